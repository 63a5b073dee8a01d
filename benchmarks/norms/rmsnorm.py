"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight over rows of n, with offset 0 and the "llama" casting mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.op_entry import Function, OpEntry, Overwritten, Random, sweep
from benchmarks.workload import Case

EPS = 1e-6
NS = (128, 256, 512, 1024, 2048, 4096, 5120, 8192, 11008, 16384, 18944, 32768, 65536, 131072)


def formula(x: Tensor, weight: Tensor) -> Tensor:
    """As models write it, "llama" casting mode."""
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return (wide * rstd).to(x.dtype) * weight


class RMSNorm(OpEntry):
    op = "rmsnorm"
    providers = (*OpEntry.providers, "quack")
    sections = (*OpEntry.sections, "cold")
    # 1 GiB read and written forward, 768 MiB backward
    points = (
        *sweep("forward", 2**28, NS),
        *sweep("forward", 2**27, [n for n in NS if n <= 32768], torch.float32),
        *sweep("backward", 2**27, [n for n in NS if 512 <= n <= 32768]),
    )
    shared = (1,)

    def inputs(self, case: Case, random: Random) -> tuple[Tensor, ...]:
        return random.normal(*case.shape), random.near(1, case.shape[-1])

    def keywords(self, variant: str) -> Mapping[str, Any]:
        return {"eps": EPS}

    def eager(self, variant: str) -> Function:
        return lambda x, weight: torch.nn.functional.rms_norm(x, weight.shape, weight, EPS)

    def formula(self, variant: str) -> Function:
        return formula

    def liger(self, variant: str) -> Function:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        return lambda x, weight: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama")

    def quack(self, variant: str) -> Function:
        from quack.rmsnorm import rmsnorm

        return lambda x, weight: rmsnorm(x, weight, eps=EPS)

    def overwritten(self, provider: str, case: Case) -> Overwritten:
        return Overwritten(grads=provider == "liger" and case.direction == "backward")

    def host_calls(self, provider: str, device: torch.device) -> Mapping[str, Callable[[], object]]:
        calls = dict(super().host_calls(provider, device))
        x, weight = self.small_inputs(device)
        if provider == "liger_aot":
            import liger_aot

            op = liger_aot.load("rmsnorm")
            out = torch.empty_like(x)
            calls["host_forward_out"] = lambda: op(x, weight, eps=EPS, out=out)
        if provider == "torch":
            calls["host_empty_like"] = lambda: torch.empty_like(x)
        return calls


ENTRY = RMSNorm()
