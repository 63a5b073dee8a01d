"""The walk of a norm's backward over rows that one program holds in shared memory (Gluon, Hopper).

A program copies its rows to shared memory ahead of their use, STAGES of them, and reads each twice from there: for the
sums over the row, and one step later for its dx and the sums of columns. So no other program need share a row,
registers hold the sums of columns and the weight alone, two or three fp32 values a column, and the two reads, of two
rows, are under way together: neither waits for the other. Every thread reads back what it copied itself.

Rows are of 16-bit elements, two to an int32. A row is PIECES blocks of BLOCK pairs, each with a place in shared memory
of its own: copies to the same one would be kept in order by barriers.

``walk_ring`` is of RMSNorm, with a gradient to add or without (ADDED), of LayerNorm (CENTERED: rows have a mean) and of
the modulated RMSNorm; the last two want the sums of dy, too (PLAIN). What is a tensor a piece goes by halves: the even
columns of a piece, the odd ones, the even ones of the next.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from csrc_triton.common.bf16x2 import even, odd, pack
from csrc_triton.common.pipeline import add_two, copy_tile, next_stage
from csrc_triton.norms.norm_vectors import load_vector

# The form of a kernel that runs ``walk_ring``, beside the function's name.
BACKWARD_PIPELINE = {
    "language": "gluon",
    "constants": ["PIECES", "BLOCK", "STAGES"],
    "covers": "2 * PIECES * BLOCK",
    "requires": {"dtype": ["bf16", "fp16"], "aligned": [True]},
    "may_spill": "a tenth of the registers, once a row, for a row that no other program shares",
}


@gluon.constexpr_function
def ring_layout(warps):
    """The layout of a block: four pairs a thread."""
    return gl.BlockedLayout([4], [32], [warps], [0])


@gluon.jit
def blocks_of(count: gl.constexpr, BLOCK: gl.constexpr):
    """Blocks in shared memory."""
    return gl.allocate_shared_memory(gl.int32, [count, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def columns_of(half, BLOCK: gl.constexpr, layout: gl.constexpr):
    """Columns of the ``half``-th half of pieces: even ones of a piece, odd ones, even ones of the next."""
    return 2 * (half // 2 * BLOCK + gl.arange(0, BLOCK, layout=layout)) + half % 2


@gluon.jit
def halves_of(V, start, n_cols, kind, PIECES: gl.constexpr, BLOCK: gl.constexpr, layout: gl.constexpr):
    """The halves of a vector of n_cols from ``start`` on, in fp32; zeros past its end and where there is none."""
    neighbours: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    halves = ()
    for i in gl.static_range(PIECES):
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
def store_halves(OUT, sums, n_cols, store, PIECES: gl.constexpr, BLOCK: gl.constexpr):
    """Sums that ``walk_ring`` returned to a row of fp32, where they are wanted. Neighbours together: every other
    column held LayerNorm at 16384 columns at 0.76 of the copy instead of 0.88 (H200)."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    cols = gl.arange(0, 2 * BLOCK, layout=layout)
    for i in gl.static_range(PIECES):
        both = gl.join(sums[2 * i], sums[2 * i + 1]).reshape([2 * BLOCK])
        both = gl.convert_layout(both, layout)
        at = i * 2 * BLOCK + cols
        gl.store(OUT + at, both, mask=(at < n_cols) & (store != 0))


@gluon.jit
def copy_piece(
    xs, dys, adds, i: gl.constexpr, stage, X, DY, ADD, n, live, has_add, BLOCK: gl.constexpr, ADDED: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Start to copy the ``i``-th piece of a row of each input; zeros if it is not there."""
    mask = (gl.arange(0, BLOCK, layout=layout) < n - i * BLOCK) & live
    copy_tile(xs[i], stage, X + i * BLOCK, mask)
    copy_tile(dys[i], stage, DY + i * BLOCK, mask)
    if ADDED:
        copy_tile(adds[i], stage, ADD + i * BLOCK, mask & has_add)
    async_copy.commit_group()


@gluon.jit
def statistics(STATS, row, last, CENTERED: gl.constexpr):
    """Mean and 1 / sqrt(var + eps) of a row, or of the last one: no mask, for which the load would be waited for."""
    row = gl.minimum(row, last - 1)
    if CENTERED:
        return gl.load(STATS + row * 2), gl.load(STATS + row * 2 + 1)
    else:
        return 0.0, gl.load(STATS + row)


@gluon.jit
def add_dots(x, dy, low, high, dots, totals, dtype: gl.constexpr, CENTERED: gl.constexpr):
    """A block's part of the sums of x * dy * weight and, where they are wanted, of dy * weight."""
    p = low * even(dy, dtype)
    q = high * odd(dy, dtype)
    dots = dots + p * even(x, dtype)
    dots = dots + q * odd(x, dtype)
    if CENTERED:
        totals = totals + (p + q)
    return dots, totals


@gluon.jit
def line_of(dots, totals, mean, rstd, part, CENTERED: gl.constexpr):
    """(slope, level) of what is added to dy * weight * rstd for dx, a line in x."""
    if CENTERED:  # rows are of 16 bits: fp32 has room for a mean 2^8 deviations away
        dot, total = gl.reduce((dots, totals), 0, add_two)
        slope = (mean * total - dot) * (rstd * rstd * rstd * part)
        return slope, -mean * slope - total * (rstd * part)
    else:
        return -gl.sum(dots, 0) * (rstd * rstd * rstd * part), 0.0


@gluon.jit
def finish_half(x, dy, m, mean, rstd, slope, level):
    """One half of the pairs in fp32: dx, and what a row adds to the sum of dy * the normalised x."""
    a = dy * rstd
    return m * a + (x * slope + level), a * (x - mean)


@gluon.jit
def walk_ring(
    DX, DY, X, ADD, STATS, ms, dx_stride, dy_stride, x_stride, add_stride, first, last, step, n_cols, store_dx, has_add,
    CENTERED: gl.constexpr, PLAIN: gl.constexpr, ADDED: gl.constexpr, PIECES: gl.constexpr,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Rows ``first``, ``first`` + ``step``, ... below ``last``, at least one: dx is stored; sums over the rows of dy *
    the normalised x, and of dy if PLAIN, are returned. STATS holds mean and 1 / sqrt(var + eps) of a row, or only the
    latter. ``ms`` is the weight, or what stands for it, in fp32. If ADDED, ADD is added to dx where ``has_add``.

    A piece of a row is asked for as soon as the piece that it takes the place of has been finished: STAGES - 1 rows but
    for two pieces are under way at every moment. That happens behind the barrier of the next wait, and so costs none
    of its own."""
    gl.static_assert(STAGES >= 2 and PIECES >= 2)
    dtype: gl.constexpr = X.dtype.element_ty
    pairs: gl.constexpr = gl.pointer_type(gl.int32)
    block = gl.arange(0, BLOCK, layout=layout)
    n = n_cols // 2
    part = 1.0 / n_cols
    dx_stride, dy_stride, x_stride = dx_stride >> 1, dy_stride >> 1, x_stride >> 1  # of pairs
    X = X.to(pairs, bitcast=True) + block
    DY = DY.to(pairs, bitcast=True) + block
    DX = DX.to(pairs, bitcast=True) + block
    if ADDED:
        add_stride = add_stride >> 1
        ADD = ADD.to(pairs, bitcast=True) + block
    xs, dys, adds, normals, plains = (), (), (), (), ()
    for _ in gl.static_range(PIECES):
        xs += (blocks_of(STAGES, BLOCK),)
        dys += (blocks_of(STAGES, BLOCK),)
        if ADDED:
            adds += (blocks_of(STAGES, BLOCK),)
    for _ in gl.static_range(2 * PIECES):
        normals += (gl.zeros([BLOCK], gl.float32, layout),)
        if PLAIN:
            plains += (gl.zeros([BLOCK], gl.float32, layout),)
    for i in gl.static_range(STAGES * PIECES - 1):  # the last one: in the loop
        row = first + i // PIECES * step
        copy_piece(
            xs, dys, adds, i % PIECES, i // PIECES, X + row * x_stride, DY + row * dy_stride, ADD + row * add_stride,
            n, row < last, has_add, BLOCK, ADDED, layout,
        )  # fmt: skip
    mean, rstd = statistics(STATS, first, last, CENTERED)
    zeros = gl.zeros([BLOCK], gl.float32, layout)
    dots, totals = zeros, zeros
    async_copy.wait_group((STAGES - 1) * PIECES - 1)
    for i in gl.static_range(PIECES):
        x, dy = xs[i].index(0).load(layout), dys[i].index(0).load(layout)
        dots, totals = add_dots(x, dy, ms[2 * i], ms[2 * i + 1], dots, totals, dtype, CENTERED)
    slope, level = line_of(dots, totals, mean, rstd, part, CENTERED)
    slot, last_slot = 0, STAGES - 1
    for row in range(first, last, step):
        next_mean, next_rstd = statistics(STATS, row + step, last, CENTERED)
        next_slot = next_stage(slot, STAGES)
        dots, totals = zeros, zeros
        new_normals, new_plains = (), ()
        later = row + STAGES * step
        for i in gl.static_range(PIECES):
            async_copy.wait_group((STAGES - 1) * PIECES - 2)
            if i == 0:
                before = later - step
                copy_piece(
                    xs, dys, adds, PIECES - 1, last_slot, X + before * x_stride, DY + before * dy_stride,
                    ADD + before * add_stride, n, before < last, has_add, BLOCK, ADDED, layout,
                )  # fmt: skip
            else:
                copy_piece(
                    xs, dys, adds, i - 1, slot, X + later * x_stride, DY + later * dy_stride, ADD + later * add_stride,
                    n, later < last, has_add, BLOCK, ADDED, layout,
                )  # fmt: skip
            low, high = ms[2 * i], ms[2 * i + 1]
            x, dy = xs[i].index(next_slot).load(layout), dys[i].index(next_slot).load(layout)
            dots, totals = add_dots(x, dy, low, high, dots, totals, dtype, CENTERED)
            x, dy = xs[i].index(slot).load(layout), dys[i].index(slot).load(layout)
            low_dx, low_normal = finish_half(even(x, dtype), even(dy, dtype), low, mean, rstd, slope, level)
            high_dx, high_normal = finish_half(odd(x, dtype), odd(dy, dtype), high, mean, rstd, slope, level)
            if ADDED:
                add = adds[i].index(slot).load(layout)
                low_dx += even(add, dtype)
                high_dx += odd(add, dtype)
            mask = (block < n - i * BLOCK) & (store_dx != 0)
            gl.store(DX + row * dx_stride + i * BLOCK, pack(low_dx, high_dx, dtype), mask=mask)
            new_normals += (normals[2 * i] + low_normal, normals[2 * i + 1] + high_normal)
            if PLAIN:
                new_plains += (plains[2 * i] + even(dy, dtype), plains[2 * i + 1] + odd(dy, dtype))
        normals, plains = new_normals, new_plains
        mean, rstd, last_slot, slot = next_mean, next_rstd, slot, next_slot
        slope, level = line_of(dots, totals, mean, rstd, part, CENTERED)
    async_copy.wait_group(0)
    return normals, plains
