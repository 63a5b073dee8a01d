"""KL divergence of a linear layer's softmax from given probabilities, without ever holding all logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import e, log2
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.arguments import ABOVE_ZERO, ANY, Allowed, Schema
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.losses._divergence import check_labels
from liger_aot.ops.losses._linear import (
    BUDGET,
    LinearGradients,
    LinearLoss,
    autocast,
    check_linear,
    check_weight_grad_dtype,
    chunk_buffer,
    chunk_rows,
    contiguous_rows,
    found_in_backward,
    padded,
    project,
    row_bytes,
    scaled,
)
from liger_aot.ops.losses._row_loss import counted
from liger_aot.ops.op import Problem, check_rows, check_same_device, check_tensor

LOG2_E = log2(e)
REDUCTIONS = ("batchmean", "mean", "sum")


class Settings(NamedTuple):
    """Of a call, in the order of the op's schema."""

    reduction: str
    ignore_index: int
    temperature: float
    eps: float
    chunk_bytes: int
    weight_grad_dtype: torch.dtype | None
    wanted: Sequence[bool] = ()


class FusedLinearKLDiv(LinearLoss):
    """``fused_linear_kl_div(input, weight, target, shift_labels=None, *, reduction="batchmean", ignore_index=-100,
    temperature=1.0, eps=1e-10, chunk_bytes=2**29, weight_grad_dtype=None) -> Tensor``: KL(target || softmax(input @
    weight^T / temperature)), with the teacher's probabilities given, as soft labels that were computed before are.

    Differentiable in input and weight; works under torch.compile and, after ``preload``, in CUDA graphs: nothing waits
    for the device. CPU tensors take the plain-torch reference, which holds all logits. For a teacher that is a linear
    layer itself there is ``fused_linear_jsd``, with beta 0.

    The logits are computed in chunks of rows, in input's dtype, the divergence in float32. Where a gradient is wanted
    it is found in the forward: the chunk's kernel writes it over the logits, and two products take it to input and
    weight. The first backward multiplies those by the loss's gradient in place; a second one (``retain_graph=True``)
    computes all again. For float16 they are found in the backward.

    Args:
        input: (..., k) bfloat16, float16 or float32.
        weight: (vocabulary, k) of input's dtype, or float32: then it is cast for the products, once a call.
        target: (..., vocabulary) probabilities, of input's dtype or float32. No gradient. Other layouts than rows are
            copied.
        shift_labels: (...) int64 or int32 or None. Rows whose label is ``ignore_index`` do not count: their gradient is
            zero. If none counts the loss is 0.
        reduction: "batchmean" divides the sum by the number of rows that count, "mean" by that times the vocabulary;
            or "sum".
        ignore_index: the label of rows that do not count.
        temperature: above 0.
        eps: the least probability that a logarithm is taken of; above 0.
        chunk_bytes: of memory for a chunk's logits.
        weight_grad_dtype: of weight's gradient while it is added up, a rounding a chunk: None is the weight's, or
            torch.float32.

    Returns:
        () float32.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: shapes or devices don't fit; a number is out of its range; chunk_bytes holds no row.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Kullback and Leibler, On Information and Sufficiency (1951); chunks: Liger Kernel (Hsu et al., 2024).
    """

    name = "fused_linear_kl_div"
    uses = ("fused_linear_cross_entropy",)
    tensors = ("input", "weight", "target", "shift_labels?")
    graded = ("input", "weight")
    settings = Schema(
        {
            "str reduction": Allowed(among=REDUCTIONS),
            "int ignore_index": ANY,
            "float temperature": ABOVE_ZERO,
            "float eps": ABOVE_ZERO,
            "int chunk_bytes": Allowed(least=1),
            "ScalarType? weight_grad_dtype": ANY,
            "bool[] wanted": ANY,
        }
    )
    results = 1 + len(graded)

    def __call__(
        self,
        input: Tensor,
        weight: Tensor,
        target: Tensor,
        shift_labels: Tensor | None = None,
        *,
        reduction: str = "batchmean",
        ignore_index: int = -100,
        temperature: float = 1.0,
        eps: float = 1e-10,
        chunk_bytes: int = BUDGET,
        weight_grad_dtype: torch.dtype | None = None,
    ) -> Tensor:
        input, weight = autocast(input, weight)
        target = target.detach() if isinstance(target, Tensor) else target
        settings = (reduction, ignore_index, temperature, eps, chunk_bytes, weight_grad_dtype)
        loss: Tensor = self.differentiable((input, weight, target, shift_labels), settings)
        return loss

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        x, weight, target, labels = tensors
        asked = Settings(*settings)
        check_rows(self.name, "input", x)
        check_linear(self.name, "input", x, weight, None)
        check_tensor(self.name, "target", target)
        check_same_device(self.name, "target", target, "input", x)
        if target.dtype not in (x.dtype, torch.float32):
            raise ArgumentTypeError(
                f"{self.name}: target must be of input's dtype {x.dtype} or float32, got {target.dtype}"
            )
        if target.shape != (*x.shape[:-1], weight.shape[0]):
            raise ArgumentError(
                f"{self.name}: target must be of shape {(*x.shape[:-1], weight.shape[0])}, a probability a class; got "
                f"{tuple(target.shape)}"
            )
        if labels is not None:
            check_labels(self.name, "shift_labels", labels, "input", x)
        check_weight_grad_dtype(self.name, asked.weight_grad_dtype, weight)
        chunk_rows(self.name, 1, row_bytes(x, weight.shape[0]), asked.chunk_bytes)

    def in_backward(self, tensors: Tensors, settings: tuple[Any, ...]) -> bool:
        return found_in_backward(tensors[0].dtype, "mean")

    def compute(
        self, tensors: Tensors, settings: tuple[Any, ...], wanted: Sequence[bool], grad: Tensor | None
    ) -> tuple[Tensors, Tensors]:
        input, weight, target, labels = tensors
        asked = Settings(*settings)
        on = self._own.of(input, "input")
        assert on is not None
        dtype, n = input.dtype, weight.shape[0]
        x, w, q = contiguous_rows(input), weight.to(dtype), contiguous_rows(target)
        rows, q_at, q_stride = x.shape[0], q.data_ptr(), q.stride(0)
        q_bytes = q_stride * q.element_size()
        labels = None if labels is None else labels.reshape(-1).contiguous()
        words = 0 if labels is None else labels.element_size() // 4
        count = None
        if labels is not None and asked.reduction != "sum":
            count = counted(labels, asked.ignore_index).sum(dtype=torch.float32)
        per_row = _per_row(asked.reduction, 1 if count is not None else rows, n)
        outer = None if grad is None else grad.to(torch.float32)
        losses = x.new_empty(rows, dtype=torch.float32)

        width = padded(n)
        each = chunk_rows(self.name, rows, width * x.element_size(), asked.chunk_bytes)
        buffer, device = chunk_buffer(x, each, n), on.device
        made = LinearGradients(x, w, None, (*wanted, False), asked.weight_grad_dtype or weight.dtype)
        aligned = not (q_at | q_stride | n) & 15
        loaded = on.kernels["fused_linear_kl_div_rows"]((dtype, q.dtype, aligned), n)
        for first in range(0, rows, each):
            last = min(first + each, rows)
            logits = project(x[first:last], w, None, buffer[: last - first])
            loaded.launch(
                device, on.stream(device), last - first, 1, 1,
                losses[first:].data_ptr(), logits.data_ptr(), q_at + first * q_bytes,
                None if labels is None else labels[first:].data_ptr(), None if count is None else count.data_ptr(),
                None if outer is None else outer.data_ptr(), width, q_stride, n, width, asked.ignore_index, words,
                LOG2_E / asked.temperature, 1 / asked.temperature, asked.eps, per_row, any(wanted),
            )  # fmt: skip
            if any(wanted):
                made.add(first, logits)
        return (losses.sum(),), made.shaped(input, None)[:2]

    @staticmethod
    def reference(*arguments: Any) -> tuple[Tensor, ...]:
        tensors, settings = arguments[:4], arguments[4:]
        asked = Settings(*settings)
        now = not found_in_backward(tensors[0].dtype, "mean")
        loss, gradients = whole(tensors, asked, None, [want and now for want in asked.wanted])
        return (loss, *(loss.new_empty(0) if g is None else g for g in gradients))

    @staticmethod
    def reference_backward(grads: Tensors, saved: Tensors, *settings: Any) -> Tensors:
        tensors, gradients = saved[:4], saved[4:]
        if any(g is not None for g in gradients):
            found: Tensors = tuple(None if g is None else scaled(g, grads[0]) for g in gradients)
        else:
            _, found = whole(tensors, Settings(*settings), grads[0], [True, True])
        return *found, None, None

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        """The one kernel of the op's own, on logits of ``shape``."""
        n = shape[-1]
        target = (dtypes or {}).get("target", dtype)
        return (Problem("fused_linear_kl_div_rows", (dtype, target), n % 16 == 0, n),)


def _per_row(reduction: str, rows: int, n: int) -> float:
    """What a row's divergence is multiplied by."""
    return 1.0 if reduction == "sum" else 1 / (max(rows, 1) * (n if reduction == "mean" else 1))


def whole(
    tensors: Tensors, asked: Settings, grad: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor, Tensors]:
    """(loss, gradients of input and weight, None where not wanted) in plain torch, with all logits at once."""
    x, weight, target, labels = tensors
    wide = torch.promote_types(x.dtype, torch.float32)
    flat, w = x.reshape(x.shape[:-1].numel(), x.shape[-1]).to(wide), weight.to(wide)
    q = target.reshape(flat.shape[0], w.shape[0]).to(wide)
    log_p = (flat @ w.t() / asked.temperature).log_softmax(-1)
    summands = torch.where(q == 0, 0, q * (q.clamp(min=asked.eps).log() - log_p))
    counts = torch.ones_like(q[:, 0], dtype=torch.bool) if labels is None else None
    if counts is None:
        counts = counted(labels.reshape(-1), asked.ignore_index)
    count = counts.sum().clamp(min=1).to(wide)
    factor = _per_row(asked.reduction, 1, w.shape[0]) / (1 if asked.reduction == "sum" else count)
    loss = torch.where(counts, summands.sum(-1), 0).sum() * factor
    if not any(wanted):
        return loss, (None, None)
    g = (log_p.exp() * q.sum(-1, keepdim=True) - q) * (factor / asked.temperature)
    g = torch.where(counts.unsqueeze(-1), g, 0)
    g = g if grad is None else g * grad.to(wide)
    dtype = (asked.weight_grad_dtype if x.dtype != torch.float64 else None) or weight.dtype
    return loss, (
        (g @ w).to(x.dtype).view(x.shape) if wanted[0] else None,
        (g.t() @ flat).to(dtype) if wanted[1] else None,
    )


OP = FusedLinearKLDiv
