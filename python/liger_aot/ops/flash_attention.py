"""Flash attention: softmax(Q K^T scale) V without the matrix of scores.

Dao et al., FlashAttention (2022); Dao, FlashAttention-2 (2023); Shah et al., FlashAttention-3 (2024).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_aot.attention import ADDRESS_UNIT, Settings, bounded, fitted, plan_for, shape_of, unit_of
from liger_aot.differentiable import DifferentiableOp, Tensors
from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.op import Problem, check_same_device, check_tensor
from liger_aot.runtime import REMEMBERED

LARGEST_DIM = 256
LAYOUTS = ("bshd", "bhsd")


class FlashAttention(DifferentiableOp):
    """``flash_attention(q, k, v, *, causal=False, ...) -> Tensor``: attention of every query to the keys it may see.

    Exact, with float32 scores and sums; the matrix of scores is never in memory. On GPUs there is a forward alone so
    far: a call that needs a gradient raises. Works under torch.compile and, after ``preload`` and one call, in CUDA
    graphs. CPU tensors take the plain-torch reference, with gradients.

    Args:
        q: (batch, length, heads, dim) bfloat16 or float16, (batch, heads, length, dim) with layout "bhsd". Any strides
            but the last, which must be 1. Tensors whose rows don't start at multiples of 16 bytes (on sm80 and AMD: of
            16 elements, as dim) are copied.
        k, v: (batch, length, heads, dim) of q's dtype; heads divide q's (grouped and multi-query attention), the length
            may be another. dim is up to 256; it runs at the speed of the next of 64, 96, 128, 192 and 256.
        causal: a query sees no key after its own position, where the last query stands at the last key.
        scale: of the scores, above 0. Default 1 / sqrt(dim).
        window: (left, right): a query sees so many keys before and after its own position. None is no bound.
        softcap: above 0: scores become softcap * tanh(score / softcap). tanh is the GPU's approximation (2^-11).
        sinks: (heads,) bfloat16, float16 or float32, or None: for each head of q the score of one more key, whose value
            is 0.
        layout: "bshd" or "bhsd".
        return_lse: also return the logarithm of each query's sum.

    Returns:
        a contiguous tensor of q's shape and dtype; with ``return_lse`` also (batch, heads, length) float32. A query
        that sees no key gives zeros, and -inf without a sink.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: a shape, stride, device or setting is not allowed; a gradient is needed on a GPU.
        PackNotFound: no installed pack serves the GPU.
    """

    name = "flash_attention"
    tensors = ("q", "k", "v", "sinks?")
    settings = ("float scale", "int left", "int right", "float softcap", "str layout")
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
        return_lse: bool = False,
    ) -> Any:
        if scale is None:
            check_tensor(self.name, "q", q)
            scale = 1.0 / math.sqrt(q.shape[-1]) if q.dim() and q.shape[-1] else 1.0
        left, right = _bounds(window)
        if causal:
            right = 0
        o, lse = self.differentiable((q, k, v, sinks), (scale, left, right, softcap, layout))
        return (o, lse) if return_lse else o

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        q, k, v, sinks = tensors
        scale, _, _, softcap, layout = settings
        if layout not in LAYOUTS:
            raise ArgumentError(f"{self.name}: layout must be 'bshd' or 'bhsd', got {layout!r}")
        for name, value in (("scale", scale), ("softcap", softcap)):
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise ArgumentTypeError(f"{self.name}: {name} must be a number, got {type(value).__name__}")
        if not 0 < scale < math.inf:
            raise ArgumentError(f"{self.name}: scale must be above 0 and finite, got {scale}")
        if not 0 <= softcap < math.inf:
            raise ArgumentError(f"{self.name}: softcap must be 0 (none) or above and finite, got {softcap}")
        for name, t in (("q", q), ("k", k), ("v", v)):
            self._check_operand(name, t, q)
        self._check_shapes(q, k, v, layout)
        if sinks is not None:
            check_tensor(self.name, "sinks", sinks)
            check_same_device(self.name, "sinks", sinks, "q", q)
            heads = shape_of(q, k, layout).heads
            if sinks.shape != (heads,):
                raise ArgumentError(
                    f"{self.name}: sinks must be of shape ({heads},), one a head of q; got {tuple(sinks.shape)}"
                )

    def _check_operand(self, name: str, t: Any, q: Tensor) -> None:
        check_tensor(self.name, name, t)
        if t.dim() != 4:
            raise ArgumentError(f"{self.name}: {name} must have 4 dimensions, got shape {tuple(t.shape)}")
        if t.shape[-1] > 1 and t.stride(-1) != 1:
            raise ArgumentError(
                f"{self.name}: the last dimension of {name} must be contiguous, got strides {t.stride()}"
            )
        if t is not q:
            check_same_device(self.name, name, t, "q", q)
            if t.dtype != q.dtype:
                raise ArgumentTypeError(f"{self.name}: {name} must be of q's dtype {q.dtype}, got {t.dtype}")

    def _check_shapes(self, q: Tensor, k: Tensor, v: Tensor, layout: str) -> None:
        shape = shape_of(q, k, layout)
        if not 1 <= shape.dim <= LARGEST_DIM:
            raise ArgumentError(
                f"{self.name}: the last dimension of q must be 1 to {LARGEST_DIM}, got {shape.dim}"
            )
        if k.shape[0] != shape.batch or k.shape[-1] != shape.dim:
            raise ArgumentError(
                f"{self.name}: k has shape {tuple(k.shape)}, q {tuple(q.shape)}: batch and last dimension must agree"
            )
        if v.shape != k.shape:
            raise ArgumentError(f"{self.name}: v must have k's shape {tuple(k.shape)}, got {tuple(v.shape)}")
        if (shape.kv_heads == 0) != (shape.heads == 0) or (shape.heads and shape.heads % shape.kv_heads):
            raise ArgumentError(
                f"{self.name}: the heads of q ({shape.heads}) must be a multiple of those of k ({shape.kv_heads})"
            )

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        q, k, v, sinks = tensors
        try:
            plan = self._plans.get(_key(q, k, v, sinks, settings))
        except (AttributeError, TypeError):  # not tensors, or settings that are no numbers: the checks say so
            plan = None
        if plan is None or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ADDRESS_UNIT:
            return self.prepare_forward(tensors, settings, keep, out)
        if keep:
            raise ArgumentError(
                f"{self.name}: a gradient is needed, and there is no backward on GPUs yet: call it under "
                "torch.no_grad(), or with tensors that do not require a gradient"
            )
        found: Tensors = plan(q, k, v, sinks)
        return found

    def prepare_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        self.check(tensors, settings)
        q, k, v, sinks = tensors
        if self.on_reference(tensors):
            with torch.no_grad():
                return self.laid_out(self.reference(*tensors, *settings))
        on = self._own.of(q, "q")
        assert on is not None
        unit = unit_of(on)
        dim, q, k, v = q.shape[-1], fitted(q, unit), fitted(k, unit), fitted(v, unit)
        sinks = None if sinks is None else sinks.float().contiguous()
        key = _key(q, k, v, sinks, settings)
        if key not in self._plans:
            if len(self._plans) >= REMEMBERED:
                self._plans.clear()
            self._plans[key] = plan_for(on, q, k, v, Settings(*settings))
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
        return self.prepare_backward(grads, saved, settings, needed)  # the CPU's: a GPU's forward has refused

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        """Of a call without a mask and of a causal one; an architecture without warp groups has one for both."""
        if not 1 <= shape[-1] <= LARGEST_DIM:
            raise ArgumentError(
                f"{self.name}: the last dimension of q must be 1 to {LARGEST_DIM}, got {shape[-1]}"
            )
        kernels = tuple(f"flash_attention_forward{kind}" for kind in ("", "_causal", "_tiles"))
        return tuple(Problem(kernel, (dtype,), True, shape[-1]) for kernel in kernels)

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
    ) -> tuple[Tensor, Tensor]:
        settings = Settings(scale, left, right, softcap, layout)
        a, _, c, scores, _ = _scores(q, k, v, settings)
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
    ) -> Tensors:
        q, k, v, sinks, o, lse = saved
        do, dlse = grads
        settings = Settings(scale, left, right, softcap, layout)
        a, b, c, scores, slope = _scores(q, k, v, settings)
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
            share = torch.exp(sinks.to(wide)[:, None] - lse.to(wide))
            dsinks = -(share * delta).sum((0, 2)).to(sinks.dtype)
        return dq, dk, dv, dsinks


def _scores(
    q: Tensor, k: Tensor, v: Tensor, settings: Settings
) -> tuple[Tensor, Tensor, Tensor, Tensor, Any]:
    """Q, K and V in the wider dtype with all of q's heads, the masked scores, and by how much a capped score follows
    the one before the cap."""
    wide = torch.promote_types(q.dtype, torch.float32)
    shape = shape_of(q, k, settings.layout)
    settings = bounded(shape, settings)
    a, b, c = (t.to(wide).transpose(1, 2) if settings.layout == "bshd" else t.to(wide) for t in (q, k, v))
    if shape.kv_heads != shape.heads:
        b, c = (t.repeat_interleave(shape.heads // shape.kv_heads, 1) for t in (b, c))
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
    return a, b, c, scores, slope


def _bounds(window: Any) -> tuple[int, int]:
    """(left, right) of a window, -1 for none."""
    if window is None:
        return -1, -1
    bounds = []
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ArgumentTypeError(f"flash_attention: window must be (left, right), got {window!r}") from None
    for bound in (left, right):
        if bound is not None and (type(bound) is not int or bound < -1):
            raise ArgumentError(
                f"flash_attention: window must be two numbers of keys, or None for no bound; got {window!r}"
            )
        bounds.append(-1 if bound is None else bound)
    return bounds[0], bounds[1]


def _key(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, settings: tuple[Any, ...]) -> tuple[Any, ...]:
    """All that a plan depends on; addresses apart."""
    extra = None if sinks is None else (sinks.shape, sinks.stride(), sinks.dtype, sinks.device)
    return (
        q.shape, q.stride(), q.dtype, q.device,
        k.shape, k.stride(), k.dtype, k.device,
        v.shape, v.stride(), v.dtype, v.device,
        extra, settings,
    )  # fmt: skip


OP = FlashAttention
