"""``attn_implementation="liger_aot"``: flash attention for Transformers' attention interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, PatchError, UnknownOp
from liger_aot.loader import load
from liger_aot.ops import names

NAME = "liger_aot"
OP = "flash_attention"


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
    AttentionInterface.register(NAME, attention_by(load(OP) if OP in names() else _no_op))
    AttentionMaskInterface.register(NAME, attention_mask)


def _no_op(*args: Any, **kwargs: Any) -> Tensor:
    raise UnknownOp(
        f'attn_implementation="{NAME}" needs the op {OP}, which this liger-aot does not have: set "sdpa" or '
        '"flash_attention_2" instead'
    )


def attention_by(op: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, None]]:
    """The interface's function, by ``flash_attention`` or what has its arguments."""

    def forward(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return attention(op, module, *args, **kwargs)

    return forward


def attention(
    op: Callable[..., Tensor],
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
        module: ``is_causal`` is taken from it where it is not given.
        query: (batch, heads, tokens, head dimension).
        key, value: the same with heads that divide query's; they stand at query's end.
        attention_mask: None.
        sliding_window: how many keys a query sees, its own among them.
        softcap, s_aux: the op's ``softcap`` and ``sinks``.
        others: what other implementations need.

    Returns:
        (batch, tokens, heads, head dimension), and None for the weights, which are never there.

    Raises:
        UnknownOp: this build has no flash attention.
        ArgumentError: a mask, dropout or packed sequences are asked for.
    """
    for name, value_of in (("attention_mask", attention_mask), ("cu_seq_lens_q", cu_seq_lens_q)):
        if value_of is not None:
            raise ArgumentError(
                f'attn_implementation="{NAME}": {name} must be None, got {type(value_of).__name__}'
            )
    if dropout:
        raise ArgumentError(f'attn_implementation="{NAME}": dropout must be 0, got {dropout}')
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = None
    if sliding_window is not None:
        window = (sliding_window - 1, None if causal else sliding_window - 1)
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    out = op(
        q, k, v, causal=causal, scale=scaling, window=window, softcap=softcap or 0.0, sinks=s_aux, layout="bshd"
    )  # fmt: skip
    return out, None


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
    **others: Any,
) -> None:
    """The interface's mask: none is needed where keys stand at the queries' end and nothing is padded or packed.

    Raises:
        ArgumentError: a mask would be needed.
    """
    problem = ""
    if isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length:
        problem = f"keys beyond the last query ({kv_length} keys, a static cache)"
    elif use_vmap or not (allow_is_causal_skip and allow_is_bidirectional_skip):
        problem = "packed sequences or a mask of its own"
    elif attention_mask is not None and not torch.all(attention_mask):
        problem = "padding"
    if problem:
        raise ArgumentError(f'attn_implementation="{NAME}" has no masks: {problem} needs "sdpa"')
