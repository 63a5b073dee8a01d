"""The post-training losses of linear layers as entries of ``all_ops``."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.harness.choices import Choices, Prepared
from tests.harness.op_cases import BF16, FP16, FP32
from tests.ops.losses import linear_loss_cases
from tests.ops.post_training import row_cases, sequence_cases
from tests.ops.post_training.sequence_cases import SequenceTests


class LossOp:
    """An op whose tests derive from ``SequenceTests`` or ``RowTests``: a random problem is one of their cases in
    another size, dtype and number of chunks."""

    interpreted = "sm90"

    def __init__(self, tests: SequenceTests | row_cases.RowTests) -> None:
        self._tests, self.op_class, self.name = tests, tests.op_class, tests.op_class.name
        self._ways = cache(lambda way: linear_loss_cases.made(self.op_class, way))

    def problem(self, choices: Choices, large: bool) -> tuple[Any, int]:
        wide, vocabulary = (300, 700) if large else (40, 130)
        dtype, bias = choices.one((FP32, BF16, FP16)), bool(choices.number(0, 1))
        of_sequences = isinstance(self._tests, SequenceTests)
        base = choices.one(self._random_cases())
        case = replace(
            base,
            # Of one column cuBLAS makes a matrix-vector product, which loses small terms of a bfloat16 sum.
            k=choices.number(2, wide),
            j=choices.number(1, wide) if base.j else 0,
            vocabulary=choices.number(12, 20_000 if large and of_sequences else vocabulary),
            dtype=dtype,
            bias=bias and "bias" in "".join(self.op_class.tensors),
            index=base.index and choices.one((torch.int64, torch.int32)),
        )
        if isinstance(case, sequence_cases.Case):
            return replace(
                case,
                sequences=2 * choices.number(1, 3),
                tokens=choices.number(4, 30 if large else 6),
                chunks=choices.one(("whole", "units", "rows")),
            ), choices.number(0, 9999)
        rows = choices.number(1, 60 if large else 9)
        return replace(case, rows=rows, chunks=choices.number(1, min(rows, 4))), choices.number(0, 9999)

    def _random_cases(self) -> list[Any]:
        """But for the hinge, whose derivative jumps where rounding may take a pair."""
        cases = (*self._tests.cases, *getattr(self._tests, "more", ()))
        return [case for case in cases if case.keywords.get("loss_type") != "hinge"]

    def small(self) -> list[tuple[Any, int]]:
        return [(case, 0) for case in self._tests.cases]

    def prepare(self, problem: tuple[Any, int], device: str) -> Prepared:
        case, seed = problem
        drawn: Any = self._tests.draw(case, seed, device)
        grad = torch.tensor(0.625, device=device)
        tensors = drawn.tensors if isinstance(drawn, sequence_cases.Drawn) else drawn

        def run(op: Any) -> tuple[Tensor | None, ...]:
            outputs, gradients = self._tests.run(op, case, drawn, grad)
            return *outputs.values(), *gradients.values()

        return Prepared((*(t for t in tensors.values() if t is None or isinstance(t, Tensor)), grad), run)

    def check(self, way: str, problem: tuple[Any, int]) -> None:
        case, seed = problem
        op, device = self._ways(way)
        self._tests.check(op, case, device, seed, rounded_logits=way != "reference")
