"""The residual addition and RMSNorm in one pass, on every driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_aot
from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.norms.fused_add_rmsnorm import FusedAddRMSNorm
from tests.harness.op_tests import BF16, DTYPES, FP16, FP32, Case, Draw, Exact, OpTests, Results

X = torch.ones(2, 8)


class TestFusedAddRMSNorm(OpTests):
    op_class = FusedAddRMSNorm
    names = ("y", "sum")
    in_place: Mapping[str, str] = {"y": "x", "sum": "residual"}
    defaults: Mapping[str, Any] = {"eps": 1e-6, "offset": 0.0, "casting_mode": "llama"}
    cases = (
        Case((3, 5, 48), BF16, weight=BF16),
        Case((1, 1), BF16, weight=BF16),
        Case((7, 1), FP32),
        Case((3, 2), FP16, weight=FP32, casting_mode="gemma", offset=1.0),
        Case((4, 17), BF16, casting_mode="none"),
        Case((5, 48), FP16, weight=FP16, gap=16, casting_mode="gemma", offset=1.0),
        Case((5, 48), FP32, weight=FP32, gap=3, offset=0.5),
        Case((2, 64), BF16, weight=FP32, shift=8, eps=0.1),
        Case((9, 1000), BF16, weight=FP32, offset=1.0, shift=3, gap=5),
        Case((150, 32), BF16, weight=BF16),
        Case((2, 2, 2100), FP16, weight=FP32, casting_mode="none"),
        Case((1, 9008), FP32, weight=FP32),  # one step for one program, in a form that only writes partials
        Case((1, 5001), BF16, weight=BF16, shift=1),
        Case((2, 8208), BF16, weight=FP32),  # past the forms that take such a weight
        Case((40,), BF16, weight=BF16),
    )
    empty = (Case((0, 16), BF16, weight=BF16), Case((4, 0), FP32, weight=FP32), Case((2, 0, 8), FP16))
    large = tuple(
        Case(((1 << 25) // n, n), dtype, weight=weight)
        for n in (128, 1024, 4096, 5120, 8192, 11008, 14336, 16384, 18944, 32768, 131072)
        for dtype in DTYPES
        for weight in dict.fromkeys((dtype, FP32))
    )
    beyond = (Case(((1 << 31) // 8192 + 64, 8192), BF16, weight=BF16),)
    bad: Mapping[str, Any] = {
        "x a scalar": ((torch.tensor(1.0), torch.tensor(1.0)), {}, ArgumentError, "x must have at least one"),
        "integers": ((X.int(), X.int()), {}, ArgumentTypeError, "x must be bfloat16, float16, float32"),
        "residual of another shape": (
            (X, torch.ones(8)),
            {},
            ArgumentError,
            r"residual must be of x's shape \(2, 8\).*got \(8,\)",
        ),
        "residual of another dtype": (
            (X, X.to(BF16)),
            {},
            ArgumentError,
            "residual must be of x's.*bfloat16",
        ),
        "weight too long": ((X, X, torch.ones(9)), {}, ArgumentError, r"weight .*\(8,\).*shape \(9,\)"),
        "weight strided": ((X, X, torch.ones(16)[::2]), {}, ArgumentError, "weight must be contiguous"),
        "weight of another dtype": (
            (X, X, torch.ones(8, dtype=FP16)),
            {},
            ArgumentTypeError,
            "weight must be of x's dtype.*or float32",
        ),
        "unknown mode": ((X, X), {"casting_mode": "mistral"}, ArgumentError, "llama, gemma, none; got 'mis"),
        "in place, one tensor": ((X, X), {"inplace": True}, ArgumentError, "x and residual, which overlap"),
        "in place, strided": (
            (torch.ones(8, 2).t(), X),
            {"inplace": True},
            ArgumentError,
            r"writes x, whose strides are \(1, 2\)",
        ),
        "in place, expanded": (
            (X, torch.ones(1, 8).expand(2, 8)),
            {"inplace": True},
            ArgumentError,
            r"writes residual, whose strides are \(0, 1\)",
        ),
    }

    def table_case(
        self, kernel: str, dtypes: Mapping[str, torch.dtype], n: int, aligned: bool, rows: int
    ) -> Case | None:
        case = super().table_case(kernel, dtypes, n, aligned, rows)
        return case if case is None else case.but(weight=case.dtype, offset=0.5)

    def tensors(self, case: Case, draw: Draw) -> Tensors:
        size = 10 ** draw.uniform(-2, 2, *case.shape[:-1], 1)  # rows of very different sizes
        x, residual = (draw.rows(*case.shape).mul_(size) for _ in range(2))
        dtype = case.get("weight")
        return x, residual, None if dtype is None else draw.dense(case.shape[-1], dtype=dtype)

    def formula(
        self, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, mode: str
    ) -> tuple[Tensor, Tensor]:
        h = x + residual
        y = h / (h.square().mean(-1, keepdim=True) + eps).sqrt()
        return (y if weight is None else y * (offset + weight)), h

    def exact(
        self, tensors: Tensors, settings: tuple[Any, ...], grads: Tensors, got: Results | None = None
    ) -> Exact:
        """y and the gradients are of the sum as it was rounded."""
        x, residual, weight = tensors
        if got is None:
            return super().exact(tensors, settings, grads)
        added = got.outputs[1]
        exact = super().exact((added, torch.zeros_like(added), weight), settings, grads)
        y, _, rstd = exact.results
        return exact._replace(results=(y, x.double() + residual.double(), rstd))

    def limits(self, exact: Exact) -> Mapping[str, Mapping[str, Any]]:
        h, weight = exact.inputs["x"], exact.inputs["weight"]
        (dy, dsum), offset = exact.grads, exact.settings["offset"]
        twice = exact.settings["casting_mode"] == "llama" and weight is not None
        w = h.new_ones(h.shape[-1]) if weight is None else offset + weight
        limits: dict[str, dict[str, Any]] = {"y": {"roundings": 2 if twice else 1, "scale": 1 + w.abs()}}
        if dy is not None:
            rstd = exact.results[2].view(*h.shape[:-1], 1)
            apart = w if weight is None else abs(offset) + weight.abs()
            mean = (h * dy * apart).abs().mean(-1, keepdim=True)  # some forms multiply the offset out
            terms = (dy * apart * rstd).abs() + h.abs() * mean * rstd**3
            terms = terms if dsum is None else terms + dsum.abs()
            limits["dx"] = limits["dresidual"] = {"magnitude": terms}
            limits["dweight"] = {"magnitude": torch.atleast_2d((dy * h * rstd).abs()).flatten(0, -2).sum(0)}
        return limits


def made(*shape: int) -> tuple[Tensor, Tensor]:
    """x and residual that a gradient flows through, no leaves."""
    x, residual = (torch.randn(shape, requires_grad=True) for _ in range(2))
    return x * 1, residual * 1


def test_a_result_that_is_not_used_costs_no_gradient() -> None:
    """The gradient of the sum alone is the arguments' own, unchanged."""
    op = liger_aot.load("fused_add_rmsnorm")
    dsum = torch.randn(3, 8)
    saved = (torch.randn(3, 8), None, torch.ones(3))
    dx, dresidual, dweight = op.run_backward((None, dsum), saved, (1e-6, 0.0, "llama"), (True, True, False))
    assert dx is dsum and dresidual is dsum and dweight is None


def test_gradients_that_share_memory_add_up() -> None:
    """x and residual of one origin, and gradients that are used again: autograd must not add in place."""
    op = liger_aot.load("fused_add_rmsnorm")
    origin = torch.randn(3, 8, dtype=torch.float32, requires_grad=True)
    other = torch.randn(3, 8, requires_grad=True)
    x, residual = origin * 2, origin * 3 + other
    y, added = op(x, residual)
    (y.square().sum() + (added * 5).sum() + residual.sum()).backward()
    h = (origin.detach() * 5 + other.detach()).requires_grad_()
    (op(h, torch.zeros_like(h))[0].square().sum() + (h * 5).sum()).backward()
    assert h.grad is not None and origin.grad is not None and other.grad is not None
    torch.testing.assert_close(other.grad, h.grad + 1)
    torch.testing.assert_close(origin.grad, h.grad * 5 + 3)


def test_in_place_of_a_view_is_refused() -> None:
    """Before anything is written; without gradients a view is written like any tensor."""
    op = liger_aot.load("fused_add_rmsnorm")
    x, residual = made(4, 8)
    for arguments, name in (
        ((x.view(8, 4), made(8, 4)[1]), "x"),
        ((made(8, 4)[0], x.view(8, 4)), "residual"),
    ):
        before = x.detach().clone()
        with pytest.raises(ArgumentError, match=f"{name} is a view"):
            op(*arguments, inplace=True)
        assert torch.equal(x, before)
    with torch.no_grad():
        y, added = op(x.view(8, 4), residual.view(8, 4), inplace=True)
    assert y.data_ptr() == x.data_ptr() and added.data_ptr() == residual.data_ptr()


def test_in_place_of_what_a_backward_reads() -> None:
    """A second addition to the same residual takes from the first what its backward needs: autograd says so."""
    op = liger_aot.load("fused_add_rmsnorm")
    x, residual = made(4, 8)
    y, added = op(x, residual, inplace=True)
    y2, _ = op(y * 2, added, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y2.sum().backward()


def test_in_place_beside_each_other() -> None:
    """Columns of one buffer do not overlap; columns they share do."""
    op = liger_aot.load("fused_add_rmsnorm")
    both = torch.randn(4, 16)
    x, residual = both[:, :8], both[:, 8:]
    y, added = op(x, residual)
    assert all(torch.equal(a, b) for a, b in zip(op(x, residual, inplace=True), (y, added), strict=True))
    before = both.clone()
    with pytest.raises(ArgumentError, match="x and residual, which overlap"):
        op(both[:, :8], both[:, 4:12], inplace=True)
    with pytest.raises(ArgumentError, match="residual, which overlaps weight"):
        op(torch.ones(4, 8), both[:, 8:], both[0, 8:], inplace=True)
    assert torch.equal(both, before)
