"""Attention residuals: tokens (blocks, tokens, n) weighted by a softmax over the blocks. The points are
blocks x tokens x n."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.op_entry import Function, OpEntry, Random, both
from benchmarks.workload import Case

EPS = 1e-6
SHAPES = ((8, 8192, 2048), (4, 8192, 4096), (8, 8192, 4096), (8, 4096, 7168), (16, 4096, 4096))


class AttentionResiduals(OpEntry):
    op = "attention_residuals"
    points = both(SHAPES)
    kernels = (("attention_residuals_sums", "backward", ""),)
    shared = (1, 2)
    small = (4, 4, 1024)

    def inputs(self, case: Case, random: Random) -> tuple[Tensor, ...]:
        """The blocks lie one after the other in memory; the tokens are the first dimension, as a batch is."""
        n = case.shape[-1]
        return random.normal(*case.shape).transpose(0, 1), random.normal(n) * n**-0.5, random.near(1, n)

    def keywords(self, variant: str) -> Mapping[str, Any]:
        return {"eps": EPS}

    def invoke(self, op: Any, variant: str) -> Function:
        return lambda v, query, norm: op(v.transpose(0, 1), query, norm, **self.keywords(variant))

    def eager(self, variant: str) -> Function:
        return _attention_residuals

    def liger(self, variant: str) -> Function:
        from liger_kernel.ops.attn_res import LigerAttnResFunction

        return lambda v, query, norm: LigerAttnResFunction.apply(v.transpose(0, 1), query, norm, EPS)

    def tuned_shape(self, kernel: str, n: int, elements: int) -> tuple[int, ...]:
        return 8, elements // (8 * n), n


def _attention_residuals(v: Tensor, query: Tensor, norm: Tensor) -> Tensor:
    scores = torch.nn.functional.rms_norm(v, v.shape[-1:], norm, EPS) @ query
    return (scores.softmax(-1).unsqueeze(-1) * v).sum(-2)


ENTRY = AttentionResiduals()
