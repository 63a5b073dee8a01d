"""What the tuner tries: for each row that a launch table needs, the candidates for it.

A candidate is a row of a profile as Python's dict: its form, the form's constants, compile options and what the host
reads. Grids are generous: the plan, the audit and the check leave out what does not fit the chip, spills or gives wrong
results, and the report names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from benchmarks.workload import Workload

HALVES = ("bf16", "fp16")
FLOATS = (*HALVES, "fp32")
LANES = 32  # of a warp; the grids' elements a thread are meant for it

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Problem:
    """What one row of a launch table is for.

    Attributes:
        max_n: the row's bound; None: any size.
        sizes: the n at which candidates are timed. A candidate has to be good at each.
        dtypes: the row's. Candidates must compile for all of them and are timed in the first.
        when: the row's other axes.
        most_rows: the row is for calls of at most so many rows. Candidates are timed with as many.
    """

    max_n: int | None
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...] = HALVES
    when: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    most_rows: int | None = None

    @property
    def n(self) -> int:
        """The longest row that candidates are made for."""
        return self.max_n or max(self.sizes)

    @property
    def width(self) -> int:
        """Bytes of the widest element."""
        return 4 if "fp32" in self.dtypes else 2

    def __str__(self) -> str:
        others = "".join(f", {axis} {'/'.join(map(str, values))}" for axis, values in self.when.items())
        few = "" if self.most_rows is None else f", up to {self.most_rows} rows"
        return f"n <= {self.max_n or 'any'}{few}, {'/'.join(self.dtypes)}{others}"


Workloads = Callable[[Problem, int, torch.dtype, int, torch.device], Sequence[Workload]]


@dataclass(frozen=True)
class Space:
    """The search space of one kernel.

    Attributes:
        workloads: (problem, n, dtype, elements, device) -> the calls by which a candidate is checked and timed; None:
            those of the op's benchmark.
        without: prefixes of the names of kernels that are hidden from the host, which would choose them instead.
    """

    problems: tuple[Problem, ...]
    rows: Callable[[Problem], Iterable[Row]]
    workloads: Workloads | None = None
    without: tuple[str, ...] = ()


def grid(**keys: Any) -> Iterator[Row]:
    """Every combination of the keys' values; a tuple holds alternatives."""
    values = (value if isinstance(value, tuple) else (value,) for value in keys.values())
    for chosen in product(*values):
        yield dict(zip(keys, chosen, strict=True))


def power(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def warps(elements: int, fewest: int = 8, most: int = 64, limit: int = 32) -> tuple[int, ...]:
    """Numbers of warps for which each thread has between ``fewest`` and ``most`` of the elements."""
    counts = (1 << i for i in range(limit.bit_length()))
    return tuple(w for w in counts if fewest <= elements // (w * LANES) <= most) or (1,)


def by_length(
    bounds: Mapping[int | None, tuple[int, ...]], dtypes: tuple[str, ...] = HALVES
) -> tuple[Problem, ...]:
    """A problem for each bound, timed at the lengths given."""
    return tuple(Problem(bound, sizes, dtypes) for bound, sizes in bounds.items())


# ---- Forms that several kernels have, by how a program takes a row ----


def whole_rows(
    p: Problem, form: str = "tile", rows: Sequence[int] = (1, 2, 4, 8, 16, 32), **keys: Any
) -> Iterator[Row]:
    """A program has one block: one row, or several short ones."""
    block = power(p.n)
    for count in rows:
        if 512 <= count * block <= 8192 or (count == 1 and block <= 32768):
            yield from grid(form=form, rows=count, block=block, num_warps=warps(count * block), **keys)


def one_row(p: Problem, form: str = "row", **keys: Any) -> Iterator[Row]:
    """A program has one row, in one block."""
    block = power(p.n)
    if block <= 32768:
        yield from grid(form=form, block=block, num_warps=warps(block), **keys)


def row_in_blocks(
    p: Problem, form: str = "long", count: str = "blocks", most: int = 16, **keys: Any
) -> Iterator[Row]:
    """A program has one row, in several blocks, all in registers; ``count`` is the key for how many."""
    for block in (256, 512, 1024, 2048, 4096, 8192, 16384):
        blocks = -(-p.n // block)
        if 2 <= blocks <= most and blocks * block <= 1.5 * p.n:
            yield from grid(form=form, block=block, **{count: blocks}, num_warps=warps(block, 8, 32), **keys)


def for_few_rows(bounds: Iterable[int], most_rows: int) -> tuple[Problem, ...]:
    """A problem for each bound, for calls of at most so many rows."""
    return tuple(Problem(n, (n,), most_rows=most_rows) for n in bounds)


def row_in_registers(p: Problem) -> Iterator[Row]:
    """A program has one row, in one block or several, started before the kernel before it has ended."""
    for block in (256, 512, 1024, 2048, 4096, 8192):
        blocks = -(-p.n // block)
        if blocks <= 16 and blocks * block <= 1.5 * p.n:
            numbers = {"block": block, "blocks": blocks, "num_warps": warps(block * blocks, 8, 64)}
            aligned = {} if p.most_rows is None else {"aligned": True}
            yield from grid(form="in_registers", **aligned, **numbers)


def any_row(
    p: Problem, form: str = "long", blocks: Sequence[int] = (2048, 4096, 8192, 16384), **keys: Any
) -> Iterator[Row]:
    """A program has one row of any length, which each pass reads a block at a time."""
    for block in blocks:
        yield from grid(form=form, block=block, num_warps=warps(block, 8, 32), **keys)
