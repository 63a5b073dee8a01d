"""Squared ReLU: relu(x)^2, element by element."""

from __future__ import annotations

import torch

from benchmarks.op_entry import Function, OpEntry, both


class ReLUSquared(OpEntry):
    op = "relu_squared"
    points = tuple(both([(8192, n) for n in (5120, 11008, 14336, 18944)]))

    def eager(self, variant: str) -> Function:
        return lambda x: torch.nn.functional.relu(x).square()

    def liger(self, variant: str) -> Function:
        from liger_kernel.ops.relu_squared import LigerReLUSquaredFunction

        apply: Function = LigerReLUSquaredFunction.apply
        return apply


ENTRY = ReLUSquared()
