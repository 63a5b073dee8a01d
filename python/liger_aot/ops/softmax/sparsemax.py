"""Sparsemax over the last dimension, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.softmax._probabilities import RowProbabilities


class Sparsemax(RowProbabilities):
    """``sparsemax(x) -> Tensor``: the point of the probability simplex nearest to x along the last dimension:
    max(x - tau, 0) with the tau that makes it sum to 1. Most of a row is exactly 0.

    Differentiable in x; works under torch.compile and, after ``preload``, in CUDA graphs. CPU tensors take the
    plain-torch reference, which sorts; the kernels find tau by Newton's method, without a sort, and give the same bits
    every time. Computed in float32 from differences to the row's greatest value, rounded once.

    Args:
        x: (..., n) bfloat16, float16 or float32, n of any size. Rows may have any stride; other layouts are copied.
            -inf is allowed and gives 0. A row of nothing but -inf, and one that holds +inf or NaN, gives NaN.

    Returns:
        a contiguous tensor of x's shape and dtype. The backward reads it and not x: where y > 0, dx is dy less dy's
        mean there; elsewhere it is 0.

    Raises:
        ArgumentTypeError: x is not a tensor or of another dtype.
        ArgumentError: x has no dimension.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Martins and Astudillo, From Softmax to Sparsemax: A Sparse Model of Attention and Multi-Label
        Classification (2016).
    """

    name = "sparsemax"

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.differentiable((x,))
        return y

    @staticmethod
    def reference(x: Tensor) -> tuple[Tensor]:
        if not x.numel():
            return (torch.empty_like(x, memory_format=torch.contiguous_format),)
        wide = torch.promote_types(x.dtype, torch.float32)
        z = x.to(wide)
        z = z - z.amax(-1, keepdim=True)
        # A subset's threshold is never above the row's; that of the k greatest is, for the right k, the row's own.
        sums = z.sort(-1, descending=True).values.cumsum(-1)
        counts = torch.arange(1, x.shape[-1] + 1, dtype=wide, device=x.device)
        tau = ((sums - 1) / counts).amax(-1, keepdim=True)
        return ((z - tau).clamp(min=0).to(x.dtype),)

    @staticmethod
    def reference_backward(grads: Tensors, saved: Tensors) -> Tensors:
        (dy,), (y,) = grads, saved
        wide = torch.promote_types(y.dtype, torch.float32)
        da, support = dy.to(wide), y > 0
        mean = da.where(support, 0).sum(-1, keepdim=True) / support.sum(-1, keepdim=True)
        return ((da - mean).where(support, y.to(wide)).to(y.dtype),)


OP = Sparsemax
