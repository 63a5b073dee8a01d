"""Fused linear cross entropy, forward and backward together: `python -m benchmarks.linear_losses`.

What bounds it are three matrix products (logits, input's gradient, weight's gradient), so that is what each provider's
time is divided by: the products alone, whole, of the same data, timed in the same rounds. The peak is the memory that a
forward and a backward take beside input and weight, the gradients among it. Errors are norms of differences to fp64
over norms, of the loss, of some rows of input's gradient and of some rows of weight's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import environment, measure
from .providers import first_line
from .session import RESULTS
from .workload import relative_error

PRODUCTS = "products"
POINTS = (
    (1024, 4096, 128256),
    (8192, 4096, 128256),
    (16384, 4096, 128256),
    (8192, 2048, 50257),
    (8192, 4096, 32000),
)
CHECKED = 256  # rows of each gradient
LARGEST_ERROR = 0.02  # what is wrong is off by far more
GIB = 1 << 30


@dataclass(frozen=True)
class Result:
    """One provider at rows x k x vocabulary, bf16."""

    shape: tuple[int, int, int]
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
class Inputs:
    input: Tensor
    weight: Tensor
    target: Tensor

    def forget(self) -> None:
        self.input.grad = self.weight.grad = None


def drawn(shape: tuple[int, int, int], device: torch.device) -> Inputs:
    """Logits of about standard normal size."""
    rows, k, vocabulary = shape
    g = torch.Generator(device).manual_seed(rows)
    x = torch.randn(rows, k, device=device, generator=g).bfloat16()
    w = torch.randn(vocabulary, k, device=device, generator=g).mul_(k**-0.5).bfloat16()
    t = torch.randint(vocabulary, (rows,), device=device, generator=g)
    return Inputs(x.requires_grad_(), w.requires_grad_(), t)


Loss = Callable[[Inputs], Tensor]


def ours(**keywords: Any) -> Loss:
    import liger_aot

    op = liger_aot.load("fused_linear_cross_entropy")
    loss: Loss = lambda i: op(i.input, i.weight, i.target, **keywords)  # noqa: E731
    return loss


def liger(dtype: torch.dtype | None) -> Loss:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Function

    def loss(i: Inputs) -> Tensor:
        found: Tensor = Function.apply(
            i.input, i.weight, i.target, None, None, -100, 0.0, 0.0, "mean", None, False, dtype
        )[0]
        return found

    return loss


def eager(i: Inputs) -> Tensor:
    return F.cross_entropy(F.linear(i.input, i.weight).float(), i.target)


def compiled() -> Loss:
    torch._dynamo.reset()
    made: Loss = torch.compile(eager, dynamic=False)
    return made


PROVIDERS: dict[str, Callable[[], Loss]] = {
    "liger_aot": ours,
    "liger_aot, float32 dW": lambda: ours(weight_grad_dtype=torch.float32),
    "torch": lambda: eager,
    "torch_compile": compiled,
    "liger": lambda: liger(None),
    "liger, float32 dW": lambda: liger(torch.float32),
}


def step(loss: Loss, inputs: Inputs, provider: str) -> Callable[[], Tensor]:
    """Forward and backward. Our float32 gradient stays one, where this torch can say so."""
    keeps = provider.startswith("liger_aot, float32") and hasattr(inputs.weight, "grad_dtype")

    def run() -> Tensor:
        inputs.forget()
        inputs.weight.grad_dtype = torch.float32 if keeps else torch.bfloat16
        found = loss(inputs)
        found.backward()
        return found.detach()

    return run


def products(inputs: Inputs) -> Callable[[], None]:
    """The three alone, on this data: the gradient of the logits is that of the loss."""
    x, w = inputs.input.detach(), inputs.weight.detach()
    rows = x.shape[0]
    g, logits = torch.mm(x, w.t()), torch.empty(rows, w.shape[0], device=x.device, dtype=x.dtype)
    for first in range(0, rows, 512):
        some = g[first : first + 512]
        p = torch.softmax(some.float(), -1)
        p[torch.arange(len(p), device=p.device), inputs.target[first : first + 512]] -= 1
        some.copy_(p / rows)
    dx, dw = torch.empty_like(x), torch.empty_like(w)

    def run() -> None:
        torch.mm(x, w.t(), out=logits)
        torch.mm(g, w, out=dx)
        torch.mm(g.t(), x, out=dw)

    return run


@dataclass(frozen=True)
class Exact:
    loss: Tensor
    d_input: Tensor
    d_weight: Tensor


def exact(inputs: Inputs) -> Exact:
    """In fp64: the loss, and the first CHECKED rows of the gradients."""
    x, w, t = inputs.input.detach().double(), inputs.weight.detach().double(), inputs.target
    rows, loss, d_input = x.shape[0], x.new_zeros(()), None
    d_weight = x.new_zeros((CHECKED, x.shape[1]))
    for first in range(0, rows, CHECKED):
        some, targets = x[first : first + CHECKED], t[first : first + CHECKED]
        logits = some @ w.t()
        loss += F.cross_entropy(logits, targets, reduction="sum") / rows
        g = torch.softmax(logits, -1)
        g[torch.arange(len(g), device=g.device), targets] -= 1
        g /= rows
        d_input = g @ w if d_input is None else d_input
        d_weight += g[:, :CHECKED].t() @ some
    assert d_input is not None
    return Exact(loss, d_input, d_weight)


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
    shape: tuple[int, int, int], name: str, inputs: Inputs, wanted: Exact
) -> tuple[Callable[[], Tensor], Result] | Result:
    """A provider's step, checked, and what is known before it is timed; or how it failed: a peer that cannot do a
    point is a result, not the run's end."""
    try:
        run = step(PROVIDERS[name](), inputs, name)
        run()  # cuBLAS's workspace, compilation
        gib, loss = peak(run, inputs), run()
        assert inputs.input.grad is not None and inputs.weight.grad is not None
        errors = (
            relative_error(loss, wanted.loss),
            relative_error(inputs.input.grad[:CHECKED], wanted.d_input),
            relative_error(inputs.weight.grad[:CHECKED], wanted.d_weight),
        )
        if not max(errors) < LARGEST_ERROR:
            raise ArithmeticError(f"errors against fp64 {errors}")
    except Exception as error:
        return Result(shape, name, failed=f"{type(error).__name__}: {first_line(error)}")
    return run, Result(shape, name, None, None, None, None, gib, *errors)


def at(shape: tuple[int, int, int], names: Sequence[str], device: torch.device, rounds: int) -> list[Result]:
    inputs = drawn(shape, device)
    wanted = exact(inputs)
    made: list[Result] = []
    ready: dict[str, tuple[Callable[[], Tensor], Result]] = {}
    for name in names:
        found = prepared(shape, name, inputs, wanted)
        if isinstance(found, Result):
            made.append(found)
        else:
            ready[name] = found
    inputs.forget()
    torch.cuda.empty_cache()
    runs: dict[str, Callable[[], object]] = {PRODUCTS: products(inputs)}
    runs |= {name: run for name, (run, _) in ready.items()}
    calls = {name: [measure.Call(run)] for name, run in runs.items()}
    samples = measure.time_interleaved(calls, rounds=rounds, min_ms=1.0)
    timings = {name: measure.summarize(times) for name, times in samples.items()}
    base = timings[PRODUCTS]
    made.append(Result(shape, PRODUCTS, base.median_ms, base.p20_ms, base.p80_ms, 1.0))
    for name, (_, result) in ready.items():
        timing = timings[name]
        made.append(
            dataclasses.replace(
                result, median_ms=timing.median_ms, p20_ms=timing.p20_ms, p80_ms=timing.p80_ms,
                of_products=timing.median_ms / base.median_ms,
            )
        )  # fmt: skip
    return made


def line(r: Result) -> str:
    if r.failed:
        return f"  {r.provider:24s} failed: {r.failed}"
    text = f"  {r.provider:24s} {r.median_ms:8.2f} ms  {r.of_products:6.3f} of the products"
    if r.peak_gib is None:
        return text
    errors = f"loss {r.loss_error:.1e}, d input {r.input_error:.1e}, d weight {r.weight_error:.1e}"
    return f"{text}  {r.peak_gib:6.2f} GiB  errors: {errors}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.linear_losses", description=__doc__)
    parser.add_argument(
        "--out", type=Path, help="folder of the results (default: benchmarks/results/GPU/steps)"
    )
    parser.add_argument("--rounds", type=int, default=2, help="of all providers in turn, of 10 calls each")
    parser.add_argument(
        "--providers", default=";".join(PROVIDERS), help="semicolons between (default: %(default)s)"
    )
    parser.add_argument(
        "--shape", action="append", help="rows,k,vocabulary (may be repeated; default: all points)"
    )
    parser.add_argument("--commit", help="the commit measured, where the tree has no history")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("a GPU is needed, and torch sees none here")
    device = torch.device("cuda", 0)
    shapes: list[Any] = [tuple(map(int, s.split(","))) for s in options.shape or ()] or list(POINTS)
    command = shlex.join(["python", "-m", "benchmarks.linear_losses", *arguments])
    seen = environment.observe(device, command=command, commit=options.commit, absent={})
    folder = options.out or RESULTS / environment.folder_name(seen.gpu) / "steps"
    results: list[Result] = []
    for shape in shapes:
        print(" x ".join(map(str, shape)), flush=True)
        found = at(shape, options.providers.split(";"), device, options.rounds)
        print("\n".join(map(line, found)), flush=True)
        results += found
        content = {
            "environment": dataclasses.asdict(seen),
            "results": [dataclasses.asdict(r) for r in results],
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "fused_linear_cross_entropy_steps.json").write_text(json.dumps(content, indent=1) + "\n")
        torch.cuda.empty_cache()
    return int(any(r.failed and r.provider.startswith("liger_aot") for r in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
