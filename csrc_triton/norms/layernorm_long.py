"""Rows of any length in LayerNorm: read block by block, twice; see ``layernorm.forward_long`` and ``backward_long``."""

import triton
import triton.language as tl

from csrc_triton.norms.moments import lane_counts
from csrc_triton.norms.norm_vectors import as_fp32, load_vector


@triton.jit
def load_folded(X, first, n_cols, BLOCK: tl.constexpr, FOLD: tl.constexpr):
    """A block of a row in fp32, FOLD neighbours to a line: as many as one thread loads at once."""
    cols = first + tl.arange(0, BLOCK)
    x = tl.load(X + cols, mask=cols < n_cols, other=0.0, eviction_policy="evict_last").to(tl.float32)
    return tl.reshape(x, [BLOCK // FOLD, FOLD])


@triton.jit
def block_moments(X, n_cols, blocks, BLOCK: tl.constexpr, FOLD: tl.constexpr):
    """(mean, sum of squared deviations from it) of a row, in one read; FOLD divides n_cols.

    Every line of FOLD columns adds up what its elements, in all blocks, differ from the mean of the first FOLD. That
    nothing cancels is shown in ``moments``; here the lines are merged without a division, around the row's mean. Three
    registers a line: few enough for four programs of 16 warps a multiprocessor."""
    lines: tl.constexpr = BLOCK // FOLD
    line = tl.arange(0, lines)
    x = load_folded(X, 0, n_cols, BLOCK, FOLD)
    pivot = tl.sum(x, 1) / FOLD
    apart = x - pivot[:, None]
    sums = tl.sum(apart, 1)
    squares = tl.sum(apart * apart, 1)
    for i in range(1, blocks):
        apart = load_folded(X, i * BLOCK, n_cols, BLOCK, FOLD) - pivot[:, None]
        in_row = i * lines + line < n_cols // FOLD
        sums += tl.where(in_row, tl.sum(apart, 1), 0.0)
        squares += tl.where(in_row, tl.sum(apart * apart, 1), 0.0)
    return merged(pivot, sums, squares, n_cols, FOLD)


@triton.jit
def merged(pivot, sums, squares, n_cols, FOLD: tl.constexpr):
    """(mean, sum of squared deviations from it) of what lines have."""
    lines: tl.constexpr = pivot.shape[0]
    counts = lane_counts(tl.arange(0, lines), n_cols // FOLD, lines) * FOLD
    mean = tl.sum(pivot * counts + sums, 0) / n_cols
    apart = pivot - mean
    return mean, tl.sum(squares + apart * (2.0 * sums + apart * counts), 0)


@triton.jit
def scale_blocks(Y, X, W, B, mean, rstd, n_cols, w_kind, b_kind, blocks, BLOCK: tl.constexpr):
    """The second read of a row, last block first: what was read last is the likeliest to be in the cache still."""
    lane = tl.arange(0, BLOCK)
    for i in range(blocks):
        cols = (blocks - 1 - i) * BLOCK + lane
        mask = cols < n_cols
        x = tl.load(X + cols, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        y = scaled((x - mean) * rstd, W, B, cols, mask, w_kind, b_kind)
        tl.store(Y + cols, y.to(Y.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit
def scaled(normal, W, B, cols, mask, w_kind, b_kind):
    w = tl.load(W + cols, mask=mask & (w_kind != 0), other=1.0).to(tl.float32)
    b = tl.load(B + cols, mask=mask & (b_kind != 0), other=0.0).to(tl.float32)
    return normal * w + b


@triton.jit
def long_of(
    Y, X, W, B, STATS, y_stride, x_stride, n_cols, eps, w_kind, b_kind, store_stats,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """The forward of a program's row; BLOCKS is 0 where it is not known."""
    row = tl.program_id(0).to(tl.int64)
    X += row * x_stride
    Y += row * y_stride
    if BLOCKS > 0:
        blocks = BLOCKS
    else:
        blocks = tl.cdiv(n_cols, BLOCK)
    mean, deviations = block_moments(X, n_cols, blocks, BLOCK, FOLD)
    rstd = tl.rsqrt(deviations / n_cols + eps)
    if store_stats != 0:
        tl.store(STATS + row * 2, mean)
        tl.store(STATS + row * 2 + 1, rstd)
    if BLOCKS == 0:
        if (w_kind == 2) | (b_kind == 2):
            scale_blocks(Y, X, as_fp32(W), as_fp32(B), mean, rstd, n_cols, w_kind, b_kind, blocks, BLOCK)
        else:
            scale_blocks(Y, X, W, B, mean, rstd, n_cols, w_kind, b_kind, blocks, BLOCK)
    else:
        scale_blocks(Y, X, W, B, mean, rstd, n_cols, w_kind, b_kind, blocks, BLOCK)


@triton.jit
def add_to(pointer, value, mask, again):
    """Add to a sum in memory that this program alone owns; the first time, write it."""
    before = tl.load(pointer, mask=mask & again, other=0.0)
    tl.store(pointer, before + value, mask=mask)


@triton.jit
def load_step(
    X, DY, W, rows, cols, in_rows, in_row, x_stride, dy_stride, w_kind, EVICT: tl.constexpr
):  # fmt: skip
    """x, dy and dy * weight of one block of some rows in fp32; 0 where there is none."""
    mask = in_rows[:, None] & in_row[None, :]
    x = tl.load(X + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0, eviction_policy=EVICT)
    dy = tl.load(DY + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0, eviction_policy=EVICT)
    dy = dy.to(tl.float32)
    w = load_vector(W, cols, in_row, w_kind) + (w_kind == 0)
    return x.to(tl.float32), dy, dy * w[None, :]


@triton.jit
def walk_blocks(
    DX, DY, X, W, STATS, PARTIALS, dx_stride, dy_stride, x_stride, n_rows, n_cols, db_column, w_kind,
    store_dx, store_dw, store_db, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program's rows of the backward, ROWS a step; PARTIALS is the program's own row of them."""
    program = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    for step in range(program, tl.cdiv(n_rows, ROWS), tl.num_programs(0)):
        rows = step * ROWS + tl.arange(0, ROWS)
        in_rows = rows < n_rows
        mean = tl.load(STATS + rows * 2, mask=in_rows, other=0.0)[:, None]
        rstd = tl.load(STATS + rows * 2 + 1, mask=in_rows, other=0.0)
        dots = tl.zeros([ROWS, BLOCK], tl.float32)
        sums = tl.zeros([ROWS, BLOCK], tl.float32)
        for first in range(0, n_cols, BLOCK):
            cols = first + block
            x, dy, scaled_dy = load_step(
                X, DY, W, rows, cols, in_rows, cols < n_cols, x_stride, dy_stride, w_kind, "evict_last"
            )  # fmt: skip
            dots += scaled_dy * (x - mean)
            sums += scaled_dy
        along = (tl.sum(dots, 1) * rstd / n_cols)[:, None]
        offset = (tl.sum(sums, 1) / n_cols)[:, None]
        rstd = rstd[:, None]
        for first in range(0, n_cols, BLOCK):
            cols = first + block
            in_row = cols < n_cols
            x, dy, scaled_dy = load_step(
                X, DY, W, rows, cols, in_rows, in_row, x_stride, dy_stride, w_kind, "evict_first"
            )  # fmt: skip
            normal = (x - mean) * rstd
            dx = (scaled_dy - normal * along - offset) * rstd
            mask = in_rows[:, None] & in_row[None, :] & (store_dx != 0)
            tl.store(DX + rows[:, None] * dx_stride + cols[None, :], dx.to(DX.dtype.element_ty), mask=mask)
            again = step != program
            add_to(PARTIALS + cols, tl.sum(dy * normal, 0), in_row & (store_dw != 0), again)
            add_to(PARTIALS + db_column + cols, tl.sum(dy, 0), in_row & (store_db != 0), again)
        tl.debug_barrier()  # the next step reads the partials, perhaps in other threads
