"""Registration with torch.library: how torch.compile, torch.export and tensor subclasses see an op.

Eager calls on plain tensors don't come this way: the dispatcher costs several times a launch. An op's registration
(``ops/_<op>_torch.py``) is imported when it is first needed; a program that loads one that torch.export saved calls
``register_all`` before.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

NAMESPACE = "liger_aot"
_library = torch.library.Library(NAMESPACE, "DEF")


def define(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> None:
    """Define ``liger_aot::<schema>``.

    Args:
        schema: name, arguments and results in torch's schema language.
        implementation: for every backend; the op's host code chooses by the tensors' device.
        fake: gives results of the right shape, dtype and device without touching memory.
        backward, setup_context: as for ``torch.library.register_autograd``.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    _library.impl(name, fake, "Meta")  # register_fake does the same and reads source files: 1 ms an op
    if backward is not None:
        torch.library.register_autograd(
            f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=_library
        )


def register(op: str) -> bool:
    """Register one op, if it wasn't yet. Its name is a constant to dynamo, and so is the answer: the import runs while
    a graph is traced and leaves nothing in it."""
    import_module(f"liger_aot.ops._{op}_torch")
    return True


# What torch.compiler.assume_constant_result sets; that imports all of dynamo, which takes seconds.
register._dynamo_marked_constant = True  # type: ignore[attr-defined]


def register_all() -> None:
    """Register every op of the package with torch.library."""
    from liger_aot.ops import names

    for name in names():
        if find_spec(f"liger_aot.ops._{name}_torch"):
            register(name)
