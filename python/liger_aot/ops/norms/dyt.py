"""DyT, a normalisation without statistics: weight * tanh(alpha * x) + bias, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.ops.norms._vectors import ABSENT, NARROW, WIDE
from liger_aot.ops.op import Problem, check_rows, check_same_device, check_tensor
from liger_aot.runtime.layout import Rows, rows_of


class DyT(DifferentiableOp):
    """``dyt(x, alpha, weight=None, bias=None) -> Tensor``: weight * tanh(alpha * x) + bias.

    Differentiable in all four; works under torch.compile and, after ``preload``, in CUDA graphs. CPU tensors take the
    plain-torch reference. Computed in float32, rounded once; the gradients of alpha, weight and bias are summed in
    float32 in a fixed order.

    Args:
        x: (..., n) bfloat16, float16 or float32. Rows may have any stride; other layouts are copied.
        alpha: one element, of x's dtype or float32.
        weight: (n,) of alpha's dtype, or None for ones. The paper's gamma.
        bias: (n,) of alpha's dtype, or None for zeros. The paper's beta.

    Returns:
        a contiguous tensor of x's shape and dtype.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: alpha has more than one element; shapes, devices or layouts do not fit.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Zhu, Chen, He, LeCun and Liu, Transformers without Normalization (2025).
    """

    name = "dyt"
    tensors = ("x", "alpha", "weight?", "bias?")

    def __call__(
        self, x: Tensor, alpha: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        y: Tensor = self.differentiable((x, alpha, weight, bias))
        return y

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        x, alpha, weight, bias = tensors
        check_rows(self.name, "x", x)
        check_tensor(self.name, "alpha", alpha)
        check_same_device(self.name, "alpha", alpha, "x", x)
        if alpha.numel() != 1:
            raise ArgumentError(f"dyt: alpha must have one element, got shape {tuple(alpha.shape)}")
        if alpha.dtype != x.dtype and alpha.dtype != torch.float32:
            raise ArgumentTypeError(
                f"dyt: alpha must be of x's dtype {x.dtype} or float32, got {alpha.dtype}"
            )
        for name, value in (("weight", weight), ("bias", bias)):
            if value is None:
                continue
            check_tensor(self.name, name, value)
            check_same_device(self.name, name, value, "x", x)
            if value.dtype != alpha.dtype:
                raise ArgumentTypeError(
                    f"dyt: {name} must be of alpha's dtype {alpha.dtype}, got {value.dtype}"
                )
            if value.dim() != 1 or value.shape[0] != x.shape[-1] or not value.is_contiguous():
                raise ArgumentError(
                    f"dyt: {name} must be contiguous of shape ({x.shape[-1]},), the last dimension of x; got shape "
                    f"{tuple(value.shape)} with strides {value.stride()}"
                )

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        x, alpha, weight, bias = tensors
        in_x, in_alpha = rows_of(x), rows_of(alpha)
        on = None if in_x is None else self._own.find(in_x[1], in_x[2])
        if on is None or in_x is None or in_alpha is None or not in_x[5] * in_x[6]:
            return self.prepare_forward(tensors, settings, keep, out)
        x_at, _, _, _, _, rows, n, x_stride = in_x
        w_at = None if weight is None else _place(weight, in_alpha, n)
        b_at = None if bias is None else _place(bias, in_alpha, n)
        dtype, weight_dtype = x.dtype, alpha.dtype
        if (
            w_at == 0
            or b_at == 0
            or in_alpha[1:3] != in_x[1:3]
            or in_alpha[5] * in_alpha[6] != 1
            or (weight_dtype != dtype and weight_dtype != torch.float32)
        ):
            return self.prepare_forward(tensors, settings, keep, out)
        y = (
            torch.empty_like(x)
            if x_stride == n
            else torch.empty_like(x, memory_format=torch.contiguous_format)
        )
        y_at = y.data_ptr()
        aligned = not (y_at | x_at | (w_at or 0) | (b_at or 0) | x_stride | n) & 15
        kernel = on.kernels["dyt_forward"]
        loaded = kernel.recent.get((dtype, aligned, n)) or kernel((dtype, aligned), n)
        blocks = -(-n // loaded.block)
        groups, resident = -(-rows // loaded.rows), loaded.numbers.get("programs_per_multiprocessor")
        if resident:
            groups = max(1, min(resident * on.multiprocessors // blocks, groups))
        device, kind = on.device, NARROW if weight_dtype == dtype else WIDE
        loaded.launch(
            device, on.stream(device), groups * blocks, 1, 1,
            y_at, x_at, in_alpha[0], w_at, b_at, n, x_stride, rows, n, blocks,
            kind, ABSENT if w_at is None else kind, ABSENT if b_at is None else kind,
        )  # fmt: skip
        return (y,)

    def prepare_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        return super().prepare_forward(_with_rows(self, tensors), settings, keep, out)

    def saved(self, tensors: Tensors, results: Tensors) -> Tensors:
        return tensors[:3]

    def run_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        (dy,), (x, alpha, weight) = grads, saved
        in_dy, in_x = rows_of(dy), rows_of(x)
        on = None if in_x is None else self._own.find(in_x[1], in_x[2])
        if on is None or in_x is None or in_dy is None or not in_x[5] * in_x[6] or not any(needed):
            return self.prepare_backward(grads, saved, settings, needed)
        x_at, _, _, _, _, rows, n, x_stride = in_x
        dy_at, dy_stride = in_dy[0], in_dy[7]
        need_dx, need_dalpha, need_dweight, need_dbias = needed
        dx = dalpha = dweight = dbias = partials = None
        dx_at = 0
        if need_dx:
            dx = (
                torch.empty_like(x)
                if x_stride == n
                else torch.empty_like(x, memory_format=torch.contiguous_format)
            )
            dx_at = dx.data_ptr()
        w_at = None if weight is None else weight.data_ptr()
        aligned = not (dx_at | dy_at | x_at | (w_at or 0) | dy_stride | x_stride | n) & 15
        kind = NARROW if alpha.dtype == x.dtype else WIDE
        key, kernel = (x.dtype, aligned), on.kernels["dyt_backward"]
        loaded = kernel.recent.get((*key, n)) or kernel(key, n)
        blocks = -(-n // loaded.block)
        programs = loaded.numbers["programs_per_multiprocessor"] * on.multiprocessors
        groups = max(1, min(programs // blocks, -(-rows // loaded.rows)))
        second = on.kernels["dyt_sums"]((alpha.dtype, not n & 15), n)
        reach = -(-n // second.block) * second.block  # both sums in one row of partials, each in whole blocks
        width, dbias_at = reach * (need_dweight + need_dbias), reach * need_dweight
        alphas = groups * blocks
        if need_dalpha or width:
            partials = x.new_empty(groups * width + alphas, dtype=torch.float32)
        partials_at = 0 if partials is None else partials.data_ptr()
        alphas_at = partials_at + 4 * groups * width
        device = on.device
        stream = on.stream(device)
        loaded.launch(
            device, stream, alphas, 1, 1,
            dx_at, dy_at, x_at, alpha.data_ptr(), w_at, partials_at, alphas_at,
            n, dy_stride, x_stride, width, dbias_at, rows, n, blocks,
            kind, ABSENT if w_at is None else kind, need_dx, need_dweight, need_dbias, need_dalpha,
        )  # fmt: skip
        if partials is not None:
            dweight = _in_blocks(alpha, n, reach) if need_dweight else None
            dbias = _in_blocks(alpha, n, reach) if need_dbias else None
            dalpha = torch.empty_like(alpha) if need_dalpha else None
            second.launch(
                device, stream, -(-width // second.block) + need_dalpha, 1, 1,
                None if dweight is None else dweight.data_ptr(), None if dbias is None else dbias.data_ptr(),
                None if dalpha is None else dalpha.data_ptr(), partials_at, alphas_at,
                groups, width, dbias_at, alphas, need_dalpha,
            )  # fmt: skip
        return dx, dalpha, dweight, dbias

    @staticmethod
    def reference(x: Tensor, alpha: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor]:
        wide = torch.promote_types(x.dtype, torch.float32)
        y = torch.tanh(alpha.reshape(()).to(wide) * x.to(wide))
        if weight is not None:
            y = y * weight.to(wide)
        if bias is not None:
            y = y + bias.to(wide)
        return (y.to(x.dtype),)

    @staticmethod
    def reference_backward(grads: Tensors, saved: Tensors) -> Tensors:
        (dy,), (x, alpha, weight) = grads, saved
        wide = torch.promote_types(x.dtype, torch.float32)
        xw, dyw, a = x.to(wide), dy.to(wide), alpha.reshape(()).to(wide)
        z = a * xw
        scaled = dyw if weight is None else dyw * weight.to(wide)
        e = torch.exp(-2 * z.abs())
        dz = scaled * (4 * e / (1 + e).square())  # 1 - tanh(z)^2 without cancellation
        outer = tuple(range(x.dim() - 1))
        dweight = None if weight is None else _sum(dyw * torch.tanh(z), outer).to(weight.dtype)
        dbias = _sum(dyw, outer).to(alpha.dtype)
        return (dz * a).to(x.dtype), (dz * xw).sum().reshape(alpha.shape).to(alpha.dtype), dweight, dbias

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        n = shape[-1]
        weight = (dtypes or {}).get("weight", dtype)
        aligned = n % 16 == 0
        return (
            Problem("dyt_forward", (dtype,), aligned, n),
            Problem("dyt_backward", (dtype,), aligned, n),
            Problem("dyt_sums", (weight,), aligned, n),
        )


def _place(vector: Tensor, in_alpha: Rows, n: int) -> int:
    """The address of a weight or bias, or 0 where it is none that a kernel takes beside alpha."""
    found = rows_of(vector)
    fits = found is not None and found[6] == n and found[1:5] == in_alpha[1:5] and vector.dim() == 1
    return found[0] if fits and found is not None else 0


def _in_blocks(like: Tensor, n: int, reach: int) -> Tensor:
    """n elements of a buffer of ``reach``."""
    whole = like.new_empty(reach)
    return whole if reach == n else whole[:n]


def _with_rows(op: DyT, tensors: Tensors) -> Tensors:
    """The arguments with alpha one-dimensional: kernels find where it lies as they find rows."""
    op.check(tensors, ())
    x, alpha, weight, bias = tensors
    return x, alpha.reshape(1), weight, bias


def _sum(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return x.sum(dims) if dims else x


OP = DyT
