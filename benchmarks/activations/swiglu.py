"""SwiGLU: silu(gate) * up, rows of n; "packed": both in one tensor (rows, 2n), gate first."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.activations.gated import GatedEntry
from benchmarks.op_entry import Function, Overwritten, Random, both
from benchmarks.workload import Case

SHAPES = [(8192, n) for n in (5120, 11008, 14336, 18944)]


class SwiGLU(GatedEntry):
    op = "swiglu"
    points = (*both(SHAPES), *both(SHAPES, "packed"))

    def inputs(self, case: Case, random: Random) -> tuple[Tensor, ...]:
        rows, n = case.shape
        if case.variant == "packed":
            return (random.normal(rows, 2 * n),)
        return random.normal(rows, n), random.normal(rows, n)

    def eager(self, variant: str) -> Function:
        return _packed if variant == "packed" else _separate

    def liger(self, variant: str) -> Function:
        from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction, LigerSiLUMulFunction

        kind = LigerFusedGateUpSiLUMulFunction if variant == "packed" else LigerSiLUMulFunction
        apply: Function = kind.apply
        return apply

    def overwritten(self, provider: str, case: Case) -> Overwritten:
        over = provider == "liger" and case.direction == "backward" and case.variant == ""
        return Overwritten((0, 1) if over else ())


def _separate(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


def _packed(gate_up: Tensor) -> Tensor:
    return _separate(*gate_up.chunk(2, -1))


ENTRY = SwiGLU()
