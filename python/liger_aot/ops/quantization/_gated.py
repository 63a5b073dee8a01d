"""Gated activations with 8-bit codes as their result: what their host sides share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from liger_aot.errors import ArgumentError
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.op import check_same_device, check_tensor
from liger_aot.ops.quantization._codes import QuantizingOp, Scheme, address
from liger_aot.runtime.layout import rows_of


class GatedQuantize(QuantizingOp):
    """Base of the two. Settings after the common ones are the last arguments of their kernels."""

    tensors = ("gate", "up?", "scale?", "scale_ub?")

    def columns(self, tensors: Tensors) -> int:
        n: int = tensors[0].shape[-1]
        return n if tensors[1] is not None else n // 2

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        gate, up = tensors[:2]
        self.check_source("gate", gate)
        if up is None and gate.shape[-1] % 2:
            raise ArgumentError(
                f"{self.name}: without up, gate holds both halves: its last dimension must be even, got "
                f"{tuple(gate.shape)}"
            )
        if up is not None:
            check_tensor(self.name, "up", up)
            check_same_device(self.name, "up", up, "gate", gate)
            if up.shape != gate.shape or up.dtype != gate.dtype:
                raise ArgumentError(
                    f"{self.name}: up must be of gate's shape {tuple(gate.shape)} and dtype {gate.dtype}; got "
                    f"{tuple(up.shape)}, {up.dtype}"
                )
        self.check_scheme(tensors, settings)

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        gate, up, scale, scale_ub = tensors
        in_gate, in_up = rows_of(gate), None if up is None else rows_of(up)
        on = None if in_gate is None else self._own.find(in_gate[1], in_gate[2])
        if keep or on is None or in_gate is None:
            return self.prepare_forward(tensors, settings, keep, out)
        gate_at, _, _, _, bits, rows, n, gate_stride = in_gate
        if up is None:
            right = not n & 1
            n >>= 1
            up_at, up_stride = gate_at + n * (bits >> 3), gate_stride
        elif in_up is None:
            right = False
        else:
            right = in_up[1:7] == in_gate[1:7] and up.shape == gate.shape
            up_at, up_stride = in_up[0], in_up[7]
        if not right or not rows * n or not self.fits(tensors, settings, n):
            return self.prepare_forward(tensors, settings, keep, out)
        asked = Scheme(*settings[:5])
        made = self.make(gate, asked, n, scale is not None)
        q_at, dtype, device = made.codes.data_ptr(), gate.dtype, on.device
        aligned = not (q_at | gate_at | up_at | gate_stride | up_stride | n) & 15
        loaded = self.find(on.kernels[self.name], (dtype, asked.codes, asked.word, aligned), n, rows)
        blocks = 1 if asked.scheme == "token" else -(-n // loaded.block)
        given = scale if scale is not None else scale_ub
        loaded.launch(
            device, on.stream(device), rows * blocks, 1, 1,
            q_at, made.scales.data_ptr(), gate_at, up_at, address(given), gate_stride, up_stride, made.row, made.step,
            n, blocks, given is not None, asked.ue8m0, *settings[5:],
        )  # fmt: skip
        return made.codes, made.scales
