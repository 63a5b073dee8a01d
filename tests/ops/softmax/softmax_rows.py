"""Rows that break careless softmaxes: masks, overflow, one dominating value, ties."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.harness.op_tests import BF16, FP16, FP32, OpTests, Way
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
