"""Cases of the ops of hyper-connections: x is (..., streams, channels)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tests.harness.op_cases import BF16, DTYPES, FP16, FP32, Case

STREAMS = (2, 4, 8)
CASES = (
    Case((3, 4, 48), BF16),
    Case((2, 3, 2, 32), FP32),
    Case((5, 8, 37), FP16),
    Case((4, 1), FP32),
    Case((2, 1, 4, 17), BF16, shift=3),
    Case((3, 4, 48), BF16, gap=16),
    Case((2, 2, 1040), FP16, gap=5),
    Case((2, 4, 1100), FP32, shift=3, gap=5),
    Case((2, 300), BF16),
)
EMPTY = (Case((0, 4, 16), BF16), Case((4, 2, 0), FP32))
LARGE = tuple(
    Case(((1 << 24) // (streams * n), streams, n), dtype)
    for streams, n in ((2, 1024), (4, 2048), (4, 7168), (8, 4096), (4, 257))
    for dtype in DTYPES
)
BEYOND = (Case(((1 << 31) // 16384 + 64, 4, 4096), BF16),)


def streams_case(axes: Mapping[str, Any], channels: int, aligned: bool, rows: int) -> Case:
    """Of so many tokens for a row of a dispatch table."""
    return Case((rows, int(axes["streams"]), channels), axes.get("dtype", BF16), shift=int(not aligned))


def with_streams(case: Case, choose: Callable[[Sequence[Any]], Any]) -> Case:
    """A random shape with a number of streams that there are binaries for."""
    return case.but(shape=(*case.shape[:-2], choose(STREAMS), case.shape[-1]))


def fp32_of(case: Case) -> torch.dtype:
    """Of what is float32 beside any x, and float64 where everything is."""
    return torch.promote_types(case.dtype, torch.float32)
