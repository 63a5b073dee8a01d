"""A recorded function -> the JITFunction that it is in this process: its module is imported, its key compared.

A function may be made in another function (a factory), or be one of several of a name: all that a module makes while it
is imported are noted, and the one whose key is the recorded one is taken.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from liger_aot.triton.identity import Variant
from liger_aot.triton.recording import Function, is_module, is_qualname
from liger_aot.triton.values import NotData, decode, encode

MAIN = "__main__"
BY_GLOBALS = "reads globals that were others when it was recorded"
STAND_IN_MAIN = "__liger_aot_main__"

_made: dict[tuple[str, str], list[Any]] = defaultdict(list)
_all: list[Any] = []  # every function of Triton's in this process, also those that are no kernels


def as_recorded(variant: Variant) -> Variant:
    """A variant as a run of the program says it: functions of the program itself are of ``__main__`` there."""
    text = json.dumps(variant).replace(f'"{STAND_IN_MAIN}"', f'"{MAIN}"')
    return Variant(*json.loads(text))


class NotFound(Exception):
    """There is no such function here, or not as it was recorded."""


def note_functions() -> None:
    """Note every function that is made from now on."""
    from triton.runtime import jit

    made = jit.JITCallable.__init__

    def __init__(self: Any, fn: Any, *arguments: Any, **named: Any) -> None:
        made(self, fn, *arguments, **named)
        _all.append(self)
        _made[fn.__module__, fn.__qualname__].append(self)

    jit.JITCallable.__init__ = __init__


class Finder:
    """Finds functions by module and qualified name. With ``packages``, in these alone: a recording that comes from
    strangers names modules, and to import one runs it."""

    def __init__(self, packages: Sequence[str] = (), main: str | None = None) -> None:
        self.packages, self.main = tuple(packages), main

    def module(self, name: str) -> Any:
        """The module, imported; NotFound says why not."""
        if not is_module(name):
            raise NotFound(f"{name!r:.80} is no module")
        if name == MAIN:
            return self._main()
        top = name.partition(".")[0]
        if self.packages and top not in (*self.packages, "triton"):
            raise NotFound(
                f"{name} is of none of the packages that may be imported ({', '.join(self.packages)})"
            )
        try:
            return import_module(name)
        except Exception as error:
            raise NotFound(f"import {name}: {type(error).__name__}: {error}") from None

    def _main(self) -> Any:
        if self.main is None:
            raise NotFound("is in the program itself: name its file with --main, or move it into a module")
        if STAND_IN_MAIN not in sys.modules:
            spec = spec_from_file_location(STAND_IN_MAIN, self.main)
            if spec is None or spec.loader is None:
                raise NotFound(f"--main {self.main}: no Python file")
            module = sys.modules[STAND_IN_MAIN] = module_from_spec(spec)
            sys.path.insert(0, str(Path(self.main).absolute().parent))
            try:
                spec.loader.exec_module(module)
            except Exception as error:
                raise NotFound(f"--main {self.main}: {type(error).__name__}: {error}") from None
        return sys.modules[STAND_IN_MAIN]

    def candidates(self, module: str, qualname: str) -> list[Any]:
        """Functions of this name, the module's own attribute first."""
        from triton.runtime.jit import JITFunction

        found: list[Any] = []
        at = self.module(module)
        if not is_qualname(qualname):
            raise NotFound(f"{qualname!r:.80} is no function's name")
        for part in qualname.split("."):
            at = getattr(at, part, None)
        while at is not None and not isinstance(at, JITFunction):
            at = getattr(at, "fn", None)  # under @triton.autotune and @triton.heuristics
        if at is not None:
            found.append(at)
        name = STAND_IN_MAIN if module == MAIN else module
        found += [fn for fn in _made[name, qualname] if fn not in found and isinstance(fn, JITFunction)]
        if not found:
            raise NotFound(f"{module} has no @triton.jit function {qualname}")
        return found

    def find(self, module: str, qualname: str, key: str) -> tuple[Any, bool]:
        """The function, and whether it is the recorded one by Triton's own key; the last one made where none is."""
        found = self.candidates(module, qualname)
        for fn in found:
            if fn.cache_key == key:
                return fn, True
        return found[0], False

    def find_class(self, module: str, qualname: str) -> Any:
        """A class that a constant is of."""
        at = self.module(module)
        for part in qualname.split("."):
            at = getattr(at, part, None)
        return at


@contextmanager
def recorded_globals(finder: Finder, functions: Sequence[Function]) -> Iterator[list[str]]:
    """The globals that ``functions`` read, as they were recorded; yields the names of those that were others here."""
    changed: list[tuple[dict[str, Any], str, Any]] = []
    names: list[str] = []
    try:
        for function in functions:
            for module, name, recorded in function.reads:
                if module == "triton" or module.startswith("triton."):
                    continue
                owner = finder.module(module).__dict__
                if name in owner and _data(owner[name]) != recorded:
                    changed.append((owner, name, owner[name]))
                    owner[name] = decode(recorded)
                    names.append(name)
        if changed:
            _forget_keys()
        yield names
    finally:
        for owner, name, value in reversed(changed):
            owner[name] = value
        if changed:
            _forget_keys()


def _data(value: Any) -> Any:
    try:
        return encode(value)
    except NotData:
        return None


def _forget_keys() -> None:
    for fn in _all:
        fn.hash = None


def differs(function: Function, fn: Any) -> str:
    """Why ``fn`` is not the recorded function, for people."""
    _ = fn.cache_key  # reads the globals
    now = {name: _data(value) for (name, _), (value, _) in fn.used_global_vals.items()}
    other = [name for _, name, value in function.reads if name in now and now[name] != value]
    if other:
        return f"{BY_GLOBALS}: {', '.join(sorted(set(other)))}"
    if fn.fn.__code__.co_firstlineno != function.line:
        return f"its source is another: it begins at line {fn.fn.__code__.co_firstlineno}, recorded was {function.line}"
    return "its source, or that of a function that it calls, is not what was recorded"
