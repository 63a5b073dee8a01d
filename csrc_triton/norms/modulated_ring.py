"""The walk of the modulated RMSNorm's forward over rows that pass through shared memory (Gluon, Hopper).

A program copies its rows ahead of their use, STAGES of them, before it loads scale and shift, which it keeps: what
bounds the kernel is how much is under way, and here no compiler moves loads to where they are used. Every thread reads
back what it copied itself. Rows are of 16-bit elements, two to an int32, in halves and pieces as in ``norm_backward``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from csrc_triton.common.bf16x2 import even, odd, pack
from csrc_triton.common.pipeline import copy_tile, next_stage
from csrc_triton.norms.norm_backward import blocks_of, halves_of, plus, times


@gluon.jit
def copy_row(xs, stage, X, n, live, BLOCK: gl.constexpr, layout: gl.constexpr):
    """Start to copy a row; zeros if it is not there."""
    block = gl.arange(0, BLOCK, layout=layout)
    for i in gl.static_range(len(xs)):
        copy_tile(xs[i], stage, X + i * BLOCK, (block < n - i * BLOCK) & live)
    async_copy.commit_group()


@gluon.jit
def scaled(low, high, rstd, round_first, dtype: gl.constexpr):
    """x * rstd, rounded to ``dtype`` if ``round_first``."""
    low, high = low * rstd, high * rstd
    rounded = pack(low, high, dtype)
    return gl.where(round_first, even(rounded, dtype), low), gl.where(round_first, odd(rounded, dtype), high)


@gluon.jit
def walk_forward(
    Y, X, SCALE, SHIFT, W, RSTD, y_stride, x_stride, scale_start, shift_start, first, last, n_cols, eps, offset,
    scale_kind, shift_kind, weight_kind, round_first, store_rstd,
    PIECES: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Rows from ``first`` to before ``last``, of one group."""
    dtype: gl.constexpr = X.dtype.element_ty
    pairs: gl.constexpr = gl.pointer_type(gl.int32)
    block = gl.arange(0, BLOCK, layout=layout)
    n = n_cols // 2
    part = 1.0 / n_cols
    y_stride, x_stride = y_stride >> 1, x_stride >> 1  # of pairs
    X = X.to(pairs, bitcast=True) + block
    Y = Y.to(pairs, bitcast=True) + block
    xs = ()
    for _ in gl.static_range(PIECES):
        xs += (blocks_of(STAGES, BLOCK),)
    for i in gl.static_range(STAGES):
        copy_row(xs, i, X + (first + i) * x_stride, n, first + i < last, BLOCK, layout)
    ms = plus(halves_of(SCALE, scale_start, n_cols, scale_kind, PIECES, BLOCK, layout), 1.0)
    shifts = halves_of(SHIFT, shift_start, n_cols, shift_kind, PIECES, BLOCK, layout)
    if weight_kind != 0:
        ms = times(ms, plus(halves_of(W, 0, n_cols, weight_kind, PIECES, BLOCK, layout), offset))
    slot = 0
    for row in range(first, last):
        async_copy.wait_group(STAGES - 1)
        tiles = ()
        squares = gl.zeros([BLOCK], gl.float32, layout)
        for i in gl.static_range(PIECES):
            x = xs[i].index(slot).load(layout)
            low, high = even(x, dtype), odd(x, dtype)
            squares = squares + low * low
            squares = squares + high * high
            tiles += (x,)
        rstd = gl.rsqrt(gl.sum(squares, 0) * part + eps)
        later = row + STAGES
        copy_row(xs, slot, X + later * x_stride, n, later < last, BLOCK, layout)
        slot = next_stage(slot, STAGES)
        if store_rstd != 0:
            gl.store(RSTD + row, rstd)
        for i in gl.static_range(PIECES):
            low, high = scaled(even(tiles[i], dtype), odd(tiles[i], dtype), rstd, round_first != 0, dtype)
            low = low * ms[2 * i] + shifts[2 * i]
            high = high * ms[2 * i + 1] + shifts[2 * i + 1]
            gl.store(Y + row * y_stride + i * BLOCK, pack(low, high, dtype), mask=block < n - i * BLOCK)
    async_copy.wait_group(0)
