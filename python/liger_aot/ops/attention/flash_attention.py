"""Flash attention: softmax(Q K^T scale) V without the matrix of scores.

Dao et al., FlashAttention (2022); Dao, FlashAttention-2 (2023); Shah et al., FlashAttention-3 (2024).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_aot.ops.arguments import ANY, Allowed, Schema, check_flag
from liger_aot.ops.attention._backward import backward_problems, check_backward, gradients
from liger_aot.ops.attention._checks import LAYOUTS, SCALES, check_attention, check_dim, settings_of
from liger_aot.ops.attention._operands import (
    ADDRESS_UNIT,
    COUNTER_WORDS,
    MAP_UNIT,
    TILE_UNIT,
    WARP_GROUP_ROWS,
    Settings,
    Shape,
    TensorMapCache,
    bounded,
    bounds_of,
    checked_tiles,
    fitted,
    keys_of,
    padded_head_dim,
    scales_of,
    shape_of,
    strides_of,
    swizzle_heads,
)
from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.ops.op import Problem
from liger_aot.runtime.dispatch import OpOn
from liger_aot.runtime.layout import layouts_of
from liger_aot.runtime.remembered import remember

FORWARD = "flash_attention_forward"


class FlashAttention(DifferentiableOp):
    """``flash_attention(q, k, v, *, causal=False, ...) -> Tensor``: attention of every query to the keys it may see.

    Exact, with float32 scores and sums; the matrix of scores is never in memory. Differentiable in q, k, v, sinks, also
    through ``return_lse``. The backward alone is the op ``flash_attention_backward``. Works under torch.compile and,
    after ``preload`` and one call, in CUDA graphs. CPU tensors take the plain-torch reference.

    On gfx90a, whose float16 matrix instructions read subnormal numbers as zeros, elements of q, k and v below 2^-14
    count as zeros in float16's forward. Its backward multiplies in float32, at a quarter of the rate, without loss.

    Args:
        q: (batch, length, heads, dim) bfloat16 or float16, (batch, heads, length, dim) with layout "bhsd". Any strides
            but the last, which must be 1. Tensors whose rows don't start at multiples of 16 bytes (on sm80 and AMD: of
            16 elements, as dim) are copied.
        k, v: (batch, length, heads, dim) of q's dtype; heads divide q's (grouped and multi-query attention), the length
            may be another. dim is up to 256; it runs at the speed of the next of 64, 96, 128, 192 and 256. The backward
            copies tensors whose dim or strides are no multiples of 16 elements.
        causal: a query sees no key after its own position, where the last query stands at the last key.
        scale: of the scores, above 0. Default 1 / sqrt(dim).
        window: (left, right): a query sees so many keys before and after its own position. None is no bound.
        softcap: above 0: scores become softcap * tanh(score / softcap). tanh is the GPU's approximation (2^-11).
        sinks: (heads,) bfloat16, float16 or float32, or None: for each head of q the score of one more key, whose value
            is 0.
        layout: "bshd" or "bhsd".
        deterministic: gradients have the same bits every time. Without it q's may differ in their last bits from run to
            run where a pack's backward is warp-specialised (sm90): its programs add to dq in any order. Under
            ``torch.use_deterministic_algorithms(True)`` none differs.
        return_lse: also return the logarithm of each query's sum.

    Returns:
        a contiguous tensor of q's shape and dtype; with ``return_lse`` also (batch, heads, length) float32. A query
        that sees no key gives zeros, and -inf without a sink.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: a shape, stride, device or setting is not allowed.
        NotBuilt: the architecture does without binaries for this head dimension, or, where a gradient is needed,
            without those of the backward.
        PackNotFound: no installed pack serves the GPU.
    """

    name = "flash_attention"
    uses = ("flash_attention_backward",)
    tensors = ("q", "k", "v", "sinks?")
    settings = Schema({**SCALES, "str layout": Allowed(among=LAYOUTS), "bool deterministic": ANY})
    outputs = 2
    results = 2  # o, lse

    def __init__(self, runtimes: Any = None) -> None:
        super().__init__(runtimes)
        self._plans: dict[Any, Any] = {}

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        window: tuple[int | None, int | None] | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        layout: str = "bshd",
        deterministic: bool = False,
        return_lse: bool = False,
    ) -> Any:
        settings = (*settings_of(self.name, q, causal, scale, window, softcap), layout, deterministic)
        o, lse = self.differentiable((q, k, v, sinks), settings)
        return o if return_lse is False or not check_flag(self.name, "return_lse", return_lse) else (o, lse)

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        q, k, v, sinks = tensors
        check_attention(self.name, q, k, v, sinks, Settings(*settings))

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        try:
            layouts, q_at, k_at, v_at, _ = layouts_of(tensors)
            plan = self._plans.get((layouts, settings, keep))
        except (AttributeError, RuntimeError, TypeError):
            plan = None  # not tensors, or none with memory, or settings that are no numbers: the slow way sorts it out
        if plan is None or (q_at | k_at | v_at) % ADDRESS_UNIT:
            return self.prepare_forward(tensors, settings, keep, out)
        found: Tensors = plan(*tensors)
        return found

    def prepare_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        self.check(tensors, settings)
        q, k, v, sinks = tensors
        if self.on_reference(tensors):
            return self.by_reference(tensors, settings)
        on = self._own.of(q, "q")
        assert on is not None
        unit = MAP_UNIT if warp_specialized(on) else TILE_UNIT
        dim, q, k, v = q.shape[-1], fitted(q, unit), fitted(k, unit), fitted(v, unit)
        sinks = None if sinks is None else sinks.float().contiguous()
        key = layouts_of((q, k, v, sinks))[0], settings, keep
        if key not in self._plans:
            if keep:
                backward = self._runtimes["flash_attention_backward"].of(q, "q")
                assert backward is not None
                check_backward(backward, q, Settings(*settings))
            remember(self._plans, key, plan_for(on, q, k, v, Settings(*settings)))
        o, lse = self.run_forward((q, k, v, sinks), settings, keep, out)
        return o if o.shape[-1] == dim else o[..., :dim].contiguous(), lse

    def on_reference(self, tensors: Tensors) -> bool:
        """Also without keys: there is nothing to read."""
        return super().on_reference(tensors) or not tensors[1].numel()

    def saved(self, tensors: Tensors, results: Tensors) -> Tensors:
        return (*tensors, *results)

    def run_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        if self.on_reference(saved):
            return self.prepare_backward(grads, saved, settings, needed)
        on = self._runtimes["flash_attention_backward"].of(saved[0], "q")
        assert on is not None
        return gradients(on, grads, saved, Settings(*settings), needed)

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        """Of a call without a mask, of a causal one, and of the backward. A pack has a warp-specialised kernel or
        tiles."""
        check_dim(self.name, shape[-1])
        key, keys = (dtype, padded_head_dim(shape[-1])), keys_of(shape)
        forward = [Problem(FORWARD, (*key, mask), True, keys) for mask in ("full", "causal")]
        forward.append(Problem(f"{FORWARD}_tiles", key, True, keys))
        return (*forward, *backward_problems(shape[-1], dtype))

    @staticmethod
    def reference(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        scale: float,
        left: int,
        right: int,
        softcap: float,
        layout: str,
        deterministic: bool = False,
        seen: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``seen``: for each query and key, whether it sees it; beside the bounds."""
        settings = Settings(scale, left, right, softcap, layout)
        a, _, c, scores, _ = _scores(q, k, v, settings, seen)
        top = scores.amax(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -math.inf)
        if sinks is not None:
            top = torch.maximum(top, sinks.to(a.dtype)[:, None])
        top = top.clamp(min=torch.finfo(a.dtype).min)
        e = torch.exp(scores - top[..., None])
        total = e.sum(-1)
        if sinks is not None:
            total = total + torch.exp(sinks.to(a.dtype)[:, None] - top)
        o = (e / torch.where(total > 0, total, 1.0)[..., None]) @ c
        lse = torch.log(total) + top
        o = (o.transpose(1, 2) if layout == "bshd" else o).to(q.dtype)
        return o, lse.to(torch.promote_types(q.dtype, torch.float32))

    @staticmethod
    def reference_backward(
        grads: Tensors,
        saved: Tensors,
        scale: float,
        left: int,
        right: int,
        softcap: float,
        layout: str,
        deterministic: bool = False,
        seen: Tensor | None = None,
    ) -> Tensors:
        q, k, v, sinks, o, lse = saved
        do, dlse = grads
        settings = Settings(scale, left, right, softcap, layout)
        a, b, c, scores, slope = _scores(q, k, v, settings, seen)
        wide = a.dtype
        do = torch.zeros_like(o) if do is None else do
        do, o = (t.to(wide).transpose(1, 2) if layout == "bshd" else t.to(wide) for t in (do, o))
        finite = torch.where(torch.isinf(lse), torch.zeros_like(lse), lse).to(wide)
        p = torch.exp(scores - finite[..., None])
        delta = (do * o).sum(-1)
        if dlse is not None:
            delta = delta - torch.where(torch.isinf(lse), torch.zeros_like(dlse), dlse).to(wide)
        ds = p * (do @ c.transpose(-1, -2) - delta[..., None]) * slope * scale
        gradients = [ds @ b, ds.transpose(-1, -2) @ a, p.transpose(-1, -2) @ do]
        shape = shape_of(q, k, layout)
        ratio = shape.heads // max(1, shape.kv_heads)
        for i in (1, 2):
            grouped = (shape.batch, shape.kv_heads, ratio, shape.len_k, shape.dim)
            gradients[i] = gradients[i].reshape(grouped).sum(2)
        dq, dk, dv = (
            (g.transpose(1, 2) if layout == "bshd" else g).to(t.dtype)
            for g, t in zip(gradients, (q, k, v), strict=True)
        )
        dsinks = None
        if sinks is not None:
            weight = torch.exp(sinks.to(wide)[:, None] - lse.to(wide))
            dsinks = -(weight * delta).sum((0, 2)).to(sinks.dtype)
        return dq, dk, dv, dsinks


def _scores(
    q: Tensor, k: Tensor, v: Tensor, settings: Settings, seen: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Any]:
    """Q, K and V in the wider dtype with all of q's heads, the masked scores, and by how much a capped score follows
    the one before the cap."""
    wide = torch.promote_types(q.dtype, torch.float32)
    shape = shape_of(q, k, settings.layout)
    settings = bounded(shape, settings)
    a, b, c = (t.to(wide).transpose(1, 2) if settings.layout == "bshd" else t.to(wide) for t in (q, k, v))
    if shape.kv_heads != shape.heads:
        b, c = (t.repeat_interleave(int(shape.heads // shape.kv_heads), 1) for t in (b, c))  # int: traced
    scores, slope = a @ b.transpose(-1, -2) * settings.scale, 1.0
    if settings.softcap:
        capped = torch.tanh(scores / settings.softcap)
        scores, slope = capped * settings.softcap, 1 - capped * capped  # type: ignore[assignment]
    at = torch.arange(shape.len_k - shape.len_q, shape.len_k, device=q.device)[:, None]
    keys = torch.arange(shape.len_k, device=q.device)
    if settings.right >= 0:
        scores = scores.masked_fill(keys > at + settings.right, -math.inf)
    if settings.left >= 0:
        scores = scores.masked_fill(keys < at - settings.left, -math.inf)
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    return a, b, c, scores, slope


class WarpSpecializedPlan:
    """A forward with tensor maps, for all calls with tensors like these."""

    def __init__(self, on: OpOn, q: Tensor, k: Tensor, v: Tensor, settings: Settings) -> None:
        shape = shape_of(q, k, settings.layout)
        key = q.dtype, padded_head_dim(shape.dim), mask_of(settings), True
        loaded = on.kernels[FORWARD](key, shape.len_k)
        numbers = loaded.numbers
        tiles_per_head = -(-shape.len_q // (WARP_GROUP_ROWS * numbers["warp_groups"]))
        tiles = checked_tiles(shape, tiles_per_head)
        swizzle = heads_in_l2(shape, numbers["l2_megabytes"], q.element_size())
        self._on, self._loaded = on, loaded
        self._programs = min(tiles, on.multiprocessors * loaded.variant.resident)
        self._numbers = (
            shape.len_q,
            *scales_of(settings),
            tiles,
            tiles_per_head,
            shape.heads,
            shape.batch * shape.heads,
            shape.heads // shape.kv_heads,
            swizzle * tiles_per_head,
            swizzle,
            shape.len_q,
            shape.len_k,
            *bounds_of(shape, settings),
        )
        assert on.tensor_map is not None
        o = torch.empty(q.shape, dtype=q.dtype, device="meta")
        named = (("Q", q), ("K", k), ("V", v), ("Y", o))
        self._maps = tuple(
            TensorMapCache(on.tensor_map, loaded, name, t, settings.layout).at for name, t in named
        )
        self._lse_shape = (shape.batch, shape.heads, shape.len_q)
        self._counters = on.workspace("counters", q.device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        on = self._on
        o = q.new_empty(q.shape)
        lse = q.new_empty(self._lse_shape, dtype=torch.float32)
        stream = on.stream(on.device)
        q_map, k_map, v_map, o_map = self._maps
        self._loaded.launch(
            on.device,
            stream,
            self._programs,
            1,
            1,
            q_map(q.data_ptr()),
            k_map(k.data_ptr()),
            v_map(v.data_ptr()),
            o_map(o.data_ptr()),
            lse.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            self._counters.on(stream, COUNTER_WORDS).data_ptr(),
            *self._numbers,
        )
        return o, lse


class TilesPlan:
    """A forward with a program a tile, for all calls with tensors like these."""

    def __init__(self, on: OpOn, q: Tensor, k: Tensor, v: Tensor, settings: Settings) -> None:
        shape = shape_of(q, k, settings.layout)
        loaded = on.kernels[f"{FORWARD}_tiles"]((q.dtype, padded_head_dim(shape.dim), True), shape.len_k)
        tiles_per_head = -(-shape.len_q // loaded.numbers["block_m"])
        self._on, self._loaded = on, loaded
        self._programs = checked_tiles(shape, tiles_per_head)
        o = torch.empty(q.shape, dtype=q.dtype, device="meta")
        self._numbers = (
            *(stride for t in (o, q, k, v) for stride in strides_of(t, settings.layout)),
            *scales_of(settings),
            tiles_per_head,
            swizzle_heads(on, loaded, tiles_per_head, settings),
            shape.heads,
            shape.heads // shape.kv_heads,
            shape.dim,
            shape.len_q,
            shape.len_k,
            *bounds_of(shape, settings),
        )
        self._lse_shape = (shape.batch, shape.heads, shape.len_q)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
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
            *self._numbers,
        )
        return o, lse


def mask_of(settings: Settings) -> str:
    """The kernel's mask; that with a left bound computes soft caps, too."""
    if settings.left >= 0 or settings.softcap:
        return "local"
    return "causal" if settings.right >= 0 else "full"


def heads_in_l2(shape: Shape, megabytes: int, element_bytes: int) -> int:
    """Heads of q whose keys and values fit into so much of L2 together."""
    bytes_per_head = 2 * shape.len_k * shape.dim * element_bytes
    heads = max(1, (megabytes << 20) // bytes_per_head) * (shape.heads // shape.kv_heads)
    return min(shape.batch * shape.heads, heads)


def warp_specialized(on: OpOn) -> bool:
    return FORWARD in on.kernels


def plan_for(
    on: OpOn, q: Tensor, k: Tensor, v: Tensor, settings: Settings
) -> WarpSpecializedPlan | TilesPlan:
    """The plan of calls with tensors like these, all of which ``fits``, on their device."""
    settings = bounded(shape_of(q, k, settings.layout), settings)
    return (WarpSpecializedPlan if warp_specialized(on) else TilesPlan)(on, q, k, v, settings)


OP = FlashAttention
