"""Softmax: temperatures, masks and long rows, on every driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.softmax.softmax import Softmax
from tests.harness.op_tests import BF16, FP16, FP32, Case, Exact
from tests.ops.softmax.softmax_rows import ProbabilityTests

X = torch.ones(2, 8)


class TestSoftmax(ProbabilityTests):
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
    bad: Mapping[str, Any] = {
        **ProbabilityTests.bad,
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

    def formula(self, x: Tensor, temperature: float) -> Tensor:
        powers = torch.exp((x - x.amax(-1, keepdim=True).detach()) / temperature)
        return powers / powers.sum(-1, keepdim=True)

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

    def test_integer_temperature(self) -> None:
        x = torch.randn(3, 20)
        op = self.loaded_op()
        assert torch.equal(op(x, temperature=2), op(x, temperature=2.0))


def exponential_terms(x: Tensor, y: Tensor) -> Tensor:
    """An error of the exponent's is relative to the exponent, and one of y relative to y."""
    return y * (1 + (x - x.amax(-1, keepdim=True)).abs()).clamp(max=1e6)
