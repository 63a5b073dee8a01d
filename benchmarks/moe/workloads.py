"""The tuner's calls of a mixture of experts: 16 experts of which a token has 4, sizes as Qwen3's. Results and gradients
of some tokens, and those of one expert's weights, are checked against fp64."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import Call
from benchmarks.moe.experts import CHECKED, Inputs, Model, drawn, exact, flops
from benchmarks.workload import Workload, largest_error

TIMED = Model(2048, 768, 16, 4)
SMALL = Model(272, 144, 4, 2)  # checked alone: sizes that are no multiple of a tile
ROUNDINGS = 4  # the projections, their gradients, an expert's part, the result


def workloads(
    rows: int, direction: str, dtype: torch.dtype, elements: int, device: torch.device
) -> list[Workload]:
    """A small call, and one with so many rows an expert, at most about ``elements`` elements of x."""
    tokens = max(1, min(rows * TIMED.experts // TIMED.top_k, elements // TIMED.hidden))
    small = max(1, rows * SMALL.experts // SMALL.top_k)
    return [
        workload(SMALL, small, direction, dtype, device, timed=False),
        workload(TIMED, tokens, direction, dtype, device, timed=True),
    ]


def workload(
    model: Model, tokens: int, direction: str, dtype: torch.dtype, device: torch.device, timed: bool
) -> Workload:
    inputs = drawn(model, tokens, device, dtype)
    y, dx = exact(inputs)
    backward = direction == "backward"
    wanted = (dx, *exact_weights(inputs)) if backward else (y,)

    def run(op: Any) -> tuple[Tensor, ...]:
        if not backward:
            return (op(*inputs.arguments),)
        return torch.autograd.grad(op(*inputs.arguments), inputs.leaves, inputs.dy)

    def error(results: tuple[Tensor, ...]) -> float:
        first = results[0][:CHECKED]
        return largest_error((first, results[1][0], results[2][0]) if backward else (first,), wanted)

    tensors = inputs.arguments if not backward else (*inputs.arguments, inputs.dy, *inputs.leaves)
    return Workload(
        call=lambda op: Call(lambda: run(op)),
        error=error,
        bytes=sum(t.numel() * t.element_size() for t in tensors),
        point=f"{tokens * model.top_k // model.experts} rows an expert",
        grad=backward,
        flops=flops(model, tokens, direction),
        timed=timed,
        roundings=ROUNDINGS,
    )


def exact_weights(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The gradients of the first expert's weights in fp64."""
    share = (inputs.weights.detach() * (inputs.indices == 0)).sum(-1, keepdim=True).double()
    x, dy = inputs.x.detach().double(), inputs.dy.double()
    first, second = (w[0].detach().double().requires_grad_() for w in (inputs.gate_up, inputs.down))
    gate, up = (x @ first.t()).chunk(2, -1)
    y = share * ((F.silu(gate) * up) @ second.t())
    found: tuple[Tensor, Tensor] = torch.autograd.grad(y, (first, second), dy)  # type: ignore[assignment]
    return found
