"""PolyNorm over the last dimension, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.arguments import FROM_ZERO, Schema
from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.ops.op import Problem, check_rows, check_same_device, check_tensor
from liger_aot.runtime.grid import persistent
from liger_aot.runtime.layout import rows_of


class PolyNorm(DifferentiableOp):
    """``poly_norm(x, weight, bias, *, eps=1e-6) -> Tensor``: w0 * norm(x^3) + w1 * norm(x^2) + w2 * norm(x) + b, where
    norm(u) = u / sqrt(mean(u^2) + eps) over the last dimension.

    Differentiable in all three; works under torch.compile and, after ``preload``, in CUDA graphs. CPU tensors take the
    plain-torch reference. Statistics are float32; the result is rounded once. The gradients of weight and bias are
    summed in float32 in a fixed order.

    Args:
        x: (..., n) bfloat16, float16 or float32. Rows may have any stride; other layouts are copied.
        weight: (3,) of x's dtype or float32: of the cube, the square and x itself.
        bias: one element of weight's dtype.
        eps: added to the means.

    Returns:
        a contiguous tensor of x's shape and dtype.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: a shape, device or layout does not fit.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Zhuo et al., Polynomial Composition Activations (2024). The order of the weights is that of its
        authors' code and of Liger-Kernel: the cube's first.
    """

    name = "poly_norm"
    tensors = ("x", "weight", "bias")
    settings = Schema({"float eps": FROM_ZERO})
    results = 2  # y, and 1 / sqrt(mean + eps) of the cubes, squares and values of each row

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-6) -> Tensor:
        y: Tensor = self.differentiable((x, weight, bias), (eps,))
        return y

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        x, weight, bias = tensors
        check_rows(self.name, "x", x)
        for name, value in (("weight", weight), ("bias", bias)):
            check_tensor(self.name, name, value)
            check_same_device(self.name, name, value, "x", x)
            if value.dtype != x.dtype and value.dtype != torch.float32:
                raise ArgumentTypeError(
                    f"poly_norm: {name} must be of x's dtype {x.dtype} or float32, got {value.dtype}"
                )
        if weight.shape != (3,) or not weight.is_contiguous():
            raise ArgumentError(
                f"poly_norm: weight must be contiguous of shape (3,), got shape {tuple(weight.shape)} with strides "
                f"{weight.stride()}"
            )
        if bias.numel() != 1:
            raise ArgumentError(f"poly_norm: bias must have one element, got shape {tuple(bias.shape)}")
        if bias.dtype != weight.dtype:
            raise ArgumentTypeError(
                f"poly_norm: bias must be of weight's dtype {weight.dtype}, got {bias.dtype}"
            )

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        x, weight, bias = tensors
        in_x, in_w, in_b = rows_of(x), rows_of(weight), rows_of(bias)
        on = None if in_x is None else self._own.find(in_x[1], in_x[2])
        if on is None or in_x is None or in_w is None or in_b is None or not in_x[5] * in_x[6]:
            return self.prepare_forward(tensors, settings, keep, out)
        x_at, _, _, _, _, rows, n, x_stride = in_x
        dtype, wide = x.dtype, weight.dtype == torch.float32
        if (
            in_w[1:3] != in_x[1:3]
            or in_w[1:5] != in_b[1:5]
            or in_w[5:7] != (1, 3)
            or in_b[5:7] != (1, 1)
            or not (wide or weight.dtype == dtype)
        ):
            return self.prepare_forward(tensors, settings, keep, out)
        y = (
            torch.empty_like(x)
            if x_stride == n
            else torch.empty_like(x, memory_format=torch.contiguous_format)
        )
        rstd = x.new_empty((rows, 3), dtype=torch.float32) if keep else None
        y_at = y.data_ptr()
        key, kernel = (dtype, not (y_at | x_at | x_stride | n) & 15), on.kernels["poly_norm_forward"]
        loaded = kernel.recent.get((*key, n)) or kernel(key, n)
        device = on.device
        loaded.launch(
            device, on.stream(device), -(-rows // loaded.rows), 1, 1,
            y_at, x_at, in_w[0], in_w[0], in_b[0], in_b[0], None if rstd is None else rstd.data_ptr(),
            n, x_stride, rows, n, settings[0], wide, keep,
        )  # fmt: skip
        return y, rstd

    def prepare_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        self.check(tensors, settings)
        x, weight, bias = tensors
        return super().prepare_forward((x, weight, bias.reshape(1)), settings, keep, out)

    def saved(self, tensors: Tensors, results: Tensors) -> Tensors:
        return *tensors, results[1]

    def run_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        (dy,), (x, weight, bias, rstd) = grads, saved
        in_dy, in_x = rows_of(dy), rows_of(x)
        on = None if in_x is None else self._own.find(in_x[1], in_x[2])
        if on is None or in_x is None or in_dy is None or not in_x[5] * in_x[6] or not any(needed):
            return self.prepare_backward(grads, saved, settings, needed)
        x_at, _, _, _, _, rows, n, x_stride = in_x
        need_dx, need_dweight, need_dbias = needed
        dx = dweight = dbias = partials = None
        dx_at = 0
        if need_dx:
            dx = (
                torch.empty_like(x)
                if x_stride == n
                else torch.empty_like(x, memory_format=torch.contiguous_format)
            )
            dx_at = dx.data_ptr()
        aligned = not (dx_at | in_dy[0] | x_at | in_dy[7] | x_stride | n) & 15
        key, kernel = (x.dtype, aligned), on.kernels["poly_norm_backward"]
        loaded = kernel.recent.get((*key, n)) or kernel(key, n)
        programs, _, _ = persistent(on, loaded, rows)
        if need_dweight or need_dbias:
            partials = x.new_empty((programs, 4), dtype=torch.float32)
        device = on.device
        stream = on.stream(device)
        w_at, partials_at = weight.data_ptr(), None if partials is None else partials.data_ptr()
        loaded.launch(
            device, stream, programs, 1, 1,
            dx_at, in_dy[0], x_at, w_at, w_at, rstd.data_ptr(), partials_at, n, in_dy[7], x_stride, rows, n,
            weight.dtype == torch.float32, need_dx, partials is not None,
        )  # fmt: skip
        if partials is not None:
            dweight, dbias = torch.empty_like(weight), torch.empty_like(bias)
            second = on.kernels["poly_norm_sums"]((weight.dtype, not n & 15), n)
            second.launch(
                device, stream, 1, 1, 1, dweight.data_ptr(), dbias.data_ptr(), partials_at, programs
            )
        return dx, dweight if need_dweight else None, dbias if need_dbias else None

    @staticmethod
    def reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(x.dtype, torch.float32)
        xw, w = x.to(wide), weight.to(wide)
        powers = torch.stack((xw.pow(3), xw.square(), xw), -2)
        rstd = torch.rsqrt(powers.square().sum(-1) / max(x.shape[-1], 1) + eps)
        y = (powers * (w * rstd).unsqueeze(-1)).sum(-2) + bias.reshape(()).to(wide)
        return y.to(x.dtype), rstd.reshape(-1, 3)

    @staticmethod
    def reference_backward(grads: Tensors, saved: Tensors, eps: float) -> Tensors:
        (dy,), (x, weight, bias, rstd) = grads, saved
        wide = torch.promote_types(x.dtype, torch.float32)
        xw, dyw, w = x.to(wide), dy.to(wide), weight.to(wide)
        r = rstd.to(wide).reshape(*x.shape[:-1], 3)
        powers = torch.stack((xw.pow(3), xw.square(), xw), -2)
        slopes = torch.stack((3 * xw.square(), 2 * xw, torch.ones_like(xw)), -2)
        dots = (dyw.unsqueeze(-2) * powers).sum(-1)
        a, k = w * r, w * r.pow(3) * dots / max(x.shape[-1], 1)
        dx = (slopes * (a.unsqueeze(-1) * dyw.unsqueeze(-2) - k.unsqueeze(-1) * powers)).sum(-2)
        dweight = (dots * r).reshape(-1, 3).sum(0)
        return dx.to(x.dtype), dweight.to(weight.dtype), dyw.sum().reshape(bias.shape).to(bias.dtype)

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        n = shape[-1]
        aligned = n % 16 == 0
        return (
            Problem("poly_norm_forward", (dtype,), aligned, n),
            Problem("poly_norm_backward", (dtype,), aligned, n),
            Problem("poly_norm_sums", ((dtypes or {}).get("weight", dtype),), aligned, n),
        )


OP = PolyNorm
