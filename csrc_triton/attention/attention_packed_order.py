"""In which order the packed forward by warp groups takes tiles: sequences with the most keys first, so that no long
tile starts late, and a sequence's heads in sections whose keys and values fit into L2 together, so that programs read
the same ones at a time. In a section masked tiles go longest first, each of all its heads.

Where sequences start is on the device. The scheduling warp of each program keeps the numbers of WINDOW sequences at a
time, which follow each other as they lie and have the places for tiles that ``attention_sequences`` gives them. It
sorts them where one window holds all: more than once, that would take longer than short tiles.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from csrc_triton.attention.attention_groups import FULL
from csrc_triton.attention.attention_softmax import here

WINDOW = gl.constexpr(64)  # what is behind the last sequence counts as one
STEP = gl.constexpr(2)  # sequences that all are compared with at a time: more take registers
ROUNDS = gl.constexpr(
    2
)  # tiles of a section that a program has at least, on average: fewer, and it ends unevenly
PAIRS = gl.constexpr(gl.BlockedLayout([1, 2], [32, 1], [1, 1], [1, 0]))  # of sequences, by one warp
OWN = gl.constexpr(gl.SliceLayout(1, gl.BlockedLayout([1, 2], [32, 1], [1, 1], [1, 0])))
FIRST, END, START_Q, LEN_Q, START_K, LEN_K, NUMBERS = (gl.constexpr(i) for i in range(7))  # of a sequence


@aggregate
class Packed:
    """Where sequences start, the tokens of all, and the tiles of a launch."""

    bounds_q: gl.tensor
    bounds_k: gl.tensor
    sequences: gl.tensor
    tokens_q: gl.tensor
    tokens_k: gl.tensor
    tiles: gl.tensor  # of all heads, or more
    heads: gl.tensor  # of Q
    ratio: gl.tensor  # heads of Q a head of K
    together: gl.tensor  # keys of one head that, with their values, fit into L2
    right: gl.tensor  # row r of a sequence with as many keys as rows sees keys before r + right

    @gluon.constexpr_function
    def __init__(
        self, bounds_q, bounds_k, sequences, tokens_q, tokens_k, tiles, heads, ratio, together, right
    ):
        self.bounds_q, self.bounds_k, self.sequences = bounds_q, bounds_k, sequences
        self.tokens_q, self.tokens_k = tokens_q, tokens_k
        self.tiles, self.heads, self.ratio, self.together, self.right = tiles, heads, ratio, together, right


@gluon.jit
def divided(a, b):
    """a / b of numbers that are not below 0: unsigned, as rounding towards zero takes registers."""
    return (a.to(gl.uint32) // b.to(gl.uint32)).to(gl.int32)


@gluon.jit
def whole(a, b):
    """How many b hold a."""
    return divided(a + b - 1, b)


@gluon.jit
def blocks(rows, block: gl.constexpr):
    return (rows.to(gl.uint32) // block).to(gl.int32)


@gluon.jit
def start_at(BOUNDS, s, packed, tokens):
    """Where sequences ``s`` start; behind the last one, where that ends."""
    return gl.minimum(gl.maximum(gl.load(BOUNDS + gl.minimum(s, packed.sequences)), 0), tokens)


@gluon.jit
def spans(BOUNDS, s, packed, tokens):
    """(start, length) of sequences ``s``."""
    start = start_at(BOUNDS, s, packed, tokens)
    return start, gl.maximum(start_at(BOUNDS, s + 1, packed, tokens) - start, 0)


@gluon.jit
def rows_of(s, packed):
    """``spans`` of queries: the sequence behind the last one has all that are left."""
    start, length = spans(packed.bounds_q, s, packed, packed.tokens_q)
    return start, gl.where(s == packed.sequences, packed.tokens_q - start, length)


@gluon.jit
def lanes():
    """Of a window's sequences; computed again each time."""
    return here(gl.arange(0, WINDOW, OWN))


@gluon.jit
def order_board():
    """Where the numbers of a window's sequences are kept: the scheduling warp's registers are few."""
    return gl.allocate_shared_memory(gl.int32, [NUMBERS, WINDOW], mbarrier.MBarrierLayout())


@gluon.jit
def first_place(s, packed, block: gl.constexpr):
    """The number of a head's tiles before sequence s, as they lie; of all behind the last one."""
    place = blocks(start_at(packed.bounds_q, s, packed, packed.tokens_q), block) + s
    return gl.where(s <= packed.sequences, place, divided(packed.tiles, packed.heads))


@gluon.jit
def fill_window(s, packed, order, block: gl.constexpr):
    """Write the numbers of sequence ``s`` and those behind it. Sorted, equally long ones keep their order."""
    own = s + lanes()
    start_q, len_q = rows_of(own, packed)
    start_k, len_k = spans(packed.bounds_k, own, packed, packed.tokens_k)
    order.index(START_Q).store(start_q.to(gl.int32))
    order.index(LEN_Q).store(len_q.to(gl.int32))
    order.index(START_K).store(start_k.to(gl.int32))
    order.index(LEN_K).store(len_k.to(gl.int32))
    first = gl.zeros([WINDOW], gl.int32, OWN) + first_place(s, packed, block)
    for i in range(0, gl.where(packed.sequences < WINDOW, packed.sequences + 1, 0), STEP):
        others = s + i + gl.arange(0, STEP, gl.SliceLayout(0, PAIRS))
        _, rows = rows_of(others, packed)
        _, keys = spans(packed.bounds_k, others, packed, packed.tokens_k)
        more = gl.expand_dims(keys, 0) - gl.expand_dims(order.index(LEN_K).load(OWN), 1)
        earlier = gl.expand_dims(others, 0) < gl.expand_dims(own, 1)
        counts = (more > 0) | ((more == 0) & earlier)
        counts = counts & (gl.expand_dims(others, 0) <= packed.sequences)
        tiles = gl.expand_dims(blocks(rows + block - 1, block), 0)
        first += gl.sum(gl.where(counts, tiles, 0), 1)
    tiles = blocks(order.index(LEN_Q).load(OWN) + block - 1, block)
    tiles = gl.where(own <= packed.sequences, tiles, 0)
    order.index(FIRST).store(first.to(gl.int32))
    order.index(END).store((first + tiles).to(gl.int32))
    if packed.sequences >= WINDOW:
        first = blocks(order.index(START_Q).load(OWN), block) + s + lanes()
        end = first + order.index(END).load(OWN) - order.index(FIRST).load(OWN)
        order.index(FIRST).store(first.to(gl.int32))
        order.index(END).store(end.to(gl.int32))


@gluon.jit
def number_of(which: gl.constexpr, here, order):
    """A number of the sequence that ``here`` marks; -1 where none is marked."""
    return gl.max(gl.where(here, order.index(which).load(OWN), -1), 0)


@gluon.jit
def place_in(r, tiles, len_k, packed, z):
    """(tile, head) of a sequence's r-th tile. Sections are of nearly the same number of heads of K."""
    if z.MASK == FULL:
        head = divided(r, tiles)
        m = r - head * tiles
    else:
        kv_heads = divided(packed.heads, packed.ratio)
        tiles_a_head = tiles * packed.ratio  # of K
        fitting = divided(packed.together, gl.maximum(len_k, 1))
        enough = whole(gl.num_programs(0) * ROUNDS, tiles_a_head)
        sections = divided(kv_heads, gl.minimum(gl.maximum(fitting, enough), kv_heads))
        section = divided((divided(r, tiles_a_head) + 1) * sections - 1, kv_heads)
        first = divided(section * kv_heads, sections)
        heads = (divided((section + 1) * kv_heads, sections) - first) * packed.ratio
        r -= first * tiles_a_head
        m = divided(r, heads)
        head = first * packed.ratio + r - m * heads
        m = tiles - 1 - m
    return m, head
