"""Generalised Jensen-Shannon divergence of two linear layers' results, which are never whole in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import e, log2
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.arguments import ABOVE_ZERO, ANY, Allowed, Schema
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.losses._divergence import check_labels, count_labels
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
    row_bytes,
    scaled,
)
from liger_aot.ops.losses._row_loss import counted
from liger_aot.ops.losses.jsd import kind_of, smaller_weight, summands_and_slopes
from liger_aot.ops.op import Problem, check_rows, check_same_device

LOG2_E = log2(e)


class FusedLinearJSD(LinearLoss):
    """``fused_linear_jsd(student_input, student_weight, teacher_input, teacher_weight, shift_labels=None,
    student_bias=None, teacher_bias=None, *, jsd_beta=0.5, ignore_index=-100, temperature=1.0, chunk_bytes=2**29,
    weight_grad_dtype=None) -> Tensor``: ``jsd`` of the log-softmaxes of (student_input @ student_weight^T +
    student_bias) / temperature and the teacher's, of which only chunks of rows exist at a time.

    Differentiable in the student's input, weight and bias; the teacher's get no gradient. Works under torch.compile
    and, after ``preload``, in CUDA graphs: nothing waits for the device. CPU tensors take the plain-torch reference,
    which holds all logits.

    The logits are computed in the inputs' dtype, the divergence in float32. Where a gradient is wanted it is found in
    the forward: the chunk's kernel writes it over the student's logits, and two products take it to input and weight.
    The first backward multiplies those by the loss's gradient in place (a launch that returns at once where that is 1);
    a second one (``retain_graph=True``) computes all again. What is frozen costs nothing. For float16, whose range a
    loss scaler's factor has to reach before the gradients are found, they are found in the backward.

    Args:
        student_input: (..., k) bfloat16, float16 or float32.
        student_weight: (vocabulary, k) of student_input's dtype, or float32: then it is cast for the products, once a
            call.
        teacher_input: (..., j) of student_input's leading dimensions. Where its dtype is another, the teacher's logits
            are computed in that and cast to student_input's.
        teacher_weight: (vocabulary, j) of teacher_input's dtype or float32.
        shift_labels: (...) int64 or int32 or None. Rows whose label is ``ignore_index`` do not count: their gradient is
            zero. If none counts the loss is 0.
        student_bias, teacher_bias: (vocabulary,) of the weight's kinds of dtype, or None.
        jsd_beta: the teacher's weight, from 0 to 1: 0 gives the forward KL divergence, 1 the reverse.
        ignore_index: the label of rows that do not count.
        temperature: above 0.
        chunk_bytes: of memory for both models' logits of a chunk.
        weight_grad_dtype: of student_weight's gradient while it is added up, a rounding a chunk: None is the weight's,
            or torch.float32. The weight's ``grad_dtype`` decides what becomes of it.

    Returns:
        () float32: the sum over the rows that count, divided by their number.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: shapes or devices don't fit; a number is out of its range; chunk_bytes holds no row.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Agarwal et al., On-Policy Distillation of Language Models (2024); Liger Kernel (Hsu et al., 2024).
    """

    name = "fused_linear_jsd"
    uses = ("fused_linear_jsd", "divergence_sums", "fused_linear_cross_entropy")
    tensors = (
        "student_input", "student_weight", "teacher_input", "teacher_weight", "shift_labels?", "student_bias?",
        "teacher_bias?",
    )  # fmt: skip
    graded = ("student_input", "student_weight", "student_bias")
    settings = Schema(
        {
            "float beta": Allowed(least=0, most=1, called="jsd_beta"),
            "int ignore_index": ANY,
            "float temperature": ABOVE_ZERO,
            "int chunk_bytes": Allowed(least=1),
            "ScalarType? weight_grad_dtype": ANY,
            "bool[] wanted": ANY,
        }
    )
    results = 1 + len(graded)

    def __call__(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        shift_labels: Tensor | None = None,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
        *,
        jsd_beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        chunk_bytes: int = BUDGET,
        weight_grad_dtype: torch.dtype | None = None,
    ) -> Tensor:
        student_input, student_weight, student_bias = autocast(student_input, student_weight, student_bias)
        teacher_input, teacher_weight, teacher_bias = (
            t.detach() if isinstance(t, Tensor) else t
            for t in autocast(teacher_input, teacher_weight, teacher_bias)
        )
        tensors = (
            student_input, student_weight, teacher_input, teacher_weight, shift_labels, student_bias, teacher_bias,
        )  # fmt: skip
        settings = (jsd_beta, ignore_index, temperature, chunk_bytes, weight_grad_dtype)
        loss: Tensor = self.differentiable(tensors, settings)
        return loss

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        x, weight, teacher_x, teacher_weight, labels, bias, teacher_bias = tensors
        check_models(self.name, (x, weight, bias), (teacher_x, teacher_weight, teacher_bias))
        if teacher_weight.shape[0] != weight.shape[0]:
            raise ArgumentError(
                f"{self.name}: teacher_weight must have student_weight's {weight.shape[0]} rows; got "
                f"{tuple(teacher_weight.shape)}"
            )
        if labels is not None:
            check_labels(self.name, "shift_labels", labels, "student_input", x)
        check_weight_grad_dtype(self.name, settings[4], weight)
        chunk_rows(self.name, 1, bytes_of_both(x, teacher_x, weight.shape[0]), settings[3])

    def in_backward(self, tensors: Tensors, settings: tuple[Any, ...]) -> bool:
        return found_in_backward(tensors[0].dtype, "batchmean")

    def compute(
        self, tensors: Tensors, settings: tuple[Any, ...], wanted: Sequence[bool], grad: Tensor | None
    ) -> tuple[Tensors, Tensors]:
        student_input, weight, teacher_input, teacher_weight, labels, bias, teacher_bias = tensors
        beta, ignored, temperature, chunk_bytes, weight_grad_dtype = settings
        on = self._own.of(student_input, "student_input")
        sums = self._runtimes["divergence_sums"].of(student_input, "student_input")
        assert on is not None and sums is not None
        dtype, n = student_input.dtype, weight.shape[0]
        x, y = contiguous_rows(student_input), contiguous_rows(teacher_input)
        w, v = weight.to(dtype), teacher_weight.to(y.dtype)
        b, c = (
            None if bias is None else bias.to(dtype),
            None if teacher_bias is None else teacher_bias.to(y.dtype),
        )
        rows = x.shape[0]
        labels = None if labels is None else labels.reshape(-1).contiguous()
        words = 0 if labels is None else labels.element_size() // 4
        count = None if labels is None else count_labels(sums, labels, ignored)
        count_at = None if count is None else count.data_ptr()
        per_row = 1.0 if labels is not None else 1.0 / rows
        outer = None if grad is None else grad.to(torch.float32)
        losses = x.new_empty(rows, dtype=torch.float32)

        each = chunk_rows(self.name, rows, bytes_of_both(x, y, n), chunk_bytes)
        buffers = chunk_buffer(x, each, n), chunk_buffer(x, each, n)
        uncast = None if y.dtype == dtype else chunk_buffer(y, each, n)
        made = LinearGradients(x, w, b, wanted, weight_grad_dtype or weight.dtype)
        width, device = padded(n), on.device
        loaded = on.kernels["fused_linear_jsd_rows"]((dtype, kind_of(beta), True), n)
        for first in range(0, rows, each):
            last = min(first + each, rows)
            logits = project(x[first:last], w, b, buffers[0][: last - first])
            teacher = project_cast(y[first:last], v, c, buffers[1][: last - first], uncast)
            loaded.launch(
                device, on.stream(device), last - first, 1, 1,
                losses[first:].data_ptr(), logits.data_ptr(), teacher.data_ptr(),
                None if labels is None else labels[first:].data_ptr(), count_at,
                None if outer is None else outer.data_ptr(), width, n, width, ignored, words, LOG2_E / temperature,
                1 / temperature, per_row, smaller_weight(beta), any(wanted),
            )  # fmt: skip
            if any(wanted):
                made.add(first, logits)
        loss = x.new_empty((), dtype=torch.float32)
        total = sums.kernels["divergence_total"]((True,), rows)
        total.launch(
            device, sums.stream(device), 1, 1, 1, loss.data_ptr(), losses.data_ptr(), count_at, rows, per_row
        )  # fmt: skip
        return (loss,), made.shaped(student_input, bias)

    @staticmethod
    def reference(*arguments: Any) -> tuple[Tensor, ...]:
        tensors, settings = arguments[:7], arguments[7:]
        now = not found_in_backward(tensors[0].dtype, "batchmean")
        loss, gradients = whole(tensors, settings, None, [want and now for want in settings[-1]])
        return (loss, *(loss.new_empty(0) if g is None else g for g in gradients))

    @staticmethod
    def reference_backward(grads: Tensors, saved: Tensors, *settings: Any) -> Tensors:
        tensors, gradients = saved[:7], saved[7:]
        if any(g is not None for g in gradients):
            found: Tensors = tuple(None if g is None else scaled(g, grads[0]) for g in gradients)
        else:
            _, found = whole(tensors, settings, grads[0], [True, True, tensors[5] is not None])
        d_input, d_weight, d_bias = found
        return d_input, d_weight, None, None, None, d_bias, None

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        """The one kernel of the op's own, on logits of ``shape``."""
        return (Problem("fused_linear_jsd_rows", (dtype, "mixed"), True, shape[-1]),)


def bytes_of_both(x: Tensor, y: Tensor, n: int) -> int:
    """Of a row of both models' logits; the teacher's are there twice where they are cast."""
    return 2 * row_bytes(x, n) + (row_bytes(y, n) if y.dtype != x.dtype else 0)


def check_models(op: str, student: tuple[Any, Any, Any], teacher: tuple[Any, Any, Any]) -> None:
    """Raise unless both are (input, weight, bias or None) of a linear layer, for as many rows."""
    x, y = student[0], teacher[0]
    check_rows(op, "student_input", x)
    check_rows(op, "teacher_input", y)
    check_same_device(op, "teacher_input", y, "student_input", x)
    if y.shape[:-1] != x.shape[:-1]:
        raise ArgumentError(
            f"{op}: teacher_input must be of student_input's leading dimensions, {(*x.shape[:-1], 'j')}; got "
            f"{tuple(y.shape)}"
        )
    _check_parameters(op, "student", *student)
    _check_parameters(op, "teacher", *teacher)


def _check_parameters(op: str, whose: str, x: Tensor, weight: Any, bias: Any) -> None:
    for argument, value in ((f"{whose}_weight", weight), (f"{whose}_bias", bias)):
        if value is None and argument.endswith("bias"):
            continue
        if not isinstance(value, Tensor):
            raise ArgumentTypeError(f"{op}: {argument} must be a torch.Tensor, got {type(value).__name__}")
        check_same_device(op, argument, value, f"{whose}_input", x)
        if value.dtype not in (x.dtype, torch.float32):
            raise ArgumentTypeError(
                f"{op}: {argument} must be of {whose}_input's dtype {x.dtype} or float32, got {value.dtype}"
            )
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ArgumentError(
            f"{op}: {whose}_weight must be of shape (vocabulary, {x.shape[-1]}), as {whose}_input "
            f"{tuple(x.shape)} asks; got {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ArgumentError(
            f"{op}: {whose}_bias must be of shape ({weight.shape[0]},), {whose}_weight's rows; got "
            f"{tuple(bias.shape)}"
        )


def whole(
    tensors: Tensors, settings: tuple[Any, ...], grad: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor, Tensors]:
    """(loss, gradients of student_input, student_weight and student_bias, None where not wanted) in plain torch, with
    all logits at once."""
    x, weight, teacher_x, teacher_weight, labels, bias, teacher_bias = tensors
    beta, ignored, temperature, _, weight_grad_dtype = settings[:5]
    wide = torch.promote_types(x.dtype, torch.float32)
    flat, w = x.reshape(x.shape[:-1].numel(), x.shape[-1]).to(wide), weight.to(wide)
    student = flat @ w.t()
    teacher = teacher_x.reshape(flat.shape[0], teacher_x.shape[-1]).to(wide) @ teacher_weight.to(wide).t()
    student = student if bias is None else student + bias.to(wide)
    teacher = teacher if teacher_bias is None else teacher + teacher_bias.to(wide)
    log_q, log_p = ((logits / temperature).log_softmax(-1) for logits in (student, teacher))
    summands, slopes = summands_and_slopes(log_q, log_p, beta)
    counts = flat.new_ones(flat.shape[0]) if labels is None else counted(labels.reshape(-1), ignored).to(wide)
    factor = counts / counts.sum().clamp(min=1)
    loss = (torch.where(counts == 0, 0, summands.sum(-1)) * factor).sum()
    g = slopes - log_q.exp() * slopes.sum(-1, keepdim=True)
    g = torch.where(counts.unsqueeze(-1) == 0, 0, g * (factor / temperature).unsqueeze(-1))
    if grad is not None:
        g = g * grad.to(wide)
    want_x, want_weight, want_bias = wanted
    return loss, (
        (g @ w).to(x.dtype).view(x.shape) if want_x else None,
        (g.t() @ flat).to(weight_grad_dtype or weight.dtype) if want_weight else None,
        g.sum(0).to(bias.dtype) if want_bias and bias is not None else None,
    )


OP = FusedLinearJSD
