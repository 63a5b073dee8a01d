"""Continuous batching: attention to Transformers' paged cache, ``attn_implementation="paged|liger_aot"``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

NAME = "liger_aot"
PAGED = f"paged|{NAME}"
_MARK = "_liger_aot"  # of a function that was replaced already


def paged_attention_by(
    varlen: Callable[..., Tensor], decoding: Callable[..., Tensor]
) -> Callable[..., tuple[Tensor, None]]:
    """The attention interface's function for continuous batching, by ``flash_attention_varlen`` and
    ``flash_decoding`` or what has their arguments."""

    def forward(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return _attention(varlen, decoding, module, *args, **kwargs)

    return forward


def _attention(
    varlen: Callable[..., Tensor],
    decoding: Callable[..., Tensor],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    cache: Any,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor | dict[str, Tensor],
    max_seqlen_q: int,
    max_seqlen_k: int | dict[str, int],
    read_index: list[Tensor],
    write_index: list[Tensor],
    block_table: Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Writes the new tokens' keys and values into the cache, and attends to what each sequence has there.

    Args:
        query, key, value: (1, heads, tokens, head dimension), the tokens of all sequences one behind the other.
        attention_mask: not looked at.
        cache: Transformers' ``PagedAttentionCache``.
        cu_seq_lens_q, cu_seq_lens_k, max_seqlen_q, max_seqlen_k: as the varlen op has them; of k by the type of the
            layer where there are several.
        read_index, write_index: of each group of layers where in the cache keys are, and new ones go to.
        block_table: (groups, sequences, most pages) int32 in steps of one token a sequence: keys are then read where
            they are. Batches that are filled up have sequences without keys, whose pages are -1.

    Returns:
        (1, tokens, heads, head dimension), and None for the weights.
    """
    window = cache.sliding_windows[module.layer_idx]  # 1: none
    settings = {
        "causal": True,
        "scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "window": None if window == 1 else (window - 1, 0),
        "softcap": softcap or 0.0,
        "sinks": s_aux,
    }
    layer_type = "full_attention" if window == 1 else "sliding_attention"
    starts_k = cu_seq_lens_k[layer_type] if isinstance(cu_seq_lens_k, dict) else cu_seq_lens_k
    if block_table is not None:
        return _decode(decoding, module, query, key, value, cache, starts_k, block_table, settings), None
    longest = max_seqlen_k[layer_type] if isinstance(max_seqlen_k, dict) else max_seqlen_k
    k, v = cache.update(
        key_states=key,
        value_states=value,
        layer_idx=module.layer_idx,
        read_index=read_index,
        write_index=write_index,
    )
    q = query[0].transpose(0, 1)
    starts = (cu_seq_lens_q.to(torch.int32), starts_k.to(torch.int32))
    return varlen(q, k, v, *starts, int(max_seqlen_q), int(longest), **settings)[None], None


def _decode(
    decoding: Callable[..., Tensor],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: Any,
    starts_k: Tensor,
    block_table: Tensor,
    settings: dict[str, Any],
) -> Tensor:
    group, layer = cache.layer_index_to_group_indices[module.layer_idx]
    q, k, v = (t.permute(2, 0, 1, 3) for t in (query, key, value))  # (sequences, 1, heads, dim)
    caches = (cache.key_cache[layer], cache.value_cache[layer])  # (pages * page size, kv_heads, dim)
    lengths, pages, slots = _step(
        starts_k, block_table, group, module.layer_idx, cache.block_size, caches[0].shape[0]
    )
    for t, new in zip(caches, (k, v), strict=True):
        t.index_copy_(0, slots, new[:, 0])
    k_cache, v_cache = (t.unflatten(0, (-1, cache.block_size)) for t in caches)
    return decoding(q, k_cache, v_cache, cache_seqlens=lengths, block_table=pages, **settings).transpose(0, 1)


def _step(
    starts_k: Tensor, block_table: Tensor, group: int, layer: int, page_size: int, slots: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each sequence its length, its pages, and where in the cache its new token goes.

    They are kept with the block table for a group's other layers. A layer that comes again is another step's, or a CUDA
    graph's capture.
    """
    known: dict[int, tuple[set[int], tuple[Tensor, Tensor, Tensor]]] = {}
    if not torch.compiler.is_compiling():
        try:
            known = block_table._liger_aot_steps  # type: ignore[attr-defined]
        except AttributeError:
            block_table._liger_aot_steps = known  # type: ignore[attr-defined]
    if group not in known or layer in known[group][0]:
        lengths = starts_k.diff()[: block_table.shape[1]].to(torch.int32)
        # Nobody reads the cache's last page: tokens of sequences that fill the batch up go there.
        pages = block_table[group].remainder(slots // page_size)
        last = (lengths - 1).clamp(min=0).long()[:, None]
        page = pages.gather(1, last // page_size)
        known[group] = set(), (lengths, pages, (page * page_size + last % page_size)[:, 0])
    layers, found = known[group]
    layers.add(layer)
    return found


def register_paged(interface: Any, varlen: Callable[..., Tensor], decoding: Callable[..., Tensor]) -> None:
    """Make ``"paged|liger_aot"`` known, and have continuous batching treat it as flash attention: without masks, with
    its CUDA graphs and with a block table in steps of one token.

    Transformers knows flash attention by "flash" in its name: what its continuous batching asks knows one name more. A
    Transformers without these functions has no continuous batching by this name; all else works.
    """
    try:
        from transformers.generation.continuous_batching import cache, continuous_api, initialization
    except ImportError:
        return
    for module in (cache, continuous_api, initialization):
        _replace(module, "is_flash_attention_requested", _requested)
    _replace(initialization, "lazy_import_paged_flash_attention", partial(_functions, (varlen, decoding)))
    interface.register(PAGED, paged_attention_by(varlen, decoding))


def _replace(module: ModuleType, name: str, by: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    found = getattr(module, name, None)
    if found is not None and not hasattr(found, _MARK):
        new = wraps(found)(by(found))
        setattr(new, _MARK, True)
        setattr(module, name, new)


def _requested(found: Callable[..., bool]) -> Callable[..., bool]:
    """Whether an implementation, or a configuration's, is flash attention."""

    def requested(
        config: Any = None, requested_attention_implementation: str | None = None, **kwargs: Any
    ) -> bool:
        name = requested_attention_implementation if config is None else config._attn_implementation
        return name in (NAME, PAGED) or found(config, requested_attention_implementation, **kwargs)

    return requested


def _functions(ours: tuple[Callable[..., Any], ...], found: Callable[..., Any]) -> Callable[..., Any]:
    """An implementation's functions: asked whether there is one that takes a block table."""

    def functions(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        return ours if implementation in (NAME, PAGED) else found(implementation, *args, **kwargs)

    return functions
