"""A pack's binaries as its files hold them: zlib streams. Variants of one kernel differ little, so that most are
compressed against another's bytes (zlib's preset dictionary), their base; a base has none itself. All of it takes a
fourth of its size. LZMA would save 15% more, and take more than twice as long to unpack.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from liger_aot_build.plan import Plan

WINDOW = 1 << 15  # how far back deflate sees
CANDIDATES = 4  # tried as the base of a group


@dataclass(frozen=True)
class Stored:
    data: bytes
    base: str | None  # the variant against whose binary it is compressed


def stored(plan: Plan, images: Mapping[str, bytes]) -> dict[str, Stored]:
    """The compressed binaries of one op by variant, in the order of its file; the same bytes from the same binaries."""
    groups: dict[tuple[str, str, bool], list[str]] = {}
    for v in plan.variants:
        groups.setdefault((v.kernel, v.form.name, v.aligned), []).append(v.name)
    return {name: binary for names in groups.values() for name, binary in stored_group(names, images).items()}


def stored_group(names: list[str], images: Mapping[str, bytes]) -> dict[str, Stored]:
    """The compressed binaries of ``names``, which are alike, most of them against one of them."""
    by_size = sorted(names, key=lambda name: (len(images[name]), name))
    candidates = by_size[:: -(-len(names) // CANDIDATES)]
    base = min(candidates, key=lambda c: sum(len(compressed(images[n], images[c], level=1)) for n in names))
    binaries = {base: Stored(compressed(images[base]), None)}
    for name in names:
        alone, against = compressed(images[name]), compressed(images[name], images[base])
        if name != base:
            binaries[name] = Stored(against, base) if len(against) < len(alone) else Stored(alone, None)
    return binaries


def compressed(image: bytes, base: bytes = b"", level: int = 9) -> bytes:
    """A zlib stream, with the end of ``base`` as its dictionary."""
    stream = zlib.compressobj(level, memLevel=9)
    if base:
        stream = zlib.compressobj(level, memLevel=9, zdict=base[-WINDOW:])
    return stream.compress(image) + stream.flush()
