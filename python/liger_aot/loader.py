"""``load(name)``: an op by its name, one object a process."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from liger_aot.errors import UnknownOp
from liger_aot.ops import families, module


def archs() -> tuple[str, ...]:
    """Architectures of the installed packs."""
    from liger_aot.runtime.packs import installed_packs

    return tuple(pack.arch for pack in installed_packs())


@lru_cache(maxsize=256)
def load(name: str) -> Any:
    """The op ``name``: a callable with ``preload``, documented in ``help(liger_aot.load(name))``.

    Nothing is compiled and no file is written. Binaries load on first use on each device; ``preload`` loads them all.
    Loading itself needs no GPU: CPU tensors take the op's plain-torch reference.

    Raises:
        UnknownOp: there is no such op; the message lists those there are.
    """
    if name not in families():
        raise UnknownOp(f"no op {name!r}: there are {', '.join(families())}")
    return module(name).OP()
