"""Out of memory in the middle of an op: the error passes through, what the caller owns is as it was, the op goes on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import liger_aot
from liger_aot.runtime.manifest import Variant
from tests.conftest import built_pack
from tests.harness.all_ops import HarnessOp, entries
from tests.harness.choices import Entry
from tests.harness.drivers import InterpreterDriver, Launchable, bound_op, past_modes
from tests.harness.op_cases import same

quiet = pytest.mark.filterwarnings("ignore:(overflow|underflow|invalid value|divide by zero) encountered")
MADE = "made by a test"


class Memory(TorchDispatchMode):
    """Has none left for the n-th allocation: of the torch calls, those with fresh results."""

    def __init__(self, fails: int) -> None:
        super().__init__()
        self._left = fails

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fresh = any(r.alias_info is None and "Tensor" in str(r.type) for r in func._schema.returns)
        self._left -= fresh
        if fresh and not self._left:
            raise torch.OutOfMemoryError(MADE)
        return func(*args, **(kwargs or {}))


class Driver(InterpreterDriver):
    """What the interpreter itself allocates is no op's."""

    def load(self, variant: Variant) -> Launchable:
        kernel = super().load(variant)

        def run(grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
            with _disable_current_modes():
                kernel.run(grid, arguments)

        return Launchable(run)


def fresh_op(entry: Entry) -> Any:
    return bound_op(entry.op_class, built_pack(entry.interpreted), Driver)


def some(entry: Entry) -> list[Any]:
    """The typical problem, and for what other kernels do the longest one that is small."""
    small = entry.small()
    if not isinstance(entry, HarnessOp):
        return [small[0], small[-1]]
    longest = max(small, key=lambda p: (torch.Size(p.case.shape).numel() <= 6000) * p.case.shape[-1])
    return [small[0], longest]


def copies(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if t is None else t.clone() for t in tensors]


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    return same(a, b) or (a is not None and b is not None and torch.equal(_bits(a), _bits(b)))


def _bits(t: Tensor) -> Tensor:
    """NaN, as decoding has where no key was written, equals itself."""
    return t.contiguous().view(torch.uint8) if t.dim() else t.reshape(1).view(torch.uint8)


@quiet
@pytest.mark.interpreter
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("which", [0, pytest.param(1, marks=pytest.mark.slow)], ids=["typical", "long"])
@pytest.mark.parametrize("name", entries())
def test_each_allocation_in_turn(name: str, which: int) -> None:
    """Forward and backward of a fresh op, as often as they allocate."""
    entry = entries()[name]
    problem = some(entry)[which]
    prepared = entry.prepare(problem, "cpu")
    before = copies(prepared.inputs)
    expected = prepared.run(fresh_op(entry))
    for k in count(1):  # until there are fewer
        op = fresh_op(entry)
        try:
            with past_modes(), Memory(k):
                prepared.run(op)
            break
        except torch.OutOfMemoryError as error:
            assert str(error) == MADE
        label = f"{problem}, allocation {k}"
        assert all(map(same_bits, prepared.inputs, before)), f"{label}: an argument was written to"
        got = prepared.run(op)
        assert all(map(same_bits, got, expected)), f"{label}: the next call is not right"
    assert k > 1, "nothing was allocated"


@quiet
@pytest.mark.interpreter
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    "name", [n for n, e in entries().items() if getattr(e, "tests", None) and e.tests.in_place]
)
def test_in_place(name: str) -> None:
    """What is overwritten is so by the last step alone: before it, the arguments are whole and may be given again."""
    entry = entries()[name]
    assert isinstance(entry, HarnessOp)
    tests = entry.tests
    tensors, settings, _ = tests.draw(tests.cases[0], 0, "cpu")

    def run(op: Any, given: list[Tensor | None]) -> list[Tensor | None]:
        with torch.no_grad():
            tests.call_in_place(op, tuple(given), settings)
        return given

    expected = run(fresh_op(entry), copies(tensors))
    for k in count(1):
        given, op = copies(tensors), fresh_op(entry)
        try:
            with past_modes(), Memory(k):
                run(op, given)
            break
        except torch.OutOfMemoryError:
            assert all(map(same_bits, given, tensors)), f"allocation {k}"
            assert all(map(same_bits, run(op, given), expected))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", [n for n, e in entries().items() if getattr(e, "tests", None) and e.tests.large]
)
def test_a_full_gpu(name: str) -> None:
    """torch's allocator has all but so much of what the op needs. Blocks of 2 MiB and more make some shares enough."""
    entry = entries()[name]
    assert isinstance(entry, HarnessOp)
    case = entry.tests.large[0]
    prepared = entry.prepare(entry.asked(case), "cuda")
    op: Any = liger_aot.load(name)
    before = copies(prepared.inputs)
    expected = prepared.run(op)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    prepared.run(op)
    needed = torch.cuda.max_memory_allocated() - held
    total, failures = torch.cuda.get_device_properties(0).total_memory, 0
    try:
        for share in (0.05, 0.3, 0.5, 0.7, 0.9):
            torch.cuda.empty_cache()
            reserved = torch.cuda.memory_reserved()
            torch.cuda.set_per_process_memory_fraction((reserved + share * needed) / total)
            try:
                prepared.run(op)
            except torch.OutOfMemoryError:
                failures += 1
            torch.cuda.set_per_process_memory_fraction(1.0)
            assert all(map(same_bits, prepared.inputs, before)), f"{case}: an argument was written to"
            got = prepared.run(op)
            assert all(map(same_bits, got, expected)), (
                f"{case}, with {share} of {needed} bytes: not right after it"
            )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert failures, f"{case}: no share of {needed} bytes was too little"
