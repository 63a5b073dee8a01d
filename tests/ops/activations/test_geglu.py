"""GeGLU: both approximations, gate and up apart and packed, on every driver."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_aot
from liger_aot.errors import ArgumentError
from liger_aot.ops.activations.geglu import GeGLU
from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from tests.harness.op_tests import BF16, DTYPES, FP16, FP32, Case, Exact
from tests.ops.activations.gated_tests import GATE, GatedTests


class TestGeGLU(GatedTests):
    op_class = GeGLU
    defaults: Mapping[str, Any] = {"exact": False}
    cases = (
        Case((3, 5, 48), BF16),
        Case((3, 5, 48), BF16, exact=True),
        Case((1, 1), BF16),
        Case((7, 1), FP32, exact=True),
        Case((5, 37), FP16),
        Case((2, 3, 1000), FP32),
        Case((2, 1040), FP32, exact=True),
        Case((4, 17), BF16, shift=3),
        Case((5, 48), FP16, gap=16, exact=True),
        Case((9, 1000), FP32, shift=3, gap=5),
        Case((3, 64), BF16, packed=True),
        Case((4, 2), FP32, packed=True),
        Case((5, 96), BF16, packed=True, shift=1, gap=3, exact=True),
        Case((2, 2080), FP32, packed=True, gap=16),
        Case((130,), FP16, packed=True),
        Case((3, 40), BF16, size=60.0),
        Case((3, 40), BF16, size=60.0, exact=True),
        Case((3, 400), FP32, size=200.0),
        Case((3, 400), FP32, size=200.0, exact=True),
    )
    large = tuple(
        Case(((1 << 25) // n, n), dtype, packed=packed, exact=exact)
        for n in (128, 5120, 14336, 18944, 300_002)
        for dtype in DTYPES
        for packed, exact in ((False, False), (True, True))
    )
    bad: Mapping[str, Any] = {
        **GatedTests.bad,
        "unknown approximation": (
            (GATE, GATE),
            {"approximate": "sigmoid"},
            ArgumentError,
            "approximate must be one of tanh, none; got 'sigmoid'",
        ),
    }

    def call(self, op: DifferentiableOp, tensors: Tensors, settings: tuple[Any, ...]) -> Any:
        return op(*tensors, approximate="none" if settings[0] else "tanh")  # type: ignore[operator]

    def formula(self, gate: Tensor, up: Tensor | None, exact: bool) -> Tensor:
        a, b = gate.chunk(2, -1) if up is None else (gate, up)
        near = torch.nn.functional.gelu(a, approximate="none" if exact else "tanh")
        # 1 + erf and 1 + tanh cancel far below zero, in float64 too
        phi = (
            torch.special.erfc(-a * math.sqrt(0.5)) / 2
            if exact
            else torch.sigmoid(1.5957691216057308 * (a + 0.044715 * a**3))
        )
        return torch.where(a < -2, a * phi, near) * b

    def limits(self, exact: Exact) -> Mapping[str, Mapping[str, Any]]:
        """An exponent x is rounded before the exponential is taken: x roundoffs of the result, for each rounding. dgate
        is a sum that cancels near -0.75."""
        gate, up, (dy,) = exact.inputs["gate"], exact.inputs["up"], exact.grads
        a, b = gate.chunk(2, -1) if up is None else (gate, up)
        if exact.settings["exact"]:
            exponent = a.square() / 2
            phi = torch.special.erfc(-a * math.sqrt(0.5)) / 2
            second = a * torch.exp(-exponent) / math.sqrt(2 * math.pi)
        else:
            exponent = 1.6 * (a + 0.044715 * a**3).abs()
            phi = torch.sigmoid(1.5957691216057308 * (a + 0.044715 * a**3))
            second = a * phi * (1 - phi) * (1.6 + 0.2141 * a.square())
        # No larger than where the results underflow: beyond, they are zero, as is phi below float32's normal numbers.
        growth = 1 + exponent.clamp(max=104) / 8
        phi = phi + 2.0**-126 / 2.0**-24
        dup = (dy * a * phi).abs() * growth
        dgate = (dy * b).abs() * (phi + second.abs()) * growth
        limits = {"y": {"magnitude": (a * phi * b).abs() * growth}}
        if up is None:
            return {**limits, "dgate": {"magnitude": torch.cat((dgate, dup), -1)}}
        return {**limits, "dgate": {"magnitude": dgate}, "dup": {"magnitude": dup}}


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_far_from_zero(approximate: str) -> None:
    """No infinity in between makes a NaN of a result or of a gradient."""
    gate = torch.tensor([-3e38, -1e20, -1e10, -300.0, 300.0, 1e10, 1e20, 3e38], requires_grad=True)
    up = torch.ones(8, requires_grad=True)
    y = liger_aot.load("geglu")(gate, up, approximate=approximate)
    dgate, dup = torch.autograd.grad(y.sum(), (gate, up))
    assert torch.equal(y, gate.detach().clamp(min=0)) and torch.equal(dup, y.detach())
    assert torch.equal(dgate, (gate > 0).float())
