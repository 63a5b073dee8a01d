"""What the tests of the ops that sample share: problems, and the check of a result.

A result is compared twice: to the bit with the plain-torch reference on the CPU, and with the formulas of vLLM, written
anew in float64. There a token may be decided either way only where what decides it is nearer to its limit than the
errors that the ops document.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_aot.ops.registry import module
from liger_aot.ops.sampling._logits import processed
from liger_aot.ops.sampling._random import ACCEPT, RECOVER, SAMPLE, words

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OPS = ("top_k_top_p_mask", "sample", "rejection_sample")
VALUES = ("normal", "ties", "peaked", "special", "same")
SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, 3e38, -3e38)
# Relative errors of a mass: those of 2^x by a polynomial and of its argument, up to 31 of 2^-24 each way; twice, for a
# part and the whole.
MASS_ERROR = 8e-6
LOG_ERROR = 1e-5  # of a score: two logarithms by polynomials, and a product below 2^7 rounded to float32
CHECKED_TOGETHER = 1 << 19  # elements
FILTERS = ("top_k", "top_p", "min_p")
PENALTIES = (
    "repetition_penalties", "presence_penalties", "frequency_penalties", "prompt_mask", "output_counts",
    "allowed_mask", "bad_token_ids",
)  # fmt: skip


class Problem(NamedTuple):
    """One call. ``given`` are the optional arguments; of ``rejection_sample`` ``rows`` are requests."""

    op: str
    rows: int
    n: int
    dtype: torch.dtype = FP32
    values: str = "normal"
    given: frozenset[str] = frozenset()
    shift: int = 0  # elements that rows start after an aligned address
    gap: int = 0  # elements between rows
    drafts: int = 3  # the most draft tokens of a request
    inplace: bool = False
    logprobs: int | None = None  # compared with float64 as soon as they are there

    def tensors(self, seed: int = 0, device: str = "cpu") -> dict[str, Tensor]:
        """By name. NaN is around rows with gaps."""
        draw = torch.Generator(device).manual_seed(seed)
        if self.op == "rejection_sample":
            return self._drafts(draw, device)
        x = self._rows(draw, self.rows, self._values(draw, device), self.dtype)
        found = {"logits": x}
        if self.op == "sample":
            found["seeds"] = torch.randint(-(1 << 62), 1 << 62, (self.rows,), device=device, generator=draw)
            found["positions"] = torch.randint(0, 1 << 40, (self.rows,), device=device, generator=draw)
        n, rows = self.n, self.rows

        def one_of(*values: float, dtype: torch.dtype = FP32) -> Tensor:
            at = torch.randint(len(values), (rows,), device=device, generator=draw)
            return torch.tensor(values, device=device, dtype=dtype)[at]

        def bits() -> Tensor:
            return torch.randint(
                -(1 << 31), 1 << 31, (rows, -(-n // 32)), device=device, generator=draw, dtype=torch.int32
            )

        made = {
            "temperature": lambda: one_of(0.0, 1.0, 0.7, 2.0, 0.1),
            "top_k": lambda: one_of(0, 1, 5, n, n // 2, n + 9, -1, 50, dtype=torch.int32),
            "top_p": lambda: one_of(0.9, 1.0, 0.5, 0.0, 0.999, 0.1),
            "min_p": lambda: one_of(0.0, 0.1, 1.0, 0.001, 1e-9),
            "repetition_penalties": lambda: one_of(1.0, 1.3, 0.8),
            "presence_penalties": lambda: one_of(0.0, 0.6, -0.5),
            "frequency_penalties": lambda: one_of(0.0, 0.3, -0.1),
            "prompt_mask": bits,
            "output_counts": lambda: torch.randint(
                -2, 4, (rows, n), device=device, generator=draw, dtype=torch.int32
            ).clamp(min=0),
            "allowed_mask": bits,
            "bad_token_ids": lambda: torch.randint(
                -1, n + 1, (rows, 3), device=device, generator=draw, dtype=torch.int32
            ),
        }
        return found | {name: make() for name, make in made.items() if name in self.given}

    def _values(self, draw: torch.Generator, device: str) -> Tensor:
        x = torch.randn(self.rows, self.n, device=device, generator=draw)
        if self.values == "ties":
            return (x * 2).round()
        if self.values == "peaked":
            return x * 8
        if self.values == "same":
            return torch.full_like(x, 1.5)
        if self.values == "special":
            some = torch.tensor(SPECIAL, device=device)
            at = torch.randint(len(SPECIAL), x.shape, device=device, generator=draw)
            often = torch.rand(x.shape, device=device, generator=draw) < 0.2
            x = torch.where(often, some[at], x * 3)
            x[0] = -math.inf
        return x

    def _rows(self, draw: torch.Generator, rows: int, values: Tensor, dtype: torch.dtype) -> Tensor:
        n = values.shape[1]
        buffer = torch.full(
            (self.shift + rows * (n + self.gap),), math.nan, dtype=dtype, device=values.device
        )
        return buffer.as_strided((rows, n), (n + self.gap, 1), self.shift).copy_(values)

    def _drafts(self, draw: torch.Generator, device: str) -> dict[str, Tensor]:
        rows = self.rows
        counts = torch.randint(0, self.drafts + 1, (rows,), device=device, generator=draw, dtype=torch.int32)
        ends = counts.cumsum(0, dtype=torch.int32)
        tokens = int(ends[-1])
        logits = torch.randn(tokens, self.n, device=device, generator=draw) * 2
        if self.values == "ties":
            logits = logits.round()
        near = torch.randn(tokens, self.n, device=device, generator=draw) * 0.3
        draft = (logits + near).softmax(1)
        ids = torch.multinomial(draft, 1, generator=draw)[:, 0] if tokens else ends.new_empty(0).long()
        if tokens:
            sure = torch.rand(tokens, device=device, generator=draw) < 0.5
            ids = torch.where(sure, logits.argmax(1), ids)
            if self.values == "special":
                ids[0] = self.n + 3
        found = {
            "target_probs": self._rows(draw, tokens, logits.softmax(1), FP32),
            "draft_token_ids": ids,
            "cu_num_draft_tokens": ends,
            "bonus_token_ids": torch.randint(self.n, (rows,), device=device, generator=draw),
            "seeds": torch.randint(-(1 << 62), 1 << 62, (rows,), device=device, generator=draw),
            "positions": torch.randint(0, 1 << 40, (rows,), device=device, generator=draw),
        }
        if "draft_probs" in self.given:
            found["draft_probs"] = self._rows(draw, tokens, draft, FP32)
        if "greedy" in self.given:
            found["greedy"] = torch.rand(rows, device=device, generator=draw) < 0.5
        return found

    def run(self, op: Any, tensors: dict[str, Tensor]) -> Tensor:
        return self.results(op, tensors)[0]

    def results(self, op: Any, tensors: dict[str, Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """What an op returns, and log-probabilities beside it where they are asked for."""
        if self.op == "rejection_sample":
            return op(**tensors, max_spec_len=self.drafts), ()
        if self.logprobs is not None:
            tokens, measured = op(**tensors, logprobs=self.logprobs)
            return tokens, tuple(measured)
        if self.inplace:
            return op(**{**tensors, "logits": tensors["logits"].clone()}, inplace=True), ()
        return op(**tensors), ()


def bits_set(mask: Tensor, n: int) -> Tensor:
    """(rows, n) bool, of words of 32 bits."""
    columns = torch.arange(n, device=mask.device)
    return (mask.long()[:, columns // 32] >> (columns % 32)) & 1 == 1


def check(op: Any, problem: Problem, *, seed: int = 0, device: str = "cpu") -> None:
    tensors = problem.tensors(seed, device)
    before = {name: t.clone() for name, t in tensors.items()}
    got, measured = problem.results(op, tensors)
    for name, t in tensors.items():
        assert _same(t, before[name]), f"{problem}: {name} was overwritten"
    assert got.device.type == torch.device(device).type
    on_cpu = {name: t.cpu() for name, t in tensors.items()}
    reference, result = module(problem.op).OP(), got.cpu()
    for rows in parts_of(problem):
        given = {name: t[rows] for name, t in on_cpu.items()}
        wanted = problem.run(reference, given)
        assert result.dtype == wanted.dtype and _same(result[rows], wanted), (
            f"{problem}, seed {seed}: not the reference's bits"
        )
        CHECKS[problem.op](problem, given, result[rows])
    if measured:
        check_logprobs(on_cpu["logits"], result, *(t.cpu() for t in measured))


def parts_of(problem: Problem) -> list[slice]:
    """Rows that are checked together: so few that what the reference makes of them fits a processor's cache, in which
    it takes a fourth of the time. A request's rows stay together."""
    if problem.op == "rejection_sample":
        return [slice(None)]
    together = max(1, CHECKED_TOGETHER // problem.n)
    return [slice(first, first + together) for first in range(0, problem.rows, together)]


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(torch.nan_to_num(a, nan=77.0), torch.nan_to_num(b, nan=77.0))


def adjusted(t: dict[str, Tensor]) -> Tensor:
    """vLLM's penalties and masks, in float64; the logits are float32's until then."""
    x = t["logits"].double()
    n = x.shape[1]
    x = torch.where(x.isnan(), -math.inf, x)
    if "allowed_mask" in t:
        x = x.masked_fill(~bits_set(t["allowed_mask"], n), -math.inf)
    for row, ids in enumerate(t.get("bad_token_ids", torch.empty(0, 0)).tolist()):
        for token in ids:
            if 0 <= token < n:
                x[row, int(token)] = -math.inf
    counts = t.get("output_counts", torch.zeros(x.shape, dtype=torch.int32))
    seen = counts > 0
    if "prompt_mask" in t:
        seen = seen | bits_set(t["prompt_mask"], n)
    if "repetition_penalties" in t:
        by = torch.where(seen, t["repetition_penalties"].double()[:, None], 1.0)
        x = torch.where(x > 0, x / by, x * by)
    if "frequency_penalties" in t:
        x = x - t["frequency_penalties"].double()[:, None] * counts
    if "presence_penalties" in t:
        x = x - t["presence_penalties"].double()[:, None] * (counts > 0)
    return torch.where(x.isnan(), -math.inf, x)


def decided(x: Tensor, t: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(what must be kept, what may be kept) by min-p, top-k and top-p of float64 logits, by a sort."""
    rows, n = x.shape
    temperature = t.get("temperature", torch.ones(rows)).double()[:, None]
    z = x / torch.where(temperature > 0, temperature, 1.0)
    top = z.amax(1, keepdim=True)
    far = torch.where(z == top, 0.0, top - z)  # infinities among them
    must, may = torch.ones_like(x, dtype=torch.bool), torch.ones_like(x, dtype=torch.bool)
    if "min_p" in t:
        least = t["min_p"].double()[:, None]
        most = torch.where(least > 0, -least.log(), math.inf)
        error = 1e-6 * (1 + most.nan_to_num(posinf=0.0))
        must, may = (far <= most - error) | (far == 0), far <= most + error
    if "top_k" in t:
        k = t["top_k"].long()[:, None]
        k = torch.where((k <= 0) | (k > n), n, k)
        known, wide = torch.where(must, x, -math.inf), torch.where(may, x, -math.inf)
        must = must & (x >= wide.sort(1, descending=True).values.gather(1, k - 1))
        may = may & (x >= known.sort(1, descending=True).values.gather(1, k - 1))
    if "top_p" in t:
        p = t["top_p"].double()[:, None]
        if bool((must != may).any()):
            # not certain what the probabilities are of; of equal ones at the top the first is kept
            return must & (far == 0) & ((far == 0).cumsum(1) == 1), may
        weight = torch.where(must, torch.exp(-far), 0.0)
        order = torch.where(must, x, -math.inf).sort(dim=1, stable=True, descending=True).indices
        sorted_weight = weight.gather(1, order)
        before = sorted_weight.cumsum(1) - sorted_weight
        share = before / sorted_weight.sum(1, keepdim=True)
        error = MASS_ERROR + n * 2.0**-30
        surely, maybe = (torch.empty_like(must).scatter(1, order, share < p + by) for by in (-error, error))
        first = torch.zeros_like(must).scatter(1, order[:, :1], True)
        all_kept = p >= 1
        must, may = must & (surely | all_kept | first), may & (maybe | all_kept | first)
    cold = (temperature <= 0) | (top == -math.inf)
    return must | cold, may | cold


def check_mask(problem: Problem, t: dict[str, Tensor], got: Tensor) -> None:
    x = adjusted(t)
    must, may = decided(x, t)
    kept = got > -math.inf
    assert torch.equal(got[kept].double(), x[kept]), f"{problem}: other logits"
    assert bool((kept <= may).all()), f"{problem}: too many are kept"
    assert bool((must & (x > -math.inf) <= kept).all()), f"{problem}: too few are kept"


def exact_exponential(seeds: Tensor, positions: Tensor, n: int, stream: int) -> Tensor:
    """The exponentially distributed numbers in float64, in the same unit: 1 / ln 2."""
    v = (words(seeds, positions.long(), n, stream).double() + 0.5) / 2.0**32
    return -torch.log1p(-v) / math.log(2)


def check_sample(problem: Problem, t: dict[str, Tensor], got: Tensor) -> None:
    x = processed(t["logits"], *(t.get(name) for name in PENALTIES)).double()
    exact = adjusted(t)
    near = 4e-7 * (x.abs() + t["logits"].double().abs().nan_to_num(posinf=0.0, neginf=0.0) + 8)
    assert bool(((x == exact) | ((x - exact).abs() <= near)).all()), f"{problem}: other penalties"
    rows, n = x.shape
    assert got.shape == (rows,) and bool(((got >= 0) & (got < n)).all())
    temperature = t.get("temperature", torch.ones(rows)).double()[:, None]
    cold = temperature <= 0
    e = exact_exponential(t["seeds"], t["positions"], n, SAMPLE)
    score = x / torch.where(cold, 1.0, temperature) / math.log(2) - torch.where(cold, 0.0, e.log2())
    score = torch.where(score.abs() < 2.0**128, score, score * math.inf)  # as float32 has it
    must, may = decided(x, t)
    own = score.gather(1, got[:, None])
    size = own.abs().nan_to_num(posinf=0.0, neginf=0.0) * 2.0**-22
    top = torch.where(must, score, -math.inf).amax(1, keepdim=True)
    assert bool(may.gather(1, got[:, None]).all()), f"{problem}: a token that is not kept"
    assert bool(((own >= top - LOG_ERROR - size) | (own == top)).all()), f"{problem}: {own - top}"


def check_logprobs(logits: Tensor, tokens: Tensor, ids: Tensor, logprobs: Tensor, ranks: Tensor) -> None:
    """Of the logits as given. Rows whose sum is no number have none."""
    x = torch.where(logits.isnan(), -math.inf, logits.double())
    wanted = ids.shape[1] - 1
    assert torch.equal(ids[:, 0], tokens)
    assert torch.equal(ids[:, 1:], x.sort(dim=1, descending=True, stable=True).indices[:, :wanted])
    assert torch.equal(ranks, (x >= x.gather(1, tokens[:, None])).sum(1))
    lse = x.logsumexp(1, keepdim=True)
    exact = x.gather(1, ids) - lse
    error = 1e-5 + 2.0**-22 * (x.gather(1, ids).abs() + lse.abs())
    near = ((logprobs - exact).abs() <= error) | (exact == logprobs) | ~lse.isfinite()
    assert bool(near.all()), (logprobs, exact)


def check_rejection(problem: Problem, t: dict[str, Tensor], got: Tensor) -> None:
    """Each request by itself, token after token, in float64."""
    start = 0
    for row, end in enumerate(t["cu_num_draft_tokens"].tolist()):
        tokens, count = got[row].tolist(), end - start
        greedy = "greedy" in t and bool(t["greedy"][row])
        seed = t["seeds"][row : row + 1]
        for i in range(count):
            p = t["target_probs"][start + i].double()
            draft = int(t["draft_token_ids"][start + i])
            q = t["draft_probs"][start + i].double() if "draft_probs" in t else None
            at = t["positions"][row : row + 1] + i
            if greedy:
                accepted, other = draft == int(p.argmax()), p
            else:
                u = float(words(seed, at, 1, ACCEPT)[0, 0] >> 8) / 2.0**24
                known = 0 <= draft < problem.n
                accepted = known and u * (1.0 if q is None else float(q[draft])) < float(p[draft])
                if q is not None:
                    other = (p - q).clamp(min=0)
                else:
                    other = p.clone()
                    other[draft : draft + 1] = 0.0
                other = other / exact_exponential(seed, at, problem.n, RECOVER)[0]
            if not accepted:
                found = float(other[tokens[i]])
                assert found >= float(other.max()) * (1 - 1e-5), f"{problem}: row {row}, token {i}"
                assert tokens[i + 1 :] == [-1] * (problem.drafts - i)
                break
            assert tokens[i] == draft, f"{problem}: row {row}, token {i}"
        else:
            assert tokens[count:] == [int(t["bonus_token_ids"][row])] + [-1] * (problem.drafts - count)
        start = end


CHECKS = {"top_k_top_p_mask": check_mask, "sample": check_sample, "rejection_sample": check_rejection}


def optional(op: str) -> tuple[str, ...]:
    """The optional arguments."""
    if op == "rejection_sample":
        return ("draft_probs", "greedy")
    return FILTERS if op == "top_k_top_p_mask" else ("temperature", *FILTERS, *PENALTIES)


def small(op: str) -> list[Problem]:
    """The typical problems, each kind of argument among them."""
    if op == "rejection_sample":
        p = Problem(op, 5, 70)
        return [
            p,
            p._replace(given=frozenset(("draft_probs",)), n=64),
            p._replace(given=frozenset(("draft_probs", "greedy")), shift=1, gap=3, values="ties"),
            p._replace(given=frozenset(("greedy",)), values="special", drafts=35),
            p._replace(rows=1, drafts=1, n=1),
        ]
    both = frozenset(("top_k", "top_p"))
    p = Problem(op, 4, 300, given=both)
    found = [
        p,
        p._replace(dtype=BF16, n=304, values="ties"),
        p._replace(dtype=FP16, given=frozenset(FILTERS), values="peaked", shift=1, gap=3),
        p._replace(given=frozenset(("top_p",)), values="same", n=100),
        p._replace(given=frozenset(("min_p", "top_p")), values="special"),
        p._replace(rows=1, n=1),
        p._replace(given=frozenset()),
        p._replace(rows=3, n=4700, given=frozenset(("top_p",))),
    ]
    if op == "sample":
        warm = both | {"temperature", "min_p"}
        found += [
            p._replace(given=warm),
            p._replace(given=warm | frozenset(PENALTIES), n=160, dtype=BF16),
            p._replace(given=frozenset(PENALTIES), values="special", shift=1),
            p._replace(given=frozenset(("allowed_mask", "temperature")), rows=3, logprobs=0),
            p._replace(given=frozenset(("allowed_mask",)), values="special", logprobs=9, n=99),
            p._replace(given=both, values="ties", logprobs=20, dtype=BF16, n=1056),
        ]
    else:
        found.append(p._replace(inplace=True, gap=4))
    return found
