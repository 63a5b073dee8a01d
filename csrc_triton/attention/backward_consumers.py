"""Consumer warp groups of the warp-specialised backward, for heads of up to 128 columns and for wider ones.

All is computed transposed, so that P^T and dS^T stay register operands:

    S^T = K Q^T,  dP^T = V dY^T,  dV += P^T dY,  dK += dS^T Q,  dQ = dS K

dQ is added to float32 in global memory (``add_dq``): in any order, so that its last bits vary from run to run, or in a
fixed one (``Semaphore``). dK and dV do not vary.

**Up to 128 columns** (``warp_specialized``) two warp groups own 64 keys each and hold their dK and dV in registers.
Only dQ needs both groups' dS: each stores its part to shared memory and computes half of the tile of dQ, one block
late, so that the groups need not meet in every block. What else is chosen, and what ptxas (Triton 3.6.0) forces:

- With PIPELINED_SCORES the next block's scores start before this block's dQ and dK; it takes a third stage of Q where
  that fits.
- A matrix descriptor that does not change in the loop is held in registers, which spills: see ``zero`` in ``step``.
- No accumulator is in flight over the loop's back edge: all products would be serialised.
- The first block stands before the loop, since it has no dQ to add.

**Past 128 columns** (``warp_specialized_wide``) a warp group cannot hold dK and dV of 64 keys both, so a tile has 64
keys, and each of three warp groups makes one gradient:

- ``make_dv``: S^T = K Q^T, P^T = exp2(S^T - lse), dV += P^T dY. It passes P^T on through shared memory.
- ``make_dk``: dP^T = V dY^T, dS^T = P^T (dP^T - delta), dK += dS^T Q. It passes dS^T on.
- ``make_dq``: dQ = dS K. It holds no accumulator over the loop and needs few registers.

So dV and dK are products as wide as a head of register operands, which read the least shared memory: its bandwidth is
the next bound. P^T is passed on in float32: rounded, dS would be rounded twice. While one warp group waits the others
multiply; within a warp group nothing overlaps. The next block's scores beside this block's dV or dK, as above, cost up
to 20% on one NVIDIA H200, a third stage of Q and dY up to 13%. Heads have two panels of columns, 192 = 128 + 64 and 256
= 128 + 128: ptxas (Triton 3.6.0) refuses a product of 256 columns in a block of 512 threads, whatever the warp groups'
registers. What it holds over the code of all warp groups has to fit into the registers of the smallest.
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

from csrc_triton.attention.backward_producer import (
    BATCH,
    COUNT,
    FIRST_SEES,
    KEY,
    KV_HEAD,
    LAST_ROW,
    Buffers,
    produce,
    read_cap,
    resident_tiles,
    row_statistics,
    write_tile,
)
from csrc_triton.attention.backward_scheduler import (
    KEYS,
    START,
    arrive_added,
    make_semaphore,
    next_offset,
    semaphore_warp,
    wait_ready,
)
from csrc_triton.attention.pipeline import load_scalar, mbarriers, pipeline_of
from csrc_triton.attention.tile_scheduler import CAUSAL, LOCAL

SLAB_BYTES = gl.constexpr(2048)  # eight columns of 64 rows of dQ in float32
DS_STAGES = gl.constexpr(4)  # of dS; with four no barrier must say that one is empty: see ``step``
DQ_COLUMNS = gl.constexpr(64)  # columns of dQ that ``make_dq`` has in registers
UNSEEN = gl.constexpr(1e18)  # so far out of a soft cap that P is 0, and finite when squared

# [64, 64] of float32 as a thread has it in accumulators, four values beside each other: (row, column) of each bit of an
# element's number. A thread moves 16 bytes at once, a warp 512 side by side.
ACCUMULATORS = gl.constexpr(
    gl.SharedLinearLayout(
        [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0], [0, 8], [0, 16], [0, 32]]
    )
)


# ---- dQ ----


# One statement adds all of a thread's values, a vector of four for each slab; operands are the results (which inline
# assembly must have), then as many pointers as values, all the same, then the values.
@gluon.constexpr_function
def reduction(values):
    pointer, first = values // 4, values // 4 + values
    vectors = (
        (SLAB_BYTES.value * j, ", ".join(f"${first + 4 * j + e}" for e in range(4)))
        for j in range(values // 4)
    )
    return " ".join(
        f"red.relaxed.gpu.global.add.v4.f32 [${pointer}+{at}], {{{four}}};" for at, four in vectors
    )


@gluon.constexpr_function
def reduction_operands(values):
    return ",".join(["=r"] * (values // 4) + ["l"] * values + ["f"] * values)


@gluon.jit
def add_dq(to, dq):
    """Add [64, N] of dQ to float32 at ``to``, where tiles of 64 rows lie in the order of accumulators: slabs of eight
    columns, in each the 4 values of a thread of the warp group beside each other (``postprocess`` undoes it). A warp
    adds 512 bytes side by side, with no trip through shared memory."""
    layout: gl.constexpr = dq.type.layout
    values: gl.constexpr = dq.shape[1] // 2  # a thread's
    c = gl.arange(0, dq.shape[1], gl.SliceLayout(0, layout))
    r = gl.arange(0, 64, gl.SliceLayout(1, layout))
    thread = gl.expand_dims((r // 16) * 32 + (r % 8) * 4, 1) + gl.expand_dims((c % 8) // 2, 0)
    gl.inline_asm_elementwise(
        reduction(values),
        reduction_operands(values),
        [(to + thread * 4).to(gl.int64), dq],
        dtype=gl.int8,
        is_pure=False,
        pack=values,
    )


@gluon.jit
def add_ordered(to, dq, j, semaphore):
    """``add_dq`` for the j-th block of rows, with a semaphore when this program may."""
    if semaphore is not None:
        wait_ready(j, semaphore)
    add_dq(to, dq)
    if semaphore is not None:
        arrive_added(j, semaphore)


@gluon.jit
def product_into(a, b, columns: gl.constexpr, other_a, other_b):
    """a b + other_a other_b of 64 rows, asynchronous."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )
    dq = gl.zeros([64, columns], gl.float32, layout)
    dq = warpgroup_mma(a, b, dq, use_acc=False, is_async=True)
    return warpgroup_mma(other_a, other_b, dq, is_async=True)


@gluon.jit
def dq_product(ds, stage, k, zero, g: gl.constexpr, z):
    """Warp group g's part of a block's dQ, asynchronous: half of the rows, or of the columns."""
    a = ds.index(2 * stage)
    b = ds.index(2 * stage + 1)
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


# ---- Products, masks and stores of both kinds of consumers ----


@gluon.jit
def times_rows(keys, part, rows, stage, z):
    """keys rows^T of a warp group's keys (``part`` of the resident tiles) and a block of rows, asynchronous."""
    s = warpgroup_mma(
        keys.first.index(part).reshape([KEYS, z.D1]),
        rows.first.index(stage).reshape([z.BLOCK_M, z.D1]).permute((1, 0)),
        gl.zeros([KEYS, z.BLOCK_M], gl.float32, z.S),
        use_acc=False,
        is_async=True,
    )
    if z.D2 > 0:
        s = warpgroup_mma(
            keys.second.index(part).reshape([KEYS, z.D2]),
            rows.second.index(stage).reshape([z.BLOCK_M, z.D2]).permute((1, 0)),
            s,
            is_async=True,
        )
    return s


@gluon.jit
def add_product(p, rows, stage, acc, acc2, z):
    """acc + p rows, asynchronous: one or two products."""
    acc = warpgroup_mma(p, rows.first.index(stage).reshape([z.BLOCK_M, z.D1]), acc, is_async=True)
    if z.D2 > 0:
        acc2 = warpgroup_mma(p, rows.second.index(stage).reshape([z.BLOCK_M, z.D2]), acc2, is_async=True)
    return acc, acc2


@gluon.jit
def row_values(statistics, stage, z):
    """[1, BLOCK_M]: LSE or delta of the rows of a stage."""
    plain: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    values = statistics.index(stage)._reinterpret(gl.float32, [z.BLOCK_M], plain).load(z.ROW)
    return gl.expand_dims(values, 0)


@gluon.jit
def masked(p, at, info, g: gl.constexpr, z, unseen=0.0):
    """P^T of a block of rows, ``unseen`` where a row does not see a key or there is none."""
    keys = gl.arange(0, KEYS, z.KEY) + g * KEYS
    hidden = gl.full([KEYS], -1, gl.int32, z.KEY)  # the last of the block's rows that does not see a key
    if z.MASK:
        hidden = keys - (at + load_scalar(info, FIRST_SEES, 4))
    hidden = gl.where(keys < load_scalar(info, COUNT, 4), hidden, z.BLOCK_M)
    # a row's number is a thread's part (in 6) and a constant: compared like this, the constants take no registers
    rows = gl.expand_dims(gl.arange(0, z.BLOCK_M, z.ROW), 0)
    p = gl.where(gl.expand_dims(hidden, 1) - (rows & 6) < (rows & ~6), p, unseen)
    if z.MASK >= LOCAL:
        last = keys + (load_scalar(info, LAST_ROW, 4) - at)  # of the block's rows that sees a key
        p = gl.where(gl.expand_dims(last, 1) - (rows & 6) >= (rows & ~6), p, unseen)
    return p


@gluon.jit
def needs_mask(at, masked_rows, info, g: gl.constexpr, z):
    """Whether a mask crosses a block of rows for warp group g: one that starts before so many rows of a head, or ends
    behind the last row that sees the group's first key."""
    if z.MASK >= LOCAL:
        return (at < masked_rows) | (at + (z.BLOCK_M - 1 - g * KEYS) > load_scalar(info, LAST_ROW, 4))
    return at < masked_rows


@gluon.jit
def store_gradient(values, buffer, of, info, column: gl.constexpr, g: gl.constexpr, z):
    """Start to store [64, N] of a gradient; keys past the last and columns past the head's are not written."""
    buffer.reshape([KEYS, values.shape[1]]).store(values.to(of.dtype))
    fence_async_shared()
    batch = load_scalar(info, BATCH, 4)
    head = load_scalar(info, KV_HEAD, 4)
    key = load_scalar(info, KEY, 4) + g * KEYS
    any_keys = True
    if z.VARLEN:  # a box wholly behind a sequence is never stored
        any_keys = load_scalar(info, COUNT, 4) > g * KEYS
    if any_keys:
        for c in gl.static_range(values.shape[1] // z.BOX):
            piece = buffer.slice(c * z.BOX, z.BOX, dim=3)
            tma.async_copy_shared_to_global(of, [batch, head, key, column + c * z.BOX], piece)


@gluon.jit
def store_zeros(of, tile, len_k, z):
    """The gradients of keys that no row sees."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    zeros = gl.allocate_shared_memory(of.dtype, of.block_shape, of.layout)
    zeros.reshape([KEYS, z.BOX]).store(gl.zeros([KEYS, z.BOX], of.dtype, layout))
    fence_async_shared()
    for g in gl.static_range(z.BLOCK_N // KEYS):
        if tile.key + g * KEYS < len_k:
            place, key = tile.keys_at(g)
            for c in gl.static_range((z.D1 + z.D2) // z.BOX):
                tma.async_copy_shared_to_global(of, [place, tile.kv_head, key, c * z.BOX], zeros)
    tma.store_wait(0)


# ---- Up to 128 columns: a warp group owns 64 keys ----


@aggregate
class LoopState:
    """What a warp group needs in every step to know of its rows and keys: few values, as each takes a register."""

    rows: gl.tensor  # of a head
    jump: gl.tensor  # from the last block of a head to the first of the next, in rows of DQ32
    masked_rows: gl.tensor  # see ``needs_mask``
    scale: gl.tensor  # of scores, in base 2

    @gluon.constexpr_function
    def __init__(self, rows, jump, masked_rows, scale):
        self.rows, self.jump, self.masked_rows, self.scale = rows, jump, masked_rows, scale


@gluon.jit
def step(
    i, at, c, gap, to, loop, dk, dk2, dv, dv2, s, info, x, ds, ds_full, semaphore, FIRST: gl.constexpr,
    g: gl.constexpr, z,
):  # fmt: skip
    """Block i, which starts ``at`` rows after the first of its head. ``to`` is where block i - 1's dQ goes; it is
    returned for block i's, as ``at`` is for the next block. With a semaphore, ``c`` is ``next_offset``'s, and ``gap``
    what lies between both blocks' dQ. With PIPELINED_SCORES ``s`` are the block's scores; the next block's are
    returned."""
    panels: gl.constexpr = 2 if z.D2 > 0 else 1  # products in flight for one of S^T, dP^T, dK, dV
    qi = i % z.Q_STAGES
    yi = i % z.DY_STAGES
    zero = i >> 30  # to the compiler it is not: it would hold the descriptors of K and V in registers
    if not z.PIPELINED_SCORES:
        mbarrier.wait(x.q.full.index(qi), (i // z.Q_STAGES) & 1)
        s = times_rows(x.k, g + zero, x.q, qi, z)
    mbarrier.wait(x.dy.full.index(yi), (i // z.DY_STAGES) & 1)
    dp = times_rows(x.v, g + zero, x.dy, yi, z)
    base = row_values(x.lse, qi, z)
    if not z.PIPELINED_SCORES:
        s = warpgroup_mma_wait(panels, deps=(s,))
    p = gl.exp2(s * loop.scale - base)  # while dP^T runs
    if needs_mask(at, loop.masked_rows, info, g, z):
        p = masked(p, at, info, g, z)
    p_a = gl.convert_layout(p.to(x.q.first.dtype), z.P)
    dv, dv2 = add_product(p_a, x.dy, yi, dv, dv2, z)
    dp = warpgroup_mma_wait(panels, deps=(dp,))
    d = (p * (dp - row_values(x.delta, yi, z))).to(x.q.first.dtype)  # while dV runs
    # Stage b was last read by dQ(i - 4), which both warp groups finished in their block i - 3. This one has seen
    # ds_full(i - 2) in its block i - 1, and the other one signals that in its block i - 2: four stages need no empty
    # barrier.
    b = i % DS_STAGES
    ds.index(2 * b + g).store(d)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(b), count=1)
    ds_a = gl.convert_layout(d, z.P)
    if z.PIPELINED_SCORES:  # the next block's scores, before dQ and dK
        if z.D2 > 0:
            dv, dv2 = warpgroup_mma_wait(0, deps=(dv, dv2))
        else:
            dv = warpgroup_mma_wait(0, deps=(dv,))
        mbarrier.arrive(x.dy.empty.index(yi), count=1)
        qn = (i + 1) % z.Q_STAGES
        mbarrier.wait(x.q.full.index(qn), ((i + 1) // z.Q_STAGES) & 1)
        s = times_rows(x.k, g + zero, x.q, qn, z)
    if FIRST:
        dk, dk2 = add_product(ds_a, x.q, qi, dk, dk2, z)
        if z.PIPELINED_SCORES:
            s = warpgroup_mma_wait(panels, deps=(s,))
        else:
            if z.D2 > 0:
                dv, dv2 = warpgroup_mma_wait(panels, deps=(dv, dv2))
            else:
                dv = warpgroup_mma_wait(panels, deps=(dv,))
            mbarrier.arrive(x.dy.empty.index(yi), count=1)
    else:
        j = i - 1  # dQ lags one block
        stage = j % DS_STAGES
        mbarrier.wait(ds_full.index(stage), (j // DS_STAGES) & 1)
        dq = dq_product(ds, stage, x.k, zero, g, z)
        dk, dk2 = add_product(ds_a, x.q, qi, dk, dk2, z)
        if z.PIPELINED_SCORES:
            s, dq = warpgroup_mma_wait(panels, deps=(s, dq))
        else:
            if z.D2 > 0:
                dv, dv2, dq = warpgroup_mma_wait(panels, deps=(dv, dv2, dq))
            else:
                dv, dq = warpgroup_mma_wait(panels, deps=(dv, dq))
            mbarrier.arrive(x.dy.empty.index(yi), count=1)
        add_ordered(to, dq, j, semaphore)  # while dK runs
        if semaphore is None or z.MASK != CAUSAL:
            gap = gl.where(at == 0, loop.jump, z.BLOCK_M)
        to += gap.to(gl.int64) * (z.D1 + z.D2)
    if z.D2 > 0:
        dk, dk2 = warpgroup_mma_wait(0, deps=(dk, dk2))
    else:
        dk = warpgroup_mma_wait(0, deps=(dk,))
    mbarrier.arrive(x.q.empty.index(qi), count=1)
    if semaphore is None or z.MASK != CAUSAL:
        at += z.BLOCK_M
        at = gl.where(at == loop.rows, 0, at)
    else:
        at, c, gap = next_offset(at, c, semaphore)
    return at, c, gap, to, dk, dk2, dv, dv2, s


@gluon.jit
def consume(
    z, tile, info, out, x, ds, ds_full, semaphore, padded, heads, scale, g: gl.constexpr
):  # fmt: skip
    """Consumer warp group g: keys 64 g to 64 g + 63 of the tile."""
    columns: gl.constexpr = z.D1 + z.D2
    dk = gl.zeros([KEYS, z.D1], gl.float32, z.O1)
    dv = gl.zeros([KEYS, z.D1], gl.float32, z.O1)
    dk2 = gl.zeros([KEYS, z.D2 if z.D2 > 0 else 16], gl.float32, z.O2)
    dv2 = gl.zeros([KEYS, z.D2 if z.D2 > 0 else 16], gl.float32, z.O2)
    s = gl.zeros([KEYS, z.BLOCK_M], gl.float32, z.S)
    # group 1's half starts after eight slabs: the next 64 rows, or the columns from 64 on
    head = (tile.batch * heads + tile.head).to(gl.int64)
    to = out.DQ32 + ((head * padded + tile.row) * columns + g * 4096)
    # all blocks where not all keys are there, else those whose first row does not see all
    masked_rows = KEYS * (g + 1) - load_scalar(info, FIRST_SEES, 4) if z.MASK else 0
    masked_rows = gl.where(load_scalar(info, COUNT, 4) < KEYS * (g + 1), tile.rows, masked_rows)
    loop = LoopState(tile.rows, padded - tile.rows + z.BLOCK_M, masked_rows, scale)
    mbarrier.wait(x.k.full.index(0), 0)
    mbarrier.wait(x.v.full.index(0), 0)
    if z.PIPELINED_SCORES:
        mbarrier.wait(x.q.full.index(0), 0)
        s = times_rows(x.k, g, x.q, 0, z)
        s = warpgroup_mma_wait(0, deps=(s,))
    zero = tile.steps * 0
    at = zero
    if semaphore is not None and z.MASK == CAUSAL:
        at += load_scalar(semaphore.path, START, 4)
        to += at.to(gl.int64) * columns
    at, c, gap, to, dk, dk2, dv, dv2, s = step(
        zero, at, zero, zero, to, loop, dk, dk2, dv, dv2, s, info, x, ds, ds_full, semaphore, True, g, z
    )
    for i in range(1, tile.steps):
        at, c, gap, to, dk, dk2, dv, dv2, s = step(
            i, at, c, gap, to, loop, dk, dk2, dv, dv2, s, info, x, ds, ds_full, semaphore, False, g, z
        )
    # V's rows of this warp group are spent, and only it reads them: they carry dV out, then dK
    store_gradient(dv, x.v.first.index(g), out.DV, info, 0, g, z)
    if z.D2 > 0:
        store_gradient(dv2, x.v.second.index(g), out.DV, info, z.D1, g, z)
    j = tile.steps - 1
    c = j % DS_STAGES
    mbarrier.wait(ds_full.index(c), (j // DS_STAGES) & 1)
    dq = dq_product(ds, c, x.k, 0, g, z)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    add_ordered(to, dq, j, semaphore)
    tma.store_wait(0)
    natural = scale * 0.6931471805599453
    store_gradient(dk * natural, x.v.first.index(g), out.DK, info, 0, g, z)
    if z.D2 > 0:
        store_gradient(dk2 * natural, x.v.second.index(g), out.DK, info, z.D1, g, z)
    tma.store_wait(0)


@gluon.jit
def run_narrow(
    maps, out, SEMAPHORE, tile, scale, tiles_per_head, heads, padded, len_k, right, REGISTERS: gl.constexpr, z,
    left=None,
):  # fmt: skip
    """A tile of 128 keys: two consumer warp groups, a producer warp and, with SEMAPHORE, a semaphore warp."""
    info = write_tile(tile, right, len_k, left)
    k = resident_tiles(maps.K, 2, z)
    v = resident_tiles(maps.V, 2, z)
    q = pipeline_of(maps.Q, z.Q_STAGES, 2, z)
    dy = pipeline_of(maps.DY, z.DY_STAGES, 2, z)
    ds = gl.allocate_shared_memory(
        maps.Q.dtype, [2 * DS_STAGES, 64, z.BLOCK_M], gl.NVMMASharedLayout(128, 16, 2)
    )
    lse = row_statistics(maps.LSE2, z.Q_STAGES)
    delta = row_statistics(maps.DELTA, z.DY_STAGES)
    x = Buffers(k, v, q, dy, lse, delta)
    ds_full = mbarriers(DS_STAGES, 2)
    # the tuples stay literal: through a variable, constants would turn into run-time values
    if SEMAPHORE is None:
        fence_async_shared()
        gl.warp_specialize(
            [
                (consume, (z, tile, info, out, x, ds, ds_full, None, padded, heads, scale, 0)),
                (consume, (z, tile, info, out, x, ds, ds_full, None, padded, heads, scale, 1)),
                (produce, (z, tile, maps, x)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        semaphore = make_semaphore(tile, padded, 2, 1, z)
        fence_async_shared()
        gl.warp_specialize(
            [
                (consume, (z, tile, info, out, x, ds, ds_full, semaphore, padded, heads, scale, 0)),
                (consume, (z, tile, info, out, x, ds, ds_full, semaphore, padded, heads, scale, 1)),
                (produce, (z, tile, maps, x, semaphore)),
                (semaphore_warp, (z, tile, SEMAPHORE, semaphore, tiles_per_head, heads, padded, right, 0)),
            ],
            [4, 1, 1],
            [REGISTERS, 24, 24],
        )


# ---- Past 128 columns: a warp group makes one gradient ----


@aggregate
class Passed:
    """Tiles that one warp group passes on to another: stages in shared memory, two barriers each."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty):
        self.tiles, self.full, self.empty = tiles, full, empty


@gluon.jit
def passed_tiles(dtype: gl.constexpr, stages: gl.constexpr, layout: gl.constexpr, z):
    tiles = gl.allocate_shared_memory(dtype, [stages, KEYS, z.BLOCK_M], layout)
    return Passed(tiles, mbarriers(stages, 1), mbarriers(stages, 1))


@gluon.jit
def both_zeros(z):
    """Both panels of dK or dV."""
    return gl.zeros([KEYS, z.D1], gl.float32, z.O1), gl.zeros([KEYS, z.D2], gl.float32, z.O2)


@gluon.jit
def store_both(acc, acc2, tiles, stage, of, info, z):
    store_gradient(acc, tiles.first.index(stage), of, info, 0, 0, z)
    store_gradient(acc2, tiles.second.index(stage), of, info, z.D1, 0, z)
    tma.store_wait(0)


@gluon.jit
def probabilities(s, base, at, masked_rows, scale, info, z):
    """P^T of a block of rows; with a soft cap, behind it, 1 - tanh. There the mask is on that: with both live while the
    mask is computed, ptxas would spill."""
    if z.SOFTCAP:  # tanh(x) = 1 - u with u = 2 / (1 + exp(2 x))
        u = 2.0 / (1.0 + gl.exp2(s * (read_cap(info) * 2.8853900817779268)))
        if needs_mask(at, masked_rows, info, 0, z):
            u = masked(u, at, info, 0, z, UNSEEN)
        p = gl.exp2((scale - base) - u * scale)
        return p, u
    else:
        p = gl.exp2(s * scale - base)
        if needs_mask(at, masked_rows, info, 0, z):
            p = masked(p, at, info, 0, z)
        return p, p


@gluon.jit
def make_dv(z, tile, info, semaphore, DV, k, q, dy, lse, passed_p, scale):
    dv, dv2 = both_zeros(z)
    rows = tile.rows
    # all blocks where not all keys are there, else those whose first row does not see all
    masked_rows = KEYS - load_scalar(info, FIRST_SEES, 4) if z.MASK else 0
    masked_rows = gl.where(load_scalar(info, COUNT, 4) < KEYS, rows, masked_rows)
    mbarrier.wait(k.full.index(0), 0)
    at = 0  # rows after the first of its head
    c = 0
    if semaphore is not None and z.MASK == CAUSAL:
        at = load_scalar(semaphore.path, START, 4)
    for i in range(tile.steps):
        qi = i % z.Q_STAGES
        yi = i % z.DY_STAGES
        # to the compiler i >> 30 is not zero: it would hold the descriptors of K in registers
        mbarrier.wait(q.full.index(qi), (i // z.Q_STAGES) & 1)
        s = times_rows(k, i >> 30, q, qi, z)
        base = row_values(lse, qi, z)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(q.empty.index(qi), count=1)
        p, u = probabilities(s, base, at, masked_rows, scale, info, z)
        mbarrier.wait(passed_p.empty.index(0), (i & 1) ^ 1)
        if z.SOFTCAP:
            # times the slope of tanh, which would spill if it was there before the wait
            passed_p.tiles.index(0).store(p * (u * (2.0 - u)))
        else:
            passed_p.tiles.index(0).store(p)
        mbarrier.arrive(passed_p.full.index(0), count=1)
        mbarrier.wait(dy.full.index(yi), (i // z.DY_STAGES) & 1)
        dv, dv2 = add_product(gl.convert_layout(p.to(q.first.dtype), z.P), dy, yi, dv, dv2, z)
        dv, dv2 = warpgroup_mma_wait(0, deps=(dv, dv2))
        mbarrier.arrive(dy.empty.index(yi), count=1)
        if semaphore is None or z.MASK != CAUSAL:
            at += z.BLOCK_M
            at = gl.where(at == rows, 0, at)
        else:
            at, c, _ = next_offset(at, c, semaphore)
    # the last rows of dY are spent, once both warp groups say so: they carry dV out
    j = tile.steps - 1
    stage = j % z.DY_STAGES
    mbarrier.wait(dy.empty.index(stage), (j // z.DY_STAGES) & 1)
    store_both(dv, dv2, dy, stage, DV, info, z)


@gluon.jit
def make_dk(z, tile, info, DK, v, q, dy, delta, passed_p, passed_ds, scale):
    dk, dk2 = both_zeros(z)
    stages: gl.constexpr = passed_ds.tiles.shape[0]
    mbarrier.wait(v.full.index(0), 0)
    for i in range(tile.steps):
        qi = i % z.Q_STAGES
        yi = i % z.DY_STAGES
        mbarrier.wait(dy.full.index(yi), (i // z.DY_STAGES) & 1)
        dp = times_rows(v, i >> 30, dy, yi, z)
        base = row_values(delta, yi, z)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        mbarrier.wait(passed_p.full.index(0), i & 1)
        d = (passed_p.tiles.index(0).load(z.S) * (dp - base)).to(q.first.dtype)
        mbarrier.arrive(passed_p.empty.index(0), count=1)
        mbarrier.arrive(dy.empty.index(yi), count=1)
        c = i % stages
        mbarrier.wait(passed_ds.empty.index(c), ((i // stages) & 1) ^ 1)
        passed_ds.tiles.index(c).store(d)
        fence_async_shared()
        mbarrier.arrive(passed_ds.full.index(c), count=1)
        mbarrier.wait(q.full.index(qi), (i // z.Q_STAGES) & 1)
        dk, dk2 = add_product(gl.convert_layout(d, z.P), q, qi, dk, dk2, z)
        dk, dk2 = warpgroup_mma_wait(0, deps=(dk, dk2))
        mbarrier.arrive(q.empty.index(qi), count=1)
    # the last rows of Q are spent, as their scores were computed before P came: they carry dK out
    natural = scale * 0.6931471805599453
    if z.SOFTCAP:
        natural *= read_cap(info)
    store_both(dk * natural, dk2 * natural, q, (tile.steps - 1) % z.Q_STAGES, DK, info, z)


@gluon.jit
def make_dq(z, tile, DQ32, k, passed_ds, semaphore, padded, heads):
    columns: gl.constexpr = z.D1 + z.D2
    stages: gl.constexpr = passed_ds.tiles.shape[0]
    to = DQ32 + ((tile.batch * heads + tile.head).to(gl.int64) * padded + tile.row) * columns
    jump = padded - tile.rows + z.BLOCK_M  # from the last block of a head to the first of the next
    mbarrier.wait(k.full.index(0), 0)
    at = 0
    c = 0
    if semaphore is not None and z.MASK == CAUSAL:
        at = load_scalar(semaphore.path, START, 4)
        to += at.to(gl.int64) * columns
    for i in range(tile.steps):
        stage = i % stages
        mbarrier.wait(passed_ds.full.index(stage), (i // stages) & 1)
        ds = passed_ds.tiles.index(stage).permute((1, 0))
        add_panel(to, ds, k.first.index(i >> 30).reshape([KEYS, z.D1]), i, semaphore)
        add_panel(to + 64 * z.D1, ds, k.second.index(i >> 30).reshape([KEYS, z.D2]), i, None)
        if semaphore is not None:
            arrive_added(i, semaphore)
        mbarrier.arrive(passed_ds.empty.index(stage), count=1)
        if semaphore is None or z.MASK != CAUSAL:
            at += z.BLOCK_M
            last = at == tile.rows
            to += gl.where(last, jump, z.BLOCK_M).to(gl.int64) * columns
            at = gl.where(last, 0, at)
        else:
            at, c, gap = next_offset(at, c, semaphore)
            to += gap.to(gl.int64) * columns


@gluon.jit
def add_panel(to, ds, keys, i, semaphore):
    """Add dS keys, of a panel of columns, to float32 at ``to``; with a semaphore when this program may add to the i-th
    block of rows, for which the first product does not wait."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DQ_COLUMNS, 16]
    )
    for n in gl.static_range(keys.shape[1] // DQ_COLUMNS):
        dq = gl.zeros([64, DQ_COLUMNS], gl.float32, layout)
        dq = warpgroup_mma(
            ds, keys.slice(n * DQ_COLUMNS, DQ_COLUMNS, dim=1), dq, use_acc=False, is_async=True
        )
        dq = warpgroup_mma_wait(0, deps=(dq,))
        if n == 0 and semaphore is not None:
            wait_ready(i, semaphore)
        add_dq(to + n * (64 * DQ_COLUMNS), dq)
        gl.thread_barrier()  # ptxas would start the next product before it has added this one, and spill


@gluon.jit
def run_wide(
    maps, out, SEMAPHORE, tile, scale, tiles_per_head, heads, padded, len_k, right, REGISTERS: gl.constexpr,
    DQ_REGISTERS: gl.constexpr, z, left=None, cap=None,
):  # fmt: skip
    """A tile of 64 keys: three consumer warp groups, a producer warp and, with SEMAPHORE, three semaphore warps."""
    info = write_tile(tile, right, len_k, left, cap)
    k = resident_tiles(maps.K, 1, z)
    v = resident_tiles(maps.V, 1, z)
    q = pipeline_of(maps.Q, z.Q_STAGES, 2, z)
    dy = pipeline_of(maps.DY, z.DY_STAGES, 2, z)
    p = passed_tiles(gl.float32, 1, ACCUMULATORS, z)
    ds = passed_tiles(maps.Q.dtype, 2, gl.NVMMASharedLayout(128, 16, 2), z)
    lse = row_statistics(maps.LSE2, z.Q_STAGES)
    delta = row_statistics(maps.DELTA, z.DY_STAGES)
    x = Buffers(k, v, q, dy, lse, delta)
    # the tuples stay literal: through a variable, constants would turn into run-time values; with 24 registers for the
    # producer the consumers spill
    if SEMAPHORE is None:
        fence_async_shared()
        gl.warp_specialize(
            [
                (make_dv, (z, tile, info, None, out.DV, k, q, dy, lse, p, scale)),
                (make_dk, (z, tile, info, out.DK, v, q, dy, delta, p, ds, scale)),
                (make_dq, (z, tile, out.DQ32, k, ds, None, padded, heads)),
                (produce, (z, tile, maps, x)),
            ],
            [4, 4, 1],
            [REGISTERS, DQ_REGISTERS, 32],
        )
    else:
        semaphore = make_semaphore(tile, padded, 1, 3, z)
        fence_async_shared()
        gl.warp_specialize(
            [
                (make_dv, (z, tile, info, semaphore, out.DV, k, q, dy, lse, p, scale)),
                (make_dk, (z, tile, info, out.DK, v, q, dy, delta, p, ds, scale)),
                (make_dq, (z, tile, out.DQ32, k, ds, semaphore, padded, heads)),
                (produce, (z, tile, maps, x, semaphore)),
                (semaphore_warp, (z, tile, SEMAPHORE, semaphore, tiles_per_head, heads, padded, right, 0)),
                (semaphore_warp, (z, tile, SEMAPHORE, semaphore, tiles_per_head, heads, padded, right, 1)),
                (semaphore_warp, (z, tile, SEMAPHORE, semaphore, tiles_per_head, heads, padded, right, 2)),
            ],
            [4, 4, 1, 1, 1, 1],
            [REGISTERS, DQ_REGISTERS, 32, 32, 32, 32],
        )
