"""Few rows of each sequence against a paged cache, by programs that combine their own parts (Gluon, Hopper).

All queries of a sequence that share a head of keys are rows of one tile. Each sequence's keys are split; the last
program of a sequence's head to end combines the parts. Products are transposed, K Q^T and V^T P^T: the 64 rows of wgmma
are keys and columns of values, and its columns, of which there may be 8, are rows of q (BLOCK_M). So nothing is
computed for rows that are not there. Programs count in COUNTERS who has ended; the last finds all parts in L2, combines
them in their order, so that the bits do not depend on which one is last, and resets the counter.
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

from csrc_triton.attention.paged import finalise, keys_in_cache, report_keys
from csrc_triton.attention.paged_split import split_of_blocks, vector_layout, zero_outside
from csrc_triton.attention.pipeline import mbarriers
from csrc_triton.attention.varlen import report, span
from csrc_triton.common.pdl_begin import begin


@aggregate
class FewRows:
    """A sequence's rows of one head of keys, and where their results go."""

    OUT: gl.tensor
    LSE: gl.tensor
    SINKS: gl.tensor
    out_token: gl.tensor
    out_head: gl.tensor
    head: gl.tensor
    ratio: gl.tensor
    dim: gl.tensor
    tokens: gl.tensor
    start_q: gl.tensor
    rows: gl.tensor

    @gluon.constexpr_function
    def __init__(self, OUT, LSE, SINKS, out_token, out_head, head, ratio, dim, tokens, start_q, rows):
        self.OUT, self.LSE, self.SINKS = OUT, LSE, SINKS
        self.out_token, self.out_head, self.head, self.ratio = out_token, out_head, head, ratio
        self.dim, self.tokens, self.start_q, self.rows = dim, tokens, start_q, rows


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
def load_block_pages(
    K, V, TABLE, ks, vs, full, stage, head, key, start, stop, pages, page_bits, unknown, BLOCK_N: gl.constexpr,
    D: gl.constexpr,
):  # fmt: skip
    """Start to load a block's keys and values; returns ``unknown``, or a page that is not there."""
    BOX_KEYS: gl.constexpr = K.block_shape[2]
    own = full.index(stage)
    mbarrier.expect(own, 2 * K.block_type.nbytes * (D // 64) * (BLOCK_N // BOX_KEYS))
    for i in gl.static_range(BLOCK_N // BOX_KEYS):
        row = gl.maximum(gl.minimum(key + i * BOX_KEYS, stop - 1), start) // BOX_KEYS * BOX_KEYS
        page = gl.load(TABLE + (row >> page_bits))
        there = (page >= 0) & (page < pages)
        unknown = gl.where(there, unknown, page)
        page = gl.where(there, page, 0)
        row = row & ((1 << page_bits) - 1)
        for c in gl.static_range(D // 64):
            to = ks.index(stage).slice(i * BOX_KEYS, BOX_KEYS, dim=2).slice(c * 64, 64, dim=3)
            tma.async_copy_global_to_shared(K, [page, head, row, c * 64], own, to)
        for c in gl.static_range(D // 64):
            to = vs.index(stage).slice(i * BOX_KEYS, BOX_KEYS, dim=2).slice(c * 64, 64, dim=3)
            tma.async_copy_global_to_shared(V, [page, head, row, c * 64], own, to)
    return unknown


@gluon.jit
def store_few(of, m, total, acc, cols, row, dtype: gl.constexpr):
    """Divide (column, row) by the rows' sums and store them, with their LSE."""
    valid = row < of.rows
    place = gl.minimum(row, of.rows - 1)
    token = place // of.ratio
    query_head = of.head * of.ratio + (place - token * of.ratio)
    lse, by = finalise(m, total, of.SINKS, query_head)
    own = (of.start_q + token).to(gl.int64)
    gl.store(of.LSE + (query_head.to(gl.int64) * of.tokens + own), lse, mask=valid)
    at = own * of.out_token + query_head.to(gl.int64) * of.out_head
    mask = gl.expand_dims(valid, 0) & gl.expand_dims(cols < of.dim, 1)
    out = (acc * gl.expand_dims(by, 0)).to(dtype)
    gl.store(of.OUT + (gl.expand_dims(at, 0) + gl.expand_dims(cols, 1)), out, mask=mask)


@gluon.jit
def combine_few(
    of, OUT_PARTIAL, LSE_PARTIAL, step, used, dtype: gl.constexpr, BLOCK_SPLITS: gl.constexpr, BLOCK_M: gl.constexpr,
    D: gl.constexpr,
):  # fmt: skip
    """The results of rows from all their parts, BLOCK_SPLITS at a time. Instead of parts that are not there the last is
    loaded, with weight 0."""
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
    m = gl.full([BLOCK_M], -1.0e30, gl.float32, M)
    total = gl.zeros([BLOCK_M], gl.float32, M)
    acc = gl.zeros([D, BLOCK_M], gl.float32, A)
    for first in range(0, used, BLOCK_SPLITS):
        at = gl.minimum(first + of_values, used - 1) * (step * D)
        values = gl.load(OUT_PARTIAL + (gl.expand_dims(gl.expand_dims(at, 1), 2) + inside))
        at = gl.expand_dims(gl.minimum(first + of_weights, used - 1) * step, 1)
        lse = gl.load(LSE_PARTIAL + (at + gl.expand_dims(gl.arange(0, BLOCK_M, M), 0)))
        lse = gl.where(gl.expand_dims(first + of_weights < used, 1), lse, float("-inf"))
        new_m = gl.maximum(m, gl.max(lse, 0))
        weights = gl.exp2(lse - gl.expand_dims(new_m, 0))
        by = gl.exp2(m - new_m)
        m = new_m
        total = total * by + gl.sum(weights, 0)
        weights = gl.expand_dims(gl.convert_layout(weights, gl.SliceLayout(1, C)), 1)
        acc = acc * gl.expand_dims(gl.convert_layout(by, R), 0) + gl.sum(values * weights, 0)
    m, total = gl.convert_layout(m, R), gl.convert_layout(total, R)
    store_few(of, m, total, acc, cols, row, dtype)


@gluon.jit
def zero_tail(
    OUT, LSE, start, head, split, splits, out_token, out_head, ratio, dim, tokens, BLOCK_M: gl.constexpr, D: gl.constexpr,
    dtype: gl.constexpr,
):  # fmt: skip
    """The results of tokens behind the last sequence."""
    layout: gl.constexpr = vector_layout(D)
    index = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    columns = gl.arange(0, D, gl.SliceLayout(0, layout))
    rows = (tokens - start) * ratio
    for first in range(split * BLOCK_M, rows, splits * BLOCK_M):
        row = first + index
        token = row // ratio
        query_head = head * ratio + (row - token * ratio)
        token += start
        at = token.to(gl.int64) * out_token + query_head.to(gl.int64) * out_head
        mask = gl.expand_dims(row < rows, 1) & gl.expand_dims(columns < dim, 0)
        gl.store(OUT + (gl.expand_dims(at, 1) + gl.expand_dims(columns, 0)), gl.zeros([BLOCK_M, D], dtype, layout), mask=mask)
        to = LSE + (query_head.to(gl.int64) * tokens + token)
        gl.store(to, gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, layout)), mask=row < rows)


@gluon.jit
def fused_pages(
    K, V, OUT, LSE, OUT_PARTIAL, LSE_PARTIAL, COUNTERS, Q, SINKS, CU_SEQLENS_Q, SEQUSED_K, TABLE, FLAG, out_token,
    out_head, q_token, q_head, table_row, scale, cap, ratio, dim, sequences, tokens, capacity, pages, page_bits, right,
    left, max_seqlen_q, few, kv_heads, splits,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
    BLOCK_SPLITS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """A split of a sequence: its result where it is the whole sequence, else a part, and from the last of them the
    result. The grid is (heads of K, splits, sequences and the tokens behind the last)."""
    D: gl.constexpr = HEAD_DIM
    dtype: gl.constexpr = K.dtype
    T: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    ROW: gl.constexpr = gl.SliceLayout(0, T)
    LOADED: gl.constexpr = vector_layout(D)
    head = gl.program_id(0)
    split = gl.program_id(1)
    sequence = gl.program_id(2)
    if DEPENDENT:
        sequence = begin(sequence, True)
    start_q, len_q = span(CU_SEQLENS_Q, sequence, sequences, tokens)
    len_k = keys_in_cache(SEQUSED_K, sequence, sequences, capacity)
    full = mbarriers(STAGES, 1)
    ks = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D], K.layout)
    vs = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D], V.layout)
    fence_async_shared()
    rows = gl.where(len_q <= few, len_q * ratio, 0)
    past = len_k - len_q
    start = gl.minimum(gl.maximum(past + left, 0), len_k)
    stop = gl.maximum(gl.minimum(past + len_q - 1 + right, len_k), start)
    first = start // BLOCK_N
    behind = gl.where(stop > start, (stop + BLOCK_N - 1) // BLOCK_N, first + 1)
    used = gl.minimum(splits, behind - first)
    if sequence == sequences:
        zero_tail(OUT, LSE, start_q, head, split, splits, out_token, out_head, ratio, dim, tokens, BLOCK_M, D, dtype)
    elif (rows > 0) & (split < used):
        before, end = split_of_blocks(split, used, first, behind)
        end = gl.where(stop > start, end, before)
        TABLE += sequence * table_row
        unknown = before - before
        for i in range(gl.minimum(end - before, STAGES)):
            unknown = load_block_pages(
                K, V, TABLE, ks, vs, full, i, head, (before + i) * BLOCK_N, start, stop, pages, page_bits, unknown,
                BLOCK_N, D,
            )  # fmt: skip
        index = gl.arange(0, BLOCK_M, gl.SliceLayout(1, LOADED))
        columns = gl.arange(0, D, gl.SliceLayout(0, LOADED))
        token = index // ratio
        at = (start_q + token).to(gl.int64) * q_token + (head * ratio + (index - token * ratio)).to(gl.int64) * q_head
        mask = gl.expand_dims(index < rows, 1) & gl.expand_dims(columns < dim, 0)
        q = gl.load(Q + (gl.expand_dims(at, 1) + gl.expand_dims(columns, 0)), mask=mask, other=0.0)
        qs = gl.allocate_shared_memory(
            dtype, [BLOCK_M, D], gl.NVMMASharedLayout.get_default_for([BLOCK_M, D], dtype)
        )
        ps = gl.allocate_shared_memory(
            dtype, [BLOCK_M, BLOCK_N], gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_N], dtype)
        )
        qs.store(q)
        fence_async_shared()
        gl.thread_barrier()
        row = gl.arange(0, BLOCK_M, ROW)
        token = gl.minimum(row, rows - 1) // ratio
        low = past + token + left
        high = gl.minimum(past + token + right, len_k)
        every_low = past + len_q - 1 + left
        every_high = gl.minimum(past + right, len_k)
        m = gl.full([BLOCK_M], -1.0e30, gl.float32, ROW)
        sums = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, T)
        acc = gl.zeros([D, BLOCK_M], gl.float32, T)
        for j in range(end - before):
            key = (before + j) * BLOCK_N
            stage = j % STAGES
            mbarrier.wait(full.index(stage), (j // STAGES) & 1)
            zeros = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, T)
            k = ks.index(stage).reshape([BLOCK_N, D])
            s = warpgroup_mma(k, qs.permute((1, 0)), zeros, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,))
            if cap != 0.0:  # tanh(x) = 1 - 2 / (1 + exp(2 x))
                s = 1.0 - 2.0 / (1.0 + gl.exp2(s * (cap * 2.8853900817779268)))
            s = s * scale
            v = vs.index(stage).reshape([BLOCK_N, D])
            if (key < every_low) | (key + BLOCK_N > every_high):
                keys = gl.expand_dims(key + gl.arange(0, BLOCK_N, gl.SliceLayout(1, T)), 1)
                seen = (keys >= gl.expand_dims(low, 0)) & (keys < gl.expand_dims(high, 0))
                s = gl.where(seen, s, float("-inf"))
                zero_outside(v, key, start, stop)
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
            if j + STAGES < end - before:
                gl.thread_barrier()  # all threads are done with the stage
                unknown = load_block_pages(
                    K, V, TABLE, ks, vs, full, stage, head, key + STAGES * BLOCK_N, start, stop, pages, page_bits,
                    unknown, BLOCK_N, D,
                )  # fmt: skip
        gl.store(FLAG, unknown.to(gl.int64), mask=unknown != 0)
        total = gl.sum(sums, 0)
        cols = gl.arange(0, D, gl.SliceLayout(1, T))
        of = FewRows(OUT, LSE, SINKS, out_token, out_head, head, ratio, dim, tokens, start_q, rows)
        if used == 1:
            store_few(of, m, total, acc, cols, row, dtype)
        else:
            first_part = (sequence * splits * kv_heads + head).to(gl.int64) * BLOCK_M
            step = kv_heads * BLOCK_M
            OUT_PARTIAL += first_part * D
            LSE_PARTIAL += first_part
            gl.store(LSE_PARTIAL + (split * step + row), m + gl.log2(total))
            by = gl.where(total == 0.0, 0.0, 1.0 / total)
            place = split * step * D + gl.expand_dims(cols * BLOCK_M, 1) + gl.expand_dims(row, 0)
            gl.store(OUT_PARTIAL + place, acc * gl.expand_dims(by, 0))
            gl.thread_barrier()
            counter = COUNTERS + sequence * kv_heads + head
            if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == used - 1:
                gl.store(counter, 0)
                combine_few(of, OUT_PARTIAL, LSE_PARTIAL, step, used, dtype, BLOCK_SPLITS, BLOCK_M, D)
    if (split == 0) & (head == 0) & (sequence < sequences):
        report(FLAG, CU_SEQLENS_Q, sequence, tokens, max_seqlen_q)
        report_keys(FLAG, SEQUSED_K, sequence, capacity)
