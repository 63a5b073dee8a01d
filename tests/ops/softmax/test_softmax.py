"""Softmax: temperatures, masks and long rows, on every driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.softmax.softmax import Softmax
from tests.harness.op_tests import BF16, DTYPES, FP16, FP32, WAYS, Case, Draw, Exact, OpTests, Results, Way
from tests.ops.softmax.softmax_rows import SPECIAL, check_special_rows

X = torch.ones(2, 8)


# NumPy's, on the interpreter: a difference to -inf or to the lowest value is meant to overflow
@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered")
class TestSoftmax(OpTests):
    op_class = Softmax
    defaults = {"temperature": 1.0}  # noqa: RUF012
    cases = (
        Case((3, 5, 48), BF16),
        Case((1, 1), BF16),
        Case((7, 1), FP32),
        Case((5, 37), FP16, temperature=0.5),
        Case((2, 3, 1000), FP32, temperature=3.0),
        Case((4, 17), BF16, shift=3),
        Case((5, 48), BF16, gap=16, temperature=0.1),
        Case((3, 1040), FP16, gap=5),
        Case((9, 1000), FP32, shift=3, gap=5),
        Case((5001,), BF16, shift=1),
        Case((8192,), BF16),
        Case((3, 40), FP32, size=1e4),
        Case((3, 40), BF16, size=1e4, temperature=1e4),
        Case((17008,), BF16, size=300.0),  # a sum's logarithm that rounding would spoil in fp16
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
        "integers": ((X.int(),), {}, ArgumentTypeError, "x must be bfloat16.*got int32"),
        "zero": (
            (X,),
            {"temperature": 0.0},
            ArgumentError,
            "temperature must be from 1.17549e-38 to .*got 0.0",
        ),
        "below zero": ((X,), {"temperature": -1}, ArgumentError, "temperature must be from .*got -1"),
        "infinite": ((X,), {"temperature": float("inf")}, ArgumentError, "temperature.*got inf"),
        "nan": ((X,), {"temperature": float("nan")}, ArgumentError, "temperature.*got nan"),
        "a string": ((X,), {"temperature": "hot"}, ArgumentTypeError, "temperature must be a number.*str"),
        "a bool": ((X,), {"temperature": True}, ArgumentTypeError, "temperature must be a number.*bool"),
    }

    def tensors(self, case: Case, draw: Draw) -> Tensors:
        return (draw.rows(*case.shape).mul_(case.get("size", 2.0)),)

    def formula(self, x: Tensor, temperature: float) -> Tensor:
        powers = torch.exp((x - x.amax(-1, keepdim=True).detach()) / temperature)
        return powers / powers.sum(-1, keepdim=True)

    def saved(self, wide: Tensors, results: Tensors, got: Results) -> Tensors:
        return (got.outputs[0].double(),)

    def limits(self, exact: Exact) -> Mapping[str, Mapping[str, Any]]:
        x, t = exact.inputs["x"], exact.settings["temperature"]
        (dy,), y = exact.grads, exact.results[0]
        if not x.numel():
            return {}
        factor = (dy.abs() + (y * dy.abs()).sum(-1, keepdim=True)) / t
        return {
            "y": {"magnitude": exponential_terms(x / t, y)},
            "dx": {"magnitude": y * factor * 1.01, "scale": 1 + factor},
        }

    @pytest.mark.parametrize("way", WAYS, indirect=True)
    @pytest.mark.parametrize("n,dtype", SPECIAL)
    def test_special_rows(self, way: Way, n: int, dtype: torch.dtype) -> None:
        check_special_rows(self, way, n, dtype)

    def test_integer_temperature(self) -> None:
        x = torch.randn(3, 20)
        op = self.loaded_op()
        assert torch.equal(op(x, temperature=2), op(x, temperature=2.0))


def exponential_terms(x: Tensor, y: Tensor) -> Tensor:
    """An error of the exponent's is relative to the exponent, and one of y relative to y."""
    return y * (1 + (x - x.amax(-1, keepdim=True)).abs()).clamp(max=1e6)
