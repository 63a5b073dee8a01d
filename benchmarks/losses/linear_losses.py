"""Fused linear cross entropy, forward and backward together: `python -m benchmarks.losses.linear_losses`.

What bounds it are three matrix products (logits, input's gradient, weight's gradient): see
`benchmarks.losses.linear_steps`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.losses.linear_steps import Inputs, LinearLoss, Loss, Shape, main

POINTS = (
    (1024, 4096, 128256),
    (8192, 4096, 128256),
    (16384, 4096, 128256),
    (8192, 2048, 50257),
    (8192, 4096, 32000),
)
CHECKED = 256  # rows of each gradient


def drawn(shape: Shape, device: torch.device) -> Inputs:
    """Logits of about standard normal size, and a target a row."""
    rows, k, vocabulary = shape
    g = torch.Generator(device).manual_seed(rows)
    x = torch.randn(rows, k, device=device, generator=g).bfloat16()
    w = torch.randn(vocabulary, k, device=device, generator=g).mul_(k**-0.5).bfloat16()
    target = torch.randint(vocabulary, (rows,), device=device, generator=g)
    return Inputs(x.requires_grad_(), w.requires_grad_(), (target,))


def ours(**keywords: Any) -> Loss:
    import liger_aot

    op = liger_aot.load("fused_linear_cross_entropy")
    loss: Loss = lambda i: op(i.input, i.weight, *i.others, **keywords)  # noqa: E731
    return loss


def liger(dtype: torch.dtype | None) -> Loss:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Function

    def loss(i: Inputs) -> Tensor:
        settings = (None, None, -100, 0.0, 0.0, "mean", None, False, dtype)
        found: Tensor = Function.apply(i.input, i.weight, *i.others, *settings)[0]
        return found

    return loss


def eager(i: Inputs) -> Tensor:
    return F.cross_entropy(F.linear(i.input, i.weight).float(), *i.others)


def compiled() -> Loss:
    torch._dynamo.reset()
    made: Loss = torch.compile(eager, dynamic=False)
    return made


def products(inputs: Inputs) -> Callable[[], None]:
    """The three alone, on this data: the gradient of the logits is that of the loss."""
    x, w, (target,) = inputs.input.detach(), inputs.weight.detach(), inputs.others
    rows = x.shape[0]
    g, logits = torch.mm(x, w.t()), torch.empty(rows, w.shape[0], device=x.device, dtype=x.dtype)
    for first in range(0, rows, 512):
        some = g[first : first + 512]
        p = torch.softmax(some.float(), -1)
        p[torch.arange(len(p), device=p.device), target[first : first + 512]] -= 1
        some.copy_(p / rows)
    dx, dw = torch.empty_like(x), torch.empty_like(w)

    def run() -> None:
        torch.mm(x, w.t(), out=logits)
        torch.mm(g, w, out=dx)
        torch.mm(g.t(), x, out=dw)

    return run


def exact(inputs: Inputs) -> dict[str, Tensor]:
    x, w, (target,) = inputs.input.detach().double(), inputs.weight.detach().double(), inputs.others
    rows, loss, d_input = x.shape[0], x.new_zeros(()), None
    d_weight = x.new_zeros((min(CHECKED, len(w)), x.shape[1]))
    for first in range(0, rows, CHECKED):
        some, targets = x[first : first + CHECKED], target[first : first + CHECKED]
        logits = some @ w.t()
        loss += F.cross_entropy(logits, targets, reduction="sum") / rows
        g = torch.softmax(logits, -1)
        g[torch.arange(len(g), device=g.device), targets] -= 1
        g /= rows
        d_input = g @ w if d_input is None else d_input
        d_weight += g[:, :CHECKED].t() @ some
    assert d_input is not None
    return {"loss": loss, "input": d_input, "weight": d_weight}


CROSS_ENTROPY = LinearLoss(
    op="fused_linear_cross_entropy",
    module="linear_losses",
    points=POINTS,
    providers={
        "liger_aot": ours,
        "liger_aot, float32 dW": lambda: ours(weight_grad_dtype=torch.float32),
        "torch": lambda: eager,
        "torch_compile": compiled,
        "liger": lambda: liger(None),
        "liger, float32 dW": lambda: liger(torch.float32),
    },
    drawn=drawn,
    products=products,
    exact=exact,
    largest_error=0.02,
)

if __name__ == "__main__":
    sys.exit(main(CROSS_ENTROPY, __doc__, sys.argv[1:]))
