"""Tile schedulers: which tile of which head a program computes, and which blocks of keys a tile sees.

Masked tiles go longest first. Tiles of several heads are interleaved (L2 swizzle), as many heads as have their K and V
in L2 together or as fill the GPU at once, so that no long tile starts last.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from csrc_triton.attention.pipeline import Pipeline, load_scalar, mbarriers, store_scalar

FULL, CAUSAL, LOCAL = (gl.constexpr(i) for i in range(3))  # masks: none, a right bound, a left bound too


@triton.jit
def swizzled_tile(tiles_per_head, swizzle_heads):
    """(head of all batches, tile of the head) of a kernel with a program a tile: tiles of ``swizzle_heads`` heads are
    interleaved."""
    program = tl.program_id(0)
    before = program // (swizzle_heads * tiles_per_head) * swizzle_heads  # heads of earlier sets
    width = tl.minimum(swizzle_heads, tl.num_programs(0) // tiles_per_head - before)
    number = (program - before * tiles_per_head) // width
    return program - before * tiles_per_head - number * width + before, number


@gluon.jit
def whole_blocks(keys, z):
    """keys // BLOCK_N of ``keys`` >= 0: unsigned, as rounding towards zero takes registers."""
    return (keys.to(gl.uint32) // z.BLOCK_N).to(gl.int32)


@aggregate
class TileScheduler:
    """A persistent kernel's tiles, in the order in which they are taken; lengths and bounds in rows and keys."""

    tiles: gl.tensor
    tiles_per_head: gl.tensor
    heads: gl.tensor  # of Q
    all_heads: gl.tensor  # of Q, of all batches
    ratio: gl.tensor  # heads of Q a head of K
    swizzle_tiles: gl.tensor  # tiles of ``swizzle_heads`` heads
    swizzle_heads: gl.tensor
    len_q: gl.tensor
    len_k: gl.tensor
    right: gl.tensor  # row r sees keys before r + right
    left: gl.tensor  # from r + left on

    @gluon.constexpr_function
    def __init__(
        self,
        tiles,
        tiles_per_head,
        heads,
        all_heads,
        ratio,
        swizzle_tiles,
        swizzle_heads,
        len_q,
        len_k,
        right,
        left,
    ):
        self.tiles, self.tiles_per_head, self.heads, self.all_heads = tiles, tiles_per_head, heads, all_heads
        self.ratio, self.swizzle_tiles, self.swizzle_heads = ratio, swizzle_tiles, swizzle_heads
        self.len_q, self.len_k = len_q, len_k
        self.right, self.left = right, left

    @gluon.jit
    def decode(self, t, z):
        """(tile of the head, batch, head) of tile t."""
        if z.MASK == FULL:
            batch_head = t // self.tiles_per_head
            m = t - batch_head * self.tiles_per_head
        else:
            s = t // self.swizzle_tiles
            r = t - s * self.swizzle_tiles
            width = gl.minimum(self.swizzle_heads, self.all_heads - s * self.swizzle_heads)
            m = r // width
            batch_head = s * self.swizzle_heads + r - m * width
            m = self.tiles_per_head - 1 - m
        batch = batch_head // self.heads
        return m, batch, batch_head - batch * self.heads

    @gluon.jit
    def keys(self, row, z):
        """len_k. With SHARED_PIPELINE ``row`` >> 30 is added, which is 0, but not to the compiler: it would compute
        what depends on len_k before the loop over tiles and spill it."""
        n = self.len_k
        if z.SHARED_PIPELINE:
            n += row >> 30
        return n

    @gluon.jit
    def blocks(self, row, end, z):
        """(first, behind the last) block of keys that rows ``row`` to ``end`` - 1 see. There is at least one: a block
        that no row sees does no harm."""
        stop = self.keys(row, z)
        if z.MASK != FULL:
            stop = gl.minimum(stop, end - 1 + self.right)
        last = whole_blocks(gl.maximum(stop, 1) + z.BLOCK_N - 1, z)
        first = 0
        if z.MASK == LOCAL:
            first = gl.minimum(whole_blocks(gl.maximum(row + self.left, 0), z), last - 1)
        return first, last


@gluon.jit
def tile_pipeline(numbers: gl.constexpr, consumers: gl.constexpr):
    """A pipeline of two stages through which the scheduling warp broadcasts ``numbers`` int32 values of each tile."""
    values = gl.allocate_shared_memory(gl.int32, [2 * numbers, 1], mbarrier.MBarrierLayout())
    return Pipeline(values, values, mbarriers(2, 1), mbarriers(2, consumers))


@gluon.jit
def broadcast_tile(t, i, scheduler, pipeline, z):
    """Send tile t to the consumers as their i-th: its index and, with BROADCAST_TILE, what ``decode`` gives for it."""
    mbarrier.wait(pipeline.empty.index(i & 1), ((i >> 1) & 1) ^ 1)
    if z.BROADCAST_TILE:
        m, batch, head = scheduler.decode(gl.minimum(t, scheduler.tiles - 1), z)
        at = (i & 1) * 4
        store_scalar(pipeline.first, at, t, 1)
        store_scalar(pipeline.first, at + 1, m, 1)
        store_scalar(pipeline.first, at + 2, batch, 1)
        store_scalar(pipeline.first, at + 3, head, 1)
    else:
        store_scalar(pipeline.first, i & 1, t, 1)
    mbarrier.arrive(pipeline.full.index(i & 1), count=1)


@gluon.jit
def receive_tile(i, pipeline, z):
    """(index, tile of the head, batch, head) of a consumer's i-th tile. Without BROADCAST_TILE only the
    index is: ``decode`` gives the others."""
    mbarrier.wait(pipeline.full.index(i & 1), (i >> 1) & 1)
    if z.BROADCAST_TILE:
        at = (i & 1) * 4
        t, m = load_scalar(pipeline.first, at, 4), load_scalar(pipeline.first, at + 1, 4)
        batch, head = load_scalar(pipeline.first, at + 2, 4), load_scalar(pipeline.first, at + 3, 4)
    else:
        t = load_scalar(pipeline.first, i & 1, 4)
        m, batch, head = t, t, t
    mbarrier.arrive(pipeline.empty.index(i & 1), count=1)
    return t, m, batch, head
