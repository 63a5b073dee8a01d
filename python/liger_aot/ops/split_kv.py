"""How many programs split the keys of a sequence (split KV): what decoding and paged attention choose by."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_SPLITS = 256


@dataclass(frozen=True)
class SplitCosts:
    """What ``best_splits`` reckons with beside the keys, of one kernel on one NVIDIA H200.

    Attributes:
        uneven: what a last wave that is not full takes longer, in saturating programs, as programs before it end
            unevenly.
        multiprocessor_limit: what one moves at most, as a multiple of its part of the memory bandwidth.
        combine: a second launch, in blocks of keys; None: as much as a wave takes to start and end.
        each: what combining takes for each split, in blocks of keys.
    """

    uneven: float = 0.6
    multiprocessor_limit: float = 1.6
    combine: float | None = None
    each: float = 1 / 16


# Decoding: within 2% of the fastest number of splits tried at 11 sizes.
DECODING = SplitCosts()
# Attention to a paged cache by the kernel with tensor maps: on average 2.6% slower than the fastest number of splits
# tried at 113 sizes (5 to 32 queries of 1 to 64 sequences on 1024 to 32768 keys), 23% at worst; by DECODING 4.2% and
# 46% (2026-11-24).
PAGED = SplitCosts(multiprocessor_limit=1.1, combine=1.0, each=1 / 8)


def best_splits(
    programs: int,
    blocks: int,
    places: int,
    saturating: int,
    startup_blocks: int,
    most: int = MAX_SPLITS,
    costs: SplitCosts = DECODING,
) -> int:
    """The number of splits of a sequence, ``most`` at most, that is done first by this model:

    ``saturating`` programs at once saturate memory, ``places`` fit onto the GPU. A block of keys costs one of the
    saturating programs 1, a wave of programs ``startup_blocks`` to start and end. A last wave that is not full takes
    longer, and a program or two too many are a second one for some multiprocessors; two and more splits are combined.
    """
    combine = startup_blocks if costs.combine is None else costs.combine
    best, least = 1, math.inf
    for splits in range(1, min(blocks, most) + 1):
        waves, rest = divmod(programs * splits, places)
        last = (
            max(rest / saturating, 1.0, -(-rest // saturating) / costs.multiprocessor_limit) if rest else 0.0
        )
        if waves and rest:
            last = min(last + costs.uneven, places / saturating)
        cost = -(-blocks // splits) * (waves * places / saturating + last) + startup_blocks * (
            waves + (rest > 0)
        )
        if splits > 1:
            cost += combine + splits * costs.each
        if cost < least:
            best, least = splits, cost
    return best
