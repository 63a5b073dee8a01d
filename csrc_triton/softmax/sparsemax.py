"""Sparsemax over rows: y = max(x - tau, 0), the row's nearest point of the probability simplex, and its backward.

With z = x - max(x), tau is the root of f(t) = sum(max(z - t, 0)) - 1, which is convex, decreasing and linear between
the values of z. It lies in [-1, -1/n]. Newton's method from a point left of it,

    t' = t + f(t) / g(t),    g(t) = the number of z > t,

never passes it, drops elements at every step, and is exact as soon as it drops none (Michelot's algorithm, begun with
the elements within 1 of the greatest). So it ends, and soon: convexity at t' says f(t) >= f(t') + g(t') * (t' - t);
divided by f(t) that is f(t') / f(t) + g(t') / g(t) <= 1, so each step divides f * g by 4 at least. f(-1) and g are at
most n and g is at least 1: after log2(n) + 13 steps f is below 2^-26, its own rounding error. Normal rows take 2 to 14.
Rounding may let a long step pass the root. The next one comes back left of it, where steps are short; a second such
return is rounding of the last bit and ends the search. No sort, and the same bits every time.

Any subset's root is left of the row's. So a few values that hold most of the support give a start that one or two looks
at the whole row complete: the greatest of each 16-byte vector or, where a row is too long for registers, of each class
of columns modulo BLOCK.

Where the greatest of a vector is not above tau, its other values are nothing: they are not read again (``vectors``).
Nor does the backward read dy where y has no support.

Martins and Astudillo, From Softmax to Sparsemax (2016); Michelot, A finite algorithm for finding the projection of a
point onto the canonical simplex (1986).
"""

import triton
import triton.language as tl

from csrc_triton.softmax.softmax_gradient import (
    BACKWARD,
    BACKWARD_ARGUMENTS,
    BACKWARD_FORMS,
    gradient_blocks,
    gradient_long,
    gradient_row,
    gradient_tile,
)
from csrc_triton.softmax.softmax_statistics import DTYPES, FORWARD_ALIGNED, FORWARD_ARGUMENTS, vectors
from csrc_triton.softmax.sparsemax_gradient import gradient_vectors
from csrc_triton.softmax.sparsemax_root import above, both_sums, excess, newton, returns_left, root_of
from csrc_triton.softmax.sparsemax_vectors import row_by_vectors

DECLARATION = {
    "op": "sparsemax",
    "kernels": {
        "sparsemax_forward": {
            "arguments": FORWARD_ARGUMENTS,
            "axes": DTYPES,
            "aligned": FORWARD_ALIGNED,
            "forms": {
                "tile": {"function": "forward_tile", "constants": ["ROWS", "BLOCK"], "covers": "BLOCK"},
                "row": {
                    "function": "forward_row",
                    "constants": ["BLOCK", "ACROSS"],
                    "defaults": {"ACROSS": False},
                    "covers": "BLOCK",
                },
                "long": {"function": "forward_long", "constants": ["BLOCK"]},
                "vectors": {
                    "function": "forward_vectors",
                    "constants": ["BLOCK", "BLOCKS"],
                    "covers": "BLOCKS * BLOCK",
                    "requires": {"aligned": [True]},
                },
            },
        },
        "sparsemax_backward": {
            "arguments": BACKWARD_ARGUMENTS,
            **BACKWARD,
            "forms": {
                **BACKWARD_FORMS,
                "vectors": {
                    "function": "backward_vectors",
                    "constants": ["BLOCK", "BLOCKS"],
                    "defaults": {"BLOCKS": 0},
                    "covers": "BLOCKS * BLOCK",
                    "any_length": "BLOCKS",
                    "requires": {"aligned": [True]},
                },
            },
        },
    },
}


@triton.jit
def forward_tile(Y, X, y_stride, x_stride, n_rows, n_cols, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """ROWS whole rows a program, held in registers, as many steps as the slowest of them takes; n_cols <= BLOCK."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    x = tl.load(X + rows[:, None] * x_stride + cols[None, :], mask=mask, other=-float("inf")).to(tl.float32)
    z = x - tl.max(x, 1)[:, None]
    tau = tl.full([ROWS], -1.0, tl.float32)
    last_count = tl.zeros([ROWS], tl.float32)
    returns = tl.full([ROWS], 2, tl.int32)
    while tl.max(returns, 0) > 0:
        excess_sum, count = both_sums(excess(z, tau[:, None]), above(z, tau[:, None]), 1)
        found = newton(tau, excess_sum, count, n_cols)
        found = tl.where(returns > 0, found, tau)
        returns = returns_left(returns, found, tau, count, last_count)
        tau = found
        last_count = count
    y = excess(z, tau[:, None]).to(Y.dtype.element_ty)
    tl.store(Y + rows[:, None] * y_stride + cols[None, :], y, mask=mask)


@triton.jit
def forward_row(Y, X, y_stride, x_stride, n_rows, n_cols, BLOCK: tl.constexpr, ACROSS: tl.constexpr):
    """One row a program, held in registers. Newton's method begins with the greatest value of each 16-byte vector:
    few values to look at, and most of the support is among them."""
    dtype: tl.constexpr = X.dtype.element_ty
    AXIS: tl.constexpr = 0 if ACROSS else 1
    row = tl.program_id(0).to(tl.int64)
    cols = vectors(BLOCK, dtype, ACROSS)
    mask = cols < n_cols
    x = tl.load(X + row * x_stride + cols, mask=mask, other=-float("inf")).to(tl.float32)
    greatest = tl.max(x, AXIS)
    highest = tl.max(greatest, 0)
    tau, last_count = root_of((greatest - highest,), n_cols)
    z = x - highest
    returns = tl.full((), 2, tl.int32)
    while returns > 0:
        excess_sum, count = both_sums(tl.sum(excess(z, tau), AXIS), tl.sum(above(z, tau), AXIS), 0)
        found = newton(tau, excess_sum, count, n_cols)
        returns = returns_left(returns, found, tau, count, last_count)
        tau = found
        last_count = count
    tl.store(Y + row * y_stride + cols, excess(z, tau).to(dtype), mask=mask)


@triton.jit
def forward_long(Y, X, y_stride, x_stride, n_rows, n_cols, BLOCK: tl.constexpr):
    """One row of any length a program. Its last columns, up to BLOCK of them, stay in registers; what is before them is
    whole blocks, without masks, read from the cache once for every step."""
    row = tl.program_id(0).to(tl.int64)
    X += row * x_stride
    Y += row * y_stride
    cols = tl.arange(0, BLOCK)
    blocks = (tl.maximum(n_cols, 1) - 1) // BLOCK
    kept_cols = blocks * BLOCK + cols
    mask = kept_cols < n_cols
    kept = tl.load(X + kept_cols, mask=mask, other=-float("inf"), eviction_policy="evict_first").to(
        tl.float32
    )
    greatest = kept
    for i in range(blocks):
        x = tl.load(X + (i * BLOCK + cols), eviction_policy="evict_last").to(tl.float32)
        greatest = tl.maximum(greatest, x)
    highest = tl.max(greatest, 0)
    tau, last_count = root_of((greatest - highest,), n_cols)
    kept -= highest
    returns = tl.full((), 2, tl.int32)
    while returns > 0:
        excess_sums = excess(kept, tau)
        counts = above(kept, tau)
        for i in range(blocks):
            x = tl.load(X + (i * BLOCK + cols), eviction_policy="evict_last").to(tl.float32) - highest
            excess_sums += excess(x, tau)
            counts += above(x, tau)
        excess_sum, count = both_sums(excess_sums, counts, 0)
        found = newton(tau, excess_sum, count, n_cols)
        returns = returns_left(returns, found, tau, count, last_count)
        tau = found
        last_count = count
    for i in range(blocks):
        at = (blocks - 1 - i) * BLOCK + cols
        x = tl.load(X + at, eviction_policy="evict_first").to(tl.float32) - highest
        tl.store(Y + at, excess(x, tau).to(Y.dtype.element_ty), eviction_policy="evict_first")
    tl.store(
        Y + kept_cols, excess(kept, tau).to(Y.dtype.element_ty), mask=mask, eviction_policy="evict_first"
    )


@triton.jit
def forward_vectors(
    Y, X, y_stride, x_stride, n_rows, n_cols, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """One row a program, of which registers hold the greatest value of each 16-byte vector."""
    row = tl.program_id(0).to(tl.int64)
    row_by_vectors(Y + row * y_stride, X + row * x_stride, n_cols, BLOCK, BLOCKS)


@triton.jit
def backward_tile(
    DX, DY, Y, dx_stride, dy_stride, y_stride, n_rows, n_cols, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    gradient_tile(DX, DY, Y, dx_stride, dy_stride, y_stride, n_rows, n_cols, 1.0, ROWS, BLOCK, "sparsemax")


@triton.jit
def backward_row(
    DX, DY, Y, dx_stride, dy_stride, y_stride, n_rows, n_cols, BLOCK: tl.constexpr, REPACK: tl.constexpr
):  # fmt: skip
    gradient_row(DX, DY, Y, dx_stride, dy_stride, y_stride, n_cols, 1.0, BLOCK, REPACK, "sparsemax")


@triton.jit
def backward_blocks(
    DX, DY, Y, dx_stride, dy_stride, y_stride, n_rows, n_cols, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    gradient_blocks(DX, DY, Y, dx_stride, dy_stride, y_stride, n_cols, 1.0, BLOCK, BLOCKS, "sparsemax")


@triton.jit
def backward_long(
    DX, DY, Y, dx_stride, dy_stride, y_stride, n_rows, n_cols, BLOCK: tl.constexpr, REPACK: tl.constexpr
):  # fmt: skip
    gradient_long(DX, DY, Y, dx_stride, dy_stride, y_stride, n_cols, 1.0, BLOCK, REPACK, "sparsemax")


@triton.jit
def backward_vectors(
    DX, DY, Y, dx_stride, dy_stride, y_stride, n_rows, n_cols, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    gradient_vectors(DX, DY, Y, dx_stride, dy_stride, y_stride, n_cols, BLOCK, BLOCKS)
