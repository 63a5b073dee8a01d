"""flash_decoding in one launch (Gluon, Hopper): shares of a sequence's keys, and the last of them to end weighs all.

For calls so short that what is not reading counts. q is asked for before anything is known, then the length, then the
first STAGES blocks of keys and values by TMA, and no number is divided on the way to them. Behind those, q would wait
until all of them are here.

Products are turned round, K Q^T and V^T P^T: wgmma's 64 rows are keys and columns of values, and its columns, of which
there may be 8, are the rows of queries (BLOCK_M). So nothing is computed for rows that are not there.

Pages are brought in pieces of 16 keys, which all page sizes are multiples of.

Programs of a sequence's head count in a word who has ended; the last one finds all pieces in L2, combines them in their
order, so that who was last changes no bit, and leaves the word as zero.
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

from csrc_triton.attention.pipeline import mbarriers
from csrc_triton.decoding.decoding_keys import (
    NOTHING,
    blocks_of,
    finish,
    length_of,
    row_of,
    seen_by,
    sink_of,
)
from csrc_triton.decoding.decoding_stream import keep_keys, lines_layout, turn

# What the kernels take behind the tensor maps of keys and values.
SHARE = {
    "OUT": "*dtype", "LSE": "*fp32", "PARTS": "*fp32", "PART_SUMS": "*fp32", "FLAG": "*i64", "COUNTS": "*i32",
    "Q": "*dtype", "TABLE": "*i32", "LENGTHS": "*i32", "SINKS": "*fp32", "q_batch": "i64", "q_token": "i32",
    "q_head": "i32", "table_row": "i64", "scale": "fp32", "cap": "fp32", "kv_heads": "i32", "ratio": "i32",
    "by_ratio": "i32", "tokens": "i32", "dim": "i32", "capacity": "i32", "pages": "i32", "page_bits": "i32",
    "each": "i32", "by_each": "i32", "left": "i32", "right": "i32",
}  # fmt: skip


@gluon.constexpr_function
def pieces_layout(shares, rows):
    """(share, column, row) of fp32, where a thread has all shares of what it has."""
    return gl.BlockedLayout([shares, 1, 4], [1, 128 // rows, rows // 4], [1, 4, 1], [2, 1, 0])


@gluon.constexpr_function
def weights_layout(shares):
    """(share, row), where a warp has all shares of its rows."""
    down = min(shares, 16)
    return gl.BlockedLayout([shares // down, 1], [down, 32 // down], [1, 4], [0, 1])


@gluon.jit
def part_blocks(part, each, by_each, w):
    """(first block of a part, how many it has, parts that have any), of w blocks; by_each is 2^32 // each + 1, and
    each * each * w is below 2^32: one multiplication for a division."""
    n = gl.minimum(each, w)
    first = part
    last = part + 1
    if w > each:
        by = by_each.to(gl.uint32, bitcast=True)
        first = gl.umulhi((part * w).to(gl.uint32, bitcast=True), by).to(gl.int32, bitcast=True)
        last = gl.umulhi((part * w + w).to(gl.uint32, bitcast=True), by).to(gl.int32, bitcast=True)
        first = gl.where(each == 1, 0, first)
        last = gl.where(each == 1, w, last)
    return first, gl.where(part < n, last - first, 0), n


@gluon.jit
def fetch(
    of, TABLE, to, full, b, head, key, start, stop, page_bits, pages,
    BLOCK_N: gl.constexpr, D: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """Begin to copy a block of keys or values; of pages piece by piece, and for keys out of [start, stop) the nearest
    in it. Returns a page that is not there, or 0."""
    BOX: gl.constexpr = of.block_shape[3]
    LINES: gl.constexpr = of.block_shape[2]
    mbarrier.expect(full, of.block_type.nbytes * (D // BOX) * (BLOCK_N // LINES))
    wrong = 0
    for i in gl.static_range(BLOCK_N // LINES):
        place = b
        line = key + i * LINES
        if PAGED:
            line = gl.maximum(gl.minimum(line, stop - 1), start) // LINES * LINES
            page = gl.load(TABLE + (line >> page_bits))
            there = (page >= 0) & (page < pages)
            wrong = gl.where(there, wrong, page)
            place = gl.where(there, page, 0)
            line = line & ((1 << page_bits) - 1)
        for c in gl.static_range(D // BOX):
            piece = to.slice(i * LINES, LINES, dim=2).slice(c * BOX, BOX, dim=3)
            tma.async_copy_global_to_shared(of, [place, head, line, c * BOX], full, piece)
    return wrong


@gluon.jit
def ask(
    K, V, TABLE, ks, vs, full, slot, unknown, b, head, block, start, stop, page_bits, pages,
    BLOCK_N: gl.constexpr, D: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """Begin to copy a block's keys and values into a slot; returns ``unknown``, or a page that is not there."""
    key = block * BLOCK_N
    own = full.index(slot)
    bad = fetch(K, TABLE, ks.index(slot), own, b, head, key, start, stop, page_bits, pages, BLOCK_N, D, PAGED)
    fetch(V, TABLE, vs.index(slot), own, b, head, key, start, stop, page_bits, pages, BLOCK_N, D, PAGED)
    return gl.where(bad != 0, bad, unknown)


@gluon.jit
def share(
    K, V, OUT, LSE, PARTS, PART_SUMS, FLAG, COUNTS, Q, TABLE, LENGTHS, SINKS, q_batch, q_token, q_head,
    table_row, scale, cap, kv_heads, ratio, by_ratio, tokens, dim, capacity, pages, page_bits,
    each, by_each, left, right,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SHARES: gl.constexpr,
    PAGED: gl.constexpr,
):  # fmt: skip
    """A part of a sequence's keys: its result where it is all of them, else a piece, and from the last of the parts
    the result."""
    dtype: gl.constexpr = K.dtype
    # scores (key, row) and values (column, row)
    T: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    ROW: gl.constexpr = gl.SliceLayout(0, T)
    head = gl.program_id(0)
    part = gl.program_id(1)
    sequence = gl.program_id(2)
    b = sequence.to(gl.int64)
    count = tokens * ratio
    q = load_q(Q + b * q_batch, count, head, ratio, by_ratio, q_token, q_head, dim, BLOCK_M, D)
    length, wrong, given = length_of(LENGTHS, sequence, capacity)
    full = mbarriers(STAGES, 2)  # of keys and of values
    ks = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D], K.layout)
    vs = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D], V.layout)
    fence_async_shared()
    before_blocks, w = blocks_of(length, tokens, left, right, BLOCK_N)
    begin, blocks, used = part_blocks(part, each, by_each, gl.maximum(w, 1))
    if blocks > 0:
        TABLE += b * table_row
        start, stop = seen_by(length, 0, tokens - 1, tokens, left, right)
        first = before_blocks + begin
        behind = (gl.maximum(stop - 1, 0).to(gl.uint32) // BLOCK_N).to(gl.int32) + 1
        last = gl.minimum(first + blocks, gl.where(stop > start, behind, 0))
        unknown = first - first
        for i in range(gl.minimum(last - first, STAGES)):
            unknown = ask(
                K, V, TABLE, ks, vs, full, i, unknown, sequence, head, first + i, start, stop, page_bits, pages,
                BLOCK_N, D, PAGED,
            )  # fmt: skip
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
        m = gl.full([BLOCK_M], NOTHING, gl.float32, ROW)
        sums = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, T)
        acc = gl.zeros([D, BLOCK_M], gl.float32, T)
        slot = 0
        phase = 0
        for j in range(first, last):
            key = j * BLOCK_N
            mbarrier.wait(full.index(slot), phase)
            zeros = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, T)
            k = ks.index(slot).reshape([BLOCK_N, D])
            s = warpgroup_mma(k, qs.permute((1, 0)), zeros, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,))
            if cap != 0.0:  # tanh(x) = 1 - 2 / (1 + exp(2 x))
                s = 1.0 - 2.0 / (1.0 + gl.exp2(s * (cap * 2.8853900817779268)))
            s = s * scale
            v = vs.index(slot).reshape([BLOCK_N, D])
            if (key < inner_low) | (key + BLOCK_N > inner_high):
                keys = gl.expand_dims(key + gl.arange(0, BLOCK_N, gl.SliceLayout(1, T)), 1)
                seen = (keys >= gl.expand_dims(low, 0)) & (keys < gl.expand_dims(high, 0))
                s = gl.where(seen, s, float("-inf"))
                keep_keys(v, key, start, stop)
            new_m = gl.maximum(m, gl.max(s, 0))
            e = gl.exp2(s - gl.expand_dims(new_m, 0))
            by = gl.expand_dims(gl.exp2(m - new_m), 0)
            m = new_m
            sums = sums * by + e
            acc = acc * by
            ps.permute((1, 0)).store(e.to(dtype))
            fence_async_shared()
            gl.thread_barrier()
            acc = warpgroup_mma(v.permute((1, 0)), ps.permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            if j + STAGES < last:
                gl.thread_barrier()  # all are done with the slot
                unknown = ask(
                    K, V, TABLE, ks, vs, full, slot, unknown, sequence, head, j + STAGES, start, stop, page_bits,
                    pages, BLOCK_N, D, PAGED,
                )  # fmt: skip
            slot, phase = turn(slot, phase, STAGES)
        if PAGED:
            gl.store(FLAG, unknown.to(gl.int64), mask=(unknown != 0) & flagged)
            wrong = wrong | (unknown != 0)
        total = gl.where(wrong, float("nan"), gl.sum(sums, 0))
        cols = gl.arange(0, D, gl.SliceLayout(1, T))
        if used == 1:
            put(
                OUT, LSE, SINKS, m, total, acc, cols, row, count, b, head, tokens, kv_heads, ratio,
                by_ratio, dim, dtype,
            )  # fmt: skip
        else:
            of_sequence = (b * each * kv_heads + head) * BLOCK_M
            step = kv_heads * BLOCK_M
            PARTS += of_sequence * D
            PART_SUMS += of_sequence
            gl.store(PART_SUMS + (part * step + row), m + gl.log2(total))
            by = gl.where(total == 0.0, 0.0, 1.0 / total)
            at = part * step * D + gl.expand_dims(cols * BLOCK_M, 1) + gl.expand_dims(row, 0)
            gl.store(PARTS + at, acc * gl.expand_dims(by, 0))
            gl.thread_barrier()
            word = COUNTS + b * kv_heads + head
            if gl.atomic_add(word, 1, sem="acq_rel", scope="gpu") == used - 1:
                gl.store(word, 0)
                weigh(
                    OUT, LSE, PARTS, PART_SUMS, SINKS, step, used, b, head, kv_heads, ratio, by_ratio, tokens, dim,
                    count, dtype, SHARES, BLOCK_M, D,
                )  # fmt: skip


@gluon.jit
def load_q(Q, count, head, ratio, by_ratio, q_token, q_head, dim, BLOCK_M: gl.constexpr, D: gl.constexpr):
    """The rows of a head's queries, and zeros for what is not there."""
    layout: gl.constexpr = lines_layout(D)
    row = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    cols = gl.arange(0, D, gl.SliceLayout(0, layout))
    token, query_head = row_of(row, 0, 0, head, ratio, by_ratio)
    at = token.to(gl.int64) * q_token + query_head.to(gl.int64) * q_head
    mask = gl.expand_dims(row < count, 1) & gl.expand_dims(cols < dim, 0)
    return gl.load(Q + (gl.expand_dims(at, 1) + gl.expand_dims(cols, 0)), mask=mask, other=0.0)


@gluon.jit
def put(
    OUT, LSE, SINKS, m, total, acc, cols, row, count, b, head, tokens, kv_heads, ratio, by_ratio,
    dim, dtype: gl.constexpr,
):  # fmt: skip
    """Results of rows from (column, row), not yet divided by their sums."""
    token, query_head = row_of(row, 0, 0, head, ratio, by_ratio)
    kept = row < count
    lse, by = finish(m, total, sink_of(SINKS, query_head))
    heads = kv_heads * ratio
    gl.store(LSE + (b * heads + query_head) * tokens + token, lse, mask=kept)
    at = ((b * tokens + token) * heads + query_head) * dim
    mask = gl.expand_dims(kept, 0) & gl.expand_dims(cols < dim, 1)
    result = (acc * gl.expand_dims(by, 0)).to(dtype)
    gl.store(OUT + (gl.expand_dims(at, 0) + gl.expand_dims(cols, 1)), result, mask=mask)


@gluon.jit
def weigh(
    OUT, LSE, PARTS, PART_SUMS, SINKS, step, used, b, head, kv_heads, ratio, by_ratio, tokens, dim,
    count, dtype: gl.constexpr, SHARES: gl.constexpr, BLOCK_M: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """The results of rows from all their pieces, SHARES at a time. What is not there is read from its neighbour, and
    weighs nothing: a mask would cost as many instructions as all the rest."""
    C: gl.constexpr = pieces_layout(SHARES, BLOCK_M)
    A: gl.constexpr = gl.SliceLayout(0, C)
    R: gl.constexpr = gl.SliceLayout(0, A)
    W: gl.constexpr = weights_layout(SHARES)
    M: gl.constexpr = gl.SliceLayout(0, W)
    shares = gl.arange(0, SHARES, gl.SliceLayout(1, gl.SliceLayout(2, C)))
    weighed = gl.arange(0, SHARES, gl.SliceLayout(1, W))
    cols = gl.arange(0, D, gl.SliceLayout(1, A))
    row = gl.arange(0, BLOCK_M, R)
    inside = gl.expand_dims(gl.expand_dims(cols * BLOCK_M, 1) + gl.expand_dims(row, 0), 0)
    m = gl.full([BLOCK_M], NOTHING, gl.float32, M)
    total = gl.zeros([BLOCK_M], gl.float32, M)
    acc = gl.zeros([D, BLOCK_M], gl.float32, A)
    for first in range(0, used, SHARES):
        at = gl.minimum(first + shares, used - 1) * (step * D)
        values = gl.load(PARTS + (gl.expand_dims(gl.expand_dims(at, 1), 2) + inside))
        at = gl.expand_dims(gl.minimum(first + weighed, used - 1) * step, 1)
        lse = gl.load(PART_SUMS + (at + gl.expand_dims(gl.arange(0, BLOCK_M, M), 0)))
        lse = gl.where(gl.expand_dims(first + weighed < used, 1), lse, float("-inf"))
        new_m = gl.maximum(m, gl.max(lse, 0))
        weights = gl.exp2(lse - gl.expand_dims(new_m, 0))
        by = gl.exp2(m - new_m)
        m = new_m
        total = total * by + gl.sum(weights, 0)
        weights = gl.expand_dims(gl.convert_layout(weights, gl.SliceLayout(1, C)), 1)
        acc = acc * gl.expand_dims(gl.convert_layout(by, R), 0) + gl.sum(values * weights, 0)
    put(
        OUT, LSE, SINKS, gl.convert_layout(m, R), gl.convert_layout(total, R), acc, cols, row, count, b, head,
        tokens, kv_heads, ratio, by_ratio, dim, dtype,
    )  # fmt: skip
