"""Liger's Triton kernels, compiled ahead of time: no Triton, no compiler and no warm-up where they run.

import liger_aot
rmsnorm = liger_aot.load("rmsnorm")
y = rmsnorm(x, weight, eps=1e-6)

Gradients can be differentiated again: with ``create_graph=True`` an op's backward is its plain-torch reference's, step
by step, at plain torch's speed and memory. So is all of an op in forward-mode AD, under torch.func's transforms and in
torch.jit.trace; but losses over several ranks, and gradients in place, raise there.
"""

from typing import TYPE_CHECKING

from liger_aot import ops
from liger_aot._version import __version__
from liger_aot.errors import LigerAOTError
from liger_aot.ops.registry import load

if TYPE_CHECKING:
    from liger_aot import nn
    from liger_aot.explanation import explain
    from liger_aot.models import apply, patch, register_attention, register_experts, restore

__all__ = [
    "LigerAOTError", "__version__", "apply", "archs", "explain", "load", "nn", "ops", "patch",
    "register_attention", "register_experts", "restore",
]  # fmt: skip


def archs() -> tuple[str, ...]:
    """Architectures of the installed packs."""
    from liger_aot.runtime.packs import installed_packs

    return tuple(pack.arch for pack in installed_packs())


_OF_MODELS = ("apply", "patch", "register_attention", "register_experts", "restore")


def __getattr__(name: str) -> object:  # deferred: a serving process does not need them
    if name == "explain":
        from liger_aot.explanation import explain

        return explain
    if name in ("nn", "models"):
        from importlib import import_module

        return import_module(f"liger_aot.{name}")
    if name in _OF_MODELS:
        from liger_aot import models

        return getattr(models, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
