"""Ops for inference: no call of them has a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from liger_aot.ops import guards
from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.ops.guards import needs_gradient


class ForwardOnlyOp(DifferentiableOp):
    """Base of ops without a backward. A call that needs a gradient raises, before anything is computed."""

    no_gradient: ClassVar[str]  # what the error says: "codes have none"
    instead: ClassVar[str] = ""  # the op that has a gradient, if there is one

    def check_no_gradient(
        self, tensors: Tensors, settings: tuple[Any, ...], out: Sequence[Tensor] | None
    ) -> None:
        """ArgumentError where a gradient is needed."""
        given = tensors if out is None else (*tensors, *out)
        graded = torch.is_grad_enabled() and needs_gradient(given)
        # a tensor that a transform of torch.func left behind may say so without needing one
        if graded and (is_compiling() or needs_gradient(guards.plain(given))):
            self.check_all(tensors, settings)
            self._refuse_gradient()

    # All ways of a call that needs a gradient; the direct way of others pays for no check.

    def _with_gradient(
        self, tensors: Tensors, settings: tuple[Any, ...], out: Sequence[Tensor] | None
    ) -> Any:
        self.check_no_gradient(tensors, settings, out)
        return super()._with_gradient(tensors, settings, out)

    def through_library(
        self, tensors: Tensors, settings: tuple[Any, ...], out: Sequence[Tensor] | None
    ) -> Any:
        self.check_no_gradient(tensors, settings, out)
        return super().through_library(tensors, settings, out)

    def in_torch(self, tensors: Tensors, settings: tuple[Any, ...], out: Sequence[Tensor] | None) -> Any:
        self.check_no_gradient(tensors, settings, out)
        return super().in_torch(tensors, settings, out)

    def saved(self, tensors: Tensors, results: Tensors) -> Tensors:
        return ()

    def run_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        self._refuse_gradient()
        return ()

    def _refuse_gradient(self) -> None:
        raise guards.no_gradient(self.name, self.no_gradient, self.instead)
