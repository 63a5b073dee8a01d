"""Few queries of each sequence against a paged cache, with TMA and wgmma (Gluon, Hopper): split KV by pages.

A producer warp or two load pages of keys and values by TMA, box by box; one or two consumer warp groups compute. As in
``flash_attention_paged.paged_tiles``, the queries of a token that share a head of keys are rows of one tile, of 64
rows a warp group, as wgmma multiplies so many; several programs split a tile's keys where there are too few tiles, or
where sequences may differ in length, and ``combine_paged`` combines their parts. With one warp group memory is the
bound: 64 rows take half of the time that their keys take to arrive, and rows that are not there cost nothing more.
What counts is that loads are on their way from the first block to the last, whatever the consumers do; so each stage is
waited for and handed back by barriers alone. Two warp groups are for more rows, a chunk of a prompt: its keys are
loaded half as often.

Boxes are of 16 keys, which all page sizes are multiples of, or of 64: a warp takes as long for eight boxes of 16 keys
of K and of V as two warp groups for the block.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait
from triton.language.core import _aggregate as aggregate

from csrc_triton.attention.key_parts import (
    SEQUENCES,
    Split,
    chunk_of,
    keys_in_cache,
    parts_of,
    sequence_of_slot,
    work_of,
)
from csrc_triton.attention.online_softmax import (
    issue_pv,
    issue_qk,
    mask_scores,
    partial_row_sums,
    scale_rows,
    to_x2,
    wait_pv,
)
from csrc_triton.attention.paged import (
    PagedSequences,
    finalise,
    load_pages,
    paged_pipeline,
    pages_of_block,
    report_keys,
)
from csrc_triton.attention.pipeline import Pipeline, Sizes
from csrc_triton.attention.varlen import report, span
from csrc_triton.common.pdl import launch_dependents, wait_for_previous_if


@aggregate
class Tile:
    """64 rows a warp group, (token, head) pairs of a sequence and a head of keys, and the split of their keys."""

    sequence: gl.tensor
    head: gl.tensor  # of keys
    splits: gl.tensor
    partial: gl.tensor  # where partial results of the sequence's first token would be, of the first head
    token_step: gl.tensor  # to those of the next token
    row: gl.tensor  # the first
    rows: gl.tensor  # of the sequence; 0 where this program has none of its tiles
    start_q: gl.tensor
    past: gl.tensor  # the sequence's first query stands at this key
    len_k: gl.tensor
    start: gl.tensor  # keys that some row sees, from here
    stop: gl.tensor  # to before here
    first: gl.tensor  # block of this split
    last: gl.tensor  # one after its last

    @gluon.constexpr_function
    def __init__(
        self, sequence, head, splits, partial, token_step, row, rows, start_q, past, len_k, start, stop, first, last
    ):  # fmt: skip
        self.sequence, self.head, self.splits = sequence, head, splits
        self.partial, self.token_step = partial, token_step
        self.row, self.rows, self.start_q, self.past, self.len_k = row, rows, start_q, past, len_k
        self.start, self.stop, self.first, self.last = start, stop, first, last


@aggregate
class Operands:
    """What the consumers read and write by pointers."""

    OUT: gl.tensor
    LSE: gl.tensor
    OUT_PARTIAL: gl.tensor
    LSE_PARTIAL: gl.tensor
    Q: gl.tensor
    SINKS: gl.tensor
    out_token: gl.tensor
    out_head: gl.tensor
    q_token: gl.tensor
    q_head: gl.tensor
    dim: gl.tensor
    kv_heads: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self,
        OUT,
        LSE,
        OUT_PARTIAL,
        LSE_PARTIAL,
        Q,
        SINKS,
        out_token,
        out_head,
        q_token,
        q_head,
        dim,
        kv_heads,
    ):
        self.OUT, self.LSE, self.OUT_PARTIAL, self.LSE_PARTIAL = OUT, LSE, OUT_PARTIAL, LSE_PARTIAL
        self.Q, self.SINKS, self.dim, self.kv_heads = Q, SINKS, dim, kv_heads
        self.out_token, self.out_head, self.q_token, self.q_head = out_token, out_head, q_token, q_head


@gluon.constexpr_function
def vector_layout(columns):
    """Rows of 16-bit elements, 16 bytes a thread."""
    across = min(columns // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def zero_outside(values, key, start, stop):
    """Set a block's rows to zero that hold no keys of [start, stop)."""
    layout: gl.constexpr = vector_layout(values.shape[1])
    keys = key + gl.arange(0, values.shape[0], gl.SliceLayout(1, layout))
    valid = gl.expand_dims((keys >= start) & (keys < stop), 1)
    loaded = values.load(layout)
    values.store(gl.where(valid, loaded, gl.zeros_like(loaded)))


@gluon.jit
def zero_tokens(operands, head, number, programs, start, tokens, ratio, dtype: gl.constexpr, D: gl.constexpr):
    """The results of tokens from ``start`` on, which are behind the last sequence: those of a head of keys, by so many
    programs."""
    layout: gl.constexpr = vector_layout(D)
    index = gl.arange(0, 64, gl.SliceLayout(1, layout))
    columns = gl.arange(0, D, gl.SliceLayout(0, layout))
    rows = (tokens - start) * ratio
    for first in range(number * 64, rows, programs * 64):
        row = first + index
        token = row // ratio
        query_head = head * ratio + (row - token * ratio)
        token += start
        at = token.to(gl.int64) * operands.out_token + query_head.to(gl.int64) * operands.out_head
        mask = gl.expand_dims(row < rows, 1) & gl.expand_dims(columns < operands.dim, 0)
        to = operands.OUT + (gl.expand_dims(at, 1) + gl.expand_dims(columns, 0))
        gl.store(to, gl.zeros([64, D], dtype, layout), mask=mask)
        to = operands.LSE + (query_head.to(gl.int64) * tokens + token)
        gl.store(to, gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, layout)), mask=row < rows)


@gluon.jit
def load_queries(to, operands, tile, first_row, ratio, layout: gl.constexpr, D: gl.constexpr):
    """64 rows of a tile, from ``first_row`` on, to shared memory, zeros where there are none."""
    row = first_row + gl.arange(0, 64, gl.SliceLayout(1, layout))
    columns = gl.arange(0, D, gl.SliceLayout(0, layout))
    token = row // ratio
    head = tile.head * ratio + (row - token * ratio)
    at = (tile.start_q + token).to(gl.int64) * operands.q_token + head.to(gl.int64) * operands.q_head
    mask = gl.expand_dims(row < tile.rows, 1) & gl.expand_dims(columns < operands.dim, 0)
    to.store(gl.load(operands.Q + (gl.expand_dims(at, 1) + gl.expand_dims(columns, 0)), mask=mask, other=0.0))


@gluon.jit
def store_rows(TO, at, values, valid, dim, layout: gl.constexpr):
    """Store a tile's ``values`` at its rows' places."""
    columns = gl.arange(0, values.shape[1], gl.SliceLayout(0, layout))
    at = gl.convert_layout(at, gl.SliceLayout(1, layout))
    valid = gl.convert_layout(valid, gl.SliceLayout(1, layout))
    mask = gl.expand_dims(valid, 1) & gl.expand_dims(columns < dim, 0)
    gl.store(TO + (gl.expand_dims(at, 1) + gl.expand_dims(columns, 0)), values, mask=mask)


@gluon.jit
def zero_edge(v, stage, key, tile, z):
    """Set the rows of a block of V to zero that hold no key of the tile: each warp group all of them."""
    if (key < tile.start) | (key + z.BLOCK_N > tile.stop):
        zero_outside(v.first.index(stage).reshape([z.BLOCK_N, z.D1]), key, tile.start, tile.stop)
        fence_async_shared()


@gluon.jit
def probabilities(s, key, low, high, every_low, every_high, scale, cap, m, z, CAPPED: gl.constexpr):
    """Scores of the block from ``key`` on to (probabilities, each row's largest score)."""
    if CAPPED:  # noqa: SIM102 (the outer is the compiler's)
        if cap != 0.0:  # tanh(x) = 1 - 2 / (1 + exp(2 x))
            s = 1.0 - 2.0 / (1.0 + gl.exp2(s * (cap * 2.8853900817779268)))
    if (key < every_low) | (key + z.BLOCK_N > every_high):
        s = mask_scores(s, key, (low, high), True)
    new_m = gl.maximum(m, gl.max(s, 1) * scale)
    return gl.exp2(s * scale - gl.expand_dims(new_m, 1)), new_m


@gluon.jit
def consume(z, q, k, v, operands, tile, seqs, scale, cap, CAPPED: gl.constexpr, g: gl.constexpr):
    """Consumer warp group g: scores, softmax and values of 64 of a tile's rows, and their results. Where there are two
    warp groups, products are the bound: scores of a block are computed beside the values of the block before."""
    ratio = seqs.ratio
    D: gl.constexpr = z.D1
    layout: gl.constexpr = vector_layout(D)
    first_row = tile.row + 64 * g
    if tile.rows > 0:
        load_queries(q.first.index(g).reshape([64, D]), operands, tile, first_row, ratio, layout, D)
        fence_async_shared()
        last_row = gl.minimum(first_row + 64, tile.rows) - 1
        row = first_row + gl.arange(0, 64, z.ROW)
        valid = row < tile.rows
        token = gl.minimum(row, last_row) // ratio
        left = seqs.right - seqs.width
        low = tile.past + token + left
        high = gl.minimum(tile.past + token + seqs.right, tile.len_k)
        every_low = tile.past + last_row // ratio + left
        every_high = gl.minimum(tile.past + gl.minimum(first_row, last_row) // ratio + seqs.right, tile.len_k)
        m = gl.full([64], -1.0e30, gl.float32, z.ROW)  # finite: a row that sees no key gives no NaN
        sums = partial_row_sums(gl.zeros([64, z.BLOCK_N], gl.float32, z.S))
        acc = gl.zeros([64, D], gl.float32, z.O1)
        acc2 = gl.zeros([64, 16], gl.float32, z.O2)
        blocks = tile.last - tile.first
        if z.WARP_GROUPS == 2:
            if blocks > 0:
                key = tile.first * z.BLOCK_N
                mbarrier.wait(k.full.index(0), 0)
                s = warpgroup_mma_wait(0, deps=(issue_qk(q, g, k, 0 * blocks, z),))
                mbarrier.arrive(k.empty.index(0), count=1)
                e, m = probabilities(s, key, low, high, every_low, every_high, scale, cap, m, z, CAPPED)
                sums = partial_row_sums(e)
                p = to_x2(e, v.first.dtype)
                for b in range(1, blocks):
                    key = (tile.first + b) * z.BLOCK_N
                    stage = b % z.STAGES
                    before = (b - 1) % z.STAGES
                    phase = ((b - 1) // z.STAGES) & 1
                    if (key - z.BLOCK_N < tile.start) | (key > tile.stop):
                        mbarrier.wait(v.full.index(before), phase)
                        zero_edge(v, before, key - z.BLOCK_N, tile, z)
                    mbarrier.wait(k.full.index(stage), (b // z.STAGES) & 1)
                    s = issue_qk(q, g, k, stage, z)
                    mbarrier.wait(v.full.index(before), phase)
                    acc, acc2 = issue_pv(p, v, before, acc, acc2, z)
                    s = warpgroup_mma_wait(1, deps=(s,))
                    mbarrier.arrive(k.empty.index(stage), count=1)
                    e, new_m = probabilities(
                        s, key, low, high, every_low, every_high, scale, cap, m, z, CAPPED
                    )
                    by = gl.exp2(m - new_m)
                    m = new_m
                    sums = scale_rows(sums, by) + partial_row_sums(e)
                    acc, acc2 = wait_pv(acc, acc2, z)
                    mbarrier.arrive(v.empty.index(before), count=1)
                    p = to_x2(e, v.first.dtype)
                    acc = scale_rows(acc, by)
                stage = (blocks - 1) % z.STAGES
                mbarrier.wait(v.full.index(stage), ((blocks - 1) // z.STAGES) & 1)
                zero_edge(v, stage, (tile.last - 1) * z.BLOCK_N, tile, z)
                acc, acc2 = issue_pv(p, v, stage, acc, acc2, z)
                acc, acc2 = wait_pv(acc, acc2, z)
        else:
            for b in range(blocks):
                key = (tile.first + b) * z.BLOCK_N
                stage = b % z.STAGES
                phase = (b // z.STAGES) & 1
                mbarrier.wait(k.full.index(stage), phase)
                s = warpgroup_mma_wait(0, deps=(issue_qk(q, g, k, stage, z),))
                mbarrier.arrive(k.empty.index(stage), count=1)
                e, new_m = probabilities(s, key, low, high, every_low, every_high, scale, cap, m, z, CAPPED)
                by = gl.exp2(m - new_m)
                m = new_m
                sums = scale_rows(sums, by) + partial_row_sums(e)
                acc = scale_rows(acc, by)
                mbarrier.wait(v.full.index(stage), phase)
                zero_edge(v, stage, key, tile, z)
                acc, acc2 = issue_pv(to_x2(e, v.first.dtype), v, stage, acc, acc2, z)
                acc, acc2 = wait_pv(acc, acc2, z)
                mbarrier.arrive(v.empty.index(stage), count=1)
        total = gl.convert_layout(gl.sum(sums, 1), z.ROW)
        head = tile.head * ratio + (gl.minimum(row, last_row) - token * ratio)
        if tile.splits == 1:
            lse, by = finalise(m, total, operands.SINKS, head)
            own = (tile.start_q + token).to(gl.int64)
            at = own * operands.out_token + head.to(gl.int64) * operands.out_head
            out = scale_rows(acc, by).to(v.first.dtype)
            store_rows(operands.OUT, at, out, valid, operands.dim, z.O1)
            gl.store(operands.LSE + (head.to(gl.int64) * seqs.tokens_q + own), lse, mask=valid)
        else:
            part = scale_rows(acc, 1.0 / gl.where(total > 0, total, 1.0))
            at = tile.partial + token * tile.token_step + (head - tile.head * ratio)
            seen = valid & (tile.last > tile.first)
            store_rows(operands.OUT_PARTIAL, at * operands.dim, part, seen, operands.dim, z.O1)
            gl.store(operands.LSE_PARTIAL + at, m + gl.log2(total), mask=valid)


@gluon.jit
def produce(z, K, V, k, v, tile, seqs, FLAG, KEYS: gl.constexpr, VALUES: gl.constexpr):
    """A producer warp: loads K (KEYS) and V (VALUES) of the blocks that ``consume`` takes, in its order."""
    BOX_KEYS: gl.constexpr = K.block_shape[2]
    pages = pages_of_block(tile.sequence, tile.first * z.BLOCK_N, tile.start, tile.stop, seqs, BOX_KEYS, z)
    for b in range(tile.last - tile.first):
        key = (tile.first + b) * z.BLOCK_N
        stage = b % z.STAGES
        phase = ((b // z.STAGES) & 1) ^ 1
        # of the next block: they arrive while this one's stage is waited for
        following = pages_of_block(tile.sequence, key + z.BLOCK_N, tile.start, tile.stop, seqs, BOX_KEYS, z)
        if KEYS:
            mbarrier.wait(k.empty.index(stage), phase)
            to, full = k.first.index(stage), k.full.index(stage)
            load_pages(K, pages, tile.head, key, tile.start, tile.stop, to, full, seqs, FLAG, True, z)
        if VALUES:
            mbarrier.wait(v.empty.index(stage), phase)
            to, full = v.first.index(stage), v.full.index(stage)
            load_pages(V, pages, tile.head, key, tile.start, tile.stop, to, full, seqs, FLAG, False, z)
        pages = following


@triton.jit
def split_of_blocks(split, splits, first, last):
    """(first block of a split, one after its last): equal numbers of blocks or one more."""
    each = (last - first) // splits
    more = (last - first) - each * splits
    begin = first + split * each + gl.minimum(split, more)
    return begin, begin + each + gl.where(split < more, 1, 0)


@gluon.constexpr_function
def bits_of(n):
    return n.bit_length() - 1


@gluon.jit
def split_pages(
    K, V, OUT, LSE, OUT_PARTIAL, LSE_PARTIAL, Q, SINKS, CU_SEQLENS_Q, SEQUSED_K, TABLE, FLAG, out_token, out_head,
    q_token, q_head, table_row, scale, cap, ratio, dim, sequences, tokens, capacity, pages, page_bits, right, left,
    max_seqlen_q, few, tiles, kv_heads, tiles_per_sequence, splits, least,
    BLOCK_N: gl.constexpr, BOX_KEYS: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
    WARP_GROUPS: gl.constexpr, PRODUCERS: gl.constexpr, CAPPED: gl.constexpr, BY_LENGTHS: gl.constexpr,
    DEPENDENT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A split of a tile's keys: a program for each of (splits, heads of K, tiles of a head), of which each sequence has
    ``tiles_per_sequence``. Where that is 0 (BY_LENGTHS), a program for each of (slots, heads of K) instead, as many
    slots as ``tiles`` says, sequences in at most ``splits`` parts of ``least`` blocks and more: see
    ``key_parts.Split``.

    All programs zero tokens behind the last one: tiles of their own, mostly without any, took places on the GPU that
    others waited for. K and V are tensor maps over (page, head, row, column) with boxes of BOX_KEYS keys and 64
    columns, loaded by one producer warp or by two, K and V each. Without CAPPED, cap must be 0. The other arguments are
    as in ``paged_tiles``.

    DEPENDENT: a dependent launch. Behind ``paged_warp_specialized`` of the same call, whose results are not ours,
    programs start as its programs end, and wait only when they are done, for what comes next waits for this kernel
    alone. That kernel started when all before it had ended, and runs where ``max_seqlen_q`` is more than ``few``."""
    BLOCK_M: gl.constexpr = 64 * WARP_GROUPS
    z = Sizes(BLOCK_N, HEAD_DIM, 0, 64, STAGES, WARP_GROUPS, 0, 0)
    k = paged_pipeline(K, STAGES, z)
    v = paged_pipeline(V, STAGES, z)
    rows_of_q = gl.allocate_shared_memory(K.dtype, [WARP_GROUPS, 1, 1, 64, HEAD_DIM], K.layout)
    q = Pipeline(rows_of_q, rows_of_q, k.full, k.empty)
    if DEPENDENT:
        sequences = wait_for_previous_if((max_seqlen_q <= few).to(gl.int32), sequences)
    if PDL:  # noqa: SIM102 (the outer is the compiler's)
        # See ``flash_decoding.split``: by programs without work too. Not before the wait: ``combine_paged`` reads the
        # lengths before its own.
        if splits > 1:
            launch_dependents()
    program = gl.program_id(0)
    split_head = program // tiles
    of_head = program - split_head * tiles
    split = split_head // kv_heads
    head = split_head - split * kv_heads
    number = split * tiles + of_head
    programs_a_head = splits * tiles
    sequence = gl.minimum(of_head // gl.maximum(tiles_per_sequence, 1), sequences)
    row = (of_head - sequence * tiles_per_sequence) * BLOCK_M
    token_step = kv_heads * ratio
    partial = (split * sequences + sequence).to(gl.int64) * (few * token_step) + head * ratio
    reports = (of_head < sequences) & (head == 0) & (split == 0)
    reported = of_head
    if BY_LENGTHS:  # noqa: SIM102
        if tiles_per_sequence == 0:
            number = program // kv_heads
            head = program - number * kv_heads
            programs_a_head = tiles
            of_call = Split(
                CU_SEQLENS_Q, SEQUSED_K, sequences, tokens, capacity, left, few, ratio, tiles, splits, least,
                gl.to_tensor(BLOCK_M), gl.to_tensor(bits_of(BLOCK_N)),
            )  # fmt: skip
            offsets = gl.arange(0, SEQUENCES, gl.BlockedLayout([4], [32], [4], [0]))  # each warp has all
            chunk, near_tiles, near_blocks = chunk_of(offsets, of_call)
            sequence, before = sequence_of_slot(offsets, near_tiles, near_blocks, number, chunk, of_call)
            own_tiles, blocks = work_of(sequence, of_call)
            splits = parts_of(blocks, chunk, of_call)
            split = (number - before) // gl.maximum(own_tiles, 1)
            row = (number - before - split * own_tiles) * BLOCK_M
            token_step = ratio
            partial = program.to(gl.int64) * gl.minimum(few * ratio, BLOCK_M) - row
            reports = (number == before) & (sequence < sequences) & (head == 0)
            reported = sequence
    if reports:
        report(FLAG, CU_SEQLENS_Q, reported, tokens, max_seqlen_q)
        report_keys(FLAG, SEQUSED_K, reported, capacity)
    start_q, len_q = span(CU_SEQLENS_Q, sequence, sequences, tokens)
    rows = gl.where((row < len_q * ratio) & (len_q <= few), len_q * ratio, 0)
    len_k = keys_in_cache(SEQUSED_K, sequence, sequences, capacity)
    past = len_k - len_q
    last_row = gl.minimum(row + BLOCK_M, rows) - 1
    start = gl.minimum(gl.maximum(past + row // ratio + left, 0), len_k)
    stop = gl.maximum(gl.minimum(past + last_row // ratio + right, len_k), start)
    stop = gl.where(rows > 0, stop, start)
    first = start // BLOCK_N
    last = gl.where(stop > start, (stop + BLOCK_N - 1) // BLOCK_N, first)
    first, last = split_of_blocks(split, splits, first, last)
    seqs = PagedSequences(
        CU_SEQLENS_Q, SEQUSED_K, TABLE, table_row, sequences, tokens, tiles, kv_heads, ratio, tiles, right,
        right - left, few, capacity, pages, page_bits,
    )  # fmt: skip
    own = Tile(
        sequence, head, splits, partial, token_step, row, rows, start_q, past, len_k, start, stop, first, last
    )  # fmt: skip
    operands = Operands(
        OUT, LSE, OUT_PARTIAL, LSE_PARTIAL, Q, SINKS, out_token, out_head, q_token, q_head, dim, kv_heads
    )
    behind, _ = span(CU_SEQLENS_Q, sequences, sequences, tokens)
    zero_tokens(operands, head, number, programs_a_head, behind, tokens, ratio, K.dtype, HEAD_DIM)
    fence_async_shared()
    # the tuples stay literal: through a variable, constants would turn into run-time values
    if WARP_GROUPS == 2 and PRODUCERS == 2:
        gl.warp_specialize(
            [
                (consume, (z, q, k, v, operands, own, seqs, scale, cap, CAPPED, 0)),
                (consume, (z, q, k, v, operands, own, seqs, scale, cap, CAPPED, 1)),
                (produce, (z, K, V, k, v, own, seqs, FLAG, True, False)),
                (produce, (z, K, V, k, v, own, seqs, FLAG, False, True)),
            ],
            [4, 1, 1],
            [232, 40, 40],
        )
    elif WARP_GROUPS == 2:
        gl.warp_specialize(
            [
                (consume, (z, q, k, v, operands, own, seqs, scale, cap, CAPPED, 0)),
                (consume, (z, q, k, v, operands, own, seqs, scale, cap, CAPPED, 1)),
                (produce, (z, K, V, k, v, own, seqs, FLAG, True, True)),
            ],
            [4, 1],
            [232, 40],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (z, q, k, v, operands, own, seqs, scale, cap, CAPPED, 0)),
                (produce, (z, K, V, k, v, own, seqs, FLAG, True, True)),
            ],
            [1],
            [40],
        )
    if DEPENDENT:
        wait_for_previous_if((max_seqlen_q > few).to(gl.int32), few)
