"""RMSNorm in all casting modes, with a weight of x's dtype or float32 or none, on every driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_aot
from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.ops.norms.rmsnorm import RMSNorm
from tests.harness.op_tests import BF16, DTYPES, FP16, FP32, Case, Draw, Exact, OpTests

X = torch.ones(2, 8)


class TestRMSNorm(OpTests):
    op_class = RMSNorm
    in_place: Mapping[str, str] = {"y": "x"}
    defaults: Mapping[str, Any] = {"eps": 1e-6, "offset": 0.0, "casting_mode": "llama"}
    cases = (
        Case((3, 5, 48), BF16, weight=BF16),
        Case((1, 1), BF16, weight=BF16),
        Case((7, 1), FP32),
        Case((3, 2), FP16, weight=FP32, casting_mode="gemma", offset=1.0),
        Case((4, 17), BF16, casting_mode="none"),
        Case((5, 48), BF16, weight=BF16, gap=16, casting_mode="gemma", offset=1.0),
        Case((5, 48), FP32, weight=FP32, gap=3, offset=0.5),
        Case((2, 64), FP16, weight=FP16, shift=8, eps=0.1),
        Case((9, 1000), BF16, weight=FP32, offset=1.0, shift=3, gap=5),
        Case((600, 32), BF16, weight=BF16),
        Case((1, 9008), FP32, weight=FP32),  # one step for one program, in a form that only writes partials
        Case((1, 5001), BF16, weight=BF16, shift=1),
        Case((1, 8192), BF16, weight=BF16),
        Case((40,), BF16, weight=BF16),
    )
    empty = (Case((0, 16), BF16, weight=BF16), Case((4, 0), FP32, weight=FP32), Case((2, 0, 8), FP16))
    large = tuple(
        Case(((1 << 25) // n, n), dtype, weight=weight, casting_mode=mode, offset=offset)
        for n in (128, 4096, 5120, 11008, 16384, 18944, 32768, 65536, 131072, 300_001)
        for dtype in DTYPES
        for weight, mode, offset in ((dtype, "llama", 0.0), (FP32, "gemma", 1.0))
    )
    beyond = tuple(Case(((1 << 31) // n + 64, n), BF16, weight=BF16) for n in (4096, 32768))
    bad: Mapping[str, Any] = {
        "x a scalar": ((torch.tensor(1.0),), {}, ArgumentError, "x must have at least one dimension"),
        "integers": ((X.int(),), {}, ArgumentTypeError, "x must be bfloat16, float16, float32, got int32"),
        "weight too long": ((X, torch.ones(9)), {}, ArgumentError, r"weight .*\(8,\).*got shape \(9,\)"),
        "weight 2-D": ((X, torch.ones(8, 1)), {}, ArgumentError, "weight must be contiguous of shape"),
        "weight strided": ((X, torch.ones(16)[::2]), {}, ArgumentError, "weight must be contiguous"),
        "weight's dtype": ((X, torch.ones(8, dtype=FP16)), {}, ArgumentTypeError, "x's dtype.*or float32"),
        "unknown mode": ((X,), {"casting_mode": "mistral"}, ArgumentError, "llama, gemma, none; got 'mist"),
        "out too wide": ((X,), {"out": torch.ones(2, 9)}, ArgumentError, "out must be of x's dtype"),
        "out's dtype": (
            (X,),
            {"out": torch.ones(2, 8, dtype=BF16)},
            ArgumentError,
            "out must be of x's dtype",
        ),
        "out elsewhere": ((X,), {"out": X.to("meta")}, ArgumentError, "out is on meta, x on cpu"),
        "out with a gradient": (
            (torch.ones(2, 8, requires_grad=True),),
            {"out": torch.ones(2, 8)},
            ArgumentError,
            "a gradient is needed",
        ),
    }

    def tensors(self, case: Case, draw: Draw) -> Tensors:
        x = draw.rows(*case.shape)
        x.mul_(10 ** draw.uniform(-2, 2, *case.shape[:-1], 1))  # rows of very different sizes
        dtype = case.get("weight")
        return x, None if dtype is None else draw.dense(case.shape[-1], dtype=dtype)

    def formula(self, x: Tensor, weight: Tensor | None, eps: float, offset: float, mode: str) -> Tensor:
        y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
        return y if weight is None else y * (offset + weight)

    def call_in_place(self, op: DifferentiableOp, tensors: Tensors, settings: tuple[Any, ...]) -> Any:
        named = dict(zip(self.setting_names(), settings, strict=True))
        return op(*tensors, **named, out=tensors[0])  # type: ignore[operator]

    def limits(self, exact: Exact) -> Mapping[str, Mapping[str, Any]]:
        x, weight = exact.inputs.values()
        (dy,), rstd = exact.grads, exact.results[1].view(*x.shape[:-1], 1)
        offset = exact.settings["offset"]
        w = torch.ones_like(x[..., :1]) if weight is None else offset + weight
        twice = exact.settings["casting_mode"] == "llama" and weight is not None
        limits: dict[str, dict[str, Any]] = {"y": {"roundings": 2 if twice else 1, "scale": 1 + w.abs()}}
        if dy is not None:
            # Some forms multiply the offset out.
            summands = w if weight is None else abs(offset) + weight.abs()
            mean = (x * dy * summands).abs().mean(-1, keepdim=True)
            limits["dx"] = {"magnitude": (dy * summands * rstd).abs() + x.abs() * mean * rstd**3}
            limits["dweight"] = {"magnitude": torch.atleast_2d((dy * x * rstd).abs()).flatten(0, -2).sum(0)}
        return limits


def test_overlapping_out() -> None:
    op = liger_aot.load("rmsnorm")
    buffer = torch.randn(2 * 16)
    with pytest.raises(ArgumentError, match="out overlaps x"):
        op(buffer[:16].view(2, 8), out=buffer[4:20].view(2, 8))
    both = torch.randn(4, 16)
    left, right = both[:, :8], both[:, 8:]
    assert torch.equal(op(left, out=right), op(left)), "columns beside each other don't overlap"


@pytest.mark.gpu
def test_out_of_other_layouts() -> None:
    """Rows with a gap, whose rest stays as it was; columns first, which no kernel writes."""
    op = liger_aot.load("rmsnorm")
    x, weight = torch.randn(6, 10, 256, dtype=BF16, device="cuda"), torch.ones(256, dtype=BF16, device="cuda")
    out = torch.full((6, 10, 512), torch.nan, dtype=BF16, device="cuda")
    op(x, weight, out=out[..., :256])
    assert torch.equal(out[..., :256], op(x, weight)) and out[..., 256:].isnan().all()
    with pytest.raises(ArgumentError, match="evenly spaced"):
        op(x, weight, out=torch.empty(256, 6, 10, dtype=BF16, device="cuda").permute(1, 2, 0))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [16384, 131072])
def test_in_place_on_rows_read_twice(n: int) -> None:
    op, x = liger_aot.load("rmsnorm"), torch.randn(300, n, dtype=BF16, device="cuda")
    expected = op(x)
    assert torch.equal(op(x, out=x), expected)
