"""GeGLU: gelu(gate) * up with the tanh approximation, rows of n; "exact": gelu by the error function; "packed": gate
and up in one tensor (rows, 2n), gate first, tanh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.activations.gated import GatedEntry
from benchmarks.op_entry import Function, Overwritten, Random, both
from benchmarks.workload import Case

SHAPES = [(8192, n) for n in (5120, 11008, 14336, 18944)]


class GeGLU(GatedEntry):
    op = "geglu"
    points = (*both(SHAPES), *both(SHAPES, "exact"), *both(SHAPES, "packed"))

    def inputs(self, case: Case, random: Random) -> tuple[Tensor, ...]:
        rows, n = case.shape
        if case.variant == "packed":
            return (random.normal(rows, 2 * n),)
        return random.normal(rows, n), random.normal(rows, n)

    def keywords(self, variant: str) -> Mapping[str, Any]:
        return {"approximate": _approximate(variant)}

    def eager(self, variant: str) -> Function:
        gelu, approximate = torch.nn.functional.gelu, _approximate(variant)
        if variant == "packed":
            return lambda both: _packed(both, approximate)
        return lambda gate, up: gelu(gate, approximate=approximate) * up

    def offers(self, provider: str, variant: str) -> bool:
        # Liger has the tanh form on two tensors alone.
        return provider in self.providers and (provider != "liger" or variant == "")

    def liger(self, variant: str) -> Function:
        from liger_kernel.ops.geglu import LigerGELUMulFunction

        apply: Function = LigerGELUMulFunction.apply
        return apply

    def overwritten(self, provider: str, case: Case) -> Overwritten:
        return Overwritten((0, 1) if provider == "liger" and case.direction == "backward" else ())


def _approximate(variant: str) -> str:
    return "none" if variant == "exact" else "tanh"


def _packed(gate_up: Tensor, approximate: str) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


ENTRY = GeGLU()
