"""Cross entropy in torch's machinery: its module, and torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import liger_aot
from liger_aot.nn import CrossEntropyLoss

X, T = torch.ones(4, 8), torch.tensor([0, 7, 3, 1])


def test_module() -> None:
    """As torch's, classes last; a new module has torch's state."""
    weight = torch.rand(8)
    for keywords in ({}, {"weight": weight, "label_smoothing": 0.1, "reduction": "sum"}):
        module, other = CrossEntropyLoss(**keywords), torch.nn.CrossEntropyLoss(**keywords)
        assert module.state_dict().keys() == other.state_dict().keys()
        torch.testing.assert_close(module(X * T[:, None], T), other(X * T[:, None], T))
    capped = CrossEntropyLoss(softcap=2.0, lse_square_scale=0.1)
    wanted = liger_aot.load("cross_entropy")(X, T, softcap=2.0, lse_square_scale=0.1)
    assert torch.equal(capped(X, T), wanted)


def test_compiled_results() -> None:
    """All results under torch.compile, with and without gradients, in place or not."""
    op = liger_aot.load("cross_entropy")
    more = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}

    def called(x: Tensor) -> Any:
        return op(x * 2, T, lse_square_scale=0.1, **more), op(x * 2, T, inplace_grad=True)

    torch.compiler.reset()
    compiled = torch.compile(called, fullgraph=True, backend="aot_eager")
    for grad in (False, True):
        x = torch.randn(4, 8, requires_grad=grad)
        (wanted, w), (got, g) = called(x), compiled(x)
        for a, b in zip((*wanted, w), (*got, g), strict=True):
            assert torch.equal(a, b)
        if grad:
            torch.testing.assert_close(
                torch.autograd.grad(got[0] + g, x)[0], torch.autograd.grad(wanted[0] + w, x)[0]
            )
