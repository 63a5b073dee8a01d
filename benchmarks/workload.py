"""What an op's benchmark hands to the harness and to the tuner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Call
from benchmarks.records import point

CHECKED_ROWS = 64

# Largest ‖out - reference‖ / ‖reference‖ of a result worth timing. The 16-bit ones leave room for providers
# that round intermediate values to the input's dtype; a wrong kernel is off by far more.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    """One point of a figure: `direction` on a problem of `dtype`. The entry says what its `shape` means ((rows, n)
    where nothing else is said) and which variants it has, "" being the usual one."""

    direction: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    variant: str = ""

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def point(self) -> str:
        """As in Measurement."""
        return point(self.shape, self.variant)


@dataclass(frozen=True)
class Problem:
    """A case with its inputs on the device, the same for every provider.

    `calls(provider, function)` gives one Call for each input set, of a provider's function (None: its usual one); what
    such a call returns for the first set goes to `check`, which gives its largest relative error against fp64.
    """

    calls: Callable[..., Sequence[Call]]
    check: Callable[[tuple[Tensor, ...]], float]


@dataclass(frozen=True)
class Workload:
    """What the tuner runs of a kernel's op.

    Attributes:
        call: of the op given, on the same inputs each time; it returns its results.
        error: their largest relative error against fp64.
        bytes: what one call has to move through device memory.
        point: what the call is of, in a table's words.
        grad: whether autograd is on.
        flops: of one call, where that and not memory is what bounds it.
        timed: whether it is more than a check.
        roundings: how often a result may be rounded to the dtype on its way.
    """

    call: Callable[[Any], Call]
    error: Callable[[tuple[Tensor, ...]], float]
    bytes: int
    point: str
    grad: bool = False
    flops: float = 0.0
    timed: bool = True
    roundings: int = 2


def checked_rows(rows: int, device: torch.device, seed: int) -> Tensor:
    """Which rows a check looks at: the first, the last and random ones between; int64, ascending."""
    if rows <= CHECKED_ROWS:
        return torch.arange(rows, device=device)
    generator = torch.Generator().manual_seed(seed)
    middle = torch.randperm(rows - 2, generator=generator)[: CHECKED_ROWS - 2] + 1
    ends = torch.tensor([0, rows - 1])
    return torch.cat([ends, middle]).sort().values.to(device)


def relative_error(result: Tensor, reference: Tensor) -> float:
    """‖result - reference‖ / ‖reference‖ in fp64; infinite where the result is not finite."""
    difference = (result.detach().double() - reference).norm() / reference.norm()
    return float(difference) if bool(difference.isfinite()) else float("inf")


@contextmanager
def poisoned() -> Iterator[None]:
    """torch.empty returns memory filled with NaN, so that an element that is never written fails the check.

    torch fills memory in its deterministic mode only. The mode is hidden from the ops, which would choose other
    kernels.
    """
    settings: Any = torch.utils.deterministic  # without type hints
    asked, filled = torch.are_deterministic_algorithms_enabled, settings.fill_uninitialized_memory
    before = asked()
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    torch.are_deterministic_algorithms_enabled = lambda: before
    try:
        yield
    finally:
        torch.are_deterministic_algorithms_enabled = asked
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = filled


def largest_error(results: Sequence[Tensor], references: Sequence[Tensor]) -> float:
    """The largest relative error of several results; shapes must agree."""
    if len(results) != len(references):
        raise ValueError(f"{len(results)} results, {len(references)} references")
    for result, reference in zip(results, references, strict=True):
        if result.shape != reference.shape:
            raise ValueError(f"a result is {tuple(result.shape)}, its reference {tuple(reference.shape)}")
    return max(relative_error(a, b) for a, b in zip(results, references, strict=True))


def rotated_sets(moved_bytes: int, l2_bytes: int) -> int:
    """How many input sets to rotate through, so that nothing a call reads is left in the L2 cache from the
    last call on the same set: four caches' worth passes between two uses, and at least one other call."""
    return max(2, -(-4 * l2_bytes // moved_bytes))
