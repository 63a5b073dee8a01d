"""What attention asks of its arguments: forward, backward and decoding."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.arguments import ABOVE_ZERO, ANY, FROM_ZERO, Schema, check_flag
from liger_aot.ops.attention._operands import VARLEN, Settings, shape_of
from liger_aot.ops.kv_cache import check_alike
from liger_aot.ops.op import check_same_device, check_tensor

LARGEST_DIM = 256
SMALLEST_PAGE = 16
LAYOUTS = ("bshd", "bhsd")
# The settings that all of attention shares: a bound of -1 and a soft cap of 0 are none.
SCALES = Schema({"float scale": ABOVE_ZERO, "int left": ANY, "int right": ANY, "float softcap": FROM_ZERO})


def settings_of(
    op: str, q: Tensor, causal: bool, scale: float | None, window: Any, softcap: float
) -> tuple[float, int, int, float]:
    """(scale, left, right, softcap) of the public arguments, not checked yet but for the window."""
    if scale is None:
        check_tensor(op, "q", q)
        scale = 1.0 / math.sqrt(q.shape[-1]) if q.dim() and q.shape[-1] else 1.0
    left, right = _bounds(op, window)
    if causal is not False and check_flag(op, "causal", causal):
        right = 0
    return scale, left, right, softcap


def _bounds(op: str, window: Any) -> tuple[int, int]:
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


def check_attention(op: str, q: Any, k: Any, v: Any, sinks: Any, settings: Settings) -> None:
    """Raise for everything that is wrong with the forward's arguments."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_operand(op, name, t, q, 3 if settings.layout == VARLEN else 4)
    _check_shapes(op, q, k, v, settings.layout)
    check_sinks(op, sinks, q, shape_of(q, k, settings.layout).heads)


def check_results(op: str, o: Any, lse: Any, do: Any, dlse: Any, q: Tensor, k: Tensor, layout: str) -> None:
    """Raise unless these are the forward's results and their gradients; q and k are checked already."""
    shape = shape_of(q, k, layout)
    rows = (shape.batch, shape.heads, shape.len_q)[layout == VARLEN :]
    for name, t in (("o", o), ("do", do)):
        _check_like(op, name, t, q, q.shape, q)
    for name, t in (("lse", lse), ("dlse", dlse)):
        if name == "lse" or t is not None:
            _check_like(op, name, t, None, rows, q)


def _check_like(op: str, name: str, t: Any, like: Tensor | None, shape: tuple[int, ...], q: Tensor) -> None:
    """Of ``like``'s dtype, or float32; where q is."""
    check_tensor(op, name, t)
    check_same_device(op, name, t, "q", q)
    if t.shape != shape:
        raise ArgumentError(f"{op}: {name} must be of shape {tuple(shape)}, got {tuple(t.shape)}")
    if like is not None and t.dtype != like.dtype:
        raise ArgumentTypeError(f"{op}: {name} must be of q's dtype {like.dtype}, got {t.dtype}")
    if like is None and t.dtype != torch.float32:
        raise ArgumentTypeError(f"{op}: {name} must be float32, got {t.dtype}")


def check_dim(op: str, dim: int) -> None:
    if not 1 <= dim <= LARGEST_DIM:
        raise ArgumentError(f"{op}: the last dimension of q must be 1 to {LARGEST_DIM}, got {dim}")


def check_heads(op: str, heads: int, kv_heads: int, of: str) -> None:
    """``of`` is the name of the keys."""
    if (kv_heads == 0) != (heads == 0) or (heads and heads % kv_heads):
        raise ArgumentError(
            f"{op}: the heads of q ({heads}) must be a multiple of those of {of} ({kv_heads})"
        )


def check_sinks(op: str, sinks: Any, q: Tensor, heads: int) -> None:
    if sinks is None:
        return
    check_tensor(op, "sinks", sinks)
    check_same_device(op, "sinks", sinks, "q", q)
    if sinks.shape != (heads,):
        raise ArgumentError(
            f"{op}: sinks must be of shape ({heads},), one a head of q; got {tuple(sinks.shape)}"
        )


def check_caches_alike(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Of caches of four dimensions, each of which was checked by itself."""
    if k.shape[3] != q.shape[-1]:
        raise ArgumentError(
            f"{op}: the last dimension of k_cache must be q's {q.shape[-1]}, got {k.shape[3]}"
        )
    check_alike(op, "v_cache", v, "k_cache", k)


def check_page_size(op: str, k: Tensor) -> None:
    if (size := k.shape[1]) < SMALLEST_PAGE or size & (size - 1):
        raise ArgumentError(
            f"{op}: pages of k_cache must hold a power of 2 of keys, {SMALLEST_PAGE} or more; got {size}"
        )


def check_integers(op: str, name: str, t: Any, q: Tensor) -> None:
    """Where sequences start or end, or pages lie: int32, where q is."""
    if not isinstance(t, Tensor):
        raise ArgumentTypeError(f"{op}: {name} must be a torch.Tensor, got {type(t).__name__}")
    if t.is_nested:
        raise ArgumentTypeError(f"{op}: {name} must be a dense tensor, got a nested one")
    if t.dtype != torch.int32:
        raise ArgumentTypeError(f"{op}: {name} must be int32, got {t.dtype}")
    check_same_device(op, name, t, "q", q)


def check_operand(op: str, name: str, t: Any, q: Tensor, dimensions: int) -> None:
    """Of q, k and v, by itself."""
    check_tensor(op, name, t)
    if t.dim() != dimensions:
        raise ArgumentError(f"{op}: {name} must have {dimensions} dimensions, got shape {tuple(t.shape)}")
    if t.shape[-1] > 1 and t.stride(-1) != 1:
        raise ArgumentError(
            f"{op}: the last dimension of {name} must be contiguous, got strides {t.stride()}"
        )
    if t is not q:
        check_same_device(op, name, t, "q", q)
        if t.dtype != q.dtype:
            raise ArgumentTypeError(f"{op}: {name} must be of q's dtype {q.dtype}, got {t.dtype}")


def _check_shapes(op: str, q: Tensor, k: Tensor, v: Tensor, layout: str) -> None:
    shape = shape_of(q, k, layout)
    check_dim(op, shape.dim)
    batched = layout != VARLEN
    if k.shape[-1] != shape.dim or (batched and k.shape[0] != shape.batch):
        which = "batch and last dimension" if batched else "the last dimension"
        raise ArgumentError(f"{op}: k has shape {tuple(k.shape)}, q {tuple(q.shape)}: {which} must agree")
    if v.shape != k.shape:
        raise ArgumentError(f"{op}: v must have k's shape {tuple(k.shape)}, got {tuple(v.shape)}")
    check_heads(op, shape.heads, shape.kv_heads, "k")
