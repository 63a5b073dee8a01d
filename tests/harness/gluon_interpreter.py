"""Gluon device functions on Triton's interpreter, which knows none: as far as the rings of csrc_triton
need it.

Layouts are left out, as they change no value. A block of shared memory holds garbage until it is written, and one that
is being copied to until the copy has been waited for: a wait that comes too late, or not at all, shows. Groups of warps
are threads, each with its own copies, that wait for each other at barriers.
"""

from __future__ import annotations

import operator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Condition, local
from types import FunctionType, ModuleType
from typing import Any

PATIENCE = 600.0  # seconds a group of warps waits for a barrier before that counts as a deadlock


class _Block:
    """A block of shared memory, or a barrier in it."""

    phases: int
    changed: Condition

    def __init__(self, dtype: Any, shape: list[Any]) -> None:
        import triton.language as tl

        garbage, known = (-7, dtype) if dtype.is_int() else (float("nan"), tl.float32)
        self.value = tl.full([int(n) for n in shape], garbage, known).to(dtype)  # it makes no bfloat16

    def load(self, layout: Any) -> Any:
        return self.value

    def store(self, value: Any) -> None:
        self.value = value

    def permute(self, order: Any) -> Any:
        import triton.language as tl

        block = object.__new__(_Block)
        block.value = tl.permute(self.value, [int(i) for i in order])
        return block


class _Memory:
    def __init__(self, dtype: Any, shape: list[Any], layout: Any) -> None:
        self.blocks = [_Block(dtype, shape[1:]) for _ in range(int(shape[0]))]

    def index(self, i: Any) -> _Block:
        return self.blocks[operator.index(i)]


class _Gluon:
    """``gluon.language``: Triton's own, and what it has beside."""

    def __getattr__(self, name: str) -> Any:
        import triton.language as tl

        return (lambda *arguments: None) if name.endswith("Layout") else getattr(tl, name)

    def arange(self, start: Any, end: Any, layout: Any = None) -> Any:
        import triton.language as tl

        return tl.arange(start, end)

    def zeros(self, shape: Any, dtype: Any, layout: Any = None) -> Any:
        import triton.language as tl

        return tl.zeros(shape, dtype)

    def full(self, shape: Any, value: Any, dtype: Any, layout: Any = None) -> Any:
        import triton.language as tl

        return tl.full(shape, value, dtype)

    def static_range(self, *bounds: Any) -> Any:
        import triton.language as tl

        return [tl.constexpr(i) for i in range(*map(int, bounds))]

    def num_warps(self) -> int:
        return 4

    def thread_barrier(self) -> None:
        """A program's threads take every step together."""

    def convert_layout(self, value: Any, layout: Any) -> Any:
        return value

    def allocate_shared_memory(self, dtype: Any, shape: Any, layout: Any) -> _Memory | _Block:
        return _Memory(dtype, shape, layout) if len(shape) > 1 else _Block(dtype, shape)

    def warp_specialize(self, functions: Any, warps: Any, registers: Any) -> Any:
        """A group of warps is a thread; of the first one, the caller's own, the result."""
        from triton.runtime.interpreter import interpreter_builder

        where = interpreter_builder.grid_idx

        def run(function: Any, arguments: Any) -> None:
            interpreter_builder.grid_idx = where
            function(*arguments)

        (first, arguments), *others = functions
        with ThreadPoolExecutor(len(others)) as pool:
            waiting = [pool.submit(run, *one) for one in others]
            result = first(*arguments)
            for one in waiting:
                one.result()
        return result


class _Barriers:
    """``mbarrier``, of one arrival a phase."""

    def MBarrierLayout(self) -> None:
        pass

    def init(self, block: _Block, count: int) -> None:
        assert int(count) == 1
        block.phases, block.changed = 0, Condition()

    def arrive(self, block: _Block, count: int) -> None:
        with block.changed:
            block.phases += 1
            block.changed.notify_all()

    def wait(self, block: _Block, phase: Any) -> None:
        """Until a phase of this parity is over: the one under way is of the other."""
        with block.changed:
            assert block.changed.wait_for(lambda: block.phases & 1 != int(phase), PATIENCE), "nobody arrives"


class _Ampere:
    """``ampere``: its matrix instruction."""

    def mma_v2(self, a: Any, b: Any, acc: Any) -> Any:
        import triton.language as tl

        return tl.dot(a, b, acc)


class _AsyncCopy(local):
    """``async_copy``: copies in groups, each carried out when it is waited for. A program is a thread."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.groups: list[list[Any]] = []

    def async_copy_global_to_shared(self, block: _Block, pointer: Any, mask: Any) -> None:
        block.__init__(pointer.dtype.element_ty, list(pointer.shape))  # type: ignore[misc]
        self.asked.append((block, pointer, mask))

    def commit_group(self) -> None:
        self.groups.append(self.asked)
        self.asked = []

    def wait_group(self, outstanding: Any) -> None:
        import triton.language as tl

        while len(self.groups) > int(outstanding):
            for block, pointer, mask in self.groups.pop(0):
                block.store(tl.load(pointer, mask=mask, other=0))


def interpreted(function: Any) -> Any:
    """A Gluon function, and with it those that it calls, as the interpreter takes it; any other as it is."""
    from triton.experimental.gluon._runtime import GluonJITFunction
    from triton.runtime.interpreter import InterpretedFunction

    if not isinstance(function, GluonJITFunction):
        return function
    if function.fn in _interpreted:
        return _interpreted[function.fn]
    stand_ins = _stand_ins()
    known: dict[str, Any] = {}
    found = FunctionType(function.fn.__code__, known, function.fn.__name__)
    for name in function.fn.__code__.co_names:
        if name not in function.fn.__globals__:
            continue  # an attribute, or a builtin
        value = function.fn.__globals__[name]
        if isinstance(value, ModuleType) and value.__name__ in stand_ins:
            known[name] = stand_ins[value.__name__]
        else:
            known[name] = interpreted(value) if isinstance(value, GluonJITFunction) else value
    return _interpreted.setdefault(function.fn, InterpretedFunction(found))


_interpreted: dict[Any, Any] = {}  # by the Python function: a Gluon one's hash is that of all it calls


@cache
def _stand_ins() -> dict[str, Any]:
    from triton.experimental.gluon import language
    from triton.experimental.gluon.language.nvidia import ampere
    from triton.experimental.gluon.language.nvidia.ampere import async_copy
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier

    return {
        language.__name__: _Gluon(),
        ampere.__name__: _Ampere(),
        async_copy.__name__: _AsyncCopy(),
        mbarrier.__name__: _Barriers(),
    }
