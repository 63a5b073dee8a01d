"""What the tests of losses of a linear layer's rows share: the checks of every driver against float64, and how far
rounding may take a result.

The loss of a row is a function of its logits, the student's and perhaps the teacher's. Each logit is off by a rounding
and by its sum's errors, so the loss is off by its derivatives times that, and the gradient of the logits by the second
derivatives: bounds of first order, found by autograd from the loss's formula in float64, with a factor of 2 for the
rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from benchmarks import workload
from liger_aot.ops.losses._linear import padded
from tests.harness.tolerances import UNIT_ROUNDOFF
from tests.ops.losses.linear_loss_cases import BF16, FP16, FP32, WAYS, made
from tests.ops.post_training.linear_loss_tests import LinearLossTests

__all__ = ["BF16", "FP16", "FP32", "WAYS", "Case", "RowTests", "made"]
U32 = UNIT_ROUNDOFF[FP32]


@dataclass(frozen=True)
class Case:
    """``chunks`` of the rows at a time. The teacher's layer is j wide, 0 where there is none, and has ``more`` classes
    than the student's; ``teacher`` is its dtype, where that is another."""

    rows: int
    k: int
    vocabulary: int
    dtype: torch.dtype = FP32
    j: int = 0
    more: int = 0
    index: torch.dtype | None = torch.int64
    bias: bool = False
    chunks: int = 1
    all_ignored: bool = False
    teacher: torch.dtype | None = None
    parts: tuple[str, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        shape = f"{self.rows}x{self.k}/{self.j}x{self.vocabulary}+{self.more}"
        parts = [shape, str(self.dtype).removeprefix("torch."), f"{self.chunks}chunks", *self.parts]
        parts += [name for name in ("bias", "all_ignored", "teacher") if getattr(self, name)]
        return "-".join(parts + [f"{name}={value}" for name, value in self.keywords.items()])


class RowTests(LinearLossTests):
    """Base of an op's tests.

    A subclass gives ``op_class``, ``cases``, ``buffers`` (of logits that a chunk has), ``student`` (the names of its
    input, weight and bias) and ``teacher``; ``draw_others``; and ``row_loss``, a row's outputs by name, the loss among
    them, from its logits in float64 and the other tensors' part of the row.
    """

    some_chunks = 2
    for_graph: ClassVar[Mapping[str, Any]] = {"rows": 64, "k": 32, "vocabulary": 1000, "chunks": 2}
    buffers: ClassVar[int] = 1
    teacher: ClassVar[tuple[str, str, str]] = ("", "", "")
    labels: ClassVar[str]

    def draw_others(self, case: Case, g: torch.Generator, device: str) -> dict[str, Any]:
        return {}

    def row_loss(
        self, case: Case, student: Tensor, teacher: Tensor, others: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        raise NotImplementedError

    def divisor(self, case: Case, count: int) -> float:
        return max(count, 1)

    # ---- running it -------------------------------------------------------------------------------------------

    def draw(self, case: Case, seed: int, device: str) -> dict[str, Any]:
        g = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, generator=g)

        drawn: dict[str, Any] = {}
        for (x, w, b), width, classes, dtype in (
            (self.student, case.k, case.vocabulary, case.dtype),
            (self.teacher, case.j, case.vocabulary + case.more, case.teacher or case.dtype),
        ):
            if width:
                drawn[x] = normal(case.rows, width).to(dtype)
                drawn[w] = (normal(classes, width) * width**-0.5).to(dtype)
                if b:
                    drawn[b] = normal(classes).to(dtype) if case.bias else None
        if case.index is not None:
            labels = torch.randint(case.vocabulary, (case.rows,), device=device, generator=g)
            at = torch.arange(case.rows, device=device)
            ignored = case.keywords.get("ignore_index", -100)
            labels[(at % 3 == 1) | torch.tensor(case.all_ignored, device=device)] = ignored
            drawn[self.labels] = labels.to(case.index)
        return {**drawn, **self.draw_others(case, g, device)}

    def chunk_bytes(self, case: Case) -> int:
        each = self.buffers * case.dtype.itemsize + (0 if case.teacher is None else case.teacher.itemsize)
        return -(-case.rows // case.chunks) * padded(case.vocabulary + case.more) * each

    def exact(
        self, case: Case, drawn: dict[str, Any], grad: float, rounded_logits: bool
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(outputs and gradients in float64, how far they may be off), by name."""
        wide = {
            n: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for n, t in drawn.items()
        }
        x, w, b = (wide.get(name) for name in self.student)
        assert x is not None and w is not None
        logits, off = self._layer(case, x, w, b, rounded_logits)
        teacher, teacher_off = logits.new_zeros(case.rows, 0), logits.new_zeros(case.rows, 0)
        if case.j:
            y, v, c = (wide.get(name) for name in self.teacher)
            assert y is not None and v is not None
            teacher, teacher_off = self._layer(case, y, v, c, rounded_logits)
            if case.teacher is not None and rounded_logits:  # before they are cast
                teacher_off = teacher_off + UNIT_ROUNDOFF[case.teacher] * teacher.abs()
        counts = torch.ones(case.rows, dtype=torch.bool, device=x.device)
        if case.index is not None:
            counts = wide[self.labels].long() != case.keywords.get("ignore_index", -100)
        divisor = self.divisor(case, int(counts.sum()))
        size, u, n = grad / divisor, UNIT_ROUNDOFF[case.dtype], case.vocabulary
        exact: dict[str, Tensor] = {}
        allowed: dict[str, Tensor] = {}
        g, dg = torch.zeros_like(logits), torch.zeros_like(logits)
        for row in range(case.rows):
            others = {
                name: t[row]
                for name, t in wide.items()
                if isinstance(t, Tensor) and t.shape[:1] == x.shape[:1]
            }
            both, error = torch.cat((logits[row], teacher[row])), torch.cat((off[row], teacher_off[row]))

            def outputs(z: Tensor, others: dict[str, Tensor] = others) -> dict[str, Tensor]:
                return self.row_loss(case, z[:n], z[n:], others)

            first = torch.func.jacrev(outputs)(both)
            for name, value in outputs(both).items():
                by = first[name].abs()
                bound = by @ error + 64 * U32 * (value.abs() + by @ both.abs() + 1)
                here = float(counts[row]) / divisor
                exact[name] = exact.get(name, 0.0) + value * here
                allowed[name] = allowed.get(name, 2.0**-40) + 2 * bound * here
            if not counts[row]:
                continue
            second = torch.func.jacfwd(torch.func.jacrev(lambda z: outputs(z)["loss"]))(both)[:n].abs()
            g[row] = first["loss"][:n]
            # A gradient is a difference of parts about as large as the probability. What rounds the row's sum of powers
            # moves that without moving any logit, so the second derivative, zero where there is one class, lacks it.
            of_sum = logits[row].softmax(-1)
            dg[row] = second @ error + 64 * U32 * (g[row].abs() + second @ both.abs() + of_sum)
        dg, g = size * dg, size * g
        tiny = 2.0**-24 if case.dtype == FP16 else 2.0**-126
        dg = dg + u * g.abs() + tiny
        names = dict(zip(("input", "weight", "bias"), self.student, strict=True))
        found = {"input": g @ w, "weight": g.t() @ x, "bias": g.sum(0)}
        x, w, g = x.abs(), w.abs(), g.abs()
        limits = {
            "input": dg @ w + (u + n * U32) * (g @ w),
            "weight": dg.t() @ x + (case.chunks * u + case.rows * U32) * (g.t() @ x),
            "bias": dg.sum(0) + (u + case.rows * U32) * g.sum(0),
        }
        for name, of in names.items():
            exact[of], allowed[of] = found[name], 2 * limits[name] + tiny
        return exact, allowed

    def _layer(
        self, case: Case, x: Tensor, w: Tensor, b: Tensor | None, rounded: bool
    ) -> tuple[Tensor, Tensor]:
        """(logits, how far each may be off)."""
        logits = torch.nn.functional.linear(x, w, b)
        size = x.abs() @ w.abs().t() + (0.0 if b is None else b.abs())
        store = UNIT_ROUNDOFF[case.dtype] if rounded else 0.0
        return logits, store * logits.abs() + (x.shape[1] + 2) * U32 * size

    # ---- tests ------------------------------------------------------------------------------------------------

    def test_more_dimensions(self) -> None:
        op, _ = made(self.op_class, "reference")
        case = replace(self.cases[0], rows=12)
        drawn = self.draw(case, 0, "cpu")
        shaped = {
            name: t.view(3, 4, *t.shape[1:]) if isinstance(t, Tensor) and t.shape[0] == 12 else t
            for name, t in drawn.items()
        }
        plain, found = op(**drawn, **case.keywords), op(**shaped, **case.keywords)
        torch.testing.assert_close(found, plain)

    @pytest.mark.gpu
    @pytest.mark.parametrize("vocabulary", [50257, 128256, 262144])
    def test_large(self, vocabulary: int) -> None:
        """Against the op's reference in float32 on the GPU's values."""
        op, device = made(self.op_class, "gpu")
        case = replace(self.cases[0], rows=300, k=256, vocabulary=vocabulary, dtype=BF16, chunks=3)
        case = replace(case, j=256 if case.j else 0)
        drawn = self.draw(case, 0, device)
        one = torch.ones((), device=device)
        outputs, gradients = self.run(op, case, drawn, one)
        cpu = {
            name: (t.float() if t.is_floating_point() else t).cpu() if isinstance(t, Tensor) else t
            for name, t in drawn.items()
        }
        wanted, of = self.run(op, replace(case, dtype=FP32, chunks=1), cpu, one.cpu())
        for name, t in outputs.items():
            torch.testing.assert_close(t.cpu(), wanted[name], rtol=5e-3, atol=1e-4)
        for name, t in gradients.items():
            assert workload.relative_error(t.cpu(), of[name].double()) < workload.TOLERANCE[BF16], name
