"""The benchmark of the ops around a cache without a GPU: its inputs, our results, what is counted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.cache import cache
from benchmarks.cache.cache import DIM, POINTS, SIXTEEN_BITS, TOLERANCE, Point

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", cache.KINDS)
def test_ours_is_right_and_errors_are_seen(kind: str) -> None:
    point = Point(kind, 5, 4, 2)
    assert cache.checked(point, "liger_aot", CPU) <= TOLERANCE.get(kind, SIXTEEN_BITS)
    inputs = cache.drawn(point, CPU)
    wanted = cache.exact(point, inputs)
    found = cache.left(point, inputs, cache.ours(point, inputs)())
    assert cache.error(found, wanted) < 2 * SIXTEEN_BITS + TOLERANCE.get(kind, 0.0)
    for i in range(len(found)):
        changed: list[Tensor] = [t.clone() for t in found]
        changed[i].view(-1)[7] *= -1
        assert cache.error(changed, wanted) > 0.5


@pytest.mark.parametrize("kind", cache.KINDS)
def test_bytes(kind: str) -> None:
    """Of each tensor's elements those that a call reads or writes, once."""
    point = Point(kind, 5, 4, 2)
    i = cache.drawn(point, CPU)
    a_token = 2 * point.kv_heads * DIM * i.cache.element_size()
    both = 2 * point.kv_heads * DIM * 2
    rotated = 2 * (point.q_heads + point.kv_heads) * DIM * 2 + DIM * i.table.element_size()
    wanted = {
        "write": both + a_token,
        "write_fp8": both + a_token,
        "write_fp8_dynamic": both + a_token + 2 * point.kv_heads * 4,
        "qk_norm_rope": rotated,
        "qk_norm_rope_and_write": rotated + both // 2 + a_token,
        "merge": (3 * i.outs[0].numel() * 2 + 3 * i.lse[0].numel() * 4) // 5,
    }
    assert point.bytes == 5 * wanted[kind]


def test_points() -> None:
    assert len(set(POINTS)) == len(POINTS) and {p.kind for p in POINTS} == set(cache.KINDS)
