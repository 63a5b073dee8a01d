"""What the ops that write a cache share: a plan for all calls with tensors alike, and its launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentTypeError
from liger_aot.ops.cache._slots import EARLIER, UNIT, Named, check_disjoint
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.in_place import InPlaceOp
from liger_aot.ops.kv_cache import lacking
from liger_aot.ops.op import written
from liger_aot.runtime import device_errors
from liger_aot.runtime.dispatch import OpOn
from liger_aot.runtime.layout import layouts_of
from liger_aot.runtime.remembered import remember


class Plan:
    """All calls with tensors of these shapes, strides and dtypes, but for their addresses.

    Args:
        key: the axes' values of the kernel; the last is the cache's dtype.
        n: a head's elements.
        rows: heads of tokens; nothing is launched without any.
        steps: all that the aligned binaries take for multiples of UNIT.
        arguments: the kernel's, behind the addresses.
        grid: from the rows of a program, how many programs there are, and the kernel's last arguments.
    """

    __slots__ = ("aligned", "arguments", "disjoint", "grid", "key", "n", "rows", "variants")

    def __init__(
        self,
        key: tuple[Any, ...],
        n: int,
        rows: int,
        steps: Sequence[int],
        arguments: tuple[int, ...],
        grid: Callable[[int], tuple[int, tuple[Any, ...]]],
    ) -> None:
        self.key, self.n, self.rows, self.arguments, self.grid = key, n, rows, arguments, grid
        self.aligned = not any(step % UNIT for step in steps)
        self.disjoint: dict[tuple[int, ...], bool] = {}  # distances at which no two tensors share memory
        self.variants: list[Any] = [None, None]  # generic, aligned: launch, programs, last arguments


class CacheOp(InPlaceOp):
    """Base of the ops of this family. A subclass says how a call becomes a plan, and its addresses the kernel's."""

    def plan(self, tensors: Tensors, settings: tuple[Any, ...]) -> Plan:
        """Of a call that was checked."""
        raise NotImplementedError

    def addresses(self, at: Sequence[int]) -> tuple[tuple[int, ...], int]:
        """Of the tensors' addresses, in the order of the arguments: what the kernel gets, in its order; and all those
        together (by or) that the aligned binaries take for multiples of UNIT."""
        raise NotImplementedError

    def memory(self, tensors: Tensors) -> tuple[Named, Named]:
        """What a call writes and what it reads, by name."""
        raise NotImplementedError

    def check_values(self, tensors: Tensors) -> None:
        """Raise for what the tensors hold, where looking costs nothing: on the CPU."""
        raise NotImplementedError

    def preload(self, device: torch.device | int | str | None = None) -> None:
        super().preload(device)
        device_errors.flag(self.name)

    def prepare_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        self.check(tensors, settings)
        check_disjoint(self.name, *self.memory(tensors))
        if self.on_reference(tensors):
            self.check_values(tensors)
        return super().prepare_forward(tensors, settings, keep, out)

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        on = self._own.bound.get(tensors[0].get_device())
        if on is None:
            return self.prepare_forward(tensors, settings, keep, out)
        layouts, *at = layouts_of(tensors)
        plan: Plan | None = on.plans.get((layouts, settings))
        if plan is None:
            self.check(tensors, settings)
            plan = remember(on.plans, (layouts, settings), self.plan(tensors, settings))
        distances = tuple(a - at[0] for a in at)
        if distances not in plan.disjoint:
            check_disjoint(self.name, *self.memory(tensors))
            remember(plan.disjoint, distances, True)
        device_errors.raise_if_any(self.name, EARLIER)
        overwritten = self.overwritten(tensors)
        if plan.rows:
            addresses, together = self.addresses(at)
            aligned = plan.aligned and not together % UNIT
            launch, programs, last = plan.variants[aligned] or self._variant(on, plan, aligned)
            launch(
                on.device, on.stream(on.device), programs, 1, 1, *addresses, device_errors.flag(self.name),
                *plan.arguments, *last,
            )  # fmt: skip
            written(*overwritten)
            device_errors.check_now(self.name, tensors[0].device)
        return overwritten

    def _variant(self, on: OpOn, plan: Plan, aligned: bool) -> tuple[Any, int, tuple[Any, ...]]:
        try:
            loaded = on.kernels[self.name]((*plan.key, aligned), plan.n)
        except ArgumentTypeError:
            raise lacking(self.name, "key_cache", plan.key[-1]) from None
        found = plan.variants[aligned] = loaded.launch, *plan.grid(loaded.rows)
        return found
