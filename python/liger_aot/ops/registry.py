"""Which ops there are, and ``load(name)``: an op by its name, one object a process."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from os import scandir
from pathlib import Path
from types import ModuleType
from typing import Any

from liger_aot.errors import UnknownOp


@lru_cache(maxsize=1)
def families() -> dict[str, str]:
    """The family of each op, in the order of the ops' names: the folder here that its module lies in."""
    folders = [f for f in scandir(Path(__file__).parent) if f.is_dir() and not f.name.startswith("_")]
    found = {
        file.name[:-3]: folder.name
        for folder in folders
        for file in scandir(folder.path)
        if file.name.endswith(".py") and not file.name.startswith("_")
    }
    return dict(sorted(found.items()))


def names() -> tuple[str, ...]:
    """Names of the ops, sorted."""
    return tuple(families())


def module(name: str) -> ModuleType:
    """The module of the op ``name``."""
    return import_module(f"liger_aot.ops.{families()[name]}.{name}")


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
