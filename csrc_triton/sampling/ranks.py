"""The threshold of a small top-k: so few columns can be among the greatest that each is compared with each.

No step waits for the one before it, as in a search. The groups of a row are put into ``RANKED`` sets: at least k
columns reach the k-th greatest of the sets' greatest values, and few more.
"""

import triton
import triton.language as tl

from csrc_triton.sampling.generator import column_of, in_order, mass_of, ordered
from csrc_triton.sampling.logits import GROUP, LOWEST

RANKED = tl.constexpr(256)  # sets, and columns that are compared
COUNT = RANKED  # the word that has their number, where the threshold was found among them; 0 where it was not
CHUNK = tl.constexpr(16)
NO_WORD = tl.constexpr(-9223372036854775808)
LAST_WORD = tl.constexpr(9223372036854775807)


@triton.jit
def sets_of_groups(GREATEST, groups, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """The key of the greatest logit of each set of groups: those whose number is the set's, modulo RANKED. In the place
    of a group past the last, a set's first is read again: masks of loads would take scalar registers."""
    of = tl.arange(0, RANKED)
    i = tl.arange(0, GROUPS // RANKED)[:, None] * RANKED + of[None, :]
    first = tl.minimum(of, groups - 1)[None, :]
    greatest = tl.load(GREATEST + tl.where(i < groups, i, first))
    for part in tl.static_range(1, WIDTH // GROUP):
        at = part * GROUPS + i
        greatest = tl.maximum(greatest, tl.load(GREATEST + tl.where(at < groups, at, first)))
    return tl.where(of < groups, ordered(tl.max(greatest, 0)), LOWEST)


@triton.jit
def bound_of_sets(WORDS, wanted):
    """The key of the ``wanted``-th greatest of the sets."""
    own = tl.load(WORDS + tl.arange(0, RANKED))
    greater = tl.zeros([RANKED, CHUNK], tl.int32)
    for first in range(0, RANKED, CHUNK):
        other = tl.load(WORDS + (first + tl.arange(0, CHUNK)))
        greater += (other[None, :] > own[:, None]).to(tl.int32)
    return tl.min(tl.where(tl.sum(greater, 1) < wanted, own, LAST_WORD), 0).to(tl.int32)


@triton.jit
def last_kept(WORDS, count, wanted, share, greatest, scale):
    """(key, column) of the last column that top-k and top-p keep of ``count`` that are written down."""
    i = tl.arange(0, RANKED)
    own = tl.load(WORDS + i, mask=i < count, other=NO_WORD)
    own_key = (own >> 32).to(tl.int32)
    greater = tl.zeros([RANKED, CHUNK], tl.int32)
    before = tl.zeros([RANKED, CHUNK], tl.int64)
    for first in range(0, count, CHUNK):
        j = first + tl.arange(0, CHUNK)
        other = tl.load(WORDS + j, mask=j < count, other=NO_WORD)
        key = (other >> 32).to(tl.int32)
        mass = mass_of(in_order(key), greatest, scale)
        greater += (key[None, :] > own_key[:, None]).to(tl.int32)
        before += tl.where(other[None, :] > own[:, None], mass[None, :], 0).to(tl.int64)
    kept = (own != NO_WORD) & (tl.sum(greater, 1) < wanted)
    total = tl.sum(tl.where(kept, mass_of(in_order(own_key), greatest, scale), 0).to(tl.int64), 0)
    needed = tl.maximum(tl.ceil(share.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
    kept = kept & ((share >= 1.0) | (tl.sum(before, 1) < needed))
    last = tl.min(tl.where(kept, own, LAST_WORD), 0)
    return (last >> 32).to(tl.int32), column_of(last).to(tl.int32)
