"""A token's streams mixed and added to, on every driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.residual.mhc_post import MHCPost
from tests.harness.op_tests import Case, Draw, Exact, OpTests
from tests.ops.residual.stream_cases import BEYOND, CASES, EMPTY, LARGE, fp32_of, streams_case, with_streams

X, F, H, R = torch.ones(3, 4, 8), torch.ones(3, 8), torch.ones(3, 4), torch.ones(3, 4, 4)


class TestMHCPost(OpTests):
    op_class = MHCPost
    dimensions = (3, 4)
    longest_emulated = 1300
    cases, empty, large, beyond = CASES, EMPTY, LARGE, BEYOND
    bad: Mapping[str, Any] = {
        "no streams": (
            (torch.ones(4), F, H, R),
            {},
            ArgumentError,
            r"x must be \(..., streams, channels\), got shape \(4,\)",
        ),
        "one stream": ((X[:, :1], F, H, R), {}, ArgumentError, "x must have 2, 4 or 8 streams"),
        "f's shape": ((X, F[:2], H, R), {}, ArgumentError, r"f must be of shape \(3, 8\), got \(2, 8\)"),
        "f's dtype": ((X, F.half(), H, R), {}, ArgumentTypeError, "f must be of x's dtype torch.float32"),
        "h_post's shape": (
            (X, F, R, R),
            {},
            ArgumentError,
            r"h_post must be of shape \(3, 4\), got \(3, 4, 4\)",
        ),
        "h_res' dtype": (
            (X, F, H, R.half()),
            {},
            ArgumentTypeError,
            "h_res must be float32, got torch.float16",
        ),
        "integers": ((X.int(), F, H, R), {}, ArgumentTypeError, "x must be bfloat16.*got int32"),
    }

    def tensors(self, case: Case, draw: Draw) -> Tensors:
        *outer, streams, n = case.shape
        wide = fp32_of(case)
        return (
            draw.rows(*case.shape),
            draw.rows(*outer, n),
            draw.dense(*outer, streams, dtype=wide),
            draw.dense(*outer, streams, streams, dtype=wide),
        )

    def formula(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        return torch.einsum("...oi,...ic->...oc", h_res, x) + torch.einsum("...o,...c->...oc", h_post, f)

    def limits(self, exact: Exact) -> Mapping[str, Mapping[str, Any]]:
        """All results are sums."""
        x, f, h_post, h_res = (t.abs() for t in exact.inputs.values())
        dy = exact.grads[0].abs()
        return {
            "y": {"magnitude": h_res @ x + h_post.unsqueeze(-1) * f.unsqueeze(-2)},
            "dx": {"magnitude": h_res.transpose(-1, -2) @ dy},
            "df": {"magnitude": (h_post.unsqueeze(-1) * dy).sum(-2)},
            "dh_post": {"magnitude": (dy * f.unsqueeze(-2)).sum(-1)},
            "dh_res": {"magnitude": dy @ x.transpose(-1, -2)},
        }

    def table_case(
        self, kernel: str, dtypes: Mapping[str, Any], n: int, aligned: bool, rows: int
    ) -> Case | None:
        return streams_case(dtypes, n, aligned, rows)

    def fit(self, case: Case, choose: Callable[[Sequence[Any]], Any]) -> Case:
        return with_streams(case, choose)
