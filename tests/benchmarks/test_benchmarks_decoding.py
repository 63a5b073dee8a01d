"""Decoding's benchmark without a GPU: its inputs, its providers' results, what is counted."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

import pytest
import torch

from benchmarks.decoding import decoding
from benchmarks.decoding.decoding import POINTS, Point

CPU = torch.device("cpu")
SMALL = Point(batch=2, cached=96, dim=16, heads=6, kv_heads=2)


@pytest.mark.parametrize(
    "point",
    [
        SMALL,
        replace(SMALL, page=16),
        replace(SMALL, tokens=3, page=32),
        replace(SMALL, kv_heads=6),
        replace(SMALL, shortest=32),
        replace(SMALL, batch=4, page=16, shortest=40),
    ],
)
def test_providers_are_right_and_errors_are_seen(point: Point) -> None:
    inputs = decoding.drawn(point, CPU, 0)
    for name in ("liger_aot", "torch"):
        if decoding.offers(name, point):
            result = decoding.PROVIDERS[name]()(inputs)
            assert decoding.error(point, inputs, result) < 0.01
            result[-1, :, -1] = 0
            assert decoding.error(point, inputs, result) > 0.2
    other = decoding.drawn(point, CPU, 1)
    assert decoding.error(point, inputs, decoding.ours()(other)) > 0.5


def test_peers_have_what_they_can() -> None:
    assert decoding.offers("cudnn", SMALL)
    assert not decoding.offers("torch", replace(SMALL, page=16))
    assert not decoding.offers("flash_attention_2", replace(SMALL, tokens=2))
    assert not decoding.offers("torch", replace(SMALL, shortest=32))


def test_mixed_lengths() -> None:
    """From the shortest to the longest, in no order; what they hold is what counts as read."""
    point = Point(batch=8, cached=800, shortest=100)
    assert sorted(point.lengths) == list(range(100, 801, 100)) != point.lengths
    assert decoding.drawn(replace(point, dim=16), CPU, 0).lengths.tolist() == point.lengths
    assert point.bytes == 4 * 3600 * 8 * 128


def test_points() -> None:
    assert len(set(POINTS)) == len(POINTS)
    inputs = decoding.drawn(SMALL, CPU, 0)
    assert SMALL.bytes == sum(t.numel() * t.element_size() for t in (inputs.k, inputs.v))
    for point in POINTS:
        assert point.heads % point.kv_heads == 0 and (not point.page or point.cached % point.page == 0)


@pytest.mark.parametrize(("gib", "largest"), [(139.8, 128 * 131072), (79.1, 32 * 131072)])
def test_caches_that_a_gpu_holds_are_measured(
    gib: float, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H200 and H100."""
    properties = Namespace(total_memory=gib * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    most = decoding.largest_cache(CPU)
    usual = [p for p in POINTS if (p.dim, p.kv_heads) == (128, 8)]
    assert max(p.batch * p.cached for p in usual if p.bytes <= most) == largest
