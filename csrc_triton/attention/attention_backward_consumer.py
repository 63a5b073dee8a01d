"""A consumer group's way through the blocks of rows that see its keys, and what starts all groups. See
``attention_backward_groups``."""

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

from csrc_triton.attention.attention_backward_dq import add_dq
from csrc_triton.attention.attention_backward_groups import (
    BATCH,
    COUNT,
    FIRST_SEES,
    GROUPS,
    KEY,
    KEYS,
    KV_HEAD,
    LAST_ROW,
    held_tiles,
    noted,
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
from csrc_triton.attention.tile_scheduler import CAUSAL, LOCAL

DS_SLOTS = gl.constexpr(4)  # of dS; with four no barrier must say that one is free: see ``step``


@aggregate
class View:
    """What a group needs in every step to know of its rows and keys: few values, as each takes a register."""

    rows: gl.tensor  # of a head
    jump: gl.tensor  # from the last block of a head to the first of the next, in rows of DQ32
    masked: gl.tensor  # blocks that start before so many rows of a head take a mask: see ``crossed``
    scale: gl.tensor  # of scores, in base 2

    @gluon.constexpr_function
    def __init__(self, rows, jump, masked, scale):
        self.rows, self.jump, self.masked, self.scale = rows, jump, masked, scale


@gluon.jit
def add_in_turn(to, dq, j, order):
    """``add_dq`` for the j-th block of rows; where there is an order, at this program's turn."""
    if order is not None:
        begin_turn(j, order)
    add_dq(to, dq)
    if order is not None:
        end_turn(j, order)


@gluon.jit
def product_into(a, b, columns: gl.constexpr, other_a, other_b):
    """a b + other_a other_b of 64 rows, under way."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )
    dq = gl.zeros([64, columns], gl.float32, layout)
    dq = warpgroup_mma(a, b, dq, use_acc=False, is_async=True)
    return warpgroup_mma(other_a, other_b, dq, is_async=True)


@gluon.jit
def dq_product(ds, slot, k, zero, g: gl.constexpr, z):
    """Group g's part of a block's dQ, under way: half of the rows, or of the columns."""
    a = ds.index(GROUPS * slot)
    b = ds.index(GROUPS * slot + 1)
    k0 = k.first.index(zero).reshape([KEYS, z.D1])
    k1 = k.first.index(zero + 1).reshape([KEYS, z.D1])
    if z.BLOCK_M == 128:
        gl.static_assert(z.D1 == 64 and z.D2 == 0)
        a = a.slice(g * 64, 64, dim=1)
        b = b.slice(g * 64, 64, dim=1)
        dq = product_into(a.permute((1, 0)), k0, 64, b.permute((1, 0)), k1)
    elif z.D2 == 0:
        gl.static_assert(z.BLOCK_M == 64 and z.D1 == 128)
        k0 = k0.slice(g * 64, 64, dim=1)
        k1 = k1.slice(g * 64, 64, dim=1)
        dq = product_into(a.permute((1, 0)), k0, 64, b.permute((1, 0)), k1)
    else:
        gl.static_assert(z.BLOCK_M == 64 and z.D1 == 64)
        if g == 0:
            dq = product_into(a.permute((1, 0)), k0, 64, b.permute((1, 0)), k1)
        else:
            k0 = k.second.index(zero).reshape([KEYS, z.D2])
            k1 = k.second.index(zero + 1).reshape([KEYS, z.D2])
            dq = product_into(a.permute((1, 0)), k0, z.D2, b.permute((1, 0)), k1)
    return dq


@gluon.jit
def times_rows(keys, part, rows, slot, z):
    """keys rows^T of a group's keys (its ``part`` of the ring) and a block of rows, under way."""
    s = warpgroup_mma(
        keys.first.index(part).reshape([KEYS, z.D1]),
        rows.first.index(slot).reshape([z.BLOCK_M, z.D1]).permute((1, 0)),
        gl.zeros([KEYS, z.BLOCK_M], gl.float32, z.S),
        use_acc=False,
        is_async=True,
    )
    if z.D2 > 0:
        s = warpgroup_mma(
            keys.second.index(part).reshape([KEYS, z.D2]),
            rows.second.index(slot).reshape([z.BLOCK_M, z.D2]).permute((1, 0)),
            s,
            is_async=True,
        )
    return s


@gluon.jit
def add_product(p, rows, slot, acc, acc2, z):
    """acc + p rows, under way: one or two products."""
    acc = warpgroup_mma(p, rows.first.index(slot).reshape([z.BLOCK_M, z.D1]), acc, is_async=True)
    if z.D2 > 0:
        acc2 = warpgroup_mma(p, rows.second.index(slot).reshape([z.BLOCK_M, z.D2]), acc2, is_async=True)
    return acc, acc2


@gluon.jit
def row_values(sums, slot, z):
    """[1, BLOCK_M] of a slot of float32 sums, a value a row of Q."""
    plain: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    values = sums.index(slot)._reinterpret(gl.float32, [z.BLOCK_M], plain).load(z.ROW)
    return gl.expand_dims(values, 0)


@gluon.jit
def seen(p, at, notes, g: gl.constexpr, z, unseen=0.0):
    """P^T of a block of rows, ``unseen`` where a row does not see a key or there is none."""
    keys = gl.arange(0, KEYS, z.KEY) + g * KEYS
    hidden = gl.full([KEYS], -1, gl.int32, z.KEY)  # the last of the block's rows that does not see a key
    if z.BOUNDED:
        hidden = keys - (at + noted(notes, FIRST_SEES))
    hidden = gl.where(keys < noted(notes, COUNT), hidden, z.BLOCK_M)
    # a row's number is a thread's part (in 6) and a constant: compared like this, the constants take no registers
    rows = gl.expand_dims(gl.arange(0, z.BLOCK_M, z.ROW), 0)
    p = gl.where(gl.expand_dims(hidden, 1) - (rows & 6) < (rows & ~6), p, unseen)
    if z.BOUNDED >= LOCAL:
        last = keys + (noted(notes, LAST_ROW) - at)  # of the block's rows that sees a key
        p = gl.where(gl.expand_dims(last, 1) - (rows & 6) >= (rows & ~6), p, unseen)
    return p


@gluon.jit
def crossed(at, masked, notes, g: gl.constexpr, z):
    """Whether a mask crosses a block of rows for group g: one that starts before so many rows of a head, or ends
    behind the last that sees the group's first key."""
    if z.BOUNDED >= LOCAL:
        return (at < masked) | (at + (z.BLOCK_M - 1 - g * KEYS) > noted(notes, LAST_ROW))
    return at < masked


@gluon.jit
def step(
    i, at, c, gap, to, view, dk, dk2, dv, dv2, s, notes, k, v, q, dy, lse, delta, ds, ds_full, order,
    FIRST: gl.constexpr, g: gl.constexpr, z,
):  # fmt: skip
    """Block i, which starts ``at`` rows after the first of its head that is walked. ``to`` is where block i - 1's dQ
    goes; it comes back for block i's, as ``at`` does for the next. Where there is an order, ``c`` is
    ``next_step``'s and ``gap`` what lies between both blocks' dQ. With AHEAD ``s`` are the block's scores, and the next
    block's come back."""
    panels: gl.constexpr = 2 if z.D2 > 0 else 1  # products in flight for one of S^T, dP^T, dK, dV
    qi = i % z.Q_STAGES
    yi = i % z.DY_STAGES
    zero = i >> 30  # to the compiler it is not: it would keep the descriptors of K and V in registers
    if not z.AHEAD:
        mbarrier.wait(q.full.index(qi), (i // z.Q_STAGES) & 1)
        s = times_rows(k, g + zero, q, qi, z)
    mbarrier.wait(dy.full.index(yi), (i // z.DY_STAGES) & 1)
    dp = times_rows(v, g + zero, dy, yi, z)
    base = row_values(lse, qi, z)
    if not z.AHEAD:
        s = warpgroup_mma_wait(panels, deps=(s,))
    p = gl.exp2(s * view.scale - base)  # while dP^T runs
    if crossed(at, view.masked, notes, g, z):
        p = seen(p, at, notes, g, z)
    p_a = gl.convert_layout(p.to(q.first.dtype), z.P)
    dv, dv2 = add_product(p_a, dy, yi, dv, dv2, z)
    dp = warpgroup_mma_wait(panels, deps=(dp,))
    d = (p * (dp - row_values(delta, yi, z))).to(q.first.dtype)  # while dV runs
    # Slot b was last read by dQ(i - 4), which both groups finished in their block i - 3. This group has seen
    # ds_full(i - 2) in its block i - 1, and the other one signals that in its block i - 2: four slots need no barrier
    # that says which is free.
    b = i % DS_SLOTS
    ds.index(GROUPS * b + g).store(d)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(b), count=1)
    ds_a = gl.convert_layout(d, z.P)
    if z.AHEAD:  # the next block's scores, before dQ and dK
        if z.D2 > 0:
            dv, dv2 = warpgroup_mma_wait(0, deps=(dv, dv2))
        else:
            dv = warpgroup_mma_wait(0, deps=(dv,))
        mbarrier.arrive(dy.empty.index(yi), count=1)
        qn = (i + 1) % z.Q_STAGES
        mbarrier.wait(q.full.index(qn), ((i + 1) // z.Q_STAGES) & 1)
        s = times_rows(k, g + zero, q, qn, z)
    if FIRST:
        dk, dk2 = add_product(ds_a, q, qi, dk, dk2, z)
        if z.AHEAD:
            s = warpgroup_mma_wait(panels, deps=(s,))
        else:
            if z.D2 > 0:
                dv, dv2 = warpgroup_mma_wait(panels, deps=(dv, dv2))
            else:
                dv = warpgroup_mma_wait(panels, deps=(dv,))
            mbarrier.arrive(dy.empty.index(yi), count=1)
    else:
        j = i - 1  # dQ lags one block
        slot = j % DS_SLOTS
        mbarrier.wait(ds_full.index(slot), (j // DS_SLOTS) & 1)
        dq = dq_product(ds, slot, k, zero, g, z)
        dk, dk2 = add_product(ds_a, q, qi, dk, dk2, z)
        if z.AHEAD:
            s, dq = warpgroup_mma_wait(panels, deps=(s, dq))
        else:
            if z.D2 > 0:
                dv, dv2, dq = warpgroup_mma_wait(panels, deps=(dv, dv2, dq))
            else:
                dv, dq = warpgroup_mma_wait(panels, deps=(dv, dq))
            mbarrier.arrive(dy.empty.index(yi), count=1)
        add_in_turn(to, dq, j, order)  # while dK runs
        if order is None or z.BOUNDED != CAUSAL:
            gap = gl.where(at == 0, view.jump, z.BLOCK_M)
        to += gap.to(gl.int64) * (z.D1 + z.D2)
    if z.D2 > 0:
        dk, dk2 = warpgroup_mma_wait(0, deps=(dk, dk2))
    else:
        dk = warpgroup_mma_wait(0, deps=(dk,))
    mbarrier.arrive(q.empty.index(qi), count=1)
    if order is None or z.BOUNDED != CAUSAL:
        at += z.BLOCK_M
        at = gl.where(at == view.rows, 0, at)
    else:
        at, c, gap = next_step(at, c, order)
    return at, c, gap, to, dk, dk2, dv, dv2, s


@gluon.jit
def put(values, buffer, of, notes, column: gl.constexpr, g: gl.constexpr, z):
    """[64, N] of a gradient on its way to memory; keys past the last and columns past the head's are not written."""
    buffer.reshape([KEYS, values.shape[1]]).store(values.to(of.dtype))
    fence_async_shared()
    batch = noted(notes, BATCH)
    head = noted(notes, KV_HEAD)
    key = noted(notes, KEY) + g * KEYS
    any_keys = True
    if z.PACKED:  # what is wholly behind a sequence is never asked for
        any_keys = noted(notes, COUNT) > g * KEYS
    if any_keys:
        for c in gl.static_range(values.shape[1] // z.BOX):
            piece = buffer.slice(c * z.BOX, z.BOX, dim=3)
            tma.async_copy_shared_to_global(of, [batch, head, key, column + c * z.BOX], piece)


@gluon.jit
def consume(
    z, tile, notes, DK, DV, DQ32, k, v, q, dy, lse, delta, ds, ds_full, order, padded, heads, scale,
    g: gl.constexpr,
):  # fmt: skip
    """Consumer group g: keys 64 g to 64 g + 63 of the tile."""
    columns: gl.constexpr = z.D1 + z.D2
    dk = gl.zeros([KEYS, z.D1], gl.float32, z.O1)
    dv = gl.zeros([KEYS, z.D1], gl.float32, z.O1)
    dk2 = gl.zeros([KEYS, z.D2 if z.D2 > 0 else 16], gl.float32, z.O2)
    dv2 = gl.zeros([KEYS, z.D2 if z.D2 > 0 else 16], gl.float32, z.O2)
    s = gl.zeros([KEYS, z.BLOCK_M], gl.float32, z.S)
    # group 1's half starts after eight slabs: the next 64 rows, or the columns from 64 on
    head = (tile.batch * heads + tile.head).to(gl.int64)
    to = DQ32 + ((head * padded + tile.row) * columns + g * 4096)
    # masked: all blocks where not all keys are there, else those whose first row does not see all
    masked = KEYS * (g + 1) - noted(notes, FIRST_SEES) if z.BOUNDED else 0
    masked = gl.where(noted(notes, COUNT) < KEYS * (g + 1), tile.rows, masked)
    view = View(tile.rows, padded - tile.rows + z.BLOCK_M, masked, scale)
    mbarrier.wait(k.full.index(0), 0)
    mbarrier.wait(v.full.index(0), 0)
    if z.AHEAD:
        mbarrier.wait(q.full.index(0), 0)
        s = times_rows(k, g, q, 0, z)
        s = warpgroup_mma_wait(0, deps=(s,))
    zero = tile.steps * 0
    at = zero
    if order is not None and z.BOUNDED == CAUSAL:
        at += noted(order.walk, START)
        to += at.to(gl.int64) * columns
    at, c, gap, to, dk, dk2, dv, dv2, s = step(
        zero, at, zero, zero, to, view, dk, dk2, dv, dv2, s, notes, k, v, q, dy, lse, delta, ds, ds_full, order,
        True, g, z,
    )  # fmt: skip
    for i in range(1, tile.steps):
        at, c, gap, to, dk, dk2, dv, dv2, s = step(
            i, at, c, gap, to, view, dk, dk2, dv, dv2, s, notes, k, v, q, dy, lse, delta, ds, ds_full, order,
            False, g, z,
        )  # fmt: skip
    # V's rows of this group are spent, and only it reads them: they carry dV out, then dK
    put(dv, v.first.index(g), DV, notes, 0, g, z)
    if z.D2 > 0:
        put(dv2, v.second.index(g), DV, notes, z.D1, g, z)
    j = tile.steps - 1
    c = j % DS_SLOTS
    mbarrier.wait(ds_full.index(c), (j // DS_SLOTS) & 1)
    dq = dq_product(ds, c, k, 0, g, z)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    add_in_turn(to, dq, j, order)
    tma.store_wait(0)
    natural = scale * 0.6931471805599453
    put(dk * natural, v.first.index(g), DK, notes, 0, g, z)
    if z.D2 > 0:
        put(dk2 * natural, v.second.index(g), DK, notes, z.D1, g, z)
    tma.store_wait(0)


@gluon.jit
def by_groups(
    Q, K, V, DY, DK, DV, LSE2, DELTA, DQ32, TURNS, tile, scale, tiles_a_head, heads, padded, len_k, right,
    REGISTERS: gl.constexpr, z, left=None,
):  # fmt: skip
    """A block of 128 keys, whose ``tile`` it is, by two consumer groups and a producer warp. TURNS are None where there
    is no order, ``left`` where there is no left bound."""
    notes = write_notes(tile, right, len_k, left)
    k = held_tiles(K, 2, z)
    v = held_tiles(V, 2, z)
    q = tile_ring(Q, z.Q_STAGES, z)
    dy = tile_ring(DY, z.DY_STAGES, z)
    ds = gl.allocate_shared_memory(Q.dtype, [2 * DS_SLOTS, 64, z.BLOCK_M], gl.NVMMASharedLayout(128, 16, 2))
    lse = sums_ring(LSE2, z.Q_STAGES)
    delta = sums_ring(DELTA, z.DY_STAGES)
    ds_full = mbarriers(DS_SLOTS, 2)
    # the tuples stay literal: through a variable, constants would turn into run-time values
    if TURNS is None:
        fence_async_shared()
        gl.warp_specialize(
            [
                (consume, (z, tile, notes, DK, DV, DQ32, k, v, q, dy, lse, delta, ds, ds_full, None, padded,
                           heads, scale, 0)),
                (consume, (z, tile, notes, DK, DV, DQ32, k, v, q, dy, lse, delta, ds, ds_full, None, padded,
                           heads, scale, 1)),
                (produce, (z, tile, Q, K, V, DY, LSE2, DELTA, k, v, q, dy, lse, delta)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    else:
        order = order_of(tile, padded, 2, 1, z)
        fence_async_shared()
        gl.warp_specialize(
            [
                (consume, (z, tile, notes, DK, DV, DQ32, k, v, q, dy, lse, delta, ds, ds_full, order, padded,
                           heads, scale, 0)),
                (consume, (z, tile, notes, DK, DV, DQ32, k, v, q, dy, lse, delta, ds, ds_full, order, padded,
                           heads, scale, 1)),
                (produce, (z, tile, Q, K, V, DY, LSE2, DELTA, k, v, q, dy, lse, delta, order)),
                (keep_order, (z, tile, TURNS, order, tiles_a_head, heads, padded, right, 0)),
            ],
            [4, 1, 1],
            [REGISTERS, 24, 24],
        )  # fmt: skip
