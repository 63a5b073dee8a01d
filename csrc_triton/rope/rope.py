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
                    "constants": ["HEADS", "PASSES", "BLOCK", "PERSISTENT", "PDL"],
                    "defaults": {"PERSISTENT": 0, "PDL": 0},
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
    HEADS: tl.constexpr, PASSES: tl.constexpr, BLOCK: tl.constexpr, PERSISTENT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Halves of tokens whose heads are the fast dimension, a token a program or, PERSISTENT, one after the other; no
    columns are copied. Addresses and angles are worked out once for all heads: most instructions of a program of rows
    of whichever tokens are for them. The first HEADS * PASSES heads of q and HEADS of k are in flight together."""
    q = Rows(
        Q_OUT, Q, q_rows, (q_mid, q_mid_inverse, q_mid_shift), (q_fast, q_fast_inverse, q_fast_shift),
        (q_out_slow_stride, q_out_mid_stride, q_out_fast_stride), (q_slow_stride, q_mid_stride, q_fast_stride),
    )  # fmt: skip
    k = Rows(
        K_OUT, K, k_rows, (k_mid, k_mid_inverse, k_mid_shift), (k_fast, k_fast_inverse, k_fast_shift),
        (k_out_slow_stride, k_out_mid_stride, k_out_fast_stride), (k_slow_stride, k_mid_stride, k_fast_stride),
    )  # fmt: skip
    if PERSISTENT:
        for token in range(
            tl.program_id(0), divide(q_rows, q_fast_inverse, q_fast_shift), tl.num_programs(0)
        ):
            rotate_token(
                token, q, k, COS, SIN, IDS, index_slow, index_mid, id_words, n_table, cos_stride, sin_stride,
                half_bytes, sign, HEADS, PASSES, BLOCK, PDL,
            )  # fmt: skip
    else:
        rotate_token(
            tl.program_id(0), q, k, COS, SIN, IDS, index_slow, index_mid, id_words, n_table, cos_stride, sin_stride,
            half_bytes, sign, HEADS, PASSES, BLOCK, PDL,
        )  # fmt: skip
    almost_done(PDL, False)


@triton.jit
def rotate_token(
    token, q, k, COS, SIN, IDS, index_slow, index_mid, id_words, n_table, cos_stride, sin_stride, half_bytes, sign,
    HEADS: tl.constexpr, PASSES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    slow = divide(token, q.mid_inverse, q.mid_shift)
    mid = token - slow * q.mid
    index = slow * index_slow + mid * index_mid
    slow = slow.to(tl.int64)
    mid = mid.to(tl.int64)
    q_x = beyond(q.X, slow * q.slow_stride + mid * q.mid_stride)
    k_x = beyond(k.X, slow * k.slow_stride + mid * k.mid_stride)
    q_out = beyond(q.OUT, slow * q.out_slow_stride + mid * q.out_mid_stride)
    k_out = beyond(k.OUT, slow * k.out_slow_stride + mid * k.out_mid_stride)
    cols = tl.arange(0, BLOCK)
    q_at = heads_at(q.fast_stride, q.X, cols, HEADS)
    k_at = heads_at(k.fast_stride, k.X, cols, HEADS)
    q_out_at = heads_at(q.out_fast_stride, q.X, cols, HEADS)
    k_out_at = heads_at(k.out_fast_stride, k.X, cols, HEADS)
    half = elements(half_bytes, q.X)
    in_half = cols < half
    id_words = begin(id_words, PDL, False)
    row, known = table_rows(IDS, index, True, n_table, id_words)
    q_heads = load_heads(q_x, q_at, half, in_half, q.fast, q.fast_stride, HEADS, PASSES)
    k_heads = load_heads(k_x, k_at, half, in_half, k.fast, k.fast_stride, HEADS, 1)
    cos = load_angles(COS, row * cos_stride, cols, in_half & known, HEADS)
    sin = load_angles(SIN, row * sin_stride, cols, in_half & known, HEADS) * sign
    store_heads(q_out, q_out_at, q_heads, cos, sin, half, in_half, q.fast, q.out_fast_stride, HEADS, PASSES)
    store_heads(k_out, k_out_at, k_heads, cos, sin, half, in_half, k.fast, k.out_fast_stride, HEADS, 1)
    rotate_heads(q_x, q_out, q_at, q_out_at, cos, sin, half, in_half, q, HEADS * PASSES, HEADS)
    rotate_heads(k_x, k_out, k_at, k_out_at, cos, sin, half, in_half, k, HEADS, HEADS)


@triton.jit
def rotate_heads(X, OUT, at, out_at, cos, sin, half, in_half, rows, first: tl.constexpr, HEADS: tl.constexpr):
    """A token's heads from ``first`` on, if there are any."""
    for head in range(first, rows.fast, HEADS):
        x = beyond(X, head * rows.fast_stride)
        out = beyond(OUT, head * rows.out_fast_stride)
        heads = load_heads(x, at, half, in_half, rows.fast - head, rows.fast_stride, HEADS, 1)
        store_heads(
            out, out_at, heads, cos, sin, half, in_half, rows.fast - head, rows.out_fast_stride, HEADS, 1
        )


@triton.jit
def beyond(POINTER, n_bytes):
    """The pointer, so many bytes further."""
    return (POINTER.to(tl.pointer_type(tl.int8), bitcast=True) + n_bytes).to(POINTER.dtype, bitcast=True)


@triton.jit
def heads_at(stride, POINTER, cols, HEADS: tl.constexpr):
    """Elements from a head to the columns of the HEADS heads from it on, which are ``stride`` bytes apart."""
    return tl.arange(0, HEADS).to(tl.int64)[:, None] * elements(stride, POINTER) + cols[None, :]


@triton.jit
def load_heads(X, at, half, in_half, heads, stride, HEADS: tl.constexpr, PASSES: tl.constexpr):
    """Both halves of the first PASSES times HEADS of the ``heads`` at X."""
    pairs = ()
    p = X + at
    for i in tl.static_range(PASSES):
        mask = (tl.arange(0, HEADS) < heads - i * HEADS)[:, None] & in_half[None, :]
        pairs += ((tl.load(p, mask=mask), tl.load(p + half, mask=mask)),)
        p = beyond(p, HEADS * stride)
    return pairs


@triton.jit
def store_heads(
    OUT, at, pairs, cos, sin, half, in_half, heads, stride, HEADS: tl.constexpr, PASSES: tl.constexpr
):
    """What ``load_heads`` read, rotated."""
    dtype: tl.constexpr = OUT.dtype.element_ty
    p = OUT + at
    for i in tl.static_range(PASSES):
        if i * HEADS < heads:
            mask = (tl.arange(0, HEADS) < heads - i * HEADS)[:, None] & in_half[None, :]
            x = pairs[i][0].to(tl.float32)
            y = pairs[i][1].to(tl.float32)
            tl.store(p, (x * cos - y * sin).to(dtype), mask=mask)
            tl.store(p + half, (y * cos + x * sin).to(dtype), mask=mask)
        p = beyond(p, HEADS * stride)


@triton.jit
def load_angles(TABLE, n_bytes, cols, mask, HEADS: tl.constexpr):
    """A row of a table in fp32, NaN where the mask is not set, as a tile of HEADS rows that are all this one."""
    p = beyond(TABLE, n_bytes) + tl.zeros([HEADS, 1], tl.int32) + cols[None, :]
    return tl.load(p, mask=mask[None, :], other=float("nan")).to(tl.float32)
