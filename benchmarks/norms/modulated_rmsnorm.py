"""RMSNorm with adaptive scale and shift: y = rmsnorm(x) * (1 + scale) + shift of images (batch, tokens, n), one scale
and one shift (batch, 1, n) for an image's tokens, no weight: the norm of diffusion transformers. "by token": a scale
and a shift for each token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.op_entry import Function, OpEntry, Overwritten, Random, both
from benchmarks.workload import Case

EPS = 1e-6
SHAPES = ((32, 1024, 1152), (32, 4096, 1152), (32, 1024, 3072), (32, 4096, 3072), (32, 4096, 4096))


class ModulatedRMSNorm(OpEntry):
    op = "modulated_rmsnorm"
    points = (*both(SHAPES), *both([(32, 1024, 3072)], "by token"))
    kernels = (
        ("modulated_rmsnorm_sums", "backward", ""),
        ("modulated_rmsnorm_backward_tokens", "backward", "by token"),
    )
    small = (1, 4, 4096)
    unread = (2,)

    def inputs(self, case: Case, random: Random) -> tuple[Tensor, ...]:
        batch, tokens, n = case.shape
        group = (batch, tokens if case.variant == "by token" else 1, n)
        return random.normal(*case.shape), random.near(0, *group), random.near(0, *group)

    def keywords(self, variant: str) -> Mapping[str, Any]:
        return {"eps": EPS}

    def eager(self, variant: str) -> Function:
        return _modulated

    def liger(self, variant: str) -> Function:
        from liger_kernel.ops.modulated_rms_norm import LigerModulatedRMSNormFunction

        return lambda x, scale, shift: LigerModulatedRMSNormFunction.apply(x, None, scale, shift, EPS)

    def overwritten(self, provider: str, case: Case) -> Overwritten:
        return Overwritten(grads=provider == "liger" and case.direction == "backward")

    def tuned_shape(self, kernel: str, n: int, elements: int) -> tuple[int, ...]:
        return 32, elements // (32 * n), n


def _modulated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], eps=EPS) * (1 + scale) + shift


ENTRY = ModulatedRMSNorm()
