"""What decoding accepts: the checks of a call's arguments, on the CPU also of the lengths and pages they hold."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from liger_aot.attention import LARGEST_STRIDE, LONGEST
from liger_aot.decoding import MOST_SPLITS, Shape
from liger_aot.differentiable import Tensors
from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.op import check_same_device, check_tensor

LARGEST_DIM = 256
SMALLEST_PAGE = 16


def check_arguments(op: str, tensors: Tensors, settings: tuple[Any, ...]) -> None:
    """Raise for everything that is wrong with a call, but for what its lengths and block table hold."""
    q, k, v, cache_seqlens, block_table, sinks = tensors
    _check_settings(op, settings)
    for name, t in (("q", q), ("k_cache", k), ("v_cache", v)):
        _check_operand(op, name, t, q)
    if block_table is not None:
        _check_integers(op, "block_table", block_table, q)
        if block_table.dim() != 2 or (block_table.shape[1] > 1 and block_table.stride(1) != 1):
            raise ArgumentError(
                f"{op}: block_table must be (batch, pages of a sequence) with contiguous rows, got shape "
                f"{tuple(block_table.shape)} with strides {block_table.stride()}"
            )
    _check_shapes(op, q, k, v, block_table)
    if cache_seqlens is not None:
        _check_integers(op, "cache_seqlens", cache_seqlens, q)
        if cache_seqlens.shape != q.shape[:1]:
            raise ArgumentError(
                f"{op}: cache_seqlens must be of shape ({q.shape[0]},), one a sequence; got "
                f"{tuple(cache_seqlens.shape)}"
            )
    if sinks is not None:
        check_tensor(op, "sinks", sinks)
        check_same_device(op, "sinks", sinks, "q", q)
        if sinks.shape != q.shape[2:3]:
            raise ArgumentError(
                f"{op}: sinks must be of shape ({q.shape[2]},), one a head of q; got {tuple(sinks.shape)}"
            )


def _check_operand(op: str, name: str, t: Any, q: Tensor) -> None:
    check_tensor(op, name, t)
    if t.dim() != 4:
        raise ArgumentError(f"{op}: {name} must have 4 dimensions, got shape {tuple(t.shape)}")
    if t.shape[-1] > 1 and t.stride(-1) != 1:
        raise ArgumentError(
            f"{op}: the last dimension of {name} must be contiguous, got strides {t.stride()}"
        )
    if any(
        size > 1 and stride >= LARGEST_STRIDE
        for size, stride in zip(t.shape[1:], t.stride()[1:], strict=True)
    ):
        raise ArgumentError(
            f"{op}: strides of {name} but the first must be below {LARGEST_STRIDE}, got {t.stride()}"
        )
    if t is not q:
        check_same_device(op, name, t, "q", q)
        if t.dtype != q.dtype:
            raise ArgumentTypeError(f"{op}: {name} must be of q's dtype {q.dtype}, got {t.dtype}")


def _check_integers(op: str, name: str, t: Any, q: Tensor) -> None:
    if not isinstance(t, Tensor):
        raise ArgumentTypeError(f"{op}: {name} must be a torch.Tensor, got {type(t).__name__}")
    if t.dtype != torch.int32:
        raise ArgumentTypeError(f"{op}: {name} must be int32, got {t.dtype}")
    check_same_device(op, name, t, "q", q)


def _check_shapes(op: str, q: Tensor, k: Tensor, v: Tensor, block_table: Tensor | None) -> None:
    dim, heads, kv_heads = q.shape[3], q.shape[2], k.shape[2]
    if not 1 <= dim <= LARGEST_DIM:
        raise ArgumentError(f"{op}: the last dimension of q must be 1 to {LARGEST_DIM}, got {dim}")
    if k.shape[3] != dim:
        raise ArgumentError(f"{op}: the last dimension of k_cache must be q's {dim}, got {k.shape[3]}")
    if v.shape != k.shape:
        raise ArgumentError(f"{op}: v_cache must have k_cache's shape {tuple(k.shape)}, got {tuple(v.shape)}")
    pairs = zip(k.shape, k.stride(), v.stride(), strict=True)
    if any(size > 1 and of_k != of_v for size, of_k, of_v in pairs):
        raise ArgumentError(f"{op}: v_cache must have k_cache's strides {k.stride()}, got {v.stride()}")
    if (kv_heads == 0) != (heads == 0) or (heads and heads % kv_heads):
        raise ArgumentError(
            f"{op}: the heads of q ({heads}) must be a multiple of those of k_cache ({kv_heads})"
        )
    name, batch = ("k_cache", k.shape[0]) if block_table is None else ("block_table", block_table.shape[0])
    if batch != q.shape[0]:
        raise ArgumentError(
            f"{op}: {name} must have q's {q.shape[0]} sequences in its first dimension, got {batch}"
        )
    size = k.shape[1]
    if block_table is not None and (size < SMALLEST_PAGE or size & (size - 1)):
        raise ArgumentError(
            f"{op}: pages of k_cache must hold a power of 2 of keys, {SMALLEST_PAGE} or more; got {size}"
        )
    if (capacity := Shape(q, k, block_table).capacity) >= LONGEST or q.shape[1] >= LONGEST:
        raise ArgumentError(
            f"{op}: a sequence may have fewer than {LONGEST} keys and tokens, got {capacity} and {q.shape[1]}"
        )


def check_values(op: str, tensors: Tensors, settings: tuple[Any, ...]) -> None:
    """ArgumentError for a length, or a page that is looked at, out of range; on the CPU alone, where looking costs
    nothing."""
    q, k, _, cache_seqlens, block_table, _ = tensors
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


def _check_settings(op: str, settings: tuple[Any, ...]) -> None:
    scale, _, _, softcap, splits = settings
    for name, value in (("scale", scale), ("softcap", softcap)):
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ArgumentTypeError(f"{op}: {name} must be a number, got {type(value).__name__}")
    if not 0 < scale < math.inf:
        raise ArgumentError(f"{op}: scale must be above 0 and finite, got {scale}")
    if not 0 <= softcap < math.inf:
        raise ArgumentError(f"{op}: softcap must be 0 (none) or above and finite, got {softcap}")
    if type(splits) is not int or not 0 <= splits <= MOST_SPLITS:
        raise ArgumentError(f"{op}: splits must be 1 to {MOST_SPLITS}, or None; got {splits!r}")


def bounds_of(op: str, window: Any) -> tuple[int, int]:
    """(left, right) of a window, -1 for none."""
    if window is None:
        return -1, -1
    bounds = []
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ArgumentTypeError(f"{op}: window must be (left, right), got {window!r}") from None
    for bound in (left, right):
        if bound is not None and (type(bound) is not int or bound < -1):
            raise ArgumentError(
                f"{op}: window must be two numbers of keys, or None for no bound; got {window!r}"
            )
        bounds.append(-1 if bound is None else bound)
    return bounds[0], bounds[1]
