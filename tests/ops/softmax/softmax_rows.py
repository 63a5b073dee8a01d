"""What the tests of softmax, log-softmax and sparsemax share, and rows that break careless ones: masks, overflow, one
dominating value, ties."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.differentiable import Tensors
from tests.harness.op_tests import BF16, DTYPES, FP16, FP32, WAYS, Case, Draw, OpTests, Results, Way
from tests.harness.tolerances import worst

INF = float("inf")
SPECIAL = [(5, FP32), (700, BF16), (700, FP16), (5001, FP32), (17504, BF16)]  # short, long, aligned, not


def special_rows(n: int, dtype: torch.dtype, device: str) -> Tensor:
    """(12, n), n > 2."""
    x = torch.randn((12, n), generator=torch.Generator(device).manual_seed(0), device=device).to(dtype)
    lowest, greatest = torch.finfo(dtype).min, torch.finfo(dtype).max
    x[0, n // 2 :] = -INF  # masked attention scores
    x[1, : n - 1] = -INF
    x[2] = -INF  # NaN
    x[3] = lowest  # another way to mask all: uniform
    x[4, 1:] = lowest
    x[5] = lowest
    x[5, n - 1] = greatest
    x[6] = -INF
    x[6, :: n - 1] = lowest
    x[7] = 3.25  # equal values
    x[8, n // 3] += 60  # one dominates
    x[9] = torch.arange(n, device=device).remainder(3).to(dtype)  # ties
    x[10, 1] = INF  # NaN
    x[11, n - 1] = torch.nan  # NaN
    return x


def check_special_rows(tests: OpTests, way: Way, n: int, dtype: torch.dtype) -> None:
    """The op gives on those rows what its reference gives in float64, NaN and infinities in the same places."""
    x = special_rows(n, dtype, way.device)
    dy = torch.randn(x.shape, generator=torch.Generator(way.device).manual_seed(1), device=x.device).to(dtype)
    settings = tuple(tests.defaults.values())
    got = tests.run(way.op, (x,), settings, (dy,))
    exact = tests.exact((x,), settings, (dy,), got)
    y, dx = exact.results[0], exact.gradients["x"]
    assert dx is not None and got.gradients["x"] is not None
    assert y[[2, 10, 11]].isnan().all() and not y[[0, 1, 3, 4, 5, 6, 7, 8, 9]].isnan().any()
    limits = tests.limits(exact)
    for name, found, wanted in (("y", got.outputs[0], y), ("dx", got.gradients["x"], dx)):
        rounded = wanted.to(dtype)
        finite = rounded.isfinite()
        magnitude = limits[name]["magnitude"].expand(x.shape).where(finite, 0)
        assert torch.equal(found.isnan(), rounded.isnan())
        assert torch.equal(found.isinf(), rounded.isinf())
        error = worst(found.where(finite, 0), wanted.where(finite, 0), way.allowed, magnitude=magnitude)
        assert error <= 1, f"{name} of {dtype}, n = {n}: {error} of what is allowed"


# NumPy's, on the interpreter: a difference to -inf or to the lowest value is meant to overflow
@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered")
class ProbabilityTests(OpTests):
    """A case's option ``size`` is the standard deviation of x."""

    empty = (Case((0, 16), BF16), Case((4, 0), FP32))
    lengths = (128, 1000, 1024, 4096, 5120, 11008, 18944, 32768, 50257, 131072, 262144, 300_002)
    large = tuple(Case(((1 << 25) // n, n), dtype) for n in lengths for dtype in DTYPES)
    beyond = (Case(((1 << 31) // 4096 + 96, 4096), BF16), Case(((1 << 31) // 131072 + 96, 131072), BF16))
    longest_interpreted = 140_000
    bad: Mapping[str, Any] = {
        "a scalar": ((torch.tensor(1.0),), {}, ArgumentError, "x must have at least one dimension"),
        "integers": ((torch.ones(2, 8).int(),), {}, ArgumentTypeError, "x must be bfloat16.*got int32"),
    }

    def tensors(self, case: Case, draw: Draw) -> Tensors:
        return (draw.rows(*case.shape).mul_(case.get("size", 2.0)),)

    def saved(self, wide: Tensors, results: Tensors, got: Results) -> Tensors:
        return (got.outputs[0].double(),)

    @pytest.mark.parametrize("way", WAYS, indirect=True)
    @pytest.mark.parametrize("n,dtype", SPECIAL)
    def test_special_rows(self, way: Way, n: int, dtype: torch.dtype) -> None:
        check_special_rows(self, way, n, dtype)
