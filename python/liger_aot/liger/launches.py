"""Kernels of Liger's that Triton would compile when they are launched: the first one is reported."""

from __future__ import annotations

import os
import warnings
from typing import Any

from liger_aot.errors import ArgumentError, LeftAlone, PatchError

VARIABLE = "LIGER_AOT_JIT"
ALLOWED = ("warn", "error")

_run: list[tuple[Any, Any, Any]] = []  # Triton's class, its own method and ours, while that is in its place
_said = False


def watch_launches() -> None:
    """From now on the first launch of a kernel of Liger's warns or, with ``LIGER_AOT_JIT=error``, each one raises."""
    if _run:
        return
    from triton.runtime.jit import JITFunction

    plain = JITFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (getattr(self, "__module__", None) or "").startswith("liger_kernel"):
            _report(f"{self.__module__}.{self.__name__}")
        return plain(self, *args, **kwargs)

    JITFunction.run = run
    _run.append((JITFunction, plain, run))


def release_launches() -> None:
    global _said
    for cls, plain, ours in _run:
        if cls.run is ours:
            cls.run = plain
    _run.clear()
    _said = False


def _report(kernel: str) -> None:
    global _said
    how = os.environ.get(VARIABLE) or "warn"
    if how not in ALLOWED:
        raise ArgumentError(f"{VARIABLE} must be {' or '.join(ALLOWED)}, got {how!r}")
    if how == "error":
        raise PatchError(
            f"liger_aot.liger: Triton would compile {kernel}, which no op of liger-aot stands for: {VARIABLE}=error "
            "forbids it"
        )
    if not _said:
        _said = True
        warnings.warn(
            f"liger_aot.liger: Triton compiles {kernel}: no op of liger-aot stands for it. This is said once; "
            f"liger_aot.liger.status() lists what is compiled, {VARIABLE}=error makes it an error",
            LeftAlone,
            stacklevel=4,
        )
