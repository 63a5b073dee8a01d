"""Cross entropy and total variation distance of each row of n logits. A backward reads both models' logits again."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.op_entry import Function, OpEntry, Random, both
from benchmarks.reference import Maybe, PublicCall, Tensors
from benchmarks.workload import Case

SHAPES = ((8192, 32000), (4096, 50257), (4096, 128256))


class CrossEntropyTVD(OpEntry):
    op = "cross_entropy_tvd"
    points = both(SHAPES)
    providers = ("liger_aot", "torch", "torch_compile", "liger")
    constant = (1,)

    def inputs(self, case: Case, random: Random) -> Tensors:
        rows, n = case.shape
        return random.normal(rows, n), random.normal(rows, n), random.integers(n, rows)

    def eager(self, variant: str) -> Function:
        def function(x: Tensor, y: Tensor, target: Tensor) -> Tensors:
            wide = torch.promote_types(x.dtype, torch.float32)
            log_p, q = x.to(wide).log_softmax(-1), y.to(wide).softmax(-1)
            ce = -log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1)
            return ce, (log_p.exp() - q).abs().sum(-1) / 2

        return function

    def liger(self, variant: str) -> Function:
        from liger_kernel.ops.fused_ce_tvd import LigerFusedCETVDFunction

        function: Function = LigerFusedCETVDFunction.apply
        return function

    def _grads(self, calculation: PublicCall, arguments: Maybe, random: Random) -> Tensors:
        """The results are float32 whatever the logits are."""
        wide = torch.promote_types(random.dtype, torch.float32)
        return tuple(g.to(wide) for g in super()._grads(calculation, arguments, random))


ENTRY = CrossEntropyTVD()
