"""Losses of a linear layer's results, forward and backward together, beside the matrix products that bound them: what
`benchmarks.losses.linear_losses` and `benchmarks.losses.linear_jsd` share.

Each provider's time is divided by that of the products alone, whole, of the same data, timed in the same rounds. The
peak is the memory that a step takes beside its arguments, the gradients among it. Errors are norms of differences to
fp64 over norms, of the loss and of some rows of the gradients.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import environment, measure
from benchmarks.providers import first_line
from benchmarks.session import RESULTS
from benchmarks.workload import relative_error

PRODUCTS = "products"
GIB = 1 << 30

Shape = tuple[int, int, int]  # rows, k, vocabulary


@dataclass(frozen=True)
class Inputs:
    """``input`` and ``weight`` get gradients; ``others`` are the loss's further tensors."""

    input: Tensor
    weight: Tensor
    others: tuple[Tensor, ...]

    def forget(self) -> None:
        self.input.grad = self.weight.grad = None


Loss = Callable[[Inputs], Tensor]


@dataclass(frozen=True)
class Result:
    """One provider at a shape, bf16."""

    shape: Shape
    provider: str
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    of_products: float | None = None
    peak_gib: float | None = None
    loss_error: float | None = None
    input_error: float | None = None
    weight_error: float | None = None
    failed: str | None = None


@dataclass(frozen=True)
class LinearLoss:
    """A loss to measure.

    Args:
        exact: of inputs, in fp64: "loss", the first rows of the gradient of "input" and, where there are, of "weight".
        largest_error: what is wrong is off by far more.
    """

    op: str
    module: str
    points: Sequence[Shape]
    providers: Mapping[str, Callable[[], Loss]]
    drawn: Callable[[Shape, torch.device], Inputs]
    products: Callable[[Inputs], Callable[[], None]]
    exact: Callable[[Inputs], Mapping[str, Tensor]]
    largest_error: float


def step(loss: Loss, inputs: Inputs, wide_gradient: bool = False) -> Callable[[], Tensor]:
    """Forward and backward. A float32 gradient of a bf16 weight stays one, where this torch can say so."""
    wide_gradient = wide_gradient and hasattr(inputs.weight, "grad_dtype")

    def run() -> Tensor:
        inputs.forget()
        inputs.weight.grad_dtype = torch.float32 if wide_gradient else inputs.weight.dtype
        found = loss(inputs)
        found.backward()
        return found.detach()

    return run


def errors(loss: Tensor, inputs: Inputs, exact: Mapping[str, Tensor]) -> dict[str, float]:
    """By name in ``exact``, after a step."""
    assert inputs.input.grad is not None and inputs.weight.grad is not None
    got = {"loss": loss, "input": inputs.input.grad, "weight": inputs.weight.grad}
    return {
        name: relative_error(got[name][: len(t)] if t.dim() else got[name], t) for name, t in exact.items()
    }


def peak(run: Callable[[], Tensor], inputs: Inputs) -> float:
    """GiB that a step takes beside what was there before it."""
    inputs.forget()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / GIB


def prepared(
    of: LinearLoss, shape: Shape, name: str, inputs: Inputs, exact: Mapping[str, Tensor]
) -> tuple[Callable[[], Tensor], Result] | Result:
    """A provider's step, checked, and what is known before it is timed; or how it failed: a peer that cannot do a
    point is a result, not the run's end."""
    try:
        wide = name.startswith("liger_aot") and name.endswith("float32 dW")
        run = step(of.providers[name](), inputs, wide)
        run()  # cuBLAS's workspace, compilation
        gib, loss = peak(run, inputs), run()
        found = errors(loss, inputs, exact)
        if not max(found.values()) < of.largest_error:
            raise ArithmeticError(f"errors against fp64 {found}")
    except Exception as error:
        return Result(shape, name, failed=f"{type(error).__name__}: {first_line(error)}")
    return run, Result(shape, name, peak_gib=gib, **{f"{what}_error": e for what, e in found.items()})


def at(of: LinearLoss, shape: Shape, names: Sequence[str], device: torch.device, rounds: int) -> list[Result]:
    inputs = of.drawn(shape, device)
    exact = of.exact(inputs)
    made: list[Result] = []
    ready: dict[str, Result] = {PRODUCTS: Result(shape, PRODUCTS)}
    runs: dict[str, Callable[[], object]] = {}
    for name in names:
        found = prepared(of, shape, name, inputs, exact)
        if isinstance(found, Result):
            made.append(found)
        else:
            runs[name], ready[name] = found
    inputs.forget()
    torch.cuda.empty_cache()
    runs = {PRODUCTS: of.products(inputs), **runs}
    calls = {name: [measure.Call(run)] for name, run in runs.items()}
    samples = measure.time_interleaved(calls, rounds=rounds, min_ms=1.0)
    times = {name: measure.summarize(found) for name, found in samples.items()}
    return made + [
        dataclasses.replace(
            ready[name], median_ms=t.median_ms, p20_ms=t.p20_ms, p80_ms=t.p80_ms,
            of_products=t.median_ms / times[PRODUCTS].median_ms,
        )
        for name, t in times.items()
    ]  # fmt: skip


def line(r: Result) -> str:
    if r.failed:
        return f"  {r.provider:24s} failed: {r.failed}"
    text = f"  {r.provider:24s} {r.median_ms:8.2f} ms  {r.of_products:6.3f} of the products"
    if r.peak_gib is None:
        return text
    named = {"loss": r.loss_error, "d input": r.input_error, "d weight": r.weight_error}
    return f"{text}  {r.peak_gib:6.2f} GiB  errors: " + ", ".join(
        f"{name} {error:.1e}" for name, error in named.items() if error is not None
    )


def main(of: LinearLoss, description: str | None, arguments: Sequence[str]) -> int:
    """Measure, print, and write ``<op>_steps.json``. 1 where one of ours failed."""
    parser = argparse.ArgumentParser(f"python -m benchmarks.{of.module}", description=description)
    parser.add_argument(
        "--out", type=Path, help="folder of the results (default: benchmarks/results/GPU/steps)"
    )
    parser.add_argument("--rounds", type=int, default=2, help="of all providers in turn, of 10 calls each")
    parser.add_argument(
        "--providers", default=";".join(of.providers), help="semicolons between (default: %(default)s)"
    )
    parser.add_argument(
        "--shape", action="append", help="rows,k,vocabulary (may be repeated; default: all points)"
    )
    parser.add_argument("--commit", help="the commit measured, where the tree has no history")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("a GPU is needed, and torch sees none here")
    device = torch.device("cuda", 0)
    asked = [tuple(map(int, shape.split(","))) for shape in options.shape or ()]
    shapes = [(rows, k, vocabulary) for rows, k, vocabulary in asked] or of.points
    command = shlex.join(["python", "-m", f"benchmarks.{of.module}", *arguments])
    seen = environment.observe(device, command=command, commit=options.commit, absent={})
    folder = options.out or RESULTS / environment.folder_name(seen.gpu) / "steps"
    results: list[Result] = []
    for shape in shapes:
        print(" x ".join(map(str, shape)), flush=True)
        found = at(of, shape, options.providers.split(";"), device, options.rounds)
        print("\n".join(map(line, found)), flush=True)
        results += found
        content = {
            "environment": dataclasses.asdict(seen),
            "results": [dataclasses.asdict(r) for r in results],
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{of.op}_steps.json").write_text(json.dumps(content, indent=1) + "\n")
        torch.cuda.empty_cache()
    return int(any(r.failed and r.provider.startswith("liger_aot") for r in results))
