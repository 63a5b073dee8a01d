"""GRPO's loss of each token from (sequences, tokens) log-probabilities, clipped on both sides, with the divergence from
a reference model; "sequence" has one importance weight a sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.op_entry import Function, OpEntry, Random
from benchmarks.reference import Maybe, PublicCall, Tensors
from benchmarks.workload import Case

SHAPES = ((512, 8192), (8192, 1024))
BETA, LOW, HIGH = 0.04, 0.2, 0.28


class PolicyLoss(OpEntry):
    op = "policy_loss"
    points = tuple(
        Case(direction, torch.float32, shape, variant)
        for variant in ("", "sequence")
        for direction in ("forward", "backward")
        for shape in SHAPES
    )
    providers = ("liger_aot", "torch", "torch_compile")
    constant = (1, 2, 3)

    def inputs(self, case: Case, random: Random) -> Tensors:
        b, length = case.shape
        logp = random.near(-2.0, b, length)
        return logp, logp + random.near(0.0, b, length), logp + random.near(0.0, b, length), random.normal(b)

    def invoke(self, op: Any, variant: str) -> Function:
        def function(*tensors: Tensor) -> Tensor:
            options = {"beta": BETA, "eps_low": LOW, "eps_high": HIGH, "reduction": "none"}
            loss: Tensor = op(*tensors, importance_sampling_level=variant or "token", **options)[0]
            return loss

        return function

    def eager(self, variant: str) -> Function:
        def function(logp: Tensor, old: Tensor, ref: Tensor, advantages: Tensor) -> Tensor:
            given = (logp.float(), old.float(), ref.float(), advantages.float())
            return clipped_loss(*given, BETA, LOW, HIGH, of_sequence=bool(variant))

        return function

    def _grads(self, calculation: PublicCall, arguments: Maybe, random: Random) -> Tensors:
        return of_tokens(arguments[0], random)


def clipped_loss(
    logp: Tensor,
    old: Tensor,
    ref: Tensor,
    advantages: Tensor,
    beta: float,
    low: float,
    high: float,
    of_sequence: bool = False,
) -> Tensor:
    """As trainers write it in torch."""
    logs = logp - old
    weight = (logs.mean(-1, keepdim=True) if of_sequence else logs).exp()
    advantages = advantages.unsqueeze(-1)
    loss = -torch.min(weight * advantages, weight.clamp(1 - low, 1 + high) * advantages)
    away = ref - logp
    return loss + beta * (away.exp() - away - 1)


def of_tokens(like: Tensor, random: Random) -> Tensors:
    """The gradient of the tokens' losses, float32 whatever the inputs are."""
    return (random.normal(*like.shape).to(torch.promote_types(random.dtype, torch.float32)),)


ENTRY = PolicyLoss()
