"""Attention's backward in plain Triton: the gradients of a tile of keys or of rows, block by block of the other side.

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
def row_values(LSE, DELTA, rows, length, MASKED: tl.constexpr):
    """What ``row_sums`` left for each row. With MASKED, rows from ``length`` on, which are another sequence's, get what
    makes their probabilities 0."""
    if MASKED:
        keep = rows < length
        return tl.load(LSE + rows, mask=keep, other=float("inf")), tl.load(DELTA + rows, mask=keep, other=0.0)
    else:
        return tl.load(LSE + rows), tl.load(DELTA + rows)


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
    PACKED: tl.constexpr,
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
    lse, delta = row_values(LSE, DELTA, rows, len_q, PACKED and MASKED)
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


@triton.jit
def key_tile(
    key, DK, DV, Q, K, V, DY, LSE2, DELTA, dk_row, q_head, q_row, k_row, v_row, dy_head, dy_row, scale, cap,
    gradient_scale, ratio, dim, padded, len_q, len_k, right, left, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    D1: tl.constexpr, D2: tl.constexpr, STAGES: tl.constexpr, CAP: tl.constexpr, PACKED: tl.constexpr,
    PEELED: tl.constexpr,
):  # fmt: skip
    """dK and dV, which share strides, of keys ``key`` to ``key`` + BLOCK_N - 1 of one head of one sequence.

    Tensors start at its first row or key; of Q, DY, LSE2 and DELTA in the first of the ``ratio`` heads that share it.
    ``scale`` and ``cap`` as the forward takes them; ``gradient_scale`` is d score / d (q k) without the soft cap's
    slope. PACKED: rows of LSE2 and DELTA behind ``len_q`` are another sequence's. PEELED: blocks that need no mask have
    a loop without one, which takes registers.
    """
    keys = key + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, D1)
    k = rows_within(K, keys, k_row, columns, dim, len_k, True)
    v = rows_within(V, keys, v_row, columns, dim, len_k, True)
    dk = tl.zeros([BLOCK_N, D1], tl.float32)
    dv = tl.zeros([BLOCK_N, D1], tl.float32)
    k2 = k
    v2 = v
    dk2 = dk
    dv2 = dv
    if D2 > 0:
        columns2 = tl.arange(0, D2) + D1
        k2 = rows_within(K, keys, k_row, columns2, dim, len_k, True)
        v2 = rows_within(V, keys, v_row, columns2, dim, len_k, True)
        dk2 = tl.zeros([BLOCK_N, D2], tl.float32)
        dv2 = tl.zeros([BLOCK_N, D2], tl.float32)

    # the first row that sees each key, how many see it; blocks that see no key or every key of the tile
    low = keys - right + 1
    count = tl.full([BLOCK_N], 0, tl.uint32) + (right - left).to(tl.uint32, bitcast=True)
    stop = tl.maximum(tl.minimum(tl.minimum(key + BLOCK_N, len_k) - left, len_q), 0)
    last = tl.cdiv(stop, BLOCK_M)
    first = tl.minimum(tl.maximum(key - right + 1, 0) // BLOCK_M, last)
    upper = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(key + BLOCK_N - right, 0), BLOCK_M), first), last)
    whole = tl.minimum(tl.maximum(tl.minimum(key - left + 1, len_q), 0) // BLOCK_M, last)
    whole = tl.maximum(whole, upper)
    # one loop over heads and blocks, so that the pipeline runs on from head to head
    inner = 0
    if PEELED:
        inner = whole - upper
        a_head = tl.maximum(inner, 1)
        for i in tl.range(0, ratio * inner, num_stages=STAGES):
            h = (i // a_head).to(tl.int64)
            at = h * padded
            dk, dk2, dv, dv2 = key_step(
                (upper + i % a_head) * BLOCK_M, Q + h * q_head, DY + h * dy_head, LSE2 + at, DELTA + at, q_row, dy_row,
                k, k2, v, v2, low, count, scale, cap, dim, len_q, dk, dk2, dv, dv2, False, CAP, BLOCK_M, D1, D2, PACKED,
            )  # fmt: skip
    edges = last - first - inner
    a_head = tl.maximum(edges, 1)
    for i in tl.range(0, ratio * edges, num_stages=STAGES):
        h = (i // a_head).to(tl.int64)
        at = h * padded
        j = first + i % a_head
        j += tl.where(j >= upper, inner, 0)
        dk, dk2, dv, dv2 = key_step(
            j * BLOCK_M, Q + h * q_head, DY + h * dy_head, LSE2 + at, DELTA + at, q_row, dy_row, k, k2, v, v2, low,
            count, scale, cap, dim, len_q, dk, dk2, dv, dv2, True, CAP, BLOCK_M, D1, D2, PACKED,
        )  # fmt: skip

    at = keys.to(tl.int64)[:, None] * dk_row
    keep = keys[:, None] < len_k
    inside = keep & (columns[None, :] < dim)
    tl.store(DK + at + columns[None, :], (dk * gradient_scale).to(DK.dtype.element_ty), mask=inside)
    tl.store(DV + at + columns[None, :], dv.to(DV.dtype.element_ty), mask=inside)
    if D2 > 0:
        inside = keep & (columns2[None, :] < dim)
        tl.store(DK + at + columns2[None, :], (dk2 * gradient_scale).to(DK.dtype.element_ty), mask=inside)
        tl.store(DV + at + columns2[None, :], dv2.to(DV.dtype.element_ty), mask=inside)


@triton.jit
def query_tile(
    row, DQ, Q, K, V, DY, LSE2, DELTA, dq_row, q_row, k_row, v_row, dy_row, scale, cap, gradient_scale, dim,
    len_q, len_k, right, left, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D1: tl.constexpr,
    D2: tl.constexpr, STAGES: tl.constexpr, CAP: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """dQ of rows ``row`` to ``row`` + BLOCK_M - 1 of one head of one sequence, as in ``key_tile``."""
    rows = row + tl.arange(0, BLOCK_M)
    lse, delta = row_values(LSE2, DELTA, rows, len_q, PACKED)
    columns = tl.arange(0, D1)
    q = rows_within(Q, rows, q_row, columns, dim, len_q, True)
    dy = rows_within(DY, rows, dy_row, columns, dim, len_q, True)
    dq = tl.zeros([BLOCK_M, D1], tl.float32)
    q2 = q
    dy2 = dy
    dq2 = dq
    if D2 > 0:
        columns2 = tl.arange(0, D2) + D1
        q2 = rows_within(Q, rows, q_row, columns2, dim, len_q, True)
        dy2 = rows_within(DY, rows, dy_row, columns2, dim, len_q, True)
        dq2 = tl.zeros([BLOCK_M, D2], tl.float32)

    # the first key that each row sees, how many it sees; blocks that no row or every row sees whole
    low = rows + left
    count = tl.maximum(tl.minimum(rows + right, len_k) - low, 0).to(tl.uint32, bitcast=True)
    stop = tl.maximum(tl.minimum(row + BLOCK_M + right - 1, len_k), 0)
    last = tl.cdiv(stop, BLOCK_N)
    first = tl.minimum(tl.maximum(row + left, 0) // BLOCK_N, last)
    whole = tl.maximum(tl.minimum(tl.minimum(tl.maximum(row + right, 0), len_k) // BLOCK_N, last), first)
    lower = tl.minimum(tl.cdiv(tl.maximum(row + BLOCK_M - 1 + left, 0), BLOCK_N), whole)
    lower = tl.maximum(lower, first)
    for j in tl.range(lower, whole, num_stages=STAGES):
        dq, dq2 = query_step(
            j * BLOCK_N, K, V, k_row, v_row, q, q2, dy, dy2, lse, delta, low, count, scale, cap, dim, len_k, dq, dq2,
            False, CAP, BLOCK_N, D1, D2,
        )  # fmt: skip
    gap = whole - lower
    for i in tl.range(first, last - gap, num_stages=STAGES):
        j = i + tl.where(i >= lower, gap, 0)
        dq, dq2 = query_step(
            j * BLOCK_N, K, V, k_row, v_row, q, q2, dy, dy2, lse, delta, low, count, scale, cap, dim, len_k, dq, dq2,
            True, CAP, BLOCK_N, D1, D2,
        )  # fmt: skip

    to = DQ + rows.to(tl.int64)[:, None] * dq_row
    keep = rows[:, None] < len_q
    out = (dq * gradient_scale).to(DQ.dtype.element_ty)
    tl.store(to + columns[None, :], out, mask=keep & (columns[None, :] < dim))
    if D2 > 0:
        out = (dq2 * gradient_scale).to(DQ.dtype.element_ty)
        tl.store(to + columns2[None, :], out, mask=keep & (columns2[None, :] < dim))
