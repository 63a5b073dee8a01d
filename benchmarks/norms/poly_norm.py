"""PolyNorm: y = w0 norm(x^3) + w1 norm(x^2) + w2 norm(x) + b over rows of n, norm(u) = u / rms(u)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.op_entry import Function, OpEntry, Overwritten, Random, sweep
from benchmarks.workload import Case

EPS = 1e-6
NS = (1024, 2048, 4096, 5120, 8192, 11008, 16384)


class PolyNorm(OpEntry):
    op = "poly_norm"
    kernels = (("poly_norm_sums", "backward", ""),)
    points = (*sweep("forward", 2**28, NS), *sweep("backward", 2**27, NS))
    shared = (1, 2)
    unread = (2,)

    def inputs(self, case: Case, random: Random) -> tuple[Tensor, ...]:
        return random.normal(*case.shape), random.near(1 / 3, 3), random.near(1, 1)

    def keywords(self, variant: str) -> Mapping[str, Any]:
        return {"eps": EPS}

    def eager(self, variant: str) -> Function:
        return _poly_norm

    def liger(self, variant: str) -> Function:
        from liger_kernel.ops.poly_norm import LigerPolyNormFunction

        # Its bias is a scalar.
        return lambda x, weight, bias: LigerPolyNormFunction.apply(x, weight, bias.squeeze(), EPS)

    def overwritten(self, provider: str, case: Case) -> Overwritten:
        return Overwritten(grads=provider == "liger" and case.direction == "backward")


def _poly_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return weight[0] * _norm(x**3) + weight[1] * _norm(x**2) + weight[2] * _norm(x) + bias


def _norm(u: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(u, u.shape[-1:], eps=EPS)


ENTRY = PolyNorm()
