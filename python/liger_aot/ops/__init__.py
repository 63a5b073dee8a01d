"""One module an op, in folders by family: checks, outputs, grid, autograd, and its plain-torch reference. Each
names its class ``OP``. What the ops of a family share lies beside them, in modules whose names begin with an
underscore.

The package itself can be called: ``liger_aot.ops()`` lists the names that ``liger_aot.load`` takes.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib import import_module
from os import scandir
from types import ModuleType


@lru_cache(maxsize=1)
def families() -> dict[str, str]:
    """The family of each op, in the order of the ops' names."""
    folders = [f for f in scandir(__path__[0]) if f.is_dir() and not f.name.startswith("_")]
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


class _Ops(ModuleType):
    def __call__(self) -> tuple[str, ...]:
        return names()


sys.modules[__name__].__class__ = _Ops
