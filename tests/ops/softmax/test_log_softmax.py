"""Log-softmax: masks and long rows, on every driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from liger_aot.ops.softmax.log_softmax import LogSoftmax
from tests.harness.op_tests import BF16, FP16, FP32, Case, Exact
from tests.ops.softmax.softmax_rows import ProbabilityTests


class TestLogSoftmax(ProbabilityTests):
    op_class = LogSoftmax
    cases = (
        Case((3, 5, 48), BF16),
        Case((1, 1), BF16),
        Case((7, 1), FP32),
        Case((5, 37), FP16),
        Case((2, 3, 1000), FP32),
        Case((4, 17), BF16, shift=3),
        Case((5, 48), BF16, gap=16),
        Case((3, 1040), FP16, gap=5),
        Case((9, 1000), FP32, shift=3, gap=5),
        Case((5001,), BF16, shift=1),
        Case((8192,), BF16),
        Case((3, 40), FP32, size=1e4),
        Case((17008,), FP16, size=300.0),
        Case((17000,), FP16, size=5.0),
    )

    def formula(self, x: Tensor) -> Tensor:
        shifted = x - x.amax(-1, keepdim=True).detach()
        return shifted - shifted.exp().sum(-1, keepdim=True).log()

    def limits(self, exact: Exact) -> Mapping[str, Mapping[str, Any]]:
        """The logarithm is of a sum whose greatest term is 1. dx is of the y that was rounded and saved: see saved."""
        x, (dy,), y = exact.inputs["x"], exact.grads, exact.results[0]
        if not x.numel():
            return {}
        shifted = x - x.amax(-1, keepdim=True)
        total = (shifted - y).abs().nan_to_num(0, 0, 0).amax(-1, keepdim=True)
        sums = dy.abs().sum(-1, keepdim=True)
        return {
            "y": {"magnitude": shifted.abs() + total + 1},
            "dx": {"magnitude": dy.abs() + y.exp() * (1 + y.abs()).nan_to_num(0, 0, 0) * sums * 1.1},
        }
