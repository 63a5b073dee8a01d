"""What the tests of paged attention share: problems, and the check of each sequence against float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_aot.ops.attention.flash_attention_paged import FlashAttentionPaged
from tests.ops.attention import attention_cases
from tests.ops.attention.attention_cases import BF16, FP16, errors
from tests.ops.attention.varlen_cases import rounded, starts_of

E4M3, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
FP8 = (E4M3, FNUZ)


class Problem(NamedTuple):
    """One call. ``queries`` and ``keys`` of each sequence; ``behind``: tokens of q behind the last one."""

    heads: int
    kv_heads: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    dim: int
    dtype: torch.dtype = BF16
    page: int = 16
    causal: bool = True
    window: tuple[int | None, int | None] | None = None
    softcap: float = 0.0
    sinks: bool = False
    scale: float | None = None
    behind: int = 0
    splits: int | None = None
    cache: torch.dtype | None = None  # of the caches, where it is not ``dtype``
    per_head: bool = False  # scales of each head; else one for all
    unscaled: str = ""  # "k" or "v" has none
    known: bool = False  # max_seqlen_k is given
    halves: bool = False  # both caches are halves of one tensor, heads before rows

    def tensors(self, seed: int = 0, device: str = "cpu") -> list[Any]:
        """In the order of FlashAttentionPaged.tensors. NaN is where no key was written and before the windows; entries
        of the block table for such are no pages."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return rounded(torch.randn(shape, device=device, generator=generator), self.dtype)

        count = len(self.queries)
        a_sequence = max((-(-n // self.page) for n in self.keys), default=0) + 1
        pages = count * a_sequence + 3
        order = torch.randperm(pages, device=device, generator=generator)
        table = order[: count * a_sequence].view(count, a_sequence).to(torch.int32)
        kv = self._caches(pages, device)
        for s, length in enumerate(self.keys):
            unseen = self.unseen(s)
            for cache in kv:
                values = normal(length, self.kv_heads, self.dim)
                values[:unseen] = torch.nan
                for first in range(0, length, self.page):
                    some = values[first : first + self.page]
                    cache[int(table[s, first // self.page]), : len(some)] = some.to(cache.dtype)
            table[s, -(-length // self.page) :] = 9999 if s % 2 else -1
            table[s, : unseen // self.page] = 9999
        q = normal(sum(self.queries) + self.behind, self.heads, self.dim)
        q[sum(self.queries) :] = torch.nan
        lengths = torch.tensor(self.keys, dtype=torch.int32, device=device)
        sinks = torch.randn(self.heads, device=device, generator=generator) if self.sinks else None
        scales = [None, None]
        if self.cache is not None:
            of = self.kv_heads if self.per_head else 1
            scales = [torch.rand(of, device=device, generator=generator) + 0.5 for _ in range(2)]
            scales = [None if name == self.unscaled else t for name, t in zip("kv", scales, strict=True)]
        return [q, *kv, starts_of(self.queries).to(device), lengths, table, sinks, *scales]

    def _caches(self, pages: int, device: str) -> tuple[Tensor, Tensor]:
        shape, dtype = (pages, self.page, self.kv_heads, self.dim), self.cache or self.dtype
        if self.halves:  # vLLM's [pages, 2, heads, rows, dim]
            both = torch.empty(pages, 2, self.kv_heads, self.page, self.dim, device=device)
            both = both.fill_(torch.nan).to(dtype)
            return both[:, 0].transpose(1, 2), both[:, 1].transpose(1, 2)
        k, v = (torch.full(shape, torch.nan, device=device).to(dtype) for _ in range(2))
        return k, v

    def unseen(self, s: int) -> int:
        """Keys of sequence s before its first query's window."""
        left = (self.window or (None, None))[0]
        if left is None or not self.queries[s]:
            return 0
        return min(max(0, self.keys[s] - self.queries[s] - left), self.keys[s])

    def longest(self) -> int:
        return max(self.queries, default=0)

    def keywords(self, tensors: list[Any]) -> dict[str, Any]:
        """The op's arguments but the first seven."""
        return {
            "causal": self.causal, "window": self.window, "softcap": self.softcap, "scale": self.scale,
            "sinks": tensors[6], "k_scale": tensors[7], "v_scale": tensors[8], "splits": self.splits,
            "return_lse": True, "max_seqlen_k": max(self.keys) if self.known else None,
        }  # fmt: skip

    def settings(self) -> tuple[Any, ...]:
        """As the reference takes them."""
        return (self.longest(), 0, *self.one(0).settings()[:4], self.splits or 0)

    def one(self, s: int) -> attention_cases.Problem:
        """A sequence by itself."""
        return attention_cases.Problem(
            1, self.heads, self.kv_heads, self.queries[s], self.keys[s], self.dim, self.dtype, "bshd", self.causal,
            self.window, self.softcap, self.sinks, self.scale,
        )  # fmt: skip

    def of_sequence(self, s: int, tensors: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Its q, k and v, (1, length, heads, dim); keys that no query sees are zeros."""
        q, k, v, starts, _, table, _, *scales = tensors
        own = q[int(starts[s]) : int(starts[s + 1])][None]
        found = []
        for cache, scale in zip((k, v), scales, strict=True):
            lines = torch.arange(self.keys[s], device=q.device)
            pages = table[s].long()[lines // self.page]
            pages[: self.unseen(s) // self.page * self.page] = 0
            t = cache.float()[pages, lines % self.page]
            t[: self.unseen(s)] = 0
            found.append((t if scale is None else t * scale.reshape(-1, 1))[None])
        return own, *found


def run(op: Any, problem: Problem, tensors: list[Any], **others: Any) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = op(
        *tensors[:6], problem.longest(), **{**problem.keywords(tensors), **others}
    )
    return found


def check(
    op: Any, problem: Problem, allowed: Mapping[str, float], *, seed: int = 0, device: str = "cpu"
) -> None:
    """Run ``op`` and compare every sequence with float64; what is behind them gives zeros. Then again, into memory that
    is given: the same bits. The arguments must stay as they were."""
    tensors = problem.tensors(seed, device)
    before = [None if t is None else t.clone() for t in tensors]
    o, lse = run(op, problem, tensors)
    q, end = tensors[0], sum(problem.queries)
    assert o.is_contiguous() and o.shape == q.shape and o.dtype == problem.dtype
    assert lse.shape == (problem.heads, q.shape[0]) and lse.dtype == torch.float32
    assert not o[end:].any() and torch.isneginf(lse[:, end:]).all(), "behind the last sequence"
    check_sequences(problem, tensors, o, lse, allowed, device)
    for t, was in zip(tensors, before, strict=True):
        assert t is None or torch.equal(_bits(t), _bits(was))
    wide = torch.full((q.shape[0], problem.heads + 1, problem.dim), torch.nan, dtype=q.dtype, device=device)
    to = wide[:, 1:]
    again = run(op, problem, tensors, out=to, return_lse=False)
    assert again is to and torch.equal(to, o), f"{problem}: not the same twice"
    assert torch.isnan(wide[:, 0]).all()


def check_sequences(
    problem: Problem,
    tensors: list[Any],
    o: Tensor,
    lse: Tensor,
    allowed: Mapping[str, float],
    device: str = "cpu",
) -> None:
    """Every sequence against float64, with the limits of ``attention_cases.errors``."""
    starts = tensors[3].tolist()
    for s, count in enumerate(problem.queries):
        if not count:
            continue
        rows = slice(starts[s], starts[s + 1])
        own = (*problem.of_sequence(s, tensors), tensors[6])
        worst = errors(
            o[rows][None], lse[None, :, rows], own, problem.one(s), allowed, approximate=device == "cuda"
        )
        assert max(worst) <= 1, f"{problem}, sequence {s}: o and lse, as fractions of what is allowed {worst}"


def _bits(t: Tensor) -> Tensor:
    """NaN equals itself."""
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()])


# Small ones, for the interpreter and the emulator: every dimension's kernel, both dtypes, few rows and many, one split
# and several, tiles by sequence and by number, pages of all sizes, lengths that end anywhere, sequences without queries
# or keys, tokens behind the last one, windows with NaN before them, every mask.
SMALL = (
    Problem(4, 1, (1, 1, 0, 1), (70, 16, 9, 33), 64, behind=3),
    Problem(4, 2, (1, 2, 1), (90, 40, 0), 64, FP16, splits=3, sinks=True, behind=1),
    Problem(2, 1, (40, 1, 0, 7), (60, 33, 12, 7), 64, page=32, behind=9),
    Problem(8, 1, (3, 1), (65, 20), 64, FP16, page=64, splits=2, window=(9, 0)),
    Problem(2, 2, (20, 3), (50, 40), 64, softcap=5.0, halves=True),
    Problem(3, 1, (1, 4), (40, 20), 128, sinks=True),
    Problem(2, 1, (30, 1), (47, 5), 128, FP16, page=64, window=(20, None), causal=False),
    Problem(18, 1, (1, 1), (33, 70), 112, splits=2),
    Problem(6, 2, (1, 1, 1), (40, 1, 17), 96, FP16, splits=2, window=(5, 0), sinks=True),
    Problem(2, 1, (1, 2), (30, 40), 256, splits=2),
    Problem(1, 1, (18, 1), (33, 40), 208, FP16, behind=2),
    Problem(2, 1, (20,), (10,), 160, causal=False, softcap=3.0),
    Problem(1, 1, (9, 1), (20, 5), 256, FP16, window=(None, 3), causal=False),
    Problem(2, 1, (1, 1), (40, 7), 48, FP16, splits=2),
    Problem(4, 1, (34, 1), (50, 20), 176),
    Problem(20, 1, (2, 1), (20, 31), 128, FP16, splits=3),
)
# In fp8, whose dtype the architecture decides.
SMALL_FP8 = (
    Problem(4, 2, (1, 2, 0), (70, 33, 9), 64, per_head=True, splits=2, behind=1),
    Problem(2, 1, (20, 1), (45, 20), 64, FP16, page=32, window=(9, 0)),
    Problem(2, 2, (1, 3), (30, 20), 128, FP16, softcap=5.0, sinks=True),
    Problem(2, 1, (30,), (47,), 112, halves=True, unscaled="v"),
    Problem(1, 1, (1,), (40,), 256, splits=2),
    Problem(2, 2, (17, 1), (20, 30), 208, FP16, per_head=True, unscaled="k"),
)
EMPTY = (
    Problem(2, 1, (), (), 64, behind=5),
    Problem(2, 1, (0, 0), (4, 3), 64),
    Problem(2, 1, (4, 3), (0, 0), 64, sinks=True, behind=2),
    Problem(2, 1, (0, 0), (0, 0), 64, behind=5),
)


def reference(problem: Problem, tensors: list[Any]) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = FlashAttentionPaged.reference(*tensors, *problem.settings())
    return found
