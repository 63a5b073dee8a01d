"""What the ops of hyper-connections share: checks of streams and of their weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.op import check_same_device, check_tensor

STREAMS = (2, 4, 8)  # that binaries are built for


def check_streams(op: str, x: Any) -> None:
    """Raise unless ``x`` is a tensor of tokens of so many streams as there are binaries for."""
    check_tensor(op, "x", x)
    if x.dim() < 2:
        raise ArgumentError(f"{op}: x must be (..., streams, channels), got shape {tuple(x.shape)}")
    if x.shape[-2] not in STREAMS:
        raise ArgumentError(
            f"{op}: x must have {', '.join(map(str, STREAMS[:-1]))} or {STREAMS[-1]} streams, its dimension before the "
            f"last; got shape {tuple(x.shape)}"
        )


def check_weights(op: str, argument: str, value: Any, x: Tensor, *shape: int) -> None:
    """Raise unless ``value`` is float32 of x's leading dimensions and ``shape``, on x's device."""
    check_tensor(op, argument, value)
    check_same_device(op, argument, value, "x", x)
    if value.dtype != torch.float32:
        raise ArgumentTypeError(f"{op}: {argument} must be float32, got {value.dtype}")
    wanted = (*x.shape[:-2], *shape)
    if tuple(value.shape) != wanted:
        raise ArgumentError(f"{op}: {argument} must be of shape {wanted}, got {tuple(value.shape)}")


def wide(x: Tensor) -> Tensor:
    """In the dtype that a reference computes in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
