"""mHC: what a layer reads of a token's streams, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.ops.op import Problem
from liger_aot.ops.residual._streams import STREAMS, check_streams, check_weights, wide
from liger_aot.runtime.layout import FP32, rows_of


class MHCPre(DifferentiableOp):
    """``mhc_pre(x, h_pre) -> Tensor``: the sum of a token's streams, weighted: y[c] = sum over s of h_pre[s] * x[s, c].

    Differentiable in both; works under torch.compile and, after ``preload``, in CUDA graphs. CPU tensors take the
    plain-torch reference. Computed in float32, rounded once.

    Args:
        x: (..., streams, channels) bfloat16, float16 or float32, of 2, 4 or 8 streams. Rows of channels may be any
            distance apart; other layouts are copied.
        h_pre: (..., streams) float32, as ``mhc_coefficients`` gives it.

    Returns:
        a contiguous (..., channels) tensor of x's dtype.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: shapes or devices do not fit; another number of streams.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Xie et al., mHC: Manifold-Constrained Hyper-Connections (2025).
    """

    name = "mhc_pre"
    tensors = ("x", "h_pre")

    def __call__(self, x: Tensor, h_pre: Tensor) -> Tensor:
        y: Tensor = self.differentiable((x, h_pre))
        return y

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        x, h_pre = tensors
        check_streams(self.name, x)
        check_weights(self.name, "h_pre", h_pre, x, x.shape[-2])

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        x, h_pre = tensors
        in_x, in_h = rows_of(x), rows_of(h_pre)
        on = None if in_x is None else self._own.find(in_x[1], in_x[2])
        if on is None or in_x is None or in_h is None or not in_x[5] * in_x[6]:
            return self.prepare_forward(tensors, settings, keep, out)
        x_at, n, x_stride, streams = in_x[0], in_x[6], in_x[7], in_h[6]
        fits = in_h[1:5] == (*in_x[1:3], *FP32) and in_h[7] == streams and h_pre.shape == x.shape[:-1]
        if not fits or streams not in STREAMS:
            return self.prepare_forward(tensors, settings, keep, out)
        y = x.new_empty((*x.shape[:-2], n))
        y_at = y.data_ptr()
        key = (x.dtype, streams, not (x_at | y_at | x_stride | n) & 15)
        loaded = on.kernels["mhc_pre_forward"](key, n)
        blocks, device = -(-n // loaded.block), on.device
        loaded.launch(
            device, on.stream(device), in_h[5] * blocks, 1, 1,
            y_at, x_at, in_h[0], x_stride, n, blocks,
        )  # fmt: skip
        return (y,)

    def prepare_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        self.check(tensors, settings)
        x, h_pre = tensors
        return super().prepare_forward((x, h_pre.contiguous()), settings, keep, out)

    def saved(self, tensors: Tensors, results: Tensors) -> Tensors:
        return tensors

    def run_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        (dy,), (x, h_pre) = grads, saved
        in_dy, in_x, in_h = rows_of(dy), rows_of(x), rows_of(h_pre)
        on = None if in_x is None else self._own.find(in_x[1], in_x[2])
        if (
            on is None
            or in_x is None
            or in_dy is None
            or in_h is None
            or not in_x[5] * in_x[6]
            or not any(needed)
        ):
            return self.prepare_backward(grads, saved, settings, needed)
        if in_h[7] != in_h[6]:
            return self.run_backward(grads, (x, h_pre.contiguous()), settings, needed)
        x_at, n, x_stride, streams = in_x[0], in_x[6], in_x[7], in_h[6]
        need_dx, need_dh = needed
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if need_dx else None
        dh = torch.empty_like(h_pre, memory_format=torch.contiguous_format) if need_dh else None
        dx_at = 0 if dx is None else dx.data_ptr()
        key = (x.dtype, streams, not (x_at | dx_at | in_dy[0] | in_dy[7] | x_stride | n) & 15)
        loaded = on.kernels["mhc_pre_backward"](key, n)
        device = on.device
        loaded.launch(
            device, on.stream(device), in_h[5], 1, 1,
            dx_at, None if dh is None else dh.data_ptr(), in_dy[0], x_at, in_h[0], in_dy[7], x_stride, n,
            need_dx, need_dh,
        )  # fmt: skip
        return dx, dh

    @staticmethod
    def reference(x: Tensor, h_pre: Tensor) -> tuple[Tensor]:
        return ((wide(x) * wide(h_pre).unsqueeze(-1)).sum(-2).to(x.dtype),)

    @staticmethod
    def reference_backward(grads: Tensors, saved: Tensors) -> Tensors:
        (dy,), (x, h_pre) = grads, saved
        dyw = wide(dy).unsqueeze(-2)
        dx = dyw * wide(h_pre).unsqueeze(-1)
        return dx.to(x.dtype), (dyw * wide(x)).sum(-1).to(h_pre.dtype)

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        n, aligned = shape[-1], shape[-1] % 16 == 0
        axes = (dtype, shape[-2])
        return tuple(Problem(f"mhc_pre_{way}", axes, aligned, n) for way in ("forward", "backward"))


OP = MHCPre
