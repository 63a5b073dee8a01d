"""Residual addition and RMSNorm: h = x + residual and y = rmsnorm(h) * weight over rows of n, both given.

A backward has gradients of both, reads h, as large as x, and writes one gradient: x and residual have the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.norms.rmsnorm import EPS, formula
from benchmarks.op_entry import LENGTHS, Function, OpEntry, Random, sweep
from benchmarks.workload import Case


class FusedAddRMSNorm(OpEntry):
    op = "fused_add_rmsnorm"
    points = (*sweep("forward", 2**27, LENGTHS), *sweep("backward", 2**27, LENGTHS))
    shared = (2,)
    unread = (1,)
    unwritten = (1,)

    def inputs(self, case: Case, random: Random) -> tuple[Tensor, ...]:
        return random.normal(*case.shape), random.normal(*case.shape), random.near(1, case.shape[-1])

    def keywords(self, variant: str) -> Mapping[str, Any]:
        return {"eps": EPS}

    def eager(self, variant: str) -> Function:
        return _eager

    def formula(self, variant: str) -> Function:
        return _formula

    def liger(self, variant: str) -> Function:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

        return lambda x, residual, weight: LigerFusedAddRMSNormFunction.apply(x, residual, weight, EPS)


def _eager(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    return torch.nn.functional.rms_norm(h, weight.shape, weight, EPS), h


def _formula(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    return formula(h, weight), h


ENTRY = FusedAddRMSNorm()
