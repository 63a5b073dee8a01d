"""Softmax over the last dimension, with a temperature, forward and backward."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from liger_aot.ops.arguments import Allowed, Schema
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.softmax._probabilities import RowProbabilities

LOG2_E = math.log2(math.e)
# Between these, log2(e) / temperature and its inverse are normal float32 numbers.
COLDEST, HOTTEST = 2.0**-126, 2.0**126


class Softmax(RowProbabilities):
    """``softmax(x, *, temperature=1.0) -> Tensor``: exp(x / temperature) over its sum along the last dimension.

    Differentiable in x; works under torch.compile and, after ``preload``, in CUDA graphs. CPU tensors take the
    plain-torch reference. Computed in float32 from differences to the row's greatest value, rounded once.

    Args:
        x: (..., n) bfloat16, float16 or float32, n of any size. Rows may have any stride; other layouts are copied.
            -inf is allowed and gives 0. A row of nothing but -inf, and one that holds +inf or NaN, gives NaN.
        temperature: above 0, between 2^-126 and 2^126: below 1 sharpens, above 1 flattens. It gets no gradient.

    Returns:
        a contiguous tensor of x's shape and dtype. The backward reads it and not x:
        dx = y * (dy - sum(y * dy)) / temperature.

    Raises:
        ArgumentTypeError: x is not a tensor or of another dtype; temperature is no number.
        ArgumentError: x has no dimension; temperature is out of range.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Milakov and Gimelshein, Online normalizer calculation for softmax (2018).
    """

    name = "softmax"
    settings = Schema({"float temperature": Allowed(least=COLDEST, most=HOTTEST)})

    def __call__(self, x: Tensor, *, temperature: float = 1.0) -> Tensor:
        y: Tensor = self.differentiable((x,), (temperature,))
        return y

    def forward_numbers(self, settings: tuple[Any, ...]) -> tuple[float, ...]:
        return (LOG2_E / settings[0],)

    def backward_numbers(self, settings: tuple[Any, ...]) -> tuple[float, ...]:
        return (1.0 / settings[0],)

    @staticmethod
    def reference(x: Tensor, temperature: float = 1.0) -> tuple[Tensor]:
        wide = torch.promote_types(x.dtype, torch.float32)
        x_wide = x.to(wide)
        if x.shape[-1]:  # differences before the temperature: else their roundings are those of the values
            x_wide = x_wide - x_wide.amax(-1, keepdim=True)
        return (torch.softmax(x_wide / temperature, -1).to(x.dtype),)

    @staticmethod
    def reference_backward(grads: Tensors, saved: Tensors, temperature: float) -> Tensors:
        (dy,), (y,) = grads, saved
        wide = torch.promote_types(y.dtype, torch.float32)
        a, da = y.to(wide), dy.to(wide)
        dx = a * (da - (a * da).sum(-1, keepdim=True)) / temperature
        return (dx.to(y.dtype),)


OP = Softmax
