"""Keys and values of new tokens into a cache, paged or contiguous."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.cache._cache_op import CacheOp, Plan
from liger_aot.ops.cache._slots import (
    LARGEST_DIM,
    MOST,
    UNIT,
    Cache,
    Named,
    check_cache,
    check_slots,
    write_slots,
)
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.op import Problem, check_same_device, check_tensor


class WriteKVCache(CacheOp):
    """``write_kv_cache(key, value, key_cache, value_cache, slot_mapping, *, k_scale=None, v_scale=None) -> (Tensor,
    Tensor)``: keys and values of new tokens into their slots of a cache, in place; as vLLM's
    ``reshape_and_cache_flash``.

    Slot s is row s % page_size of page s // page_size; in a contiguous cache a page is a sequence. Only what the slots
    name is written. Nothing waits for the device: works under torch.compile, which copies no cache, and, after
    ``preload``, in CUDA graphs, whose slots may change between replays. For inference: there is no gradient. CPU
    tensors take the plain-torch reference.

    One rule under torch.compile: where both caches are parts of one tensor, give the compiled function that tensor and
    take the parts inside of it. Two parts that are inputs of their own come out wrong, of any op that writes both:
    Inductor copies the second from a wrong place (seen with torch 2.11 and 2.13).

    An fp8 cache holds codes, value = code * scale: code is value / scale, correctly rounded to float32, then to the
    cache's dtype; beyond its largest value (448; of float8_e4m3fnuz 224, vLLM's choice) it is that. NaN stays NaN.

    Args:
        key, value: (tokens, kv_heads, dim) bfloat16 or float16. Any strides but the last, which must be 1. dim is 1 to
            256.
        key_cache, value_cache: (pages, page_size, kv_heads, dim), or (batch, capacity, kv_heads, dim), of key's dtype,
            float8_e4m3fn (compute capability 8.9 and from 9.0 on, gfx950, gfx12) or float8_e4m3fnuz (gfx942). Any equal
            strides but the last, which must be 1: ``cache[0]`` and ``cache[1]`` of (2, pages, ...), ``cache[:, 0]`` and
            ``cache[:, 1]`` of (pages, 2, ...), ``transpose(1, 2)`` of a cache by heads. Storage of uint8 is passed as
            ``.view(torch.float8_e4m3fn)``.
        slot_mapping: (tokens,) int64 or int32, contiguous. It may be shorter than key, whose other tokens count as
            padding. A negative slot is skipped. What two tokens of one slot leave there is either's.
        k_scale, v_scale: for an fp8 cache, float32, above 0, of one shape and strides: one element for the whole cache,
            (kv_heads,), or (pages, page_size, kv_heads), which the op writes: max(absmax of the token's head, 1 / 512)
            / 448 (224). Those that are not written may be None, each, which is 1.

    Returns:
        key_cache and value_cache.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype; the GPU has no such fp8.
        ArgumentError: shapes, strides or devices do not fit, what is written shares memory with another argument, or a
            gradient is needed. Nothing was written then. On the CPU also a slot past the last; on a GPU it is skipped,
            and the next call raises (LIGER_AOT_DEBUG=1: the call itself).
        PackNotFound: no installed pack serves the GPU.

    Source:
        Kwon et al., PagedAttention (2023); vLLM's reshape_and_cache_flash.
    """

    name = "write_kv_cache"
    tensors = ("key", "value", "key_cache", "value_cache", "slot_mapping", "k_scale?", "v_scale?")
    writes = ("key_cache", "value_cache", "k_scale", "v_scale")

    def __call__(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        *,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        found = self.write((key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale), ())
        return found[0], found[1]

    def overwritten(self, tensors: Tensors) -> Tensors:
        scales = [t for t in tensors[5:] if isinstance(t, Tensor) and t.dim() == 3]
        return *tensors[2:4], *scales

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        key, value, *cache = tensors
        for name, t in (("key", key), ("value", value)):
            check_tensor(self.name, name, t)
            if t.dtype not in (torch.bfloat16, torch.float16):
                raise ArgumentTypeError(f"{self.name}: {name} must be bfloat16, float16, got {t.dtype}")
            if t.dim() != 3 or (t.shape[-1] > 1 and t.stride(-1) != 1):
                raise ArgumentError(
                    f"{self.name}: {name} must be (tokens, heads, dim) with a contiguous last dimension, got shape "
                    f"{tuple(t.shape)} with strides {t.stride()}"
                )
        check_same_device(self.name, "value", value, "key", key)
        if value.shape != key.shape or value.dtype != key.dtype:
            raise ArgumentError(
                f"{self.name}: value must have key's shape {tuple(key.shape)} and dtype {key.dtype}, got "
                f"{tuple(value.shape)}, {value.dtype}"
            )
        _, heads, dim = key.shape
        if not 1 <= dim <= LARGEST_DIM:
            raise ArgumentError(
                f"{self.name}: the last dimension of key must be 1 to {LARGEST_DIM}, got {dim}"
            )
        if key.shape[0] * heads > MOST:
            raise ArgumentError(
                f"{self.name}: key has {key.shape[0] * heads} heads of tokens, more than {MOST}"
            )
        check_cache(self.name, "key", key, heads, dim, Cache(*cache))

    def check_values(self, tensors: Tensors) -> None:
        check_slots(self.name, Cache(*tensors[2:]))

    def addresses(self, at: Sequence[int]) -> tuple[tuple[int, ...], int]:
        key, value, k_cache, v_cache, slots, k_scale, v_scale = at
        return (k_cache, v_cache, k_scale, v_scale, key, value, slots), key | value | k_cache | v_cache

    def memory(self, tensors: Tensors) -> tuple[Named, Named]:
        key, value, *rest = tensors
        cache = Cache(*rest)
        return cache.written, {"key": key, "value": value, "slot_mapping": cache.slot_mapping}

    def plan(self, tensors: Tensors, settings: tuple[Any, ...]) -> Plan:
        key, value, *rest = tensors
        cache = Cache(*rest)
        _, heads, dim = key.shape
        rows = cache.slot_mapping.shape[0] * heads
        strides = (*cache.strides, *key.stride()[:2], *value.stride()[:2])
        arguments = (*strides, *cache.places, rows, heads, dim)

        def grid(of_program: int) -> tuple[int, tuple[Any, ...]]:
            return -(-rows // of_program), ()

        return Plan((key.dtype, cache.key_cache.dtype), dim, rows, (*strides, dim), arguments, grid)

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        """``dtypes`` may name that of the cache: ``key_cache``."""
        dim = shape[-1]
        return (Problem(self.name, (dtype, (dtypes or {}).get("key_cache", dtype)), dim % UNIT == 0, dim),)

    @staticmethod
    def write_in_torch(key: Tensor, value: Tensor, *cache: Any) -> None:
        write_slots(key, value, Cache(*cache))

    @staticmethod
    def reference(
        key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, *scales: Any
    ) -> tuple[Tensor, ...]:
        caches = key_cache.clone(), value_cache.clone()
        made = [t.clone() if t is not None and t.dim() == 3 else t for t in scales]
        WriteKVCache.write_in_torch(key, value, *caches, slot_mapping, *made)
        return *caches, *(t for t in made if t is not None and t.dim() == 3)


OP = WriteKVCache
