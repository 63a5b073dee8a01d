"""Kullback-Leibler divergence from a teacher's probabilities, or log-probabilities ("log_target")."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.losses.divergence_entry import SHAPES, DivergenceEntry
from benchmarks.op_entry import Function, Random, both
from benchmarks.workload import Case


class KLDiv(DivergenceEntry):
    op = "kl_div"
    points = (*both(SHAPES), *both(SHAPES[1:2], "log_target"))

    def inputs(self, case: Case, random: Random, distance: float = 1.0) -> tuple[Tensor, ...]:
        x, y = super().inputs(case, random, distance)
        return x, y if case.variant else y.exp_()

    def keywords(self, variant: str) -> Mapping[str, Any]:
        return {"log_target": variant == "log_target"}

    def eager(self, variant: str) -> Function:
        """In float32, which users of bfloat16 cast to: the sums of thousands of terms ask for it."""
        log_target = variant == "log_target"
        return lambda x, y: torch.nn.functional.kl_div(
            x.float(), y.float(), reduction="batchmean", log_target=log_target
        )

    def liger(self, variant: str) -> Function:
        from liger_kernel.ops.kl_div import LigerKLDivLossFunction

        log_target = variant == "log_target"
        return lambda x, y: LigerKLDivLossFunction.apply(x, y, "batchmean", log_target)


ENTRY = KLDiv()
