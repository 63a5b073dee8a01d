"""Residual addition and RMSNorm with 8-bit codes as their result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError
from liger_aot.ops.arguments import Schema, check_flag
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.norms.fused_add_rmsnorm import FusedAddRMSNorm
from liger_aot.ops.norms.rmsnorm import NORM_SETTINGS
from liger_aot.ops.op import check_same_device, check_tensor, check_writable_rows, written
from liger_aot.ops.quantization._codes import COMMON, quantized_reference
from liger_aot.ops.quantization._norms import NormQuantize
from liger_aot.ops.quantization.rmsnorm_quantize import rms_scalars
from liger_aot.runtime.layout import overlap


class FusedAddRMSNormQuantize(NormQuantize):
    """``fused_add_rmsnorm_quantize(x, residual, weight=None, scale=None, *, scheme="token", dtype=None,
    group_size=128, scale_layout="row_major", ue8m0=False, scale_ub=None, eps=1e-6, offset=0.0, casting_mode="llama",
    inplace=False) -> (Tensor, Tensor, Tensor)``: the codes and scales of rmsnorm(sum), and sum = x + residual, in one
    pass.

    The sum is rounded to x's dtype, and y = rmsnorm(sum) too, as ``fused_add_rmsnorm`` gives them; y is then
    quantised: how, ``quantize`` says. No gradient. Works under torch.compile and, after ``preload``, in CUDA graphs.
    CPU tensors take the plain-torch reference.

    Args:
        x: (..., n) bfloat16 or float16. Rows may have any stride; other layouts are copied.
        residual: of x's shape, dtype and device, with strides of its own.
        weight: (n,) of x's dtype, or None.
        scale: for scheme "tensor", which needs it: one float32 element on x's device.
        scheme, dtype, group_size, scale_layout, ue8m0, scale_ub: as of ``quantize``.
        eps: added to the mean of squares.
        offset: added to the weight (1.0 for Gemma); without effect where there is no weight.
        casting_mode: "llama" rounds sum / rms to x's dtype before the weight is applied, "gemma" and "none" do not.
        inplace: write the sum over ``residual`` and return that. Its rows must be contiguous, evenly spaced and without
            overlap, and share no element with the other arguments.

    Returns:
        codes and scales, as of ``quantize``; and the sum, a contiguous tensor of x's shape and dtype, or ``residual``.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype; the GPU has no such fp8.
        ArgumentError: shapes, devices or settings do not fit each other, a gradient is needed, or ``inplace`` can't be
            met. Nothing was written then.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Zhang and Sennrich, Root Mean Square Layer Normalization (2019).
    """

    name = "fused_add_rmsnorm_quantize"
    tensors = ("x", "residual", "weight?", "scale?", "scale_ub?")
    settings = Schema({**COMMON, **NORM_SETTINGS})
    outputs = 3
    results = 3  # codes, scales, sum
    adds = True

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
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
        inplace: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        settings = (scheme, dtype, group_size, scale_layout, ue8m0, eps, offset, casting_mode)
        tensors = (x, residual, weight, scale, scale_ub)
        out = None
        if inplace is not False and check_flag(self.name, "inplace", inplace):
            out = (residual,)
        results: tuple[Tensor, Tensor, Tensor] = self.quantized(tensors, settings, out)
        return results

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        super().check(tensors, settings)
        x, residual = tensors[:2]
        check_tensor(self.name, "residual", residual)
        check_same_device(self.name, "residual", residual, "x", x)
        if residual.shape != x.shape or residual.dtype != x.dtype:
            raise ArgumentError(
                f"{self.name}: residual must be of x's shape {tuple(x.shape)} and dtype {x.dtype}; got "
                f"{tuple(residual.shape)}, {residual.dtype}"
            )

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        if out is not None:
            self._check_in_place(tensors, settings)
        results = super().run_forward(tensors, settings, keep, out)
        if out is not None:
            written(out[0])
        return results

    def _check_in_place(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        x, residual = tensors[:2]
        if not residual.numel():
            return
        check_writable_rows(self.name, "residual", residual)
        for name, value in zip(self.tensors, (x, None, *tensors[2:]), strict=True):
            if value is not None and (value.data_ptr() == residual.data_ptr() or overlap(residual, value)):
                argument = name.rstrip("?")
                raise ArgumentError(f"{self.name}: inplace writes residual, which overlaps {argument}")

    def scalars(self, settings: tuple[Any, ...], vectors: Tensors) -> tuple[Any, ...]:
        return rms_scalars(settings, vectors[0])

    def _given(self, results: Tensors, out: Sequence[Tensor] | None) -> Any:
        """``out`` is for the sum alone."""
        return results if out is None else (*results[:2], out[0].copy_(results[2]))

    @staticmethod
    def reference(
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        scale: Tensor | None,
        scale_ub: Tensor | None,
        *settings: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, added, _ = FusedAddRMSNorm.reference(x, residual, weight, *settings[5:])
        return *quantized_reference(y, scale, scale_ub, settings), added


OP = FusedAddRMSNormQuantize
