"""Attention over the depth of the network on every driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.residual.attention_residuals import AttentionResiduals
from tests.harness.op_tests import BF16, DTYPES, FP16, FP32, Case, Draw, Exact, OpTests, Results

V, W = torch.ones(3, 2, 8), torch.ones(8)


class TestAttentionResiduals(OpTests):
    """Options of a case: ``query``, its and the norm's dtype if not v's."""

    op_class = AttentionResiduals
    relaid = ("v",)
    dimensions = (2, 4)
    longest_emulated = 1100
    defaults: Mapping[str, Any] = {"eps": 1e-6}
    cases = (
        Case((4, 3, 48), BF16),
        Case((3, 2, 3, 48), BF16, query=FP32),
        Case((1, 5, 37), FP16),
        Case((2, 16), FP32),
        Case((5, 3, 1), FP32),
        Case((40, 2, 17), BF16, shift=3),
        Case((3, 4, 48), FP16, gap=16, query=FP32),
        Case((2, 2, 1040), FP16, gap=5, eps=0.1),
        Case((3, 2, 1100), FP32, shift=3, gap=5),
    )
    empty = (Case((3, 0, 16), BF16), Case((2, 4, 0), FP32))
    large = tuple(
        Case((blocks, (1 << 24) // (blocks * n), n), dtype)
        for blocks, n in ((4, 1024), (8, 4096), (5, 7168), (16, 2048), (3, 10_000))
        for dtype in DTYPES
    )
    beyond = (Case((4, (1 << 31) // 16384 + 64, 4096), BF16),)
    bad: Mapping[str, Any] = {
        "one dimension": ((W, W, W), {}, ArgumentError, r"v must be \(blocks, ..., n\).*got shape \(8,\)"),
        "no block": ((V[:0], W, W), {}, ArgumentError, r"at least one block, got shape \(0, 2, 8\)"),
        "query's shape": (
            (V, W[:7], W),
            {},
            ArgumentError,
            r"query must be contiguous of shape \(8,\).*shape \(7,\)",
        ),
        "norm strided": ((V, W, torch.ones(16)[::2]), {}, ArgumentError, r"norm must be.*strides \(2,\)"),
        "query's dtype": (
            (V, W.half(), W.half()),
            {},
            ArgumentTypeError,
            "query must be of v's dtype torch.float32",
        ),
        "norm's dtype": (
            (V.half(), W, W.half()),
            {},
            ArgumentTypeError,
            "norm must be of query's dtype torch.float32, got torch.float16",
        ),
        "integers": ((V.int(), W, W), {}, ArgumentTypeError, "v must be bfloat16.*got int32"),
    }

    def tensors(self, case: Case, draw: Draw) -> Tensors:
        """Scores of about 1: a softmax that is not saturated."""
        n, dtype = case.shape[-1], torch.promote_types(case.get("query", case.dtype), case.dtype)
        query = draw.dense(n, dtype=dtype).mul_(max(n, 1) ** -0.5)
        return draw.rows(*case.shape), query, draw.dense(n, dtype=dtype)

    def formula(self, v: Tensor, query: Tensor, norm: Tensor, eps: float) -> Tensor:
        keys = v / torch.sqrt((v * v).mean(-1, keepdim=True) + eps) * norm
        return torch.einsum("i...,i...n->...n", torch.softmax(keys @ query, 0), v)

    def saved(self, wide: Tensors, results: Tensors, got: Results) -> Tensors:
        return *wide, got.outputs[0].double(), *results[1:]

    def limits(self, exact: Exact) -> Mapping[str, Mapping[str, Any]]:
        """All results are sums; the softmax's weights change with the terms of its scores."""
        v, query, norm = (t.abs() for t in exact.inputs.values())
        y, alpha, rstd = exact.results
        alpha, rstd = (t.t().reshape(v.shape[:-1]) for t in (alpha, rstd))
        weight = query * norm
        dots = (v * weight).sum(-1)
        grown = alpha * (1 + 2 * (dots * rstd).amax(0))
        dy = exact.grads[0].abs()
        dscore = grown * ((v * dy).sum(-1) + (dy * y.abs()).sum(-1)) * rstd
        slope = dscore * rstd.square() * dots / max(v.shape[-1], 1)
        dv = grown.unsqueeze(-1) * dy + dscore.unsqueeze(-1) * weight + slope.unsqueeze(-1) * v
        sums = (dscore.unsqueeze(-1) * v).flatten(0, -2).sum(0)
        return {
            "y": {"magnitude": (grown.unsqueeze(-1) * v).sum(0)},
            "dv": {"magnitude": dv},
            "dquery": {"magnitude": sums * norm},
            "dnorm": {"magnitude": sums * query},
        }

    def table_case(
        self, kernel: str, dtypes: Mapping[str, Any], n: int, aligned: bool, rows: int
    ) -> Case | None:
        dtype = dtypes.get("dtype", dtypes.get("weight", BF16))
        return Case((3, rows, n), dtype, shift=int(not aligned))

    def tail(self, case: Case, tensor: Any) -> Any:
        if tensor.dim() == 1:
            return None
        return tensor[:, -96:] if tensor.dim() == 3 else tensor[-96:]
