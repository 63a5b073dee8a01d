"""The host side of losses that compare two distributions over the last dimension: ``kl_div``, ``jsd`` and ``tvd``.

Where a gradient is wanted, a reduced loss finds it in the forward: two tensors are read and one is written, instead of
four and one. The first backward hands that gradient to autograd; if the gradient of the loss is not 1, it is recomputed
in place first, which the device decides, without synchronisation. A further backward (``retain_graph=True``) recomputes
it. So every gradient is rounded once, and float16 does not underflow before the factor of a loss scaler comes. Under
torch.compile, and where the loss is not reduced, the backward computes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.arguments import Allowed
from liger_aot.ops.differentiable import DifferentiableOp, Function, Tensors
from liger_aot.ops.losses._row_loss import counted
from liger_aot.ops.op import Problem, as_rows, check_rows, check_same_device, check_tensor
from liger_aot.runtime.dispatch import OpOn
from liger_aot.runtime.grid import persistent
from liger_aot.runtime.layout import rows_of

REDUCTION = Allowed(among=("none", "sum", "mean", "batchmean"))


class Summand(NamedTuple):
    """What is summed, as the kernels take it.

    Attributes:
        kind: which of the formulas of csrc_triton/losses/divergence.py.
        number: its parameter.
        reduction: one of REDUCTION.
        ignored: the label of rows that do not count.
    """

    kind: str
    number: float
    reduction: str
    ignored: int = -100


class _Handed(Function):
    """The eager path. The gradient that the forward found is no saved tensor: the first backward hands it over."""

    @staticmethod
    def forward(
        ctx: Any, op: Divergence, settings: tuple[Any, ...], out: None, *tensors: Tensor | None
    ) -> Tensor:
        loss, ctx.ready = op.loss_and_gradient(tensors, settings, True)
        ctx.save_for_backward(*tensors)
        ctx.op, ctx.settings = op, settings
        return loss


class Divergence(DifferentiableOp):
    """Base of the three. ``tensors`` are the student's (which gets the gradient), the teacher's and, but for
    ``kl_div``, labels that say which rows count. The kernels are ``<name>_forward``, ``<name>_both``
    (the loss and its gradient) and ``<name>_backward``."""

    uses = ("divergence_sums",)
    function = _Handed
    batch_is_first: ClassVar[bool] = False  # batchmean divides by the first dimension, not by the rows
    usual_kind: ClassVar[str]  # of a call with the default settings

    # ---- what a subclass gives ------------------------------------------------------------------------------

    def summand(self, settings: tuple[Any, ...]) -> Summand:
        raise NotImplementedError

    # ``reference`` and ``reference_backward``, of ``reduced`` and ``reduced_backward``.

    # ---- what it gets ---------------------------------------------------------------------------------------

    def differentiable(
        self, tensors: Tensors, settings: tuple[Any, ...] = (), out: Sequence[Tensor] | None = None
    ) -> Any:
        if torch.is_grad_enabled() and isinstance(tensors[1], Tensor) and tensors[1].requires_grad:
            name, student = self.tensors[1], self.tensors[0]
            raise ArgumentError(
                f"{self.name}: {name} requires a gradient, and only {student} gets one: give {name}.detach(), or "
                "compute it under torch.no_grad()"
            )
        return super().differentiable(tensors, settings, out)

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        names = [name.rstrip("?") for name in self.tensors]
        x, y = tensors[:2]
        check_rows(self.name, names[0], x)
        check_tensor(self.name, names[1], y)
        check_same_device(self.name, names[1], y, names[0], x)
        if y.shape != x.shape or y.dtype != x.dtype:
            raise ArgumentError(
                f"{self.name}: {names[1]} must be of {names[0]}'s shape {tuple(x.shape)} and dtype {x.dtype}; got "
                f"{tuple(y.shape)}, {y.dtype}"
            )
        if len(tensors) > 2 and tensors[2] is not None:
            check_labels(self.name, names[2], tensors[2], names[0], x)

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        return self.loss_and_gradient(tensors, settings, False)[:1]

    def gradients_of(self, ctx: Any, grads: Tensors, needed: Sequence[bool]) -> Tensors:
        ready, ctx.ready = ctx.ready, None
        dx = self.gradient(grads[0], ctx.saved_tensors, ctx.settings, ready)
        return (dx, *(None,) * (len(needed) - 1))

    def loss_and_gradient(
        self, tensors: Tensors, settings: tuple[Any, ...], want: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(loss, its gradient by the first argument where ``want`` and there is one before the backward)."""
        x, y, *rest = tensors
        labels = rest[0] if rest else None
        in_x = rows_of(x)
        on = None if in_x is None else self._own.find(in_x[1], in_x[2])
        in_y = None if on is None else rows_of(y)
        if (
            on is None
            or in_x is None
            or in_y is None
            or in_y[1:7] != in_x[1:7]
            or y.shape != x.shape
            or not in_x[5] * in_x[6]
            or not self._labels_fit(labels, x)
        ):
            return self._prepare(tensors, settings, want)
        summand = self.summand(settings)
        x_at, _, _, _, _, rows, n, x_stride = in_x
        y_at, y_stride = in_y[0], in_y[7]
        each = summand.reduction == "none"
        loss = x.new_empty(x.shape if each else (), dtype=torch.float32)
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if want and not each else None
        scale = self._scale(summand, x.shape, rows, n, labels)
        label_at, words, count = self._count(labels, rows, summand, x)
        if labels is None and x_stride == y_stride == n:
            rows, n = 1, rows * n
            x_stride = y_stride = n
        dx_at, loss_at = 0 if dx is None else dx.data_ptr(), loss.data_ptr()
        aligned = not (x_at | y_at | dx_at | (loss_at if each else 0) | x_stride | y_stride | n) & 15
        way = "forward" if dx is None else "both"
        loaded = on.kernels[f"{self.name}_{way}"]((x.dtype, summand.kind, aligned), n)
        blocks = -(-n // loaded.block)
        programs, _, _ = persistent(on, loaded, rows * blocks)
        partials = None if each else x.new_empty(programs, dtype=torch.float32)
        partials_at = None if partials is None else partials.data_ptr()
        device = on.device
        stream = on.stream(device)
        count_at = None if count is None else count.data_ptr()
        if dx is None:
            loaded.launch(
                device, stream, programs, 1, 1,
                loss_at if each else None, partials_at, x_at, y_at, label_at, x_stride, y_stride, n, rows * blocks,
                blocks, summand.ignored, words, summand.number, each,
            )  # fmt: skip
        else:
            loaded.launch(
                device, stream, programs, 1, 1,
                partials_at, dx_at, x_at, y_at, label_at, count_at, x_stride, y_stride, n, rows * blocks, blocks,
                summand.ignored, words, scale, summand.number,
            )  # fmt: skip
        if partials is not None:
            total = self._sums(on).kernels["divergence_total"]((True,), programs)
            total.launch(device, stream, 1, 1, 1, loss_at, partials_at, count_at, programs, scale)
        return loss, dx

    def saved(self, tensors: Tensors, results: Tensors) -> Tensors:
        return tensors

    def run_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        return (self.gradient(grads[0], saved, settings, None), *(None,) * (len(saved) - 1))

    def gradient(
        self, dloss: Tensor, saved: Tensors, settings: tuple[Any, ...], ready: Tensor | None
    ) -> Tensor:
        """By the first argument. ``ready`` is it already if dloss is 1, and is overwritten if not."""
        x, y, *rest = saved
        labels = rest[0] if rest else None
        summand = self.summand(settings)
        each = summand.reduction == "none"
        in_x, in_y = rows_of(x), rows_of(y)
        on = None if in_x is None else self._own.find(in_x[1], in_x[2])
        in_loss = rows_of(dloss) if each else (dloss.data_ptr(), 0, 0, 0, 0, 0, 0, 0)
        if on is None or in_x is None or in_y is None or in_loss is None or not in_x[5] * in_x[6]:
            return self._prepare_gradient(dloss, saved, settings, ready)
        x_at, _, _, _, _, rows, n, x_stride = in_x
        y_at, y_stride = in_y[0], in_y[7]
        loss_at, loss_stride = in_loss[0], in_loss[7]
        dx = ready
        if dx is None:
            dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        scale = self._scale(summand, x.shape, rows, n, labels)
        label_at, words, count = self._count(labels, rows, summand, x)
        if labels is None and x_stride == y_stride == n and loss_stride == (n if each else 0):
            rows, n = 1, rows * n
            x_stride = y_stride = n
            loss_stride = n if each else 0
        dx_at = dx.data_ptr()
        places = dx_at | x_at | y_at | (loss_at if each else 0)
        aligned = not (places | x_stride | y_stride | loss_stride | n) & 15
        loaded = on.kernels[f"{self.name}_backward"]((x.dtype, summand.kind, aligned), n)
        blocks = -(-n // loaded.block)
        programs, _, _ = persistent(on, loaded, rows * blocks)
        device = on.device
        loaded.launch(
            device, on.stream(device), programs, 1, 1,
            dx_at, loss_at, x_at, y_at, label_at, None if count is None else count.data_ptr(), loss_stride, x_stride,
            y_stride, n, rows * blocks, blocks, summand.ignored, words, scale, summand.number, each, ready is None,
        )  # fmt: skip
        return dx

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        """Without labels: all elements are one row."""
        n = torch.Size(shape).numel()
        axes, aligned = (dtype, self.usual_kind), n % 16 == 0
        return tuple(
            Problem(f"{self.name}_{way}", axes, aligned, n) for way in ("forward", "both", "backward")
        )

    # ---- the slow ways in -----------------------------------------------------------------------------------

    def _prepare(
        self, tensors: Tensors, settings: tuple[Any, ...], want: bool
    ) -> tuple[Tensor, Tensor | None]:
        self.check(tensors, settings)
        if self.on_reference(tensors):
            return self.by_reference(tensors, settings)[0], None
        return self.loss_and_gradient(self._ready(tensors), settings, want)

    def _prepare_gradient(
        self, dloss: Tensor, saved: Tensors, settings: tuple[Any, ...], ready: Tensor | None
    ) -> Tensor:
        if self.on_reference(saved):
            dx: Tensor = self.gradients_by_reference((dloss,), saved, settings)[0]
            return dx
        return self.gradient(
            dloss if rows_of(dloss) is not None else dloss.contiguous(), self._ready(saved), settings, ready
        )

    def _ready(self, tensors: Tensors) -> Tensors:
        """As the kernels can read them."""
        named = zip(self.tensors[:2], tensors, strict=False)
        rows = tuple(as_rows(self.name, name, t) for name, t in named)
        return (*rows, *(t if t is None else t.contiguous() for t in tensors[2:]))

    # ---- what both directions need --------------------------------------------------------------------------

    def _labels_fit(self, labels: Any, x: Tensor) -> bool:
        return labels is None or (
            isinstance(labels, Tensor)
            and labels.dtype in (torch.int64, torch.int32)
            and labels.shape == x.shape[:-1]
            and labels.device == x.device
            and labels.is_contiguous()
        )

    def _scale(self, summand: Summand, shape: torch.Size, rows: int, n: int, labels: Tensor | None) -> float:
        """What the sum is multiplied by; with labels the kernels divide by how many count."""
        if summand.reduction in ("sum", "none"):
            return 1.0
        if summand.reduction == "mean":
            return 1.0 / n if labels is not None else 1.0 / (rows * n)
        if labels is not None:
            return 1.0
        return 1.0 / (shape[0] if self.batch_is_first else rows)

    def _count(
        self, labels: Tensor | None, rows: int, summand: Summand, x: Tensor
    ) -> tuple[int | None, int, Tensor | None]:
        """(address of the labels, 32-bit words of one, how many count or None where nothing is divided by it)."""
        if labels is None:
            return None, 0, None
        words = labels.element_size() // 4
        if summand.reduction in ("sum", "none"):
            return labels.data_ptr(), words, None
        on = self._runtimes["divergence_sums"].of(x, self.tensors[0])
        assert on is not None
        return labels.data_ptr(), words, count_labels(on, labels, summand.ignored)

    def _sums(self, on: OpOn) -> OpOn:
        """``divergence_sums`` where ``on`` is."""
        runtimes = self._runtimes["divergence_sums"]
        return runtimes.bound.get(on.device) or runtimes.on(on.device)


def count_labels(on: OpOn, labels: Tensor, ignored: int) -> Tensor:
    """() float32: how many of the labels (int64 or int32, contiguous) are not ``ignored``; ``on`` is
    ``divergence_sums`` where they are."""
    count = torch.empty((), dtype=torch.float32, device=labels.device)
    at, rows, device = labels.data_ptr(), labels.numel(), on.device
    loaded = on.kernels["divergence_count"]((not at & 15,), rows)
    words = labels.element_size() // 4
    loaded.launch(device, on.stream(device), 1, 1, 1, count.data_ptr(), at, rows, ignored, words)
    return count


def check_labels(op: str, name: str, labels: Any, first: str, x: Tensor) -> None:
    """Raise unless ``labels`` are int64 or int32, one a row of ``x``, where x is; ``first`` is x's name."""
    if not isinstance(labels, Tensor):
        raise ArgumentTypeError(f"{op}: {name} must be a torch.Tensor or None, got {type(labels).__name__}")
    if labels.dtype not in (torch.int64, torch.int32):
        raise ArgumentTypeError(f"{op}: {name} must be int64 or int32, got {labels.dtype}")
    check_same_device(op, name, labels, first, x)
    if labels.shape != x.shape[:-1]:
        raise ArgumentError(
            f"{op}: {name} must be of shape {tuple(x.shape[:-1])}, one a row of {first}; got {tuple(labels.shape)}"
        )


# ---- the references' part that is the same ------------------------------------------------------------------


def reduced(
    summands: Tensor, reduction: str, labels: Tensor | None, ignored: int, batch: int | None
) -> Tensor:
    """The loss of (..., n) summands.

    Args:
        batch: what batchmean divides by; None: the rows, with labels those that count.
    """
    if labels is not None:
        summands = torch.where(counted(labels, ignored).unsqueeze(-1), summands, 0)
    if reduction == "none":
        return summands
    return summands.sum() * _factor(summands, reduction, labels, ignored, batch)


def reduced_backward(
    slopes: Tensor, dloss: Tensor, reduction: str, labels: Tensor | None, ignored: int, batch: int | None
) -> Tensor:
    """The gradient of ``reduced``, of summands with these derivatives."""
    if labels is not None:
        slopes = torch.where(counted(labels, ignored).unsqueeze(-1), slopes, 0)
    if reduction == "none":
        return slopes * dloss
    return slopes * (_factor(slopes, reduction, labels, ignored, batch) * dloss)


def _factor(
    summands: Tensor, reduction: str, labels: Tensor | None, ignored: int, batch: int | None
) -> Tensor:
    if reduction == "sum":
        return summands.new_ones(())
    n = summands.shape[-1]
    if batch is not None:
        return 1 / summands.new_full((), batch if reduction == "batchmean" else summands.numel())
    rows = summands.shape[:-1].numel()
    count = (
        summands.new_full((), rows) if labels is None else counted(labels, ignored).sum().to(summands.dtype)
    )
    size = count * n if reduction == "mean" else count
    return torch.where(size > 0, 1 / size.clamp(min=1), 0)
