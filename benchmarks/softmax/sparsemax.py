"""Sparsemax over rows of n: the projection onto the simplex (Martins and Astudillo, 2016), in torch by a sort.

A backward reads the output, as large as x."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.op_entry import Function, OpEntry, Random, sweep
from benchmarks.workload import Case

# Few elements: torch's sort takes a hundred times as long as reading them.
NS = (1024, 2048, 4096, 5120, 8192, 11008, 16384, 32768)


class Sparsemax(OpEntry):
    op = "sparsemax"
    providers = ("liger_aot", "torch", "liger")  # compiled, the sort stays torch's own
    points = (*sweep("forward", 2**26, NS), *sweep("backward", 2**26, NS))

    def inputs(self, case: Case, random: Random) -> tuple[Tensor, ...]:
        """Multiples of 3 / 32: differences of their sums are never 1, so no element lies on the threshold, where the
        gradient is not unique."""
        return (random.normal(*case.shape).mul_(32 / 3).round_().mul_(3 / 32),)

    def eager(self, variant: str) -> Function:
        return _sparsemax

    def liger(self, variant: str) -> Function:
        from liger_kernel.ops.sparsemax import LigerSparsemaxFunction

        return lambda x: LigerSparsemaxFunction.apply(x, -1)


def _sparsemax(x: Tensor) -> Tensor:
    """In fp32: a running sum of bf16 would lose the threshold."""
    wide = x.float()
    falling = wide.sort(-1, descending=True).values
    ranks = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=wide.dtype)
    excess = falling.cumsum(-1) - 1
    support = (falling * ranks > excess).sum(-1, keepdim=True)
    threshold = excess.gather(-1, support - 1) / support
    return (wide - threshold).clamp(min=0).to(x.dtype)


ENTRY = Sparsemax()
