"""``attn_implementation="liger_aot"``: flash attention for Transformers' attention interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, PatchError, UnknownOp
from liger_aot.ops.registry import load, names

NAME = "liger_aot"
OP = "flash_attention"
DECODING = "flash_decoding"  # from a cache with room for more keys
FEW = 16  # tokens that decoding is meant for


def register_attention() -> None:
    """Make ``attn_implementation="liger_aot"`` known to Transformers: before a model is made that asks for it.

    ``apply`` and ``patch`` do this too. Binaries are loaded when a model first attends.

    Raises:
        PatchError: Transformers isn't installed, or is without its attention interface.
    """
    try:
        from transformers.masking_utils import AttentionMaskInterface
        from transformers.modeling_utils import AttentionInterface
    except ImportError as error:
        raise PatchError(
            f"liger_aot.register_attention: Transformers' attention interface: {error}"
        ) from error
    AttentionInterface.register(NAME, attention_by(_op(OP), _op(DECODING)))
    AttentionMaskInterface.register(NAME, attention_mask)


def _op(name: str) -> Callable[..., Tensor]:
    if name in names():
        op: Callable[..., Tensor] = load(name)
        return op

    def missing(*args: Any, **kwargs: Any) -> Tensor:
        raise UnknownOp(
            f'attn_implementation="{NAME}" needs the op {name}, which this liger-aot does not have: set "sdpa" or '
            '"flash_attention_2" instead'
        )

    return missing


def attention_by(
    op: Callable[..., Tensor], decoding: Callable[..., Tensor]
) -> Callable[..., tuple[Tensor, None]]:
    """The interface's function, by ``flash_attention`` and ``flash_decoding`` or what has their arguments."""

    def forward(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return attention(op, decoding, module, *args, **kwargs)

    return forward


def attention(
    op: Callable[..., Tensor],
    decoding: Callable[..., Tensor],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What the interface's function does.

    Args:
        op: as ``flash_attention``.
        decoding: as ``flash_decoding``; it has no gradient.
        module: ``is_causal`` is taken from it where it is not given.
        query: (batch, heads, tokens, head dimension).
        key, value: the same with heads that divide query's.
        attention_mask: None: the keys stand at query's end. Else what ``attention_mask`` below gave for a static cache.
        sliding_window: how many keys a query sees, its own among them.
        softcap, s_aux: the op's ``softcap`` and ``sinks``.
        others: what other implementations need.

    Returns:
        (batch, tokens, heads, head dimension), and None for the weights, which are never there.

    Raises:
        UnknownOp: this build has no flash attention.
        ArgumentError: a mask, dropout or packed sequences are asked for, or a gradient through a static cache.
    """
    lengths = None
    if attention_mask is not None and _is_known_to_host(attention_mask):
        key, value = (t[:, :, : attention_mask.shape[0]] for t in (key, value))
    elif attention_mask is not None and _is_lengths(attention_mask):
        lengths, attention_mask = attention_mask, None
    else:
        _refuse("attention_mask", attention_mask)
    _refuse("cu_seq_lens_q", cu_seq_lens_q)
    if dropout:
        raise ArgumentError(f'attn_implementation="{NAME}": dropout must be 0, got {dropout}')
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = None
    if sliding_window is not None:
        window = (sliding_window - 1, None if causal else sliding_window - 1)
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    settings = {
        "causal": causal,
        "scale": scaling,
        "window": window,
        "softcap": softcap or 0.0,
        "sinks": s_aux,
    }
    if lengths is not None:
        return decoding(q, k, v, cache_seqlens=lengths, **settings), None
    return op(q, k, v, layout="bshd", **settings), None


def _refuse(name: str, value: Any) -> None:
    if value is not None:
        raise ArgumentError(f'attn_implementation="{NAME}": {name} must be None, got {type(value).__name__}')


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = True,
    use_vmap: bool = False,
    mask_function: Any = None,
    device: torch.device | str | None = None,
    **others: Any,
) -> Tensor | None:
    """The interface's mask: how many of a static cache's keys are there. None where all are, at the queries' end.

    Returns:
        None; or (keys, 0), an empty tensor whose shape says how many keys there are, where the host knows it (the
        first prompt) or asks for it (a later prompt: it waits once for the device); or (batch,) int32 lengths, which
        only the device knows: nothing waits for it, so that decoding can be captured in a CUDA graph.

    Raises:
        ArgumentError: a mask would be needed.
    """
    from transformers.masking_utils import bidirectional_mask_function

    problem = ""
    # With a static cache Transformers insists on the mask of a single query, which sees all keys that are there.
    single = q_length == 1 and mask_function is not bidirectional_mask_function
    packed = not (allow_is_causal_skip or single)
    if use_vmap or packed or not allow_is_bidirectional_skip:
        problem = "packed sequences or a mask of its own"
    elif attention_mask is not None and _may_pad(attention_mask) and not torch.all(attention_mask):
        problem = "padding"
    if problem:
        raise ArgumentError(f'attn_implementation="{NAME}" has no masks: {problem} needs "sdpa"')
    keys = q_offset + q_length - kv_offset
    if isinstance(keys, Tensor):
        if q_length <= FEW or torch.compiler.is_compiling() or _is_capturing(keys):
            return keys.to(torch.int32).repeat(batch_size)
        keys = int(keys)
    return None if keys == kv_length else torch.empty((keys, 0), device=device)


def _is_capturing(t: Tensor) -> bool:
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


def _is_known_to_host(mask: Tensor) -> bool:
    return mask.dim() == 2 and not mask.shape[1]


def _is_lengths(mask: Tensor) -> bool:
    return mask.dim() == 1 and mask.dtype == torch.int32


def _may_pad(mask: Tensor) -> bool:
    """Not where it is one of ours: ``generate`` makes masks before the model does, and hands them to it."""
    return not (_is_known_to_host(mask) or _is_lengths(mask))
