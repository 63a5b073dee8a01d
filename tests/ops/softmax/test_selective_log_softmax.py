"""selective_log_softmax: one column or several of each row, repeated ones and ones outside, on every driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    """A case's option ``chosen`` is how many columns a row; without it index has a dimension less. ``mask`` is the
    mask's dtype; about a third of the tokens do not count."""

    op_class = SelectiveLogSoftmax
    defaults: Mapping[str, Any] = {"temperature": 1.0, "drop_last": False, "inplace_grad": False}
    frozen = ("mask",)
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
        Case((2, 5, 64), BF16, drop_last=True, mask=torch.int32),
        Case((3, 4, 37), FP32, drop_last=True, chosen=2),
        Case((2, 1, 6, 5001), FP16, drop_last=True, mask=torch.bool, index=torch.int32),
        Case((7, 33), FP32, mask=torch.float32, chosen=3),
        Case((6, 48), BF16, mask=torch.int64, shift=3, gap=5),
        Case((2, 48), FP16, mask=torch.uint8, drop_last=True),
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
        "mask of another shape": (
            (X, INDEX, INDEX[:2]),
            {},
            ArgumentError,
            r"mask must be of shape \(3,\), got \(2,\)",
        ),
        "mask of another dtype": (
            (X, INDEX, INDEX.short()),
            {},
            ArgumentTypeError,
            "mask must be bool, uint8.*int16",
        ),
        "too many tokens": (
            (X, INDEX),
            {"drop_last": True},
            ArgumentError,
            r"index must be of shape \(2,\) or that and one more.*got \(3,\)",
        ),
        "one row and no token": (
            (X[0], INDEX[0]),
            {"drop_last": True},
            ArgumentError,
            r"drop_last logits must be \(\.\.\., L \+ 1, n\).*got \(8,\)",
        ),
        "overwriting a leaf": (
            (X.clone().requires_grad_(), INDEX),
            {"inplace_grad": True},
            ArgumentError,
            "logits is a leaf that requires a gradient",
        ),
        "temperature": (
            (X, INDEX),
            {"temperature": 0.0},
            ArgumentError,
            "temperature must be above 0 and finite, got 0.0",
        ),
    }

    def tensors(self, case: Case, draw: Draw) -> Tensors:
        chosen, shape = case.get("chosen"), case.shape[:-1]
        if case.get("drop_last"):
            shape = (*shape[:-1], shape[-1] - 1)
        index = draw.integers(max(case.shape[-1], 1), *shape, *(() if chosen is None else (chosen,)))
        of_mask = case.get("mask")
        mask = None if of_mask is None else draw.integers(3, *shape).to(of_mask)
        logits = draw.rows(*case.shape).mul_(case.get("size", 2.0))
        return logits, index.to(case.get("index", torch.int64)), mask

    def fit(self, case: Case, choose: Callable[[Sequence[Any]], Any]) -> Case:
        """Logits of sequences have a row more than tokens, and of floating-point masks there are float32's."""
        if case.get("mask") in DTYPES:
            case = case.but(mask=FP32)
        if not case.get("drop_last"):
            return case
        *batch, length = case.shape[:-1] or (1,)
        return case.but(shape=(*batch, length + 1, case.shape[-1]))

    def draw(self, case: Case, seed: int, device: str) -> tuple[Tensors, tuple[Any, ...], tuple[Tensor, ...]]:
        """The result of a vector is one number, no row; gradients are dense."""
        draw = Draw(case, torch.Generator(device).manual_seed(seed))
        tensors = self.tensors(case, draw)
        index = tensors[1]
        dtype = torch.promote_types(case.dtype, FP32)
        dy = draw.dense(max(index.numel(), 1), dtype=dtype)[: index.numel()].view(index.shape)
        return tensors, self.settings(case), (dy,)

    def formula(
        self,
        logits: Tensor,
        index: Tensor,
        mask: Tensor | None,
        temperature: float,
        drop_last: bool,
        inplace_grad: bool,
    ) -> Tensor:
        y = (logits / temperature).log_softmax(-1)
        y = y[..., : y.shape[-2] - 1, :] if drop_last else y
        columns = index.long() if index.dim() == logits.dim() else index.long().unsqueeze(-1)
        found = y.gather(-1, columns)
        found = found if mask is None else found * mask.bool().unsqueeze(-1)
        return found.view(index.shape)

    def limits(self, exact: Exact) -> Mapping[str, Mapping[str, Any]]:
        """The logarithm is of a sum whose greatest term is 1; a power's exponent is rounded, and the power is flushed
        to zero before it is multiplied. Gradients add up."""
        x, index, (dy,) = exact.inputs["logits"], exact.inputs["index"], exact.grads
        if not index.numel():
            return {}
        temperature, mask = exact.settings["temperature"], exact.inputs["mask"]
        x = x[..., :-1, :] if exact.settings["drop_last"] else x
        shifted = (x - x.amax(-1, keepdim=True)) / temperature
        total = shifted.exp().sum(-1, keepdim=True).log()
        columns = index.long() if index.dim() == x.dim() else index.long().unsqueeze(-1)
        size = (shifted.abs() + total + 1).gather(-1, columns).view(index.shape)
        weights = dy.abs().reshape(columns.shape)
        weights = weights if mask is None else weights * (mask != 0).unsqueeze(-1)
        factor = weights.sum(-1, keepdim=True) / temperature
        powers = (shifted - total).exp() * (2 + shifted.abs() + total) * factor
        magnitude, scale = powers.scatter_add(-1, columns, weights / temperature), 1 + factor
        if exact.settings["drop_last"]:
            magnitude = torch.nn.functional.pad(magnitude, (0, 0, 0, 1))
            scale = torch.nn.functional.pad(scale, (0, 0, 0, 1), value=1.0)
        return {"y": {"magnitude": size}, "dlogits": {"magnitude": magnitude, "scale": scale}}

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

    @pytest.mark.parametrize("way", WAYS, indirect=True)
    @pytest.mark.parametrize("dtype", [BF16, FP32])
    def test_tokens_left_out_are_not_read(self, way: Way, dtype: torch.dtype) -> None:
        """Nor is the row after the last token: NaN in their logits and columns of any number change nothing."""
        op, generator = way.op, torch.Generator(way.device).manual_seed(3)
        x = torch.randn(2, 5, 48, device=way.device, generator=generator).to(dtype)
        mask = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 0]], device=way.device)
        index = torch.randint(48, (2, 4), device=way.device, generator=generator)
        x[:, :4][mask == 0] = torch.nan
        x[:, 4] = torch.nan
        index[mask == 0] = -100
        dy = torch.randn(2, 4, device=way.device, generator=generator)
        leaf = x.clone().requires_grad_()
        y = op(leaf, index, mask, drop_last=True)  # type: ignore[operator]
        (dx,) = torch.autograd.grad(y, leaf, dy)
        kept = x[:, :4][mask == 1].requires_grad_()
        wanted = op(kept, index[mask == 1])  # type: ignore[operator]
        (dkept,) = torch.autograd.grad(wanted, kept, dy[mask == 1])
        assert not y[mask == 0].any()
        torch.testing.assert_close(y[mask == 1], wanted, rtol=1e-6, atol=0.0)
        torch.testing.assert_close(
            dx[:, :4][mask == 1], dkept, rtol=2.0**-7 if dtype == BF16 else 1e-5, atol=1e-7
        )
        assert not dx[:, :4][mask == 0].any() and not dx[:, 4].any()

    @pytest.mark.parametrize("way", WAYS, indirect=True)
    @pytest.mark.parametrize("case", [Case((2, 5, 48), BF16, drop_last=True), Case((7, 37), FP32)], ids=str)
    def test_gradient_over_the_logits(self, way: Way, case: Case) -> None:
        """The same bits, in the logits' memory; what saved the logits before learns of it."""
        op, (tensors, settings, (dy,)) = way.op, self.draw(case, 0, way.device)
        leaf = tensors[0].clone().requires_grad_()
        (wanted,) = torch.autograd.grad(self.call(op, (leaf, *tensors[1:]), settings), leaf, dy)
        made = leaf * 1
        squares = (made * made).sum()
        y = self.call(op, (made, *tensors[1:]), (*settings[:2], True))
        (dx,) = torch.autograd.grad(y, made, dy, retain_graph=True)
        assert torch.equal(dx, wanted) and dx.data_ptr() == made.data_ptr()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(y, made, dy)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            squares.backward()


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
