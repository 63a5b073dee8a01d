"""Losses of a linear layer's results that never hold all of them: chunks of rows go through the products of cuBLAS or
hipBLAS, by torch, and through an op's kernels in between.

The gradients are found in the forward, chunk by chunk, and handed to autograd in the backward (Liger Kernel, Hsu et
al., 2024; Efficient cross entropy, Malek, 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from liger_aot.errors import ArgumentError
from liger_aot.ops.differentiable import DifferentiableOp, Function, Tensors
from liger_aot.ops.torch_library import register
from liger_aot.runtime.dispatch import OpOn
from liger_aot.runtime.grid import persistent


class LinearLoss(DifferentiableOp):
    """Base of losses whose gradients the forward finds.

    A subclass's ``settings`` end in "bool[] wanted": whether each argument of ``graded`` is to get a gradient. Its
    ``results`` are its outputs and then one gradient for each argument of ``graded``. The first output is the loss; no
    other one is differentiable. Its ``__call__`` returns ``self.differentiable(tensors, settings without wanted)``.

    The first backward multiplies the gradients by that of the loss, in place and on the device, and gives them away: no
    copy of them is left here. A further one (``retain_graph=True``) computes all again from the arguments.

    ``uses`` names "fused_linear_cross_entropy", whose kernel multiplies, unless that is the op itself.
    """

    graded: ClassVar[tuple[str, ...]]

    # ---- what a subclass gives ------------------------------------------------------------------------------

    def compute(
        self, tensors: Tensors, settings: tuple[Any, ...], wanted: Sequence[bool], grad: Tensor | None
    ) -> tuple[Tensors, Tensors]:
        """(outputs, gradients of ``graded``, None where not wanted), by the kernels.

        Args:
            settings: without ``wanted``.
            grad: of the loss, where it is known: a scalar or, for a loss a row, one for each row. The gradients are
                multiplied by it. None is 1.
        """
        raise NotImplementedError

    def in_backward(self, tensors: Tensors, settings: tuple[Any, ...]) -> bool:
        """Whether the gradients can't be found before that of the loss is known."""
        return False

    # ``reference`` gives the outputs and the gradients as well, an empty tensor (``loss.new_empty(0)``) for one that is
    # not wanted or is found in the backward. ``reference_backward`` gets ``saved`` as below.

    # ---- what it gets ---------------------------------------------------------------------------------------

    def scale(self, gradient: Tensor, grad: Tensor) -> None:
        """gradient *= grad, a float32 scalar on the same device, in place, with no word from the host."""
        if self._own.of(gradient, "input") is None:
            gradient.copy_(scaled(gradient, grad))
        elif gradient.numel():
            on = self._runtimes["fused_linear_cross_entropy"].of(gradient, "input")
            assert on is not None
            scale_in_place(on, gradient, grad)

    def differentiable(
        self, tensors: Tensors, settings: tuple[Any, ...] = (), out: Sequence[Tensor] | None = None
    ) -> Any:
        grads = torch.is_grad_enabled()
        wanted = tuple(grads and getattr(t, "requires_grad", False) for t in self._graded(tensors))
        return super().differentiable(tensors, (*settings, wanted))

    def through_library(
        self, tensors: Tensors, settings: tuple[Any, ...], out: Sequence[Tensor] | None
    ) -> Any:
        """The backward in plain torch, so that Inductor may multiply in place."""
        wanted = settings[-1]
        if not any(wanted) or self.in_backward(tensors, settings):
            return super().through_library(tensors, settings, out)
        register(self.name)
        self.check_all(tensors, settings)
        with torch.no_grad():
            results = getattr(torch.ops.liger_aot, f"{self.name}_forward")(*tensors, *settings, True)
        found = list(compress(results[self.outputs :], wanted))
        graded = compress(self._graded(tensors), wanted)
        loss = _Attached.apply(results[0], *found, *graded)  # type: ignore[no-untyped-call]
        return loss if self.outputs == 1 else (loss, *results[1 : self.outputs])

    def in_torch(self, tensors: Tensors, settings: tuple[Any, ...], out: Sequence[Tensor] | None) -> Any:
        """Of the reference the outputs alone: torch finds the gradients."""
        return super().in_torch(tensors, (*settings[:-1], (False,) * len(self.graded)), out)

    def _graded(self, tensors: Tensors) -> list[Any]:
        names = [name.rstrip("?") for name in self.tensors]
        return [tensors[names.index(name)] for name in self.graded]

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        self.check(tensors, settings)
        if self.on_reference(tensors):
            results = self.by_reference(tensors, settings)
            return (*results[: self.outputs], *(_there(r) for r in results[self.outputs :]))
        now = settings[-1] if keep and not self.in_backward(tensors, settings) else [False] * len(self.graded)
        outputs, gradients = self.compute(tensors, settings[:-1], now, None)
        return (*outputs, *gradients)

    def on_reference(self, tensors: Tensors) -> bool:
        first: Tensor = next(t for t in tensors if t is not None)
        return self._own.of(first, self.tensors[0]) is None or not all(
            t is None or t.numel() for t in tensors
        )

    def saved(self, tensors: Tensors, results: Tensors) -> Tensors:
        """The gradients where there are any, else the arguments; None in place of the others."""
        gradients = tuple(_there(g) for g in results[self.outputs :])
        if any(g is not None for g in gradients):
            return (*(None,) * len(tensors), *gradients)
        return (*tensors, *gradients)

    def gradients_of(self, ctx: Any, grads: Tensors, needed: Sequence[bool]) -> Tensors:
        grad = grads[0]
        if grad is None:
            return (None,) * len(needed)
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            return self.run_backward((grad,), self.completed(ctx.saved_tensors), ctx.settings, needed)
        by_name = dict(zip(self.graded, gradients, strict=True))
        del gradients
        made: list[Tensor | None] = []
        for name, need in zip(self.tensors, needed, strict=True):
            gradient = by_name.pop(name.rstrip("?"), None) if need else None
            if gradient is not None:
                self.scale(gradient, grad)
            made.append(gradient)
            del gradient
        return tuple(made)

    def completed(self, saved: Tensors) -> Tensors:
        """The arguments alone: from them all is computed again."""
        if saved[0] is None:
            raise ArgumentError(
                f"{self.name}: torch.library's backward has the gradients alone: it is not for create_graph=True"
            )
        return (*saved[: len(self.tensors)], *(None,) * len(self.graded))

    def followed(self, saved: Tensors, settings: tuple[Any, ...]) -> Tensors:
        return saved

    def run_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        """What only torch.compile and torch.export run, where a graph may not be rewritten in place."""
        count = len(self.tensors)
        tensors, gradients = saved[:count], saved[count:]
        names = [name.rstrip("?") for name in self.tensors]
        if any(g is not None for g in gradients):
            found = tuple(None if g is None else scaled(g, grads[0]) for g in gradients)
        elif self.on_reference(tensors):
            return self.gradients_by_reference(grads, saved, settings)
        else:
            wanted = [needed[names.index(k)] for k in self.graded]
            _, found = self.compute(tensors, settings[:-1], wanted, grads[0])
        by_name = dict(zip(self.graded, found, strict=True))
        return tuple(by_name.get(k) if need else None for k, need in zip(names, needed, strict=True))


def scaled(gradient: Tensor, grad: Tensor) -> Tensor:
    """gradient * grad, rounded once."""
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return (gradient.to(wide) * grad).to(gradient.dtype)


def _there(gradient: Tensor | None) -> Tensor | None:
    """torch.library knows no missing result: a tensor of one dimension and no elements stands for it."""
    absent = gradient is None or (gradient.dim() == 1 and not gradient.numel())
    return None if absent else gradient


class _Handed(Function):
    """The eager way. The gradients are no saved tensors: those autograd would keep until after the backward, and then
    AccumulateGrad copies what it could have taken."""

    @staticmethod
    def forward(
        ctx: Any, op: LinearLoss, settings: tuple[Any, ...], out: None, *tensors: Tensor | None
    ) -> Any:
        results = op.run_forward(tensors, settings, True, None)
        outputs, gradients = results[: op.outputs], results[op.outputs :]
        ctx.op, ctx.settings = op, settings
        ctx.gradients = list(gradients) if any(g is not None for g in gradients) else None
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(o for o in outputs[1:] if o is not None))
        return outputs[0] if op.outputs == 1 else outputs


class _Attached(torch.autograd.Function):
    """A loss with the gradients that belong to it: ``apply(loss, *gradients, *arguments that get them)``."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *rest: Tensor) -> Tensor:
        ctx.save_for_backward(*rest[: len(rest) // 2])
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if not is_compiling() and torch.is_grad_enabled():
            raise ArgumentError(
                "a linear loss of tensor subclasses or under a mode is not for create_graph=True"
            )
        gradients = ctx.saved_tensors
        return (None, *(None for _ in gradients), *(scaled(g, grad) for g in gradients))


def scale_in_place(on: OpOn, gradient: Tensor, grad: Tensor) -> None:
    """gradient *= grad, by the kernel of fused_linear_cross_entropy, which is ``on`` where gradient lies."""
    n, at, dtype = gradient.numel(), gradient.data_ptr(), gradient.dtype
    loaded = on.kernels["fused_linear_cross_entropy_scale"]((dtype, not (at | n) & 15), n)
    programs, _, _ = persistent(on, loaded, -(-n // loaded.block))
    device = on.device
    loaded.launch(device, on.stream(device), programs, 1, 1, at, grad.data_ptr(), n)


LinearLoss.function = _Handed
