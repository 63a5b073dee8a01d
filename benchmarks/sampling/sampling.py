"""Ops that sample on this machine's GPU: `python -m benchmarks.sampling.sampling`.

Microseconds a call inside a CUDA graph, as in `benchmarks.quantization.quantization`, beside a copy of the logits. Rows
are flat, of normally distributed logits, of which top-p keeps most columns, or peaked, as a language model's are: a few
columns have most of the probability. The peers are torch (by a sort, as vLLM's own fallback), Transformers' logits
processors, vLLM's Triton kernels and FlashInfer, the last two where they can be imported. Before it is timed, what a
provider keeps or samples is compared with float64.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.in_graphs import Ready, Result, beside_the_copy, captured, cells, small_error
from benchmarks.steps import Command

K, P = 50, 0.9
ROWS, COLUMNS = (1, 8, 32, 128), (32_000, 128_256, 131_072, 151_936)
TASKS = (
    "mask top_k top_p",
    "mask top_k",
    "mask top_p",
    "sample top_k top_p",
    "sample top_p",
    "sample",
    "greedy",
)
KINDS = ("peaked", "flat")
# Of the probability: what the sums of a peer in float32 may be off by.
TOLERANCE = 1e-3
Run = Callable[[], Tensor]


@dataclass(frozen=True)
class Point:
    task: str
    kind: str
    rows: int
    columns: int

    @property
    def bytes(self) -> int:
        """Of float32 logits, read and written once, or read alone."""
        return self.rows * self.columns * (8 if self.task.startswith("mask") else 4)


POINTS = tuple(Point(t, k, r, c) for r in ROWS for c in COLUMNS for t in TASKS for k in KINDS)


@dataclass(frozen=True)
class Inputs:
    logits: Tensor
    k: Tensor | None
    p: Tensor | None
    temperature: Tensor | None
    seeds: Tensor
    positions: Tensor


def drawn(point: Point, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)
    rows, columns = point.rows, point.columns
    x = torch.randn(rows, columns, device=device, generator=generator)
    if point.kind == "peaked":  # a tail of exponentially distributed logits, whose greatest stand alone
        uniform = torch.rand(rows, columns, device=device, generator=generator)  # 0 among them, 1 not
        x = -(1 - uniform).log() * 1.7 + x * 0.5
    full = torch.ones(rows, device=device)
    return Inputs(
        x,
        (full * K).int() if "top_k" in point.task else None,
        full * P if "top_p" in point.task else None,
        full * 0 if point.task == "greedy" else None,
        torch.arange(rows, device=device),
        torch.arange(rows, device=device),
    )


def by_sort(logits: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor:
    """-inf for what is left out, by a sort of each row."""
    ordered, order = logits.sort(dim=-1)
    if k is not None:
        kth = ordered.gather(1, (ordered.shape[1] - k.long())[:, None])
        ordered = ordered.masked_fill(ordered < kth, -torch.inf)
    if p is not None:
        left_out = ordered.softmax(-1).cumsum(-1) <= 1 - p.to(ordered.dtype)[:, None]
        left_out[:, -1] = False
        ordered = ordered.masked_fill(left_out, -torch.inf)
    return torch.empty_like(ordered).scatter_(1, order, ordered)


def error(point: Point, i: Inputs, got: Tensor) -> float:
    """How much of the probability is kept that should not be, or not kept that should; of tokens, how many are none
    that may be sampled, or not the greatest of a greedy row."""
    exact = i.logits.double()
    wanted = by_sort(exact, i.k, i.p) > -torch.inf
    if point.task.startswith("mask"):
        others = (got > -torch.inf) != wanted
        return float((exact.softmax(-1) * others).sum(-1).max())
    tokens = got.long().reshape(-1, 1)
    right = tokens[:, 0] == exact.argmax(-1) if point.task == "greedy" else wanted.gather(1, tokens)[:, 0]
    return float((~right).double().mean())


# ---- the providers ----


def ours(point: Point, i: Inputs) -> Run:
    import liger_aot

    if point.task.startswith("mask"):
        mask = liger_aot.load("top_k_top_p_mask")
        return lambda: mask(i.logits, i.k, i.p)
    op = liger_aot.load("sample")
    return lambda: op(i.logits, i.seeds, i.positions, temperature=i.temperature, top_k=i.k, top_p=i.p)


def by_torch(point: Point, i: Inputs) -> Run:
    if point.task == "greedy":
        return lambda: i.logits.argmax(-1)

    def run() -> Tensor:
        x = i.logits if i.k is None and i.p is None else by_sort(i.logits, i.k, i.p)
        if point.task.startswith("mask"):
            return x
        return (x.softmax(-1) / torch.empty_like(x).exponential_()).argmax(-1)

    return run


def transformers(point: Point, i: Inputs) -> Run:
    from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

    if not point.task.startswith("mask"):
        raise NotImplementedError("its processors mask logits")
    steps = ([TopKLogitsWarper(K)] if i.k is not None else []) + (
        [TopPLogitsWarper(P)] if i.p is not None else []
    )
    none: Any = None

    def run() -> Tensor:
        x = i.logits
        for step in steps:
            x = step(none, x)
        return x

    return run


def vllm(point: Point, i: Inputs) -> Run:
    from vllm.v1.sample.ops.topk_topp_triton import apply_top_k_top_p_triton

    if not point.task.startswith("mask"):
        raise NotImplementedError("its kernel masks logits")
    x = i.logits.clone()  # which it overwrites: later calls see what the first one left
    return lambda: apply_top_k_top_p_triton(x.copy_(i.logits), i.k, i.p)  # type: ignore[no-any-return]


def flashinfer(point: Point, i: Inputs) -> Run:
    import flashinfer.sampling as fi

    if point.task == "mask top_k":
        return lambda: fi.top_k_mask_logits(i.logits, i.k)  # type: ignore[no-any-return]
    if point.task == "mask top_p":
        return lambda: fi.top_p_renorm_probs(i.logits.softmax(-1), i.p).log()  # type: ignore[no-any-return]
    if point.task == "sample top_k top_p":
        return lambda: fi.top_k_top_p_sampling_from_logits(i.logits, i.k, i.p)  # type: ignore[no-any-return]
    if point.task == "sample top_p":
        return lambda: fi.top_p_sampling_from_probs(i.logits.softmax(-1), i.p)  # type: ignore[no-any-return]
    if point.task == "sample":
        return lambda: fi.sampling_from_logits(i.logits)  # type: ignore[no-any-return]
    raise NotImplementedError("it has no such call")


PROVIDERS: dict[str, Callable[[Point, Inputs], Run]] = {
    "liger_aot": ours,
    "torch": by_torch,
    "transformers": transformers,
    "vllm": vllm,
    "flashinfer": flashinfer,
}


# ---- measuring ----


def prepared(point: Point, name: str, inputs: Inputs) -> Ready:
    """A provider's graph and its error."""
    run = PROVIDERS[name](point, inputs)
    found = small_error(error(point, inputs, run()), TOLERANCE)
    return captured(run), found


def at(point: Point, names: Sequence[str], device: torch.device) -> list[Result]:
    inputs = drawn(point, device)
    return beside_the_copy(point, names, lambda name: prepared(point, name, inputs), device)


def line(point: Point, found: Sequence[Result]) -> str:
    return f"{point.task} {point.kind} {point.rows} x {point.columns}: {cells(found)}"


def main(arguments: Sequence[str]) -> int:
    command = Command("benchmarks.sampling.sampling", __doc__, PROVIDERS)
    command.several("rows", ROWS)
    command.several("columns", COLUMNS)
    options = command.read(arguments)
    points = [p for p in POINTS if p.rows in options.rows and p.columns in options.columns]
    return command.measure("sampling", points, lambda p: at(p, options.providers, command.device), line)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
