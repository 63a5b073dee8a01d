"""RoPE: rotate pairs of columns of every head of q and k by the angles of its token's position.

The pairs are a column of the first half and one of the second or, ``interleaved``, two neighbours. Columns past them
are copied. One launch does q and k; the backward is the same with ``sign`` -1.

Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding (2021).
"""

import triton
import triton.language as tl

from csrc_triton.common.pdl_begin import begin
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
    rotate_interleaved,
)

DECLARATION = {
    "op": "rope",
    "kernels": {
        "rope": {
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
            "axes": {**AXES, "interleaved": [False, True]},
            "aligned": [*ALIGNED, *TABLES, *TABLE_STRIDES, *COLUMNS],
            # Blocks are of columns of the first half or, interleaved, of both.
            "forms": {
                "rows": {
                    "function": "rope",
                    **FORM,
                    "constants": ["INTERLEAVED", "ROWS", "BLOCK", "BLOCKS", "PDL"],
                    "defaults": {"BLOCKS": 0, "PDL": 0},
                    "pdl": "PDL",
                }
            },
        },
    },
}


@triton.jit
def rope(
    Q_OUT, K_OUT, Q, K, COS, SIN, IDS,
    q_rows, q_mid, q_mid_inverse, q_mid_shift, q_fast, q_fast_inverse, q_fast_shift,
    q_out_slow_stride, q_out_mid_stride, q_out_fast_stride, q_slow_stride, q_mid_stride, q_fast_stride,
    k_rows, k_mid, k_mid_inverse, k_mid_shift, k_fast, k_fast_inverse, k_fast_shift,
    k_out_slow_stride, k_out_mid_stride, k_out_fast_stride, k_slow_stride, k_mid_stride, k_fast_stride,
    q_programs, index_slow, index_mid, index_fast,
    id_words, n_table, cos_stride, sin_stride, half_bytes, end_bytes, sign,
    INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
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
    # Behind what needs no other kernel's results: arguments, divisions, addresses. On the H200 they took 0.4 us a call.
    id_words = begin(id_words, PDL)
    row, known = table_rows(IDS, b.index, b.inside, n_table, id_words)
    cos_at = elements(row * cos_stride, COS)
    sin_at = elements(row * sin_stride, SIN)
    half = elements(half_bytes, b.x)
    n = 2 * half if INTERLEAVED else half
    if BLOCKS:
        for block in tl.static_range(BLOCKS):
            rotate(b, COS, SIN, cos_at, sin_at, n, sign, known, block * BLOCK, INTERLEAVED, ROWS, BLOCK)
    else:
        for first in range(0, n, BLOCK):
            rotate(b, COS, SIN, cos_at, sin_at, n, sign, known, first, INTERLEAVED, ROWS, BLOCK)
    copy_columns(b, 2 * half, elements(end_bytes, b.x), BLOCK)


@triton.jit
def rotate(
    b, COS, SIN, cos_at, sin_at, n, sign, known, first,
    INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if INTERLEAVED:
        rotate_interleaved(b, COS, SIN, cos_at, sin_at, n, sign, known, first, ROWS, BLOCK)
    else:
        rotate_halves(b, COS, SIN, cos_at, sin_at, n, sign, known, first, 0, 0, 0, 0, BLOCK, False)


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
