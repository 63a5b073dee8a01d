"""The base of the benchmarks of losses between two distributions, (rows, n) log-probabilities or probabilities each.

"backward" is a training step: the loss with its gradient wanted, and the backward. A provider that computes the
gradient in the forward has little left to do in the backward, so neither half is timed alone. Bytes count each tensor
once: forward both arguments, a step their reading and the writing of the student's gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Call
from benchmarks.op_entry import Function, OpEntry, Random, both
from benchmarks.reference import Invoke, PublicCall, Tensors, as_tuple, op_class
from benchmarks.workload import Case, Problem, Workload, checked_rows, largest_error

SHAPES = ((16384, 32000), (8192, 128256), (4096, 262144))
CHUNK_ELEMENTS = 2**24


class DivergenceEntry(OpEntry):
    """A subclass's functions give the loss divided by the rows."""

    points = tuple(both(SHAPES))
    by_rows = False
    constant = (1,)  # the teacher's

    def inputs(self, case: Case, random: Random, distance: float = 1.0) -> Tensors:
        """Two models' log-probabilities, which agree in part."""
        x, other = random.normal(*case.shape), random.normal(*case.shape)
        return (2 * x).log_softmax(-1), (2 * x + distance * other).log_softmax(-1)

    def moved_bytes(self, case: Case) -> int:
        rows, n = case.shape
        return rows * n * case.dtype.itemsize * (2 if case.direction == "forward" else 3)

    def problem(self, case: Case, device: torch.device, sets: int, seed: int) -> Problem:
        random = Random(case.dtype, device, torch.Generator(device).manual_seed(seed))
        # Each set's models lie closer to each other than the one's before: losses of all rows differ, too.
        inputs = [self.inputs(case, random, 1 / (1 + i)) for i in range(sets)]
        rows = checked_rows(case.shape[0], device, seed)
        step = case.direction == "backward"
        expected = self._expected(case.variant, inputs[0], rows, gradient=step)

        def calls(provider: str, function: Function | None = None) -> list[Call]:
            function = function or self.function(provider, case.variant)

            def call(x: Tensor, y: Tensor) -> Call:
                if not step:
                    return Call(lambda: as_tuple(function(x, y)))
                leaf = x.detach().requires_grad_()

                def run() -> Tensors:
                    loss = function(leaf, y)
                    return loss.detach(), *torch.autograd.grad(loss, leaf)

                return Call(run)

            return [call(*one) for one in inputs]

        def check(results: Tensors) -> float:
            loss, *gradients = results
            return largest_error((loss, *(g[rows] for g in gradients)), expected)

        return Problem(calls, check)

    def workloads(
        self,
        kernel: str,
        n: int,
        dtype: torch.dtype,
        elements: int,
        device: torch.device,
        seed: int,
        variant: str | None = None,
    ) -> list[Workload]:
        """The forward, a step, or the backward alone, which torch.compile asks for."""
        if kernel != f"{self.op}_backward":
            way = {f"{self.op}_both": f"{self.op}_backward"}.get(kernel, kernel)
            return super().workloads(way, n, dtype, elements, device, seed, variant)
        case = Case("backward", dtype, (elements // n, n), variant or self._usual.variant)
        x, y = self.inputs(case, Random(dtype, device, torch.Generator(device).manual_seed(seed)))
        tensors = (x, y, None)[: len(op_class(self.op).tensors)]
        rows, one = checked_rows(len(x), device, seed), torch.ones((), device=device)
        _, expected = self._expected(case.variant, (x, y), rows, gradient=True)
        settings = _settings(self.op, self._invoke(case.variant))
        alone = Workload(
            call=lambda op: Call(lambda: (op.gradient(one, tensors, settings, None),)),
            error=lambda results: largest_error((results[0][rows],), (expected,)),
            bytes=self.moved_bytes(case),
            point=case.point,
        )
        return [alone]

    def _expected(self, variant: str, arguments: Tensors, rows: Tensor, *, gradient: bool) -> Tensors:
        """In fp64: the loss over all rows, and its gradient at some."""
        call = PublicCall(self.op, self._invoke(variant))
        x, y = arguments
        total, step = x.new_zeros((), dtype=torch.float64), max(1, CHUNK_ELEMENTS // x.shape[1])
        for first in range(0, len(x), step):
            part = x[first : first + step].double(), y[first : first + step].double()
            total += call.results(part)[0] * (len(part[0]) / len(x))
        if not gradient:
            return (total,)
        wide = x[rows].double(), y[rows].double()
        (dx,) = call.gradients(wide, (torch.ones_like(total),), (0,))
        return total, dx * (len(rows) / len(x))


class _Asked(Exception):
    """Carries the settings of a public call."""


def _settings(op: str, invoke: Invoke) -> tuple[Any, ...]:
    """What the public call passes to the op's kernels beside tensors."""

    class Recorder(op_class(op)):  # type: ignore[misc]
        def differentiable(self, tensors: Any, settings: tuple[Any, ...] = (), out: Any = None) -> Any:
            raise _Asked(settings)

    try:
        invoke(Recorder())(*torch.zeros(2, 1, 1))
    except _Asked as asked:
        settings: tuple[Any, ...] = asked.args[0]
        return settings
    raise TypeError(f"a call of {op} did not reach its differentiable form")
