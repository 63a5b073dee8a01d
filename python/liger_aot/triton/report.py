"""What a recording holds, for people: ``liger-aot record --report``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from liger_aot.triton import recording
from liger_aot.triton.recording import Noted, Part
from liger_aot.triton.values import plain

MANY = 4  # variants of a function by one argument, from which on it is worth a word
SHOWN = 6  # values of an argument


def report(folder: Path) -> str:
    """A table of the functions and their variants, and what made them many."""
    return "\n".join(line for part in recording.read(folder) for line in _part(part))


def _part(part: Part) -> Iterator[str]:
    on = (
        f"on {part.device}"
        if part.timed
        else "with no GPU: no kernel ran, tuners took their first configuration"
    )
    yield f"{part.target.profile}, triton {part.triton}, {on}"
    by_function: dict[str, list[Noted]] = defaultdict(list)
    for noted in part.variants:
        by_function[noted.variant.function].append(noted)
    files = {f.name: f"{f.file}:{f.line}" for f in part.functions.values()}
    width = max(map(len, by_function), default=0)
    for name, found in sorted(by_function.items(), key=lambda item: (-len(item[1]), item[0])):
        yield f"  {name:<{width}} {len({n.variant.name for n in found}):>5}  {files[name]}"
        yield from (f"    {why}" for why in _reasons(found))
    tuned = len({(c.module, c.qualname, c.key) for c in part.choices})
    variants = len({noted.variant.name for noted in part.variants})
    yield f"  {len(by_function)} functions, {variants} variants, {tuned} tuners' choices"
    for function, why in part.refused:
        yield f"  left out: {function}: {why}"


def _reasons(found: Sequence[Noted]) -> Iterator[str]:
    """Constants that have many values, and a hint."""
    names = [name for name, _ in found[0].variant.signature]
    values: dict[str, dict[str, Any]] = defaultdict(dict)
    for noted in found:
        for path, value in noted.variant.constants:
            if len(path) == 1 and path[0] < len(names):
                values[names[path[0]]][plain(value)] = value
    for name, seen in values.items():
        if len(seen) < MANY:
            continue
        some = ", ".join(sorted(seen)[:SHOWN]) + (", ..." if len(seen) > SHOWN else "")
        yield f"{name} is a constant with {len(seen)} values ({some}): {_hint(seen.values())}"


def _hint(values: Any) -> str:
    if any(isinstance(value, dict) and "float" in value for value in values):
        return "a float that changes between calls: make it an argument (drop tl.constexpr), and one variant is enough"
    if any(type(value) is int and value & (value - 1) for value in values):
        return (
            "sizes that are no powers of two: make it an argument, or mark it do_not_specialize, where no block's"
            " shape depends on it"
        )
    return "each value is a binary"
