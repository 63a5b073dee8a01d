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

The root of any subset is left of the row's. So a few values that hold most of the support give a start from which one
or two passes over the whole row are enough: the greatest of each 16-byte vector or, where a row is too long for
registers, of each class of columns modulo BLOCK.

The form ``vectors`` holds only the greatest value of each vector in registers. A vector whose greatest value is not
above tau adds nothing to any sum and is 0 in the end, so it is not read again; the few others are, from the cache. The
backward loads a vector of dy where y has support, which is a small part of most rows.

Martins and Astudillo, From Softmax to Sparsemax (2016); Michelot, A finite algorithm for finding the projection of a
point onto the canonical simplex (1986).
"""

import triton
import triton.language as tl

from csrc_triton.softmax.online_softmax import vectors
from csrc_triton.softmax.softmax_backward import (
    BACKWARD_ALIGNED,
    BACKWARD_ARGUMENTS,
    LONG,
    ROW,
    TILE,
    gradient,
    summand,
    support,
)
from csrc_triton.softmax.softmax_backward import backward_long as softmax_backward_long
from csrc_triton.softmax.softmax_backward import backward_row as softmax_backward_row
from csrc_triton.softmax.softmax_backward import backward_tile as softmax_backward_tile
from csrc_triton.softmax.softmax_forward import DTYPES, FORWARD_ALIGNED, FORWARD_ARGUMENTS

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
                    "constants": ["BLOCK", "UNALIGNED"],
                    "defaults": {"UNALIGNED": False},
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
            "axes": DTYPES,
            "aligned": BACKWARD_ALIGNED,
            "forms": {
                "tile": TILE,
                "row": ROW,
                "long": LONG,
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
def excess(z, tau):
    """z - tau above tau, else 0. NaN stays NaN."""
    return tl.where(z <= tau, 0.0, z - tau)


@triton.jit
def above(z, tau):
    """1 above tau, else 0, in fp32: exact to 2^24 elements, near enough past that. NaN counts."""
    return tl.where(z <= tau, 0.0, 1.0)


@triton.jit
def both_sums(excesses, counts, AXIS: tl.constexpr):
    """Two sums over AXIS, in one exchange between threads."""
    return tl.split(tl.sum(tl.join(excesses, counts), AXIS))


@triton.jit
def newton(tau, excess_sum, count, n_cols):
    """The next tau. It is at most -1/n, which rounding might pass in a long row of equal values."""
    found = tau + (excess_sum - 1.0) / count
    greatest = -1.0 / n_cols
    return tl.where(found > greatest, greatest, found)


@triton.jit
def returns_left(returns, found, tau, count, last_count):
    """How many more steps may go back: none after a step that dropped no element, unless it was longer than rounding
    explains (the last count may be of a part of the row). No comparison holds for NaN, so it ends the search."""
    moved = found - tau > tau * -(2.0**-20)
    return tl.where(
        count == last_count, tl.where(moved, returns, 0), tl.where(found < tau, returns - 1, returns)
    )


@triton.jit
def root_of(values, n_cols):
    """tau of tensors of values in registers, and how many lie above it."""
    tau = tl.full((), -1.0, tl.float32)
    last_count = tl.full((), 0.0, tl.float32)
    returns = tl.full((), 2, tl.int32)
    while returns > 0:
        excesses = excess(values[0], tau)
        counts = above(values[0], tau)
        for i in tl.static_range(1, len(values)):
            excesses += excess(values[i], tau)
            counts += above(values[i], tau)
        excess_sum, count = both_sums(excesses, counts, 0)
        found = newton(tau, excess_sum, count, n_cols)
        returns = returns_left(returns, found, tau, count, last_count)
        tau = found
        last_count = count
    return tau, last_count


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
def forward_row(Y, X, y_stride, x_stride, n_rows, n_cols, BLOCK: tl.constexpr, UNALIGNED: tl.constexpr):
    """One row a program, held in registers. Newton's method starts with the greatest value of each 16-byte vector: few
    values, and most of the support is among them."""
    dtype: tl.constexpr = X.dtype.element_ty
    AXIS: tl.constexpr = 0 if UNALIGNED else 1
    row = tl.program_id(0).to(tl.int64)
    cols = vectors(BLOCK, dtype, UNALIGNED)
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
    """One row of any length a program. Its last columns, up to BLOCK of them, stay in registers. Those before them are
    whole blocks, without masks, read from the cache once for every step."""
    row = tl.program_id(0).to(tl.int64)
    X += row * x_stride
    Y += row * y_stride
    cols = tl.arange(0, BLOCK)
    blocks = (tl.maximum(n_cols, 1) - 1) // BLOCK
    last_cols = blocks * BLOCK + cols
    mask = last_cols < n_cols
    in_registers = tl.load(X + last_cols, mask=mask, other=-float("inf"), eviction_policy="evict_first")
    in_registers = in_registers.to(tl.float32)
    greatest = in_registers
    for i in range(blocks):
        x = tl.load(X + (i * BLOCK + cols), eviction_policy="evict_last").to(tl.float32)
        greatest = tl.maximum(greatest, x)
    highest = tl.max(greatest, 0)
    tau, last_count = root_of((greatest - highest,), n_cols)
    in_registers -= highest
    returns = tl.full((), 2, tl.int32)
    while returns > 0:
        excess_sums = excess(in_registers, tau)
        counts = above(in_registers, tau)
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
    y = excess(in_registers, tau).to(Y.dtype.element_ty)
    tl.store(Y + last_cols, y, mask=mask, eviction_policy="evict_first")


@triton.jit
def greater(a, b):
    """The maximum, NaN if either is: a vector with a NaN must not be skipped."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def differences(X, at, n_cols, top, tau, highest):
    """A block's values less the greatest of the row; -inf in vectors that have none above tau."""
    mask = tl.broadcast_to((top <= tau)[:, None] == 0, at.shape) & (at < n_cols)
    return tl.load(X + at, mask=mask, other=-float("inf")).to(tl.float32) - highest


@triton.jit
def forward_vectors(
    Y, X, y_stride, x_stride, n_rows, n_cols, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """One row of at most BLOCKS * BLOCK columns a program, of which registers hold the greatest value of each 16-byte
    vector."""
    row = tl.program_id(0).to(tl.int64)
    X += row * x_stride
    Y += row * y_stride
    cols = vectors(BLOCK, X.dtype.element_ty, False)
    xs, greatest, tops = (), (), ()
    for i in tl.static_range(BLOCKS):
        at = cols + i * BLOCK
        xs += (tl.load(X + at, mask=at < n_cols, other=-float("inf"), eviction_policy="evict_last"),)
    tl.debug_barrier()  # or the compiler sinks the loads to where they are used
    for i in tl.static_range(BLOCKS):
        greatest += (tl.reduce(xs[i].to(tl.float32), 1, greater),)
    highest = greatest[0]
    for i in tl.static_range(1, BLOCKS):
        highest = greater(highest, greatest[i])
    highest = tl.reduce(highest, 0, greater)
    for i in tl.static_range(BLOCKS):
        tops += (greatest[i] - highest,)
    tau, last_count = root_of(tops, n_cols)
    returns = tl.full((), 2, tl.int32)
    while returns > 0:
        excesses = tl.zeros([cols.shape[0]], tl.float32)
        counts = tl.zeros([cols.shape[0]], tl.float32)
        for i in tl.static_range(BLOCKS):
            z = differences(X, cols + i * BLOCK, n_cols, tops[i], tau, highest)
            excesses += tl.sum(excess(z, tau), 1)
            counts += tl.sum(above(z, tau), 1)
        excess_sum, count = both_sums(excesses, counts, 0)
        found = newton(tau, excess_sum, count, n_cols)
        returns = returns_left(returns, found, tau, count, last_count)
        tau = found
        last_count = count
    for i in tl.static_range(BLOCKS):
        at = cols + i * BLOCK
        y = excess(differences(X, at, n_cols, tops[i], tau, highest), tau).to(Y.dtype.element_ty)
        tl.store(Y + at, y, mask=at < n_cols, eviction_policy="evict_first")


@triton.jit
def backward_tile(
    DX, DY, Y, dx_stride, dy_stride, y_stride, n_rows, n_cols, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    softmax_backward_tile(DX, DY, Y, dx_stride, dy_stride, y_stride, n_rows, n_cols, ROWS, BLOCK, SPARSE=True)


@triton.jit
def backward_row(DX, DY, Y, dx_stride, dy_stride, y_stride, n_rows, n_cols, BLOCK: tl.constexpr):
    softmax_backward_row(DX, DY, Y, dx_stride, dy_stride, y_stride, n_rows, n_cols, BLOCK, SPARSE=True)


@triton.jit
def backward_long(DX, DY, Y, dx_stride, dy_stride, y_stride, n_rows, n_cols, BLOCK: tl.constexpr):
    softmax_backward_long(DX, DY, Y, dx_stride, dy_stride, y_stride, n_rows, n_cols, BLOCK, SPARSE=True)


@triton.jit
def add_two(a, b, c, d):
    return a + c, b + d


@triton.jit
def load_supported(Y, DY, at, n_cols, EVICT: tl.constexpr):
    """y, and dy in those vectors (rows of a tile) that have support; in fp32, 0 elsewhere."""
    in_row = at < n_cols
    y = tl.load(Y + at, mask=in_row, other=0.0, eviction_policy=EVICT).to(tl.float32)
    needed = tl.broadcast_to((tl.max(y, 1) > 0.0)[:, None], y.shape)
    dy = tl.load(DY + at, mask=needed & in_row, other=0.0, eviction_policy=EVICT)
    return y, dy.to(tl.float32)


@triton.jit
def backward_vectors(
    DX, DY, Y, dx_stride, dy_stride, y_stride, n_rows, n_cols, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """One row of at most BLOCKS * BLOCK columns a program or, where BLOCKS is 0, of any length; read twice, the second
    time backwards and from the cache."""
    row = tl.program_id(0).to(tl.int64)
    DX += row * dx_stride
    DY += row * dy_stride
    Y += row * y_stride
    cols = vectors(BLOCK, Y.dtype.element_ty, False)
    if BLOCKS > 0:
        blocks = BLOCKS
    else:
        blocks = tl.cdiv(n_cols, BLOCK)
    sums = tl.zeros([cols.shape[0]], tl.float32)
    counts = tl.zeros([cols.shape[0]], tl.float32)
    for i in range(blocks):
        y, dy = load_supported(Y, DY, cols + i * BLOCK, n_cols, "evict_last")
        sums += tl.sum(summand(y, dy, "sparsemax"), 1)
        counts += tl.sum(support(y), 1)
    total, count = tl.reduce((sums, counts), 0, add_two)  # in one reduction
    for i in range(blocks):
        at = cols + (blocks - 1 - i) * BLOCK
        y, dy = load_supported(Y, DY, at, n_cols, "evict_first")
        dx = gradient(y, dy, total / count, 1.0, "sparsemax").to(DX.dtype.element_ty)
        tl.store(DX + at, dx, mask=at < n_cols, eviction_policy="evict_first")
