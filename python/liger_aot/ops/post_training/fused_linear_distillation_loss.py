"""Distillation of a student from a teacher and from targets by two linear layers, whose logits are never whole in
memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import e, log2
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError
from liger_aot.ops.arguments import ABOVE_ZERO, ANY, Allowed, Schema
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.losses._linear import (
    BUDGET,
    LinearGradients,
    LinearLoss,
    autocast,
    check_weight_grad_dtype,
    chunk_buffer,
    chunk_rows,
    contiguous_rows,
    found_in_backward,
    padded,
    project,
    project_cast,
    scaled,
)
from liger_aot.ops.losses._row_loss import WORDS, check_range, check_target, counted
from liger_aot.ops.losses.fused_linear_jsd import bytes_of_both, check_models
from liger_aot.ops.losses.jsd import kind_of, smaller_weight, summands_and_slopes
from liger_aot.ops.op import Problem
from liger_aot.runtime import device_errors

LOG2_E = log2(e)
OUTPUTS = 3
LEAST_NORM = 1e-12


class DistillationLoss(NamedTuple):
    """What the op returns: float32 scalars, of which ``loss`` alone has a gradient."""

    loss: Tensor
    soft_loss: Tensor
    hard_loss: Tensor


class Settings(NamedTuple):
    """Of a call, in the order of the op's schema."""

    soft: str
    beta: float
    weight_hard: float
    weight_soft: float
    temperature: float
    ignore_index: int
    chunk_bytes: int
    weight_grad_dtype: torch.dtype | None
    wanted: Sequence[bool] = ()

    @property
    def kind(self) -> tuple[str, float]:
        """The formula, as the kernels take it, and its number."""
        if self.soft == "jsd":
            return kind_of(self.beta), smaller_weight(self.beta)
        return self.soft, 0.0


class FusedLinearDistillationLoss(LinearLoss):
    """``fused_linear_distillation_loss(student_input, student_weight, teacher_input, teacher_weight, target,
    student_bias=None, teacher_bias=None, *, soft_loss="jsd", beta=0.5, weight_hard_loss=0.5, weight_soft_loss=0.5,
    temperature=1.0, ignore_index=-100, chunk_bytes=2**30, weight_grad_dtype=None) -> DistillationLoss``:
    weight_hard_loss times the cross entropy of the student's logits student_input @ student_weight^T + student_bias
    with ``target``, and weight_soft_loss times a distance of the student's from the teacher's logits, both over the
    temperature:

    - "jsd": ``jsd`` of the log-softmaxes; beta 0 is the KL divergence of the student from the teacher, 1 the reverse.
    - "cosine": 1 less the cosine of the two rows of logits.

    Differentiable in the student's input, weight and bias; the teacher's get no gradient. Works under torch.compile
    and, after ``preload``, in CUDA graphs: nothing waits for the device. CPU tensors take the plain-torch reference,
    which holds all logits.

    The logits are computed in the inputs' dtype in chunks of rows, the losses in float32. Where a gradient is wanted it
    is found in the forward: the chunk's kernel writes it over the student's logits, and two products take it to input
    and weight. The first backward multiplies those by the loss's gradient in place; a second one
    (``retain_graph=True``) computes all again. For float16 they are found in the backward. ``fused_linear_jsd`` is the
    same without a target.

    Args:
        student_input: (..., k) bfloat16, float16 or float32.
        student_weight: (vocabulary, k) of student_input's dtype, or float32: then it is cast for the products, once a
            call.
        teacher_input: (..., j) of student_input's leading dimensions. Where its dtype is another, the teacher's logits
            are computed in that and cast to student_input's.
        teacher_weight: (at least vocabulary, j) of teacher_input's dtype or float32. The student's logits of classes
            that it lacks are 0 in the soft loss.
        target: (...) int64 or int32, each in [0, vocabulary) or ignore_index.
        student_bias, teacher_bias: of their weights' rows and kinds of dtype, or None.
        soft_loss: "jsd" or "cosine".
        beta: the teacher's weight in "jsd", from 0 to 1.
        weight_hard_loss, weight_soft_loss: of the two.
        temperature: above 0. The hard loss has none.
        ignore_index: rows with this target have no loss and no gradient.
        chunk_bytes: of memory for both models' logits of a chunk; each takes no more than student_weight does.
        weight_grad_dtype: of student_weight's gradient while it is added up, a rounding a chunk: None is the weight's,
            or torch.float32.

    Returns:
        DistillationLoss(loss, soft_loss, hard_loss): sums over the rows that count, divided by their
            number, at least 1.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: shapes or devices don't fit; a number is out of its range; chunk_bytes holds no row; a target is
            out of range: on the CPU at once, on a GPU the loss is NaN and the next call raises (with
            LIGER_AOT_DEBUG=1 this one).
        PackNotFound: no installed pack serves the GPU.

    Source:
        Hinton et al., Distilling the Knowledge in a Neural Network (2015); Agarwal et al., On-Policy Distillation of
        Language Models (2024); Liger Kernel (Hsu et al., 2024).
    """

    name = "fused_linear_distillation_loss"
    uses = ("fused_linear_cross_entropy",)
    tensors = (
        "student_input", "student_weight", "teacher_input", "teacher_weight", "target", "student_bias?",
        "teacher_bias?",
    )  # fmt: skip
    graded = ("student_input", "student_weight", "student_bias")
    settings = Schema(
        {
            "str soft": Allowed(among=("jsd", "cosine"), called="soft_loss"),
            "float beta": Allowed(least=0, most=1),
            "float weight_hard": Allowed(called="weight_hard_loss"),
            "float weight_soft": Allowed(called="weight_soft_loss"),
            "float temperature": ABOVE_ZERO,
            "int ignore_index": ANY,
            "int chunk_bytes": Allowed(least=1),
            "ScalarType? weight_grad_dtype": ANY,
            "bool[] wanted": ANY,
        }
    )
    outputs = OUTPUTS
    results = OUTPUTS + len(graded)

    def __call__(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        target: Tensor,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
        *,
        soft_loss: str = "jsd",
        beta: float = 0.5,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        temperature: float = 1.0,
        ignore_index: int = -100,
        chunk_bytes: int = 2 * BUDGET,
        weight_grad_dtype: torch.dtype | None = None,
    ) -> DistillationLoss:
        student_input, student_weight, student_bias = autocast(student_input, student_weight, student_bias)
        teacher_input, teacher_weight, teacher_bias = (
            t.detach() if isinstance(t, Tensor) else t
            for t in autocast(teacher_input, teacher_weight, teacher_bias)
        )
        tensors = (
            student_input, student_weight, teacher_input, teacher_weight, target, student_bias, teacher_bias,
        )  # fmt: skip
        settings = (
            soft_loss, beta, weight_hard_loss, weight_soft_loss, temperature, ignore_index, chunk_bytes,
            weight_grad_dtype,
        )  # fmt: skip
        found = self.differentiable(tensors, settings)
        return DistillationLoss(*found)

    def preload(self, device: torch.device | int | str | None = None) -> None:
        super().preload(device)
        device_errors.flag(self.name)

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        x, weight, teacher_x, teacher_weight, target, bias, teacher_bias = tensors
        asked = Settings(*settings)
        check_models(self.name, (x, weight, bias), (teacher_x, teacher_weight, teacher_bias))
        if teacher_weight.shape[0] < weight.shape[0]:
            raise ArgumentError(
                f"{self.name}: teacher_weight must have at least student_weight's {weight.shape[0]} rows; got "
                f"{tuple(teacher_weight.shape)}"
            )
        check_target(self.name, target, x.shape[:-1], x.device)
        check_weight_grad_dtype(self.name, asked.weight_grad_dtype, weight)
        chunk_rows(self.name, 1, bytes_of_both(x, teacher_x, teacher_weight.shape[0]), asked.chunk_bytes)

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        if isinstance(tensors[0], Tensor) and tensors[0].device.type == "cpu":
            self.check(tensors, settings)
            check_range(self.name, tensors[4], tensors[1].shape[0], Settings(*settings).ignore_index)
        return super().run_forward(tensors, settings, keep, out)

    def in_backward(self, tensors: Tensors, settings: tuple[Any, ...]) -> bool:
        return found_in_backward(tensors[0].dtype, "mean")

    def compute(
        self, tensors: Tensors, settings: tuple[Any, ...], wanted: Sequence[bool], grad: Tensor | None
    ) -> tuple[Tensors, Tensors]:
        student_input, weight, teacher_input, teacher_weight, target, bias, teacher_bias = tensors
        asked = Settings(*settings)
        kind, number = asked.kind
        device_errors.raise_if_any(self.name)
        on = self._own.of(student_input, "student_input")
        assert on is not None
        dtype, n, classes = student_input.dtype, teacher_weight.shape[0], weight.shape[0]
        x, y = contiguous_rows(student_input), contiguous_rows(teacher_input)
        w, v = weight.to(dtype), teacher_weight.to(y.dtype)
        b, c = (
            None if bias is None else bias.to(dtype),
            None if teacher_bias is None else teacher_bias.to(y.dtype),
        )
        rows, t = x.shape[0], target.reshape(-1).contiguous()
        count = counted(t, asked.ignore_index).sum(dtype=torch.float32).clamp_(min=1)
        outer = None if grad is None else grad.to(torch.float32)
        losses = x.new_empty((2, rows), dtype=torch.float32)

        both = bytes_of_both(x, y, n)
        each = chunk_rows(self.name, rows, both, min(asked.chunk_bytes, x.shape[1] * both))
        buffers = chunk_buffer(x, each, n), chunk_buffer(x, each, n)
        uncast = None if y.dtype == dtype else chunk_buffer(y, each, n)
        made = LinearGradients(x, w, b, wanted, asked.weight_grad_dtype or weight.dtype)
        width, device = padded(n), on.device
        loaded = on.kernels["fused_linear_distillation_rows"]((dtype, kind, True), n)
        for first in range(0, rows, each):
            last = min(first + each, rows)
            whole_rows = buffers[0][: last - first]
            logits = project(x[first:last], w, b, whole_rows[:, :classes])
            if classes < n:
                whole_rows[:, classes:].zero_()
            teacher = project_cast(y[first:last], v, c, buffers[1][: last - first], uncast)
            loaded.launch(
                device, on.stream(device), last - first, 1, 1,
                losses[0, first:].data_ptr(), losses[1, first:].data_ptr(), logits.data_ptr(), teacher.data_ptr(),
                t[first:].data_ptr(), count.data_ptr(), None if outer is None else outer.data_ptr(),
                device_errors.flag(self.name), width, n, classes, width, asked.ignore_index, WORDS[t.dtype],
                LOG2_E / asked.temperature, 1 / asked.temperature, number, asked.weight_soft, asked.weight_hard,
                any(wanted),
            )  # fmt: skip
            if any(wanted):
                made.add(first, logits)
        device_errors.check_now(self.name, student_input.device)
        gradients = made.shaped(student_input, bias)
        if grad is not None:  # the forward gave them
            return (None,) * OUTPUTS, gradients
        soft, hard = (losses.sum(1) / count).unbind(0)
        return (asked.weight_soft * soft + asked.weight_hard * hard, soft.clone(), hard.clone()), gradients

    @staticmethod
    def reference(*arguments: Any) -> tuple[Tensor, ...]:
        tensors, settings = arguments[:7], arguments[7:]
        asked = Settings(*settings)
        now = not found_in_backward(tensors[0].dtype, "mean")
        outputs, gradients = whole(tensors, asked, None, [want and now for want in asked.wanted])
        return (*outputs, *(outputs[0].new_empty(0) if g is None else g for g in gradients))

    @staticmethod
    def reference_backward(grads: Tensors, saved: Tensors, *settings: Any) -> Tensors:
        tensors, gradients = saved[:7], saved[7:]
        if any(g is not None for g in gradients):
            found: Tensors = tuple(None if g is None else scaled(g, grads[0]) for g in gradients)
        else:
            _, found = whole(tensors, Settings(*settings), grads[0], [True, True, tensors[5] is not None])
        d_input, d_weight, d_bias = found
        return d_input, d_weight, None, None, None, d_bias, None

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        """The one kernel of the op's own, on logits of ``shape``."""
        return (Problem("fused_linear_distillation_rows", (dtype, "mixed"), True, shape[-1]),)


def whole(
    tensors: Tensors, asked: Settings, grad: Tensor | None, wanted: Sequence[bool]
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensors]:
    """(outputs, gradients of student_input, student_weight and student_bias, None where not wanted) in plain torch,
    with all logits at once."""
    x, weight, teacher_x, teacher_weight, target, bias, teacher_bias = tensors
    wide = torch.promote_types(x.dtype, torch.float32)
    flat, w, t = x.reshape(target.numel(), x.shape[-1]).to(wide), weight.to(wide), target.reshape(-1)
    student = flat @ w.t()
    student = student if bias is None else student + bias.to(wide)
    teacher = teacher_x.reshape(flat.shape[0], teacher_x.shape[-1]).to(wide) @ teacher_weight.to(wide).t()
    teacher = teacher if teacher_bias is None else teacher + teacher_bias.to(wide)
    counts = counted(t, asked.ignore_index)
    each = 1 / counts.sum().clamp(min=1).to(wide)
    missing = teacher.shape[1] - student.shape[1]
    rows, slopes = _soft(torch.nn.functional.pad(student, (0, missing)), teacher, asked)
    rows = torch.where(counts, rows, 0) * each
    g = torch.where(counts.unsqueeze(-1), slopes, 0)[:, : student.shape[1]] * (asked.weight_soft * each)
    log_q = student.log_softmax(-1)
    at = torch.where(counts, t.long(), 0).unsqueeze(-1)
    hard_rows = torch.where(counts, -log_q.gather(-1, at).squeeze(-1), 0) * each
    by = (counts.to(wide) * (asked.weight_hard * each)).unsqueeze(-1)
    g = (g + log_q.exp() * by).scatter_add(-1, at, -by)
    loss = (asked.weight_soft * rows + asked.weight_hard * hard_rows).sum()
    outputs = loss, rows.detach().sum(), hard_rows.detach().sum()
    if not any(wanted):
        return outputs, (None, None, None)
    if grad is not None:
        g = g * grad.to(wide)
    want_x, want_weight, want_bias = wanted
    dtype = (asked.weight_grad_dtype if x.dtype != torch.float64 else None) or weight.dtype
    return outputs, (
        (g @ w).to(x.dtype).view(x.shape) if want_x else None,
        (g.t() @ flat).to(dtype) if want_weight else None,
        g.sum(0).to(bias.dtype) if want_bias and bias is not None else None,
    )


def _soft(student: Tensor, teacher: Tensor, asked: Settings) -> tuple[Tensor, Tensor]:
    """(rows,) soft losses, and their derivatives by the student's logits."""
    if asked.soft == "cosine":
        norm, other = (
            t.square().sum(-1, keepdim=True).sqrt().clamp(min=LEAST_NORM) for t in (student, teacher)
        )
        x, y = student / norm, teacher / other
        cosine = (x * y).sum(-1, keepdim=True)
        return 1 - cosine.squeeze(-1), (x * cosine - y) / norm
    log_q, log_p = ((logits / asked.temperature).log_softmax(-1) for logits in (student, teacher))
    summands, slopes = summands_and_slopes(log_q, log_p, asked.beta)
    slopes = slopes - log_q.exp() * slopes.sum(-1, keepdim=True)
    return summands.sum(-1), slopes / asked.temperature


OP = FusedLinearDistillationLoss
