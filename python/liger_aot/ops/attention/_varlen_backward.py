"""How the backward of packed sequences is launched by warp groups."""

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
    padded_rows,
    sinks_gradient,
)
from liger_aot.ops.attention._backward_groups import TILE_ROWS
from liger_aot.ops.attention._operands import (
    VARLEN,
    Settings,
    TensorMapCache,
    checked_tiles,
    padded_head_dim,
    scales_of,
    shape_of,
    strides_of,
)
from liger_aot.ops.attention._varlen import (
    NAME,
    average_length,
    bytes_before,
    map_operand,
    tiles_of,
    token_strides,
    varlen_bounds,
)
from liger_aot.runtime.dispatch import Loaded, OpOn

UNIT = 128  # rows of float32 sums: a sequence's start at a multiple, as the kernels find them


class PackedProducts(TilesProducts):
    """dQ, dK and dV of packed sequences. ``own`` has their kernels; all tokens are one sequence to those of rows and
    sinks, which are the dense backward's."""

    def __init__(
        self, own: OpOn, sequences: int, on: OpOn, q: Tensor, k: Tensor, v: Tensor, do: Tensor, settings: Settings,
        row_block: int,
    ) -> None:  # fmt: skip
        shape = shape_of(q, k, VARLEN)
        capped = "_capped" if settings.softcap else ""
        key = (q.dtype, True)
        self._on = on
        self._keys = own.kernels[f"{NAME}_backward_keys{capped}"](key, shape.dim)
        self._queries = own.kernels[f"{NAME}_backward_queries{capped}"](key, shape.dim)
        self.padded = padded_rows(shape, (row_block,))
        inputs = (*token_strides(q, k, v, do), *scales_of(settings), settings.scale)
        ratio = shape.heads // shape.kv_heads
        sizes = (
            ratio,
            shape.dim,
            self.padded,
            sequences,
            shape.len_q,
            shape.len_k,
            *varlen_bounds(shape, settings),
        )

        def numbers(like: Tensor, loaded: Loaded, block: str) -> tuple[int, tuple[Any, ...]]:
            """Programs and numbers of a kernel with tiles of ``block`` tokens of ``like``."""
            tiles = tiles_of(like.shape[0], loaded.numbers[block], sequences)
            made = torch.empty(like.shape, dtype=like.dtype, device="meta")
            of_heads = shape._replace(heads=like.shape[1])
            return checked_tiles(of_heads, tiles), (*token_strides(made), *inputs, tiles, *sizes)

        self._key_programs, self._key_numbers = numbers(k, self._keys, "block_n")
        self._query_programs, self._query_numbers = numbers(q, self._queries, "block_m")


class PackedGroupsBackward:
    """A backward by warp groups, for all calls with tensors like these: dK and dV and a float32 dQ by one kernel.

    Sums of rows and dQ have as many rows as all sequences take in whole blocks of UNIT, whatever their lengths are.

    ``own`` and ``on`` are those of packed sequences' backward and of the dense one's.
    """

    def __init__(
        self, kernel: str, own: OpOn, sequences: int, on: OpOn, q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor,
        settings: Settings,
    ) -> None:  # fmt: skip
        self._shape = shape = shape_of(q, k, VARLEN)
        self._own, self._on = own, on
        self._others = settings, partial(PackedProducts, own, sequences)
        self._tiles: BackwardPlan | None = None
        self._rows, self._loaded, self._finish = (
            own.kernels[name]((q.dtype, True), shape.dim)
            for name in (f"{NAME}_backward_rows", kernel, f"{NAME}_backward_finish")
        )
        self._padded = padded = tiles_of(shape.len_q, UNIT, sequences) * UNIT
        right, _ = varlen_bounds(shape, settings)
        ratio = shape.heads // shape.kv_heads
        dk = torch.empty(k.shape, dtype=k.dtype, device="meta")
        dq = torch.empty(q.shape, dtype=q.dtype, device="meta")
        y, dy, to = (strides_of(t, VARLEN)[1:] for t in (o, do, dq))

        a_head = padded // self._rows.numbers["block_m"]
        self._row_programs = checked_tiles(shape, a_head)
        self._row_numbers = (*y, *dy, a_head, shape.dim, padded, sequences, shape.len_q)

        a_head = tiles_of(shape.len_k, self._loaded.numbers["block_n"], sequences)
        self._programs = checked_tiles(shape._replace(heads=shape.kv_heads), a_head)
        tiles = -(-average_length(shape.len_k, sequences) // self._loaded.numbers["block_n"])
        section = turns_of(shape.kv_heads, tiles, own.multiprocessors)
        self._numbers = (
            scales_of(settings)[0], a_head, ratio, padded, section, sequences, shape.len_q, shape.len_k, right,
        )  # fmt: skip

        columns = self._loaded.numbers["d1"] + self._loaded.numbers["d2"]
        self._dq_shape = (shape.heads, padded, columns)
        pieces = columns // self._finish.numbers["width"]
        a_head = padded // TILE_ROWS
        self._finish_programs = checked_tiles(shape, a_head * pieces)
        self._finish_numbers = (*to, settings.scale, a_head, pieces, shape.dim, sequences, shape.len_q)

        encode = own.tensor_map
        assert encode is not None
        named = (("Q", q), ("K", k), ("V", v), ("DY", do), ("DK", dk), ("DV", dk))
        self._maps = [
            TensorMapCache(encode, self._loaded, name, map_operand(t), "bhsd").at for name, t in named
        ]
        self._before = [bytes_before(t) for _, t in named]
        sums = torch.empty((1, shape.heads, 1, padded), dtype=torch.float32, device="meta")
        self._sum_maps = [
            TensorMapCache(encode, self._loaded, name, sums, "bhsd").at for name in ("LSE2", "DELTA")
        ]

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        o: Tensor,
        lse: Tensor,
        do: Tensor,
        dlse: Tensor | None,
        needed: Sequence[bool],
        *starts: Tensor,
    ) -> tuple[Tensor | None, ...]:
        dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        firsts = [
            t.data_ptr() - before for t, before in zip((q, k, v, do, dk, dv), self._before, strict=True)
        ]
        if min(firsts) < 0:  # a tensor that is larger than its own address: no map can start before it
            self._tiles = self._tiles or BackwardPlan(self._on, q, k, v, o, do, *self._others)
            return self._tiles(q, k, v, sinks, o, lse, do, dlse, needed, *starts)
        device, stream = self._own.device, self._own.stream(self._own.device)
        sums = q.new_empty((2, self._shape.heads, self._padded), dtype=torch.float32)
        lse2_at, delta_at = sums.data_ptr(), sums.data_ptr() + sums.nbytes // 2
        dlse_at = None if dlse is None else dlse.data_ptr()
        of_q, of_k = (t.data_ptr() for t in starts)
        self._rows.launch(
            device, stream, self._row_programs, 1, 1, lse2_at, delta_at, o.data_ptr(), do.data_ptr(), lse.data_ptr(),
            dlse_at, of_q, *self._row_numbers,
        )  # fmt: skip
        dq32 = q.new_zeros(self._dq_shape, dtype=torch.float32)
        maps = [at(first) for at, first in zip(self._maps, firsts, strict=True)]
        maps += [at(address) for at, address in zip(self._sum_maps, (lse2_at, delta_at), strict=True)]
        self._loaded.launch(
            device, stream, self._programs, 1, 1, *maps, dq32.data_ptr(), of_q, of_k, *self._numbers
        )  # fmt: skip
        self._finish.launch(
            device, stream, self._finish_programs, 1, 1, dq.data_ptr(), dq32.data_ptr(), of_q, *self._finish_numbers
        )  # fmt: skip
        if sinks is None or not needed[3]:
            return dq, dk, dv, None
        return (
            dq,
            dk,
            dv,
            sinks_gradient(self._on, stream, sinks, self._shape, lse2_at, delta_at, self._padded),
        )


def turns_of(kv_heads: int, tiles: int, multiprocessors: int) -> int:
    """Heads of K that take turns to start a tile, of which a sequence has so many: a divisor of all, as the kernel at
    96 would spill with more to work out. Twice as many as fit onto the GPU together are up to 3% faster than as many,
    since sequences differ, too. Of more, what they add to leaves the cache: on one NVIDIA H200 32 heads of 256 at once
    took 1.8 times as long as 2.
    """
    most = min(-(-2 * multiprocessors // tiles), kv_heads)
    return next(n for n in range(most, 0, -1) if not kv_heads % n)


def backward_groups_kernel(
    own: OpOn, dim: int, settings: Settings, needed: Sequence[bool], deterministic: bool
) -> str | None:
    """The backward's kernel by warp groups for a call with ``bounded`` settings, or None: the pack has none, the driver
    encodes no tensor maps, or the call is for the tiles. Those are deterministic, too."""
    name = f"{NAME}_backward_groups_{padded_head_dim(dim)}"
    taken = for_groups(own, needed) and not (deterministic or settings.left >= 0 or settings.softcap)
    return name if taken and name in own.kernels else None


def backward_kernels(dim: int) -> tuple[str, ...]:
    """What a call without a soft cap and without sinks may run; a pack need not have all."""
    kinds = ("keys", "queries", "rows", f"groups_{padded_head_dim(dim)}", "finish")
    return "flash_attention_backward_rows", *(f"{NAME}_backward_{kind}" for kind in kinds)


def backward_plan(
    own: OpOn, sequences: int, on: OpOn, q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, settings: Settings,
    needed: Sequence[bool], deterministic: bool,
) -> Any:  # fmt: skip
    """As ``attention_backward.plan_for``; ``own`` has the kernels of packed sequences, ``on`` the dense backward's."""
    kernel = backward_groups_kernel(own, q.shape[-1], settings, needed, deterministic)
    if kernel is None:
        return BackwardPlan(on, q, k, v, o, do, settings, partial(PackedProducts, own, sequences))
    from liger_aot.ops.attention._varlen_backward import PackedGroupsBackward

    return PackedGroupsBackward(kernel, own, sequences, on, q, k, v, o, do, settings)
