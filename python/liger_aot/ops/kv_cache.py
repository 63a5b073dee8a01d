"""Caches of keys and values: what the ops that write them and those that read them check alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.op import check_same_device

FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


def check_dense(op: str, name: str, t: Any, x_name: str, x: Tensor) -> None:
    """A tensor of any dtype, where x is."""
    if not isinstance(t, Tensor):
        raise ArgumentTypeError(f"{op}: {name} must be a torch.Tensor, got {type(t).__name__}")
    if t.layout != torch.strided or t.is_nested or t.is_quantized:
        raise ArgumentTypeError(f"{op}: {name} must be a dense tensor, got layout {t.layout}")
    check_same_device(op, name, t, x_name, x)


def check_alike(op: str, name: str, t: Tensor, like_name: str, like: Tensor) -> None:
    """Of one dtype, shape and, but for dimensions of one element, strides: kernels get those of one tensor for both."""
    if t.dtype != like.dtype:
        raise ArgumentTypeError(f"{op}: {name} must be of {like_name}'s dtype {like.dtype}, got {t.dtype}")
    if t.shape != like.shape:
        raise ArgumentError(
            f"{op}: {name} must have {like_name}'s shape {tuple(like.shape)}, got {tuple(t.shape)}"
        )
    if any(n > 1 and a != b for n, a, b in zip(t.shape, t.stride(), like.stride(), strict=True)):
        raise ArgumentError(f"{op}: {name} must have {like_name}'s strides {like.stride()}, got {t.stride()}")


def check_scales(
    op: str,
    k_scale: Any,
    v_scale: Any,
    cache_name: str,
    cache: Tensor,
    x_name: str,
    x: Tensor,
    of_tokens: bool = False,
) -> None:
    """What the codes of an fp8 cache (pages, page size, heads, dim) are multiplied by: float32, one for all keys and
    one for all values, or one a head, or one a token and head where ``of_tokens``. Either may be None, which is 1."""
    shapes = {tuple(cache.shape[2:3]): "one a head"}
    if of_tokens:
        shapes[tuple(cache.shape[:3])] = "one a token and head"
    given = [(name, t) for name, t in (("k_scale", k_scale), ("v_scale", v_scale)) if t is not None]
    for name, t in given:
        check_dense(op, name, t, x_name, x)
        if t.dtype != torch.float32:
            raise ArgumentTypeError(f"{op}: {name} must be float32, got {t.dtype}")
        if cache.dtype not in FP8:
            raise ArgumentError(f"{op}: {name} is for a cache of fp8, got {cache_name} of {cache.dtype}")
        if not (t.numel() == 1 and t.dim() < 3) and tuple(t.shape) not in shapes:
            allowed = " or ".join(f"{shape} ({what})" for shape, what in shapes.items())
            raise ArgumentError(
                f"{op}: {name} must have one element or be of shape {allowed}; got {tuple(t.shape)}"
            )
    if len(given) == 2 and k_scale.numel() != v_scale.numel():
        raise ArgumentError(
            f"{op}: v_scale must have as many elements as k_scale, {k_scale.numel()}, got {v_scale.numel()}"
        )


def lacking(op: str, cache_name: str, dtype: torch.dtype) -> ArgumentTypeError:
    """Of a GPU for which there is no binary with a cache of this dtype."""
    said = str(dtype).removeprefix("torch.")
    return ArgumentTypeError(
        f"{op}: this GPU does not convert {cache_name}'s dtype {said}: float8_e4m3fn is for compute capability 8.9 and "
        "from 9.0 on, gfx950 and gfx12, float8_e4m3fnuz for gfx942; all have a cache of 16 bits"
    )


def scale_head(k_scale: Tensor | None, v_scale: Tensor | None) -> int:
    """Elements from a head's scale to the next one's: 0 where all heads have one."""
    scale = v_scale if k_scale is None else k_scale
    return 0 if scale is None or scale.numel() == 1 else 1
