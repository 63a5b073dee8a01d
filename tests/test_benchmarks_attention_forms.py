"""The forms of attention that are measured beside each other, on the CPU: what they cost and that they run."""

from __future__ import annotations

import pytest
import torch

from benchmarks.attention_forms import FORMS, GROUP, flops, providers, uneven


@pytest.mark.parametrize("length", [512, 2048, 8192, 16384])
def test_uneven_sequences_cost_what_even_ones_do(length: int) -> None:
    lengths = uneven(length)
    even = flops([length] * (16384 // length), 16, 128, True, False)
    assert len(set(lengths)) == 2
    assert flops(lengths, 16, 128, True, False) == pytest.approx(even, rel=2e-3)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backward", [False, True])
def test_forms_run(form: str, backward: bool) -> None:
    runs, cost = providers(form, 256, 32, True, backward, device="cpu", tokens=64)
    found = runs["liger_aot"]()
    assert cost > 0 and len(found) == (3 if backward else 1)
    heads = 8 // GROUP if form == "gqa" else 8
    shapes = [t.shape[-2:] for t in found]
    assert shapes == [(8, 256), (heads, 256), (heads, 256)][: len(found)]
    assert all(torch.isfinite(t).all() for t in found)
