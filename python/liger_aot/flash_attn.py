"""flash-attn's functions by name, argument and result, on our attention ops.

    from liger_aot.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

After flash-attn's own arguments come some by keyword, named as in FlashAttention-3: ``s_aux`` (heads,), for each head
the score of one more key, whose value is 0 (attention sinks); ``k_descale`` and ``v_descale``, what the elements of a
float8 cache are multiplied by. Dropout, ALiBi and rotary embeddings within attention are not there: asking for one is
an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.registry import load

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

_attention_op, _varlen_op, _paged_op, _decoding_op, _write_op = (
    load("flash_attention"),
    load("flash_attention_varlen"),
    load("flash_attention_paged"),
    load("flash_decoding"),
    load("write_kv_cache"),
)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Any:
    """Attention of q (batch, tokens, heads, dim) to k and v (batch, keys, kv_heads, dim).

    Returns:
        as q; with ``return_attn_probs`` (it, the log-sum-exp (batch, heads, tokens), None).
    """
    _refuse("flash_attn_func", dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    found = _attention_op(
        q,
        k,
        v,
        causal=causal,
        scale=softmax_scale,
        window=_window(window_size),
        softcap=softcap,
        sinks=s_aux,
        deterministic=deterministic,
        return_lse=return_attn_probs,
    )
    return (*found, None) if return_attn_probs else found


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    s_aux: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Any:
    """Attention within each of the sequences that follow each other in q (tokens, heads, dim) and in k and v.

    With ``block_table`` (sequences, most pages) int32, k and v are a cache (pages, page_size, kv_heads, dim), to which
    there is no gradient. ``k_descale`` and ``v_descale`` are for such a cache of float8, as in
    ``flash_attn_with_kvcache``.

    Returns:
        as q; with ``return_attn_probs`` (it, the log-sum-exp (heads, tokens), None).
    """
    name = "flash_attn_varlen_func"
    _refuse(name, dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    if block_table is not None:
        k_scale, v_scale = _scales(name, k_descale, v_descale)
        found = _paged_op(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k.diff(),
            block_table,
            int(max_seqlen_q),
            max_seqlen_k=int(max_seqlen_k) or None,
            causal=causal,
            scale=softmax_scale,
            window=_window(window_size),
            softcap=softcap,
            sinks=s_aux,
            k_scale=k_scale,
            v_scale=v_scale,
            return_lse=return_attn_probs,
        )
        return (*found, None) if return_attn_probs else found
    if k_descale is not None or v_descale is not None:
        raise ArgumentError(
            f"liger_aot.flash_attn.{name}: k_descale and v_descale are for a cache, which needs block_table, got None"
        )
    found = _varlen_op(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        int(max_seqlen_q),
        int(max_seqlen_k),
        causal=causal,
        scale=softmax_scale,
        window=_window(window_size),
        softcap=softcap,
        sinks=s_aux,
        deterministic=deterministic,
        return_lse=return_attn_probs,
    )
    return (*found, None) if return_attn_probs else found


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Any:
    """Attention of the last tokens of each sequence, q (batch, tokens, heads, dim), to its cache, contiguous or paged.

    ``k`` and ``v`` (batch, new tokens, kv_heads, dim) are written into the cache first, after each sequence's
    ``cache_seqlens``. Nothing waits for the device.

    A cache may be of float8, q, k and v then are of 16 bits: its elements count ``k_descale`` and ``v_descale`` times,
    and what is written is divided by them. Each may be None, which is 1. They are float32 of one element, (kv_heads,),
    or as in FlashAttention-3 (batch, kv_heads) where all sequences share them: ``expand``, not a copy.

    Returns:
        as q; with ``return_softmax_lse`` also the log-sum-exp (batch, heads, tokens).
    """
    name = "flash_attn_with_kvcache"
    _refuse(
        name,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        alibi_slopes=alibi_slopes,
    )
    lengths, scales = _lengths(q, cache_seqlens), _scales(name, k_descale, v_descale)
    if k is not None or v is not None:
        if k is None or v is None or lengths is None:
            raise ArgumentError(f"liger_aot.flash_attn.{name}: k, v and cache_seqlens belong together")
        slots = _slots(k_cache, lengths, k.shape[1], block_table)
        _write_op(
            k.flatten(0, 1), v.flatten(0, 1), k_cache, v_cache, slots, k_scale=scales[0], v_scale=scales[1]
        )
        lengths = lengths + k.shape[1]
    return _decoding_op(
        q,
        k_cache,
        v_cache,
        cache_seqlens=lengths,
        block_table=block_table,
        scale=softmax_scale,
        causal=causal,
        window=_window(window_size),
        softcap=softcap,
        sinks=s_aux,
        k_scale=scales[0],
        v_scale=scales[1],
        splits=num_splits or None,
        return_lse=return_softmax_lse,
    )


def _lengths(q: Tensor, lengths: int | Tensor | None) -> Tensor | None:
    if isinstance(lengths, int):
        return torch.full((q.shape[0],), lengths, dtype=torch.int32, device=q.device)
    return lengths if lengths is None else lengths.to(torch.int32)


def _slots(k_cache: Tensor, lengths: Tensor, new: int, block_table: Tensor | None) -> Tensor:
    """Where the new tokens of each sequence go, after the ``lengths`` that are there. One that its cache has no room
    for is -1, which is skipped: the op that reads the cache then reports the length."""
    at = lengths.long()[:, None] + torch.arange(new, device=lengths.device)
    page_size = k_cache.shape[1]
    if block_table is None:
        capacity, pages = page_size, torch.arange(lengths.shape[0], device=lengths.device)[:, None]
    else:
        capacity = block_table.shape[1] * page_size
        pages = block_table.long().gather(1, at.clamp(0, max(capacity - 1, 0)) // page_size)
    there = (at >= 0) & (at < capacity)
    return torch.where(there, pages * page_size + at % page_size, -1).flatten()


def _scales(
    function: str, k_descale: Tensor | None, v_descale: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """As the ops take them: one for the cache, or for each of its heads."""
    found = []
    for name, t in (("k_descale", k_descale), ("v_descale", v_descale)):
        if t is not None and not isinstance(t, Tensor):
            raise ArgumentTypeError(
                f"liger_aot.flash_attn.{function}: {name} must be a torch.Tensor, got {type(t).__name__}"
            )
        if t is not None and t.dim() == 2:
            if not t.shape[0] or (t.shape[0] > 1 and t.stride(0)):
                raise ArgumentError(
                    f"liger_aot.flash_attn.{function}: {name} must have one element, be (kv_heads,), or (batch, "
                    f"kv_heads) expanded from one row; got shape {tuple(t.shape)} with strides {t.stride()}"
                )
            t = t[0]
        found.append(None if t is None else t.contiguous())
    return found[0], found[1]


def _window(size: tuple[int, int]) -> tuple[int | None, int | None] | None:
    left, right = (None if n < 0 else n for n in size)
    return None if left is None and right is None else (left, right)


def _refuse(function: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None and not (name == "dropout_p" and value == 0):
            allowed = "0" if name == "dropout_p" else "None"
            got = value if name == "dropout_p" else type(value).__name__
            raise ArgumentError(f"liger_aot.flash_attn.{function}: {name} must be {allowed}, got {got}")
