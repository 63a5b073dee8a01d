"""The benchmarks of losses of a linear layer: their formulas in float64, and what they give the providers."""

from __future__ import annotations

import pytest
import torch

from benchmarks.losses.linear import CROSS_ENTROPY, JSD, LinearLoss, Result, errors, line, step
from benchmarks.post_training.linear import LOSSES


@pytest.mark.parametrize("of", [CROSS_ENTROPY, JSD, *LOSSES.values()], ids=lambda of: of.op)
def test_providers_are_right(of: LinearLoss) -> None:
    inputs = of.drawn((300, 16, 50), torch.device("cpu"))
    exact = of.exact(inputs)
    for name in set(of.providers) & {"liger_aot", "liger_aot, float32 dW", "torch"}:
        wide = name.endswith("float32 dW")
        found = errors(step(of.providers[name](), inputs, wide)(), inputs, exact)
        assert max(found.values()) < of.largest_error, (name, found)
        assert inputs.weight.grad is not None
        assert inputs.weight.grad.dtype == (torch.float32 if wide else torch.bfloat16)
    wrong = errors(torch.tensor(2.0), inputs, {"loss": torch.tensor(1.0)})
    assert wrong == {"loss": 1.0}
    of.products(inputs)()


def test_a_line_of_each_kind() -> None:
    shape = (1, 2, 3)
    assert line(Result(shape, "liger", failed="RuntimeError: no")).endswith("failed: RuntimeError: no")
    assert line(Result(shape, "products", 2.0, 1.9, 2.1, 1.0)).endswith("1.000 of the products")
    assert line(Result(shape, "torch", 2.0, 1.9, 2.1, 1.0, 0.5, 1e-3, 2e-3)).endswith(
        "loss 1.0e-03, d input 2.0e-03"
    )
