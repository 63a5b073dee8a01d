"""tvd: every reduction, labels, and equal probabilities, on every driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_aot.errors import ArgumentError
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.losses.tvd import TVD
from tests.harness.op_tests import BF16, FP16, FP32, WAYS, Case, Draw, Exact, Way
from tests.ops.losses.divergence_cases import LARGE, DivergenceTests, bad_inputs, bad_labels

A = torch.full((3, 8), 0.125)


class TestTVD(DivergenceTests):
    op_class = TVD
    defaults: Mapping[str, Any] = {"reduction": "batchmean", "ignore_index": -100}
    frozen = ("q",)
    cases = (
        *DivergenceTests.base_cases(),
        *DivergenceTests.labelled_cases(),
        *DivergenceTests.labelled_cases(reduction="none"),
        *(
            Case(shape, dtype, reduction=reduction, **options)
            for reduction in ("none", "sum", "mean")
            for shape, dtype, options in (
                ((4, 48), BF16, {}),
                ((3, 1001), FP32, {"labels": torch.int64}),
                ((2, 3, 37), FP16, {"labels": torch.int32}),
            )
        ),
    )
    large = (*LARGE, Case((256, 128256), BF16, labels=torch.int64, reduction="mean"))
    bad: Mapping[str, Any] = {
        **bad_inputs("p", "q"),
        **bad_labels("p"),
        "a reduction": ((A, A), {"reduction": None}, ArgumentError, "reduction must be one of none.*None"),
    }

    def tensors(self, case: Case, draw: Draw) -> Tensors:
        p, q = self.distributions(case, draw)
        return p.copy_(p.float().exp()), q.copy_(q.float().exp()), self.labels(case, draw)

    def formula(
        self, p: Tensor, q: Tensor, shift_labels: Tensor | None, reduction: str, ignore_index: int
    ) -> Tensor:
        summands = (p - q).abs() / 2
        count = torch.tensor(p.shape[:-1].numel())
        if shift_labels is not None:
            counts = shift_labels != ignore_index
            summands, count = summands * counts.unsqueeze(-1), counts.sum().clamp(min=1)
        if reduction == "none":
            return summands
        divisor = {"sum": 1, "mean": count * p.shape[-1], "batchmean": count}[reduction]
        return summands.sum() / divisor

    def sizes(self, exact: Exact) -> tuple[Tensor, Tensor]:
        p, q = exact.inputs["p"], exact.inputs["q"]
        return (p.abs() + q.abs()) / 2, torch.full_like(p, 0.5)

    @pytest.mark.parametrize("way", WAYS, indirect=True)
    def test_equal_and_nan(self, way: Way) -> None:
        """Equal probabilities have a gradient of 0; NaN stays NaN."""
        p = torch.tensor([[0.5, 0.25, 0.25]], device=way.device, requires_grad=True)
        q = torch.tensor([[0.25, 0.5, 0.25]], device=way.device)
        (dp,) = torch.autograd.grad(way.op(p, q), p)  # type: ignore[operator]
        assert dp.tolist() == [[0.5, -0.5, 0.0]]
        q[0, 1] = torch.nan
        loss = way.op(p, q)  # type: ignore[operator]
        (dp,) = torch.autograd.grad(loss, p)
        assert loss.isnan() and dp[0, 1].isnan() and not dp[0, 0].isnan()
