"""The tuner's calls of decoding: 8 KV heads, 8 query heads for each."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.decoding.decoding import Point, drawn, error
from benchmarks.measure import Call
from benchmarks.tuning.space import Problem
from benchmarks.workload import Workload

Sizes = tuple[tuple[int, int], ...]  # batch, cached keys
FEW: Sizes = ((1, 8192), (1, 32768), (8, 32768))
SIZES: Sizes = ((1, 32768), (8, 32768), (24, 16384), (128, 8192))
MANY: Sizes = ((20, 16384), (32, 8192), (32, 32768), (128, 8192))


def workloads(
    problem: Problem,
    n: int,
    dtype: torch.dtype,
    elements: int,
    device: torch.device,
    *,
    sizes: Sizes,
    page: int = 0,
    tokens: int = 1,
) -> list[Workload]:
    """A call at each size. Caches are cut to 32 * ``elements`` elements."""
    found = []
    for batch, cached in sizes:
        most = 32 * elements // (batch * 8 * n)
        keys = max(64, min(cached, most) // 64 * 64)
        found.append(workload(Point(batch, keys, page, n, tokens=tokens), dtype, device))
    return found


def workload(point: Point, dtype: torch.dtype, device: torch.device) -> Workload:
    i = drawn(point, device, 0, dtype)

    def call(op: Any) -> Call:
        return Call(lambda: (op(i.q, i.k, i.v, cache_seqlens=i.lengths, block_table=i.table),))

    return Workload(
        call=call,
        error=lambda results: error(point, i, results[0]),
        bytes=point.bytes,
        point=f"{point.batch} x {point.cached}" + (f", pages of {point.page}" if point.page else ""),
    )
