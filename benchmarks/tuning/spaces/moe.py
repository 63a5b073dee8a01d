"""Mixture of experts: n is the rows of an expert, or of a tile. Forward and backward are timed whole, as the kernels of
one direction share tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.moe.workloads import workloads
from benchmarks.tuning.space import Problem, Row, Space, grid
from benchmarks.workload import Workload

WARP_SPECIALIZED: dict[str, Any] = {"form": "warp_specialized", "warp_groups": 2, "num_warps": 4}
ROWS = (128, 512, 2048)  # of an expert, where tiles are full
FEW = (Problem(16, (4, 16)), Problem(None, (64,)))
BOTH = ("down", "gate_up")


def calls(direction: str) -> Any:
    def made(
        p: Problem, n: int, dtype: torch.dtype, elements: int, device: torch.device
    ) -> Sequence[Workload]:
        return workloads(n, direction, dtype, elements, device)

    return made


def up(p: Problem) -> Iterator[Row]:
    tiles = {"block_n": 256, "b_rows": 128, "least_rows": 64}
    yield from grid(**WARP_SPECIALIZED, **tiles, stages=(3, 4), group=(4, 8, 16), registers=(216, 224))


def product(p: Problem) -> Iterator[Row]:
    yield from grid(**WARP_SPECIALIZED, block_n=256, stages=(3, 4), group=(4, 8, 16), registers=240)


def down_backward(p: Problem) -> Iterator[Row]:
    yield from grid(**WARP_SPECIALIZED, block_n=256, stages=(3, 4), group=(4, 8, 16), registers=240)


def weight_backward(p: Problem) -> Iterator[Row]:
    yield from grid(**WARP_SPECIALIZED, block_n=256, stages=(3, 4), group=(8, 16, 1024), registers=240)


def tiles(p: Problem) -> Iterator[Row]:
    rows = 16 if p.max_n == 16 else 64
    yield from grid(
        form="tile", block_m=rows, block_n=(64, 128), block_k=(64, 128), stages=(3, 4), group=8, num_warps=(4, 8)
    )  # fmt: skip


def of_weights(sizes: tuple[int, ...]) -> tuple[Problem, ...]:
    return tuple(Problem(None, sizes, when={"weight": (which,)}) for which in BOTH)


FORWARD, BACKWARD = calls("forward"), calls("backward")
SPACES = {
    "fused_moe_up": Space(FEW, tiles, FORWARD),
    "fused_moe_down": Space(FEW, tiles, FORWARD),
    "fused_moe_up_backward": Space(FEW, tiles, BACKWARD),
    "fused_moe_up_warp_specialized": Space((Problem(None, ROWS),), up, FORWARD),
    "fused_moe_product_warp_specialized": Space(of_weights(ROWS), product, BACKWARD),
    "fused_moe_down_backward_warp_specialized": Space((Problem(None, ROWS),), down_backward, BACKWARD),
    "fused_moe_weight_backward_warp_specialized": Space(of_weights(ROWS), weight_backward, BACKWARD),
}
