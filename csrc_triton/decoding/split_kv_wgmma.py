"""Split KV with TMA and wgmma (Gluon, Hopper), in one launch.

Each sequence is split, and the last program of a sequence's head to end combines the parts. In short calls all but the
loads counts: q is loaded before anything is known, then the length, then the first STAGES blocks of K and V, with no
division on the way. Products are transposed, K Q^T and V^T P^T: the 64 rows of wgmma are keys and columns of values,
and its columns are rows of q (BLOCK_M: 8, 16 or 32). So little is computed for rows that are not there. Programs count
in COUNTERS who has ended; the last finds all parts in L2, combines them in their order, so that the bits do not depend
on which one is last, and resets the counter.

TMA loads whole blocks. Memory that no key was written to may hold anything, so values outside of a tile's keys are set
to zero.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from csrc_triton.attention.pipeline import mbarriers
from csrc_triton.common.pdl_begin import begin
from csrc_triton.decoding.split_kv import (
    NO_SCORE,
    Sequences,
    finalise,
    length_of,
    row_of,
    sink_of,
    visible_blocks,
    visible_keys,
)


@aggregate
class Rows:
    """The rows of q of a sequence and one head of K."""

    Q: gl.tensor
    q_token: gl.tensor
    q_head: gl.tensor
    dim: gl.tensor
    kv_heads: gl.tensor
    ratio: gl.tensor  # heads of q a head of K
    by_ratio: gl.tensor  # see ``token_of``
    head: gl.tensor  # of K
    count: gl.tensor

    @gluon.constexpr_function
    def __init__(self, Q, q_token, q_head, dim, kv_heads, ratio, by_ratio, head, count):
        self.Q, self.q_token, self.q_head, self.dim = Q, q_token, q_head, dim
        self.kv_heads, self.ratio, self.by_ratio = kv_heads, ratio, by_ratio
        self.head, self.count = head, count


@aggregate
class Results:
    """Where results and partial results go, and what they need besides."""

    OUT: gl.tensor
    LSE: gl.tensor
    OUT_PARTIAL: gl.tensor
    LSE_PARTIAL: gl.tensor
    FLAG: gl.tensor
    SINKS: gl.tensor

    @gluon.constexpr_function
    def __init__(self, OUT, LSE, OUT_PARTIAL, LSE_PARTIAL, FLAG, SINKS):
        self.OUT, self.LSE, self.OUT_PARTIAL, self.LSE_PARTIAL = OUT, LSE, OUT_PARTIAL, LSE_PARTIAL
        self.FLAG, self.SINKS = FLAG, SINKS


@gluon.constexpr_function
def vector_layout(columns):
    """Rows of 16-bit elements, 16 bytes a thread."""
    across = min(columns // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The next stage of a pipeline, and its phase."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def zero_rows_outside(tile, key, start, stop):
    """Set a block's rows to zero that hold no keys of [start, stop), 16 at a time, for few registers. Rows are kept or
    zeroed, so the order of their elements is free: of each 64 columns they are 128 bytes, BLOCK_N rows behind each
    other."""
    PLAIN: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    BLOCK_N: gl.constexpr = tile.shape[2]
    PANELS: gl.constexpr = tile.shape[3] // 64
    groups = tile._reinterpret(gl.int32, [PANELS * BLOCK_N // 16, 512], mbarrier.MBarrierLayout())
    row = gl.arange(0, 512, PLAIN) // 32
    for i in range(BLOCK_N // 16):
        first = key + i * 16
        if (first < start) | (first + 16 > stop):
            valid = (first + row >= start) & (first + row < stop)
            for c in gl.static_range(PANELS):
                group = groups.index(c * (BLOCK_N // 16) + i)
                loaded = group.load(PLAIN)
                group.store(gl.where(valid, loaded, gl.zeros_like(loaded)))


@aggregate
class Cache:
    """A head's keys and values of one sequence: tensor maps, the table of its pages, and the keys that tokens see."""

    K: gl.nvidia.hopper.tma.tensor_descriptor
    V: gl.nvidia.hopper.tma.tensor_descriptor
    TABLE: gl.tensor
    sequence: gl.tensor
    head: gl.tensor
    start: gl.tensor
    stop: gl.tensor
    pages: gl.tensor
    page_bits: gl.tensor

    @gluon.constexpr_function
    def __init__(self, K, V, TABLE, sequence, head, start, stop, pages, page_bits):
        self.K, self.V, self.TABLE, self.sequence, self.head = K, V, TABLE, sequence, head
        self.start, self.stop, self.pages, self.page_bits = start, stop, pages, page_bits


@gluon.constexpr_function
def parts_layout(splits, rows):
    """(split, column, row) of fp32, where a thread has all splits of its elements."""
    return gl.BlockedLayout([splits, 1, 4], [1, 128 // rows, rows // 4], [1, 4, 1], [2, 1, 0])


@gluon.constexpr_function
def weights_layout(splits):
    """(split, row), where a warp has all splits of its rows."""
    down = min(splits, 16)
    return gl.BlockedLayout([splits // down, 1], [down, 32 // down], [1, 4], [0, 1])


@gluon.jit
def split_blocks(split, splits, by_splits, blocks):
    """(first block of a split, how many it has, splits that have any); by_splits is 2^32 // splits + 1, and splits *
    splits * blocks is below 2^32: one multiplication for a division."""
    n = gl.minimum(splits, blocks)
    first = split
    last = split + 1
    if blocks > splits:
        by = by_splits.to(gl.uint32, bitcast=True)
        first = gl.umulhi((split * blocks).to(gl.uint32, bitcast=True), by).to(gl.int32, bitcast=True)
        last = gl.umulhi((split * blocks + blocks).to(gl.uint32, bitcast=True), by).to(gl.int32, bitcast=True)
        first = gl.where(splits == 1, 0, first)
        last = gl.where(splits == 1, blocks, last)
    return first, gl.where(split < n, last - first, 0), n


@gluon.jit
def row_of_box(cache, key, i: gl.constexpr, BOX_KEYS: gl.constexpr):
    """The first key of the i-th box of a block; of one outside of [start, stop) of the nearest inside."""
    return gl.maximum(gl.minimum(key + i * BOX_KEYS, cache.stop - 1), cache.start) // BOX_KEYS * BOX_KEYS


@gluon.jit
def pages_of(cache, key, BLOCK_N: gl.constexpr, PAGED: gl.constexpr):
    """The pages of a block's boxes: all loads are on their way at once."""
    BOX_KEYS: gl.constexpr = cache.K.block_shape[2]
    pages = ()
    for i in gl.static_range(BLOCK_N // BOX_KEYS):
        if PAGED:
            row = row_of_box(cache, key, i, BOX_KEYS)
            pages = pages + (gl.load(cache.TABLE + (row >> cache.page_bits)),)  # noqa: RUF005 (as Triton wants it)
    return pages


@gluon.jit
def unknown_of(unknown, pages, cache, PAGED: gl.constexpr):
    """``unknown``, or one of the pages that is not there."""
    if PAGED:
        for i in gl.static_range(len(pages)):
            unknown = gl.where((pages[i] >= 0) & (pages[i] < cache.pages), unknown, pages[i])
    return unknown


@gluon.jit
def load_keys(of, to, full, cache, key, pages, BLOCK_N: gl.constexpr, D: gl.constexpr, PAGED: gl.constexpr):
    """Start the TMA loads of a block of K or V, of pages box by box."""
    BOX: gl.constexpr = of.block_shape[3]
    BOX_KEYS: gl.constexpr = of.block_shape[2]
    mbarrier.expect(full, of.block_type.nbytes * (D // BOX) * (BLOCK_N // BOX_KEYS))
    for i in gl.static_range(BLOCK_N // BOX_KEYS):
        place = cache.sequence
        row = key + i * BOX_KEYS
        if PAGED:
            row = row_of_box(cache, key, i, BOX_KEYS) & ((1 << cache.page_bits) - 1)
            place = gl.where((pages[i] >= 0) & (pages[i] < cache.pages), pages[i], 0)
        for c in gl.static_range(D // BOX):
            part = to.slice(i * BOX_KEYS, BOX_KEYS, dim=2).slice(c * BOX, BOX, dim=3)
            tma.async_copy_global_to_shared(of, [place, cache.head, row, c * BOX], full, part)


@gluon.jit
def split_and_combine(
    K, V, OUT, LSE, OUT_PARTIAL, LSE_PARTIAL, FLAG, COUNTERS, Q, TABLE, LENGTHS, SINKS, q_batch, q_token, q_head,
    table_row, scale, cap, kv_heads, ratio, by_ratio, tokens, dim, capacity, pages, page_bits, splits, by_splits,
    left, right,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BOX_KEYS: gl.constexpr, HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr, BLOCK_SPLITS: gl.constexpr, PAGED: gl.constexpr, WHOLE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A split of a sequence: its result where it is the whole sequence, else a part, and from the last of them the
    result. WHOLE: all sequences are one split, and the code that combines is left out. The grid is (heads of K, splits,
    sequences). Pages are loaded in boxes of BOX_KEYS keys, which page sizes are multiples of, and looked up a block
    ahead. The next keys are loaded while a block's values are multiplied: a stage has a barrier for each."""
    gl.static_assert(PAGED or BLOCK_N == BOX_KEYS)
    D: gl.constexpr = HEAD_DIM
    dtype: gl.constexpr = K.dtype
    # scores (key, row) and values (column, row)
    T: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    ROW: gl.constexpr = gl.SliceLayout(0, T)
    head = gl.program_id(0)
    split = gl.program_id(1)
    sequence = gl.program_id(2)
    sequence = begin(sequence, PDL)
    b = sequence.to(gl.int64)
    seqs = Sequences(LENGTHS, gl.num_programs(2), tokens, capacity, left, right)
    TABLE += b * table_row
    length, wrong, given = length_of(seqs, sequence)
    rows = Rows(Q + b * q_batch, q_token, q_head, dim, kv_heads, ratio, by_ratio, head, tokens * ratio)
    q = load_q(rows, BLOCK_M, D)
    k_full = mbarriers(STAGES, 1)
    v_full = mbarriers(STAGES, 1)
    ks = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D], K.layout)
    vs = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D], V.layout)
    fence_async_shared()
    before_blocks, all_blocks = visible_blocks(length, seqs, BLOCK_N)
    blocks = gl.maximum(all_blocks, 1)
    before = 0
    used = 1
    if not WHOLE:
        before, blocks, used = split_blocks(split, splits, by_splits, blocks)
    if blocks > 0:
        start, stop = visible_keys(length, 0, tokens - 1, seqs)
        cache = Cache(K, V, TABLE, sequence, head, start, stop, pages, page_bits)
        first = before_blocks + before
        end = (gl.maximum(stop - 1, 0).to(gl.uint32) // BLOCK_N).to(gl.int32) + 1
        last = gl.minimum(first + blocks, gl.where(stop > start, end, 0))
        unknown = first - first
        for i in range(gl.minimum(last - first, STAGES)):
            key = (first + i) * BLOCK_N
            of_block = pages_of(cache, key, BLOCK_N, PAGED)
            unknown = unknown_of(unknown, of_block, cache, PAGED)
            load_keys(K, ks.index(i), k_full.index(i), cache, key, of_block, BLOCK_N, D, PAGED)
            load_keys(V, vs.index(i), v_full.index(i), cache, key, of_block, BLOCK_N, D, PAGED)
        qs = gl.allocate_shared_memory(
            dtype, [BLOCK_M, D], gl.NVMMASharedLayout.get_default_for([BLOCK_M, D], dtype)
        )
        ps = gl.allocate_shared_memory(
            dtype, [BLOCK_M, BLOCK_N], gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_N], dtype)
        )
        qs.store(q)
        fence_async_shared()
        gl.thread_barrier()
        flagged = FLAG.to(gl.int64) != 0
        gl.store(FLAG, given.to(gl.int64), mask=wrong & flagged)
        row = gl.arange(0, BLOCK_M, ROW)
        token, _ = row_of(row, 0, 0, head, ratio, by_ratio)
        own = length - tokens + token
        low = own - left
        high = gl.minimum(own + right, length)
        inner_low = length - 1 - left
        inner_high = gl.minimum(length - tokens + right, length)
        m = gl.full([BLOCK_M], NO_SCORE, gl.float32, ROW)
        sums = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, T)
        acc = gl.zeros([D, BLOCK_M], gl.float32, T)
        # 0, but not to the compiler, which would keep the addresses of the only stage in registers
        stage = gl.where(length > capacity, 1, 0)
        phase = 0
        for j in range(first, last):
            key = j * BLOCK_N
            more = j + STAGES < last
            next_key = key + STAGES * BLOCK_N
            of_block = pages_of(cache, next_key, BLOCK_N, PAGED)
            unknown = unknown_of(unknown, of_block, cache, PAGED)
            mbarrier.wait(k_full.index(stage), phase)
            zeros = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, T)
            k = ks.index(stage).reshape([BLOCK_N, D])
            s = warpgroup_mma(k, qs.permute((1, 0)), zeros, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,))
            if cap != 0.0:  # tanh(x) = 1 - 2 / (1 + exp(2 x))
                s = 1.0 - 2.0 / (1.0 + gl.exp2(s * (cap * 2.8853900817779268)))
            s = s * scale
            partial = (key < inner_low) | (key + BLOCK_N > inner_high)
            if partial:
                keys = gl.expand_dims(key + gl.arange(0, BLOCK_N, gl.SliceLayout(1, T)), 1)
                seen = (keys >= gl.expand_dims(low, 0)) & (keys < gl.expand_dims(high, 0))
                s = gl.where(seen, s, float("-inf"))
            new_m = gl.maximum(m, gl.max(s, 0))
            e = gl.exp2(s - gl.expand_dims(new_m, 0))
            by = gl.expand_dims(gl.exp2(m - new_m), 0)
            m = new_m
            sums = sums * by + e
            acc = acc * by
            ps.permute((1, 0)).store(e.to(dtype))
            v = vs.index(stage).reshape([BLOCK_N, D])
            mbarrier.wait(v_full.index(stage), phase)
            if partial:
                zero_rows_outside(vs.index(stage), key, start, stop)
            fence_async_shared()
            gl.thread_barrier()  # all threads have the scores, too
            k_stage, v_stage = ks.index(stage), vs.index(stage)
            if more:
                load_keys(K, k_stage, k_full.index(stage), cache, next_key, of_block, BLOCK_N, D, PAGED)
            acc = warpgroup_mma(v.permute((1, 0)), ps.permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            if more:
                gl.thread_barrier()  # all threads are done with the stage
                load_keys(V, v_stage, v_full.index(stage), cache, next_key, of_block, BLOCK_N, D, PAGED)
            stage, phase = advance(stage, phase, STAGES)
        if PAGED:
            gl.store(FLAG, unknown.to(gl.int64), mask=(unknown != 0) & flagged)
            wrong = wrong | (unknown != 0)
        total = gl.where(wrong, float("nan"), gl.sum(sums, 0))
        cols = gl.arange(0, D, gl.SliceLayout(1, T))
        results = Results(OUT, LSE, OUT_PARTIAL, LSE_PARTIAL, FLAG, SINKS)
        if WHOLE or used == 1:
            store_rows(results, rows, seqs, m, total, acc, cols, row, b, dtype)
        else:
            of_sequence = (b * splits * kv_heads + head) * BLOCK_M
            step = kv_heads * BLOCK_M
            OUT_PARTIAL += of_sequence * D
            LSE_PARTIAL += of_sequence
            gl.store(LSE_PARTIAL + (split * step + row), m + gl.log2(total))
            by = gl.where(total == 0.0, 0.0, 1.0 / total)
            at = split * step * D + gl.expand_dims(cols * BLOCK_M, 1) + gl.expand_dims(row, 0)
            gl.store(OUT_PARTIAL + at, acc * gl.expand_dims(by, 0))
            gl.thread_barrier()
            counter = COUNTERS + b * kv_heads + head
            if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == used - 1:
                gl.store(counter, 0)
                results = Results(OUT, LSE, OUT_PARTIAL, LSE_PARTIAL, FLAG, SINKS)
                combine_parts(results, rows, seqs, step, used, b, dtype, BLOCK_SPLITS, BLOCK_M, D)


@gluon.jit
def load_q(rows, BLOCK_M: gl.constexpr, D: gl.constexpr):
    """The rows of a head's queries, zeros where there are none."""
    layout: gl.constexpr = vector_layout(D)
    row = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    cols = gl.arange(0, D, gl.SliceLayout(0, layout))
    token, query_head = row_of(row, 0, 0, rows.head, rows.ratio, rows.by_ratio)
    at = token.to(gl.int64) * rows.q_token + query_head.to(gl.int64) * rows.q_head
    mask = gl.expand_dims(row < rows.count, 1) & gl.expand_dims(cols < rows.dim, 0)
    return gl.load(rows.Q + (gl.expand_dims(at, 1) + gl.expand_dims(cols, 0)), mask=mask, other=0.0)


@gluon.jit
def store_rows(results, rows, seqs, m, total, acc, cols, row, b, dtype: gl.constexpr):
    """Divide (column, row) by the rows' sums and store them, with their LSE."""
    token, query_head = row_of(row, 0, 0, rows.head, rows.ratio, rows.by_ratio)
    valid = row < rows.count
    lse, by = finalise(m, total, sink_of(results.SINKS, query_head))
    heads = rows.kv_heads * rows.ratio
    gl.store(results.LSE + (b * heads + query_head) * seqs.tokens + token, lse, mask=valid)
    at = ((b * seqs.tokens + token) * heads + query_head) * rows.dim
    mask = gl.expand_dims(valid, 0) & gl.expand_dims(cols < rows.dim, 1)
    out = (acc * gl.expand_dims(by, 0)).to(dtype)
    gl.store(results.OUT + (gl.expand_dims(at, 0) + gl.expand_dims(cols, 1)), out, mask=mask)


@gluon.jit
def combine_parts(
    results, rows, seqs, step, used, b, dtype: gl.constexpr, BLOCK_SPLITS: gl.constexpr, BLOCK_M: gl.constexpr,
    D: gl.constexpr,
):  # fmt: skip
    """The results of rows from all their parts, BLOCK_SPLITS at a time. Instead of parts that are not there the last is
    loaded, with weight 0: a mask would cost as many instructions as all the rest."""
    C: gl.constexpr = parts_layout(BLOCK_SPLITS, BLOCK_M)
    A: gl.constexpr = gl.SliceLayout(0, C)
    R: gl.constexpr = gl.SliceLayout(0, A)
    W: gl.constexpr = weights_layout(BLOCK_SPLITS)
    M: gl.constexpr = gl.SliceLayout(0, W)
    of_values = gl.arange(0, BLOCK_SPLITS, gl.SliceLayout(1, gl.SliceLayout(2, C)))
    of_weights = gl.arange(0, BLOCK_SPLITS, gl.SliceLayout(1, W))
    cols = gl.arange(0, D, gl.SliceLayout(1, A))
    row = gl.arange(0, BLOCK_M, R)
    inside = gl.expand_dims(gl.expand_dims(cols * BLOCK_M, 1) + gl.expand_dims(row, 0), 0)
    m = gl.full([BLOCK_M], NO_SCORE, gl.float32, M)
    total = gl.zeros([BLOCK_M], gl.float32, M)
    acc = gl.zeros([D, BLOCK_M], gl.float32, A)
    for first in range(0, used, BLOCK_SPLITS):
        at = gl.minimum(first + of_values, used - 1) * (step * D)
        values = gl.load(results.OUT_PARTIAL + (gl.expand_dims(gl.expand_dims(at, 1), 2) + inside))
        at = gl.expand_dims(gl.minimum(first + of_weights, used - 1) * step, 1)
        lse = gl.load(results.LSE_PARTIAL + (at + gl.expand_dims(gl.arange(0, BLOCK_M, M), 0)))
        lse = gl.where(gl.expand_dims(first + of_weights < used, 1), lse, float("-inf"))
        new_m = gl.maximum(m, gl.max(lse, 0))
        weights = gl.exp2(lse - gl.expand_dims(new_m, 0))
        by = gl.exp2(m - new_m)
        m = new_m
        total = total * by + gl.sum(weights, 0)
        weights = gl.expand_dims(gl.convert_layout(weights, gl.SliceLayout(1, C)), 1)
        acc = acc * gl.expand_dims(gl.convert_layout(by, R), 0) + gl.sum(values * weights, 0)
    m, total = gl.convert_layout(m, R), gl.convert_layout(total, R)
    store_rows(results, rows, seqs, m, total, acc, cols, row, b, dtype)
