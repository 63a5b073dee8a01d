"""Between which values the threshold of top-p lies, in a row of which top-p alone decides what is kept.

All columns of such a row count, and where it is flat most of them are candidates. One group of columns in ``SAMPLED``
tells nearly where the threshold is: what lies farther from the greatest logit than the threshold has 1 - p of the row's
mass. Of that tail a sample says much, even where a few columns, which it may lack, have most of the mass: that of the
whole row is known, as a float32, from ``groups``.

Two steps measure the sample at nine distances each, the second one within one interval of the first. ``collect`` then
reads the whole row once: it adds up the masses, exactly, and writes down the columns near the supposed threshold. Exact
sums say whether that lies among them; where it does not, it is searched for as in other rows. The result is the same.
"""

import triton
import triton.language as tl

from csrc_triton.sampling.generator import LOG2_E
from csrc_triton.sampling.logits import given

SAMPLED = tl.constexpr(8)
STEPS = tl.constexpr(2)
MEASURES = tl.constexpr(
    32
)  # float32s that a block of the sample leaves: 9 tails, and from the 16th on 9 counts
NEAR = tl.constexpr(1600.0)  # columns on each side of the supposed threshold
SUMS = tl.constexpr(4)  # words before them: how many they are, the row's mass, the mass above them
HELD = tl.constexpr(
    8192
)  # columns that are written down, if there are no more: twice as many, and room for an error
MOST_PARTS = tl.constexpr(128)  # blocks that are read together
FARTHEST = tl.constexpr(32.0)  # in units of log2(probability): from here on masses are 0


@triton.jit
def decided_by_mass(k, share, least_share, temperature, greatest, n):
    """Whether top-p alone decides what is kept of a row."""
    alone = ((k <= 0) | (k >= n)) & (share < 1.0) & (least_share <= 0.0) & (temperature > 0.0)
    return alone & (greatest > -float("inf")) & (greatest < float("inf"))


@triton.jit
def row_of(K, P, MIN_P, TEMPERATURE, PARTS, parts, n, at):
    """Of row ``at``: (whether top-p alone decides, the greatest logit, the scale, the mass of its sample's tail)."""
    share = given(P, at, 1.0)
    temperature = given(TEMPERATURE, at, 1.0)
    scale = tl.div_rn(LOG2_E, temperature)
    greatest, total = greatest_and_total(PARTS + at.to(tl.int64) * (2 * parts), parts, scale)
    alone = decided_by_mass(given(K, at, n), share, given(MIN_P, at, 0.0), temperature, greatest, n)
    return alone, greatest, scale, total * (1.0 - share) / SAMPLED


@triton.jit
def greatest_and_total(PARTS, parts, scale):
    """The greatest logit of a row and the row's mass, relative to that one's, from what ``groups`` left of blocks."""
    i = tl.arange(0, MOST_PARTS)
    greatest = tl.full([], -float("inf"), tl.float32)
    for first in range(0, parts, MOST_PARTS):
        of = tl.load(PARTS + 2 * (first + i), mask=first + i < parts, other=-float("inf"))
        greatest = tl.maximum(greatest, tl.max(of, 0))
    total = tl.full([], 0.0, tl.float32)
    for first in range(0, parts, MOST_PARTS):
        of = tl.load(PARTS + 2 * (first + i), mask=first + i < parts, other=-float("inf"))
        sums = tl.load(PARTS + 2 * (first + i) + 1, mask=first + i < parts, other=0.0)
        total += tl.sum(sums * tl.exp2(tl.where(of == greatest, 0.0, of - greatest) * scale), 0)
    return greatest, total


@triton.jit
def distance(near, far, i, step):
    """The i-th of nine distances from ``near`` to ``far``; those of the first step are denser at the near end."""
    f = i * 0.125
    return near + (far - near) * tl.where(step == 0, f * f, f)


@triton.jit
def interval_of(TAILS, blocks, near, far, tail, step):
    """(near, far, tails from there on, columns up to there, all that was measured) of the interval in which the tail
    falls below ``tail``."""
    i = tl.arange(0, MEASURES)
    measured = tl.zeros([MEASURES], tl.float32)
    for block in range(blocks):
        measured += tl.load(TAILS + block * MEASURES + i)
    at = tl.maximum(tl.sum(((i < 8) & (measured >= tail)).to(tl.int32), 0) - 1, 0)
    more = tl.sum(tl.where(i == at, measured, 0.0), 0)
    less = tl.sum(tl.where(i == at + 1, measured, 0.0), 0)
    first = tl.sum(tl.where(i == at + 16, measured, 0.0), 0)
    last = tl.sum(tl.where(i == at + 17, measured, 0.0), 0)
    nearer = distance(near, far, at.to(tl.float32), step)
    farther = distance(near, far, (at + 1).to(tl.float32), step)
    return nearer, farther, more, less, first, last, measured


@triton.jit
def bounds_of(TAILS, blocks, greatest, scale, tail):
    """(the lowest value that is collected, the first that is above those): about ``NEAR`` columns on each side of the
    supposed threshold, and all from the greatest on where those are no more."""
    zero = tl.full([], 0.0, tl.float32)
    near, far, _more, _less, _first, _last, measured = interval_of(
        TAILS, blocks, zero, zero + FARTHEST, tail, 0
    )
    i = tl.arange(0, MEASURES)
    few = tl.sum(((i >= 16) & (i < 25) & (measured * SAMPLED <= NEAR)).to(tl.int32), 0)
    few_up_to = distance(zero, zero + FARTHEST, tl.maximum(few - 1, 0).to(tl.float32), 0)
    near, far, more, less, first, last, _measured = interval_of(
        TAILS + blocks * MEASURES, blocks, near, far, tail, 1
    )
    between = tl.maximum(more - less, 1e-30)
    part = tl.minimum(tl.maximum(more - tail, 0.0), between) / between
    supposed = near + (far - near) * part
    reach = (far - near) * tl.minimum(NEAR / (tl.maximum(last - first, 1.0) * SAMPLED), 8.0)
    low = greatest - tl.maximum(supposed + reach, few_up_to) / scale
    high = greatest - (supposed - reach) / scale
    head = (first + (last - first) * part) * SAMPLED <= NEAR
    return low, tl.where(head | (high > greatest), float("inf"), high)
