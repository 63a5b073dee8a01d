"""How many programs split the keys of a sequence (split KV): what decoding and paged attention choose by."""

from __future__ import annotations

import math

MAX_SPLITS = 256
# Of the model in ``best_splits``, on one NVIDIA H200. UNEVEN: what a last wave that is not full takes longer, as
# programs before it end unevenly. MULTIPROCESSOR_LIMIT: what one moves at most, as a multiple of its part of the memory
# bandwidth.
UNEVEN = 0.6
MULTIPROCESSOR_LIMIT = 1.6


def best_splits(
    programs: int, blocks: int, places: int, saturating: int, startup_blocks: int, most: int = MAX_SPLITS
) -> int:
    """The number of splits of a sequence, ``most`` at most, that is done first by this model:

    ``saturating`` programs at once saturate memory, ``places`` fit onto the GPU. A block of keys costs one of the
    saturating programs 1, a wave of programs ``startup_blocks`` to start and end, as much as a second launch, which
    takes 1 / 16 more for each split that it combines. A last wave that is not full takes UNEVEN of the saturating
    programs longer; a program or two too many are a second one for some multiprocessors, which move
    MULTIPROCESSOR_LIMIT. So chosen, decoding on one NVIDIA H200 was within 2% of the fastest number of splits tried
    at 11 sizes.
    """
    best, least = 1, math.inf
    for splits in range(1, min(blocks, most) + 1):
        waves, rest = divmod(programs * splits, places)
        last = max(rest / saturating, 1.0, -(-rest // saturating) / MULTIPROCESSOR_LIMIT) if rest else 0.0
        if waves and rest:
            last = min(last + UNEVEN, places / saturating)
        cost = -(-blocks // splits) * (waves * places / saturating + last) + startup_blocks * (
            waves + (rest > 0)
        )
        if splits > 1:
            cost += startup_blocks + splits / 16
        if cost < least:
            best, least = splits, cost
    return best
