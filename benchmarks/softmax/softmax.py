"""Softmax over rows of n. A backward reads the output, as large as x."""

from __future__ import annotations

import torch

from benchmarks.op_entry import Function, OpEntry, sweep

NS = (1024, 4096, 5120, 11008, 32768, 131072, 262144)
POINTS = (*sweep("forward", 2**28, NS), *sweep("backward", 2**27, (*NS[:4], 8192, 16384, *NS[4:])))


class Softmax(OpEntry):
    op = "softmax"
    points = POINTS

    def eager(self, variant: str) -> Function:
        return lambda x: torch.nn.functional.softmax(x, -1)

    def liger(self, variant: str) -> Function:
        from liger_kernel.ops.softmax import LigerSoftmaxFunction

        apply: Function = LigerSoftmaxFunction.apply
        return apply


ENTRY = Softmax()
