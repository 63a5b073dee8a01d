"""What the environment asks of liger-aot in programs that have no line for it, their child processes included:

``LIGER_AOT_LIGER=1`` (or Liger's own ``LIGER_KERNEL_IMPL=liger_aot``) runs Liger-Kernel on liger-aot's binaries, so
that trainers that take ``--use_liger_kernel`` use them. ``LIGER_AOT_TRITON=error|warn|compile`` runs Triton kernels
from the installed packs. ``LIGER_AOT_RECORD=FOLDER`` notes the Triton kernels that a program launches: ``liger-aot
record`` sets it.

``liger_aot.pth`` in site-packages imports this where one of them is set. Nothing else is imported before the package
that it is about.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from threading import RLock
from types import ModuleType
from typing import Any

VARIABLE = "LIGER_AOT_LIGER"
PACKAGE = "liger_kernel"
SAID = "quiet"  # the variable's value for child processes, once a process has said what it does
ON = ("1", SAID)
OFF = ("", "0")
TRITON = "LIGER_AOT_TRITON"
MISSING = ("error", "warn", "compile")  # its values: what becomes of a launch that no pack has


class _Finder(MetaPathFinder):
    """Finds a package as the others do, and calls ``after`` once it has been imported."""

    _within = False

    def __init__(self, package: str, after: Callable[[], None]) -> None:
        self.package, self.after = package, after

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.package or self._within:
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
        self._finder.after()


def watch(package: str, after: Callable[[], None]) -> None:
    """Call ``after`` once ``package`` has been imported; now, where it has."""
    if package in sys.modules:
        after()
    elif not any(isinstance(f, _Finder) and (f.package, f.after) == (package, after) for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder(package, after))


def _run_liger() -> None:
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


def _record_kernels() -> None:
    from liger_aot.triton.recorder import start

    start()


def _stand_in_gpu() -> None:
    from liger_aot.triton.stand_ins import start

    start()


class _PendingDriver:
    """Triton's driver until something is asked of it: only then are torch and the packs looked at."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _use_packs()
        from triton.runtime import driver

        return getattr(driver.active, name)


_using = RLock()


def _use_packs() -> None:
    """All installed packs, once. Where that fails it is tried again, and fails, at the next launch."""
    from triton.runtime import driver

    with _using:
        pending = driver._active
        if not isinstance(pending, _PendingDriver):
            return
        driver._active = None  # what importing asks of it, Triton's own answers
        try:
            from liger_aot.triton.running import use

            use(missing=os.environ[TRITON])
        except BaseException:
            driver._active = pending
            raise


def _run_triton() -> None:
    """Triton has been imported. A tuner looks for its key before it asks the driver, so that it asks for packs, too."""
    from triton.runtime import driver
    from triton.runtime.autotuner import Autotuner

    plain = Autotuner.run

    @wraps(plain)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        _use_packs()
        from liger_aot.triton.running import fill

        fill(self)
        return plain(self, *args, **kwargs)

    run._liger_aot_fills = True
    Autotuner.run = run
    driver.set_active(_PendingDriver())


def start() -> None:
    """Watch for the packages that the environment asks about."""
    value = os.environ.get(VARIABLE, "")
    if value not in ON + OFF:
        print(f"liger_aot: {VARIABLE} must be 1 or 0, got {value!r}: ignored", file=sys.stderr)
    named = os.environ.get("LIGER_KERNEL_IMPL", "").strip().lower() == "liger_aot"
    if (value in ON or named) and PACKAGE not in sys.modules:
        watch(PACKAGE, _run_liger)
    triton = os.environ.get(TRITON, "")
    if triton in MISSING:
        watch("triton", _run_triton)
    elif triton not in OFF:
        allowed = ", ".join(MISSING)
        print(f"liger_aot: {TRITON} must be {allowed} or 0, got {triton!r}: ignored", file=sys.stderr)
    if os.environ.get("LIGER_AOT_RECORD"):
        watch("triton", _record_kernels)
        if os.environ.get("LIGER_AOT_RECORD_TARGET"):  # torch answers for a GPU that is not there
            watch("torch", _stand_in_gpu)


start()
