"""Fused linear Jensen-Shannon divergence, forward and backward together: `python -m benchmarks.linear_jsd`.

What bounds it are four matrix products (the student's and the teacher's logits, the student's input's and weight's
gradients): each provider's time is divided by that of the products alone, whole, timed in the same rounds. The peak is
the memory that a step takes beside its arguments, the gradients among it. Errors are norms of differences to fp64 over
norms, of the loss and of some rows of the input's gradient.
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

import torch
import torch.nn.functional as F
from torch import Tensor

from . import environment, measure
from .providers import first_line
from .session import RESULTS
from .workload import relative_error

PRODUCTS = "products"
POINTS = ((4096, 4096, 128256), (8192, 2048, 32000))
CHECKED = 128  # rows of the input's gradient
LARGEST_ERROR = 0.05  # logits rounded to bf16 move it by half of that; what is wrong is off by far more
GIB = 1 << 30


@dataclass(frozen=True)
class Result:
    """One provider at rows x k x vocabulary, bf16; the teacher's layer is as wide as the student's."""

    shape: tuple[int, int, int]
    provider: str
    median_ms: float | None = None
    of_products: float | None = None
    peak_gib: float | None = None
    loss_error: float | None = None
    input_error: float | None = None
    failed: str | None = None


@dataclass(frozen=True)
class Inputs:
    """Of the student and the teacher, who agree in part."""

    x: Tensor
    weight: Tensor
    y: Tensor
    teacher: Tensor

    def forget(self) -> None:
        self.x.grad = self.weight.grad = None


Loss = Callable[[Inputs], Tensor]


def drawn(shape: tuple[int, int, int], device: torch.device) -> Inputs:
    rows, k, vocabulary = shape
    g = torch.Generator(device).manual_seed(rows)
    x, other = (torch.randn(rows, k, device=device, generator=g) for _ in range(2))
    w = torch.randn(vocabulary, k, device=device, generator=g).mul_(2 * k**-0.5)
    leaves = x.bfloat16().requires_grad_(), w.bfloat16().requires_grad_()
    return Inputs(*leaves, (x + other / 2).bfloat16(), w.bfloat16())


def jsd(student: Tensor, teacher: Tensor) -> Tensor:
    x, y = student.log_softmax(-1), teacher.log_softmax(-1)
    mixed = torch.logaddexp(x, y) - 0.6931471805599453
    kl = F.kl_div
    halves = (kl(mixed, t, reduction="batchmean", log_target=True) for t in (x, y))
    return torch.stack(tuple(halves)).mean()


def eager(i: Inputs) -> Tensor:
    return jsd(F.linear(i.x, i.weight).float(), F.linear(i.y, i.teacher).float())


def compiled() -> Loss:
    torch._dynamo.reset()
    made: Loss = torch.compile(eager, dynamic=False)
    return made


def ours() -> Loss:
    import liger_aot

    op = liger_aot.load("fused_linear_jsd")
    return lambda i: op(i.x, i.weight, i.y, i.teacher)


def liger() -> Loss:
    from liger_kernel.ops.fused_linear_jsd import LigerFusedLinearJSDFunction as Function

    def loss(i: Inputs) -> Tensor:
        found: Tensor = Function.apply(i.x, i.weight, i.y, i.teacher, None, 0.5, -100, 1.0, None, None, None)
        return found

    return loss


PROVIDERS: dict[str, Callable[[], Loss]] = {
    "liger_aot": ours,
    "torch": lambda: eager,
    "torch_compile": compiled,
    "liger": liger,
}


def step(loss: Loss, inputs: Inputs) -> Callable[[], Tensor]:
    def run() -> Tensor:
        inputs.forget()
        found = loss(inputs)
        found.backward()
        return found.detach()

    return run


def products(i: Inputs) -> Callable[[], None]:
    x, w = i.x.detach(), i.weight.detach()
    student, teacher = torch.mm(x, w.t()), torch.mm(i.y, i.teacher.t())
    g, dx, dw = torch.softmax(student, -1), torch.empty_like(x), torch.empty_like(w)

    def run() -> None:
        torch.mm(x, w.t(), out=student)
        torch.mm(i.y, i.teacher.t(), out=teacher)
        torch.mm(g, w, out=dx)
        torch.mm(g.t(), x, out=dw)

    return run


def exact(i: Inputs) -> tuple[Tensor, Tensor]:
    """In fp64: the loss, and the first CHECKED rows of the input's gradient."""
    w, v = i.weight.detach().double(), i.teacher.double()
    rows, total, gradient = len(i.x), w.new_zeros(()), None
    for first in range(0, rows, CHECKED):
        x = i.x[first : first + CHECKED].detach().double().requires_grad_(first == 0)
        loss = jsd(x @ w.t(), i.y[first : first + CHECKED].double() @ v.t()) * (len(x) / rows)
        total += loss.detach()
        if first == 0:
            (gradient,) = torch.autograd.grad(loss, x)
    assert gradient is not None
    return total, gradient


def peak(run: Callable[[], Tensor], inputs: Inputs) -> float:
    inputs.forget()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / GIB


def prepared(
    shape: tuple[int, int, int], name: str, inputs: Inputs, wanted: tuple[Tensor, Tensor]
) -> tuple[Callable[[], Tensor], Result] | Result:
    """A provider's step, checked, and what is known before it is timed; or how it failed."""
    try:
        run = step(PROVIDERS[name](), inputs)
        found = run()
        assert inputs.x.grad is not None
        errors = relative_error(found, wanted[0]), relative_error(inputs.x.grad[:CHECKED], wanted[1])
        if not max(errors) < LARGEST_ERROR:
            raise ArithmeticError(f"errors against fp64 {errors}")
        return run, Result(shape, name, None, None, peak(run, inputs), *errors)
    except Exception as error:
        return Result(shape, name, failed=f"{type(error).__name__}: {first_line(error)}")


def at(shape: tuple[int, int, int], names: Sequence[str], device: torch.device) -> list[Result]:
    inputs = drawn(shape, device)
    wanted = exact(inputs)
    made: list[Result] = []
    known: dict[str, Result] = {}
    runs: dict[str, Callable[[], object]] = {PRODUCTS: products(inputs)}
    for name in names:
        found = prepared(shape, name, inputs, wanted)
        if isinstance(found, Result):
            made.append(found)
        else:
            runs[name], known[name] = found
    inputs.forget()
    torch.cuda.empty_cache()
    calls = {name: [measure.Call(run)] for name, run in runs.items()}
    samples = measure.time_interleaved(calls, rounds=2, min_ms=1.0)
    times = {name: measure.summarize(t).median_ms for name, t in samples.items()}
    for name, ms in times.items():
        of = ms / times[PRODUCTS]
        made.append(dataclasses.replace(known.get(name, Result(shape, name)), median_ms=ms, of_products=of))
    return made


def line(r: Result) -> str:
    if r.failed:
        return f"  {r.provider:14s} failed: {r.failed}"
    text = f"  {r.provider:14s} {r.median_ms:8.2f} ms  {r.of_products:6.3f} of the products"
    if r.peak_gib is None:
        return text
    return f"{text}  {r.peak_gib:6.2f} GiB  errors: loss {r.loss_error:.1e}, d input {r.input_error:.1e}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.linear_jsd", description=__doc__)
    parser.add_argument(
        "--out", type=Path, help="folder of the results (default: benchmarks/results/GPU/steps)"
    )
    parser.add_argument(
        "--providers", default=",".join(PROVIDERS), help="commas between (default: %(default)s)"
    )
    parser.add_argument("--commit", help="the commit measured, where the tree has no history")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("a GPU is needed, and torch sees none here")
    device = torch.device("cuda", 0)
    command = shlex.join(["python", "-m", "benchmarks.linear_jsd", *arguments])
    seen = environment.observe(device, command=command, commit=options.commit, absent={})
    folder = options.out or RESULTS / environment.folder_name(seen.gpu) / "steps"
    results: list[Result] = []
    for shape in POINTS:
        print(" x ".join(map(str, shape)), flush=True)
        found = at(shape, options.providers.split(","), device)
        print("\n".join(map(line, found)), flush=True)
        results += found
        content = {
            "environment": dataclasses.asdict(seen),
            "results": [dataclasses.asdict(r) for r in results],
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "fused_linear_jsd_steps.json").write_text(json.dumps(content, indent=1) + "\n")
        torch.cuda.empty_cache()
    return int(any(r.failed and r.provider == "liger_aot" for r in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
