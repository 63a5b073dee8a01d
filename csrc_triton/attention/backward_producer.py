"""Attention backward by warp-specialised kernels (Gluon, Hopper): compile-time sizes, shared memory and the producer.

A program owns a tile of keys of a head of K and goes through the blocks of rows that see them (``backward_scheduler``).
A producer warp loads tiles with TMA into pipelines of stages, each with a full and an empty mbarrier; consumer warp
groups (``backward_consumers``) multiply with wgmma. K and V are loaded once and stay in shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate as aggregate

from csrc_triton.attention.backward_scheduler import KEYS, first_block, next_block
from csrc_triton.attention.pipeline import Pipeline, load_panels, load_scalar, mbarriers, store_scalar

# What the head dimension that a kernel is built for decides: keys of a tile, both panels of columns (a panel is a power
# of two), columns that one TMA copy moves, and consumer warp groups.
HEAD_DIMS = {
    64: {"BLOCK_N": 128, "D1": 64, "D2": 0, "BOX": 64, "WARP_GROUPS": 2},
    96: {"BLOCK_N": 128, "D1": 64, "D2": 32, "BOX": 32, "WARP_GROUPS": 2},
    128: {"BLOCK_N": 128, "D1": 128, "D2": 0, "BOX": 64, "WARP_GROUPS": 2},
    192: {"BLOCK_N": 64, "D1": 128, "D2": 64, "BOX": 64, "WARP_GROUPS": 3},
    256: {"BLOCK_N": 64, "D1": 128, "D2": 128, "BOX": 64, "WARP_GROUPS": 3},
}
NARROW = [64, 96, 128]
WIDE = [192, 256]
NARROW_CONSTANTS = [
    "BLOCK_M", "BLOCK_N", "D1", "D2", "BOX", "Q_STAGES", "DY_STAGES", "PIPELINED_SCORES", "WARP_GROUPS", "REGISTERS",
]  # fmt: skip
WIDE_CONSTANTS = [
    "BLOCK_M", "BLOCK_N", "D1", "D2", "BOX", "Q_STAGES", "DY_STAGES", "WARP_GROUPS", "REGISTERS", "DQ_REGISTERS",
]  # fmt: skip
MAPS = {
    "Q": "dtype[1, 1, BLOCK_M, BOX]",
    "K": "dtype[1, 1, 64, BOX]",
    "V": "dtype[1, 1, 64, BOX]",
    "DY": "dtype[1, 1, BLOCK_M, BOX]",
    "DK": "dtype[1, 1, 64, BOX]",
    "DV": "dtype[1, 1, 64, BOX]",
    "LSE2": "fp32[1, 1, 1, BLOCK_M]",
    "DELTA": "fp32[1, 1, 1, BLOCK_M]",
    "DQ32": "*fp32",
}


@aggregate
class BackwardSizes:
    """What is fixed when a kernel is compiled."""

    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    D1: gl.constexpr
    D2: gl.constexpr
    BOX: gl.constexpr
    Q_STAGES: gl.constexpr
    DY_STAGES: gl.constexpr
    PIPELINED_SCORES: gl.constexpr
    MASK: gl.constexpr  # FULL, CAUSAL or LOCAL, as the forward's
    SOFTCAP: gl.constexpr  # then MASK is LOCAL
    VARLEN: gl.constexpr  # whether tiles are ``VarlenKeyTile``s
    S: gl.constexpr  # layouts of S^T and dP^T, of both panels of dK and dV, of P^T and dS^T as an operand
    O1: gl.constexpr
    O2: gl.constexpr
    P: gl.constexpr
    ROW: gl.constexpr  # a value a row of Q, as S^T has it
    KEY: gl.constexpr  # a value a key

    @gluon.constexpr_function
    def __init__(
        self, BLOCK_M, BLOCK_N, D1, D2, BOX, Q_STAGES, DY_STAGES, PIPELINED_SCORES, MASK, SOFTCAP=0, VARLEN=0
    ):
        def wgmma(columns):
            return gl.NVMMADistributedLayout(
                version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
            )

        value = gl.constexpr
        self.BLOCK_M, self.BLOCK_N = value(BLOCK_M), value(BLOCK_N)
        self.D1, self.D2, self.BOX = value(D1), value(D2), value(BOX)
        self.Q_STAGES, self.DY_STAGES = value(Q_STAGES), value(DY_STAGES)
        self.PIPELINED_SCORES = value(PIPELINED_SCORES)
        self.MASK, self.SOFTCAP, self.VARLEN = value(MASK), value(SOFTCAP), value(VARLEN)
        self.S = value(wgmma(self.BLOCK_M.value))
        self.O1 = value(wgmma(self.D1.value))
        self.O2 = value(wgmma(self.D2.value or 16))
        self.P = value(gl.DotOperandLayout(0, self.O1.value, 2))
        self.ROW = value(gl.SliceLayout(0, self.S.value))
        self.KEY = value(gl.SliceLayout(1, self.S.value))


@aggregate
class InputMaps:
    """Tensor maps over (batch, head, row, column); those of LSE2 and DELTA over (batch, head, 1, row)."""

    Q: tma.tensor_descriptor
    K: tma.tensor_descriptor
    V: tma.tensor_descriptor
    DY: tma.tensor_descriptor
    LSE2: tma.tensor_descriptor
    DELTA: tma.tensor_descriptor

    @gluon.constexpr_function
    def __init__(self, Q, K, V, DY, LSE2, DELTA):
        self.Q, self.K, self.V, self.DY, self.LSE2, self.DELTA = Q, K, V, DY, LSE2, DELTA


@aggregate
class Outputs:
    """Tensor maps as ``InputMaps``, and float32 tiles [batch, heads, padded / 64] as ``add_dq`` lays them out."""

    DK: tma.tensor_descriptor
    DV: tma.tensor_descriptor
    DQ32: gl.tensor

    @gluon.constexpr_function
    def __init__(self, DK, DV, DQ32):
        self.DK, self.DV, self.DQ32 = DK, DV, DQ32


# What the consumers seldom need of a tile, in shared memory. BATCH and KEY are coordinates of tensor maps.
BATCH, KV_HEAD, KEY, COUNT, FIRST_SEES, LAST_ROW, CAP = (gl.constexpr(i) for i in range(7))


@gluon.jit
def write_tile(tile, right, len_k, left=None, cap=None):
    count: gl.constexpr = LAST_ROW if left is None else CAP if cap is None else CAP + 1
    info = gl.allocate_shared_memory(gl.int32, [count, 1], mbarrier.MBarrierLayout())
    batch, key = tile.keys_at(0)
    store_scalar(info, BATCH, batch, 4)
    store_scalar(info, KV_HEAD, tile.kv_head, 4)
    store_scalar(info, KEY, key, 4)
    store_scalar(info, COUNT, len_k - tile.key, 4)  # of the tile's keys and those behind them
    store_scalar(info, FIRST_SEES, tile.row + right - tile.key, 4)  # of them; each later row sees one more
    if left is not None:
        # the last of the tile's rows that sees the first key; each later key is seen by one more
        store_scalar(info, LAST_ROW, tile.key - left - tile.row, 4)
    if cap is not None:
        store_scalar(info, CAP, cap.to(gl.int32, bitcast=True), 4)
    return info


@gluon.jit
def read_cap(info):
    return load_scalar(info, CAP, 4).to(gl.float32, bitcast=True)


@gluon.jit
def resident_tiles(of, count: gl.constexpr, z):
    """Tiles that are loaded once, together. They have no empty barrier: one that nobody waits for would share its
    memory with other tiles, and a GPU that leaves a program for another process and comes back overwrites what lies on
    a barrier."""
    first = gl.allocate_shared_memory(of.dtype, [count, 1, 1, KEYS, z.D1], of.layout)
    second = first
    if z.D2 > 0:
        second = gl.allocate_shared_memory(of.dtype, [count, 1, 1, KEYS, z.D2], of.layout)
    full = mbarriers(1, 1)
    return Pipeline(first, second, full, full)


@gluon.jit
def row_statistics(of, stages: gl.constexpr):
    """LSE or delta of the rows of a pipeline's stages, whose barriers count both."""
    return gl.allocate_shared_memory(of.dtype, [stages, 1, 1, 1, of.block_shape[3]], of.layout)


@aggregate
class Buffers:
    """Shared memory that the producer fills: K and V, the pipelines of Q and dY, and the statistics of their rows."""

    k: Pipeline
    v: Pipeline
    q: Pipeline
    dy: Pipeline
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, k, v, q, dy, lse, delta):
        self.k, self.v, self.q, self.dy, self.lse, self.delta = k, v, q, dy, lse, delta


@gluon.jit
def load_keys(of, tile, to, z):
    full = to.full.index(0)
    mbarrier.expect(full, z.BLOCK_N * (z.D1 + z.D2) * 2)
    for g in gl.static_range(z.BLOCK_N // KEYS):
        batch, key = tile.keys_at(g)
        load_panels(of, batch, tile.kv_head, key, to, g, full, z)


@gluon.jit
def load_block(of, statistics_of, tile, head, row, to, statistics, stage, z):
    """A block of rows and its LSE or delta, into a stage that is empty."""
    full = to.full.index(stage)
    mbarrier.expect(full, z.BLOCK_M * ((z.D1 + z.D2) * 2 + 4))
    batch, at_head, at = tile.rows_at(head, row)
    load_panels(of, batch, at_head, at, to, stage, full, z)
    tma.async_copy_global_to_shared(
        statistics_of, [tile.batch, at_head, 0, row], full, statistics.index(stage)
    )


@gluon.jit
def produce(z, tile, maps, x, semaphore=None):
    """The producer warp. What lies outside a tensor arrives as zeros."""
    load_keys(maps.K, tile, x.k, z)
    head = tile.head
    row = first_block(tile, z, semaphore)
    load_block(maps.Q, maps.LSE2, tile, head, row, x.q, x.lse, 0, z)
    load_keys(maps.V, tile, x.v, z)
    for i in range(tile.steps):
        stage = i % z.DY_STAGES
        mbarrier.wait(x.dy.empty.index(stage), ((i // z.DY_STAGES) & 1) ^ 1)
        load_block(maps.DY, maps.DELTA, tile, head, row, x.dy, x.delta, stage, z)
        head, row = next_block(head, row, tile, z, semaphore)
        j = i + 1
        if z.PIPELINED_SCORES or j < tile.steps:  # pipelined, the last scores, of a dummy block, are not used
            stage = j % z.Q_STAGES
            mbarrier.wait(x.q.empty.index(stage), ((j // z.Q_STAGES) & 1) ^ 1)
            load_block(maps.Q, maps.LSE2, tile, head, row, x.q, x.lse, stage, z)
