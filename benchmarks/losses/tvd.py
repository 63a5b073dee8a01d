"""Total variation distance of probabilities."""

from __future__ import annotations

from torch import Tensor

from benchmarks.losses.divergence_entry import DivergenceEntry
from benchmarks.op_entry import Function, Random
from benchmarks.workload import Case


class TVD(DivergenceEntry):
    op = "tvd"

    def inputs(self, case: Case, random: Random, distance: float = 1.0) -> tuple[Tensor, ...]:
        x, y = super().inputs(case, random, distance)
        return x.exp_(), y.exp_()

    def eager(self, variant: str) -> Function:
        """In float32, which users of bfloat16 cast to: the sums of thousands of terms ask for it."""
        return lambda p, q: (p.float() - q.float()).abs().sum() * (0.5 / len(p))

    def liger(self, variant: str) -> Function:
        from liger_kernel.ops.tvd import LigerTVDLossFunction

        return lambda p, q: LigerTVDLossFunction.apply(p, q, None, "batchmean")


ENTRY = TVD()
