"""Fused linear cross entropy in torch's machinery: torch.compile, torch.library, autocast, modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import liger_aot
from liger_aot.nn import FusedLinearCrossEntropyLoss
from liger_aot.ops.losses.fused_linear_cross_entropy import FusedLinearCrossEntropy
from liger_aot.ops.torch_library import register
from tests.ops.losses.linear_loss_cases import BF16, LinearCase, draw, formula, worst_linear


def check_compiled(device: str, **options: Any) -> None:
    op = liger_aot.load("fused_linear_cross_entropy")
    for keywords in ({}, {"reduction": "none", "return_z_loss": True, "lse_square_scale": 0.01}):
        torch.compiler.reset()

        def doubled(x: Tensor, w: Tensor, b: Tensor, t: Tensor, keywords: Any = keywords) -> Any:
            found = op(x * 2, w * 2, t, b * 2, **keywords)
            return found[0] if keywords else found

        compiled = torch.compile(doubled, fullgraph=True, **options)
        for rows in (9, 11, 12):
            drawn = draw(LinearCase(rows, 16, 37, bias=True), rows, device)
            leaves = drawn.leaves()
            plain, got = doubled(*leaves, drawn.target), compiled(*leaves, drawn.target)
            torch.testing.assert_close(got, plain)
            grad = torch.rand_like(plain)
            for a, b in zip(
                torch.autograd.grad(got, leaves, grad), torch.autograd.grad(plain, leaves, grad), strict=True
            ):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
            with torch.no_grad():
                torch.testing.assert_close(compiled(*leaves, drawn.target), plain)


def test_compile_is_one_graph() -> None:
    check_compiled("cpu", backend="aot_eager")


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_registration(reduction: str) -> None:
    register("fused_linear_cross_entropy")
    drawn = draw(LinearCase(9, 16, 37, bias=True))
    settings = (-100, 0.1, 0.0, 0.0, False, reduction, 1 << 20, None, [True] * 3, [True] * 3)
    forward = torch.ops.liger_aot.fused_linear_cross_entropy_forward
    x, w, b = drawn.leaves()
    torch.library.opcheck(forward.default, (x, w, drawn.target, b, None, *settings, True))
    tensors = (x.detach(), w.detach(), drawn.target, b.detach(), None)
    results = forward(*tensors, *settings, True)
    saved = list(FusedLinearCrossEntropy().saved(tensors, results))
    backward = torch.ops.liger_aot.fused_linear_cross_entropy_backward
    grads = [torch.ones_like(results[0]), None, None, None]
    needed = [True, True, False, True, False]
    torch.library.opcheck(backward.default, (grads, saved, *settings, needed))


def test_autocast() -> None:
    """float32 weights under autocast: products in bfloat16, gradients in float32."""
    op = liger_aot.load("fused_linear_cross_entropy")
    case = LinearCase(9, 16, 37, bias=True)
    drawn = draw(case)
    leaves = drawn.leaves()
    with torch.autocast("cpu", dtype=BF16):
        loss = op(leaves[0], leaves[1], drawn.target, leaves[2])
    loss.backward()
    rounded = draw(case)
    exact = formula(rounded, torch.ones(()))
    assert all(leaf.grad is not None and leaf.grad.dtype == torch.float32 for leaf in leaves)
    narrow = LinearCase(9, 16, 37, BF16, bias=True)
    grads = {
        n: t.grad for n, t in zip(("input", "weight", "bias"), leaves, strict=True) if t.grad is not None
    }
    # Input and weight are rounded too: a logit's error is that of three roundings.
    worst = worst_linear(narrow, rounded, exact, loss, grads, slack=6.0)
    assert max(worst.values()) <= 1, worst


def test_module() -> None:
    drawn = draw(LinearCase(9, 16, 37, bias=True, classes=True))
    classes = drawn.keywords["class_weight"]
    module = FusedLinearCrossEntropyLoss(
        classes, label_smoothing=0.1, return_z_loss=True, lse_square_scale=0.1
    )
    op = liger_aot.load("fused_linear_cross_entropy")
    wanted = op(
        drawn.input, drawn.weight, drawn.target, drawn.bias, class_weight=classes, label_smoothing=0.1,
        return_z_loss=True, lse_square_scale=0.1,
    )  # fmt: skip
    for a, b in zip(module(drawn.weight, drawn.input, drawn.target, drawn.bias), wanted, strict=True):
        assert torch.equal(a, b)
    assert not module.state_dict() and "label_smoothing=0.1" in repr(module)
