"""Tile scheduler of the warp-specialised backward, and the semaphore that orders what programs add to dQ.

A program owns a tile of keys of a head of K and goes through the blocks of rows that see them, of all query heads that
share it.

**Deterministic dQ.** The programs of a head add to a block of rows one after the other, in the order of their numbers.
A semaphore in global memory, one int32 a block of rows, holds the number of the program that may add next. A warp of
each program, or several that take every n-th block, polls it, lets the consumers add, and passes it on. The consumers
never wait for global memory, only for an mbarrier.

This cannot deadlock. A program waits, for one block of rows at a time, for the program before it, and only where that
one sees the rows too. Both are of one head of K and take its rows in the same order, and the one before was started
before: a GPU starts programs in the order of their numbers. So the first program of a head never waits and ends, and
each next one finds every semaphore passed on sooner or later.

The order of tiles and rows keeps waits short:

- Without a bound all programs begin with the first rows, where each waits for the one before. So the tiles of several
  heads are interleaved (``ordered_tile``).
- With a bound a program begins at its diagonal, and the last keys go first: the first to add to a row is the program
  that sees it first, and at any moment each adds to other rows. With the first keys first, most would wait.
- But then the longest programs end last. Where more than MOST_HEADS_IN_ORDER query heads share a head of K, a causal
  program interleaves its query heads instead, the last rows first: it follows the one before at a small distance, and
  the first keys, the longest programs, go first.

**Varlen.** Tensor maps are those of the varlen forward, so that a sequence ends where a map does: rows and keys behind
it arrive as zeros and are not written. A box wholly behind a sequence is never asked for, as there: a warp group
without keys gets the last key instead, whose probabilities are masked, and stores nothing. Row statistics and dQ have
padded rows: a sequence starts at a multiple of UNIT (``padded_start``), so that whole blocks of rows can be read and
added. A sequence without queries leaves its keys gradients of zero; so do the keys behind the last sequence.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from csrc_triton.attention.pipeline import load_scalar, mbarriers, store_scalar
from csrc_triton.attention.tile_scheduler import CAUSAL, LOCAL, swizzled_tile
from csrc_triton.attention.varlen import find, padded_start, span

KEYS = gl.constexpr(64)  # of a warp group
MOST_HEADS_IN_ORDER = gl.constexpr(2)  # query heads a head of K that are not interleaved


# ---- Tiles of keys ----


@aggregate
class KeyTile:
    """A tile of keys, and the rows that see them: as many blocks of rows in each of the query heads."""

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
        """Of tensor maps: the first coordinate and the row of warp group g's keys."""
        return self.batch, self.key + g * KEYS

    @gluon.jit
    def rows_at(self, head, row):
        """Of the tensor maps of Q and DY: the first coordinate, the head and the row of a block of rows."""
        return self.batch, head, row


@gluon.jit
def key_tile(tiles_per_head, swizzle_heads, kv_heads, ratio, len_q, right, z, left=None):
    """This program's tile. The first keys, which most rows see, come first: of one head after the other or, with a
    bound, of ``swizzle_heads`` heads interleaved, so that no long tile starts last."""
    if z.MASK:
        batch_head, number = swizzled_tile(tiles_per_head, swizzle_heads)
    else:
        batch_head = gl.program_id(0) // tiles_per_head
        number = gl.program_id(0) - batch_head * tiles_per_head
    return tile_at(batch_head, number, kv_heads, ratio, len_q, right, z, left)


@gluon.jit
def ordered_tile(tiles_per_head, swizzle_heads, kv_heads, ratio, len_q, right, z, left=None):
    """This program's tile where dQ is deterministic, of ``swizzle_heads`` interleaved heads of K. The last keys come
    first where there is a bound and query heads are not interleaved."""
    batch_head, number = swizzled_tile(tiles_per_head, swizzle_heads)
    if z.MASK:
        number = gl.where(interleaved_heads(ratio, z) > 0, number, tiles_per_head - 1 - number)
    return tile_at(batch_head, number, kv_heads, ratio, len_q, right, z, left)


@gluon.jit
def tile_at(batch_head, number, kv_heads, ratio, len_q, right, z, left=None):
    """A tile of a head of K; ``batch_head`` counts the heads of all batches. It has at least one block of rows: where
    no row sees a key, the first, which adds nothing."""
    key = number * z.BLOCK_N
    batch = batch_head // kv_heads
    kv_head = batch_head - batch * kv_heads
    first = 0
    if z.MASK:
        first = gl.maximum(key - right + 1, 0) // z.BLOCK_M
    end = len_q
    if z.MASK >= LOCAL:
        end = gl.minimum(end, gl.maximum(key + z.BLOCK_N - left, 1))
    blocks = (end + z.BLOCK_M - 1) // z.BLOCK_M - first
    return KeyTile(
        batch, kv_head, kv_head * ratio, key, first * z.BLOCK_M, blocks * z.BLOCK_M, ratio * blocks
    )


@aggregate
class VarlenKeyTile:
    """As ``KeyTile``, of a sequence; there may be no rows. Rows are padded ones."""

    batch: gl.tensor  # of the row statistics: 0
    kv_head: gl.tensor
    head: gl.tensor
    last_head: gl.tensor
    key: gl.tensor  # of the sequence's; at its end where the tile has none
    last_key: gl.tensor
    row: gl.tensor
    rows: gl.tensor
    steps: gl.tensor
    place_q: gl.tensor  # first coordinate of tensor maps, and what must be added to a row and to a key
    past_q: gl.tensor
    place_k: gl.tensor
    past_k: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self, batch, kv_head, head, last_head, key, last_key, row, rows, steps, place_q, past_q, place_k,
        past_k,
    ):  # fmt: skip
        self.batch, self.kv_head, self.head, self.last_head = batch, kv_head, head, last_head
        self.key, self.last_key = key, last_key
        self.row, self.rows, self.steps = row, rows, steps
        self.place_q, self.past_q, self.place_k, self.past_k = place_q, past_q, place_k, past_k

    @gluon.jit
    def keys_at(self, g: gl.constexpr):
        return self.place_k, self.past_k + gl.minimum(self.key + g * KEYS, self.last_key)

    @gluon.jit
    def rows_at(self, head, row):
        # the block after the last one, which is loaded but not used, is of the last head
        return self.place_q, gl.minimum(head, self.last_head), self.past_q + row


@gluon.jit
def varlen_key_tile(
    CU_SEQLENS_Q, CU_SEQLENS_K, tiles_per_head, ratio, swizzle_heads, sequences, tokens_q, tokens_k, right, z
):
    """This program's tile, the keys of its sequence, and the bound: padded row r sees those before r + it.
    ``swizzle_heads`` heads of K are interleaved, so that the longest tiles of the last head do not start last."""
    first_head = gl.program_id(0) // (swizzle_heads * tiles_per_head)
    place = gl.program_id(0) - first_head * (swizzle_heads * tiles_per_head)
    number = place // swizzle_heads
    kv_head = first_head * swizzle_heads + place - number * swizzle_heads
    sequence, start_k, len_k, key = find(CU_SEQLENS_K, number, sequences, tokens_k, z.BLOCK_N)
    start_q, len_q = span(CU_SEQLENS_Q, sequence, sequences, tokens_q)
    key = gl.where((key < 0) | (key > len_k), len_k, key)
    right += len_k - len_q
    first = gl.maximum(key - right + 1, 0) // z.BLOCK_M
    blocks = gl.maximum((len_q + z.BLOCK_M - 1) // z.BLOCK_M - first, 0)
    blocks = gl.where(key < len_k, blocks, 0)
    start = padded_start(start_q, sequence)
    tile = VarlenKeyTile(
        start * 0, kv_head, kv_head * ratio, kv_head * ratio + ratio - 1, key, len_k - 1, start + first * z.BLOCK_M,
        blocks * z.BLOCK_M, ratio * blocks, start_q + len_q, tokens_q - len_q - start, start_k + len_k,
        tokens_k - len_k,
    )  # fmt: skip
    return tile, len_k, right - start


# ---- Blocks of rows ----


@gluon.jit
def first_block(tile, z, semaphore=None):
    row = tile.row
    if semaphore is not None and z.MASK == CAUSAL:
        row = gl.where(semaphore.interleaved > 0, tile.row + tile.rows - z.BLOCK_M, row)
    return row


@gluon.jit
def next_block(head, row, tile, z, semaphore=None):
    """The block of rows after one: of the same head, or the next head's first. Where query heads are interleaved, the
    last rows of each head come first, then the rows before them."""
    after = row + z.BLOCK_M
    last = after == tile.row + tile.rows
    to_head, to_row = gl.where(last, head + 1, head), gl.where(last, tile.row, after)
    if semaphore is not None and z.MASK == CAUSAL:
        interleaved = semaphore.interleaved
        last = head + 1 == tile.head + interleaved
        to_head = gl.where(interleaved > 0, gl.where(last, tile.head, head + 1), to_head)
        to_row = gl.where(interleaved > 0, gl.where(last, row - z.BLOCK_M, row), to_row)
    return to_head, to_row


# ---- The semaphore ----


@aggregate
class Semaphore:
    """mbarriers between the semaphore warps and the consumers, two a warp, with a phase for each of its blocks."""

    ready: gl.shared_memory_descriptor  # this program may add
    added: gl.shared_memory_descriptor  # all consumers have added
    path: gl.shared_memory_descriptor  # see ``next_offset``; only causal kernels have one of their own
    interleaved: gl.tensor  # how many query heads are interleaved, the last rows first; 0: none

    @gluon.constexpr_function
    def __init__(self, ready, added, path, interleaved):
        self.ready, self.added, self.path, self.interleaved = ready, added, path, interleaved


@gluon.jit
def make_semaphore(tile, padded, consumers: gl.constexpr, warps: gl.constexpr, z):
    """For so many warp groups that add to dQ, and so many semaphore warps."""
    ready = mbarriers(warps, 1)
    interleaved = interleaved_heads(tile.steps // (tile.rows // z.BLOCK_M), z)
    path = ready
    if z.MASK == CAUSAL:
        path = write_path(tile, padded, interleaved, z)
    return Semaphore(ready, mbarriers(warps, consumers), path, interleaved)


@gluon.jit
def interleaved_heads(ratio, z):
    """``Semaphore.interleaved`` where ``ratio`` query heads share a head of K."""
    interleaved = ratio * 0
    if z.MASK == CAUSAL:
        interleaved = gl.where(ratio > MOST_HEADS_IN_ORDER, ratio, 0)
    return interleaved


# What the consumers need to follow ``next_block``, in shared memory: the offset of the first block from the start of
# the tile's rows; and, for a step to the next block and for each COUNT-th step, the change of that offset and of the
# row of DQ32.
START, COUNT, STEP, STEP_DQ, WRAP, WRAP_DQ = (gl.constexpr(i) for i in range(6))


@gluon.jit
def write_path(tile, padded, interleaved, z):
    path = gl.allocate_shared_memory(gl.int32, [6, 1], mbarrier.MBarrierLayout())
    some = interleaved > 0
    back = z.BLOCK_M - tile.rows
    store_scalar(path, START, gl.where(some, -back, 0), 4)
    store_scalar(path, COUNT, gl.where(some, interleaved, tile.rows // z.BLOCK_M), 4)
    store_scalar(path, STEP, gl.where(some, 0, z.BLOCK_M), 4)
    store_scalar(path, STEP_DQ, gl.where(some, padded, z.BLOCK_M), 4)
    store_scalar(path, WRAP, gl.where(some, -z.BLOCK_M, back), 4)
    store_scalar(path, WRAP_DQ, gl.where(some, (1 - interleaved) * padded - z.BLOCK_M, padded + back), 4)
    return path


@gluon.jit
def next_offset(at, c, semaphore):
    """After a block that starts ``at`` rows after the first of its head, the c-th since the last wrap: those of the
    next block, and how many rows of DQ32 lie between both."""
    path = semaphore.path
    c += 1
    wraps = c == load_scalar(path, COUNT, 4)
    at += gl.where(wraps, load_scalar(path, WRAP, 4), load_scalar(path, STEP, 4))
    return (
        at,
        gl.where(wraps, 0, c),
        gl.where(wraps, load_scalar(path, WRAP_DQ, 4), load_scalar(path, STEP_DQ, 4)),
    )


@gluon.jit
def wait_ready(i, semaphore):
    """A consumer, before it adds to the i-th block of rows."""
    warps: gl.constexpr = semaphore.ready.shape[0]
    mbarrier.wait(semaphore.ready.index(i % warps), (i // warps) & 1)


@gluon.jit
def arrive_added(i, semaphore):
    """A consumer, after it has added to the i-th block of rows."""
    gl.thread_barrier()  # of the warp group
    mbarrier.arrive(semaphore.added.index(i % semaphore.ready.shape[0]), count=1)


# All lanes of the warp do the same. Acquire and release order what the consumers have added, too, as their mbarriers
# lie between.
ACQUIRE = gl.constexpr("""{
.reg .pred other;
again:
ld.acquire.gpu.global.s32 $0, [$1];
setp.ne.s32 other, $0, $2;
@other bra again;
}""")
RELEASE = gl.constexpr("st.release.gpu.global.s32 [$1], $2; mov.b32 $0, $2;")


@gluon.jit
def semaphore_warp(
    z, tile, SEMAPHORE, semaphore, tiles_per_head, heads, padded, right, w: gl.constexpr
):  # fmt: skip
    """Semaphore warp w. SEMAPHORE is [batch, heads, padded / BLOCK_M], zeros before the launch."""
    warps: gl.constexpr = semaphore.ready.shape[0]
    number = tile.key // z.BLOCK_N
    alone = 0  # rows before it are not seen by the programs before, which have later keys
    if z.MASK:
        number = tiles_per_head - 1 - number
        alone = gl.maximum(tile.key + z.BLOCK_N - right + 1, 0) // z.BLOCK_M * z.BLOCK_M
    if z.MASK == CAUSAL:  # where query heads are interleaved, the programs before see all its rows
        number = gl.where(semaphore.interleaved > 0, tile.key // z.BLOCK_N, number)
        alone = gl.where(semaphore.interleaved > 0, 0, alone)
    head = tile.head
    row = first_block(tile, z, semaphore)
    for _ in gl.static_range(w):
        head, row = next_block(head, row, tile, z, semaphore)
    for i in range(w, tile.steps, warps):
        block = (tile.batch * heads + head) * (padded // z.BLOCK_M) + row // z.BLOCK_M
        at = (SEMAPHORE + block).to(gl.int64)
        mine = gl.where(row < alone, 0, number)
        gl.inline_asm_elementwise(ACQUIRE, "=&r,l,r", [at, mine], gl.int32, False, 1)
        mbarrier.arrive(semaphore.ready.index(w), count=1)
        mbarrier.wait(semaphore.added.index(w), (i // warps) & 1)
        gl.inline_asm_elementwise(RELEASE, "=r,l,r", [at, number + 1], gl.int32, False, 1)
        for _ in gl.static_range(warps):
            head, row = next_block(head, row, tile, z, semaphore)
