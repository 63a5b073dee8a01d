"""Sparsemax: its threshold without a sort, masks, ties and long rows, on every driver."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_aot.ops.softmax.sparsemax import Sparsemax
from tests.harness.op_tests import BF16, DTYPES, FP16, FP32, WAYS, Case, Exact, Way
from tests.harness.own_tables import check_form, way_of
from tests.ops.softmax.softmax_rows import ProbabilityTests, check_special_rows


class TestSparsemax(ProbabilityTests):
    op_class = Sparsemax
    cases = (
        Case((3, 5, 48), BF16),
        Case((1, 1), BF16),
        Case((7, 1), FP32),
        Case((5, 37), FP16),
        Case((2, 3, 1000), FP32),
        Case((6, 1000), FP32, size=1e-3),  # all in the support
        Case((6, 1000), BF16, size=0.1),
        Case((4, 17), BF16, shift=3),
        Case((5, 48), BF16, gap=16),
        Case((3, 1040), FP16, gap=5, size=0.5),
        Case((9, 1000), FP32, shift=3, gap=5),
        Case((5001,), BF16, shift=1, size=0.3),
        Case((8192,), BF16),
        Case((3, 40), FP32, size=1e4),
        Case((17000,), FP16, size=0.1),
        Case((9000,), FP32, size=0.01),
    )
    large = tuple(
        Case(((1 << 25) // n, n), dtype, size=size)
        for n in ProbabilityTests.lengths
        for dtype in DTYPES
        for size in (0.02, 2.0)
    )

    def formula(self, x: Tensor) -> Tensor:
        """By the paper's algorithm 1, which sorts."""
        z = x.sort(-1, descending=True).values
        sums, k = z.cumsum(-1), torch.arange(1, x.shape[-1] + 1)
        support = (1 + k * z > sums).sum(-1, keepdim=True)
        return (x - (sums.gather(-1, support - 1) - 1) / support).clamp(min=0)

    def limits(self, exact: Exact) -> Mapping[str, Mapping[str, Any]]:
        """y is a difference to tau, which is as far from the row's greatest value as the greatest y is large."""
        (dy,), y = exact.grads, exact.results[0]
        if not y.numel():
            return {}
        return {
            "y": {"magnitude": y.amax(-1, keepdim=True).expand(y.shape)},
            "dx": {"magnitude": dy.abs() + dy.abs().mean(-1, keepdim=True) * 8},
        }

    @pytest.mark.parametrize("way", WAYS, indirect=True)
    @pytest.mark.parametrize("n", [1000, 17008])
    def test_hard_supports(self, way: Way, n: int) -> None:
        """Rows for which Newton's method takes many steps, or passes the root by rounding; they sum to 1 as well."""
        steps = torch.arange(n, device=way.device, dtype=torch.float64)
        second_half = (steps * 2 >= n).double()
        rows = (
            -1 + 0.5**steps,  # each step drops few elements
            -(1 - 0.5**steps) / 2,
            -((steps + 1) / n).log2().abs() / 16,
            -steps / n**2,  # support of many, each near -1/n
            -steps.sqrt() / n,
            1e-9 * steps.sin(),  # nearly equal
            # half of the row so little above tau that the long first step's rounding may pass it
            *(-second_half * (2 / n - margin * 1e-8) for margin in range(1, 13)),
        )
        x = torch.stack(rows).float()
        (exact,) = Sparsemax.reference(x.double())
        got = way.op(x)
        torch.testing.assert_close(
            got.double().sum(-1),
            torch.ones(len(rows), dtype=torch.float64, device=way.device),
            rtol=0,
            atol=1e-5,
        )
        limit = 64 * 2.0**-24 * exact.amax(-1, keepdim=True)
        assert ((got.double() - exact).abs() <= limit).all()
        assert torch.equal(got, way.op(x))


@pytest.mark.interpreter
@pytest.mark.usefixtures("poisoned")
@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered")
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
def test_vectors(tmp_path: Path) -> None:
    """The form whose registers hold the greatest value of each vector, at small blocks: rows of one block, of several,
    of part of one."""
    tests = TestSparsemax()
    vectors = '{ max_n = 256, form = "vectors", block = 64, blocks = 4, num_warps = 4 }'
    way = way_of(
        tests,
        tmp_path,
        sparsemax_forward=f"""
          {{ form = "long", aligned = false, block = 64, num_warps = 4 }}, {vectors},
          {{ form = "long", block = 64, num_warps = 4 }},
        """,
        sparsemax_backward=f"""
          {{ form = "long", aligned = false, block = 64, num_warps = 4 }}, {vectors},
          {{ form = "vectors", block = 64, num_warps = 4 }},
        """,
    )
    sizes = (2.0, 1e-3, 0.1, 30.0)
    cases = [
        Case((3, n), DTYPES[i % 3], size=sizes[i % 4])
        for i, n in enumerate(2 * (16, 64, 80, 208, 256) + (320,))
    ]
    check_form(tests, way, "vectors", *cases)
    for n in (16, 208, 320):
        check_special_rows(tests, way, n, BF16)
