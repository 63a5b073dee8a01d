"""SwiGLU: gate and up apart and packed, on every driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_aot
from liger_aot.ops.activations.swiglu import SwiGLU
from tests.harness.op_tests import BF16, DTYPES, FP16, FP32, Case, Exact
from tests.ops.activations.gated_tests import GatedTests


# Of NumPy, on the interpreter: exp(-gate) may be inf.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
class TestSwiGLU(GatedTests):
    op_class = SwiGLU
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
        Case((3, 64), BF16, packed=True),
        Case((4, 2), FP32, packed=True),
        Case((2, 3, 1050), FP16, packed=True),
        Case((5, 96), BF16, packed=True, shift=1, gap=3),
        Case((2, 2080), FP32, packed=True, gap=16),
        Case((4100,), BF16),
        Case((130,), FP16, packed=True),
        Case((3, 40), BF16, size=60.0),
        Case((3, 40), FP32, size=200.0),
    )
    large = tuple(
        Case(((1 << 25) // n, n), dtype, packed=packed)
        for n in (128, 5120, 11008, 14336, 18944, 300_002)
        for dtype in DTYPES
        for packed in (False, True)
    )

    def formula(self, gate: Tensor, up: Tensor | None) -> Tensor:
        a, b = gate.chunk(2, -1) if up is None else (gate, up)
        return a / (1 + torch.exp(-a)) * b

    def limits(self, exact: Exact) -> Mapping[str, Mapping[str, Any]]:
        """dgate is a sum that cancels near -1.28, and a sigmoid near zero is what underflows first, before it is
        multiplied."""
        gate, up, (dy,) = exact.inputs["gate"], exact.inputs["up"], exact.grads
        a, b = gate.chunk(2, -1) if up is None else (gate, up)
        sigmoid = torch.sigmoid(a)
        terms = (dy * b).abs() * (a.abs() * (1 - sigmoid) + 1) * sigmoid
        y = {"scale": 1 + (a * b).abs()}
        of_gate, of_up = 1 + (dy * b).abs() * (1 + a.abs()), 1 + (dy * a).abs()
        if up is None:
            terms = torch.cat((terms, exact.gradients["gate"].chunk(2, -1)[1].abs()), -1)
            return {"y": y, "dgate": {"magnitude": terms, "scale": torch.cat((of_gate, of_up), -1)}}
        return {"y": y, "dgate": {"magnitude": terms, "scale": of_gate}, "dup": {"scale": of_up}}


def test_halves_of_one_tensor_are_read_in_place() -> None:
    op = liger_aot.load("swiglu")
    packed = torch.randn(6, 32, dtype=BF16)
    gate, up = packed.chunk(2, -1)
    assert torch.equal(op(gate, up), op(packed))
