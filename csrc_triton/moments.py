"""Mean and squared deviations of many blocks in one pass, without cancellation.

Every lane adds up what its elements differ from its first one, so that no reduction stands between the loads. A lane's
sums are at most as many terms as there are blocks: what E[x^2] - E[x]^2 loses there is a few roundings. Lanes, and
programs that share a row, are then merged by their means.

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
