"""Paged attention on this machine's GPU: `python -m benchmarks.attention.paged --fa3 _vllm_fa3_C.abi3.so`.

Chunks of queries on a context that is cached already, and mixed batches of prefill and decoding, in bf16 with 32 heads
of q and 8 of keys of 128. Figures are microseconds a call in a CUDA graph, where all providers take turns. The peers
are FlashAttention-3 in vLLM's build, where ``--fa3`` names its shared object (vllm/vllm_flash_attn of its wheel), and
flash_decoding where each sequence has one query. Before it is timed, a provider's result is compared with fp64, for the
last queries of some sequences and heads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.in_graphs import Ready, captured, made_ready, microseconds, small_error
from benchmarks.steps import Command
from benchmarks.workload import TOLERANCE, relative_error

CALLS = 5  # in a graph
CHECKED_QUERIES = 4  # of a sequence, its last
CHUNKS, CONTEXTS, PAGES = (1, 16, 512, 2048, 8192), (0, 2048, 32768), (16, 64, 256)


@dataclass(frozen=True)
class Point:
    """A batch: the queries and the keys of each sequence; ``page`` keys a page."""

    name: str
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    page: int = 16
    dim: int = 128
    heads: int = 32
    kv_heads: int = 8

    @property
    def operations(self) -> int:
        """Of both products, by the keys that queries see."""
        seen = sum(q * k - q * (q - 1) // 2 for q, k in zip(self.queries, self.keys, strict=True))
        return 4 * seen * self.heads * self.dim

    @property
    def bytes(self) -> int:
        """Of q, the keys and values, and the result, once each."""
        return 4 * self.dim * (sum(self.queries) * self.heads + sum(self.keys) * self.kv_heads)


def chunk(queries: int, context: int, sequences: int, page: int) -> Point:
    name = f"{sequences} x {queries} on {context}"
    return Point(name, (queries,) * sequences, (queries + context,) * sequences, page)


MIXED = {
    "a prompt of 2048 beside 32 decoding": ((2048, *(1,) * 32), (2048, *(2048,) * 32)),
    "a chunk of 512 on 32768 beside 8 decoding": ((512, *(1,) * 8), (33280, *(32768,) * 8)),
    "prompts of 100 to 1600": (tuple(range(100, 1700, 100)), tuple(range(100, 1700, 100))),
    "32 with 4 speculated tokens": ((5,) * 32, tuple(range(500, 8500, 250))),
    "64 decoding from 128 to 8192": ((1,) * 64, tuple(range(128, 8193, 128))),
}
POINTS = (
    *(
        chunk(q, n, s, page)
        for page in PAGES
        for q in CHUNKS
        for n in CONTEXTS
        for s in (1, 8)
        if q * s <= 16384
    ),
    *(Point(name, *batch, page) for page in PAGES for name, batch in MIXED.items()),
)


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    starts: Tensor
    lengths: Tensor
    table: Tensor


@dataclass(frozen=True)
class Result:
    point: Point
    provider: str
    us: float | None = None
    teraflops_per_second: float | None = None
    gigabytes_per_second: float | None = None
    error: float | None = None
    failed: str | None = None


Run = Callable[[], Tensor]


def drawn(point: Point, device: torch.device) -> Inputs:
    """Random tensors; the pages of a sequence lie in random places."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=torch.bfloat16).normal_(generator=generator)

    counts = [-(-n // point.page) for n in point.keys]
    order = torch.randperm(sum(counts), device=device, generator=generator).to(torch.int32)
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=device)
    for row, own in zip(table, order.split(counts), strict=True):
        row[: own.numel()] = own
    starts = torch.tensor([0, *point.queries], device=device).cumsum(0).to(torch.int32)
    lengths = torch.tensor(point.keys, dtype=torch.int32, device=device)
    cache = (sum(counts), point.page, point.kv_heads, point.dim)
    q = normal(sum(point.queries), point.heads, point.dim)
    return Inputs(q, normal(*cache), normal(*cache), starts, lengths, table)


def ours(point: Point, i: Inputs) -> Run:
    import liger_aot

    op = liger_aot.load("flash_attention_paged")
    op.preload()
    most = max(point.queries), max(point.keys)
    return lambda: op(i.q, i.k, i.v, i.starts, i.lengths, i.table, most[0], max_seqlen_k=most[1])


def decoding(point: Point, i: Inputs) -> Run:
    import liger_aot

    if max(point.queries) > 1:
        raise ValueError("it is for one query of each sequence")
    op = liger_aot.load("flash_decoding")
    op.preload()
    q = i.q[:, None]
    return lambda: op(q, i.k, i.v, cache_seqlens=i.lengths, block_table=i.table)[:, 0]


def fa3(point: Point, i: Inputs) -> Run:
    """With its scheduler's metadata made beforehand, as vLLM does once a step."""
    library = torch.ops._vllm_fa3_C
    longest_q, longest_k, sizes = (
        max(point.queries),
        max(point.keys),
        (point.heads, point.kv_heads, point.dim),
    )
    metadata = library.get_scheduler_metadata(
        len(point.queries), longest_q, longest_k, *sizes, point.dim, torch.bfloat16, i.lengths, i.starts, None, None,
        None, None, point.page, 0, True, -1, -1, False, 0, None, 0,
    )  # fmt: skip

    def run() -> Tensor:
        found: Tensor = library.fwd(
            i.q, i.k, i.v, None, None, None, None, i.starts, None, None, None, i.lengths, longest_q, longest_k, i.table,
            None, None, None, None, None, None, None, None, point.dim**-0.5, True, -1, -1, 0.0, True, metadata, 0,
            None, 0, None, 1, 0, None,
        )[0]  # fmt: skip
        return found

    return run


PROVIDERS: dict[str, Callable[[Point, Inputs], Run]] = {
    "liger_aot": ours,
    "fa3": fa3,
    "flash_decoding": decoding,
}


def offers(provider: str, point: Point) -> bool:
    return provider != "flash_decoding" or max(point.queries) == 1


def error(point: Point, i: Inputs, result: Tensor) -> float:
    """The largest of ‖result - exact‖ / ‖exact‖ in fp64 over what is checked: the last queries of the first and last
    sequence, of the first and the last head."""
    from liger_aot.ops.attention.flash_attention import FlashAttention

    worst = 0.0
    for s, head in ((0, 0), (-1, point.heads - 1)):
        length, end = point.keys[s], int(i.starts[1:][s])
        rows = slice(end - min(CHECKED_QUERIES, point.queries[s]), end)
        line = torch.arange(length, device=i.q.device)
        pages, of = i.table[s].long()[line // point.page], head * point.kv_heads // point.heads
        k, v = (t[pages, line % point.page, of][None, :, None].double() for t in (i.k, i.v))
        q = i.q[rows, head][None, :, None].double()
        exact, _ = FlashAttention.reference(q, k, v, None, point.dim**-0.5, -1, 0, 0.0, "bshd")
        worst = max(worst, relative_error(result[rows, head], exact[0, :, 0]))
    return worst


def prepared(point: Point, name: str, inputs: Inputs) -> Ready:
    """A provider's graph and its error."""
    run = PROVIDERS[name](point, inputs)
    found = small_error(error(point, inputs, run()), TOLERANCE[torch.bfloat16])
    return captured(run, CALLS), found


def at(point: Point, names: Sequence[str], device: torch.device) -> list[Result]:
    """All providers in turn."""
    inputs = drawn(point, device)
    able = [name for name in names if offers(name, point)]
    ready, failed = made_ready(able, lambda name: prepared(point, name, inputs))
    us = microseconds({name: graph for name, (graph, _) in ready.items()}, device, CALLS)
    return [
        *(Result(point, name, failed=why) for name, why in failed.items()),
        *(
            Result(point, name, t, point.operations / t / 1e6, point.bytes / t / 1e3, ready[name][1])
            for name, t in us.items()
        ),
    ]


def line(point: Point, found: Sequence[Result]) -> str:
    cells = [
        f"{r.provider} {r.us:.2f} ({r.teraflops_per_second:.0f} TFLOP/s, {r.gigabytes_per_second:.0f} GB/s)"
        for r in found
        if r.us is not None
    ]
    failed = [f"{r.provider} failed: {r.failed}" for r in found if r.failed]
    return f"page {point.page}, {point.name}: {', '.join([*cells, *failed])}"


def main(arguments: Sequence[str]) -> int:
    command = Command("benchmarks.attention.paged", __doc__, PROVIDERS)
    command.library("fa3", "vLLM's _vllm_fa3_C.abi3.so")
    command.several("pages", PAGES)
    options = command.read(arguments)
    points = [point for point in POINTS if point.page in options.pages]
    name = "flash_attention_paged_points"
    return command.measure(name, points, lambda p: at(p, options.providers, command.device), line)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
