"""LayerNorm's forward over rows that one program holds in registers (Gluon, Hopper).

What bounds rows of 64 KB that are read one a program: weight and bias, as many bytes again as the row and its result,
come from the second-level cache for each, 8 TB/s in all, and registers or the first-level cache have room for two rows
a multiprocessor, of which one is often between its reads and its writes. Here a persistent program has weight and bias
in shared memory, and a row's loads are under way while the row before is added up and written.

Rows are of 16-bit elements, two to an int32, in PIECES blocks of BLOCK pairs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from csrc_triton.norm_ring import blocks_of, ring_layout
from csrc_triton.packed import even, odd, pair_up


@gluon.constexpr_function
def ones(dtype):
    """A pair of them."""
    return {"bf16": 0x3F803F80, "fp16": 0x3C003C00}[dtype.name]


@gluon.jit
def load_row(X, block, n, there, PIECES: gl.constexpr, BLOCK: gl.constexpr):
    row = ()
    for i in gl.static_range(PIECES):
        row += (gl.load(X + i * BLOCK, mask=(block < n - i * BLOCK) & there, other=0),)
    return row


@gluon.jit
def mean_of(xs, part, dtype: gl.constexpr):
    total = even(xs[0], dtype) + odd(xs[0], dtype)
    for i in gl.static_range(len(xs) - 1):
        total += even(xs[i + 1], dtype) + odd(xs[i + 1], dtype)
    return gl.sum(total, 0) * part


@gluon.jit
def variance_of(xs, mean, block, n, part, zero, dtype: gl.constexpr, BLOCK: gl.constexpr):
    total = gl.zeros_like(even(xs[0], dtype))
    for i in gl.static_range(len(xs)):
        x = xs[i] ^ zero
        low, high = even(x, dtype) - mean, odd(x, dtype) - mean
        total += gl.where(block < n - i * BLOCK, low * low + high * high, 0.0)
    return gl.sum(total, 0) * part


@gluon.jit
def walk_ahead(
    Y, X, W, B, STATS, y_stride, x_stride, n_rows, n_cols, eps, w_kind, b_kind, store_stats,
    PIECES: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """``layernorm.forward_ahead``."""
    dtype: gl.constexpr = X.dtype.element_ty
    pairs: gl.constexpr = gl.pointer_type(gl.int32)
    layout: gl.constexpr = ring_layout(gl.num_warps())
    block = gl.arange(0, BLOCK, layout=layout)
    n = n_cols // 2
    part = 1.0 / n_cols
    X, Y = X.to(pairs, bitcast=True) + block, Y.to(pairs, bitcast=True) + block
    W, B = W.to(pairs, bitcast=True) + block, B.to(pairs, bitcast=True) + block
    x_stride, y_stride = x_stride >> 1, y_stride >> 1
    step = gl.num_programs(0).to(gl.int64)
    first = gl.program_id(0).to(gl.int64)
    zero = (n_rows >> 63).to(gl.int32)  # the compiler can't know it, or it would keep fp32 copies of pairs
    xs = load_row(X + first * x_stride, block, n, True, PIECES, BLOCK)
    ws, bs = blocks_of(PIECES, BLOCK), blocks_of(PIECES, BLOCK)
    for i in gl.static_range(PIECES):
        mask = block < n - i * BLOCK
        ws.index(i).store(gl.load(W + i * BLOCK, mask=mask & (w_kind != 0), other=ones(dtype)))
        bs.index(i).store(gl.load(B + i * BLOCK, mask=mask & (b_kind != 0), other=0))
    for row in range(first, n_rows, step):
        nexts = load_row(X + (row + step) * x_stride, block, n, row + step < n_rows, PIECES, BLOCK)
        mean = mean_of(xs, part, dtype)
        rstd = gl.rsqrt(variance_of(xs, mean, block, n, part, zero, dtype, BLOCK) + eps)
        if store_stats != 0:
            gl.store(STATS + row * 2, mean)
            gl.store(STATS + row * 2 + 1, rstd)
        for i in gl.static_range(PIECES):
            x = xs[i] ^ zero
            w, b = ws.index(i).load(layout), bs.index(i).load(layout)
            low = (even(x, dtype) - mean) * rstd * even(w, dtype) + even(b, dtype)
            high = (odd(x, dtype) - mean) * rstd * odd(w, dtype) + odd(b, dtype)
            gl.store(Y + (row * y_stride + i * BLOCK), pair_up(low, high, dtype), mask=block < n - i * BLOCK)
        xs = nexts
