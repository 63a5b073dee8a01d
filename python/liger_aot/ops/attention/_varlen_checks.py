"""What attention of packed sequences asks of where they start and how long they are."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor

from liger_aot.errors import ArgumentError
from liger_aot.ops.attention._checks import check_attention, check_integers
from liger_aot.ops.attention._forward import Settings
from liger_aot.ops.attention._varlen import MOST_TOKENS

LARGEST_BLOCK = 256  # tokens of a tile


def check_packed(
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
        if of.shape[0] + LARGEST_BLOCK * t.shape[0] >= MOST_TOKENS:
            raise ArgumentError(
                f"{op}: {of.shape[0]} tokens in {t.shape[0] - 1} sequences are too many: tokens and {LARGEST_BLOCK} "
                f"times the sequences must be below {MOST_TOKENS}"
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
    for which, t, size, longest in zip("qk", cu_seqlens, tokens, max_seqlens, strict=True):
        if t.device.type != "cpu":
            continue
        starts = t.tolist()
        lengths = [end - start for start, end in pairwise(starts)]
        if starts[0]:
            raise ArgumentError(f"{op}: cu_seqlens_{which} must start at 0, got {starts[0]}")
        if min(lengths, default=0) < 0:
            i = lengths.index(min(lengths))
            raise ArgumentError(
                f"{op}: cu_seqlens_{which} must not fall, got {starts[i + 1]} behind {starts[i]}"
            )
        if starts[-1] > size:
            raise ArgumentError(
                f"{op}: cu_seqlens_{which} must end at the {size} tokens of {which} or before, got {starts[-1]}"
            )
        if max(lengths, default=0) > longest:
            raise ArgumentError(
                f"{op}: max_seqlen_{which} must be the longest length, {max(lengths)}, or more; got {longest}"
            )
