"""Llama 4's RoPE: pairs of columns times complex numbers, on every driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

import liger_aot
from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.rope.rope_llama4 import Llama4RoPE
from tests.harness.op_tests import BF16, FP16, FP32, Case, Draw, Exact, OpTests
from tests.ops.rope.rotary_cases import by_complex_numbers, magnitudes, q_and_k

X = torch.ones(2, 5, 3, 8)
FREQS = torch.ones(5, 4, dtype=torch.complex64)


class TestLlama4RoPE(OpTests):
    """A case's shape is q's; ``table`` is "complex" (the default) or "real"; ``batched``: one for each sequence."""

    op_class = Llama4RoPE
    names = ("q_out", "k_out")
    frozen = ("freqs_cis",)
    in_place: ClassVar[Mapping[str, str]] = {"q_out": "q", "k_out": "k"}
    cases = (
        Case((2, 5, 4, 128), BF16, table="real"),
        Case((1, 7, 3, 64), FP16),
        Case((3, 4, 5, 96), FP32, k=1, batched=True),
        Case((2, 3, 6, 88), BF16, batched=True, table="real"),
        Case((2, 3, 2, 2), FP32, table="real"),
        Case((1, 3, 2, 2), BF16),
        Case((1, 3, 2, 600), FP16),
        Case((2, 4, 3, 64), BF16, shift=1),
        Case((2, 4, 3, 64), FP32, gap=3),
        Case((2, 4, 3, 64), BF16, transposed=True),
        Case((4, 1, 3, 64), BF16, batched=True),
    )
    empty = (Case((0, 3, 2, 8), BF16), Case((2, 0, 2, 8), FP32))
    large = (
        Case((2, 8192, 40, 128), BF16, k=8),
        Case((8, 577, 16, 88), FP16, k=16),
        Case((2, 4096, 40, 128), FP32, k=8, table="real"),
    )
    beyond = (Case(((1 << 31) // (512 * 32 * 128) + 64, 512, 32, 128), BF16),)
    bad: ClassVar[Mapping[str, Any]] = {
        "the table's rows": (
            (X, X, FREQS[:4]),
            {},
            ArgumentError,
            r"freqs_cis must be \(5, 4\).*got \(4, 4\)",
        ),
        "the table's columns": ((X, X, FREQS[:, :3]), {}, ArgumentError, r"freqs_cis must be.*got \(5, 3\)"),
        "the table's batch": ((X, X, FREQS.expand(3, 5, 4)), {}, ArgumentError, r"got \(3, 5, 4\)"),
        "a real table without pairs": ((X, X, torch.ones(5, 4)), {}, ArgumentError, r"must be \(5, 4, 2\)"),
        "the table's dtype": (
            (X, X, FREQS.to(torch.complex128)),
            {},
            ArgumentTypeError,
            "complex64 or float32",
        ),
        "a gradient of the table": (
            (X, X, FREQS.clone().requires_grad_()),
            {},
            ArgumentError,
            "requires a grad",
        ),
        "k's sequence": ((X, X[:, :4], FREQS), {}, ArgumentError, "k must be as q"),
        "k's dtype": ((X, X.half(), FREQS), {}, ArgumentError, "k must be as q"),
        "odd heads": ((X[..., :7], X[..., :7], FREQS), {}, ArgumentError, "even, got 7"),
        "three dimensions": ((X[0], X[0], FREQS), {}, ArgumentError, r"q must be \(batch, sequence, heads"),
        "integers": ((X.int(), X.int(), FREQS), {}, ArgumentTypeError, "q must be bfloat16.*got int32"),
    }

    dimensions = (4, 4)

    def fit(self, case: Case, choose: Callable[[Sequence[Any]], Any]) -> Case:
        return case.but(shape=(*case.shape[:-1], 2 * -(-min(case.shape[-1], 600) // 2)))

    def tensors(self, case: Case, draw: Draw) -> Tensors:
        q, k = q_and_k(case, draw, "bshd")
        batch, sequence, _, n = case.shape
        rows = (batch, sequence) if case.get("batched") else (sequence,)
        angles = draw.uniform(-3.2, 3.2, *rows, n // 2)
        freqs = torch.polar(torch.ones_like(angles), angles)
        return q, k, torch.view_as_real(freqs) if case.get("table") == "real" else freqs

    def table_case(
        self, kernel: str, dtypes: Mapping[str, torch.dtype], n: int, aligned: bool, rows: int
    ) -> Case:
        return Case((1, rows, 3, max(2, n // 2 * 2)), dtypes["dtype"], shift=int(not aligned))

    def formula(self, q: Tensor, k: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:
        freqs = torch.view_as_real(freqs) if freqs.is_complex() else freqs
        cos, sin = (t.double().unsqueeze(-2) for t in freqs.unbind(-1))
        return by_complex_numbers(q, cos, sin, True), by_complex_numbers(k, cos, sin, True)

    def limits(self, exact: Exact) -> Mapping[str, Mapping[str, Any]]:
        freqs = exact.inputs["freqs_cis"]
        cos, sin = (torch.view_as_real(freqs) if freqs.is_complex() else freqs).abs().unbind(-1)

        def rotated(x: Tensor, sign: int) -> Tensor:
            return Llama4RoPE.reference(x, x, torch.stack((cos, sign * sin), -1))[0]

        return magnitudes(exact, rotated)


def test_conjugates_undo() -> None:
    """Of a table that torch has only marked as conjugate, too."""
    op = liger_aot.load("rope_llama4")
    tests = TestLlama4RoPE()
    (q, k, freqs), _, _ = tests.draw(Case((2, 5, 4, 16), FP32, transposed=True), 0, "cpu")
    assert freqs.conj().is_conj()
    for x, back in zip((q, k), op(*op(q, k, freqs), freqs.conj()), strict=True):
        torch.testing.assert_close(back, x)
        assert back.stride() == x.stride()


def test_without_k() -> None:
    op = liger_aot.load("rope_llama4")
    (q, k, freqs), _, _ = TestLlama4RoPE().draw(TestLlama4RoPE.cases[0], 0, "cpu")
    got, none = op(q, None, freqs)
    assert none is None and torch.equal(got, op(q, k, freqs)[0])
