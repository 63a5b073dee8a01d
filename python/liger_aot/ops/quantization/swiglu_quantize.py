"""SwiGLU with 8-bit codes as its result, gpt-oss's clamped form too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_aot.ops.activations._gated import halves
from liger_aot.ops.arguments import ABOVE_ZERO, ANY, Schema
from liger_aot.ops.quantization._codes import COMMON, quantized_reference
from liger_aot.ops.quantization._gated import GatedQuantize

NO_LIMIT = torch.finfo(torch.float32).max


class SwiGLUQuantize(GatedQuantize):
    """``swiglu_quantize(gate, up=None, scale=None, *, scheme="token", dtype=None, group_size=128,
    scale_layout="row_major", ue8m0=False, scale_ub=None, alpha=1.0, up_offset=0.0, limit=None) -> (Tensor, Tensor)``:
    the codes and scales of gate * sigmoid(alpha * gate) * (up + up_offset), in one pass.

    With the defaults that is ``swiglu``. gpt-oss has alpha=1.702, up_offset=1.0 and limit=7.0, with which the gate is
    first clamped to at most 7 and up to between -7 and 7. The product is computed in float32, rounded to the gate's
    dtype, and then quantised: how, ``quantize`` says. No gradient. Works under torch.compile and, after ``preload``,
    in CUDA graphs. CPU tensors take the plain-torch reference.

    Args:
        gate: (..., n) bfloat16 or float16; without ``up`` (..., 2n), its first half the gate and its second half up: a
            packed projection's result, read in place. Rows may have any stride; other layouts are copied.
        up: of gate's shape, dtype and device, with strides of its own; or None.
        scale: for scheme "tensor", which needs it: one float32 element on gate's device.
        scheme, dtype, group_size, scale_layout, ue8m0, scale_ub: as of ``quantize``.
        alpha: the sigmoid's factor.
        up_offset: added to up, after it was clamped.
        limit: where the gate, and up, are clamped; None: nowhere.

    Returns:
        codes (..., n) and scales, as of ``quantize``.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype; the GPU has no such fp8.
        ArgumentError: shapes, devices or settings do not fit each other, or a gradient is needed.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Shazeer, GLU Variants Improve Transformer (2020); OpenAI, gpt-oss model card (2025).
    """

    name = "swiglu_quantize"
    settings = Schema({**COMMON, "float alpha": ANY, "float up_offset": ANY, "float limit": ABOVE_ZERO})

    def __call__(
        self,
        gate: Tensor,
        up: Tensor | None = None,
        scale: Tensor | None = None,
        *,
        scheme: str = "token",
        dtype: torch.dtype | None = None,
        group_size: int = 128,
        scale_layout: str = "row_major",
        ue8m0: bool = False,
        scale_ub: Tensor | None = None,
        alpha: float = 1.0,
        up_offset: float = 0.0,
        limit: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        limit = NO_LIMIT if limit is None else limit
        settings = (scheme, dtype, group_size, scale_layout, ue8m0, alpha, up_offset, limit)
        results: tuple[Tensor, Tensor] = self.quantized((gate, up, scale, scale_ub), settings)
        return results

    @staticmethod
    def reference(
        gate: Tensor, up: Tensor | None, scale: Tensor | None, scale_ub: Tensor | None, *settings: Any
    ) -> tuple[Tensor, Tensor]:
        alpha, up_offset, limit = settings[5:]
        a, b = (t.to(torch.promote_types(gate.dtype, torch.float32)) for t in halves(gate, up))
        if limit < NO_LIMIT:
            a, b = a.clamp(max=limit), b.clamp(-limit, limit)
        y = (a * torch.sigmoid(alpha * a) * (b + up_offset)).to(gate.dtype)
        return quantized_reference(y, scale, scale_ub, settings)


OP = SwiGLUQuantize
