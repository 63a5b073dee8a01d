"""GRPO's loss of each token, from (sequences, tokens + 1, n) logits: clipped on both sides, with the divergence from a
reference model. A backward reads the logits again and writes their gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.op_entry import Function, OpEntry, Random, both
from benchmarks.post_training.policy_loss import clipped_loss, of_tokens
from benchmarks.reference import Invoke, Maybe, PublicCall, Tensors, on_reference
from benchmarks.workload import Case
from liger_aot.ops.post_training.grpo_loss import GRPOLoss

SHAPES = ((8, 512, 32000), (4, 1024, 128256), (4, 2048, 151936))
TEMPERATURE, BETA, LOW, HIGH = 0.9, 0.04, 0.2, 0.28


class GRPOLossEntry(OpEntry):
    op = "grpo_loss"
    points = both(SHAPES)
    small = (2, 64, 512)
    constant = (1, 2, 4)

    def inputs(self, case: Case, random: Random) -> Tensors:
        """Log-probabilities of other models near those of the logits, which are about -log(n)."""
        b, length, n = case.shape
        ids = random.integers(n, b, length)
        old, ref = (random.near(-(float(n) ** 0.5) / 30, b, length).float() for _ in range(2))
        return random.normal(b, length + 1, n), old, ref, ids, random.normal(b).float()

    def invoke(self, op: Any, variant: str) -> Function:
        def function(*tensors: Tensor) -> Tensor:
            options = {"beta": BETA, "eps_low": LOW, "eps_high": HIGH, "reduction": "none"}
            loss: Tensor = op(*tensors, temperature=TEMPERATURE, **options)[0]
            return loss

        return function

    def eager(self, variant: str) -> Function:
        def function(logits: Tensor, old: Tensor, ref: Tensor, ids: Tensor, advantages: Tensor) -> Tensor:
            logs = torch.nn.functional.log_softmax(logits[:, :-1] / TEMPERATURE, -1, dtype=torch.float32)
            logp = logs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
            return clipped_loss(logp, old, ref, advantages, BETA, LOW, HIGH)

        return function

    def liger(self, variant: str) -> Function:
        from liger_kernel.ops.grpo_loss import GrpoLossFunction

        def function(*tensors: Tensor) -> Tensor:
            loss: Tensor = GrpoLossFunction.apply(
                *tensors, None, TEMPERATURE, BETA, LOW, HIGH, False, "grpo", None, False
            )[0]
            return loss

        return function

    def _grads(self, calculation: PublicCall, arguments: Maybe, random: Random) -> Tensors:
        return of_tokens(arguments[1], random)

    def _public(self, case: Case) -> PublicCall:
        return _OfItsParts(self.op, self._invoke(case.variant))


class _OfItsParts(PublicCall):
    """The op, whose references are those of the two that it is made of."""

    def __init__(self, op: str, invoke: Invoke) -> None:
        made = GRPOLoss()
        made._log_softmax, made._loss = on_reference("selective_log_softmax"), on_reference("policy_loss")
        self._function = invoke(made)


ENTRY = GRPOLossEntry()
