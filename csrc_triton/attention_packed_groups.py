"""Attention forward by warp groups over packed sequences: ``attention_groups``, a tile of a sequence at a time.

- A warp of its own takes tiles from the counter, finds their sequences and tells the producer and the consumers on the
  board. It passes over tiles that no sequence needs: nobody else sees them. The search among the starts of sequences
  waits for memory several times over: done by the producer, it leaves the consumers without keys.
- It takes a tile when the producer asks for it, ASK blocks before the end of the one before: earlier, the tile would
  wait for this program while others are idle, and the last ones end late.
- Tensor maps are over (place, head, row, column); place and row both step from token to token, there are as many rows
  as tokens, and the map starts that many rows before the tensor. Then row ``tokens - length + r`` at place ``start +
  length`` is a sequence's row r, and behind its last one TMA itself ends: rows there read as zeros, whatever lies in
  memory, and are not written. So neither NaN behind a sequence's values nor another sequence's output needs care. The
  trick is that of Triton's ragged_tma and of FlashAttention's output on Hopper. But a box wholly behind a sequence is
  never asked for: an H200 then reads where the map starts, which may be nobody's memory (an illegal access).
- All else is the dense form's tile, whose ``Work`` has the sequence's lengths and bounds. There is one kind of mask, a
  right bound: nearly every sequence ends within a block of keys, which the mask's first step is for in any case.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.core import _aggregate as aggregate

from csrc_triton.attention_consumer import consume_tile
from csrc_triton.attention_groups import Ring, Work, barriers, fetch, pass_turn
from csrc_triton.attention_sequences import find, report, span

NOTES = gl.constexpr(8)  # numbers of a tile on the board


@aggregate
class Packed:
    """Where sequences start, and the tokens of all."""

    bounds_q: gl.tensor
    bounds_k: gl.tensor
    sequences: gl.tensor
    tokens_q: gl.tensor
    tokens_k: gl.tensor

    @gluon.constexpr_function
    def __init__(self, bounds_q, bounds_k, sequences, tokens_q, tokens_k):
        self.bounds_q, self.bounds_k, self.sequences = bounds_q, bounds_k, sequences
        self.tokens_q, self.tokens_k = tokens_q, tokens_k


@aggregate
class Tile:
    """A tile of a head of Q, and its sequence."""

    number: gl.tensor  # of all the launch's; from as many as it has on, there is no tile
    at: gl.tensor  # its number in its sequence
    head: gl.tensor
    start_q: gl.tensor
    len_q: gl.tensor
    start_k: gl.tensor
    len_k: gl.tensor
    inside: gl.tensor  # 0 behind the last sequence, else 1

    @gluon.constexpr_function
    def __init__(self, number, at, head, start_q, len_q, start_k, len_k, inside):
        self.number, self.at, self.head = number, at, head
        self.start_q, self.len_q, self.start_k, self.len_k = start_q, len_q, start_k, len_k
        self.inside = inside

    @gluon.jit
    def work(self, of_all):
        """``of_all`` tiles, with this one's lengths and bounds."""
        past = self.len_k - self.len_q
        return Work(
            of_all.tiles, of_all.tiles_a_head, of_all.heads, of_all.all_heads, of_all.ratio, of_all.section,
            of_all.section_heads, self.len_q, self.len_k, of_all.right + past, of_all.left,
        )  # fmt: skip


@gluon.jit
def next_tile(t, work, packed, COUNT, z):
    """Tile t, or the first behind it that the counter gives and that has rows."""
    block: gl.constexpr = 64 * z.GROUPS
    m, _, head = work.tile(gl.minimum(t, work.tiles - 1), z)
    sequence, start_q, len_q, row = find(packed.bounds_q, m, packed.sequences, packed.tokens_q, block)
    while (t < work.tiles) & ((row < 0) | (row >= len_q)):
        t = gl.atomic_add(COUNT, 1) + gl.num_programs(0)
        m, _, head = work.tile(gl.minimum(t, work.tiles - 1), z)
        sequence, start_q, len_q, row = find(packed.bounds_q, m, packed.sequences, packed.tokens_q, block)
    start_k, len_k = span(packed.bounds_k, sequence, packed.sequences, packed.tokens_k)
    inside = (sequence < packed.sequences).to(gl.int32)
    return Tile(t, row // block, head, start_q, len_q, start_k, len_k, inside)


@gluon.jit
def packed_board(readers: gl.constexpr):
    """Where the producer writes the next tile, two deep."""
    numbers = gl.allocate_shared_memory(gl.int32, [2 * NOTES, 1], mbarrier.MBarrierLayout())
    return Ring(numbers, numbers, barriers(2, 1), barriers(2, readers))


@gluon.jit
def write_note(value, at, board):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    board.first.index(at).store(gl.full([1], 0, gl.int32, one) + value)


@gluon.jit
def announce_tile(tile, i, board):
    """Tell the consumers what their i-th tile is."""
    mbarrier.wait(board.free.index(i & 1), ((i >> 1) & 1) ^ 1)
    at = (i & 1) * NOTES
    write_note(tile.number, at, board)
    write_note(tile.at, at + 1, board)
    write_note(tile.head, at + 2, board)
    write_note(tile.start_q, at + 3, board)
    write_note(tile.len_q, at + 4, board)
    write_note(tile.start_k, at + 5, board)
    write_note(tile.len_k, at + 6, board)
    write_note(tile.inside, at + 7, board)
    mbarrier.arrive(board.full.index(i & 1), count=1)


@gluon.jit
def read_note(at, board, WARPS: gl.constexpr):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(board.first.index(at).load(one), 0)


@gluon.jit
def announced_tile(i, board, WARPS: gl.constexpr):
    """The i-th tile, for a group of so many warps."""
    mbarrier.wait(board.full.index(i & 1), (i >> 1) & 1)
    at = (i & 1) * NOTES
    tile = Tile(
        read_note(at, board, WARPS), read_note(at + 1, board, WARPS), read_note(at + 2, board, WARPS),
        read_note(at + 3, board, WARPS), read_note(at + 4, board, WARPS), read_note(at + 5, board, WARPS),
        read_note(at + 6, board, WARPS), read_note(at + 7, board, WARPS),
    )  # fmt: skip
    mbarrier.arrive(board.free.index(i & 1), count=1)
    return tile


@gluon.jit
def schedule_packed(z, work, packed, board, asked, COUNT, FLAG, longest_q, longest_k):
    """The scheduling warp: announces tiles, behind the last one that there is none. At its end it reports what is wrong
    with sequences."""
    i = 0
    tile = next_tile(gl.program_id(0), work, packed, COUNT, z)
    announce_tile(tile, 0, board)
    while tile.number < work.tiles:
        mbarrier.wait(asked.index(0), i & 1)
        i += 1
        tile = next_tile(gl.atomic_add(COUNT, 1) + gl.num_programs(0), work, packed, COUNT, z)
        announce_tile(tile, i, board)
    for s in range(gl.program_id(0), packed.sequences, gl.num_programs(0)):
        report(FLAG, packed.bounds_q, s, packed.tokens_q, longest_q)
        report(FLAG, packed.bounds_k, s, packed.tokens_k, longest_k)
    if gl.atomic_add(COUNT + 1, 1) == gl.num_programs(0) - 1:  # the last one out: zeros for the next launch
        gl.store(COUNT, 0)
        gl.store(COUNT + 1, 0)


@gluon.jit
def clear(to, slot, z):
    """A slot of a ring full of zeros, written by the producer itself."""
    lanes: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    to.first.index(slot).reshape([z.BLOCK_N, z.D1]).store(gl.zeros([z.BLOCK_N, z.D1], to.first.dtype, lanes))
    if z.D2 > 0:
        to.second.index(slot).reshape([z.BLOCK_N, z.D2]).store(
            gl.zeros([z.BLOCK_N, z.D2], to.second.dtype, lanes)
        )
    fence_async_shared()
    mbarrier.arrive(to.full.index(slot), count=1)


@gluon.jit
def produce_packed(z, work, packed, Q, K, V, q, k, v, board, asked, ASK):
    """The producer warp: fills the rings as ``attention_groups.produce``, and asks for the next tile."""
    b = 0  # blocks of keys so far
    i = 0  # tiles so far
    tile = announced_tile(0, board, 1)
    while tile.number < work.tiles:
        row = tile.at * (64 * z.GROUPS)
        first, last = tile.work(work).blocks(row, row + 64 * z.GROUPS, z)
        place_k = tile.start_k + tile.len_k
        past_k = packed.tokens_k - tile.len_k
        for j in range(last - first):
            if j == gl.maximum(last - first - ASK, 0):
                mbarrier.arrive(asked.index(0), count=1)
            key = past_k + (last - 1 - j) * z.BLOCK_N
            slot = b % z.STAGES
            phase = ((b // z.STAGES) & 1) ^ 1
            mbarrier.wait(k.free.index(slot), phase)
            if tile.len_k > 0:
                fetch(K, place_k, tile.head // work.ratio, key, k, slot, z)
            else:  # the one block of no keys: all scores are masked, whatever they are
                mbarrier.arrive(k.full.index(slot), count=1)
            if j == 0:
                past_q = packed.tokens_q - tile.len_q + row
                for g in gl.static_range(z.GROUPS):
                    mbarrier.wait(q.free.index(g), (i & 1) ^ 1)
                    if row + g * 64 < tile.len_q:
                        fetch(Q, tile.start_q + tile.len_q, tile.head, past_q + g * 64, q, g, z)
                    else:  # a group without rows waits all the same
                        mbarrier.arrive(q.full.index(g), count=1)
            mbarrier.wait(v.free.index(slot), phase)
            if tile.len_k > 0:
                fetch(V, place_k, tile.head // work.ratio, key, v, slot, z)
            else:  # 0 times what lay there could be NaN
                clear(v, slot, z)
            b += 1
        i += 1
        tile = announced_tile(i, board, 1)


@gluon.jit
def consume_packed(z, work, packed, q, k, v, board, buffer, Y, LSE, SINKS, scale, g: gl.constexpr):
    """Consumer group g: rows 64 g to 64 g + 63 of each tile."""
    if g == z.GROUPS - 1:
        pass_turn(g, z)  # the first group starts
    rows = gl.arange(0, 64, z.ROW)
    b = 0
    i = 0
    tile = announced_tile(0, board, 4)
    while tile.number < work.tiles:
        b = consume_tile(
            tile.at, 0, tile.head, tile.start_q + tile.len_q, packed.tokens_q - tile.len_q, tile.inside != 0, rows, b,
            i, q, k, v, tile.work(work), buffer, Y, LSE + tile.start_q, packed.tokens_q, SINKS, scale, scale, g, z,
        )  # fmt: skip
        i += 1
        tile = announced_tile(i, board, 4)
    tma.store_wait(0)
