"""Log-softmax: masks and long rows, on every driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.softmax.log_softmax import LogSoftmax
from tests.harness.op_tests import BF16, DTYPES, FP16, FP32, WAYS, Case, Draw, Exact, OpTests, Results, Way
from tests.ops.softmax.softmax_rows import SPECIAL, check_special_rows


# NumPy's, on the interpreter: a difference to -inf or to the lowest value is meant to overflow
@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered")
class TestLogSoftmax(OpTests):
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
    empty = (Case((0, 16), BF16), Case((4, 0), FP32))
    large = tuple(
        Case(((1 << 25) // n, n), dtype)
        for n in (128, 1000, 1024, 4096, 5120, 11008, 18944, 32768, 50257, 131072, 262144, 300_002)
        for dtype in DTYPES
    )
    beyond = (Case(((1 << 31) // 4096 + 96, 4096), BF16), Case(((1 << 31) // 131072 + 96, 131072), BF16))
    longest_interpreted = 140_000
    bad = {  # noqa: RUF012
        "a scalar": ((torch.tensor(1.0),), {}, ArgumentError, "x must have at least one dimension"),
        "integers": ((torch.ones(2, 8).int(),), {}, ArgumentTypeError, "x must be bfloat16.*got int32"),
    }

    def tensors(self, case: Case, draw: Draw) -> Tensors:
        return (draw.rows(*case.shape).mul_(case.get("size", 2.0)),)

    def formula(self, x: Tensor) -> Tensor:
        shifted = x - x.amax(-1, keepdim=True).detach()
        return shifted - shifted.exp().sum(-1, keepdim=True).log()

    def saved(self, wide: Tensors, results: Tensors, got: Results) -> Tensors:
        return (got.outputs[0].double(),)

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

    @pytest.mark.parametrize("way", WAYS, indirect=True)
    @pytest.mark.parametrize("n,dtype", SPECIAL)
    def test_special_rows(self, way: Way, n: int, dtype: torch.dtype) -> None:
        check_special_rows(self, way, n, dtype)
