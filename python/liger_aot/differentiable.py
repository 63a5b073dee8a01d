"""Ops with a backward: one way through autograd, torch.library and the CPU reference for all of them.

A subclass names its tensor arguments and settings and gives five functions; nothing of autograd or torch.library stands
in an op's own file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as transforms_active
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling

from liger_aot.errors import ArgumentError
from liger_aot.layout import all_readable, rows_of
from liger_aot.op import PLAIN_OR_NONE, Op, as_rows
from liger_aot.torch_library import register

# Each a tensor or None: an optional argument, a gradient that is not there.
Tensors = tuple[Any, ...]


class Function(torch.autograd.Function):
    """torch's, with a shorter way in. ``apply`` first unwraps tensors that a transform of torch.func left behind, which
    takes longer than a launch; ``direct`` is what it ends in, for tensors that are all readable."""

    direct: ClassVar[Any]

    def __init_subclass__(cls) -> None:
        cls.direct = super(torch.autograd.Function, cls).apply  # type: ignore[misc]


class _Function(Function):
    @staticmethod
    def forward(
        ctx: Any,
        op: DifferentiableOp,
        settings: tuple[Any, ...],
        out: Sequence[Tensor] | None,
        *tensors: Tensor | None,
    ) -> Any:
        results = op.run_forward(tensors, settings, True, out)
        ctx.save_for_backward(*op.saved(tensors, results))
        ctx.op, ctx.settings = op, settings
        ctx.set_materialize_grads(False)
        if out is not None:
            ctx.mark_dirty(*out)
        return results[0] if op.outputs == 1 else results[: op.outputs]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            return _backward_once(ctx, *grads)
        op: DifferentiableOp = ctx.op
        needed = ctx.needs_input_grad[3:]
        for g in grads:
            if g is not None:
                return None, None, None, *op.run_backward(grads, ctx.saved_tensors, ctx.settings, needed)
        return (None,) * (3 + len(needed))


@once_differentiable
def _backward_once(ctx: Any, *grads: Tensor | None) -> Any:
    """Where a graph of the gradient is asked for: it may not be differentiated again."""
    return _Function.backward(ctx, *grads)


class DifferentiableOp(Op):
    """An op that autograd, torch.compile and tensor subclasses can go through.

    A subclass's ``__call__`` takes its public arguments and returns ``self.differentiable(tensors, settings)``.
    """

    tensors: ClassVar[tuple[str, ...]]  # the tensor arguments in order; "weight?" may be None
    settings: ClassVar[tuple[str, ...]] = ()  # the others, in torch's schema language: "float eps"
    outputs: ClassVar[int] = 1  # how many of the results the caller gets
    results: ClassVar[int] = 1  # the outputs, then what only the backward needs
    overwrites: ClassVar[tuple[str, ...]] = ()  # may be overwritten although they need a gradient
    same_gradient: ClassVar[
        Mapping[str, str]
    ] = {}  # argument -> an earlier one whose gradient is also its own
    contiguous: ClassVar[bool] = (
        True  # whether all results are; else they lie in memory as the references' do
    )
    function: ClassVar[type[Function]] = _Function  # takes (op, settings, out, *tensors)

    # ---- what a subclass gives ------------------------------------------------------------------------------

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        """Raise for everything that is wrong with the arguments, but for their layout in memory."""
        raise NotImplementedError

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        """The results; those after the outputs may be None unless ``keep``. The hot path: what does not fit its
        conditions (errors, the CPU, empty tensors, layouts that need a copy, a device's first call) goes to
        ``prepare_forward``, which comes back here when it has put that right.

        Args:
            out: memory for the outputs, checked by ``check_out``; by default they are new and contiguous.
        """
        raise NotImplementedError

    def saved(self, tensors: Tensors, results: Tensors) -> Tensors:
        """Of the arguments and results, what the backward reads."""
        raise NotImplementedError

    def run_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        """A gradient for each tensor argument that needs one, else None.

        Args:
            grads: of the outputs; None for one that nothing was computed from.
            saved: as ``saved`` gave it.
            needed: for each tensor argument.
        """
        raise NotImplementedError

    @staticmethod
    def reference(*arguments: Any) -> tuple[Tensor, ...]:
        """All results in plain torch, from the tensors and the settings. Float64 is computed in float64, other dtypes
        in float32, rounded at the end. Nothing in it may depend on a tensor's values: shapes are found with it, too."""
        raise NotImplementedError

    @staticmethod
    def reference_backward(grads: Tensors, saved: Tensors, *settings: Any) -> Tensors:
        """The gradients of all tensor arguments that can have one, in plain torch, as ``reference``."""
        raise NotImplementedError

    # ---- what it gets ---------------------------------------------------------------------------------------

    def differentiable(
        self, tensors: Tensors, settings: tuple[Any, ...] = (), out: Sequence[Tensor] | None = None
    ) -> Any:
        """The outputs (a tensor where there is one), with autograd where a gradient is needed.

        Args:
            out: memory for the outputs. With gradients only arguments themselves: they are overwritten in place.
        """
        if is_compiling():
            return _through_torch(self, tensors, settings, out)
        readable = all_readable(tensors)
        if not readable and not PLAIN_OR_NONE.issuperset(map(type, tensors)):
            return _through_torch(self, tensors, settings, out)
        if torch.is_grad_enabled() and needs_gradient(tensors):
            if out is not None:
                self.check(tensors, settings)
                check_writable(self, tensors, out)
            function = self.function
            apply = function.direct if readable and not transforms_active() else function.apply
            return apply(self, settings, out, *tensors)
        results = self.run_forward(tensors, settings, False, out)
        return results[0] if self.outputs == 1 else results[: self.outputs]

    def prepare_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        """The slow way into ``run_forward``: complete checks, the reference for the CPU and for empty tensors, copies
        of what no kernel can read."""
        self.check(tensors, settings)
        if self.on_reference(tensors):
            with torch.no_grad():
                results = self.laid_out(self.reference(*tensors, *settings))
            if out is not None:
                copied = (
                    to.copy_(r.view(to.shape)) for to, r in zip(out, results, strict=False) if r is not None
                )
                results = (*copied, *results[len(out) :])
            return results
        ready = tuple(
            None if t is None else as_rows(self.name, name.rstrip("?"), t)
            for name, t in zip(self.tensors, tensors, strict=True)
        )
        return self.run_forward(ready, settings, keep, out)

    def prepare_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        """The slow way into ``run_backward``, as ``prepare_forward``."""
        if not any(needed):
            return (None,) * len(needed)
        if self.on_reference(saved):
            with torch.no_grad():
                found = self.laid_out(self.reference_backward(grads, saved, *settings))
            return tuple(g if need else None for g, need in zip(found, needed, strict=True))
        return self.run_backward(_readable(grads), _readable(saved), settings, needed)

    def laid_out(self, results: Tensors) -> Tensors:
        """The reference's results as a kernel's lie in memory."""
        return tuple(r.contiguous() if self.contiguous and r is not None else r for r in results)

    def on_reference(self, tensors: Tensors) -> bool:
        """Whether a call with these tensors is the plain-torch reference's: on the CPU, or with nothing to compute."""
        first: Tensor = next(t for t in tensors if t is not None)
        return self._own.of(first, self.tensors[0].rstrip("?")) is None or not first.numel()


def needs_gradient(tensors: Tensors) -> bool:
    for t in tensors:  # noqa: SIM110 (half the time of any(), on every call)
        if t is not None and t.requires_grad:
            return True
    return False


def check_writable(op: DifferentiableOp, tensors: Tensors, out: Sequence[Tensor]) -> None:
    """ArgumentError unless autograd can follow a write to ``out``: to arguments whose values no backward needs."""
    for to in out:
        names = [name.rstrip("?") for name, t in zip(op.tensors, tensors, strict=True) if t is to]
        if not names or names[0] not in op.overwrites:
            raise ArgumentError(
                f"{op.name}: out is given, but a gradient is needed: use torch.no_grad() or no out"
            )
        if to.is_leaf and to.requires_grad:
            raise ArgumentError(
                f"{op.name}: {names[0]} is a leaf that requires a gradient: its value can't be overwritten; use "
                "inplace=False"
            )


def _readable(tensors: Tensors) -> Tensors:
    """With contiguous copies of those that are no rows (a gradient may be an expanded scalar)."""
    return tuple(t if t is None or rows_of(t) is not None else t.contiguous() for t in tensors)


def _through_torch(
    op: DifferentiableOp, tensors: Tensors, settings: tuple[Any, ...], out: Sequence[Tensor] | None
) -> Any:
    """The way of torch.compile and of tensor subclasses: what is written in place is copied there."""
    register(op.name)
    op.check(tensors, settings)
    keep = torch.is_grad_enabled() and needs_gradient(tensors)
    if out is not None and keep:
        check_writable(op, tensors, out)
    results = getattr(torch.ops.liger_aot, f"{op.name}_forward")(*tensors, *settings, keep)
    results = (results,) if isinstance(results, Tensor) else tuple(results)
    outputs = results[: op.outputs]
    if out is not None:
        outputs = tuple(to.copy_(r.view(to.shape)) for to, r in zip(out, outputs, strict=True))
    return outputs[0] if op.outputs == 1 else outputs
