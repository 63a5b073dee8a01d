"""The weighted sum of a token's streams on every driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.residual.mhc_pre import MHCPre
from tests.harness.op_tests import Case, Draw, Exact, OpTests
from tests.ops.residual.stream_cases import BEYOND, CASES, EMPTY, LARGE, fp32_of, streams_case, with_streams

X, H = torch.ones(3, 4, 8), torch.ones(3, 4)


class TestMHCPre(OpTests):
    op_class = MHCPre
    dimensions = (3, 4)
    longest_emulated = 1300
    cases, empty, large, beyond = CASES, EMPTY, LARGE, BEYOND
    bad: Mapping[str, Any] = {
        "no streams": (
            (torch.ones(4), H),
            {},
            ArgumentError,
            r"x must be \(..., streams, channels\), got shape \(4,\)",
        ),
        "three streams": (
            (torch.ones(3, 3, 8), torch.ones(3, 3)),
            {},
            ArgumentError,
            r"x must have 2, 4 or 8 streams.*got shape \(3, 3, 8\)",
        ),
        "weights of others": (
            (X, H[:, :2]),
            {},
            ArgumentError,
            r"h_pre must be of shape \(3, 4\), got \(3, 2\)",
        ),
        "weights' dtype": ((X, H.half()), {}, ArgumentTypeError, "h_pre must be float32, got torch.float16"),
        "integers": ((X.int(), H), {}, ArgumentTypeError, "x must be bfloat16.*got int32"),
    }

    def tensors(self, case: Case, draw: Draw) -> Tensors:
        return draw.rows(*case.shape), draw.dense(*case.shape[:-1], dtype=fp32_of(case))

    def formula(self, x: Tensor, h_pre: Tensor) -> Tensor:
        return torch.einsum("...s,...sc->...c", h_pre, x)

    def limits(self, exact: Exact) -> Mapping[str, Mapping[str, Any]]:
        x, h = exact.inputs["x"].abs(), exact.inputs["h_pre"].abs()
        dy = exact.grads[0].abs().unsqueeze(-2)
        return {
            "y": {"magnitude": (x * h.unsqueeze(-1)).sum(-2)},
            "dh_pre": {"magnitude": (dy * x).sum(-1)},
        }

    def table_case(
        self, kernel: str, dtypes: Mapping[str, Any], n: int, aligned: bool, rows: int
    ) -> Case | None:
        return streams_case(dtypes, n, aligned, rows)

    def fit(self, case: Case, choose: Callable[[Sequence[Any]], Any]) -> Case:
        return with_streams(case, choose)
