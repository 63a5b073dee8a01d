"""Log-softmax over rows of n. A backward reads the output, as large as x."""

from __future__ import annotations

import torch

from benchmarks.op_entry import Function, OpEntry
from benchmarks.softmax.softmax import POINTS


class LogSoftmax(OpEntry):
    op = "log_softmax"
    points = POINTS
    providers = ("liger_aot", "torch", "torch_compile")

    def eager(self, variant: str) -> Function:
        return lambda x: torch.nn.functional.log_softmax(x, -1)


ENTRY = LogSoftmax()
