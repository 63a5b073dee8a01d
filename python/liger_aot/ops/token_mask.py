"""Masks of tokens as kernels take them: any dtype of ``KINDS``, where not zero means that the token counts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.op import check_same_device

# What csrc_triton/common/token_mask.py calls kinds
KINDS = {
    torch.bool: 1, torch.uint8: 1, torch.int8: 1, torch.int32: 4, torch.int64: 8, torch.float32: -4,
}  # fmt: skip


def check_token_mask(op: str, mask: Tensor, shape: Sequence[int], first: str, like: Tensor) -> None:
    """Raise unless ``mask`` is a mask of tokens of that shape, where ``like``, the argument ``first``, is."""
    if not isinstance(mask, Tensor):
        raise ArgumentTypeError(f"{op}: mask must be a torch.Tensor, got {type(mask).__name__}")
    if mask.dtype not in KINDS:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in KINDS)
        raise ArgumentTypeError(f"{op}: mask must be {allowed}, got {mask.dtype}")
    check_same_device(op, "mask", mask, first, like)
    if mask.shape != tuple(shape):
        raise ArgumentError(f"{op}: mask must be of shape {tuple(shape)}, got {tuple(mask.shape)}")


def mask_kind(mask: Tensor | None) -> int:
    """What the kernels ask of it; 0 where there is none."""
    return 0 if mask is None else KINDS[mask.dtype]
