"""Grouped matrix products by warp-specialised kernels (Gluon, Hopper), with rows in the padded order of ``routing``.

A producer loads both operands into a pipeline of stages; two consumer warp groups own 64 of a tile's 128 rows each and
multiply with wgmma. Rows in the padded order and weights come by TMA, which one warp starts. ``up`` and
``down_backward`` gather tokens by cp.async, 16 bytes a thread and copy: then the producer is a warp group. For weights'
gradients ``gather`` has written tokens in the padded order: many tiles read the same ones, and TMA reads them faster.
The kernels are persistent: the producer loads the next tile while the consumers finish this one, and their results
leave through a buffer in shared memory.

Weights are tensor maps over (expert, row / PAIR, row % PAIR, column). Of gate-up weights PAIR is 2 and the strides are
such that rows of gate and up alternate: column 2 i of a product is gate i, 2 i + 1 up i, as ``matmul_tiles`` has them.
Of the others PAIR is 1. What lies outside of a map reads as zero and is not written.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

BLOCK_M = gl.constexpr(128)  # rows of a tile: the unit of the padded order
GROUP_M = gl.constexpr(64)  # a warp group's
BLOCK_K = gl.constexpr(64)  # the depth of a stage: 128 bytes
PANEL = gl.constexpr(64)  # columns that one TMA copy moves
OUT = gl.constexpr(128)  # columns of a warp group's output buffer
THREADS = gl.constexpr(128)  # of a warp group
GATHERED_STAGE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


@gluon.constexpr_function
def wgmma_layout(columns):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def pairs_layout(columns):
    """Of two values for each of a product's [64, columns / 2], side by side: a thread has both."""
    columns = getattr(columns, "value", columns)
    blocks = [[0, 16 << i] for i in range((columns // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0], *blocks],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, columns],
    )


@aggregate
class Pipeline:
    """Stages of both operands, with a full and an empty mbarrier each."""

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr
    GATHERED: gl.constexpr  # whether threads copy the first operand, not TMA

    @gluon.constexpr_function
    def __init__(self, a, b, full, empty, STAGES, GATHERED=0):
        self.a, self.b, self.full, self.empty = a, b, full, empty
        self.STAGES, self.GATHERED = gl.constexpr(STAGES), gl.constexpr(GATHERED)


@gluon.jit
def mbarriers(count: gl.constexpr, arrivals: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(made.index(i), count=arrivals)
    return made


@aggregate
class Tiles:
    """A program's tiles: number program id, then on by as many as there are programs. GROUP row tiles share a weight's
    columns while they are in the L2 cache."""

    rows: gl.tensor  # tiles of rows that are used
    columns: gl.tensor
    GROUP: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, rows, columns, GROUP):
        self.rows, self.columns = rows, columns
        self.GROUP = gl.constexpr(GROUP)

    @gluon.jit
    def decode(self, t):
        """(row tile, column tile) of tile t."""
        before = t // (self.GROUP * self.columns) * self.GROUP
        width = gl.minimum(self.GROUP, self.rows - before)
        inside = t - before * self.columns
        column = inside // width
        return before + inside - column * width, column


@gluon.jit
def load_stage(i, pipe, BYTES: gl.constexpr):
    """Wait until the i-th stage is empty; its full mbarrier, which now expects BYTES."""
    mbarrier.wait(pipe.empty.index(i % pipe.STAGES), ((i // pipe.STAGES) & 1) ^ 1)
    full = pipe.full.index(i % pipe.STAGES)
    mbarrier.expect(full, BYTES)
    return full


@gluon.jit
def produce(
    A, B, TILE_EXPERT, depth, tiles, pipe, BLOCK_N: gl.constexpr, PAIR: gl.constexpr, BY_ROWS: gl.constexpr
):
    """The producer warp of products of rows and weights. ``BY_ROWS``: a weight's rows are the depth, not the
    columns."""
    BYTES: gl.constexpr = (BLOCK_M + BLOCK_N) * BLOCK_K * 2
    i = 0
    for t in range(gl.program_id(0), tiles.rows * tiles.columns, gl.num_programs(0)):
        row, column = tiles.decode(t)
        expert = gl.load(TILE_EXPERT + row)
        for k in range(0, depth, BLOCK_K):
            full = load_stage(i, pipe, BYTES)
            stage = i % pipe.STAGES
            tma.async_copy_global_to_shared(A, [row * BLOCK_M, k], full, pipe.a.index(stage))
            load_weight(B, expert, k, column, full, pipe, stage, BLOCK_N, PAIR, BY_ROWS)
            i += 1


@gluon.jit
def produce_gathered(
    X, stride, B, ROW_TOKEN, TILE_EXPERT, depth, tiles, pipe, BLOCK_N: gl.constexpr, PAIR: gl.constexpr,
    BY_ROWS: gl.constexpr,
):  # fmt: skip
    """``produce`` with A's rows gathered from tokens X, zeros in the padding."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    lines = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    columns = gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
    i = 0
    for t in range(gl.program_id(0), tiles.rows * tiles.columns, gl.num_programs(0)):
        row, column = tiles.decode(t)
        expert = gl.load(TILE_EXPERT + row)
        token = gl.load(ROW_TOKEN + row * BLOCK_M + lines)
        known = (token >= 0)[:, None]
        at = (token.to(gl.int64) * stride)[:, None] + columns[None, :]
        for k in range(0, depth, BLOCK_K):
            full = load_stage(i, pipe, BLOCK_N * BLOCK_K * 2)
            stage = i % pipe.STAGES
            load_weight(B, expert, k, column, full, pipe, stage, BLOCK_N, PAIR, BY_ROWS)
            mask = known & (columns < depth - k)[None, :]
            async_copy.async_copy_global_to_shared(pipe.a.index(stage), X + k + at, mask=mask)
            async_copy.mbarrier_arrive(full, increment_count=False)
            i += 1
    async_copy.wait_group(0)


@gluon.jit
def load_weight(
    B, expert, k, column, full, pipe, stage, BLOCK_N: gl.constexpr, PAIR: gl.constexpr, BY_ROWS: gl.constexpr
):
    """Start to load BLOCK_N columns of a weight at depth k."""
    if BY_ROWS:
        for c in gl.static_range(BLOCK_N // PANEL):
            to = pipe.b.index(stage).slice(c * PANEL, PANEL, dim=3)
            at = column * BLOCK_N + c * PANEL
            tma.async_copy_global_to_shared(B, [expert, k // PAIR, 0, at], full, to)
    else:
        at = column * (BLOCK_N // PAIR)
        tma.async_copy_global_to_shared(B, [expert, at, 0, k], full, pipe.b.index(stage))


@gluon.jit
def multiply(
    i, steps, pipe, BLOCK_N: gl.constexpr, BY_ROWS: gl.constexpr, A_BY_ROWS: gl.constexpr, g: gl.constexpr
):
    """Warp group g's [64, BLOCK_N] product over ``steps`` stages, of which the i-th is the first."""
    acc = gl.zeros([GROUP_M, BLOCK_N], gl.float32, wgmma_layout(BLOCK_N))
    for n in range(i, i + steps):
        stage = n % pipe.STAGES
        mbarrier.wait(pipe.full.index(stage), (n // pipe.STAGES) & 1)
        if pipe.GATHERED:
            fence_async_shared()  # wgmma reads what threads have copied
        if A_BY_ROWS:
            a = pipe.a.index(stage).slice(g * GROUP_M, GROUP_M, dim=1).permute((1, 0))
        else:
            a = pipe.a.index(stage).slice(g * GROUP_M, GROUP_M, dim=0)
        if BY_ROWS:
            b = pipe.b.index(stage).reshape([BLOCK_K, BLOCK_N])
        else:
            b = pipe.b.index(stage).reshape([BLOCK_N, BLOCK_K]).permute((1, 0))
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        if n > i:
            mbarrier.arrive(pipe.empty.index((n - 1) % pipe.STAGES), count=1)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    if steps > 0:
        mbarrier.arrive(pipe.empty.index((i + steps - 1) % pipe.STAGES), count=1)
    return acc


@gluon.jit
def store_tile(values, to, row, column, buffer):
    """Start to store [64, OUT] at a row and column of a map of rows; the buffer's last tile is read first."""
    tma.store_wait(0)
    buffer.reshape([GROUP_M, OUT]).store(values)
    fence_async_shared()
    for c in gl.static_range(OUT // PANEL):
        part = buffer.reshape([GROUP_M, OUT]).slice(c * PANEL, PANEL, dim=1)
        tma.async_copy_shared_to_global(to, [row, column + c * PANEL], part)


@gluon.jit
def halves(values):
    """The left and right half of the columns; no value moves between threads."""
    N: gl.constexpr = values.shape[1]
    return gl.split(values.reshape([GROUP_M, 2, N // 2]).permute((0, 2, 1)))


@gluon.jit
def consume_product(
    OUTPUT, depth, tiles, pipe, buffer, BLOCK_N: gl.constexpr, BY_ROWS: gl.constexpr, g: gl.constexpr
):  # fmt: skip
    """Consumer warp group g: the product as it is."""
    steps = (depth + (BLOCK_K - 1)) // BLOCK_K
    i = 0
    for t in range(gl.program_id(0), tiles.rows * tiles.columns, gl.num_programs(0)):
        acc = multiply(i, steps, pipe, BLOCK_N, BY_ROWS, False, g)
        i += steps
        row, column = tiles.decode(t)
        left, right = halves(acc.to(OUTPUT.dtype))
        store_tile(left, OUTPUT, row * BLOCK_M + g * GROUP_M, column * BLOCK_N, buffer)
        store_tile(right, OUTPUT, row * BLOCK_M + g * GROUP_M, column * BLOCK_N + OUT, buffer)
    tma.store_wait(0)


@gluon.jit
def product(
    OUTPUT, A, B, TILE_EXPERT, depth, tiles, columns,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, PAIR: gl.constexpr, BY_ROWS: gl.constexpr,
    B_ROWS: gl.constexpr, WARP_GROUPS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """OUTPUT[rows, columns] = A[rows, depth] times each row tile's expert's weight B."""
    gl.static_assert(WARP_GROUPS == 2)
    a = gl.allocate_shared_memory(A.dtype, [STAGES, BLOCK_M, BLOCK_K], A.layout)
    b = weight_stages(B, STAGES, BLOCK_N, BY_ROWS)
    pipe = Pipeline(a, b, mbarriers(STAGES, 1), mbarriers(STAGES, WARP_GROUPS), STAGES)
    out = gl.allocate_shared_memory(OUTPUT.dtype, [WARP_GROUPS, GROUP_M, OUT], OUTPUT.layout)
    fence_async_shared()
    work = Tiles(gl.load(TILE_EXPERT + tiles), columns, GROUP)
    gl.warp_specialize(
        [
            (consume_product, (OUTPUT, depth, work, pipe, out.index(0), BLOCK_N, BY_ROWS, 0)),
            (consume_product, (OUTPUT, depth, work, pipe, out.index(1), BLOCK_N, BY_ROWS, 1)),
            (produce, (A, B, TILE_EXPERT, depth, work, pipe, BLOCK_N, PAIR, BY_ROWS)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


@gluon.jit
def weight_stages(B, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, BY_ROWS: gl.constexpr):
    """Stages of a weight's tiles: [64, BLOCK_N] by rows, else a box of the map as it is."""
    if BY_ROWS:
        return gl.allocate_shared_memory(
            B.dtype, [STAGES, 1, B.block_shape[1], B.block_shape[2], BLOCK_N], B.layout
        )
    else:
        return gl.allocate_shared_memory(
            B.dtype, [STAGES, 1, B.block_shape[1], B.block_shape[2], BLOCK_K], B.layout
        )


@gluon.jit
def consume_up(
    ACT, PRE, ROW_PAIR, depth, inner, save, tiles, pipe, buffer, BLOCK_N: gl.constexpr, g: gl.constexpr
):
    """Consumer warp group g: SwiGLU of the interleaved product, which with ``save`` goes to PRE."""
    steps = (depth + (BLOCK_K - 1)) // BLOCK_K
    i = 0
    for t in range(gl.program_id(0), tiles.rows * tiles.columns, gl.num_programs(0)):
        acc = multiply(i, steps, pipe, BLOCK_N, False, False, g)
        i += steps
        tile, column = tiles.decode(t)
        row = tile * BLOCK_M + g * GROUP_M
        gate, up = gl.split(acc.reshape([GROUP_M, OUT, 2]))
        act = gate / (1.0 + gl.exp(-gate)) * up
        if save != 0:
            left, right = halves(acc.to(ACT.dtype))
            scatter_rows(left, PRE, ROW_PAIR + row, column * BLOCK_N, 2 * inner, buffer)
            scatter_rows(right, PRE, ROW_PAIR + row, column * BLOCK_N + OUT, 2 * inner, buffer)
        store_tile(act.to(ACT.dtype), ACT, row, column * OUT, buffer)
    tma.store_wait(0)


@gluon.jit
def scatter_rows(values, to, PAIRS, column, width, buffer):
    """Write [64, OUT] to the rows of 64 pairs, through shared memory: a row of the tile is contiguous."""
    tma.store_wait(0)
    tile = buffer.reshape([GROUP_M, OUT])
    tile.store(values)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    pair = gl.load(PAIRS + gl.arange(0, GROUP_M, gl.SliceLayout(1, layout)))
    at = column + gl.arange(0, OUT, gl.SliceLayout(0, layout))
    mask = (pair >= 0)[:, None] & (at < width)[None, :]
    gl.store(to + (pair.to(gl.int64) * width)[:, None] + at[None, :], tile.load(layout), mask=mask)


@gluon.jit
def gathering_pipeline(
    B, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, BY_ROWS: gl.constexpr, WARP_GROUPS: gl.constexpr
):
    """The pipeline of ``produce_gathered``, for tokens of B's dtype."""
    a = gl.allocate_shared_memory(B.dtype, [STAGES, BLOCK_M, BLOCK_K], GATHERED_STAGE)
    b = weight_stages(B, STAGES, BLOCK_N, BY_ROWS)
    full = mbarriers(STAGES, THREADS + 1)  # those that copy, and the one that starts TMA
    return Pipeline(a, b, full, mbarriers(STAGES, WARP_GROUPS), STAGES, True)


@gluon.jit
def up(
    ACT, PRE, X, B, ROW_PAIR, ROW_TOKEN, TILE_EXPERT, stride, hidden, inner, tiles, columns, save,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, B_ROWS: gl.constexpr, WARP_GROUPS: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """``matmul_tiles.up``; B has PAIR 2. ACT is a map of boxes of 64 columns."""
    gl.static_assert(WARP_GROUPS == 2)
    pipe = gathering_pipeline(B, STAGES, BLOCK_N, False, WARP_GROUPS)
    out = gl.allocate_shared_memory(ACT.dtype, [WARP_GROUPS, GROUP_M, OUT], ACT.layout)
    fence_async_shared()
    work = Tiles(gl.load(TILE_EXPERT + tiles), columns, GROUP)
    gl.warp_specialize(
        [
            (consume_up, (ACT, PRE, ROW_PAIR, hidden, inner, save, work, pipe, out.index(0), BLOCK_N, 0)),
            (consume_up, (ACT, PRE, ROW_PAIR, hidden, inner, save, work, pipe, out.index(1), BLOCK_N, 1)),
            (produce_gathered, (X, stride, B, ROW_TOKEN, TILE_EXPERT, hidden, work, pipe, BLOCK_N, 2, False)),
        ],
        [4, 4],
        [REGISTERS, 512 - 2 * REGISTERS],
    )


@gluon.jit
def consume_down_backward(
    DPRE, ACT, DWEIGHTS, PRE, WEIGHTS, ROW_PAIR, depth, inner, pairs, tiles, pipe, buffer, BLOCK_N: gl.constexpr,
    g: gl.constexpr,
):  # fmt: skip
    """Consumer warp group g: SwiGLU's gradient, a panel of columns at a time."""
    steps = (depth + (BLOCK_K - 1)) // BLOCK_K
    layout: gl.constexpr = wgmma_layout(2 * PANEL)
    i = 0
    for t in range(gl.program_id(0), tiles.rows * tiles.columns, gl.num_programs(0)):
        acc = multiply(i, steps, pipe, BLOCK_N, True, False, g)
        i += steps
        tile, column = tiles.decode(t)
        row = tile * BLOCK_M + g * GROUP_M
        pair = gl.load(ROW_PAIR + row + gl.arange(0, GROUP_M, gl.SliceLayout(1, layout)))
        known = pair >= 0
        weight = gl.load(WEIGHTS + pair, mask=known, other=0.0)
        left, right = halves(acc)
        at = column * BLOCK_N
        total = panel_backward(left, DPRE, ACT, PRE, pair, weight, row, at, inner, buffer)
        total += panel_backward(right, DPRE, ACT, PRE, pair, weight, row, at + PANEL, inner, buffer)
        gl.store(DWEIGHTS + column.to(gl.int64) * pairs + pair, total, mask=known)
    tma.store_wait(0)


@gluon.jit
def panel_backward(dact, DPRE, ACT, PRE, pair, weight, row, column, inner, buffer):
    """[64, 64] of the activations' gradient: its gradients of gate and up, and the weighted activations, go out; their
    part of the routing weights' gradient, one a row. By halves: registers are few beside the other panels."""
    left, right = halves(dact)
    tile = buffer.reshape([GROUP_M, OUT])
    tma.store_wait(0)  # the buffer's last tile is read
    first, total = half_backward(left, PRE, pair, weight, 2 * column, inner, tile.slice(0, PANEL, dim=1))
    second, more = half_backward(
        right, PRE, pair, weight, 2 * column + PANEL, inner, tile.slice(PANEL, PANEL, dim=1)
    )
    fence_async_shared()
    for c in gl.static_range(OUT // PANEL):
        part = tile.slice(c * PANEL, PANEL, dim=1)
        tma.async_copy_shared_to_global(DPRE, [row, 2 * column + c * PANEL], part)
    tma.store_wait(0)
    act = gl.join(first, second).permute((0, 2, 1)).reshape([GROUP_M, PANEL])
    part = tile.slice(0, PANEL, dim=1)
    part.store(act)
    fence_async_shared()
    tma.async_copy_shared_to_global(ACT, [row, column], part)
    return total + more


@gluon.jit
def half_backward(dact, PRE, pair, weight, column, inner, to):
    """Write the gradients of [64, 32] gates and ups, interleaved, to shared memory; (the weighted activations, their
    part of the routing weights' gradient)."""
    N: gl.constexpr = dact.shape[1]
    both: gl.constexpr = pairs_layout(2 * N)
    own: gl.constexpr = wgmma_layout(N)
    dact = gl.convert_layout(dact, own)
    pair = gl.convert_layout(pair, gl.SliceLayout(1, both))
    at = column + gl.arange(0, 2 * N, gl.SliceLayout(0, both))
    mask = (pair >= 0)[:, None] & (at < 2 * inner)[None, :]
    pre = gl.load(PRE + (pair.to(gl.int64) * (2 * inner))[:, None] + at[None, :], mask=mask, other=0.0)
    gate, up = gl.split(pre.reshape([GROUP_M, N, 2]))
    gate = gl.convert_layout(gate.to(gl.float32), own)
    up = gl.convert_layout(up.to(gl.float32), own)
    sigmoid = 1.0 / (1.0 + gl.exp(-gate))
    silu = gate * sigmoid
    act = silu * up
    total = gl.sum(dact * act, 1)
    share = gl.expand_dims(gl.convert_layout(weight, gl.SliceLayout(1, own)), 1)
    dact *= share
    dgate = dact * up * (silu * (1.0 - sigmoid) + sigmoid)
    to.store(gl.join(dgate, dact * silu).reshape([GROUP_M, 2 * N]).to(to.dtype))
    return (act * share).to(to.dtype), gl.convert_layout(total, gl.SliceLayout(1, wgmma_layout(2 * PANEL)))


@gluon.jit
def down_backward(
    DPRE, ACT, DWEIGHTS, DOUT, B, PRE, WEIGHTS, ROW_PAIR, ROW_TOKEN, TILE_EXPERT, stride, hidden, inner, pairs, tiles,
    columns,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, WARP_GROUPS: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """``matmul_tiles.down_backward``; B has PAIR 1 and is read by rows."""
    gl.static_assert(WARP_GROUPS == 2 and BLOCK_N == 2 * PANEL)
    pipe = gathering_pipeline(B, STAGES, BLOCK_N, True, WARP_GROUPS)
    out = gl.allocate_shared_memory(DPRE.dtype, [WARP_GROUPS, GROUP_M, OUT], DPRE.layout)
    fence_async_shared()
    work = Tiles(gl.load(TILE_EXPERT + tiles), columns, GROUP)
    gl.warp_specialize(
        [
            (
                consume_down_backward,
                (
                    DPRE, ACT, DWEIGHTS, PRE, WEIGHTS, ROW_PAIR, hidden, inner, pairs, work, pipe, out.index(0),
                    BLOCK_N, 0,
                ),
            ),
            (
                consume_down_backward,
                (
                    DPRE, ACT, DWEIGHTS, PRE, WEIGHTS, ROW_PAIR, hidden, inner, pairs, work, pipe, out.index(1),
                    BLOCK_N, 1,
                ),
            ),
            (produce_gathered, (DOUT, stride, B, ROW_TOKEN, TILE_EXPERT, hidden, work, pipe, BLOCK_N, 1, True)),
        ],
        [4, 4],
        [REGISTERS, 512 - 2 * REGISTERS],
    )  # fmt: skip


@gluon.jit
def produce_weight(A, B, OFFSETS, experts, row_tiles, column_tiles, pipe, BLOCK_N: gl.constexpr):
    """The producer warp of weights' gradients: both operands are rows of an expert, [64, 128] and [64, BLOCK_N]."""
    BYTES: gl.constexpr = (BLOCK_M + BLOCK_N) * BLOCK_K * 2
    each = row_tiles * column_tiles
    i = 0
    for t in range(gl.program_id(0), experts * each, gl.num_programs(0)):
        expert = t // each
        row = (t - expert * each) % row_tiles * BLOCK_M
        column = (t - expert * each) // row_tiles * BLOCK_N
        for k in range(gl.load(OFFSETS + expert), gl.load(OFFSETS + expert + 1), BLOCK_K):
            full = load_stage(i, pipe, BYTES)
            stage = i % pipe.STAGES
            for c in gl.static_range(BLOCK_M // PANEL):
                to = pipe.a.index(stage).slice(c * PANEL, PANEL, dim=1)
                tma.async_copy_global_to_shared(A, [k, row + c * PANEL], full, to)
            for c in gl.static_range(BLOCK_N // PANEL):
                to = pipe.b.index(stage).slice(c * PANEL, PANEL, dim=1)
                tma.async_copy_global_to_shared(B, [k, column + c * PANEL], full, to)
            i += 1


@gluon.jit
def consume_weight(
    DWEIGHT, OFFSETS, experts, row_tiles, column_tiles, pipe, buffer, BLOCK_N: gl.constexpr, PAIR: gl.constexpr,
    g: gl.constexpr,
):  # fmt: skip
    """Consumer warp group g: 64 rows of an expert's gradient."""
    each = row_tiles * column_tiles
    i = 0
    for t in range(gl.program_id(0), experts * each, gl.num_programs(0)):
        expert = t // each
        steps = (gl.load(OFFSETS + expert + 1) - gl.load(OFFSETS + expert)) // BLOCK_K
        acc = multiply(i, steps, pipe, BLOCK_N, True, True, g)
        i += steps
        row = (t - expert * each) % row_tiles * BLOCK_M + g * GROUP_M
        column = (t - expert * each) // row_tiles * BLOCK_N
        left, right = halves(acc.to(DWEIGHT.dtype))
        store_weight(left, DWEIGHT, expert, row, column, buffer, PAIR)
        store_weight(right, DWEIGHT, expert, row, column + OUT, buffer, PAIR)
    tma.store_wait(0)


@gluon.jit
def store_weight(values, to, expert, row, column, buffer, PAIR: gl.constexpr):
    """``store_tile`` to a map of weights."""
    tma.store_wait(0)
    buffer.reshape([GROUP_M, OUT]).store(values)
    fence_async_shared()
    for c in gl.static_range(OUT // PANEL):
        part = buffer.slice(c * PANEL, PANEL, dim=3)
        tma.async_copy_shared_to_global(to, [expert, row // PAIR, 0, column + c * PANEL], part)


@gluon.jit
def weight_backward(
    DWEIGHT, A, B, OFFSETS, experts, row_tiles, column_tiles,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PAIR: gl.constexpr, B_ROWS: gl.constexpr, WARP_GROUPS: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """DWEIGHT[experts, m, n], a map of weights, is A^T B over each expert's rows: A[rows, m], B[rows, n]. An expert
    without rows gets zeros."""
    gl.static_assert(WARP_GROUPS == 2)
    a = gl.allocate_shared_memory(A.dtype, [STAGES, BLOCK_K, BLOCK_M], A.layout)
    b = gl.allocate_shared_memory(B.dtype, [STAGES, BLOCK_K, BLOCK_N], B.layout)
    pipe = Pipeline(a, b, mbarriers(STAGES, 1), mbarriers(STAGES, WARP_GROUPS), STAGES)
    out = gl.allocate_shared_memory(DWEIGHT.dtype, [WARP_GROUPS, 1, B_ROWS, PAIR, OUT], DWEIGHT.layout)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                consume_weight,
                (DWEIGHT, OFFSETS, experts, row_tiles, column_tiles, pipe, out.index(0), BLOCK_N, PAIR, 0),
            ),
            (
                consume_weight,
                (DWEIGHT, OFFSETS, experts, row_tiles, column_tiles, pipe, out.index(1), BLOCK_N, PAIR, 1),
            ),
            (produce_weight, (A, B, OFFSETS, experts, row_tiles, column_tiles, pipe, BLOCK_N)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
