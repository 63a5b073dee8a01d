"""Attention forward by warp groups (Gluon, Hopper): the device code that ``flash_attention`` bakes.

A producer warp moves Q, K and V with TMA; GROUPS consumer groups of four warps own 64 query rows each and multiply
with wgmma. After FlashAttention-3 (Shah et al., 2024), with these choices:

- Persistent: a block takes tiles (64 GROUPS rows of one head) from a counter. Masked tiles go longest first, in
  sections of heads whose K and V fit into L2 together. The producer loads the next tile while the consumers finish.
- Keys are walked downwards from the last visible block: only a tile's first blocks carry a mask, and with a left bound
  its last ones. A group skips, but acknowledges, the blocks that only its neighbours see.
- P stays packed (two 16-bit values a register) from one step to the next; left to the compiler, a carried tensor of
  16-bit values takes a register an element.
- Tensor maps have four dimensions (batch, head, row, column): what lies outside reads as zero and is not written, so
  any strides, lengths and head dimensions work without a copy.
- A head dimension between two powers of two has two panels of columns, D1 + D2: 96 = 64 + 32, 192 = 128 + 64.
- With TURNS, groups issue their products one after the other, so that one's softmax meets another's products.
- With ONE_RING, K and V share a ring. Where two stages of both do not fit beside Q, three slots let blocks be twice as
  long as two pairs of slots would.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from csrc_triton.attention.attention_softmax import masked, pack, row_parts, soft_cap, unpack

FULL, CAUSAL, LOCAL = (gl.constexpr(i) for i in range(3))  # kinds of MASK: none, a right bound, both bounds


@aggregate
class Sizes:
    """What is fixed when a kernel is compiled."""

    BLOCK_N: gl.constexpr
    D1: gl.constexpr
    D2: gl.constexpr
    BOX: gl.constexpr  # columns that one TMA copy moves
    STAGES: gl.constexpr
    GROUPS: gl.constexpr
    MASK: gl.constexpr
    TURNS: gl.constexpr
    LATE: gl.constexpr  # whether a tile is taken behind the last block of the one before: see ``produce``
    ONE_RING: gl.constexpr  # whether K and V have one ring: see ``key_number``
    TOLD: (
        gl.constexpr
    )  # whether the producer tells the consumers of which head a tile is; else they divide, too
    S: gl.constexpr  # layouts of the scores, of both panels of the output, of P as an operand
    O1: gl.constexpr
    O2: gl.constexpr
    P: gl.constexpr
    ROW: gl.constexpr  # a value a row, as the scores have it

    @gluon.constexpr_function
    def __init__(self, BLOCK_N, D1, D2, BOX, STAGES, GROUPS, MASK, TURNS, LATE=0, ONE_RING=0, TOLD=0):
        def wgmma(columns):
            return gl.NVMMADistributedLayout(
                version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
            )

        value = gl.constexpr
        self.BLOCK_N, self.D1, self.D2, self.BOX = value(BLOCK_N), value(D1), value(D2), value(BOX)
        self.STAGES, self.GROUPS = value(STAGES), value(GROUPS)
        self.MASK, self.TURNS, self.LATE = value(MASK), value(TURNS), value(LATE)
        self.ONE_RING, self.TOLD = value(ONE_RING), value(TOLD)
        self.S = value(wgmma(self.BLOCK_N.value))
        self.O1 = value(wgmma(self.D1.value))
        self.O2 = value(wgmma(self.D2.value or 16))
        self.P = value(gl.DotOperandLayout(0, self.O1.value, 2))
        self.ROW = value(gl.SliceLayout(1, self.S.value))


@gluon.jit
def whole_blocks(keys, z):
    """Blocks in ``keys`` >= 0 keys: unsigned, as rounding towards zero would take registers."""
    return (keys.to(gl.uint32) // z.BLOCK_N).to(gl.int32)


@aggregate
class Work:
    """The tiles of a launch, in the order they are taken; lengths and bounds in rows and keys."""

    tiles: gl.tensor
    tiles_a_head: gl.tensor
    heads: gl.tensor  # of Q
    all_heads: gl.tensor  # of Q, of all batches
    ratio: gl.tensor  # heads of Q a head of K
    section: gl.tensor  # tiles of it
    section_heads: gl.tensor
    len_q: gl.tensor
    len_k: gl.tensor
    right: gl.tensor  # row r sees keys before r + right
    left: gl.tensor  # from r + left on

    @gluon.constexpr_function
    def __init__(
        self, tiles, tiles_a_head, heads, all_heads, ratio, section, section_heads, len_q, len_k, right, left
    ):
        self.tiles, self.tiles_a_head, self.heads, self.all_heads = tiles, tiles_a_head, heads, all_heads
        self.ratio, self.section, self.section_heads = ratio, section, section_heads
        self.len_q, self.len_k = len_q, len_k
        self.right, self.left = right, left

    @gluon.jit
    def tile(self, t, z):
        """(tile of the head, batch, head) of tile t."""
        if z.MASK == FULL:
            both = t // self.tiles_a_head
            m = t - both * self.tiles_a_head
        else:
            s = t // self.section
            r = t - s * self.section
            width = gl.minimum(self.section_heads, self.all_heads - s * self.section_heads)
            m = r // width
            both = s * self.section_heads + r - m * width
            m = self.tiles_a_head - 1 - m
        batch = both // self.heads
        return m, batch, both - batch * self.heads

    @gluon.jit
    def keys(self, row, z):
        """len_k. With ONE_RING ``row`` >> 30 is added, which is zero, but not to the compiler: it would keep what it
        works out for all tiles in local memory."""
        n = self.len_k
        if z.ONE_RING:
            n += row >> 30
        return n

    @gluon.jit
    def blocks(self, row, end, z):
        """The range of blocks of keys that rows ``row`` to ``end`` - 1 see. It holds at least one: a block that no row
        sees does no harm."""
        stop = self.keys(row, z)
        if z.MASK != FULL:
            stop = gl.minimum(stop, end - 1 + self.right)
        last = whole_blocks(gl.maximum(stop, 1) + z.BLOCK_N - 1, z)
        first = 0
        if z.MASK == LOCAL:
            first = gl.minimum(whole_blocks(gl.maximum(row + self.left, 0), z), last - 1)
        return first, last


@aggregate
class Ring:
    """Buffers that the producer fills and the consumers free: both panels of tiles, and a pair of barriers each."""

    first: gl.shared_memory_descriptor
    second: gl.shared_memory_descriptor  # the first again where there is one panel
    full: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, first, second, full, free):
        self.first, self.second, self.full, self.free = first, second, full, free


@gluon.jit
def barriers(count: gl.constexpr, arrivals: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(made.index(i), count=arrivals)
    return made


@gluon.jit
def ring(of, slots: gl.constexpr, readers: gl.constexpr, z):
    """A ring of ``slots`` tiles of a tensor map; each is free again when ``readers`` have said so."""
    rows: gl.constexpr = of.block_shape[2]
    first = gl.allocate_shared_memory(of.dtype, [slots, 1, 1, rows, z.D1], of.layout)
    second = first
    if z.D2 > 0:
        second = gl.allocate_shared_memory(of.dtype, [slots, 1, 1, rows, z.D2], of.layout)
    return Ring(first, second, barriers(slots, 1), barriers(slots, readers))


@gluon.jit
def key_number(b, FIRST: gl.constexpr, z):
    """The number in its ring of the keys of block b, FIRST of its tile or not. With ONE_RING keys and values lie in one
    ring in the order in which groups need them: each block's keys before the values of the block before. Three slots
    are as good as two pairs then: a slot is asked for while the groups work on both others."""
    n = b
    if z.ONE_RING:
        n = 2 * b if FIRST else 2 * b - 1
    return n


@gluon.jit
def value_number(b, LAST: gl.constexpr, z):
    """The number in its ring of the values of block b, LAST of its tile or not."""
    n = b
    if z.ONE_RING:
        n = 2 * b + 1 if LAST else 2 * b + 2
    return n


@gluon.jit
def fetch(of, batch, head, row, to, slot, z):
    """Start to copy a tile into a slot of a ring, once it is free."""
    full = to.full.index(slot)
    mbarrier.expect(full, of.block_type.nbytes // z.BOX * (z.D1 + z.D2))
    for c in gl.static_range(z.D1 // z.BOX):
        piece = to.first.index(slot).slice(c * z.BOX, z.BOX, dim=3)
        tma.async_copy_global_to_shared(of, [batch, head, row, c * z.BOX], full, piece)
    for c in gl.static_range(z.D2 // z.BOX):
        piece = to.second.index(slot).slice(c * z.BOX, z.BOX, dim=3)
        tma.async_copy_global_to_shared(of, [batch, head, row, z.D1 + c * z.BOX], full, piece)


# Barriers 8 to 10 are the groups' turns (128 threads wait, 128 pass); Triton's own are 0 to 4.
TAKE0, TAKE1, TAKE2 = (gl.constexpr(f"bar.sync {8 + g}, 256; mov.b32 $0, $1;") for g in range(3))
PASS0, PASS1, PASS2 = (gl.constexpr(f"bar.arrive {8 + g}, 256; mov.b32 $0, $1;") for g in range(3))


@gluon.jit
def named_barrier(assembly: gl.constexpr):
    x = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))  # one element, once a thread
    gl.inline_asm_elementwise(assembly, "=r,r", [x], gl.int32, False, 1)


@gluon.jit
def take_turn(g: gl.constexpr, z):
    """Wait until the group before this one has issued its products."""
    if z.TURNS:
        if g == 0:
            named_barrier(TAKE0)
        elif g == 1:
            named_barrier(TAKE1)
        else:
            named_barrier(TAKE2)


@gluon.jit
def pass_turn(g: gl.constexpr, z):
    if z.TURNS:
        if g == z.GROUPS - 1:
            named_barrier(PASS0)
        elif g == 0:
            named_barrier(PASS1)
        else:
            named_barrier(PASS2)


@gluon.jit
def skip(count, b, k, v, g: gl.constexpr, z):
    """Let blocks b to b + count - 1 pass, which this group does not need."""
    for j in range(b, b + count):
        at = key_number(j, True, z)  # with ONE_RING all slots of whole tiles, one after the other
        mbarrier.wait(k.full.index(at % z.STAGES), (at // z.STAGES) & 1)
        take_turn(g, z)
        pass_turn(g, z)
        mbarrier.arrive(k.free.index(at % z.STAGES), count=1)
        at = value_number(j, True, z)
        mbarrier.wait(v.full.index(at % z.STAGES), (at // z.STAGES) & 1)
        mbarrier.arrive(v.free.index(at % z.STAGES), count=1)


@gluon.jit
def scores(q, g: gl.constexpr, k, slot, z):
    """Q K^T of a block, under way."""
    at = g
    if z.ONE_RING or z.D1 == 256:
        at += slot >> 30  # zero, but not to the compiler: it would keep the descriptors of Q in registers
    a = q.first.index(at).reshape([64, z.D1])
    keys = k.first.index(slot).reshape([z.BLOCK_N, z.D1]).permute((1, 0))
    zeros = gl.zeros([64, z.BLOCK_N], gl.float32, z.S)
    s = warpgroup_mma(a, keys, zeros, use_acc=False, is_async=True)
    if z.D2 > 0:
        a = q.second.index(at).reshape([64, z.D2])
        keys = k.second.index(slot).reshape([z.BLOCK_N, z.D2]).permute((1, 0))
        s = warpgroup_mma(a, keys, s, is_async=True)
    return s


@gluon.jit
def add_values(p, v, slot, acc, acc2, z):
    """acc + P V of a block, under way."""
    p = unpack(p, v.first.dtype, z.P, z.BLOCK_N)
    acc = warpgroup_mma(p, v.first.index(slot).reshape([z.BLOCK_N, z.D1]), acc, is_async=True)
    if z.D2 > 0:
        acc2 = warpgroup_mma(p, v.second.index(slot).reshape([z.BLOCK_N, z.D2]), acc2, is_async=True)
    return acc, acc2


@gluon.jit
def wait_values(acc, acc2, z):
    if z.D2 > 0:
        acc, acc2 = warpgroup_mma_wait(0, deps=(acc, acc2))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    return acc, acc2


@gluon.jit
def scaled(acc, by):
    return acc * gl.expand_dims(gl.convert_layout(by, gl.SliceLayout(1, acc.type.layout)), 1)


@gluon.jit
def step(
    b, key, q, k, v, bounds, scale, cap, p, acc, acc2, m, sums, MASKED: gl.constexpr, g: gl.constexpr, z
):
    """Block b's scores and softmax while block b - 1's product with V runs."""
    at_k = key_number(b, False, z)
    at_v = value_number(b - 1, False, z)
    slot = at_k % z.STAGES
    before = at_v % z.STAGES
    mbarrier.wait(k.full.index(slot), (at_k // z.STAGES) & 1)
    take_turn(g, z)
    s = scores(q, g, k, slot, z)
    mbarrier.wait(v.full.index(before), (at_v // z.STAGES) & 1)
    acc, acc2 = add_values(p, v, before, acc, acc2, z)
    pass_turn(g, z)
    s = warpgroup_mma_wait(2 if z.D2 > 0 else 1, deps=(s,))
    mbarrier.arrive(k.free.index(slot), count=1)
    if z.MASK == LOCAL:
        s = soft_cap(s, cap)
    if MASKED:
        s = masked(s, key, bounds, z.MASK == LOCAL)
    new_m = gl.maximum(m, gl.max(s, 1) * scale)
    e = gl.exp2(s * scale - gl.expand_dims(new_m, 1))
    alpha = gl.exp2(m - new_m)
    sums = scaled(sums, alpha) + row_parts(e)
    acc, acc2 = wait_values(acc, acc2, z)
    mbarrier.arrive(v.free.index(before), count=1)
    p = pack(e, v.first.dtype)
    acc = scaled(acc, alpha)
    if z.D2 > 0:
        acc2 = scaled(acc2, alpha)
    return p, acc, acc2, new_m, sums
