"""Any project's ``@triton.jit`` kernels from a pack: recorded once, built for each architecture with no GPU, run with
nothing to compile. docs/triton-packs.md shows the way.

Importing this imports neither Triton nor torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from liger_aot.triton.declared import points
    from liger_aot.triton.running import status, stop, use

__all__ = ["points", "status", "stop", "use"]

_WHERE = {"points": "declared", "status": "running", "stop": "running", "use": "running"}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
