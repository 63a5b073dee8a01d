"""Rows of LayerNorm whose loads are all in flight before the first value is used; see ``layernorm.forward_held``."""

import triton
import triton.language as tl

from csrc_triton.norms.layernorm_long import merged
from csrc_triton.norms.row_blocks import load_blocks


@triton.jit
def held_moments(xs, n_cols, BLOCK: tl.constexpr, FOLD: tl.constexpr):
    """``layernorm_long.block_moments`` of a row's blocks."""
    lines: tl.constexpr = BLOCK // FOLD
    line = tl.arange(0, lines)
    x = tl.reshape(xs[0].to(tl.float32), [lines, FOLD])
    pivot = tl.sum(x, 1) / FOLD
    apart = x - pivot[:, None]
    sums = tl.sum(apart, 1)
    squares = tl.sum(apart * apart, 1)
    for i in tl.static_range(1, len(xs)):
        apart = tl.reshape(xs[i].to(tl.float32), [lines, FOLD]) - pivot[:, None]
        in_row = i * lines + line < n_cols // FOLD
        sums += tl.where(in_row, tl.sum(apart, 1), 0.0)
        squares += tl.where(in_row, tl.sum(apart * apart, 1), 0.0)
    return merged(pivot, sums, squares, n_cols, FOLD)


@triton.jit
def held_row(
    Y, X, W, B, STATS, y_stride, x_stride, n_cols, eps, w_kind, b_kind, store_stats,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, TOGETHER: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """A program's row, read twice, the second time from the first-level cache."""
    row = tl.program_id(0).to(tl.int64)
    X += row * x_stride
    Y += row * y_stride
    block = tl.arange(0, BLOCK)
    xs = load_blocks(X, n_cols, block, BLOCKS)
    mean, deviations = held_moments(xs, n_cols, BLOCK, FOLD)
    rstd = tl.rsqrt(deviations / n_cols + eps)
    if store_stats != 0:
        tl.store(STATS + row * 2, mean)
        tl.store(STATS + row * 2 + 1, rstd)
    for i in tl.static_range(0, BLOCKS, TOGETHER):
        scale_together(
            Y + i * BLOCK, X + i * BLOCK, W + i * BLOCK, B + i * BLOCK, mean, rstd, n_cols - i * BLOCK, w_kind, b_kind,
            block, TOGETHER if i + TOGETHER < BLOCKS else BLOCKS - i, BLOCK,
        )  # fmt: skip


@triton.jit
def scale_together(
    Y, X, W, B, mean, rstd, n_cols, w_kind, b_kind, block, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """Blocks whose loads are under way together."""
    xs, ws, bs = (), (), ()
    for i in tl.static_range(COUNT):
        cols = i * BLOCK + block
        xs += (tl.load(X + cols, mask=cols < n_cols, other=0.0, eviction_policy="evict_first"),)
    for i in tl.static_range(COUNT):
        cols = i * BLOCK + block
        mask = cols < n_cols
        ws += (tl.load(W + cols, mask=mask & (w_kind != 0), other=1.0),)
        bs += (tl.load(B + cols, mask=mask & (b_kind != 0), other=0.0),)
    for i in tl.static_range(COUNT):
        cols = i * BLOCK + block
        y = (xs[i].to(tl.float32) - mean) * rstd * ws[i].to(tl.float32) + bs[i].to(tl.float32)
        tl.store(Y + cols, y.to(Y.dtype.element_ty), mask=cols < n_cols, eviction_policy="evict_first")
