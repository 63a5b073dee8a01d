"""Attention backward of wide heads by warp groups with roles (Gluon, Hopper): past 128 columns a group cannot keep dK
and dV of 64 keys both (see ``attention_backward_groups``), so each of three consumer groups makes one gradient.

A block owns 64 keys of a head of K. All is computed transposed, as there:

- ``make_dv``: S^T = K Q^T, P^T = exp2(S^T - lse), dV += P^T dY. It hands P^T on through shared memory.
- ``make_dk``: dP^T = V dY^T, dS^T = P^T (dP^T - delta), dK += dS^T Q. It hands dS^T on.
- ``make_dq``: dQ = dS K, added to float32 in global memory, in any order or in a fixed one. It keeps nothing and needs
  few registers.

So dV and dK are products as wide as a head of register operands, which read the least shared memory: its bandwidth is
the next bound. P^T is handed on in float32: rounded, dS would be rounded twice.

While one group waits the others multiply: within a group nothing overlaps. The next block's scores beside this block's
dV or dK, as in ``attention_backward_consumer``, cost up to 20% on one NVIDIA H200, a third stage of Q and dY up to 13%.
Heads have two panels of columns, 192 = 128 + 64 and 256 = 128 + 128: ptxas (Triton 3.6.0) refuses a product of
256 columns in a block of 512 threads, whatever the groups' registers. What it keeps over all roles' code has to fit
into the registers of the smallest.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from csrc_triton.attention.attention_backward_consumer import (
    add_product,
    crossed,
    put,
    row_values,
    seen,
    times_rows,
)
from csrc_triton.attention.attention_backward_dq import add_dq
from csrc_triton.attention.attention_backward_groups import (
    CAPPED,
    COUNT,
    FIRST_SEES,
    KEYS,
    held_tiles,
    noted,
    noted_cap,
    produce,
    sums_ring,
    tile_ring,
    write_notes,
)
from csrc_triton.attention.attention_backward_order import (
    START,
    begin_turn,
    end_turn,
    keep_order,
    next_step,
    order_of,
)
from csrc_triton.attention.pipeline import mbarriers
from csrc_triton.attention.tile_scheduler import CAUSAL

UNSEEN = gl.constexpr(1e18)  # so far out of a soft cap that P is 0, and finite when squared
PART = gl.constexpr(64)  # columns of dQ that ``make_dq`` has in registers

# [64, 64] of float32 as a thread has it in accumulators, four values beside each other: (row, column) of each bit of an
# element's number. A thread moves 16 bytes at once, a warp 512 side by side.
ACCUMULATORS = gl.constexpr(
    gl.SharedLinearLayout(
        [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0], [0, 8], [0, 16], [0, 32]]
    )
)


@aggregate
class Handed:
    """What one group hands on to another: a tile or a ring of them, and a pair of barriers for each."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, tiles, full, free):
        self.tiles, self.full, self.empty = tiles, full, free


@gluon.jit
def handed_tiles(dtype: gl.constexpr, slots: gl.constexpr, layout: gl.constexpr, z):
    tiles = gl.allocate_shared_memory(dtype, [slots, KEYS, z.BLOCK_M], layout)
    return Handed(tiles, mbarriers(slots, 1), mbarriers(slots, 1))


@gluon.jit
def zeros_of(z):
    """Both panels of dK or dV."""
    return gl.zeros([KEYS, z.D1], gl.float32, z.O1), gl.zeros([KEYS, z.D2], gl.float32, z.O2)


@gluon.jit
def put_both(acc, acc2, ring, slot, of, notes, z):
    put(acc, ring.first.index(slot), of, notes, 0, 0, z)
    put(acc2, ring.second.index(slot), of, notes, z.D1, 0, z)
    tma.store_wait(0)


@gluon.jit
def probabilities(s, base, at, masked, scale, notes, z):
    """P^T of a block of rows; with a soft cap, behind it, 1 - tanh. There the mask is on that: with both live while the
    mask is worked out, ptxas would spill."""
    if z.BOUNDED == CAPPED:  # tanh(x) = 1 - u with u = 2 / (1 + exp(2 x))
        u = 2.0 / (1.0 + gl.exp2(s * (noted_cap(notes) * 2.8853900817779268)))
        if crossed(at, masked, notes, 0, z):
            u = seen(u, at, notes, 0, z, UNSEEN)
        p = gl.exp2((scale - base) - u * scale)
        return p, u
    else:
        p = gl.exp2(s * scale - base)
        if crossed(at, masked, notes, 0, z):
            p = seen(p, at, notes, 0, z)
        return p, p


@gluon.jit
def make_dv(z, tile, notes, order, DV, k, q, dy, lse, p_ring, scale):
    dv, dv2 = zeros_of(z)
    rows = tile.rows
    # masked: all blocks where not all keys are there, else those whose first row does not see all
    masked = KEYS - noted(notes, FIRST_SEES) if z.BOUNDED else 0
    masked = gl.where(noted(notes, COUNT) < KEYS, rows, masked)
    mbarrier.wait(k.full.index(0), 0)
    at = 0  # rows after the first of its head that is walked
    c = 0
    if order is not None and z.BOUNDED == CAUSAL:
        at = noted(order.walk, START)
    for i in range(tile.steps):
        qi = i % z.Q_STAGES
        yi = i % z.DY_STAGES
        # to the compiler i >> 30 is not zero: it would keep the descriptors of K in registers
        mbarrier.wait(q.full.index(qi), (i // z.Q_STAGES) & 1)
        s = times_rows(k, i >> 30, q, qi, z)
        base = row_values(lse, qi, z)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(q.empty.index(qi), count=1)
        p, u = probabilities(s, base, at, masked, scale, notes, z)
        mbarrier.wait(p_ring.empty.index(0), (i & 1) ^ 1)
        if z.BOUNDED == CAPPED:
            # times the slope of tanh, which would spill if it was there before the wait
            p_ring.tiles.index(0).store(p * (u * (2.0 - u)))
        else:
            p_ring.tiles.index(0).store(p)
        mbarrier.arrive(p_ring.full.index(0), count=1)
        mbarrier.wait(dy.full.index(yi), (i // z.DY_STAGES) & 1)
        dv, dv2 = add_product(gl.convert_layout(p.to(q.first.dtype), z.P), dy, yi, dv, dv2, z)
        dv, dv2 = warpgroup_mma_wait(0, deps=(dv, dv2))
        mbarrier.arrive(dy.empty.index(yi), count=1)
        if order is None or z.BOUNDED != CAUSAL:
            at += z.BLOCK_M
            at = gl.where(at == rows, 0, at)
        else:
            at, c, _ = next_step(at, c, order)
    # the last rows of dY are spent, once both groups say so: they carry dV out
    j = tile.steps - 1
    slot = j % z.DY_STAGES
    mbarrier.wait(dy.empty.index(slot), (j // z.DY_STAGES) & 1)
    put_both(dv, dv2, dy, slot, DV, notes, z)


@gluon.jit
def make_dk(z, tile, notes, DK, v, q, dy, delta, p_ring, ds_ring, scale):
    dk, dk2 = zeros_of(z)
    slots: gl.constexpr = ds_ring.tiles.shape[0]
    mbarrier.wait(v.full.index(0), 0)
    for i in range(tile.steps):
        qi = i % z.Q_STAGES
        yi = i % z.DY_STAGES
        mbarrier.wait(dy.full.index(yi), (i // z.DY_STAGES) & 1)
        dp = times_rows(v, i >> 30, dy, yi, z)
        base = row_values(delta, yi, z)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        mbarrier.wait(p_ring.full.index(0), i & 1)
        d = (p_ring.tiles.index(0).load(z.S) * (dp - base)).to(q.first.dtype)
        mbarrier.arrive(p_ring.empty.index(0), count=1)
        mbarrier.arrive(dy.empty.index(yi), count=1)
        c = i % slots
        mbarrier.wait(ds_ring.empty.index(c), ((i // slots) & 1) ^ 1)
        ds_ring.tiles.index(c).store(d)
        fence_async_shared()
        mbarrier.arrive(ds_ring.full.index(c), count=1)
        mbarrier.wait(q.full.index(qi), (i // z.Q_STAGES) & 1)
        dk, dk2 = add_product(gl.convert_layout(d, z.P), q, qi, dk, dk2, z)
        dk, dk2 = warpgroup_mma_wait(0, deps=(dk, dk2))
        mbarrier.arrive(q.empty.index(qi), count=1)
    # the last rows of Q are spent, as their scores were done before P came: they carry dK out
    natural = scale * 0.6931471805599453
    if z.BOUNDED == CAPPED:
        natural *= noted_cap(notes)
    put_both(dk * natural, dk2 * natural, q, (tile.steps - 1) % z.Q_STAGES, DK, notes, z)


@gluon.jit
def make_dq(z, tile, DQ32, k, ds_ring, order, padded, heads):
    columns: gl.constexpr = z.D1 + z.D2
    slots: gl.constexpr = ds_ring.tiles.shape[0]
    to = DQ32 + ((tile.batch * heads + tile.head).to(gl.int64) * padded + tile.row) * columns
    jump = padded - tile.rows + z.BLOCK_M  # from the last block of a head to the first of the next
    mbarrier.wait(k.full.index(0), 0)
    at = 0
    c = 0
    if order is not None and z.BOUNDED == CAUSAL:
        at = noted(order.walk, START)
        to += at.to(gl.int64) * columns
    for i in range(tile.steps):
        slot = i % slots
        mbarrier.wait(ds_ring.full.index(slot), (i // slots) & 1)
        ds = ds_ring.tiles.index(slot).permute((1, 0))
        add_parts(to, ds, k.first.index(i >> 30).reshape([KEYS, z.D1]), i, order)
        add_parts(to + 64 * z.D1, ds, k.second.index(i >> 30).reshape([KEYS, z.D2]), i, None)
        if order is not None:
            end_turn(i, order)
        mbarrier.arrive(ds_ring.empty.index(slot), count=1)
        if order is None or z.BOUNDED != CAUSAL:
            at += z.BLOCK_M
            last = at == tile.rows
            to += gl.where(last, jump, z.BLOCK_M).to(gl.int64) * columns
            at = gl.where(last, 0, at)
        else:
            at, c, gap = next_step(at, c, order)
            to += gap.to(gl.int64) * columns


@gluon.jit
def add_parts(to, ds, keys, i, order):
    """Add dS keys, of a panel of columns, to float32 at ``to``; where there is an order, at this program's turn for
    the i-th block of rows, which the first part's product does not wait for."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PART, 16]
    )
    for n in gl.static_range(keys.shape[1] // PART):
        dq = gl.zeros([64, PART], gl.float32, layout)
        dq = warpgroup_mma(ds, keys.slice(n * PART, PART, dim=1), dq, use_acc=False, is_async=True)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        if n == 0 and order is not None:
            begin_turn(i, order)
        add_dq(to + n * (64 * PART), dq)
        gl.thread_barrier()  # ptxas would start the next product before it has added this one, and spill


@gluon.jit
def by_roles(
    Q, K, V, DY, DK, DV, LSE2, DELTA, DQ32, TURNS, tile, scale, tiles_a_head, heads, padded, len_k, right,
    REGISTERS: gl.constexpr, DQ_REGISTERS: gl.constexpr, z, left=None, cap=None,
):  # fmt: skip
    """A block of 64 keys, whose ``tile`` it is: as ``backward_groups``. TURNS are None where there is no order,
    ``left`` and ``cap`` where there is no left bound and no soft cap."""
    notes = write_notes(tile, right, len_k, left, cap)
    k = held_tiles(K, 1, z)
    v = held_tiles(V, 1, z)
    q = tile_ring(Q, z.Q_STAGES, z)
    dy = tile_ring(DY, z.DY_STAGES, z)
    p = handed_tiles(gl.float32, 1, ACCUMULATORS, z)
    ds = handed_tiles(Q.dtype, 2, gl.NVMMASharedLayout(128, 16, 2), z)
    lse = sums_ring(LSE2, z.Q_STAGES)
    delta = sums_ring(DELTA, z.DY_STAGES)
    # the tuples stay literal: through a variable, constants would turn into run-time values; with 24 registers for the
    # producer the groups spill
    if TURNS is None:
        fence_async_shared()
        gl.warp_specialize(
            [
                (make_dv, (z, tile, notes, None, DV, k, q, dy, lse, p, scale)),
                (make_dk, (z, tile, notes, DK, v, q, dy, delta, p, ds, scale)),
                (make_dq, (z, tile, DQ32, k, ds, None, padded, heads)),
                (produce, (z, tile, Q, K, V, DY, LSE2, DELTA, k, v, q, dy, lse, delta)),
            ],
            [4, 4, 1],
            [REGISTERS, DQ_REGISTERS, 32],
        )
    else:
        order = order_of(tile, padded, 1, 3, z)
        fence_async_shared()
        gl.warp_specialize(
            [
                (make_dv, (z, tile, notes, order, DV, k, q, dy, lse, p, scale)),
                (make_dk, (z, tile, notes, DK, v, q, dy, delta, p, ds, scale)),
                (make_dq, (z, tile, DQ32, k, ds, order, padded, heads)),
                (produce, (z, tile, Q, K, V, DY, LSE2, DELTA, k, v, q, dy, lse, delta, order)),
                (keep_order, (z, tile, TURNS, order, tiles_a_head, heads, padded, right, 0)),
                (keep_order, (z, tile, TURNS, order, tiles_a_head, heads, padded, right, 1)),
                (keep_order, (z, tile, TURNS, order, tiles_a_head, heads, padded, right, 2)),
            ],
            [4, 4, 1, 1, 1, 1],
            [REGISTERS, DQ_REGISTERS, 32, 32, 32, 32],
        )
