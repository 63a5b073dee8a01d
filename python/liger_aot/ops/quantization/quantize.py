"""Tensors as 8-bit codes and scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_aot.ops.arguments import Schema
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.quantization._codes import COMMON, QuantizingOp, Scheme, address, quantized_reference
from liger_aot.runtime.layout import rows_of

PARTS = 2  # programs a multiprocessor that look for a whole tensor's absmax


class Quantize(QuantizingOp):
    """``quantize(x, scale=None, *, scheme="token", dtype=None, group_size=128, scale_layout="row_major", ue8m0=False,
    scale_ub=None) -> (Tensor, Tensor)``: 8-bit codes and their scales, x ~ codes * scales.

    A scale is s = max(min(absmax, scale_ub), floor) / largest in float32, where absmax is the greatest magnitude among
    the values that share it, NaN left out, and a code is x / s, rounded to float32 and then, to nearest even, to
    ``dtype``. ``largest`` is 448 for float8_e4m3fn, 224 for float8_e4m3fnuz and 127 for int8; what lies beyond it
    becomes it. The floor is 1e-10, for rows in fp8 1 / 512. With one scale for the whole tensor the code is
    x * (1 / s), which may differ from x / s in ties. All of this is as in vLLM, but for int8's multiplication by
    127 / absmax: here it is divided by s, too.

    NaN stays NaN in fp8 and becomes 0 in int8. An infinity makes its scale infinite; finite values that share it
    become 0, infinite ones NaN. Where s is given, or bounded by ``scale_ub``, an infinity becomes the largest code.
    No gradient. Works under torch.compile and, after ``preload``, in CUDA graphs. CPU tensors take the plain-torch
    reference, which gives the same bits.

    Args:
        x: (..., n) bfloat16, float16 or float32. Rows may have any stride; other layouts are copied.
        scale: for scheme "tensor", one float32 element on x's device: the scale to use. By default it is made from x,
            in two launches.
        scheme: what shares a scale: "tensor", all of x; "token", a row; "group", ``group_size`` columns of a row.
        dtype: of the codes; None is the GPU's fp8 (float8_e4m3fn; on gfx942 float8_e4m3fnuz). int8 is for "token".
        group_size: 64 or 128; n must be a multiple of it.
        scale_layout: of the groups' scales in memory. "row_major"; "column_major", where those of one group follow
            each other, row by row; "tma_aligned", the same with a distance of columns rounded up to 16 bytes.
        ue8m0: round scales up to powers of two. They stay float32. Not with scheme "tensor" or int8.
        scale_ub: one float32 element on x's device, an upper bound for absmax. Not with scheme "tensor".

    Returns:
        codes, a contiguous tensor of x's shape; and scales, float32, (1,) or ``scale`` itself, (..., 1), or
        (..., n / group_size).

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype; the GPU has no such fp8.
        ArgumentError: settings do not fit each other, or a gradient is needed.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Micikevicius et al., FP8 Formats for Deep Learning (2022); the forms are those of vLLM.
    """

    name = "quantize"
    tensors = ("x", "scale?", "scale_ub?")
    settings = Schema(COMMON)
    dynamic_tensor = True
    source_dtypes = (torch.bfloat16, torch.float16, torch.float32)

    def __call__(
        self,
        x: Tensor,
        scale: Tensor | None = None,
        *,
        scheme: str = "token",
        dtype: torch.dtype | None = None,
        group_size: int = 128,
        scale_layout: str = "row_major",
        ue8m0: bool = False,
        scale_ub: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        settings = (scheme, dtype, group_size, scale_layout, ue8m0)
        results: tuple[Tensor, Tensor] = self.quantized((x, scale, scale_ub), settings)
        return results

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        self.check_source("x", tensors[0])
        self.check_scheme(tensors, settings)

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        x, scale, scale_ub = tensors
        asked, in_x = Scheme(*settings), rows_of(x)
        on = None if in_x is None else self._own.find(in_x[1], in_x[2])
        if (
            keep
            or on is None
            or in_x is None
            or not in_x[5] * in_x[6]
            or not self.fits(tensors, settings, in_x[6])
        ):
            return self.prepare_forward(tensors, settings, keep, out)
        x_at, _, _, _, _, rows, n, x_stride = in_x
        made = self.make(x, asked, n, scale is not None)
        q_at, s_at, columns, asked_rows = made.codes.data_ptr(), made.scales.data_ptr(), n, rows
        if x_stride == n and asked.scheme != "token" and asked.scale_layout == "row_major":
            rows, columns = 1, rows * n  # tiles end nowhere but at the end
            x_stride = columns
        dtype, device, stream = x.dtype, on.device, on.stream(on.device)
        aligned = not (x_at | q_at | x_stride | columns) & 15
        key = (dtype, asked.codes, asked.word, aligned)
        if asked.scheme == "tensor" and scale is None:
            if "quantize_absmax" not in on.kernels:
                raise self._lacking(asked.codes)
            first = self.find(on.kernels["quantize_absmax"], (dtype, asked.codes, aligned), columns, rows)
            blocks = -(-columns // first.block)
            parts = min(rows * blocks, PARTS * on.multiprocessors)
            found = x.new_empty(parts, dtype=torch.float32)
            second = self.find(on.kernels["quantize_by_parts"], (dtype, asked.codes, aligned), columns, rows)
            parts_at = found.data_ptr()
            first.launch(
                device, stream, parts, 1, 1, parts_at, x_at, x_stride, columns, blocks, rows * blocks
            )
            blocks = -(-columns // second.block)
            second.launch(
                device,
                stream,
                rows * blocks,
                1,
                1,
                q_at,
                s_at,
                x_at,
                parts_at,
                x_stride,
                columns,
                blocks,
                parts,
            )
            return made.codes, made.scales
        loaded = self.find(on.kernels["quantize"], key, columns, asked_rows)
        blocks = 1 if asked.scheme == "token" else -(-columns // loaded.block)
        given = scale if scale is not None else scale_ub
        loaded.launch(
            device, stream, rows * blocks, 1, 1,
            q_at, s_at, x_at, address(given), x_stride, made.row, made.step, columns, blocks, given is not None,
            asked.ue8m0,
        )  # fmt: skip
        return made.codes, made.scales

    @staticmethod
    def reference(
        x: Tensor, scale: Tensor | None, scale_ub: Tensor | None, *settings: Any
    ) -> tuple[Tensor, Tensor]:
        return quantized_reference(x, scale, scale_ub, settings)


OP = Quantize
