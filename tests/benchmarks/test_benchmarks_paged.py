"""Paged attention's benchmark without a GPU: its inputs, its providers' results, what is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import liger_aot
from benchmarks.attention import paged
from benchmarks.attention.paged import POINTS, Point

CPU = torch.device("cpu")
SMALL = Point("small", (5, 1, 3), (40, 17, 3), page=16, dim=16, heads=4, kv_heads=2)
ONE = Point("one query each", (1, 1), (40, 17), page=32, dim=16, heads=4, kv_heads=2)


@pytest.mark.parametrize("point", [SMALL, ONE], ids=str)
def test_providers_are_right_and_errors_are_seen(point: Point, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attention_paged", "flash_decoding"):  # there is nothing to load for the CPU
        monkeypatch.setattr(type(liger_aot.load(name)), "preload", lambda *_: None)
    inputs = paged.drawn(point, CPU)
    for name in ("liger_aot", "flash_decoding"):
        if paged.offers(name, point):
            result = paged.PROVIDERS[name](point, inputs)()
            assert paged.error(point, inputs, result) < 0.01
            result[-1, -1] = 0
            assert paged.error(point, inputs, result) > 0.2


def test_points() -> None:
    assert len(set(POINTS)) == len(POINTS)
    assert not paged.offers("flash_decoding", SMALL) and paged.offers("flash_decoding", ONE)
    seen = sum(k - q + 1 + t for q, k in zip(SMALL.queries, SMALL.keys, strict=True) for t in range(q))
    assert SMALL.operations == 4 * seen * 4 * 16
    inputs = paged.drawn(SMALL, CPU)
    assert SMALL.bytes == 2 * 2 * inputs.q.numel() + 2 * 2 * 60 * 2 * 16
    for point in POINTS:
        assert all(0 < q <= k for q, k in zip(point.queries, point.keys, strict=True))


def test_fa3_takes_what_its_signature_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of arguments of vLLM's build: 23 of get_scheduler_metadata, 37 of fwd."""
    asked: list[tuple[Any, ...]] = []

    class Library:
        @staticmethod
        def get_scheduler_metadata(*arguments: Any) -> None:
            asked.append(arguments)

        @staticmethod
        def fwd(*arguments: Any) -> Any:
            asked.append(arguments)
            return arguments[:1]

    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", Library, raising=False)
    paged.fa3(SMALL, paged.drawn(SMALL, CPU))()
    assert [len(arguments) for arguments in asked] == [23, 37]
