"""Log-probabilities of one token of each row, of n logits. A backward reads the logits again."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.op_entry import Function, OpEntry, Random, both
from benchmarks.reference import Maybe, PublicCall, Tensors
from benchmarks.workload import Case

SHAPES = ((16384, 32000), (10240, 50257), (8192, 128256), (4096, 262144))


class SelectiveLogSoftmax(OpEntry):
    op = "selective_log_softmax"
    points = (*both(SHAPES), *both(SHAPES[2:3], "64 columns"))
    providers = ("liger_aot", "torch", "torch_compile")

    def inputs(self, case: Case, random: Random) -> Tensors:
        rows, n = case.shape
        chosen = (64,) if case.variant else ()
        return random.normal(rows, n), random.integers(n, rows, *chosen)

    def eager(self, variant: str) -> Function:
        def function(logits: Tensor, index: Tensor) -> Tensor:
            y = torch.nn.functional.log_softmax(logits, -1, dtype=torch.float32)
            return y.gather(-1, index if variant else index.unsqueeze(-1)).view(index.shape)

        return function

    def _grads(self, calculation: PublicCall, arguments: Maybe, random: Random) -> Tensors:
        """The result is float32 whatever the logits are."""
        wide = torch.promote_types(random.dtype, torch.float32)
        return tuple(g.to(wide) for g in super()._grads(calculation, arguments, random))


ENTRY = SelectiveLogSoftmax()
