"""Generalised Jensen-Shannon divergence of two models' log-probabilities, forward and backward."""

from __future__ import annotations

from math import log
from typing import Any

import torch
from torch import Tensor

from liger_aot.ops.arguments import ANY, Allowed, Schema
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.losses._divergence import Divergence, Summand, reduced, reduced_backward

LEAST_WEIGHT = 2.0**-126  # the least normal float32


class JSD(Divergence):
    """``jsd(input, target, shift_labels=None, *, beta=0.5, ignore_index=-100) -> Tensor``: the generalised
    Jensen-Shannon divergence of the rows, added up and divided by the number of rows that count.

    Of a row it is beta * KL(P || M) + (1 - beta) * KL(Q || M), where P = exp(target), Q = exp(input) and
    M = beta * P + (1 - beta) * Q. At the ends, where that is 0, beta = 0 means KL(P || Q) and beta = 1 KL(Q || P).

    Differentiable in input; works under torch.compile and, after ``preload``, in CUDA graphs. CPU tensors take the
    plain-torch reference. Sums are float32 in a fixed order. The gradient is found in the forward where it is wanted,
    and rounded once.

    Args:
        input: (..., n) log-probabilities of the student: bfloat16, float16 or float32. Rows may have any stride; other
            layouts are copied.
        target: log-probabilities of the teacher, of input's shape and dtype. It gets no gradient: one that requires a
            gradient is an error. Probabilities of zero (-inf) add nothing.
        shift_labels: (...) int64 or int32 or None. Rows whose label is ``ignore_index`` do not count: their gradient is
            zero. If none counts the loss is 0.
        ignore_index: the label of rows that do not count.
        beta: the teacher's weight, from 0 to 1: 0 gives the forward KL divergence KL(target || input), 1 the reverse.

    Returns:
        () float32.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: a shape, device or value does not fit, or target requires a gradient.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Agarwal et al., On-Policy Distillation of Language Models (2024); the ends are as in Liger-Kernel.
    """

    name = "jsd"
    tensors = ("input", "target", "shift_labels?")
    settings = Schema({"float beta": Allowed(least=0, most=1), "int ignore_index": ANY})
    usual_kind = "mixed"

    def __call__(
        self,
        input: Tensor,
        target: Tensor,
        shift_labels: Tensor | None = None,
        *,
        beta: float = 0.5,
        ignore_index: int = -100,
    ) -> Tensor:
        loss: Tensor = self.differentiable((input, target, shift_labels), (beta, ignore_index))
        return loss

    def summand(self, settings: tuple[Any, ...]) -> Summand:
        beta, ignored = settings
        return Summand(kind_of(beta), smaller_weight(beta), "batchmean", ignored)

    @staticmethod
    def reference(
        input: Tensor, target: Tensor, shift_labels: Tensor | None, beta: float, ignore_index: int
    ) -> tuple[Tensor]:
        wide = torch.promote_types(input.dtype, torch.float32)
        summands, _ = summands_and_slopes(input.to(wide), target.to(wide), beta)
        return (reduced(summands, "batchmean", shift_labels, ignore_index, None),)

    @staticmethod
    def reference_backward(grads: Tensors, saved: Tensors, beta: float, ignore_index: int) -> Tensors:
        (dloss,), (x, y, labels) = grads, saved
        wide = torch.promote_types(x.dtype, torch.float32)
        _, slopes = summands_and_slopes(x.to(wide), y.to(wide), beta)
        dx = reduced_backward(slopes, dloss, "batchmean", labels, ignore_index, None)
        return dx.to(x.dtype), None, None


def kind_of(beta: float) -> str:
    """Which formula the kernels take."""
    return "forward" if beta == 0 else "reverse" if beta == 1 else "mixed"


def smaller_weight(beta: float) -> float:
    """As the kernels take beta: the teacher's weight, or as a negative number the student's; none that float32 takes
    for zero."""
    return max(beta, LEAST_WEIGHT) if beta <= 0.5 else beta - 1


def summands_and_slopes(x: Tensor, y: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """What a row's divergence is the sum of, and its derivative by x; x and y are log-probabilities."""
    q, p = x.exp(), y.exp()
    if beta == 0:
        return _product(p, y - x), -p
    if beta == 1:
        summands = _product(q, x - y)
        return summands, summands + q
    mixed = torch.logaddexp(y + log(beta), x + log(1 - beta))
    from_x = _product((1 - beta) * q, x - mixed)
    return _product(beta * p, y - mixed) + from_x, from_x


def _product(probability: Tensor, logarithm: Tensor) -> Tensor:
    """0 where the probability is, whatever the logarithm."""
    return torch.where(probability == 0, 0, probability * logarithm)


OP = JSD
