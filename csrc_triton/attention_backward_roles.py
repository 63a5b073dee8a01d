"""Attention backward of wide heads by warp groups with roles (Gluon, Hopper): above 128 columns a group cannot keep dK
and dV of 64 keys both (see ``attention_backward_groups``), so each of three consumer groups keeps one thing.

A block owns 64 keys of a head of K. All is computed transposed, as there:

- ``make_dv``: S^T = K Q^T, P^T = exp2(S^T - lse), dV += P^T dY. It hands P^T on through shared memory.
- ``make_dk``: dP^T = V dY^T, dS^T = P^T (dP^T - delta), dK += dS^T Q. It hands dS^T on.
- ``make_dq``: dQ = dS K, added to float32 in global memory, part by part: it keeps nothing and needs few registers.

So all products are as wide as a head, and P^T and dS^T are register operands: wide products read less shared memory,
whose bandwidth they would else wait for. P^T is handed on in float32, in the order of accumulators: rounded, dS would
be rounded twice.
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

from csrc_triton.attention_backward_consumer import (
    add_dq,
    add_product,
    put,
    row_values,
    seen,
    times_rows,
)
from csrc_triton.attention_backward_groups import COUNT, FIRST_SEES, KEYS, noted

DS_SLOTS = gl.constexpr(2)  # of dS
PART = gl.constexpr(64)  # columns of dQ that ``make_dq`` has in registers

# [64, 64] of float32 as a thread of a group has it in accumulators, four values beside each other: (row, column) of
# each bit of an element's number. A thread moves 16 bytes at once, a warp 512 side by side.
ACCUMULATORS = gl.constexpr(
    gl.SharedLinearLayout(
        [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0], [0, 8], [0, 16], [0, 32]]
    )
)


@gluon.jit
def wait_both(acc, acc2, z):
    if z.D2 > 0:
        acc, acc2 = warpgroup_mma_wait(0, deps=(acc, acc2))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    return acc, acc2


@gluon.jit
def zeros_of(z):
    """Both panels of dK or dV."""
    first = gl.zeros([KEYS, z.D1], gl.float32, z.O1)
    return first, gl.zeros([KEYS, z.D2 if z.D2 > 0 else 16], gl.float32, z.O2)


@gluon.jit
def put_both(acc, acc2, ring, slot, of, notes, z):
    put(acc, ring.first.index(slot), of, notes, 0, 0, z)
    if z.D2 > 0:
        put(acc2, ring.second.index(slot), of, notes, z.D1, 0, z)
    tma.store_wait(0)


@gluon.jit
def make_dv(z, tile, notes, DV, k, q, dy, lse, p_shared, p_full, p_free, scale):
    dv, dv2 = zeros_of(z)
    rows = tile.rows
    # all blocks take a mask where not all keys are there, else those whose first row does not see all
    masked = KEYS - noted(notes, FIRST_SEES) if z.BOUNDED else 0
    masked = gl.where(noted(notes, COUNT) < KEYS, rows, masked)
    mbarrier.wait(k.full.index(0), 0)
    at = 0  # rows after the first of its head that is walked
    for i in range(tile.steps):
        qi = i % z.Q_STAGES
        yi = i % z.DY_STAGES
        zero = i >> 30  # to the compiler it is not: it would keep the descriptors of K in registers
        mbarrier.wait(q.full.index(qi), (i // z.Q_STAGES) & 1)
        s = times_rows(k, zero, q, qi, z)
        base = row_values(lse, qi, z)
        s = warpgroup_mma_wait(0, deps=(s,))
        p = gl.exp2(s * scale - base)
        mbarrier.arrive(q.free.index(qi), count=1)
        if at < masked:
            p = seen(p, at, notes, 0, z)
        mbarrier.wait(p_free.index(0), (i & 1) ^ 1)
        p_shared.store(p)
        mbarrier.arrive(p_full.index(0), count=1)
        mbarrier.wait(dy.full.index(yi), (i // z.DY_STAGES) & 1)
        dv, dv2 = add_product(gl.convert_layout(p.to(q.first.dtype), z.P), dy, yi, dv, dv2, z)
        dv, dv2 = wait_both(dv, dv2, z)
        mbarrier.arrive(dy.free.index(yi), count=1)
        at += z.BLOCK_M
        at = gl.where(at == rows, 0, at)
    # the last rows of dY carry dV out, once both groups are done with them
    j = tile.steps - 1
    slot = j % z.DY_STAGES
    mbarrier.wait(dy.free.index(slot), (j // z.DY_STAGES) & 1)
    put_both(dv, dv2, dy, slot, DV, notes, z)


@gluon.jit
def make_dk(
    z, tile, notes, DK, v, q, dy, delta, p_shared, p_full, p_free, ds, ds_full, ds_free, scale
):  # fmt: skip
    dk, dk2 = zeros_of(z)
    mbarrier.wait(v.full.index(0), 0)
    for i in range(tile.steps):
        qi = i % z.Q_STAGES
        yi = i % z.DY_STAGES
        zero = i >> 30
        mbarrier.wait(dy.full.index(yi), (i // z.DY_STAGES) & 1)
        dp = times_rows(v, zero, dy, yi, z)
        base = row_values(delta, yi, z)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        mbarrier.wait(p_full.index(0), i & 1)
        d = (p_shared.load(z.S) * (dp - base)).to(q.first.dtype)
        mbarrier.arrive(p_free.index(0), count=1)
        mbarrier.arrive(dy.free.index(yi), count=1)
        c = i % DS_SLOTS
        mbarrier.wait(ds_free.index(c), ((i // DS_SLOTS) & 1) ^ 1)
        ds.index(c).store(d)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(c), count=1)
        mbarrier.wait(q.full.index(qi), (i // z.Q_STAGES) & 1)
        dk, dk2 = add_product(gl.convert_layout(d, z.P), q, qi, dk, dk2, z)
        dk, dk2 = wait_both(dk, dk2, z)
        mbarrier.arrive(q.free.index(qi), count=1)
    # the last rows of Q carry dK out: S of them was done before P came
    natural = scale * 0.6931471805599453
    put_both(dk * natural, dk2 * natural, q, (tile.steps - 1) % z.Q_STAGES, DK, notes, z)


@gluon.jit
def make_dq(z, tile, DQ32, k, ds, ds_full, ds_free, padded, heads):
    columns: gl.constexpr = z.D1 + z.D2
    rows = tile.rows
    to = DQ32 + ((tile.batch * heads + tile.head).to(gl.int64) * padded + tile.row) * columns
    jump = padded - rows + z.BLOCK_M  # from the last block of a head to the first of the next
    mbarrier.wait(k.full.index(0), 0)
    at = 0
    for i in range(tile.steps):
        c = i % DS_SLOTS
        mbarrier.wait(ds_full.index(c), (i // DS_SLOTS) & 1)
        a = ds.index(c).permute((1, 0))
        for n in gl.static_range(z.D1 // PART):
            part = k.first.index(i >> 30).reshape([KEYS, z.D1]).slice(n * PART, PART, dim=1)
            dq = times_keys(a, part)
            if z.D2 == 0 and n == z.D1 // PART - 1:
                mbarrier.arrive(ds_free.index(c), count=1)
            add_dq(to + n * (64 * PART), dq)
            gl.thread_barrier()
        for n in gl.static_range(z.D2 // PART):
            part = k.second.index(i >> 30).reshape([KEYS, z.D2]).slice(n * PART, PART, dim=1)
            dq = times_keys(a, part)
            if n == z.D2 // PART - 1:
                mbarrier.arrive(ds_free.index(c), count=1)
            add_dq(to + (64 * z.D1 + n * (64 * PART)), dq)
            gl.thread_barrier()
        at += z.BLOCK_M
        last = at == rows
        to += gl.where(last, jump, z.BLOCK_M).to(gl.int64) * columns
        at = gl.where(last, 0, at)


@gluon.jit
def times_keys(ds, keys):
    """dS keys of 64 rows, done."""
    columns: gl.constexpr = keys.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )
    dq = gl.zeros([64, columns], gl.float32, layout)
    dq = warpgroup_mma(ds, keys, dq, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=(dq,))
