"""The benchmark of ops with 8-bit results without a GPU: its inputs, its providers' results, what is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.quantization import quantization
from benchmarks.quantization.quantization import POINTS, TOLERANCE, Point

CPU = torch.device("cpu")
SMALL = Point("quantize", "token", 3, 256)


@pytest.mark.parametrize("kind", quantization.KINDS)
@pytest.mark.parametrize("scheme", quantization.SCHEMES)
def test_providers_are_right_and_errors_are_seen(kind: str, scheme: str) -> None:
    point = replace(SMALL, kind=kind, scheme=scheme)
    inputs = quantization.drawn(point, CPU)
    y, *_ = quantization.values(point, inputs.x, inputs.residual, inputs.weight)
    for codes, scales in (
        quantization.ours(point, inputs)()[:2],
        quantization.quantized(point, y, inputs.scale),
    ):
        assert quantization.error(point, inputs, codes, scales) < TOLERANCE
        assert quantization.error(point, inputs, codes, scales * 1.2) > TOLERANCE
        codes[1, 7] = -codes[1, 7].float()
        assert quantization.error(point, inputs, codes, scales) > TOLERANCE


def test_points() -> None:
    assert len(set(POINTS)) == len(POINTS)
    for kind in quantization.KINDS:
        point = replace(SMALL, kind=kind)
        inputs = quantization.drawn(point, CPU)
        codes, _, *rest = quantization.ours(point, inputs)()
        tensors = [inputs.x, codes, *rest, *([inputs.residual] if rest else [])]
        assert point.bytes == sum(t.numel() * t.element_size() for t in tensors)
    assert all(p.scheme != "group" or p.columns % quantization.GROUP == 0 for p in POINTS)
