"""LayerNorm over rows of n, with weight and bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.op_entry import LENGTHS, Function, OpEntry, Random, sweep
from benchmarks.workload import Case

EPS = 1e-5


class LayerNorm(OpEntry):
    op = "layernorm"
    points = (*sweep("forward", 2**28, LENGTHS), *sweep("backward", 2**27, LENGTHS))
    shared = (1, 2)
    unread = (2,)

    def inputs(self, case: Case, random: Random) -> tuple[Tensor, ...]:
        n = case.shape[-1]
        return random.normal(*case.shape), random.near(1, n), random.near(0, n)

    def keywords(self, variant: str) -> Mapping[str, Any]:
        return {"eps": EPS}

    def eager(self, variant: str) -> Function:
        return lambda x, weight, bias: torch.nn.functional.layer_norm(x, weight.shape, weight, bias, EPS)

    def liger(self, variant: str) -> Function:
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        return lambda x, weight, bias: LigerLayerNormFunction.apply(x, weight, bias, EPS)


ENTRY = LayerNorm()
