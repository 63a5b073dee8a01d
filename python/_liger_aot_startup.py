"""Runs Liger-Kernel on liger-aot in programs that have no line for ``import liger_aot.liger``: ``LIGER_AOT_LIGER=1`` in
the environment. So trainers that take ``--use_liger_kernel`` use the binaries, in child processes too.

``liger_aot.pth`` in site-packages imports this where that is set, or where Liger's own ``LIGER_KERNEL_IMPL`` names us.
Nothing else is imported before liger_kernel is.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

VARIABLE = "LIGER_AOT_LIGER"
PACKAGE = "liger_kernel"
SAID = "quiet"  # the variable's value for child processes, once a process has said what it does
ON = ("1", SAID)
OFF = ("", "0")


class _Finder(MetaPathFinder):
    """Finds liger_kernel as the others do, and has liger_aot.liger imported after it."""

    _within = False

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != PACKAGE or self._within:
            return None
        self._within = True
        try:
            spec = find_spec(name)
        finally:
            self._within = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec


class _Loader(Loader):
    def __init__(self, plain: Loader, finder: _Finder) -> None:
        self._plain, self._finder = plain, finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._plain.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._plain
        self._plain.exec_module(module)
        import liger_aot.liger  # noqa: F401

        _say()


def _say() -> None:
    """Once: not in child processes, nor by each of a job's ranks."""
    if os.environ.get(VARIABLE) == SAID:
        return
    if os.environ.get(VARIABLE) in ON:
        os.environ[VARIABLE] = SAID
    if os.environ.get("RANK", "0") == "0" and os.environ.get("LOCAL_RANK", "0") == "0":
        from importlib.metadata import version

        print(
            f"liger_aot: liger_kernel {version('liger_kernel')} runs on liger-aot's binaries; "
            "liger_aot.liger.status() says what of it",
            file=sys.stderr,
        )


def start() -> None:
    """Watch for liger_kernel, if the environment asks for it."""
    value = os.environ.get(VARIABLE, "")
    if value not in ON + OFF:
        print(f"liger_aot: {VARIABLE} must be 1 or 0, got {value!r}: ignored", file=sys.stderr)
    if value not in ON and os.environ.get("LIGER_KERNEL_IMPL", "").strip().lower() != "liger_aot":
        return
    if PACKAGE not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


start()
