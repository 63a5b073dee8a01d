"""Total variation distance of two distributions, half the sum of |p - q|, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_aot.ops.arguments import ANY, Schema
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.losses._divergence import REDUCTION, Divergence, Summand, reduced, reduced_backward


class TVD(Divergence):
    """``tvd(p, q, shift_labels=None, *, reduction="batchmean", ignore_index=-100) -> Tensor``: half the sum of
    |p - q|.

    Differentiable in p, with 0 where p is q; works under torch.compile and, after ``preload``, in CUDA graphs. CPU
    tensors take the plain-torch reference. Sums are float32 in a fixed order. The gradient is found in the forward
    where it is wanted, and rounded once.

    Args:
        p: (..., n) probabilities of the student: bfloat16, float16 or float32. Rows may have any stride; other layouts
            are copied.
        q: probabilities of the teacher, of p's shape and dtype. It gets no gradient: one that requires a gradient is an
            error.
        shift_labels: (...) int64 or int32 or None. Rows whose label is ``ignore_index`` do not count: they add nothing
            and their gradient is zero. If none counts the loss is 0.
        reduction: "batchmean" divides the sum by the number of rows that count, "mean" by that times n; "sum" and
            "none".
        ignore_index: the label of rows that do not count.

    Returns:
        () float32, or with "none" a contiguous float32 tensor of p's shape.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: a shape, device or reduction does not fit, or q requires a gradient.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Wen et al., f-Divergence Minimization for Sequence-Level Knowledge Distillation (2023).
    """

    name = "tvd"
    tensors = ("p", "q", "shift_labels?")
    settings = Schema({"str reduction": REDUCTION, "int ignore_index": ANY})
    usual_kind = "total_variation"

    def __call__(
        self,
        p: Tensor,
        q: Tensor,
        shift_labels: Tensor | None = None,
        *,
        reduction: str = "batchmean",
        ignore_index: int = -100,
    ) -> Tensor:
        loss: Tensor = self.differentiable((p, q, shift_labels), (reduction, ignore_index))
        return loss

    def summand(self, settings: tuple[Any, ...]) -> Summand:
        reduction, ignored = settings
        return Summand("total_variation", 0.0, reduction, ignored)

    @staticmethod
    def reference(
        p: Tensor, q: Tensor, shift_labels: Tensor | None, reduction: str, ignore_index: int
    ) -> tuple[Tensor]:
        wide = torch.promote_types(p.dtype, torch.float32)
        summands = (p.to(wide) - q.to(wide)).abs() / 2
        return (reduced(summands, reduction, shift_labels, ignore_index, None),)

    @staticmethod
    def reference_backward(grads: Tensors, saved: Tensors, reduction: str, ignore_index: int) -> Tensors:
        (dloss,), (p, q, labels) = grads, saved
        wide = torch.promote_types(p.dtype, torch.float32)
        difference = p.to(wide) - q.to(wide)
        slopes = torch.where(difference.isnan(), difference, difference.sign()) / 2
        return reduced_backward(slopes, dloss, reduction, labels, ignore_index, None).to(p.dtype), None, None


OP = TVD
