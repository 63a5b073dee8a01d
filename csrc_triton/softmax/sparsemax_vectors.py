"""Sparsemax of rows of which only the greatest value of each 16-byte vector is kept; see ``sparsemax.forward_vectors``.

A vector whose greatest value is not above tau adds nothing to any sum and is 0 in the end. The few others are read
again, from the cache.
"""

import triton
import triton.language as tl

from csrc_triton.softmax.softmax_statistics import vectors
from csrc_triton.softmax.sparsemax_root import above, both_sums, excess, newton, returns_left, root_of


@triton.jit
def greater(a, b):
    """Of NaN and a number NaN: a vector with one is looked at."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def differences(X, at, n_cols, top, tau, highest):
    """A block's values less the row's greatest; -inf in vectors that have none above tau."""
    mask = tl.broadcast_to((top <= tau)[:, None] == 0, at.shape) & (at < n_cols)
    return tl.load(X + at, mask=mask, other=-float("inf")).to(tl.float32) - highest


@triton.jit
def row_by_vectors(Y, X, n_cols, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    cols = vectors(BLOCK, X.dtype.element_ty, False)
    xs, greatest, tops = (), (), ()
    for i in tl.static_range(BLOCKS):
        at = cols + i * BLOCK
        xs += (tl.load(X + at, mask=at < n_cols, other=-float("inf"), eviction_policy="evict_last"),)
    tl.debug_barrier()  # or the compiler takes the loads down to where they are used
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
