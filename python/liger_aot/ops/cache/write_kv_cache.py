"""Keys and values of new tokens into a cache, paged or contiguous."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.cache._slots import (
    EARLIER,
    LARGEST_DIM,
    MOST,
    UNIT,
    Cache,
    check_cache,
    check_disjoint,
    check_slots,
    lacking,
    write_slots,
)
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.in_place import InPlaceOp
from liger_aot.ops.op import Problem, check_same_device, check_tensor, written
from liger_aot.runtime import device_errors
from liger_aot.runtime.dispatch import REMEMBERED, OpOn
from liger_aot.runtime.layout import layouts_of


class _Plan:
    """All calls with tensors of these shapes, strides and dtypes, but for their addresses."""

    __slots__ = ("aligned", "arguments", "disjoint", "key", "rows", "variants")

    def __init__(self, key: Tensor, value: Tensor, cache: Cache) -> None:
        heads, dim = key.shape[1:]
        self.rows = cache.slot_mapping.shape[0] * heads
        of_tokens = (*key.stride()[:2], *value.stride()[:2])
        self.arguments = (*cache.strides, *of_tokens, *cache.places, self.rows, heads, dim)
        self.aligned = not any(n % UNIT for n in (*cache.strides, *of_tokens, dim))
        self.key = key.dtype, cache.key_cache.dtype
        self.disjoint: set[tuple[int, ...]] = set()  # distances at which no two tensors share memory
        self.variants: list[Any] = [None, None]  # generic, aligned


class WriteKVCache(InPlaceOp):
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
            float8_e4m3fn (compute capability 8.9 and from 9.0 on) or float8_e4m3fnuz (gfx942). Any equal strides but
            the last, which must be 1: ``cache[0]`` and ``cache[1]`` of (2, pages, ...), ``cache[:, 0]`` and
            ``cache[:, 1]`` of (pages, 2, ...), ``transpose(1, 2)`` of a cache by heads. Storage of uint8 is passed as
            ``.view(torch.float8_e4m3fn)``.
        slot_mapping: (tokens,) int64 or int32, contiguous. It may be shorter than key, whose other tokens count as
            padding. A negative slot is skipped. What two tokens of one slot leave there is either's.
        k_scale, v_scale: for an fp8 cache, float32, above 0: one element for the whole cache, (kv_heads,), or (pages,
            page_size, kv_heads) of any equal strides, which the op writes: max(absmax of the token's head, 1 / 512) /
            448 (224). None is 1.

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

    def preload(self, device: torch.device | int | str | None = None) -> None:
        super().preload(device)
        device_errors.flag(self.name)

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

    def prepare_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        self.check(tensors, settings)
        self._check_disjoint(tensors)
        if self.on_reference(tensors):
            check_slots(self.name, Cache(*tensors[2:]))
        return super().prepare_forward(tensors, settings, keep, out)

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        on = self._own.bound.get(tensors[0].get_device())
        if on is None:
            return self.prepare_forward(tensors, settings, keep, out)
        layouts, *at = layouts_of(tensors)
        plan: _Plan | None = on.plans.get(layouts)
        if plan is None:
            plan = self._plan(on, layouts, tensors)
        key_at, value_at, k_cache_at, v_cache_at, slots_at, k_scale_at, v_scale_at = at
        distances = tuple(a - k_cache_at for a in at)
        if distances not in plan.disjoint:
            self._check_disjoint(tensors)
            if len(plan.disjoint) >= REMEMBERED:
                plan.disjoint.clear()
            plan.disjoint.add(distances)
        device_errors.raise_if_any(self.name, EARLIER)
        overwritten = self.overwritten(tensors)
        if plan.rows:
            aligned = plan.aligned and not (key_at | value_at | k_cache_at | v_cache_at) % UNIT
            launch, programs = plan.variants[aligned] or self._variant(on, plan, aligned)
            launch(
                on.device, on.stream(on.device), programs, 1, 1, k_cache_at, v_cache_at, k_scale_at, v_scale_at,
                key_at, value_at, slots_at, device_errors.flag(self.name), *plan.arguments,
            )  # fmt: skip
            written(*overwritten)
            device_errors.check_now(self.name, tensors[0].device)
        return overwritten

    def _check_disjoint(self, tensors: Tensors) -> None:
        key, value, *rest = tensors
        cache = Cache(*rest)
        read = {"key": key, "value": value, "slot_mapping": cache.slot_mapping}
        check_disjoint(self.name, cache.written, read)

    def _plan(self, on: OpOn, layouts: Any, tensors: Tensors) -> _Plan:
        self.check(tensors, ())
        if len(on.plans) >= REMEMBERED:
            on.plans.clear()
        plan = on.plans[layouts] = _Plan(tensors[0], tensors[1], Cache(*tensors[2:]))
        return plan

    def _variant(self, on: OpOn, plan: _Plan, aligned: bool) -> tuple[Any, int]:
        """The binary for a plan, and how many programs it takes."""
        try:
            loaded = on.kernels[self.name]((*plan.key, aligned), plan.arguments[-1])
        except ArgumentTypeError:
            raise lacking(self.name, plan.key[1]) from None
        found = plan.variants[aligned] = loaded.launch, -(-plan.rows // loaded.rows)
        return found

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
