"""Attention backward by warp groups (Gluon, Hopper): the device code that ``flash_attention_backward`` bakes.

A block owns 128 keys of a head of K and walks the rows that see them, of all query heads that share it. A producer warp
moves tiles with TMA; two consumer warp groups own 64 keys each and keep their dK and dV in registers. All is computed
transposed, so that P^T and dS^T stay register operands:

    S^T = K Q^T,  dP^T = V dY^T,  dV += P^T dY,  dK += dS^T Q

Only dQ = dS K needs both groups' dS: each stores its part to shared memory and computes half of the tile of dQ, one
block late, so that the groups need not meet in every block. dQ is added to float32 in global memory (``add_dq``), in
any order, so that its last bits vary from run to run, or, by kernels of their own, in a fixed one
(``attention_backward_order``). dK and dV do not vary.

What else is chosen, and what ptxas (Triton 3.6.0) forces:

- With AHEAD the next block's scores start before this block's dQ and dK; it takes a third stage of Q where it fits.
- A matrix descriptor that does not change in the loop is kept in registers, which spills: see ``zero`` in ``step``.
- No accumulator is in flight over the loop's back edge: all products would be serialised.
- The first block stands before the loop, since it has no dQ to add.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate as aggregate

from csrc_triton.attention.pipeline import Pipeline, mbarriers
from csrc_triton.attention.tile_scheduler import CAUSAL, LOCAL, swizzled_tile

CAPPED = gl.constexpr(3)  # both bounds and a soft cap
GROUPS = gl.constexpr(2)
KEYS = gl.constexpr(64)  # of a group


@aggregate
class BackwardSizes:
    """What is fixed when a kernel is compiled."""

    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    D1: gl.constexpr
    D2: gl.constexpr
    BOX: gl.constexpr  # columns that one TMA copy moves
    Q_STAGES: gl.constexpr
    DY_STAGES: gl.constexpr
    AHEAD: gl.constexpr
    BOUNDED: gl.constexpr  # FULL, CAUSAL or LOCAL, as the forward's MASK, or CAPPED
    PACKED: gl.constexpr  # whether tiles are of packed sequences: ``PackedKeyTile``
    S: gl.constexpr  # layouts of S^T and dP^T, of both panels of dK and dV, of P^T and dS^T as an operand
    O1: gl.constexpr
    O2: gl.constexpr
    P: gl.constexpr
    ROW: gl.constexpr  # a value a row of Q, as S^T has it
    KEY: gl.constexpr  # a value a key

    @gluon.constexpr_function
    def __init__(self, BLOCK_M, BLOCK_N, D1, D2, BOX, Q_STAGES, DY_STAGES, AHEAD, BOUNDED, PACKED=0):
        def wgmma(columns):
            return gl.NVMMADistributedLayout(
                version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
            )

        value = gl.constexpr
        self.BLOCK_M, self.BLOCK_N = value(BLOCK_M), value(BLOCK_N)
        self.D1, self.D2, self.BOX = value(D1), value(D2), value(BOX)
        self.Q_STAGES, self.DY_STAGES = value(Q_STAGES), value(DY_STAGES)
        self.AHEAD, self.BOUNDED, self.PACKED = value(AHEAD), value(BOUNDED), value(PACKED)
        self.S = value(wgmma(self.BLOCK_M.value))
        self.O1 = value(wgmma(self.D1.value))
        self.O2 = value(wgmma(self.D2.value or 16))
        self.P = value(gl.DotOperandLayout(0, self.O1.value, 2))
        self.ROW = value(gl.SliceLayout(0, self.S.value))
        self.KEY = value(gl.SliceLayout(1, self.S.value))


@aggregate
class KeyTile:
    """A block's keys, and the rows that see them: as many blocks of rows in each of the query heads."""

    batch: gl.tensor
    kv_head: gl.tensor
    head: gl.tensor  # the first query head
    key: gl.tensor
    row: gl.tensor  # the first, at the start of a block
    rows: gl.tensor  # of a head, whole blocks
    steps: gl.tensor  # blocks of rows of all heads

    @gluon.constexpr_function
    def __init__(self, batch, kv_head, head, key, row, rows, steps):
        self.batch, self.kv_head, self.head, self.key = batch, kv_head, head, key
        self.row, self.rows, self.steps = row, rows, steps

    @gluon.jit
    def keys_at(self, g: gl.constexpr):
        """Of tensor maps: the first coordinate and the row of group g's keys."""
        return self.batch, self.key + g * KEYS

    @gluon.jit
    def rows_at(self, head, row):
        """Of the tensor maps of Q and DY: the first coordinate, the head and the row of a block of rows."""
        return self.batch, head, row


@gluon.jit
def tile_of_keys(tiles_a_head, section, kv_heads, ratio, len_q, right, z, left=None):
    """This program's. The first keys, which most rows see, come first: of one head after the other or, with
    ``section``, of so many heads in turns, so that no long block starts late."""
    if section is None:
        both = gl.program_id(0) // tiles_a_head
        number = gl.program_id(0) - both * tiles_a_head
    else:
        both, number = swizzled_tile(tiles_a_head, section)
    return tile_at(both, number, kv_heads, ratio, len_q, right, z, left)


@gluon.jit
def tile_at(both, number, kv_heads, ratio, len_q, right, z, left=None):
    """A tile of a head of K; ``both`` counts the heads of all batches. It has at least one block of rows: where no row
    sees a key, the first, which adds nothing."""
    key = number * z.BLOCK_N
    batch = both // kv_heads
    kv_head = both - batch * kv_heads
    first = 0
    if z.BOUNDED:
        first = gl.maximum(key - right + 1, 0) // z.BLOCK_M
    end = len_q
    if z.BOUNDED >= LOCAL:
        end = gl.minimum(end, gl.maximum(key + z.BLOCK_N - left, 1))
    blocks = (end + z.BLOCK_M - 1) // z.BLOCK_M - first
    return KeyTile(
        batch, kv_head, kv_head * ratio, key, first * z.BLOCK_M, blocks * z.BLOCK_M, ratio * blocks
    )


# What the consumers seldom need lies in shared memory: held in registers over the loop, it would make them spill. BATCH
# and KEY are coordinates of tensor maps.
BATCH, KV_HEAD, KEY, COUNT, FIRST_SEES, LAST_ROW, CAP = (gl.constexpr(i) for i in range(7))


@gluon.jit
def write_notes(tile, right, len_k, left=None, cap=None):
    count: gl.constexpr = LAST_ROW if left is None else CAP if cap is None else CAP + 1
    notes = gl.allocate_shared_memory(gl.int32, [count, 1], mbarrier.MBarrierLayout())
    batch, key = tile.keys_at(0)
    write_note(notes, BATCH, batch)
    write_note(notes, KV_HEAD, tile.kv_head)
    write_note(notes, KEY, key)
    write_note(notes, COUNT, len_k - tile.key)  # of the block's keys and those behind them
    write_note(notes, FIRST_SEES, tile.row + right - tile.key)  # of them; each later row sees one more
    if left is not None:
        # the last of the rows walked that sees the first key; each later key is seen by one more
        write_note(notes, LAST_ROW, tile.key - left - tile.row)
    if cap is not None:
        write_note(notes, CAP, cap.to(gl.int32, bitcast=True))
    return notes


@gluon.jit
def write_note(notes, what: gl.constexpr, value):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    notes.index(what).store(gl.full([1], 0, gl.int32, one) + value)


@gluon.jit
def noted(notes, what: gl.constexpr):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(notes.index(what).load(one), 0)


@gluon.jit
def noted_cap(notes):
    return noted(notes, CAP).to(gl.float32, bitcast=True)


@gluon.jit
def tile_panels(of, slots: gl.constexpr, z):
    """Memory for ``slots`` tiles of a tensor map: both panels, the first again where there is one."""
    rows: gl.constexpr = of.block_shape[2]
    first = gl.allocate_shared_memory(of.dtype, [slots, 1, 1, rows, z.D1], of.layout)
    second = first
    if z.D2 > 0:
        second = gl.allocate_shared_memory(of.dtype, [slots, 1, 1, rows, z.D2], of.layout)
    return first, second


@gluon.jit
def tile_ring(of, slots: gl.constexpr, z):
    """A ring of ``slots`` tiles, which both groups free."""
    first, second = tile_panels(of, slots, z)
    return Pipeline(first, second, mbarriers(slots, 1), mbarriers(slots, GROUPS))


@gluon.jit
def held_tiles(of, slots: gl.constexpr, z):
    """Tiles that are filled once, together. They have no barrier for free: one that nobody waits for would share its
    memory with other tiles, and a GPU that leaves a block for another process and comes back overwrites what lies on a
    barrier."""
    first, second = tile_panels(of, slots, z)
    full = mbarriers(1, 1)
    return Pipeline(first, second, full, full)


@gluon.jit
def sums_ring(of, slots: gl.constexpr):
    """Float32 sums of rows beside a ring of tiles, whose barriers hold for both."""
    return gl.allocate_shared_memory(of.dtype, [slots, 1, 1, 1, of.block_shape[3]], of.layout)


@gluon.jit
def copy_rows(of, batch, head, row, full, to, slot, z):
    """Start to copy a tile into a slot of a ring; ``full`` expects its bytes already."""
    for c in gl.static_range(z.D1 // z.BOX):
        piece = to.first.index(slot).slice(c * z.BOX, z.BOX, dim=3)
        tma.async_copy_global_to_shared(of, [batch, head, row, c * z.BOX], full, piece)
    for c in gl.static_range(z.D2 // z.BOX):
        piece = to.second.index(slot).slice(c * z.BOX, z.BOX, dim=3)
        tma.async_copy_global_to_shared(of, [batch, head, row, z.D1 + c * z.BOX], full, piece)


@gluon.jit
def fetch_keys(of, tile, to, z):
    full = to.full.index(0)
    mbarrier.expect(full, z.BLOCK_N * (z.D1 + z.D2) * 2)
    for g in gl.static_range(z.BLOCK_N // KEYS):
        batch, key = tile.keys_at(g)
        copy_rows(of, batch, tile.kv_head, key, full, to, g, z)


@gluon.jit
def fetch_rows(of, sums_of, tile, head, row, to, sums, slot, z):
    """A block of rows and its float32 sums, one a row, into a slot that is free."""
    full = to.full.index(slot)
    mbarrier.expect(full, z.BLOCK_M * ((z.D1 + z.D2) * 2 + 4))
    batch, at_head, at = tile.rows_at(head, row)
    copy_rows(of, batch, at_head, at, full, to, slot, z)
    tma.async_copy_global_to_shared(sums_of, [tile.batch, at_head, 0, row], full, sums.index(slot))


@gluon.jit
def produce(z, tile, Q, K, V, DY, LSE2, DELTA, k, v, q, dy, lse, delta, order=None):
    """The producer warp. What lies outside a tensor arrives as zeros."""
    fetch_keys(K, tile, k, z)
    head = tile.head
    row = first_row(tile, z, order)
    fetch_rows(Q, LSE2, tile, head, row, q, lse, 0, z)
    fetch_keys(V, tile, v, z)
    for i in range(tile.steps):
        slot = i % z.DY_STAGES
        mbarrier.wait(dy.empty.index(slot), ((i // z.DY_STAGES) & 1) ^ 1)
        fetch_rows(DY, DELTA, tile, head, row, dy, delta, slot, z)
        head, row = next_rows(head, row, tile, z, order)
        j = i + 1
        if z.AHEAD or j < tile.steps:  # with AHEAD the last Q is a dummy: scores that nobody uses
            slot = j % z.Q_STAGES
            mbarrier.wait(q.empty.index(slot), ((j // z.Q_STAGES) & 1) ^ 1)
            fetch_rows(Q, LSE2, tile, head, row, q, lse, slot, z)


@gluon.jit
def first_row(tile, z, order=None):
    row = tile.row
    if order is not None and z.BOUNDED == CAUSAL:
        row = gl.where(order.inner > 0, tile.row + tile.rows - z.BLOCK_M, row)
    return row


@gluon.jit
def next_rows(head, row, tile, z, order=None):
    """The block after one: of the same head, or the next head's first. Where query heads take turns in an order, the
    last rows of each come first, then the rows before them: see ``attention_backward_order``."""
    after = row + z.BLOCK_M
    last = after == tile.row + tile.rows
    to_head, to_row = gl.where(last, head + 1, head), gl.where(last, tile.row, after)
    if order is not None and z.BOUNDED == CAUSAL:
        inner = order.inner
        last = head + 1 == tile.head + inner
        to_head = gl.where(inner > 0, gl.where(last, tile.head, head + 1), to_head)
        to_row = gl.where(inner > 0, gl.where(last, row - z.BLOCK_M, row), to_row)
    return to_head, to_row
