"""Replaces Liger's functions wherever liger_kernel looks them up, and restores them."""

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
# Functions of Liger's dispatcher, each of which looks up in its module a class that is replaced.
DISPATCHED = (
    "cross_entropy", "fused_add_rms_norm", "fused_linear_cross_entropy", "fused_linear_jsd", "geglu", "jsd", "kl_div",
    "layer_norm", "rms_norm", "rope", "softmax", "swiglu",
)  # fmt: skip

_lock = RLock()
_originals: dict[str, Any] = {}  # Liger's own functions by name, while they are replaced


def install() -> None:
    """Run liger_kernel on precompiled binaries, whether it is imported already or not. A second call also replaces
    functions in modules that were imported since.

    Raises:
        PatchError: liger_kernel isn't installed or can't be imported.

    Warns:
        LeftAlone: this liger_kernel lacks functions that there are ops for.
    """
    with _lock:
        if OPS not in sys.modules:
            _seed_registry()
        try:
            importlib.import_module(OPS)
        except ImportError as error:
            raise PatchError(f"liger_aot.liger: {OPS} can't be imported: {error}") from error
        for module in _modules():
            _originals.update(
                (name, value)
                for name, value in vars(module).items()
                if name in COVERED and value is not COVERED[name][0] and _is_own(value)
            )
        if missing := sorted(set(COVERED) - set(_originals)):
            warnings.warn(
                f"liger_aot.liger: this liger_kernel has no {', '.join(missing)}: nothing is replaced",
                LeftAlone,
                stacklevel=3,
            )
        LigerVocabParallelCEFunction.original = _originals.get("LigerVocabParallelCEFunction")
        _replace({id(value): COVERED[name][0] for name, value in _originals.items()})
        _register_with_dispatcher()


def uninstall() -> None:
    """Restore Liger's own functions, also in modules that imported the replacements since."""
    with _lock:
        _replace({id(COVERED[name][0]): value for name, value in _originals.items()})
        registry = sys.modules.get("liger_kernel.backends.registry")
        for op in DISPATCHED:
            if registry is not None and registry._REGISTRY.pop((op, NAME), None) is not None:
                registry._invalidate_available_cache()
        _originals.clear()


def _replace(by: dict[int, Any]) -> None:
    """Replace every object of liger_kernel's modules whose id is in ``by``."""
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
    """Register with Liger before liger_kernel.ops reads its registry: LIGER_KERNEL_IMPL=liger_aot chooses liger-aot,
    and on a GPU it is the default."""
    package = importlib.util.find_spec("liger_kernel")
    if package is None or not package.submodule_search_locations:
        raise PatchError("liger_aot.liger: liger_kernel isn't installed: pip install liger-kernel")
    path = Path(next(iter(package.submodule_search_locations)), "ops", "backends", "registry.py")
    spec = importlib.util.spec_from_file_location(REGISTRY, path)
    if not path.exists() or spec is None or spec.loader is None:
        return  # there is no registry; the functions are replaced anyway
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


def _register_with_dispatcher() -> None:
    """Come before the languages that compile at the first call, which ``liger_kernel.backends.dispatch`` prefers."""
    try:
        registry = importlib.import_module("liger_kernel.backends.registry")
        for op in DISPATCHED:
            module = importlib.import_module(f"{OPS}.backends._triton.{op}")
            function = getattr(module, f"{op}_triton")
            registry.register_impl(op, impl_name=NAME, preference_rank=0)(function)
    except (ImportError, AttributeError) as error:
        warnings.warn(
            f"liger_aot.liger: liger_kernel.backends is not as expected ({error}): calls through it may "
            "use other kernels",
            LeftAlone,
            stacklevel=4,
        )


@dataclass(frozen=True)
class Status:
    """What Liger's functions run on.

    Attributes:
        version: of liger_kernel.
        ours: Liger's name -> the op that replaces it.
        jit: names that still launch kernels compiled at their first call.
        others: names whose module has no Triton kernel.
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
    """What ``import liger_aot.liger`` replaced: prints as a table."""
    from importlib.metadata import version

    ops = importlib.import_module(OPS)
    ours = {name: op for name, (function, op) in COVERED.items() if getattr(ops, name, None) is function}
    others: dict[bool, list[str]] = {True: [], False: []}
    for name, value in sorted(vars(ops).items()):
        if name not in ours and re.fullmatch(r"\w+Function|\w+_(forward|backward)", name) and _is_own(value):
            others[_launches(sys.modules[value.__module__])].append(name)
    return Status(version("liger_kernel"), ours, tuple(others[True]), tuple(others[False]))


def _launches(module: ModuleType) -> bool:
    """Whether a module has Triton kernels, its own or imported ones."""
    names = {type(value).__name__ for value in vars(module).values()}
    return bool(names & {"JITFunction", "Autotuner", "Heuristics"})
