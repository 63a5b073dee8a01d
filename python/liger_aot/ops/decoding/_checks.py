"""What decoding accepts: the checks of a call's arguments, on the CPU also of the lengths and pages they hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError
from liger_aot.ops.attention._checks import (
    check_caches_alike,
    check_dim,
    check_heads,
    check_integers,
    check_operand,
    check_page_size,
    check_sinks,
)
from liger_aot.ops.attention._operands import LARGEST_STRIDE, MAX_SEQLEN
from liger_aot.ops.decoding._plans import Shape
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.kv_cache import FP8, check_scales
from liger_aot.ops.op import check_same_device


def check_arguments(op: str, tensors: Tensors, settings: tuple[Any, ...]) -> None:
    """Raise for everything that is wrong with a call, but for what its lengths and block table hold."""
    q, k, v, cache_seqlens, block_table, sinks, k_scale, v_scale = tensors
    for name, t in (("q", q), ("k_cache", k), ("v_cache", v)):
        _check_operand(op, name, t, q)
    if block_table is not None:
        check_integers(op, "block_table", block_table, q)
        if block_table.dim() != 2 or (block_table.shape[1] > 1 and block_table.stride(1) != 1):
            raise ArgumentError(
                f"{op}: block_table must be (batch, pages of a sequence) with contiguous rows, got shape "
                f"{tuple(block_table.shape)} with strides {block_table.stride()}"
            )
    _check_shapes(op, q, k, v, block_table)
    if cache_seqlens is not None:
        check_integers(op, "cache_seqlens", cache_seqlens, q)
        if cache_seqlens.shape != q.shape[:1]:
            raise ArgumentError(
                f"{op}: cache_seqlens must be of shape ({q.shape[0]},), one a sequence; got "
                f"{tuple(cache_seqlens.shape)}"
            )
    check_sinks(op, sinks, q, q.shape[2])
    check_scales(op, k_scale, v_scale, "k_cache", k, "q", q)


def _check_operand(op: str, name: str, t: Any, q: Tensor) -> None:
    if t is not q and isinstance(t, Tensor) and t.dtype in FP8 and t.layout == torch.strided:
        check_same_device(op, name, t, "q", q)
        t = t.view(torch.uint8)
        if t.dim() != 4 or (t.shape[-1] > 1 and t.stride(-1) != 1):
            raise ArgumentError(
                f"{op}: {name} must have 4 dimensions, the last contiguous; got shape {tuple(t.shape)} with strides "
                f"{t.stride()}"
            )
    else:
        check_operand(op, name, t, q, 4)
    if any(
        size > 1 and stride >= LARGEST_STRIDE
        for size, stride in zip(t.shape[1:], t.stride()[1:], strict=True)
    ):
        raise ArgumentError(
            f"{op}: strides of {name} but the first must be below {LARGEST_STRIDE}, got {t.stride()}"
        )


def _check_shapes(op: str, q: Tensor, k: Tensor, v: Tensor, block_table: Tensor | None) -> None:
    check_dim(op, q.shape[3])
    check_caches_alike(op, q, k, v)
    check_heads(op, q.shape[2], k.shape[2], "k_cache")
    name, batch = ("k_cache", k.shape[0]) if block_table is None else ("block_table", block_table.shape[0])
    if batch != q.shape[0]:
        raise ArgumentError(
            f"{op}: {name} must have q's {q.shape[0]} sequences in its first dimension, got {batch}"
        )
    if block_table is not None:
        check_page_size(op, k)
    if (capacity := Shape(q, k, block_table).capacity) >= MAX_SEQLEN or q.shape[1] >= MAX_SEQLEN:
        raise ArgumentError(
            f"{op}: a sequence may have fewer than {MAX_SEQLEN} keys and tokens, got {capacity} and {q.shape[1]}"
        )


def check_values(op: str, tensors: Tensors, settings: tuple[Any, ...]) -> None:
    """ArgumentError for a length, or a page that is looked at, out of range; on the CPU alone, where looking costs
    nothing."""
    q, k, _, cache_seqlens, block_table = tensors[:5]
    if q.device.type != "cpu":
        return
    shape, left = Shape(q, k, block_table), settings[1]
    lengths = torch.full((shape.batch,), shape.capacity) if cache_seqlens is None else cache_seqlens
    wrong = (lengths < 0) | (lengths > shape.capacity)
    if wrong.any():
        raise ArgumentError(
            f"{op}: cache_seqlens must be in [0, {shape.capacity}], what the cache holds; got {int(lengths[wrong][0])}"
        )
    if block_table is not None:
        first = torch.arange(block_table.shape[1]) * shape.page_size
        looked_at = first < lengths[:, None]
        if left >= 0:
            looked_at &= first + shape.page_size > lengths[:, None] - shape.tokens - left
        wrong = looked_at & ((block_table < 0) | (block_table >= shape.pages))
        if wrong.any():
            raise ArgumentError(
                f"{op}: block_table must be in [0, {shape.pages}), the pages of k_cache, where a sequence has keys; "
                f"got {int(block_table[wrong][0])}"
            )
