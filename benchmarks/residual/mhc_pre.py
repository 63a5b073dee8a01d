"""mHC, what a layer reads of tokens (tokens, streams, channels): the streams' sum, weighted (tokens, streams)."""

from __future__ import annotations

from torch import Tensor

from benchmarks.op_entry import Function, OpEntry, Random, both
from benchmarks.workload import Case

SHAPES = ((8192, 4, 2048), (8192, 4, 4096), (4096, 4, 7168), (8192, 2, 4096), (4096, 8, 4096))


class MHCPre(OpEntry):
    op = "mhc_pre"
    points = both(SHAPES)
    small = (4, 4, 1024)

    def inputs(self, case: Case, random: Random) -> tuple[Tensor, ...]:
        return random.normal(*case.shape), random.near(1, *case.shape[:-1]).float()

    def eager(self, variant: str) -> Function:
        return lambda x, h: (x.float() * h.unsqueeze(-1)).sum(-2).to(x.dtype)

    def liger(self, variant: str) -> Function:
        from liger_kernel.ops.mhc import LigerMHCPreFunction

        apply: Function = LigerMHCPreFunction.apply
        return apply

    def tuned_shape(self, kernel: str, n: int, elements: int) -> tuple[int, ...]:
        return elements // (4 * n), 4, n


ENTRY = MHCPre()
