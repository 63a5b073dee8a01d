"""Cross entropy's problems, its formula by torch's own function in float64, and how far results may lie off."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from liger_aot.ops.differentiable import Tensors
from tests.harness.op_tests import BF16, FP16, FP32, Case, Draw, Exact

IGNORED = -100
DEFAULTS: Mapping[str, Any] = {
    "ignore_index": IGNORED,
    "label_smoothing": 0.0,
    "lse_square_scale": 0.0,
    "softcap": 0.0,
    "reduction": "mean",
    "return_z_loss": False,
    "return_token_accuracy": False,
    "return_predicted_tokens": False,
}
EVERYTHING: Mapping[str, Any] = {
    "weight": FP32,
    "label_smoothing": 0.1,
    "lse_square_scale": 0.01,
    "softcap": 5.0,
}
CASES = (
    Case((3, 5, 48), BF16, weight=FP32),
    Case((1, 1), BF16),
    Case((7, 1), FP32, reduction="sum"),
    Case((48,), FP32),
    Case((5, 37), FP16, index=torch.int32, reduction="none"),
    Case((2, 3, 1000), FP32, reduction="sum", lse_square_scale=0.01),
    Case((4, 17), BF16, shift=3, reduction="none", weight=BF16),
    Case((5, 48), BF16, gap=16, label_smoothing=0.2),
    Case((3, 1040), FP16, gap=5, weight=FP32, lse_square_scale=-0.02, reduction="none"),
    Case((4, 1104), BF16, size=30.0, index=torch.int32),
    Case((5, 2003), FP32, ignored=1, reduction="sum"),
    Case((6, 2003), BF16, ignored=2, ignore_index=5, weight=FP32),
    Case((3, 1203), FP16, label_smoothing=1.0, reduction="none"),
    Case((4, 4211), BF16, shift=5, gap=3, reduction="sum"),
    Case((3, 1056), BF16, reduction="none", **EVERYTHING),
    Case((5, 1201), FP32, ignored=2, **EVERYTHING),
    Case((4, 100), FP16, reduction="sum", softcap=2.0),
)
EMPTY = (Case((0, 16), BF16, reduction="sum"), Case((0, 16), FP32, reduction="none"))


class CrossEntropyCases:
    """Mixed into ``OpTests``."""

    defaults = DEFAULTS
    names = ("loss",)
    frozen = ("weight",)
    relaid = ("logits",)
    order_by_address = True

    def fit(self, case: Case, choose: Callable[[Sequence[Any]], Any]) -> Case:
        """The mean over no target at all is NaN: ``test_all_ignored`` has it."""
        if case.get("ignored") == 1 or case.get("ignore_index", IGNORED) >= 0:
            return case.but(reduction=choose(("sum", "none")))
        return case

    def tensors(self, case: Case, draw: Draw) -> Tensors:
        logits = draw.rows(*case.shape).mul_(case.get("size", 3.0))
        n = case.shape[-1]
        target = draw.integers(n, *case.shape[:-1])
        every = case.get("ignored")
        if every:
            target.view(-1)[every - 1 :: every] = case.get("ignore_index", IGNORED)
        target = target.to(case.get("index", torch.int64))
        weight = None
        if (dtype := case.get("weight")) is not None:
            weight = draw.uniform(0.25, 2.0, n).to(dtype)
        return logits, target, weight

    def draw(self, case: Case, seed: int, device: str) -> tuple[Tensors, tuple[Any, ...], tuple[Tensor, ...]]:
        draw = Draw(case, torch.Generator(device).manual_seed(seed))
        tensors, settings = self.tensors(case, draw), self.settings(case)  # type: ignore[attr-defined]
        shape = case.shape[:-1] if settings[4] == "none" else ()
        return tensors, settings, (draw.uniform(-2.0, 2.0, *shape),)

    def formula(self, logits: Tensor, target: Tensor, weight: Tensor | None, *settings: Any) -> Tensor:
        ignore_index, smoothing, z_scale, softcap, reduction, *_ = settings
        n, counts = logits.shape[-1], target != ignore_index
        x = softcap * torch.tanh(logits / softcap) if softcap else logits
        loss = functional.cross_entropy(
            x.reshape(-1, n),
            target.long().reshape(-1),
            weight,
            ignore_index=ignore_index,
            label_smoothing=smoothing,
            reduction=reduction,
        )
        z = torch.where(counts, z_scale * torch.logsumexp(x, -1) ** 2, 0.0)
        if reduction == "none":
            return loss.view(target.shape) + z
        return loss + (z.sum() / counts.sum() if reduction == "mean" else z.sum())

    def limits(self, exact: Exact) -> Mapping[str, Mapping[str, Any]]:
        """What is added: lse and logits in the loss; in the gradient the three terms of the formula, of which the first
        has a power whose exponent is rounded at its own size, and which is flushed to zero before it is multiplied."""
        logits, target, weight = exact.inputs.values()
        if not logits.numel():
            return {}
        ignore_index, s, z_scale, softcap, reduction, *_ = exact.settings.values()
        n, counts, lse = logits.shape[-1], target != ignore_index, exact.results[4][0]
        x = (softcap * torch.tanh(logits / softcap) if softcap else logits).abs()
        w = torch.ones(n, dtype=x.dtype, device=x.device) if weight is None else weight
        at = torch.where(counts, target, 0).long()
        w_t, x_t = w[at], x.gather(-1, at.unsqueeze(-1)).squeeze(-1)
        rows = (1 - s) * w_t * (lse.abs() + x_t) + abs(z_scale) * lse * lse
        rows = rows + s / n * (w.sum() * lse.abs() + (w * x).sum(-1))
        rows = torch.where(counts, rows, 0.0)
        scale, z_of = exact.grads[0].abs(), exact.grads[0].abs()
        if reduction == "mean":
            weights, count = exact.results[5]
            rows, scale, z_of = rows.sum() / torch.minimum(weights, count), scale / weights, z_of / count
        elif reduction == "sum":
            rows = rows.sum()
        scale, z_of = (v.expand(lse.shape) for v in (scale, z_of))
        capped = softcap * torch.tanh(logits / softcap) if softcap else logits
        p = torch.exp(capped - lse.unsqueeze(-1))
        a = scale * ((1 - s) * w_t + s / n * w.sum()) + z_of * 2 * abs(z_scale) * lse.abs()
        terms = p * a.unsqueeze(-1) * (1 + (capped.abs() + lse.abs().unsqueeze(-1)) / 8)
        terms = terms + (scale * s / n).unsqueeze(-1) * w
        terms = terms.scatter_add(-1, at.unsqueeze(-1), ((1 - s) * w_t * scale).unsqueeze(-1))
        terms = torch.where(counts.unsqueeze(-1), terms, 0.0)
        return {"loss": {"magnitude": rows}, "dlogits": {"magnitude": terms, "scale": 1 + a.unsqueeze(-1)}}
