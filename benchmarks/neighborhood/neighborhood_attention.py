"""Attention to the neighbours in a sequence: 9 or 7 of them, also at every second position. Bytes are those of q, k, v
and the result; torch's attention with a mask reads all keys, Liger's writes all scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.op_entry import Function, OpEntry, Random, both
from benchmarks.reference import Tensors
from benchmarks.workload import Case

SHAPES = ((8, 16, 1024, 64), (2, 16, 4096, 64))
DILATED = "dilation 2"


class NeighborhoodAttention(OpEntry):
    op = "neighborhood_attention"
    points = (*both(SHAPES), *both(SHAPES, DILATED))
    small = (1, 2, 32, 64)
    providers = ("liger_aot", "torch", "liger")

    def inputs(self, case: Case, random: Random) -> Tensors:
        return tuple(random.normal(*case.shape) for _ in range(3))

    def keywords(self, variant: str) -> Mapping[str, Any]:
        return {"reach": 3, "dilation": 2, "scale": 0.125} if variant else {"reach": 4, "scale": 0.125}

    def eager(self, variant: str) -> Function:
        reach, dilation = self.keywords(variant)["reach"], 2 if variant else 1

        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            at = torch.arange(q.shape[-2], device=q.device)
            apart = at - at[:, None]
            seen = (apart.abs() <= reach * dilation) & (apart % dilation == 0)
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=0.125)

        return function

    def liger(self, variant: str) -> Function:
        from liger_kernel.ops.fused_neighborhood_attention import LigerFusedNeighborhoodAttentionFunction

        size, dilation = 2 * self.keywords(variant)["reach"] + 1, 2 if variant else 1
        return lambda *qkv: LigerFusedNeighborhoodAttentionFunction.apply(*qkv, size, dilation, 0.125)


ENTRY = NeighborhoodAttention()
