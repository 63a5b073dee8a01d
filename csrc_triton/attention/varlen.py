"""Variable-length (packed) sequences: where they start, and in which order the warp-specialised forward takes tiles.

CU_SEQLENS holds where each sequence starts, and where the last one ends. It is in device memory, so the numbering of
tiles does not depend on its values: sequence s has the tiles from CU_SEQLENS[s] // BLOCK + s on, as many as it needs
or one more. Tokens behind the last sequence count as one more sequence, which sees no keys. Whatever CU_SEQLENS holds,
rows stay within the tensors.

The tile scheduler of the forward takes the sequences with the most keys first, so that no long tile starts last. Tiles
of several heads are interleaved (L2 swizzle), as many as have their K and V in L2 together; masked tiles of such a set
go longest first. A scheduling warp of each program keeps WINDOW sequences at a time in shared memory. It sorts them
where one window holds all: sorting several would take longer than short tiles.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from csrc_triton.attention.online_softmax import no_hoist
from csrc_triton.attention.pipeline import load_scalar, store_scalar
from csrc_triton.attention.tile_scheduler import FULL, TileScheduler

# Parts of the declarations of all varlen kernels.
DTYPES = {"dtype": ["bf16", "fp16"]}
CU_SEQLENS = {"CU_SEQLENS_Q": "*i32", "CU_SEQLENS_K": "*i32"}
STRIDES = {"q_head": "i32", "q_row": "i32", "k_head": "i32", "k_row": "i32", "v_head": "i32", "v_row": "i32"}
SIZES = {"sequences": "i32", "tokens_q": "i32", "tokens_k": "i32", "right": "i32"}
MAX_SEQLENS = {"max_seqlen_q": "i32", "max_seqlen_k": "i32"}
UNIT = tl.constexpr(128)  # rows; a multiple of every kernel's block


@triton.jit
def start_of(CU_SEQLENS, s, tokens):
    return tl.minimum(tl.maximum(tl.load(CU_SEQLENS + s), 0), tokens)


@triton.jit
def span(CU_SEQLENS, s, sequences, tokens):
    """(start, length) of sequence s; the one behind the last has length 0."""
    start = start_of(CU_SEQLENS, s, tokens)
    return start, tl.maximum(start_of(CU_SEQLENS, tl.minimum(s + 1, sequences), tokens) - start, 0)


@triton.jit
def find(CU_SEQLENS, tile, sequences, tokens, BLOCK: tl.constexpr):
    """(sequence, its start, its length, the tile's first row in it) by binary search. Where that row is outside of the
    sequence there is nothing to do."""
    low = tile * 0
    high = low + sequences
    while low < high:
        middle = (low + high + 1) // 2
        starts = start_of(CU_SEQLENS, middle, tokens) // BLOCK + middle <= tile
        low = tl.where(starts, middle, low)
        high = tl.where(starts, high, middle - 1)
    start, length = span(CU_SEQLENS, low, sequences, tokens)
    length = tl.where(low == sequences, tokens - start, length)
    return low, start, length, (tile - start // BLOCK - low) * BLOCK


@triton.jit
def padded_start(start, sequence):
    """The first row of a sequence in a tensor where each sequence is padded to tiles of UNIT rows."""
    return (start // UNIT + sequence) * UNIT


@triton.jit
def report(FLAG, CU_SEQLENS, s, tokens, max_seqlen):
    """Write to the device error flag what is wrong with sequence s: where the first one starts if that is not 0, where
    s ends if that is past the tokens, its length if that is negative or above ``max_seqlen``. None of these is 0."""
    start = tl.load(CU_SEQLENS + s).to(tl.int64)
    end = tl.load(CU_SEQLENS + s + 1).to(tl.int64)
    length = end - start
    found = tl.where((length < 0) | (length > max_seqlen), length, 0)
    found = tl.where(end > tokens, end, found)
    found = tl.where((s == 0) & (start != 0), start, found)
    tl.store(FLAG, found, mask=found != 0)


WINDOW = gl.constexpr(64)  # sequences, with the one behind the last
STEP = gl.constexpr(2)  # sequences that all of a window are compared with at once: more take registers
MIN_TILES = gl.constexpr(
    2
)  # tiles of a set of heads for each program, on average: with fewer they end unevenly
COMPARED = gl.constexpr(
    gl.BlockedLayout([1, 2], [32, 1], [1, 1], [1, 0])
)  # (own, other) sequence, of one warp
OWN = gl.constexpr(gl.SliceLayout(1, gl.BlockedLayout([1, 2], [32, 1], [1, 1], [1, 0])))
FIRST, END, START_Q, LEN_Q, START_K, LEN_K, FIELDS = (
    gl.constexpr(i) for i in range(7)
)  # of a window's sequence
COORDINATES = gl.constexpr(9)  # values that are broadcast for each tile


@aggregate
class Sequences:
    """All sequences of a call, and the tiles of a launch."""

    cu_seqlens_q: gl.tensor
    cu_seqlens_k: gl.tensor
    count: gl.tensor
    tokens_q: gl.tensor
    tokens_k: gl.tensor
    tiles: gl.tensor  # of all heads, or more
    heads: gl.tensor  # of Q
    ratio: gl.tensor  # heads of Q a head of K
    keys_in_l2: gl.tensor  # keys of one head that fit into L2 with their values
    right: gl.tensor  # row r of a sequence with as many keys as rows sees keys before r + right

    @gluon.constexpr_function
    def __init__(
        self,
        cu_seqlens_q,
        cu_seqlens_k,
        count,
        tokens_q,
        tokens_k,
        tiles,
        heads,
        ratio,
        keys_in_l2,
        right,
    ):
        self.cu_seqlens_q, self.cu_seqlens_k, self.count = cu_seqlens_q, cu_seqlens_k, count
        self.tokens_q, self.tokens_k = tokens_q, tokens_k
        self.tiles, self.heads, self.ratio = tiles, heads, ratio
        self.keys_in_l2, self.right = keys_in_l2, right


@gluon.jit
def divide(a, b):
    """a // b of numbers that are not negative: unsigned, as rounding towards zero takes registers."""
    return (a.to(gl.uint32) // b.to(gl.uint32)).to(gl.int32)


@gluon.jit
def divide_up(a, b):
    return divide(a + b - 1, b)


@gluon.jit
def blocks(rows, block: gl.constexpr):
    return (rows.to(gl.uint32) // block).to(gl.int32)


@gluon.jit
def starts_of(CU_SEQLENS, s, seqs, tokens):
    """Where sequences ``s`` start; of those behind the last one, where that ends."""
    return gl.minimum(gl.maximum(gl.load(CU_SEQLENS + gl.minimum(s, seqs.count)), 0), tokens)


@gluon.jit
def spans(CU_SEQLENS, s, seqs, tokens):
    """(start, length) of sequences ``s``."""
    start = starts_of(CU_SEQLENS, s, seqs, tokens)
    return start, gl.maximum(starts_of(CU_SEQLENS, s + 1, seqs, tokens) - start, 0)


@gluon.jit
def query_spans(s, seqs):
    """``spans`` of queries; the sequence behind the last one has all remaining tokens."""
    start, length = spans(seqs.cu_seqlens_q, s, seqs, seqs.tokens_q)
    return start, gl.where(s == seqs.count, seqs.tokens_q - start, length)


@gluon.jit
def window_index():
    """0 to WINDOW - 1; recomputed where it is used."""
    return no_hoist(gl.arange(0, WINDOW, OWN))


@gluon.jit
def window_memory():
    """A window's sequences in shared memory: the scheduling warp has few registers."""
    return gl.allocate_shared_memory(gl.int32, [FIELDS, WINDOW], mbarrier.MBarrierLayout())


@gluon.jit
def first_tile(s, seqs, block: gl.constexpr):
    """How many tiles a head has before sequence s, in the order of CU_SEQLENS; behind the last sequence, all."""
    first = blocks(starts_of(seqs.cu_seqlens_q, s, seqs, seqs.tokens_q), block) + s
    return gl.where(s <= seqs.count, first, divide(seqs.tiles, seqs.heads))


@gluon.jit
def fill_window(s, seqs, window, block: gl.constexpr):
    """Write sequences ``s`` to ``s`` + WINDOW - 1 to the window. Sorting keeps the order of equally long ones."""
    own = s + window_index()
    start_q, len_q = query_spans(own, seqs)
    start_k, len_k = spans(seqs.cu_seqlens_k, own, seqs, seqs.tokens_k)
    window.index(START_Q).store(start_q.to(gl.int32))
    window.index(LEN_Q).store(len_q.to(gl.int32))
    window.index(START_K).store(start_k.to(gl.int32))
    window.index(LEN_K).store(len_k.to(gl.int32))
    first = gl.zeros([WINDOW], gl.int32, OWN) + first_tile(s, seqs, block)
    for i in range(0, gl.where(seqs.count < WINDOW, seqs.count + 1, 0), STEP):
        others = s + i + gl.arange(0, STEP, gl.SliceLayout(0, COMPARED))
        _, rows = query_spans(others, seqs)
        _, keys = spans(seqs.cu_seqlens_k, others, seqs, seqs.tokens_k)
        more = gl.expand_dims(keys, 0) - gl.expand_dims(window.index(LEN_K).load(OWN), 1)
        earlier = gl.expand_dims(others, 0) < gl.expand_dims(own, 1)
        counts = (more > 0) | ((more == 0) & earlier)
        counts = counts & (gl.expand_dims(others, 0) <= seqs.count)
        tiles = gl.expand_dims(blocks(rows + block - 1, block), 0)
        first += gl.sum(gl.where(counts, tiles, 0), 1)
    tiles = blocks(window.index(LEN_Q).load(OWN) + block - 1, block)
    tiles = gl.where(own <= seqs.count, tiles, 0)
    window.index(FIRST).store(first.to(gl.int32))
    window.index(END).store((first + tiles).to(gl.int32))
    if seqs.count >= WINDOW:
        first = blocks(window.index(START_Q).load(OWN), block) + s + window_index()
        end = first + window.index(END).load(OWN) - window.index(FIRST).load(OWN)
        window.index(FIRST).store(first.to(gl.int32))
        window.index(END).store(end.to(gl.int32))


@gluon.jit
def selected(field: gl.constexpr, select, window):
    """A field of the sequence that ``select`` marks; -1 where none is marked."""
    return gl.max(gl.where(select, window.index(field).load(OWN), -1), 0)


@gluon.jit
def decode(r, tiles, len_k, seqs, z):
    """(tile, head) of a sequence's r-th tile. Sets of interleaved heads have nearly the same number of heads of K."""
    if z.MASK == FULL:
        head = divide(r, tiles)
        m = r - head * tiles
    else:
        kv_heads = divide(seqs.heads, seqs.ratio)
        tiles_per_head = tiles * seqs.ratio  # of K
        fitting = divide(seqs.keys_in_l2, gl.maximum(len_k, 1))
        enough = divide_up(gl.num_programs(0) * MIN_TILES, tiles_per_head)
        sets = divide(kv_heads, gl.minimum(gl.maximum(fitting, enough), kv_heads))
        i = divide((divide(r, tiles_per_head) + 1) * sets - 1, kv_heads)
        first = divide(i * kv_heads, sets)
        heads = (divide((i + 1) * kv_heads, sets) - first) * seqs.ratio
        r -= first * tiles_per_head
        m = divide(r, heads)
        head = first * seqs.ratio + r - m * heads
        m = tiles - 1 - m
    return m, head


@aggregate
class VarlenTile:
    """A tile of a head of Q, and its sequence."""

    t: gl.tensor  # its index in the launch; there is no tile where it is past all
    m: gl.tensor  # its index in its sequence
    head: gl.tensor
    start_q: gl.tensor
    len_q: gl.tensor
    start_k: gl.tensor
    len_k: gl.tensor
    right: gl.tensor  # row r sees keys before r + right
    inside: gl.tensor  # 0 behind the last sequence, else 1

    @gluon.constexpr_function
    def __init__(self, t, m, head, start_q, len_q, start_k, len_k, right, inside):
        self.t, self.m, self.head = t, m, head
        self.start_q, self.len_q, self.start_k, self.len_k = start_q, len_q, start_k, len_k
        self.right, self.inside = right, inside

    @gluon.jit
    def scheduler(self, seqs):
        """This sequence's lengths and bounds, for ``consume_tile``, which does not look at the order of tiles."""
        return TileScheduler(
            seqs.tiles, seqs.tiles, seqs.heads, seqs.heads, seqs.ratio, seqs.tiles, seqs.heads,
            self.len_q, self.len_k, self.right, self.right,
        )  # fmt: skip


@gluon.jit
def find_tile(t, s, window, seqs, z):
    """Tile t, which is in the window from sequence ``s`` on; its ``m`` is -1 where no sequence has that tile."""
    block: gl.constexpr = 64 * z.WARP_GROUPS
    u = divide(t, seqs.heads)
    first = window.index(FIRST).load(OWN)
    select = (first <= u) & (u < window.index(END).load(OWN))
    sequence = gl.max(gl.where(select, s + window_index(), -1), 0)
    start_q, len_q = selected(START_Q, select, window), selected(LEN_Q, select, window)
    start_k, len_k = selected(START_K, select, window), selected(LEN_K, select, window)
    r = gl.maximum(t - selected(FIRST, select, window) * seqs.heads, 0)
    m, head = decode(r, gl.maximum(blocks(len_q + block - 1, block), 1), len_k, seqs, z)
    m = gl.where(sequence >= 0, m, -1)
    inside = (sequence < seqs.count).to(gl.int32)
    return VarlenTile(t, m, head, start_q, len_q, start_k, len_k, seqs.right + len_k - len_q, inside)


@gluon.jit
def broadcast_varlen_tile(tile, i, pipeline):
    """Send the producer and the consumers their i-th tile."""
    mbarrier.wait(pipeline.empty.index(i & 1), ((i >> 1) & 1) ^ 1)
    at = (i & 1) * COORDINATES
    store_scalar(pipeline.first, at, tile.t, 1)
    store_scalar(pipeline.first, at + 1, tile.m, 1)
    store_scalar(pipeline.first, at + 2, tile.head, 1)
    store_scalar(pipeline.first, at + 3, tile.start_q, 1)
    store_scalar(pipeline.first, at + 4, tile.len_q, 1)
    store_scalar(pipeline.first, at + 5, tile.start_k, 1)
    store_scalar(pipeline.first, at + 6, tile.len_k, 1)
    store_scalar(pipeline.first, at + 7, tile.right, 1)
    store_scalar(pipeline.first, at + 8, tile.inside, 1)
    mbarrier.arrive(pipeline.full.index(i & 1), count=1)


@gluon.jit
def broadcast_no_tile(seqs, i, pipeline):
    """Tell them that there is no i-th tile."""
    mbarrier.wait(pipeline.empty.index(i & 1), ((i >> 1) & 1) ^ 1)
    store_scalar(pipeline.first, (i & 1) * COORDINATES, seqs.tiles, 1)
    mbarrier.arrive(pipeline.full.index(i & 1), count=1)


@gluon.jit
def receive_varlen_tile(i, pipeline, WARPS: gl.constexpr):
    """The i-th tile, in registers of WARPS warps."""
    mbarrier.wait(pipeline.full.index(i & 1), (i >> 1) & 1)
    at = (i & 1) * COORDINATES
    values = pipeline.first
    return VarlenTile(
        load_scalar(values, at, WARPS), load_scalar(values, at + 1, WARPS), load_scalar(values, at + 2, WARPS),
        load_scalar(values, at + 3, WARPS), load_scalar(values, at + 4, WARPS), load_scalar(values, at + 5, WARPS),
        load_scalar(values, at + 6, WARPS), load_scalar(values, at + 7, WARPS), load_scalar(values, at + 8, WARPS),
    )  # fmt: skip


@gluon.jit
def release_varlen_tile(i, pipeline):
    """After the last read of the i-th tile's coordinates."""
    mbarrier.arrive(pipeline.empty.index(i & 1), count=1)
