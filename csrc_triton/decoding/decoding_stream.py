"""flash_decoding over a contiguous cache with TMA and wgmma (Gluon, Hopper): a producer warp streams keys and values of
one sequence after the other through a ring in shared memory, and a consumer group of four warps computes.

The producer knows the next sequence's blocks before the consumers are done with the last's, so memory is busy from the
first block of a program to its last. Nothing but the lengths is needed for the first copy: q and all that belongs to
rows is the consumers'. wgmma multiplies 64 rows, of which a tile may have fewer: q's others are zeros, and cost nothing
where reading is what takes time. Copies bring whole blocks: what no key was written to may hold anything, so values out
of a tile's keys are made zeros.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
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
from csrc_triton.attention.pipeline import load_tile
from csrc_triton.decoding.decoding_keys import NOTHING, finish, row_of, sink_of
from csrc_triton.decoding.decoding_work import MANY, even_work_of, piece_of


@gluon.constexpr_function
def lines_layout(columns):
    """Rows of 16-bit elements, 16 bytes a thread."""
    across = min(columns // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def turn(slot, phase, STAGES: gl.constexpr):
    """The next slot of a ring, and its phase."""
    last = slot == STAGES - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def own_work(group, groups, LENGTHS, batch, tokens, capacity, left, right, z):
    """``even_work_of`` by the warps of one role: the other need not be waited for."""
    many = gl.arange(0, MANY, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    return even_work_of(many, group, groups, LENGTHS, batch, tokens, capacity, left, right, z.BLOCK_N)


@gluon.jit
def stream(
    z, K, V, k, v,
    head, group, groups, LENGTHS, first_token, last_token, batch, tokens, capacity, left, right,
):  # fmt: skip
    """The producer: fills the rings with the blocks that ``attend`` takes, in its order."""
    b, begin, blocks = own_work(group, groups, LENGTHS, batch, tokens, capacity, left, right, z)
    slot = 0
    phase = 1
    while blocks > 0:
        _, _, _, here, _, _, _, first, last = piece_of(
            LENGTHS, b, begin, blocks, first_token, last_token, tokens, capacity, left, right, z.BLOCK_N
        )
        for j in range(first, last):
            mbarrier.wait(k.empty.index(slot), phase)
            load_tile(K, b, head, j * z.BLOCK_N, k, slot, z)
            mbarrier.wait(v.empty.index(slot), phase)
            load_tile(V, b, head, j * z.BLOCK_N, v, slot, z)
            slot, phase = turn(slot, phase, z.STAGES)
        blocks -= here
        begin = 0
        b += 1


@gluon.jit
def load_q(
    Q, to, column: gl.constexpr, count, first_token, into, head, ratio, by_ratio, q_token, q_head, dim
):  # fmt: skip
    """Columns of a tile's rows from ``column`` on to shared memory, and zeros for what is not there."""
    width: gl.constexpr = to.shape[1]
    layout: gl.constexpr = lines_layout(width)
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    cols = column + gl.arange(0, width, gl.SliceLayout(0, layout))
    token, query_head = row_of(row, first_token, into, head, ratio, by_ratio)
    at = token.to(gl.int64) * q_token + query_head.to(gl.int64) * q_head
    mask = gl.expand_dims(row < count, 1) & gl.expand_dims(cols < dim, 0)
    to.store(gl.load(Q + (gl.expand_dims(at, 1) + gl.expand_dims(cols, 0)), mask=mask, other=0.0))


@gluon.jit
def keep_keys(values, key, start, stop):
    """Zeros in a block's lines that hold no keys of [start, stop)."""
    layout: gl.constexpr = lines_layout(values.shape[1])
    keys = key + gl.arange(0, values.shape[0], gl.SliceLayout(1, layout))
    there = gl.expand_dims((keys >= start) & (keys < stop), 1)
    loaded = values.load(layout)
    values.store(gl.where(there, loaded, gl.zeros_like(loaded)))


@gluon.jit
def put(TO, at, values, layout: gl.constexpr, column: gl.constexpr, count, dim):
    """Columns of a tile's results from ``column`` on to where its rows are."""
    cols = column + gl.arange(0, values.shape[1], gl.SliceLayout(0, layout))
    at = gl.convert_layout(at, gl.SliceLayout(1, layout))
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    mask = gl.expand_dims(row < count, 1) & gl.expand_dims(cols < dim, 0)
    gl.store(TO + (gl.expand_dims(at, 1) * dim + gl.expand_dims(cols, 0)), values, mask=mask)


@gluon.jit
def put_all(TO, at, acc, acc2, by, dtype: gl.constexpr, count, dim, z):
    """Both panels, scaled by row."""
    put(TO, at, scale_rows(acc, by).to(dtype), z.O1, 0, count, dim)
    if z.D2 > 0:
        put(TO, at, scale_rows(acc2, by).to(dtype), z.O2, z.D1, count, dim)


@gluon.jit
def attend(
    z, q, k, v, OUT, LSE, PARTS, PART_SUMS, FLAG, Q, SINKS, q_batch, q_token, q_head, scale, cap, kv_heads, ratio,
    by_ratio, dim, program, part_rows, all_count, all_into,
    head, group, groups, LENGTHS, first_token, last_token, batch, tokens, capacity, left, right,
):  # fmt: skip
    """The consumers: scores, softmax and values of ``all_count`` rows, and their results."""
    b, begin, blocks = own_work(group, groups, LENGTHS, batch, tokens, capacity, left, right, z)
    slot = 0
    phase = 0
    while blocks > 0:
        length, wrong, given, here, whole, start, stop, first, last = piece_of(
            LENGTHS, b, begin, blocks, first_token, last_token, tokens, capacity, left, right, z.BLOCK_N
        )
        # 0, which no compiler can know: what belongs to rows is computed anew for each sequence, and takes no registers
        # in between
        zero = gl.where(length > capacity, 1, 0)
        into = all_into + zero
        count = all_count + zero
        row = gl.arange(0, 64, z.ROW)
        index = b.to(gl.int64)
        of_batch = Q + index * q_batch
        load_q(
            of_batch, q.first.index(0).reshape([64, z.D1]), 0, count, first_token, into, head, ratio, by_ratio,
            q_token, q_head, dim,
        )  # fmt: skip
        if z.D2 > 0:
            load_q(
                of_batch, q.second.index(0).reshape([64, z.D2]), z.D1, count, first_token, into, head, ratio, by_ratio,
                q_token, q_head, dim,
            )  # fmt: skip
        fence_async_shared()
        gl.store(FLAG, given.to(gl.int64), mask=wrong & (FLAG.to(gl.int64) != 0))
        before = length - tokens
        token, query_head = row_of(row, first_token, into, head, ratio, by_ratio)
        low = before + token - left
        high = gl.minimum(before + token + right, length)
        inner_low = before + last_token - left
        inner_high = gl.minimum(before + first_token + right, length)
        m = gl.full([64], NOTHING, gl.float32, z.ROW)
        sums = partial_row_sums(gl.zeros([64, z.BLOCK_N], gl.float32, z.S))
        acc = gl.zeros([64, z.D1], gl.float32, z.O1)
        acc2 = gl.zeros([64, z.D2 if z.D2 > 0 else 16], gl.float32, z.O2)
        for j in range(first, last):
            key = j * z.BLOCK_N
            mbarrier.wait(k.full.index(slot), phase)
            s = warpgroup_mma_wait(0, deps=(issue_qk(q, 0, k, slot, z),))
            mbarrier.arrive(k.empty.index(slot), count=1)
            if cap != 0.0:  # tanh(x) = 1 - 2 / (1 + exp(2 x))
                s = 1.0 - 2.0 / (1.0 + gl.exp2(s * (cap * 2.8853900817779268)))
            if (key < inner_low) | (key + z.BLOCK_N > inner_high):
                s = mask_scores(s, key, (low, high), True)
            new_m = gl.maximum(m, gl.max(s, 1) * scale)
            e = gl.exp2(s * scale - gl.expand_dims(new_m, 1))
            by = gl.exp2(m - new_m)
            m = new_m
            sums = scale_rows(sums, by) + partial_row_sums(e)
            acc = scale_rows(acc, by)
            if z.D2 > 0:
                acc2 = scale_rows(acc2, by)
            mbarrier.wait(v.full.index(slot), phase)
            if (key < start) | (key + z.BLOCK_N > stop):
                keep_keys(v.first.index(slot).reshape([z.BLOCK_N, z.D1]), key, start, stop)
                if z.D2 > 0:
                    keep_keys(v.second.index(slot).reshape([z.BLOCK_N, z.D2]), key, start, stop)
                fence_async_shared()
            acc, acc2 = issue_pv(to_x2(e, v.first.dtype), v, slot, acc, acc2, z)
            acc, acc2 = wait_pv(acc, acc2, z)
            mbarrier.arrive(v.empty.index(slot), count=1)
            slot, phase = turn(slot, phase, z.STAGES)
        total = gl.convert_layout(gl.sum(sums, 1), z.ROW)
        total = gl.where(wrong, float("nan"), total)
        there = row < count
        if whole:
            lse, by = finish(m, total, sink_of(SINKS, query_head))
            heads = kv_heads * ratio
            at = (index * tokens + token) * heads + query_head
            gl.store(LSE + (index * heads + query_head) * tokens + token, lse, mask=there)
            put_all(OUT, at, acc, acc2, by, v.first.dtype, count, dim, z)
        else:
            by = gl.where(total == 0.0, 0.0, 1.0 / total)
            at = (2 * program + gl.where(begin == 0, 1, 0)).to(gl.int64) * part_rows + row
            gl.store(PART_SUMS + at, m + gl.log2(total), mask=there)
            put_all(PARTS, at, acc, acc2, by, gl.float32, count, dim, z)
        blocks -= here
        begin = 0
        b += 1
