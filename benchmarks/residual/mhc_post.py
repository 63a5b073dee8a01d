"""mHC, what a layer leaves in tokens (tokens, streams, channels): the streams mixed by matrices, and the layer's result
(tokens, channels) added to each by a weight."""

from __future__ import annotations

from torch import Tensor

from benchmarks.op_entry import Function, OpEntry, Random, both
from benchmarks.residual.mhc_pre import SHAPES
from benchmarks.workload import Case


class MHCPost(OpEntry):
    op = "mhc_post"
    points = both(SHAPES)
    small = (4, 4, 1024)

    def inputs(self, case: Case, random: Random) -> tuple[Tensor, ...]:
        tokens, streams, channels = case.shape
        return (
            random.normal(*case.shape),
            random.normal(tokens, channels),
            random.near(1, tokens, streams).float(),
            random.near(0.25, tokens, streams, streams).float(),
        )

    def eager(self, variant: str) -> Function:
        return _post

    def liger(self, variant: str) -> Function:
        from liger_kernel.ops.mhc import LigerMHCPostResFunction

        apply: Function = LigerMHCPostResFunction.apply
        return apply

    def tuned_shape(self, kernel: str, n: int, elements: int) -> tuple[int, ...]:
        return elements // (4 * n), 4, n


def _post(x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    return (h_res @ x.float() + h_post.unsqueeze(-1) * f.float().unsqueeze(-2)).to(x.dtype)


ENTRY = MHCPost()
