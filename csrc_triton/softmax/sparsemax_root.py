"""Newton's method for sparsemax's threshold; see ``sparsemax``."""

import triton
import triton.language as tl


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
    """How many more steps may go back: none after one that dropped no element, unless it was longer than rounding
    explains (the last count may be of a part of the row). No comparison holds for NaN, which ends the search."""
    moved = found - tau > tau * -(2.0**-20)
    return tl.where(
        count == last_count, tl.where(moved, returns, 0), tl.where(found < tau, returns - 1, returns)
    )


@triton.jit
def root_of(values, n_cols):
    """tau of tensors of values that are held in registers, and how many lie above it."""
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
