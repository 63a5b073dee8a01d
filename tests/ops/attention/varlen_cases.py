"""What the tests of varlen attention share: problems, and the check of each sequence against float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_aot.ops.attention.flash_attention_varlen import FlashAttentionVarlen
from tests.harness.tolerances import LEAST, UNIT_ROUNDOFF
from tests.ops.attention import attention_cases
from tests.ops.attention.attention_cases import BF16, FP16, errors
from tests.ops.attention.attention_gradients import gradient_errors


class Problem(NamedTuple):
    """One call. ``behind``: tokens of q, and of k and v, behind the last sequence."""

    heads: int
    kv_heads: int
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    dim: int
    dtype: torch.dtype = BF16
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float = 0.0
    sinks: bool = False
    scale: float | None = None
    behind: tuple[int, int] = (0, 0)

    def tensors(self, seed: int = 0, device: str = "cpu") -> list[Any]:
        """q, k, v, cu_seqlens_q, cu_seqlens_k, sinks."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, generator=generator)

        tokens_q, tokens_k = sum(self.lengths_q) + self.behind[0], sum(self.lengths_k) + self.behind[1]
        q = rounded(normal(tokens_q, self.heads, self.dim), self.dtype)
        k, v = (rounded(normal(tokens_k, self.kv_heads, self.dim), self.dtype) for _ in range(2))
        starts = (starts_of(lengths).to(device) for lengths in (self.lengths_q, self.lengths_k))
        return [q, k, v, *starts, normal(self.heads) if self.sinks else None]

    def longest(self) -> tuple[int, int]:
        return max(self.lengths_q, default=0), max(self.lengths_k, default=0)

    def keywords(self, sinks: Tensor | None) -> dict[str, Any]:
        return {
            "causal": self.causal, "window": self.window, "softcap": self.softcap, "sinks": sinks,
            "scale": self.scale, "return_lse": True,
        }  # fmt: skip

    def settings(self) -> tuple[Any, ...]:
        """As the reference takes them."""
        return (*self.longest(), *self.one(0, 0).settings()[:-1], False)

    def one(self, len_q: int, len_k: int) -> attention_cases.Problem:
        """A sequence by itself."""
        return attention_cases.Problem(
            1, self.heads, self.kv_heads, len_q, len_k, self.dim, self.dtype, "bshd", self.causal, self.window,
            self.softcap, self.sinks, self.scale,
        )  # fmt: skip

    def pieces(self) -> list[tuple[attention_cases.Problem, slice, slice]]:
        """Every sequence, with its places among the tokens of q and of k."""
        bounds = (pairwise(starts_of(lengths).tolist()) for lengths in (self.lengths_q, self.lengths_k))
        return [
            (self.one(b - a, d - c), slice(a, b), slice(c, d)) for (a, b), (c, d) in zip(*bounds, strict=True)
        ]


def rounded(t: Tensor, dtype: torch.dtype) -> Tensor:
    """To ``dtype``, with zeros for subnormal numbers: the matrix instructions of gfx90a's forward take those for zeros,
    which is no rounding."""
    t = t.to(dtype)
    return torch.where(t.abs() < torch.finfo(dtype).tiny, 0, t)


def starts_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)


def check(
    op: Any, problem: Problem, allowed: Mapping[str, float], *, seed: int = 0, device: str = "cpu"
) -> None:
    """Run ``op`` both ways and compare every sequence with float64; what is behind them gives zeros."""
    tensors = problem.tensors(seed, device)
    q, k, v, cu_q, cu_k, sinks = tensors
    leaves = [t.requires_grad_() for t in (q, k, v, sinks) if t is not None]
    o, lse = op(q, k, v, cu_q, cu_k, *problem.longest(), **problem.keywords(sinks))
    assert o.is_contiguous() and o.shape == q.shape and o.dtype == q.dtype
    assert lse.dtype == torch.float32 and lse.shape == (problem.heads, q.shape[0])
    generator = torch.Generator(device).manual_seed(seed + 1)
    do = torch.randn(o.shape, device=device, generator=generator).to(o.dtype)
    dlse = torch.randn(lse.shape, device=device, generator=generator) if seed % 2 else None
    outputs, given = ((o, lse), (do, dlse)) if dlse is not None else ((o,), (do,))
    found = torch.autograd.grad(outputs, leaves, given)  # type: ignore[arg-type]
    for g, leaf in zip(found, leaves, strict=True):
        assert g.is_contiguous() and g.shape == leaf.shape and g.dtype == leaf.dtype
    o, lse, q, k, v = (t.detach() for t in (o, lse, q, k, v))
    sinks = None if sinks is None else sinks.detach()
    end_q, end_k = sum(problem.lengths_q), sum(problem.lengths_k)
    assert not o[end_q:].any() and torch.isneginf(lse[:, end_q:]).all()
    assert not found[0][end_q:].any() and not found[1][end_k:].any() and not found[2][end_k:].any()

    sums = SinkSums(sinks)
    for one, rows, keys in problem.pieces():
        if not one.len_q:
            assert not found[1][keys].any() and not found[2][keys].any()
            continue
        own = q[rows][None], k[keys][None], v[keys][None], sinks
        worst = errors(o[rows][None], lse[None, :, rows], own, one, allowed, approximate=device == "cuda")
        assert max(worst) <= 1, (
            f"{one}, {rows}, seed {seed}: o and lse, as fractions of what is allowed {worst}"
        )
        gradients = found[0][rows][None], found[1][keys][None], found[2][keys][None]
        g = None if dlse is None else dlse[None, :, rows]
        limits = gradient_errors(
            gradients, own, do[rows][None], g, one, allowed, approximate=device == "cuda", sums=sums
        )
        assert max(limits.values()) <= 1, f"{one}, {rows}, seed {seed}: gradients, as fractions {limits}"
    if sinks is not None:
        assert sums.worst(found[3]) <= 1, f"{problem}, seed {seed}: dsinks"
    again = op(*tensors[:5], *problem.longest(), **{**problem.keywords(sinks), "return_lse": False})
    assert torch.equal(again, o), f"{problem}: not the same twice"


def check_backward(op: Any, problem: Problem, allowed: Mapping[str, float], seed: int) -> None:
    """Run the backward alone with NaN behind the last sequence: every sequence's gradients against float64, and zeros
    behind the last one. Then again, and with NaN in neighbours: the same bits of dk and dv, and of dq but for
    roundings, as it may be added up in any order."""
    q, k, v, cu_q, cu_k, sinks = problem.tensors(seed)
    reference = FlashAttentionVarlen.reference(q, k, v, cu_q, cu_k, sinks, *problem.settings())
    o, lse = (t.contiguous() for t in reference)
    do, dlse = torch.randn_like(o), torch.randn_like(lse) if seed % 2 else None
    end_q, end_k = sum(problem.lengths_q), sum(problem.lengths_k)
    for t, end in ((q, end_q), (do, end_q), (o, end_q), (k, end_k), (v, end_k)):
        t[end:] = math.nan
    keywords = {key: value for key, value in problem.keywords(sinks).items() if key != "return_lse"}

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = op(*given, lse, cu_q, cu_k, *problem.longest(), dlse=dlse, **keywords)
        return found

    given = do, q, k, v, o
    first = run(*given)
    behind = first[0][end_q:], first[1][end_k:], first[2][end_k:]
    assert not any(t.any() for t in behind), "what is behind the last sequence is not zeros"
    sums = SinkSums(sinks)
    for one, rows, keys in problem.pieces():
        if not one.len_q:
            assert not first[1][keys].any() and not first[2][keys].any(), "gradients of keys without queries"
            continue
        worst = gradient_errors(
            (first[0][rows][None], first[1][keys][None], first[2][keys][None]),
            (q[rows][None], k[keys][None], v[keys][None], sinks), do[rows][None],
            None if dlse is None else dlse[None, :, rows], one, allowed, approximate=False, sums=sums,
        )  # fmt: skip
        assert max(worst.values()) <= 1, f"{one}, {rows}: gradients are off by {worst} of what is allowed"
    if sinks is not None:
        assert sums.worst(first[3]) <= 1, "dsinks are off by more than is allowed"
    _assert_same(run(*given), first, "from run to run")

    merged = tuple(t.clone() for t in first[:3])
    pieces = [(rows, keys) for _, rows, keys in problem.pieces()]
    for some in (pieces[::2], pieces[1::2]):
        tensors = tuple(torch.full_like(t, math.nan) for t in given)
        for rows, keys in some:
            for t, of, own in zip(tensors, given, (rows, rows, keys, keys, rows), strict=True):
                t[own] = of[own]
        found = run(*tensors)
        for rows, keys in some:
            for to, g, own in zip(merged, found, (rows, keys, keys), strict=False):
                to[own] = g[own]
    _assert_same(merged, first, "beside NaN")


def _assert_same(found: tuple[Tensor, ...], first: tuple[Tensor, ...], when: str) -> None:
    dq, wanted = found[0].double(), first[0].double()
    close = bool((dq - wanted).norm() <= UNIT_ROUNDOFF[first[0].dtype] * wanted.norm())
    assert close and torch.equal(found[1], first[1]) and torch.equal(found[2], first[2]), (
        f"they differ {when}"
    )


class SinkSums:
    """The gradient of the sinks, which all sequences share, and its limit."""

    def __init__(self, sinks: Tensor | None) -> None:
        self.exact: Any = 0.0 if sinks is None else torch.zeros_like(sinks, dtype=torch.float64)
        self.limit: Any = self.exact

    def add(self, exact: Tensor, limit: Tensor) -> None:
        self.exact, self.limit = self.exact + exact, self.limit + limit

    def worst(self, found: Tensor) -> float:
        ratio = (found.double() - self.exact).abs() / (self.limit + LEAST[torch.float32])
        return float(torch.where(torch.isnan(ratio), torch.inf, ratio).max())


# Small ones, for the emulator: every dimension's kernel, both dtypes, every mask, sequences without queries or keys,
# queries that see no key, tokens behind the last sequence, several blocks of rows and keys.
SMALL = (
    Problem(2, 1, (40, 0, 20, 7), (60, 12, 10, 0), 64, behind=(9, 5)),
    Problem(1, 1, (130, 1), (20, 140), 64, FP16, causal=True, sinks=True, behind=(3, 0)),
    Problem(1, 1, (10, 25), (33, 5), 96, window=(9, 5), softcap=5.0),
    Problem(1, 1, (20, 3), (25, 20), 96, FP16, causal=True, sinks=True),
    Problem(2, 1, (17, 0), (40, 3), 128, causal=True, scale=0.5, behind=(1, 0)),
    Problem(1, 1, (13, 20), (31, 9), 128, FP16),
    Problem(1, 1, (20, 5), (10, 9), 192, sinks=True, causal=True),
    Problem(1, 1, (4, 33), (8, 20), 160, FP16, window=(6, 0)),
    Problem(1, 1, (9, 20), (30, 9), 256, window=(None, 3)),
    Problem(1, 1, (9,), (20,), 208, FP16, causal=True, behind=(0, 30)),
    Problem(2, 1, (5, 0, 30), (30, 0, 7), 33, FP16, window=(4, 4), sinks=True),
    Problem(1, 1, (6,), (7,), 64, softcap=3.0),
    Problem(1, 1, (6,), (7,), 64, FP16, softcap=3.0, causal=True),
    Problem(1, 1, (6,), (7,), 96, FP16, softcap=3.0),
    Problem(1, 1, (6,), (7,), 128, softcap=3.0, sinks=True),
    Problem(1, 1, (6,), (7,), 128, FP16, softcap=3.0),
    Problem(1, 1, (6,), (7,), 192, softcap=3.0),
    Problem(1, 1, (6,), (7,), 192, FP16, softcap=3.0),
    Problem(1, 1, (6,), (7,), 256, softcap=3.0),
    Problem(1, 1, (6,), (7,), 256, FP16, softcap=3.0),
    Problem(1, 1, (6,), (7,), 96),
)
EMPTY = (
    Problem(2, 1, (), (), 64, behind=(5, 3)),
    Problem(2, 1, (0, 0), (4, 3), 64),
    Problem(2, 1, (4, 3), (0, 0), 64, sinks=True, behind=(2, 0)),
    Problem(2, 1, (0, 0), (0, 0), 64, behind=(5, 7)),
)
DIMS = (8, 33, 64, 72, 96, 100, 128, 160, 192, 200, 256)
UNEVEN = (1, 700, 0, 64, 3, 129, 300), (300, 700, 5, 0, 64, 200, 128)
LARGE = (
    *(
        problem
        for dim in DIMS
        for problem in (
            Problem(4, 2, UNEVEN[0], UNEVEN[0], dim),
            Problem(4, 2, UNEVEN[0], UNEVEN[0], dim, FP16, causal=True, behind=(300, 20)),
            Problem(4, 1, *UNEVEN, dim, causal=True, sinks=True),
            Problem(4, 2, *UNEVEN, dim, FP16, window=(100, 30)),
            Problem(4, 4, *UNEVEN, dim, window=(64, 0), softcap=15.0, sinks=True),
            Problem(2, 2, *UNEVEN, dim, window=(None, 20), behind=(1, 1)),
        )
    ),
    Problem(2, 1, (5,) * 1000, (7,) * 1000, 64, causal=True),
    Problem(8, 1, (2048, 3000, 17), (2048, 3000, 400), 128, causal=True),
)
