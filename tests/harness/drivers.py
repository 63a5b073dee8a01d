"""Drivers that run an op's own host code without a GPU: on Triton's interpreter, and on the AMD emulator.

Both work on CPU tensors: an op whose runtimes are bound to one of them launches there instead of taking its reference.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import torch

from liger_aot.ops import differentiable, guards
from liger_aot.ops.op import Op
from liger_aot.runtime.dispatch import OpOn, Runtimes
from liger_aot.runtime.manifest import OpManifest, Pack, Variant
from liger_aot_build.declaration import Kernel, op_module, read_declaration
from tests.emulator.amd_emulator import Memory, Program
from tests.harness import executed, storages

AnyOp = TypeVar("AnyOp", bound=Op)
MULTIPROCESSORS = 2  # few, so that persistent programs have several steps
# Kernels whose programs have a block of columns each and nothing else apart, by the number that says how many. The
# interpreter takes as long for a column as for a thousand, so it runs blocks that are wider than the profile's.
COLUMNS = {"column_sums": "BLOCK"}
WIDER = 16


def bound_op(op_class: type[AnyOp], pack: Pack, driver: Callable[[str, Pack], Any]) -> AnyOp:
    """``op_class`` with CPU tensors bound to ``driver(op name, pack)`` over the pack's dispatch tables."""
    runtimes = {}
    for name in (op_class.name, *op_class.uses):
        on = OpOn(pack.op(name), driver(name, pack), -1, MULTIPROCESSORS)
        runtimes[name] = Runtimes(name, {-1: on})
    return op_class(runtimes)


@contextmanager
def as_of_many_rows(op: Op) -> Iterator[None]:
    """An op takes the binaries for many rows, however few there are: else a test of those would need hundreds."""
    with ExitStack() as stack:
        for runtimes in op._runtimes.values():
            if not runtimes.bound:  # on a GPU: it would be bound by the first call, and not be seen here
                runtimes.on(torch.cuda.current_device())
            for on in runtimes.bound.values():
                stack.enter_context(patch.object(on, "plans", {}))
                for kernel in on.kernels.values():
                    for name, value in (("_few", {}), ("many_rows", 1), ("recent", {})):
                        stack.enter_context(patch.object(kernel, name, value))
        yield


@contextmanager
def past_modes() -> Iterator[None]:
    """Ops don't go through torch.library for the sake of a dispatch mode, which is the test's own: it is to see what
    they ask of torch on the direct path."""
    with ExitStack() as stack:
        for module in (differentiable, guards):
            stack.enter_context(patch.object(module, "dispatch_modes", lambda: 0))
        yield


@dataclass(frozen=True)
class Launchable:
    run: Callable[..., None]

    def launch(self, device: int, stream: int, x: int, y: int, z: int, /, *arguments: Any) -> None:
        self.run((x, y, z), arguments)

    def prepare(self, device: int, /) -> None:
        pass


class InterpreterDriver:
    """Device functions on Triton's interpreter; the process must have started with TRITON_INTERPRET=1."""

    def __init__(self, op: str, pack: Pack) -> None:
        self._kernels = read_declaration(op).kernels
        self._module = import_module(op_module(op))
        self._manifest: OpManifest = pack.op(op)

    def stream(self, device: int) -> int:
        return 0

    def load(self, variant: Variant) -> Launchable:
        from tests.harness.gluon_interpreter import interpreted  # Triton, which the emulator does without
        from tests.harness.interpreter import interpret

        kernel_name, form_name, *_ = variant.name.split("-")
        kernel = self._kernels[kernel_name]
        form = kernel.forms[form_name]
        function = interpreted(getattr(self._module, form.function))
        tables = self._manifest.kernels[kernel_name]
        key = next(
            k
            for k, e in tables.tables.items()
            if variant.name in {v for *_, v in (*e, *tables.few.get(k, ()))}
        )
        axes = dict(zip(kernel.axes, key.split("/"), strict=False))
        kinds = (kernel.arguments[name] for name in variant.arguments)
        types = [t.replace(t[1:], axes.get(t[1:], t[1:])) if t[0] == "*" else t for t in kinds]
        constants = {name: _constant(form, name, variant.numbers[name.lower()]) for name in form.constants}

        def run(grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
            _check_alignment(kernel, variant, arguments)
            numbers = constants
            if (name := COLUMNS.get(kernel_name)) is not None:
                grid = (-(-grid[0] // WIDER), *grid[1:])
                numbers = {**constants, name: constants[name] * WIDER}
            interpret(function, grid, types, list(variant.arguments), arguments, numbers, variant.cooperative)

        return Launchable(run)


def _check_alignment(kernel: Kernel, variant: Variant, arguments: tuple[Any, ...]) -> None:
    """What the compiler was promised of an aligned variant's arguments; these drivers would not notice otherwise."""
    if "aligned" in variant.name.split("-"):
        for name, value in zip(variant.arguments, arguments, strict=True):
            assert name not in kernel.aligned or not (value or 0) % 16, f"{variant.name}: {name} is {value}"


def _constant(form: Any, name: str, value: int) -> int | bool:
    return bool(value) if isinstance(form.defaults.get(name), bool) else value


class EmulatorDriver:
    """The pack's own machine code, executed in software. The device's memory is the storages of the CPU tensors that
    it is given: an access beside them is a fault."""

    def __init__(self, op: str, pack: Pack) -> None:
        storages.watch()
        self._arch, self._op = pack.arch, op
        self._kernels = read_declaration(op).kernels

    def stream(self, device: int) -> int:
        return 0

    def load(self, variant: Variant) -> Launchable:
        program = _program(variant.read(), self._arch, variant.symbol)
        kernel = self._kernels[variant.name.split("-")[0]]

        def run(grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
            _check_alignment(kernel, variant, arguments)
            memory = Memory()
            letters = zip(variant.signature, arguments, strict=True)
            mapped = _map_storages(
                memory, [address for letter, address in letters if letter == "p" and address]
            )
            values = [
                _translate(value or 0, mapped)
                if letter == "p"
                else float(value)
                if letter == "f"
                else int(value)
                for letter, value in zip(variant.signature, arguments, strict=True)
            ]
            count = program.launch(memory, grid, values, variant.threads, variant.shared)
            self.launched(variant, program, count)

        return Launchable(run)

    def launched(self, variant: Variant, program: Program, instructions: int) -> None:
        """A launch has ended well; its waves executed so many instructions."""
        executed.record(self._arch, self._op, variant.name)


@lru_cache(maxsize=64)  # some megabytes each; the tests of an op use the same binaries again and again
def _program(image: bytes, arch: str, symbol: str) -> Program:
    return Program(image, arch, symbol)


def _map_storages(memory: Memory, addresses: list[int]) -> list[tuple[int, int, int]]:
    """(host address, bytes, device address) of the storages that hold ``addresses``."""
    mapped = []
    for start, size in storages.living(addresses).items():
        buffer = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(start))
        mapped.append((start, size, memory.add(buffer, f"storage at {start:#x}")))
    return mapped


def _translate(address: int, mapped: list[tuple[int, int, int]]) -> int:
    if not address:
        return 0
    for start, size, device in mapped:
        if start <= address < start + size:
            return device + address - start
    raise AssertionError(f"no live tensor holds {address:#x}")
