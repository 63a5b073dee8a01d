"""The host side of gated activations: y = f(gate) * up, element by element, strided or packed inputs read in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError
from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.ops.op import Problem, check_rows, check_same_device, check_tensor
from liger_aot.runtime.layout import rows_of

MOST = 1 << 62  # elements, of which a table's last row is for as many as there are


class GatedActivation(DifferentiableOp):
    """Base of ``swiglu`` and ``geglu``. Their kernels are ``<name>_forward`` and ``<name>_backward``; settings, all
    integers, follow the other arguments of both. The forward's tables are by the number of elements; rows that do not
    follow each other and are shorter than a block take the last row of a table, whose blocks are short."""

    tensors = ("gate", "up?")

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        gate, up = tensors
        check_rows(self.name, "gate", gate)
        if up is None:
            if gate.shape[-1] % 2:
                raise ArgumentError(
                    f"{self.name}: without up, gate holds both halves: its last dimension must be even, got "
                    f"{tuple(gate.shape)}"
                )
            return
        check_tensor(self.name, "up", up)
        check_same_device(self.name, "up", up, "gate", gate)
        if up.shape != gate.shape or up.dtype != gate.dtype:
            raise ArgumentError(
                f"{self.name}: up must be of gate's shape {tuple(gate.shape)} and dtype {gate.dtype}; got "
                f"{tuple(up.shape)}, {up.dtype}"
            )

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        gate, up = tensors
        in_gate, in_up = rows_of(gate), None if up is None else rows_of(up)
        on = None if in_gate is None else self._own.find(in_gate[1], in_gate[2])
        if on is None or in_gate is None:
            return self.prepare_forward(tensors, settings, keep, out)
        gate_at, _, _, _, bits, rows, n, gate_stride = in_gate
        if up is None:
            fits = not n & 1
            n >>= 1
            up_at, up_stride = gate_at + n * (bits >> 3), gate_stride
        elif in_up is None:
            fits = False
        else:
            fits = in_up[1:7] == in_gate[1:7] and up.shape == gate.shape
            up_at, up_stride = in_up[0], in_up[7]
        if not fits or not rows * n:
            return self.prepare_forward(tensors, settings, keep, out)
        size = rows * n
        if up is not None and gate_stride == up_stride == n:
            y = torch.empty_like(gate, memory_format=torch.contiguous_format)
            rows, n = 1, rows * n
            gate_stride = up_stride = n
        else:
            y = gate.new_empty((*gate.shape[:-1], n))
        y_at, dtype = y.data_ptr(), gate.dtype
        aligned = not (y_at | gate_at | up_at | gate_stride | up_stride | n) & 15
        kernel = on.kernels[f"{self.name}_forward"]
        loaded = kernel.recent.get((dtype, aligned, size)) or kernel((dtype, aligned), size)
        if n < loaded.block and rows > 1:  # a row would fill a part of its block
            loaded = kernel.recent.get((dtype, aligned, MOST)) or kernel((dtype, aligned), MOST)
        blocks = -(-n // loaded.block)
        device = on.device
        loaded.launch(
            device, on.stream(device), rows * blocks, 1, 1,
            y_at, gate_at, up_at, n, gate_stride, up_stride, n, blocks, *settings,
        )  # fmt: skip
        return (y,)

    def saved(self, tensors: Tensors, results: Tensors) -> Tensors:
        return tensors

    def run_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        (dy,), (gate, up) = grads, saved
        in_dy, in_gate, in_up = rows_of(dy), rows_of(gate), None if up is None else rows_of(up)
        on = None if in_gate is None else self._own.find(in_gate[1], in_gate[2])
        readable = in_dy is not None and (up is None or in_up is not None)
        if on is None or in_gate is None or in_dy is None or not readable or not dy.numel():
            return self.prepare_backward(grads, saved, settings, needed)
        gate_at, _, _, _, _, rows, _, gate_stride = in_gate
        dy_at, n, dy_stride = in_dy[0], in_dy[6], in_dy[7]
        dgate = torch.empty_like(gate, memory_format=torch.contiguous_format)
        dgate_at, size = dgate.data_ptr(), dgate.element_size()
        need = needed
        if in_up is None:
            dup, need = None, (True, True)
            up_at, up_stride, dup_at, dx_stride = gate_at + n * size, gate_stride, dgate_at + n * size, 2 * n
        else:
            dup = torch.empty_like(up, memory_format=torch.contiguous_format)
            up_at, up_stride, dup_at, dx_stride = in_up[0], in_up[7], dup.data_ptr(), n
            if gate_stride == up_stride == dy_stride == n:
                rows, n = 1, rows * n
                gate_stride = up_stride = dy_stride = dx_stride = n
        places = dgate_at | dup_at | dy_at | gate_at | up_at
        aligned = not (places | dx_stride | dy_stride | gate_stride | up_stride | n) & 15
        dtype, kernel = gate.dtype, on.kernels[f"{self.name}_backward"]
        loaded = kernel.recent.get((dtype, aligned, 1)) or kernel((dtype, aligned), 1)
        blocks = -(-n // loaded.block)
        device = on.device
        loaded.launch(
            device, on.stream(device), rows * blocks, 1, 1,
            dgate_at, dup_at, dy_at, gate_at, up_at, dx_stride, dx_stride, dy_stride, gate_stride, up_stride, n,
            blocks, *need, *settings,
        )  # fmt: skip
        return dgate if need[0] else None, dup if need[1] else None

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        aligned = shape[-1] % 16 == 0
        return (
            Problem(f"{self.name}_forward", (dtype,), aligned, prod(shape)),
            Problem(f"{self.name}_backward", (dtype,), aligned, 1),
        )


def halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gate and up, of a packed tensor too."""
    if up is not None:
        return gate, up
    first, second = gate.chunk(2, -1)
    return first, second
