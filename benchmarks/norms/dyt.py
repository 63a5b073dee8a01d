"""Dynamic tanh: y = weight * tanh(alpha * x) + bias over rows of n, alpha one trained number (Zhu et al., 2025)."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.op_entry import Function, OpEntry, Random, sweep
from benchmarks.workload import Case

NS = (4096, 5120, 8192, 11008, 16384)


class DyT(OpEntry):
    op = "dyt"
    kernels = (("dyt_sums", "backward", ""),)
    points = (*sweep("forward", 2**28, NS), *sweep("backward", 2**27, NS))
    shared = (1, 2, 3)
    unread = (3,)

    def inputs(self, case: Case, random: Random) -> tuple[Tensor, ...]:
        n = case.shape[-1]
        return random.normal(*case.shape), random.near(0.5, 1), random.near(1, n), random.near(0, n)

    def eager(self, variant: str) -> Function:
        return lambda x, alpha, weight, bias: torch.tanh(alpha * x) * weight + bias

    def liger(self, variant: str) -> Function:
        from liger_kernel.ops.dyt import LigerDyTFunction

        apply: Function = LigerDyTFunction.apply
        return apply


ENTRY = DyT()
