"""Grouped matrix products by warp-specialised kernels (Gluon, Hopper), with rows in the padded order of ``routing``.

A producer loads both operands into a pipeline of stages; two consumer warp groups own 64 of a tile's 128 rows each and
multiply with wgmma. Rows in the padded order and weights come by TMA, which one warp starts. ``up`` gathers tokens by
cp.async, 16 bytes a thread and copy: then the producer is a warp group. For the backward ``gather`` has written tokens
in the padded order: many tiles read the same ones, and TMA reads them faster.
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
    """Consumer warp group g: SwiGLU's gradient, half a panel of columns at a time. Projections are loaded one half
    ahead, the first before the product."""
    steps = (depth + (BLOCK_K - 1)) // BLOCK_K
    layout: gl.constexpr = gl.SliceLayout(1, wgmma_layout(PANEL))
    i = 0
    for t in range(gl.program_id(0), tiles.rows * tiles.columns, gl.num_programs(0)):
        tile, column = tiles.decode(t)
        row = tile * BLOCK_M + g * GROUP_M
        pair = gl.load(ROW_PAIR + row + gl.arange(0, GROUP_M, layout))
        known = pair >= 0
        weight = gl.load(WEIGHTS + pair, mask=known, other=0.0)
        at = column * BLOCK_N
        pre = load_projections(PRE, pair, at, inner)
        acc = multiply(i, steps, pipe, BLOCK_N, True, False, g)
        i += steps
        left, right = halves(acc)
        total, pre = half_backward(left, pre, DPRE, ACT, PRE, pair, weight, row, at, inner, buffer, True)
        more, pre = half_backward(
            right, pre, DPRE, ACT, PRE, pair, weight, row, at + 2 * PANEL, inner, buffer, False
        )
        gl.store(DWEIGHTS + column.to(gl.int64) * pairs + pair, total + more, mask=known)
    tma.store_wait(0)


@gluon.jit
def half_backward(dact, pre, DPRE, ACT, PRE, pair, weight, row, column, inner, buffer, NEXT: gl.constexpr):
    """``panel_backward`` of two panels."""
    left, right = halves(dact)
    total, pre = panel_backward(left, pre, DPRE, ACT, PRE, pair, weight, row, column, inner, buffer, True)
    more, pre = panel_backward(
        right, pre, DPRE, ACT, PRE, pair, weight, row, column + PANEL, inner, buffer, NEXT
    )
    return total + more, pre


@gluon.jit
def load_projections(PRE, pair, column, inner):
    """[64, 32] words of 32 bits, a gate and an up each: bf16 values alone would take a register each."""
    layout: gl.constexpr = wgmma_layout(PANEL // 2)
    pair = gl.convert_layout(pair, gl.SliceLayout(1, layout))
    at = column + gl.arange(0, PANEL // 2, gl.SliceLayout(0, layout))
    mask = (pair >= 0)[:, None] & (at < inner)[None, :]
    return gl.load(PRE + (pair.to(gl.int64) * inner)[:, None] + at[None, :], mask=mask, other=0)


@gluon.jit
def panel_backward(dact, pre, DPRE, ACT, PRE, pair, weight, row, column, inner, buffer, NEXT: gl.constexpr):
    """[64, 64] of the activations' gradient: its gradients of gate and up, and the weighted activations, go out; (their
    part of the routing weights' gradient, one a row; the projections that the NEXT panel begins with)."""
    left, right = halves(dact)
    tile = buffer.reshape([GROUP_M, OUT])
    gradients, act = tile.slice(0, PANEL, dim=1), tile.slice(PANEL, PANEL, dim=1)
    after = load_projections(PRE, pair, column + PANEL // 2, inner)
    total = half_panel_backward(left, pre, weight, gradients, act.slice(0, PANEL // 2, dim=1))
    fence_async_shared()
    tma.async_copy_shared_to_global(DPRE, [row, 2 * column], gradients)
    if NEXT:
        pre = load_projections(PRE, pair, column + PANEL, inner)
    total += half_panel_backward(right, after, weight, gradients, act.slice(PANEL // 2, PANEL // 2, dim=1))
    fence_async_shared()
    tma.async_copy_shared_to_global(DPRE, [row, 2 * column + PANEL], gradients)
    tma.async_copy_shared_to_global(ACT, [row, column], act)
    return total, pre


@gluon.jit
def half_panel_backward(dact, pre, weight, to, to_act):
    """Write the gradients of [64, 32] gates and ups, interleaved, and the weighted activations to shared memory, when
    what lay there is read; their part of the routing weights' gradient."""
    N: gl.constexpr = dact.shape[1]
    own: gl.constexpr = wgmma_layout(N)
    dact = gl.convert_layout(dact, own)
    gate, up = projections(pre, to.dtype)
    slope = sigmoid(gate)
    silu = gate * slope
    act = silu * up
    total = gl.sum(dact * act, 1)
    share = gl.expand_dims(gl.convert_layout(weight, gl.SliceLayout(1, own)), 1)
    dact *= share
    dgate = dact * up * (silu * (1.0 - slope) + slope)
    both = gl.join(dgate, dact * silu).reshape([GROUP_M, 2 * N]).to(to.dtype)
    weighted = (act * share).to(to.dtype)
    tma.store_wait(0)
    to.store(both)
    to_act.store(weighted)
    return gl.convert_layout(total, gl.SliceLayout(1, wgmma_layout(PANEL)))


@gluon.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) in four instructions, which flush subnormal numbers; the compiler's exp and division, which do
    not, take eleven more."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 %e; mul.ftz.f32 %e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 %e, %e; add.ftz.f32 %e, %e, 0f3F800000; "
        "rcp.approx.ftz.f32 $0, %e; }",
        "=f,f", [x], gl.float32, True, 1,
    )  # fmt: skip


@gluon.jit
def projections(words, dtype: gl.constexpr):
    """(gate, up) in float32 of the low and high halves."""
    low = words.to(gl.int16).to(dtype, bitcast=True)
    high = (words >> 16).to(gl.int16).to(dtype, bitcast=True)
    return low.to(gl.float32), high.to(gl.float32)


@gluon.jit
def down_backward(
    DPRE, ACT, DWEIGHTS, A, B, PRE, WEIGHTS, ROW_PAIR, TILE_EXPERT, depth, inner, pairs, tiles, columns,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, WARP_GROUPS: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """``matmul_tiles.down_backward`` of gathered gradients A; B has PAIR 1 and is read by rows, PRE by words of 32
    bits."""
    gl.static_assert(WARP_GROUPS == 2 and BLOCK_N == 4 * PANEL)
    a = gl.allocate_shared_memory(A.dtype, [STAGES, BLOCK_M, BLOCK_K], A.layout)
    b = weight_stages(B, STAGES, BLOCK_N, True)
    pipe = Pipeline(a, b, mbarriers(STAGES, 1), mbarriers(STAGES, WARP_GROUPS), STAGES)
    out = gl.allocate_shared_memory(DPRE.dtype, [WARP_GROUPS, GROUP_M, OUT], DPRE.layout)
    fence_async_shared()
    work = Tiles(gl.load(TILE_EXPERT + tiles), columns, GROUP)
    gl.warp_specialize(
        [
            (
                consume_down_backward,
                (
                    DPRE, ACT, DWEIGHTS, PRE, WEIGHTS, ROW_PAIR, depth, inner, pairs, work, pipe, out.index(0),
                    BLOCK_N, 0,
                ),
            ),
            (
                consume_down_backward,
                (
                    DPRE, ACT, DWEIGHTS, PRE, WEIGHTS, ROW_PAIR, depth, inner, pairs, work, pipe, out.index(1),
                    BLOCK_N, 1,
                ),
            ),
            (produce, (A, B, TILE_EXPERT, depth, work, pipe, BLOCK_N, 1, True)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


@aggregate
class ExpertTiles:
    """A program's tiles of weights' gradients, as ``Tiles`` an expert after the other."""

    OFFSETS: gl.tensor
    TOTALS: gl.tensor
    experts: gl.tensor
    rows: gl.tensor  # tiles of rows of a weight
    columns: gl.tensor
    GROUP: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, OFFSETS, TOTALS, experts, rows, columns, GROUP):
        self.OFFSETS, self.TOTALS = OFFSETS, TOTALS
        self.experts, self.rows, self.columns = experts, rows, columns
        self.GROUP = gl.constexpr(GROUP)

    @gluon.jit
    def count(self):
        return self.experts * self.rows * self.columns

    @gluon.jit
    def decode(self, t):
        """(expert, row tile, column tile, steps) of tile t. What is beyond the last step of an expert is padding."""
        each = self.rows * self.columns
        expert = t // each
        row, column = Tiles(self.rows, self.columns, self.GROUP).decode(t - expert * each)
        return expert, row, column, (gl.load(self.TOTALS + expert) + (BLOCK_K - 1)) // BLOCK_K


@gluon.jit
def produce_weight(A, B, tiles, pipe, BLOCK_N: gl.constexpr):
    """The producer warp of weights' gradients: both operands are rows of an expert, [64, 128] and [64, BLOCK_N]."""
    BYTES: gl.constexpr = (BLOCK_M + BLOCK_N) * BLOCK_K * 2
    i = 0
    for t in range(gl.program_id(0), tiles.count(), gl.num_programs(0)):
        expert, row, column, steps = tiles.decode(t)
        first = gl.load(tiles.OFFSETS + expert)
        for k in range(first, first + steps * BLOCK_K, BLOCK_K):
            full = load_stage(i, pipe, BYTES)
            stage = i % pipe.STAGES
            for c in gl.static_range(BLOCK_M // PANEL):
                to = pipe.a.index(stage).slice(c * PANEL, PANEL, dim=1)
                tma.async_copy_global_to_shared(A, [k, row * BLOCK_M + c * PANEL], full, to)
            for c in gl.static_range(BLOCK_N // PANEL):
                to = pipe.b.index(stage).slice(c * PANEL, PANEL, dim=1)
                tma.async_copy_global_to_shared(B, [k, column * BLOCK_N + c * PANEL], full, to)
            i += 1


@gluon.jit
def consume_weight(
    DWEIGHT, tiles, pipe, buffer, BLOCK_N: gl.constexpr, PAIR: gl.constexpr, g: gl.constexpr
):  # fmt: skip
    """Consumer warp group g: 64 rows of an expert's gradient."""
    i = 0
    for t in range(gl.program_id(0), tiles.count(), gl.num_programs(0)):
        expert, tile, column, steps = tiles.decode(t)
        acc = multiply(i, steps, pipe, BLOCK_N, True, True, g)
        i += steps
        row = tile * BLOCK_M + g * GROUP_M
        left, right = halves(acc.to(DWEIGHT.dtype))
        store_weight(left, DWEIGHT, expert, row, column * BLOCK_N, buffer, PAIR)
        store_weight(right, DWEIGHT, expert, row, column * BLOCK_N + OUT, buffer, PAIR)
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
    DWEIGHT, A, B, OFFSETS, TOTALS, experts, row_tiles, column_tiles,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, PAIR: gl.constexpr,
    B_ROWS: gl.constexpr, WARP_GROUPS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """DWEIGHT[experts, m, n], a map of weights, is A^T B over the rows of each expert, TOTALS of them: A[rows, m],
    B[rows, n]. An expert without rows gets zeros."""
    gl.static_assert(WARP_GROUPS == 2)
    a = gl.allocate_shared_memory(A.dtype, [STAGES, BLOCK_K, BLOCK_M], A.layout)
    b = gl.allocate_shared_memory(B.dtype, [STAGES, BLOCK_K, BLOCK_N], B.layout)
    pipe = Pipeline(a, b, mbarriers(STAGES, 1), mbarriers(STAGES, WARP_GROUPS), STAGES)
    out = gl.allocate_shared_memory(DWEIGHT.dtype, [WARP_GROUPS, 1, B_ROWS, PAIR, OUT], DWEIGHT.layout)
    fence_async_shared()
    work = ExpertTiles(OFFSETS, TOTALS, experts, row_tiles, column_tiles, GROUP)
    gl.warp_specialize(
        [
            (consume_weight, (DWEIGHT, work, pipe, out.index(0), BLOCK_N, PAIR, 0)),
            (consume_weight, (DWEIGHT, work, pipe, out.index(1), BLOCK_N, PAIR, 1)),
            (produce_weight, (A, B, work, pipe, BLOCK_N)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
