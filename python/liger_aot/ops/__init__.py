"""One module an op: checks, outputs, grid, autograd, and its plain-torch reference. Each names its class ``OP``.

The package itself can be called: ``liger_aot.ops()`` lists the names that ``liger_aot.load`` takes.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from os import listdir
from types import ModuleType


@lru_cache(maxsize=1)
def names() -> tuple[str, ...]:
    """Names of the ops, sorted."""
    return tuple(sorted(f[:-3] for f in listdir(__path__[0]) if f.endswith(".py") and not f.startswith("_")))


class _Ops(ModuleType):
    def __call__(self) -> tuple[str, ...]:
        return names()


sys.modules[__name__].__class__ = _Ops
