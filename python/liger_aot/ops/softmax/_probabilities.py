"""The host side of softmax, log-softmax and sparsemax: y from each row of x, and dx from y and dy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.ops.op import Problem, check_rows
from liger_aot.runtime.grid import programs_of, with_split_rows
from liger_aot.runtime.layout import rows_of


class RowProbabilities(DifferentiableOp):
    """Base of ops over the last dimension whose backward needs no more than the result. Their kernels are
    ``<name>_forward`` and ``<name>_backward``."""

    tensors = ("x",)

    def forward_numbers(self, settings: tuple[Any, ...]) -> tuple[float, ...]:
        """What the forward's kernel gets after the other arguments."""
        return ()

    def backward_numbers(self, settings: tuple[Any, ...]) -> tuple[float, ...]:
        """What the backward's kernel gets after the other arguments."""
        return ()

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        (x,) = tensors
        check_rows(self.name, "x", x)

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        (x,) = tensors
        in_x = rows_of(x)
        on = None if in_x is None else self._own.find(in_x[1], in_x[2])
        if on is None or in_x is None or not (in_x[5] * in_x[6]):
            return self.prepare_forward(tensors, settings, keep, out)
        x_at, _, _, _, _, rows, n, x_stride = in_x
        y = (
            torch.empty_like(x)
            if x_stride == n
            else torch.empty_like(x, memory_format=torch.contiguous_format)
        )
        y_at, dtype = y.data_ptr(), x.dtype
        kernel = on.kernels[f"{self.name}_forward"]
        aligned = not (x_at | y_at | x_stride | n) & 15
        few = kernel.many_rows
        if rows < few:
            few = rows
        loaded = kernel.recent.get((dtype, aligned, n, few)) or with_split_rows(
            on, kernel.name, f"{self.name}_split", (dtype, aligned), n, rows
        )
        device = on.device
        if loaded.parts:
            parts = -(-n // loaded.block)
            # Each part's greatest value, and its sum.
            found = x.new_empty((2, rows, parts), dtype=torch.float32)
            peaks_at, sums_at = found.data_ptr(), found.data_ptr() + 4 * rows * parts
            for combine in (False, True):
                loaded.launch(
                    device, on.stream(device), rows * parts, 1, 1,
                    y_at, x_at, peaks_at, sums_at, n, x_stride, n, parts, combine, *self.forward_numbers(settings),
                )  # fmt: skip
        else:
            loaded.launch(
                device, on.stream(device), programs_of(on, loaded, rows), 1, 1,
                y_at, x_at, n, x_stride, rows, n, *self.forward_numbers(settings),
            )  # fmt: skip
        return (y,)

    def saved(self, tensors: Tensors, results: Tensors) -> Tensors:
        return results

    def run_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        (dy,), (y,) = grads, saved
        in_dy, in_y = rows_of(dy), rows_of(y)
        on = None if in_y is None else self._own.find(in_y[1], in_y[2])
        if on is None or in_y is None or in_dy is None or not (in_y[5] * in_y[6]):
            return self.prepare_backward(grads, saved, settings, needed)
        y_at, _, _, _, _, rows, n, y_stride = in_y
        dy_at, dy_stride = in_dy[0], in_dy[7]
        dx = torch.empty_like(y, memory_format=torch.contiguous_format)
        dx_at, dtype = dx.data_ptr(), y.dtype
        kernel = on.kernels[f"{self.name}_backward"]
        aligned = not (dx_at | dy_at | y_at | dy_stride | y_stride | n) & 15
        loaded = kernel.recent.get((dtype, aligned, n)) or kernel((dtype, aligned), n)
        device = on.device
        loaded.launch(
            device, on.stream(device), programs_of(on, loaded, rows), 1, 1,
            dx_at, dy_at, y_at, n, dy_stride, y_stride, rows, n, *self.backward_numbers(settings),
        )  # fmt: skip
        return (dx,)

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        n = shape[-1]
        forward, aligned = f"{self.name}_forward", n % 16 == 0
        return (
            Problem(forward, (dtype,), aligned, n, prod(shape[:-1]), f"{self.name}_split"),
            Problem(f"{self.name}_backward", (dtype,), aligned, n),
        )
