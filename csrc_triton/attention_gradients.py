"""A step of attention's backward in plain Triton: the probabilities of a block, and what they add to gradients.

With P = exp(S - LSE) and delta = rowsum(dY * Y): dV = P^T dY, dS = P * (dY V^T - delta), dQ = dS K, dK = dS^T Q, both
times the scale. After FlashAttention-2.
"""

import triton
import triton.language as tl


@triton.jit
def rows_within(X, rows, stride, columns, dim, length, CLAMPED: tl.constexpr):
    """[rows, columns] of a tensor, zero past ``dim`` columns. With CLAMPED, rows past the last are the last once more:
    nothing may come of them. A mask of rows would take registers that the kernels don't have."""
    if CLAMPED:
        rows = tl.minimum(rows, length - 1)
    return tl.load(
        X + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=columns[None, :] < dim, other=0.0
    )


@triton.jit
def probabilities(s, lse, at, low, count, scale, cap, MASKED: tl.constexpr, CAP: tl.constexpr):
    """P of the products of Q and K, and by how much a capped score follows the one before the cap.

    ``scale`` and ``lse`` are in base 2. ``lse`` is infinite in rows that see no key or do not exist: their P is 0.
    With MASKED, P is 0 but for ``count`` places ``at`` ``low`` and behind, both counts unsigned: one comparison.
    """
    slope = s
    if CAP:  # tanh(x) = 1 - 2 / (1 + exp(2 x))
        s = 1.0 - 2.0 / (1.0 + tl.exp2(s * (cap * 2.8853900817779268)))
        slope = 1.0 - s * s
    s = s * scale - lse
    if MASKED:
        s = tl.where((at - low).to(tl.uint32, bitcast=True) < count, s, float("-inf"))
    return tl.exp2(s), slope


@triton.jit
def key_step(
    row,
    Q,
    DY,
    LSE,
    DELTA,
    q_row,
    dy_row,
    k,
    k2,
    v,
    v2,
    low,
    count,
    scale,
    cap,
    dim,
    len_q,
    dk,
    dk2,
    dv,
    dv2,
    MASKED: tl.constexpr,
    CAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
):
    """What the block of rows from ``row`` on adds to dK (not yet scaled) and dV. ``low`` and ``count`` are the first
    row that sees each key and how many do. Scores are [keys, rows], so that P^T and dS^T need no transpose."""
    rows = row + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, D1)
    q = rows_within(Q, rows, q_row, columns, dim, len_q, MASKED)
    dy = rows_within(DY, rows, dy_row, columns, dim, len_q, MASKED)
    s = tl.dot(k, tl.trans(q))
    dp = tl.dot(v, tl.trans(dy))
    q2 = q
    dy2 = dy
    if D2 > 0:
        columns2 = tl.arange(0, D2) + D1
        q2 = rows_within(Q, rows, q_row, columns2, dim, len_q, MASKED)
        dy2 = rows_within(DY, rows, dy_row, columns2, dim, len_q, MASKED)
        s = tl.dot(k2, tl.trans(q2), s)
        dp = tl.dot(v2, tl.trans(dy2), dp)
    lse = tl.load(LSE + rows)
    delta = tl.load(DELTA + rows)
    p, slope = probabilities(
        s, lse[None, :], rows[None, :], low[:, None], count[:, None], scale, cap, MASKED, CAP
    )
    ds = p * (dp - delta[None, :])
    if CAP:
        ds = ds * slope
    p = p.to(k.dtype)
    ds = ds.to(k.dtype)
    dv = tl.dot(p, dy, dv)
    dk = tl.dot(ds, q, dk)
    if D2 > 0:
        dv2 = tl.dot(p, dy2, dv2)
        dk2 = tl.dot(ds, q2, dk2)
    return dk, dk2, dv, dv2


@triton.jit
def query_step(
    key,
    K,
    V,
    k_row,
    v_row,
    q,
    q2,
    dy,
    dy2,
    lse,
    delta,
    low,
    count,
    scale,
    cap,
    dim,
    len_k,
    dq,
    dq2,
    MASKED: tl.constexpr,
    CAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
):
    """What the block of keys from ``key`` on adds to dQ (not yet scaled). ``low`` and ``count`` are the first key that
    each row sees and how many it sees."""
    keys = key + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, D1)
    k = rows_within(K, keys, k_row, columns, dim, len_k, MASKED)
    v = rows_within(V, keys, v_row, columns, dim, len_k, MASKED)
    s = tl.dot(q, tl.trans(k))
    dp = tl.dot(dy, tl.trans(v))
    k2 = k
    if D2 > 0:
        columns2 = tl.arange(0, D2) + D1
        k2 = rows_within(K, keys, k_row, columns2, dim, len_k, MASKED)
        v2 = rows_within(V, keys, v_row, columns2, dim, len_k, MASKED)
        s = tl.dot(q2, tl.trans(k2), s)
        dp = tl.dot(dy2, tl.trans(v2), dp)
    p, slope = probabilities(
        s, lse[:, None], keys[None, :], low[:, None], count[:, None], scale, cap, MASKED, CAP
    )
    ds = p * (dp - delta[:, None])
    if CAP:
        ds = ds * slope
    ds = ds.to(q.dtype)
    dq = tl.dot(ds, k, dq)
    if D2 > 0:
        dq2 = tl.dot(ds, k2, dq2)
    return dq, dq2
