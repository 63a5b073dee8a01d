"""RMSNorm with 8-bit codes as its result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_aot.ops.arguments import Schema
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.norms.rmsnorm import NORM_SETTINGS, ROUND_FIRST, RMSNorm
from liger_aot.ops.quantization._codes import COMMON, quantized_reference
from liger_aot.ops.quantization._norms import NormQuantize


class RMSNormQuantize(NormQuantize):
    """``rmsnorm_quantize(x, weight=None, scale=None, *, scheme="token", dtype=None, group_size=128,
    scale_layout="row_major", ue8m0=False, scale_ub=None, eps=1e-6, offset=0.0, casting_mode="llama")
    -> (Tensor, Tensor)``: the codes and scales of rmsnorm(x), in one pass.

    y = x / sqrt(mean(x^2) + eps) * (offset + weight) is rounded to x's dtype, as ``rmsnorm`` gives it, and then
    quantised: how, ``quantize`` says. No gradient. Works under torch.compile and, after ``preload``, in CUDA graphs.
    CPU tensors take the plain-torch reference.

    Args:
        x: (..., n) bfloat16 or float16. Rows may have any stride; other layouts are copied.
        weight: (n,) of x's dtype, or None.
        scale: for scheme "tensor", which needs it: one float32 element on x's device.
        scheme, dtype, group_size, scale_layout, ue8m0, scale_ub: as of ``quantize``.
        eps: added to the mean of squares.
        offset: added to the weight (1.0 for Gemma); without effect where there is no weight.
        casting_mode: "llama" rounds x / rms to x's dtype before the weight is applied, "gemma" and "none" do not.

    Returns:
        codes and scales, as of ``quantize``.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype; the GPU has no such fp8.
        ArgumentError: shapes, devices or settings do not fit each other, or a gradient is needed.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Zhang and Sennrich, Root Mean Square Layer Normalization (2019).
    """

    name = "rmsnorm_quantize"
    tensors = ("x", "weight?", "scale?", "scale_ub?")
    settings = Schema({**COMMON, **NORM_SETTINGS})

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | None = None,
        scale: Tensor | None = None,
        *,
        scheme: str = "token",
        dtype: torch.dtype | None = None,
        group_size: int = 128,
        scale_layout: str = "row_major",
        ue8m0: bool = False,
        scale_ub: Tensor | None = None,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
    ) -> tuple[Tensor, Tensor]:
        settings = (scheme, dtype, group_size, scale_layout, ue8m0, eps, offset, casting_mode)
        results: tuple[Tensor, Tensor] = self.quantized((x, weight, scale, scale_ub), settings)
        return results

    def scalars(self, settings: tuple[Any, ...], vectors: Tensors) -> tuple[Any, ...]:
        return rms_scalars(settings, vectors[0])

    @staticmethod
    def reference(
        x: Tensor, weight: Tensor | None, scale: Tensor | None, scale_ub: Tensor | None, *settings: Any
    ) -> tuple[Tensor, Tensor]:
        y = RMSNorm.reference(x, weight, *settings[5:])[0]
        return quantized_reference(y, scale, scale_ub, settings)


def rms_scalars(settings: tuple[Any, ...], weight: Tensor | None) -> tuple[Any, ...]:
    """eps, offset, w_kind, round_first; without a weight the offset stands for it."""
    eps, offset, casting_mode = settings[5:]
    return eps, 1.0 if weight is None else offset, weight is not None, ROUND_FIRST[casting_mode]


OP = RMSNormQuantize
