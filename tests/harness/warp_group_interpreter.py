"""Gluon kernels of warp groups without a GPU: their device code run as Python, a thread a warp group, tensors by torch.

Layouts are left out, as they change no value. What a GPU does later is done late here, too: a TMA copy fills its place
with NaN and arrives at some later moment, in any order; a store leaves shared memory when it is waited for. Barriers
count arrivals and bytes as the GPU's do; who waits for a phase that nobody completes fails. Memory that no tensor holds
is not touched.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from importlib import import_module
from threading import Condition, Thread, get_ident
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from liger_aot.runtime.manifest import Pack, Variant
from liger_aot_build.declaration import op_module, read_declaration
from tests.harness import storages
from tests.harness.drivers import InterpreterDriver, Launchable
from tests.harness.warp_group_memory import TYPES, Pointer, Shared, TensorMap, atomic_add, load, memory, store
from tests.harness.warp_group_softmax import SOFTMAX

PATIENCE = 600.0  # seconds a group waits for a barrier before that counts as a deadlock
SCALARS = ("i32", "i64", "fp32")
THREADS = 128  # of a warp group


class Barrier:
    def __init__(self) -> None:
        self.count = self.left = self.bytes = self.phase = 0
        self.used = False


class Block:
    """A running program: its barriers, copies under way, and groups."""

    def __init__(self, program: tuple[int, ...], programs: tuple[int, ...]) -> None:
        self.program, self.programs = program, programs
        self.changed = Condition()
        self.barriers: list[list[Barrier]] = []
        self.copies: list[Callable[[], None]] = []
        self.passed: dict[str, int] = {}  # turns, by named barrier
        self.stores: dict[int, list[Callable[[], None]]] = {}
        # Copies by threads that no barrier waits for yet.
        self.started: dict[int, list[Callable[[], None]]] = {}
        self.error: BaseException | None = None
        self.random = random.Random(str(program))

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        if dtype == torch.int64:
            made = [Barrier() for _ in range(int(shape[0]))]
            self.barriers.append(made)
            return SimpleNamespace(index=lambda i: made[int(i)], shape=shape)
        garbage = torch.nan if dtype.is_floating_point else -7
        return Shared(torch.full([int(n) for n in shape], garbage, dtype=dtype))

    # barriers

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.left = int(count)

    def signal(self, barrier: Barrier, arrivals: int = 0, expected: int = 0) -> None:
        with self.changed:
            barrier.used = True
            barrier.left -= int(arrivals)
            barrier.bytes += int(expected)
            assert barrier.left >= 0, "more arrivals than a phase has"
            if not barrier.left and not barrier.bytes:
                barrier.left, barrier.phase = barrier.count, barrier.phase + 1
            self.changed.notify_all()

    def arrive(self, barrier: Barrier, count: int) -> None:
        self.signal(barrier, arrivals=count)

    def expect(self, barrier: Barrier, size: int) -> None:
        self.signal(barrier, arrivals=1, expected=size)

    def wait(self, barrier: Barrier, parity: Any) -> None:
        """For the phase of this parity; meanwhile copies arrive."""
        with self.changed:
            barrier.used = True
            while barrier.phase & 1 == int(parity):
                if self.copies:
                    self.copies.pop(self.random.randrange(len(self.copies)))()
                elif not self.changed.wait(PATIENCE) or self.error:
                    raise self.error or AssertionError("a barrier's phase never ends")

    def named_barrier(self, assembly: str) -> None:
        """As the forward's groups take turns: who waits goes on once another has arrived."""
        found = re.match(r"bar\.(sync|arrive) (\d+), 256;", assembly)
        assert found, assembly
        what, number = found.groups()
        with self.changed:
            if what == "arrive":
                self.passed[number] = self.passed.get(number, 0) + 1
                self.changed.notify_all()
                return
            while not self.passed.get(number):
                if not self.changed.wait(PATIENCE) or self.error:
                    raise self.error or AssertionError("a turn that nobody passes on")
            self.passed[number] -= 1

    # TMA

    def copy_in(self, of: TensorMap, at: list[Any], barrier: Barrier, to: Shared) -> None:
        part, where = of.inside(at)
        to.values.fill_(torch.nan)

        def arrive() -> None:
            to.values.zero_()
            to.values[where] = part
            self.signal(barrier, expected=-to.values.nbytes)

        with self.changed:
            self.copies.append(arrive)
            self.changed.notify_all()

    def copy_by_threads(self, to: Shared, at: Pointer, mask: Any) -> None:
        """Of cp.async: it has arrived when the barrier that ``arrive_after_copies`` names has the threads' arrivals."""
        to.values.fill_(torch.nan)
        self.started.setdefault(get_ident(), []).append(lambda: to.values.copy_(load(at, mask)))

    def arrive_after_copies(self, barrier: Barrier, increment_count: bool) -> None:
        assert not increment_count
        started = self.started.pop(get_ident(), [])

        def arrive() -> None:
            for copy in started:
                copy()
            self.signal(barrier, arrivals=THREADS)

        with self.changed:
            self.copies.append(arrive)
            self.changed.notify_all()

    def copy_out(self, of: TensorMap, at: list[Any], source: Shared) -> None:
        part, where = of.inside(at)
        self.stores.setdefault(get_ident(), []).append(lambda: part.copy_(source.values[where]))

    def store_wait(self, left: int) -> None:
        for leave in self.stores.pop(get_ident(), []):
            leave()

    # groups

    def specialize(self, groups: list[Any], warps: list[int], registers: list[int]) -> None:
        def run(function: Any, arguments: Any) -> None:
            try:
                function(*arguments)
            except BaseException as error:
                with self.changed:
                    self.error = self.error or error
                    self.changed.notify_all()

        threads = [Thread(target=run, args=group) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.error:
            raise self.error
        assert not self.copies and not self.stores, "a copy is never waited for"


class Const(int):
    """A ``constexpr``."""

    value = property(int)


class _Layout:
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.value = self

    @classmethod
    def get_default_for(cls, *arguments: Any) -> _Layout:
        return cls()


def _tensor(x: Any) -> Tensor:
    return x if isinstance(x, Tensor) else torch.as_tensor(x)


def _product(a: Any, b: Any, acc: Tensor, use_acc: bool = True, is_async: bool = False) -> Tensor:
    left, right = (x.values if isinstance(x, Shared) else x for x in (a, b))
    found = left.float() @ right.float()
    return found + acc if use_acc else found


def _wait(left: int, deps: tuple[Tensor, ...]) -> Any:
    return deps if len(deps) > 1 else deps[0]


def add_dq(to: Pointer, dq: Tensor) -> None:
    """``backward_consumers.add_dq``, whose assembly says in which order a thread's values lie."""
    r, c = torch.arange(64)[:, None], torch.arange(dq.shape[1])[None]
    thread = 32 * (r // 16) + 4 * (r % 8) + c % 8 // 2
    at = 512 * (c // 8) + 4 * thread + 2 * (r % 16 // 8) + c % 2
    memory(to.address, to.dtype, dq.numel()).index_add_(0, at.flatten(), dq.flatten())


def _semaphore(assembly: str, constraints: str, operands: list[Any], *rest: Any) -> None:
    """The semaphore of ``backward_scheduler``. Programs run one after the other: one that waits would wait for ever."""
    at, number = operands
    semaphore = memory(at.address, torch.int32, 1)
    if "st.release" in assembly:
        semaphore[0] = number
    else:
        assert "ld.acquire" in assembly and semaphore[0] == number, "nobody releases this semaphore"


def _to(x: Tensor, dtype: torch.dtype, bitcast: bool = False) -> Tensor:
    """Integers are kept in 64 bits: what is unsigned by its value."""
    if dtype == torch.uint32:
        return x.type(torch.int64) & 0xFFFFFFFF
    same = not bitcast or x.dtype == torch.int64
    return x.type(dtype) if same else x.view(dtype)


def _language(block: Block) -> SimpleNamespace:
    names = (
        "BlockedLayout", "DistributedLinearLayout", "DotOperandLayout", "NVMMADistributedLayout", "NVMMASharedLayout",
        "SharedLinearLayout", "SliceLayout",
    )  # fmt: skip
    return SimpleNamespace(
        **dict.fromkeys(names, _Layout),
        constexpr=lambda x: x if isinstance(x, _Layout) else Const(x),
        float32=torch.float32, int16=torch.int16, int32=torch.int32, int64=torch.int64, uint32=torch.uint32,
        program_id=lambda axis: torch.tensor(block.program[axis]),
        num_programs=lambda axis: torch.tensor(block.programs[axis]),
        num_warps=lambda: 4,
        arange=lambda start, end, layout: torch.arange(int(start), int(end)),
        zeros=lambda shape, dtype, layout: torch.zeros([int(n) for n in shape], dtype=dtype),
        full=lambda shape, value, dtype, layout: torch.full([int(n) for n in shape], value, dtype=dtype),
        minimum=lambda a, b: torch.minimum(_tensor(a), _tensor(b)),
        maximum=lambda a, b: torch.maximum(_tensor(a), _tensor(b)),
        where=lambda c, a, b: torch.where(_tensor(c), _tensor(a), _tensor(b)),
        max=lambda x, axis: x.amax(axis),
        sum=lambda x, axis: x.sum(axis),
        cumsum=lambda x, axis: x.cumsum(axis),
        umulhi=lambda a, b: (a * b) >> 32,
        zeros_like=torch.zeros_like,
        to_tensor=_tensor,
        split=lambda x: x.unbind(-1),
        join=lambda a, b: torch.stack((a, b), -1),
        exp=torch.exp, exp2=torch.exp2, log2=torch.log2, expand_dims=torch.unsqueeze,
        load=load, store=store, atomic_add=atomic_add,
        convert_layout=lambda x, layout: x,
        static_range=range,
        static_assert=lambda condition: None,
        thread_barrier=lambda: None,
        inline_asm_elementwise=_semaphore,
        allocate_shared_memory=block.allocate,
        warp_specialize=block.specialize,
    )  # fmt: skip


class Code:
    """Device functions as Python ones, for one program."""

    def __init__(self, block: Block) -> None:
        language = _language(block)
        self._known: dict[Any, Any] = {}
        self._named = {
            "gl": language, "tl": language, "add_dq": add_dq, "warpgroup_mma": _product, "warpgroup_mma_wait": _wait,
            "fence_async_shared": lambda: None, "named_barrier": block.named_barrier, **SOFTMAX,
            "launch_dependents": lambda: None, "wait_for_previous": lambda value: value,
            "wait_for_previous_if": lambda condition, value: value, "sigmoid": torch.sigmoid,
            "mbarrier": SimpleNamespace(
                init=block.init, arrive=block.arrive, expect=block.expect, wait=block.wait, MBarrierLayout=_Layout
            ),
            "async_copy": SimpleNamespace(
                async_copy_global_to_shared=block.copy_by_threads, mbarrier_arrive=block.arrive_after_copies,
                wait_group=lambda left: None,
            ),
            "tma": SimpleNamespace(
                async_copy_global_to_shared=block.copy_in, async_copy_shared_to_global=block.copy_out,
                store_wait=block.store_wait,
            ),
        }  # fmt: skip

    def python(self, value: Any) -> Any:
        """A device function, class or constant."""
        from triton.language import constexpr

        if isinstance(value, constexpr):
            return Const(value.value) if isinstance(value.value, int) else value.value
        if getattr(value, "__triton_aggregate__", False):
            return self._known.get(value) or self._class(value)
        function = getattr(value, "fn", None)
        if not isinstance(function, FunctionType):
            return value
        return self._known.get(function) or self._function(function)

    def _function(self, function: FunctionType) -> FunctionType:
        known: dict[str, Any] = {}
        made = FunctionType(function.__code__, known, function.__name__, function.__defaults__)
        self._known[function] = made
        for name in _names(function.__code__):
            if name in self._named:
                known[name] = self._named[name]
            elif name in function.__globals__:
                known[name] = self.python(function.__globals__[name])
        return made

    def _class(self, aggregate: Any) -> type:
        made = self._known[aggregate] = type(aggregate.__name__, (), {})
        first, *methods = (self.python(m) for m in aggregate.hash_attrs)
        made.__init__ = first  # type: ignore[misc]
        for method in methods:
            setattr(made, method.__name__, method)
        return made


def _names(code: CodeType) -> set[str]:
    inner = (_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*inner)


def in_turn(programs: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The order that programs run in; tests have others."""
    return programs


def device_values() -> Any:
    """Tensors as device code has values: they never change, and become others with the same bits."""
    add, subtract, multiply = Tensor.__add__, Tensor.__sub__, Tensor.__mul__
    return patch.multiple(Tensor, __iadd__=add, __isub__=subtract, __imul__=multiply, to=_to)


def run(function: Any, types: dict[str, str], constants: dict[str, int], grid: Any, arguments: Any) -> None:
    """Launch a kernel, one program after the other.

    Args:
        types: of the run-time arguments by name, in order; those that are not pointers are numbers or ``TensorMap``.
    """
    given = {
        name: Pointer(value, TYPES[kind[1:]])
        if kind[0] == "*"
        else torch.tensor(value)
        if kind in SCALARS
        else value
        for value, (name, kind) in zip(arguments, types.items(), strict=True)
    }
    with device_values():
        programs = [p[::-1] for p in itertools.product(*(range(n) for n in reversed(grid)))]
        blocks = [Block(program, tuple(grid)) for program in in_turn(programs)]
        for block in blocks:
            made = Code(block).python(function)
            made(**given, **{name: Const(value) for name, value in constants.items()})
            assert not block.copies, "a copy is never waited for"
    # the compiler gives their memory to tiles, and a GPU that swaps a block out and in writes on it
    alike = zip(*(block.barriers for block in blocks if block.barriers), strict=True)
    used = [any(b.used for barriers in same for b in barriers) for same in alike]
    assert all(used) or not any(used), "barriers that nobody uses"  # none at all: there was nothing to do


class GroupsDriver(InterpreterDriver):
    """Kernels of warp groups by ``run``, the others on Triton's interpreter."""

    tensor_map: Any = TensorMap

    def __init__(self, op: str, pack: Pack) -> None:
        super().__init__(op, pack)
        storages.watch()
        self._op = op

    def load(self, variant: Variant) -> Any:
        kernel_name, form_name, dtype, *_ = variant.name.split("-")
        kernel = read_declaration(self._op).kernels[kernel_name]
        if kernel.language != "gluon":
            return super().load(variant)
        form = kernel.forms[form_name]
        function = getattr(import_module(op_module(self._op)), form.function)
        types = {name: kernel.arguments[name].replace("dtype", dtype) for name in variant.arguments}
        constants = {name: variant.numbers[name.lower()] for name in form.constants}
        return Launchable(lambda grid, arguments: run(function, types, constants, grid, arguments))
