"""How attention's backward is launched: the statistics of rows, then dQ, dK and dV, then the sinks' gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from liger_aot.ops.attention._operands import (
    TILE_UNIT,
    Settings,
    Shape,
    TensorMapCache,
    bounded,
    bounds_of,
    checked_tiles,
    fitted,
    padded_head_dim,
    scales_of,
    shape_of,
    strides_of,
    swizzle_heads,
)
from liger_aot.ops.op import Problem
from liger_aot.runtime.dispatch import Loaded, OpOn
from liger_aot.runtime.remembered import remember

KERNEL = "flash_attention_backward"
MOST_HEADS_IN_ORDER = 2  # query heads a head of K that are not interleaved, as in backward_scheduler
DQ_ROWS = 64  # of a tile of float32 dQ, which lies in the order of accumulators


class Needed(NamedTuple):
    """Which gradients a call needs."""

    q: bool
    k: bool
    v: bool
    sinks: bool

    @property
    def several(self) -> bool:
        """Whether dQ and another of the products: the tiles make one alone."""
        return self.q and (self.k or self.v)


class Products(Protocol):
    """Of a plan: dQ, dK and dV, from the statistics of rows up to ``padded``."""

    padded: int

    def __call__(
        self, stream: int, q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse2_at: int, delta_at: int,
        needed: Needed, /, *cu_seqlens_at: int,
    ) -> tuple[Tensor | None, ...]: ...  # fmt: skip


class BackwardPlan:
    """A backward, for all calls with tensors like these, all of which the kernels can read.

    Args:
        settings: as ``bounded`` gives them.
        products_of: makes what computes dQ, dK and dV, of the other arguments without o and of the rows of a program
            that preprocesses.
    """

    def __init__(
        self,
        on: OpOn,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        do: Tensor,
        settings: Settings,
        products_of: Callable[..., Products],
    ) -> None:
        layout = settings.layout
        self._shape = shape = shape_of(q, k, layout)
        self._on = on
        self._preprocess = on.kernels[f"{KERNEL}_preprocess"]((q.dtype, True), shape.dim)
        block = self._preprocess.numbers["block_m"]
        self._products = products_of(on, q, k, v, do, settings, block)
        self._padded = padded = self._products.padded
        tiles_per_head = padded // block
        self._programs = checked_tiles(shape, tiles_per_head)
        y, dy = strides_of(o, layout), strides_of(do, layout)
        self._numbers = (*y, *dy, tiles_per_head, shape.heads, shape.dim, shape.len_q, padded)

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
        """``cu_seqlens``: of packed sequences, of queries and of keys."""
        on, shape = self._on, self._shape
        device, stream = on.device, on.stream(on.device)
        statistics = q.new_empty((2, shape.batch, shape.heads, self._padded), dtype=torch.float32)
        lse2_at, delta_at = statistics.data_ptr(), statistics.data_ptr() + statistics.nbytes // 2
        dlse_at = None if dlse is None else dlse.data_ptr()
        self._preprocess.launch(
            device, stream, self._programs, 1, 1, lse2_at, delta_at, o.data_ptr(), do.data_ptr(), lse.data_ptr(),
            dlse_at, *self._numbers,
        )  # fmt: skip
        found = self._products(
            stream, q, k, v, do, lse2_at, delta_at, needed, *(t.data_ptr() for t in cu_seqlens)
        )
        if sinks is None or not needed.sinks:
            return *found, None
        return *found, sinks_gradient(on, stream, sinks, shape, lse2_at, delta_at, self._padded)


def sinks_gradient(
    on: OpOn, stream: int, sinks: Tensor, shape: Shape, lse2_at: int, delta_at: int, padded: int
) -> Tensor:
    """That of float32 sinks, from the statistics of rows."""
    dsinks = sinks.new_empty(sinks.shape)
    on.kernels[f"{KERNEL}_sinks"]((True,), shape.len_q).launch(
        on.device, stream, shape.heads, 1, 1, dsinks.data_ptr(), sinks.data_ptr(), lse2_at, delta_at, shape.batch,
        shape.heads, padded,
    )  # fmt: skip
    return dsinks


class TilesProducts:
    """dK and dV by one kernel, dQ by another, each gradient summed by one program in a fixed order."""

    def __init__(
        self, on: OpOn, q: Tensor, k: Tensor, v: Tensor, do: Tensor, settings: Settings, row_block: int
    ) -> None:
        layout = settings.layout
        shape = shape_of(q, k, layout)
        key = (q.dtype, bool(settings.softcap), True)
        self._on = on
        self._dkdv = on.kernels[f"{KERNEL}_dkdv"](key, shape.dim)
        self._dq = on.kernels[f"{KERNEL}_dq"](key, shape.dim)
        # all of these kernels read the statistics of whole blocks of rows
        blocks = (row_block, self._dkdv.numbers["block_m"], self._dq.numbers["block_m"])
        self.padded = padded_rows(shape, blocks)
        inputs = (*(s for t in (q, k, v, do) for s in strides_of(t, layout)),)
        # in base 2 as the forward's; with a soft cap, cap times its scale in front of tanh is the score's own
        scales = (*scales_of(settings), settings.scale)
        ratio = shape.heads // shape.kv_heads
        sizes = (ratio, shape.dim, self.padded, shape.len_q, shape.len_k, *bounds_of(shape, settings))
        tiles = -(-shape.len_k // self._dkdv.numbers["block_n"])
        self._dkdv_programs = checked_tiles(shape._replace(heads=shape.kv_heads), tiles)
        dk = strides_of(torch.empty(k.shape, dtype=k.dtype, device="meta"), layout)
        swizzle = swizzle_heads(on, self._dkdv, tiles, settings)
        self._dkdv_numbers = (*dk, *inputs, *scales, tiles, swizzle, shape.kv_heads, *sizes)
        tiles = -(-shape.len_q // self._dq.numbers["block_m"])
        self._dq_programs = checked_tiles(shape, tiles)
        dq = strides_of(torch.empty(q.shape, dtype=q.dtype, device="meta"), layout)
        swizzle = swizzle_heads(on, self._dq, tiles, settings)
        self._dq_numbers = (*dq, *inputs, *scales, tiles, swizzle, shape.heads, *sizes)

    def __call__(
        self, stream: int, q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse2_at: int, delta_at: int,
        needed: Needed, *cu_seqlens_at: int,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        device = self._on.device
        read = (q.data_ptr(), k.data_ptr(), v.data_ptr(), do.data_ptr(), lse2_at, delta_at, *cu_seqlens_at)
        dq = dk = dv = None
        if needed.k or needed.v:
            dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
            self._dkdv.launch(
                device, stream, self._dkdv_programs, 1, 1, dk.data_ptr(), dv.data_ptr(), *read, *self._dkdv_numbers
            )  # fmt: skip
        if needed.q:
            dq = q.new_empty(q.shape)
            self._dq.launch(device, stream, self._dq_programs, 1, 1, dq.data_ptr(), *read, *self._dq_numbers)
        return dq, dk, dv


class WarpSpecializedProducts:
    """dQ, dK and dV by one kernel, which adds dQ up in memory; unless the call is deterministic, its last bits vary.
    Beside the results it takes as many float32 as dQ has elements, and an int32 a block of rows if deterministic.

    ``key`` is that of ``warp_specialized_key``."""

    def __init__(
        self, key: tuple[Any, ...], on: OpOn, q: Tensor, k: Tensor, v: Tensor, do: Tensor, settings: Settings,
        row_block: int,
    ) -> None:  # fmt: skip
        layout = settings.layout
        shape = shape_of(q, k, layout)
        self._on = on
        self._loaded = loaded = on.kernels[f"{KERNEL}_warp_specialized"](key, shape.dim)
        self._postprocess = on.kernels[f"{KERNEL}_postprocess"]((q.dtype, True), shape.dim)
        columns = loaded.numbers["d1"] + loaded.numbers["d2"]
        block_m = loaded.numbers["block_m"]
        self.padded = padded = padded_rows(shape, (row_block, block_m, DQ_ROWS))
        rows = shape.batch * shape.heads * padded
        taken = loaded.variant.arguments
        self._dq_elements = rows * columns
        self._semaphores = rows // block_m if "SEMAPHORE" in taken else 0
        tiles = -(-shape.len_k // loaded.numbers["block_n"])
        self._programs = checked_tiles(shape._replace(heads=shape.kv_heads), tiles)
        scale, cap = scales_of(settings)
        right, left = bounds_of(shape, settings)
        ratio = shape.heads // shape.kv_heads
        if self._semaphores:
            self._swizzle = ordered_swizzle_heads(on, loaded, tiles, ratio)
        else:
            self._swizzle = swizzle_heads(on, loaded, tiles, settings)
        self._numbers = (
            scale,
            tiles,
            shape.kv_heads,
            ratio,
            padded,
            shape.len_q,
            shape.len_k,
            right,
            *((left,) if "left" in taken else ()),
            *((cap,) if "cap" in taken else ()),
        )
        dk = torch.empty(k.shape, dtype=k.dtype, device="meta")
        statistics = torch.empty((shape.batch, shape.heads, 1, padded), dtype=torch.float32, device="meta")
        named = (("Q", q), ("K", k), ("V", v), ("DY", do), ("DK", dk), ("DV", dk))
        assert on.tensor_map is not None
        self._maps = (
            *(TensorMapCache(on.tensor_map, loaded, name, t, layout).at for name, t in named),
            *(
                TensorMapCache(on.tensor_map, loaded, name, statistics, "bhsd").at
                for name in ("LSE2", "DELTA")
            ),
        )
        pieces = columns // self._postprocess.numbers["width"]
        dq_tiles = padded // DQ_ROWS
        self._postprocess_programs = checked_tiles(shape, dq_tiles * pieces)
        dq = strides_of(torch.empty(q.shape, dtype=q.dtype, device="meta"), layout)
        self._postprocess_numbers = (
            *dq, settings.scale, dq_tiles, shape.heads, pieces, shape.dim, shape.len_q,
        )  # fmt: skip

    def __call__(
        self, stream: int, q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse2_at: int, delta_at: int,
        needed: Needed, *cu_seqlens_at: int,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        device = self._on.device
        dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        # an int32 0 has the same bits as a float32 0
        zeros = q.new_zeros(self._dq_elements + self._semaphores, dtype=torch.float32)
        dq32_at = zeros.data_ptr()
        semaphore = (dq32_at + 4 * self._dq_elements,) if self._semaphores else ()
        tensors = (*(t.data_ptr() for t in (q, k, v, do, dk, dv)), lse2_at, delta_at)
        maps = (at(address) for at, address in zip(self._maps, tensors, strict=True))
        self._loaded.launch(
            device, stream, self._programs, 1, 1, *maps, dq32_at, *self._numbers, *semaphore, self._swizzle
        )  # fmt: skip
        self._postprocess.launch(
            device, stream, self._postprocess_programs, 1, 1, dq.data_ptr(), dq32_at, *self._postprocess_numbers
        )  # fmt: skip
        return dq, dk, dv


def ordered_swizzle_heads(on: OpOn, loaded: Loaded, tiles: int, ratio: int) -> int:
    """How many heads of K are interleaved where dQ is deterministic: as many as fill the GPU, times a number of the
    profile. The more there are the less their programs wait for each other, and the less of their rows stays in L2.
    That number is another where more query heads share a head of K: there, in causal calls, query heads are interleaved
    too, so that all programs of a head are at nearly the same rows."""
    number = "waves_gqa" if ratio > MOST_HEADS_IN_ORDER else "waves"
    return -(-on.multiprocessors // tiles) * loaded.numbers[number]


def padded_rows(shape: Shape, blocks: Sequence[int]) -> int:
    """Rows of a head in whole blocks of each of these sizes, which divide each other."""
    unit = max(blocks)
    return -(-shape.len_q // unit) * unit


def warp_specialized_key(
    on: OpOn, dtype: torch.dtype, dim: int, settings: Settings, needed: Needed, deterministic: bool
) -> tuple[Any, ...] | None:
    """Of the warp-specialised kernel for a call with ``bounded`` settings, or None: the pack has none for it, or the
    tiles are for the call."""
    kernel = on.kernels.get(f"{KERNEL}_warp_specialized")
    if kernel is None or not for_warp_specialized(on, needed):
        return None
    mask = "causal" if settings.right >= 0 else "full"
    if settings.left >= 0 or settings.softcap:
        mask = "local"
    key = (dtype, padded_head_dim(dim), mask, bool(settings.softcap), deterministic, True)
    return key if kernel.serves(key) else None


def for_warp_specialized(on: OpOn, needed: Needed) -> bool:
    """Whether the driver encodes tensor maps, and more than one gradient is needed."""
    return on.tensor_map is not None and needed.several


def check_backward(on: OpOn, q: Tensor, settings: Settings, kernels: str = KERNEL) -> None:
    """NotBuilt where the architecture does without the backward of a call with a gradient: the forward says so, before
    a training step has computed anything.

    Args:
        on: what has the kernels, whose names begin with ``kernels``.
    """
    if f"{kernels}_warp_specialized" in on.kernels:
        return  # the tiles are not for all calls
    for kind in ("dkdv", "dq"):
        key = (q.dtype, bool(settings.softcap), True)
        on.kernels[f"{kernels}_{kind}"].check_built(key, q.shape[-1])


def backward_problems(dim: int, dtype: torch.dtype) -> tuple[Problem, ...]:
    """What a call without a soft cap and without sinks may run, full and causal; a pack need not have all."""
    width = padded_head_dim(dim)
    kinds: list[tuple[str, tuple[Any, ...]]] = [
        ("preprocess", (dtype,)),
        ("dkdv", (dtype, False)),
        ("dq", (dtype, False)),
        *(
            ("warp_specialized", (dtype, width, mask, False, deterministic))
            for deterministic in (False, True)
            for mask in ("full", "causal")
        ),
        ("postprocess", (dtype,)),
    ]
    return tuple(Problem(f"{KERNEL}_{kind}", axes, True, dim) for kind, axes in kinds)


def plan_for(
    on: OpOn, q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, settings: Settings, needed: Needed,
    deterministic: bool,
) -> BackwardPlan:  # fmt: skip
    key = warp_specialized_key(on, q.dtype, q.shape[-1], settings, needed, deterministic)
    products_of = TilesProducts if key is None else partial(WarpSpecializedProducts, key)
    return BackwardPlan(on, q, k, v, o, do, settings, products_of)


def contiguous(t: Tensor) -> Tensor:
    """With the strides of a new tensor, also along dimensions of one element, where others count as contiguous, too."""
    return t.clone(memory_format=torch.contiguous_format)


def gradients(
    on: OpOn,
    grads: Sequence[Tensor | None],
    saved: Sequence[Any],
    settings: Settings,
    needed: Sequence[bool],
    plan_of: Callable[..., Callable[..., tuple[Tensor | None, ...]]] | None = None,
    *cu_seqlens: Tensor,
) -> tuple[Tensor | None, ...]:
    """dQ, dK, dV and the gradient of the sinks on a GPU, those that are ``needed``; none is empty.

    Args:
        grads: of o, any strides, and of lse; None for one that nothing was computed from.
        saved: q, k, v, sinks, o, lse. What no kernel can read is copied.
        settings: with ``deterministic``, or torch's deterministic algorithms, all is added in a fixed order.
        plan_of, cu_seqlens: of packed sequences, what makes their plans as ``plan_for``, and where they start.
    """
    needed = Needed(*needed)
    if not any(needed):
        return None, None, None, None
    q, k, v, sinks, o, lse = saved
    do, dlse = grads
    do = torch.zeros_like(o) if do is None else do if do.stride(-1) == 1 else do.contiguous()
    dim, sink_dtype = q.shape[-1], None if sinks is None else sinks.dtype
    q, k, v, o, do = (fitted(t, TILE_UNIT) for t in (q, k, v, o, do))
    deterministic = settings.deterministic or torch.are_deterministic_algorithms_enabled()
    layouts = (part for t in (q, k, v, o, do) for part in (t.shape, t.stride()))
    key = (settings, deterministic, needed.several, q.dtype, *layouts, *(t.shape for t in cu_seqlens))
    plan = on.plans.get(key)
    if plan is None:
        settings = bounded(shape_of(q, k, settings.layout), settings)
        plan = (plan_of or plan_for)(on, q, k, v, o, do, settings, needed, deterministic)
        remember(on.plans, key, plan)
    sinks = None if sinks is None else sinks.float().contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    *found, dsinks = plan(q, k, v, sinks, o, lse.contiguous(), do, dlse, needed, *cu_seqlens)
    # columns that only fill up to what the kernels read
    cut = (g if g is None or g.shape[-1] == dim else g[..., :dim].contiguous() for g in found)
    wanted = (g if need else None for g, need in zip(cut, needed, strict=False))
    return *wanted, None if dsinks is None else dsinks.to(sink_dtype)
