"""Decoding: attention of a few query tokens to a long cache of keys and values, contiguous or paged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_aot.ops.arguments import Allowed, Schema, check_flag
from liger_aot.ops.attention._checks import SCALES, check_dim, settings_of
from liger_aot.ops.decoding._checks import check_arguments, check_values
from liger_aot.ops.decoding._plans import (
    NAME,
    UNIT,
    FusedPlan,
    Settings,
    Shape,
    SplitPlan,
    fused_head_dim,
    plan_for,
)
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.forward_only import ForwardOnlyOp
from liger_aot.ops.kv_cache import FP8, scale_head
from liger_aot.ops.op import Problem
from liger_aot.ops.split_kv import MAX_SPLITS
from liger_aot.runtime import device_errors
from liger_aot.runtime.remembered import remember

SPLITS = Allowed(least=1, most=MAX_SPLITS)
EARLIER = "the cache_seqlens or block_table of an earlier call"


class FlashDecoding(ForwardOnlyOp):
    """``flash_decoding(q, k_cache, v_cache, *, cache_seqlens=None, block_table=None, ...) -> Tensor``: attention of the
    last tokens of each sequence to the keys and values in its cache, the tokens' own among them.

    Exact, with float32 scores and sums. For inference: there is no gradient. Lengths and block tables stay on the
    device, and nothing waits for it. Works under torch.compile and, after ``preload``, in CUDA graphs, whose lengths
    and tables may change between replays. CPU tensors take the plain-torch reference.

    On gfx90a, whose float16 matrix instructions read subnormal numbers as zeros, float16 elements of q, k_cache and
    v_cache below 2^-14 count as zeros.

    Args:
        q: (batch, tokens, heads, dim) bfloat16 or float16. Any strides but the last, which must be 1.
        k_cache, v_cache: (batch, capacity, kv_heads, dim) or, with ``block_table``, (pages, page_size, kv_heads, dim)
            of q's dtype, float8_e4m3fn (compute capability 8.9 and from 9.0 on, gfx950, gfx12) or float8_e4m3fnuz
            (gfx942), and equal strides, any but the last, which must be 1; page_size is a power of 2 from 16 on.
            kv_heads divide heads (grouped and multi-query attention). dim is up to 256; it runs at the speed of the
            next of 64, 128 and 256. Where addresses or strides are no multiples of 16 bytes and elements, or dim is no
            multiple of 16, a much slower kernel runs.
        cache_seqlens: (batch,) int32: how many keys each sequence has. None: as many as its cache can hold, which is
            faster for many sequences than lengths that say so.
        block_table: (batch, most pages) int32, rows contiguous: where the pages of each sequence are. Entries past its
            last key, or before its window, are not looked at.
        scale: of the scores, above 0. Default 1 / sqrt(dim).
        causal: a token sees no key after its own, where the last token's is the sequence's last.
        window: (left, right): a token sees so many keys before and after its own. None is no bound.
        softcap: above 0: scores become softcap * tanh(score / softcap).
        sinks: (heads,) bfloat16, float16 or float32, or None: for each head the score of one more key, whose value
            is 0.
        k_scale, v_scale: of an fp8 cache, float32, as many elements each: keys and values are code * scale. One
            element, or (kv_heads,). Each may be None, which is 1. ``write_kv_cache`` writes such caches.
        splits: how many programs split a sequence's keys at most. None: chosen from the shapes and the profile.
        return_lse: also return the logarithm of each token's sum.

    Returns:
        a contiguous tensor of q's shape and dtype; with ``return_lse`` also (batch, heads, tokens) float32. A token
        that sees no key gives zeros, and -inf without a sink. A sequence with a length out of [0, capacity], or a page
        out of [0, pages) where its tokens look, gives NaN; nothing out of bounds is read, and the next call raises
        (LIGER_AOT_DEBUG=1: the call itself).

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: a shape, stride, device or setting is not allowed, or a gradient is needed; on the CPU also a
            length or page out of range.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Dao et al., Flash-Decoding (2023); Kwon et al., PagedAttention (2023).
    """

    name = NAME
    tensors = ("q", "k_cache", "v_cache", "cache_seqlens?", "block_table?", "sinks?", "k_scale?", "v_scale?")
    settings = Schema({**SCALES, "int splits": Allowed(least=0, most=MAX_SPLITS)})
    no_gradient = "decoding has none"
    instead = "flash_attention"
    outputs = 2
    results = 2  # o, lse

    def __init__(self, runtimes: Any = None) -> None:
        super().__init__(runtimes)
        self._plans: dict[Any, SplitPlan | FusedPlan] = {}

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        cache_seqlens: Tensor | None = None,
        block_table: Tensor | None = None,
        scale: float | None = None,
        causal: bool = True,
        window: tuple[int | None, int | None] | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        splits: int | None = None,
        return_lse: bool = False,
    ) -> Any:
        tensors = (q, k_cache, v_cache, cache_seqlens, block_table, sinks, k_scale, v_scale)
        settings = (
            *settings_of(self.name, q, causal, scale, window, softcap),
            0 if splits is None else SPLITS.checked(self.name, "int splits", splits),
        )
        o, lse = self.differentiable(tensors, settings)
        return o if return_lse is False or not check_flag(self.name, "return_lse", return_lse) else (o, lse)

    def preload(self, device: torch.device | int | str | None = None) -> None:
        super().preload(device)
        device_errors.flag(self.name)
        for index, on in self._own.bound.items():
            if f"{NAME}_fused" in on.kernels and index >= 0:
                on.workspace("counters", torch.device("cuda", index)).prepare()

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        check_arguments(self.name, tensors, settings)

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        try:
            plan = self._plans.get(_key(tensors, settings))
        except (AttributeError, TypeError, RuntimeError):
            plan = None  # no tensors, or none with memory: the checks say so
        if plan is None:
            return self.prepare_forward(tensors, settings, keep, out)
        device_errors.raise_if_any(self.name, EARLIER)
        results = plan(*tensors)
        device_errors.check_now(self.name, tensors[0].device)
        return results

    def prepare_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        self.check(tensors, settings)
        q, k, v, cache_seqlens, block_table, sinks, k_scale, v_scale = tensors
        if self.on_reference(tensors):
            check_values(self.name, tensors, settings)
            return self.by_reference(tensors, settings)
        on = self._own.of(q, "q")
        assert on is not None
        cache_seqlens = None if cache_seqlens is None else cache_seqlens.contiguous()
        sinks = None if sinks is None else sinks.float().contiguous()
        k_scale, v_scale = (None if t is None else t.contiguous() for t in (k_scale, v_scale))
        tensors = (q, k, v, cache_seqlens, block_table, sinks, k_scale, v_scale)
        key = _key(tensors, settings)
        if key not in self._plans:
            by_head = scale_head(k_scale, v_scale)
            plan = plan_for(
                on, q, k, block_table, cache_seqlens is None, by_head, Settings(*settings), addresses_aligned=key[0]
            )  # fmt: skip
            remember(self._plans, key, plan)
        return self.run_forward(tensors, settings, keep, out)

    def on_reference(self, tensors: Tensors) -> bool:
        """Also without a key that could be read."""
        k, block_table = tensors[1], tensors[4]
        none = block_table is not None and not block_table.numel()
        return super().on_reference(tensors) or not k.numel() or none

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        """``shape`` is q's; ``dtypes`` may name that of the cache: ``k_cache``. Of a contiguous cache and of a paged
        one; wide variants are for many rows of q a head of k, ``fused`` for few where there is such a kernel
        (``large_pages`` from 64 keys on; True: for many sequences; ``whole``: not split)."""
        dim = shape[-1]
        check_dim(self.name, dim)
        aligned, cache = not dim % UNIT, (dtypes or {}).get("k_cache", dtype)
        kinds: list[tuple[Any, ...]] = [
            ("split", paged, wide, cache) for wide in (False, True) for paged in (False, True)
        ]
        kinds.append(("combine",))
        same = aligned and cache == dtype
        if same and fused_head_dim(dim) in (64, 128):
            forms = [(of, False, 8) for of in ("contiguous", "pages", "large_pages")]
            if dim > 64:
                forms += [(of, True, 8) for of in ("contiguous", "pages", "whole")]
                forms += [(of, False, rows) for of in ("contiguous", "large_pages") for rows in (16, 32)]
            kinds += [("fused", fused_head_dim(dim), *form) for form in forms]
        return tuple(Problem(f"{NAME}_{kind}", (dtype, *axes), aligned, dim) for kind, *axes in kinds)

    @staticmethod
    def reference(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cache_seqlens: Tensor | None,
        block_table: Tensor | None,
        sinks: Tensor | None,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
        scale: float,
        left: int,
        right: int,
        softcap: float,
        splits: int,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        shape = Shape(q, k_cache, block_table)
        k, v, known = _gathered(k_cache, v_cache, block_table)
        k, v = k.to(wide), v.to(wide)
        k, v = (t if s is None else t * s.to(wide).reshape(-1, 1) for t, s in ((k, k_scale), (v, v_scale)))
        lengths = torch.full((shape.batch,), shape.capacity, device=q.device)
        lengths = lengths if cache_seqlens is None else cache_seqlens.long()
        wrong = (lengths < 0) | (lengths > shape.capacity)
        lengths = torch.where(wrong, 0, lengths)
        keys = torch.arange(shape.capacity, device=q.device)
        cached = keys < lengths[:, None]
        grouped = q.to(wide).unflatten(2, (shape.kv_heads, -1)) if shape.kv_heads else q.to(wide).unsqueeze(3)
        scores = torch.einsum("btkgd,bskd->bkgts", grouped, k) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        own = lengths[:, None] - shape.tokens + torch.arange(shape.tokens, device=q.device)
        seen = cached[:, None].expand(-1, shape.tokens, -1)
        if right >= 0:
            seen = seen & (keys <= own[:, :, None] + right)
        if left >= 0:
            seen = seen & (keys >= own[:, :, None] - left)
        # memory that holds no key, or one out of every window, may hold anything
        v = torch.where(seen.any(1)[:, :, None, None], v, 0.0)
        wrong = wrong | (seen & ~known[:, None]).any(-1).any(-1)
        scores = torch.where(seen[:, None, None], scores, -math.inf)
        top = scores.amax(-1) if shape.capacity else scores.new_full(scores.shape[:-1], -math.inf)
        sink = None if sinks is None else sinks.to(wide).view(shape.kv_heads, -1, 1)
        top = (top if sink is None else torch.maximum(top, sink)).clamp(min=torch.finfo(wide).min)
        e = torch.exp(scores - top[..., None])
        total = e.sum(-1)
        if sink is not None:
            total = total + torch.exp(sink - top)
        lse = torch.log(total) + top
        o = torch.einsum("bkgts,bskd->btkgd", e / torch.where(total > 0, total, 1.0)[..., None], v)
        o = torch.where(wrong[:, None, None, None], math.nan, o.flatten(2, 3)).to(q.dtype)
        lse = torch.where(wrong[:, None, None], math.nan, lse.flatten(1, 2))
        return o, lse.to(torch.promote_types(q.dtype, torch.float32))


def _gathered(k: Tensor, v: Tensor, block_table: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values (batch, capacity, kv_heads, dim) and, for each, whether it has a page."""
    if block_table is None:
        return k, v, torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)
    known = (block_table >= 0) & (block_table < k.shape[0])
    if not k.shape[0]:
        k, v = (t.new_zeros((1, *t.shape[1:])) for t in (k, v))
    at = torch.where(known, block_table, 0).long()
    if k.dtype in FP8:  # which torch does not index
        k, v = (t.view(torch.uint8)[at].view(k.dtype) for t in (k, v))
        return k.flatten(1, 2), v.flatten(1, 2), known.repeat_interleave(k.shape[2], 1)
    return k[at].flatten(1, 2), v[at].flatten(1, 2), known.repeat_interleave(k.shape[1], 1)


def _key(tensors: Tensors, settings: tuple[Any, ...]) -> tuple[Any, ...]:
    """All that a plan depends on: first whether addresses are aligned, then what is the same from call to call."""
    q, k, v, *others = tensors
    return (
        not (q.data_ptr() | k.data_ptr() | v.data_ptr()) % UNIT,
        q.shape, q.stride(), q.dtype, q.device,
        k.shape, k.stride(), k.dtype, k.device,
        v.shape, v.stride(), v.dtype, v.device,
        *map(_form, others), settings,
    )  # fmt: skip


def _form(t: Tensor | None) -> tuple[Any, ...] | None:
    return None if t is None else (t.shape, t.stride(), t.dtype, t.device)


OP = FlashDecoding
