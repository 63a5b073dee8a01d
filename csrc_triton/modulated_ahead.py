"""Modulated RMSNorm's forward over rows that one program holds in registers (Gluon, Hopper).

A part of a group a program: what its rows are multiplied by and what is added to them lie in shared memory in fp32, so
that registers hold a row alone, and the next one, whose loads are under way while it is added up and written.

Rows are of 16-bit elements, two to an int32, in PIECES blocks of BLOCK pairs; vectors go by halves, as in
``norm_ring``: the even columns of a piece, the odd ones, the even ones of the next.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from csrc_triton.layernorm_ahead import load_row
from csrc_triton.modulated_rows import run_of
from csrc_triton.norm_ring import ring_layout
from csrc_triton.norm_vectors import as_fp32
from csrc_triton.packed import even, odd, pair_up


@gluon.jit
def load_halves(V, start, block, n, first, kind, WIDE: gl.constexpr):
    """Even and odd columns of the block of pairs from ``first`` on, as fp32; ``kind`` and WIDE as in
    ``norm_vectors``."""
    dtype: gl.constexpr = V.dtype.element_ty
    at = first + block
    pairs = (V + start).to(gl.pointer_type(gl.int32), bitcast=True)
    pair = gl.load(pairs + at, mask=(at < n) & (kind == 1), other=0)
    low, high = even(pair, dtype), odd(pair, dtype)
    if WIDE:
        wide = as_fp32(V) + start
        low += gl.load(wide + 2 * at, mask=(at < n) & (kind == 2), other=0.0)
        high += gl.load(wide + 2 * at + 1, mask=(at < n) & (kind == 2), other=0.0)
    return low, high


@gluon.jit
def blocks_of(count: gl.constexpr, BLOCK: gl.constexpr):
    """Blocks in shared memory. Each is a memory of its own: stores to the same one are kept in order by barriers."""
    blocks = ()
    for _ in gl.static_range(count):
        memory = gl.allocate_shared_memory(gl.float32, [1, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        blocks += (memory.index(0),)
    return blocks


@gluon.jit
def fill(
    ms, shifts, SCALE, SHIFT, W, scale_start, shift_start, block, n, offset, scale_kind, shift_kind, weight_kind,
    PIECES: gl.constexpr, BLOCK: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    for i in gl.static_range(PIECES):
        low, high = load_halves(SCALE, scale_start, block, n, i * BLOCK, scale_kind, WIDE)
        low_w, high_w = load_halves(W, 0, block, n, i * BLOCK, weight_kind, WIDE)
        ms[2 * i].store((1.0 + low) * (low_w + offset))
        ms[2 * i + 1].store((1.0 + high) * (high_w + offset))
        low, high = load_halves(SHIFT, shift_start, block, n, i * BLOCK, shift_kind, WIDE)
        shifts[2 * i].store(low)
        shifts[2 * i + 1].store(high)


@gluon.jit
def squares_of(xs, dtype: gl.constexpr):
    low, high = even(xs[0], dtype), odd(xs[0], dtype)
    total = low * low + high * high
    for i in gl.static_range(len(xs) - 1):
        low, high = even(xs[i + 1], dtype), odd(xs[i + 1], dtype)
        total += low * low + high * high
    return gl.sum(total, 0)


@gluon.jit
def normal_of(x, rstd, round_first, dtype: gl.constexpr):
    """A block of pairs normalised, in fp32, by halves."""
    low, high = even(x, dtype) * rstd, odd(x, dtype) * rstd
    rounded = pair_up(low, high, dtype)
    low = gl.where(round_first != 0, even(rounded, dtype), low)
    return low, gl.where(round_first != 0, odd(rounded, dtype), high)


@gluon.jit
def walk_ahead(
    Y, X, SCALE, SHIFT, W, RSTD, y_stride, x_stride, scale_stride, shift_stride, n_cols, rows_per_group, rows_per_part,
    parts, eps, offset, scale_kind, shift_kind, weight_kind, round_first, store_rstd,
    PIECES: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """``modulated_rmsnorm.forward_ahead``."""
    dtype: gl.constexpr = X.dtype.element_ty
    pairs: gl.constexpr = gl.pointer_type(gl.int32)
    layout: gl.constexpr = ring_layout(gl.num_warps())
    block = gl.arange(0, BLOCK, layout=layout)
    n = n_cols // 2
    part = 1.0 / n_cols
    group, first, last = run_of(rows_per_group, rows_per_part, parts)
    zero = (rows_per_group >> 63).to(gl.int32)  # the compiler can't know it, or it would keep fp32 copies of pairs
    X, Y = X.to(pairs, bitcast=True) + block, Y.to(pairs, bitcast=True) + block
    x_stride, y_stride = x_stride >> 1, y_stride >> 1
    xs = load_row(X + first * x_stride, block, n, True, PIECES, BLOCK)
    scale_start, shift_start = group * scale_stride, group * shift_stride
    ms, shifts = blocks_of(2 * PIECES, BLOCK), blocks_of(2 * PIECES, BLOCK)
    if (scale_kind == 2) | (weight_kind == 2):  # asked once: loads that are masked off would be a tenth of all there is
        fill(
            ms, shifts, SCALE, SHIFT, W, scale_start, shift_start, block, n, offset, scale_kind, shift_kind, weight_kind,
            PIECES, BLOCK, True,
        )  # fmt: skip
    else:
        fill(
            ms, shifts, SCALE, SHIFT, W, scale_start, shift_start, block, n, offset, scale_kind, shift_kind, weight_kind,
            PIECES, BLOCK, False,
        )  # fmt: skip
    for row in range(first, last):
        nexts = load_row(X + (row + 1) * x_stride, block, n, row + 1 < last, PIECES, BLOCK)
        rstd = gl.rsqrt(squares_of(xs, dtype) * part + eps)
        gl.store(RSTD + row, rstd, mask=store_rstd != 0)
        for i in gl.static_range(PIECES):
            low, high = normal_of(xs[i] ^ zero, rstd, round_first, dtype)
            low = low * ms[2 * i].load(layout) + shifts[2 * i].load(layout)
            high = high * ms[2 * i + 1].load(layout) + shifts[2 * i + 1].load(layout)
            gl.store(Y + (row * y_stride + i * BLOCK), pair_up(low, high, dtype), mask=block < n - i * BLOCK)
        xs = nexts
