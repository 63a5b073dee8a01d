"""The walk of a norm's backward over rows that one program holds in shared memory (Gluon, Hopper).

A program copies its rows to a ring of blocks in shared memory ahead of their use and reads them from it twice: for the
sums over a row, then for its dx and the sums of columns. So registers hold little but the sums of columns, two fp32
values a column, and no other program need share a row: at 16384 columns the ring holds two and a half rows. A row is
PIECES blocks, the ring DEPTH of them; every thread reads back what it copied itself.

Rows are of 16-bit elements, two to an int32; BLOCK counts pairs. What a thread has of a block is 16 bytes, and as fp32
16 bytes of its even columns and 16 of its odd ones: no two threads meet in a bank of shared memory.

``walk_ring`` is of LayerNorm (CENTERED: rows have a mean) and of the modulated RMSNorm. The weight, or what stands for
it, is fp32 in shared memory, 0 past the end of a row: even columns of a piece, then odd ones.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from csrc_triton.packed import even, odd, pair_up


@gluon.constexpr_function
def ring_layout(warps):
    """The layout of a block: four pairs a thread."""
    return gl.BlockedLayout([4], [32], [warps], [0])


@gluon.jit
def blocks_of(dtype: gl.constexpr, count: gl.constexpr, BLOCK: gl.constexpr):
    """Blocks in shared memory."""
    return gl.allocate_shared_memory(dtype, [count, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def load_as_fp32(V, cols, mask, kind):
    """As ``norm_vectors.load_vector``: columns of a vector of the rows' dtype (kind 1) or fp32 (kind 2), zeros where
    there is none."""
    v = gl.load(V + cols, mask=mask & (kind == 1), other=0.0).to(gl.float32)
    wide = V.to(gl.pointer_type(gl.float32), bitcast=True)
    return v + gl.load(wide + cols, mask=mask & (kind == 2), other=0.0)


@gluon.jit
def columns_of(half, BLOCK: gl.constexpr, layout: gl.constexpr):
    """Columns of the ``half``-th half of pieces: even ones of a piece, odd ones, even ones of the next."""
    return 2 * (half // 2 * BLOCK + gl.arange(0, BLOCK, layout=layout)) + half % 2


@gluon.jit
def store_sum(OUT, total, half, n_cols, store, BLOCK: gl.constexpr, layout: gl.constexpr):
    """What ``walk_ring`` returned of such columns to a row of fp32, where it is wanted."""
    cols = columns_of(half, BLOCK, layout)
    gl.store(OUT + cols, total, mask=(cols < n_cols) & (store != 0))


@gluon.jit
def add_both(a, b, c, d):
    return a + c, b + d


@gluon.jit
def ask(xs, dys, slot, X, DY, mask):
    """Begin to copy a block of x and of dy."""
    async_copy.async_copy_global_to_shared(xs.index(slot), X, mask=mask)
    async_copy.async_copy_global_to_shared(dys.index(slot), DY, mask=mask)
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
def place(slot, DEPTH: gl.constexpr):
    return gl.where(slot < DEPTH, slot, slot - DEPTH)


@gluon.jit
def finish_half(x, dy, m, normals, plains, rstd, shift, along, offset):
    """One half of the pairs in fp32: dx, and both sums with the row added."""
    normal = x * rstd + shift
    return m * (dy * rstd) + (normal * along + offset), normals + dy * normal, plains + dy


@gluon.jit
def walk_ring(
    DX, DY, X, STATS, ms, dx_stride, dy_stride, x_stride, first, last, step, n_cols, store_dx,
    CENTERED: gl.constexpr, PIECES: gl.constexpr, BLOCK: gl.constexpr, DEPTH: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Rows ``first``, ``first`` + ``step``, ... below ``last``, at least one: dx is stored; sums over the rows of dy *
    the normalised x, and of dy, are returned, each a tuple of the even columns of every piece and then the odd ones.
    STATS holds mean and 1 / sqrt(var + eps) of a row, or only the latter."""
    gl.static_assert(DEPTH >= PIECES)
    dtype: gl.constexpr = X.dtype.element_ty
    pairs: gl.constexpr = gl.pointer_type(gl.int32)
    block = gl.arange(0, BLOCK, layout=layout)
    n = n_cols // 2
    part = 1.0 / n_cols
    dx_stride, dy_stride, x_stride = dx_stride >> 1, dy_stride >> 1, x_stride >> 1  # of pairs
    X = X.to(pairs, bitcast=True) + block
    DY = DY.to(pairs, bitcast=True) + block
    DX = DX.to(pairs, bitcast=True) + block
    xs = blocks_of(gl.int32, DEPTH, BLOCK)
    dys = blocks_of(gl.int32, DEPTH, BLOCK)
    for i in gl.static_range(DEPTH):
        row = first + (i // PIECES) * step
        start = i % PIECES * BLOCK
        mask = (block < n - start) & (row < last)
        ask(xs, dys, i, X + row * x_stride + start, DY + row * dy_stride + start, mask)
    normals, plains = (), ()
    for _ in gl.static_range(2 * PIECES):
        normals += (gl.zeros([BLOCK], gl.float32, layout),)
        plains += (gl.zeros([BLOCK], gl.float32, layout),)
    slot = 0
    mean, rstd = statistics(STATS, first, last, CENTERED)
    for row in range(first, last, step):
        next_mean, next_rstd = statistics(STATS, row + step, last, CENTERED)
        async_copy.wait_group(DEPTH - PIECES)
        dots = gl.zeros([BLOCK], gl.float32, layout)
        totals = gl.zeros([BLOCK], gl.float32, layout)
        for i in gl.static_range(PIECES):
            at = place(slot + i, DEPTH)
            x, dy = xs.index(at).load(layout), dys.index(at).load(layout)
            p = ms.index(2 * i).load(layout) * even(dy, dtype)
            q = ms.index(2 * i + 1).load(layout) * odd(dy, dtype)
            dots += p * even(x, dtype)
            dots += q * odd(x, dtype)
            if CENTERED:
                totals += p + q
        if CENTERED:  # rows are of 16 bits: fp32 has room for a mean 2^8 deviations away
            dot, total = gl.reduce((dots, totals), 0, add_both)
            along = (dot - mean * total) * (-rstd * rstd * part)
            offset = total * (-rstd * part)
        else:
            along = gl.sum(dots, 0) * (-rstd * rstd * part)
            offset = 0.0
        shift = -mean * rstd
        gl.thread_barrier()  # or what was read would be kept in registers
        new_normals, new_plains = (), ()
        for i in gl.static_range(PIECES):
            at = place(slot + i, DEPTH)
            x, dy = xs.index(at).load(layout), dys.index(at).load(layout)
            low, low_normal, low_plain = finish_half(
                even(x, dtype), even(dy, dtype), ms.index(2 * i).load(layout), normals[2 * i], plains[2 * i],
                rstd, shift, along, offset,
            )  # fmt: skip
            high, high_normal, high_plain = finish_half(
                odd(x, dtype), odd(dy, dtype), ms.index(2 * i + 1).load(layout), normals[2 * i + 1],
                plains[2 * i + 1], rstd, shift, along, offset,
            )  # fmt: skip
            mask = (block < n - i * BLOCK) & (store_dx != 0)
            gl.store(DX + row * dx_stride + i * BLOCK, pair_up(low, high, dtype), mask=mask)
            new_normals += (low_normal, high_normal)
            new_plains += (low_plain, high_plain)
        normals, plains = new_normals, new_plains
        for i in gl.static_range(PIECES):
            later = row + (i + DEPTH) // PIECES * step
            start = (i + DEPTH) % PIECES * BLOCK
            mask = (block < n - start) & (later < last)
            ask(xs, dys, place(slot + i, DEPTH), X + later * x_stride + start, DY + later * dy_stride + start, mask)
        slot = place(slot + PIECES, DEPTH)
        mean, rstd = next_mean, next_rstd
    async_copy.wait_group(0)
    return normals, plains
