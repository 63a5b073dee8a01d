"""fused_linear_kl_div: given probabilities of every dtype and layout, zeros among them, labels, reductions, chunks,
what autograd gets and when, on every driver."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import liger_aot
from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.post_training.fused_linear_kl_div import FusedLinearKLDiv
from tests.ops.post_training.row_cases import BF16, FP16, FP32, WAYS, Case, RowTests, made


class TestKLDiv(RowTests):
    op_class = FusedLinearKLDiv
    student = ("input", "weight", "")
    labels = "shift_labels"
    cases = (
        Case(9, 16, 48),
        Case(9, 16, 37, BF16, chunks=3, keywords={"temperature": 2.0}),
        Case(9, 16, 48, BF16, index=None, parts=("float32",)),
        Case(1, 8, 1, index=None),
        Case(5, 1, 40, FP16, index=torch.int32, chunks=2),
        Case(5, 8, 37, FP16, index=None, parts=("float32",), keywords={"reduction": "sum"}),
        Case(6, 16, 37, all_ignored=True),
        Case(7, 24, 130, BF16, chunks=2, keywords={"reduction": "mean", "ignore_index": 3}),
        Case(7, 24, 37, chunks=2, keywords={"temperature": 0.7, "reduction": "sum"}),
        Case(9, 16, 37, BF16, chunks=3, keywords={"weight_grad_dtype": FP32}),
    )

    # Each pair of dtypes, aligned and not: every binary.
    every = tuple(
        Case(3, 8, n, dtype, index=None, parts=parts)
        for n in (48, 37)
        for dtype in (BF16, FP16)
        for parts in ((), ("float32",))
    )

    @pytest.mark.parametrize("way", WAYS)
    def test_every_binary(self, way: str) -> None:
        op, device = made(self.op_class, way)
        for case in self.every:
            self.check(op, case, device, 0, rounded_logits=way != "reference")

    def draw_others(self, case: Case, g: torch.Generator, device: str) -> dict[str, Any]:
        """Probabilities with zeros, which need not add up to 1."""
        q = torch.randn(case.rows, case.vocabulary, device=device, generator=g).softmax(-1) * 1.1
        q[:, 1::7] = 0
        return {"target": q.to(FP32 if "float32" in case.parts else case.dtype)}

    def divisor(self, case: Case, count: int) -> float:
        reduction = case.keywords.get("reduction", "batchmean")
        return 1 if reduction == "sum" else max(count, 1) * (case.vocabulary if reduction == "mean" else 1)

    def row_loss(
        self, case: Case, student: Tensor, teacher: Tensor, others: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        log_p, q = (student / case.keywords.get("temperature", 1.0)).log_softmax(-1), others["target"]
        return {"loss": (torch.special.xlogy(q, q) - q * log_p).sum()}


@pytest.mark.parametrize("way", WAYS)
def test_layouts_of_the_target(way: str) -> None:
    """Sliced, transposed, expanded."""
    op, device = made(FusedLinearKLDiv, way)
    tests = TestKLDiv()
    drawn = tests.draw(Case(6, 16, 48, index=None), 0, device)
    x, w, q = drawn["input"], drawn["weight"], drawn["target"]
    loss = op(x, w, q)
    for other in (torch.cat((q, q), 1)[:, :48], torch.cat((q[:, :1], q), 1)[:, 1:], q.t().contiguous().t()):
        assert torch.equal(other, q)
        torch.testing.assert_close(op(x, w, other), loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        op(x, w, q[:1].expand(6, 48)), op(x, w, q[:1].repeat(6, 1)), rtol=1e-5, atol=1e-6
    )


@pytest.mark.gpu
def test_a_target_past_two_to_the_31_elements() -> None:
    op, device = made(FusedLinearKLDiv, "gpu")
    rows, n = (1 << 31) // 65536 + 45, 65536
    x = torch.randn(rows, 16, device=device).bfloat16().requires_grad_()
    w = torch.randn(n, 16, device=device).bfloat16()
    q = torch.rand(1, n, device=device).softmax(-1).bfloat16().repeat(rows, 1)
    labels = torch.full((rows,), -100, device=device)
    labels[-40:] = 1
    loss = op(x, w, q, labels)
    (dx,) = torch.autograd.grad(loss, x)
    last = x.detach()[-40:].requires_grad_()
    wanted = op(last, w, q[-40:].clone())
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0)
    torch.testing.assert_close(dx[-40:], torch.autograd.grad(wanted, last)[0], rtol=1e-2, atol=1e-6)
    assert not dx[:-40].any()


def test_as_jsd_of_beta_0() -> None:
    x, w, y = torch.randn(5, 8), torch.randn(11, 8), torch.randn(5, 8)
    found = liger_aot.load("fused_linear_kl_div")(x, w, (y @ w.t()).softmax(-1))
    torch.testing.assert_close(found, liger_aot.load("fused_linear_jsd")(x, w, y, w, jsd_beta=0.0))


X, W, Q, L = torch.ones(4, 8), torch.ones(6, 8), torch.ones(4, 6) / 6, torch.zeros(4, dtype=torch.int64)
BAD: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "target's shape": ((X, W, Q[:, :5]), {}, ArgumentError, r"target must be of shape \(4, 6\).*\(4, 5\)"),
    "target's dtype": ((X, W, Q.half()), {}, ArgumentTypeError, "target must be of input's dtype.*float16"),
    "no target": ((X, W, [1]), {}, ArgumentTypeError, "target must be a torch.Tensor, got list"),
    "width": ((X, W[:, :4], Q), {}, ArgumentError, r"weight must be of shape \(vocabulary, 8\)"),
    "labels": ((X, W, Q, L[:3]), {}, ArgumentError, r"shift_labels must be of shape \(4,\)"),
    "reduction": ((X, W, Q), {"reduction": "none"}, ArgumentError, "reduction must be one of batchmean, mean, sum"),
    "temperature": ((X, W, Q), {"temperature": 0.0}, ArgumentError, "temperature must be above 0"),
    "eps": ((X, W, Q), {"eps": 0.0}, ArgumentError, "eps must be above 0"),
    "budget": ((X, W, Q), {"chunk_bytes": 100}, ArgumentError, "chunk_bytes must hold one row"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_bad_input(bad: str) -> None:
    arguments, keywords, error, text = BAD[bad]
    with pytest.raises(error, match=f"fused_linear_kl_div: .*{text}"):
        liger_aot.load("fused_linear_kl_div")(*arguments, **keywords)
