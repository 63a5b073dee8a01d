"""DyT on every driver: weight and bias each optional, parameters of x's dtype or float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import liger_aot
from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.norms.dyt import DyT
from tests.harness.op_tests import BF16, DTYPES, FP16, FP32, Case, Draw, Exact, OpTests

X, ONE, ROW = torch.ones(2, 8), torch.ones(1), torch.ones(8)


class TestDyT(OpTests):
    op_class = DyT
    cases = (
        Case((3, 5, 48), BF16),
        Case((1, 1), BF16),
        Case((7, 1), FP32),
        Case((5, 37), FP16),
        Case((2, 3, 1000), FP32),
        Case((4, 17), BF16, shift=3),
        Case((5, 48), BF16, gap=16, weight=FP32),
        Case((40, 144), BF16, weight=FP32),
        Case((3, 2064), FP16, gap=5, weight=FP32),
        Case((3, 1040), BF16, weight=FP32),
        Case((70, 528), BF16),
        Case((9, 1000), FP32, shift=3, gap=5),
        Case((1040,), BF16),
        Case((5, 64), BF16, without=("weight",)),
        Case((5, 65), FP32, without=("bias",)),
        Case((5, 64), FP16, without=("weight", "bias"), weight=FP32),
        Case((3, 32), BF16, scalar=True),
        Case((3, 640), FP32, size=30.0),
        Case((3, 640), FP32, size=1e-6),
    )
    empty = (Case((0, 16), BF16), Case((4, 0), FP32))
    large = tuple(
        Case(((1 << 25) // n, n), dtype, weight=weight)
        for n in (128, 512, 5120, 8192, 18944, 100_002)
        for dtype in DTYPES
        for weight in dict.fromkeys((dtype, FP32))
    )
    beyond = (Case(((1 << 31) // 8192 + 64, 8192), BF16),)
    bad: Mapping[str, Any] = {
        "a scalar": ((torch.tensor(1.0), ONE), {}, ArgumentError, "x must have at least one dimension"),
        "many alphas": ((X, ROW), {}, ArgumentError, r"alpha must have one element, got shape \(8,\)"),
        "alpha's dtype": ((X, ONE.to(BF16)), {}, ArgumentTypeError, "alpha must be of x's dtype"),
        "weight's shape": (
            (X, ONE, torch.ones(7)),
            {},
            ArgumentError,
            r"weight must be.*\(8,\).*got shape \(7,\)",
        ),
        "weight's dtype": ((X, ONE, ROW.to(BF16)), {}, ArgumentTypeError, "weight must be of alpha's dtype"),
        "bias's shape": ((X, ONE, None, X), {}, ArgumentError, r"bias must be.*got shape \(2, 8\)"),
        "bias strided": (
            (X, ONE, ROW, torch.ones(16)[::2]),
            {},
            ArgumentError,
            r"bias must be.*strides \(2,\)",
        ),
        "integers": ((X.int(), ONE), {}, ArgumentTypeError, "x must be bfloat16.*got int32"),
    }

    def tensors(self, case: Case, draw: Draw) -> Tensors:
        n, dtype = case.shape[-1], case.get("weight", case.dtype)
        x = draw.rows(*case.shape).mul_(case.get("size", 1.0))
        alpha = draw.dense(*(() if case.get("scalar") else (1,)), dtype=dtype)
        without = case.get("without", ())
        weight = None if "weight" in without else draw.dense(n, dtype=dtype)
        return x, alpha, weight, None if "bias" in without else draw.dense(n, dtype=dtype)

    def formula(self, x: Tensor, alpha: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        z = 2 * alpha * x
        tanh = torch.expm1(z.clamp(max=80)) / (torch.exp(z.clamp(max=80)) + 1)
        y = tanh if weight is None else weight * tanh
        return y if bias is None else y + bias

    def limits(self, exact: Exact) -> Mapping[str, Mapping[str, Any]]:
        """The parameters' gradients are sums; exp(-2 |z|) is off by 2 |z| roundoffs."""
        x, alpha, weight, bias = (exact.inputs[name] for name in ("x", "alpha", "weight", "bias"))
        (dy,) = exact.grads
        z = alpha * x
        tanh, scale = torch.tanh(z), torch.ones_like(x) if weight is None else weight.expand(x.shape)
        slope = 1 / torch.cosh(z.clamp(-300, 300)).square()
        dz = (dy * scale).abs() * slope * (1 + z.abs().clamp(max=60) / 8)
        outer = tuple(range(x.dim() - 1))
        add = (lambda t: t.sum(outer)) if outer else (lambda t: t)
        return {
            "y": {"magnitude": (scale * tanh).abs() + (0 if bias is None else bias.abs())},
            "dx": {"magnitude": dz * alpha.abs()},
            "dalpha": {"magnitude": (dz * x.abs()).sum().reshape(alpha.shape)},
            "dweight": {"magnitude": add((dy * tanh).abs())},
            "dbias": {"magnitude": add(dy.abs())},
        }

    def table_case(
        self, kernel: str, dtypes: Mapping[str, torch.dtype], n: int, aligned: bool, rows: int
    ) -> Case | None:
        return super().table_case(kernel, {"dtype": dtypes.get("weight"), **dtypes}, n, aligned, rows)


def test_extremes() -> None:
    """No NaN where tanh is flat; the sign of zero is kept."""
    x = torch.tensor([-3e38, -100.0, -0.0, 0.0, 100.0, 3e38], requires_grad=True)
    y = liger_aot.load("dyt")(x, torch.ones(1))
    assert torch.equal(y, torch.sign(x)) and torch.equal(y.signbit(), x.signbit())
    (dx,) = torch.autograd.grad(y, x, torch.ones(6))
    assert torch.equal(dx, (x == 0).float())
