"""selective_log_softmax: one column or several of each row, repeated ones and ones outside, on every driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.softmax.selective_log_softmax import SelectiveLogSoftmax
from tests.harness.op_tests import (
    BF16,
    BINARIES,
    DTYPES,
    FP16,
    FP32,
    WAYS,
    Case,
    Draw,
    Exact,
    OpTests,
    Way,
    made,
)
from tests.ops.softmax.softmax_rows import special_rows

X, INDEX = torch.ones(3, 8), torch.tensor([0, 7, 3])


class TestSelectiveLogSoftmax(OpTests):
    """A case's option ``chosen`` is how many columns a row; without it index has a dimension less."""

    op_class = SelectiveLogSoftmax
    defaults: Mapping[str, Any] = {"temperature": 1.0}
    cases = (
        Case((3, 5, 48), BF16),
        Case((1, 1), BF16),
        Case((7, 1), FP32, chosen=3),
        Case((5, 37), FP16, index=torch.int32),
        Case((2, 3, 1000), FP32, chosen=1, temperature=0.7),
        Case((4, 17), BF16, shift=3, chosen=40),
        Case((5, 48), BF16, gap=16, temperature=2.5),
        Case((3, 1040), FP16, gap=5, chosen=2, index=torch.int32),
        Case((9, 1000), FP32, shift=3, gap=5),
        Case((6, 5), FP16, shift=5, gap=2),
        Case((5001,), BF16, shift=1),
        Case((8192,), BF16, chosen=3),
        Case((3, 40), FP32, size=1e4),
        Case((3, 17008), FP16, size=300.0, chosen=2),
        Case((3, 17001), BF16, size=5.0),
    )
    empty = (Case((0, 16), BF16), Case((4, 16), FP32, chosen=0))
    large = (
        *(Case((256, 128256), dtype) for dtype in DTYPES),
        *(Case(((1 << 25) // n, n), BF16) for n in (1000, 4096, 50257, 262144)),
        Case((256, 128256), BF16, chosen=64, index=torch.int32),
    )
    beyond = (Case(((1 << 31) // 131072 + 96, 131072), BF16),)
    longest_interpreted = 70_000
    bad: Mapping[str, Any] = {
        "a scalar": (
            (torch.tensor(1.0), INDEX),
            {},
            ArgumentError,
            "logits must have at least one dimension",
        ),
        "integers": ((X.int(), INDEX), {}, ArgumentTypeError, "logits must be bfloat16.*got int32"),
        "float index": ((X, X), {}, ArgumentTypeError, "index must be int64 or int32, got torch.float32"),
        "short index": ((X, INDEX.short()), {}, ArgumentTypeError, "index must be int64 or int32.*int16"),
        "another shape": (
            (X, INDEX[:2]),
            {},
            ArgumentError,
            r"index must be of shape \(3,\) or that and one more.*got \(2,\)",
        ),
        "too large": ((X, INDEX + 1), {}, ArgumentError, r"index must be in \[0, 8\).*got 8"),
        "negative": ((X, INDEX - 1), {}, ArgumentError, r"index must be in \[0, 8\).*got -1"),
        "no columns": ((X[:, :0], INDEX), {}, ArgumentError, r"index must be in \[0, 0\)"),
        "temperature": (
            (X, INDEX),
            {"temperature": 0.0},
            ArgumentError,
            "temperature must be above 0 and finite, got 0.0",
        ),
    }

    def tensors(self, case: Case, draw: Draw) -> Tensors:
        chosen, shape = case.get("chosen"), case.shape[:-1]
        index = draw.integers(max(case.shape[-1], 1), *shape, *(() if chosen is None else (chosen,)))
        return draw.rows(*case.shape).mul_(case.get("size", 2.0)), index.to(case.get("index", torch.int64))

    def draw(self, case: Case, seed: int, device: str) -> tuple[Tensors, tuple[Any, ...], tuple[Tensor, ...]]:
        """The result of a vector is one number, no row; gradients are dense."""
        draw = Draw(case, torch.Generator(device).manual_seed(seed))
        tensors = self.tensors(case, draw)
        index = tensors[1]
        dtype = torch.promote_types(case.dtype, FP32)
        dy = draw.dense(max(index.numel(), 1), dtype=dtype)[: index.numel()].view(index.shape)
        return tensors, self.settings(case), (dy,)

    def formula(self, logits: Tensor, index: Tensor, temperature: float) -> Tensor:
        y = (logits / temperature).log_softmax(-1)
        columns = index.long() if index.dim() == logits.dim() else index.long().unsqueeze(-1)
        return y.gather(-1, columns).view(index.shape)

    def limits(self, exact: Exact) -> Mapping[str, Mapping[str, Any]]:
        """The logarithm is of a sum whose greatest term is 1; a power's exponent is rounded, and the power is flushed
        to zero before it is multiplied. Gradients add up."""
        x, index, (dy,) = exact.inputs["logits"], exact.inputs["index"], exact.grads
        if not index.numel():
            return {}
        temperature = exact.settings["temperature"]
        shifted = (x - x.amax(-1, keepdim=True)) / temperature
        total = shifted.exp().sum(-1, keepdim=True).log()
        columns = index.long() if index.dim() == x.dim() else index.long().unsqueeze(-1)
        size = (shifted.abs() + total + 1).gather(-1, columns).view(index.shape)
        weights = dy.abs().reshape(columns.shape)
        factor = weights.sum(-1, keepdim=True) / temperature
        powers = (shifted - total).exp() * (2 + shifted.abs() + total) * factor
        return {
            "y": {"magnitude": size},
            "dlogits": {
                "magnitude": powers.scatter_add(-1, columns, weights / temperature),
                "scale": 1 + factor,
            },
        }

    @pytest.mark.parametrize("way", WAYS, indirect=True)
    @pytest.mark.parametrize("n,dtype", [(5, FP32), (700, BF16), (5001, FP32), (17504, BF16)])
    @pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered")
    def test_special_rows(self, way: Way, n: int, dtype: torch.dtype) -> None:
        """Masks, overflow, one dominating value, NaN: the result is log_softmax's, in float64."""
        x = special_rows(n, dtype, way.device)
        index = torch.arange(12, device=x.device).remainder(n)
        index[6] = 0
        leaf = x.clone().requires_grad_()
        y = way.op(leaf, index)  # type: ignore[operator]
        (dx,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
        exact = x.double().requires_grad_()
        wanted = exact.log_softmax(-1).gather(-1, index[:, None])[:, 0]
        (dwanted,) = torch.autograd.grad(wanted, exact, torch.ones_like(wanted))
        wanted = wanted.detach()
        assert torch.equal(y.isnan(), wanted.isnan()) and y.isnan().tolist() == [
            i in (2, 10, 11) for i in range(12)
        ]
        torch.testing.assert_close(y.double(), wanted.float().double(), rtol=2e-6, atol=2e-6, equal_nan=True)
        counts = ~wanted.isnan()
        torch.testing.assert_close(
            dx[counts].double(),
            dwanted[counts].to(dtype).double(),
            rtol=2.0**-7 if dtype == BF16 else 1e-5,
            atol=1e-6,
        )

    @pytest.mark.parametrize("way", WAYS, indirect=True)
    def test_repeated_columns(self, way: Way) -> None:
        """Their gradients add up, in float32, rounded once."""
        x = torch.randn(5, 300, device=way.device).to(BF16).requires_grad_()
        index = torch.full((5, 7), 250, device=way.device)
        y = way.op(x, index)  # type: ignore[operator]
        dy = torch.randn_like(y)
        (dx,) = torch.autograd.grad(y, x, dy)
        exact = x.detach().double().requires_grad_()
        (wanted,) = torch.autograd.grad(exact.log_softmax(-1).gather(-1, index), exact, dy.double())
        torch.testing.assert_close(dx.double(), wanted, rtol=2.0**-7, atol=1e-6)

    @pytest.mark.parametrize("way", WAYS, indirect=True)
    def test_rows_without_a_gradient(self, way: Way) -> None:
        """A row whose gradients are all zero has one of zero and is not read."""
        x = torch.randn(4, 48, device=way.device, requires_grad=True)
        y = way.op(x, torch.arange(4, device=way.device))  # type: ignore[operator]
        dy = torch.tensor([1.0, 0.0, 0.0, 2.0], device=way.device)
        (dx,) = torch.autograd.grad(y, x, dy)
        assert not dx[1:3].any() and dx[0].all() and dx[3].all()


@pytest.mark.parametrize("name", BINARIES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_columns_outside_of_the_row(name: str, dtype: torch.dtype, poisoned: None) -> None:
    """Their results are NaN, they give no gradient, and the next call raises; also where the low word of an index is
    one of the row."""
    way: Way = made(TestSelectiveLogSoftmax(), name)
    unknown = [-1, 48, -(1 << 31), (1 << 31) - 1]
    if dtype == torch.int64:
        unknown += [1 << 32, (1 << 32) + 3, -(1 << 63), (1 << 63) - 1]
    x = torch.randn(len(unknown), 48, device=way.device, requires_grad=True)
    index = torch.tensor([[3, u] for u in unknown], dtype=dtype, device=way.device)
    y = way.op(x, index)  # type: ignore[operator]
    assert y[:, 1].isnan().all()
    torch.testing.assert_close(y[:, 0], x.detach().log_softmax(-1)[:, 3], rtol=1e-5, atol=1e-5)
    dy = torch.ones_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    exact = x.detach().clone().requires_grad_()
    (wanted,) = torch.autograd.grad(exact.log_softmax(-1)[:, 3].sum(), exact)
    torch.testing.assert_close(dx, wanted, rtol=1e-5, atol=1e-6)
    if way.device == "cuda":
        torch.cuda.synchronize()
    with pytest.raises(ArgumentError, match="selective_log_softmax: an earlier call was given") as error:
        way.op(x, index)  # type: ignore[operator]
    assert any(f"given {u}," in str(error.value) for u in unknown)
    assert way.op(x, index[:, :1]).isfinite().all()  # type: ignore[operator]
