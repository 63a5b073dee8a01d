"""How attention's backward by warp groups is launched: dK, dV and a float32 dQ together, then dQ rounded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from liger_aot.ops.attention._backward import KERNEL, padded_rows
from liger_aot.ops.attention._operands import (
    Settings,
    TensorMapCache,
    bounds_of,
    checked_tiles,
    scales_of,
    shape_of,
    strides_of,
    swizzle_heads,
)
from liger_aot.runtime.dispatch import Loaded, OpOn

TILE_ROWS = 64  # of float32 dQ, in the order of accumulators
QUERY_HEADS_TAKE_TURNS = 2  # of a head of K, from more than so many on: ``attention_backward_order``


class GroupsProducts:
    """dQ, dK and dV by one kernel, which adds dQ up in memory; unless it does so in order, its last bits vary. Beside
    the results it takes as many float32 as dQ has elements; in order, an int32 a block of rows, too."""

    def __init__(
        self, kernel: str, on: OpOn, q: Tensor, k: Tensor, v: Tensor, do: Tensor, settings: Settings, row_block: int
    ) -> None:  # fmt: skip
        layout = settings.layout
        shape = shape_of(q, k, layout)
        self._on = on
        self._loaded = loaded = on.kernels[kernel]((q.dtype, True), shape.dim)
        self._finish = on.kernels[f"{KERNEL}_finish"]((q.dtype, True), shape.dim)
        columns = loaded.numbers["d1"] + loaded.numbers["d2"]
        block_m = loaded.numbers["block_m"]
        self.padded = padded = padded_rows(shape, (row_block, block_m, TILE_ROWS))
        rows = shape.batch * shape.heads * padded
        self._sums = rows * columns
        self._turns = rows // block_m if kernel.endswith("_ordered") else 0
        tiles = -(-shape.len_k // loaded.numbers["block_n"])
        self._programs = checked_tiles(shape._replace(heads=shape.kv_heads), tiles)
        scale, cap = scales_of(settings)
        right, left = bounds_of(shape, settings)
        ratio = shape.heads // shape.kv_heads
        section = swizzle_heads(on, loaded, tiles, settings)
        if self._turns:
            section = heads_in_order(on, loaded, tiles, ratio, kernel.endswith("_causal_ordered"))
        bounded = settings.left >= 0 or settings.right >= 0 or bool(cap)
        self._section = (section,) if bounded or self._turns else ()
        self._numbers = (
            scale,
            tiles,
            shape.kv_heads,
            ratio,
            padded,
            shape.len_q,
            shape.len_k,
            right,
            *((left,) if settings.left >= 0 or cap else ()),
            *((cap,) if cap else ()),
        )
        dk = torch.empty(k.shape, dtype=k.dtype, device="meta")
        sums = torch.empty((shape.batch, shape.heads, 1, padded), dtype=torch.float32, device="meta")
        named = (("Q", q), ("K", k), ("V", v), ("DY", do), ("DK", dk), ("DV", dk))
        assert on.tensor_map is not None
        self._maps = (
            *(TensorMapCache(on.tensor_map, loaded, name, t, layout).at for name, t in named),
            *(TensorMapCache(on.tensor_map, loaded, name, sums, "bhsd").at for name in ("LSE2", "DELTA")),
        )
        pieces = columns // self._finish.numbers["width"]
        tiles_a_head = padded // TILE_ROWS
        self._finish_programs = checked_tiles(shape, tiles_a_head * pieces)
        dq = strides_of(torch.empty(q.shape, dtype=q.dtype, device="meta"), layout)
        self._finish_numbers = (
            *dq, settings.scale, tiles_a_head, shape.heads, pieces, shape.dim, shape.len_q,
        )  # fmt: skip

    def __call__(
        self, stream: int, q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse2_at: int, delta_at: int,
        needed: Sequence[bool], *starts_at: int,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        device = self._on.device
        dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        zeros = q.new_zeros(self._sums + self._turns, dtype=torch.float32)  # an int32 0 has the same bits
        sums_at = zeros.data_ptr()
        turns = (sums_at + 4 * self._sums,) if self._turns else ()
        tensors = (*(t.data_ptr() for t in (q, k, v, do, dk, dv)), lse2_at, delta_at)
        maps = (at(address) for at, address in zip(self._maps, tensors, strict=True))
        self._loaded.launch(
            device, stream, self._programs, 1, 1, *maps, sums_at, *self._numbers, *turns, *self._section
        )  # fmt: skip
        self._finish.launch(
            device, stream, self._finish_programs, 1, 1, dq.data_ptr(), sums_at, *self._finish_numbers
        )  # fmt: skip
        return dq, dk, dv


def heads_in_order(on: OpOn, loaded: Loaded, tiles: int, ratio: int, causal: bool) -> int:
    """How many heads of K at a time take turns to start a block where dQ is added in order: as many as fill the GPU, or
    some times as many. The more there are the less the blocks of one wait for each other, and the less of their rows
    stays in L2. Where query heads take turns, too, all blocks of a head are at nearly the same rows."""
    filling = -(-on.multiprocessors // tiles)
    if ratio > QUERY_HEADS_TAKE_TURNS:
        return filling * (4 if causal else 1)
    return filling * loaded.numbers.get("fillings", 1)
