"""flash-attn's functions by name, argument and result, on our attention ops.

    from liger_aot.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Dropout, ALiBi and rotary embeddings within attention are not there: asking for one is an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError
from liger_aot.ops.registry import load

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

_attention_op, _varlen_op, _paged_op, _decoding_op = (
    load("flash_attention"),
    load("flash_attention_varlen"),
    load("flash_attention_paged"),
    load("flash_decoding"),
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
) -> Any:
    """Attention of q (batch, tokens, heads, dim) to k and v (batch, keys, kv_heads, dim).

    Returns:
        as q; with ``return_attn_probs`` (it, the log-sum-exp (batch, heads, tokens), None).
    """
    return _dense(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


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
) -> Any:
    """Attention within each of the sequences that follow each other in q (tokens, heads, dim) and in k and v.

    With ``block_table`` (sequences, most pages) int32, k and v are a cache (pages, page_size, kv_heads, dim), to which
    there is no gradient.

    Returns:
        as q; with ``return_attn_probs`` (it, the log-sum-exp (heads, tokens), None).
    """
    return _varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        block_table,
    )


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
) -> Any:
    """Attention of the last tokens of each sequence, q (batch, tokens, heads, dim), to its cache, contiguous or paged.

    ``k`` and ``v`` (batch, new tokens, kv_heads, dim) are written into the cache first, after each sequence's
    ``cache_seqlens``. Nothing waits for the device.

    Returns:
        as q; with ``return_softmax_lse`` also the log-sum-exp (batch, heads, tokens).
    """
    return _with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos,
        rotary_sin,
        cache_seqlens,
        cache_batch_idx,
        cache_leftpad,
        block_table,
        softmax_scale,
        causal,
        window_size,
        softcap,
        rotary_interleaved,
        alibi_slopes,
        num_splits,
        return_softmax_lse,
    )


# The same with attention sinks, as vLLM's FlashAttention-3 names them: what Transformers' gpt-oss asks for.


def _dense(
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
    s_aux: Tensor | None = None,
) -> Any:
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


def _varlen(
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
    s_aux: Tensor | None = None,
) -> Any:
    _refuse("flash_attn_varlen_func", dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    if block_table is not None:
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
            return_lse=return_attn_probs,
        )
        return (*found, None) if return_attn_probs else found
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


def _with_kvcache(
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
    s_aux: Tensor | None = None,
) -> Any:
    name = "flash_attn_with_kvcache"
    _refuse(
        name,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        alibi_slopes=alibi_slopes,
    )
    lengths = _lengths(q, cache_seqlens)
    if k is not None or v is not None:
        if k is None or v is None or lengths is None:
            raise ArgumentError(f"liger_aot.flash_attn.{name}: k, v and cache_seqlens belong together")
        _write(k_cache, v_cache, k, v, lengths, block_table)
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
        splits=num_splits or None,
        return_lse=return_softmax_lse,
    )


def _lengths(q: Tensor, lengths: int | Tensor | None) -> Tensor | None:
    if isinstance(lengths, int):
        return torch.full((q.shape[0],), lengths, dtype=torch.int32, device=q.device)
    return lengths if lengths is None else lengths.to(torch.int32)


def _write(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, lengths: Tensor, block_table: Tensor | None
) -> None:
    """New tokens into the cache, after the ``lengths`` that are there."""
    at = lengths.long()[:, None] + torch.arange(k.shape[1], device=k.device)
    if block_table is None:
        rows = torch.arange(k.shape[0], device=k.device)[:, None].expand_as(at)
    else:
        page_size = k_cache.shape[1]
        rows, at = block_table.long().gather(1, at // page_size), at % page_size
    k_cache[rows, at] = k
    v_cache[rows, at] = v


def _window(size: tuple[int, int]) -> tuple[int | None, int | None] | None:
    left, right = (None if n < 0 else n for n in size)
    return None if left is None and right is None else (left, right)


def _refuse(function: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None and not (name == "dropout_p" and value == 0):
            allowed = "0" if name == "dropout_p" else "None"
            got = value if name == "dropout_p" else type(value).__name__
            raise ArgumentError(f"liger_aot.flash_attn.{function}: {name} must be {allowed}, got {got}")


WITH_SINKS = (_dense, _varlen, _with_kvcache)
