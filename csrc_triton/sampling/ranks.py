"""The threshold of a small top-k: so few columns can be among the greatest that each is compared with each.

No step waits for the one before it, as in a search. The groups of a row are put into ``RANKED`` sets: at least k
columns reach the k-th greatest of the sets' greatest values, and few more.
"""

import triton
import triton.language as tl

from csrc_triton.sampling.generator import column_of, in_order, mass_of, ordered
from csrc_triton.sampling.logits import LOWEST

RANKED = tl.constexpr(256)  # sets, and columns that are compared
COUNT = RANKED  # the word that has their number, where the threshold was found among them; 0 where it was not
PIVOTS = tl.constexpr(64)  # of the sets, with which all are compared
FEW = tl.constexpr(64)  # of the columns, where there are no more: as a rule
NO_KEY = tl.constexpr(-2147483648)  # below every number's
NO_WORD = tl.constexpr(-9223372036854775808)
LAST_WORD = tl.constexpr(9223372036854775807)


@triton.jit
def keys_of_sets(GREATEST, groups):
    """The key of the greatest logit of each set of groups: those whose number is the set's, modulo RANKED."""
    sets = tl.full([RANKED], NO_KEY, tl.int32)
    for first in range(0, groups, 16 * RANKED):
        i = first + tl.arange(0, 16)[:, None] * RANKED + tl.arange(0, RANKED)[None, :]
        # without a mask: masks of loads take scalar registers
        greatest = tl.load(GREATEST + tl.minimum(i, groups - 1))
        sets = tl.maximum(sets, tl.max(tl.where(i < groups, ordered(greatest), NO_KEY), 0))
    return sets


@triton.jit
def bound_of_sets(sets, wanted):
    """A key that at least ``wanted`` of the sets reach, and few more: the greatest such of PIVOTS of them. LOWEST if
    there is none."""
    pivots = tl.max(tl.reshape(sets, [PIVOTS, RANKED // PIVOTS]), 1)
    reached = tl.sum(tl.where(sets[:, None] >= pivots[None, :], 1.0, 0.0), 0)
    return tl.maximum(tl.max(tl.where(reached >= wanted.to(tl.float32), pivots, LOWEST), 0), LOWEST)


@triton.jit
def last_kept(WORDS, count, wanted, share, greatest, scale, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    """(key, column) of the last column that top-k and top-p keep of ``count`` that are written down, of which there
    are COLUMNS at most. All are compared with CHUNK at a time."""
    i = tl.arange(0, COLUMNS)
    own = tl.load(WORDS + i, mask=i < count, other=NO_WORD)
    own_key = (own >> 32).to(tl.int32)
    greater = tl.zeros([COLUMNS], tl.float32)
    before = tl.zeros([COLUMNS], tl.int64)
    for first in range(0, count, CHUNK):
        j = first + tl.arange(0, CHUNK)
        other = tl.load(WORDS + j, mask=j < count, other=NO_WORD)
        key = (other >> 32).to(tl.int32)
        mass = mass_of(in_order(key), greatest, scale)
        greater += tl.sum(tl.where(key[:, None] > own_key[None, :], 1.0, 0.0), 0)
        before += tl.sum(tl.where(other[:, None] > own[None, :], mass[:, None], 0).to(tl.int64), 0)
    kept = (own != NO_WORD) & (greater < wanted.to(tl.float32))
    total = tl.sum(tl.where(kept, mass_of(in_order(own_key), greatest, scale), 0).to(tl.int64), 0)
    needed = tl.maximum(tl.ceil(share.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
    kept = kept & ((share >= 1.0) | (before < needed))
    last = tl.min(tl.where(kept, own, LAST_WORD), 0)
    return (last >> 32).to(tl.int32), column_of(last).to(tl.int32)
