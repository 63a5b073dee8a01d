"""Cross entropy, (rows, vocabulary) logits and a target a row, the mean over rows.

"backward" is a training step: the loss with its gradient wanted, and the backward, since a provider that computes the
gradient in the forward has little left to do in the backward. The variant "inplace" lets ours write it over the
logits; Liger always does, torch never. Bytes count the logits once forward, and for a step their reading and the
writing of the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Call
from benchmarks.op_entry import Function, OpEntry, Random, both
from benchmarks.reference import Tensors
from benchmarks.workload import Case, Problem, checked_rows, largest_error

SHAPES = ((262144, 1000), (32768, 32000), (20480, 50257), (8192, 128256), (8192, 262144))
IN_PLACE = "inplace"
CHUNK_ELEMENTS = 2**24


class CrossEntropy(OpEntry):
    op = "cross_entropy"
    points = (*both(SHAPES), *(Case("backward", torch.bfloat16, shape, IN_PLACE) for shape in SHAPES))
    kernels = (
        ("cross_entropy_gradient", "backward", ""),
        ("cross_entropy_in_place", "backward", IN_PLACE),
    )
    by_rows = False
    constant = (1,)

    def inputs(self, case: Case, random: Random) -> Tensors:
        rows, n = case.shape
        return 2 * random.normal(rows, n), random.integers(n, rows)

    def keywords(self, variant: str) -> Mapping[str, Any]:
        return {"inplace_grad": True} if variant == IN_PLACE else {}

    def eager(self, variant: str) -> Function:
        return torch.nn.functional.cross_entropy

    def liger(self, variant: str) -> Function:
        from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

        def loss(logits: Tensor, target: Tensor) -> Tensor:
            found: Tensor = LigerCrossEntropyFunction.apply(logits, target, None)[0]
            return found

        return loss

    def moved_bytes(self, case: Case) -> int:
        rows, n = case.shape
        return rows * n * case.dtype.itemsize * (1 if case.direction == "forward" else 2)

    def problem(self, case: Case, device: torch.device, sets: int, seed: int) -> Problem:
        random = Random(case.dtype, device, torch.Generator(device).manual_seed(seed))
        # Each set's logits are larger than the one's before: losses differ, as gradients do.
        inputs = [((1 + i) * x, t) for i, (x, t) in enumerate(self.inputs(case, random) for _ in range(sets))]
        rows = checked_rows(case.shape[0], device, seed)
        step = case.direction == "backward"
        expected = _expected(*inputs[0], rows, gradient=step)

        def calls(provider: str, function: Function | None = None) -> list[Call]:
            function = function or self.function(provider, case.variant)
            overwrites = step and (provider == "liger" or (provider, case.variant) == ("liger_aot", IN_PLACE))
            return [_step(function, *one, overwrites) if step else _forward(function, *one) for one in inputs]

        def check(results: Tensors) -> float:
            loss, *gradients = results
            return largest_error((loss, *(g[rows] for g in gradients)), expected)

        return Problem(calls, check)

    def host_calls(self, provider: str, device: torch.device) -> Mapping[str, Any]:
        logits, target = self.small_inputs(device)
        function = self.function(provider)
        return {
            "host_forward": lambda: function(logits, target),
            "host_forward_backward": lambda: torch.autograd.grad(function(logits, target), (logits,)),
        }

    def small_inputs(self, device: torch.device) -> Tensors:
        case = Case("backward", torch.bfloat16, self.small)
        random = Random(case.dtype, device, torch.Generator(device).manual_seed(0))
        logits, target = self.inputs(case, random)
        return logits.requires_grad_(), target


class _Produced(torch.autograd.Function):
    """The same memory as a layer's result, which may be overwritten."""

    @staticmethod
    def forward(ctx: Any, memory: Tensor, leaf: Tensor) -> Tensor:
        return torch.empty(0, dtype=memory.dtype, device=memory.device).set_(
            memory.untyped_storage(), memory.storage_offset(), memory.shape, memory.stride()
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


def _produced(x: Tensor) -> tuple[Tensor, Tensor]:
    """(a result that has x's memory, the leaf that gets its gradient)"""
    leaf = x.new_empty(()).expand(x.shape).requires_grad_()
    made: Tensor = _Produced.apply(x, leaf)  # type: ignore[no-untyped-call]
    return made, leaf


def _forward(function: Function, x: Tensor, t: Tensor) -> Call:
    return Call(lambda: (function(x, t),))


def _step(function: Function, x: Tensor, t: Tensor, overwrites: bool) -> Call:
    own = x.clone() if overwrites else x

    def run() -> Tensors:
        logits, leaf = _produced(own)
        loss = function(logits, t)
        (gradient,) = torch.autograd.grad(loss, (leaf,))
        return loss.detach(), gradient

    return Call(run, (lambda: own.copy_(x)) if overwrites else None)


def _expected(x: Tensor, t: Tensor, rows: Tensor, *, gradient: bool) -> Tensors:
    """In fp64: the mean loss over all rows, and its gradient at some."""

    def loss(x: Tensor, t: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(x.double(), t, reduction="sum") / total

    total, step = len(x), max(1, CHUNK_ELEMENTS // x.shape[1])
    with torch.no_grad():
        mean = sum(loss(x[i : i + step], t[i : i + step]) for i in range(0, total, step))
    assert isinstance(mean, Tensor)
    if not gradient:
        return (mean,)
    with torch.enable_grad():
        leaf = x[rows].double().requires_grad_()
        return mean, torch.autograd.grad(loss(leaf, t[rows]), leaf)[0]


ENTRY = CrossEntropy()
