"""fused_linear_preference_loss: every loss, chunks of pairs and of rows, what autograd gets and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import liger_aot
from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.post_training._preference import PAIRS
from liger_aot.ops.post_training.fused_linear_preference_loss import FusedLinearPreferenceLoss
from tests.ops.post_training.sequence_cases import BF16, FP16, FP32, Case, Drawn, SequenceTests

SMOOTHED = {"exo_pair", "robust"}
Formula = Callable[[Tensor, Tensor, float, float], Tensor]

# Of a pair's log-ratios, beta and the label smoothing, as the papers and TRL have them.
FORMULAS: dict[str, Formula] = {
    "sigmoid": lambda a, b, beta, s: (
        -F.logsigmoid(beta * (a - b)) * (1 - s) - F.logsigmoid(-beta * (a - b)) * s
    ),
    "hinge": lambda a, b, beta, s: torch.relu(1 - beta * (a - b)),
    "exo_pair": lambda a, b, beta, s: (
        torch.sigmoid(beta * (a - b))
        * (F.logsigmoid(beta * (a - b)) - torch.log(torch.tensor(1 - s).double()))
        + torch.sigmoid(beta * (b - a)) * (F.logsigmoid(beta * (b - a)) - torch.log(torch.tensor(s).double()))
    ),
    "robust": lambda a, b, beta, s: (
        (-(1 - s) * F.logsigmoid(beta * (a - b)) + s * F.logsigmoid(-beta * (a - b))) / (1 - 2 * s)
    ),
    "discopop": lambda a, b, beta, s: (
        -F.logsigmoid(beta * (a - b)) * (1 - torch.sigmoid(beta * (a - b) / 0.05))
        + torch.exp(-beta * (a - b)) * torch.sigmoid(beta * (a - b) / 0.05)
    ),
    "nca_pair": lambda a, b, beta, s: (
        -F.logsigmoid(beta * a) - 0.5 * F.logsigmoid(-beta * a) - 0.5 * F.logsigmoid(-beta * b)
    ),
    "bco_pair": lambda a, b, beta, s: -F.logsigmoid(beta * a) - F.logsigmoid(-beta * b),
    "sppo_hard": lambda a, b, beta, s: (a - 0.5 / beta) ** 2 + (b + 0.5 / beta) ** 2,
    "apo_zero": lambda a, b, beta, s: 1 - torch.sigmoid(beta * a) + torch.sigmoid(beta * b),
    "apo_down": lambda a, b, beta, s: torch.sigmoid(beta * a) + 1 - torch.sigmoid(beta * (a - b)),
    "odds_ratio": lambda a, b, beta, s: (
        -beta * F.logsigmoid((a - b) - (torch.log1p(-torch.exp(a)) - torch.log1p(-torch.exp(b))))
    ),
}
DPO = {"loss_type": "sigmoid"}


def settings(kind: str) -> dict[str, Any]:
    return {"loss_type": kind, **({"label_smoothing": 0.1} if kind in SMOOTHED else {})}


class TestPreferenceLoss(SequenceTests):
    op_class = FusedLinearPreferenceLoss
    cases = (
        Case(4, 5, 16, 48, j=24, keywords=DPO),
        # The policy's part of a row's gradient is a hundredth of the other target's.
        Case(
            2, 4, 8, 1600, BF16, parts=("nll_target",),
            keywords={"loss_type": "odds_ratio", "average_log_prob": True, "nll_weight": 1.0, "beta": 0.01},
        ),
        Case(4, 5, 16, 37, BF16, j=24, chunks="units", keywords=DPO),
        Case(4, 5, 16, 37, BF16, j=24, bias=True, chunks="rows", keywords=DPO),
        Case(4, 5, 16, 37, j=24, bias=True, chunks="units", ref=BF16, keywords=DPO),
        Case(4, 5, 16, 37, BF16, j=24, ref=FP32, keywords=DPO),
        Case(6, 4, 8, 130, FP16, index=torch.int32, chunks="units", keywords={"average_log_prob": True}),
        Case(2, 1, 8, 1),
        Case(
            4, 5, 16, 37, chunks="units", parts=("nll_target",),
            keywords={"loss_type": "odds_ratio", "average_log_prob": True, "nll_weight": 1.0},
        ),
        Case(
            4, 5, 16, 37, BF16, bias=True, chunks="rows", parts=("nll_target",),
            keywords={"loss_type": "odds_ratio", "average_log_prob": True, "nll_weight": 0.5},
        ),
        Case(4, 5, 16, 37, keywords={"nll_weight": 1.0, "label_smoothing": 0.2}),
        Case(4, 5, 16, 37, keywords={"average_log_prob": True, "margin": 0.5, "beta": 2.0, "nll_weight": 0.5}),
        Case(4, 5, 16, 37, BF16, keywords={"weight_grad_dtype": FP32, "ignore_index": 3}, chunks="units"),
        Case(3, 5, 16, 37, j=8, parts=("labels", "kl"), keywords={"loss_type": "kto"}),
        Case(3, 5, 16, 37, BF16, chunks="units", parts=("labels", "kls"), keywords={"loss_type": "kto"}),
        Case(3, 5, 16, 37, FP16, chunks="rows", parts=("labels",), keywords={"loss_type": "kto"}),
    )  # fmt: skip
    more = tuple(Case(4, 5, 16, 37, j=8, keywords=settings(kind)) for kind in PAIRS if kind != "odds_ratio")

    def is_paired(self, case: Case) -> bool:
        return case.keywords.get("loss_type") != "kto"

    def draw_others(self, case: Case, drawn: Drawn, g: torch.Generator) -> Drawn:
        device, size = drawn.tensors["input"].device, (case.sequences, case.tokens)
        ignored = case.keywords.get("ignore_index", -100)

        def tokens(part: int) -> Tensor:
            t = torch.randint(case.vocabulary, size, device=device, generator=g)
            at = torch.arange(case.sequences * case.tokens, device=device).view(size)
            return torch.where((at % part == 1) & (case.tokens > 1), ignored, t).to(case.index)

        drawn = drawn.but(target=tokens(3))
        if "nll_target" in case.parts:
            drawn = drawn.but(nll_target=tokens(4))
        if "labels" in case.parts:
            drawn = drawn.but(preference_labels=torch.arange(case.sequences, device=device) % 2 == 0)
        if "kl" in case.parts:
            drawn = drawn.but(kl=torch.full((), 0.3, device=device))
        if "kls" in case.parts:
            drawn = drawn.but(kl=torch.rand(case.sequences, device=device, generator=g))
        return drawn

    def tokens_of(self, case: Case, drawn: Drawn) -> dict[str, Tensor]:
        ignored = case.keywords.get("ignore_index", -100)
        found = {"policy": drawn.tensors["target"]}
        if "nll_target" in case.parts:
            found["second"] = drawn.tensors["nll_target"]
        return {name: torch.where(t == ignored, self.ignored, t.long()) for name, t in found.items()}

    def formula(
        self, case: Case, drawn: Drawn, values: dict[str, Tensor], held: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        kw, t = case.keywords, drawn.tensors
        kind, beta, s = kw.get("loss_type", "sigmoid"), kw.get("beta", 0.1), kw.get("label_smoothing", 0.0)
        counts = t["target"].long() != kw.get("ignore_index", -100)
        logps, ref = (
            values["policy"].sum(-1),
            values.get("reference", torch.zeros_like(counts)).double().sum(-1),
        )
        if kw.get("average_log_prob"):
            logps, ref = logps / counts.sum(-1), ref / counts.sum(-1)
        ratios, half = logps - ref, len(logps) // 2
        found = {"logps": logps, "rewards": beta * ratios}
        if kind == "kto":
            sign = torch.where(t["preference_labels"], 1.0, -1.0).double()
            kl = 0.0 if t.get("kl") is None else t["kl"].double()
            return {**found, "loss": (1 - torch.sigmoid(beta * sign * (ratios - kl))).mean()}
        a, b = ratios[:half], ratios[half:]
        loss = FORMULAS[kind](a - kw.get("margin", 0.0) / beta, b, beta, s).mean()
        likely = values.get("second", values["policy"])[:half]
        of = t.get("nll_target", t["target"])[:half]
        nll = -likely.sum() / (of.long() != kw.get("ignore_index", -100)).sum()
        return {**found, "loss": loss + kw.get("nll_weight", 0.0) * nll, "nll_loss": nll}

    def only_last(self, case: Case, drawn: Drawn, count: int) -> Drawn:
        target = drawn.tensors["target"].clone()
        target[:, :-count] = -100
        return drawn.but(target=target)


def test_mean_of_the_logits() -> None:
    x, w, b = torch.randn(4, 5, 8), torch.randn(11, 8), torch.randn(11)
    found = liger_aot.load("fused_linear_preference_loss")(x, w, torch.zeros(4, 5, dtype=torch.int64), b)
    torch.testing.assert_close(found.logits_mean, (x @ w.t() + b).mean((1, 2)))


def test_a_sequence_without_tokens_that_count() -> None:
    """Its log-probability is 0 and it gets no gradient; the mean of no tokens is NaN, as torch's."""
    op = liger_aot.load("fused_linear_preference_loss")
    x, w, t = (
        torch.randn(4, 5, 8, requires_grad=True),
        torch.randn(11, 8),
        torch.ones(4, 5, dtype=torch.int64),
    )
    t[0] = -100
    found = op(x, w, t)
    found.loss.backward()
    assert found.logps[0] == 0 and found.loss.isfinite()
    assert x.grad is not None and not x.grad[0].any() and x.grad[1:].any()
    assert op(x, w, t, average_log_prob=True).logps[0].isnan()


X, W, T = torch.ones(4, 3, 8), torch.ones(6, 8), torch.zeros(4, 3, dtype=torch.int64)
LABELS = torch.ones(4, dtype=torch.bool)
BAD: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "no tensor": (([1.0], W, T), {}, ArgumentTypeError, "input must be a torch.Tensor, got list"),
    "two dimensions": ((X[0], W, T), {}, ArgumentError, r"input must be of shape \(sequences, tokens, k\)"),
    "weight's width": ((X, W[:, :7], T), {}, ArgumentError, r"weight must be of shape \(vocabulary, 8\)"),
    "target's shape": ((X, W, T[:3]), {}, ArgumentError, r"target must be of shape \(4, 3\)"),
    "target's dtype": ((X, W, T.float()), {}, ArgumentTypeError, "target must be int64 or int32"),
    "target too large": ((X, W, T + 6), {}, ArgumentError, r"target must be in \[0, 6\)"),
    "an odd number": ((X[:3], W, T[:3]), {}, ArgumentError, "input must hold pairs.*got 3 sequences"),
    "half a reference": ((X, W, T, None, X), {}, ArgumentError, "ref_input and ref_weight must be given"),
    "reference's shape": ((X, W, T, None, X[:2], W), {}, ArgumentError, "ref_input must be of shape"),
    "reference's classes": ((X, W, T, None, X, W[:5]), {}, ArgumentError, "ref_weight must have weight's 6"),
    "nll_target": ((X, W, T), {"nll_target": T[:2]}, ArgumentError, r"nll_target must be of shape \(4, 3\)"),
    "labels": ((X, W, T), {"preference_labels": LABELS}, ArgumentError, 'for loss_type "kto" alone'),
    "no labels": ((X, W, T), {"loss_type": "kto"}, ArgumentError, "needs preference_labels"),
    "labels' dtype": (
        (X, W, T),
        {"loss_type": "kto", "preference_labels": T[:, 0]},
        ArgumentTypeError,
        "preference_labels must be bool, got int64",
    ),
    "kl": (
        (X, W, T),
        {"loss_type": "kto", "preference_labels": LABELS, "kl": X[0, :, 0]},
        ArgumentError,
        r"kl must be of shape \(\) or \(1,\) or \(4,\)",
    ),
    "likelihood of kto": (
        (X, W, T),
        {"loss_type": "kto", "preference_labels": LABELS, "nll_weight": 1.0},
        ArgumentError,
        "has no nll_weight",
    ),
    "loss type": ((X, W, T), {"loss_type": "ipo"}, ArgumentError, "loss_type must be one of sigmoid"),
    "beta": ((X, W, T), {"beta": 0.0}, ArgumentError, "beta must be above 0"),
    "exo": ((X, W, T), {"loss_type": "exo_pair"}, ArgumentError, "label_smoothing must be between 0 and 1"),
    "robust": (
        (X, W, T),
        {"loss_type": "robust", "label_smoothing": 0.5},
        ArgumentError,
        "label_smoothing must be below 0.5",
    ),
    "budget": ((X, W, T), {"chunk_bytes": 255}, ArgumentError, "chunk_bytes must hold one row"),
    "grad dtype": ((X, W, T), {"weight_grad_dtype": BF16}, ArgumentTypeError, "weight_grad_dtype must be"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input(bad: str) -> None:
    arguments, keywords, error, text = BAD[bad]
    with pytest.raises(error, match=f"fused_linear_preference_loss: .*{text}"):
        liger_aot.load("fused_linear_preference_loss")(*arguments, **keywords)
