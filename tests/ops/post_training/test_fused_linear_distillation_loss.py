"""fused_linear_distillation_loss: each soft loss beside the hard one, temperatures, labels, teachers with more classes,
chunks, what autograd gets and when, on every driver."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import liger_aot
from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.post_training.fused_linear_distillation_loss import FusedLinearDistillationLoss
from tests.ops.post_training.row_cases import BF16, FP16, FP32, WAYS, Case, RowTests, made


class TestDistillationLoss(RowTests):
    op_class = FusedLinearDistillationLoss
    student = ("student_input", "student_weight", "student_bias")
    teacher = ("teacher_input", "teacher_weight", "teacher_bias")
    labels = "target"
    buffers = 2
    cases = (
        Case(9, 16, 48, j=24),
        Case(9, 16, 37, BF16, j=24, chunks=3, bias=True, keywords={"temperature": 2.0}),
        Case(1, 8, 1, j=8),
        Case(5, 1, 40, FP16, j=3, index=torch.int32, chunks=2, keywords={"soft_loss": "cosine"}),
        Case(6, 16, 37, j=8, all_ignored=True),
        Case(7, 24, 130, BF16, j=16, chunks=2, keywords={"beta": 0.0, "weight_hard_loss": 0.0}),
        Case(7, 24, 40, BF16, j=16, more=9, keywords={"beta": 1.0, "ignore_index": 3}),
        Case(7, 24, 37, FP32, j=16, more=11, chunks=2, keywords={"temperature": 0.7, "beta": 0.1}),
        Case(9, 16, 37, j=24, chunks=2, bias=True, keywords={"soft_loss": "cosine", "weight_soft_loss": 2.0}),
        Case(9, 16, 130, BF16, j=24, more=8, keywords={"soft_loss": "cosine", "weight_hard_loss": 0.0}),
        Case(9, 16, 37, BF16, j=24, chunks=3, keywords={"weight_grad_dtype": FP32, "weight_soft_loss": 0.0}),
        Case(9, 16, 37, FP32, j=24, more=3, bias=True, chunks=2, teacher=BF16),
        Case(9, 16, 37, BF16, j=24, chunks=2, teacher=FP32, keywords={"soft_loss": "cosine"}),
    )

    # Each formula in each dtype: every binary.
    every = tuple(
        Case(3, 8, 40, dtype, j=8, keywords={"beta": beta}) for beta in (0.0, 1.0) for dtype in (FP16, FP32)
    )

    @pytest.mark.parametrize("way", WAYS)
    def test_every_binary(self, way: str) -> None:
        op, device = made(self.op_class, way)
        for case in self.every:
            self.check(op, case, device, 0, rounded_logits=way != "reference")

    def row_loss(
        self, case: Case, student: Tensor, teacher: Tensor, others: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        kw = case.keywords
        hard = -student.log_softmax(-1)[others["target"].long().clamp(0, case.vocabulary - 1)]
        whole = torch.nn.functional.pad(student, (0, case.more))
        if kw.get("soft_loss") == "cosine":
            soft = 1 - torch.nn.functional.cosine_similarity(whole, teacher, dim=-1)
        else:
            beta, temperature = kw.get("beta", 0.5), kw.get("temperature", 1.0)
            log_q, log_p = ((z / temperature).log_softmax(-1) for z in (whole, teacher))
            q, p = log_q.exp(), log_p.exp()
            mixed = (beta * p + (1 - beta) * q).log()
            terms = {0.0: p * (log_p - log_q), 1.0: q * (log_q - log_p)}
            soft = terms.get(beta, beta * p * (log_p - mixed) + (1 - beta) * q * (log_q - mixed)).sum(-1)
        weights = kw.get("weight_soft_loss", 0.5), kw.get("weight_hard_loss", 0.5)
        return {"soft_loss": soft, "hard_loss": hard, "loss": weights[0] * soft + weights[1] * hard}


def test_parts() -> None:
    """The soft loss is fused_linear_jsd's, the hard one fused_linear_cross_entropy's."""
    tests = TestDistillationLoss()
    case = Case(9, 16, 37, j=24, bias=True)
    drawn = tests.draw(case, 0, "cpu")
    found = liger_aot.load("fused_linear_distillation_loss")(**drawn, beta=0.3, temperature=2.0)
    student = [drawn[name] for name in tests.student]
    hard = liger_aot.load("fused_linear_cross_entropy")(*student[:2], drawn["target"], student[2])
    soft = liger_aot.load("fused_linear_jsd")(
        *student[:2], drawn["teacher_input"], drawn["teacher_weight"], drawn["target"], student[2],
        drawn["teacher_bias"], jsd_beta=0.3, temperature=2.0,
    )  # fmt: skip
    torch.testing.assert_close(found.hard_loss, hard)
    torch.testing.assert_close(found.soft_loss, soft)
    torch.testing.assert_close(found.loss, (hard + soft) / 2)


X, W, T = torch.ones(4, 8), torch.ones(6, 8), torch.zeros(4, dtype=torch.int64)
BAD: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "rows": ((X, W, X[:3], W, T), {}, ArgumentError, r"teacher_input must be of student_input's.*\(3, 8\)"),
    "width": ((X, W[:, :4], X, W, T), {}, ArgumentError, r"student_weight must be of shape \(vocabulary, 8\)"),
    "fewer classes": (
        (X, W, X, W[:5], T),
        {},
        ArgumentError,
        r"teacher_weight must have at least student_weight's 6 rows; got \(5, 8\)",
    ),
    "no tensor": ((X, W, X, [1], T), {}, ArgumentTypeError, "teacher_weight must be a torch.Tensor, got list"),
    "target's shape": ((X, W, X, W, T[:3]), {}, ArgumentError, r"target must be of shape \(4,\)"),
    "target's dtype": ((X, W, X, W, X[:, 0]), {}, ArgumentTypeError, "target must be int64 or int32"),
    "target's range": ((X, W, X, W, T + 6), {}, ArgumentError, r"target must be in \[0, 6\)"),
    "soft loss": ((X, W, X, W, T), {"soft_loss": "tvd"}, ArgumentError, "soft_loss must be one of jsd, cosine"),
    "beta": ((X, W, X, W, T), {"beta": 2.0}, ArgumentError, "beta must be from 0 to 1, got 2.0"),
    "temperature": ((X, W, X, W, T), {"temperature": 0.0}, ArgumentError, "temperature must be above 0"),
    "weight": ((X, W, X, W, T), {"weight_hard_loss": "1"}, ArgumentTypeError, "weight_hard_loss must be a number"),
    "budget": ((X, W, X, W, T), {"chunk_bytes": 100}, ArgumentError, "chunk_bytes must hold one row"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_bad_input(bad: str) -> None:
    arguments, keywords, error, text = BAD[bad]
    with pytest.raises(error, match=f"fused_linear_distillation_loss: .*{text}"):
        liger_aot.load("fused_linear_distillation_loss")(*arguments, **keywords)
