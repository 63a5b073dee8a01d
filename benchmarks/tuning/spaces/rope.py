"""Rotary embedding: n is the part of a head that is rotated, a row is a head of a token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.op_entry import load
from benchmarks.tuning.space import Problem, Row, Space, grid, warps
from benchmarks.workload import Workload


def heads(p: Problem) -> Iterator[Row]:
    """Several heads a program, each in one block or in a few."""
    for block in (32, 64, 128):
        if block <= p.n:
            for rows in (8, 16, 32, 64):
                if 512 <= rows * p.n <= 4096:
                    counts = warps(rows * p.n, 4, 16, limit=8)
                    yield from grid(
                        form="rows", rows=rows, block=block, blocks=-(-p.n // block), num_warps=counts
                    )


def problems(*dims: int, **when: Any) -> tuple[Problem, ...]:
    axes = {axis: (value,) for axis, value in when.items()}
    halves = [Problem(n, (n,), when=axes) for n in dims]
    return (*halves, *(Problem(n, (n,), ("fp32",), axes) for n in dims if n > 32))


def calls(p: Problem, n: int, dtype: torch.dtype, elements: int, device: torch.device) -> list[Workload]:
    """n counts both of a pair's columns where they are interleaved, else one."""
    if p.when["interleaved"] == (True,):
        return load("rope").workloads("rope", n // 2, dtype, elements, device, n, "interleaved")
    return load("rope").workloads("rope", n, dtype, elements, device, n)


SPACES = {
    "rope": Space(
        (*problems(32, 64, 128, interleaved=False), *problems(64, 128, 256, interleaved=True)), heads, calls
    ),
    "rope_llama4": Space(problems(128), heads),
    "rope_multimodal": Space(problems(64), heads),
}
