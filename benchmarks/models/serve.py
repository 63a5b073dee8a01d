"""The example's server with Llama-3-8B's shapes, and Transformers' continuous batching: `python -m
benchmarks.models.serve`.

Random weights; as many users as sequences, each of whom asks again when an answer is there, prompts and answers of
mixed lengths, greedy. Tokens a second, and medians of the milliseconds to a request's first token and from each to the
next. For ours also a step in which every sequence grows by a token, at some lengths: its graph, and graphs of its
matrix products and of its attention alone; the share is what is not matrix products.

Transformers attends with torch's SDPA, or with liger-aot, and runs by CUDA graphs. It has been through the same
requests once before, so that it has captured what it meets.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

import liger_aot
from benchmarks.providers import OURS, first_line
from benchmarks.steps import Command
from examples import serve
from examples.paged_decoder import Decoder

MODULE = "benchmarks.models.serve"
ATTENTION = {"transformers": "sdpa", "transformers_on_aot": "liger_aot"}
PROVIDERS = (OURS, *ATTENTION)
SEQUENCES = (1, 8, 32, 128, 256)
DTYPES = ("bf16", "fp8")
LENGTHS = (64, 256, 1024)  # of a step's sequences
PROMPT, ANSWER = (32, 256), (32, 128)  # tokens: fewest, most


@dataclass(frozen=True)
class Point:
    """``sequences`` at once; the matrix products' ``dtype``."""

    dtype: str
    sequences: int


@dataclass(frozen=True)
class Result:
    point: Point
    provider: str
    tokens_per_second: float | None = None
    first_ms: float | None = None
    next_ms: float | None = None
    steps: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """By the length of the sequences: milliseconds of the whole step, of its products and of its attention."""
    failed: str | None = None


class Models:
    """A model and, by dtype, what the server has of it."""

    def __init__(self, name: str) -> None:
        liger_aot.register_attention()
        self.model = serve.make(name)
        self.decoder = cache(lambda dtype: Decoder(self.model, dtype == "fp8"))


def measured(point: Point, provider: str, models: Models, load: serve.Load, lengths: Sequence[int]) -> Result:
    steps: dict[int, Mapping[str, float]] = {}
    try:
        if provider == OURS:
            decoder = models.decoder(point.dtype)
            found = serve.serve(decoder, load)
            if models.model.device.type == "cuda":
                for length in lengths:
                    gc.collect()
                    torch.cuda.empty_cache()
                    steps[length] = serve.step_times(decoder, point.sequences, length)
        else:
            found = serve.with_transformers(models.model, load, ATTENTION[provider])
    except Exception as problem:  # a peer that cannot is a result
        return Result(point, provider, failed=f"{type(problem).__name__}: {first_line(problem)}")
    finally:
        gc.collect()
    return Result(point, provider, found["rate"], found["first"] * 1e3, found["next"] * 1e3, steps)


def line(point: Point, found: Sequence[Result]) -> str:
    """A point's results in one line."""
    cells = []
    for r in found:
        if r.failed is not None:
            cells.append(f"{r.provider} failed: {r.failed}")
            continue
        shares = ", ".join(f"{share(step):.1%} at {n}" for n, step in r.steps.items())
        cells.append(
            f"{r.provider} {r.tokens_per_second:.0f} tokens/s, first {r.first_ms:.1f} ms, next {r.next_ms:.2f} ms"
            + (f", not products {shares}" if shares else "")
        )
    return f"{point.dtype}, {point.sequences} sequences: {'; '.join(cells)}"


def share(step: Mapping[str, float]) -> float:
    """Of a step, what is not matrix products."""
    return 1 - step["products"] / step["whole"]


def main(arguments: Sequence[str]) -> int:
    command = Command(MODULE, __doc__, PROVIDERS, on_cpu=True)
    add = command.parser.add_argument
    add("--model", choices=serve.MODELS, default="llama3-8b", help="(default: %(default)s)")
    add("--requests", type=int, default=2, help="for each sequence (default: %(default)s)")
    command.several("sequences", SEQUENCES)
    command.several("dtypes", DTYPES)
    command.several("lengths", LENGTHS)
    options = command.read(arguments)
    models = Models(options.model)

    def at(point: Point) -> list[Result]:
        n = point.sequences
        load = serve.Load(n, max(options.requests * n, 8), PROMPT, ANSWER)
        names = [name for name in options.providers if name == OURS or point.dtype == "bf16"]
        return [measured(point, name, models, load, options.lengths) for name in names]

    points = [Point(dtype, n) for dtype in options.dtypes for n in options.sequences]
    facts: dict[str, Any] = {"model": options.model, "prompt": PROMPT, "answer": ANSWER}
    return command.measure("serve", points, at, line, **facts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
