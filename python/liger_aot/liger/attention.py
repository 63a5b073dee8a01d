"""Liger's multi-token and neighbourhood attention, with its names, arguments and results, on the ops and torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_aot.liger.common import Function
from liger_aot.ops.registry import load

_softmax, _sparsemax = load("softmax"), load("sparsemax")
_attention, _neighbours = load("flash_attention"), load("neighborhood_attention")

WIDE = 8  # steps to either side, beyond which tensor cores are faster
UNSEEN = -1e9  # Liger's score of a key after the query, where the dtype has that number


class LigerMultiTokenAttentionFunction(Function):
    """The convolution is torch's: cuDNN's or MIOpen's, and nothing compiles. ``sparse`` takes every dtype."""

    @staticmethod
    def call(
        scores: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        sparse: bool = False,
    ) -> Tensor:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        masked = torch.where(seen, scores, max(UNSEEN, torch.finfo(scores.dtype).min))
        probabilities = _sparsemax(masked) if sparse else _softmax(masked)
        mixed = F.conv2d(probabilities, weight, bias, stride, padding, dilation, groups)
        return mixed.tril()


class LigerFusedNeighborhoodAttentionFunction(Function):
    """A query sees the keys at most ``kernel_size // 2`` steps of ``dilation`` before and after it."""

    @staticmethod
    def call(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kernel_size: int = 7,
        dilation: int = 1,
        scale: float | None = None,
    ) -> Tensor:
        reach = kernel_size // 2
        y: Tensor
        if reach > WIDE and dilation == 1 and query.dtype in (torch.bfloat16, torch.float16):
            y = _attention(query, key, value, scale=scale, window=(reach, reach), layout="bhsd")
        else:
            y = _neighbours(query, key, value, reach=reach, dilation=dilation, scale=scale)
        return y


NAMES: dict[str, tuple[Any, str]] = {  # Liger's name -> its replacement, and the op that this calls
    "LigerMultiTokenAttentionFunction": (LigerMultiTokenAttentionFunction, "softmax"),
    "LigerFusedNeighborhoodAttentionFunction": (
        LigerFusedNeighborhoodAttentionFunction,
        "neighborhood_attention",
    ),
}
