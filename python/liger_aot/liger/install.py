"""Replaces Liger's functions wherever liger_kernel looks them up, and restores them."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any

import torch

from liger_aot.errors import LeftAlone, PatchError
from liger_aot.liger import chunked, fallback
from liger_aot.liger.dispatching import DISPATCHED, asked_for
from liger_aot.liger.functions import REPLACED
from liger_aot.liger.launches import release_launches, watch_launches

OPS = "liger_kernel.ops"
CHUNKED = "liger_kernel.chunked_loss"
REGISTRY = f"{OPS}.backends.registry"
# Modules of Liger's that hold functions that we replace.
NOT_IMPORTED_BY_OPS = (f"{OPS}.experimental.mm_int8int2",)
NAME = "liger_aot"
OTHER_LANGUAGES = re.compile(r"liger_kernel\.ops\.(backends\._(?!triton)|cutile|cutedsl|cute)")
_lock = RLock()
_originals = fallback.theirs
_dispatchers: list[tuple[Any, Any]] = []  # Liger's dispatcher and ours, while that is in its place


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
        for name in NOT_IMPORTED_BY_OPS:
            if importlib.util.find_spec(name) is not None:
                importlib.import_module(name)
        with suppress(ImportError):  # then its names are missing
            importlib.import_module(f"{CHUNKED}.functional")
        for module in _modules():
            prefix = chunked.PREFIX if module.__name__.startswith(CHUNKED) else ""
            _originals.update(
                (name, value)
                for name, value in ((f"{prefix}{name}", value) for name, value in vars(module).items())
                if name in REPLACED and value is not REPLACED[name][0] and _is_own(value)
            )
        missing = sorted(n for n in set(REPLACED) - set(_originals) if not n.startswith("_"))
        if missing:
            warnings.warn(
                f"liger_aot.liger: this liger_kernel has no {', '.join(missing)}: nothing is replaced",
                LeftAlone,
                stacklevel=3,
            )
        _replace({id(value): REPLACED[name][0] for name, value in _originals.items()})
        _register_with_dispatcher()
        _tell_compiler()
        watch_launches()


def uninstall() -> None:
    """Restore Liger's own functions, also in modules that imported the replacements since."""
    with _lock:
        ours = {id(REPLACED[name][0]): value for name, value in _originals.items()}
        _replace(ours | {id(own): plain for plain, own in _dispatchers})
        _dispatchers.clear()
        release_launches()
        fallback.unserved.clear()
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
    owner = getattr(value, "__self__", value)  # of a class's ``apply`` the class
    where = getattr(owner, "__module__", None) or ""
    return bool(where.startswith((OPS, CHUNKED))) and not OTHER_LANGUAGES.match(where)


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
        dispatcher = importlib.import_module("liger_kernel.backends.dispatch")
        direct: dict[str, Any] = {}
        for op in DISPATCHED:
            module = importlib.import_module(f"{OPS}.backends._triton.{op}")
            direct[op] = getattr(module, f"{op}_triton")
            registry.register_impl(op, impl_name=NAME, preference_rank=0)(direct[op])
        plain = dispatcher.dispatch
    except (ImportError, AttributeError) as error:
        warnings.warn(
            f"liger_aot.liger: liger_kernel.backends is not as expected ({error}): calls through it may "
            "use other kernels",
            LeftAlone,
            stacklevel=4,
        )
        return
    if not _dispatchers:
        _dispatchers.append((plain, _dispatcher(plain, direct)))
        _replace({id(plain): _dispatchers[0][1]})
    else:
        _replace({id(own_plain): own for own_plain, own in _dispatchers})


def _dispatcher(plain: Any, direct: dict[str, Any]) -> Any:
    """Liger's ``dispatch`` is hidden from torch.compile and breaks its graphs. This one calls ops of ours at once,
    unless another implementation was asked for."""

    def dispatch(
        op_name: str, *args: Any, impl: str | None = None, backend: str | None = None, **kwargs: Any
    ) -> Any:
        if op_name in direct and impl is None and backend is None and ours_is_wanted(op_name):
            return direct[op_name](*args, **kwargs)
        return plain(op_name, *args, impl=impl, backend=backend, **kwargs)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def ours_is_wanted(op_name: str) -> bool:
        return asked_for(op_name) in ("", NAME)

    return dispatch


def _tell_compiler() -> None:
    """Transformers says once that Liger's models read a deprecated setting, which would break torch.compile's graphs:
    compiled code does not say it."""
    if importlib.util.find_spec("transformers") is None:
        return
    try:
        importlib.import_module("transformers.utils.logging")
        import torch._dynamo.config as config
    except ImportError:
        return
    once = getattr(logging.Logger, "warning_once", None)
    if once is not None:
        config.ignore_logger_methods.add(once)
