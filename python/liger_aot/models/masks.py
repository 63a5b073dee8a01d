"""The mask of ``attn_implementation="liger_aot"``: which tokens belong together, not which sees which."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_aot.errors import ArgumentError

FEW = 16  # tokens that decoding is meant for


class Sequences(NamedTuple):
    """What the varlen op takes: where each sequence starts, in all rows one behind the other."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen: int | None  # of queries and of keys; None: as many as a row has

    def as_mask(self) -> Tensor:
        """(1, max_seqlen, 2, sequences + 1) int32, one memory for all of max_seqlen. Transformers leaves masks of four
        dimensions as they are."""
        both = torch.stack((self.cu_seqlens_q, self.cu_seqlens_k)).to(torch.int32)
        return both.expand(1, self.max_seqlen or 1, *both.shape)

    @classmethod
    def of_mask(cls, mask: Tensor) -> Sequences | None:
        if mask.dim() != 4 or mask.dtype != torch.int32 or mask.shape[0] != 1 or mask.shape[2] != 2:
            return None
        longest = mask.shape[1]
        return cls(mask[0, 0, 0], mask[0, 0, 1], None if longest == 1 else longest)


class Order(NamedTuple):
    """Tokens of each row in an order in which the real ones come first: for masks that the host cannot look at, or
    with gaps."""

    tokens: Tensor  # (batch, tokens) int64: where each comes from
    real: Tensor  # (batch,) int64: how many are real

    @classmethod
    def of(cls, real: Tensor) -> Order:
        """``real``: (batch, tokens) bool."""
        return cls(real.logical_not().to(torch.int8).argsort(dim=1, stable=True), real.sum(1))


class Orders(NamedTuple):
    q: Order
    k: Order

    def as_mask(self) -> Tensor:
        """(batch, 1, 1, 2 + queries + keys) int64."""
        parts = (self.q.real[:, None], self.k.real[:, None], self.q.tokens, self.k.tokens)
        return torch.cat(parts, 1)[:, None, None]

    @classmethod
    def of_mask(cls, mask: Tensor, queries: int, keys: int) -> Orders | None:
        if mask.dim() != 4 or mask.dtype != torch.int64 or mask.shape[1:] != (1, 1, 2 + queries + keys):
            return None
        real_q, real_k, q, k = mask[:, 0, 0].split((1, 1, queries, keys), 1)
        return cls(Order(q, real_q[:, 0]), Order(k, real_k[:, 0]))


def known_keys(mask: Tensor) -> int | None:
    """How many of a static cache's keys are there, where the host knows it: ``mask`` is (keys, 0)."""
    return mask.shape[0] if mask.dim() == 2 and not mask.shape[1] else None


def is_lengths(mask: Tensor) -> bool:
    """How many of a static cache's keys are there, where only the device knows it: (batch,) int32."""
    return mask.dim() == 1 and mask.dtype == torch.int32


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
    config: Any = None,
    local_size: int | None = None,
    **others: Any,
) -> Tensor | None:
    """The attention mask interface's function.

    Returns:
        None where nothing is padded or packed, and all keys are there, at the queries' end. Else one of
        (keys, 0), an empty tensor whose shape says how many keys of a static cache are there, where the host knows it
        (the first prompt) or asks for it (a later prompt: it waits once for the device);
        (batch,) int32 lengths, which only the device knows: nothing waits for it, so that decoding can be captured in
        a CUDA graph;
        ``Sequences`` of packed rows, or of rows that are padded on the left or on the right;
        ``Orders`` of rows with gaps, of rows that are decoded, and of rows that the host must not look at because the
        model is traced or captured.

    Raises:
        ArgumentError: the model asks for a mask of its own.
    """
    from transformers.masking_utils import bidirectional_mask_function

    causal = mask_function is not bidirectional_mask_function
    if use_vmap or not allow_is_bidirectional_skip:
        _refuse("a mask of the model's own")
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and local_size == chunk and kv_offset + kv_length > chunk:
        _refuse(f"attention in chunks of {chunk} tokens to {kv_offset + kv_length} keys")
    if causal and not allow_is_causal_skip and q_length > 1:
        packed: Sequences | None
        packed, causal = _pattern(mask_function, batch_size, q_length, device)
        if packed is not None:
            return packed.as_mask()
    keys = q_offset + q_length - kv_offset if causal else kv_length
    if attention_mask is not None and attention_mask.dim() == 2 and known_keys(attention_mask) is None:
        real = attention_mask[:, kv_offset : kv_offset + kv_length]
        padded = _padded(real, q_length, kv_length, keys, causal, local_size is not None)
        if padded is not None:
            return padded.as_mask()
    if isinstance(keys, Tensor):
        if q_length <= FEW or _is_traced_or_captured(keys):
            lengths: Tensor = keys.to(torch.int32).repeat(batch_size)
            return lengths
        keys = int(keys)
    return None if keys == kv_length else torch.empty((keys, 0), device=device)


def _refuse(what: str) -> None:
    raise ArgumentError(f'attn_implementation="liger_aot" has no masks: {what} needs "sdpa"')


def _is_traced_or_captured(t: Tensor) -> bool:
    return torch.compiler.is_compiling() or (t.is_cuda and torch.cuda.is_current_stream_capturing())


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _pattern(
    mask_function: Any, batch: int, tokens: int, device: torch.device | str | None
) -> tuple[Sequences | None, bool]:
    """The sequences that a mask keeps apart, None where each row is one; and whether it is causal.

    Looks at each token's neighbours, which tells them all: Transformers' own masks without vmap are causal or
    bidirectional, within a window or not, and within packed sequences or not.
    """
    row = torch.arange(batch, device=device)[:, None]
    at = torch.arange(tokens, device=device)
    head = at.new_zeros(())
    shape = (batch, tokens - 1)
    before = mask_function(row, head, at[1:], at[:-1]).expand(shape)
    after = mask_function(row, head, at[:-1], at[1:]).expand(shape)
    apart, sees, all_see = torch.stack((~before.all(), after.any(), after.all())).tolist()
    if sees and (apart or not all_see):
        _refuse("blocks of tokens that see each other")
    if not apart:
        return None, not sees
    return _beginning(F.pad(~before, (1, 0), value=True)), True


def _beginning(starts: Tensor) -> Sequences:
    """``starts``: (batch, tokens) bool, the first token of each row among them."""
    cu_seqlens = F.pad(starts.flatten().nonzero().flatten(), (0, 1), value=starts.numel())
    return Sequences(cu_seqlens, cu_seqlens, int(cu_seqlens.diff().max()))


def mask_of_positions(position_ids: Tensor, tokens: int) -> Tensor | None:
    """The mask of one row in which positions start again. It is made once for all layers, which are given one
    tensor."""
    if position_ids.shape != (1, tokens) or _is_traced_or_captured(position_ids):
        return None
    try:
        known: Tensor | None = position_ids._liger_aot_mask  # type: ignore[attr-defined]
        return known
    except AttributeError:
        pass
    starts = F.pad(position_ids.diff(dim=1) != 1, (1, 0), value=True)
    packed = bool(starts[:, 1:].any())
    mask = _beginning(starts).as_mask() if packed else None
    position_ids._liger_aot_mask = mask  # type: ignore[attr-defined]
    return mask


def _padded(
    real: Tensor, queries: int, size: int, keys: int | Tensor, causal: bool, windowed: bool
) -> Sequences | Orders | None:
    """``real``: (batch, keys or fewer) bool, the mask of a cache of ``size`` keys, of which ``keys`` are there."""
    batch = real.shape[0]
    if real.shape[1] < size:
        real = F.pad(real, (0, size - real.shape[1]))
    if isinstance(keys, Tensor):
        real = real & (torch.arange(size, device=real.device) < keys)
    of_q = real.new_ones((batch, queries))
    if causal:  # the queries are the last of the keys
        of_q = (
            real.gather(1, _last(keys, queries, batch))
            if isinstance(keys, Tensor)
            else real[:, keys - queries : keys]
        )
    if _is_traced_or_captured(real):
        return Orders(Order.of(of_q), Order.of(real))
    began = real & ~F.pad(real, (1, 0))[:, :-1]
    padded, gaps = torch.stack((real.sum() != batch * keys, (began.sum(1) > 1).any())).tolist()
    if not padded:
        return None
    if gaps and windowed:
        _refuse("a sliding window over tokens with padding between them")
    if gaps or queries == 1:
        return Orders(Order.of(of_q), Order.of(real))
    first = real.to(torch.int8).argmax(1)
    starts_k = torch.stack((torch.zeros_like(first), first, first + real.sum(1)), 1)
    starts_q = torch.zeros_like(starts_k)
    if causal:
        starts_q = (starts_k - (keys - queries)).clamp(0, queries)
    else:
        starts_q[:, 2] = queries
    return Sequences(_flat(starts_q, queries), _flat(starts_k, size), None)


def _last(keys: Tensor, queries: int, batch: int) -> Tensor:
    """Where the queries are among the keys."""
    return (keys - queries + torch.arange(queries, device=keys.device)).expand(batch, queries)


def _flat(starts: Tensor, size: int) -> Tensor:
    """From where parts start in each row (batch, parts) to where they do in all rows, and the end of the last."""
    batch = starts.shape[0]
    rows = torch.arange(batch, device=starts.device)[:, None] * size
    return F.pad((starts + rows).flatten(), (0, 1), value=batch * size)


def sequences_of(orders: Orders) -> Sequences:
    """Two of each row: the real tokens, then the others."""

    def starts(order: Order) -> Tensor:
        return _flat(torch.stack((torch.zeros_like(order.real), order.real), 1), order.tokens.shape[1])

    return Sequences(starts(orders.q).to(torch.int32), starts(orders.k).to(torch.int32), None)
