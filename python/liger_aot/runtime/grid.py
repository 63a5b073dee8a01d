"""How many programs a launch takes."""

from __future__ import annotations

from liger_aot.runtime.dispatch import REMEMBERED, Loaded, OpOn


def programs_of(on: OpOn, loaded: Loaded, rows: int) -> int:
    """Of a kernel that takes so many rows a program or, where a profile says how many programs a multiprocessor gets,
    walks the rows."""
    return persistent(on, loaded, rows)[0] if loaded.persistent else -(-rows // loaded.rows)


def persistent(on: OpOn, loaded: Loaded, rows: int) -> tuple[int, int, int]:
    """(programs, groups of them that share rows, programs a group) of a kernel whose programs walk the rows.

    Every group has at least one row: each writes its partial sums.
    """
    known: tuple[int, int, int] | None = on.plans.get((loaded, rows))
    if known is not None:
        return known
    numbers = loaded.numbers
    split = numbers.get("splits", 1)
    if rows <= numbers.get("rows_for_one_cta", 0):
        groups = 1
    else:
        steps = -(-rows // loaded.rows)
        groups = max(1, min(numbers["programs_per_multiprocessor"] * on.multiprocessors // split, steps))
    if len(on.plans) >= REMEMBERED:
        on.plans.clear()
    on.plans[(loaded, rows)] = found = (groups * split, groups, split)
    return found
