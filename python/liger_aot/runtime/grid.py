"""How many programs a launch takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from liger_aot.runtime.dispatch import Loaded, OpOn
from liger_aot.runtime.remembered import remember


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
    return remember(on.plans, (loaded, rows), (groups * split, groups, split))


def with_split_rows(on: OpOn, kernel: str, split: str, key: tuple[Any, ...], n: int, rows: int) -> Loaded:
    """As ``for_rows``; where rows are so few and long that it pays, the variant of the optional kernel ``split``, of
    which up to ``parts`` programs have a row together."""
    whole, splitting = on.kernels[kernel], on.kernels.get(split)
    rows = min(rows, whole.many_rows)
    if rows < whole.many_rows and splitting is not None and splitting.serves(key):  # noqa: SIM102 (as it is read)
        if splits_rows(splitting.numbers(key, n), n, rows):
            return remember(whole.recent, (*key, n, rows), splitting(key, n))
    return whole.for_rows(key, n, rows)


def splits_rows(numbers: Mapping[str, int], n: int, rows: int) -> bool:
    """Whether a variant by these launch numbers takes so many rows of n."""
    return rows <= numbers["up_to_rows"] and numbers["from_n"] <= n <= numbers["parts"] * numbers["block"]
