"""Functions that are made inside another function: what tells one from another of the same source.

``@triton.jit`` inside a function makes a kernel at each call of it. Two of them may differ in nothing but the variables
of the function around them. Triton's hash says what those are that are functions or ``tl.constexpr``, and nothing of
others, such as a dtype; so a pack's key of such a function is made of Triton's hash and of its variables.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from hashlib import sha256
from types import FunctionType, ModuleType
from typing import Any

LOCAL = "<locals>"  # in the qualified name of what is made inside a function
LIBDEVICE = "triton.language.extra.libdevice"  # the names in it are functions of plain Python
DEEPEST = 8  # functions in variables of functions, tuples in tuples


class Unclear(TypeError):
    """A value that can't be written down: only Triton's hash can say whether it is the same."""


def closure(fn: Any) -> dict[str, Any]:
    """The variables of functions around a function that it reads.

    Raises:
        Unclear: one has no value, or ``fn`` is made of something else than a Python function.
    """
    if not isinstance(fn.fn, FunctionType):
        raise Unclear(f"a {type(fn.fn).__qualname__}, {fn.fn!r:.80}")
    found = {}
    for name, cell in cells(fn.fn):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned yet  # noqa: PERF203
            raise Unclear(f"{name} has no value yet") from None
    return found


def cells(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The cells of a Python function by the names of its variables."""
    return zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)


def is_function(value: Any) -> bool:
    """One of Triton's, which its hash goes into."""
    from triton.runtime.jit import JITCallable

    return isinstance(value, JITCallable)


def is_builtin(value: Any) -> bool:
    """A function of Triton's language."""
    return bool(getattr(value, "__triton_builtin__", False)) or getattr(value, "__module__", "") == LIBDEVICE


def key(fn: Any) -> str:
    """What a recording and a pack know a function by: Triton's hash and, where it has variables of a function around
    it, what they are. Triton's hash alone where that can't be written down."""
    try:
        return certain_key(fn)
    except Unclear:
        own: str = fn.cache_key
        return own


def certain_key(fn: Any, depth: int = DEEPEST) -> str:
    """The same; Unclear where a variable can't be written down."""
    own: str = fn.cache_key
    said = variables(fn, lambda one: [one.fn.__qualname__, certain_key(one, depth - 1)], depth)
    return sha256(json.dumps([own, said]).encode()).hexdigest() if said else own


def variables(fn: Any, function: Callable[[Any], Any], depth: int = DEEPEST) -> list[list[Any]]:
    """A function's variables, ``[name, value]`` in the order of names; a value that is one of Triton's functions is
    what ``function`` says of it.

    Raises:
        Unclear: a value is none that can be written down.
    """
    if not depth:
        raise Unclear(f"{fn.__name__} calls itself")
    found = []
    for name, value in sorted(closure(fn).items()) if hasattr(fn, "fn") else ():
        try:
            found.append([name, written(value, function)])
        except Unclear as error:  # noqa: PERF203
            raise Unclear(f"its variable {name} is {error}") from None
    return found


def written(value: Any, function: Callable[[Any], Any]) -> Any:
    """A variable's value as JSON, as ``values.encode`` has it where that knows it."""
    if type(value) is ModuleType:
        return {"module": value.__name__}
    of_triton = isinstance(value, type) and value.__module__.startswith("triton.")
    if of_triton or (is_builtin(value) and not is_function(value)):
        return {"builtin": [value.__module__, value.__qualname__]}

    def other(value: Any) -> Any:
        if is_function(value) and hasattr(value, "fn"):
            return {"function": function(value)}
        raise Unclear(in_words(value))

    return data(value, other)


def data(value: Any, other: Callable[[Any], Any], depth: int = DEEPEST) -> Any:
    """A value as JSON, and what ``other`` makes of it where this knows none. Unlike ``values.encode`` it tells all
    classes apart: Triton's hash does by their ``str``."""
    of, module = type(value), type(value).__module__
    if value is None or of in (bool, int, str):
        return value
    if of is float:
        return {"float": value.hex()}
    if depth and of is tuple:
        return {"tuple": [data(item, other, depth - 1) for item in value]}
    if depth and module == "triton.language.core" and of.__qualname__ == "constexpr":
        return {"constexpr": data(value.value, other, depth - 1)}
    if module == "triton.language.core" and of.__qualname__ == "dtype":
        return {"dtype": value.name}
    if module == "torch" and of.__qualname__ == "dtype":
        return {"torch": str(value).removeprefix("torch.")}
    return other(value)


def in_words(value: Any) -> str:
    """What a value is, for people."""
    return f"a {type(value).__module__}.{type(value).__qualname__}, {value!r:.80}"


def functions(fn: Any) -> Iterator[Any]:
    """Those of Triton's among a function's variables."""
    waiting = list(closure(fn).values()) if isinstance(fn.fn, FunctionType) else []
    while waiting:
        value = waiting.pop()
        if type(value) is tuple:
            waiting += value
        elif is_function(value) and hasattr(value, "fn"):
            yield value
