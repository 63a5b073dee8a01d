"""mHC: what a layer leaves in a token's streams, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.ops.op import Problem, check_same_device, check_tensor
from liger_aot.ops.residual._streams import STREAMS, check_streams, check_weights, wide
from liger_aot.runtime.layout import FP32, rows_of


class MHCPost(DifferentiableOp):
    """``mhc_post(x, f, h_post, h_res) -> Tensor``: a token's streams mixed, and the layer's result added to each:
    y[o, c] = sum over i of h_res[o, i] * x[i, c] + h_post[o] * f[c].

    Differentiable in all four; works under torch.compile and, after ``preload``, in CUDA graphs. CPU tensors take the
    plain-torch reference. Computed in float32, rounded once.

    Args:
        x: (..., streams, channels) bfloat16, float16 or float32, of 2, 4 or 8 streams. Rows of channels may be any
            distance apart; other layouts are copied.
        f: (..., channels) of x's dtype, the layer's result.
        h_post: (..., streams) float32, as ``mhc_coefficients`` gives it.
        h_res: (..., streams, streams) float32, as ``mhc_coefficients`` gives it.

    Returns:
        a contiguous tensor of x's shape and dtype.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: shapes or devices do not fit; another number of streams.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Xie et al., mHC: Manifold-Constrained Hyper-Connections (2025).
    """

    name = "mhc_post"
    tensors = ("x", "f", "h_post", "h_res")

    def __call__(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        y: Tensor = self.differentiable((x, f, h_post, h_res))
        return y

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        x, f, h_post, h_res = tensors
        check_streams(self.name, x)
        check_tensor(self.name, "f", f)
        check_same_device(self.name, "f", f, "x", x)
        if f.dtype != x.dtype:
            raise ArgumentTypeError(f"mhc_post: f must be of x's dtype {x.dtype}, got {f.dtype}")
        if f.shape != (*x.shape[:-2], x.shape[-1]):
            raise ArgumentError(
                f"mhc_post: f must be of shape {(*x.shape[:-2], x.shape[-1])}, got {tuple(f.shape)}"
            )
        streams = x.shape[-2]
        check_weights(self.name, "h_post", h_post, x, streams)
        check_weights(self.name, "h_res", h_res, x, streams, streams)

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        x, f, h_post, h_res = tensors
        in_x, in_f, in_post, in_res = rows_of(x), rows_of(f), rows_of(h_post), rows_of(h_res)
        on = None if in_x is None else self._own.find(in_x[1], in_x[2])
        if on is None or in_x is None or in_f is None or in_post is None or in_res is None:
            return self.prepare_forward(tensors, settings, keep, out)
        x_at, tokens, n, x_stride, streams = in_x[0], in_f[5], in_x[6], in_x[7], in_post[6]
        shape, place = x.shape, (*in_x[1:3], *FP32)
        if (
            not tokens * n
            or streams not in STREAMS
            or not in_post[7] == in_res[6] == in_res[7] == streams
            or in_post[1:5] != place
            or in_res[1:5] != place
            or in_f[1:5] != in_x[1:5]
            or f.shape[:-1] != shape[:-2]
            or in_f[6] != n
            or h_post.shape != shape[:-1]
            or h_res.shape[:-1] != shape[:-1]
        ):
            return self.prepare_forward(tensors, settings, keep, out)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        y_at = y.data_ptr()
        key = (x.dtype, streams, not (x_at | y_at | in_f[0] | in_f[7] | x_stride | n) & 15)
        loaded = on.kernels["mhc_post_forward"](key, n)
        blocks, device = -(-n // loaded.block), on.device
        loaded.launch(
            device, on.stream(device), tokens * blocks, 1, 1,
            y_at, x_at, in_f[0], in_post[0], in_res[0], x_stride, in_f[7], n, blocks,
        )  # fmt: skip
        return (y,)

    def prepare_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        self.check(tensors, settings)
        x, f, h_post, h_res = tensors
        return super().prepare_forward((x, f, h_post.contiguous(), h_res.contiguous()), settings, keep, out)

    def saved(self, tensors: Tensors, results: Tensors) -> Tensors:
        return tensors

    def run_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        (dy,), (x, f, h_post, h_res) = grads, saved
        in_dy, in_x, in_f, in_post, in_res = (rows_of(t) for t in (dy, x, f, h_post, h_res))
        on = None if in_x is None else self._own.find(in_x[1], in_x[2])
        if on is None or in_x is None or in_dy is None or in_f is None or in_post is None or in_res is None:
            return self.prepare_backward(grads, saved, settings, needed)
        x_at, tokens, n, x_stride, streams = in_x[0], in_f[5], in_x[6], in_x[7], in_post[6]
        if not tokens * n or not any(needed):
            return self.prepare_backward(grads, saved, settings, needed)
        if not in_post[7] == in_res[7] == streams:
            return self.run_backward(grads, (x, f, h_post.contiguous(), h_res.contiguous()), settings, needed)
        dx, df, dh_post, dh_res = (
            torch.empty_like(t, memory_format=torch.contiguous_format) if need else None
            for t, need in zip(saved, needed, strict=True)
        )
        dx_at, df_at, dh_post_at, dh_res_at = (
            0 if t is None else t.data_ptr() for t in (dx, df, dh_post, dh_res)
        )
        aligned = not (x_at | dx_at | df_at | in_f[0] | in_dy[0] | in_dy[7] | in_f[7] | x_stride | n) & 15
        loaded = on.kernels["mhc_post_backward"]((x.dtype, streams, aligned), n)
        device = on.device
        loaded.launch(
            device, on.stream(device), tokens, 1, 1,
            dx_at, df_at, dh_post_at, dh_res_at, in_dy[0], x_at, in_f[0], in_post[0], in_res[0],
            in_dy[7], x_stride, in_f[7], n, *needed,
        )  # fmt: skip
        return dx, df, dh_post, dh_res

    @staticmethod
    def reference(x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> tuple[Tensor]:
        y = wide(h_res) @ wide(x) + wide(h_post).unsqueeze(-1) * wide(f).unsqueeze(-2)
        return (y.to(x.dtype),)

    @staticmethod
    def reference_backward(grads: Tensors, saved: Tensors) -> Tensors:
        (dy,), (x, f, h_post, h_res) = grads, saved
        dyw = wide(dy)
        dx = wide(h_res).transpose(-1, -2) @ dyw
        df = (wide(h_post).unsqueeze(-1) * dyw).sum(-2)
        dh_post = (dyw * wide(f).unsqueeze(-2)).sum(-1)
        dh_res = dyw @ wide(x).transpose(-1, -2)
        return dx.to(x.dtype), df.to(f.dtype), dh_post.to(h_post.dtype), dh_res.to(h_res.dtype)

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        n, aligned = shape[-1], shape[-1] % 16 == 0
        axes = (dtype, shape[-2])
        return tuple(Problem(f"mhc_post_{way}", axes, aligned, n) for way in ("forward", "backward"))


OP = MHCPost
