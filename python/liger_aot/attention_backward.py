"""How attention's backward is launched: what each row needs, then dK and dV, then dQ, then the sinks' gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_aot.attention import (
    TILE_UNIT,
    Settings,
    bounded,
    bounds_of,
    checked_tiles,
    fitted,
    scales_of,
    shape_of,
    strides_of,
)
from liger_aot.runtime import REMEMBERED, OpOn

KERNEL = "flash_attention_backward"
WITHOUT_CAP = tuple(f"{KERNEL}_{kind}" for kind in ("rows", "keys", "queries"))


class BackwardPlan:
    """A backward, for all calls with tensors like these, all of which the kernels can read."""

    def __init__(self, on: OpOn, q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, settings: Settings):
        layout = settings.layout
        shape = shape_of(q, k, layout)
        settings = bounded(shape, settings)
        capped = "_capped" if settings.softcap else ""
        key = (q.dtype, True)
        self._on = on
        self._rows = on.kernels[f"{KERNEL}_rows"](key, shape.dim)
        self._keys = on.kernels[f"{KERNEL}_keys{capped}"](key, shape.dim)
        self._queries = on.kernels[f"{KERNEL}_queries{capped}"](key, shape.dim)
        row_block, key_block = self._queries.numbers["block_m"], self._keys.numbers["block_n"]
        # a row's sums are read by whole blocks of any of the kernels
        unit = max(loaded.numbers["block_m"] for loaded in (self._rows, self._keys, self._queries))
        self._padded = padded = -(-shape.len_q // unit) * unit
        tiles_a_head = padded // self._rows.numbers["block_m"]
        self._row_programs = checked_tiles(shape, tiles_a_head)
        y, dy = strides_of(o, layout), strides_of(do, layout)
        self._row_numbers = (*y, *dy, tiles_a_head, shape.heads, shape.dim, shape.len_q, padded)

        inputs = (*(s for t in (q, k, v) for s in strides_of(t, layout)), *dy)
        # in base 2 as the forward's; with a soft cap, cap times its scale in front of tanh is the score's own
        scales = (*scales_of(settings), settings.scale)
        ratio = shape.heads // shape.kv_heads
        sizes = (ratio, shape.dim, padded, shape.len_q, shape.len_k, *bounds_of(shape, settings))
        tiles = -(-shape.len_k // key_block)
        self._key_programs = checked_tiles(shape._replace(heads=shape.kv_heads), tiles)
        dk = strides_of(torch.empty(k.shape, dtype=k.dtype, device="meta"), layout)
        self._key_numbers = (*dk, *inputs, *scales, tiles, shape.kv_heads, *sizes)
        tiles = -(-shape.len_q // row_block)
        self._query_programs = checked_tiles(shape, tiles)
        dq = strides_of(torch.empty(q.shape, dtype=q.dtype, device="meta"), layout)
        self._query_numbers = (*dq, *inputs, *scales, tiles, shape.heads, *sizes)
        self._shape = shape

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
        do_at = do.data_ptr()
        dlse_at = None if dlse is None else dlse.data_ptr()
        self._rows.launch(
            device, stream, self._row_programs, 1, 1, lse2_at, delta_at, o.data_ptr(), do_at, lse.data_ptr(), dlse_at,
            *self._row_numbers,
        )  # fmt: skip
        starts_at = (t.data_ptr() for t in starts)
        read = (q.data_ptr(), k.data_ptr(), v.data_ptr(), do_at, lse2_at, delta_at, *starts_at)
        dq = dk = dv = dsinks = None
        if needed[1] or needed[2]:
            dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
            self._keys.launch(
                device,
                stream,
                self._key_programs,
                1,
                1,
                dk.data_ptr(),
                dv.data_ptr(),
                *read,
                *self._key_numbers,
            )
        if needed[0]:
            dq = q.new_empty(q.shape)
            self._queries.launch(
                device, stream, self._query_programs, 1, 1, dq.data_ptr(), *read, *self._query_numbers
            )
        if sinks is not None and needed[3]:
            dsinks = sinks.new_empty(sinks.shape)
            on.kernels[f"{KERNEL}_sinks"]((True,), shape.len_q).launch(
                device, stream, shape.heads, 1, 1, dsinks.data_ptr(), sinks.data_ptr(), lse2_at, delta_at, shape.batch,
                shape.heads, self._padded,
            )  # fmt: skip
        return dq, dk, dv, dsinks


def gradients(
    on: OpOn,
    grads: Sequence[Tensor | None],
    saved: Sequence[Any],
    settings: Settings,
    needed: Sequence[bool],
    plan_of: Callable[..., BackwardPlan] = BackwardPlan,
    *starts: Tensor,
) -> tuple[Tensor | None, ...]:
    """dQ, dK, dV and the gradient of the sinks on a GPU, those that are ``needed``; none is empty.

    Args:
        grads: of o, any strides, and of lse; None for one that nothing was computed from.
        saved: q, k, v, sinks, o, lse. Of what no kernel can read there are copies.
        plan_of, starts: of packed sequences, how their plan is made and where they start.
    """
    if not any(needed):
        return None, None, None, None
    q, k, v, sinks, o, lse = saved
    do, dlse = grads
    do = torch.zeros_like(o) if do is None else do if do.stride(-1) == 1 else do.contiguous()
    dim, sink_dtype = q.shape[-1], None if sinks is None else sinks.dtype
    q, k, v, o, do = (fitted(t, TILE_UNIT) for t in (q, k, v, o, do))
    key = (
        settings,
        q.dtype,
        *(part for t in (q, k, v, o, do) for part in (t.shape, t.stride())),
        *(t.shape for t in starts),
    )
    plan = on.plans.get(key)
    if plan is None:
        if len(on.plans) >= REMEMBERED:
            on.plans.clear()
        plan = on.plans[key] = plan_of(on, q, k, v, o, do, settings)
    sinks = None if sinks is None else sinks.float().contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    *found, dsinks = plan(q, k, v, sinks, o, lse.contiguous(), do, dlse, needed, *starts)
    # columns that only fill up to what the kernels read
    cut = (g if g is None or g.shape[-1] == dim else g[..., :dim].contiguous() for g in found)
    wanted = (g if need else None for g, need in zip(cut, needed, strict=False))
    return *wanted, None if dsinks is None else dsinks.to(sink_dtype)
