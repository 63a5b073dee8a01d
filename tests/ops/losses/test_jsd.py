"""jsd: every beta, labels, and probabilities of zero, on every driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_aot.errors import ArgumentError
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.losses.jsd import JSD, summands_and_slopes
from tests.harness.op_tests import BF16, FP16, FP32, WAYS, Case, Draw, Exact, Way
from tests.ops.losses.divergence_cases import LARGE, DivergenceTests, bad_inputs, bad_labels

A = torch.full((3, 8), 0.125).log()


class TestJSD(DivergenceTests):
    op_class = JSD
    defaults: Mapping[str, Any] = {"beta": 0.5, "ignore_index": -100}
    frozen = ("target",)
    settings_of = {"forward": {"beta": 0.0}, "reverse": {"beta": 1.0}}  # noqa: RUF012
    cases = (
        *DivergenceTests.base_cases(),
        *DivergenceTests.labelled_cases(),
        *(
            Case(shape, dtype, beta=beta, **options)
            for beta in (0.0, 1.0, 0.1, 0.9, 1e-3)
            for shape, dtype, options in (
                ((4, 48), BF16, {}),
                ((3, 1001), FP32, {"labels": torch.int64, "ignore_index": 1 << 40}),
                ((3, 37), FP16, {"labels": torch.int32, "ignore_index": 5}),
            )
        ),
    )
    large = (
        *LARGE,
        *(Case((256, 128256), BF16, beta=beta, labels=torch.int64) for beta in (0.0, 0.5, 1.0)),
    )
    bad: Mapping[str, Any] = {
        **bad_inputs("input", "target"),
        **bad_labels("input"),
        "beta above 1": ((A, A), {"beta": 1.5}, ArgumentError, "beta must be from 0 to 1, got 1.5"),
        "beta below 0": ((A, A), {"beta": -0.1}, ArgumentError, "beta must be from 0 to 1"),
        "beta is NaN": ((A, A), {"beta": float("nan")}, ArgumentError, "beta must be from 0 to 1"),
    }

    def tensors(self, case: Case, draw: Draw) -> Tensors:
        return *self.distributions(case, draw), self.labels(case, draw)

    def formula(
        self, input: Tensor, target: Tensor, shift_labels: Tensor | None, beta: float, ignore_index: int
    ) -> Tensor:
        def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
            return torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)

        if beta == 0:
            rows = kl(target, input)
        elif beta == 1:
            rows = kl(input, target)
        else:
            mixed = (beta * target.exp() + (1 - beta) * input.exp()).log()
            rows = beta * kl(target, mixed) + (1 - beta) * kl(input, mixed)
        if shift_labels is None:
            return rows.mean()
        counts = shift_labels.long() != ignore_index
        return torch.where(counts, rows, 0).sum() / counts.sum().clamp(min=1)

    def sizes(self, exact: Exact) -> tuple[Tensor, Tensor]:
        """Logarithms have absolute errors of some roundoffs of 1, those of sums of powers as well: each probability
        counts once more."""
        x, y, beta = exact.inputs["input"], exact.inputs["target"], exact.settings["beta"]
        q, p = x.exp(), y.exp()
        if beta == 0:
            return p * (y.abs() + x.abs() + 1), p * (1 + y.abs())
        if beta == 1:
            size = q * (x.abs() + y.abs() + 1)
            return size, size + q
        size = 1 + x.abs() + y.abs()
        return (beta * p + (1 - beta) * q) * size, (1 - beta) * q * size

    @pytest.mark.parametrize("way", [w for w in WAYS if "interpreter" not in str(w)], indirect=True)
    @pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
    def test_zero_probabilities(self, way: Way, beta: float) -> None:
        """Tokens that both models mask add nothing; NaN stays NaN. (The interpreter's minimum keeps the NaN of a
        difference of infinities.)"""
        n = 48
        x = torch.randn(4, n, generator=torch.Generator().manual_seed(1))
        y = torch.randn(4, n, generator=torch.Generator().manual_seed(2))
        masked = torch.arange(n) >= 40
        x, y = (t.masked_fill(masked, -torch.inf).log_softmax(-1).to(way.device) for t in (x, y))
        leaf = x.clone().requires_grad_()
        loss = way.op(leaf, y, beta=beta)  # type: ignore[operator]
        (dx,) = torch.autograd.grad(loss, leaf, torch.full_like(loss, 3.0))
        wanted, slopes = summands_and_slopes(x[:, :40].double(), y[:, :40].double(), beta)
        torch.testing.assert_close(loss.detach().double(), wanted.sum() / 4, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(dx[:, :40].double(), slopes * 0.75, rtol=1e-5, atol=1e-6)
        assert not dx[:, 40:].any()
        x[1, 3] = torch.nan
        assert way.op(x, y, beta=beta).isnan()  # type: ignore[operator]

    @pytest.mark.parametrize("way", WAYS, indirect=True)
    @pytest.mark.parametrize("beta", [1e-42, 1e-9, 1e-4, 1 - 1e-4, 1 - 1e-9])
    def test_small_weights(self, way: Way, beta: float) -> None:
        """A small weight keeps its digits where its distribution has most of the mixture. One that float32 takes for
        zero does not make NaN of tokens that the other model masks."""
        generator = torch.Generator().manual_seed(1)
        x, y = (torch.randn(4, 48, generator=generator) * 8 for _ in range(2))
        x[:, 3], y[:, 5] = -400.0, -400.0
        tensors = x.log_softmax(-1).to(way.device), y.log_softmax(-1).to(way.device), None
        settings, grads = (beta, -100), (torch.ones((), device=way.device),)
        got = self.run(way.op, tensors, settings, grads)
        exact = self.exact(tensors, settings, grads, got)
        self.compare(got, exact, tensors, way.allowed, f"beta {beta}")

    @pytest.mark.parametrize("way", [w for w in WAYS if "interpreter" not in str(w)], indirect=True)
    def test_disjoint_distributions(self, way: Way) -> None:
        """Where one model's probability is zero, the mixture's is the other's share: log(2) in all for beta = 0.5."""
        x = torch.full((2, 64), -torch.inf, device=way.device)
        y = x.clone()
        x[:, :32], y[:, 32:] = -(32.0**0.5), -(32.0**0.5)
        x, y = x.log_softmax(-1), y.log_softmax(-1)
        loss = way.op(x.requires_grad_(), y)  # type: ignore[operator]
        (dx,) = torch.autograd.grad(loss, x)
        torch.testing.assert_close(loss.item(), 0.6931471805599453, rtol=1e-6, atol=0)
        torch.testing.assert_close(dx[:, :32], torch.full_like(dx[:, :32], 0.5 * 0.6931471805599453 / 32 / 2))
        assert not dx[:, 32:].any()


def test_an_ignored_index_that_no_label_can_be() -> None:
    """torch takes 2^40 for 0 where it compares it with int32."""
    op, labels = JSD(), torch.zeros(3, dtype=torch.int32)
    target = torch.randn(3, 8).log_softmax(-1)
    assert torch.equal(op(A, target, labels, ignore_index=1 << 40), op(A, target))
