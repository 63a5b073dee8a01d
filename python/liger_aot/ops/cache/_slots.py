"""Caches of keys and values, and the slots in them: what ops that write them check, and how they describe them to
kernels. csrc_triton/cache/slots.py says what a slot and a scale are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.in_place import check_writable, end_of, share_an_element
from liger_aot.ops.kv_cache import FP8, check_alike, check_dense, check_scales
from liger_aot.ops.quantization._codes import FLOOR_OF_ROWS, LARGEST, absmax, divided, encoded

LARGEST_DIM = 256
MOST = (1 << 31) - (1 << 16)  # slots, and rows of heads: int32 with room for a program's excess
UNIT = 16  # what the aligned binaries assume of addresses (bytes), strides and the dimension (elements)
EARLIER = "the slot_mapping of an earlier call"


Named = Mapping[str, Tensor | None]


class Cache(NamedTuple):
    """The arguments of a call that are a cache, in the ops' order."""

    key_cache: Tensor
    value_cache: Tensor
    slot_mapping: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None

    @property
    def dynamic(self) -> bool:
        """Whether scales are written: one for each token and head."""
        return any(t is not None and t.dim() == 3 for t in (self.k_scale, self.v_scale))

    @property
    def written(self) -> Named:
        """What a call writes, by name."""
        caches = {"key_cache": self.key_cache, "value_cache": self.value_cache}
        return {**caches, "k_scale": self.k_scale, "v_scale": self.v_scale} if self.dynamic else caches

    @property
    def strides(self) -> tuple[int, int, int]:
        """Of pages, rows and heads. Those of dimensions of one element are free: what all binaries take."""
        sizes = zip(self.key_cache.shape[:3], self.key_cache.stride()[:3], strict=True)
        page, row, head = (stride if size > 1 else 0 for size, stride in sizes)
        return page, row, head

    @property
    def places(self) -> tuple[int, ...]:
        """The kernels' arguments from the scales' strides on."""
        scale = self.v_scale if self.k_scale is None else self.k_scale
        words = self.slot_mapping.element_size() // 4
        strides: tuple[int, ...] = (0, 0, 0)
        if scale is not None and scale.numel() > 1:
            sizes = zip(scale.shape, scale.stride(), strict=True)
            strides = (0,) * (3 - scale.dim()) + tuple(stride if size > 1 else 0 for size, stride in sizes)
        pages, page_size = self.key_cache.shape[:2]
        return *strides, words, pages * page_size, page_size, self.dynamic


def check_cache(op: str, x_name: str, x: Tensor, heads: int, dim: int, cache: Cache) -> None:
    """Raise for everything that is wrong with a cache for keys and values like x, but for what its slots hold."""
    key_cache, value_cache, slots = cache[:3]
    for name, t in (("key_cache", key_cache), ("value_cache", value_cache)):
        check_dense(op, name, t, x_name, x)
        if t.dtype not in (x.dtype, *FP8):
            raise ArgumentTypeError(
                f"{op}: {name} must be of {x_name}'s dtype {x.dtype}, float8_e4m3fn or float8_e4m3fnuz, got {t.dtype}"
            )
        if t.dim() != 4 or t.shape[2:] != (heads, dim):
            raise ArgumentError(
                f"{op}: {name} must be (pages, page size, {heads} heads, {dim}), got {tuple(t.shape)}"
            )
        if t.shape[-1] > 1 and t.stride(-1) != 1:
            raise ArgumentError(
                f"{op}: the last dimension of {name} must be contiguous, got strides {t.stride()}"
            )
        check_writable(op, name, t)
    check_alike(op, "value_cache", value_cache, "key_cache", key_cache)
    if key_cache.shape[0] * key_cache.shape[1] > MOST:
        raise ArgumentError(
            f"{op}: key_cache has {key_cache.shape[0] * key_cache.shape[1]} slots, more than {MOST}"
        )
    check_dense(op, "slot_mapping", slots, x_name, x)
    if slots.dtype not in (torch.int64, torch.int32):
        raise ArgumentTypeError(f"{op}: slot_mapping must be int64 or int32, got {slots.dtype}")
    if slots.dim() != 1 or not slots.is_contiguous() or slots.shape[0] > x.shape[0]:
        raise ArgumentError(
            f"{op}: slot_mapping must be contiguous of shape (tokens,), at most the {x.shape[0]} of {x_name}; got "
            f"shape {tuple(slots.shape)} with strides {slots.stride()}"
        )
    _check_scales(op, x_name, x, cache)


def check_slots(op: str, cache: Cache) -> None:
    """ArgumentError for a slot past the last; on the CPU alone, where looking costs nothing."""
    slots, count = cache.slot_mapping, cache.key_cache.shape[0] * cache.key_cache.shape[1]
    if slots.device.type == "cpu" and slots.numel() and int(slots.max()) >= count:
        raise ArgumentError(
            f"{op}: slot_mapping must be below {count}, the slots of key_cache; got {int(slots.max())}"
        )


def check_disjoint(op: str, written: Named, read: Named) -> None:
    """ArgumentError where what is written shares memory with something else of the call."""
    before: list[tuple[str, Tensor]] = []
    for name, t in written.items():
        if t is None or not t.numel() or t.is_meta:  # meta has no memory
            continue
        for other, u in before:
            if share_an_element(t, u):
                raise ArgumentError(f"{op}: {name} overlaps {other}")
        before.append((name, t))
        for other, r in read.items():
            if r is not None and r.numel() and r.data_ptr() < end_of(t) and t.data_ptr() < end_of(r):
                raise ArgumentError(f"{op}: {name} overlaps {other}, which is read while it is written")


def write_slots(key: Tensor, value: Tensor, cache: Cache) -> None:
    """Keys and values (tokens, heads, dim) into their slots, in plain torch."""
    count, page_size = cache.key_cache.shape[0] * cache.key_cache.shape[1], max(cache.key_cache.shape[1], 1)
    slots = cache.slot_mapping.long()
    tokens = ((slots >= 0) & (slots < count)).nonzero().flatten()
    slots = slots.index_select(0, tokens)
    at = slots // page_size, slots % page_size
    for x, to, scale in ((key, cache.key_cache, cache.k_scale), (value, cache.value_cache, cache.v_scale)):
        rows = x.index_select(0, tokens)
        if to.dtype not in FP8:
            to[at] = rows
            continue
        rows = rows.float()
        if cache.dynamic:
            assert scale is not None
            found = divided(absmax(rows).clamp(min=FLOOR_OF_ROWS), LARGEST[to.dtype])
            scale[at] = found
            rows = rows / found.unsqueeze(-1)
        elif scale is not None:
            rows = rows / scale.reshape(-1, 1)
        to.view(torch.uint8)[at] = encoded(rows, to.dtype).view(torch.uint8)  # torch indexes no fp8


def _check_scales(op: str, x_name: str, x: Tensor, cache: Cache) -> None:
    """As those of a cache that is read, or for each token and head: these are written, both. The kernels take the
    strides of one for both."""
    k_scale, v_scale = cache.k_scale, cache.v_scale
    check_scales(op, k_scale, v_scale, "key_cache", cache.key_cache, x_name, x, of_tokens=True)
    if k_scale is None or v_scale is None:
        if cache.dynamic:
            missing, given = ("k_scale", "v_scale") if k_scale is None else ("v_scale", "k_scale")
            raise ArgumentError(
                f"{op}: {missing} must be given where {given} is one a token and head, got None"
            )
        return
    if cache.dynamic or k_scale.numel() > 1:
        check_alike(op, "v_scale", v_scale, "k_scale", k_scale)
    if cache.dynamic:
        for name, t in (("k_scale", k_scale), ("v_scale", v_scale)):
            check_writable(op, name, t)
