"""Ops with a backward: one way through autograd, torch.library and the CPU reference for all of them.

A subclass names its tensor arguments and settings and gives five functions; nothing of autograd or torch.library stands
in an op's own file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _are_functorch_transforms_active as transforms_active
from torch._C import _is_tracing as is_tracing
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops import guards
from liger_aot.ops.arguments import Schema
from liger_aot.ops.guards import Way, needs_gradient
from liger_aot.ops.op import Op, as_rows, check_tensor, plain_torch
from liger_aot.ops.torch_library import register
from liger_aot.runtime.dispatch import Runtimes
from liger_aot.runtime.layout import INDIRECT, NEEDS_GRADIENT, OTHER_SETTINGS, rows_of, traits
from liger_aot.runtime.remembered import REMEMBERED

# Each a tensor or None: an optional argument, a gradient that is not there.
Tensors = tuple[Any, ...]


class Function(torch.autograd.Function):
    """torch's, with a shorter way in. ``apply`` first unwraps tensors that a transform of torch.func left behind, which
    takes longer than a launch; ``direct`` is what it ends in, for plain tensors."""

    direct: ClassVar[Any]

    def __init_subclass__(cls) -> None:
        cls.direct = super(torch.autograd.Function, cls).apply  # type: ignore[misc]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        op: DifferentiableOp = ctx.op
        needed = ctx.needs_input_grad[3:]
        if (
            is_grad_enabled()
            or traits(grads) == INDIRECT
            or forward_ad._current_level >= 0
            or dispatch_modes()
            or is_tracing()
        ):
            return None, None, None, *op.backward_in_torch(grads, ctx.saved_tensors, ctx.settings, needed)
        for g in grads:
            if g is not None:
                return None, None, None, *op.gradients_of(ctx, grads, needed)
        return (None,) * (3 + len(needed))


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


class DifferentiableOp(Op):
    """An op that autograd, torch.compile and tensor subclasses can go through.

    A subclass's ``__call__`` takes its public arguments and returns ``self.differentiable(tensors, settings)``.

    Gradients of gradients: with ``create_graph=True`` the backward is the reference's, in torch's own steps, which
    autograd can follow any number of times, at plain torch's speed and memory. So is the forward in forward-mode AD and
    under the transforms of torch.func. An op that can't do that (``twice``) raises as soon as it is asked.
    """

    tensors: ClassVar[tuple[str, ...]]  # the tensor arguments in order; "weight?" may be None
    settings: ClassVar[Schema] = Schema()  # the others, in torch's schema language: "float eps"
    outputs: ClassVar[int] = 1  # how many of the results the caller gets
    results: ClassVar[int] = 1  # the outputs, then what only the backward needs
    overwrites: ClassVar[tuple[str, ...]] = ()  # may be overwritten although they need a gradient
    writes: ClassVar[tuple[str, ...]] = ()  # arguments that every call writes: see InPlaceOp
    # Argument -> an earlier one whose gradient is also its own.
    same_gradient: ClassVar[Mapping[str, str]] = {}
    # Whether all results are; else they lie in memory as the references' do.
    contiguous: ClassVar[bool] = True
    # Whether the reference computes what the op does, so that torch can follow it.
    twice: ClassVar[bool] = True
    function: ClassVar[type[Function]] = _Function  # takes (op, settings, out, *tensors)

    def __init__(self, runtimes: Mapping[str, Runtimes] | None = None) -> None:
        super().__init__(runtimes)
        # By value and type: True is no 1.0.
        self._valid = lru_cache(REMEMBERED, typed=True)(self._validated)
        self._known: tuple[Any, ...] = ()  # settings of an earlier call that are right

    # ---- what a subclass gives ------------------------------------------------------------------------------

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        """Raise for everything that is wrong with the tensors, but for their layout in memory, and for settings that do
        not fit them; what the settings are by themselves is checked by ``settings``."""
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
        if is_dynamo_compiling():  # export without dynamo has subclasses
            return self.through_library(tensors, settings, out)
        found = traits(tensors if out is None else (*tensors, *out), settings, self._known)
        if (
            found == INDIRECT
            or forward_ad._current_level >= 0  # as guards.in_torch, but for its call
            or dispatch_modes()
            or is_tracing()
        ):
            return self._by_table(tensors, settings, out)
        try:
            if found:
                if found & OTHER_SETTINGS:
                    settings = self._checked(settings)
                if found & NEEDS_GRADIENT and is_grad_enabled():
                    return self._with_gradient(tensors, settings, out)
            if out is not None:
                guards.check_versions(self.name, self.tensors, tensors, out)
            results = self.run_forward(tensors, settings, False, out)
        except Exception:
            return self._instead(tensors, settings, out)
        return results[0] if self.outputs == 1 else results[: self.outputs]

    def _with_gradient(
        self, tensors: Tensors, settings: tuple[Any, ...], out: Sequence[Tensor] | None
    ) -> Any:
        if transforms_active():
            return self.in_torch(tensors, settings, out)
        if out is not None:
            self.check(tensors, settings)
            guards.check_versions(self.name, self.tensors, tensors, out)
            check_writable(self, tensors, out)
        return self.function.direct(self, settings, out, *tensors)

    def _checked(self, settings: tuple[Any, ...]) -> tuple[Any, ...]:
        """The settings as the schema has them; if those are the very ones, the next call knows them."""
        valid = self._valid(*settings)
        if all(a is b for a, b in zip(valid, settings, strict=True)):
            self._known = settings
        return valid

    def _instead(self, tensors: Tensors, settings: tuple[Any, ...], out: Sequence[Tensor] | None) -> Any:
        """Where the direct path raised: the reference under a transform of torch.func, whose new tensors have no
        memory; an error that names the argument; or else the same error."""
        if transforms_active():
            return self.in_torch(tensors, settings, out)
        self.check_all(tensors, settings)
        raise

    def _by_table(self, tensors: Tensors, settings: tuple[Any, ...], out: Sequence[Tensor] | None) -> Any:
        """A call with something that only the dispatcher sees, or no tensors."""
        written = out or ()
        row = guards.row_of((*tensors, *written))
        if row is None:
            try:
                settings = self._checked(settings)
                if is_grad_enabled() and needs_gradient((*tensors, *written)):
                    return self._with_gradient(tensors, settings, out)
                return self._given(self.run_forward(tensors, settings, False, out), None)
            except Exception:
                return self._instead(tensors, settings, out)
        if row.way is Way.LIBRARY:
            return self.through_library(tensors, settings, out)
        if row.way is Way.REFERENCE:
            return self.in_torch(tensors, settings, out)
        names = (*(name.rstrip("?") for name in self.tensors), *("out" for _ in written))
        for name, t in zip(names, (*tensors, *written), strict=True):
            if guards.row_of((t,)) is row and (row.way is Way.ERROR or any(t is to for to in written)):
                raise ArgumentTypeError(
                    f"{self.name}: {name} must be dense, with memory of its own that holds its values; got one with "
                    f"{row.name} ({t.layout}, {t.device})"
                )
        return DifferentiableOp.differentiable(self, guards.plain(tensors), settings, out)

    def through_library(
        self, tensors: Tensors, settings: tuple[Any, ...], out: Sequence[Tensor] | None
    ) -> Any:
        """By torch.library, for torch.compile, subclasses and modes: what is written in place is copied there."""
        register(self.name)
        self.check_all(tensors, settings)
        keep = torch.is_grad_enabled() and needs_gradient(tensors)
        if out is not None and keep:
            check_writable(self, tensors, out)
        results = getattr(torch.ops.liger_aot, f"{self.name}_forward")(*tensors, *settings, keep)
        results = (results,) if isinstance(results, Tensor) else tuple(results)
        return self._given(results, out)

    def in_torch(self, tensors: Tensors, settings: tuple[Any, ...], out: Sequence[Tensor] | None) -> Any:
        """By the reference, where torch follows each of its steps."""
        self.check_all(tensors, settings)
        self._check_twice("forward-mode AD and the transforms of torch.func")
        with plain_torch(differentiable=is_grad_enabled()):
            results = self.laid_out(self.reference(*tensors, *settings))
        return self._given(results, out)

    def _given(self, results: Tensors, out: Sequence[Tensor] | None) -> Any:
        outputs = results[: self.outputs]
        if out is not None:
            for to in out:
                check_tensor(self.name, "out", to)
            outputs = tuple(to.copy_(r.view(to.shape)) for to, r in zip(out, outputs, strict=True))
        return outputs[0] if self.outputs == 1 else outputs

    def backward_in_torch(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        """The backward where torch is to follow it: with ``create_graph=True``, or of gradients that are no plain
        tensors."""
        if all(g is None for g in grads):
            return (None,) * len(needed)
        row = guards.row_of(grads)
        saved = self.completed(saved)
        if not is_grad_enabled():
            if row is None or row.way is Way.PLAIN:
                return self.run_backward(guards.plain(grads), saved, settings, needed)
            if row.way is Way.LIBRARY:
                register(self.name)
                call = getattr(torch.ops.liger_aot, f"{self.name}_backward")
                made = iter(call(list(grads), list(saved), *settings, list(needed)))
                return tuple(next(made) if need else None for need in needed)
        self._check_twice("create_graph=True and gradients that are no plain tensors")
        with plain_torch(differentiable=is_grad_enabled()):
            saved = self.followed(saved, settings)
            found = self.laid_out(self.reference_backward(grads, saved, *settings))
        return tuple(g if need else None for g, need in zip(found, needed, strict=True))

    def overwritten(self, tensors: Tensors) -> Tensors:
        """Of the arguments, those that every call writes."""
        return ()

    def completed(self, saved: Tensors) -> Tensors:
        """What the function's context holds, as ``run_backward`` takes it."""
        return saved

    def followed(self, saved: Tensors, settings: tuple[Any, ...]) -> Tensors:
        """``saved``, where what is neither an argument nor an output is computed again, so that torch knows what it
        comes from. Ops that save such things save all their arguments first, or give a way of their own."""
        if self.results == self.outputs:
            return saved
        tensors = saved[: len(self.tensors)]
        return self.saved(tensors, self.reference(*tensors, *settings))

    def gradients_of(self, ctx: Any, grads: Tensors, needed: Sequence[bool]) -> Tensors:
        """``run_backward`` of what a function's context holds."""
        return self.run_backward(grads, ctx.saved_tensors, ctx.settings, needed)

    def check_all(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        """Raise for everything that is wrong with a call, but for its tensors' layout in memory."""
        self._validated(*settings)
        self.check(tensors, settings)

    def _validated(self, *settings: Any) -> tuple[Any, ...]:
        """The settings, checked by themselves, as the schema has them."""
        return self.settings.checked(self.name, settings)

    def _check_twice(self, asked: str) -> None:
        if not self.twice:
            raise ArgumentError(f"{self.name} has no gradient that torch can follow: it is not for {asked}")

    def prepare_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        """The slow way into ``run_forward``: complete checks, the reference for the CPU and for empty tensors, copies
        of what no kernel can read."""
        self.check(tensors, settings)
        if self.on_reference(tensors):
            results = self.by_reference(tensors, settings)
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
            found = self.gradients_by_reference(grads, saved, settings)
            return tuple(g if need else None for g, need in zip(found, needed, strict=True))
        return self.run_backward(_readable(grads), _readable(saved), settings, needed)

    def by_reference(self, tensors: Tensors, settings: tuple[Any, ...]) -> Tensors:
        with plain_torch():
            return self.laid_out(self.reference(*tensors, *settings))

    def gradients_by_reference(self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...]) -> Tensors:
        with plain_torch():
            return self.laid_out(self.reference_backward(grads, saved, *settings))

    def laid_out(self, results: Tensors) -> Tensors:
        """The reference's results as a kernel's lie in memory."""
        return tuple(r.contiguous() if self.contiguous and r is not None else r for r in results)

    def on_reference(self, tensors: Tensors) -> bool:
        """Whether a call with these tensors is the plain-torch reference's: on the CPU, or with nothing to compute."""
        first: Tensor = next(t for t in tensors if t is not None)
        return self._own.of(first, self.tensors[0].rstrip("?")) is None or not first.numel()


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
