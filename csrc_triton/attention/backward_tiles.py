"""Attention's backward in plain Triton: preprocessing of rows, dK and dV of a tile of keys, dQ of a tile of rows, and
postprocessing of a float32 dQ.

With P = exp(S - LSE) and delta = rowsum(dY * Y): dV = P^T dY, dS = P * (dY V^T - delta), dQ = dS K, dK = dS^T Q, both
times the scale. After FlashAttention-2.
"""

import triton
import triton.language as tl
from triton.language.core import _aggregate as aggregate

from csrc_triton.attention.forward import load_rows

# What the declarations share.
READ = {"Q": "*dtype", "K": "*dtype", "V": "*dtype", "DY": "*dtype", "LSE2": "*fp32", "DELTA": "*fp32"}
TILES_CONSTANTS = ["BLOCK_M", "BLOCK_N", "D1", "D2", "STAGES", "FP16_FLUSHES", "SOFTCAP"]


@aggregate
class Inputs:
    """What both gradients read, from the first row or key of a head of a sequence on."""

    Q: tl.tensor
    K: tl.tensor
    V: tl.tensor
    DY: tl.tensor
    LSE2: tl.tensor  # in base 2, as ``preprocess`` writes it
    DELTA: tl.tensor
    q_head: tl.tensor  # strides
    q_row: tl.tensor
    k_row: tl.tensor
    v_row: tl.tensor
    dy_head: tl.tensor
    dy_row: tl.tensor

    @triton.constexpr_function
    def __init__(self, Q, K, V, DY, LSE2, DELTA, q_head, q_row, k_row, v_row, dy_head, dy_row):
        self.Q, self.K, self.V, self.DY, self.LSE2, self.DELTA = Q, K, V, DY, LSE2, DELTA
        self.q_head, self.q_row, self.k_row, self.v_row = q_head, q_row, k_row, v_row
        self.dy_head, self.dy_row = dy_head, dy_row


@aggregate
class Problem:
    """Scales, sizes and bounds of one sequence."""

    scale: tl.tensor  # as the forward takes it, in base 2
    cap: tl.tensor  # as the forward takes it
    gradient_scale: tl.tensor  # d score / d (q k), without the slope of the soft cap
    ratio: tl.tensor  # query heads a head of K
    dim: tl.tensor
    padded: tl.tensor  # rows of LSE2 and DELTA a head
    len_q: tl.tensor
    len_k: tl.tensor
    right: tl.tensor  # row r sees keys before r + right
    left: tl.tensor  # and from r + left on

    @triton.constexpr_function
    def __init__(self, scale, cap, gradient_scale, ratio, dim, padded, len_q, len_k, right, left):
        self.scale, self.cap, self.gradient_scale = scale, cap, gradient_scale
        self.ratio, self.dim, self.padded = ratio, dim, padded
        self.len_q, self.len_k, self.right, self.left = len_q, len_k, right, left


@aggregate
class TileSizes:
    """What is fixed when a kernel is compiled."""

    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    D1: tl.constexpr  # columns of a head: two panels where D2 is not 0
    D2: tl.constexpr
    STAGES: tl.constexpr
    FP16_FLUSHES: tl.constexpr  # whether float16's matrix products are float32's: see ``rows_within``
    SOFTCAP: tl.constexpr  # whether there is one
    VARLEN: tl.constexpr  # whether rows of LSE2 and DELTA behind ``len_q`` are another sequence's
    PEELED: tl.constexpr  # whether blocks without a mask have a loop of their own, which takes registers

    @triton.constexpr_function
    def __init__(self, BLOCK_M, BLOCK_N, D1, D2, STAGES, FP16_FLUSHES, SOFTCAP, VARLEN, PEELED=True):
        value = tl.constexpr
        self.BLOCK_M, self.BLOCK_N, self.D1, self.D2 = value(BLOCK_M), value(BLOCK_N), value(D1), value(D2)
        self.STAGES, self.FP16_FLUSHES, self.SOFTCAP = value(STAGES), value(FP16_FLUSHES), value(SOFTCAP)
        self.VARLEN, self.PEELED = value(VARLEN), value(PEELED)


@triton.jit
def rows_within(X, rows, stride, columns, dim, length, CLAMPED: tl.constexpr, z):
    """[rows, columns] of a tensor, zero past ``dim`` columns. With CLAMPED, rows past the last repeat the last one; the
    caller masks what they give. A mask of rows would take more registers than the kernels have.

    Where float16's matrix instructions read subnormal numbers as zeros, float16 is float32 from here on, and with it P
    and dS, which are rounded to the tiles' dtype. Scales would not do: dS and dY have no bound.
    """
    if CLAMPED:
        rows = tl.minimum(rows, length - 1)
    tile = tl.load(
        X + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=columns[None, :] < dim, other=0.0
    )
    if z.FP16_FLUSHES and tile.dtype == tl.float16:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def row_values(LSE2, DELTA, rows, length, MASKED: tl.constexpr):
    """LSE and delta of each row. With MASKED, rows from ``length`` on, which are another sequence's, get values that
    make their probabilities 0."""
    if MASKED:
        mask = rows < length
        return tl.load(LSE2 + rows, mask=mask, other=float("inf")), tl.load(
            DELTA + rows, mask=mask, other=0.0
        )
    else:
        return tl.load(LSE2 + rows), tl.load(DELTA + rows)


@triton.jit
def probabilities(s, lse, at, low, count, p, MASKED: tl.constexpr, z):
    """P from Q K^T, and the slope of the soft cap.

    ``lse`` is infinite in rows that see no key or do not exist: their P is 0. With MASKED, P is 0 but for ``count``
    places ``at`` ``low`` and behind; both are unsigned, so that one comparison checks both ends.
    """
    slope = s
    if z.SOFTCAP:  # tanh(x) = 1 - 2 / (1 + exp(2 x))
        s = 1.0 - 2.0 / (1.0 + tl.exp2(s * (p.cap * 2.8853900817779268)))
        slope = 1.0 - s * s
    s = s * p.scale - lse
    if MASKED:
        s = tl.where((at - low).to(tl.uint32, bitcast=True) < count, s, float("-inf"))
    return tl.exp2(s), slope


@triton.jit
def dkdv_step(row, h, x, p, k, k2, v, v2, low, count, dk, dk2, dv, dv2, MASKED: tl.constexpr, z):
    """Accumulate dK (not yet scaled) and dV of the block of rows from ``row`` on of query head ``h``. ``low`` and
    ``count`` are the first row that sees each key and how many do. Scores are [keys, rows]: P^T and dS^T need no
    transpose."""
    at = h * p.padded
    Q = x.Q + h * x.q_head
    DY = x.DY + h * x.dy_head
    LSE2 = x.LSE2 + at
    DELTA = x.DELTA + at
    rows = row + tl.arange(0, z.BLOCK_M)
    columns = tl.arange(0, z.D1)
    q = rows_within(Q, rows, x.q_row, columns, p.dim, p.len_q, MASKED, z)
    dy = rows_within(DY, rows, x.dy_row, columns, p.dim, p.len_q, MASKED, z)
    s = tl.dot(k, tl.trans(q))
    dp = tl.dot(v, tl.trans(dy))
    q2 = q
    dy2 = dy
    if z.D2 > 0:
        columns2 = tl.arange(0, z.D2) + z.D1
        q2 = rows_within(Q, rows, x.q_row, columns2, p.dim, p.len_q, MASKED, z)
        dy2 = rows_within(DY, rows, x.dy_row, columns2, p.dim, p.len_q, MASKED, z)
        s = tl.dot(k2, tl.trans(q2), s)
        dp = tl.dot(v2, tl.trans(dy2), dp)
    lse, delta = row_values(LSE2, DELTA, rows, p.len_q, z.VARLEN and MASKED)
    probs, slope = probabilities(s, lse[None, :], rows[None, :], low[:, None], count[:, None], p, MASKED, z)
    ds = probs * (dp - delta[None, :])
    if z.SOFTCAP:
        ds = ds * slope
    probs = probs.to(k.dtype)
    ds = ds.to(k.dtype)
    dv = tl.dot(probs, dy, dv)
    dk = tl.dot(ds, q, dk)
    if z.D2 > 0:
        dv2 = tl.dot(probs, dy2, dv2)
        dk2 = tl.dot(ds, q2, dk2)
    return dk, dk2, dv, dv2


@triton.jit
def dkdv_tile(key, DK, DV, dk_row, x, p, z):
    """dK and dV, which share strides, of keys ``key`` to ``key`` + BLOCK_N - 1 of one head of one sequence, from the
    query heads that share it, of which ``x`` has the first."""
    keys = key + tl.arange(0, z.BLOCK_N)
    columns = tl.arange(0, z.D1)
    k = rows_within(x.K, keys, x.k_row, columns, p.dim, p.len_k, True, z)
    v = rows_within(x.V, keys, x.v_row, columns, p.dim, p.len_k, True, z)
    dk = tl.zeros([z.BLOCK_N, z.D1], tl.float32)
    dv = tl.zeros([z.BLOCK_N, z.D1], tl.float32)
    k2 = k
    v2 = v
    dk2 = dk
    dv2 = dv
    if z.D2 > 0:
        columns2 = tl.arange(0, z.D2) + z.D1
        k2 = rows_within(x.K, keys, x.k_row, columns2, p.dim, p.len_k, True, z)
        v2 = rows_within(x.V, keys, x.v_row, columns2, p.dim, p.len_k, True, z)
        dk2 = tl.zeros([z.BLOCK_N, z.D2], tl.float32)
        dv2 = tl.zeros([z.BLOCK_N, z.D2], tl.float32)

    # the first row that sees each key, how many see it; blocks that see no key or every key of the tile
    low = keys - p.right + 1
    count = tl.full([z.BLOCK_N], 0, tl.uint32) + (p.right - p.left).to(tl.uint32, bitcast=True)
    stop = tl.maximum(tl.minimum(tl.minimum(key + z.BLOCK_N, p.len_k) - p.left, p.len_q), 0)
    last = tl.cdiv(stop, z.BLOCK_M)
    first = tl.minimum(tl.maximum(key - p.right + 1, 0) // z.BLOCK_M, last)
    upper = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(key + z.BLOCK_N - p.right, 0), z.BLOCK_M), first), last)
    whole = tl.minimum(tl.maximum(tl.minimum(key - p.left + 1, p.len_q), 0) // z.BLOCK_M, last)
    whole = tl.maximum(whole, upper)
    # one loop over heads and blocks, so that the pipeline does not drain between heads
    inner = 0
    if z.PEELED:
        inner = whole - upper
        a_head = tl.maximum(inner, 1)
        for i in tl.range(0, p.ratio * inner, num_stages=z.STAGES):
            h = (i // a_head).to(tl.int64)
            row = (upper + i % a_head) * z.BLOCK_M
            dk, dk2, dv, dv2 = dkdv_step(
                row, h, x, p, k, k2, v, v2, low, count, dk, dk2, dv, dv2, False, z
            )  # fmt: skip
    edges = last - first - inner
    a_head = tl.maximum(edges, 1)
    for i in tl.range(0, p.ratio * edges, num_stages=z.STAGES):
        h = (i // a_head).to(tl.int64)
        j = first + i % a_head
        j += tl.where(j >= upper, inner, 0)
        dk, dk2, dv, dv2 = dkdv_step(
            j * z.BLOCK_M, h, x, p, k, k2, v, v2, low, count, dk, dk2, dv, dv2, True, z
        )  # fmt: skip

    at = keys.to(tl.int64)[:, None] * dk_row
    in_rows = keys[:, None] < p.len_k
    inside = in_rows & (columns[None, :] < p.dim)
    tl.store(DK + at + columns[None, :], (dk * p.gradient_scale).to(DK.dtype.element_ty), mask=inside)
    tl.store(DV + at + columns[None, :], dv.to(DV.dtype.element_ty), mask=inside)
    if z.D2 > 0:
        inside = in_rows & (columns2[None, :] < p.dim)
        tl.store(DK + at + columns2[None, :], (dk2 * p.gradient_scale).to(DK.dtype.element_ty), mask=inside)
        tl.store(DV + at + columns2[None, :], dv2.to(DV.dtype.element_ty), mask=inside)


@triton.jit
def dq_step(key, x, p, q, q2, dy, dy2, lse, delta, low, count, dq, dq2, MASKED: tl.constexpr, z):
    """Accumulate dQ (not yet scaled) of the block of keys from ``key`` on. ``low`` and ``count`` are the first key that
    each row sees and how many it sees."""
    keys = key + tl.arange(0, z.BLOCK_N)
    columns = tl.arange(0, z.D1)
    k = rows_within(x.K, keys, x.k_row, columns, p.dim, p.len_k, MASKED, z)
    v = rows_within(x.V, keys, x.v_row, columns, p.dim, p.len_k, MASKED, z)
    s = tl.dot(q, tl.trans(k))
    dp = tl.dot(dy, tl.trans(v))
    k2 = k
    if z.D2 > 0:
        columns2 = tl.arange(0, z.D2) + z.D1
        k2 = rows_within(x.K, keys, x.k_row, columns2, p.dim, p.len_k, MASKED, z)
        v2 = rows_within(x.V, keys, x.v_row, columns2, p.dim, p.len_k, MASKED, z)
        s = tl.dot(q2, tl.trans(k2), s)
        dp = tl.dot(dy2, tl.trans(v2), dp)
    probs, slope = probabilities(s, lse[:, None], keys[None, :], low[:, None], count[:, None], p, MASKED, z)
    ds = probs * (dp - delta[:, None])
    if z.SOFTCAP:
        ds = ds * slope
    ds = ds.to(q.dtype)
    dq = tl.dot(ds, k, dq)
    if z.D2 > 0:
        dq2 = tl.dot(ds, k2, dq2)
    return dq, dq2


@triton.jit
def dq_tile(row, DQ, dq_row, x, p, z):
    """dQ of rows ``row`` to ``row`` + BLOCK_M - 1 of one head of one sequence."""
    rows = row + tl.arange(0, z.BLOCK_M)
    lse, delta = row_values(x.LSE2, x.DELTA, rows, p.len_q, z.VARLEN)
    columns = tl.arange(0, z.D1)
    q = rows_within(x.Q, rows, x.q_row, columns, p.dim, p.len_q, True, z)
    dy = rows_within(x.DY, rows, x.dy_row, columns, p.dim, p.len_q, True, z)
    dq = tl.zeros([z.BLOCK_M, z.D1], tl.float32)
    q2 = q
    dy2 = dy
    dq2 = dq
    if z.D2 > 0:
        columns2 = tl.arange(0, z.D2) + z.D1
        q2 = rows_within(x.Q, rows, x.q_row, columns2, p.dim, p.len_q, True, z)
        dy2 = rows_within(x.DY, rows, x.dy_row, columns2, p.dim, p.len_q, True, z)
        dq2 = tl.zeros([z.BLOCK_M, z.D2], tl.float32)

    # the first key that each row sees, how many it sees; blocks that no row or every row sees whole
    low = rows + p.left
    count = tl.maximum(tl.minimum(rows + p.right, p.len_k) - low, 0).to(tl.uint32, bitcast=True)
    stop = tl.maximum(tl.minimum(row + z.BLOCK_M + p.right - 1, p.len_k), 0)
    last = tl.cdiv(stop, z.BLOCK_N)
    first = tl.minimum(tl.maximum(row + p.left, 0) // z.BLOCK_N, last)
    whole = tl.maximum(
        tl.minimum(tl.minimum(tl.maximum(row + p.right, 0), p.len_k) // z.BLOCK_N, last), first
    )
    lower = tl.minimum(tl.cdiv(tl.maximum(row + z.BLOCK_M - 1 + p.left, 0), z.BLOCK_N), whole)
    lower = tl.maximum(lower, first)
    for j in tl.range(lower, whole, num_stages=z.STAGES):
        dq, dq2 = dq_step(
            j * z.BLOCK_N, x, p, q, q2, dy, dy2, lse, delta, low, count, dq, dq2, False, z
        )  # fmt: skip
    gap = whole - lower
    for i in tl.range(first, last - gap, num_stages=z.STAGES):
        j = i + tl.where(i >= lower, gap, 0)
        dq, dq2 = dq_step(
            j * z.BLOCK_N, x, p, q, q2, dy, dy2, lse, delta, low, count, dq, dq2, True, z
        )  # fmt: skip

    to = DQ + rows.to(tl.int64)[:, None] * dq_row
    in_rows = rows[:, None] < p.len_q
    out = (dq * p.gradient_scale).to(DQ.dtype.element_ty)
    tl.store(to + columns[None, :], out, mask=in_rows & (columns[None, :] < p.dim))
    if z.D2 > 0:
        out = (dq2 * p.gradient_scale).to(DQ.dtype.element_ty)
        tl.store(to + columns2[None, :], out, mask=in_rows & (columns2[None, :] < p.dim))


@triton.jit
def preprocess(rows, LSE2, DELTA, Y, DY, LSE, DLSE, with_dlse, y_row, dy_row, dim, length, D1: tl.constexpr):
    """DELTA = rowsum(dY * Y) - DLSE, and LSE in base 2, of rows of one head; tensors start at its first row.

    Rows past ``length`` and rows that see no key get an infinite LSE, which makes their probabilities 0, and a delta of
    0, whatever DLSE holds there.
    """
    columns = tl.arange(0, D1)
    y = load_rows(Y, rows, y_row, columns, dim, length, True)
    dy = load_rows(DY, rows, dy_row, columns, dim, length, True)
    delta = tl.sum(y.to(tl.float32) * dy.to(tl.float32), 1)
    inside = rows < length
    lse = tl.load(LSE + rows, mask=inside, other=float("-inf"))
    delta -= tl.load(DLSE + rows, mask=inside & with_dlse, other=0.0)
    sees = lse != float("-inf")
    tl.store(LSE2, tl.where(sees, lse * 1.4426950408889634, float("inf")))
    tl.store(DELTA, tl.where(sees, delta, 0.0))


@triton.jit
def postprocess(DQ, DQ32, dq_row, scale, row, column, dim, length, WIDTH: tl.constexpr):
    """WIDTH columns of the 64 rows from ``row`` on, of one head: float32 in the order of wgmma's accumulators at DQ32
    (see ``add_dq``), scaled and rounded. Rows from ``length`` on are not written."""
    # slabs of 8 columns; in each: 16 rows a warp, 8 rows, 4 pairs of columns, both halves of the 16 rows, a pair
    x = tl.load(DQ32 + tl.arange(0, 64 * WIDTH)) * scale
    x = tl.permute(tl.reshape(x, [WIDTH // 8, 4, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5])
    rows = row + tl.arange(0, 64)
    columns = column + tl.arange(0, WIDTH)
    to = DQ + rows.to(tl.int64)[:, None] * dq_row + columns[None, :]
    inside = (rows[:, None] < length) & (columns[None, :] < dim)
    tl.store(to, tl.reshape(x, [64, WIDTH]).to(DQ.dtype.element_ty), mask=inside)
