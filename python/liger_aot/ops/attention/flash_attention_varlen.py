"""Flash attention of sequences of any lengths, packed one behind the other.

Dao et al., FlashAttention (2022); Dao, FlashAttention-2 (2023).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from liger_aot.ops.arguments import ANY, FROM_ZERO, Schema, check_flag
from liger_aot.ops.attention._backward import check_backward, gradients
from liger_aot.ops.attention._checks import SCALES, check_dim, settings_of
from liger_aot.ops.attention._operands import (
    ADDRESS_UNIT,
    COUNTER_WORDS,
    TILE_UNIT,
    VARLEN,
    WARP_GROUP_ROWS,
    Settings,
    TensorMapCache,
    checked_tiles,
    fitted,
    keys_of,
    padded_head_dim,
    scales_of,
)
from liger_aot.ops.attention._varlen import (
    NAME,
    bytes_before,
    check_values,
    check_varlen,
    map_operand,
    seen_keys,
    tiles_of,
    token_strides,
    varlen_bounds,
    varlen_sizes,
)
from liger_aot.ops.attention._varlen_backward import backward_plan, varlen_backward_problems
from liger_aot.ops.attention.flash_attention import FlashAttention
from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.ops.op import Problem
from liger_aot.runtime import device_errors
from liger_aot.runtime.dispatch import Loaded, OpOn, Runtimes
from liger_aot.runtime.layout import layouts_of
from liger_aot.runtime.remembered import remember

FORWARD = f"{NAME}_forward"
EARLIER = "a cu_seqlens, by the tokens or max_seqlen of an earlier call,"
BACKWARD = ("flash_attention_varlen_backward", "flash_attention_backward")


class FlashAttentionVarlen(DifferentiableOp):
    """``flash_attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, ...) -> Tensor``:
    attention within each of the sequences that follow each other in q, k and v.

    As ``flash_attention`` of each sequence by itself: exact, differentiable in q, k, v, sinks, also through
    ``return_lse``. A sequence's results and gradients have the same bits every time, whatever lies beside it, for one
    ``max_seqlen_k``; for q's gradient see ``deterministic``. Where sequences start stays on the device, and nothing
    waits for it. The backward alone is the op ``flash_attention_varlen_backward``. Works under torch.compile and, after
    ``preload`` and one call, in CUDA graphs, whose cu_seqlens may change between replays. CPU tensors take the
    plain-torch reference, whose memory grows with the square of all tokens.

    On gfx90a, whose float16 matrix instructions read subnormal numbers as zeros, elements of q, k and v below 2^-14
    count as zeros in float16's forward. Its backward multiplies in float32, at a quarter of the rate, without loss.

    Args:
        q: (tokens, heads, dim) bfloat16 or float16. Any strides but the last, which must be 1. Tensors whose rows don't
            start at multiples of 16 elements, as dim, are copied.
        k, v: (tokens, heads, dim) of q's dtype; heads divide q's, tokens may be others. dim is up to 256; it runs at
            the speed of the next of 64, 96, 128, 192 and 256.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32 on q's device: where each sequence starts in q, and in k and
            v, then where the last one ends: at the tokens or before. They start at 0 and don't fall; a sequence may
            have no queries, or no keys.
        max_seqlen_q, max_seqlen_k: the longest sequence's length, or more: they are checked. max_seqlen_k may choose
            another variant, whose last bits may differ.
        causal: a query sees no key after its own position, where a sequence's last query stands at its last key.
        scale: of the scores, above 0. Default 1 / sqrt(dim).
        window: (left, right): a query sees so many keys before and after its own position. None is no bound.
        softcap: above 0: scores become softcap * tanh(score / softcap).
        sinks: (heads,) bfloat16, float16 or float32, or None: for each head of q the score of one more key, whose value
            is 0.
        deterministic: all gradients have the same bits every time. Without it q's may differ in their last bits from
            run to run where a pack's backward is warp-specialised (sm90). Under
            ``torch.use_deterministic_algorithms(True)`` none does.
        return_lse: also return the logarithm of each query's sum.

    Returns:
        a contiguous tensor of q's shape and dtype; with ``return_lse`` also (heads, tokens) float32. A query that sees
        no key gives zeros, and -inf without a sink; tokens behind the last sequence give zeros and -inf. With
        cu_seqlens that are out of order or range, or a sequence above its max_seqlen, a GPU gives any numbers; nothing
        out of bounds is read or written, and the next call raises (LIGER_AOT_DEBUG=1: the call itself).

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: a shape, stride, device or setting is not allowed; on the CPU also what cu_seqlens hold.
        NotBuilt: the architecture does without binaries for this head dimension, or, where a gradient is needed,
            without those of the backward.
        PackNotFound: no installed pack serves the GPU.
    """

    name = "flash_attention_varlen"
    uses = BACKWARD
    tensors = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "sinks?")
    settings = Schema(
        {
            "SymInt max_seqlen_q": FROM_ZERO,
            "SymInt max_seqlen_k": FROM_ZERO,
            **SCALES,
            "bool deterministic": ANY,
        }
    )
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
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        causal: bool = False,
        scale: float | None = None,
        window: tuple[int | None, int | None] | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        deterministic: bool = False,
        return_lse: bool = False,
    ) -> Any:
        settings = (*settings_of(self.name, q, causal, scale, window, softcap), deterministic)
        o, lse = self.differentiable(
            (q, k, v, cu_seqlens_q, cu_seqlens_k, sinks), (max_seqlen_q, max_seqlen_k, *settings)
        )
        return o if return_lse is False or not check_flag(self.name, "return_lse", return_lse) else (o, lse)

    def preload(self, device: torch.device | int | str | None = None) -> None:
        super().preload(device)
        device_errors.flag(self.name)

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        q, k, v, cu_q, cu_k, sinks = tensors
        others = settings[2:]
        check_varlen(self.name, q, k, v, (cu_q, cu_k), sinks, varlen_settings(*others))

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        max_q, max_k, *_ = settings
        try:
            layouts, q_at, k_at, v_at, *_ = layouts_of(tensors)
            plan = self._plans.get((layouts, settings[2:], keep))
        except (AttributeError, RuntimeError, TypeError):
            plan = None  # not tensors, or none with memory, or settings that are no numbers: the slow way sorts it out
        if plan is None or (q_at | k_at | v_at) % ADDRESS_UNIT:
            return self.prepare_forward(tensors, settings, keep, out)
        device_errors.raise_if_any(self.name, EARLIER)
        results: Tensors = plan(*tensors, max_q, max_k)
        device_errors.check_now(self.name, tensors[0].device)
        return results

    def prepare_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        self.check(tensors, settings)
        q, k, v, cu_q, cu_k, sinks = tensors
        if self.on_reference(tensors):
            check_values(self.name, (cu_q, cu_k), (q.shape[0], k.shape[0]), settings[:2])
            return self.by_reference(tensors, settings)
        on = self._own.of(q, "q")
        assert on is not None
        dim = q.shape[-1]
        q, k, v = (fitted(t, TILE_UNIT) for t in (q, k, v))
        sinks = None if sinks is None else sinks.float().contiguous()
        tensors = (q, k, v, cu_q.contiguous(), cu_k.contiguous(), sinks)
        key = layouts_of(tensors)[0], settings[2:], keep
        if key not in self._plans:
            asked = varlen_settings(*settings[2:])
            if keep:
                backward = self._runtimes[BACKWARD[0]].of(q, "q")
                assert backward is not None
                check_backward(backward, q, asked, BACKWARD[0])
            remember(self._plans, key, plan_for(on, q, k, v, cu_q.shape[0] - 1, asked))
        o, lse = self.run_forward(tensors, settings, keep, out)
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
        dq, dk, dv, dsinks = varlen_gradients(
            self._runtimes, grads, saved, settings[2:], (*needed[:3], needed[5])
        )
        return dq, dk, dv, None, None, dsinks

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        """Of a call without a soft cap, a left bound and sinks, and of its backward; a pack need not have all."""
        check_dim(self.name, shape[-1])
        key, keys = (dtype, padded_head_dim(shape[-1])), keys_of(shape)
        forward = [Problem(FORWARD, (*key, mask), True, keys) for mask in ("full", "causal")]
        forward.append(Problem(f"{FORWARD}_tiles", key, True, keys))
        return (*forward, *varlen_backward_problems(shape[-1], dtype))

    @staticmethod
    def reference(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        sinks: Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        scale: float,
        left: int,
        right: int,
        softcap: float,
        deterministic: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """``flash_attention``'s, of all tokens as one sequence in which each query sees its own sequence."""
        seen, inside = seen_keys(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0], left, right)
        q, k, v = q[None], k[None], v[None]
        o, lse = FlashAttention.reference(q, k, v, sinks, scale, -1, -1, softcap, "bshd", seen=seen)
        return o[0], torch.where(inside, lse[0], -math.inf)

    @staticmethod
    def reference_backward(
        grads: Tensors,
        saved: Tensors,
        max_seqlen_q: int,
        max_seqlen_k: int,
        scale: float,
        left: int,
        right: int,
        softcap: float,
        deterministic: bool = False,
    ) -> Tensors:
        q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, o, lse = saved
        seen, _ = seen_keys(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0], left, right)
        # Tokens behind the last sequence leave sinks alone.
        lse = torch.where(torch.isinf(lse), math.inf, lse)
        grads = tuple(None if g is None else g[None] for g in grads)
        q, k, v, o, lse = (t[None] for t in (q, k, v, o, lse))
        dq, dk, dv, dsinks = FlashAttention.reference_backward(
            grads, (q, k, v, sinks, o, lse), scale, -1, -1, softcap, "bshd", seen=seen
        )
        return dq[0], dk[0], dv[0], None, None, dsinks


def varlen_gradients(
    runtimes: Mapping[str, Runtimes],
    grads: Tensors,
    saved: Tensors,
    settings: Sequence[Any],
    needed: Sequence[bool],
) -> Tensors:
    """dQ, dK, dV and the gradient of the sinks on a GPU, as ``attention_backward.gradients`` has them.

    Args:
        saved: what the forward saved.
        settings: but for max_seqlens.
    """
    q, k, v, cu_q, cu_k, sinks, o, lse = saved
    own, dense = (runtimes[name].of(q, "q") for name in BACKWARD)
    assert own is not None and dense is not None
    plan_of = partial(backward_plan, own, cu_q.shape[0] - 1)
    starts = cu_q.contiguous(), cu_k.contiguous()
    given = varlen_settings(*settings)
    return gradients(dense, grads, (q, k, v, sinks, o, lse), given, needed, plan_of, *starts)


def varlen_settings(
    scale: float, left: int, right: int, softcap: float, deterministic: bool = False
) -> Settings:
    """Of the op's settings but for max_seqlens."""
    return Settings(scale, left, right, softcap, VARLEN, deterministic)


class TilesPlan:
    """A forward with a program a tile, for all calls with tensors like these."""

    def __init__(
        self, on: OpOn, q: Tensor, k: Tensor, v: Tensor, sequences: int, settings: tuple[Any, ...]
    ) -> None:
        shape, bound = varlen_sizes(q, k, settings)
        loaded = on.kernels[f"{FORWARD}_tiles"]((q.dtype, padded_head_dim(shape.dim), True), shape.len_k)
        tiles = tiles_of(shape.len_q, loaded.numbers["block_m"], sequences)
        self._on, self._loaded = on, loaded
        self._programs = checked_tiles(shape, tiles)
        self._flag = device_errors.flag(NAME)
        self._tokens = shape.len_q, shape.len_k
        o = torch.empty(q.shape, dtype=q.dtype, device="meta")
        self._numbers = (
            *token_strides(o, q, k, v),
            *scales_of(bound),
            tiles,
            shape.heads // shape.kv_heads,
            shape.dim,
            sequences,
            *self._tokens,
            *varlen_bounds(shape, bound),
        )
        self._lse_shape = (shape.heads, shape.len_q)

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
            cu_seqlens_q.data_ptr(),
            cu_seqlens_k.data_ptr(),
            self._flag,
            *self._numbers,
            # a length past the tokens is reported all the same
            min(max_seqlen_q, self._tokens[0]),
            min(max_seqlen_k, self._tokens[1]),
        )
        return o, lse


class WarpSpecializedPlan:
    """A forward with tensor maps by one variant, for all calls with tensors like these."""

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
        shape, bound = varlen_sizes(q, k, settings)
        numbers = loaded.numbers
        tiles = checked_tiles(
            shape, tiles_of(shape.len_q, WARP_GROUP_ROWS * numbers["warp_groups"], sequences)
        )
        scale, _ = scales_of(bound)
        right, _ = varlen_bounds(shape, bound)
        self._on, self._loaded = on, loaded
        self._others = sequences, settings
        self._tiles: TilesPlan | None = None
        self._programs = min(tiles, on.multiprocessors * loaded.variant.resident)
        self._flag = device_errors.flag(NAME)
        self._tokens = shape.len_q, shape.len_k
        self._numbers = (
            scale,
            tiles,
            shape.heads,
            shape.heads // shape.kv_heads,
            keys_in_l2(shape.dim, numbers["l2_megabytes"], q.element_size()),
            sequences,
            *self._tokens,
            right,
        )
        assert on.tensor_map is not None
        o = torch.empty(q.shape, dtype=q.dtype, device="meta")
        named = (("Q", q), ("K", k), ("V", v), ("Y", o))
        self._maps = tuple(
            TensorMapCache(on.tensor_map, loaded, name, map_operand(t), "bhsd").at for name, t in named
        )
        self._before = tuple(bytes_before(t) for _, t in named)
        self._lse_shape = (shape.heads, shape.len_q)
        self._counters = on.workspace("counters", q.device)

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
            self._tiles = self._tiles or TilesPlan(on, q, k, v, *self._others)
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
            self._counters.on(stream, COUNTER_WORDS).data_ptr(),
            *self._numbers,
            # a length past the tokens is reported all the same
            min(max_seqlen_q, self._tokens[0]),
            min(max_seqlen_k, self._tokens[1]),
        )
        return o, lse


class ByLengthPlan:
    """A forward with tensor maps, for all calls with tensors like these: max_seqlen_k chooses the variant."""

    def __init__(self, on: OpOn, key: tuple[Any, ...], sequences: int, settings: tuple[Any, ...]) -> None:
        self._on, self._key, self._others = on, key, (sequences, settings)
        self._by_length: dict[int, WarpSpecializedPlan] = {}
        self._by_variant: dict[Loaded, WarpSpecializedPlan] = {}

    def __call__(self, *call: Any) -> tuple[Tensor, Tensor]:
        return (self._by_length.get(call[-1]) or self._plan(*call))(*call)

    def _plan(self, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> WarpSpecializedPlan:
        max_seqlen_k: int = others[-1]
        loaded = self._on.kernels[FORWARD](self._key, max_seqlen_k)
        if loaded not in self._by_variant:
            self._by_variant[loaded] = WarpSpecializedPlan(loaded, self._on, q, k, v, *self._others)
        return remember(self._by_length, max_seqlen_k, self._by_variant[loaded])


def plan_for(
    on: OpOn, q: Tensor, k: Tensor, v: Tensor, sequences: int, settings: tuple[Any, ...]
) -> ByLengthPlan | TilesPlan:
    """The plan of calls with tensors like these: with tensor maps where the pack has such kernels and the driver
    encodes maps, but for a left bound or a soft cap."""
    _, bound = varlen_sizes(q, k, settings)
    key = q.dtype, padded_head_dim(q.shape[-1]), "causal" if bound.right >= 0 else "full", True
    served = on.tensor_map is not None and FORWARD in on.kernels and on.kernels[FORWARD].serves(key)
    if served and bound.left < 0 and not bound.softcap:
        return ByLengthPlan(on, key, sequences, settings)
    return TilesPlan(on, q, k, v, sequences, settings)


def keys_in_l2(dim: int, megabytes: int, element_bytes: int) -> int:
    """Keys of one head that fit into so much of L2 with their values."""
    return (megabytes << 20) // (2 * dim * element_bytes)


OP = FlashAttentionVarlen
