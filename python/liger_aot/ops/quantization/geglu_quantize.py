"""GeGLU with 8-bit codes as its result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_aot.ops.activations.geglu import APPROXIMATE, EXACT, GeGLU
from liger_aot.ops.arguments import ANY, Schema
from liger_aot.ops.quantization._codes import COMMON, quantized_reference
from liger_aot.ops.quantization._gated import GatedQuantize


class GeGLUQuantize(GatedQuantize):
    """``geglu_quantize(gate, up=None, scale=None, *, scheme="token", dtype=None, group_size=128,
    scale_layout="row_major", ue8m0=False, scale_ub=None, approximate="tanh") -> (Tensor, Tensor)``: the codes and
    scales of gelu(gate) * up, in one pass.

    The product is computed in float32, rounded to the gate's dtype, as ``geglu`` gives it, and then quantised: how,
    ``quantize`` says. No gradient. Works under torch.compile and, after ``preload``, in CUDA graphs. CPU tensors take
    the plain-torch reference.

    Args:
        gate: (..., n) bfloat16 or float16; without ``up`` (..., 2n), its first half the gate and its second half up: a
            packed projection's result, read in place. Rows may have any stride; other layouts are copied.
        up: of gate's shape, dtype and device, with strides of its own; or None.
        scale: for scheme "tensor", which needs it: one float32 element on gate's device.
        scheme, dtype, group_size, scale_layout, ue8m0, scale_ub: as of ``quantize``.
        approximate: "tanh" or "none", as of ``geglu``.

    Returns:
        codes (..., n) and scales, as of ``quantize``.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype; the GPU has no such fp8.
        ArgumentError: shapes, devices or settings do not fit each other, or a gradient is needed.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Hendrycks and Gimpel, Gaussian Error Linear Units (2016); Shazeer, GLU Variants Improve Transformer (2020).
    """

    name = "geglu_quantize"
    settings = Schema({**COMMON, "bool exact": ANY})

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
        approximate: str = "tanh",
    ) -> tuple[Tensor, Tensor]:
        exact = EXACT.get(approximate) if type(approximate) is str else None
        if exact is None:
            APPROXIMATE.checked(self.name, "str approximate", approximate)
        settings = (scheme, dtype, group_size, scale_layout, ue8m0, exact)
        results: tuple[Tensor, Tensor] = self.quantized((gate, up, scale, scale_ub), settings)
        return results

    @staticmethod
    def reference(
        gate: Tensor, up: Tensor | None, scale: Tensor | None, scale_ub: Tensor | None, *settings: Any
    ) -> tuple[Tensor, Tensor]:
        return quantized_reference(GeGLU.reference(gate, up, settings[5])[0], scale, scale_ub, settings)


OP = GeGLUQuantize
