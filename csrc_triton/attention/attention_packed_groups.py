"""Attention forward by warp groups over packed sequences: ``attention_groups``, a tile of a sequence at a time.

- A warp of its own takes tiles from the counter, finds their sequences and tells the producer and the consumers on the
  board: see ``attention_packed_order``. It waits for memory several times over: done by the producer, it leaves the
  consumers without keys.
- It takes a tile when the producer asks for it, ASK blocks before the end of the one before: earlier, the tile would
  wait for this program while others are idle, and the last ones end late.
- Tensor maps are over (place, head, row, column); place and row both step from token to token, there are as many rows
  as tokens, and the map starts that many rows before the tensor. Then row ``tokens - length + r`` at place ``start +
  length`` is a sequence's row r, and behind its last one TMA itself ends: rows there read as zeros, whatever lies in
  memory, and are not written. So neither NaN behind a sequence's values nor another sequence's output needs care. The
  trick is that of Triton's ragged_tma and of FlashAttention's output on Hopper. But a box wholly behind a sequence is
  never asked for: an H200 then reads where the map starts, which may be nobody's memory (an illegal access).
- All else is the dense form's tile, whose ``Work`` has the sequence's lengths and bounds: with a right bound, which is
  out of reach where there is none, or without.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.core import _aggregate as aggregate

from csrc_triton.attention.attention_consumer import Place, consume_tile
from csrc_triton.attention.attention_groups import Ring, Work, barriers, fetch, pass_turn
from csrc_triton.attention.attention_packed_order import (
    END,
    FIRST,
    LEN_K,
    LEN_Q,
    OWN,
    START_K,
    START_Q,
    WINDOW,
    blocks,
    divided,
    fill_window,
    first_place,
    lanes,
    number_of,
    place_in,
)
from csrc_triton.attention.attention_sequences import report

NOTES = gl.constexpr(9)  # numbers of a tile on the board


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
    right: gl.tensor  # row r sees keys before r + right
    inside: gl.tensor  # 0 behind the last sequence, else 1

    @gluon.constexpr_function
    def __init__(self, number, at, head, start_q, len_q, start_k, len_k, right, inside):
        self.number, self.at, self.head = number, at, head
        self.start_q, self.len_q, self.start_k, self.len_k = start_q, len_q, start_k, len_k
        self.right, self.inside = right, inside

    @gluon.jit
    def work(self, packed):
        """This tile's lengths and bounds; the order of tiles is the packed form's own."""
        return Work(
            packed.tiles, packed.tiles, packed.heads, packed.heads, packed.ratio, packed.tiles, packed.heads,
            self.len_q, self.len_k, self.right, self.right,
        )  # fmt: skip


@gluon.jit
def tile_at(t, s, order, packed, z):
    """Tile t, which is of the window from sequence ``s`` on; one that no sequence needs is its -1st."""
    block: gl.constexpr = 64 * z.GROUPS
    u = divided(t, packed.heads)
    first = order.index(FIRST).load(OWN)
    here = (first <= u) & (u < order.index(END).load(OWN))
    sequence = gl.max(gl.where(here, s + lanes(), -1), 0)
    start_q, len_q = number_of(START_Q, here, order), number_of(LEN_Q, here, order)
    start_k, len_k = number_of(START_K, here, order), number_of(LEN_K, here, order)
    r = gl.maximum(t - number_of(FIRST, here, order) * packed.heads, 0)
    at, head = place_in(r, gl.maximum(blocks(len_q + block - 1, block), 1), len_k, packed, z)
    at = gl.where(sequence >= 0, at, -1)
    inside = (sequence < packed.sequences).to(gl.int32)
    return Tile(t, at, head, start_q, len_q, start_k, len_k, packed.right + len_k - len_q, inside)


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
    write_note(tile.right, at + 7, board)
    write_note(tile.inside, at + 8, board)
    mbarrier.arrive(board.full.index(i & 1), count=1)


@gluon.jit
def announce_end(packed, i, board):
    """Tell them that there is no i-th."""
    mbarrier.wait(board.free.index(i & 1), ((i >> 1) & 1) ^ 1)
    write_note(packed.tiles, (i & 1) * NOTES, board)
    mbarrier.arrive(board.full.index(i & 1), count=1)


@gluon.jit
def read_note(at, notes, WARPS: gl.constexpr):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(notes.index(at).load(one), 0)


@gluon.jit
def announced_tile(i, board, WARPS: gl.constexpr):
    """The i-th tile, for a group of so many warps."""
    mbarrier.wait(board.full.index(i & 1), (i >> 1) & 1)
    at = (i & 1) * NOTES
    notes = board.first
    return Tile(
        read_note(at, notes, WARPS), read_note(at + 1, notes, WARPS), read_note(at + 2, notes, WARPS),
        read_note(at + 3, notes, WARPS), read_note(at + 4, notes, WARPS), read_note(at + 5, notes, WARPS),
        read_note(at + 6, notes, WARPS), read_note(at + 7, notes, WARPS), read_note(at + 8, notes, WARPS),
    )  # fmt: skip


@gluon.jit
def free_tile(i, board):
    """Who has read all it needs of the i-th tile lets the board take another one."""
    mbarrier.arrive(board.free.index(i & 1), count=1)


@gluon.jit
def schedule_packed(z, packed, order, board, asked, COUNT, FLAG, longest_q, longest_k):
    """The scheduling warp: announces tiles, behind the last one that there is none. At its end it reports what is wrong
    with sequences."""
    block: gl.constexpr = 64 * z.GROUPS
    i = 0
    s = 0
    fill_window(0, packed, order, block)
    end = first_place(WINDOW, packed, block)
    t = gl.program_id(0)
    while t < packed.tiles:
        while divided(t, packed.heads) >= end:
            s += WINDOW
            fill_window(s, packed, order, block)
            end = first_place(s + WINDOW, packed, block)
        tile = tile_at(t, s, order, packed, z)
        if tile.at >= 0:
            announce_tile(tile, i, board)
            mbarrier.wait(asked.index(0), i & 1)
            i += 1
        if (tile.at < 0) & (packed.sequences < WINDOW):  # sorted, there is none behind the last
            t = packed.tiles
        else:
            t = gl.atomic_add(COUNT, 1) + gl.num_programs(0)
    announce_end(packed, i, board)
    for s in range(gl.program_id(0), packed.sequences, gl.num_programs(0)):
        report(FLAG, packed.bounds_q, s, packed.tokens_q, longest_q)
        report(FLAG, packed.bounds_k, s, packed.tokens_k, longest_k)
    if gl.atomic_add(COUNT + 1, 1) == gl.num_programs(0) - 1:  # the last one out: zeros for the next launch
        gl.store(COUNT, 0)
        gl.store(COUNT + 1, 0)


@gluon.jit
def clear(to, slot, z):
    """A slot of a ring full of zeros, written by the producer itself."""
    clear_words(to.first.index(slot), z.BLOCK_N * z.D1)
    if z.D2 > 0:
        clear_words(to.second.index(slot), z.BLOCK_N * z.D2)
    fence_async_shared()
    mbarrier.arrive(to.full.index(slot), count=1)


@gluon.jit
def clear_words(panel, values: gl.constexpr):
    """``values`` of 16 bits; zeros need no swizzle, whose addresses would take registers from all tiles."""
    lanes: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    words = panel._reinterpret(gl.int32, [values // 2], mbarrier.MBarrierLayout())
    words.store(gl.zeros([values // 2], gl.int32, lanes))


@gluon.jit
def produce_packed(z, packed, Q, K, V, q, k, v, board, asked, ASK):
    """The producer warp: fills the rings as ``attention_groups.produce``, and asks for the next tile."""
    b = 0  # blocks of keys so far
    i = 0  # tiles so far
    tile = announced_tile(0, board, 1)
    while tile.number < packed.tiles:
        free_tile(i, board)
        row = tile.at * (64 * z.GROUPS)
        first, last = tile.work(packed).blocks(row, row + 64 * z.GROUPS, z)
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
                fetch(K, place_k, tile.head // packed.ratio, key, k, slot, z)
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
                fetch(V, place_k, tile.head // packed.ratio, key, v, slot, z)
            else:  # 0 times what lay there could be NaN
                clear(v, slot, z)
            b += 1
        i += 1
        tile = announced_tile(i, board, 1)


@aggregate
class Announced:
    """The place of the i-th tile's rows, read from the board when it is asked for: while keys are walked, registers are
    few."""

    notes: gl.shared_memory_descriptor
    at: gl.tensor
    tokens_q: gl.tensor

    @gluon.constexpr_function
    def __init__(self, notes, at, tokens_q):
        self.notes, self.at, self.tokens_q = notes, at, tokens_q

    @gluon.jit
    def found(self):
        at = read_note(self.at + 1, self.notes, 4)
        head = read_note(self.at + 2, self.notes, 4)
        start = read_note(self.at + 3, self.notes, 4)
        length = read_note(self.at + 4, self.notes, 4)
        inside = read_note(self.at + 8, self.notes, 4)
        lse = head.to(gl.int64) * self.tokens_q.to(gl.uint32) + start
        return Place(at, start + length, head, self.tokens_q - length, lse, length, inside != 0)


@gluon.jit
def consume_packed(z, packed, q, k, v, board, buffer, Y, LSE, SINKS, scale, g: gl.constexpr):
    """Consumer group g: rows 64 g to 64 g + 63 of each tile."""
    if g == z.GROUPS - 1:
        pass_turn(g, z)  # the first group starts
    b = 0
    i = 0
    tile = announced_tile(0, board, 4)
    while tile.number < packed.tiles:
        place = Announced(board.first, (i & 1) * NOTES, packed.tokens_q)
        b = consume_tile(
            tile.at, place, b, i, q, k, v, tile.work(packed), buffer, Y, LSE, SINKS, scale, scale, g, z
        )
        free_tile(i, board)
        i += 1
        tile = announced_tile(i, board, 4)
    tma.store_wait(0)
