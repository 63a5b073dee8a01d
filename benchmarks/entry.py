"""What the harness asks of an op's benchmark, and which ops have one.

An op's benchmark is the file here that bears the name of the op's device code in csrc_triton/. It is a module
with the functions below; nothing else names it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor

from .workload import Case, Problem, Workload

HERE = Path(__file__).resolve().parent


class Entry(Protocol):
    """The functions of an op's benchmark module. A provider is named as in providers.NAMES."""

    def function(self, provider: str) -> Callable[..., Tensor]:
        """The op as that provider gives it, imported and loaded now: called with `small_inputs`, or tensors
        of that kind in other shapes."""

    def cases(self, quick: bool) -> Sequence[Case]:
        """The points of the device figures; a few of them when `quick`."""

    def moved_bytes(self, case: Case) -> int:
        """What one call has to move through device memory."""

    def problem(self, case: Case, device: torch.device, sets: int, seed: int) -> Problem:
        """A case with `sets` sets of random inputs."""

    def small_inputs(self, device: torch.device) -> tuple[Tensor, ...]:
        """Inputs so small that a call's cost is the host's."""

    def host_calls(self, provider: str, device: torch.device) -> Mapping[str, Callable[[], object]]:
        """Calls on small inputs by direction ("host_..."); a direction with "backward" in its name is timed
        with autograd on, the others under no_grad."""

    def workload(
        self, kernel: str, n: int, dtype: torch.dtype, elements: int, device: torch.device, seed: int
    ) -> Workload:
        """One kernel of the op on about `elements` elements in rows of n, for the tuner."""


def names() -> list[str]:
    """The ops that have a benchmark."""
    device_code = {path.stem for path in (HERE.parent / "csrc_triton").glob("*.py")} - {"__init__"}
    return sorted(device_code & {path.stem for path in HERE.glob("*.py")})


def load(name: str) -> Entry:
    """The benchmark of an op.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in names():
        raise ValueError(f"no benchmark for {name!r}: there is one for {', '.join(names())}")
    return cast(Entry, importlib.import_module(f"benchmarks.{name}"))
