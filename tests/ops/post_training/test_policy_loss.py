"""policy_loss: every loss type and level, masks, ratios and means, on every driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import log
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_aot
from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.ops.post_training.policy_loss import LOSS_TYPES, NORMALIZED, PolicyLoss
from tests.harness.op_tests import BF16, FP16, FP32, WAYS, Case, Draw, Exact, OpTests, Way
from tests.harness.tolerances import UNIT_ROUNDOFF

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # by bounds on both sides
A, B = torch.zeros(3, 8), torch.ones(3)


class TestPolicyLoss(OpTests):
    """A case's shape is (sequences, tokens). Its options: ``old`` and ``ref``, whether there are such
    log-probabilities; ``mask``, its dtype; ``advantages`` and ``ratio``, 0 for one a sequence, 1 with a last dimension
    of 1, 2 for one a token; ``normalizer`` and ``weight``, whether they are given. The loss alone is an output that has
    a gradient."""

    op_class = PolicyLoss
    graded = 1
    frozen = (
        "old_logp", "ref_logp", "advantages", "mask", "sampling_ratio", "normalizer", "sequence_weight",
    )  # fmt: skip
    defaults: Mapping[str, Any] = {
        "loss_type": "dapo", "importance_sampling_level": "token", "reduction": "mean", "beta": 0.04, "eps_low": 0.2,
        "eps_high": 0.4, "delta": None, "use_bias_correction_kl": False, "max_completion_length": None,
        "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0,
    }  # fmt: skip
    cases = (
        Case((3, 48), FP32, mask=torch.int32, ratio=2),
        *(Case((3, 17), FP32, loss_type=t, mask=torch.bool) for t in LOSS_TYPES),
        *(Case((2, 33), FP32, loss_type=t, reduction="none", ratio=0, mask=torch.int64) for t in LOSS_TYPES),
        *(
            Case(
                (3, 40), FP32, loss_type=t, importance_sampling_level="sequence", mask=torch.float32, delta=delta,
                use_bias_correction_kl=corrected, reduction=reduction, ratio=2,
            )
            for t, delta, corrected, reduction in (
                ("grpo", None, True, "mean"), ("bnpo", 1.05, False, "mean"), ("dr_grpo", 1.5, True, "none"),
                ("dapo", None, False, "none"), ("luspo", 1.02, True, "mean"),
            )
        ),
        Case((4, 21), FP32, delta=1.1, use_bias_correction_kl=True, ratio=1),
        Case((4, 21), FP32, delta=2.0, loss_type="grpo", advantages=2, eps_low=0.0),
        Case((1, 1), FP32),
        Case((5, 9), FP32, old=False, use_bias_correction_kl=True),
        Case((5, 9), FP32, old=False, importance_sampling_level="sequence", loss_type="grpo", reduction="none"),
        Case((5, 9), FP32, ref=False, beta=0.0, advantages=1),
        Case((5, 9), FP32, loss_type="vespo", ratio=2, mask=torch.uint8, normalizer=True),
        Case((5, 9), FP32, loss_type="vespo", ratio=1, advantages=2, use_bias_correction_kl=True),
        Case((5, 9), FP32, loss_type="vespo", weight=True, ref=False, beta=0.0),
        Case((5, 9), FP32, loss_type="cispo", normalizer=True, eps_high=1.1, advantages=2),
        Case((5, 9), FP32, loss_type="sapo", sapo_temperature_pos=3.0, ratio=2, advantages=2),
        Case((5, 9), FP32, loss_type="dr_grpo", max_completion_length=32),
        Case((3, 2500), FP32, mask=torch.int8, importance_sampling_level="sequence"),
        Case((300, 2), FP32, loss_type="grpo", mask=torch.bool),
    )  # fmt: skip
    empty = (Case((0, 16), FP32, reduction="none"), Case((4, 0), FP32, reduction="none"))
    large = (
        Case((16, 4096), FP32, mask=torch.int32, ratio=2),
        Case((64, 8192), FP32, mask=torch.int32, importance_sampling_level="sequence", loss_type="grpo"),
        Case((1, 100_000), FP32, mask=torch.int32, loss_type="vespo"),
    )
    # Without a bound, at which one of millions of tokens would be on another side than in float64
    beyond = (
        Case(((1 << 31) // 65536 + 96, 65536), FP32, loss_type="sapo", reduction="none", beta=0.0, ref=False),
    )
    dimensions = (2, 2)
    bad: Mapping[str, Any] = {
        "one sequence": ((A[0], None, None, B), {}, ArgumentError, r"logp must be of shape \(sequences, tokens\)"),
        "integers": ((A.int(), None, None, B), {}, ArgumentTypeError, "logp must be bfloat16.*got int32"),
        "old of another shape": (
            (A, A[:2], None, B), {}, ArgumentError, r"old_logp must be of shape \(3, 8\).*got \(2, 8\)",
        ),
        "advantages of another shape": (
            (A, None, None, B[:2]), {}, ArgumentError, r"advantages must be of shape \(3,\) or \(3, 1\) or \(3, 8\)",
        ),
        "no advantages": ((A, None, None, None), {}, ArgumentTypeError, "advantages must be a torch.Tensor, got None"),
        "mask of another shape": ((A, None, None, B, B), {}, ArgumentError, r"mask must be of shape \(3, 8\)"),
        "mask of another dtype": (
            (A, None, None, B, A.short()), {}, ArgumentTypeError, "mask must be bool, uint8.*int16",
        ),
        "no reference": ((A, None, None, B), {"beta": 0.1}, ArgumentError, "ref_logp is None, but beta is 0.1"),
        "loss type": (
            (A, None, None, B), {"loss_type": "ppo"}, ArgumentError, "loss_type must be one of grpo, bnpo.*'ppo'",
        ),
        "level": (
            (A, None, None, B), {"importance_sampling_level": "word"}, ArgumentError, "must be one of token, sequence",
        ),
        "reduction": ((A, None, None, B), {"reduction": "sum"}, ArgumentError, "reduction must be one of none, mean"),
        "sequence level of sapo": (
            (A, None, None, B), {"loss_type": "sapo", "importance_sampling_level": "sequence"}, ArgumentError,
            "importance_sampling_level=\"sequence\" is not for loss_type='sapo'",
        ),
        "delta of cispo": (
            (A, None, None, B), {"loss_type": "cispo", "delta": 2.0}, ArgumentError, "delta is not for .*'cispo'",
        ),
        "normalizer of grpo": (
            (A, None, None, B), {"loss_type": "grpo", "normalizer": B[0]}, ArgumentError, "normalizer is not for",
        ),
        "normalizer is no number": (
            (A, None, None, B), {"normalizer": "3"}, ArgumentTypeError, "normalizer must be a torch.Tensor, got str",
        ),
        "several normalizers": (
            (A, None, None, B), {"normalizer": B}, ArgumentError, r"normalizer must be of shape \(\) or \(1,\)",
        ),
        "weight of dapo": ((A, None, None, B), {"sequence_weight": B}, ArgumentError, "sequence_weight is not for"),
        "temperature": (
            (A, None, None, B), {"loss_type": "sapo", "sapo_temperature_neg": 0.0}, ArgumentError,
            "sapo_temperature_neg must be above 0",
        ),
    }  # fmt: skip

    def tensors(self, case: Case, draw: Draw) -> Tensors:
        b, length = case.shape
        per = lambda kind: ((b,), (b, 1), (b, length))[kind]  # noqa: E731
        logp = -draw.uniform(0.0, 4.0, b, length).to(case.dtype)
        near = lambda: logp + 0.4 * draw.dense(b, length)  # noqa: E731
        old, ref = near() if case.get("old", True) else None, near() if case.get("ref", True) else None
        advantages = draw.dense(*per(case.get("advantages", 0)))
        of_mask, ratio = case.get("mask"), case.get("ratio")
        mask = None if of_mask is None else draw.integers(3, b, length).to(of_mask)
        ratio = None if ratio is None else draw.uniform(0.3, 1.7, *per(ratio))
        normalizer = draw.uniform(2.0, 90.0) if case.get("normalizer") else None
        weight = draw.uniform(0.2, 1.5, b, 1) if case.get("weight") else None
        return logp, old, ref, advantages, mask, ratio, normalizer, weight

    def fit(self, case: Case, choose: Callable[[Sequence[Any]], Any]) -> Case:
        """Log-probabilities are float32 here, and some options are for some loss types alone."""
        loss_type = case.get("loss_type", "dapo")
        options: dict[str, Any] = {"dtype": FP32, "shift": 0, "gap": 0}
        if case.get("mask") in (BF16, FP16):
            options["mask"] = FP32
        if loss_type not in CLIPPED:
            options |= {"importance_sampling_level": "token", "delta": None}
        if loss_type not in NORMALIZED:
            options["normalizer"] = False
        if loss_type != "vespo":
            options["weight"] = False
        if case.get("beta", 0.04):
            options["ref"] = True
        return case.but(**options)

    def draw(self, case: Case, seed: int, device: str) -> tuple[Tensors, tuple[Any, ...], tuple[Tensor, ...]]:
        """The scalar's gradient is no row."""
        tensors, settings, grads = super().draw(case.but(reduction="none"), seed, device)
        settings = self.settings(case)
        return tensors, settings, grads if settings[2] == "none" else (grads[0].new_tensor(1.5),)

    def call(self, op: DifferentiableOp, tensors: Tensors, settings: tuple[Any, ...]) -> Any:
        named = dict(zip(self.setting_names(), settings, strict=True))
        *given, normalizer, weight = tensors
        return op(*given, normalizer=normalizer, sequence_weight=weight, **named)[0]  # type: ignore[operator]

    def table_case(
        self, kernel: str, dtypes: Mapping[str, torch.dtype], n: int, aligned: bool, rows: int
    ) -> Case | None:
        shape = (n, 3) if kernel.endswith("reduce") else (rows, n)
        return Case(shape, FP32, mask=torch.int32, importance_sampling_level="sequence")

    def formula(self, logp: Tensor, old: Tensor, *arguments: Any) -> Tensor:
        return _losses(self, (logp, old, *arguments))

    def limits(self, exact: Exact) -> Mapping[str, Mapping[str, Any]]:
        """Every step of a token is a few roundings of numbers of its size; logarithms have absolute errors, which
        exponentials make relative. Sums add the sizes of their terms. A weight so near a bound of the clipping that it
        may be on the other side than in float64 has either side's gradient."""
        i, s = exact.inputs, exact.settings
        logp, mask = i["logp"], i["mask"]
        if not logp.numel():
            return {}
        counts = torch.ones_like(logp) if mask is None else (mask != 0).to(logp)
        old = logp if i["old_logp"] is None else i["old_logp"]
        away = (logp - old) * counts
        tokens = counts.sum(-1, keepdim=True).clamp(min=1)
        if s["importance_sampling_level"] == "sequence":
            logs = added = away.abs().sum(-1, keepdim=True)
            weight = (away.sum(-1, keepdim=True) / tokens).exp()
        else:
            logs, added = logp.abs() + old.abs(), away.abs()
            weight = away.exp()
        advantages = i["advantages"].reshape(len(logp), -1).abs()
        ratio = 1.0 if i["sampling_ratio"] is None else i["sampling_ratio"].reshape(len(logp), -1)
        factor = torch.maximum(weight, torch.ones_like(weight)) * (1 + logs) * 4
        if s["loss_type"] == "vespo":
            every = (away.abs() + (0 if i["sampling_ratio"] is None else ratio.log().abs())).sum(
                -1, keepdim=True
            )
            given = i["sequence_weight"]
            factor = (1 + every) * 8 * (1 + (0 if given is None else given.reshape(-1, 1)))
            ratio = 1.0
        size = factor * advantages * ratio * (1 + logp.abs())
        divergence = torch.zeros_like(logp)
        if s["beta"]:
            d = i["ref_logp"] - logp
            divergence = s["beta"] * (d.exp() + d.abs() + 1) * (1 + logp.abs() + i["ref_logp"].abs())
            if s["use_bias_correction_kl"]:
                divergence = divergence * factor
        size = (size + divergence) * counts
        dloss = exact.grads[0].abs().expand(logp.shape)
        if s["reduction"] == "mean":
            by = exact.results[5].reshape(-1, 1)
            loss, dloss = (size * by).sum(), dloss * by
        else:
            loss = size
        dlogp = dloss * size
        if s["loss_type"] in CLIPPED:
            near = (4 + 4 * added) * UNIT_ROUNDOFF[FP32] * weight
            bounds = (b for b in (1 - s["eps_low"], 1 + s["eps_high"], s["delta"]) if b is not None)
            either = torch.stack([(weight - b).abs() <= near for b in bounds]).any(0)
            jump = dloss * weight * advantages * ratio * counts / UNIT_ROUNDOFF[FP32]
            dlogp = dlogp + torch.where(either, jump, 0.0)
        if s["importance_sampling_level"] == "sequence":
            dlogp = dlogp + (dlogp.sum(-1, keepdim=True) / tokens) * counts
        return {"y": {"magnitude": loss}, "dlogp": {"magnitude": dlogp}}

    @pytest.mark.parametrize("way", WAYS, indirect=True)
    @pytest.mark.parametrize("level", ["token", "sequence"])
    def test_divergence_and_clipped(self, way: Way, level: str) -> None:
        """What has no gradient: of each token, and their means over those that count; None where beta is 0."""
        case = Case(
            (4, 50), FP32, mask=torch.bool, importance_sampling_level=level, use_bias_correction_kl=True
        )
        (logp, old, ref, _, mask, *_), _, _ = self.draw(case, 1, way.device)
        advantages = torch.tensor([1.0, 2.0, -1.0, -0.5], device=way.device)
        old = old + torch.tensor([0.3, -0.3, 0.3, -0.3], device=way.device)[:, None]
        options = {
            "importance_sampling_level": level,
            "use_bias_correction_kl": True,
            "eps_low": 0.1,
            "eps_high": 0.1,
        }
        leaf = logp.clone().requires_grad_()
        given = (leaf, old, ref, advantages, mask)
        _, kl, clipped = way.op(*given, beta=0.1, reduction="none", **options)  # type: ignore[operator]
        away = (logp - old).double() * mask
        if level == "sequence":
            away = (away.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)).expand(mask.shape)
        d, weight = (ref - logp).double(), away.exp()
        wanted = (d.exp() - d - 1) * weight * mask
        torch.testing.assert_close(kl.double(), wanted, rtol=1e-5, atol=2e-6)
        out = torch.where(advantages[:, None] > 0, weight > 1.1, weight < 0.9) & mask
        assert torch.equal(clipped, out.float()) and 0 < out.sum() < mask.sum()
        assert not kl.requires_grad and not clipped.requires_grad
        _, mean, share = way.op(*given, beta=0.1, **options)  # type: ignore[operator]
        torch.testing.assert_close(mean.double(), wanted.sum() / mask.sum(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(share.double(), out.sum() / mask.sum().double(), rtol=1e-6, atol=0.0)
        assert mean.shape == share.shape == ()
        assert way.op(*given, **options)[1] is None  # type: ignore[operator]

    @pytest.mark.parametrize("way", WAYS, indirect=True)
    @pytest.mark.parametrize("loss_type", LOSS_TYPES)
    def test_tokens_that_do_not_count_are_not_read(self, way: Way, loss_type: str) -> None:
        """NaN there changes nothing, and a NaN in a token that counts is not lost."""
        case = Case((2, 20), FP32, mask=torch.int32, loss_type=loss_type)
        (logp, old, ref, advantages, mask, *_), settings, _ = self.draw(case, 2, way.device)

        def run(*given: Tensor) -> tuple[Tensor, Tensor]:
            leaf = given[0].clone().requires_grad_()
            loss = self.call(way.op, (leaf, *given[1:], advantages, mask, None, None, None), settings)
            return loss.detach(), torch.autograd.grad(loss, leaf)[0]

        wanted = run(logp, old, ref)
        nan = [torch.where(mask == 0, torch.nan, t) for t in (logp, old, ref)]
        got = run(*nan)
        assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])
        assert not got[1][mask == 0].any()
        at = int(mask[1].nonzero()[0])
        logp[1, at] = torch.nan
        assert run(logp, old, ref)[0].isnan()

    @pytest.mark.parametrize("way", WAYS, indirect=True)
    def test_sequences_of_no_tokens(self, way: Way) -> None:
        """They add nothing; where no token counts at all the means are 0."""
        logp = -torch.rand(3, 6, device=way.device)
        mask = torch.ones(3, 6, dtype=torch.bool, device=way.device)
        mask[1] = False
        advantages = torch.tensor([1.0, 5.0, -1.0], device=way.device)
        for level in ("token", "sequence"):
            options = {"loss_type": "grpo", "importance_sampling_level": level}
            loss, _, _ = way.op(logp, None, None, advantages, mask, **options)  # type: ignore[operator]
            torch.testing.assert_close(loss, torch.zeros_like(loss), rtol=0, atol=1e-6)
            loss, _, share = way.op(logp, None, None, advantages, mask & False, **options)  # type: ignore[operator]
            assert loss == 0 and share == 0


@pytest.mark.parametrize(
    "case", [case for case in TestPolicyLoss.cases if case.get("ratio") is not None], ids=str
)
def test_second_derivatives(case: Case) -> None:
    tests = TestPolicyLoss()
    tensors, settings, _ = tests.draw(case, 4, "cpu")
    leaf = tensors[0].clone().requires_grad_()
    found = []
    for way, function in (("op", None), ("formula", _losses)):
        x = leaf if way == "op" else leaf.double()
        wide = tuple(t.double() if t is not None and t.is_floating_point() else t for t in tensors[1:])
        loss = (
            tests.call(liger_aot.load("policy_loss"), (x, *tensors[1:]), settings)
            if function is None
            else function(tests, (x, *wide, *settings))
        )
        (first,) = torch.autograd.grad(loss.square().sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(first.sin().sum(), leaf)[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5 * float(found[1].abs().max()) + 1e-7)


def _losses(tests: TestPolicyLoss, arguments: Sequence[Any]) -> Tensor:
    """The loss as the papers have it, for autograd: what is a constant there is detached here."""
    names = (*tests.tensor_names(), *tests.setting_names())
    v = dict(zip(names, arguments, strict=True))
    logp, mask, loss_type = v["logp"], v["mask"], v["loss_type"]
    counts = torch.ones_like(logp) if mask is None else mask.bool().to(logp)
    old = logp.detach() if v["old_logp"] is None else v["old_logp"]
    advantages = v["advantages"].reshape(len(logp), -1)
    ratio = None if v["sampling_ratio"] is None else v["sampling_ratio"].reshape(len(logp), -1)
    logs = logp - old
    if v["importance_sampling_level"] == "sequence":
        logs = ((logs * counts).sum(-1, keepdim=True) / counts.sum(-1, keepdim=True).clamp(min=1)).expand_as(
            logp
        )
    weight = logs.exp()
    if loss_type in CLIPPED:
        limited = torch.clamp(weight, 1 - v["eps_low"], 1 + v["eps_high"])
        most = weight if v["delta"] is None else weight.clamp(max=v["delta"])
        loss = -torch.min(most * advantages, limited * advantages)
    elif loss_type == "cispo":
        loss = -weight.clamp(max=v["eps_high"]).detach() * advantages * logp
    elif loss_type == "sapo":
        positive, negative = (
            torch.sigmoid(t * (weight - 1)) * 4 / t
            for t in (v["sapo_temperature_pos"], v["sapo_temperature_neg"])
        )
        loss = -torch.where(advantages > 0, positive, negative) * advantages
    elif v["sequence_weight"] is not None:
        loss = -v["sequence_weight"].reshape(-1, 1) * advantages * logp
    else:
        total = (logs.clamp(-20, 20) * counts).sum(-1, keepdim=True)
        if ratio is not None:
            total = total + ratio.log().clamp(log(1e-8), 20).sum(-1, keepdim=True)
        total = total.clamp(log(1e-8), 20).detach()
        of_sign = [
            torch.exp(
                v[f"vespo_lambda_{sign}"]
                + v[f"vespo_k_{sign}"] * total
                - v[f"vespo_lambda_{sign}"] * total.exp()
            )
            for sign in ("pos", "neg")
        ]
        loss = -torch.where(advantages >= 0, *of_sign) * advantages * logp
    if ratio is not None and loss_type != "vespo":
        loss = loss * ratio
    if v["beta"]:
        away = v["ref_logp"] - logp
        kl = away.exp() - away - 1
        loss = loss + v["beta"] * (kl * weight if v["use_bias_correction_kl"] else kl)
    loss = loss * counts
    if v["reduction"] == "none":
        return loss
    b, length = logp.shape
    of_sequences = counts.sum(-1)
    if loss_type in ("grpo", "sapo"):
        return (loss.sum(-1) / of_sequences.clamp(min=1)).mean()
    if loss_type == "luspo":
        return (loss * of_sequences[:, None]).mean()
    if loss_type == "dr_grpo":
        return loss.sum() / (b * (v["max_completion_length"] or length))
    tokens = of_sequences.sum() if v["normalizer"] is None else v["normalizer"]
    return loss.sum() / tokens.clamp(min=1)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_other_dtypes_are_converted(dtype: torch.dtype) -> None:
    op = liger_aot.load("policy_loss")
    logp = (-torch.rand(3, 7)).to(dtype).requires_grad_()
    old, advantages = logp.detach() + 0.1, torch.randn(3).to(dtype)
    loss, _, _ = op(logp, old, None, advantages)
    wide, _, _ = op(logp.detach().float(), old.float(), None, advantages.float())
    (dlogp,) = torch.autograd.grad(loss, logp)
    assert loss.dtype == FP32 and torch.equal(loss.detach(), wide) and dlogp.dtype == dtype
