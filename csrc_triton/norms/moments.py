"""Mean and squared deviations of a row or group that is read in blocks, merged without cancellation.

Sums are of each element's difference from a pivot close to it: the mean of the first elements in the same registers.
They have at most as many terms as there are blocks, so that E[x^2] - E[x]^2 of them loses a few roundings only. The
sums of lanes, and of programs that share a row, are then merged by their means.

Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances (1979).
"""

import triton
import triton.language as tl


@triton.jit
def lane_counts(lane, n, BLOCK: tl.constexpr):
    """How many of n elements, taken in blocks of BLOCK, each lane has; as fp32."""
    return ((n - lane + (BLOCK - 1)) // BLOCK).to(tl.float32)


@triton.jit
def merge(means, deviations, counts, n):
    """(mean, sum of squared deviations) of all lanes together, n elements."""
    mean = tl.sum(means * counts, 0) / n
    centered = means - mean
    return mean, tl.sum(deviations + counts * centered * centered, 0)


@triton.jit
def load_lines(X, first, n_cols, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """A block of a row in fp32, as lines of VECTOR neighbours: what one thread loads at once."""
    cols = first + tl.arange(0, BLOCK)
    x = tl.load(X + cols, mask=cols < n_cols, other=0.0, eviction_policy="evict_last").to(tl.float32)
    return tl.reshape(x, [BLOCK // VECTOR, VECTOR])


@triton.jit
def block_moments(X, n_cols, blocks, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """(mean, sum of squared deviations from it) of a row, in one read; VECTOR divides n_cols.

    Each line of VECTOR columns sums the differences of its elements, in all blocks, from the mean of its first VECTOR.
    Three registers a line: few enough for four programs of 16 warps a multiprocessor."""
    lines: tl.constexpr = BLOCK // VECTOR
    line = tl.arange(0, lines)
    x = load_lines(X, 0, n_cols, BLOCK, VECTOR)
    pivot = tl.sum(x, 1) / VECTOR
    centered = x - pivot[:, None]
    sums = tl.sum(centered, 1)
    squares = tl.sum(centered * centered, 1)
    for i in range(1, blocks):
        centered = load_lines(X, i * BLOCK, n_cols, BLOCK, VECTOR) - pivot[:, None]
        in_row = i * lines + line < n_cols // VECTOR
        sums += tl.where(in_row, tl.sum(centered, 1), 0.0)
        squares += tl.where(in_row, tl.sum(centered * centered, 1), 0.0)
    return merge_lines(pivot, sums, squares, n_cols, VECTOR)


@triton.jit
def tile_moments(xs, n_cols, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """``block_moments`` of a row's blocks that are in registers."""
    lines: tl.constexpr = BLOCK // VECTOR
    line = tl.arange(0, lines)
    x = tl.reshape(xs[0].to(tl.float32), [lines, VECTOR])
    pivot = tl.sum(x, 1) / VECTOR
    centered = x - pivot[:, None]
    sums = tl.sum(centered, 1)
    squares = tl.sum(centered * centered, 1)
    for i in tl.static_range(1, len(xs)):
        centered = tl.reshape(xs[i].to(tl.float32), [lines, VECTOR]) - pivot[:, None]
        in_row = i * lines + line < n_cols // VECTOR
        sums += tl.where(in_row, tl.sum(centered, 1), 0.0)
        squares += tl.where(in_row, tl.sum(centered * centered, 1), 0.0)
    return merge_lines(pivot, sums, squares, n_cols, VECTOR)


@triton.jit
def merge_lines(pivot, sums, squares, n_cols, VECTOR: tl.constexpr):
    """(mean, sum of squared deviations from it) of all lines; without a division, around the row's mean."""
    lines: tl.constexpr = pivot.shape[0]
    counts = lane_counts(tl.arange(0, lines), n_cols // VECTOR, lines) * VECTOR
    mean = tl.sum(pivot * counts + sums, 0) / n_cols
    centered = pivot - mean
    return mean, tl.sum(squares + centered * (2.0 * sums + centered * counts), 0)
