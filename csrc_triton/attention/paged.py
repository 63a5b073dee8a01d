"""A paged cache: which keys a tile of queries sees, on which pages they lie, and how they get into shared memory.

K and V are (page, row of the page, head, column); TABLE[sequence, i] is the page of the keys from i * page size on, and
SEQUSED_K[sequence] how many keys the sequence has. The last query of a sequence stands at its last key.

Pages may hold anything where no key was written, and before a window: NaN times a probability of 0 is NaN. So values
of such rows are never multiplied. Plain kernels load the nearest key that the tile sees instead. TMA loads boxes of
rows of one page: boxes without such a key are replaced by the nearest box that has one, and the producer sets the other
rows of V's boxes to zero. Scores are masked, whatever they are. Page numbers that the cache does not have count as page
0, and are reported.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.core import _aggregate as aggregate

from csrc_triton.attention.forward import p_exponent
from csrc_triton.attention.pipeline import Pipeline, mbarriers
from csrc_triton.attention.tile_scheduler import LOCAL, TileScheduler
from csrc_triton.attention.varlen import (
    COMPARED,
    END,
    FIRST,
    LEN_K,
    LEN_Q,
    OWN,
    START_K,
    START_Q,
    STEP,
    WINDOW,
    blocks,
    first_tile,
    span,
    starts_of,
    window_index,
)
from csrc_triton.common.fp8 import product_dtype, queries_in, widened

HEAD_DIMS = [64, 128, 256]  # that kernels are written for; others run as the next

# ---- Plain Triton ----


@triton.jit
def report_keys(FLAG, SEQUSED_K, s, capacity):
    """Write a length that the cache can't have to the device error flag; it is not 0."""
    length = tl.load(SEQUSED_K + s)
    tl.store(FLAG, length.to(tl.int64), mask=(length < 0) | (length > capacity))


@triton.jit
def find_rows(CU_SEQLENS, tile, sequences, tokens, ratio, BLOCK: tl.constexpr):
    """As ``varlen.find`` where each token has ``ratio`` rows: (sequence, the tile's first row in it)."""
    low = tile * 0
    high = low + sequences
    while low < high:
        middle = (low + high + 1) // 2
        start, _ = span(CU_SEQLENS, middle, sequences, tokens)
        starts = start * ratio // BLOCK + middle <= tile
        low = tl.where(starts, middle, low)
        high = tl.where(starts, high, middle - 1)
    start, _ = span(CU_SEQLENS, low, sequences, tokens)
    return low, (tile - start * ratio // BLOCK - low) * BLOCK


@triton.jit
def page_of(TABLE, keys, page_bits, some):
    """The pages that hold ``keys``, if there are ``some``. TABLE is the sequence's own."""
    return tl.load(TABLE + (keys >> page_bits), mask=some, other=0)


@triton.jit
def page_offsets(page, keys, page_bits, pages, k_page, k_row, bad):
    """Where in a head of the cache ``keys`` are, which ``page`` holds, and ``bad``, with page numbers that are none in
    it."""
    there = (page >= 0) & (page < pages)
    bad = tl.where(there, bad, page)
    row = keys & ((1 << page_bits) - 1)
    return tl.where(there, page, 0).to(tl.int64) * k_page + row.to(tl.int64) * k_row, bad


@triton.jit
def near_columns(dim, D: tl.constexpr):
    """D columns; instead of those past ``dim``, a multiple of 16, columns of the first 16, so that all may be loaded:
    what they give meets zeros of the queries, or is not stored."""
    columns = tl.arange(0, D)
    unit = columns // 16 * 16
    columns = tl.where(unit < dim, columns, columns - unit)
    return tl.max_contiguous(tl.multiple_of(columns, 16), 16)


@triton.jit
def finalise(m, sums, SINKS, head):
    """(natural logarithm of a row's sum, what its weighted values are multiplied by), from the largest score and the
    sum in base 2; a sink is one more key, whose value is 0."""
    sink = tl.load(SINKS + head, mask=SINKS.to(tl.int64) != 0, other=float("-inf")) * 1.4426950408889634
    top = tl.maximum(m, sink)
    by = tl.exp2(m - top)
    sums = sums * by + tl.exp2(sink - top)
    return (top + tl.log2(sums)) * 0.6931471805599453, tl.where(sums > 0, by / sums, 0.0)


@triton.jit
def attend_pages(
    q, K, V, TABLE, first, last, start, stop, low, high, every_low, every_high, scale, cap, dim, pages, page_bits,
    k_page, k_row, BLOCK_N: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Rows ``q`` over blocks ``first`` to ``last`` - 1 of a head's keys, of which a row sees ``low`` to ``high`` - 1,
    all rows ``every_low`` to ``every_high`` - 1, and some row ``start`` to ``stop`` - 1. Returns P V, each row's
    largest score and its sum in base 2, and page numbers that are none (0: none)."""
    BLOCK_M: tl.constexpr = q.shape[0]
    DTYPE: tl.constexpr = product_dtype(q.dtype, K.dtype.element_ty, PTX)
    SCALED: tl.constexpr = q.dtype != DTYPE
    q, by_row = queries_in(q, DTYPE)
    columns = near_columns(dim, D)
    visible = tl.maximum(high - low, 0).to(tl.uint32, bitcast=True)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    m = tl.full([BLOCK_M], -1.0e30, tl.float32)  # finite: a row that sees no key gives no NaN
    sums = tl.zeros([BLOCK_M], tl.float32)
    bad = tl.zeros([BLOCK_N], tl.int32)
    own = tl.arange(0, BLOCK_N)
    nearest = tl.maximum(tl.minimum(first * BLOCK_N + own, stop - 1), start)
    page = page_of(TABLE, nearest, page_bits, first < last)
    for j in tl.range(first, last, num_stages=STAGES):
        key = j * BLOCK_N
        nearest = tl.maximum(tl.minimum(key + own, stop - 1), start)
        at, bad = page_offsets(page, nearest, page_bits, pages, k_page, k_row, bad)
        # for the next block: else the pipeline would give half of its stages to the table
        following = tl.maximum(tl.minimum(key + BLOCK_N + own, stop - 1), start)
        page = page_of(TABLE, following, page_bits, True)
        k = widened(tl.load(K + at[:, None] + columns[None, :]), DTYPE, PTX, False)
        s = tl.dot(q, tl.trans(k))
        if SCALED:
            s *= by_row[:, None]
        if cap != 0.0:  # tanh(x) = 1 - 2 / (1 + exp(2 x))
            s = 1.0 - 2.0 / (1.0 + tl.exp2(s * (cap * 2.8853900817779268)))
        s = s * scale
        if (key < every_low) | (key + BLOCK_N > every_high):
            after = (key + own[None, :] - low[:, None]).to(
                tl.uint32, bitcast=True
            )  # one comparison for both ends
            s = tl.where(after < visible[:, None], s, float("-inf"))
        new_m = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - (new_m - p_exponent(DTYPE))[:, None])
        by = tl.exp2(m - new_m)
        m = new_m
        sums = sums * by + tl.sum(p, 1)
        v = widened(tl.load(V + at[:, None] + columns[None, :]), DTYPE, PTX, True)
        acc = tl.dot(p.to(DTYPE), v, acc * by[:, None])
    return acc, m - p_exponent(DTYPE), sums, bad


# ---- Warp groups (Gluon, Hopper) ----


@aggregate
class PagedSequences:
    """All sequences of a call, and the tiles of a launch: what ``varlen.Sequences`` is to packed keys."""

    cu_seqlens_q: gl.tensor
    seqused_k: gl.tensor
    table: gl.tensor
    table_row: gl.tensor
    count: gl.tensor
    tokens_q: gl.tensor
    tiles: gl.tensor  # of all heads, or more
    heads: gl.tensor  # of Q
    ratio: gl.tensor  # heads of Q a head of K
    keys_in_l2: gl.tensor  # keys of one head that fit into L2 with their values
    right: gl.tensor  # row r of a sequence with as many keys as rows sees keys before r + right
    width: gl.tensor  # from r + right - width on
    few: (
        gl.tensor
    )  # sequences with so many queries or fewer are ``paged_tiles``', and tokens behind the last; 0: none
    capacity: gl.tensor  # keys of a sequence, at most
    pages: gl.tensor
    page_bits: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self, cu_seqlens_q, seqused_k, table, table_row, count, tokens_q, tiles, heads, ratio, keys_in_l2, right, width,
        few, capacity, pages, page_bits,
    ):  # fmt: skip
        self.cu_seqlens_q, self.seqused_k, self.table, self.table_row = (
            cu_seqlens_q,
            seqused_k,
            table,
            table_row,
        )
        self.count, self.tokens_q, self.tiles, self.heads, self.ratio = count, tokens_q, tiles, heads, ratio
        self.keys_in_l2, self.right, self.width, self.few = keys_in_l2, right, width, few
        self.capacity, self.pages, self.page_bits = capacity, pages, page_bits


@gluon.jit
def scheduler_of(tile, seqs):
    """The lengths and bounds of a tile's sequence, for ``consume_tile``, which does not look at the order of tiles."""
    return TileScheduler(
        seqs.tiles, seqs.tiles, seqs.heads, seqs.heads, seqs.ratio, seqs.tiles, seqs.heads,
        tile.len_q, tile.len_k, tile.right, tile.right - seqs.width,
    )  # fmt: skip


@gluon.jit
def queries_of(s, seqs):
    """(start, length) of the queries of sequences ``s``, length 0 where they are ``paged_tiles``'; the sequence behind
    the last one has all remaining tokens."""
    start = starts_of(seqs.cu_seqlens_q, s, seqs, seqs.tokens_q)
    length = gl.maximum(starts_of(seqs.cu_seqlens_q, s + 1, seqs, seqs.tokens_q) - start, 0)
    length = gl.where(s == seqs.count, seqs.tokens_q - start, length)
    theirs = (length <= seqs.few) | ((s == seqs.count) & (seqs.few > 0))
    return start, gl.where(theirs, 0, length)


@gluon.jit
def keys_of(s, seqs):
    """How many keys sequences ``s`` have; behind the last one, none."""
    length = gl.load(seqs.seqused_k + s, mask=s < seqs.count, other=0)
    return gl.minimum(gl.maximum(length, 0), seqs.capacity)


@gluon.jit
def fill_paged_window(s, seqs, window, block: gl.constexpr):
    """As ``varlen.fill_window``. START_K is the sequence's number."""
    own = s + window_index()
    start_q, len_q = queries_of(own, seqs)
    window.index(START_Q).store(start_q.to(gl.int32))
    window.index(LEN_Q).store(len_q.to(gl.int32))
    window.index(START_K).store(own.to(gl.int32))
    window.index(LEN_K).store(keys_of(own, seqs).to(gl.int32))
    first = gl.zeros([WINDOW], gl.int32, OWN) + first_tile(s, seqs, block)
    for i in range(0, gl.where(seqs.count < WINDOW, seqs.count + 1, 0), STEP):
        others = s + i + gl.arange(0, STEP, gl.SliceLayout(0, COMPARED))
        _, rows = queries_of(others, seqs)
        more = gl.expand_dims(keys_of(others, seqs), 0) - gl.expand_dims(window.index(LEN_K).load(OWN), 1)
        earlier = gl.expand_dims(others, 0) < gl.expand_dims(own, 1)
        counts = (more > 0) | ((more == 0) & earlier)
        counts = counts & (gl.expand_dims(others, 0) <= seqs.count)
        tiles = gl.expand_dims(blocks(rows + block - 1, block), 0)
        first += gl.sum(gl.where(counts, tiles, 0), 1)
    tiles = blocks(window.index(LEN_Q).load(OWN) + block - 1, block)
    tiles = gl.where(own <= seqs.count, tiles, 0)
    if seqs.count >= WINDOW:
        first = blocks(window.index(START_Q).load(OWN), block) + s + window_index()
    window.index(FIRST).store(first.to(gl.int32))
    window.index(END).store((first + tiles).to(gl.int32))


@gluon.jit
def load_rows_of_q(Q, end, head, row, to, stage, dim, z):
    """Start the TMA loads of 64 rows of q, as ``load_tile`` does, but for a box of columns that q does not have: Hopper
    fills it with zeros, yet touches the address that the map starts at, and Q's starts before q, where nothing may be
    mapped. Columns that q has are loaded instead; they meet zeros of K."""
    full = to.full.index(stage)
    mbarrier.expect(full, Q.block_type.nbytes // z.BOX * z.D1)
    for c in gl.static_range(z.D1 // z.BOX):
        part = to.first.index(stage).slice(c * z.BOX, z.BOX, dim=3)
        column = c * z.BOX
        if column >= 192:  # q has some of all others: smaller ones have kernels of their own
            column = gl.where(column < dim, column, 0)
        tma.async_copy_global_to_shared(Q, [end, head, row, column], full, part)


@gluon.jit
def paged_pipeline(tensor_map, barriers: gl.constexpr, z):
    """A pipeline of tiles of BLOCK_N rows that are loaded by boxes, with so many barriers that say what is full."""
    tiles = gl.allocate_shared_memory(tensor_map.dtype, [z.STAGES, 1, 1, z.BLOCK_N, z.D1], tensor_map.layout)
    return Pipeline(tiles, tiles, mbarriers(barriers, 1), mbarriers(z.STAGES, z.WARP_GROUPS))


@gluon.jit
def row_of_box(key, i, start, stop, BOX_KEYS: gl.constexpr):
    """The first key of the block's i-th box; of one without any key of [start, stop) of the nearest that has one."""
    return gl.maximum(gl.minimum(key + i * BOX_KEYS, stop - 1), start) // BOX_KEYS * BOX_KEYS


@gluon.jit
def pages_of_block(sequence, key, start, stop, seqs, BOX_KEYS: gl.constexpr, z):
    """The page numbers of the boxes of the block of keys from ``key`` on: all loads are on their way at once."""
    pages = ()
    for i in gl.static_range(z.BLOCK_N // BOX_KEYS):
        row = row_of_box(key, i, start, stop, BOX_KEYS)
        at = seqs.table + (sequence * seqs.table_row + (row >> seqs.page_bits))
        pages = pages + (gl.load(at, mask=stop > 0, other=0),)  # noqa: RUF005 (Triton knows no other way)
    return pages


@gluon.jit
def load_pages(tensor_map, pages, head, key, start, stop, to, full, seqs, FLAG, REPORT: gl.constexpr, z):
    """Start the TMA loads of the block of keys from ``key`` on. REPORT page numbers that are none, or not."""
    BOX_KEYS: gl.constexpr = tensor_map.block_shape[2]
    BOXES: gl.constexpr = z.BLOCK_N // BOX_KEYS
    mbarrier.expect(full, tensor_map.block_type.nbytes * (z.D1 // z.BOX) * BOXES)
    for i in gl.static_range(BOXES):
        row = row_of_box(key, i, start, stop, BOX_KEYS) & ((1 << seqs.page_bits) - 1)
        page = pages[i]
        there = (page >= 0) & (page < seqs.pages)
        if REPORT:
            gl.store(FLAG, page.to(gl.int64), mask=there == 0)
        page = gl.where(there, page, 0)
        for c in gl.static_range(z.D1 // z.BOX):
            part = to.slice(i * BOX_KEYS, BOX_KEYS, dim=2).slice(c * z.BOX, z.BOX, dim=3)
            tma.async_copy_global_to_shared(tensor_map, [page, head, row, c * z.BOX], full, part)


@gluon.jit
def zero_rows(tile, low, high, z):
    """Set rows ``low`` to ``high`` - 1 of a block of V to zero, by the producer warp. Zeros need no swizzled layout,
    whose addresses would take registers from all warps: a row is 128 bytes of each 64 columns, which follow each
    other as [D1 / 64, BLOCK_N, 64]."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    EIGHT: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    PANELS: gl.constexpr = z.D1 // 64
    rows = tile._reinterpret(gl.int32, [PANELS * z.BLOCK_N, 32], mbarrier.MBarrierLayout())
    eights = tile._reinterpret(gl.int32, [PANELS * z.BLOCK_N // 8, 256], mbarrier.MBarrierLayout())
    first = gl.minimum((low + 7) // 8, high // 8)
    last = high // 8
    for r in range(low, gl.minimum(first * 8, high)):
        for c in gl.static_range(PANELS):
            rows.index(c * z.BLOCK_N + r).store(gl.zeros([32], gl.int32, ONE))
    for r in range(first, last):
        for c in gl.static_range(PANELS):
            eights.index(c * (z.BLOCK_N // 8) + r).store(gl.zeros([256], gl.int32, EIGHT))
    for r in range(gl.maximum(last * 8, low), high):
        for c in gl.static_range(PANELS):
            rows.index(c * z.BLOCK_N + r).store(gl.zeros([32], gl.int32, ONE))


@gluon.jit
def zero_unseen(tile, key, start, stop, z):
    """Set the rows of the block of V from ``key`` on to zero that hold no key of [start, stop)."""
    if z.MASK == LOCAL:
        zero_rows(tile, 0, gl.minimum(gl.maximum(start - key, 0), z.BLOCK_N), z)
    zero_rows(tile, gl.minimum(gl.maximum(stop - key, 0), z.BLOCK_N), z.BLOCK_N, z)
    fence_async_shared()
