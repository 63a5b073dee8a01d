"""How attention's backward is launched: what each row needs, then dQ, dK and dV, then the sinks' gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from liger_aot.ops.attention._operands import (
    TILE_UNIT,
    Settings,
    Shape,
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
from liger_aot.runtime.dispatch import REMEMBERED, OpOn

KERNEL = "flash_attention_backward"


class Products(Protocol):
    """Of a plan: dQ, dK and dV, from what ``row_sums`` left for rows up to ``padded``."""

    padded: int

    def __call__(
        self, stream: int, q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse2_at: int, delta_at: int,
        needed: Sequence[bool], /, *starts_at: int,
    ) -> tuple[Tensor | None, ...]: ...  # fmt: skip


class BackwardPlan:
    """A backward, for all calls with tensors like these, all of which the kernels can read.

    Args:
        settings: as ``bounded`` gives them.
        products_of: makes, of the other arguments without o and of the rows a program of ``row_sums`` has, what
            computes dQ, dK and dV.
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
        self._rows = on.kernels[f"{KERNEL}_rows"]((q.dtype, True), shape.dim)
        block = self._rows.numbers["block_m"]
        self._products = products_of(on, q, k, v, do, settings, block)
        self._padded = padded = self._products.padded
        tiles_a_head = padded // block
        self._row_programs = checked_tiles(shape, tiles_a_head)
        y, dy = strides_of(o, layout), strides_of(do, layout)
        self._row_numbers = (*y, *dy, tiles_a_head, shape.heads, shape.dim, shape.len_q, padded)

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
        """``starts``: of packed sequences, what the kernels read of them behind the sums."""
        on, shape = self._on, self._shape
        device, stream = on.device, on.stream(on.device)
        sums = q.new_empty((2, shape.batch, shape.heads, self._padded), dtype=torch.float32)
        lse2_at, delta_at = sums.data_ptr(), sums.data_ptr() + sums.nbytes // 2
        dlse_at = None if dlse is None else dlse.data_ptr()
        self._rows.launch(
            device, stream, self._row_programs, 1, 1, lse2_at, delta_at, o.data_ptr(), do.data_ptr(), lse.data_ptr(),
            dlse_at, *self._row_numbers,
        )  # fmt: skip
        found = self._products(
            stream, q, k, v, do, lse2_at, delta_at, needed, *(t.data_ptr() for t in starts)
        )
        if sinks is None or not needed[3]:
            return *found, None
        return *found, sinks_gradient(on, stream, sinks, shape, lse2_at, delta_at, self._padded)


def sinks_gradient(
    on: OpOn, stream: int, sinks: Tensor, shape: Shape, lse2_at: int, delta_at: int, padded: int
) -> Tensor:
    """That of float32 sinks, from the sums of rows."""
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
        capped = "_capped" if settings.softcap else ""
        self._on = on
        self._keys = on.kernels[f"{KERNEL}_keys{capped}"]((q.dtype, True), shape.dim)
        self._queries = on.kernels[f"{KERNEL}_queries{capped}"]((q.dtype, True), shape.dim)
        # a row's sums are read by whole blocks of any of the kernels
        blocks = (row_block, self._keys.numbers["block_m"], self._queries.numbers["block_m"])
        self.padded = padded_rows(shape, blocks)
        inputs = (*(s for t in (q, k, v, do) for s in strides_of(t, layout)),)
        # in base 2 as the forward's; with a soft cap, cap times its scale in front of tanh is the score's own
        scales = (*scales_of(settings), settings.scale)
        ratio = shape.heads // shape.kv_heads
        sizes = (ratio, shape.dim, self.padded, shape.len_q, shape.len_k, *bounds_of(shape, settings))
        tiles = -(-shape.len_k // self._keys.numbers["block_n"])
        self._key_programs = checked_tiles(shape._replace(heads=shape.kv_heads), tiles)
        dk = strides_of(torch.empty(k.shape, dtype=k.dtype, device="meta"), layout)
        section = swizzle_heads(on, self._keys, tiles, settings)
        self._key_numbers = (*dk, *inputs, *scales, tiles, section, shape.kv_heads, *sizes)
        tiles = -(-shape.len_q // self._queries.numbers["block_m"])
        self._query_programs = checked_tiles(shape, tiles)
        dq = strides_of(torch.empty(q.shape, dtype=q.dtype, device="meta"), layout)
        section = swizzle_heads(on, self._queries, tiles, settings)
        self._query_numbers = (*dq, *inputs, *scales, tiles, section, shape.heads, *sizes)

    def __call__(
        self, stream: int, q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse2_at: int, delta_at: int,
        needed: Sequence[bool], *starts_at: int,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        device = self._on.device
        read = (q.data_ptr(), k.data_ptr(), v.data_ptr(), do.data_ptr(), lse2_at, delta_at, *starts_at)
        dq = dk = dv = None
        if needed[1] or needed[2]:
            dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
            self._keys.launch(
                device, stream, self._key_programs, 1, 1, dk.data_ptr(), dv.data_ptr(), *read, *self._key_numbers
            )  # fmt: skip
        if needed[0]:
            dq = q.new_empty(q.shape)
            self._queries.launch(
                device, stream, self._query_programs, 1, 1, dq.data_ptr(), *read, *self._query_numbers
            )
        return dq, dk, dv


def _by_groups(kernel: str, *arguments: Any) -> Products:
    from liger_aot.ops.attention._backward_groups import GroupsProducts

    return GroupsProducts(kernel, *arguments)


def padded_rows(shape: Shape, blocks: Sequence[int]) -> int:
    """Rows of a head in whole blocks of each of these sizes, which divide each other."""
    unit = max(blocks)
    return -(-shape.len_q // unit) * unit


def groups_kernel(
    on: OpOn, dim: int, settings: Settings, needed: Sequence[bool], deterministic: bool
) -> str | None:
    """The kernel by warp groups for a call with ``bounded`` settings, or None: the pack has none, or it is not for
    them."""
    if not for_groups(on, needed):
        return None
    width = padded_head_dim(dim)
    name = f"{KERNEL}_groups_{width}"
    if settings.softcap:
        name += "_capped"
    elif settings.left >= 0:
        name += "_local"
    elif settings.right >= 0:
        name += "_causal"
    name += "_ordered" if deterministic else ""
    return name if name in on.kernels else None


def for_groups(on: OpOn, needed: Sequence[bool]) -> bool:
    """Whether a call may be for warp groups: the driver encodes tensor maps, and the tiles make one gradient alone."""
    return on.tensor_map is not None and needed[0] and (needed[1] or needed[2])


def backward_kernels(dim: int) -> tuple[str, ...]:
    """What a call without a soft cap and without sinks may run, full and causal; a pack need not have all."""
    width = padded_head_dim(dim)
    kinds = ("", "_causal", "_ordered", "_causal_ordered")
    groups = (*(f"groups_{width}{kind}" for kind in kinds), "finish")
    return tuple(f"{KERNEL}_{kind}" for kind in ("rows", "keys", "queries", *groups))


def plan_for(
    on: OpOn, q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, settings: Settings, needed: Sequence[bool],
    deterministic: bool,
) -> BackwardPlan:  # fmt: skip
    kernel = groups_kernel(on, q.shape[-1], settings, needed, deterministic)
    products_of = TilesProducts if kernel is None else partial(_by_groups, kernel)
    return BackwardPlan(on, q, k, v, o, do, settings, products_of)


def gradients(
    on: OpOn,
    grads: Sequence[Tensor | None],
    saved: Sequence[Any],
    settings: Settings,
    needed: Sequence[bool],
    plan_of: Callable[..., Callable[..., tuple[Tensor | None, ...]]] | None = None,
    *starts: Tensor,
) -> tuple[Tensor | None, ...]:
    """dQ, dK, dV and the gradient of the sinks on a GPU, those that are ``needed``; none is empty.

    Args:
        grads: of o, any strides, and of lse; None for one that nothing was computed from.
        saved: q, k, v, sinks, o, lse. Of what no kernel can read there are copies.
        settings: with ``deterministic``, or torch's deterministic algorithms, all is added in a fixed order.
        plan_of, starts: of packed sequences, what makes their plans as ``plan_for``, and where they start.
    """
    if not any(needed):
        return None, None, None, None
    q, k, v, sinks, o, lse = saved
    do, dlse = grads
    do = torch.zeros_like(o) if do is None else do if do.stride(-1) == 1 else do.contiguous()
    dim, sink_dtype = q.shape[-1], None if sinks is None else sinks.dtype
    q, k, v, o, do = (fitted(t, TILE_UNIT) for t in (q, k, v, o, do))
    deterministic = settings.deterministic or torch.are_deterministic_algorithms_enabled()
    together = needed[0] and (needed[1] or needed[2])
    layouts = (part for t in (q, k, v, o, do) for part in (t.shape, t.stride()))
    key = (settings, deterministic, together, q.dtype, *layouts, *(t.shape for t in starts))
    plan = on.plans.get(key)
    if plan is None:
        if len(on.plans) >= REMEMBERED:
            on.plans.clear()
        settings = bounded(shape_of(q, k, settings.layout), settings)
        plan = (plan_of or plan_for)(on, q, k, v, o, do, settings, needed, deterministic)
        on.plans[key] = plan
    sinks = None if sinks is None else sinks.float().contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    *found, dsinks = plan(q, k, v, sinks, o, lse.contiguous(), do, dlse, needed, *starts)
    # columns that only fill up to what the kernels read
    cut = (g if g is None or g.shape[-1] == dim else g[..., :dim].contiguous() for g in found)
    wanted = (g if need else None for g, need in zip(cut, needed, strict=False))
    return *wanted, None if dsinks is None else dsinks.to(sink_dtype)
