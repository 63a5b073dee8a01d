"""RMSNorm over the last dimension, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from liger_aot.ops.arguments import ANY, FROM_ZERO, Allowed, Schema
from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.ops.norms import column_sums
from liger_aot.ops.op import (
    Problem,
    check_out,
    check_rows,
    check_vector,
    written,
)
from liger_aot.runtime.dispatch import Runtimes
from liger_aot.runtime.grid import persistent, with_split_rows
from liger_aot.runtime.layout import CUDA, ROCM, disjoint, rows_of

# Whether x * rstd is rounded to x's dtype before it is scaled. Statistics and arithmetic are fp32 in every mode.
ROUND_FIRST = {"llama": True, "gemma": False, "none": False}
NORM_SETTINGS = Schema(
    {"float eps": FROM_ZERO, "float offset": ANY, "str casting_mode": Allowed(among=ROUND_FIRST)}
)


class RMSNorm(DifferentiableOp):
    """``rmsnorm(x, weight=None, *, eps=1e-6, offset=0.0, casting_mode="llama", out=None) -> Tensor``:
    x / sqrt(mean(x^2) + eps) * (offset + weight) along the last dimension.

    Differentiable in ``x`` and ``weight``; works under torch.compile and, after ``preload``, in CUDA graphs. CPU
    tensors take the plain-torch reference.

    Args:
        x: (..., n) bfloat16, float16 or float32. Rows may have any stride; a last dimension that is not contiguous, or
            rows that no single stride spans, are copied first; so are, in the backward of the longest rows, rows with
            gaps between them.
        weight: (n,) of x's dtype or float32, or None.
        eps: added to the mean of squares.
        offset: added to the weight (1.0 for Gemma); without effect where there is no weight.
        casting_mode: "llama" rounds x / rms to x's dtype before the weight is applied, "gemma" and "none" round once,
            at the end. Statistics are float32 in all of them.
        out: where to write the result: of x's dtype and device, with as many rows of n; ``x`` itself is allowed. Not
            with gradients.

    Returns:
        a contiguous tensor of x's shape and dtype, or ``out``.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: the weight's or out's shape, device or layout does not fit; casting_mode is unknown; ``out``
            is given where a gradient is needed, or overlaps an input.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Zhang and Sennrich, Root Mean Square Layer Normalization (2019). The casting modes are those of
        Liger-Kernel.
    """

    name = "rmsnorm"
    uses = ("column_sums",)
    tensors = ("x", "weight?")
    settings = NORM_SETTINGS
    results = 2  # y, rstd

    def __init__(self, runtimes: Mapping[str, Runtimes] | None = None) -> None:
        super().__init__(runtimes)
        self._column_sums = self._runtimes["column_sums"]

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | None = None,
        *,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        out: Tensor | None = None,
    ) -> Tensor:
        settings = (eps, offset, casting_mode)
        y: Tensor = self.differentiable((x, weight), settings, None if out is None else (out,))
        return y

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        check_norm(self.name, *tensors)

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        x, weight = tensors
        eps, offset, casting_mode = settings
        in_x, in_w = rows_of(x), None if weight is None else rows_of(weight)
        if in_x is None:
            return self.prepare_forward(tensors, settings, keep, out)
        x_at, kind, index, _, _, rows, n, x_stride = in_x
        dtype = x.dtype
        on = self._own.bound.get(index if kind == CUDA or kind == ROCM else -kind)  # noqa: SIM109 (faster)
        if weight is None:
            w_at, w_dtype, offset, fits = 0, dtype, 1.0, True  # as a weight of zeros
        elif in_w is None:
            fits = False
        else:
            w_at, w_dtype = in_w[0], weight.dtype
            fits = in_w[6] == n and in_w[2] == index and in_w[1] == kind and weight.dim() == 1
        if on is None or not fits or not rows * n:
            return self.prepare_forward(tensors, settings, keep, out)
        if out is None:
            y = (
                torch.empty_like(x)
                if x_stride == n
                else torch.empty_like(x, memory_format=torch.contiguous_format)
            )
            y_at, y_stride = y.data_ptr(), n
        else:
            y = out[0]
            in_y = rows_of(y)
            if in_y is None or in_y[1:7] != in_x[1:7] or in_y[7] < n or not disjoint(in_y, in_x, in_w):
                in_y = check_out(self.name, y, x, weight=weight)
            y_at, y_stride = in_y[0], in_y[7]
        rstd = x.new_empty(rows, dtype=torch.float32) if keep else None
        kernel = on.kernels["rmsnorm_forward"]
        aligned = not (x_at | y_at | w_at | x_stride | y_stride | n) & 15
        few = kernel.many_rows
        if rows < few:
            few = rows
        loaded = kernel.recent.get((dtype, w_dtype, aligned, n, few)) or with_split_rows(
            on, kernel.name, "rmsnorm_split", (dtype, w_dtype, aligned), n, rows
        )
        device = on.device
        if loaded.parts:
            parts = -(-n // loaded.block)
            sums = x.new_empty((rows, parts), dtype=torch.float32)
            for combine in (False, True):
                loaded.launch(
                    device, on.stream(device), rows * parts, 1, 1,
                    y_at, x_at, w_at, None if rstd is None else rstd.data_ptr(), sums.data_ptr(), y_stride, x_stride,
                    n, parts, combine, eps, offset, w_at != 0, ROUND_FIRST[casting_mode], keep,
                )  # fmt: skip
        else:
            loaded.launch(
                device, on.stream(device), -(-rows // loaded.rows), 1, 1,
                y_at, x_at, w_at, None if rstd is None else rstd.data_ptr(), y_stride, x_stride, rows, n,
                eps, offset, w_at != 0, ROUND_FIRST[casting_mode], keep,
            )  # fmt: skip
        if out is not None:
            written(y)
        return y, rstd

    def saved(self, tensors: Tensors, results: Tensors) -> Tensors:
        return *tensors, results[1]

    def run_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        (dy,), (x, weight, rstd) = grads, saved
        need_dx, need_dweight = needed
        in_x, in_dy = rows_of(x), rows_of(dy)
        if in_x is None or in_dy is None or not (need_dx or need_dweight):
            return self.prepare_backward(grads, saved, settings, needed)
        x_at, kind, index, _, _, rows, n, x_stride = in_x
        dtype, offset = x.dtype, settings[1]
        on = self._own.bound.get(index if kind == CUDA or kind == ROCM else -kind)  # noqa: SIM109 (faster)
        if on is None or not rows * n:
            return self.prepare_backward(grads, saved, settings, needed)
        dy_at, dy_stride = in_dy[0], in_dy[7]
        dx = dweight = partials = words = None
        dx_at = dw_at = 0
        if need_dx:
            dx = (
                torch.empty_like(x)
                if x_stride == n
                else torch.empty_like(x, memory_format=torch.contiguous_format)
            )
            dx_at = dx.data_ptr()
        if weight is None:
            w_at, w_dtype, offset = 0, dtype, 1.0
        else:
            w_at, w_dtype = weight.data_ptr(), weight.dtype
            if need_dweight:
                dweight = torch.empty_like(weight)
                dw_at = dweight.data_ptr()
        kernel = on.kernels["rmsnorm_backward"]
        aligned = not (x_at | dy_at | dx_at | w_at | dw_at | x_stride | dy_stride | n) & 15
        loaded = kernel.recent.get((dtype, w_dtype, aligned, n)) or kernel((dtype, w_dtype, aligned), n)
        if loaded.contiguous and not x_stride == dy_stride == n:
            saved = x.contiguous(), weight, rstd
            return self.run_backward((dy.contiguous(),), saved, settings, needed)
        programs, groups, split = persistent(on, loaded, rows)
        two_levels = need_dweight and (groups > 1 or not loaded.writes_sums)
        if two_levels:
            partials = x.new_empty((groups, n), dtype=torch.float32)
        if split > 1:
            words = x.new_zeros((rows, split), dtype=torch.int64)
        device = on.device
        loaded.launch(
            device, on.stream(device), programs, 1, 1,
            dx_at, dy_at, x_at, w_at, rstd.data_ptr(), dw_at,
            None if partials is None else partials.data_ptr(), None if words is None else words.data_ptr(),
            n, dy_stride, x_stride, rows, n, offset, w_at != 0, need_dx, two_levels, need_dweight and not two_levels,
        )  # fmt: skip
        if partials is not None and dweight is not None:
            sums = self._column_sums.find(kind, index) or self._column_sums.on(index)
            column_sums.launch(sums, dweight, partials, groups, n)
        return dx, dweight

    @staticmethod
    def reference(
        x: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str
    ) -> tuple[Tensor, Tensor]:
        """y, and 1 / rms of each row."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        y = wide * rstd
        if ROUND_FIRST[casting_mode]:
            y = y.to(x.dtype).to(wide.dtype)
        if weight is not None:
            y = y * (offset + weight.to(wide.dtype))
        return y.to(x.dtype), rstd.reshape(-1)

    @staticmethod
    def reference_backward(
        grads: Tensors, saved: Tensors, eps: float, offset: float, casting_mode: str
    ) -> Tensors:
        """dx and dweight; eps and casting_mode do not count."""
        (dy,), (x, weight, rstd) = grads, saved
        wide = torch.promote_types(x.dtype, torch.float32)
        xw, dyw, rstd = x.to(wide), dy.to(wide), rstd.to(wide).reshape(*x.shape[:-1], 1)
        scaled = dyw if weight is None else dyw * (offset + weight.to(wide))
        c = (xw * scaled).mean(-1, keepdim=True) * rstd.pow(3)
        dx = (scaled * rstd - xw * c).to(x.dtype)
        if weight is None:
            return dx, None
        dweight = (dyw * xw * rstd).reshape(x.shape[:-1].numel(), x.shape[-1]).sum(0)
        return dx, dweight.to(weight.dtype)

    def prepare_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        self.check(tensors, settings)
        if out is not None:
            check_out(self.name, out[0], tensors[0], weight=tensors[1])
        return super().prepare_forward(tensors, settings, keep, out)

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        n = shape[-1]
        weight = (dtypes or {}).get("weight", dtype)
        aligned = n % 16 == 0
        return (
            Problem("rmsnorm_forward", (dtype, weight), aligned, n, prod(shape[:-1]), "rmsnorm_split"),
            Problem("rmsnorm_backward", (dtype, weight), aligned, n),
        )


def check_norm(op: str, x: Tensor, weight: Tensor | None) -> None:
    """What RMSNorm and its relatives ask of the arguments they share."""
    check_rows(op, "x", x)
    if weight is not None:
        check_vector(op, "weight", weight, x, x.shape[-1], "the last dimension of x")


OP = RMSNorm
