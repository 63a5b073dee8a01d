"""Liger's MLP and its product of 8-bit by packed 2-bit integers, with its names, arguments and results, on torch's
matrix products (cuBLAS or hipBLAS) and the activation's op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_aot.liger.common import Function
from liger_aot.ops.registry import load

_swiglu = load("swiglu")

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ROW_BYTES = 16  # what Liger's tensor maps ask of rows
TORCH = "torch"  # in place of an op where there is none
# torch._int_mm on CUDA: at least so many rows, and multiples of 8 of the others.
INT_MM_ROWS, INT_MM_UNIT = 17, 8


class LigerMLPFunction(Function):
    """(silu(x @ gate^T * gate_multiplier) * (x @ up^T)) @ down^T * down_multiplier. What Liger refuses is refused, so
    that what runs here also runs there; but it need not be on a GPU."""

    @staticmethod
    def call(
        input: Tensor,
        gate_weight: Tensor,
        up_weight: Tensor,
        down_weight: Tensor,
        gate_multiplier: float = 1.0,
        down_multiplier: float = 1.0,
    ) -> Tensor:
        _check(input, gate_weight, up_weight, down_weight)
        gate = _linear(input, gate_weight, gate_multiplier)
        return _linear(_swiglu(gate, F.linear(input, up_weight)), down_weight, down_multiplier)


def _linear(x: Tensor, weight: Tensor, factor: float) -> Tensor:
    """x @ weight^T * factor, rounded once."""
    if factor == 1.0:
        return F.linear(x, weight)
    flat = x.reshape(-1, x.shape[-1])
    y = torch.addmm(weight.new_zeros(()), flat, weight.t(), beta=0, alpha=factor)
    return y.view(*x.shape[:-1], weight.shape[0])


def _check(*tensors: Tensor) -> None:
    x = tensors[0]
    if x.dtype not in DTYPES:
        raise TypeError(f"LigerMLP: input must be {', '.join(map(str, DTYPES))}; got {x.dtype}")
    if len({t.dtype for t in tensors}) > 1:
        raise TypeError(
            f"LigerMLP: input and weights must be of one dtype, got {', '.join(str(t.dtype) for t in tensors)}"
        )
    for t in tensors:
        if any(stride * t.element_size() % ROW_BYTES for stride in t.stride()[:-1]):
            raise ValueError(
                f"LigerMLP: rows must lie multiples of {ROW_BYTES} bytes apart, as Liger's do; got a tensor of shape "
                f"{tuple(t.shape)} and strides {t.stride()}, {t.element_size()} bytes an element"
            )


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ (the numbers in b), exact.

    Args:
        a: (m, k) int8, contiguous.
        b: (k / 4, n) uint8: bits 2i and 2i + 1 of row r are 1 + the number in row i * k / 4 + r, which is -1, 0, 1
            or 2.

    Returns:
        (m, n) int32.
    """
    assert a.shape[1] == b.shape[0] * 4, "Incompatible dimensions, the weight matrix need to be packed"
    assert a.is_contiguous(), "Matrix A must be contiguous"
    rows, columns = a.shape[0], b.shape[1]
    numbers = torch.cat([((b >> shift) & 3) for shift in (0, 2, 4, 6)]).to(torch.int8) - 1
    a = F.pad(a, (0, -a.shape[1] % INT_MM_UNIT, 0, max(0, INT_MM_ROWS - rows)))
    numbers = F.pad(numbers, (0, -columns % INT_MM_UNIT, 0, a.shape[1] - numbers.shape[0]))
    return torch._int_mm(a, numbers)[:rows, :columns].contiguous()


NAMES: dict[str, tuple[Any, str]] = {  # Liger's name -> its replacement, and the op that this calls
    "LigerMLPFunction": (LigerMLPFunction, "swiglu"),
    "matmul": (matmul, TORCH),
}
