"""What the forward and the backward of variable-length (packed) sequences share: checks, tiles, tensor maps, masks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError
from liger_aot.ops.attention._checks import check_attention, check_integers
from liger_aot.ops.attention._operands import (
    VARLEN,
    Settings,
    Shape,
    bounded,
    bounds_of,
    shape_of,
    strides_of,
)

NAME = "flash_attention_varlen"
MAX_TOKENS = 1 << 29  # a row's number, a bound and the lengths' difference add up in 32 bits
LARGEST_BLOCK = 256  # tokens of a tile


def check_varlen(
    op: str,
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens: tuple[Any, Any],
    sinks: Any,
    settings: Settings,
) -> None:
    """Raise for everything that is wrong with the forward's arguments, but for what cu_seqlens hold."""
    check_attention(op, q, k, v, sinks, settings)
    for name, t, of in (("cu_seqlens_q", cu_seqlens[0], q), ("cu_seqlens_k", cu_seqlens[1], k)):
        check_integers(op, name, t, q)
        if t.dim() != 1 or not t.shape[0]:
            raise ArgumentError(
                f"{op}: {name} must be of shape (sequences + 1,): where each starts, then where the last one ends; got "
                f"{tuple(t.shape)}"
            )
        if of.shape[0] + LARGEST_BLOCK * t.shape[0] >= MAX_TOKENS:
            raise ArgumentError(
                f"{op}: {of.shape[0]} tokens in {t.shape[0] - 1} sequences are too many: tokens and {LARGEST_BLOCK} "
                f"times the sequences must be below {MAX_TOKENS}"
            )
    if cu_seqlens[0].shape != cu_seqlens[1].shape:
        raise ArgumentError(
            f"{op}: cu_seqlens_k must be of cu_seqlens_q's shape {tuple(cu_seqlens[0].shape)}, got "
            f"{tuple(cu_seqlens[1].shape)}"
        )


def check_values(
    op: str, cu_seqlens: tuple[Tensor, Tensor], tokens: tuple[int, int], max_seqlens: tuple[int, int]
) -> None:
    """ArgumentError where sequences don't rise from 0 within the tokens, or one is too long; on the CPU alone, where
    looking costs nothing."""
    for which, t, size, max_seqlen in zip("qk", cu_seqlens, tokens, max_seqlens, strict=True):
        if t.device.type == "cpu":
            check_starts(op, which, t, size, max_seqlen)


def check_starts(op: str, which: str, starts_of: Tensor, tokens: int, max_seqlen: int) -> None:
    """``check_values`` of one cu_seqlens, on the CPU."""
    starts = starts_of.tolist()
    lengths = [end - start for start, end in pairwise(starts)]
    if starts[0]:
        raise ArgumentError(f"{op}: cu_seqlens_{which} must start at 0, got {starts[0]}")
    if min(lengths, default=0) < 0:
        i = lengths.index(min(lengths))
        raise ArgumentError(f"{op}: cu_seqlens_{which} must not fall, got {starts[i + 1]} behind {starts[i]}")
    if starts[-1] > tokens:
        raise ArgumentError(
            f"{op}: cu_seqlens_{which} must end at the {tokens} tokens of {which} or before, got {starts[-1]}"
        )
    if max(lengths, default=0) > max_seqlen:
        raise ArgumentError(
            f"{op}: max_seqlen_{which} must be the longest length, {max(lengths)}, or more; got {max_seqlen}"
        )


def tiles_of(tokens: int, block: int, sequences: int) -> int:
    """Tiles of ``block`` tokens a head, whatever the lengths: those that no sequence needs end at once."""
    return tokens // block + sequences + 1


def average_length(tokens: int, sequences: int) -> int:
    """Of a sequence: what schedules go by, as lengths are on the device."""
    return max(-(-tokens // max(sequences, 1)), 1)


def varlen_sizes(q: Tensor, k: Tensor, settings: tuple[Any, ...]) -> tuple[Shape, Settings]:
    shape = shape_of(q, k, VARLEN)
    return shape, bounded(shape, Settings(*settings))


def token_strides(*tensors: Tensor) -> tuple[int, ...]:
    """(head, row) of each, in elements."""
    return tuple(stride for t in tensors for stride in strides_of(t, VARLEN)[1:])


def varlen_bounds(shape: Shape, settings: Settings) -> tuple[int, int]:
    """(right, left) of a sequence with as many queries as keys; the kernels shift them for others."""
    right, left = bounds_of(shape._replace(len_k=shape.len_q), settings)
    return min(right, MAX_TOKENS), max(left, -MAX_TOKENS)


def map_operand(t: Tensor) -> Tensor:
    """What a varlen kernel's map of ``t`` is over: (place, head, row, column), where places and rows are tokens apart.
    It starts ``bytes_before`` before ``t``: row ``tokens - length + r`` at place ``start + length`` is row r of the
    sequence there, and the first one behind the sequence is outside of the map."""
    _, head, row = strides_of(t, VARLEN)
    tokens, heads, dim = t.shape
    return torch.empty_strided(
        (tokens + 1, heads, tokens, dim), (row, head, row, 1), dtype=t.dtype, device="meta"
    )


def bytes_before(t: Tensor) -> int:
    return t.shape[0] * strides_of(t, VARLEN)[2] * t.element_size()


def places(starts: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each token its sequence and its place there, and the lengths of all sequences. Tokens behind the last one are
    of one more sequence, which has no length."""
    starts = starts.long()
    at = torch.arange(tokens, device=starts.device)
    sequence = (starts[1:, None] <= at).sum(0)
    lengths = torch.cat([starts[1:] - starts[:-1], starts.new_zeros(1)])
    return sequence, at - starts[sequence], lengths


def seen_keys(
    starts_q: Tensor, starts_k: Tensor, tokens_q: int, tokens_k: int, left: int, right: int
) -> tuple[Tensor, Tensor]:
    """(queries, keys): whether a query sees a key; and whether a query is in any sequence. No value is looked at on the
    host."""
    of_q, place_q, lengths_q = places(starts_q, tokens_q)
    of_k, place_k, lengths_k = places(starts_k, tokens_k)
    inside = of_q < starts_q.shape[0] - 1
    seen = (of_q[:, None] == of_k) & inside[:, None]
    own = (place_q + (lengths_k - lengths_q)[of_q])[:, None]
    if right >= 0:
        seen = seen & (place_k <= own + right)
    if left >= 0:
        seen = seen & (place_k >= own - left)
    return seen, inside
