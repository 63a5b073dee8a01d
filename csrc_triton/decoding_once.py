"""flash_decoding in one launch (Gluon, Hopper): shares of a sequence's keys, and the last of them to end weighs them all.

For calls so short that what is not reading counts. So the first STAGES blocks of keys and values are on their way by
TMA, of one thread, before anything but a length is known, and no number is divided on the way to them; q comes behind
them. One group of four warps does all: wgmma multiplies 64 rows, of which a tile may have fewer: q's others are zeros.

Pages are brought in pieces of PIECE keys, which all page sizes are multiples of.

Programs of a tile count in a word who has ended; the last one finds all pieces in L2, combines them in their order, so
that who was last changes no bit, and leaves the word as zero.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from csrc_triton.attention_groups import Ring, Sizes, barriers, fetch
from csrc_triton.attention_softmax import row_parts
from csrc_triton.decoding_keys import (
    NOTHING,
    blocks_of,
    finish,
    row_of,
    seen_by,
    sink_of,
    token_of,
)
from csrc_triton.decoding_stream import add_block, load_q, put_all, turn

PIECE = gl.constexpr(16)  # keys
ROWS = gl.constexpr(8)  # of a tile that are combined at a time


@gluon.constexpr_function
def pieces_layout(shares, columns):
    """(share, row, column) of fp32, where a thread has all shares of its columns."""
    across = columns // 4
    wide = min(across, 32)
    return gl.BlockedLayout([shares, 1, 4], [1, 32 // wide, wide], [1, 4, 1], [2, 1, 0])


@gluon.constexpr_function
def weights_layout(shares):
    """(share, row), where a warp has all shares of its rows."""
    return gl.BlockedLayout([max(shares // 16, 1), 1], [min(shares, 16), 32 // min(shares, 16)], [1, 4], [0, 1])


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
def fetch_pages(of, TABLE, page_bits, pages, head, key, start, stop, to, slot, z):
    """As ``fetch``, piece by piece; for keys out of [start, stop) the nearest in it. Returns a page that is not there,
    or 0."""
    full = to.full.index(slot)
    mbarrier.expect(full, of.block_type.nbytes // z.BOX * (z.D1 + z.D2) * (z.BLOCK_N // PIECE))
    wrong = 0
    for i in gl.static_range(z.BLOCK_N // PIECE):
        at = gl.maximum(gl.minimum(key + i * PIECE, stop - 1), start) // PIECE * PIECE
        page = gl.load(TABLE + (at >> page_bits))
        there = (page >= 0) & (page < pages)
        wrong = gl.where(there, wrong, page)
        page = gl.where(there, page, 0)
        line = at & ((1 << page_bits) - 1)
        lines = to.first.index(slot).slice(i * PIECE, PIECE, dim=2)
        for c in gl.static_range(z.D1 // z.BOX):
            piece = lines.slice(c * z.BOX, z.BOX, dim=3)
            tma.async_copy_global_to_shared(of, [page, head, line, c * z.BOX], full, piece)
        if z.D2 > 0:
            lines = to.second.index(slot).slice(i * PIECE, PIECE, dim=2)
            for c in gl.static_range(z.D2 // z.BOX):
                piece = lines.slice(c * z.BOX, z.BOX, dim=3)
                tma.async_copy_global_to_shared(of, [page, head, line, z.D1 + c * z.BOX], full, piece)
    return wrong


@gluon.jit
def ask(
    K, V, TABLE, k, v, slot, b, head, key, start, stop, page_bits, pages, z, PAGED: gl.constexpr
):  # fmt: skip
    """Begin to copy a block of keys and of values; returns a page that is not there, or 0."""
    wrong = 0
    if PAGED:
        wrong = fetch_pages(K, TABLE, page_bits, pages, head, key, start, stop, k, slot, z)
        fetch_pages(V, TABLE, page_bits, pages, head, key, start, stop, v, slot, z)
    else:
        fetch(K, b, head, key, k, slot, z)
        fetch(V, b, head, key, v, slot, z)
    return wrong


@gluon.jit
def slots(of, count: gl.constexpr, rows: gl.constexpr, full, z):
    """Tiles of ``rows`` in shared memory, both panels, with their barriers; nobody is told when one is free."""
    first = gl.allocate_shared_memory(of.dtype, [count, 1, 1, rows, z.D1], of.layout)
    second = first
    if z.D2 > 0:
        second = gl.allocate_shared_memory(of.dtype, [count, 1, 1, rows, z.D2], of.layout)
    return Ring(first, second, full, full)


@gluon.jit
def zero_here(zero):
    """``zero``, which is 0, as the compiler cannot know: what is computed from it stays behind this place."""
    return gl.inline_asm_elementwise(
        "{ .reg .u32 %now; mov.u32 %now, %clock; and.b32 $0, %now, $1; }",
        "=r,r", [zero], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def fetch_length(LENGTHS, OUT, b):
    """Begin to bring a sequence's length near; ``length_here`` reads it."""
    at = gl.where(LENGTHS.to(gl.int64) != 0, (LENGTHS + b).to(gl.int64), OUT.to(gl.int64))
    gl.inline_asm_elementwise("prefetch.global.L1 [$1]; mov.b32 $0, 0;", "=r,l", [at], gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_here(AT, given, other):
    """An int32, or ``other`` where none is given; the load, and what is computed from it, stay behind this place."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred %given; setp.ne.s32 %given, $2, 0; mov.b32 $0, $3; @%given ld.global.b32 $0, [$1]; }",
        "=&r,l,r,r", [AT.to(gl.int64), given.to(gl.int32), other], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def fetch_maps():
    """Begin to fetch both tensor maps, the first parameters of the kernel ``once``: else the first copy waits for them
    after the length has come."""
    gl.inline_asm_elementwise(
        "prefetch.param.tensormap [once_param_0]; prefetch.param.tensormap [once_param_9]; mov.b32 $0, 0;",
        "=r", [], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def share(
    K, V, OUT, LSE, PARTS, PART_SUMS, FLAG, COUNTS, Q, TABLE, LENGTHS, SINKS, q_batch, q_token, q_head,
    table_row, scale, cap, kv_heads, ratio, by_ratio, tokens, dim, capacity, pages, page_bits,
    each, by_each, part_rows, left, right, tile, head, lane, width,
    BLOCK_N: gl.constexpr, D1: gl.constexpr, D2: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr,
    SHARES: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """A part of a sequence's keys: its result where it is all of them, else a piece, and from the last of the parts
    the result."""
    fetch_maps()
    z = Sizes(BLOCK_N, D1, D2, BOX, STAGES, 1, 0, 0)
    D: gl.constexpr = D1 * 2 if D2 > 0 else D1  # of a line of PARTS
    part = gl.program_id(1)
    sequence = gl.program_id(2)
    fetch_length(LENGTHS, OUT, sequence)  # while the barriers are made
    full = barriers(STAGES, 2)  # of keys and of values
    k = slots(K, STAGES, BLOCK_N, full, z)
    v = slots(V, STAGES, BLOCK_N, full, z)
    fence_async_shared()
    gl.thread_barrier()
    given = load_here(LENGTHS + sequence, LENGTHS.to(gl.int64) != 0, capacity)
    wrong = (given < 0) | (given > capacity)
    length = gl.where(wrong, 0, given)
    first_token = token_of(tile * 64, by_ratio)
    into = tile * 64 - first_token * ratio
    count = gl.minimum(tokens * ratio - tile * 64, 64)
    last_token = first_token + token_of(into + count - 1, by_ratio)
    before_blocks, w = blocks_of(length, tokens, left, right, BLOCK_N)
    w = gl.maximum(w, 1)
    begin, blocks, used = part_blocks(part, each, by_each, w)
    if blocks > 0:
        b = sequence.to(gl.int64)
        TABLE += b * table_row
        start, stop = seen_by(length, first_token, last_token, tokens, left, right)
        first = before_blocks + begin
        behind = (gl.maximum(stop - 1, 0).to(gl.uint32) // BLOCK_N).to(gl.int32) + 1
        last = gl.minimum(first + blocks, gl.where(stop > start, behind, 0))
        unknown = first - first
        for i in range(0, gl.minimum(last - first, STAGES)):
            key = (first + i) * BLOCK_N
            bad = ask(K, V, TABLE, k, v, i, sequence, head, key, start, stop, page_bits, pages, z, PAGED)
            unknown = gl.where(bad != 0, bad, unknown)
        # q's addresses are computed behind the copies
        zero = zero_here(gl.where(length > capacity, 1, 0))
        into += zero
        count += zero
        first_token += zero
        q = slots(K, 1, 64, k.full, z)
        of_batch = Q + (b + zero) * q_batch
        load_q(
            of_batch, q.first.index(0).reshape([64, D1]), 0, count, first_token, into, head, ratio, by_ratio,
            q_token, q_head, dim,
        )  # fmt: skip
        if D2 > 0:
            load_q(
                of_batch, q.second.index(0).reshape([64, D2]), D1, count, first_token, into, head, ratio, by_ratio,
                q_token, q_head, dim,
            )  # fmt: skip
        fence_async_shared()
        gl.thread_barrier()
        flagged = FLAG.to(gl.int64) != 0
        gl.store(FLAG, given.to(gl.int64), mask=wrong & flagged)
        row = gl.arange(0, 64, z.ROW)
        token, query_head = row_of(row, first_token, into, head, ratio, by_ratio)
        own = length - tokens + token
        low = own - left
        high = gl.minimum(own + right, length)
        inner_low = length - tokens + last_token - left
        inner_high = gl.minimum(length - tokens + first_token + right, length)
        m = gl.full([64], NOTHING, gl.float32, z.ROW)
        sums = row_parts(gl.zeros([64, BLOCK_N], gl.float32, z.S))
        acc = gl.zeros([64, D1], gl.float32, z.O1)
        acc2 = gl.zeros([64, D2 if D2 > 0 else 16], gl.float32, z.O2)
        slot = 0
        phase = 0
        for j in range(first, last):
            m, sums, acc, acc2 = add_block(
                z, q, k, v, slot, phase, j * BLOCK_N, m, sums, acc, acc2, scale, cap, low, high, inner_low,
                inner_high, start, stop, False,
            )  # fmt: skip
            if j + STAGES < last:
                gl.thread_barrier()  # all are done with the slot
                key = (j + STAGES) * BLOCK_N
                bad = ask(K, V, TABLE, k, v, slot, sequence, head, key, start, stop, page_bits, pages, z, PAGED)
                unknown = gl.where(bad != 0, bad, unknown)
            slot, phase = turn(slot, phase, STAGES)
        if PAGED:
            gl.store(FLAG, unknown.to(gl.int64), mask=(unknown != 0) & flagged)
            wrong = wrong | (unknown != 0)
        total = gl.convert_layout(gl.sum(sums, 1), z.ROW)
        total = gl.where(wrong, float("nan"), total)
        kept = row < count
        heads = kv_heads * ratio
        if used == 1:
            lse, by = finish(m, total, sink_of(SINKS, query_head))
            gl.store(LSE + (b * heads + query_head) * tokens + token, lse, mask=kept)
            put_all(OUT, (b * tokens + token) * heads + query_head, acc, acc2, by, K.dtype, count, dim, z)
        else:
            by = gl.where(total == 0.0, 0.0, 1.0 / total)
            of_sequence = (b * each * width + lane) * part_rows
            step = width * part_rows
            PARTS += of_sequence * D
            PART_SUMS += of_sequence
            to = part * step + row
            gl.store(PART_SUMS + to, m + gl.log2(total), mask=kept)
            put_all(PARTS, to, acc, acc2, by, gl.float32, count, D, z)
            gl.thread_barrier()
            word = COUNTS + b * width + lane
            if gl.atomic_add(word, 1, sem="acq_rel", scope="gpu") == used - 1:
                gl.store(word, 0)
                weigh(
                    OUT, LSE, PARTS, PART_SUMS, SINKS, step, used, b, head, kv_heads, ratio, by_ratio,
                    tokens, dim, first_token, into, count, K.dtype, SHARES, D,
                )  # fmt: skip


@gluon.jit
def weigh(
    OUT, LSE, PARTS, PART_SUMS, SINKS, step, used, b, head, kv_heads, ratio, by_ratio, tokens, dim,
    first_token, into, count, dtype: gl.constexpr, SHARES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """The results of a tile's rows from all their pieces, ROWS and SHARES at a time. What is not there is read from its
    neighbour, and weighs nothing or is not kept: a mask would cost as many instructions as all the rest."""
    C: gl.constexpr = pieces_layout(SHARES, D)
    L: gl.constexpr = gl.SliceLayout(2, C)
    A: gl.constexpr = gl.SliceLayout(0, C)
    W: gl.constexpr = weights_layout(SHARES)
    R: gl.constexpr = gl.SliceLayout(0, W)
    shares = gl.arange(0, SHARES, gl.SliceLayout(1, L))
    weighed = gl.arange(0, SHARES, gl.SliceLayout(1, W))
    cols = gl.arange(0, D, gl.SliceLayout(0, A))
    heads = kv_heads * ratio
    for first_row in range(0, count, ROWS):
        row = first_row + gl.arange(0, ROWS, R)
        kept = row < count
        m = gl.full([ROWS], NOTHING, gl.float32, R)
        total = gl.zeros([ROWS], gl.float32, R)
        acc = gl.zeros([ROWS, D], gl.float32, A)
        line = gl.minimum(first_row + gl.arange(0, ROWS, gl.SliceLayout(0, L)), count - 1)
        columns = gl.expand_dims(gl.expand_dims(cols, 0), 0)
        for first in range(0, used, SHARES):
            at = gl.expand_dims(gl.minimum(first + shares, used - 1) * step, 1) + gl.expand_dims(line, 0)
            values = gl.load(PARTS + (gl.expand_dims(at, 2) * D + columns))
            there = gl.expand_dims(first + weighed < used, 1)
            at = gl.expand_dims(gl.minimum(first + weighed, used - 1) * step, 1)
            lse = gl.load(PART_SUMS + (at + gl.expand_dims(gl.minimum(row, count - 1), 0)))
            lse = gl.where(there, lse, float("-inf"))
            new_m = gl.maximum(m, gl.max(lse, 0))
            weights = gl.exp2(lse - gl.expand_dims(new_m, 0))
            by = gl.exp2(m - new_m)
            m = new_m
            total = total * by + gl.sum(weights, 0)
            by = gl.convert_layout(by, gl.SliceLayout(1, A))
            weights = gl.expand_dims(gl.convert_layout(weights, L), 2)
            acc = acc * gl.expand_dims(by, 1) + gl.sum(values * weights, 0)
        token, query_head = row_of(row, first_token, into, head, ratio, by_ratio)
        lse, by = finish(m, total, sink_of(SINKS, query_head))
        gl.store(LSE + (b * heads + query_head) * tokens + token, lse, mask=kept)
        at = gl.convert_layout((b * tokens + token) * heads + query_head, gl.SliceLayout(1, A))
        by = gl.convert_layout(by, gl.SliceLayout(1, A))
        row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, A))
        mask = gl.expand_dims(row < count, 1) & gl.expand_dims(cols < dim, 0)
        result = (acc * gl.expand_dims(by, 1)).to(dtype)
        gl.store(OUT + (gl.expand_dims(at, 1) * dim + gl.expand_dims(cols, 0)), result, mask=mask)
