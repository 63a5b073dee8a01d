"""The walk of a norm's backward over rows that one program holds in shared memory (Gluon, Hopper).

A program copies its rows to shared memory ahead of their use, STAGES of them, and reads each twice from there: for the
sums over the row, and one step later for its dx and the sums of columns. So no other program need share a row,
registers hold the sums of columns, two fp32 values a column, and the weight alone, and the two reads, of two rows, are
under way together: neither waits for the other. Every thread reads back what it copied itself.

Rows are of 16-bit elements, two to an int32. A row is PIECES blocks of BLOCK pairs, each with a place in shared memory
of its own: copies to the same one would be kept in order by barriers.

``walk_ring`` is of LayerNorm (CENTERED: rows have a mean) and of the modulated RMSNorm. What is a tensor a piece goes
by halves: the even columns of a piece, the odd ones, the even ones of the next.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from csrc_triton.exchange import each, post_both, posted
from csrc_triton.packed import even, odd, pair_up


@gluon.constexpr_function
def ring_layout(warps):
    """The layout of a block: four pairs a thread."""
    return gl.BlockedLayout([4], [32], [warps], [0])


@gluon.constexpr_function
def lines_layout(warps):
    """The layout of lines of four 32-bit words: one a thread."""
    return gl.BlockedLayout([1, 4], [32, 1], [warps, 1], [1, 0])


@gluon.jit
def blocks_of(count: gl.constexpr, BLOCK: gl.constexpr):
    """Blocks in shared memory."""
    return gl.allocate_shared_memory(gl.int32, [count, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def columns_of(half, BLOCK: gl.constexpr, layout: gl.constexpr):
    """Columns of the ``half``-th half of pieces: even ones of a piece, odd ones, even ones of the next."""
    return 2 * (half // 2 * BLOCK + gl.arange(0, BLOCK, layout=layout)) + half % 2


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
def add_both(a, b, c, d):
    return a + c, b + d


@gluon.jit
def ask(xs, dys, adds, i: gl.constexpr, slot, X, DY, ADD, n, there, has_add, BLOCK: gl.constexpr, ADDED: gl.constexpr, layout: gl.constexpr):
    """Begin to copy the ``i``-th piece of a row of each input; zeros if it is not there."""
    mask = (gl.arange(0, BLOCK, layout=layout) < n - i * BLOCK) & there
    async_copy.async_copy_global_to_shared(xs[i].index(slot), X + i * BLOCK, mask=mask)
    async_copy.async_copy_global_to_shared(dys[i].index(slot), DY + i * BLOCK, mask=mask)
    if ADDED:
        async_copy.async_copy_global_to_shared(adds[i].index(slot), ADD + i * BLOCK, mask=mask & has_add)
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
def folded(dots, totals, CENTERED: gl.constexpr):
    if CENTERED:
        return gl.reduce((dots, totals), 0, add_both)
    else:
        return gl.sum(dots, 0), 0.0


@gluon.jit
def line_of(dot, total, mean, rstd, part, CENTERED: gl.constexpr):
    """(slope, level) of what is added to dy * weight * rstd for dx, a line in x."""
    if CENTERED:  # rows are of 16 bits: fp32 has room for a mean 2^8 deviations away
        slope = (mean * total - dot) * (rstd * rstd * rstd * part)
        return slope, -mean * slope - total * (rstd * part)
    else:
        return -dot * (rstd * rstd * rstd * part), 0.0


@gluon.jit
def finish_half(x, dy, m, mean, rstd, slope, level):
    """One half of the pairs in fp32: dx, and what a row adds to the sum of dy * the normalised x."""
    a = dy * rstd
    return m * a + (x * slope + level), a * (x - mean)


@gluon.jit
def weights_of(ms, i: gl.constexpr, dtype: gl.constexpr, PACKED: gl.constexpr):
    """The halves of the ``i``-th piece of the weight in fp32."""
    if PACKED:  # out of the compiler's sight, which would keep the halves, not the pairs
        pair = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [ms[i]], gl.int32, is_pure=False, pack=1)
        return even(pair, dtype), odd(pair, dtype)
    else:
        return ms[2 * i], ms[2 * i + 1]


@gluon.jit
def dots_of(xs, dys, slot, ms, zeros, dtype: gl.constexpr, CENTERED: gl.constexpr, PACKED: gl.constexpr, layout: gl.constexpr):
    """A program's part of a row's sums."""
    dots, totals = zeros, zeros
    for i in gl.static_range(len(xs)):
        x, dy = xs[i].index(slot).load(layout), dys[i].index(slot).load(layout)
        low, high = weights_of(ms, i, dtype, PACKED)
        dots, totals = add_dots(x, dy, low, high, dots, totals, dtype, CENTERED)
    return folded(dots, totals, CENTERED)


@gluon.jit
def of_other_half(WORDS, row, last):
    """The other half's sums of a row, or of the last row, once they are there."""
    return each(posted(WORDS + gl.minimum(row, last - 1) * 2 + 1 - gl.program_id(0) % 2, 1))


@gluon.jit
def walk_ring(
    DX, DY, X, ADD, STATS, WORDS, ms, dx_stride, dy_stride, x_stride, add_stride, first, last, step, start, n_cols,
    store_dx, has_add, CENTERED: gl.constexpr, PLAIN: gl.constexpr, ADDED: gl.constexpr, PACKED: gl.constexpr,
    SPLIT: gl.constexpr, PIECES: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Rows ``first``, ``first`` + ``step``, ... below ``last``, at least one: dx is stored; sums over the rows of dy *
    the normalised x, and of dy if PLAIN, are returned. STATS holds mean and 1 / sqrt(var + eps) of a row, or only the
    latter. ``ms`` is the weight, or what stands for it, 0 past the end of a row: in fp32, or PACKED, pairs. If ADDED, rows of ADD are
    added to dx where ``has_add``.

    A piece of a row is asked for as soon as the piece that it takes the place of has been finished: STAGES - 1 rows but
    for two pieces are under way at every moment. That happens behind the barrier of the next wait, and so costs none
    of its own.

    If SPLIT, a program walks one half of the rows, from the pair ``start`` on, and hands its part of a row's sums to
    the program of the other half through WORDS[rows, 2], which are zero before, one row earlier than alone: so the
    sums have a row's time for their way, and one row fewer is under way. Waiting needs a cooperative launch."""
    LEAD: gl.constexpr = SPLIT  # rows that sums are ahead
    gl.static_assert(STAGES > LEAD and PIECES >= 2 and SPLIT <= 2)
    dtype: gl.constexpr = X.dtype.element_ty
    pairs: gl.constexpr = gl.pointer_type(gl.int32)
    block = start + gl.arange(0, BLOCK, layout=layout)
    n = n_cols // 2 - start
    part = 1.0 / n_cols
    dx_stride, dy_stride, x_stride = dx_stride >> 1, dy_stride >> 1, x_stride >> 1  # of pairs
    X = X.to(pairs, bitcast=True) + block
    DY = DY.to(pairs, bitcast=True) + block
    DX = DX.to(pairs, bitcast=True) + block
    if ADDED:
        add_stride = add_stride >> 1
        ADD = ADD.to(pairs, bitcast=True) + block
    block = gl.arange(0, BLOCK, layout=layout)
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
        ask(
            xs, dys, adds, i % PIECES, i // PIECES, X + row * x_stride, DY + row * dy_stride, ADD + row * add_stride,
            n, row < last, has_add, BLOCK, ADDED, layout,
        )  # fmt: skip
    mean, rstd = statistics(STATS, first, last, CENTERED)
    zeros = gl.zeros([BLOCK], gl.float32, layout)
    async_copy.wait_group((STAGES - 1) * PIECES - 1)
    dot, total = dots_of(xs, dys, 0, ms, zeros, dtype, CENTERED, PACKED, layout)
    if SPLIT > 1:
        here = WORDS + gl.program_id(0) % 2
        post_both(here + first * 2, dot, total, first < last)
        async_copy.wait_group((STAGES - 2) * PIECES - 1)
        next_dot, next_total = dots_of(xs, dys, 1, ms, zeros, dtype, CENTERED, PACKED, layout)
        post_both(here + (first + step) * 2, next_dot, next_total, first + step < last)
        other_dot, other_total = of_other_half(WORDS, first, last)
        dot, total = dot + other_dot, total + other_total
    slope, level = line_of(dot, total, mean, rstd, part, CENTERED)
    slot, dots_slot, last_slot = 0, LEAD, STAGES - 1
    for row in range(first, last, step):
        next_mean, next_rstd = statistics(STATS, row + step, last, CENTERED)
        dots, totals = zeros, zeros
        new_normals, new_plains = (), ()
        for i in gl.static_range(PIECES):
            async_copy.wait_group((STAGES - LEAD) * PIECES - 2)
            if i == 0:
                later = row + (STAGES - 1) * step
                ask(
                    xs, dys, adds, PIECES - 1, last_slot, X + later * x_stride, DY + later * dy_stride,
                    ADD + later * add_stride, n, later < last, has_add, BLOCK, ADDED, layout,
                )  # fmt: skip
            else:
                later = row + STAGES * step
                ask(
                    xs, dys, adds, i - 1, slot, X + later * x_stride, DY + later * dy_stride,
                    ADD + later * add_stride, n, later < last, has_add, BLOCK, ADDED, layout,
                )  # fmt: skip
            if SPLIT > 1 and i == PIECES // 2:
                other_dot, other_total = of_other_half(WORDS, row + step, last)
            low, high = weights_of(ms, i, dtype, PACKED)
            x, dy = xs[i].index(dots_slot).load(layout), dys[i].index(dots_slot).load(layout)
            dots, totals = add_dots(x, dy, low, high, dots, totals, dtype, CENTERED)
            x, dy = xs[i].index(slot).load(layout), dys[i].index(slot).load(layout)
            low_dx, low_normal = finish_half(even(x, dtype), even(dy, dtype), low, mean, rstd, slope, level)
            high_dx, high_normal = finish_half(odd(x, dtype), odd(dy, dtype), high, mean, rstd, slope, level)
            if ADDED:
                add = adds[i].index(slot).load(layout)
                low_dx += even(add, dtype)
                high_dx += odd(add, dtype)
            mask = (block < n - i * BLOCK) & (store_dx != 0)
            gl.store(DX + row * dx_stride + i * BLOCK, pair_up(low_dx, high_dx, dtype), mask=mask)
            new_normals += (normals[2 * i] + low_normal, normals[2 * i + 1] + high_normal)
            if PLAIN:
                new_plains += (plains[2 * i] + even(dy, dtype), plains[2 * i + 1] + odd(dy, dtype))
        normals, plains = new_normals, new_plains
        mean, rstd, last_slot = next_mean, next_rstd, slot
        slot = gl.where(slot < STAGES - 1, slot + 1, 0)
        dots_slot = gl.where(dots_slot < STAGES - 1, dots_slot + 1, 0)
        dot, total = folded(dots, totals, CENTERED)
        if SPLIT > 1:
            later = row + 2 * step
            post_both(here + later * 2, dot, total, later < last)
            sums = next_dot + other_dot, next_total + other_total
            next_dot, next_total = dot, total
            dot, total = sums
        slope, level = line_of(dot, total, mean, rstd, part, CENTERED)
    async_copy.wait_group(0)
    return normals, plains
