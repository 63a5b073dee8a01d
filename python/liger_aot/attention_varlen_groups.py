"""How attention of packed sequences is launched by warp groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_aot import pending
from liger_aot.attention import (
    COUNTERS,
    GROUP_ROWS,
    PACKED,
    Maps,
    Shape,
    checked_tiles,
    scales_of,
    section_of,
    strides_of,
)
from liger_aot.attention_varlen import (
    OP,
    PackedPlan,
    average_length,
    groups_kernel,
    packed_sizes,
    packed_window,
    tiles_of,
)
from liger_aot.runtime import OpOn
from liger_aot.stream_words import StreamWords


class PackedGroupsPlan:
    """A forward by warp groups, for all calls with tensors like these."""

    def __init__(
        self, on: OpOn, q: Tensor, k: Tensor, v: Tensor, sequences: int, settings: tuple[Any, ...]
    ) -> None:
        shape, bound = packed_sizes(q, k, settings)
        loaded = on.kernels[groups_kernel(shape.dim)]((q.dtype, True), shape.dim)
        numbers = loaded.numbers
        tiles_a_head = tiles_of(shape.len_q, GROUP_ROWS * numbers["warp_groups"], sequences)
        tiles = checked_tiles(shape, tiles_a_head)
        section = heads_together(shape, sequences, numbers["cache_megabytes"], q.element_size())
        scale, _ = scales_of(bound)
        right, _ = packed_window(shape, bound)
        self._on, self._loaded = on, loaded
        self._others = sequences, settings
        self._tiles: PackedPlan | None = None
        self._programs = min(tiles, on.multiprocessors * loaded.variant.resident)
        self._flag = pending.flag(OP)
        self._tokens = shape.len_q, shape.len_k
        self._numbers = (
            scale,
            tiles,
            tiles_a_head,
            shape.heads,
            shape.heads // shape.kv_heads,
            section * tiles_a_head,
            section,
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


def heads_together(shape: Shape, sequences: int, megabytes: int, element_bytes: int) -> int:
    """Heads of q that start their longest tiles together: as many as ``section_of`` gives for a sequence of average
    length, in sections of nearly the same size. A small last one would leave much of the GPU idle at the end."""
    average = shape._replace(len_k=average_length(shape.len_k, sequences))
    ratio = shape.heads // shape.kv_heads
    sections = shape.heads // section_of(average, megabytes, element_bytes)
    return -(-shape.kv_heads // sections) * ratio


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
