"""kl_div: both kinds of targets and every reduction, on every driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_aot.errors import ArgumentError
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.losses.kl_div import KLDiv
from tests.harness.op_tests import BF16, FP16, FP32, WAYS, Case, Draw, Exact, Way
from tests.ops.losses.divergence_cases import LARGE, DivergenceTests, bad_inputs

A = torch.full((3, 8), 0.125)


class TestKLDiv(DivergenceTests):
    op_class = KLDiv
    defaults: Mapping[str, Any] = {"reduction": "batchmean", "log_target": False, "eps": 1e-10}
    frozen = ("target",)
    settings_of = {"forward": {"log_target": True}}  # noqa: RUF012
    labelled = False
    empty = (
        Case((4, 0), FP32),
        *(Case((0, 16), BF16, reduction=reduction) for reduction in ("sum", "none")),
    )
    cases = (
        *DivergenceTests.base_cases(),
        *DivergenceTests.base_cases(log_target=True),
        *DivergenceTests.base_cases(reduction="none"),
        *(
            Case(shape, dtype, reduction=reduction, log_target=log_target)
            for reduction in ("sum", "mean", "none")
            for log_target in (False, True)
            for shape, dtype in (((4, 48), BF16), ((2, 3, 37), FP32), ((3, 2064), FP16))
        ),
        Case((4, 48), FP32, eps=1e-3),
    )
    large = (*LARGE, *(case.but(log_target=True) for case in LARGE[:2]))
    bad: Mapping[str, Any] = {
        **bad_inputs("input", "target"),
        "a reduction": ((A, A), {"reduction": "max"}, ArgumentError, "reduction must be one of none.*'max'"),
    }

    def tensors(self, case: Case, draw: Draw) -> Tensors:
        x, y = self.distributions(case, draw)
        return x, y if case.get("log_target") else y.copy_(y.float().exp())

    def formula(self, input: Tensor, target: Tensor, reduction: str, log_target: bool, eps: float) -> Tensor:
        if not log_target:
            summands = target * (target.clamp(min=eps).log() - input)
        else:
            summands = target.exp() * (target - input)
        if reduction == "none":
            return summands
        divisor = {"sum": 1, "mean": input.numel(), "batchmean": input.shape[0]}[reduction]
        return summands.sum() / divisor

    @pytest.mark.parametrize("way", WAYS, indirect=True)
    def test_one_gradient_for_all_rows(self, way: Way) -> None:
        """As the sum over the rows of single losses gives it: a row that is read again and again."""

        def one_row(t: Tensor) -> Tensor:
            return t[:1].expand(t.shape)

        for shape in ((2, 1), (5, 48), (3, 1040)):
            case = Case(shape, FP32, reduction="none")
            self.check(way.op, case, way.allowed, device=way.device, layout=one_row)

    def sizes(self, exact: Exact) -> tuple[Tensor, Tensor]:
        """A probability's logarithm has an absolute error of some roundoffs of 1; a power, some of its exponent."""
        x, y = exact.inputs["input"], exact.inputs["target"]
        if exact.settings["log_target"]:
            p = y.exp()
            return p * (y.abs() + x.abs() + 1) * (1 + y.abs()), p * (1 + y.abs())
        logs = y.clamp(min=exact.settings["eps"]).log()
        return y * (logs.abs() + x.abs() + 1), y

    @pytest.mark.parametrize("way", WAYS, indirect=True)
    @pytest.mark.parametrize("log_target", [False, True])
    def test_zero_probabilities(self, way: Way, log_target: bool) -> None:
        """A target of zero adds nothing, even where the input is -inf; NaN stays NaN."""
        y = torch.tensor([[0.0, 0.25, 0.75, 0.0]], device=way.device)
        x = torch.tensor([[-torch.inf, -1.0, -2.0, -3.0]], device=way.device, requires_grad=True)
        target = y.log() if log_target else y
        loss = way.op(x, target, log_target=log_target)  # type: ignore[operator]
        (dx,) = torch.autograd.grad(loss, x)
        wanted = 0.25 * (torch.tensor(0.25).log() + 1) + 0.75 * (torch.tensor(0.75).log() + 2)
        torch.testing.assert_close(loss.detach().cpu(), wanted, rtol=1e-5, atol=0)
        torch.testing.assert_close(dx, -y, rtol=1e-5, atol=0)
        target = torch.where(target == target[0, 1], torch.nan, target)
        assert way.op(x, target, log_target=log_target).isnan()  # type: ignore[operator]
        target = y.log() if log_target else y
        with torch.no_grad():
            x[0, 1] = torch.nan
        assert way.op(x.detach(), target, log_target=log_target).isnan()  # type: ignore[operator]

    @pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
    @pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
    @pytest.mark.parametrize("log_target", [False, True])
    def test_like_torch(self, reduction: str, log_target: bool) -> None:
        x, y = (torch.randn(3, 4, 7, dtype=torch.float64).log_softmax(-1) for _ in range(2))
        y = y if log_target else y.exp()
        for rows in (3, 0):
            got = KLDiv.reference(x[:rows], y[:rows], reduction, log_target, 1e-10)[0]
            wanted = torch.nn.functional.kl_div(
                x[:rows], y[:rows], reduction=reduction, log_target=log_target
            )
            torch.testing.assert_close(got, wanted, equal_nan=True)
