"""Losses whose forward leaves the gradient where an argument's values were, and what autograd is told of that."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as transforms_active

from liger_aot.errors import ArgumentError
from liger_aot.ops import guards
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.op import check_writable_rows, written


class Overwriting(Protocol):
    """An op that has this way."""

    name: ClassVar[str]

    def overwrite(self, tensors: Tensors, settings: tuple[Any, ...]) -> Tensors:
        """The results, of which the first is the loss, with its gradient over the first tensor."""

    def rescale(self, gradient: Tensor, grad: Tensor) -> None:
        """gradient *= grad in place: a number, or one a row."""


def overwritten(
    op: Overwriting, argument: str, tensors: Tensors, settings: tuple[Any, ...], outputs: int = 4
) -> Any:
    """The first ``outputs`` results of ``op.overwrite``; of them the loss alone has a gradient.

    Raises:
        ArgumentError: the first tensor is a leaf, no plain tensor, or not evenly spaced rows.
    """
    x: Tensor = tensors[0]
    row = guards.row_of(tensors)
    if row is not None or transforms_active():
        found = "a transform of torch.func" if row is None else f"with {row.name}"
        raise ArgumentError(f"{op.name}: inplace_grad=True is for plain tensors, got one {found}")
    base = x._base if x._is_view() else None
    if x.is_leaf or (base is not None and base.is_leaf and base.requires_grad):
        raise ArgumentError(
            f"{op.name}: {argument} is a leaf that requires a gradient, or a view of one: its value can't be "
            "overwritten; use inplace_grad=False"
        )
    check_writable_rows(op.name, argument, x)
    function = _Overwrite if base is not None else _OverwriteDirty
    return function.apply(op, settings, outputs, *tensors)[:outputs]  # type: ignore[no-untyped-call]


class _Overwrite(torch.autograd.Function):
    """Of a view: a function with several results can't say that it gives one back changed. Its version counter tells
    those who saved it before."""

    @staticmethod
    def forward(
        ctx: Any, op: Overwriting, settings: tuple[Any, ...], outputs: int, *tensors: Tensor | None
    ) -> Any:
        results = _run(ctx, op, settings, outputs, tensors)
        written(tensors[0])  # type: ignore[arg-type]
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{ctx.op.name}: inplace_grad=True left the gradient where the values were: it can't be differentiated "
                "again (create_graph=True); use inplace_grad=False"
            )
        if len(grads) > ctx.outputs and grads[-1] is not None:
            raise RuntimeError(
                f"{ctx.op.name}: inplace_grad=True left the gradient where the values were: nothing that needs a "
                "gradient may be computed from them afterwards"
            )
        nothing = (None,) * (3 + ctx.arguments)
        if grads[0] is None:
            return nothing
        if ctx.spent:
            raise RuntimeError(
                f"{ctx.op.name}: inplace_grad=True hands the gradient over in the first backward: a second one needs "
                "inplace_grad=False"
            )
        ctx.spent = True
        gradient = ctx.saved_tensors[0].detach()
        ctx.op.rescale(gradient, grads[0])
        return (*nothing[:3], gradient, *nothing[4:])


class _OverwriteDirty(_Overwrite):
    """Of other tensors: they are a result, so that autograd follows all that is done with them later."""

    @staticmethod
    def forward(
        ctx: Any, op: Overwriting, settings: tuple[Any, ...], outputs: int, *tensors: Tensor | None
    ) -> Any:
        results = _run(ctx, op, settings, outputs, tensors)
        ctx.mark_dirty(tensors[0])
        return (*results, tensors[0])


def _run(ctx: Any, op: Overwriting, settings: tuple[Any, ...], outputs: int, tensors: Tensors) -> Tensors:
    results = op.overwrite(tensors, settings)[:outputs]
    ctx.op, ctx.outputs, ctx.arguments, ctx.spent = op, outputs, len(tensors), False
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(r for r in results[1:] if r is not None))
    ctx.save_for_backward(tensors[0])
    return results
