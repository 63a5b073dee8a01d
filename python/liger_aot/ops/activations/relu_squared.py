"""Squared ReLU, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.ops.op import Problem, check_rows
from liger_aot.runtime.layout import rows_of


class ReLUSquared(DifferentiableOp):
    """``relu_squared(x) -> Tensor``: max(x, 0)^2, element by element.

    Differentiable; works under torch.compile and, after ``preload``, in CUDA graphs. CPU tensors take the plain-torch
    reference. Computed in float32, rounded once; NaN stays NaN.

    Args:
        x: (..., n) bfloat16, float16 or float32. Rows may have any stride; other layouts are copied.

    Returns:
        a contiguous tensor of x's shape and dtype.

    Raises:
        ArgumentTypeError: x is not a tensor or of another dtype.
        ArgumentError: x is a scalar.
        PackNotFound: no installed pack serves the GPU.

    Source:
        So et al., Primer: Searching for Efficient Transformers for Language Modeling (2021).
    """

    name = "relu_squared"
    tensors = ("x",)

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.differentiable((x,))
        return y

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        (x,) = tensors
        check_rows(self.name, "x", x)

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        (x,) = tensors
        in_x = rows_of(x)
        on = None if in_x is None else self._own.find(in_x[1], in_x[2])
        if on is None or in_x is None or not in_x[5] * in_x[6]:
            return self.prepare_forward(tensors, settings, keep, out)
        x_at, _, _, _, _, rows, n, x_stride = in_x
        if x_stride == n:
            y = torch.empty_like(x)
            rows, n = 1, rows * n
            x_stride = n
        else:
            y = torch.empty_like(x, memory_format=torch.contiguous_format)
        y_at, dtype, kernel = y.data_ptr(), x.dtype, on.kernels["relu_squared_forward"]
        aligned = not (y_at | x_at | x_stride | n) & 15
        loaded = kernel.recent.get((dtype, aligned, 1)) or kernel((dtype, aligned), 1)
        blocks = -(-n // loaded.block)
        device = on.device
        loaded.launch(
            device, on.stream(device), rows * blocks, 1, 1, y_at, x_at, n, x_stride, n, blocks
        )  # fmt: skip
        return (y,)

    def saved(self, tensors: Tensors, results: Tensors) -> Tensors:
        return tensors

    def run_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        (dy,), (x,) = grads, saved
        in_dy, in_x = rows_of(dy), rows_of(x)
        on = None if in_x is None else self._own.find(in_x[1], in_x[2])
        if on is None or in_x is None or in_dy is None or not in_x[5] * in_x[6]:
            return self.prepare_backward(grads, saved, settings, needed)
        x_at, _, _, _, _, rows, n, x_stride = in_x
        dy_at, dy_stride = in_dy[0], in_dy[7]
        if x_stride == dy_stride == n:
            dx = torch.empty_like(x)
            rows, n = 1, rows * n
            x_stride = dy_stride = n
        else:
            dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        dx_at = dx.data_ptr()
        aligned = not (dx_at | dy_at | x_at | dy_stride | x_stride | n) & 15
        dtype, kernel = x.dtype, on.kernels["relu_squared_backward"]
        loaded = kernel.recent.get((dtype, aligned, 1)) or kernel((dtype, aligned), 1)
        blocks = -(-n // loaded.block)
        device = on.device
        loaded.launch(
            device, on.stream(device), rows * blocks, 1, 1,
            dx_at, dy_at, x_at, n, dy_stride, x_stride, n, blocks,
        )  # fmt: skip
        return (dx,)

    @staticmethod
    def reference(x: Tensor) -> tuple[Tensor]:
        wide = torch.promote_types(x.dtype, torch.float32)
        return (torch.relu(x.to(wide)).square().to(x.dtype),)

    @staticmethod
    def reference_backward(grads: Tensors, saved: Tensors) -> Tensors:
        (dy,), (x,) = grads, saved
        wide = torch.promote_types(x.dtype, torch.float32)
        xw = x.to(wide)
        return (torch.where(xw <= 0, 0, 2 * xw * dy.to(wide)).to(x.dtype),)

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        aligned = shape[-1] % 16 == 0
        return tuple(Problem(f"relu_squared_{way}", (dtype,), aligned, 1) for way in ("forward", "backward"))


OP = ReLUSquared
