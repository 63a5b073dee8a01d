"""Pipelines of TMA loads (Gluon, Hopper): tiles in shared memory that a producer fills and consumers release."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate as aggregate


@aggregate
class Sizes:
    """The compile-time numbers and layouts of a forward kernel.

    A head dimension between two powers of two has two panels of columns, D1 + D2: 96 = 64 + 32, 192 = 128 + 64.
    """

    BLOCK_N: gl.constexpr
    D1: gl.constexpr
    D2: gl.constexpr
    BOX: gl.constexpr  # columns of a TMA box
    STAGES: gl.constexpr
    WARP_GROUPS: gl.constexpr  # consumer warp groups, of 64 rows each
    MASK: gl.constexpr  # FULL, CAUSAL or LOCAL
    PING_PONG: gl.constexpr  # warp groups issue their products in turn
    PREFETCH_TILE: gl.constexpr  # the next tile is taken before this one's loads: see ``produce``
    SHARED_PIPELINE: gl.constexpr  # K and V share one pipeline: see ``k_index``
    BROADCAST_TILE: (
        gl.constexpr
    )  # the producer broadcasts decoded tile coordinates; else consumers decode the index
    S: gl.constexpr  # layout of the scores
    O1: gl.constexpr  # of the output's panels
    O2: gl.constexpr
    P: gl.constexpr  # of the probabilities as an operand of wgmma
    ROW: gl.constexpr  # of one value a row of the scores

    @gluon.constexpr_function
    def __init__(
        self,
        BLOCK_N,
        D1,
        D2,
        BOX,
        STAGES,
        WARP_GROUPS,
        MASK,
        PING_PONG,
        PREFETCH_TILE=1,
        SHARED_PIPELINE=0,
        BROADCAST_TILE=0,
    ):
        def wgmma(columns):
            return gl.NVMMADistributedLayout(
                version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
            )

        value = gl.constexpr
        self.BLOCK_N, self.D1, self.D2, self.BOX = value(BLOCK_N), value(D1), value(D2), value(BOX)
        self.STAGES, self.WARP_GROUPS = value(STAGES), value(WARP_GROUPS)
        self.MASK, self.PING_PONG, self.PREFETCH_TILE = value(MASK), value(PING_PONG), value(PREFETCH_TILE)
        self.SHARED_PIPELINE, self.BROADCAST_TILE = value(SHARED_PIPELINE), value(BROADCAST_TILE)
        self.S = value(wgmma(self.BLOCK_N.value))
        self.O1 = value(wgmma(self.D1.value))
        self.O2 = value(wgmma(self.D2.value or 16))
        self.P = value(gl.DotOperandLayout(0, self.O1.value, 2))
        self.ROW = value(gl.SliceLayout(1, self.S.value))


@aggregate
class Pipeline:
    """Stages of tiles in shared memory, with a full and an empty mbarrier each."""

    first: gl.shared_memory_descriptor
    second: (
        gl.shared_memory_descriptor
    )  # the second panel of columns; the first again where there is one panel
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, first, second, full, empty):
        self.first, self.second, self.full, self.empty = first, second, full, empty


@gluon.jit
def mbarriers(count: gl.constexpr, arrivals: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(made.index(i), count=arrivals)
    return made


@gluon.jit
def pipeline_of(tensor_map, stages: gl.constexpr, consumers: gl.constexpr, z):
    """A pipeline of tiles of a tensor map; a stage is empty when all ``consumers`` have arrived."""
    rows: gl.constexpr = tensor_map.block_shape[2]
    first = gl.allocate_shared_memory(tensor_map.dtype, [stages, 1, 1, rows, z.D1], tensor_map.layout)
    second = first
    if z.D2 > 0:
        second = gl.allocate_shared_memory(tensor_map.dtype, [stages, 1, 1, rows, z.D2], tensor_map.layout)
    return Pipeline(first, second, mbarriers(stages, 1), mbarriers(stages, consumers))


@gluon.jit
def load_tile(tensor_map, batch, head, row, to, stage, z):
    """Start the TMA loads of a tile into an empty stage."""
    full = to.full.index(stage)
    mbarrier.expect(full, tensor_map.block_type.nbytes // z.BOX * (z.D1 + z.D2))
    load_panels(tensor_map, batch, head, row, to, stage, full, z)


@gluon.jit
def load_panels(tensor_map, batch, head, row, to, stage, full, z):
    """Start the TMA loads of a tile's panels of columns; ``full`` expects their bytes already."""
    for c in gl.static_range(z.D1 // z.BOX):
        part = to.first.index(stage).slice(c * z.BOX, z.BOX, dim=3)
        tma.async_copy_global_to_shared(tensor_map, [batch, head, row, c * z.BOX], full, part)
    for c in gl.static_range(z.D2 // z.BOX):
        part = to.second.index(stage).slice(c * z.BOX, z.BOX, dim=3)
        tma.async_copy_global_to_shared(tensor_map, [batch, head, row, z.D1 + c * z.BOX], full, part)


@gluon.jit
def store_scalar(to, i, value, WARPS: gl.constexpr):
    """Write element i of int32 values in shared memory, by WARPS warps."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    to.index(i).store(gl.full([1], 0, gl.int32, one) + value)


@gluon.jit
def load_scalar(source, i, WARPS: gl.constexpr):
    """Element i of int32 values in shared memory, in a register of all threads of WARPS warps."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(source.index(i).load(one), 0)
