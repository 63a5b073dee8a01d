"""Multimodal RoPE: halves as in RoPE, with tables of three planes (time, height, width), each for a section of the
columns.

Wang et al., Qwen2-VL (2024).
"""

import triton
import triton.language as tl

from csrc_triton.rope.rotate import (
    ALIGNED,
    AXES,
    COLUMNS,
    FORM,
    ROWS_OF_BOTH,
    TABLE_STRIDES,
    TABLES,
    TENSORS,
    Rows,
    block_of,
    copy_columns,
    elements,
    rotate_halves,
)

PLANES = {"cos_plane": "i64", "sin_plane": "i64"}
SECTIONS = {"section_1_bytes": "i32", "section_2_bytes": "i32"}

DECLARATION = {
    "op": "rope_multimodal",
    "kernels": {
        "rope_multimodal": {
            "arguments": {
                **TENSORS,
                **TABLES,
                **ROWS_OF_BOTH,
                **TABLE_STRIDES,
                **PLANES,
                **SECTIONS,
                **COLUMNS,
                "sign": "fp32",
            },
            "axes": AXES,
            "aligned": [*ALIGNED, *TABLES, *TABLE_STRIDES, *PLANES, *SECTIONS, *COLUMNS],
            "forms": {"rows": {"function": "rope_multimodal", **FORM}},
        }
    },
}


@triton.jit
def rope_multimodal(
    Q_OUT, K_OUT, Q, K, COS, SIN,
    q_rows, q_mid, q_mid_inverse, q_mid_shift, q_fast, q_fast_inverse, q_fast_shift,
    q_out_slow_stride, q_out_mid_stride, q_out_fast_stride, q_slow_stride, q_mid_stride, q_fast_stride,
    k_rows, k_mid, k_mid_inverse, k_mid_shift, k_fast, k_fast_inverse, k_fast_shift,
    k_out_slow_stride, k_out_mid_stride, k_out_fast_stride, k_slow_stride, k_mid_stride, k_fast_stride,
    q_programs, index_slow, index_mid, index_fast,
    cos_stride, sin_stride, cos_plane, sin_plane, section_1_bytes, section_2_bytes, half_bytes, end_bytes, sign,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    q = Rows(
        Q_OUT, Q, q_rows, (q_mid, q_mid_inverse, q_mid_shift), (q_fast, q_fast_inverse, q_fast_shift),
        (q_out_slow_stride, q_out_mid_stride, q_out_fast_stride), (q_slow_stride, q_mid_stride, q_fast_stride),
    )  # fmt: skip
    k = Rows(
        K_OUT, K, k_rows, (k_mid, k_mid_inverse, k_mid_shift), (k_fast, k_fast_inverse, k_fast_shift),
        (k_out_slow_stride, k_out_mid_stride, k_out_fast_stride), (k_slow_stride, k_mid_stride, k_fast_stride),
    )  # fmt: skip
    b = block_of(q, k, q_programs, index_slow, index_mid, index_fast, ROWS)
    cos_at = elements(b.index.to(tl.int64) * cos_stride, COS)
    sin_at = elements(b.index.to(tl.int64) * sin_stride, SIN)
    half = elements(half_bytes, b.x)
    section_1 = elements(section_1_bytes, b.x)
    section_2 = elements(section_2_bytes, b.x)
    cos_plane = elements(cos_plane, COS)
    sin_plane = elements(sin_plane, SIN)
    if BLOCKS:
        for block in tl.static_range(BLOCKS):
            rotate_halves(
                b, COS, SIN, cos_at, sin_at, half, sign, b.inside, block * BLOCK,
                cos_plane, sin_plane, section_1, section_2, BLOCK, True,
            )  # fmt: skip
    else:
        for first in range(0, half, BLOCK):
            rotate_halves(
                b, COS, SIN, cos_at, sin_at, half, sign, b.inside, first,
                cos_plane, sin_plane, section_1, section_2, BLOCK, True,
            )  # fmt: skip
    copy_columns(b, 2 * half, elements(end_bytes, b.x), BLOCK)
