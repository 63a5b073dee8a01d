"""The benchmark of experts on the CPU: what providers compute, what is counted, what a line says."""

from __future__ import annotations

import pytest
import torch

from benchmarks.moe import experts, workloads
from benchmarks.moe.experts import LARGEST_ERROR, PRODUCTS, Model, Result, drawn, exact, flops, line, prepared
from benchmarks.workload import relative_error

SMALL = Model(64, 32, 4, 2)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("provider", ["liger_aot", "torch"])
def test_providers_agree_with_fp64(provider: str, direction: str) -> None:
    inputs = drawn(SMALL, 80, torch.device("cpu"))
    call, error = prepared(experts.PROVIDERS[provider](), inputs, direction, exact(inputs))
    assert 0 < error < LARGEST_ERROR / 2
    found = call()
    of = (found,) if isinstance(found, torch.Tensor) else found
    assert [t.shape for t in of] == [  # type: ignore[attr-defined]
        t.shape for t in ((inputs.x,) if direction == "forward" else inputs.leaves)
    ]


def test_a_wrong_result_is_far_off() -> None:
    inputs = drawn(SMALL, 80, torch.device("cpu"))
    y, _ = exact(inputs)
    other = drawn(SMALL, 80, torch.device("cpu"))
    other.indices.copy_(other.indices.flip(-1))  # each expert with the other's weight
    assert relative_error(exact(other)[0], y) > 2 * LARGEST_ERROR


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_tuners_calls(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is right passes the tuner's check, what is wrong does not."""
    monkeypatch.setattr(workloads, "TIMED", SMALL)
    op = experts.ours()
    for one in workloads.workloads(20, direction, torch.bfloat16, 1 << 20, torch.device("cpu")):
        results = one.call(op).run()
        assert (
            0 < one.error(results) < LARGEST_ERROR / 2 and one.flops and one.grad == (direction == "backward")
        )
        assert one.error(tuple(r * 1.1 for r in results)) > 0.05


def test_the_products_are_those_of_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their multiplications and additions are the FLOPs that are counted."""
    counted = []

    def product(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> None:
        assert int(ends[-1]) == 160
        counted.append(2 * a.numel() * b.shape[-1])

    monkeypatch.setattr(experts, "grouped_product", product)
    for direction, times in (("forward", 2), ("backward", 4)):
        experts.products(drawn(SMALL, 80, torch.device("cpu")), direction)()
        assert len(counted) == times and sum(counted) == flops(SMALL, 80, direction)
        counted.clear()


def test_lines() -> None:
    assert line(Result("m", 8, "forward", PRODUCTS, 1.0, 1.0, 1.0, 500.0)).split() == [
        PRODUCTS, "1.000", "ms", "500", "TFLOP/s",
    ]  # fmt: skip
    assert "error 1.0e-03" in line(Result("m", 8, "forward", "torch", 1.0, 1.0, 1.0, 500.0, 1e-3))
    assert "failed: E" in line(Result("m", 8, "forward", "torch", failed="E"))
