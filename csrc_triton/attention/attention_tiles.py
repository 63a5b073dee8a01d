"""Attention forward in plain Triton: a program walks the keys that a tile of rows of Q sees. After FlashAttention-2."""

import triton
import triton.language as tl


@triton.jit
def exponent_up(dtype: tl.constexpr):
    """By how many powers of two probabilities are raised before they are rounded to ``dtype``. The greatest is 2^15
    then in float16, whose normal numbers end at 2^-14: below, digits are lost, and gfx90a's matrix instructions read
    zeros. Sums of probabilities are as much greater."""
    return 15.0 if dtype == tl.float16 else 0.0


@triton.jit
def load_rows(X, rows, stride, columns, dim, length, MASKED: tl.constexpr):
    """[rows, columns] of a tensor, zero past ``dim`` columns and, with MASKED, outside its ``length`` rows."""
    at = X + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    keep = columns[None, :] < dim
    if MASKED:
        keep = keep & (rows[:, None] < length)
    return tl.load(at, mask=keep, other=0.0)


@triton.jit
def tile_step(
    key,
    K,
    V,
    k_row,
    v_row,
    q,
    q2,
    low,
    high,
    scale,
    cap,
    dim,
    len_k,
    acc,
    acc2,
    m,
    sums,
    MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
):
    """The block of keys from ``key`` on. ``low`` and ``high`` are the first key that each row sees and the one behind
    the last."""
    keys = key + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, D1)
    s = tl.dot(q, tl.trans(load_rows(K, keys, k_row, columns, dim, len_k, MASKED)))
    if D2 > 0:
        columns2 = tl.arange(0, D2) + D1
        s = tl.dot(q2, tl.trans(load_rows(K, keys, k_row, columns2, dim, len_k, MASKED)), s)
    if cap != 0.0:  # tanh(x) = 1 - 2 / (1 + exp(2 x))
        s = 1.0 - 2.0 / (1.0 + tl.exp2(s * (cap * 2.8853900817779268)))
    if MASKED:
        s = tl.where(keys[None, :] < high[:, None], s, float("-inf"))
        s = tl.where(keys[None, :] >= low[:, None], s, float("-inf"))
    new_m = tl.maximum(m, tl.max(s, 1) * scale)
    p = tl.exp2(s * scale - (new_m - exponent_up(q.dtype))[:, None])
    alpha = tl.exp2(m - new_m)
    sums = sums * alpha + tl.sum(p, 1)
    p = p.to(q.dtype)
    v = load_rows(V, keys, v_row, columns, dim, len_k, MASKED)
    acc = tl.dot(p, v, acc * alpha[:, None])
    if D2 > 0:
        v = load_rows(V, keys, v_row, tl.arange(0, D2) + D1, dim, len_k, MASKED)
        acc2 = tl.dot(p, v, acc2 * alpha[:, None])
    return acc, acc2, new_m, sums


@triton.jit
def attend_tile(
    row,
    Y,
    Q,
    K,
    V,
    LSE,
    SINK,
    has_sink,
    y_row,
    q_row,
    k_row,
    v_row,
    scale,
    cap,
    dim,
    len_q,
    len_k,
    right,
    left,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Rows ``row`` to ``row`` + BLOCK_M - 1 of Y and LSE. Tensors start at the first row or key of one head of one
    sequence, whose lengths and bounds the numbers are."""
    rows = row + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, D1)
    q = load_rows(Q, rows, q_row, columns, dim, len_q, True)
    q2 = q
    acc = tl.zeros([BLOCK_M, D1], tl.float32)
    acc2 = acc
    if D2 > 0:
        columns2 = tl.arange(0, D2) + D1
        q2 = load_rows(Q, rows, q_row, columns2, dim, len_q, True)
        acc2 = tl.zeros([BLOCK_M, D2], tl.float32)
    m = tl.full([BLOCK_M], -1.0e30, tl.float32)  # finite: a row that sees no key gives no NaN
    sums = tl.zeros([BLOCK_M], tl.float32)

    # the first key that each row sees, the one behind the last; blocks that no row or every row sees whole
    low = rows + left
    high = tl.minimum(rows + right, len_k)
    stop = tl.maximum(tl.minimum(row + BLOCK_M + right - 1, len_k), 0)
    last = tl.cdiv(stop, BLOCK_N)
    first = tl.minimum(tl.maximum(row + left, 0) // BLOCK_N, last)
    whole = tl.maximum(tl.minimum(tl.minimum(tl.maximum(row + right, 0), len_k) // BLOCK_N, last), first)
    lower = tl.minimum(tl.cdiv(tl.maximum(row + BLOCK_M - 1 + left, 0), BLOCK_N), whole)
    lower = tl.maximum(lower, first)
    for j in tl.range(lower, whole, num_stages=STAGES):
        acc, acc2, m, sums = tile_step(
            j * BLOCK_N, K, V, k_row, v_row, q, q2, low, high, scale, cap, dim, len_k, acc, acc2, m, sums, False,
            BLOCK_N, D1, D2,
        )  # fmt: skip
    gap = whole - lower
    for i in tl.range(first, last - gap, num_stages=STAGES):
        j = i + tl.where(i >= lower, gap, 0)
        acc, acc2, m, sums = tile_step(
            j * BLOCK_N, K, V, k_row, v_row, q, q2, low, high, scale, cap, dim, len_k, acc, acc2, m, sums, True,
            BLOCK_N, D1, D2,
        )  # fmt: skip

    m -= exponent_up(q.dtype)
    sink = tl.load(SINK, mask=has_sink, other=float("-inf")) * 1.4426950408889634
    new_m = tl.maximum(m, sink)
    by = tl.exp2(m - new_m)
    sums = sums * by + tl.exp2(sink - new_m)
    tl.store(LSE + rows, (new_m + tl.log2(sums)) * 0.6931471805599453, mask=rows < len_q)
    by = tl.where(sums > 0, by / sums, 0.0)
    to = Y + rows.to(tl.int64)[:, None] * y_row
    keep = rows[:, None] < len_q
    out = (acc * by[:, None]).to(Y.dtype.element_ty)
    tl.store(to + columns[None, :], out, mask=keep & (columns[None, :] < dim))
    if D2 > 0:
        out = (acc2 * by[:, None]).to(Y.dtype.element_ty)
        tl.store(to + columns2[None, :], out, mask=keep & (columns2[None, :] < dim))
