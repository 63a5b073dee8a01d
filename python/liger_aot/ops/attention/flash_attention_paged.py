"""Attention of packed queries of any lengths to a paged cache: prefill chunks, prefix hits, speculation, decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.arguments import FROM_ZERO, Allowed, Schema, check_flag
from liger_aot.ops.attention._checks import SCALES, check_dim, settings_of
from liger_aot.ops.attention._operands import MAX_SEQLEN, TILE_UNIT, fits, fitted
from liger_aot.ops.attention._paged import (
    BOXES,
    NAME,
    PagedSettings,
    Plan,
    check_aligned,
    check_out,
    check_paged,
    check_values,
    finite,
    gathered,
    head_dim_of,
    key_of,
    neutral,
    paged_shape,
    seen_in_cache,
)
from liger_aot.ops.attention.flash_attention import FlashAttention
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.forward_only import ForwardOnlyOp
from liger_aot.ops.in_place import check_writable, share_an_element
from liger_aot.ops.kv_cache import FP8, lacking
from liger_aot.ops.op import Problem, written
from liger_aot.ops.split_kv import MAX_SPLITS
from liger_aot.runtime import device_errors
from liger_aot.runtime.layout import layouts_of
from liger_aot.runtime.remembered import remember

SPLITS = Allowed(least=1, most=MAX_SPLITS)
MAX_KEYS = Allowed(least=1)
EARLIER = "the cu_seqlens_q, seqused_k or block_table of an earlier call"


class FlashAttentionPaged(ForwardOnlyOp):
    """``flash_attention_paged(q, k_cache, v_cache, cu_seqlens_q, seqused_k, block_table, max_seqlen_q, *, ...) ->
    Tensor``: attention of sequences of queries that follow each other in q to the keys and values that each sequence
    has in a paged cache, the queries' own among them.

    Exact, with float32 scores and sums. For inference: there is no gradient. Batches may mix prefill, chunks of it,
    prefixes that were cached before, speculated tokens and single ones. Starts, lengths and block tables stay on the
    device, and nothing waits for it. Works under torch.compile and, after ``preload``, in CUDA graphs, whose starts,
    lengths and tables may change between replays: launches are sized by q's tokens, the number of sequences and the
    max_seqlens. CPU tensors take the plain-torch reference, whose memory grows with tokens times all keys.

    On gfx90a, whose float16 matrix instructions read subnormal numbers as zeros, float16 elements of q, k_cache and
    v_cache below 2^-14 count as zeros.

    Args:
        q: (tokens, heads, dim) bfloat16 or float16. Any strides but the last, which must be 1; tensors whose rows don't
            start at multiples of 16 elements are copied.
        k_cache, v_cache: (pages, page_size, kv_heads, dim) of q's dtype, float8_e4m3fn (compute capability 8.9 and from
            9.0 on, gfx950, gfx12) or float8_e4m3fnuz (gfx942), and of equal strides, any multiples of 16 elements but
            the last, which must be 1: also halves of one tensor. On a GPU they start at multiples of 16 bytes.
            page_size is a power of 2 from 16 on. kv_heads divide heads (grouped and multi-query attention). dim is a
            multiple of 16 up to 256; it runs at the speed of the next of 64, 128 and 256.
        cu_seqlens_q: (sequences + 1,) int32 on q's device: where each sequence starts in q, then where the last one
            ends: at the tokens or before. They start at 0 and don't fall; a sequence may have no queries.
        seqused_k: (sequences,) int32: how many keys each sequence has.
        block_table: (sequences, most pages) int32, rows contiguous: where the pages of each sequence are. Entries past
            its last key, or before its window, are not looked at.
        max_seqlen_q: the most queries of a sequence, or more: it is checked, and chooses the kernel.
        max_seqlen_k: the most keys of a sequence, or more: it is checked, and chooses how many programs split a
            sequence's keys. None: what block_table has room for; chunks of a prompt are then not split.
        causal: a query sees no key after its own, where the last query's is the sequence's last.
        scale: of the scores, above 0. Default 1 / sqrt(dim).
        window: (left, right): a query sees so many keys before and after its own. None is no bound.
        softcap: above 0: scores become softcap * tanh(score / softcap).
        sinks: (heads,) bfloat16, float16 or float32, or None: for each head the score of one more key, whose value
            is 0.
        k_scale, v_scale: of an fp8 cache, float32, as many elements each: keys and values are code * scale. One
            element, or (kv_heads,). Each may be None, which is 1.
        splits: how many programs split a sequence's keys at most, where sequences have few queries. None: chosen from
            the shapes and the profile; on sm90, where many sequences may be long, on the GPU from the lengths of all of
            them, so that the last bits of a sequence's results depend on the other lengths.
        out: (tokens, heads, dim) of q's dtype to write the result to, or None. It shares no memory with the arguments,
            nor do its own elements with each other.
        return_lse: also return the logarithm of each query's sum.

    Returns:
        ``out`` or a contiguous tensor of q's shape and dtype; with ``return_lse`` also (heads, tokens) float32. A query
        that sees no key gives zeros, and -inf without a sink; tokens behind the last sequence give zeros and -inf. With
        starts, lengths or pages out of range, or a sequence above a max_seqlen, a GPU gives any numbers; nothing out of
        bounds is read or written, and the next call raises (LIGER_AOT_DEBUG=1: the call itself).

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype, or the GPU does not have that of the cache.
        ArgumentError: a shape, stride, device or setting is not allowed, or a gradient is needed; on the CPU also
            starts, a length or a page out of range.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Kwon et al., PagedAttention (2023); Dao, FlashAttention-2 (2023); Shah et al., FlashAttention-3 (2024).
    """

    name = NAME
    tensors = (
        "q", "k_cache", "v_cache", "cu_seqlens_q", "seqused_k", "block_table", "sinks?", "k_scale?", "v_scale?",
    )  # fmt: skip
    settings = Schema(
        {
            "SymInt max_seqlen_q": FROM_ZERO,
            "SymInt max_seqlen_k": FROM_ZERO,
            **SCALES,
            "int splits": Allowed(least=0, most=MAX_SPLITS),
        }
    )
    no_gradient = "attention to a cache has none"
    instead = "flash_attention_varlen"
    outputs = 2
    results = 2  # o, lse

    def __init__(self, runtimes: Any = None) -> None:
        super().__init__(runtimes)
        self._plans: dict[Any, Plan] = {}
        # layouts and distances at which ``out`` shares no memory with the arguments
        self._disjoint: dict[Any, bool] = {}

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cu_seqlens_q: Tensor,
        seqused_k: Tensor,
        block_table: Tensor,
        max_seqlen_q: int,
        *,
        max_seqlen_k: int | None = None,
        causal: bool = True,
        scale: float | None = None,
        window: tuple[int | None, int | None] | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        splits: int | None = None,
        out: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        tensors = (q, k_cache, v_cache, cu_seqlens_q, seqused_k, block_table, sinks, k_scale, v_scale)
        settings = (
            max_seqlen_q,
            0 if max_seqlen_k is None else MAX_KEYS.checked(self.name, "SymInt max_seqlen_k", max_seqlen_k),
            *settings_of(self.name, q, causal, scale, window, softcap),
            0 if splits is None else SPLITS.checked(self.name, "int splits", splits),
        )
        with_lse = return_lse is not False and check_flag(self.name, "return_lse", return_lse)
        to = None
        if out is not None:
            self.check_all(tensors, settings)
            check_out(self.name, out, q)
            to = out, q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
        o, lse = self.differentiable(tensors, settings, to)
        return (o, lse) if with_lse else o

    def preload(self, device: torch.device | int | str | None = None) -> None:
        super().preload(device)
        device_errors.flag(self.name)
        for index, on in self._own.bound.items():
            if f"{NAME}_forward" in on.kernels and index >= 0:
                on.workspace("counters", torch.device("cuda", index)).prepare()

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        check_paged(self.name, tensors, PagedSettings(*settings))

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        q, k, v = tensors[:3]
        to, lse = out or (None, None)
        if to is not None:
            self._check_memory(to, tensors)
        try:
            plan = self._plans.get(key_of((*tensors, to), settings))
            aligned = not (q.data_ptr() | k.data_ptr() | v.data_ptr()) % TILE_UNIT
        except (AttributeError, RuntimeError, TypeError):
            plan = None  # no tensors, or none with memory: the checks say so
        if plan is None or not aligned or (to is not None and to.data_ptr() % TILE_UNIT):
            return self.prepare_forward(tensors, settings, keep, out)
        device_errors.raise_if_any(self.name, EARLIER)
        results = plan(tensors, to, lse)
        if to is not None:
            written(to)
        device_errors.check_now(self.name, q.device)
        return results

    def _check_memory(self, out: Tensor, tensors: Tensors) -> None:
        """ArgumentError unless all of ``out`` can be written while the arguments are read."""
        layouts, *at = layouts_of((out, *tensors))
        distances = layouts, *(a - at[0] for a in at)
        if distances in self._disjoint:
            return
        check_writable(self.name, "out", out)
        for name, t in zip(self.tensors, tensors, strict=True):
            if t is not None and share_an_element(out, t):
                raise ArgumentError(f"{self.name}: out overlaps {name.rstrip('?')}")
        remember(self._disjoint, distances, True)

    def prepare_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        self.check(tensors, settings)
        q, k, v, *table, sinks, k_scale, v_scale = tensors
        asked = PagedSettings(*settings)
        if self.on_reference(tensors):
            check_values(self.name, tensors, asked)
            return self._copied(self.by_reference(tensors, settings), out)
        if out is not None and not fits(out[0], TILE_UNIT):
            return self._copied(self.prepare_forward(tensors, settings, keep, None), out)
        check_aligned(self.name, k, v)
        on = self._own.of(q, "q")
        assert on is not None
        table = [t if t.dim() == 2 else t.contiguous() for t in table]
        sinks = None if sinks is None else sinks.float().contiguous()
        scales = (t if t is None else t.contiguous() for t in (k_scale, v_scale))
        tensors = (fitted(q, TILE_UNIT), k, v, *table, sinks, *scales)
        to = None if out is None else out[0]
        key = key_of((*tensors, to), settings)
        if key not in self._plans:
            meta = torch.empty(q.shape, dtype=q.dtype, device="meta") if to is None else to
            try:
                remember(self._plans, key, Plan(on, tensors, meta, asked))
            except ArgumentTypeError:
                if k.dtype not in FP8:
                    raise
                raise lacking(self.name, "k_cache", k.dtype) from None
        return self.run_forward(tensors, settings, keep, out)

    def _copied(self, results: Tensors, out: Sequence[Tensor] | None) -> Tensors:
        found: Tensors = self._given(results, out)
        return found

    def on_reference(self, tensors: Tensors) -> bool:
        """Also without a key that could be read."""
        _, k, _, _, _, block_table, *_ = tensors
        return super().on_reference(tensors) or not k.numel() or not block_table.numel()

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        """``shape`` is q's. ``dtypes`` may name that of the ``cache``; the wide tiles are for many rows of q a head of
        k; where a pack has them, the forward is for many queries and the split kernel for few."""
        dim = shape[-1]
        check_dim(self.name, dim)
        cache, width = (dtypes or {}).get("cache", dtype), head_dim_of(dim)
        found = [Problem(f"{NAME}_tiles", (dtype, cache, width, wide), True, dim) for wide in (False, True)]
        found += [Problem(f"{NAME}_combine", (dtype, width), True, parts) for parts in (2, MAX_SPLITS)]
        if cache == dtype:
            by_box = [(False, 16), (True, 16), *([(True, 64)] if width == 128 else [])]
            found += [Problem(f"{NAME}_split", (dtype, width, *rest), True, dim) for rest in by_box]
            axes = [(mask, box) for mask in ("causal", "local") for box in sorted(BOXES)]
            found += [
                Problem(f"{NAME}_forward", (dtype, width, *rest), True, keys)
                for rest in axes
                for keys in (1, MAX_SEQLEN)
            ]
        return tuple(found)

    @staticmethod
    def reference(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cu_seqlens_q: Tensor,
        seqused_k: Tensor,
        block_table: Tensor,
        sinks: Tensor | None,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        scale: float,
        left: int,
        right: int,
        softcap: float,
        splits: int,
    ) -> tuple[Tensor, Tensor]:
        """``flash_attention``'s, of all tokens as one sequence in which each query sees its own sequence's keys."""
        wide = torch.promote_types(q.dtype, torch.float32)
        capacity = paged_shape(q, k_cache, block_table, 0).capacity
        seen, inside = seen_in_cache(cu_seqlens_q, seqused_k, q.shape[0], capacity, left, right)
        k, v = (
            finite(gathered(t, block_table, by, wide), seen)
            for t, by in ((k_cache, k_scale), (v_cache, v_scale))
        )
        wide_q = q.to(wide)
        o, lse = FlashAttention.reference(
            wide_q[None], k[None], v[None], sinks, scale, -1, -1, softcap, "bshd", seen=seen
        )
        return o[0].to(q.dtype), neutral(lse[0], inside)


OP = FlashAttentionPaged
