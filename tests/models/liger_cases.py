"""Calls of Liger's functions and the same in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import liger_aot
from liger_aot.liger.functions import COVERED


def ours(name: str) -> Any:
    """What stands for a name of Liger's."""
    return COVERED[name][0]


def rms(x: Tensor, w: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if w is None else y * (w + offset)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Of (batch, heads, tokens, D), the first columns."""
    turned, kept = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    a, b = turned.chunk(2, -1)
    return torch.cat((turned * cos.unsqueeze(-3) + torch.cat((-b, a), -1) * sin.unsqueeze(-3), kept), -1)


def multimodal(x: Tensor, cos: Tensor, sin: Tensor, sections: list[int]) -> Tensor:
    columns = torch.repeat_interleave(torch.arange(3), torch.tensor(sections)).repeat(2)
    cos, sin = (
        t.movedim(0, -1).gather(-1, columns.expand(t.shape[1:]).unsqueeze(-1)).squeeze(-1) for t in (cos, sin)
    )
    return rotate(x, cos, sin)


def poly(x: Tensor, w: Tensor, b: Tensor, eps: float = 1e-6) -> Tensor:
    return w[0] * rms(x**3, None, eps) + w[1] * rms(x**2, None, eps) + w[2] * rms(x, None, eps) + b


def cross_entropy(
    x: Tensor, t: Tensor, weight: Tensor | None, ignore: int, lse: float, smoothing: float, reduction: str,
    softcap: float | None, *returns: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    kept = t != ignore
    z = lse * torch.logsumexp(x, -1).square()
    z = (z * kept).sum() / kept.sum() if reduction == "mean" else (z * kept).sum()
    best = x.argmax(-1)
    loss = (
        F.cross_entropy(x, t, weight, ignore_index=ignore, reduction=reduction, label_smoothing=smoothing) + z
    )
    others = (z, (best == t)[kept].float().mean(), torch.where(kept, best, -1))
    return loss, *(o if ask else None for o, ask in zip(others, returns, strict=True))


def grpo_arguments(
    loss_type: str,
    reduce: bool,
    level: str,
    most: int | None = None,
    beta: float = 0.1,
    given: float | None = None,
) -> tuple[Any, ...]:
    """Of ``GrpoLossFunction``."""
    logits, ids = randn(2, 6, 11), torch.randint(0, 11, (2, 5))
    old, ref = torch.randn(2, 5) / 4 - 2.4, torch.randn(2, 5) / 4 - 2.4
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    advantages, ratio = torch.tensor([0.7, -1.3]), torch.rand(2, 5) + 0.5
    return (
        logits, old, ref if beta else None, ids, advantages, mask, 0.9, beta, 0.2, 0.3, True, loss_type, most, reduce,
        level, 1.0, 1.05, ratio, 1.7, False, given,
    )  # fmt: skip


def grpo(
    logits: Tensor, old: Tensor, ref: Tensor | None, ids: Tensor, advantages: Tensor, mask: Tensor, temperature: float,
    beta: float, low: float, high: float, _inplace: bool, loss_type: str, most: int | None, reduce: bool, level: str,
    _pos: float, _neg: float, ratio: Tensor, delta: float, _corrected: bool, given: float | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """TRL's losses that clip on both sides."""
    logp = (logits[:, :-1] / temperature).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    logs, tokens = logp - old, mask.sum(-1, keepdim=True)
    if level == "sequence":
        logs = ((logs * mask).sum(-1, keepdim=True) / tokens).expand(mask.shape)
    weight, a = logs.exp(), advantages.unsqueeze(-1)
    loss = -torch.min(weight.clamp(max=delta) * a, weight.clamp(1 - low, 1 + high) * a) * ratio
    clipped = (((weight < 1 - low) & (a < 0)) | ((weight > 1 + high) & (a > 0))) * mask.float()
    kl = None
    if ref is not None:
        kl = ((ref - logp).exp() - (ref - logp) - 1) * mask
        loss = loss + beta * kl
        kl = kl.detach()
    loss = loss * mask
    if not reduce:
        return loss, kl, clipped
    by = {
        "grpo": 1 / (tokens * len(mask)), "dr_grpo": 1 / (len(mask) * (most or mask.shape[1])),
        "dapo": 1 / (given or mask.sum()), "luspo": tokens / mask.numel(),
    }[loss_type]  # fmt: skip
    return (loss * by).sum(), None if kl is None else kl.sum() / mask.sum(), clipped.sum() / mask.sum()


def experts(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    gate, up = torch.einsum("th,tkih->tki", x, gate_up[chosen]).chunk(2, -1)
    return torch.einsum("tki,tkhi,tk->th", F.silu(gate) * up, down[chosen], weights)


def jsd(x: Tensor, y: Tensor, labels: Tensor | None, beta: float, ignore: int) -> Tensor:
    """Of log-probabilities, a mean over the rows that count."""
    p, q = y.exp(), x.exp()
    m = (beta * p + (1 - beta) * q).log()
    rows = (beta * p * (y - m) + (1 - beta) * q * (x - m)).sum(-1)
    kept = torch.ones_like(rows, dtype=torch.bool) if labels is None else labels != ignore
    return rows[kept].sum() / kept.sum()


def multi_token(x: Tensor, w: Tensor, b: Tensor | None, *rest: Any, sparse: bool = False) -> Tensor:
    """``rest``: stride, padding, dilation and groups of the convolution."""
    seen = torch.ones(x.shape[-2:], device=x.device).tril().bool()
    p = x.masked_fill(~seen, -1e9)
    mixed = F.conv2d(liger_aot.load("sparsemax")(p) if sparse else p.softmax(-1), w, b, *rest)
    return mixed.masked_fill(~seen, 0)


def neighbours(
    q: Tensor, k: Tensor, v: Tensor, size: int = 7, dilation: int = 1, scale: float | None = None
) -> Tensor:
    at = torch.arange(q.shape[2], device=q.device)
    apart = at - at[:, None]
    seen = (apart.abs() <= size // 2 * dilation) & (apart % dilation == 0)
    return F.scaled_dot_product_attention(q, k, v, seen, scale=scale)


def mlp(x: Tensor, g: Tensor, u: Tensor, d: Tensor, by_gate: float = 1.0, by_down: float = 1.0) -> Tensor:
    return (F.silu(x @ g.t() * by_gate) * (x @ u.t())) @ d.t() * by_down


def scaled_cross_entropy(
    x: Tensor, w: Tensor, t: Tensor, temperature: float, ignore: int, _: int, entropy: bool, selected: Tensor
) -> tuple[Tensor, ...]:  # fmt: skip
    log_p = (x @ w.t() / temperature).log_softmax(-1)
    kept = t != ignore
    chosen = log_p.gather(-1, torch.where(kept, t, 0)[:, None])[:, 0]
    return (
        torch.where(kept, -chosen, 0),
        torch.where(kept, -(log_p.exp() * log_p).sum(-1), 0),
        torch.where(kept[:, None], log_p[:, selected], 0),
    )


@dataclass(frozen=True)
class Case:
    """A call: its arguments (those that require gradients are compared), and the same in plain torch."""

    name: str
    arguments: Callable[[], tuple[Any, ...]]
    plain: Callable[..., Any]


def mhc_coefficients(
    x: Tensor, phi: Tensor, b: Tensor, pre: Tensor, post: Tensor, res: Tensor, _: bool, tmax: int, eps: float,
    pre_eps: float, sinkhorn_eps: float, post_mult: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    streams = x.shape[-2]
    mix = rms(x.flatten(-2), None, eps) @ phi
    parts = mix.split((streams, streams, streams * streams), -1)
    biases = b.split((streams, streams, streams * streams))
    pre, post, res = (m * a + c for m, a, c in zip(parts, (pre, post, res), biases, strict=True))
    h = res.unflatten(-1, (streams, streams)).softmax(-1) + sinkhorn_eps
    for dim in (-2, *((-1, -2) * (tmax - 1))):
        h = h / (h.sum(dim, keepdim=True) + sinkhorn_eps)
    return pre.sigmoid() + pre_eps, post.sigmoid() * post_mult, h


def attention_residuals(v: Tensor, query: Tensor, norm: Tensor, eps: float) -> Tensor:
    return ((rms(v, norm, eps) @ query).softmax(0).unsqueeze(-1) * v).sum(0)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def labels(n: int, classes: int) -> Tensor:
    t = torch.randint(0, classes, (n,))
    t[::4] = -100
    return t


def angles(*shape: int) -> tuple[Tensor, Tensor]:
    angle = torch.rand(*shape[:-1], shape[-1] // 2) * 6
    angle = torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


CASES = [
    Case(
        "LigerRMSNormFunction",
        lambda: (randn(2, 5, 24), randn(24), 1e-6, 1.0, "gemma", False),
        lambda x, w, e, o, *_: rms(x, w, e, o),
    ),
    Case("LigerRMSNormFunction", lambda: (randn(7, 24), None, 1e-6), rms),
    Case(
        "LigerRMSNormFunction",
        lambda: (randn(7, 24), randn(24), 1e-5, 0.0, 0),
        lambda x, w, e, *_: rms(x, w, e),
    ),
    Case(
        "LigerFusedAddRMSNormFunction",
        lambda: (randn(7, 24), randn(7, 24), randn(24), 1e-6, 1.0, "none", True),
        lambda x, r, w, e, o, *_: (rms(x + r, w, e, o), x + r),
    ),
    Case(
        "LigerModulatedRMSNormFunction",
        lambda: (randn(2, 3, 24), randn(24), randn(2, 24), randn(2, 24), 1e-6),
        lambda x, w, s, t, e: rms(x, w, e) * (1 + s[:, None]) + t[:, None],
    ),
    Case(
        "LigerModulatedRMSNormFunction",
        lambda: (randn(6, 24), None, randn(24), None, 1e-6),
        lambda x, w, s, t, e: rms(x, w, e) * (1 + s),
    ),
    Case(
        "LigerLayerNormFunction",
        lambda: (randn(2, 5, 24), randn(24), randn(24), 1e-5),
        lambda x, w, b, e: F.layer_norm(x, (24,), w, b, e),
    ),
    Case(
        "LigerGroupNormFunction",
        lambda: (randn(2, 12, 4, 5), randn(12), randn(12), 12, 3, 1e-5),
        lambda x, w, b, _, g, e: F.group_norm(x, g, w, b, e),
    ),
    Case(
        "LigerPolyNormFunction",
        lambda: (randn(7, 24), randn(3), randn(1), 1e-6, False),
        lambda x, w, b, e, _: poly(x, w, b, e),
    ),
    Case(
        "LigerDyTFunction",
        lambda: (randn(2, 5, 24), randn(1), randn(24), randn(24)),
        lambda x, a, g, b: g * torch.tanh(a * x) + b,
    ),
    Case(
        "LigerDyTFunction",
        lambda: (randn(7, 24), randn(1), randn(24), None),
        lambda x, a, g, b: g * torch.tanh(a * x),
    ),
    Case("LigerSiLUMulFunction", lambda: (randn(2, 5, 24), randn(2, 5, 24)), lambda a, b: F.silu(a) * b),
    Case(
        "LigerSiLUMulFunction",
        lambda: (randn(7, 24), randn(7, 24), 0.5, 3.0),
        lambda a, b, g, d: F.silu(a * g) * b * d,
    ),
    Case(
        "LigerFusedGateUpSiLUMulFunction",
        lambda: (randn(7, 48), False),
        lambda y, _: F.silu(y[:, :24]) * y[:, 24:],
    ),
    Case(
        "LigerGELUMulFunction",
        lambda: (randn(2, 5, 24), randn(2, 5, 24)),
        lambda a, b: F.gelu(a, approximate="tanh") * b,
    ),
    Case("LigerReLUSquaredFunction", lambda: (randn(7, 24),), lambda x: F.relu(x).square()),
    Case(
        "LigerRopeFunction",
        lambda: (randn(2, 4, 5, 16), randn(2, 2, 5, 16), *angles(1, 5, 16)),
        lambda q, k, c, s: (rotate(q, c, s), rotate(k, c, s)),
    ),
    Case(
        "LigerRopeFunction",
        lambda: (randn(2, 4, 5, 16), randn(2, 2, 5, 16), *angles(5, 8), None, 1),
        lambda q, k, c, s, *_: (rotate(q, c, s), rotate(k, c, s)),
    ),
    Case(
        "LigerRopeFunction",
        lambda: (randn(2, 4, 5, 16), randn(2, 2, 5, 16), *(t.unsqueeze(1) for t in angles(2, 5, 16))),
        lambda q, k, c, s: (rotate(q, c[:, 0], s[:, 0]), rotate(k, c[:, 0], s[:, 0])),
    ),
    Case(
        "LigerRopeFunction",
        lambda: (
            randn(2, 4, 5, 16),
            randn(2, 2, 5, 16),
            *(t[..., :8] for t in angles(1, 5, 16)),
            None,
            1,
            16,
        ),
        lambda q, k, c, s, *_: tuple(rotate(t, c.repeat(1, 1, 2), s.repeat(1, 1, 2)) for t in (q, k)),
    ),
    Case(
        "LigerQwen2VLMRopeFunction",
        lambda: (randn(2, 4, 5, 16), randn(2, 2, 5, 16), *angles(3, 2, 5, 16), [2, 3, 3]),
        lambda q, k, c, s, m: (multimodal(q, c, s, m), multimodal(k, c, s, m)),
    ),
    Case(
        "LigerLlama4RopeFunction",
        lambda: (randn(2, 5, 4, 16), randn(2, 5, 2, 16), torch.polar(torch.ones(9, 8), torch.rand(9, 8))),
        lambda q, k, f: tuple(
            torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2))) * f[:5, None]).flatten(-2)
            for t in (q, k)
        ),
    ),
    Case("LigerSoftmaxFunction", lambda: (randn(3, 5, 24),), lambda x: x.softmax(-1)),
    Case(
        "LigerSparsemaxFunction",
        lambda: (randn(24, 5), 0),
        lambda x, d: liger_aot.load("sparsemax")(x.t()).t(),
    ),
    Case(
        "LigerEmbeddingFunction",
        lambda: (randn(9, 24), torch.randint(0, 9, (2, 5))),
        lambda w, i: F.embedding(i, w),
    ),
    Case(
        "LigerFusedMoEFunction",
        lambda: (
            randn(7, 24),
            randn(3, 20, 24),
            randn(3, 24, 10),
            torch.randint(0, 3, (7, 2), dtype=torch.int32),
            torch.rand(7, 2),
        ),
        experts,
    ),
    Case(
        "LigerCrossEntropyFunction",
        lambda: (randn(9, 31), labels(9, 31), None, -100, 0.1, 0.2, "mean", 2.0, True, True, True),
        cross_entropy,
    ),
    Case(
        "LigerCrossEntropyFunction",
        lambda: (
            randn(9, 31) * 1,
            labels(9, 31),
            torch.rand(31),
            -100,
            0.0,
            0.0,
            "sum",
            None,
            False,
            True,
            False,
        ),
        cross_entropy,
    ),
    Case(
        "LigerFusedLinearCrossEntropyFunction",
        lambda: (
            randn(9, 16),
            randn(31, 16),
            labels(9, 31),
            randn(31),
            torch.rand(31),
            -100,
            0.0,
            0.1,
            "mean",
            2.0,
            True,
            None,
            False,
            True,
            True,
        ),
        lambda x, w, t, b, c, i, lse, sm, r, cap, z, _a, _s, acc, pred: cross_entropy(
            x @ w.t() + b, t, c, i, lse, sm, r, cap, z, acc, pred
        ),
    ),
    Case(
        "LigerFusedLinearCrossEntropyFunction",
        lambda: (randn(9, 16), randn(31, 16), labels(9, 31)),
        lambda x, w, t: cross_entropy(x @ w.t(), t, None, -100, 0.0, 0.0, "mean", None, False, False, False),
    ),
    Case(
        "LigerVocabParallelCEFunction",
        lambda: (randn(3, 2, 31), labels(6, 31).view(3, 2), None, -100, 0.1, "pytorch", "global"),
        lambda x, t, _g, i, s, *_: F.cross_entropy(
            x.movedim(-1, 1), t, ignore_index=i, label_smoothing=s, reduction="none"
        ),
    ),
    Case(
        "LigerVocabParallelCEFunction",
        lambda: (randn(3, 2, 31), labels(6, 31).view(3, 2), None, -100, 0.1, "megatron", "partition"),
        lambda x, t, _g, i, s, *_: F.cross_entropy(
            x.movedim(-1, 1), t, ignore_index=i, label_smoothing=s * 31 / 30, reduction="none"
        ),
    ),
    Case("GrpoLossFunction", lambda: grpo_arguments("grpo", True, "sequence"), grpo),
    Case("GrpoLossFunction", lambda: grpo_arguments("dr_grpo", True, "token", 9), grpo),
    Case("GrpoLossFunction", lambda: grpo_arguments("dapo", True, "token", given=20.0), grpo),
    Case("GrpoLossFunction", lambda: grpo_arguments("luspo", False, "token", beta=0.0), grpo),
    Case(
        "LigerJSDFunction",
        lambda: (randn(9, 31), torch.randn(9, 31).log_softmax(-1), labels(9, 31), 0.3, -100),
        jsd,
    ),
    Case(
        "LigerFusedLinearJSDFunction",
        lambda: (
            randn(9, 16),
            randn(31, 16),
            torch.randn(9, 8),
            torch.randn(31, 8),
            labels(9, 31),
            0.3,
            -100,
            2.0,
        ),
        lambda x, w, y, v, t, b, i, c: jsd(
            (x @ w.t() / c).log_softmax(-1), (y @ v.t() / c).log_softmax(-1), t, b, i
        ),
    ),
    Case(
        "LigerFusedLinearKLDivFunction",
        lambda: (
            randn(9, 16),
            randn(31, 16),
            torch.randn(9, 31).softmax(-1),
            labels(9, 31),
            "mean",
            -100,
            2.0,
            1e-10,
        ),
        lambda x, w, q, t, _r, i, c, _e: (
            F.kl_div((x @ w.t() / c).log_softmax(-1), q, reduction="none").sum(-1)[t != i].mean() / 31
        ),
    ),
    Case(
        "LigerFusedCETVDFunction",
        lambda: (randn(9, 31), torch.randn(9, 31), labels(9, 31), -100),
        lambda x, y, t, i: (
            F.cross_entropy(x, t, reduction="none", ignore_index=i),
            torch.where(t == i, 0.0, (x.softmax(-1) - y.softmax(-1)).abs().sum(-1) / 2),
        ),
    ),
    Case(
        "LigerKLDivLossFunction",
        lambda: (randn(9, 31), torch.rand(9, 31)),
        lambda x, y: F.kl_div(x, y, reduction="batchmean"),
    ),
    Case(
        "LigerKLDivLossFunction",
        lambda: (randn(9, 31), torch.randn(9, 31), "sum", True, 1e-10),
        lambda x, y, *_: F.kl_div(x, y, reduction="sum", log_target=True),
    ),
    Case(
        "LigerTVDLossFunction",
        lambda: (randn(9, 31), torch.randn(9, 31), labels(9, 31), "mean"),
        lambda p, q, t, _: (p - q).abs()[t != -100].mean() / 2,
    ),
    Case(
        "LigerMHCCoeffsFunction",
        lambda: (
            randn(2, 3, 4, 8), randn(32, 24), randn(24), randn(), randn(), randn(), True, 5, 1e-6, 1e-4, 1e-6, 2.0,
        ),
        mhc_coefficients,
    ),
    Case(
        "LigerMHCPreFunction",
        lambda: (randn(2, 3, 4, 8), randn(2, 3, 4)),
        lambda x, h: (x * h.unsqueeze(-1)).sum(-2),
    ),
    Case(
        "LigerMHCPostResFunction",
        lambda: (randn(2, 3, 4, 8), randn(2, 3, 8), randn(2, 3, 4), randn(2, 3, 4, 4)),
        lambda x, f, post, res: res @ x + post.unsqueeze(-1) * f.unsqueeze(-2),
    ),
    Case(
        "LigerAttnResFunction",
        lambda: (randn(3, 2, 5, 24), randn(24), randn(24), 1e-6),
        attention_residuals,
    ),
    Case(
        "LigerMultiTokenAttentionFunction",
        lambda: (randn(2, 4, 9, 9), randn(6, 2, 3, 3), randn(6), 1, 1, 1, 2),
        multi_token,
    ),
    Case(
        "LigerMultiTokenAttentionFunction",
        lambda: (randn(2, 4, 9, 9), randn(4, 4, 5, 5), None, (1, 1), (4, 4), (2, 2), 1, True),
        lambda *given: multi_token(*given[:-1], sparse=True),
    ),
    *(
        Case(
            "LigerFusedNeighborhoodAttentionFunction",
            lambda length=length, rest=rest: (*(randn(2, 3, length, 8) for _ in range(3)), *rest),
            neighbours,
        )
        for length, rest in (
            (11, ()),
            (11, (5, 2)),
            (12, (5, 3, 0.5)),
            (2, (3, 4)),
            (700, (9, 2)),
            (300, (101,)),
        )
    ),
    Case(
        "LigerMLPFunction",
        lambda: (randn(2, 5, 8), randn(12, 8), randn(12, 8), randn(8, 12)),
        mlp,
    ),
    Case(
        "LigerMLPFunction",
        lambda: (randn(2, 5, 8), randn(12, 8), randn(12, 8), randn(8, 12), 0.5, 3.0),
        mlp,
    ),
]  # fmt: skip
