"""How the backward of packed sequences is launched."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from liger_aot.ops.attention._backward import (
    DQ_ROWS,
    BackwardPlan,
    Needed,
    TilesProducts,
    for_warp_specialized,
    padded_rows,
    sinks_gradient,
)
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
from liger_aot.ops.op import Problem
from liger_aot.runtime.dispatch import Loaded, OpOn

UNIT = 128  # rows: a sequence's statistics and float32 dQ start at a multiple, as in the kernels


class VarlenTilesProducts(TilesProducts):
    """dQ, dK and dV of packed sequences. ``own`` has their kernels; those of row statistics and sinks are the dense
    backward's, to which all tokens are one sequence."""

    def __init__(
        self, own: OpOn, sequences: int, on: OpOn, q: Tensor, k: Tensor, v: Tensor, do: Tensor, settings: Settings,
        row_block: int,
    ) -> None:  # fmt: skip
        shape = shape_of(q, k, VARLEN)
        key = (q.dtype, bool(settings.softcap), True)
        self._on = on
        self._dkdv = own.kernels[f"{NAME}_backward_dkdv"](key, shape.dim)
        self._dq = own.kernels[f"{NAME}_backward_dq"](key, shape.dim)
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

        self._dkdv_programs, self._dkdv_numbers = numbers(k, self._dkdv, "block_n")
        self._dq_programs, self._dq_numbers = numbers(q, self._dq, "block_m")


class WarpSpecializedVarlenBackward:
    """A warp-specialised backward, for all calls with tensors like these: dK and dV and a float32 dQ by one kernel.

    Row statistics and dQ have as many rows as all sequences take in whole blocks of UNIT, whatever their lengths are.

    Args:
        key: as ``warp_specialized_key`` gives it.
        own, on: of packed sequences' backward, and of the dense one's.
    """

    def __init__(
        self, key: tuple[Any, ...], own: OpOn, sequences: int, on: OpOn, q: Tensor, k: Tensor, v: Tensor, o: Tensor,
        do: Tensor, settings: Settings,
    ) -> None:  # fmt: skip
        self._shape = shape = shape_of(q, k, VARLEN)
        self._own, self._on = own, on
        self._others = settings, partial(VarlenTilesProducts, own, sequences)
        self._tiles: BackwardPlan | None = None
        self._preprocess = own.kernels[f"{NAME}_backward_preprocess"]((q.dtype, True), shape.dim)
        self._loaded = loaded = own.kernels[f"{NAME}_backward_warp_specialized"](key, shape.dim)
        self._postprocess = own.kernels[f"{NAME}_backward_postprocess"]((q.dtype, True), shape.dim)
        self._padded = padded = tiles_of(shape.len_q, UNIT, sequences) * UNIT
        right, _ = varlen_bounds(shape, settings)
        ratio = shape.heads // shape.kv_heads
        dk = torch.empty(k.shape, dtype=k.dtype, device="meta")
        dq = torch.empty(q.shape, dtype=q.dtype, device="meta")
        y, dy, to = (strides_of(t, VARLEN)[1:] for t in (o, do, dq))

        tiles = padded // self._preprocess.numbers["block_m"]
        self._preprocess_programs = checked_tiles(shape, tiles)
        self._preprocess_numbers = (*y, *dy, tiles, shape.dim, padded, sequences, shape.len_q)

        tiles = tiles_of(shape.len_k, loaded.numbers["block_n"], sequences)
        self._programs = checked_tiles(shape._replace(heads=shape.kv_heads), tiles)
        of_average = -(-average_length(shape.len_k, sequences) // loaded.numbers["block_n"])
        swizzle = varlen_swizzle_heads(own, loaded, shape.kv_heads, of_average)
        self._numbers = (
            scales_of(settings)[0], tiles, ratio, padded, swizzle, sequences, shape.len_q, shape.len_k, right,
        )  # fmt: skip

        columns = loaded.numbers["d1"] + loaded.numbers["d2"]
        self._dq_shape = (shape.heads, padded, columns)
        pieces = columns // self._postprocess.numbers["width"]
        tiles = padded // DQ_ROWS
        self._postprocess_programs = checked_tiles(shape, tiles * pieces)
        self._postprocess_numbers = (*to, settings.scale, tiles, pieces, shape.dim, sequences, shape.len_q)

        encode = own.tensor_map
        assert encode is not None
        named = (("Q", q), ("K", k), ("V", v), ("DY", do), ("DK", dk), ("DV", dk))
        self._maps = [TensorMapCache(encode, loaded, name, map_operand(t), "bhsd").at for name, t in named]
        self._before = [bytes_before(t) for _, t in named]
        statistics = torch.empty((1, shape.heads, 1, padded), dtype=torch.float32, device="meta")
        self._statistics_maps = [
            TensorMapCache(encode, loaded, name, statistics, "bhsd").at for name in ("LSE2", "DELTA")
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
        needed: Needed,
        *cu_seqlens: Tensor,
    ) -> tuple[Tensor | None, ...]:
        dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        firsts = [
            t.data_ptr() - before for t, before in zip((q, k, v, do, dk, dv), self._before, strict=True)
        ]
        if min(firsts) < 0:  # a tensor that is larger than its own address: no map can start before it
            self._tiles = self._tiles or BackwardPlan(self._on, q, k, v, o, do, *self._others)
            return self._tiles(q, k, v, sinks, o, lse, do, dlse, needed, *cu_seqlens)
        device, stream = self._own.device, self._own.stream(self._own.device)
        statistics = q.new_empty((2, self._shape.heads, self._padded), dtype=torch.float32)
        lse2_at, delta_at = statistics.data_ptr(), statistics.data_ptr() + statistics.nbytes // 2
        dlse_at = None if dlse is None else dlse.data_ptr()
        of_q, of_k = (t.data_ptr() for t in cu_seqlens)
        self._preprocess.launch(
            device, stream, self._preprocess_programs, 1, 1, lse2_at, delta_at, o.data_ptr(), do.data_ptr(),
            lse.data_ptr(), dlse_at, of_q, *self._preprocess_numbers,
        )  # fmt: skip
        dq32 = q.new_zeros(self._dq_shape, dtype=torch.float32)
        maps = [at(first) for at, first in zip(self._maps, firsts, strict=True)]
        maps += [at(address) for at, address in zip(self._statistics_maps, (lse2_at, delta_at), strict=True)]
        self._loaded.launch(
            device, stream, self._programs, 1, 1, *maps, dq32.data_ptr(), of_q, of_k, *self._numbers
        )  # fmt: skip
        self._postprocess.launch(
            device, stream, self._postprocess_programs, 1, 1, dq.data_ptr(), dq32.data_ptr(), of_q,
            *self._postprocess_numbers,
        )  # fmt: skip
        if sinks is None or not needed.sinks:
            return dq, dk, dv, None
        dsinks = sinks_gradient(self._on, stream, sinks, self._shape, lse2_at, delta_at, self._padded)
        return dq, dk, dv, dsinks


def varlen_swizzle_heads(own: OpOn, loaded: Loaded, kv_heads: int, tiles: int) -> int:
    """How many heads of K are interleaved, of whose sequences each has so many tiles: as many as fill the GPU a number
    of times that the profile says, or fewer: a divisor of all, as the kernel at 96 would spill with more to compute."""
    most = min(-(-loaded.numbers["waves"] * own.multiprocessors // tiles), kv_heads)
    return next(n for n in range(most, 0, -1) if not kv_heads % n)


def warp_specialized_key(
    own: OpOn, dtype: torch.dtype, dim: int, settings: Settings, needed: Needed, deterministic: bool
) -> tuple[Any, ...] | None:
    """Of the warp-specialised kernel for a call with ``bounded`` settings, or None: the pack has none, the driver
    encodes no tensor maps, or the call is for the tiles. Those are deterministic, too."""
    kernel = own.kernels.get(f"{NAME}_backward_warp_specialized")
    if kernel is None or not for_warp_specialized(own, needed):
        return None
    if deterministic or settings.left >= 0 or settings.softcap:
        return None
    key = (dtype, padded_head_dim(dim), True)
    return key if kernel.serves(key) else None


def varlen_backward_problems(dim: int, dtype: torch.dtype) -> tuple[Problem, ...]:
    """What a call without a soft cap and without sinks may run; a pack need not have all."""
    kinds: tuple[tuple[str, tuple[Any, ...]], ...] = (
        ("flash_attention_backward_preprocess", (dtype,)),
        (f"{NAME}_backward_dkdv", (dtype, False)),
        (f"{NAME}_backward_dq", (dtype, False)),
        (f"{NAME}_backward_preprocess", (dtype,)),
        (f"{NAME}_backward_warp_specialized", (dtype, padded_head_dim(dim))),
        (f"{NAME}_backward_postprocess", (dtype,)),
    )
    return tuple(Problem(kernel, axes, True, dim) for kernel, axes in kinds)


def backward_plan(
    own: OpOn, sequences: int, on: OpOn, q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, settings: Settings,
    needed: Needed, deterministic: bool,
) -> BackwardPlan | WarpSpecializedVarlenBackward:  # fmt: skip
    """As ``_backward.plan_for``; ``own`` has the kernels of packed sequences, ``on`` the dense backward's."""
    key = warp_specialized_key(own, q.dtype, q.shape[-1], settings, needed, deterministic)
    if key is None:
        return BackwardPlan(on, q, k, v, o, do, settings, partial(VarlenTilesProducts, own, sequences))
    return WarpSpecializedVarlenBackward(key, own, sequences, on, q, k, v, o, do, settings)
