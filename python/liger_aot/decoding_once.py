"""How decoding is launched where one kernel shares a sequence's keys and combines the shares: `csrc_triton.decoding_once`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_aot import pending
from liger_aot.attention import GROUP_ROWS, LOG2_E, LONGEST, Maps
from liger_aot.runtime import Loaded, OpOn
from liger_aot.stream_words import HEAD, StreamWords

LARGEST_STRIDE = 1 << 38  # elements: what a tensor map can say
MOST_SEQUENCES = (1 << 16) - 1  # of a grid's last dimension
DIVIDED = 1 << 32  # what the shares' multiplication for a division is right below


class OncePlan:
    """All calls with tensors like these."""

    def __init__(
        self, on: OpOn, loaded: Loaded, q: Tensor, k: Tensor, block_table: Tensor | None, settings: Any, shape: Any,
        strides: list[int], each: int,
    ) -> None:  # fmt: skip
        ratio = shape.heads // shape.kv_heads
        rows = shape.tokens * ratio
        tiles = -(-rows // GROUP_ROWS)
        width = shape.kv_heads * tiles
        part_rows = min(GROUP_ROWS, rows) if each > 1 else 0
        cap = settings.softcap
        self._on, self._loaded = on, loaded
        self._grid = width, each, shape.batch
        self._flag = pending.flag("flash_decoding")
        encode: Any = on.tensor_map
        self._k_map, self._v_map = (Maps(encode, loaded, name, k, "bshd").at for name in "KV")
        self._numbers = (
            *strides[:3],
            0 if block_table is None else block_table.stride(0),
            (cap or settings.scale) * LOG2_E,
            settings.scale / cap if cap else 0.0,
            shape.kv_heads,
            ratio,
            signed((1 << 31) // ratio + 1),
            shape.tokens,
            shape.dim,
            shape.capacity,
            shape.pages,
            shape.page_size.bit_length() - 1,
            tiles,
            each,
            signed((1 << 32) // each + 1) if each > 1 else 0,
            part_rows,
            LONGEST if settings.left < 0 else min(settings.left, LONGEST),
            LONGEST if settings.right < 0 else min(settings.right + 1, LONGEST),
        )
        self._shape, self._lse_shape = q.shape, (shape.batch, shape.heads, shape.tokens)
        lines = width * each * shape.batch * part_rows
        columns = loaded.numbers["d1"] * (2 if loaded.numbers["d2"] else 1)
        self._parts, self._part_sums = lines * (columns + 1), 4 * lines * columns
        self._words = width * shape.batch
        self._counts = on.plans.setdefault("counts", StreamWords(q.device))

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache_seqlens: Tensor | None,
        block_table: Tensor | None,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        on = self._on
        o, lse = q.new_empty(self._shape), q.new_empty(self._lse_shape, dtype=torch.float32)
        device, stream = on.device, on.stream(on.device)
        parts_at = sums_at = counts_at = 0
        if self._parts:
            parts = q.new_empty(self._parts, dtype=torch.float32)
            counts = self._counts.on(stream, self._words)
            parts_at = parts.data_ptr()
            sums_at, counts_at = parts_at + self._part_sums, counts.data_ptr()
        self._loaded.launch(
            device, stream, *self._grid, self._k_map(k.data_ptr()), self._v_map(v.data_ptr()),
            o.data_ptr(), lse.data_ptr(), parts_at, sums_at, self._flag, counts_at, q.data_ptr(),
            0 if block_table is None else block_table.data_ptr(),
            0 if cache_seqlens is None else cache_seqlens.data_ptr(),
            0 if sinks is None else sinks.data_ptr(), *self._numbers,
        )  # fmt: skip
        return o, lse


def signed(x: int) -> int:
    """An unsigned 32-bit number as the launcher takes it."""
    return x - (x >> 31 << 32)
