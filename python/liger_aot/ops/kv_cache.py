"""Writing new tokens into a cache of keys and values, contiguous or paged, by torch."""

from __future__ import annotations

import torch
from torch import Tensor


def write_tokens(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, lengths: Tensor, block_table: Tensor | None
) -> None:
    """Put ``k`` and ``v`` (batch, tokens, kv_heads, dim) after the ``lengths`` (batch,) that are in the caches.

    The caches and ``block_table`` are as ``flash_decoding`` has them. Nothing waits for the device.
    """
    at = lengths.long()[:, None] + torch.arange(k.shape[1], device=k.device)
    if block_table is None:
        rows = torch.arange(k.shape[0], device=k.device)[:, None].expand_as(at)
    else:
        page_size = k_cache.shape[1]
        rows, at = block_table.long().gather(1, at // page_size), at % page_size
    k_cache[rows, at] = k
    v_cache[rows, at] = v
