"""Attention forward of one tile of rows of Q: ``attend_tile`` in plain Triton, and what the consumer warp groups of the
warp-specialised kernels do (``consume_tile``, Gluon on Hopper). After FlashAttention-2 and -3.

Consumers take blocks of keys from a tile's last visible block to its first: only the first of them carry a mask,
and with a left bound the last ones. A warp group skips, but releases, the blocks that only its neighbours see.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from csrc_triton.attention.online_softmax import (
    issue_pv,
    issue_qk,
    k_index,
    mask_scores,
    no_hoist,
    partial_row_sums,
    ping_pong_arrive,
    ping_pong_wait,
    scale_rows,
    skip_blocks,
    soft_cap,
    step,
    to_x2,
    v_index,
    wait_pv,
)
from csrc_triton.attention.tile_scheduler import FULL, LOCAL, whole_blocks

# What the declarations of the ops share: the head dimensions that kernels are written for, and for each its panels of
# columns, columns of a TMA box and of an output buffer.
HEAD_DIMS = [64, 96, 128, 192, 256]
PANELS = {
    64: {"D1": 64, "D2": 0, "BOX": 64, "OUT": 64},
    96: {"D1": 64, "D2": 32, "BOX": 32, "OUT": 64},
    128: {"D1": 128, "D2": 0, "BOX": 64, "OUT": 128},
    192: {"D1": 128, "D2": 64, "BOX": 64, "OUT": 128},
    256: {"D1": 256, "D2": 0, "BOX": 64, "OUT": 128},
}


@triton.jit
def p_exponent(dtype: tl.constexpr):
    """The power of two by which probabilities are scaled before they are rounded to ``dtype``: in float16 the largest
    is 2^15 then. Normal float16 numbers end at 2^-14; below, digits are lost, and gfx90a's matrix instructions read
    zeros. Sums of probabilities are scaled, too."""
    return 15.0 if dtype == tl.float16 else 0.0


@triton.jit
def load_rows(X, rows, stride, columns, dim, length, MASKED: tl.constexpr):
    """[rows, columns] of a tensor, zero past ``dim`` columns and, with MASKED, outside of its ``length`` rows."""
    at = X + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    keep = columns[None, :] < dim
    if MASKED:
        keep = keep & (rows[:, None] < length)
    return tl.load(at, mask=keep, other=0.0)


@aggregate
class Head:
    """One head of one sequence: tensors from its first row or key on, its lengths and bounds."""

    Y: tl.tensor
    Q: tl.tensor
    K: tl.tensor
    V: tl.tensor
    LSE: tl.tensor
    SINK: tl.tensor
    has_sink: tl.tensor
    y_row: tl.tensor
    q_row: tl.tensor
    k_row: tl.tensor
    v_row: tl.tensor
    scale: tl.tensor
    cap: tl.tensor
    dim: tl.tensor
    len_q: tl.tensor
    len_k: tl.tensor
    right: tl.tensor  # row r sees keys before r + right
    left: tl.tensor  # from r + left on

    @triton.constexpr_function
    def __init__(
        self, Y, Q, K, V, LSE, SINK, has_sink, y_row, q_row, k_row, v_row, scale, cap, dim, len_q, len_k, right, left
    ):  # fmt: skip
        self.Y, self.Q, self.K, self.V, self.LSE = Y, Q, K, V, LSE
        self.SINK, self.has_sink = SINK, has_sink
        self.y_row, self.q_row, self.k_row, self.v_row = y_row, q_row, k_row, v_row
        self.scale, self.cap, self.dim = scale, cap, dim
        self.len_q, self.len_k, self.right, self.left = len_q, len_k, right, left


@triton.jit
def tile_step(
    key, h, q, q2, low, high, acc, acc2, m, sums, MASKED: tl.constexpr, BLOCK_N: tl.constexpr,
    D1: tl.constexpr, D2: tl.constexpr,
):  # fmt: skip
    """The block of keys from ``key`` on of head ``h``. ``low`` and ``high`` are each row's first visible key and the
    one after its last."""
    keys = key + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, D1)
    s = tl.dot(q, tl.trans(load_rows(h.K, keys, h.k_row, columns, h.dim, h.len_k, MASKED)))
    if D2 > 0:
        columns2 = tl.arange(0, D2) + D1
        s = tl.dot(q2, tl.trans(load_rows(h.K, keys, h.k_row, columns2, h.dim, h.len_k, MASKED)), s)
    if h.cap != 0.0:  # tanh(x) = 1 - 2 / (1 + exp(2 x))
        s = 1.0 - 2.0 / (1.0 + tl.exp2(s * (h.cap * 2.8853900817779268)))
    if MASKED:
        s = tl.where(keys[None, :] < high[:, None], s, float("-inf"))
        s = tl.where(keys[None, :] >= low[:, None], s, float("-inf"))
    new_m = tl.maximum(m, tl.max(s, 1) * h.scale)
    p = tl.exp2(s * h.scale - (new_m - p_exponent(q.dtype))[:, None])
    alpha = tl.exp2(m - new_m)
    sums = sums * alpha + tl.sum(p, 1)
    p = p.to(q.dtype)
    v = load_rows(h.V, keys, h.v_row, columns, h.dim, h.len_k, MASKED)
    acc = tl.dot(p, v, acc * alpha[:, None])
    if D2 > 0:
        v = load_rows(h.V, keys, h.v_row, tl.arange(0, D2) + D1, h.dim, h.len_k, MASKED)
        acc2 = tl.dot(p, v, acc2 * alpha[:, None])
    return acc, acc2, new_m, sums


@triton.jit
def attend_tile(
    row, h, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Rows ``row`` to ``row`` + BLOCK_M - 1 of Y and LSE of head ``h``."""
    rows = row + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, D1)
    q = load_rows(h.Q, rows, h.q_row, columns, h.dim, h.len_q, True)
    q2 = q
    acc = tl.zeros([BLOCK_M, D1], tl.float32)
    acc2 = acc
    if D2 > 0:
        columns2 = tl.arange(0, D2) + D1
        q2 = load_rows(h.Q, rows, h.q_row, columns2, h.dim, h.len_q, True)
        acc2 = tl.zeros([BLOCK_M, D2], tl.float32)
    m = tl.full([BLOCK_M], -1.0e30, tl.float32)  # finite: a row that sees no key gives no NaN
    sums = tl.zeros([BLOCK_M], tl.float32)

    # blocks first to last - 1 are visible to some row, lower to whole - 1 to all rows: those take no mask
    low = rows + h.left
    high = tl.minimum(rows + h.right, h.len_k)
    stop = tl.maximum(tl.minimum(row + BLOCK_M + h.right - 1, h.len_k), 0)
    last = tl.cdiv(stop, BLOCK_N)
    first = tl.minimum(tl.maximum(row + h.left, 0) // BLOCK_N, last)
    whole = tl.maximum(tl.minimum(tl.minimum(tl.maximum(row + h.right, 0), h.len_k) // BLOCK_N, last), first)
    lower = tl.minimum(tl.cdiv(tl.maximum(row + BLOCK_M - 1 + h.left, 0), BLOCK_N), whole)
    lower = tl.maximum(lower, first)
    for j in tl.range(lower, whole, num_stages=STAGES):
        acc, acc2, m, sums = tile_step(
            j * BLOCK_N, h, q, q2, low, high, acc, acc2, m, sums, False, BLOCK_N, D1, D2
        )
    gap = whole - lower
    for i in tl.range(first, last - gap, num_stages=STAGES):
        j = i + tl.where(i >= lower, gap, 0)
        acc, acc2, m, sums = tile_step(
            j * BLOCK_N, h, q, q2, low, high, acc, acc2, m, sums, True, BLOCK_N, D1, D2
        )

    m -= p_exponent(q.dtype)
    sink = tl.load(h.SINK, mask=h.has_sink, other=float("-inf")) * 1.4426950408889634
    new_m = tl.maximum(m, sink)
    by = tl.exp2(m - new_m)
    sums = sums * by + tl.exp2(sink - new_m)
    tl.store(h.LSE + rows, (new_m + tl.log2(sums)) * 0.6931471805599453, mask=rows < h.len_q)
    by = tl.where(sums > 0, by / sums, 0.0)
    to = h.Y + rows.to(tl.int64)[:, None] * h.y_row
    keep = rows[:, None] < h.len_q
    out = (acc * by[:, None]).to(h.Y.dtype.element_ty)
    tl.store(to + columns[None, :], out, mask=keep & (columns[None, :] < h.dim))
    if D2 > 0:
        out = (acc2 * by[:, None]).to(h.Y.dtype.element_ty)
        tl.store(to + columns2[None, :], out, mask=keep & (columns2[None, :] < h.dim))


@gluon.jit
def store_panel(values, buffer, Y, batch, head, row, column: gl.constexpr, z, dim=None):
    """Start the TMA store of [64, N] of the output through the warp group's buffer. Boxes of columns from
    ``dim`` on are left out, for the reason in ``paged.load_rows_of_q``."""
    width: gl.constexpr = values.shape[1]
    tma.store_wait(0)  # the buffer's last tile is read
    tile = buffer._reinterpret(Y.dtype, [1, 1, 64, width], Y.layout)
    tile.reshape([64, width]).store(values)
    fence_async_shared()
    for c in gl.static_range(width // z.BOX):
        part = tile.slice(c * z.BOX, z.BOX, dim=3)
        if dim is None or column + c * z.BOX < dim:
            tma.async_copy_shared_to_global(Y, [batch, head, row, column + c * z.BOX], part)


@gluon.jit
def store_output(acc, acc2, by, buffer, Y, batch, head, row, z, dim=None):
    """Scale and store the output's rows, in panels of at most 128 columns."""
    out = scale_rows(acc, by).to(Y.dtype)
    if z.D1 == 256:
        left, right = gl.split(out.reshape([64, 2, 128]).permute((0, 2, 1)))
        store_panel(left, buffer, Y, batch, head, row, 0, z)
        store_panel(right, buffer, Y, batch, head, row, 128, z, dim)
    else:
        store_panel(out, buffer, Y, batch, head, row, 0, z)
    if z.D2 > 0:
        store_panel(scale_rows(acc2, by).to(Y.dtype), buffer, Y, batch, head, row, z.D1, z)


@gluon.jit
def attend(row, first, last, b, q, k, v, scheduler, scale, cap, i, g: gl.constexpr, z):
    """Rows ``row`` to ``row`` + 63 over blocks last - 1 down to first, which are the b-th and later of the pipelines.

    Returns both panels of P V, whose last wgmma is in flight, each row's largest score and its partial sums.
    """
    rows = no_hoist(gl.arange(0, 64, z.ROW)) + row
    # each row's first visible key and the one after its last; blocks lower to whole - 1 take no mask
    low = rows
    high = gl.full([64], 0, gl.int32, z.ROW) + scheduler.keys(row, z)
    whole = whole_blocks(scheduler.keys(row, z), z)
    if z.MASK != FULL:
        high = gl.minimum(rows + scheduler.right, scheduler.len_k)
        whole = gl.minimum(whole, whole_blocks(gl.maximum(row + scheduler.right, 0), z))
    whole = gl.minimum(whole, last - 1)
    lower = first
    if z.MASK == LOCAL:
        low = rows + scheduler.left
        whole = gl.maximum(whole, first)
        lower = whole_blocks(gl.maximum(row + 63 + scheduler.left + z.BLOCK_N - 1, 0), z)
        lower = gl.minimum(gl.maximum(lower, first), whole)
    bounds = (low, high)

    at = k_index(b, True, z)
    stage = at % z.STAGES
    mbarrier.wait(q.full.index(g), i & 1)
    mbarrier.wait(k.full.index(stage), (at // z.STAGES) & 1)
    ping_pong_wait(g, z)
    s = issue_qk(q, g, k, stage, z)
    ping_pong_arrive(g, z)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k.empty.index(stage), count=1)
    if z.MASK == LOCAL:
        s = soft_cap(s, cap)
    if z.MASK != FULL:
        s = mask_scores(s, (last - 1) * z.BLOCK_N, bounds, z.MASK == LOCAL)
    elif last != whole_blocks(scheduler.keys(row, z), z):
        s = mask_scores(s, (last - 1) * z.BLOCK_N, bounds, False)
    m = gl.maximum(gl.max(s, 1) * scale, -1.0e30)  # finite: a row that sees no key gives no NaN
    e = gl.exp2(s * scale - gl.expand_dims(m, 1))
    sums = partial_row_sums(e)
    p = to_x2(e, v.first.dtype)
    acc = gl.zeros([64, z.D1], gl.float32, z.O1)
    acc2 = gl.zeros([64, z.D2 if z.D2 > 0 else 16], gl.float32, z.O2)
    if z.MASK != FULL:
        for j in range(last - 1 - whole):
            key = (last - 2 - j) * z.BLOCK_N
            p, acc, acc2, m, sums = step(
                b + 1 + j, key, q, k, v, bounds, scale, cap, p, acc, acc2, m, sums, True, g, z
            )
    end = b + last - first
    for j in range(end - (whole - first), end - (lower - first)):
        p, acc, acc2, m, sums = step(j, 0, q, k, v, bounds, scale, cap, p, acc, acc2, m, sums, False, g, z)
    if z.MASK == LOCAL:
        for j in range(end - (lower - first), end):
            key = (first + end - 1 - j) * z.BLOCK_N
            p, acc, acc2, m, sums = step(
                j, key, q, k, v, bounds, scale, cap, p, acc, acc2, m, sums, True, g, z
            )
    mbarrier.arrive(q.empty.index(g), count=1)
    at = v_index(end - 1, True, z)
    stage = at % z.STAGES
    mbarrier.wait(v.full.index(stage), (at // z.STAGES) & 1)
    acc, acc2 = issue_pv(p, v, stage, acc, acc2, z)
    return acc, acc2, m, sums


@aggregate
class OutputTile:
    """Where a tile is written: row r to Y's (batch, head, r + past) and LSE's r + lse."""

    tile: gl.tensor  # of the head
    batch: gl.tensor
    head: gl.tensor
    past: gl.tensor
    lse: gl.tensor
    rows: gl.tensor  # of the head
    has_sink: gl.tensor

    @gluon.constexpr_function
    def __init__(self, tile, batch, head, past, lse, rows, has_sink):
        self.tile, self.batch, self.head, self.past, self.lse = tile, batch, head, past, lse
        self.rows, self.has_sink = rows, has_sink

    @gluon.jit
    def load(self):
        return self


@gluon.jit
def consume_tile(
    tile, output, b, i, q, k, v, scheduler, buffer, Y, LSE, SINKS, scale, cap, g: gl.constexpr, z, dim=None
):
    """Warp group g's 64 rows of the i-th tile, whose blocks of keys are the b-th and later; returns the next tile's b.
    ``output.load()`` gives the ``OutputTile``, after the loop over keys, where registers are few."""
    row = (tile * z.WARP_GROUPS + g) * 64
    tile_first, tile_last = scheduler.blocks(
        tile * (64 * z.WARP_GROUPS), (tile + 1) * (64 * z.WARP_GROUPS), z
    )
    b_next = b + tile_last - tile_first
    if row < scheduler.len_q:
        first, last = scheduler.blocks(row, row + 64, z)
        skip_blocks(tile_last - last, b, k, v, g, z)
        acc, acc2, m, sums = attend(
            row, first, last, b + tile_last - last, q, k, v, scheduler, scale, cap, i, g, z
        )
        total = gl.convert_layout(gl.sum(sums, 1), z.ROW)
        to = output.load()
        row = (to.tile * z.WARP_GROUPS + g) * 64
        # a sink is one more key, whose value is 0; without one its score is -inf
        seen = (SINKS.to(gl.int64) != 0) & to.has_sink
        sink = gl.load(SINKS + to.head, mask=seen, other=float("-inf")) * 1.4426950408889634
        new_m = gl.maximum(m, sink)
        by = gl.exp2(m - new_m)
        total = total * by + gl.exp2(sink - new_m)
        rows = no_hoist(gl.arange(0, 64, z.ROW))
        gl.store(
            LSE + (to.lse + row) + rows,
            (new_m + gl.log2(total)) * 0.6931471805599453,
            mask=rows < to.rows - row,
        )
        by = gl.where(total > 0, by / total, 0.0)
        acc, acc2 = wait_pv(acc, acc2, z)
        stage = v_index(b + tile_last - first - 1, True, z) % z.STAGES
        mbarrier.arrive(v.empty.index(stage), count=1)
        store_output(acc, acc2, by, buffer, Y, to.batch, to.head, row + to.past, z, dim)
        skip_blocks(first - tile_first, b_next - (first - tile_first), k, v, g, z)
    else:
        mbarrier.wait(q.full.index(g), i & 1)
        mbarrier.arrive(q.empty.index(g), count=1)
        skip_blocks(tile_last - tile_first, b, k, v, g, z)
    return b_next
