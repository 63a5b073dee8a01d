"""LayerNorm with and without weight and bias, in x's dtype and in float32, on every driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.norms.layernorm import LayerNorm
from tests.harness.op_tests import BF16, DTYPES, FP16, FP32, WAYS, Case, Draw, Exact, OpTests, Way, slow_on

X, V = torch.ones(2, 8), torch.ones(8)


class TestLayerNorm(OpTests):
    op_class = LayerNorm
    defaults: Mapping[str, Any] = {"eps": 1e-5}
    cases = (
        Case((3, 5, 48), BF16),
        Case((1, 1), BF16),
        Case((7, 1), FP32, weight=None, bias=None),
        Case((5, 37), FP16, wide=True, eps=0.1),
        Case((2, 3, 1000), FP32, bias=None),
        Case((4, 17), BF16, shift=3, weight=None),
        Case((5, 48), BF16, gap=16, wide=True, bias=None),
        Case((3, 1040), FP16, gap=5, weight=None, wide=True),
        Case((9, 1000), BF16, shift=3, gap=5, weight=None, bias=None),
        Case((600, 32), BF16),
        Case((130,), FP32),
        Case((3, 4200), FP32, offset=1000.0),
        Case((3, 4200), FP16, offset=50.0),
        Case((2, 9008), BF16, wide=True),
        Case((1, 9008), FP16, wide=True, shift=1),
        Case((3, 5120), BF16),
        Case((5, 11008), BF16, gap=16, offset=30.0, bias=None),
        Case((4, 16384), BF16, weight=None),
    )
    empty = (Case((0, 16), BF16), Case((4, 0), FP32))
    large = tuple(
        Case(((1 << 25) // n, n), dtype, wide=wide)
        for n in (128, 1024, 2048, 4096, 5120, 8192, 11008, 14336, 16384, 18944, 32768, 70_000)
        for dtype in DTYPES
        for wide in (False, True)
    )
    beyond = (Case(((1 << 31) // 4096 + 64, 4096), BF16), Case(((1 << 31) // 16384 + 64, 16384), BF16))
    bad: Mapping[str, Any] = {
        "a scalar": ((torch.tensor(1.0),), {}, ArgumentError, "x must have at least one dimension"),
        "weight too long": (
            (X, torch.ones(9)),
            {},
            ArgumentError,
            r"weight must be .* shape \(8,\).*got shape \(9,\)",
        ),
        "bias 2-D": (
            (X, V, torch.ones(1, 8)),
            {},
            ArgumentError,
            r"bias must be .* shape \(8,\).*got shape \(1, 8\)",
        ),
        "strided weight": (
            (X, torch.ones(16)[::2]),
            {},
            ArgumentError,
            r"weight must be contiguous.*strides \(2,\)",
        ),
        "weight's dtype": (
            (X.to(BF16), V.to(FP16)),
            {},
            ArgumentTypeError,
            "x's dtype torch.bfloat16 or float32",
        ),
        "narrow weight": ((X, V.to(BF16)), {}, ArgumentTypeError, "x's dtype torch.float32 or float32"),
        "two dtypes": ((X.to(BF16), V, V.to(BF16)), {}, ArgumentTypeError, "bias must be of weight's dtype"),
        "a wide bias": ((X.to(BF16), V.to(BF16), V), {}, ArgumentTypeError, "bias must be of weight's dtype"),
        "integers": ((X.int(),), {}, ArgumentTypeError, "x must be bfloat16.*got int32"),
    }

    def tensors(self, case: Case, draw: Draw) -> Tensors:
        x = draw.rows(*case.shape)
        x.add_(case.get("offset", 0.5))
        dtype = FP32 if case.get("wide") and case.dtype != torch.float64 else case.dtype
        n = case.shape[-1]
        weight = None if case.get("weight", True) is None else draw.dense(n, dtype=dtype)
        return x, weight, None if case.get("bias", True) is None else draw.dense(n, dtype=dtype)

    def formula(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)

    def limits(self, exact: Exact) -> Mapping[str, Mapping[str, Any]]:
        x, weight, bias = (exact.inputs[name] for name in ("x", "weight", "bias"))
        (dy,), (_, stats) = exact.grads, exact.results
        mean, rstd = stats.reshape(*x.shape[:-1], 2).split(1, -1)
        normal = ((x - mean).abs() + x.abs().mean(-1, keepdim=True)) * rstd  # and what the mean's sum loses
        scale = torch.ones_like(x) if weight is None else weight.abs().expand_as(x)
        shift = 0.0 if bias is None else bias.abs()
        limits: dict[str, Mapping[str, Any]] = {"y": {"magnitude": normal * scale + shift}}
        if dy is not None:
            scaled = dy.abs() * scale
            along = (scaled * normal).mean(-1, keepdim=True)
            terms = scaled + normal * along + scaled.mean(-1, keepdim=True)
            rows = tuple(range(x.dim() - 1))
            limits["dx"] = {"magnitude": terms * rstd}
            limits["dweight"] = {"magnitude": (dy.abs() * normal).sum(rows) if rows else dy.abs() * normal}
            limits["dbias"] = {"magnitude": dy.abs().sum(rows) if rows else dy.abs()}
        return limits

    @pytest.mark.parametrize("way", slow_on(WAYS, "emulator"), indirect=True)
    def test_a_mean_of_nearly_zero(self, way: Way) -> None:
        """Its error is of the size of what is added up, not of its own."""
        tensors = sums_of_nearly_zero(8, way.device), None, None
        settings, grads = (self.defaults["eps"],), (torch.ones_like(tensors[0]),)
        got = self.run(way.op, tensors, settings, grads)
        exact = self.exact(tensors, settings, grads, got)
        self.compare(got, exact, tensors, way.allowed, "rows with a mean of nearly zero")


def sums_of_nearly_zero(rows: int, device: str) -> Tensor:
    """Rows of five whose first three add up to a rounding; the others are 0."""
    x = torch.randn(rows, 5, generator=torch.Generator().manual_seed(1))
    x[:, 2] = -(x[:, 0] + x[:, 1])
    x[:, 3:] = 0.0
    return x.to(device)
