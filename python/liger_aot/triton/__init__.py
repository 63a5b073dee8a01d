"""Any project's ``@triton.jit`` kernels from a pack: recorded once, built for each architecture with no GPU, run with
nothing to compile. docs/triton-packs.md shows the way.

Importing this imports neither Triton nor torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from liger_aot.triton.declared import points

__all__ = ["points"]

_WHERE = {"points": "declared"}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
