"""Liger's multi-token and neighbourhood attention, with its names, arguments and results, on the ops and torch.

No kernel of Liger's own is behind either: multi-token attention is a softmax and a convolution, and neighbourhood
attention is attention with a window.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_aot.liger.common import Function
from liger_aot.ops.registry import load

_softmax, _sparsemax, _attention = load("softmax"), load("sparsemax"), load("flash_attention")

UNSEEN = -1e9  # Liger's score of a key after the query
LARGEST_DIM = 256  # of a head, in flash_attention
TILE = 64  # queries that are multiplied with one block of keys, where flash_attention does not serve
DENSE = 256  # up to so many positions the whole matrix of scores costs less than the copies of blocks


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
        masked = torch.where(seen, scores, UNSEEN)
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
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        reach = kernel_size // 2
        if dilation == 1:
            return _neighbours(query, key, value, reach, scale)
        return _dilated(query, key, value, reach, dilation, scale)


def _dilated(q: Tensor, k: Tensor, v: Tensor, reach: int, dilation: int, scale: float) -> Tensor:
    """Positions of one remainder by the dilation see each other alone: so many sequences side by side, the first
    ``longer`` of which have one position more."""
    length = q.shape[2]
    each, longer = divmod(length, dilation)
    padding = (0, 0, 0, dilation - longer) if longer else None
    side_by_side = [
        (t if padding is None else F.pad(t, padding)).unflatten(2, (-1, dilation)).transpose(2, 3)
        for t in (q, k, v)
    ]
    parts = []
    for first, last, positions in ((0, longer, each + 1), (longer, dilation, each)):
        if first < last and positions:
            a, b, c = (t[:, :, first:last, :positions].flatten(1, 2) for t in side_by_side)
            o = _neighbours(a, b, c, reach, scale).unflatten(1, (-1, last - first))
            parts.append(F.pad(o, (0, 0, 0, each + 1 - positions)) if longer else o)
    o = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    return o.transpose(2, 3).flatten(2, 3)[:, :, :length].contiguous()


def _neighbours(q: Tensor, k: Tensor, v: Tensor, reach: int, scale: float) -> Tensor:
    if q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= LARGEST_DIM and scale > 0:
        o: Tensor = _attention(q, k, v, scale=scale, window=(reach, reach), layout="bhsd")
        return o
    return _by_tiles(q, k, v, reach, scale)


def _by_tiles(q: Tensor, k: Tensor, v: Tensor, reach: int, scale: float) -> Tensor:
    """The same by torch's matrix products, for dtypes that flash_attention does not take: each tile of queries with
    the keys that one of them sees. Memory grows with the length, not with its square."""
    length = q.shape[2]
    if length <= DENSE or length <= TILE + 2 * reach:
        at = torch.arange(length, device=q.device)
        seen = (at - at[:, None]).abs() <= reach
        return _masked(q, k.transpose(-1, -2), v, seen, scale)
    rest = -length % TILE
    queries = F.pad(q, (0, 0, 0, rest)).unflatten(2, (-1, TILE))
    keys, values = (
        F.pad(t, (0, 0, reach, reach + rest)).unfold(2, TILE + 2 * reach, TILE) for t in (k, v)
    )  # (batch, heads, tiles, dim, keys)
    at = torch.arange(length + rest, device=q.device).view(-1, TILE, 1)
    key_at = at[:, :1] - reach + torch.arange(TILE + 2 * reach, device=q.device)
    seen = ((key_at - at).abs() <= reach) & (key_at >= 0) & ((key_at < length) | (at >= length))
    o = _masked(queries, keys, values.transpose(-1, -2), seen, scale)
    return o.flatten(2, 3)[:, :, :length].contiguous()


def _masked(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    return torch.where(seen, q * scale @ k, -math.inf).softmax(-1) @ v


NAMES: dict[str, tuple[Any, str]] = {  # Liger's name -> its replacement, and the op that this calls
    "LigerMultiTokenAttentionFunction": (LigerMultiTokenAttentionFunction, "softmax"),
    "LigerFusedNeighborhoodAttentionFunction": (LigerFusedNeighborhoodAttentionFunction, "flash_attention"),
}
