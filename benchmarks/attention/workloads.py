"""The tuner's calls of attention: heads * dim is 2048. Results and gradients of some heads are checked against fp64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention.attention import BACKWARD_FLOPS, TOKENS, WIDTH, uneven
from benchmarks.measure import Call
from benchmarks.workload import Workload, largest_error

ROUNDINGS = 4  # P or dS, the products' operands, the result


@dataclass(frozen=True)
class Calls:
    """The calls that a kernel is for."""

    op: str
    causal: bool = False
    window: int | None = None  # keys before a row's own
    softcap: float = 0.0
    deterministic: bool = False
    lengths: tuple[int, ...] = (2048, 8192)

    @property
    def backward(self) -> bool:
        return self.op.endswith("_backward")

    @property
    def varlen(self) -> bool:
        return "_varlen" in self.op

    @property
    def bounds(self) -> tuple[int, int]:
        """How many keys before and after its own a query sees; -1: all."""
        return (-1 if self.window is None else self.window, 0 if self.causal else -1)

    def keywords(self) -> dict[str, Any]:
        window = None if self.window is None else (self.window, None)
        found: dict[str, Any] = {"causal": self.causal, "window": window, "softcap": self.softcap}
        return found | ({"deterministic": self.deterministic} if self.backward else {})

    def pairs(self, length: int) -> float:
        """Pairs of a query and a key that it sees, in a sequence."""
        if self.window is not None and self.window < length:
            seen = self.window + 1
            return seen * (seen + 1) / 2 + (length - seen) * seen
        return length**2 / (2 if self.causal else 1)


def workloads(
    calls: Calls, dim: int, dtype: torch.dtype, elements: int, device: torch.device
) -> list[Workload]:
    """A call with sequences of each length, at most about ``elements`` elements, and a small one that is checked but
    not timed: grouped queries, and lengths that are no multiple of a block."""
    tokens, heads = min(TOKENS, elements // WIDTH), WIDTH // dim
    found = [
        Sequences(
            calls, (200, 77, 5), (200, 77, 130) if calls.varlen else (300,) * 3, 4, 2, dim, dtype, device
        )
    ]
    if not calls.varlen:
        found = [Sequences(calls, (200, 200), (300, 300), 4, 2, dim, dtype, device)]
    for length in dict.fromkeys(min(length, tokens) for length in calls.lengths):
        lengths = tuple(uneven(length, tokens)) if calls.varlen else (length,) * (tokens // length)
        found.append(Sequences(calls, lengths, lengths, heads, heads, dim, dtype, device))
    return [one.workload(timed=i > 0) for i, one in enumerate(found)]


class Sequences:
    """Random sequences, stored one after another as in varlen calls. Dense calls take them as a batch."""

    def __init__(
        self, calls: Calls, lengths_q: Sequence[int], lengths_k: Sequence[int], heads: int, kv_heads: int, dim: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        generator = torch.Generator(device).manual_seed(sum(lengths_q))

        def normal(tokens: int, heads: int) -> Tensor:
            return torch.randn((tokens, heads, dim), dtype=dtype, device=device, generator=generator)

        self._calls, self._lengths_q, self._lengths_k = calls, lengths_q, lengths_k
        self._starts_q, self._starts_k = ([0, *accumulate(lengths)] for lengths in (lengths_q, lengths_k))
        self._ratio, self._scale = heads // kv_heads, dim**-0.5
        self._q, self._k, self._v = (
            normal(sum(ls), h) for ls, h in ((lengths_q, heads), *2 * ((lengths_k, kv_heads),))
        )
        self._checked = tuple(dict.fromkeys(((0, 0), (len(lengths_q) - 1, kv_heads - 1))))
        if calls.backward:
            self._do = normal(sum(lengths_q), heads)
            self._o, self._lse = self._forward()

    def workload(self, timed: bool) -> Workload:
        q, calls = self._q, self._calls
        flops = 4 * q.shape[1] * q.shape[2] * sum(map(calls.pairs, self._lengths_q))
        # o and do read, dq, dk and dv written.
        written = (q,) if not calls.backward else (q, q, q, self._k, self._v)
        tensors = (q, self._k, self._v, *written)
        exact = tuple(t for at in self._checked for t in self._exact(*at))

        def error(results: tuple[Tensor, ...]) -> float:
            return largest_error([t for at in self._checked for t in self._part(results, *at)], exact)

        return Workload(
            call=lambda op: Call(lambda: self._run(op)),
            error=error,
            bytes=sum(t.numel() * t.element_size() for t in tensors),
            point=f"{'causal' if calls.causal else 'full'} {max(self._lengths_q)}",
            flops=flops * (BACKWARD_FLOPS if calls.backward else 1),
            timed=timed,
            roundings=ROUNDINGS,
        )

    def _run(self, op: Any) -> tuple[Tensor, ...]:
        calls, q = self._calls, self._q
        starts: tuple[Any, ...] = ()
        if calls.varlen:
            cu = (
                torch.tensor(s, dtype=torch.int32, device=q.device) for s in (self._starts_q, self._starts_k)
            )
            starts = (*cu, max(self._lengths_q), max(self._lengths_k))
        tensors = [self._shaped(t) for t in (q, self._k, self._v)]
        if not calls.backward:
            return (op(*tensors, *starts, **calls.keywords()).reshape(q.shape),)
        lse = self._lse
        if not calls.varlen:
            lse = lse.view(q.shape[1], len(self._lengths_q), -1).transpose(0, 1).contiguous()
        given = (self._shaped(self._do), *tensors, self._shaped(self._o), lse)
        found = op(*given, *starts, **calls.keywords())[:3]
        return tuple(g.reshape(t.shape) for g, t in zip(found, (q, self._k, self._v), strict=True))

    def _shaped(self, t: Tensor) -> Tensor:
        return t if self._calls.varlen else t.view(len(self._lengths_q), -1, *t.shape[1:])

    def _at(self, sequence: int, head: int) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
        """Rows and heads of the queries, and of the keys, of one sequence and one head of keys."""
        rows, keys = (slice(*s[sequence : sequence + 2]) for s in (self._starts_q, self._starts_k))
        return (rows, slice(head * self._ratio, (head + 1) * self._ratio)), (keys, slice(head, head + 1))

    def _part(self, results: tuple[Tensor, ...], sequence: int, head: int) -> tuple[Tensor, ...]:
        of_q, of_k = self._at(sequence, head)
        return tuple(t[at] for t, at in zip(results, (of_q, of_k, of_k), strict=False))

    def _reference(self, dtype: torch.dtype, sequence: int, head: int) -> tuple[Tensor, ...]:
        """q, k, v, o and lse of a sequence and head of keys, as batches of one."""
        from liger_aot.ops.attention.flash_attention import FlashAttention

        q, k, v = (t.to(dtype)[None] for t in self._part((self._q, self._k, self._v), sequence, head))
        return q, k, v, *FlashAttention.reference(q, k, v, None, *self._settings())

    def _settings(self) -> tuple[Any, ...]:
        return (self._scale, *self._calls.bounds, self._calls.softcap, "bshd")

    def _exact(self, sequence: int, head: int) -> tuple[Tensor, ...]:
        """In fp64: the output, or the gradients."""
        from liger_aot.ops.attention.flash_attention import FlashAttention

        q, k, v, o, lse = self._reference(torch.float64, sequence, head)
        if not self._calls.backward:
            return (o[0],)
        (do,) = self._part((self._do,), sequence, head)
        saved = (q, k, v, None, o, lse)
        found = FlashAttention.reference_backward((do.double()[None], None), saved, *self._settings())
        return tuple(g[0] for g in found[:3])

    def _forward(self) -> tuple[Tensor, Tensor]:
        """o, rounded to the dtype, and lse, by the fp32 reference: the backward's inputs."""
        o = torch.empty_like(self._q)
        lse = torch.empty(self._q.shape[1], self._q.shape[0], device=self._q.device)
        for sequence in range(len(self._lengths_q)):
            for head in range(self._k.shape[1]):
                rows, heads = self._at(sequence, head)[0]
                *_, own, sums = self._reference(torch.float32, sequence, head)
                o[rows, heads] = own[0].to(o.dtype)
                lse[heads, rows] = sums[0]
        return o, lse
