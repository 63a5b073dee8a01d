"""Gluon kernels by warp groups, as Python on the CPU: TMA, barriers and wgmma as attention's backward uses them.

Shared memory, products and accumulators are torch tensors, layouts are left out. A kernel's warps take turns: each runs
until it waits for a barrier that is not there. Memory holds NaN until it is written, a slot that TMA copies to until
somebody has waited for its barrier; what TMA stores is read when its warp waits for that. A wait that is missing shows,
and so does one that never ends. Products are done at once: what they still read may not be seen to be overwritten.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from inspect import signature
from threading import Semaphore, Thread, local
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from build_tools.declaration import tiles_of
from liger_aot.manifest import Pack, Variant
from tests.drivers import InterpreterDriver, Launchable

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class WarpGroupDriver(InterpreterDriver):
    """Kernels in Gluon by this interpreter, the others by Triton's."""

    def __init__(self, op: str, pack: Pack) -> None:
        super().__init__(op, pack)
        self.launched: list[str] = []

    def tensor_map(self, *made_of: Any) -> TensorMap:
        return TensorMap(*made_of)

    def load(self, variant: Variant) -> Launchable:
        name, form_name, *_ = variant.name.split("-")
        kernel = self._kernels[name]
        self.launched.append(name)
        if kernel.language != "gluon":
            return super().load(variant)
        form = kernel.forms[form_name]
        constants = {c: variant.numbers[c.lower()] for c in form.constants}
        function = getattr(self._module, form.function)

        def run(grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
            kinds = kernel.arguments.values()
            given = [_argument(kind, value) for kind, value in zip(kinds, arguments, strict=True)]
            for program in range(grid[0]):
                Block(program, grid[0]).python(function)(*given, **constants)

        return Launchable(run)


def _argument(kind: str, value: Any) -> Any:
    if tiles_of(kind) is not None:
        return value
    if kind.startswith("*"):
        return Pointer(value)
    return torch.tensor(value, dtype=torch.float32 if kind == "fp32" else torch.int32).as_subclass(Number)


class Number(Tensor):
    """A scalar of 32 bits, and what is computed from one: += and *= make another value, as on the device."""

    def __iadd__(self, other: Any) -> Any:
        return self + other

    def __imul__(self, other: Any) -> Any:
        return self * other

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Any:  # type: ignore[override]
        return self.view(dtype) if bitcast else super().to(dtype)


class Pointer:
    """To elements of four bytes."""

    def __init__(self, address: int) -> None:
        self.address = address

    def __add__(self, elements: Any) -> Pointer:
        return Pointer(self.address + 4 * int(elements))

    def to(self, _: Any) -> Pointer:
        return self

    def view(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer((ctypes.c_byte * (4 * count)).from_address(self.address), dtype=dtype)


class TensorMap:
    """A tensor as TMA sees it: outside it reads zeros and is not written."""

    layout = None

    def __init__(
        self, address: int, dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...], box: Any, _: int
    ) -> None:
        self.dtype, self.block_shape = DTYPES[dtype], list(box)
        last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        memory = (ctypes.c_byte * ((last + 1) * self.dtype.itemsize)).from_address(address)
        self.tensor = torch.frombuffer(memory, dtype=self.dtype).as_strided(sizes, strides)

    def _inside(self, at: list[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """What of the tensor a box holds, and where in the box that is. No box starts before the tensor."""
        starts = [int(x) for x in at]
        assert min(starts) >= 0
        counts = [
            max(min(box, size - start), 0)
            for box, size, start in zip(self.block_shape, self.tensor.shape, starts, strict=True)
        ]
        return (
            tuple(slice(s, s + n) for s, n in zip(starts, counts, strict=True)),
            tuple(slice(0, n) for n in counts),
        )

    def read(self, at: list[Any]) -> Tensor:
        whole, part = self._inside(at)
        found = torch.zeros(self.block_shape, dtype=self.dtype)
        found[part] = self.tensor[whole]
        return found

    def write(self, at: list[Any], values: Tensor) -> None:
        whole, part = self._inside(at)
        self.tensor[whole] = values[part]


class Memory:
    """Shared memory, or a view of it."""

    layout = None

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.dtype, self.shape = tensor, tensor.dtype, tuple(tensor.shape)

    def index(self, i: Any) -> Memory:
        return Memory(self.tensor[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> Memory:
        return Memory(self.tensor.narrow(dim, start, length))

    def reshape(self, shape: list[int]) -> Memory:
        return Memory(self.tensor.view(shape))

    def permute(self, order: tuple[int, ...]) -> Memory:
        return Memory(self.tensor.permute(order))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], _: Any) -> Memory:
        assert dtype == self.dtype
        return self.reshape(shape)

    def load(self, _: Any) -> Tensor:
        found = self.tensor.clone()
        return found.as_subclass(Number) if self.dtype == torch.int32 else found

    def store(self, value: Tensor) -> None:
        assert value.shape == self.tensor.shape
        self.tensor.copy_(value)


class Barrier:
    def __init__(self, arrivals: int) -> None:
        self.arrivals = self.left = arrivals
        self.bytes, self.phase = 0, 0
        self.copies: list[Callable[[], int]] = []

    def arrive(self, count: int = 1, expected: int = 0) -> None:
        assert self.left >= count, "an arrival too many"
        self.left -= count
        self.bytes += expected
        self._end_phase()

    def _end_phase(self) -> None:
        if not self.left and not self.bytes:
            self.left, self.phase = self.arrivals, self.phase ^ 1

    def passed(self, phase: int) -> bool:
        """Whether the phase of that parity has ended. Whoever waits lets copies arrive."""
        for copy in self.copies:
            self.bytes -= copy()
        if self.copies:
            self.copies.clear()
            self._end_phase()
        return self.phase != phase


class Warps:
    """Functions that run as threads, one at a time, in turns."""

    def __init__(self) -> None:
        self.me = local()

    def run(self, functions: list[Callable[[], None]]) -> None:
        self.ready: list[Callable[[], bool] | None] = [lambda: True] * len(functions)
        self.turns = [Semaphore(0) for _ in functions]
        self.error: BaseException | None = None
        threads = [Thread(target=self._warp, args=(i, f), daemon=True) for i, f in enumerate(functions)]
        for thread in threads:
            thread.start()
        self.turns[0].release()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error

    def _warp(self, i: int, function: Callable[[], None]) -> None:
        self.me.number, self.me.stores = i, []
        self.turns[i].acquire()
        try:
            if self.error is None:
                function()
                assert not self.me.stores, "a warp ends before what it stores is read"
        except BaseException as error:
            self.error = self.error or error
        self.ready[i] = None
        self._next(i)

    def wait(self, ready: Callable[[], bool]) -> None:
        i = self.me.number
        if not ready():
            self.ready[i] = ready
            self._next(i)
            self.turns[i].acquire()
            if self.error is not None:
                raise self.error

    def _next(self, i: int) -> None:
        """Let the next warp run that can; after an error all end."""
        others = [(i + n) % len(self.turns) for n in range(1, len(self.turns) + 1)]
        waiting = [(j, ready) for j in others if (ready := self.ready[j]) is not None]
        chosen = [j for j, ready in waiting if self.error is not None or ready()]
        if waiting and not chosen:
            self.error = AssertionError(f"all of {len(waiting)} warps wait")
            chosen = [j for j, _ in waiting]
        if chosen:
            self.turns[chosen[0]].release()


class Block:
    """One program, and what stands in for Gluon in it."""

    def __init__(self, program: int, programs: int) -> None:
        self._warps, self._barriers = Warps(), dict[int, Barrier]()
        self._made: dict[Any, Any] = {}
        gl = SimpleNamespace(
            **{name: getattr(torch, name) for name in ("int8", "int32", "int64", "uint32", "float32", "exp2")},
            program_id=lambda axis: _argument("i32", program),
            num_programs=lambda axis: programs,
            where=lambda *of: torch.where(*map(torch.as_tensor, of)),
            minimum=lambda *of: torch.minimum(*map(torch.as_tensor, of)),
            maximum=lambda *of: torch.maximum(*map(torch.as_tensor, of)),
            max=lambda x, axis: x.amax(axis),
            arange=lambda start, end, layout: torch.arange(start, end, dtype=torch.int32),
            full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
            expand_dims=lambda x, axis: x.unsqueeze(axis),
            convert_layout=lambda x, layout: x,
            static_range=range,
            static_assert=_check,
            thread_barrier=lambda: None,
            allocate_shared_memory=self._allocate,
            inline_asm_elementwise=_turn,
            warp_specialize=self._specialize,
            **{f"{kind}Layout": lambda *_, **__: None for kind in ("Blocked", "NVMMAShared", "NVMMADistributed")},
        )  # fmt: skip
        self._known = {
            "gl": gl,
            "mbarrier": SimpleNamespace(
                MBarrierLayout=lambda: None,
                init=lambda at, count: self._barriers.update({at.tensor.data_ptr(): Barrier(count)}),
                expect=lambda at, size: self._barrier(at).arrive(expected=size),
                arrive=lambda at, count: self._barrier(at).arrive(count),
                wait=self._wait,
            ),
            "tma": SimpleNamespace(
                async_copy_global_to_shared=self._fetch,
                async_copy_shared_to_global=lambda of, at, values: self._warps.me.stores.append(
                    (of, at, values)
                ),
                store_wait=self._store_wait,
            ),
            "fence_async_shared": lambda: None,
            "warpgroup_mma": _multiply,
            "warpgroup_mma_wait": lambda left, deps: deps[0] if len(deps) == 1 else deps,
            "add_dq": _add_dq,
        }

    def python(self, value: Any) -> Any:
        """A function with those it calls, a class or a number of the device code, as Python has it."""
        from triton.experimental.gluon import language as gl
        from triton.runtime.jit import JITCallable

        if isinstance(value, gl.constexpr):
            return value.value
        if getattr(value, "__triton_aggregate__", False):
            return self._aggregate(value)
        if not isinstance(value, JITCallable):
            return value
        if value.fn not in self._made:
            fn = value.fn
            known = self._made[fn] = FunctionType(fn.__code__, {}, fn.__name__, fn.__defaults__)
            for name in fn.__code__.co_names:
                if name in fn.__globals__:
                    given = self._known.get(name)
                    known.__globals__[name] = self.python(fn.__globals__[name]) if given is None else given
        return self._made[value.fn]

    def _aggregate(self, made_by: Any) -> Callable[..., SimpleNamespace]:
        """Its constructor, which keeps what it is given; layouts are None."""
        from triton.experimental.gluon._runtime import GluonJITFunction

        init = made_by.hash_attrs[0]
        names = list(signature(getattr(init, "fn", init)).parameters)[1:]
        methods = {n: m for n, m in vars(made_by).items() if isinstance(m, GluonJITFunction)}

        def make(*arguments: Any) -> SimpleNamespace:
            made = SimpleNamespace(**dict.fromkeys(("S", "O1", "O2", "P", "ROW", "KEY")))
            made.__dict__.update(zip(names, arguments, strict=False))
            for name, method in methods.items():
                setattr(made, name, MethodType(self.python(method), made))
            return made

        return make

    def _allocate(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Memory:
        return Memory(torch.full(shape, math.nan if dtype.is_floating_point else -7, dtype=dtype))

    def _barrier(self, at: Memory) -> Barrier:
        return self._barriers[at.tensor.data_ptr()]

    def _wait(self, at: Memory, phase: Any) -> None:
        barrier, parity = self._barrier(at), int(phase)
        self._warps.wait(lambda: barrier.passed(parity))

    def _fetch(self, of: TensorMap, at: list[Any], full: Memory, to: Memory) -> None:
        def copy() -> int:
            values = of.read(at)
            to.tensor.copy_(values)
            return values.nbytes

        assert to.shape == tuple(of.block_shape) and to.dtype == of.dtype
        to.tensor.fill_(math.nan)
        self._barrier(full).copies.append(copy)

    def _store_wait(self, left: int) -> None:
        assert left == 0
        stores = self._warps.me.stores
        for of, at, values in stores:
            of.write(at, values.tensor)
        stores.clear()

    def _specialize(self, work: list[tuple[Any, tuple[Any, ...]]], warps: Any, registers: Any) -> None:
        self._warps.run([lambda function=function, given=given: function(*given) for function, given in work])


def _check(condition: Any) -> None:
    assert condition


def _multiply(a: Any, b: Memory, acc: Tensor, use_acc: bool = True, is_async: bool = False) -> Tensor:
    a = a.tensor if isinstance(a, Memory) else a
    assert a.dtype == b.dtype in (torch.bfloat16, torch.float16)
    found = a.float() @ b.tensor.float()
    return found + acc if use_acc else found


def _add_dq(to: Pointer, dq: Tensor) -> None:
    """By thread of the warp group, from the layout of wgmma's results."""
    r, c = torch.arange(64)[:, None], torch.arange(dq.shape[1])[None]
    thread = 32 * (r // 16) + 4 * (r % 8) + c % 8 // 2
    memory = to.view(dq.numel(), torch.float32)
    memory[512 * (c // 8) + 4 * thread + 2 * (r % 16 // 8) + c % 2] += dq


def _turn(assembly: str, _: str, operands: list[Any], *rest: Any) -> None:
    """A turn of ``attention_backward_order``. Programs run one after the other: one that waits would wait for ever."""
    at, number = operands
    memory = at.view(1, torch.int32)
    if "st.release" in assembly:
        memory[0] = int(number)
    else:
        assert "ld.acquire" in assembly and int(memory[0]) == int(number), "nobody passes this turn on"
