"""How attention of packed sequences is launched by warp groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_aot.ops.attention._forward import (
    COUNTERS,
    GROUP_ROWS,
    PACKED,
    Maps,
    checked_tiles,
    scales_of,
    strides_of,
)
from liger_aot.ops.attention._varlen import (
    OP,
    PackedPlan,
    groups_kernel,
    packed_sizes,
    packed_window,
    tiles_of,
)
from liger_aot.runtime import device_errors
from liger_aot.runtime.dispatch import Loaded, OpOn
from liger_aot.runtime.workspaces import StreamWords


class PackedGroupsPlan:
    """A forward by warp groups, for all calls with tensors like these."""

    def __init__(
        self,
        loaded: Loaded,
        on: OpOn,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sequences: int,
        settings: tuple[Any, ...],
    ) -> None:
        shape, bound = packed_sizes(q, k, settings)
        numbers = loaded.numbers
        tiles = checked_tiles(shape, tiles_of(shape.len_q, GROUP_ROWS * numbers["warp_groups"], sequences))
        scale, _ = scales_of(bound)
        right, _ = packed_window(shape, bound)
        self._on, self._loaded = on, loaded
        self._others = sequences, settings
        self._tiles: PackedPlan | None = None
        self._programs = min(tiles, on.multiprocessors * loaded.variant.resident)
        self._flag = device_errors.flag(OP)
        self._tokens = shape.len_q, shape.len_k
        self._numbers = (
            scale,
            tiles,
            shape.heads,
            shape.heads // shape.kv_heads,
            keys_together(shape.dim, numbers["cache_megabytes"], q.element_size()),
            sequences,
            *self._tokens,
            right,
        )
        assert on.tensor_map is not None
        o = torch.empty(q.shape, dtype=q.dtype, device="meta")
        named = (("Q", q), ("K", k), ("V", v), ("Y", o))
        self._maps = tuple(Maps(on.tensor_map, loaded, name, placed(t), "bhsd").at for name, t in named)
        self._before = tuple(bytes_before(t) for _, t in named)
        self._lse_shape = (shape.heads, shape.len_q)
        self._counters = on.plans.setdefault("counters", StreamWords(q.device))

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
        starts = [t.data_ptr() - before for t, before in zip((q, k, v, o), self._before, strict=True)]
        if min(starts) < 0:  # a tensor that is larger than its own address: no map can start before it
            self._tiles = self._tiles or PackedPlan(on, q, k, v, *self._others)
            return self._tiles(q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, max_seqlen_q, max_seqlen_k)
        lse = q.new_empty(self._lse_shape, dtype=torch.float32)
        stream = on.stream(on.device)
        self._loaded.launch(
            on.device,
            stream,
            self._programs,
            1,
            1,
            *(at(start) for at, start in zip(self._maps, starts, strict=True)),
            lse.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            cu_seqlens_q.data_ptr(),
            cu_seqlens_k.data_ptr(),
            self._flag,
            self._counters.on(stream, COUNTERS).data_ptr(),
            *self._numbers,
            # a length past the tokens is reported all the same
            min(max_seqlen_q, self._tokens[0]),
            min(max_seqlen_k, self._tokens[1]),
        )
        return o, lse


class ShortOrLongPlan:
    """Calls whose sequences may be short, by the most keys that one may have."""

    def __init__(self, short: Loaded, long: Loaded, *others: Any) -> None:
        self._longest = short.numbers["longest"]
        self._short = PackedGroupsPlan(short, *others)
        self._long = PackedGroupsPlan(long, *others)

    def __call__(self, *call: Any) -> tuple[Tensor, Tensor]:
        plan = self._short if call[-1] <= self._longest else self._long
        return plan(*call)


def groups_plan(
    on: OpOn, q: Tensor, k: Tensor, v: Tensor, sequences: int, settings: tuple[Any, ...]
) -> PackedGroupsPlan | ShortOrLongPlan:
    """By the kernel for calls without a right bound, or by that for few keys and that for many."""
    dim = q.shape[-1]
    others = on, q, k, v, sequences, settings

    def found(kind: str) -> Loaded | None:
        kernel = on.kernels.get(groups_kernel(dim, kind))
        return None if kernel is None else kernel((q.dtype, True), dim)

    _, bound = packed_sizes(q, k, settings)
    if bound.right < 0 and (full := found("full")) is not None:
        return PackedGroupsPlan(full, *others)
    long = on.kernels[groups_kernel(dim)]((q.dtype, True), dim)
    if bound.right >= 0 and (short := found("short")) is not None:
        return ShortOrLongPlan(short, long, *others)
    return PackedGroupsPlan(long, *others)


def keys_together(dim: int, megabytes: int, element_bytes: int) -> int:
    """Of a head, with their values, in so much memory."""
    return (megabytes << 20) // (2 * dim * element_bytes)


def placed(t: Tensor) -> Tensor:
    """What a map of packed ``t`` is over: (place, head, row, column), where places and rows are tokens apart. It starts
    ``bytes_before`` before ``t``: row ``tokens - length + r`` at place ``start + length`` is row r of the sequence
    there, and the first one behind the sequence is outside of the map."""
    _, head, row = strides_of(t, PACKED)
    tokens, heads, dim = t.shape
    return torch.empty_strided(
        (tokens + 1, heads, tokens, dim), (row, head, row, 1), dtype=t.dtype, device="meta"
    )


def bytes_before(t: Tensor) -> int:
    return t.shape[0] * strides_of(t, PACKED)[2] * t.element_size()
