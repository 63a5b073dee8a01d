"""Kullback-Leibler divergence of a model's log-probabilities from a target distribution, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_aot.ops.arguments import ANY, FROM_ZERO, Schema
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.losses._divergence import REDUCTION, Divergence, Summand, reduced, reduced_backward


class KLDiv(Divergence):
    """``kl_div(input, target, *, reduction="batchmean", log_target=False, eps=1e-10) -> Tensor``: the sum of
    target * (log(target) - input), or with ``log_target`` of exp(target) * (target - input).

    As torch.nn.functional.kl_div, but for the loss's dtype and ``eps``. Differentiable in input; works under
    torch.compile and, after ``preload``, in CUDA graphs. CPU tensors take the plain-torch reference. Sums are float32
    in a fixed order. The gradient is found in the forward where it is wanted, and rounded once.

    Args:
        input: (..., n) log-probabilities: bfloat16, float16 or float32. Rows may have any stride; other layouts are
            copied.
        target: of input's shape and dtype: probabilities or, with ``log_target``, log-probabilities. Where one is zero,
            nothing is added, even if input is -inf there (torch and Liger give NaN). It gets no gradient: one that
            requires a gradient is an error.
        reduction: "batchmean" divides the sum by input's first dimension, "mean" by the number of elements; "sum" and
            "none".
        log_target: whether target holds log-probabilities.
        eps: the least target that a logarithm is taken of.

    Returns:
        () float32, or with "none" a contiguous float32 tensor of input's shape.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: a shape, device or reduction does not fit, or target requires a gradient.
        PackNotFound: no installed pack serves the GPU.

    Source:
        torch.nn.functional.kl_div; ``eps`` is Liger-Kernel's.
    """

    name = "kl_div"
    tensors = ("input", "target")
    settings = Schema({"str reduction": REDUCTION, "bool log_target": ANY, "float eps": FROM_ZERO})
    batch_is_first = True
    usual_kind = "probabilities"

    def __call__(
        self,
        input: Tensor,
        target: Tensor,
        *,
        reduction: str = "batchmean",
        log_target: bool = False,
        eps: float = 1e-10,
    ) -> Tensor:
        loss: Tensor = self.differentiable((input, target), (reduction, log_target, eps))
        return loss

    def summand(self, settings: tuple[Any, ...]) -> Summand:
        reduction, log_target, eps = settings
        return Summand("forward" if log_target else "probabilities", eps, reduction)

    @staticmethod
    def reference(
        input: Tensor, target: Tensor, reduction: str, log_target: bool, eps: float
    ) -> tuple[Tensor]:
        wide = torch.promote_types(input.dtype, torch.float32)
        x, y = input.to(wide), target.to(wide)
        p = y.exp() if log_target else y
        summands = p * ((y if log_target else y.clamp(min=eps).log()) - x)
        return (reduced(torch.where(p == 0, 0, summands), reduction, None, -1, input.shape[0]),)

    @staticmethod
    def reference_backward(
        grads: Tensors, saved: Tensors, reduction: str, log_target: bool, eps: float
    ) -> Tensors:
        (dloss,), (x, target) = grads, saved
        y = target.to(torch.promote_types(target.dtype, torch.float32))
        slopes = -(y.exp() if log_target else y)
        return reduced_backward(slopes, dloss, reduction, None, -1, x.shape[0]).to(x.dtype), None


OP = KLDiv
