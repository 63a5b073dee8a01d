"""What the host side of RMSNorm's relatives shares: checks, and how their kernels are told of an optional weight."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.layout import Rows
from liger_aot.op import check_same_device, check_tensor
from liger_aot.ops.rmsnorm import ROUND_FIRST

# What a kernel is told of an optional vector: csrc_triton/norm_vectors.py.
ABSENT, NARROW, WIDE = 0, 1, 2


def kind_of(vector: Rows, x: Rows) -> int | None:
    """NARROW or WIDE where a vector lies on x's device and is of its dtype or float32, else None."""
    if vector[1:3] != x[1:3]:
        return None
    if vector[3:5] == x[3:5]:
        return NARROW
    return WIDE if vector[4] == 32 else None


def check_x(op: str, x: Tensor) -> None:
    check_tensor(op, "x", x)
    if x.dim() == 0:
        raise ArgumentError(f"{op}: x must have at least one dimension, got a scalar")


def check_casting_mode(op: str, casting_mode: str) -> None:
    if casting_mode not in ROUND_FIRST:
        raise ArgumentError(
            f"{op}: casting_mode must be one of {', '.join(ROUND_FIRST)}; got {casting_mode!r}"
        )


def check_vector_dtype(op: str, argument: str, value: Tensor, x: Tensor) -> None:
    """Of what is scaled or shifted by: a tensor on x's device, of its dtype or float32."""
    check_tensor(op, argument, value)
    check_same_device(op, argument, value, "x", x)
    if value.dtype != x.dtype and value.dtype != torch.float32:
        raise ArgumentTypeError(
            f"{op}: {argument} must be of x's dtype {x.dtype} or float32, got {value.dtype}"
        )


def check_weight(op: str, weight: Tensor | None, x: Tensor) -> None:
    if weight is None:
        return
    check_vector_dtype(op, "weight", weight, x)
    if weight.dim() != 1 or weight.shape[0] != x.shape[-1] or not weight.is_contiguous():
        raise ArgumentError(
            f"{op}: weight must be contiguous of shape ({x.shape[-1]},), the last dimension of x; got shape "
            f"{tuple(weight.shape)} with strides {weight.stride()}"
        )
