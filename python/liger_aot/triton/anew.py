"""Functions that a program makes anew at each call of another: what Triton keeps of one, those like it have too.

Triton keeps kernels with the function's object. A function that is made at each call would have its kernel looked up in
the packs and loaded each time, and what is loaded stays loaded. Here such a function takes, before its launch, what
Triton keeps of one that is alike: of the same code, decorated alike, with the same values of the variables around it.
Each launch looks whether the variables are still what they were.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from liger_aot.runtime.remembered import remember
from liger_aot.triton.closures import DEEPEST, LOCAL, Unclear, cells, data, in_words, is_builtin, is_function

SEEN = "_liger_aot_seen"  # of a JITFunction: None, or what it was at its launch before
CALLS = "_liger_aot_calls"  # of a JITFunction: calls that it has had, as ``repeated`` keeps them
_TAKEN = (CALLS, "device_caches", "CompiledKernel", "compile", "ASTSource")  # what those alike have in common
NEW, _absent = object(), object()


class Alike:
    """Functions that are alike."""

    def __init__(self, function: Any, variables: Any) -> None:
        # The first of them and what it read then, kept: code and values are known by their addresses.
        self.function, self.variables = function, variables
        self.attributes: dict[str, Any] = function.__dict__  # what the others take is there
        self.hashed: Any = None  # the one that Triton hashed last, to compile it

    def left_by(self, fn: Any) -> None:
        """One of them is to become another; what it has of Triton's is kept for the rest."""
        if self.attributes is fn.__dict__:
            self.attributes = {name: fn.__dict__[name] for name in _TAKEN if name in fn.__dict__}
        if self.hashed is fn:
            self.hashed = SimpleNamespace(hash=fn.hash, used_global_vals=fn.used_global_vals)


class Seen(NamedTuple):
    """A function at its last launch."""

    alike: Alike | None  # None: it can't be told which are
    variables: tuple[tuple[Any, Any], ...]  # cell, value


_known: dict[Any, Alike] = {}


def before_launch(fn: Any, seen: Any) -> None:
    """To be called where ``seen``, what ``fn`` has as SEEN or else NEW, is not None."""
    if seen is NEW:
        if LOCAL in fn.fn.__qualname__:
            _take(fn)
        else:
            fn.__dict__[SEEN] = None
        return
    for cell, value in seen.variables:
        if _contents(cell) is not value:  # another function from now on
            if seen.alike is not None:
                seen.alike.left_by(fn)
            fn.device_caches = defaultdict(fn.create_binder)
            fn.hash, fn.used_global_vals = None, {}
            fn.__dict__.pop(CALLS, None)
            _take(fn)
            return
    if seen.alike is not None and seen.alike.hashed is not None and fn.hash is None:
        _take_hash(fn, seen.alike)


def compiled(fn: Any) -> None:
    """Triton compiles a kernel of ``fn``, for all that are alike: each compares its globals from now on."""
    seen = fn.__dict__.get(SEEN)
    if seen is not None and seen.alike is not None:
        seen.alike.hashed = fn


def _take(fn: Any) -> None:
    variables = tuple(_variables(fn, DEEPEST))
    try:
        key = _key(fn, DEEPEST)
    except Unclear:
        fn.__dict__[SEEN] = Seen(None, variables)
        return
    alike = _known.get(key)
    if alike is None or not _is_unchanged(alike):
        alike = Alike(fn, variables)
        remember(_known, key, alike)
    elif not alike.attributes["device_caches"]:
        return  # the first launch has not come that far: the next one asks again
    else:
        fn.__dict__.update({name: alike.attributes[name] for name in _TAKEN if name in alike.attributes})
    fn.__dict__[SEEN] = Seen(alike, variables)
    if alike.hashed is not None:
        _take_hash(fn, alike)


def _take_hash(fn: Any, alike: Alike) -> None:
    fn.hash, fn.used_global_vals = alike.hashed.hash, alike.hashed.used_global_vals


def _is_unchanged(alike: Alike) -> bool:
    """Whether the globals that kernels of these functions read are as they were: else one made now is another."""
    for kernels, *_ in tuple(alike.attributes["device_caches"].values()):
        for kernel in tuple(kernels.values()):
            for name, where, value in getattr(kernel, "kept", ()):
                if where.get(name, _absent) != value:
                    return False
    hashed = alike.hashed.used_global_vals.items() if alike.hashed is not None else ()
    return all(where.get(name, _absent) == value for (name, _), (value, where) in hashed)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _absent


def _variables(fn: Any, depth: int) -> Iterator[tuple[Any, Any]]:
    """The cells that a function reads and their values, those of functions among them, too."""
    if not depth or not isinstance(getattr(fn, "fn", None), FunctionType):
        return
    for _, cell in cells(fn.fn):
        value = _contents(cell)
        yield cell, value
        for one in value if type(value) is tuple else (value,):
            if is_function(one):
                yield from _variables(one, depth - 1)


def _key(fn: Any, depth: int) -> tuple[Any, ...]:
    """What functions that are alike have in common; Unclear where that can't be told."""
    if not depth:
        raise Unclear("a function that calls itself")
    return (
        type(fn),
        fn.src,
        _python(fn.fn, depth),
        tuple(param.annotation for param in getattr(fn, "params", ())),
        *(repr(getattr(fn, name, None)) for name in _DECORATION),
        *(_python(getattr(fn, name, None), depth) for name in ("_repr", "launch_metadata")),
    )


_DECORATION = ("do_not_specialize", "do_not_specialize_on_alignment", "noinline", "debug", "version")


def _python(function: Any, depth: int) -> Any:
    """A Python function. What is known by its address lives as long as the functions that are alike."""
    if function is None:
        return None
    if type(function) is not FunctionType:
        raise Unclear(f"{function!r:.80}")
    by_name = sorted((function.__kwdefaults__ or {}).items())
    return (
        id(function.__code__),
        id(function.__globals__),
        tuple(_value(_contents(cell), depth) for _, cell in cells(function)),
        tuple(_value(value, depth) for value in function.__defaults__ or ()),
        tuple((name, _value(value, depth)) for name, value in by_name),
    )


def _value(value: Any, depth: int) -> str:
    def other(one: Any) -> Any:
        if is_function(one) and LOCAL in getattr(one, "__qualname__", ""):
            return _key(one, depth - 1)
        if is_function(one) or isinstance(one, (ModuleType, type)) or is_builtin(one):
            return id(one)
        raise Unclear(in_words(one))

    return repr(data(value, other))
