"""Generalised Jensen-Shannon divergence of log-probabilities, beta 0.5; "forward" and "reverse" are its ends, the
Kullback-Leibler divergences."""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import Any

import torch
from torch import Tensor

from benchmarks.losses.divergence_entry import SHAPES, DivergenceEntry
from benchmarks.op_entry import Function, both

BETAS = {"": 0.5, "forward": 0.0, "reverse": 1.0}


class JSD(DivergenceEntry):
    op = "jsd"
    points = (*both(SHAPES), *both(SHAPES[1:2], "forward"), *both(SHAPES[1:2], "reverse"))

    def keywords(self, variant: str) -> Mapping[str, Any]:
        return {"beta": BETAS[variant]}

    def eager(self, variant: str) -> Function:
        """In float32, which users of bfloat16 cast to: the sums of thousands of terms ask for it."""
        beta = BETAS[variant]

        def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
            return torch.nn.functional.kl_div(log_q, log_p, reduction="batchmean", log_target=True)

        def jsd(x: Tensor, y: Tensor) -> Tensor:
            x, y = x.float(), y.float()
            if beta == 0:
                return kl(y, x)
            if beta == 1:
                return kl(x, y)
            mixed = torch.logaddexp(y + log(beta), x + log(1 - beta))
            return beta * kl(y, mixed) + (1 - beta) * kl(x, mixed)

        return jsd

    def liger(self, variant: str) -> Function:
        from liger_kernel.ops.jsd import LigerJSDFunction

        beta = BETAS[variant]
        return lambda x, y: LigerJSDFunction.apply(x, y, None, beta, -100)


ENTRY = JSD()
