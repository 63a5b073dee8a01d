"""RoPE: rotate pairs of columns of every head of q and k by the angles of its token's position.

The pairs are a column of the first half and one of the second (``rope_halves``) or two neighbours (``rope_pairs``).
Columns past them are copied. One launch does q and k; the backward is the same with ``sign`` -1.

Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding (2021).
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
    copy_columns,
    elements,
    rotate_halves,
    rotate_pairs,
    rows_of_program,
)

DECLARATION = {
    "op": "rope",
    "kernels": {
        "rope_halves": {
            "arguments": {
                **TENSORS,
                **TABLES,
                "IDS": "*i32",
                **ROWS_OF_BOTH,
                "id_words": "i32",
                "n_table": "i32",
                **TABLE_STRIDES,
                **COLUMNS,
                "sign": "fp32",
            },
            "axes": AXES,
            "aligned": [*ALIGNED, *TABLES, *TABLE_STRIDES, *COLUMNS],
            "forms": {"rows": {"function": "halves", **FORM}},
        },
        "rope_pairs": {"like": "rope_halves", "forms": {"rows": {"function": "pairs", **FORM}}},
    },
}


@triton.jit
def halves(
    Q_OUT, K_OUT, Q, K, COS, SIN, IDS,
    q_rows, q_mid, q_mid_inverse, q_mid_shift, q_fast, q_fast_inverse, q_fast_shift,
    q_out_slow_stride, q_out_mid_stride, q_out_fast_stride, q_slow_stride, q_mid_stride, q_fast_stride,
    k_rows, k_mid, k_mid_inverse, k_mid_shift, k_fast, k_fast_inverse, k_fast_shift,
    k_out_slow_stride, k_out_mid_stride, k_out_fast_stride, k_slow_stride, k_mid_stride, k_fast_stride,
    q_programs, index_slow, index_mid, index_fast,
    id_words, n_table, cos_stride, sin_stride, half_bytes, end_bytes, sign,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    out, x, out_at, x_at, inside, index = rows_of_program(
        Q_OUT, K_OUT, Q, K,
        q_rows, q_mid, q_mid_inverse, q_mid_shift, q_fast, q_fast_inverse, q_fast_shift,
        q_out_slow_stride, q_out_mid_stride, q_out_fast_stride, q_slow_stride, q_mid_stride, q_fast_stride,
        k_rows, k_mid, k_mid_inverse, k_mid_shift, k_fast, k_fast_inverse, k_fast_shift,
        k_out_slow_stride, k_out_mid_stride, k_out_fast_stride, k_slow_stride, k_mid_stride, k_fast_stride,
        q_programs, index_slow, index_mid, index_fast,
        ROWS,
    )  # fmt: skip
    row, known = table_rows(IDS, index, inside, n_table, id_words)
    cos_at = elements(row * cos_stride, COS)
    sin_at = elements(row * sin_stride, SIN)
    half = elements(half_bytes, x)
    if BLOCKS:
        for block in tl.static_range(BLOCKS):
            rotate_halves(
                out, x, COS, SIN, out_at, x_at, cos_at, sin_at, half, sign, inside, known, block * BLOCK,
                0, 0, 0, 0, BLOCK, False,
            )  # fmt: skip
    else:
        for first in range(0, half, BLOCK):
            rotate_halves(
                out, x, COS, SIN, out_at, x_at, cos_at, sin_at, half, sign, inside, known, first,
                0, 0, 0, 0, BLOCK, False,
            )  # fmt: skip
    copy_columns(out, x, out_at, x_at, 2 * half, elements(end_bytes, x), inside, BLOCK)


@triton.jit
def pairs(
    Q_OUT, K_OUT, Q, K, COS, SIN, IDS,
    q_rows, q_mid, q_mid_inverse, q_mid_shift, q_fast, q_fast_inverse, q_fast_shift,
    q_out_slow_stride, q_out_mid_stride, q_out_fast_stride, q_slow_stride, q_mid_stride, q_fast_stride,
    k_rows, k_mid, k_mid_inverse, k_mid_shift, k_fast, k_fast_inverse, k_fast_shift,
    k_out_slow_stride, k_out_mid_stride, k_out_fast_stride, k_slow_stride, k_mid_stride, k_fast_stride,
    q_programs, index_slow, index_mid, index_fast,
    id_words, n_table, cos_stride, sin_stride, half_bytes, end_bytes, sign,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    out, x, out_at, x_at, inside, index = rows_of_program(
        Q_OUT, K_OUT, Q, K,
        q_rows, q_mid, q_mid_inverse, q_mid_shift, q_fast, q_fast_inverse, q_fast_shift,
        q_out_slow_stride, q_out_mid_stride, q_out_fast_stride, q_slow_stride, q_mid_stride, q_fast_stride,
        k_rows, k_mid, k_mid_inverse, k_mid_shift, k_fast, k_fast_inverse, k_fast_shift,
        k_out_slow_stride, k_out_mid_stride, k_out_fast_stride, k_slow_stride, k_mid_stride, k_fast_stride,
        q_programs, index_slow, index_mid, index_fast,
        ROWS,
    )  # fmt: skip
    row, known = table_rows(IDS, index, inside, n_table, id_words)
    cos_at = elements(row * cos_stride, COS)
    sin_at = elements(row * sin_stride, SIN)
    width = 2 * elements(half_bytes, x)
    if BLOCKS:
        for block in tl.static_range(BLOCKS):
            rotate_pairs(
                out, x, COS, SIN, out_at, x_at, cos_at, sin_at, width, sign, inside, known, block * BLOCK,
                ROWS, BLOCK,
            )  # fmt: skip
    else:
        for first in range(0, width, BLOCK):
            rotate_pairs(
                out, x, COS, SIN, out_at, x_at, cos_at, sin_at, width, sign, inside, known, first,
                ROWS, BLOCK,
            )  # fmt: skip
    copy_columns(out, x, out_at, x_at, width, elements(end_bytes, x), inside, BLOCK)


@triton.jit
def table_rows(IDS, index, inside, n_table, id_words):
    """(row of the tables, whether they have it): ``index`` itself or, with ids, the position that stands there.

    Args:
        id_words: 32-bit words a position id; 0 without ids. What is out of range must not be read.
    """
    at = index.to(tl.int64) * id_words
    low = tl.load(IDS + at, mask=inside & (id_words != 0), other=0)
    high = tl.load(IDS + at + 1, mask=inside & (id_words == 2), other=0)
    row = tl.where(id_words != 0, low, index)
    return row.to(tl.int64), inside & (row >= 0) & (row < n_table) & (high == 0)
