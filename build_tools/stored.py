"""A pack's binaries as it holds them: zlib streams. Variants of one kernel differ little, so that most are compressed
against another's bytes (zlib's preset dictionary), their base; a base has none itself. All of it a fourth of its size.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from build_tools.plan import Plan

WINDOW = 1 << 15  # how far back deflate sees
CANDIDATES = 4  # tried as the base of a group


@dataclass(frozen=True)
class Stored:
    data: bytes
    base: str | None  # the variant against whose binary it is compressed


def stored(plan: Plan, images: Mapping[str, bytes]) -> dict[str, Stored]:
    """The files of one op by variant, the same bytes from the same binaries."""
    groups: dict[tuple[str, str, bool], list[str]] = {}
    for v in plan.variants:
        groups.setdefault((v.kernel, v.form.name, v.aligned), []).append(v.name)
    return {name: file for names in groups.values() for name, file in _group(names, images).items()}


def _group(names: list[str], images: Mapping[str, bytes]) -> dict[str, Stored]:
    by_size = sorted(names, key=lambda name: (len(images[name]), name))
    candidates = by_size[:: -(-len(names) // CANDIDATES)]
    base = min(candidates, key=lambda c: sum(len(compressed(images[n], images[c], level=1)) for n in names))
    files = {base: Stored(compressed(images[base]), None)}
    for name in names:
        alone, against = compressed(images[name]), compressed(images[name], images[base])
        if name != base:
            files[name] = Stored(against, base) if len(against) < len(alone) else Stored(alone, None)
    return files


def compressed(image: bytes, base: bytes = b"", level: int = 9) -> bytes:
    """A zlib stream, with the end of ``base`` as its dictionary."""
    stream = zlib.compressobj(level, memLevel=9)
    if base:
        stream = zlib.compressobj(level, memLevel=9, zdict=base[-WINDOW:])
    return stream.compress(image) + stream.flush()
