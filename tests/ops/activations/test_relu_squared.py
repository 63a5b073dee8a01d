"""Squared ReLU on every driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import liger_aot
from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.activations.relu_squared import ReLUSquared
from liger_aot.ops.differentiable import Tensors
from tests.harness.op_tests import BF16, DTYPES, FP16, FP32, Case, Draw, OpTests


class TestReLUSquared(OpTests):
    op_class = ReLUSquared
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
        Case((4100,), BF16),
    )
    empty = (Case((0, 16), BF16), Case((4, 0), FP32))
    large = tuple(Case(((1 << 25) // n, n), dtype) for n in (128, 5120, 14336, 300_002) for dtype in DTYPES)
    beyond = (Case(((1 << 31) // 14336 + 64, 14336), BF16),)
    bad: Mapping[str, Any] = {
        "a scalar": ((torch.tensor(1.0),), {}, ArgumentError, "x must have at least one dimension"),
        "integers": ((torch.ones(2, 8).int(),), {}, ArgumentTypeError, "x must be bfloat16.*got int32"),
    }

    def tensors(self, case: Case, draw: Draw) -> Tensors:
        return (draw.rows(*case.shape),)

    def formula(self, x: Tensor) -> Tensor:
        return x.clamp(min=0) * x


def test_nan_stays_and_infinity_gives_no_nan() -> None:
    x = torch.tensor([torch.nan, -torch.inf, torch.inf, -0.0], requires_grad=True)
    y = liger_aot.load("relu_squared")(x)
    (dx,) = torch.autograd.grad(y, x, torch.ones(4))
    expected = torch.tensor([torch.nan, 0.0, torch.inf, 0.0])
    assert torch.equal(y.detach().nan_to_num(5.0), expected.nan_to_num(5.0))
    assert torch.equal(dx.nan_to_num(5.0), expected.nan_to_num(5.0))
