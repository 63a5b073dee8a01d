"""What the tests of losses of whole sequences share: cases, the checks of every driver against float64, and how far
rounding may take a result.

A loss is a function of the tokens' log-probabilities. Each is off by a rounding of its row's logits, so a result is off
by its derivatives times that, and the derivatives themselves by the loss's second derivatives: all bounds are of first
order, found by autograd from the loss's formula in float64, with a factor of 2 for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from liger_aot.ops.losses._linear import padded
from liger_aot.ops.post_training._sequences import MOST
from tests.harness.tolerances import UNIT_ROUNDOFF
from tests.ops.losses.linear_loss_cases import BF16, FP16, FP32, WAYS, made
from tests.ops.post_training.linear_loss_tests import LinearLossTests

__all__ = ["BF16", "FP16", "FP32", "WAYS", "Case", "Drawn", "SequenceTests", "made"]
GRADED = ("input", "weight", "bias")
U32 = UNIT_ROUNDOFF[FP32]


@dataclass(frozen=True)
class Case:
    """``chunks``: "whole", one sequence or pair at a time ("units"), or "rows": less than one of those. j is the width
    of the reference's layer, 0 where there is none; ``ref`` is its dtype, where that is another. ``parts`` are optional
    tensors by name."""

    sequences: int
    tokens: int
    k: int
    vocabulary: int
    dtype: torch.dtype = FP32
    j: int = 0
    bias: bool = False
    index: torch.dtype = torch.int64
    chunks: str = "whole"
    ref: torch.dtype | None = None
    parts: tuple[str, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        shape = f"{self.sequences}x{self.tokens}x{self.k}/{self.j}x{self.vocabulary}"
        parts = [shape, str(self.dtype).removeprefix("torch."), self.chunks, *self.parts]
        parts += [name for name in ("bias", "ref") if getattr(self, name)]
        return "-".join(parts + [f"{name}={value}" for name, value in self.keywords.items()])


@dataclass(frozen=True)
class Drawn:
    """The op's tensors by name, on one device."""

    tensors: dict[str, Any]

    def but(self, **changes: Any) -> Drawn:
        return Drawn({**self.tensors, **changes})

    def wide(self) -> Drawn:
        return Drawn(
            {
                name: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t
                for name, t in self.tensors.items()
            }
        )


class Values:
    """Log-probabilities as one vector: (sequences, tokens) of the policy, of the reference and of the second tokens,
    0 where a token does not count."""

    def __init__(self, **of: Tensor) -> None:
        self._shape = next(iter(of.values())).shape
        self._names = tuple(of)
        self.vector = torch.cat([t.reshape(-1) for t in of.values()])

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        parts = vector.view(len(self._names), *self._shape)
        return dict(zip(self._names, parts, strict=True))


class SequenceTests(LinearLossTests):
    """Base of an op's tests.

    A subclass gives ``op_class``, ``cases``; ``draw_others``; ``tokens_of``, the targets of ``input`` by the names of
    ``Values``, with ``ignored`` where one does not count; and ``formula``, the outputs by name, from log-probabilities
    that may be of float64, by other steps than the op's own. What the loss takes for constants it computes from
    ``held``, the same numbers.
    """

    student = GRADED
    some_chunks = "units"
    for_graph: ClassVar[Mapping[str, Any]] = {
        "sequences": 8, "tokens": 32, "k": 64, "vocabulary": 1000, "chunks": "units"
    }  # fmt: skip
    ignored: ClassVar[int] = -100
    paired: ClassVar[bool] = False

    def draw_others(self, case: Case, drawn: Drawn, g: torch.Generator) -> Drawn:
        raise NotImplementedError

    def tokens_of(self, case: Case, drawn: Drawn) -> dict[str, Tensor]:
        raise NotImplementedError

    def formula(
        self, case: Case, drawn: Drawn, values: dict[str, Tensor], held: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        raise NotImplementedError

    def scale(self, case: Case) -> float:
        return 1.0

    def is_paired(self, case: Case) -> bool:
        return self.paired

    # ---- running it -------------------------------------------------------------------------------------------

    def draw(self, case: Case, seed: int, device: str) -> Drawn:
        g = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, generator=g).to(case.dtype)

        size = case.sequences, case.tokens
        drawn = Drawn(
            {
                "input": normal(*size, case.k),
                "weight": (normal(case.vocabulary, case.k) * case.k**-0.5).to(case.dtype),
                "bias": normal(case.vocabulary) if case.bias else None,
            }
        )
        if case.j:
            of_ref = case.ref or case.dtype
            weight = (normal(case.vocabulary, case.j) * case.j**-0.5).to(of_ref)
            drawn = drawn.but(ref_input=normal(*size, case.j).to(of_ref), ref_weight=weight)
            if case.bias:
                drawn = drawn.but(ref_bias=normal(case.vocabulary).to(of_ref))
        return self.draw_others(case, drawn, g)

    def tensors(self, drawn: Drawn) -> dict[str, Any]:
        return drawn.tensors

    def chunk_bytes(self, case: Case) -> int:
        row = padded(case.vocabulary) * max(case.dtype.itemsize, (case.ref or case.dtype).itemsize)
        unit = case.tokens * (2 if self.is_paired(case) else 1)
        return {"whole": 2 * MOST, "units": unit * row, "rows": max(unit // 2, 1) * row}[case.chunks]

    def exact(
        self, case: Case, drawn: Drawn, grad: float, rounded_logits: bool
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        exact = Exact(self, case, drawn.wide(), rounded_logits)
        gradients = {name: g * grad for name, g in exact.gradients.items()}
        return {**exact.outputs, **gradients}, {**exact.allowed, **exact.gradient_limits(grad)}

    # ---- tests ------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("way", ["reference", pytest.param("gpu", marks=pytest.mark.gpu)])
    def test_more_cases(self, way: str) -> None:
        op, device = made(self.op_class, way)
        for case in self.more:
            self.check(op, case, device, 0, rounded_logits=way != "reference")

    def test_no_sequences(self) -> None:
        op, _ = made(self.op_class, "reference")
        case = replace(self.cases[0], sequences=0)
        drawn = self.draw(case, 0, "cpu")
        w = drawn.tensors["weight"].requires_grad_()
        op(**drawn.tensors, **case.keywords).loss.backward()
        assert not w.grad.any()

    @pytest.mark.gpu
    @pytest.mark.parametrize("chunks", ["whole", "units", "rows"])
    def test_large(self, chunks: str) -> None:
        op, device = made(self.op_class, "gpu")
        case = replace(
            self.cases[0], sequences=4, tokens=20, k=256, vocabulary=50257, dtype=BF16, chunks=chunks
        )
        self.check(op, case, device, 0, rounded_logits=True)

    @pytest.mark.gpu
    def test_past_two_to_the_31_elements(self) -> None:
        """One sequence or pair whose logits have more elements than 32 bits count: the last tokens alone count."""
        op, device = made(self.op_class, "gpu")
        pair = self.is_paired(self.cases[0])
        tokens = (1 << 31) // 65536 // (2 if pair else 1) + 5
        base = replace(
            self.cases[0], parts=(), k=16, j=16 if self.cases[0].j else 0, vocabulary=65536, dtype=BF16
        )
        case = replace(base, sequences=2 if pair else 1, tokens=tokens)
        drawn = self.only_last(case, self.draw(case, 0, device), 40)
        short = replace(case, tokens=40)
        last = Drawn(
            {
                name: t[:, -40:].contiguous() if isinstance(t, Tensor) and t.shape[1:2] == (tokens,) else t
                for name, t in drawn.tensors.items()
            }
        )
        one = torch.ones((), device=device)
        outputs, gradients = self.run(op, case, drawn, one)
        assert not gradients["input"][:, :-40].any()
        wanted, of_short = self.run(op, short, last, one)
        torch.testing.assert_close(outputs["loss"], wanted["loss"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(gradients["input"][:, -40:], of_short["input"], rtol=2e-2, atol=1e-6)
        torch.testing.assert_close(gradients["weight"], of_short["weight"], rtol=2e-2, atol=1e-5)

    def only_last(self, case: Case, drawn: Drawn, count: int) -> Drawn:
        """With all but the last ``count`` tokens of each sequence left out of the loss."""
        raise NotImplementedError


class Exact:
    """A case in float64, with what rounding may do."""

    def __init__(self, tests: SequenceTests, case: Case, drawn: Drawn, rounded_logits: bool) -> None:
        self._case, self._drawn = case, drawn
        dtypes = case.dtype, case.ref or case.dtype
        store, of_ref = (UNIT_ROUNDOFF[dtype] if rounded_logits else 0.0 for dtype in dtypes)
        scale = tests.scale(case)
        t = drawn.tensors
        leaves = {name: t[name].requires_grad_() for name in GRADED if t[name] is not None}
        logits, off = self._layer(t["input"], t["weight"], t["bias"], scale, store)
        logits.retain_grad()
        log_q = logits.log_softmax(-1)
        tokens = tests.tokens_of(case, drawn)
        of = {name: _chosen(log_q, at, tests.ignored) for name, at in tokens.items()}
        errors = dict.fromkeys(tokens, off)
        if t.get("ref_input") is not None:
            ref, ref_off = self._layer(t["ref_input"], t["ref_weight"], t.get("ref_bias"), scale, of_ref)
            of["reference"] = _chosen(ref.log_softmax(-1), tokens["policy"], tests.ignored).detach()
            errors["reference"] = ref_off
        values = Values(**of)
        outputs = tests.formula(case, drawn, of, {name: t.detach() for name, t in of.items()})
        outputs["loss"].backward()
        self.outputs = {name: o.detach() for name, o in outputs.items()}
        self.gradients = {name: leaf.grad for name, leaf in leaves.items()}
        vector = values.vector.detach()
        error = torch.cat([e.expand(of["policy"].shape).reshape(-1) for e in errors.values()]) + 8 * U32 * (
            1 + vector.abs()
        )

        def by(name: str) -> Callable[[Tensor], Tensor]:
            return lambda v: tests.formula(case, drawn, values.split(v), values.split(v))[name]

        def slopes_at(v: Tensor) -> Tensor:
            moving = v.clone()
            loss = tests.formula(case, drawn, values.split(moving), values.split(v))["loss"]
            found: Tensor = torch.autograd.grad(loss, moving, create_graph=True)[0]
            return found

        self.allowed = {}
        for name, o in self.outputs.items():
            jacobian = torch.autograd.functional.jacobian(by(name), vector).abs()
            rounded = 64 * U32 * (o.abs() + jacobian @ vector.abs()) + 1e-30
            self.allowed[name] = 2 * (jacobian @ error + rounded) + 2.0**-40
        slopes = slopes_at(vector.clone().requires_grad_()).detach()
        hessian = torch.autograd.functional.jacobian(slopes_at, vector).abs()
        moved = hessian @ error + 64 * U32 * (slopes.abs() + hessian @ vector.abs())
        self._parts = values.split(slopes.abs()), values.split(moved)
        self._g, self._p = logits.grad, log_q.detach().exp()
        self._off, self._tokens, self._scale = off, tokens, scale

    def _layer(
        self, x: Tensor, w: Tensor, b: Tensor | None, scale: float, store: float
    ) -> tuple[Tensor, Tensor]:
        """(scaled logits, how far a log-probability of each token may be off)."""
        logits = torch.nn.functional.linear(x, w, b) * scale
        size = x.detach().abs() @ w.detach().abs().t() + (0.0 if b is None else b.detach().abs())
        each = store * logits.detach().abs() + (x.shape[-1] + 2) * U32 * size * scale
        return logits, each.amax(-1) * 2 + 40 * U32

    def gradient_limits(self, grad: float) -> dict[str, Tensor]:
        case, (slopes, moved) = self._case, self._parts
        u = UNIT_ROUNDOFF[case.dtype]
        p, g = self._p, self._g.abs() * grad * self._scale  # type: ignore[union-attr]
        dg = torch.zeros_like(p)
        off = self._off.unsqueeze(-1)
        for name, tokens in self._tokens.items():
            at = tokens.long().clamp(min=0).unsqueeze(-1)
            mass, shift = (t[name].unsqueeze(-1) * grad * self._scale for t in (slopes, moved))
            dg = dg + shift * p + mass * p * (off * (1 - p + off) + 32 * U32)
            dg = dg.scatter_add(-1, at, shift + u * mass)
        dg = dg + u * g + (2.0**-24 if case.dtype == FP16 else 2.0**-126)
        x, w = (self._drawn.tensors[name].detach().abs() for name in ("input", "weight"))
        flat = (t.reshape(-1, t.shape[-1]) for t in (dg, g, x))
        dg, g, x = flat
        rows, vocabulary = g.shape
        chunks = {"whole": 1, "units": case.sequences, "rows": 4 * case.sequences}[case.chunks]
        tiny = 2.0**-24 if case.dtype == FP16 else 2.0**-126
        return {
            "input": 2 * (dg @ w + (u + vocabulary * U32) * (g @ w)).view(self._drawn.tensors["input"].shape) + tiny,
            "weight": 2 * (dg.t() @ x + (chunks * u + rows * U32) * (g.t() @ x)) + tiny,
            "bias": 2 * (dg.sum(0) + (u + rows * U32) * g.sum(0)) + tiny,
        }  # fmt: skip


def _chosen(log_q: Tensor, tokens: Tensor, ignored: int) -> Tensor:
    counts = tokens.long() != ignored
    at = torch.where(counts, tokens.long(), 0).unsqueeze(-1)
    return torch.where(counts, log_q.gather(-1, at).squeeze(-1), 0.0)
