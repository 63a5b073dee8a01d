"""How attention of packed sequences is launched, and which of their queries see which keys."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from liger_aot.ops.attention._backward import (
    BackwardPlan,
    TilesProducts,
    for_groups,
    groups_width,
    padded_rows,
)
from liger_aot.ops.attention._forward import (
    PACKED,
    Settings,
    Shape,
    bounded,
    bounds_of,
    checked_tiles,
    scales_of,
    shape_of,
    strides_of,
)
from liger_aot.runtime import device_errors
from liger_aot.runtime.dispatch import Loaded, OpOn

OP = "flash_attention_varlen"
MOST_TOKENS = 1 << 29  # a row's number, a bound and the lengths' difference add up in 32 bits


def tiles_of(tokens: int, block: int, sequences: int) -> int:
    """Tiles of ``block`` tokens a head, whatever the lengths: those that no sequence needs end at once."""
    return tokens // block + sequences + 1


def average_length(tokens: int, sequences: int) -> int:
    """Of a sequence: what schedules go by, as lengths are on the device."""
    return max(-(-tokens // max(sequences, 1)), 1)


class PackedPlan:
    """A forward, for all calls with tensors like these."""

    def __init__(
        self, on: OpOn, q: Tensor, k: Tensor, v: Tensor, sequences: int, settings: tuple[Any, ...]
    ) -> None:
        shape, bound = packed_sizes(q, k, settings)
        loaded = on.kernels[f"{OP}_forward"]((q.dtype, True), shape.dim)
        tiles = tiles_of(shape.len_q, loaded.numbers["block_m"], sequences)
        self._on, self._loaded = on, loaded
        self._programs = checked_tiles(shape, tiles)
        self._flag = device_errors.flag(OP)
        self._tokens = shape.len_q, shape.len_k
        o = torch.empty(q.shape, dtype=q.dtype, device="meta")
        self._numbers = (
            *_strides(o, q, k, v),
            *scales_of(bound),
            tiles,
            shape.heads // shape.kv_heads,
            shape.dim,
            sequences,
            *self._tokens,
            *packed_window(shape, bound),
        )
        self._lse_shape = (shape.heads, shape.len_q)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        sinks: Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
    ) -> tuple[Tensor, Tensor]:
        on = self._on
        o = q.new_empty(q.shape)
        lse = q.new_empty(self._lse_shape, dtype=torch.float32)
        self._loaded.launch(
            on.device,
            on.stream(on.device),
            self._programs,
            1,
            1,
            o.data_ptr(),
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            lse.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            cu_seqlens_q.data_ptr(),
            cu_seqlens_k.data_ptr(),
            self._flag,
            *self._numbers,
            # a length past the tokens is reported all the same
            min(max_seqlen_q, self._tokens[0]),
            min(max_seqlen_k, self._tokens[1]),
        )
        return o, lse


class PackedProducts(TilesProducts):
    """dQ, dK and dV of packed sequences. ``own`` has their kernels; all tokens are one sequence to those of rows and
    sinks, which are the dense backward's."""

    def __init__(
        self, own: OpOn, sequences: int, on: OpOn, q: Tensor, k: Tensor, v: Tensor, do: Tensor, settings: Settings,
        row_block: int,
    ) -> None:  # fmt: skip
        shape = shape_of(q, k, PACKED)
        capped = "_capped" if settings.softcap else ""
        key = (q.dtype, True)
        self._on = on
        self._keys = own.kernels[f"{OP}_backward_keys{capped}"](key, shape.dim)
        self._queries = own.kernels[f"{OP}_backward_queries{capped}"](key, shape.dim)
        self.padded = padded_rows(shape, (row_block,))
        inputs = (*_strides(q, k, v, do), *scales_of(settings), settings.scale)
        ratio = shape.heads // shape.kv_heads
        sizes = (
            ratio,
            shape.dim,
            self.padded,
            sequences,
            shape.len_q,
            shape.len_k,
            *packed_window(shape, settings),
        )

        def numbers(like: Tensor, loaded: Loaded, block: str) -> tuple[int, tuple[Any, ...]]:
            """Programs and numbers of a kernel with tiles of ``block`` tokens of ``like``."""
            tiles = tiles_of(like.shape[0], loaded.numbers[block], sequences)
            made = torch.empty(like.shape, dtype=like.dtype, device="meta")
            of_heads = shape._replace(heads=like.shape[1])
            return checked_tiles(of_heads, tiles), (*_strides(made), *inputs, tiles, *sizes)

        self._key_programs, self._key_numbers = numbers(k, self._keys, "block_n")
        self._query_programs, self._query_numbers = numbers(q, self._queries, "block_m")


def groups_kernel(dim: int, kind: str = "") -> str:
    """The kernel by warp groups for a head dimension; a pack need not have it. Without that of a kind, which is for
    calls without a right bound ("full") or over few keys ("short"), the one for all computes these, too."""
    return f"{OP}_forward_groups_{groups_width(dim)}{kind and '_'}{kind}"


def plan_for(on: OpOn, q: Tensor, k: Tensor, v: Tensor, sequences: int, settings: tuple[Any, ...]) -> Any:
    """The plan of calls with tensors like these: by warp groups where the pack has them and the driver tensor maps, but
    with a left bound or a soft cap."""
    _, bound = packed_sizes(q, k, settings)
    by_groups = on.tensor_map is not None and groups_kernel(q.shape[-1]) in on.kernels
    if by_groups and bound.left < 0 and not bound.softcap:
        from liger_aot.ops.attention._varlen_groups import groups_plan  # the op's load need not wait for it

        return groups_plan(on, q, k, v, sequences, settings)
    return PackedPlan(on, q, k, v, sequences, settings)


def backward_groups_kernel(
    own: OpOn, dim: int, settings: Settings, needed: Sequence[bool], deterministic: bool
) -> str | None:
    """The backward's kernel by warp groups for a call with ``bounded`` settings, or None: the pack has none, the driver
    encodes no tensor maps, or the call is for the tiles. Those are deterministic, too."""
    name = f"{OP}_backward_groups_{groups_width(dim)}"
    taken = for_groups(own, needed) and not (deterministic or settings.left >= 0 or settings.softcap)
    return name if taken and name in own.kernels else None


def backward_kernels(dim: int) -> tuple[str, ...]:
    """What a call without a soft cap and without sinks may run; a pack need not have all."""
    kinds = ("keys", "queries", "rows", f"groups_{groups_width(dim)}", "finish")
    return "flash_attention_backward_rows", *(f"{OP}_backward_{kind}" for kind in kinds)


def backward_plan(
    own: OpOn, sequences: int, on: OpOn, q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, settings: Settings,
    needed: Sequence[bool], deterministic: bool,
) -> Any:  # fmt: skip
    """As ``attention_backward.plan_for``; ``own`` has the kernels of packed sequences, ``on`` the dense backward's."""
    kernel = backward_groups_kernel(own, q.shape[-1], settings, needed, deterministic)
    if kernel is None:
        return BackwardPlan(on, q, k, v, o, do, settings, partial(PackedProducts, own, sequences))
    from liger_aot.ops.attention._varlen_backward_groups import PackedGroupsBackward

    return PackedGroupsBackward(kernel, own, sequences, on, q, k, v, o, do, settings)


def packed_sizes(q: Tensor, k: Tensor, settings: tuple[Any, ...]) -> tuple[Shape, Settings]:
    shape = shape_of(q, k, PACKED)
    return shape, bounded(shape, Settings(*settings))


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """(head, row) of each, in elements."""
    return tuple(stride for t in tensors for stride in strides_of(t, PACKED)[1:])


def packed_window(shape: Shape, settings: Settings) -> tuple[int, int]:
    """(right, left) of a sequence with as many queries as keys; the kernels shift them for others."""
    right, left = bounds_of(shape._replace(len_k=shape.len_q), settings)
    return min(right, MOST_TOKENS), max(left, -MOST_TOKENS)


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
