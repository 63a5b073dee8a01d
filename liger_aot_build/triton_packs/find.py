"""A recorded function -> the JITFunction that it is in this process: its module is imported, its key compared.

A function may be made in another function (a factory), or be one of several of a name: all that a module makes while it
is imported are noted, and the one whose key is the recorded one is taken. One that the import does not make, because it
is made when another function is called, is made again of its code, which is a constant of that function's, and of the
recorded values of its variables; nothing is called for it.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import Any

from liger_aot.triton.closures import LOCAL, is_builtin, key
from liger_aot.triton.identity import Variant
from liger_aot.triton.recording import Function, Made, is_module, is_qualname
from liger_aot.triton.values import NotData, decode, encode

MAIN = "__main__"
BY_GLOBALS = "reads globals that were others when it was recorded"
STAND_IN_MAIN = "__liger_aot_main__"
_ALWAYS = ("triton", "math", "copy")  # modules that kernels may read whatever they are of

_made: dict[tuple[str, str], list[Any]] = defaultdict(list)
_again: dict[tuple[str, str, str], list[Any]] = defaultdict(list)  # by the recorded function's key
_making: list[bool] = []  # not empty while a function is made again: no import makes it
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
        if not _making:
            _made[fn.__module__, fn.__qualname__].append(self)

    jit.JITCallable.__init__ = __init__


class Finder:
    """Finds functions by module and qualified name. With ``packages``, in these alone: a recording that comes from
    strangers names modules, and to import one runs it.

    Args:
        functions: as they were recorded, those that may have to be made again and those among their variables.
        made: keys of those that are made again even where an import makes functions of their name; None: all.
    """

    def __init__(
        self,
        packages: Sequence[str] = (),
        main: str | None = None,
        functions: Sequence[Function] = (),
        made: Collection[tuple[str, str, str]] | None = None,
    ) -> None:
        self.packages, self.main = tuple(packages), main
        self._recorded = {function.key: function for function in functions}
        self._to_be_made = made

    def module(self, name: str) -> Any:
        """The module, imported; NotFound says why not."""
        if not is_module(name):
            raise NotFound(f"{name!r:.80} is no module")
        if name == MAIN:
            return self._main()
        top = name.partition(".")[0]
        if self.packages and top not in (*self.packages, *_ALWAYS):
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
        """Functions of this name that an import makes, the module's own attribute first."""
        from triton.runtime.jit import JITCallable

        found: list[Any] = []
        at = self.module(module)
        if not is_qualname(qualname):
            raise NotFound(f"{qualname!r:.80} is no function's name")
        for part in qualname.split("."):
            at = getattr(at, part, None)
        while at is not None and not isinstance(at, JITCallable):
            at = getattr(at, "fn", None)  # under @triton.autotune and @triton.heuristics
        if at is not None:
            found.append(at)
        return found + [fn for fn in _made[_name_here(module), qualname] if fn not in found]

    def find(self, module: str, qualname: str, recorded: str) -> tuple[Any, bool]:
        """The function, and whether it is the recorded one by its key."""
        known = self._recorded.get((module, qualname, recorded))
        found = self.candidates(module, qualname)
        for fn in found:
            if _is(fn, recorded):
                return fn, True
        if known is not None and known.made is not None and (not found or self._is_to_be_made(known)):
            fn = self._make(known, known.made)
            return fn, _is(fn, recorded)
        if not found:
            raise NotFound(f"{module} has no @triton.jit function {qualname}")
        return found[0], False

    def _is_to_be_made(self, function: Function) -> bool:
        return self._to_be_made is None or function.key in self._to_be_made

    def _make(self, function: Function, made: Made | str) -> Any:
        """A function that is made inside another one, as recorded where its code and globals still are."""
        if isinstance(made, str):
            raise NotFound(f"is made when another function is called, and can't be made here: {made}")
        for fn in _again[function.key]:
            if _is(fn, function.cache_key):
                return fn
        values = {name: self._value(value) for name, value in made.variables}
        codes = [code for code in self._codes(function) if set(code.co_freevars) == values.keys()]
        if not codes:
            names = ", ".join(values) or "none"
            raise NotFound(
                f"its source is another: no function {function.qualname} has the variables {names}"
            )
        again = [self._of_code(function, made, code, values) for code in codes]
        _again[function.key] += again
        return next((fn for fn in again if _is(fn, function.cache_key)), again[0])

    def _codes(self, function: Function) -> list[CodeType]:
        """The code of all functions of this qualified name: of several, such as in an if, each."""
        module = self.module(function.module)
        loader: Any = getattr(module.__spec__, "loader", None)
        code = loader.get_code(module.__name__) if hasattr(loader, "get_code") else None
        if code is None:
            raise NotFound(f"the source of {function.module} is not there")
        found = [code]
        for name in function.qualname.split("."):
            if name != LOCAL:
                inner = [one for code in found for one in code.co_consts if isinstance(one, CodeType)]
                found = [one for one in inner if one.co_name == name]
        return found

    def _of_code(self, function: Function, made: Made, code: CodeType, values: dict[str, Any]) -> Any:
        from triton.experimental.gluon._runtime import GluonJITFunction
        from triton.runtime.jit import ConstexprFunction, JITFunction

        closure = tuple(CellType(values[name]) for name in code.co_freevars)
        outside = self.module(function.module).__dict__
        plain = FunctionType(code, outside, code.co_name, None, closure)
        plain.__qualname__ = function.qualname
        defaults = {name: self._value(value) for name, value in made.defaults}
        by_place = code.co_varnames[: code.co_argcount]
        plain.__defaults__ = tuple(defaults.pop(name) for name in by_place if name in defaults) or None
        plain.__kwdefaults__ = defaults or None
        plain.__annotations__ = dict(made.annotations)
        _making.append(True)
        try:
            if made.kind == _kind(ConstexprFunction):
                return ConstexprFunction(plain)
            kinds = {_kind(of): of for of in (JITFunction, GluonJITFunction)}
            if made.kind not in kinds:
                raise NotFound(f"{made.kind!r:.80} is no class of Triton's functions")
            return kinds[made.kind](plain, noinline=made.noinline)
        finally:
            _making.pop()

    def _value(self, data: Any) -> Any:
        """What ``closures.written`` wrote."""
        if isinstance(data, dict) and "module" in data:
            return self.module(str(data["module"]))
        if isinstance(data, dict) and "builtin" in data:
            module, qualname = map(str, data["builtin"])
            at = self.module(module) if module.startswith("triton.") else None
            for part in qualname.split("."):
                at = getattr(at, part, None)
            if not is_builtin(at) and not isinstance(at, type):
                raise NotFound(f"{module} has no {qualname}")
            return at
        return decode(data, lambda named: self.find(*named)[0])

    def find_class(self, module: str, qualname: str) -> Any:
        """A class that a constant is of."""
        at = self.module(module)
        for part in qualname.split("."):
            at = getattr(at, part, None)
        return at


def _name_here(module: str) -> str:
    return STAND_IN_MAIN if module == MAIN else module


def _kind(of: type) -> str:
    return f"{of.__module__}.{of.__qualname__}"


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
        fn.hash, fn.used_global_vals = None, {}


def _is(fn: Any, recorded: str) -> bool:
    """Whether a function has the recorded key. Triton 3.6 puts into a function's hash the globals of those functions
    that it calls which were hashed before it; so it is also asked with none of them hashed, and with all."""
    if key(fn) == recorded:
        return True
    _forget_keys()
    if key(fn) == recorded:
        return True
    fn.hash = None
    return key(fn) == recorded


def differs(function: Function, fn: Any) -> str:
    """Why ``fn`` is not the recorded function, for people."""
    _ = key(fn)  # reads the globals
    now = {name: _data(value) for (name, _), (value, _) in fn.used_global_vals.items()}
    other = [name for _, name, value in function.reads if name in now and now[name] != value]
    if other:
        return f"{BY_GLOBALS}: {', '.join(sorted(set(other)))}"
    if fn.fn.__code__.co_firstlineno != function.line:
        return f"its source is another: it begins at line {fn.fn.__code__.co_firstlineno}, recorded was {function.line}"
    return "its source, or that of a function that it calls, is not what was recorded"
