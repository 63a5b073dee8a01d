"""One module an op, in folders by family: checks, outputs, grid, autograd, and its plain-torch reference. Each names
its class ``OP``. What the ops of a family share lies beside them, in modules whose names begin with an underscore.

The package itself can be called: ``liger_aot.ops()`` lists the names that ``liger_aot.load`` takes.
"""

from __future__ import annotations

import sys
from types import ModuleType

from liger_aot.ops.registry import names


class _Ops(ModuleType):
    def __call__(self) -> tuple[str, ...]:
        return names()


sys.modules[__name__].__class__ = _Ops
