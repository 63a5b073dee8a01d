"""How mean and squared deviations of blocks are merged without cancellation.

Sums are of what elements differ from a pivot close to them: the mean of the first elements that the same registers
held. They are at most as many terms as there are blocks, so that E[x^2] - E[x]^2 of them loses a few roundings only.
What lanes, and programs that share a row, have is then merged by the means.

Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances (1979).
"""

import triton
import triton.language as tl


@triton.jit
def lane_counts(lane, n, BLOCK: tl.constexpr):
    """How many of n elements, dealt out in blocks of BLOCK, each lane holds; as fp32."""
    return ((n - lane + (BLOCK - 1)) // BLOCK).to(tl.float32)


@triton.jit
def merge(means, deviations, counts, n):
    """(mean, sum of squared deviations) of all lanes together, n elements."""
    mean = tl.sum(means * counts, 0) / n
    apart = means - mean
    return mean, tl.sum(deviations + counts * apart * apart, 0)
