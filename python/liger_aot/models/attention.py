"""``attn_implementation="liger_aot"``: flash attention for Transformers' attention interface."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from liger_aot.errors import ArgumentError, PatchError, UnknownOp
from liger_aot.models.masks import (
    Orders,
    Sequences,
    attention_mask,
    is_lengths,
    known_keys,
    mask_of_positions,
    sequences_of,
)
from liger_aot.models.paged import NAME, register_paged
from liger_aot.ops.op import autocast_dtype
from liger_aot.ops.registry import load, names

HALF = (torch.bfloat16, torch.float16)


class Ops(NamedTuple):
    """The ops that attention takes, or what has their arguments. Decoding has no gradient."""

    dense: Callable[..., Tensor]
    varlen: Callable[..., Tensor]
    decoding: Callable[..., Tensor]

    @classmethod
    def installed(cls) -> Ops:
        return cls(*map(_op, ("flash_attention", "flash_attention_varlen", "flash_decoding")))


def register_attention() -> None:
    """Make ``attn_implementation="liger_aot"`` known to Transformers: before a model is made that asks for it.

    ``apply`` and ``patch`` do this too. Binaries are loaded when a model first attends. Continuous batching
    (``generate_batch``) takes it as it takes flash-attn's.

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
    ops = Ops.installed()
    AttentionInterface.register(NAME, attention_by(ops))
    AttentionMaskInterface.register(NAME, attention_mask)
    register_paged(AttentionInterface, ops.varlen, ops.decoding)


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


def attention_by(ops: Ops) -> Callable[..., tuple[Tensor, None]]:
    """The interface's function, by these ops."""

    def forward(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return attention(ops, module, *args, **kwargs)

    return forward


def attention(
    ops: Ops,
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
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    position_ids: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What the interface's function does.

    Args:
        module: ``is_causal`` is taken from it where it is not given.
        query: (batch, heads, tokens, head dimension). float32 is computed in autocast's dtype, or in that of the
            module's linear layers.
        key, value: the same with heads that divide query's. value's head dimension may be smaller.
        attention_mask: None: the keys stand at query's end. Else what ``masks.attention_mask`` gave.
        sliding_window: how many keys a query sees, its own among them.
        softcap, s_aux: the op's ``softcap`` and ``sinks``.
        cu_seq_lens_q, cu_seq_lens_k: where packed sequences start, whatever the mask.
        max_length_q, max_length_k: of the longest of them.
        position_ids: looked at where there is no mask and no cache, and nothing is traced: some models (gpt-oss) leave
            them out when they ask for a mask.
        others: what other implementations need.

    Returns:
        (batch, tokens, heads, value's head dimension), and None for the weights, which are never there.

    Raises:
        UnknownOp: this build has no flash attention.
        ArgumentError: a mask of the caller's own or dropout are asked for, a gradient through a static cache, or a
            model that Transformers says has no flash attention.
    """
    if (model := _without_flash(type(module).__module__)) is not None:
        raise ArgumentError(
            f'attn_implementation="{NAME}": {model} does not support flash attention, Transformers says '
            '(_supports_flash_attn): its attention has masks or biases of its own, set "sdpa" or "eager"'
        )
    if dropout:
        raise ArgumentError(f'attn_implementation="{NAME}": dropout must be 0, got {dropout}')
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = None
    if sliding_window is not None:
        window = (sliding_window - 1, None if causal else sliding_window - 1)
    settings = {
        "causal": causal,
        "scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "window": window,
        "softcap": softcap or 0.0,
        "sinks": s_aux,
    }
    dim = value.shape[-1]
    if dim != query.shape[-1]:
        value = F.pad(value, (0, query.shape[-1] - dim))
    q, k, v = (t.transpose(1, 2) for t in _half(module, query, key, value))
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        starts = Sequences(cu_seq_lens_q.to(torch.int32), cu_seq_lens_k.to(torch.int32), None)
        lengths = (_length(max_length_q, q), _length(max_length_k, k))
        o = _of_sequences(ops.varlen, q, k, v, starts, lengths, settings)
    else:
        if attention_mask is None and position_ids is not None and q.shape[:2] == (1, k.shape[1]):
            attention_mask = mask_of_positions(position_ids, q.shape[1])
        o = _masked(ops, q, k, v, attention_mask, settings)
    return (o if o.shape[-1] == dim else o[..., :dim]), None


# Llama 4 says it has none, as flash-attn has no chunks: where there are more keys than a chunk its mask is refused.
SUPPORTED = frozenset({"Llama4PreTrainedModel"})
_classes: dict[str, str | None] = {}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _without_flash(modeling: str) -> str | None:
    """The class of a modeling module that says its models have no flash attention. Such models change their masks after
    they asked for them, or hand attention a bias."""
    if modeling not in _classes:
        found = [
            name
            for name, value in vars(sys.modules.get(modeling, torch)).items()
            if isinstance(value, type)
            and value.__module__ == modeling
            and vars(value).get("_supports_flash_attn", True) is False
            and name not in SUPPORTED
        ]
        _classes[modeling] = found[0] if found else None
    return _classes[modeling]


def _masked(
    ops: Ops, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, settings: dict[str, Any]
) -> Tensor:
    if mask is None:
        return ops.dense(q, k, v, layout="bshd", **settings)
    if (keys := known_keys(mask)) is not None:
        return ops.dense(q, k[:, :keys], v[:, :keys], layout="bshd", **settings)
    if is_lengths(mask):
        return ops.decoding(q, k, v, cache_seqlens=mask, **settings)
    if (sequences := Sequences.of_mask(mask)) is not None:
        longest = sequences.max_seqlen
        lengths = (longest or q.shape[1], longest or k.shape[1])
        return _of_sequences(ops.varlen, q, k, v, sequences, lengths, settings)
    orders = Orders.of_mask(mask, q.shape[1], k.shape[1])
    if orders is None:
        raise ArgumentError(
            f'attn_implementation="{NAME}": attention_mask must be None or of (batch, tokens), got '
            f'{tuple(mask.shape)} {mask.dtype}: masks of one\'s own need "sdpa"'
        )
    k, v = (_moved(t, orders.k.tokens) for t in (k, v))
    if q.shape[1] == 1 and not (torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))):
        return ops.decoding(q, k, v, cache_seqlens=orders.k.real.to(torch.int32), **settings)
    q = _moved(q, orders.q.tokens)
    o = _of_sequences(ops.varlen, q, k, v, sequences_of(orders), (q.shape[1], k.shape[1]), settings)
    return _moved(o, orders.q.tokens.argsort(dim=1))


def _of_sequences(
    varlen: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    longest: tuple[int, int],
    settings: dict[str, Any],
) -> Tensor:
    """All rows as one, which copies nothing where rows follow each other in memory."""
    starts = sequences.cu_seqlens_q, sequences.cu_seqlens_k
    return varlen(*(t.flatten(0, 1) for t in (q, k, v)), *starts, *longest, **settings).view(q.shape)


def _length(given: int | None, t: Tensor) -> int:
    return t.shape[0] * t.shape[1] if given is None else int(given)


def _half(module: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
    """float32 comes from norms or rotary embeddings that are kept in it; the op has none."""
    if tensors[0].dtype != torch.float32 or not isinstance(module, nn.Module):
        return tensors
    dtype = autocast_dtype(tensors[0])
    if dtype is None:
        weights = (m.weight.dtype for m in module.modules() if isinstance(m, nn.Linear))
        dtype = next(weights, torch.float32)
    return tuple(t.to(dtype) for t in tensors) if dtype in HALF else tensors


class _Move(torch.autograd.Function):
    """Tokens of each row in another order. Its gradient is a move, too, not a sum by atomic additions."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return t.gather(1, order[:, :, None, None].expand_as(t))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return _moved(grads[0], order.argsort(dim=1)), None


def _moved(t: Tensor, order: Tensor) -> Tensor:
    """``t`` (batch, tokens, heads, dim) in ``order``, a permutation of each row."""
    moved: Tensor = _Move.apply(t, order)  # type: ignore[no-untyped-call]
    return moved
