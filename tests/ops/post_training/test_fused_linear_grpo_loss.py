"""fused_linear_grpo_loss: every loss and level, chunks, masks, what autograd gets and when, on every driver."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import liger_aot
from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.post_training.fused_linear_grpo_loss import FusedLinearGRPOLoss
from liger_aot.ops.post_training.policy_loss import CLIP, LOSS_TYPES
from tests.ops.post_training.sequence_cases import BF16, FP16, FP32, Case, Drawn, SequenceTests

GIVEN = ("old", "ref")
# Logarithms of importance weights, away from where they are clipped: rounding does not take them across.
RATIOS = (0.05, -0.05, 0.5, -0.5, 0.1)


class TestGRPOLoss(SequenceTests):
    op_class = FusedLinearGRPOLoss
    cases = (
        Case(3, 5, 16, 48, parts=GIVEN),
        Case(3, 5, 16, 37, BF16, j=24, chunks="units", parts=("old",)),
        Case(3, 5, 16, 37, BF16, j=24, bias=True, chunks="rows", parts=("old", "ratio"), keywords={"temperature": 1.3}),
        Case(3, 4, 8, 130, FP16, index=torch.int32, chunks="units", parts=GIVEN, keywords={"loss_type": "grpo"}),
        Case(2, 1, 8, 1, keywords={"beta": 0.0}),
        Case(
            3, 5, 16, 37, BF16, chunks="units", parts=(*GIVEN, "ratios"),
            keywords={"loss_type": "grpo", "importance_sampling_level": "sequence", "temperature": 0.7},
        ),
        Case(
            3, 5, 16, 37, chunks="rows", parts=(*GIVEN, "normalizer"),
            keywords={"loss_type": "cispo", "epsilon_high": 2.0},
        ),
        Case(3, 5, 16, 37, chunks="units", parts=GIVEN, keywords={"loss_type": "luspo"}),
    )  # fmt: skip
    more = (
        *(
            Case(3, 5, 16, 37, parts=(*GIVEN, "ratio"), keywords={"loss_type": kind, "max_completion_length": 7, **kw})
            for kind in LOSS_TYPES
            for kw in ({}, {"delta": 1.5, "use_bias_correction_kl": True, "beta": 0.2})
        ),
        *(
            Case(
                3, 5, 16, 37, parts=GIVEN,
                keywords={"loss_type": kind, "importance_sampling_level": "sequence", "use_bias_correction_kl": fixed},
            )
            for kind in LOSS_TYPES
            if LOSS_TYPES[kind][0] == CLIP
            for fixed in (False, True)
        ),
        Case(3, 5, 16, 37, parts=("by_token",), keywords={"epsilon_low": 0.1}),
    )  # fmt: skip

    def scale(self, case: Case) -> float:
        return float(1 / case.keywords.get("temperature", 1.0))

    def draw_others(self, case: Case, drawn: Drawn, g: torch.Generator) -> Drawn:
        t, size = drawn.tensors, (case.sequences, case.tokens)
        device, count = t["input"].device, case.sequences * case.tokens
        ids = torch.randint(case.vocabulary, size, device=device, generator=g)
        at = torch.arange(count, device=device).view(size)
        advantages = torch.linspace(-1.5, 2.0, case.sequences, device=device)
        drawn = drawn.but(
            completion_ids=ids.to(case.index),
            completion_mask=((at % 4 != 3) | (case.tokens == 1)).float(),
            advantages=torch.linspace(-1.5, 2.0, count, device=device).view(size)
            if "by_token" in case.parts
            else advantages,
        )
        if not set(case.parts) & {*GIVEN, "ratio", "ratios", "normalizer"}:
            return drawn
        bias = 0 if t["bias"] is None else t["bias"].double()
        logits = (t["input"].double() @ t["weight"].double().t() + bias) * self.scale(case)
        logps = logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        of_sequences = case.keywords.get("importance_sampling_level") == "sequence"
        each = at // max(case.tokens, 1) if of_sequences else at
        moved = torch.tensor(RATIOS, device=device, dtype=torch.float64)[each % len(RATIOS)]
        noise = torch.rand(size, device=device, generator=g)
        if case.keywords.get("loss_type") != "luspo":  # what is of no token that counts is not used
            logps = torch.where(drawn.tensors["completion_mask"] != 0, logps, -200.0)
        if "old" in case.parts:
            drawn = drawn.but(old_logps=(logps - moved).float())
        if "ref" in case.parts:
            drawn = drawn.but(ref_logps=(logps + 0.6 * noise - 0.3).float())
        if "ratio" in case.parts:
            drawn = drawn.but(vllm_is_ratio=noise + 0.5)
        if "ratios" in case.parts:
            drawn = drawn.but(vllm_is_ratio=noise[:, 0] + 0.5)
        if "normalizer" in case.parts:
            drawn = drawn.but(normalizer=torch.full((), 20.0, device=device))
        return drawn

    def tokens_of(self, case: Case, drawn: Drawn) -> dict[str, Tensor]:
        ids = drawn.tensors["completion_ids"].long()
        if case.keywords.get("loss_type") == "luspo":
            return {"policy": ids}
        return {"policy": torch.where(drawn.tensors["completion_mask"] != 0, ids, self.ignored)}

    def formula(
        self, case: Case, drawn: Drawn, values: dict[str, Tensor], held: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """As TRL has them."""
        kw, t = case.keywords, drawn.tensors
        kind, beta = kw.get("loss_type", "dapo"), kw.get("beta", 0.04)
        mask, logps = t["completion_mask"].double(), values["policy"]
        advantages = t["advantages"].double()
        advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
        old = held["policy"] if t.get("old_logps") is None else t["old_logps"]
        ref = values.get("reference", held["policy"]) if t.get("ref_logps") is None else t["ref_logps"]
        ratio = t.get("vllm_is_ratio")
        ratio = ratio.unsqueeze(1) if ratio is not None and ratio.dim() == 1 else ratio
        log_ratio, lengths = logps - old, mask.sum(-1, keepdim=True)
        w = log_ratio
        if kw.get("importance_sampling_level") == "sequence":
            w = (log_ratio * mask).sum(-1, keepdim=True) / lengths.clamp(min=1)
        coef = w.exp()
        low, high = 1 - kw.get("epsilon_low", 0.2), 1 + kw.get("epsilon_high", 0.2)
        clipped = ((coef < low) & (advantages < 0)) | ((coef > high) & (advantages > 0))
        if kind == "cispo":
            constant = (held["policy"] - old).exp().clamp(max=high - 1)
            loss, clipped = -constant * advantages * logps, (coef > high - 1) & (advantages > 0)
        elif kind == "sapo":
            tau = torch.where(advantages > 0, 1.0, 1.05).double()
            loss, clipped = -torch.sigmoid(tau * (coef - 1)) * 4 / tau * advantages, torch.zeros_like(clipped)
        elif kind == "vespo":
            total = ((held["policy"] - old) * mask).sum(-1, keepdim=True)
            if ratio is not None:
                total = total + ratio.expand(logps.shape).log().sum(-1, keepdim=True)
            k, rate = (torch.where(advantages >= 0, a, b).double() for a, b in ((2.0, 3.0), (3.0, 2.0)))
            loss = -(rate + k * total - rate * total.exp()).exp() * advantages * logps
            clipped = torch.zeros_like(clipped)
        else:
            free = coef.clamp(max=kw["delta"]) if "delta" in kw else coef
            loss = -torch.min(free * advantages, coef.clamp(low, high) * advantages)
        loss = loss if ratio is None or kind == "vespo" else loss * ratio
        kl = torch.exp(ref - logps) - (ref - logps) - 1
        kl = kl * coef if kw.get("use_bias_correction_kl") else kl
        if beta:
            loss = loss + beta * kl
        if kind in ("grpo", "sapo"):
            total = ((loss * mask).sum(-1, keepdim=True) / lengths.clamp(min=1)).mean()
        elif kind == "dr_grpo":
            total = (loss * mask).sum() / (case.sequences * kw.get("max_completion_length", case.tokens))
        elif kind == "luspo":
            total = (loss * lengths).mean()
        else:
            given = t.get("normalizer") if kind in ("dapo", "cispo", "vespo") else None
            total = (loss * mask).sum() / (mask.sum().clamp(min=1) if given is None else given)
        found = {"loss": total, "logps": logps * mask}
        found["kl"] = (kl * mask).sum() / mask.sum() if beta else 0 * total
        found["clip_ratio"] = (clipped * mask).sum() / mask.sum() + 0 * total
        return found

    def only_last(self, case: Case, drawn: Drawn, count: int) -> Drawn:
        mask = drawn.tensors["completion_mask"].clone()
        mask[:, :-count] = 0
        return drawn.but(completion_mask=mask)


def test_log_probabilities() -> None:
    """What ``old_logps`` and ``ref_logps`` are taken from; a masked token's id may be anything."""
    x, w, ids = torch.randn(2, 3, 8), torch.randn(11, 8), torch.tensor([[1, 2, -7], [10, 0, 99]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    found = liger_aot.load("fused_linear_grpo_loss")(x, w, ids, torch.ones(2), mask, temperature=2.0)
    wanted = ((x @ w.t()) / 2).log_softmax(-1)[:, :2].gather(-1, ids[:, :2].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(found.logps[:, :2], wanted)
    assert not found.logps[:, 2].any() and found.loss.isfinite()


def test_nothing_counts() -> None:
    op = liger_aot.load("fused_linear_grpo_loss")
    x, ids = torch.randn(2, 3, 8, requires_grad=True), torch.zeros(2, 3, dtype=torch.int64)
    for kind in LOSS_TYPES:
        x.grad = None
        found = op(x, torch.randn(11, 8), ids, torch.ones(2), torch.zeros(2, 3), loss_type=kind)
        found.loss.backward()
        assert found.loss == 0 and x.grad is not None and not x.grad.any(), kind


X, W, I = torch.ones(2, 3, 8), torch.ones(6, 8), torch.zeros(2, 3, dtype=torch.int64)  # noqa: E741
M, A = torch.ones(2, 3), torch.ones(2)
BAD: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "ids' dtype": ((X, W, I.float(), A, M), {}, ArgumentTypeError, "completion_ids must be int64 or int32"),
    "ids' range": ((X, W, I + 6, A, M), {}, ArgumentError, r"must be in \[0, 6\)"),
    "mask's shape": ((X, W, I, A, M[0]), {}, ArgumentError, r"completion_mask must be of shape \(2, 3\)"),
    "no mask": ((X, W, I, A, [1]), {}, ArgumentTypeError, "completion_mask must be a torch.Tensor, got list"),
    "advantages": ((X, W, I, M[0], M), {}, ArgumentError, r"advantages must be of shape \(2,\) or \(2, 3\)"),
    "advantages' dtype": ((X, W, I, A.int(), M), {}, ArgumentTypeError, "advantages must be bfloat16.*int32"),
    "advantages of tokens": (
        (X, W, I, M, M),
        {"importance_sampling_level": "sequence"},
        ArgumentError,
        r'advantages must be of shape \(2,\) for importance_sampling_level "sequence"',
    ),
    "old_logps": ((X, W, I, A, M), {"old_logps": A}, ArgumentError, r"old_logps must be of shape \(2, 3\)"),
    "two references": (
        (X, W, I, A, M),
        {"ref_logps": M, "ref_input": X, "ref_weight": W},
        ArgumentError,
        "ref_logps and ref_input are two references",
    ),
    "half a reference": ((X, W, I, A, M), {"ref_weight": W}, ArgumentError, "must be given together"),
    "level": (
        (X, W, I, A, M),
        {"importance_sampling_level": "sequence", "loss_type": "sapo"},
        ArgumentError,
        'must be "token" for loss_type "sapo"',
    ),
    "loss type": ((X, W, I, A, M), {"loss_type": "ppo"}, ArgumentError, "loss_type must be one of grpo"),
    "temperature": ((X, W, I, A, M), {"temperature": 0.0}, ArgumentError, "temperature must be above 0"),
    "delta": ((X, W, I, A, M), {"delta": 0.0}, ArgumentError, "delta must be above 0"),
    "normalizer": ((X, W, I, A, M), {"normalizer": A}, ArgumentError, r"normalizer must be of shape \(\)"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input(bad: str) -> None:
    arguments, keywords, error, text = BAD[bad]
    with pytest.raises(error, match=f"fused_linear_grpo_loss: .*{text}"):
        liger_aot.load("fused_linear_grpo_loss")(*arguments, **keywords)


def test_dtypes_of_the_cases() -> None:
    """Each dtype is gone through, the 16-bit ones in parts too."""
    assert {case.dtype for case in TestGRPOLoss.cases} == {FP32, BF16, FP16}
