"""Gradients of attention against float64, with a limit for every element that follows from the roundings on its way."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from liger_aot.ops.attention._operands import Settings
from liger_aot.ops.attention.flash_attention import FlashAttention, _scores
from tests.harness.tolerances import LEAST, NAMES, UNIT_ROUNDOFF
from tests.ops.attention.attention_cases import FP16, SMALL, Problem, far_behind

# With those of the forward: every row of the capped tables, and windows that leave keys unseen.
SMALL_GRADIENTS = (
    *SMALL,
    Problem(1, 1, 1, 30, 40, 64, softcap=3.0),
    Problem(1, 2, 1, 30, 40, 64, FP16, causal=True, softcap=3.0),
    Problem(1, 1, 1, 20, 40, 96, FP16, softcap=3.0),
    Problem(1, 1, 1, 20, 40, 128, causal=True, softcap=3.0, sinks=True),
    Problem(1, 1, 1, 20, 40, 128, FP16, softcap=3.0),
    Problem(1, 1, 1, 20, 40, 192, softcap=3.0),
    Problem(1, 1, 1, 20, 40, 192, FP16, softcap=3.0),
    Problem(1, 1, 1, 20, 40, 256, softcap=3.0),
    Problem(1, 1, 1, 20, 40, 96),
    Problem(1, 1, 1, 20, 40, 256, FP16, causal=True),
    Problem(2, 4, 2, 9, 200, 64, window=(20, 5), sinks=True),
    Problem(1, 2, 1, 200, 9, 32, FP16, window=(3, 2)),
)


def check_gradients(
    op: Any, problem: Problem, allowed: Mapping[str, float], *, seed: int = 0, device: str = "cpu"
) -> None:
    """Through autograd, with a gradient of lse at every second seed."""
    q, k, v, sinks = problem.tensors(seed, device)
    leaves = [t.requires_grad_() for t in (q, k, v, sinks) if t is not None]
    o, lse = op(q, k, v, **problem.keywords(sinks))
    generator = torch.Generator(device).manual_seed(seed + 1)
    do = torch.randn(o.shape, device=device, generator=generator).to(o.dtype)
    dlse = torch.randn(lse.shape, device=device, generator=generator) if seed % 2 else None
    outputs, given = ((o, lse), (do, dlse)) if dlse is not None else ((o,), (do,))
    found = torch.autograd.grad(outputs, leaves, given)  # type: ignore[arg-type]
    for g, leaf in zip(found, leaves, strict=True):
        assert g.is_contiguous() and g.shape == leaf.shape and g.dtype == leaf.dtype
    tensors = tuple(None if t is None else t.detach() for t in (q, k, v, sinks))
    worst = gradient_errors(found, tensors, do, dlse, problem, allowed, approximate=device == "cuda")
    assert max(worst.values()) <= 1, f"{problem}, seed {seed}: errors as fractions of what is allowed {worst}"


# float16's normal numbers end at 2^-14: all of P and dS but the first key's are subnormal, or dY is and dP with it.
FAINT = ((9.75, 1.0), (12.0, 1.0), (1.0, 2.0**-16), (12.0, 2.0**-16))


def faint_errors(
    run: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]],
    gap: float,
    size: float,
    allowed: Mapping[str, float],
    device: str = "cpu",
) -> dict[str, float]:
    """``gradient_errors`` of ``far_behind`` in float16 with a gradient of ``size``: ``run`` takes q, k, v and do.

    The keys far behind also have a component that does not change scores: all of dq there comes from their dS.
    """
    problem, (q, k, v, _) = far_behind(gap, FP16, device)
    k[:, 1:, :, 1] = 1.0
    do = torch.full_like(q, size)
    found = run(q, k, v, do)
    return gradient_errors(found, (q, k, v, None), do, None, problem, allowed, approximate=device == "cuda")


def gradient_errors(
    found: tuple[Tensor, ...],
    tensors: tuple[Any, ...],
    do: Tensor,
    dlse: Tensor | None,
    problem: Problem,
    allowed: Mapping[str, float],
    *,
    approximate: bool,
    sums: Any = None,
) -> dict[str, float]:
    """The largest error of each gradient as a fraction of what is allowed; NaN counts as infinite.

    P is exp of a score less lse, whose absolute errors are its relative one. P and dS are rounded to the dtype before
    they are multiplied; so was o, from which delta = sum(do o) comes. All else is summed in float32.
    ``approximate``: the forward's tanh, from which lse comes, is off by 2^-10.7. ``sums``: what the gradient of the
    sinks and its limit are added to, where ``found`` is of a part of what shares them.
    """
    dtype = do.dtype
    unit = allowed[NAMES[dtype]] * UNIT_ROUNDOFF[dtype]
    fp32, least = allowed["fp32"] * UNIT_ROUNDOFF[torch.float32], LEAST[dtype]
    settings = Settings(*problem.settings())
    swap = problem.layout == "bshd"
    q, k, v, sinks = (None if t is None else t.double() for t in tensors)
    wanted_o, lse = FlashAttention.reference(q, k, v, sinks, *settings)
    size, _ = FlashAttention.reference(q, k, v.abs(), sinks, *settings)
    wide = None if dlse is None else dlse.double()
    wanted = FlashAttention.reference_backward(
        (do.double(), wide), (q, k, v, sinks, wanted_o, lse), *settings
    )
    g, o, size = (t.double().transpose(1, 2) if swap else t.double() for t in (do, wanted_o, size))
    a, b, c, scores, slope = _scores(q, k, v, settings)

    norms = (float(t.norm(dim=-1).max()) if t.numel() else 0.0 for t in (a, b))
    terms = 1.0 + settings.scale * math.prod(norms)
    score = fp32 * terms + (problem.softcap * 2.0**-10.7 if approximate else 0.0)
    seen = torch.isfinite(lse)
    lse = torch.where(seen, lse, 0.0)
    p = torch.where(seen[..., None], torch.exp(scores - lse[..., None]), 0.0)
    relative = (score * (2 + lse.abs()))[..., None]
    delta = (g * o).sum(-1)
    delta_error = ((unit * (o.abs() + size) + 2 * score * size + fp32 * o.abs()) * g.abs()).sum(-1)
    if wide is not None:
        delta = delta - torch.where(seen, wide, 0.0)
        delta_error = delta_error + fp32 * wide.abs()
    inner = (g @ c.mT - delta[..., None]).abs()
    inner_error = fp32 * (g.abs() @ c.abs().mT) + delta_error[..., None]
    p_error = p * (relative + unit) + least
    ds = p * inner * slope
    ds_error = p * slope * ((relative + fp32) * inner + inner_error) + (unit + fp32) * ds + least
    if problem.softcap:
        ds_error = ds_error + p * inner * 2 * fp32 * terms
    limits = [
        settings.scale * (ds_error @ b.abs()),
        settings.scale * (ds_error.mT @ a.abs()),
        p_error.mT @ g.abs() + fp32 * (p.mT @ g.abs()),
    ]
    for i in (1, 2):
        limits[i] = limits[i].unflatten(1, (problem.kv_heads, problem.heads // problem.kv_heads)).sum(2)
    limits = [limit.transpose(1, 2) if swap else limit for limit in limits]
    if sinks is not None:
        share = torch.where(seen, torch.exp(sinks[:, None] - lse), 0.0)
        added = share * ((relative[..., 0] + fp32) * delta.abs() + delta_error)
        limits.append(added.sum((0, 2)))
        if sums is not None:
            sums.add(wanted[3], limits[3] + fp32 * wanted[3].abs())
    worst = {}
    for name, got, exact, limit in zip(("dq", "dk", "dv", "dsinks"), found, wanted, limits, strict=False):
        last = fp32 if name == "dsinks" else unit  # sinks are float32
        ratio = (got.double() - exact).abs() / (limit + last * exact.abs() + least)
        worst[name] = float(torch.where(torch.isnan(ratio), torch.inf, ratio).max()) if got.numel() else 0.0
    return worst
