"""Log-softmax over the last dimension, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.softmax._probabilities import RowProbabilities


class LogSoftmax(RowProbabilities):
    """``log_softmax(x) -> Tensor``: x - log(sum(exp(x))) along the last dimension.

    Differentiable in x; works under torch.compile and, after ``preload``, in CUDA graphs. CPU tensors take the
    plain-torch reference. Computed in float32 from differences to the row's greatest value, rounded once.

    Args:
        x: (..., n) bfloat16, float16 or float32, n of any size. Rows may have any stride; other layouts are copied.
            -inf is allowed and stays -inf. A row of nothing but -inf, and one that holds +inf or NaN, gives NaN.

    Returns:
        a contiguous tensor of x's shape and dtype. The backward reads it and not x: dx = dy - exp(y) * sum(dy).

    Raises:
        ArgumentTypeError: x is not a tensor or of another dtype.
        ArgumentError: x has no dimension.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Milakov and Gimelshein, Online normalizer calculation for softmax (2018).
    """

    name = "log_softmax"

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.differentiable((x,))
        return y

    @staticmethod
    def reference(x: Tensor) -> tuple[Tensor]:
        wide = torch.promote_types(x.dtype, torch.float32)
        return (torch.log_softmax(x.to(wide), -1).to(x.dtype),)

    @staticmethod
    def reference_backward(grads: Tensors, saved: Tensors) -> Tensors:
        (dy,), (y,) = grads, saved
        wide = torch.promote_types(y.dtype, torch.float32)
        dx = dy.to(wide) - y.to(wide).exp() * dy.to(wide).sum(-1, keepdim=True)
        return (dx.to(y.dtype),)


OP = LogSoftmax
