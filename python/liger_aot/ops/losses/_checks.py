"""The arguments that losses of logits and targets share, and their checks."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.arguments import ABOVE_ZERO, ANY, FROM_ZERO, Allowed, Schema
from liger_aot.ops.op import check_same_device, check_tensor

REDUCTIONS = ("mean", "sum", "none")
# The settings of RowLoss's fields, as the ops that take them begin; a softcap of 0 is none.
ROW_LOSS = Schema(
    {
        "int ignore_index": ANY,
        "float label_smoothing": Allowed(least=0, most=1),
        "float lse_square_scale": ANY,
        "float softcap": FROM_ZERO,
    }
)
TOKEN_LOSS = Schema(
    {
        **ROW_LOSS,
        "bool token_scaling": Allowed(called="use_token_scaling"),
        "str reduction": Allowed(among=REDUCTIONS),
    }
)
WORDS = {torch.int32: 1, torch.int64: 2}  # 32-bit words a target


class RowLoss:
    """What the loss of a row is; by default torch.nn.functional.cross_entropy's.

    Args:
        softcap: logits become softcap * tanh(logits / softcap); 0 is none.
        token_scaling: loss and gradient times the target's probability, which gets no gradient.
    """

    __slots__ = ("ignore_index", "label_smoothing", "lse_square_scale", "softcap", "token_scaling")

    def __init__(
        self,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        lse_square_scale: float = 0.0,
        softcap: float = 0.0,
        token_scaling: bool = False,
    ) -> None:
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing
        self.lse_square_scale, self.softcap, self.token_scaling = lse_square_scale, softcap, token_scaling


@lru_cache(maxsize=256)
def row_loss(*fields: Any) -> RowLoss:
    """A RowLoss of these fields; a call's settings are those of the call before, mostly."""
    return RowLoss(*fields)


def check_target(op: str, target: Any, shape: torch.Size, device: torch.device) -> None:
    """Raise unless ``target`` holds an integer for each row: of ``shape``, on ``device``."""
    if not isinstance(target, Tensor):
        raise ArgumentTypeError(f"{op}: target must be a torch.Tensor, got {type(target).__name__}")
    if target.dtype not in WORDS:
        raise ArgumentTypeError(f"{op}: target must be int64 or int32, got {target.dtype}")
    if target.device != device:
        raise ArgumentError(
            f"{op}: target is on {target.device}, the logits on {device}: both must be on one"
        )
    if target.shape != shape:
        raise ArgumentError(
            f"{op}: target must be of shape {tuple(shape)}, one for each row; got {tuple(target.shape)}"
        )


def check_class_weight(op: str, argument: str, weight: Tensor, logits: Tensor, vocabulary: int) -> None:
    """Raise unless ``weight`` holds fp32 or the logits' dtype for every class, where the logits are."""
    check_tensor(op, argument, weight)
    check_same_device(op, argument, weight, "logits", logits)
    if weight.dtype not in (logits.dtype, torch.float32):
        raise ArgumentTypeError(
            f"{op}: {argument} must be float32 or of the logits' dtype {logits.dtype}, got {weight.dtype}"
        )
    if weight.shape != (vocabulary,):
        raise ArgumentError(
            f"{op}: {argument} must be of shape ({vocabulary},), a number a class; got {tuple(weight.shape)}"
        )
    if weight.requires_grad:
        raise ArgumentError(f"{op}: {argument} gets no gradient: give weight.detach()")


def softcap_of(op: str, softcap: Any) -> float:
    """0 for None, which is what a public softcap above 0 may be, too."""
    return 0.0 if softcap is None else float(ABOVE_ZERO.checked(op, "float softcap", softcap))


def counted(target: Tensor, ignore_index: int) -> Tensor:
    """Which targets are not ``ignore_index``. As int64: torch takes a number modulo 2^32 to compare int32 with it."""
    return target.long() != ignore_index


def check_range(op: str, target: Tensor, vocabulary: int, ignore_index: int) -> None:
    """ArgumentError for a target outside of the classes; on the CPU alone, where looking costs nothing."""
    if target.device.type != "cpu" or not target.numel():
        return
    wrong = counted(target, ignore_index) & ((target < 0) | (target >= vocabulary))
    if wrong.any():
        raise ArgumentError(
            f"{op}: target must be in [0, {vocabulary}), the classes, or ignore_index {ignore_index}; got "
            f"{int(target[wrong][0])}"
        )


def class_weight(weight: Tensor | None) -> Tensor | None:
    """Class weights as the kernels read them: fp32, contiguous."""
    return None if weight is None else weight.detach().float().contiguous()
