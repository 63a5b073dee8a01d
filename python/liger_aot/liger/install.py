"""Puts our functions where Liger looks its own up, and takes them back."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any

from liger_aot.errors import LeftAlone, PatchError
from liger_aot.liger.functions import COVERED
from liger_aot.liger.losses import LigerVocabParallelCEFunction

OPS = "liger_kernel.ops"
REGISTRY = f"{OPS}.backends.registry"
NAME = "liger_aot"
OTHER_LANGUAGES = re.compile(r"liger_kernel\.ops\.(backends\._(?!triton)|cutile|cutedsl|cute)")
# Functions of Liger's dispatcher that call a class of ours by its name in their module.
DISPATCHED = (
    "cross_entropy", "fused_add_rms_norm", "fused_linear_cross_entropy", "fused_linear_jsd", "geglu", "jsd", "kl_div",
    "layer_norm", "rms_norm", "rope", "softmax", "swiglu",
)  # fmt: skip

_lock = RLock()
_theirs: dict[str, Any] = {}  # Liger's own, by name, while ours are in their place


def install() -> None:
    """Run liger_kernel on our binaries, whether it is imported already or not. Calling it again takes in what was
    imported since.

    Raises:
        PatchError: liger_kernel isn't installed or can't be imported.

    Warns:
        LeftAlone: this liger_kernel lacks names that there are ops for.
    """
    with _lock:
        if OPS not in sys.modules:
            _seed_registry()
        try:
            importlib.import_module(OPS)
        except ImportError as error:
            raise PatchError(f"liger_aot.liger: {OPS} can't be imported: {error}") from error
        for module in _modules():
            _theirs.update(
                (name, value)
                for name, value in vars(module).items()
                if name in COVERED and value is not COVERED[name][0] and _is_own(value)
            )
        if missing := sorted(set(COVERED) - set(_theirs)):
            warnings.warn(
                f"liger_aot.liger: this liger_kernel has no {', '.join(missing)}: nothing stands for them",
                LeftAlone,
                stacklevel=3,
            )
        LigerVocabParallelCEFunction.plain = _theirs.get("LigerVocabParallelCEFunction")
        _exchange({id(value): COVERED[name][0] for name, value in _theirs.items()})
        _tell_dispatcher()


def uninstall() -> None:
    """Liger's own functions again, also where ours were imported since."""
    with _lock:
        _exchange({id(COVERED[name][0]): value for name, value in _theirs.items()})
        registry = sys.modules.get("liger_kernel.backends.registry")
        for op in DISPATCHED:
            if registry is not None and registry._REGISTRY.pop((op, NAME), None) is not None:
                registry._invalidate_available_cache()
        _theirs.clear()


def _exchange(by: dict[int, Any]) -> None:
    """Wherever something of an id in ``by`` has a name in liger_kernel, what stands for it."""
    for module in _modules():
        for name, value in list(vars(module).items()):
            if id(value) in by:
                setattr(module, name, by[id(value)])


def _modules() -> Iterator[ModuleType]:
    for name, module in list(sys.modules.items()):
        if (
            name.partition(".")[0] == "liger_kernel"
            and module is not None
            and not OTHER_LANGUAGES.match(name)
        ):
            yield module


def _is_own(value: Any) -> bool:
    where = getattr(value, "__module__", None) or ""
    return bool(where.startswith(OPS)) and not OTHER_LANGUAGES.match(where)


def _seed_registry() -> None:
    """Tell Liger's registry of us before liger_kernel.ops reads it: LIGER_KERNEL_IMPL=liger_aot names us, and on a GPU
    we are its default."""
    package = importlib.util.find_spec("liger_kernel")
    if package is None or not package.submodule_search_locations:
        raise PatchError("liger_aot.liger: liger_kernel isn't installed: pip install liger-kernel")
    path = Path(next(iter(package.submodule_search_locations)), "ops", "backends", "registry.py")
    spec = importlib.util.spec_from_file_location(REGISTRY, path)
    if not path.exists() or spec is None or spec.loader is None:
        return  # without a registry the functions are replaced all the same
    registry = importlib.util.module_from_spec(spec)
    sys.modules[REGISTRY] = registry
    spec.loader.exec_module(registry)
    registry.register_impl(
        registry.ImplInfo(
            name=NAME,
            devices=("cuda", "cpu"),
            default_devices=("cuda",),
            module_path="liger_aot.liger.functions",
        )
    )


def _tell_dispatcher() -> None:
    """``liger_kernel.backends.dispatch`` prefers languages that compile at the first call: we come before them."""
    try:
        registry = importlib.import_module("liger_kernel.backends.registry")
        for op in DISPATCHED:
            module = importlib.import_module(f"{OPS}.backends._triton.{op}")
            function = getattr(module, f"{op}_triton")
            registry.register_impl(op, impl_name=NAME, preference_rank=0)(function)
    except (ImportError, AttributeError) as error:
        warnings.warn(
            f"liger_aot.liger: liger_kernel.backends is not as it is known ({error}): what is called through it may "
            "take other kernels",
            LeftAlone,
            stacklevel=4,
        )


@dataclass(frozen=True)
class Status:
    """Which of Liger's functions run on what.

    Attributes:
        version: of liger_kernel.
        ours: Liger's name -> the op of ours behind it.
        jit: names that still launch kernels compiled at their first call.
        others: names whose module has no kernel of Triton's.
    """

    version: str
    ours: dict[str, str]
    jit: tuple[str, ...]
    others: tuple[str, ...]

    def __str__(self) -> str:
        width = max(map(len, (*self.ours, *self.jit, *self.others)), default=0)
        lines = [f"liger_kernel {self.version}"]
        lines += [f"  {name:{width}}  liger-aot {op}" for name, op in self.ours.items()]
        lines += [f"  {name:{width}}  Triton JIT" for name in self.jit]
        lines += [f"  {name:{width}}  no Triton kernel" for name in self.others]
        return "\n".join(lines)


def status() -> Status:
    """What ``import liger_aot.liger`` did: see ``Status``; printed, a table."""
    from importlib.metadata import version

    ops = importlib.import_module(OPS)
    ours = {name: op for name, (function, op) in COVERED.items() if getattr(ops, name, None) is function}
    others: dict[bool, list[str]] = {True: [], False: []}
    for name, value in sorted(vars(ops).items()):
        if name not in ours and re.fullmatch(r"\w+Function|\w+_(forward|backward)", name) and _is_own(value):
            others[_launches(sys.modules[value.__module__])].append(name)
    return Status(version("liger_kernel"), ours, tuple(others[True]), tuple(others[False]))


def _launches(module: ModuleType) -> bool:
    """Whether a module has kernels of Triton's, its own or others'."""
    names = {type(value).__name__ for value in vars(module).values()}
    return bool(names & {"JITFunction", "Autotuner", "Heuristics"})
