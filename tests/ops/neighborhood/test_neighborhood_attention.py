"""neighborhood_attention: lengths around tiles, reaches past the ends, dilations, every head dimension's row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import liger_aot
from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.neighborhood.neighborhood_attention import NeighborhoodAttention, masked_scores
from tests.harness.op_tests import BF16, DTYPES, FP16, FP32, Case, Draw, Exact, OpTests, Results

Q = torch.ones(2, 5, 16)


class TestNeighborhoodAttention(OpTests):
    op_class = NeighborhoodAttention
    defaults: ClassVar[Mapping[str, Any]] = {"reach": 3, "dilation": 1, "scale": 0.25}
    dimensions = (2, 4)
    cases = (
        Case((2, 3, 37, 16), BF16),
        *(Case((2, 33, 64), dtype, dilation=2) for dtype in DTYPES),
        Case((40, 96), FP32, reach=0),
        Case((1, 1, 1, 64), FP16),
        Case((3, 17, 128), BF16, reach=40, dilation=3),
        Case((2, 21, 41), FP32, reach=2, dilation=5, scale=1.0),
        Case((2, 9, 256), FP32, shift=1),
        Case((2, 11, 130), FP16, reach=1, dilation=40),
    )
    empty = (Case((0, 5, 16), FP32), Case((2, 0, 16), BF16))
    bad: ClassVar = {
        "dtype": ((Q, Q.half(), Q), {"reach": 1}, ArgumentTypeError, "k must be of q's dtype"),
        "shape": (
            (Q, Q, Q[:1]),
            {"reach": 1},
            ArgumentError,
            r"v must be of q's shape \(2, 5, 16\), got \(1, 5",
        ),
        "one dimension": (
            (Q[0, 0],) * 3,
            {"reach": 1},
            ArgumentError,
            r"q must be of shape \(\.\.\., length, dim\)",
        ),
        "dim": ((torch.ones(2, 257),) * 3, {"reach": 1}, ArgumentError, r"dim from 1 to 256; got \(2, 257\)"),
        "reach": ((Q, Q, Q), {"reach": -1}, ArgumentError, "reach must be"),
        "reach's type": ((Q, Q, Q), {"reach": 1.0}, ArgumentTypeError, "reach must be an int"),
        "dilation": ((Q, Q, Q), {"reach": 1, "dilation": 0}, ArgumentError, "dilation must be"),
        "scale": ((Q, Q, Q), {"reach": 1, "scale": 0.0}, ArgumentError, "scale must be above 0"),
    }
    large = (
        Case((2, 16, 4096, 64), FP32, dilation=2),
        Case((4, 12, 1024, 64), BF16, reach=4),
        Case((1, 2, 3000, 128), FP16, reach=150),
        Case((3, 700, 80), BF16, dilation=7),
    )
    beyond = (Case(((1 << 15) + 64, 1024, 64), BF16, reach=1),)

    def tensors(self, case: Case, draw: Draw) -> tuple[Any, ...]:
        return tuple(draw.rows(*case.shape) for _ in range(3))

    def formula(self, q: Tensor, k: Tensor, v: Tensor, reach: int, dilation: int, scale: float) -> Tensor:
        """One neighbour after the other, of a sequence with room at both ends."""
        length, room = q.shape[-2], reach * dilation
        keys, values = (torch.nn.functional.pad(t, (0, 0, room, room)) for t in (k, v))
        at, scores, there = torch.arange(length), [], []
        for step in range(2 * reach + 1):
            some = keys[..., step * dilation : step * dilation + length, :]
            other = at + (step - reach) * dilation
            scores.append((q * some).sum(-1) * scale)
            there.append((other >= 0) & (other < length))
        p = torch.stack(scores, -1).masked_fill(~torch.stack(there, -1), -math.inf).softmax(-1)
        parts = (
            p[..., step, None] * values[..., step * dilation : step * dilation + length, :]
            for step in range(2 * reach + 1)
        )
        return sum(parts)  # type: ignore[return-value]

    def limits(self, exact: Exact) -> Mapping[str, Mapping[str, Any]]:
        """A score is a sum over dim, and a probability follows it: both add their terms' absolute values, twice that of
        the largest score of a row, as its log-sum-exp has it, too."""
        q, k, v = (exact.inputs[name] for name in ("q", "k", "v"))
        settings = tuple(exact.settings.values())
        scores = masked_scores(q, k, *settings)
        p, seen = scores.softmax(-1), scores.isfinite()
        terms = torch.where(seen, q.abs() @ k.abs().transpose(-1, -2) * settings[2], 0)
        follows = 1 + terms + (terms.amax(-1, keepdim=True) if terms.shape[-1] else 0.0)
        p = p * follows
        y = {"magnitude": p @ v.abs()}
        if exact.grads[0] is None:
            return {"y": y}
        dy, out = exact.grads[0].abs(), exact.results[0].abs()
        dp = dy @ v.abs().transpose(-1, -2) + (dy * out).sum(-1, keepdim=True)
        ds = p * dp * settings[2]
        return {
            "y": y,
            "dq": {"magnitude": ds @ k.abs()},
            "dk": {"magnitude": ds.transpose(-1, -2) @ q.abs()},
            "dv": {"magnitude": p.transpose(-1, -2) @ dy},
        }

    def saved(self, wide: Any, results: Any, got: Results) -> Any:
        """The backward reads the rounded result."""
        return *wide, got.outputs[0].double(), results[1]

    def table_case(
        self, kernel: str, dtypes: Mapping[str, torch.dtype], n: int, aligned: bool, rows: int
    ) -> Case | None:
        n = min(n, 256 if aligned else 255)
        return Case((2, max(rows, 5), n), dtypes["dtype"], shift=int(not aligned))

    def fit(self, case: Case, choose: Any) -> Case:
        *more, length, dim = case.shape
        return case.but(shape=(*more[-2:], min(length, 300), min(dim, 256)))

    def tail(self, case: Case, tensor: Any) -> Any:
        return tensor[-1:] if tensor is not None else None


@pytest.mark.parametrize("length", [1, 8, 20])
def test_as_flash_attention(length: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, length, 16, dtype=BF16) for _ in range(3))
    wanted = liger_aot.load("flash_attention")(q, k, v, window=(4, 4), layout="bhsd")
    got = liger_aot.load("neighborhood_attention")(q, k, v, reach=4)
    torch.testing.assert_close(got, wanted)
