"""PolyNorm on every driver: parameters of x's dtype or float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.norms.poly_norm import PolyNorm
from tests.harness.op_tests import BF16, DTYPES, FP16, FP32, Case, Draw, Exact, OpTests

X, THREE, ONE = torch.ones(2, 8), torch.ones(3), torch.ones(1)


class TestPolyNorm(OpTests):
    op_class = PolyNorm
    defaults: Mapping[str, Any] = {"eps": 1e-6}
    cases = (
        Case((3, 5, 48), BF16),
        Case((1, 1), BF16),
        Case((7, 1), FP32),
        Case((5, 37), FP16),
        Case((2, 3, 1000), FP32),
        Case((4, 17), BF16, shift=3),
        Case((5, 48), BF16, gap=16, weight=FP32),
        Case((3, 1040), FP16, gap=5),
        Case((9, 1000), FP32, shift=3, gap=5),
        Case((528,), BF16),
        Case((3, 32), BF16, scalar=True, weight=FP32),
        Case((3, 64), FP32, eps=0.5),
        Case((3, 64), FP32, size=1e-3),
        Case((3, 64), BF16, size=300.0),
        Case((2, 2500), FP16, weight=FP32),
    )
    empty = (Case((0, 16), BF16), Case((4, 0), FP32))
    large = tuple(
        Case(((1 << 24) // n, n), dtype)
        for n in (128, 512, 2048, 5120, 8192, 14336, 18944, 100_002)
        for dtype in DTYPES
    )
    beyond = (Case(((1 << 31) // 8192 + 64, 8192), BF16),)
    bad: Mapping[str, Any] = {
        "a scalar": (
            (torch.tensor(1.0), THREE, ONE),
            {},
            ArgumentError,
            "x must have at least one dimension",
        ),
        "two weights": (
            (X, torch.ones(2), ONE),
            {},
            ArgumentError,
            r"weight must be.*\(3,\), got shape \(2,\)",
        ),
        "weight strided": (
            (X, torch.ones(6)[::2], ONE),
            {},
            ArgumentError,
            r"weight must be.*strides \(2,\)",
        ),
        "weight's dtype": ((X, THREE.to(BF16), ONE), {}, ArgumentTypeError, "weight must be of x's dtype"),
        "bias's shape": (
            (X, THREE, THREE),
            {},
            ArgumentError,
            r"bias must have one element, got shape \(3,\)",
        ),
        "bias's dtype": (
            (X.to(BF16), THREE, ONE.to(BF16)),
            {},
            ArgumentTypeError,
            "bias must be of weight's dtype torch.float32, got torch.bfloat16",
        ),
        "integers": ((X.int(), THREE, ONE), {}, ArgumentTypeError, "x must be bfloat16.*got int32"),
    }

    def tensors(self, case: Case, draw: Draw) -> Tensors:
        dtype = case.get("weight", case.dtype)
        x = draw.rows(*case.shape).mul_(case.get("size", 1.0))
        return x, draw.dense(3, dtype=dtype), draw.dense(*(() if case.get("scalar") else (1,)), dtype=dtype)

    def formula(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        def norm(u: Tensor) -> Tensor:
            return u / torch.sqrt((u * u).mean(-1, keepdim=True) + eps)

        return weight[0] * norm(x**3) + weight[1] * norm(x**2) + weight[2] * norm(x) + bias

    def limits(self, exact: Exact) -> Mapping[str, Mapping[str, Any]]:
        """All results are sums."""
        x, weight, bias = (exact.inputs[name] for name in ("x", "weight", "bias"))
        (dy,), n = exact.grads, max(x.shape[-1], 1)
        x, dy, w = x.abs(), dy.abs(), weight.abs()
        scales = exact.results[1].reshape(*x.shape[:-1], 3).unbind(-1)
        y, dx, dweight = bias.abs().reshape(()).expand(x.shape), torch.zeros_like(x), []
        for i, (power, scale) in enumerate(zip((3, 2, 1), scales, strict=True)):
            r, u = scale.unsqueeze(-1), x**power
            dot = (dy * u).sum(-1, keepdim=True)
            y = y + w[i] * r * u
            dx = dx + power * x ** (power - 1) * w[i] * (r * dy + r**3 * u * dot / n)
            dweight.append((dot * r).sum())
        return {
            "y": {"magnitude": y},
            "dx": {"magnitude": dx},
            "dweight": {"magnitude": torch.stack(dweight)},
            "dbias": {"magnitude": dy.sum().reshape(bias.shape)},
        }

    def table_case(
        self, kernel: str, dtypes: Mapping[str, torch.dtype], n: int, aligned: bool, rows: int
    ) -> Case | None:
        return super().table_case(kernel, {"dtype": dtypes.get("weight", BF16), **dtypes}, n, aligned, rows)
