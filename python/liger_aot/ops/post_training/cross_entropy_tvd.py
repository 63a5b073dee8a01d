"""Cross entropy with targets and total variation distance from a teacher, of logits, row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import e, log2
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError
from liger_aot.ops.arguments import ANY, Schema
from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.ops.losses._row_loss import WORDS, check_range, check_target, counted
from liger_aot.ops.op import Problem, as_rows, check_rows, check_same_device
from liger_aot.runtime import device_errors
from liger_aot.runtime.layout import rows_of

LOG2_E = log2(e)


class CrossEntropyTVD(DifferentiableOp):
    """``cross_entropy_tvd(student_logits, teacher_logits, target, *, ignore_index=-100) -> (Tensor, Tensor)``: of each
    row the cross entropy of the student's logits with its target, and half the sum of |p - q|, with p and q the
    softmaxes of the student's and the teacher's logits.

    Differentiable in student_logits; teacher_logits get no gradient. Works under torch.compile and, after ``preload``,
    in CUDA graphs. CPU tensors take the plain-torch reference. Computed in float32: the forward reads both rows twice
    and keeps five numbers of each, the backward reads them once more.

    Args:
        student_logits: (..., n) bfloat16, float16 or float32. Rows may have any stride; other layouts are copied.
        teacher_logits: of student_logits' shape and dtype.
        target: (...) int64 or int32, each in [0, n) or ignore_index.
        ignore_index: rows with this target have results and a gradient of 0, and are not read.

    Returns:
        (cross entropy, total variation distance): float32, contiguous, of target's shape; neither is reduced.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: a shape or device does not fit, or a target is no class: on the CPU at once, on a GPU the results
            are NaN and the next call raises (with LIGER_AOT_DEBUG=1 this one).
        PackNotFound: no installed pack serves the GPU.

    Source:
        Liger Kernel (Hsu et al., 2024). The distance: Wen et al., f-Divergence Minimization for Sequence-Level
        Knowledge Distillation (2023).
    """

    name = "cross_entropy_tvd"
    tensors = ("student_logits", "teacher_logits", "target")
    settings = Schema({"int ignore_index": ANY})
    outputs = 2
    results = 3  # and of each row the two log-sum-exps, each as two numbers, and the sum of p times the sign of p - q

    def __call__(
        self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor, *, ignore_index: int = -100
    ) -> tuple[Tensor, Tensor]:
        teacher = teacher_logits.detach() if isinstance(teacher_logits, Tensor) else teacher_logits
        ce, tvd = self.differentiable((student_logits, teacher, target), (ignore_index,))
        return ce, tvd

    def preload(self, device: torch.device | int | str | None = None) -> None:
        super().preload(device)
        device_errors.flag(self.name)  # no CUDA graph may allocate it

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        x, y, target = tensors
        check_rows(self.name, "student_logits", x)
        check_rows(self.name, "teacher_logits", y)
        check_same_device(self.name, "teacher_logits", y, "student_logits", x)
        if y.shape != x.shape or y.dtype != x.dtype:
            raise ArgumentError(
                f"{self.name}: teacher_logits must be of student_logits' shape {tuple(x.shape)} and dtype {x.dtype}; "
                f"got {tuple(y.shape)}, {y.dtype}"
            )
        check_target(self.name, target, x.shape[:-1], x.device)

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        x, y, target = tensors
        in_x, in_y = rows_of(x), rows_of(y)
        on = None if in_x is None else self._own.find(in_x[1], in_x[2])
        if (
            on is None
            or in_x is None
            or in_y is None
            or in_y[1:7] != in_x[1:7]
            or y.shape != x.shape
            or not isinstance(target, Tensor)
            or target.dtype not in WORDS
            or target.device != x.device
            or target.shape != x.shape[:-1]
            or not target.is_contiguous()
            or not x.numel()
        ):
            return self.prepare_forward(tensors, settings, keep, out)
        device_errors.raise_if_any(self.name)
        x_at, _, _, _, _, rows, n, x_stride = in_x
        y_at, y_stride = in_y[0], in_y[7]
        ce, tvd = (x.new_empty(target.shape, dtype=torch.float32) for _ in range(2))
        statistics = x.new_empty((rows, 5), dtype=torch.float32)
        aligned, device = not (x_at | y_at | x_stride | y_stride | n) & 15, on.device
        on.kernels["cross_entropy_tvd_forward"]((x.dtype, aligned), n).launch(
            device, on.stream(device), rows, 1, 1,
            ce.data_ptr(), tvd.data_ptr(), statistics.data_ptr(), x_at, y_at, target.data_ptr(),
            device_errors.flag(self.name), x_stride, y_stride, n, settings[0], WORDS[target.dtype],
        )  # fmt: skip
        device_errors.check_now(self.name, device)
        return ce, tvd, statistics

    def prepare_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        self.check(tensors, settings)
        x, y, target = tensors
        if not self.on_reference(tensors):
            ready = as_rows(self.name, "student_logits", x), as_rows(self.name, "teacher_logits", y)
            return self.run_forward((*ready, target.contiguous()), settings, keep, out)
        check_range(self.name, target, x.shape[-1], settings[0])
        return super().prepare_forward(tensors, settings, keep, out)

    def saved(self, tensors: Tensors, results: Tensors) -> Tensors:
        return *tensors, results[2]

    def run_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        x, y, target, statistics = saved
        in_x, in_y = rows_of(x), rows_of(y)
        on = None if in_x is None else self._own.find(in_x[1], in_x[2])
        if on is None or in_x is None or in_y is None or not x.numel():
            return self.prepare_backward(grads, saved, settings, needed)
        x_at, _, _, _, _, _, n, x_stride = in_x
        y_at, y_stride = in_y[0], in_y[7]
        dce, dtvd = (
            torch.zeros(target.shape, dtype=torch.float32, device=x.device) if g is None else g.contiguous()
            for g in grads
        )
        target = target.contiguous()
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        dx_at = dx.data_ptr()
        aligned, device = not (dx_at | x_at | y_at | x_stride | y_stride | n) & 15, on.device
        loaded = on.kernels["cross_entropy_tvd_backward"]((x.dtype, aligned), n)
        blocks = -(-n // loaded.block)
        loaded.launch(
            device, on.stream(device), target.numel() * blocks, 1, 1,
            dx_at, dce.data_ptr(), dtvd.data_ptr(), statistics.data_ptr(), x_at, y_at, target.data_ptr(), x_stride,
            y_stride, n, blocks, settings[0], WORDS[target.dtype],
        )  # fmt: skip
        return dx, None, None

    def prepare_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        if self.on_reference(saved):
            return self.gradients_by_reference(grads, saved, settings)
        x, y, *rest = saved
        ready = as_rows(self.name, "student_logits", x), as_rows(self.name, "teacher_logits", y)
        return self.run_backward(grads, (*ready, *rest), settings, needed)

    @staticmethod
    def reference(
        student_logits: Tensor, teacher_logits: Tensor, target: Tensor, ignore_index: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(student_logits.dtype, torch.float32)
        x, y, counts = student_logits.to(wide), teacher_logits.to(wide), counted(target, ignore_index)
        if not x.shape[-1]:
            nothing = torch.where(counts, x.new_full(target.shape, torch.nan), 0)
            return nothing, nothing.clone(), x.new_zeros((target.numel(), 5))
        columns, known = _columns(target, counts, x.shape[-1])
        statistics = [t for logits in (x, y) for t in _sums(logits)]
        p, q = (_powers(t, *statistics[2 * i : 2 * i + 2]) for i, t in enumerate((x, y)))
        ce = (statistics[0] - x.gather(-1, columns)) + statistics[1] / LOG2_E
        tvd, sigma = (p - q).abs().sum(-1, keepdim=True) / 2, (p * _sign(p - q)).sum(-1, keepdim=True)
        unknown = counts & ~known.squeeze(-1)
        ce, tvd = (torch.where(unknown, torch.nan, torch.where(counts, t.squeeze(-1), 0)) for t in (ce, tvd))
        return ce, tvd, torch.cat((*statistics, sigma), -1).reshape(-1, 5)

    @staticmethod
    def reference_backward(grads: Tensors, saved: Tensors, ignore_index: int) -> Tensors:
        logits, teacher, target, statistics = saved
        wide = torch.promote_types(logits.dtype, torch.float32)
        x, y, counts = logits.to(wide), teacher.to(wide), counted(target, ignore_index)
        if not x.numel():
            return torch.zeros_like(logits), None, None
        columns, known = _columns(target, counts, x.shape[-1])
        of_x, x_last, of_y, y_last, sigma = statistics.to(wide).view(*x.shape[:-1], 5).split(1, -1)
        p, q = _powers(x, of_x, x_last), _powers(y, of_y, y_last)
        dce, dtvd = (
            x.new_zeros(known.shape) if g is None else g.to(wide).reshape(known.shape) for g in grads
        )
        dce = torch.where(known | ~counts.unsqueeze(-1), dce, torch.nan)
        dx = p * dce + p * (_sign(p - q) - sigma) * (dtvd / 2)
        dx = dx.scatter_add(-1, columns, -dce)
        return torch.where(counts.unsqueeze(-1), dx, 0).to(logits.dtype), None, None

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        n = shape[-1]
        ways = ("forward", "backward")
        return tuple(Problem(f"cross_entropy_tvd_{way}", (dtype,), n % 16 == 0, n) for way in ways)


def _sums(x: Tensor) -> tuple[Tensor, Tensor]:
    """The greatest logit, and log2 of the sum of powers relative to it."""
    greatest = x.amax(-1, keepdim=True)
    return greatest, (x - greatest).exp().sum(-1, keepdim=True).log2()


def _powers(x: Tensor, greatest: Tensor, last: Tensor) -> Tensor:
    return ((x - greatest) * LOG2_E - last).exp2()


def _sign(difference: Tensor) -> Tensor:
    return torch.where(difference.isnan(), difference, difference.sign())


def _columns(target: Tensor, counts: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """(..., 1) columns that are in the row, and whether the targets are."""
    columns = target.long().unsqueeze(-1)
    known = counts.unsqueeze(-1) & (columns >= 0) & (columns < n)
    return torch.where(known, columns, 0), known


OP = CrossEntropyTVD
