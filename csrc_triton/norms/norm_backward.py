"""The backward of RMSNorm and its relatives: bodies that their kernels share.

By the length of a row: tiles of short rows; whole rows in registers; rows read twice; rows split between programs
(PTX); rows held in shared memory (Gluon, Hopper). Each body stores dx and sums dy * x_hat, the gradient of the weight,
over the program's rows; x_hat is the normalised x. ADDED: a further gradient of x is added to dx where ``has_added``,
as ``fused_add_rmsnorm`` needs it.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.core import _aggregate as aggregate

from csrc_triton.common.bf16x2 import even, odd, pack
from csrc_triton.common.exchange import missing, poll, post, post_two, sum_high, sum_low
from csrc_triton.common.pipeline import add_two, copy_tile, next_stage
from csrc_triton.norms.norm_vectors import Rows, load_vector, row_at, tile_at

# Forms of kernels that run ``split_rms_backward`` or ``split_centered_backward``, and ``pipelined_backward``, beside
# the function's name and what is the op's own.
SPLIT_ROWS = {
    "constants": ["SPLITS", "BLOCK", "STAGES"],
    "contiguous": True,
    "covers": "2 * SPLITS * BLOCK",
    "requires": {"dtype": ["bf16", "fp16"], "aligned": [True]},
    "cooperative": "SPLITS",
}
BACKWARD_PIPELINE = {
    "language": "gluon",
    "constants": ["BLOCKS", "BLOCK", "STAGES"],
    "covers": "2 * BLOCKS * BLOCK",
    "requires": {"dtype": ["bf16", "fp16"], "aligned": [True]},
    "may_spill": "a tenth of the registers, once a row, for rows that are not split",
}


@triton.jit
def load_added(pointer, mask, ADDED: tl.constexpr):
    if ADDED:
        return tl.load(pointer, mask=mask, other=0)
    else:
        return 0


@triton.jit
def rms_backward_tiles(
    dx: Rows, dy: Rows, x: Rows, added: Rows, RSTD, w, n_rows, n_cols, has_added, store_dx,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """Persistent programs, ROWS short rows a step; the next steps' loads are in flight meanwhile. The sums are
    [ROWS, BLOCK]."""
    cols = tl.arange(0, BLOCK)
    in_row = cols < n_cols
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in tl.range(
        tl.program_id(0).to(tl.int64), tl.cdiv(n_rows, ROWS), tl.num_programs(0), num_stages=STAGES
    ):
        rows = step * ROWS + tl.arange(0, ROWS)
        mask = (rows < n_rows)[:, None] & in_row[None, :]
        xs = tl.load(tile_at(x, rows, cols), mask=mask, other=0.0).to(tl.float32)
        dys = tl.load(tile_at(dy, rows, cols), mask=mask, other=0.0).to(tl.float32)
        if ADDED:
            more = tl.load(tile_at(added, rows, cols), mask=mask & (has_added != 0), other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + rows, mask=rows < n_rows, other=0.0)
        c = tl.sum(xs * (w[None, :] * dys), 1) / n_cols
        a = dys * rstd[:, None]
        dxs = w[None, :] * a - xs * (c * rstd * rstd * rstd)[:, None]
        if ADDED:
            dxs += more
        tl.store(tile_at(dx, rows, cols), dxs.to(dx.pointer.dtype.element_ty), mask=mask & (store_dx != 0))
        dw += a * xs
    return dw


@triton.jit
def rms_backward_rows(
    dx: Rows, dy: Rows, x: Rows, added: Rows, RSTD, w, n_rows, n_cols, has_added, store_dx,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """``rms_backward_tiles`` with one row a step, 1-D: a [1, BLOCK] tile with a masked row runs at half the speed."""
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    dw = tl.zeros([BLOCK], tl.float32)
    for row in tl.range(tl.program_id(0).to(tl.int64), n_rows, tl.num_programs(0), num_stages=STAGES):
        xs = tl.load(row_at(x, row) + cols, mask=mask, other=0.0).to(tl.float32)
        dys = tl.load(row_at(dy, row) + cols, mask=mask, other=0.0).to(tl.float32)
        if ADDED:
            more = tl.load(row_at(added, row) + cols, mask=mask & (has_added != 0), other=0.0)
        rstd = tl.load(RSTD + row)
        c = tl.sum(xs * (w * dys), 0) / n_cols
        a = dys * rstd
        dxs = w * a - xs * (c * rstd * rstd * rstd)
        if ADDED:
            dxs += more.to(tl.float32)
        tl.store(row_at(dx, row) + cols, dxs.to(dx.pointer.dtype.element_ty), mask=mask & (store_dx != 0))
        dw += a * xs
    return dw


@triton.jit
def rms_backward_long(
    dx: Rows, dy: Rows, x: Rows, added: Rows, RSTD, W, PARTIALS, n_rows, n_cols, offset, w_kind, has_added, store_dx,
    store_partials, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """Rows of any length, ROWS a step, read twice: for the dot product, then for dx. The sums are added to in memory,
    in a row of PARTIALS for each program."""
    program = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    for step in range(program, tl.cdiv(n_rows, ROWS), tl.num_programs(0)):
        rows = step * ROWS + tl.arange(0, ROWS)
        in_rows = (rows < n_rows)[:, None]
        x_at = tile_at(x, rows, block)
        dy_at = tile_at(dy, rows, block)
        added_at = tile_at(added, rows, block)
        dx_at = tile_at(dx, rows, block)
        dot = tl.zeros([ROWS, BLOCK], tl.float32)
        for first in range(0, n_cols, BLOCK):
            in_row = block < n_cols - first
            mask = in_rows & in_row[None, :]
            xs = tl.load(x_at + first, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
            dys = tl.load(dy_at + first, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
            w = load_vector(W, first + block, in_row, w_kind, 0, WIDE) + offset
            dot += xs * (w[None, :] * dys)
        rstd = tl.load(RSTD + rows, mask=rows < n_rows, other=0.0)
        c = tl.sum(dot, 1) / n_cols * rstd * rstd * rstd
        for first in range(0, n_cols, BLOCK):
            in_row = block < n_cols - first
            mask = in_rows & in_row[None, :]
            xs = tl.load(x_at + first, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            dys = tl.load(dy_at + first, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            if ADDED:
                more = tl.load(added_at + first, mask=mask & (has_added != 0), other=0.0).to(tl.float32)
            w = load_vector(W, first + block, in_row, w_kind, 0, WIDE) + offset
            a = dys * rstd[:, None]
            dxs = w[None, :] * a - xs * c[:, None]
            if ADDED:
                dxs += more
            dxs = dxs.to(dx.pointer.dtype.element_ty)
            tl.store(dx_at + first, dxs, mask=mask & (store_dx != 0))
            sums_mask = in_row & (store_partials != 0)
            sums_at = PARTIALS + program * n_cols + first + block
            before = tl.load(sums_at, mask=sums_mask & (step != program), other=0.0)
            tl.store(sums_at, before + tl.sum(a * xs, 0), mask=sums_mask)
        tl.debug_barrier()  # the next step reads the partials, perhaps in other threads


# Rows split between programs: long contiguous rows of 16-bit elements as bf16x2, BLOCK pairs a program.
#
# The programs of a group go over the rows together and exchange their parts of a row's sums through words of global
# memory, which must be zero; ``n`` is a row's length in pairs. A row is finished one step late: the words of the
# previous row are polled before the sums of this one, so that the exchange costs no time. Waiting needs a cooperative
# launch.
#
# Registers decide the speed here: one stride (the row's length) instead of three is worth 0.05 to 0.2 of the copy.


@triton.jit
def as_x2(P):
    """A pointer to 16-bit elements as one to pairs of them."""
    return P.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def weighted_dot(x, dy, w, offset, dtype: tl.constexpr):
    """Sum of x * dy * (w + offset). The offset is multiplied out: w + offset would be hoisted, in fp32 registers."""
    p = even(x, dtype) * even(dy, dtype)
    q = odd(x, dtype) * odd(dy, dtype)
    return tl.sum((p * even(w, dtype) + p * offset) + (q * odd(w, dtype) + q * offset), 0)


@triton.jit
def finish_rms_row(
    x, dy, w, dw_even, dw_odd, c, rstd, offset, DX, mask, added, dtype: tl.constexpr, ADDED: tl.constexpr
):  # fmt: skip
    """Store one row's dx and return the two sums of dw with the row added; c holds rstd^3 and 1/n already."""
    a = even(dy, dtype) * rstd
    x_half = even(x, dtype)
    dx_even = even(w, dtype) * a - x_half * c
    dx_even += offset * a
    if ADDED:
        dx_even += even(added, dtype)
    dw_even += a * x_half
    a = odd(dy, dtype) * rstd
    x_half = odd(x, dtype)
    dx_odd = odd(w, dtype) * a - x_half * c
    dx_odd += offset * a
    if ADDED:
        dx_odd += odd(added, dtype)
    dw_odd += a * x_half
    tl.store(DX, pack(dx_even, dx_odd, dtype), mask=mask)
    return dw_even, dw_odd


@triton.jit
def split_rms_backward(
    DX, DY, X, ADDED_TO, RSTD, W, PARTIALS, WORDS, n_rows, n_cols, offset, w_kind, has_added, store_dx,
    store_partials, SPLITS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """RMSNorm, SPLITS programs a row. WORDS are [n_rows, SPLITS]; PARTIALS get a row for each group of programs."""
    dtype: tl.constexpr = X.dtype.element_ty
    n = n_cols // 2
    group = (tl.program_id(0) // SPLITS).to(tl.int64)
    groups = (tl.num_programs(0) // SPLITS).to(tl.int64)
    part = tl.program_id(0) % SPLITS
    cols = part * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n
    X_at = as_x2(X) + cols
    DY_at = as_x2(DY) + cols
    DX_at = as_x2(DX) + cols
    added_at = as_x2(ADDED_TO) + cols
    added_mask = mask & (has_added != 0)
    dx_mask = mask & (store_dx != 0)
    w = tl.load(as_x2(W) + cols, mask=mask & (w_kind != 0), other=0)
    dw_even = tl.zeros([BLOCK], tl.float32)
    dw_odd = tl.zeros([BLOCK], tl.float32)
    lane = tl.arange(0, triton.next_power_of_2(SPLITS))
    words_of = WORDS + tl.minimum(lane, SPLITS - 1)
    last_x = tl.zeros([BLOCK], tl.int32)
    last_dy = tl.zeros([BLOCK], tl.int32)
    last_rstd = 0.0
    for row in tl.range(group, n_rows, groups, num_stages=STAGES):
        last_row = tl.maximum(row - groups, group)
        words_at = words_of + last_row * SPLITS
        words = poll(words_at)
        x = tl.load(X_at + row * n, mask=mask, other=0)
        dy = tl.load(DY_at + row * n, mask=mask, other=0)
        rstd = tl.load(RSTD + row)
        post(WORDS + row * SPLITS + part, weighted_dot(x, dy, w, offset, dtype))
        added = load_added(added_at + last_row * n, added_mask, ADDED)
        if row >= groups:  # the `while` must be inside an `if`: directly in the loop it turns pipelining off
            while missing(words):
                words = poll(words_at)
            c = sum_high(words, lane, SPLITS) / (2 * n) * last_rstd * last_rstd * last_rstd
            dw_even, dw_odd = finish_rms_row(
                last_x, last_dy, w, dw_even, dw_odd, c, last_rstd, offset, DX_at + last_row * n, dx_mask, added, dtype,
                ADDED,
            )  # fmt: skip
        last_x = x
        last_dy = dy
        last_rstd = rstd
    steps = (n_rows - group + groups - 1) // groups
    if steps > 0:
        last_row = group + (steps - 1) * groups
        words_at = words_of + last_row * SPLITS
        words = poll(words_at)
        while missing(words):
            words = poll(words_at)
        c = sum_high(words, lane, SPLITS) / (2 * n) * last_rstd * last_rstd * last_rstd
        added = load_added(added_at + last_row * n, added_mask, ADDED)
        dw_even, dw_odd = finish_rms_row(
            last_x, last_dy, w, dw_even, dw_odd, c, last_rstd, offset, DX_at + last_row * n, dx_mask, added, dtype,
            ADDED,
        )  # fmt: skip
    partials = PARTIALS + group * n_cols + cols.to(tl.int64) * 2
    tl.store(partials, dw_even, mask=mask & (store_partials != 0))
    tl.store(partials + 1, dw_odd, mask=mask & (store_partials != 0))


@triton.jit
def weighted_sums(x, dy, w, dtype: tl.constexpr):
    """Sums of dy * w * x and of dy * w. The rows are of 16 bits: fp32 has room for a mean 2^8 deviations away."""
    first = even(dy, dtype) * even(w, dtype)
    second = odd(dy, dtype) * odd(w, dtype)
    return tl.sum(first * even(x, dtype) + second * odd(x, dtype), 0), tl.sum(first + second, 0)


@triton.jit
def finish_centered_half(x, dy, w, dw, db, scale, shift, along, offset):
    """One half of the pairs in fp32: dx, and the sums of dw and db with the row added. x * scale + shift is x_hat;
    along and offset hold 1 / sqrt(var + eps) already."""
    x_hat = x * scale + shift
    return w * (dy * scale) - (x_hat * along + offset), dw + dy * x_hat, db + dy


@triton.jit
def split_centered_backward(
    DX, DY, X, W, STATS, WORDS, n_rows, n, splits, w_kind, store_dx,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """LayerNorm, ``splits`` programs a row, SPLITS at most. STATS holds mean and 1 / sqrt(var + eps) of each row; WORDS
    are [n_rows, splits]. Returns the sums of dw and db, each of even and of odd columns.

    Registers decide the speed: the sums take four a pair, everything else stays packed."""
    dtype: tl.constexpr = X.dtype.element_ty
    ones: tl.constexpr = 0x3F803F80 if dtype == tl.bfloat16 else 0x3C003C00
    lanes: tl.constexpr = max(
        32, triton.next_power_of_2(SPLITS)
    )  # a whole warp: an integer reduction of one step
    group = (tl.program_id(0) // splits).to(tl.int64)
    groups = (tl.num_programs(0) // splits).to(tl.int64)
    part = tl.program_id(0) % splits
    cols = part * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n
    w = tl.load(as_x2(W) + cols, mask=mask & (w_kind != 0), other=ones)
    X_at = as_x2(X) + cols
    DY_at = as_x2(DY) + cols
    DX_at = as_x2(DX) + cols
    dx_mask = mask & (store_dx != 0)
    dw_even = tl.zeros([BLOCK], tl.float32)
    dw_odd = tl.zeros([BLOCK], tl.float32)
    db_even = tl.zeros([BLOCK], tl.float32)
    db_odd = tl.zeros([BLOCK], tl.float32)
    lane = tl.arange(0, lanes)
    words_of = WORDS + tl.minimum(lane, splits - 1)
    last_x = tl.zeros([BLOCK], tl.int32)
    last_dy = tl.zeros([BLOCK], tl.int32)
    last_mean = 0.0
    last_rstd = 0.0
    end = group + (n_rows - 1 - group) // groups * groups
    for next_row in tl.range(group, n_rows + groups, groups, num_stages=STAGES):
        row = tl.minimum(next_row, end)  # the last step repeats a row: that does no harm
        last_row = tl.maximum(next_row - groups, group)
        words_at = words_of + last_row * splits
        words = poll(words_at)
        x = tl.load(X_at + row * n, mask=mask, other=0)
        dy = tl.load(DY_at + row * n, mask=mask, other=0)
        mean = tl.load(STATS + row * 2)
        rstd = tl.load(STATS + row * 2 + 1)
        dot, total = weighted_sums(x, dy, w, dtype)
        post_two(WORDS + row * splits + part, (dot - mean * total) * rstd, total)
        if (
            next_row > group
        ):  # the `while` must be inside an `if`: directly in the loop it turns pipelining off
            while missing(words):
                words = poll(words_at)
            along = sum_high(words, lane, splits) / (2 * n) * last_rstd
            offset = sum_low(words, lane, splits) / (2 * n) * last_rstd
            shift = -last_mean * last_rstd
            dx_even, dw_even, db_even = finish_centered_half(
                even(last_x, dtype), even(last_dy, dtype), even(w, dtype), dw_even, db_even,
                last_rstd, shift, along, offset,
            )  # fmt: skip
            dx_odd, dw_odd, db_odd = finish_centered_half(
                odd(last_x, dtype), odd(last_dy, dtype), odd(w, dtype), dw_odd, db_odd,
                last_rstd, shift, along, offset,
            )  # fmt: skip
            tl.store(DX_at + last_row * n, pack(dx_even, dx_odd, dtype), mask=dx_mask)
        last_x = x
        last_dy = dy
        last_mean = mean
        last_rstd = rstd
    return dw_even, dw_odd, db_even, db_odd


# Rows held in shared memory by one program (Gluon, Hopper).
#
# A program copies its rows to shared memory ahead of their use, STAGES of them, and reads each twice from there: for
# the sums over the row, and one step later for its dx and the sums of columns. So no row is split, registers hold only
# the sums of columns and the weight, two or three fp32 values a column, and the two reads, of two rows, are in flight
# together: neither waits for the other. Every thread reads back what it copied itself.
#
# Rows are of 16-bit elements, as bf16x2. A row is BLOCKS blocks of BLOCK pairs, each with buffers of its own: barriers
# would order copies to the same one. Column vectors (the weight, the sums) are tuples of 2 * BLOCKS tensors, "halves":
# the even columns of a block, its odd ones, the even ones of the next.


@aggregate
class PipelineSizes:
    """What is fixed when a kernel that runs ``pipelined_backward`` is compiled."""

    CENTERED: gl.constexpr  # whether rows have a mean (LayerNorm)
    DB: gl.constexpr  # whether sums of dy are wanted, too
    ADDED: gl.constexpr
    BLOCKS: gl.constexpr
    BLOCK: gl.constexpr
    STAGES: gl.constexpr
    layout: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, warps, BLOCKS, BLOCK, STAGES, CENTERED=False, DB=False, ADDED=False):
        self.CENTERED, self.DB, self.ADDED = gl.constexpr(CENTERED), gl.constexpr(DB), gl.constexpr(ADDED)
        self.BLOCKS, self.BLOCK, self.STAGES = gl.constexpr(BLOCKS), gl.constexpr(BLOCK), gl.constexpr(STAGES)
        self.layout = gl.constexpr(x2_layout(warps))


@gluon.constexpr_function
def x2_layout(warps):
    """The layout of a block: four pairs of elements a thread."""
    return gl.BlockedLayout([4], [32], [warps], [0])


@gluon.jit
def allocate_blocks(STAGES: gl.constexpr, BLOCK: gl.constexpr):
    return gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def columns_of(half, BLOCK: gl.constexpr, layout: gl.constexpr):
    """The columns of the ``half``-th half."""
    return 2 * (half // 2 * BLOCK + gl.arange(0, BLOCK, layout=layout)) + half % 2


@gluon.jit
def load_halves(V, start, n_cols, kind, BLOCKS: gl.constexpr, BLOCK: gl.constexpr, layout: gl.constexpr):
    """The halves of a vector of n_cols from ``start`` on, in fp32; zeros past its end and where there is none."""
    neighbours: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    halves = ()
    for i in gl.static_range(BLOCKS):
        cols = i * 2 * BLOCK + gl.arange(0, 2 * BLOCK, layout=neighbours)
        low, high = gl.split(load_vector(V, cols, cols < n_cols, kind, start).reshape([BLOCK, 2]))
        halves += (gl.convert_layout(low, layout), gl.convert_layout(high, layout))
    return halves


@gluon.jit
def plus(halves, value):
    sums = ()
    for i in gl.static_range(len(halves)):
        sums += (halves[i] + value,)
    return sums


@gluon.jit
def times(halves, others):
    products = ()
    for i in gl.static_range(len(halves)):
        products += (halves[i] * others[i],)
    return products


@gluon.jit
def store_halves(OUT, sums, n_cols, store, BLOCKS: gl.constexpr, BLOCK: gl.constexpr):
    """Store sums of ``pipelined_backward`` as a row of fp32, where they are wanted. Neighbours together: with every
    other column, LayerNorm at 16384 columns ran at 0.76 of the copy instead of 0.88 (H200)."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    cols = gl.arange(0, 2 * BLOCK, layout=layout)
    for i in gl.static_range(BLOCKS):
        both = gl.join(sums[2 * i], sums[2 * i + 1]).reshape([2 * BLOCK])
        both = gl.convert_layout(both, layout)
        at = i * 2 * BLOCK + cols
        gl.store(OUT + at, both, mask=(at < n_cols) & (store != 0))


@gluon.jit
def copy_block(buffers, i: gl.constexpr, stage, X, DY, ADD, n, live, has_added, z):
    """Start to copy the ``i``-th block of a row of each input; zeros if the row is not ``live``."""
    mask = (gl.arange(0, z.BLOCK, layout=z.layout) < n - i * z.BLOCK) & live
    xs, dys, adds = buffers
    copy_tile(xs[i], stage, X + i * z.BLOCK, mask)
    copy_tile(dys[i], stage, DY + i * z.BLOCK, mask)
    if z.ADDED:
        copy_tile(adds[i], stage, ADD + i * z.BLOCK, mask & has_added)
    async_copy.commit_group()


@gluon.jit
def load_statistics(STATS, row, last, CENTERED: gl.constexpr):
    """Mean and 1 / sqrt(var + eps) of a row, or of the last one: no mask, for which the load would be waited for."""
    row = gl.minimum(row, last - 1)
    if CENTERED:
        return gl.load(STATS + row * 2), gl.load(STATS + row * 2 + 1)
    else:
        return 0.0, gl.load(STATS + row)


@gluon.jit
def accumulate_dots(x, dy, low, high, dots, totals, dtype: gl.constexpr, CENTERED: gl.constexpr):
    """Add a block to the sums of x * dy * weight and, where they are wanted, of dy * weight."""
    p = low * even(dy, dtype)
    q = high * odd(dy, dtype)
    dots = dots + p * even(x, dtype)
    dots = dots + q * odd(x, dtype)
    if CENTERED:
        totals = totals + (p + q)
    return dots, totals


@gluon.jit
def reduce_dots(dots, totals, mean, rstd, inverse_n, CENTERED: gl.constexpr):
    """(slope, level): dx is dy * weight * rstd + x * slope + level."""
    if CENTERED:  # rows are of 16 bits: fp32 has room for a mean 2^8 deviations away
        dot, total = gl.reduce((dots, totals), 0, add_two)
        slope = (mean * total - dot) * (rstd * rstd * rstd * inverse_n)
        return slope, -mean * slope - total * (rstd * inverse_n)
    else:
        return -gl.sum(dots, 0) * (rstd * rstd * rstd * inverse_n), 0.0


@gluon.jit
def finish_half(x, dy, w, mean, rstd, slope, level):
    """One half in fp32: dx, and the row's summands of dy * x_hat."""
    a = dy * rstd
    return w * a + (x * slope + level), a * (x - mean)


@gluon.jit
def pipelined_backward(
    dx: Rows, dy: Rows, x: Rows, added: Rows, STATS, ws, first, last, step, n_cols, store_dx, has_added, z
):  # fmt: skip
    """Rows ``first``, ``first`` + ``step``, ... below ``last``, at least one: dx is stored; sums over the rows of
    dy * x_hat, and of dy if DB, are returned. STATS holds mean and 1 / sqrt(var + eps) of a row, or only the latter.
    ``ws`` is the weight, in fp32.

    A block is copied as soon as the block whose buffer it takes has been finished: STAGES - 1 rows but for two blocks
    are in flight at every moment. The copy starts behind the barrier of the next wait, and so costs none of its own."""
    gl.static_assert(z.STAGES >= 2 and z.BLOCKS >= 2)
    BLOCKS: gl.constexpr = z.BLOCKS
    BLOCK: gl.constexpr = z.BLOCK
    STAGES: gl.constexpr = z.STAGES
    layout: gl.constexpr = z.layout
    dtype: gl.constexpr = x.pointer.dtype.element_ty
    block = gl.arange(0, BLOCK, layout=layout)
    n = n_cols // 2
    inverse_n = 1.0 / n_cols
    dx_stride, dy_stride, x_stride = dx.stride >> 1, dy.stride >> 1, x.stride >> 1  # in pairs
    X = as_x2(x.pointer) + block
    DY = as_x2(dy.pointer) + block
    DX = as_x2(dx.pointer) + block
    add_stride = added.stride
    ADD = added.pointer
    if z.ADDED:
        add_stride = add_stride >> 1
        ADD = as_x2(ADD) + block
    xs, dys, adds, dw, db = (), (), (), (), ()
    for _ in gl.static_range(BLOCKS):
        xs += (allocate_blocks(STAGES, BLOCK),)
        dys += (allocate_blocks(STAGES, BLOCK),)
        if z.ADDED:
            adds += (allocate_blocks(STAGES, BLOCK),)
    buffers = xs, dys, adds
    for _ in gl.static_range(2 * BLOCKS):
        dw += (gl.zeros([BLOCK], gl.float32, layout),)
        if z.DB:
            db += (gl.zeros([BLOCK], gl.float32, layout),)
    for i in gl.static_range(STAGES * BLOCKS - 1):  # the last one: in the loop
        row = first + i // BLOCKS * step
        copy_block(
            buffers, i % BLOCKS, i // BLOCKS, X + row * x_stride, DY + row * dy_stride, ADD + row * add_stride, n,
            row < last, has_added, z,
        )  # fmt: skip
    mean, rstd = load_statistics(STATS, first, last, z.CENTERED)
    zeros = gl.zeros([BLOCK], gl.float32, layout)
    dots, totals = zeros, zeros
    async_copy.wait_group((STAGES - 1) * BLOCKS - 1)
    for i in gl.static_range(BLOCKS):
        x2, dy2 = xs[i].index(0).load(layout), dys[i].index(0).load(layout)
        dots, totals = accumulate_dots(x2, dy2, ws[2 * i], ws[2 * i + 1], dots, totals, dtype, z.CENTERED)
    slope, level = reduce_dots(dots, totals, mean, rstd, inverse_n, z.CENTERED)
    stage, last_stage = 0, STAGES - 1
    for row in range(first, last, step):
        next_mean, next_rstd = load_statistics(STATS, row + step, last, z.CENTERED)
        following = next_stage(stage, STAGES)
        dots, totals = zeros, zeros
        new_dw, new_db = (), ()
        later = row + STAGES * step
        for i in gl.static_range(BLOCKS):
            async_copy.wait_group((STAGES - 1) * BLOCKS - 2)
            if i == 0:
                before = later - step
                copy_block(
                    buffers, BLOCKS - 1, last_stage, X + before * x_stride, DY + before * dy_stride,
                    ADD + before * add_stride, n, before < last, has_added, z,
                )  # fmt: skip
            else:
                copy_block(
                    buffers, i - 1, stage, X + later * x_stride, DY + later * dy_stride, ADD + later * add_stride, n,
                    later < last, has_added, z,
                )  # fmt: skip
            low, high = ws[2 * i], ws[2 * i + 1]
            x2, dy2 = xs[i].index(following).load(layout), dys[i].index(following).load(layout)
            dots, totals = accumulate_dots(x2, dy2, low, high, dots, totals, dtype, z.CENTERED)
            x2, dy2 = xs[i].index(stage).load(layout), dys[i].index(stage).load(layout)
            low_dx, low_dw = finish_half(even(x2, dtype), even(dy2, dtype), low, mean, rstd, slope, level)
            high_dx, high_dw = finish_half(odd(x2, dtype), odd(dy2, dtype), high, mean, rstd, slope, level)
            if z.ADDED:
                added2 = adds[i].index(stage).load(layout)
                low_dx += even(added2, dtype)
                high_dx += odd(added2, dtype)
            mask = (block < n - i * BLOCK) & (store_dx != 0)
            gl.store(DX + row * dx_stride + i * BLOCK, pack(low_dx, high_dx, dtype), mask=mask)
            new_dw += (dw[2 * i] + low_dw, dw[2 * i + 1] + high_dw)
            if z.DB:
                new_db += (db[2 * i] + even(dy2, dtype), db[2 * i + 1] + odd(dy2, dtype))
        dw, db = new_dw, new_db
        mean, rstd, last_stage, stage = next_mean, next_rstd, stage, following
        slope, level = reduce_dots(dots, totals, mean, rstd, inverse_n, z.CENTERED)
    async_copy.wait_group(0)
    return dw, db
