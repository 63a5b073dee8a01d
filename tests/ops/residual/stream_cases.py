"""Cases of the ops of hyper-connections: x is (..., streams, channels)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tests.harness.op_cases import BF16, Case

STREAMS = (2, 4, 8)


def streams_case(axes: Mapping[str, Any], channels: int, aligned: bool, rows: int) -> Case:
    """Of so many tokens for a row of a dispatch table."""
    return Case((rows, int(axes["streams"]), channels), axes.get("dtype", BF16), shift=int(not aligned))


def with_streams(case: Case, choose: Callable[[Sequence[Any]], Any]) -> Case:
    """A random shape with a number of streams that there are binaries for."""
    return case.but(shape=(*case.shape[:-2], choose(STREAMS), case.shape[-1]))


def fp32_of(case: Case) -> torch.dtype:
    """Of what is float32 beside any x, and float64 where everything is."""
    return torch.promote_types(case.dtype, torch.float32)
