"""LayerNorm with 8-bit codes as its result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_aot.ops.arguments import FROM_ZERO, Schema
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.norms.layernorm import LayerNorm
from liger_aot.ops.quantization._codes import COMMON, quantized_reference
from liger_aot.ops.quantization._norms import NormQuantize


class LayerNormQuantize(NormQuantize):
    """``layernorm_quantize(x, weight=None, bias=None, scale=None, *, scheme="token", dtype=None, group_size=128,
    scale_layout="row_major", ue8m0=False, scale_ub=None, eps=1e-5) -> (Tensor, Tensor)``: the codes and scales of
    layernorm(x), in one pass.

    y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias is rounded to x's dtype, as ``layernorm`` gives it, and then
    quantised: how, ``quantize`` says. No gradient. Works under torch.compile and, after ``preload``, in CUDA graphs.
    CPU tensors take the plain-torch reference.

    Args:
        x: (..., n) bfloat16 or float16. Rows may have any stride; other layouts are copied.
        weight: (n,) of x's dtype, or None.
        bias: (n,) of x's dtype, or None.
        scale: for scheme "tensor", which needs it: one float32 element on x's device.
        scheme, dtype, group_size, scale_layout, ue8m0, scale_ub: as of ``quantize``.
        eps: added to the variance, which is that of the row itself (divided by n).

    Returns:
        codes and scales, as of ``quantize``.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype; the GPU has no such fp8.
        ArgumentError: shapes, devices or settings do not fit each other, or a gradient is needed.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Ba, Kiros and Hinton, Layer Normalization (2016).
    """

    name = "layernorm_quantize"
    tensors = ("x", "weight?", "bias?", "scale?", "scale_ub?")
    settings = Schema({**COMMON, "float eps": FROM_ZERO})

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        scale: Tensor | None = None,
        *,
        scheme: str = "token",
        dtype: torch.dtype | None = None,
        group_size: int = 128,
        scale_layout: str = "row_major",
        ue8m0: bool = False,
        scale_ub: Tensor | None = None,
        eps: float = 1e-5,
    ) -> tuple[Tensor, Tensor]:
        settings = (scheme, dtype, group_size, scale_layout, ue8m0, eps)
        results: tuple[Tensor, Tensor] = self.quantized((x, weight, bias, scale, scale_ub), settings)
        return results

    def scalars(self, settings: tuple[Any, ...], vectors: Tensors) -> tuple[Any, ...]:
        weight, bias = vectors
        return settings[5], 1.0 if weight is None else 0.0, weight is not None, bias is not None

    @staticmethod
    def reference(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        scale: Tensor | None,
        scale_ub: Tensor | None,
        *settings: Any,
    ) -> tuple[Tensor, Tensor]:
        return quantized_reference(
            LayerNorm.reference(x, weight, bias, settings[5])[0], scale, scale_ub, settings
        )


OP = LayerNormQuantize
