"""Between which values the threshold of top-p lies, in a row of which top-p alone decides what is kept.

All columns of such a row count, and where it is flat most of them are candidates. A sample of its groups tells nearly
where the threshold is: what lies farther from the greatest logit than the threshold has 1 - p of the row's mass. Of
that tail a sample says much, even where a few columns, which it may lack, have most of the mass: that of the whole row
is known, as a float32, from ``groups``.

``collect`` then reads the whole row once: it adds up the masses, exactly, and writes down the columns near the supposed
threshold. Exact sums say whether that lies among them; where it does not, it is searched for as in other rows. The
result is the same.
"""

import triton
import triton.language as tl

from csrc_triton.sampling.logits import GROUP, load_logits

NEAR = tl.constexpr(1600.0)  # columns on each side of the supposed threshold
HELD = tl.constexpr(
    8192
)  # columns that are written down, if there are no more: twice as many, and room for an error
# Words of a row before them: how many they are, the row's mass, the mass above them; between which values they are, as
# two float32; the greatest logit; how many are ranked (``ranks.py``), where the threshold was found among them, else 0.
SUMS = tl.constexpr(8)
BOUNDS, HIGHEST, COUNT = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
NOT_BRACKETED = tl.constexpr(-1)
FARTHEST = tl.constexpr(32.0)  # in units of log2(probability): from here on masses are 0
MOST_PARTS = tl.constexpr(128)  # blocks that are read together


@triton.jit
def decided_by_mass(k, share, least_share, temperature, n):
    """Whether top-p alone decides what is kept of a row."""
    return ((k <= 0) | (k >= n)) & (share < 1.0) & (least_share <= 0.0) & (temperature > 0.0)


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
def distance(near, far, i, SQUARE: tl.constexpr):
    """The i-th of nine distances from ``near`` to ``far``; squares are denser at the near end."""
    f = i * 0.125
    if SQUARE:
        f = f * f
    return near + (far - near) * f


@triton.jit
def add_ten(a, b, c, d, e, f, g, h, i, j, k, m, n, o, p, q, r, s, t, u):
    return a + k, b + m, c + n, d + o, e + p, f + q, g + r, h + s, i + t, j + u


@triton.jit
def beyond(distances, powers, near, far, i: tl.constexpr, SQUARE: tl.constexpr):
    return tl.where(distances > distance(near, far, i * 1.0, SQUARE), powers, 0.0)


@triton.jit
def four_counts(distances, near, far, first: tl.constexpr, SQUARE: tl.constexpr):
    """Of each column 1 << (16 * i) for those of four distances that it does not exceed: four sums in one."""
    counts = tl.zeros(distances.shape, tl.int64)
    for i in tl.static_range(4):
        inside = distances <= distance(near, far, (first + i) * 1.0, SQUARE)
        counts += tl.where(inside, tl.full([], 1 << (16 * i), tl.int64), 0)
    return counts


@triton.jit
def measured(distances, powers, near, far, SQUARE: tl.constexpr):
    """(tails beyond the first eight of nine distances, columns up to the last eight, in two words)"""
    return tl.reduce(
        (
            beyond(distances, powers, near, far, 0, SQUARE), beyond(distances, powers, near, far, 1, SQUARE),
            beyond(distances, powers, near, far, 2, SQUARE), beyond(distances, powers, near, far, 3, SQUARE),
            beyond(distances, powers, near, far, 4, SQUARE), beyond(distances, powers, near, far, 5, SQUARE),
            beyond(distances, powers, near, far, 6, SQUARE), beyond(distances, powers, near, far, 7, SQUARE),
            four_counts(distances, near, far, 1, SQUARE), four_counts(distances, near, far, 5, SQUARE),
        ), None, add_ten,
    )  # fmt: skip


@triton.jit
def interval_of(sums, near, far, tail, least, fewest, enough, SQUARE: tl.constexpr):
    """(near, far, tails from there on, columns up to there, the distance up to which there are no more than ``enough``
    columns) of the interval in which the tail falls below ``tail``. ``least`` is the last tail, ``fewest`` the first
    number of columns."""
    at = tl.full([], -1, tl.int32)
    for i in tl.static_range(8):
        at += (sums[i] >= tail).to(tl.int32)
    at = tl.maximum(at, 0)
    more, less, first, last, few = sums[0], least, fewest, fewest, near
    before = fewest
    for i in tl.static_range(8):
        up_to = ((sums[8 + i // 4] >> (16 * (i % 4))) & 0xFFFF).to(tl.int32).to(tl.float32)
        more = tl.where(at == i, sums[i], more)
        if i < 7:
            less = tl.where(at == i, sums[i + 1], less)
        first = tl.where(at == i, before, first)
        last = tl.where(at == i, up_to, last)
        few = tl.where(up_to <= enough, distance(near, far, (i + 1) * 1.0, SQUARE), few)
        before = up_to
    nearer = distance(near, far, at.to(tl.float32), SQUARE)
    return nearer, distance(near, far, (at + 1).to(tl.float32), SQUARE), more, less, first, last, few


@triton.jit
def bounds_by_sample(X, n, groups, greatest, total, scale, share, SAMPLE: tl.constexpr):
    """(the lowest value that is collected, the first that is above those): about ``NEAR`` columns on each side of the
    supposed threshold, and all from the greatest on where those are no more. SAMPLE columns are looked at."""
    stride = tl.cdiv(groups, SAMPLE // GROUP)
    i = tl.arange(0, SAMPLE)
    cols = (i // GROUP) * (stride * GROUP) + i % GROUP
    x = load_logits(X, cols, cols < n)
    distances = tl.where(x == greatest, 0.0, (greatest - x) * scale)
    powers = tl.exp2(-distances)
    sampled = tl.div_rn(1.0, stride.to(tl.float32))
    tail = total * (1.0 - share) * sampled
    enough = NEAR * sampled
    zero = tl.full([], 0.0, tl.float32)
    sums = measured(distances, powers, zero, zero + FARTHEST, True)
    near, far, more, less, first, last, few = interval_of(
        sums, zero, zero + FARTHEST, tail, zero, zero, enough, True
    )
    sums = measured(distances, powers, near, far, False)
    near, far, more, less, first, last, _few = interval_of(sums, near, far, tail, less, first, enough, False)
    between = tl.maximum(more - less, 1e-30)
    part = tl.minimum(tl.maximum(more - tail, 0.0), between) / between
    supposed = near + (far - near) * part
    reach = (far - near) * tl.minimum(enough / tl.maximum(last - first, 1.0), 8.0)
    low = greatest - tl.maximum(supposed + reach, few) / scale
    high = greatest - (supposed - reach) / scale
    head = first + (last - first) * part <= enough
    return low, tl.where(head | (high > greatest), float("inf"), high)
