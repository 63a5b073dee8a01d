"""RMSNorm with a scale and a shift per group of tokens, on every driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_aot
from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.norms.modulated_rmsnorm import ModulatedRMSNorm, parts_of, rows_per_group
from tests.harness.op_tests import BF16, DTYPES, FP16, FP32, Case, Draw, Exact, OpTests

X = torch.ones(2, 3, 8)
S = torch.ones(2, 8)


class TestModulatedRMSNorm(OpTests):
    """Options of a case: ``scale``, the leading dimensions of the scale, or how many of x's it has; ``vectors``, the
    dtype of scale and shift if not x's; ``shifted``, whether there is a shift; ``weight``, its dtype."""

    op_class = ModulatedRMSNorm
    relaid = ("x",)
    defaults: Mapping[str, Any] = {
        "eps": 1e-6,
        "offset": 0.0,
        "casting_mode": "llama",
        "tokens_per_group": None,
    }
    cases = (
        Case((3, 5, 48), BF16, scale=1, weight=BF16),
        Case((3, 5, 48), BF16, scale=(3, 1), vectors=FP32, casting_mode="gemma"),
        Case((2, 3, 40), FP16, scale=(2, 3), weight=FP32, offset=1.0),
        Case((2, 3, 64), BF16, scale=(2, 3), shifted=False, vectors=FP32),
        Case((6, 17), FP32, scale=(2,), gap=3),
        Case((1, 1), BF16, scale=(1,), weight=BF16),
        Case((7, 1), FP32, scale=()),
        Case((40,), BF16, scale=(), weight=BF16),
        Case((4, 6, 100), FP16, scale=(1, 1), weight=FP16, casting_mode="none", eps=0.1),
        Case((2, 3, 4, 32), BF16, scale=(6,), shifted=False),
        Case((2, 3, 4, 32), FP32, scale=(2, 3, 1), weight=FP32, shifted=False, offset=0.5),
        Case((3, 4, 40), BF16, scale=(6,), tokens_per_group=2, weight=FP32),
        Case((9, 1000), BF16, scale=(3,), vectors=FP32, weight=FP32, gap=5),
        Case((9, 1000), FP16, scale=(9,), weight=FP16, gap=8),
        Case((3, 1001), BF16, scale=(3,)),
        Case((250, 32), BF16, scale=(2,), weight=BF16),
        Case((250, 32), FP16, scale=(2,), weight=FP16),
        Case((4, 2, 2104), BF16, scale=(4,), vectors=FP32, weight=FP32),
        Case((2, 2, 8208), FP16, scale=(2,), weight=FP32),
        Case((2, 9000), BF16, scale=(2,), weight=BF16),
    )
    empty = (
        Case((0, 5, 16), BF16, scale=(0,), weight=BF16),
        Case((2, 0, 16), FP32, scale=(2,), weight=FP32),
        Case((3, 2, 0), FP16, scale=(3, 1)),
    )
    large = tuple(
        Case((8, (1 << 22) // n, n), dtype, scale=scale, weight=weight)
        for n in (384, 1152, 1536, 3072, 4096, 5120, 8192, 11008)
        for dtype in DTYPES
        for scale, weight in (((8,), None), ((8, (1 << 22) // n), None), ((8, 1), dtype))
    )
    # Groups of two rows, and groups of one.
    beyond = tuple(Case(((1 << 31) // (3072 * 2) + 64, 2, 3072), BF16, scale=leading) for leading in (1, 2))
    bad: Mapping[str, Any] = {
        "x a scalar": ((torch.tensor(1.0), S), {}, ArgumentError, "x must have at least one dimension"),
        "integers": ((X.int(), S), {}, ArgumentTypeError, "x must be bfloat16, float16, float32"),
        "scale too long": (
            (X, torch.ones(2, 9)),
            {},
            ArgumentError,
            r"scale must have x's last.*got \(2, 9\)",
        ),
        "scale for each token of a sequence": (
            (X, torch.ones(3, 8)),
            {},
            ArgumentError,
            r"scale has shape \(3, 8\) for x \(2, 3, 8\)",
        ),
        "scale broadcast over the batch": ((X, torch.ones(1, 3, 8)), {}, ArgumentError, "scale has shape"),
        "groups that don't divide": ((X[0], S), {}, ArgumentError, "scale has shape"),
        "tokens_per_group": (
            (X, S),
            {"tokens_per_group": 2},
            ArgumentError,
            "scale .* a product of 6 tokens / 2",
        ),
        "scale of another dtype": ((X, S.to(FP16)), {}, ArgumentTypeError, "scale must be of x's dtype.*or"),
        "shift of another dtype": (
            (X.to(BF16), S, S.to(BF16)),
            {},
            ArgumentError,
            "shift must be of scale's dtype torch.float32",
        ),
        "shift of other groups": (
            (X, S, torch.ones(8)),
            {},
            ArgumentError,
            r"shift .* as many rows as \(2, 8\)",
        ),
        "weight too long": ((X, S, S, torch.ones(9)), {}, ArgumentError, r"weight .*\(8,\).*shape \(9,\)"),
        "unknown mode": ((X, S), {"casting_mode": "mistral"}, ArgumentError, "llama, gemma, none; got 'mis"),
    }

    def fit(self, case: Case, choose: Callable[[Sequence[Any]], Any]) -> Case:
        """Leading dimensions of the scale that x has, one for several of x's, or any number of tokens a group."""
        leading = case.shape[:-1]
        rows, first = prod(leading), leading[: choose(range(len(leading) + 1))]
        forms: list[tuple[tuple[int, ...], int | None]] = [(first, None), ((prod(first),), None)]
        forms += [((*first, *(1 for _ in leading[len(first) :])), None)]
        forms += [((rows // tokens,), tokens) for tokens in (1, 2, 3) if rows % tokens == 0]
        scale, tokens = choose(forms)
        return case.but(scale=scale, tokens_per_group=tokens)

    def tensors(self, case: Case, draw: Draw) -> Tensors:
        x = draw.rows(*case.shape).mul_(10 ** draw.uniform(-2, 2, *case.shape[:-1], 1))
        n, leading, dtype = case.shape[-1], case.get("scale"), case.get("vectors") or case.dtype
        leading = case.shape[:leading] if isinstance(leading, int) else leading
        scale = draw.rows(*leading, n, dtype=dtype)
        shift = draw.rows(*leading, n, dtype=dtype) if case.get("shifted", True) else None
        weight = case.get("weight")
        return x, scale, shift, None if weight is None else draw.dense(n, dtype=weight)

    def table_case(
        self, kernel: str, dtypes: Mapping[str, torch.dtype], n: int, aligned: bool, rows: int
    ) -> Case | None:
        dtype = dtypes["dtype"]
        groups = (2, rows) if kernel.endswith("tokens") else (2,) if n < 3000 else (1,)
        return Case((2, rows, n), dtype, shift=int(not aligned), scale=groups, weight=dtype, offset=0.5)

    def tail(self, case: Case, tensor: Any) -> Any:
        """So many groups that none of them is shared out: its sums are then in the order of the whole call."""
        return tensor[-4096:] if tensor.shape[:1] == case.shape[:1] else None

    def formula(
        self,
        x: Tensor,
        scale: Tensor,
        shift: Tensor | None,
        weight: Tensor | None,
        eps: float,
        offset: float,
        mode: str,
        tokens_per_group: int | None,
    ) -> Tensor:
        y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
        y = y if weight is None else y * (offset + weight)
        return y * (1 + spread(scale, x)) + (0 if shift is None else spread(shift, x))

    def limits(self, exact: Exact) -> Mapping[str, Mapping[str, Any]]:
        x, scale, shift, weight = exact.inputs.values()
        (dy,), offset = exact.grads, exact.settings["offset"]
        w = 1.0 if weight is None else (offset + weight).abs()
        rstd = exact.results[1].view(*x.shape[:-1], 1)
        normal, m = (x * rstd).abs(), (1 + spread(scale, x)).abs()
        terms = normal * w * m
        added = terms if shift is None else terms + spread(shift, x).abs()
        limits: dict[str, dict[str, Any]] = {"y": {"magnitude": added}}
        if exact.settings["casting_mode"] == "llama":  # x * rstd is rounded, too, and y may cancel
            twice = 1 + terms / exact.results[0].abs().clamp(min=torch.finfo(torch.float64).tiny)
            limits["y"].update(roundings=twice, scale=1 + w * m)
        g, n = dy.abs() * m * w, x.shape[-1]
        limits["dx"] = {"magnitude": (g + normal * (g * normal).mean(-1, keepdim=True)) * rstd}
        groups = scale.shape[:-1].numel()
        if x.numel():
            of_scale, of_shift = ((t.abs().reshape(groups, -1, n).sum(1)) for t in (dy * normal * w, dy))
            limits["dscale"] = {"magnitude": of_scale.view(scale.shape)}
            limits["dshift"] = {"magnitude": of_shift.view(scale.shape)}
            limits["dweight"] = {"magnitude": (dy.abs() * m * normal).reshape(-1, n).sum(0)}
        return limits


def spread(vectors: Tensor, x: Tensor) -> Tensor:
    """A scale or shift for each of x's elements."""
    groups = vectors.shape[:-1].numel()
    if not x.numel():
        return torch.empty_like(x)
    rows = vectors.reshape(groups, -1).repeat_interleave(x.shape[:-1].numel() // groups, 0)
    return rows.view(x.shape)


@pytest.mark.parametrize(
    ("x", "scale", "tokens_per_group", "rows"),
    [
        ((2, 6, 8), (8,), None, 12),
        ((2, 6, 8), (1, 1, 8), None, 12),
        ((2, 6, 8), (2, 8), None, 6),
        ((2, 6, 8), (2, 1, 8), None, 6),
        ((2, 6, 8), (2, 6, 8), None, 1),
        ((2, 6, 8), (12, 8), None, 1),
        ((2, 6, 8), (1, 8), None, 12),
        ((2, 6, 8), (6, 8), None, None),  # a row for each place in the sequence: no runs
        ((2, 6, 8), (1, 6, 8), None, None),
        ((2, 6, 8), (6, 8), 2, 2),
        ((2, 6, 8), (6, 8), 3, None),
        ((2, 6, 8), (2, 6, 1, 8), None, 1),
        ((2, 6, 8), (2, 3, 8), None, None),
        ((12, 8), (3, 8), None, 4),
        ((12, 8), (5, 8), None, None),
        ((2, 3, 4, 8), (2, 3, 8), None, 4),
        ((2, 3, 4, 8), (2, 3, 1, 8), None, 4),
        ((2, 3, 4, 8), (6, 8), None, 4),
        ((2, 3, 4, 8), (2, 1, 1, 8), None, 12),
        ((2, 3, 4, 8), (2, 1, 4, 8), None, None),
        ((8,), (8,), None, 1),
        ((1, 6, 8), (1, 6, 8), None, 1),
        ((0, 6, 8), (0, 8), None, 0),
    ],
)
def test_groups_by_shape(
    x: tuple[int, ...], scale: tuple[int, ...], tokens_per_group: int | None, rows: int | None
) -> None:
    assert rows_per_group(x, scale, tokens_per_group) == rows


def test_parts_cover_every_row_once() -> None:
    for groups, rows, resident in product((1, 2, 5, 132, 133, 1000), (2, 3, 7, 64, 257, 4096), (2, 132, 264)):
        in_part, parts = parts_of(groups, rows, resident)
        assert parts * in_part >= rows > (parts - 1) * in_part, (groups, rows, resident)
        if groups * rows >= 8 * resident:
            assert groups * parts >= resident // 2, f"{(groups, rows, resident)}: programs for half the GPU"


def test_the_shape_of_a_scale_does_not_matter() -> None:
    """(batch, n), (batch, 1, n), a chunk of a projection, one expanded to the tokens: the same bits."""
    op = liger_aot.load("modulated_rmsnorm")
    x, both = torch.randn(3, 5, 16, dtype=BF16), torch.randn(3, 32, dtype=BF16)
    scale, shift = both.chunk(2, -1)
    expected = op(x, scale, shift)
    assert torch.equal(op(x, scale[:, None], shift.contiguous()), expected)
    assert torch.equal(op(x, scale[:, None].expand(x.shape), shift[:, None].expand(x.shape)), expected)
    one = op(x, scale[0], shift[0])
    assert torch.equal(one[0], expected[0]) and not torch.equal(one[1], expected[1])


def test_gradients_have_the_shapes_of_their_arguments() -> None:
    op = liger_aot.load("modulated_rmsnorm")
    x = torch.randn(3, 5, 16, dtype=BF16)
    scale, shift = torch.randn(3, 1, 16, requires_grad=True), torch.randn(3, 16, requires_grad=True)
    op(x, scale, shift).float().sum().backward()
    assert scale.grad is not None and scale.grad.shape == (3, 1, 16) and scale.grad.dtype == FP32
    assert shift.grad is not None and torch.equal(shift.grad, torch.full((3, 16), 5.0))
