"""cross_entropy_tvd: both results of each row and their gradients, labels, ties, special rows, on every driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import liger_aot
from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.post_training.cross_entropy_tvd import CrossEntropyTVD
from tests.harness.op_tests import BF16, BINARIES, DTYPES, FP16, FP32, WAYS, Case, Draw, Exact, OpTests, Way
from tests.harness.tolerances import UNIT_ROUNDOFF

X, T = torch.ones(3, 8), torch.tensor([0, 7, -100])


class TestCrossEntropyTVD(OpTests):
    """A case's option ``near`` makes the teacher the student plus so much noise."""

    op_class = CrossEntropyTVD
    names = ("ce", "tvd")
    frozen = ("teacher_logits",)
    defaults: Mapping[str, Any] = {"ignore_index": -100}
    cases = (
        Case((3, 5, 48), BF16),
        Case((1, 1), BF16),
        Case((5, 37), FP16, index=torch.int32),
        Case((2, 3, 1000), FP32, near=0.01),
        Case((4, 17), BF16, shift=3, ignore_index=3),
        Case((5, 48), BF16, gap=16),
        Case((3, 1040), FP16, gap=5, index=torch.int32, near=0.5),
        Case((9, 1000), FP32, shift=3, gap=5),
        Case((6, 5), FP16, shift=5, gap=2),
        Case((5001,), BF16, shift=1),
        Case((8192,), BF16),
        Case((3, 40), FP32, size=1e3),
        Case((3, 5008), BF16, size=5.0),
        Case((3, 5008), FP32, size=1e-4, near=0.0),
    )
    empty = (Case((0, 16), BF16),)
    large = (
        *(Case((256, 128256), dtype) for dtype in DTYPES),
        *(Case(((1 << 24) // n, n), BF16) for n in (1000, 4096, 50257, 262144)),
    )
    beyond = (Case(((1 << 31) // 131072 + 96, 131072), BF16),)
    bad: Mapping[str, Any] = {
        "a scalar": ((X[0, 0], X, T), {}, ArgumentError, "student_logits must have at least one dimension"),
        "integers": ((X.int(), X, T), {}, ArgumentTypeError, "student_logits must be bfloat16.*got int32"),
        "teacher's shape": ((X, X[:2], T), {}, ArgumentError, r"teacher_logits must be of.*\(3, 8\).*\(2, 8\)"),
        "teacher's dtype": ((X, X.bfloat16(), T), {}, ArgumentError, "teacher_logits must be of.*bfloat16"),
        "target's shape": ((X, X, T[:2]), {}, ArgumentError, r"target must be of shape \(3,\)"),
        "target's dtype": ((X, X, X[:, 0]), {}, ArgumentTypeError, "target must be int64 or int32"),
        "target's range": ((X, X, T + 1), {}, ArgumentError, r"target must be in \[0, 8\).*got 8"),
        "ignore_index": ((X, X, T), {"ignore_index": 0.5}, ArgumentTypeError, "ignore_index must be an int"),
    }  # fmt: skip

    def tensors(self, case: Case, draw: Draw) -> Tensors:
        x = draw.rows(*case.shape).mul_(case.get("size", 2.0))
        y = draw.rows(*case.shape).mul_(case.get("size", 2.0))
        near = case.get("near")
        if near is not None:
            y.mul_(near).add_(x)
        t = draw.integers(max(case.shape[-1], 1), *case.shape[:-1])
        if t.dim():
            at = torch.arange(t.numel(), device=t.device).view(t.shape)
            t = torch.where(at % 3 == 2, case.get("ignore_index", -100), t)
        return x, y, t.to(case.get("index", torch.int64))

    def draw(self, case: Case, seed: int, device: str) -> tuple[Tensors, tuple[Any, ...], tuple[Tensor, ...]]:
        """The results of a vector are numbers, no rows; gradients are dense."""
        draw = Draw(case, torch.Generator(device).manual_seed(seed))
        tensors = self.tensors(case, draw)
        shape, dtype = tensors[2].shape, torch.promote_types(case.dtype, FP32)
        count = shape.numel()
        grads = tuple(draw.dense(max(count, 1), dtype=dtype)[:count].view(shape) for _ in self.names)
        return tensors, self.settings(case), grads

    def formula(
        self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor, ignore_index: int
    ) -> tuple[Tensor, Tensor]:
        n, counts = student_logits.shape[-1], target.long() != ignore_index
        flat = student_logits.reshape(target.numel(), n)
        t = torch.where(counts, target.long(), -100).reshape(-1)
        ce = F.cross_entropy(flat, t, reduction="none", ignore_index=-100).view(target.shape)
        p, q = student_logits.softmax(-1), teacher_logits.softmax(-1)
        return ce, torch.where(counts, (p - q).abs().sum(-1) / 2, 0.0)

    def limits(self, exact: Exact) -> Mapping[str, Mapping[str, Any]]:
        """The logarithm is of a sum whose greatest term is 1; a power's exponent is rounded. Where p and q differ by
        less than that the sign of their difference may be the other: such a row's sigma is off by twice p."""
        x, y, t = (exact.inputs[name] for name in self.op_class.tensors)
        dce, dtvd = (
            torch.zeros(t.shape, dtype=x.dtype, device=x.device) if g is None else g.abs()
            for g in exact.grads
        )
        (p, of_p), (q, of_q) = (_powers(z) for z in (x, y))
        shifted = x - x.amax(-1, keepdim=True)
        total = shifted.exp().sum(-1, keepdim=True).log()
        columns = torch.where(t.long() == exact.settings["ignore_index"], 0, t.long()).unsqueeze(-1)
        size = (shifted.abs() + total + 1).gather(-1, columns).squeeze(-1)
        unsure = ((p - q).abs() <= 64 * UNIT_ROUNDOFF[FP32] * (of_p + of_q)) / UNIT_ROUNDOFF[FP32]
        flips, all_flips = 2 * p * unsure, (2 * p * unsure).sum(-1, keepdim=True)
        by_ce, by_tvd = dce.unsqueeze(-1), dtvd.unsqueeze(-1)
        magnitude = of_p * (by_ce + 2 * by_tvd) + by_tvd * (
            flips + p * (all_flips + of_p.sum(-1, keepdim=True))
        )
        magnitude = magnitude.scatter_add(-1, columns, by_ce)
        return {
            "ce": {"magnitude": size},
            "tvd": {"magnitude": (of_p + of_q).sum(-1)},
            "dstudent_logits": {"magnitude": magnitude, "scale": 1 + by_ce + by_tvd},
        }

    def test_ignored_rows_are_not_read(self) -> None:
        x, y = torch.full((2, 8), torch.nan), torch.full((2, 8), torch.nan)
        x[1], y[1] = 1.0, 2.0
        x.requires_grad_()
        found = liger_aot.load("cross_entropy_tvd")(x, y, torch.tensor([-100, 3]))
        sum(f.sum() for f in found).backward()
        assert all(f[0] == 0 and f[1].isfinite() for f in found)
        assert x.grad is not None and not x.grad[0].any() and x.grad.isfinite().all()

    @pytest.mark.parametrize("way", WAYS, indirect=True)
    def test_special_rows(self, way: Way) -> None:
        """Masked logits have no probability; nothing but them, or NaN, gives NaN in that row alone."""
        inf = float("inf")
        x = torch.randn(5, 48, generator=torch.Generator().manual_seed(0))
        y = torch.randn(5, 48, generator=torch.Generator().manual_seed(1))
        x[0, 5:], y[1, :40], x[2], x[3, 7] = -inf, -inf, -inf, torch.nan
        t = torch.tensor([2, 3, 4, 5, 6])
        ce, tvd = way.op(x.to(way.device), y.to(way.device), t.to(way.device))  # type: ignore[operator]
        wanted = self.formula(x.double(), y.double(), t, -100)
        for got, want in zip((ce, tvd), wanted, strict=True):
            torch.testing.assert_close(got.double().cpu(), want, rtol=1e-5, atol=1e-6, equal_nan=True)
        assert ce[[2, 3]].isnan().all() and tvd[[0, 1, 4]].isfinite().all()

    @pytest.mark.parametrize("way", BINARIES, indirect=True)
    def test_a_target_that_is_no_class(self, way: Way) -> None:
        """NaN in its row alone, in the gradient too; the next call raises."""
        x = torch.randn(3, 48, device=way.device).requires_grad_()
        t = torch.tensor([1, 48, 2], device=way.device)
        ce, tvd = way.op(x, x.detach() * 2, t)  # type: ignore[operator]
        (dx,) = torch.autograd.grad((ce + tvd).sum(), x)
        for found in (ce, tvd):
            assert found[1].isnan() and found[[0, 2]].isfinite().all()
        assert dx[1].isnan().all() and dx[[0, 2]].isfinite().all()
        if way.device == "cuda":
            torch.cuda.synchronize()
        with pytest.raises(ArgumentError, match="an earlier call was given 48, which is out of range"):
            way.op(x, x.detach() * 2, t)  # type: ignore[operator]


def _powers(z: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities, and what their errors are some roundoffs of."""
    shifted = z - z.amax(-1, keepdim=True)
    total = shifted.exp().sum(-1, keepdim=True).log()
    p = (shifted - total).exp()
    return p, p * (2 + shifted.abs() + total)
