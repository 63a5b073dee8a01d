"""Which of Liger's functions run on what."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from liger_aot.liger import chunked, fallback
from liger_aot.liger.dispatching import DISPATCHED, asked_for
from liger_aot.liger.functions import COVERED, REPLACED
from liger_aot.liger.mlp import TORCH

OPS = "liger_kernel.ops"
CHUNKED = "liger_kernel.chunked_loss"
PUBLIC = re.compile(r"[A-Za-z]\w*")
KERNELS = ("JITFunction", "Autotuner", "Heuristics")


@dataclass(frozen=True)
class Status:
    """Which of Liger's functions run on what. Names are those of liger_kernel.ops, or with their submodule of it.

    Attributes:
        version: of liger_kernel.
        ours: name -> the op of ours behind it, or "torch" where that alone is.
        jit: names that still launch kernels which Triton compiles at their first call.
        inductor: names that torch.compile compiles at their first call.
        others: names that launch no kernel of Triton's.
        languages: ops of Liger's dispatcher for which a variable of Liger's or ``set_impl`` asks for another
            implementation, such as CuTe or cuTile -> its name.
        elsewhere: module.name of other packages' names that hold Liger's own function, imported before ours was in its
            place: import liger_aot.liger earlier, or import them anew.
        without_pack: GPUs that no installed pack serves: on these all of it is Liger's own.
    """

    version: str
    ours: dict[str, str]
    jit: tuple[str, ...]
    inductor: tuple[str, ...]
    others: tuple[str, ...]
    languages: dict[str, str]
    elsewhere: tuple[str, ...]
    without_pack: tuple[str, ...]

    def __str__(self) -> str:
        rows = [(name, op if op == TORCH else f"liger-aot {op}") for name, op in self.ours.items()]
        rows += [(name, "Triton JIT") for name in self.jit]
        rows += [(name, "torch.compile") for name in self.inductor]
        rows += [(name, "no Triton kernel") for name in self.others]
        rows += [(f"dispatch({op!r})", impl) for op, impl in self.languages.items()]
        rows += [(name, "Liger's own, imported before") for name in self.elsewhere]
        rows += [(name, "no pack: all is Liger's own") for name in self.without_pack]
        width = max((len(name) for name, _ in rows), default=0)
        return "\n".join([f"liger_kernel {self.version}", *(f"  {name:{width}}  {on}" for name, on in rows)])


def status() -> Status:
    """What ``import liger_aot.liger`` did: see ``Status``; printed, a table."""
    from importlib.metadata import version

    ops = importlib.import_module(OPS)
    ours: dict[str, str] = {}
    found: dict[bool, list[str]] = {True: [], False: []}
    stands = {id(function): op for function, op in REPLACED.values()}
    for name, value in _functions(ops):
        if id(value) in stands:
            ours[name] = stands[id(value)]
        elif (value.__module__ or "").startswith(OPS):
            if op := _chosen_from(value, stands):
                ours[name] = op
                continue
            launches = _launches(value, set())
            if launches or "." not in name:  # helpers without a kernel are of no interest
                found[launches].append(name)
    ours.update(
        (f"{chunked.PREFIX}{name}", stands[id(value)]) for name, value in _chunked() if id(value) in stands
    )
    return Status(
        version("liger_kernel"),
        ours,
        tuple(found[True]),
        tuple(
            name
            for name, value in sorted(vars(importlib.import_module(CHUNKED)).items())
            if isinstance(value, type) and f"{chunked.PREFIX}{name.replace('Loss', 'Function')}" not in ours
        ),
        tuple(found[False]),
        _languages(),
        tuple(_elsewhere()),
        tuple(f"cuda:{index}" for index in sorted(fallback.unserved)),
    )


def _chunked() -> Iterator[tuple[str, Any]]:
    """What the modules of Liger's chunked losses hold."""
    importlib.import_module(f"{CHUNKED}.functional")
    for name, module in sorted(sys.modules.items()):
        if name.startswith(CHUNKED):
            yield from sorted(vars(module).items())


def _functions(ops: ModuleType) -> Iterator[tuple[str, Any]]:
    """The public functions of liger_kernel.ops, then those of its modules that it does not export."""
    seen: set[int] = set()
    for name, value in sorted(vars(ops).items()):
        if re.fullmatch(r"\w+Function|\w+_(forward|backward)", name):
            seen.add(id(value))
            yield name, value
    for module in _modules(ops):
        for name, value in sorted(vars(module).items()):
            if id(value) not in seen and PUBLIC.fullmatch(name) and _defined_in(module, name, value):
                seen.add(id(value))
                yield f"{module.__name__.removeprefix(OPS + '.')}.{name}", value


def _modules(ops: ModuleType) -> Iterator[ModuleType]:
    """Those of Triton, also where nothing has imported them yet."""
    for package in (ops, importlib.import_module(f"{OPS}.experimental")):
        for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if not info.ispkg and not info.name.rpartition(".")[2].startswith("_"):
                try:
                    yield importlib.import_module(info.name)
                except ImportError:
                    continue  # it needs what isn't installed


def _defined_in(module: ModuleType, name: str, value: Any) -> bool:
    """Whether a function or an autograd function is the module's own, or stands for one of its own."""
    if isinstance(value, type):
        mine = value.__name__.endswith("Function")
    else:
        mine = isinstance(value, FunctionType) and name == value.__name__
    return mine and (getattr(value, "__module__", "") == module.__name__ or name in COVERED)


def _launches(function: Any, seen: set[int]) -> bool:
    """Whether a function, or one that it calls by name, launches a kernel of Triton's."""
    if type(function).__name__ in KERNELS:
        return True
    if id(function) in seen:
        return False
    seen.add(id(function))
    if isinstance(function, type):
        if not (function.__module__ or "").startswith("liger_kernel"):
            return False  # one of ours among them
        return any(_launches(getattr(function, way, None), seen) for way in ("forward", "backward"))
    function = inspect.unwrap(function) if callable(function) else function
    if not isinstance(function, FunctionType) or not function.__module__.startswith("liger_kernel"):
        return False
    around, code = function.__globals__, function.__code__
    inner = [c for c in code.co_consts if inspect.iscode(c)]  # functions within it
    names = {*code.co_names, *(name for c in inner for name in c.co_names)}
    if "dispatch" in names and not set(DISPATCHED) & {c for c in code.co_consts if isinstance(c, str)}:
        return True  # Liger's dispatcher, for an op that none of ours stands for
    return any(_launches(around[name], seen) for name in names if name in around)


def _chosen_from(value: Any, stands: dict[int, str]) -> str:
    """The op behind a class of Liger's that is no autograd function but calls one of several, ours among them."""
    if not isinstance(value, type) or hasattr(value, "forward"):
        return ""
    queue: list[Any] = [getattr(value, "apply", None)]
    seen: set[int] = set()
    while queue:
        function = queue.pop()
        if id(function) in stands:
            return stands[id(function)]
        if not isinstance(function, FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        if function.__module__.startswith("liger_kernel"):
            around = function.__globals__
            queue += [around[name] for name in function.__code__.co_names if name in around]
    return ""


def _languages() -> dict[str, str]:
    return {op: asked for op in DISPATCHED if (asked := asked_for(op)) not in ("", "liger_aot")}


def _elsewhere() -> Iterator[str]:
    own = {id(value) for value in fallback.theirs.values()}
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] in ("liger_kernel", "liger_aot") or not isinstance(module, ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            if id(value) in own:
                yield f"{name}.{attribute}"
