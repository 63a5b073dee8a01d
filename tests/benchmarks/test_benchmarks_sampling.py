"""The benchmark of ops that sample without a GPU: its providers' results, what is counted."""

from __future__ import annotations

import pytest
import torch

from benchmarks.sampling import sampling
from benchmarks.sampling.sampling import POINTS, TOLERANCE, Point

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", sampling.KINDS)
@pytest.mark.parametrize("task", sampling.TASKS)
def test_providers_are_right_and_errors_are_seen(task: str, kind: str) -> None:
    point = Point(task, kind, 3, 400)
    inputs = sampling.drawn(point, CPU)
    for provider in (sampling.ours, sampling.by_torch):
        got = provider(point, inputs)()
        assert sampling.error(point, inputs, got) < TOLERANCE
    if task.startswith("mask"):
        wrong = got.clone()
        wrong[1, int(inputs.logits[1].argmax())] = -torch.inf
    else:
        wrong = got.clone()
        wrong[1] = inputs.logits[1].argmin()
    if task != "sample":  # where every token may be sampled
        assert sampling.error(point, inputs, wrong) > TOLERANCE


def test_points() -> None:
    assert len(set(POINTS)) == len(POINTS)
    for point in (Point("mask top_k", "flat", 3, 64), Point("greedy", "peaked", 3, 64)):
        inputs = sampling.drawn(point, CPU)
        got = sampling.ours(point, inputs)()
        written = got.numel() * 4 if point.task.startswith("mask") else 0
        assert point.bytes == inputs.logits.numel() * 4 + written
