"""Embedding on every driver: the gradient of repeated, missing and unknown indices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_aot
from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.ops.embedding.embedding import ONE_BLOCK, Embedding, _sorted
from tests.harness.op_tests import (
    BF16,
    BINARIES,
    BY_FORM,
    DTYPES,
    EMULATED,
    FP16,
    FP32,
    Case,
    Draw,
    Exact,
    OpTests,
    Way,
    made,
)

TABLE, INDICES = torch.ones(4, 8), torch.tensor([[0, 3]])
# Of sorted indices: where the segments that cross chunks begin and end decides.
PATTERNS = {
    "one token": lambda t: torch.full_like(t, 5),
    "long segments": lambda t: t // 70,
    "segments of a chunk": lambda t: t // 32,
    "segments across chunks": lambda t: (t + 16) // 32,
    "mixed": lambda t: torch.where(t % 3 > 0, 7, t),
}


class TestEmbedding(OpTests):
    """A case's shape is the result's."""

    op_class = Embedding
    defaults: Mapping[str, Any] = {"padding": -1, "vocabulary": 50}
    cases = (
        Case((3, 5, 48), BF16),
        Case((1, 1), BF16),
        Case((48,), BF16),
        Case((7, 1), FP32),
        Case((5, 37), FP16, index=torch.int32),
        Case((2, 3, 1000), FP32, vocabulary=3),
        Case((4, 17), BF16, shift=3),
        Case((5, 48), BF16, gap=16),
        Case((3, 1040), FP16, gap=5, padding=2, vocabulary=4),
        Case((90, 40), BF16, vocabulary=2, padding=0),
        *(Case((150, 48), BF16, vocabulary=151, pattern=name) for name in PATTERNS),
        *(Case((150, n), FP16, vocabulary=151, pattern="mixed") for n in (33, 48)),
        Case((600, 16), FP32, vocabulary=6, pattern="one token"),
        Case((150, 33), FP32, vocabulary=151, pattern="mixed", index=torch.int32, padding=7),
    )
    empty = (Case((0, 16), BF16), Case((4, 0), FP32), Case((0, 16), BF16, vocabulary=0))
    large = (
        *(
            Case(((1 << 24) // n, n), dtype, vocabulary=vocabulary)
            for n in (128, 5120, 20_001)
            for dtype in DTYPES
            for vocabulary in (1, 300, 32_000)
        ),
        Case((32_768, 4096), BF16, vocabulary=128_256),
    )
    beyond = (Case(((1 << 31) // 8192 + 64, 8192), BF16),)
    bad: Mapping[str, Any] = {
        "float indices": (
            (TABLE, TABLE),
            {},
            ArgumentTypeError,
            "indices must be int32 or int64, got torch.float32",
        ),
        "short indices": (
            (INDICES.short(), TABLE),
            {},
            ArgumentTypeError,
            "indices must be int32.*got torch.int16",
        ),
        "a vector": (
            (INDICES, torch.ones(4)),
            {},
            ArgumentError,
            r"weight must be of shape \(rows, n\).*got \(4,\)",
        ),
        "integer weight": (
            (INDICES, TABLE.int()),
            {},
            ArgumentTypeError,
            "weight must be bfloat16.*got int32",
        ),
        "too large": (
            (INDICES + 1, TABLE),
            {},
            ArgumentError,
            r"indices must be in \[0, 4\), the rows of weight; got 4",
        ),
        "negative": (
            (INDICES - 1, TABLE),
            {},
            ArgumentError,
            r"indices must be in \[0, 4\), the rows of weight; got -1",
        ),
        "no rows": ((INDICES, TABLE[:0]), {}, ArgumentError, r"indices must be in \[0, 0\)"),
        "padding": (
            (INDICES, TABLE),
            {"padding_idx": 4},
            ArgumentError,
            "padding_idx must be an index of weight's 4",
        ),
        "negative padding": ((INDICES, TABLE), {"padding_idx": -5}, ArgumentError, "padding_idx.*got -5"),
    }

    def fit(self, case: Case, choose: Callable[[Sequence[Any]], Any]) -> Case:
        if case.get("pattern"):
            rows = choose((40, 1, 150))
            case = case.but(shape=(rows, case.shape[-1]), vocabulary=rows + 8)
        return case.but(padding=min(case.get("padding", -1), case.get("vocabulary", 50) - 1))

    def tensors(self, case: Case, draw: Draw) -> Tensors:
        vocabulary, shape = case.get("vocabulary", 50), case.shape[:-1]
        indices = draw.integers(max(vocabulary, 1), *shape)
        if pattern := case.get("pattern"):
            order = torch.randperm(shape[0], device=indices.device, generator=draw.generator)
            indices = PATTERNS[pattern](torch.arange(shape[0], device=indices.device))[order]
        return indices.to(case.get("index", torch.int64)), draw.rows(vocabulary, case.shape[-1])

    def call(self, op: DifferentiableOp, tensors: Tensors, settings: tuple[Any, ...]) -> Any:
        padding = None if settings[0] < 0 else settings[0]
        return op(*tensors, padding_idx=padding)  # type: ignore[operator]

    def formula(self, indices: Tensor, weight: Tensor, padding: int, vocabulary: int) -> Tensor:
        hot = torch.nn.functional.one_hot(indices.long(), vocabulary).to(weight.dtype)
        if padding >= 0:
            weight = torch.where(torch.arange(vocabulary)[:, None] == padding, weight.detach(), weight)
        return hot @ weight

    def limits(self, exact: Exact) -> Mapping[str, Mapping[str, Any]]:
        settings, (dy,) = exact.settings, exact.grads
        magnitude = self.op_class.reference_backward(
            (dy.abs(),), (exact.inputs["indices"],), settings["padding"], settings["vocabulary"]
        )[1]
        return {"dweight": {"magnitude": magnitude}}


@pytest.mark.parametrize("name", [EMULATED, *BY_FORM])
@pytest.mark.usefixtures("poisoned")
def test_segments_across_chunks_on_the_emulator(name: str) -> None:
    """The typical case has no segment that two CTAs share."""
    tests = TestEmbedding()
    by = made(tests, name)
    tests.check(by.op, Case((150, 48), BF16, vocabulary=151, pattern="segments across chunks"), by.allowed)


@pytest.mark.parametrize("name", BINARIES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.usefixtures("poisoned")
def test_indices_outside_of_the_table(name: str, dtype: torch.dtype) -> None:
    """Their rows are NaN and they give no gradient, also where the low word of an index is one of the table."""
    way: Way = made(TestEmbedding(), name)
    unknown = [-1, 6, -(1 << 31), (1 << 31) - 1]
    if dtype == torch.int64:
        unknown += [1 << 32, (1 << 32) + 3, -(1 << 63), (1 << 63) - 1]
    indices = torch.tensor([2, *unknown, 3, 2, *unknown, 0], dtype=dtype, device=way.device)
    known = (indices >= 0) & (indices < 6)
    weight = torch.randn(6, 48, device=way.device, requires_grad=True)
    y = way.op(indices, weight)  # type: ignore[operator]
    assert torch.equal(y[known], weight[indices[known]]) and y[~known].isnan().all()
    dy = torch.randn_like(y)
    (dweight,) = torch.autograd.grad(y, weight, dy)
    expected = torch.zeros_like(weight).index_put_((indices[known].long(),), dy[known], accumulate=True)
    torch.testing.assert_close(dweight, expected, rtol=1e-6, atol=1e-6)


def test_weight_may_change_before_the_backward() -> None:
    """The backward needs none of its values."""
    weight = torch.randn(4, 8, requires_grad=True)
    y = liger_aot.load("embedding")(INDICES, weight, padding_idx=-1)
    with torch.no_grad():
        weight.zero_()
    (dweight,) = torch.autograd.grad(y.sum(), weight)
    assert torch.equal(dweight, torch.tensor([1.0, 0.0, 0.0, 0.0])[:, None].expand(4, 8))


@pytest.mark.parametrize("tokens", [100, ONE_BLOCK, ONE_BLOCK + 1])
@pytest.mark.parametrize("vocabulary", [6, 40_000])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_sorted_whatever_the_width(tokens: int, vocabulary: int, dtype: torch.dtype) -> None:
    """In the order of the tokens, also of those outside of the table, which stay there."""
    indices = torch.arange(tokens, dtype=dtype) * 7919 % (vocabulary + 2) - 1
    indices[3:5] = torch.iinfo(dtype).max
    keys, order = _sorted(indices, vocabulary)
    assert keys.dtype == torch.int32 and bool((keys.diff() >= 0).all())
    known = (indices >= 0) & (indices < vocabulary)
    assert torch.equal(keys.long()[known[order]], indices[order].long()[known[order]])
    assert not bool(((keys >= 0) & (keys < vocabulary))[~known[order]].any())
    same = keys.diff() == 0
    assert bool((order.diff()[same & known[order][1:]] > 0).all())
