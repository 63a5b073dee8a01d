"""The threshold of a small top-k: so few columns can be among the greatest that each is compared with each.

No step waits for the one before it, as in a search. The groups of a row are put into ``RANKED`` sets: at least k
columns reach the k-th greatest of the sets' greatest values, and few more.
"""

import triton
import triton.language as tl

from csrc_triton.sampling.generator import column_of, in_order, log2_of, mass_of, ordered
from csrc_triton.sampling.logits import LOWEST, given

RANKED = tl.constexpr(256)  # sets, and columns that are compared
PIVOTS = tl.constexpr(64)  # of the sets, with which all are compared
FEW = tl.constexpr(64)  # of the columns, where there are no more: as a rule
NO_KEY = tl.constexpr(-2147483648)  # below every number's
NO_WORD = tl.constexpr(-9223372036854775808)
LAST_WORD = tl.constexpr(9223372036854775807)


@triton.jit
def wanted_of(K, at, n):
    """How many columns top-k keeps of a row, but for others that equal the last."""
    wanted = given(K, at, n)
    return tl.where(wanted > 0, tl.minimum(wanted, n), n)


@triton.jit
def keys_of_sets(GREATEST, groups):
    """The key of the greatest logit of each set of groups, or of fours of them: those whose number is the set's, modulo
    RANKED. What ``groups`` left of fours lies after what it left of each, and is read where there are more than needed
    of these."""
    fours = groups > 4 * RANKED
    GREATEST += tl.where(fours, groups, 0)
    count = tl.where(fours, tl.cdiv(groups, 4), groups)
    sets = tl.full([RANKED], NO_KEY, tl.int32)
    for first in range(0, count, 4 * RANKED):
        i = first + tl.arange(0, 4)[:, None] * RANKED + tl.arange(0, RANKED)[None, :]
        # without a mask: masks of loads take scalar registers
        greatest = tl.load(GREATEST + tl.minimum(i, count - 1))
        sets = tl.maximum(sets, tl.max(tl.where(i < count, ordered(greatest), NO_KEY), 0))
    return sets


@triton.jit
def bound_of_sets(sets, wanted):
    """A key that at least ``wanted`` of the sets reach, and few more: the greatest such of PIVOTS of them. LOWEST if
    there is none."""
    pivots = tl.max(tl.reshape(sets, [PIVOTS, RANKED // PIVOTS]), 1)
    reached = tl.sum(tl.where(sets[:, None] >= pivots[None, :], 1.0, 0.0), 0)
    return tl.maximum(tl.max(tl.where(reached >= wanted.to(tl.float32), pivots, LOWEST), 0), LOWEST)


@triton.jit
def least_probable(greatest, scale, share):
    """The lowest key with (greatest - value) * scale <= -log2(share), by bisection of the keys."""
    most = -log2_of(tl.maximum(share, 1e-37))
    low, high = tl.full([], LOWEST, tl.int32), ordered(greatest)
    while low < high:
        middle = ((low.to(tl.int64) + high.to(tl.int64)) >> 1).to(tl.int32)
        x = in_order(middle)
        near = (greatest - x) * scale <= most
        low = tl.where(near, low, middle + 1)
        high = tl.where(near, middle, high)
    return high


@triton.jit
def least_of_greatest(sets, greatest, wanted, least_share, scale):
    """The key that the columns reach which are compared."""
    least = bound_of_sets(sets, wanted)
    if least_share > 0.0:
        least = tl.maximum(least, least_probable(greatest, scale, tl.minimum(least_share, 1.0)))
    return least


@triton.jit
def add_two(a, b, c, d):
    return a + c, b + d


@triton.jit
def last_kept(WORDS, own, count, wanted, share, greatest, scale, CHUNK: tl.constexpr):
    """(key, column) of the last column that top-k and top-p keep of ``count`` that are written down. ``own`` is what
    lies there, of so many or more. All are compared with CHUNK at a time."""
    COLUMNS: tl.constexpr = own.shape[0]
    own = tl.where(tl.arange(0, COLUMNS) < count, own, NO_WORD)
    own_key = (own >> 32).to(tl.int32)
    greater = tl.zeros([COLUMNS], tl.float32)
    before = tl.zeros([COLUMNS], tl.int64)
    for first in range(0, count, CHUNK):
        j = first + tl.arange(0, CHUNK)
        other = tl.load(WORDS + j, mask=j < count, other=NO_WORD)
        key = (other >> 32).to(tl.int32)
        mass = mass_of(in_order(key), greatest, scale)
        above = tl.where(key[:, None] > own_key[None, :], 1.0, 0.0)
        masses = tl.where(other[:, None] > own[None, :], mass[:, None], 0).to(tl.int64)
        more, masses = tl.reduce((above, masses), 0, add_two)
        greater += more
        before += masses
    kept = (own != NO_WORD) & (greater < wanted.to(tl.float32))
    total = tl.sum(tl.where(kept, mass_of(in_order(own_key), greatest, scale), 0).to(tl.int64), 0)
    needed = tl.maximum(tl.ceil(share.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
    kept = kept & ((share >= 1.0) | (before < needed))
    last = tl.min(tl.where(kept, own, LAST_WORD), 0)
    return (last >> 32).to(tl.int32), column_of(last).to(tl.int32)
