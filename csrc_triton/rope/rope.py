"""RoPE: rotate pairs of columns of every head of q and k by the angles of its token's position.

The pairs are a column of the first half and one of the second or, ``interleaved``, two neighbours. Columns past them
are copied. One launch does q and k; the backward is the same with ``sign`` -1.

Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding (2021).
"""

import triton
import triton.language as tl

from csrc_triton.common.pdl_begin import almost_done, begin
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
    divide,
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
            "host": ["fewest_heads"],
            "aligned": [*ALIGNED, *TABLES, *TABLE_STRIDES, *COLUMNS],
            # Blocks are of columns of the first half or, interleaved, of both.
            "forms": {
                "rows": {
                    "function": "rope",
                    **FORM,
                    "constants": ["INTERLEAVED", "ROWS", "BLOCK", "BLOCKS", "PDL"],
                    "defaults": {"BLOCKS": 0, "PDL": 0},
                    "pdl": "PDL",
                },
                # Where no columns are copied and the heads are the fast dimension, at least ``fewest_heads`` of q.
                "tokens": {
                    "function": "rope_tokens",
                    "constants": ["ROWS", "PASSES", "BLOCK", "PDL"],
                    "defaults": {"PDL": 0},
                    "covers": "BLOCK",
                    "requires": {"interleaved": [False]},
                    "pdl": "PDL",
                },
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


@triton.jit
def rope_tokens(
    Q_OUT, K_OUT, Q, K, COS, SIN, IDS,
    q_rows, q_mid, q_mid_inverse, q_mid_shift, q_fast, q_fast_inverse, q_fast_shift,
    q_out_slow_stride, q_out_mid_stride, q_out_fast_stride, q_slow_stride, q_mid_stride, q_fast_stride,
    k_rows, k_mid, k_mid_inverse, k_mid_shift, k_fast, k_fast_inverse, k_fast_shift,
    k_out_slow_stride, k_out_mid_stride, k_out_fast_stride, k_slow_stride, k_mid_stride, k_fast_stride,
    q_programs, index_slow, index_mid, index_fast,
    id_words, n_table, cos_stride, sin_stride, half_bytes, end_bytes, sign,
    ROWS: tl.constexpr, PASSES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Halves, a token a program, whose heads are the fast dimension; no columns are copied. Addresses and angles are
    worked out once for all heads: most instructions of a program of rows of whichever tokens are for them. The first
    ROWS * PASSES heads of q and ROWS of k are in flight together."""
    token = tl.program_id(0)
    slow = divide(token, q_mid_inverse, q_mid_shift)
    mid = token - slow * q_mid
    index = slow * index_slow + mid * index_mid
    slow = slow.to(tl.int64)
    mid = mid.to(tl.int64)
    q = beyond(Q, slow * q_slow_stride + mid * q_mid_stride)
    k = beyond(K, slow * k_slow_stride + mid * k_mid_stride)
    q_out = beyond(Q_OUT, slow * q_out_slow_stride + mid * q_out_mid_stride)
    k_out = beyond(K_OUT, slow * k_out_slow_stride + mid * k_out_mid_stride)
    cols = tl.arange(0, BLOCK)
    q_at = heads_at(q_fast_stride, Q, cols, ROWS)
    k_at = heads_at(k_fast_stride, K, cols, ROWS)
    q_out_at = heads_at(q_out_fast_stride, Q, cols, ROWS)
    k_out_at = heads_at(k_out_fast_stride, K, cols, ROWS)
    half = elements(half_bytes, Q)
    in_half = cols < half
    id_words = begin(id_words, PDL, False)
    row, known = table_rows(IDS, index, True, n_table, id_words)
    q_heads = load_heads(q, q_at, half, in_half, q_fast, q_fast_stride, ROWS, PASSES)
    k_heads = load_heads(k, k_at, half, in_half, k_fast, k_fast_stride, ROWS, 1)
    cos = load_angles(COS, row * cos_stride, cols, in_half & known, ROWS)
    sin = load_angles(SIN, row * sin_stride, cols, in_half & known, ROWS) * sign
    store_heads(q_out, q_out_at, q_heads, cos, sin, half, in_half, q_fast, q_out_fast_stride, ROWS, PASSES)
    store_heads(k_out, k_out_at, k_heads, cos, sin, half, in_half, k_fast, k_out_fast_stride, ROWS, 1)
    for first in range(ROWS * PASSES, q_fast, ROWS):
        x = beyond(q, first * q_fast_stride)
        out = beyond(q_out, first * q_out_fast_stride)
        more = load_heads(x, q_at, half, in_half, q_fast - first, q_fast_stride, ROWS, 1)
        store_heads(out, q_out_at, more, cos, sin, half, in_half, q_fast - first, q_out_fast_stride, ROWS, 1)
    for first in range(ROWS, k_fast, ROWS):
        x = beyond(k, first * k_fast_stride)
        out = beyond(k_out, first * k_out_fast_stride)
        more = load_heads(x, k_at, half, in_half, k_fast - first, k_fast_stride, ROWS, 1)
        store_heads(out, k_out_at, more, cos, sin, half, in_half, k_fast - first, k_out_fast_stride, ROWS, 1)
    almost_done(PDL, False)


@triton.jit
def beyond(POINTER, n_bytes):
    """The pointer, so many bytes further."""
    return (POINTER.to(tl.pointer_type(tl.int8), bitcast=True) + n_bytes).to(POINTER.dtype, bitcast=True)


@triton.jit
def heads_at(stride, POINTER, cols, ROWS: tl.constexpr):
    """Elements from a head to the columns of the ROWS heads from it on, which are ``stride`` bytes apart."""
    return tl.arange(0, ROWS).to(tl.int64)[:, None] * elements(stride, POINTER) + cols[None, :]


@triton.jit
def load_heads(X, at, half, in_half, heads, stride, ROWS: tl.constexpr, PASSES: tl.constexpr):
    """Both halves of the first PASSES times ROWS of the ``heads`` at X."""
    pairs = ()
    p = X + at
    for i in tl.static_range(PASSES):
        mask = (tl.arange(0, ROWS) < heads - i * ROWS)[:, None] & in_half[None, :]
        pairs += ((tl.load(p, mask=mask), tl.load(p + half, mask=mask)),)
        p = beyond(p, ROWS * stride)
    return pairs


@triton.jit
def store_heads(
    OUT, at, pairs, cos, sin, half, in_half, heads, stride, ROWS: tl.constexpr, PASSES: tl.constexpr
):
    """What ``load_heads`` read, rotated."""
    dtype: tl.constexpr = OUT.dtype.element_ty
    p = OUT + at
    for i in tl.static_range(PASSES):
        if i * ROWS < heads:
            mask = (tl.arange(0, ROWS) < heads - i * ROWS)[:, None] & in_half[None, :]
            x = pairs[i][0].to(tl.float32)
            y = pairs[i][1].to(tl.float32)
            tl.store(p, (x * cos - y * sin).to(dtype), mask=mask)
            tl.store(p + half, (y * cos + x * sin).to(dtype), mask=mask)
        p = beyond(p, ROWS * stride)


@triton.jit
def load_angles(TABLE, n_bytes, cols, mask, ROWS: tl.constexpr):
    """A row of a table in fp32, NaN where the mask is not set, as a tile of ROWS rows that are all this one."""
    p = beyond(TABLE, n_bytes) + tl.zeros([ROWS, 1], tl.int32) + cols[None, :]
    return tl.load(p, mask=mask[None, :], other=float("nan")).to(tl.float32)
