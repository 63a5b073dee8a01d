"""Losses of a linear layer's results, forward and backward together, beside the matrix products that bound them:

    python -m benchmarks.losses.linear cross_entropy
    python -m benchmarks.losses.linear jsd
    python -m benchmarks.losses.linear log_probs

The products of cross entropy are three (logits, the gradients of input and weight), those of the Jensen-Shannon
divergence four (the logits of student and teacher, the gradients of the student's input and weight; the teacher's layer
is as wide). Log-probabilities and entropies have a gradient a token, which no forward knows: their four are the logits
twice, and the gradients of input and weight. Each provider's time is divided by that of the products alone, whole, of
the same data, timed in the same rounds. The peak is the memory that a step takes beside its arguments, the gradients
among it. Errors are norms of differences to fp64 over norms, of the loss and of some rows of the gradients.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import measure
from benchmarks.providers import first_line
from benchmarks.steps import Command
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
        record: the name of its file, where the op has several losses.
    """

    op: str
    points: Sequence[Shape]
    providers: Mapping[str, Callable[[], Loss]]
    drawn: Callable[[Shape, torch.device], Inputs]
    products: Callable[[Inputs], Callable[[], None]]
    exact: Callable[[Inputs], Mapping[str, Tensor]]
    largest_error: float
    record: str = ""


def step(loss: Loss, inputs: Inputs, wide_gradient: bool = False) -> Callable[[], Tensor]:
    """Forward and backward. A float32 gradient of a bf16 weight stays float32 where this torch supports it
    (grad_dtype)."""
    wide_gradient = wide_gradient and hasattr(inputs.weight, "grad_dtype")

    def run() -> Tensor:
        inputs.forget()
        inputs.weight.grad_dtype = torch.float32 if wide_gradient else inputs.weight.dtype
        found = loss(inputs)
        found.backward()
        return found.detach()

    return run


def errors(loss: Tensor, inputs: Inputs, exact: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative errors after a step, by name as in ``exact``."""
    assert inputs.input.grad is not None and inputs.weight.grad is not None
    got = {"loss": loss, "input": inputs.input.grad, "weight": inputs.weight.grad}
    return {
        name: relative_error(got[name][: len(t)] if t.dim() else got[name], t) for name, t in exact.items()
    }


def peak(run: Callable[[], Tensor], inputs: Inputs) -> float:
    """GiB that a step allocates, at its peak."""
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
    """A provider's step, checked, with its peak memory and errors; or why it failed. A peer that fails at a point is a
    result and does not end the run."""
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


# ---- Cross entropy ----

CHECKED = 256  # rows of each gradient
CROSS_ENTROPY_POINTS = (
    (1024, 4096, 128256),
    (8192, 4096, 128256),
    (16384, 4096, 128256),
    (8192, 2048, 50257),
    (8192, 4096, 32000),
)


def drawn_targets(shape: Shape, device: torch.device) -> Inputs:
    """Logits of about standard normal size, and a target a row."""
    rows, k, vocabulary = shape
    g = torch.Generator(device).manual_seed(rows)
    x = torch.randn(rows, k, device=device, generator=g).bfloat16()
    w = torch.randn(vocabulary, k, device=device, generator=g).mul_(k**-0.5).bfloat16()
    target = torch.randint(vocabulary, (rows,), device=device, generator=g)
    return Inputs(x.requires_grad_(), w.requires_grad_(), (target,))


def ours(name: str, **keywords: Any) -> Loss:
    import liger_aot

    op = liger_aot.load(name)
    loss: Loss = lambda i: op(i.input, i.weight, *i.others, **keywords)  # noqa: E731
    return loss


def liger_cross_entropy(dtype: torch.dtype | None) -> Loss:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Function

    def loss(i: Inputs) -> Tensor:
        settings = (None, None, -100, 0.0, 0.0, "mean", None, False, dtype)
        found: Tensor = Function.apply(i.input, i.weight, *i.others, *settings)[0]
        return found

    return loss


def cross_entropy(i: Inputs) -> Tensor:
    return F.cross_entropy(F.linear(i.input, i.weight).float(), *i.others)


def compiled(loss: Loss) -> Loss:
    torch._dynamo.reset()
    made: Loss = torch.compile(loss, dynamic=False)
    return made


def three_products(inputs: Inputs) -> Callable[[], None]:
    """The three alone, on this data, with the loss's own gradient of the logits."""
    x, w, (target,) = inputs.input.detach(), inputs.weight.detach(), inputs.others
    rows = x.shape[0]
    g, logits = torch.mm(x, w.t()), torch.empty(rows, w.shape[0], device=x.device, dtype=x.dtype)
    for first in range(0, rows, 512):
        some = g[first : first + 512]
        p = torch.softmax(some.float(), -1)
        p[torch.arange(len(p), device=p.device), target[first : first + 512]] -= 1
        some.copy_(p / rows)
    dx, dw = torch.empty_like(x), torch.empty_like(w)

    def run() -> None:
        torch.mm(x, w.t(), out=logits)
        torch.mm(g, w, out=dx)
        torch.mm(g.t(), x, out=dw)

    return run


def exact_cross_entropy(inputs: Inputs) -> dict[str, Tensor]:
    x, w, (target,) = inputs.input.detach().double(), inputs.weight.detach().double(), inputs.others
    rows, loss, d_input = x.shape[0], x.new_zeros(()), None
    d_weight = x.new_zeros((min(CHECKED, len(w)), x.shape[1]))
    for first in range(0, rows, CHECKED):
        some, targets = x[first : first + CHECKED], target[first : first + CHECKED]
        logits = some @ w.t()
        loss += F.cross_entropy(logits, targets, reduction="sum") / rows
        g = torch.softmax(logits, -1)
        g[torch.arange(len(g), device=g.device), targets] -= 1
        g /= rows
        d_input = g @ w if d_input is None else d_input
        d_weight += g[:, :CHECKED].t() @ some
    assert d_input is not None
    return {"loss": loss, "input": d_input, "weight": d_weight}


CROSS_ENTROPY = LinearLoss(
    op="fused_linear_cross_entropy",
    points=CROSS_ENTROPY_POINTS,
    providers={
        "liger_aot": lambda: ours("fused_linear_cross_entropy"),
        "liger_aot, float32 dW": lambda: ours("fused_linear_cross_entropy", weight_grad_dtype=torch.float32),
        "torch": lambda: cross_entropy,
        "torch_compile": lambda: compiled(cross_entropy),
        "liger": lambda: liger_cross_entropy(None),
        "liger, float32 dW": lambda: liger_cross_entropy(torch.float32),
    },
    drawn=drawn_targets,
    products=three_products,
    exact=exact_cross_entropy,
    largest_error=0.02,
)


# ---- Jensen-Shannon divergence ----

JSD_POINTS = ((4096, 4096, 128256), (8192, 2048, 32000))
CHECKED_OF_INPUT = 128  # rows of the input's gradient


def drawn_teacher(shape: Shape, device: torch.device) -> Inputs:
    """A student and a teacher who agree in part; the teacher's input and weight are the others."""
    rows, k, vocabulary = shape
    g = torch.Generator(device).manual_seed(rows)
    x, other = (torch.randn(rows, k, device=device, generator=g) for _ in range(2))
    w = torch.randn(vocabulary, k, device=device, generator=g).mul_(2 * k**-0.5)
    leaves = x.bfloat16().requires_grad_(), w.bfloat16().requires_grad_()
    return Inputs(*leaves, ((x + other / 2).bfloat16(), w.bfloat16()))


def jsd(student: Tensor, teacher: Tensor) -> Tensor:
    x, y = student.log_softmax(-1), teacher.log_softmax(-1)
    mixed = torch.logaddexp(x, y) - 0.6931471805599453
    kl = F.kl_div
    halves = (kl(mixed, t, reduction="batchmean", log_target=True) for t in (x, y))
    return torch.stack(tuple(halves)).mean()


def jsd_of_layers(i: Inputs) -> Tensor:
    y, teacher = i.others
    return jsd(F.linear(i.input, i.weight).float(), F.linear(y, teacher).float())


def liger_jsd() -> Loss:
    from liger_kernel.ops.fused_linear_jsd import LigerFusedLinearJSDFunction as Function

    def loss(i: Inputs) -> Tensor:
        settings = (None, 0.5, -100, 1.0, None, None, None)
        found: Tensor = Function.apply(i.input, i.weight, *i.others, *settings)
        return found

    return loss


def four_products(inputs: Inputs) -> Callable[[], None]:
    x, w, (y, teacher) = inputs.input.detach(), inputs.weight.detach(), inputs.others
    student, of_teacher = torch.mm(x, w.t()), torch.mm(y, teacher.t())
    g, dx, dw = torch.softmax(student, -1), torch.empty_like(x), torch.empty_like(w)

    def run() -> None:
        torch.mm(x, w.t(), out=student)
        torch.mm(y, teacher.t(), out=of_teacher)
        torch.mm(g, w, out=dx)
        torch.mm(g.t(), x, out=dw)

    return run


def exact_jsd(inputs: Inputs) -> dict[str, Tensor]:
    y, teacher = inputs.others
    w, v = inputs.weight.detach().double(), teacher.double()
    rows, total, gradient = len(y), w.new_zeros(()), None
    for first in range(0, rows, CHECKED_OF_INPUT):
        x = inputs.input[first : first + CHECKED_OF_INPUT].detach().double().requires_grad_(first == 0)
        loss = jsd(x @ w.t(), y[first : first + CHECKED_OF_INPUT].double() @ v.t()) * (len(x) / rows)
        total += loss.detach()
        if first == 0:
            (gradient,) = torch.autograd.grad(loss, x)
    assert gradient is not None
    return {"loss": total, "input": gradient}


JSD = LinearLoss(
    op="fused_linear_jsd",
    points=JSD_POINTS,
    providers={
        "liger_aot": lambda: ours("fused_linear_jsd"),
        "torch": lambda: jsd_of_layers,
        "torch_compile": lambda: compiled(jsd_of_layers),
        "liger": liger_jsd,
    },
    drawn=drawn_teacher,
    products=four_products,
    exact=exact_jsd,
    largest_error=0.05,  # logits rounded to bf16 move it by half of that; what is wrong is off by far more
)


# ---- Log-probabilities and entropies of tokens ----

TEMPERATURE, OF_ENTROPY = 0.7, 0.01
LOG_PROBS_POINTS = ((1024, 4096, 131072), (8192, 4096, 131072), (16384, 4096, 131072), (8192, 2048, 50257))


def policy_loss(log_probs: Tensor, entropy: Tensor) -> Tensor:
    """What a policy gradient's step is made of."""
    return -(log_probs.float().mean() + OF_ENTROPY * entropy.float().mean())


def our_log_probs() -> Loss:
    import liger_aot

    op = liger_aot.load("fused_linear_log_probs")
    options: dict[str, Any] = {"temperature": TEMPERATURE, "return_entropy": True}
    return lambda i: policy_loss(*op(i.input, i.weight, *i.others, **options))


def log_probs_of_layer(i: Inputs) -> Tensor:
    log_p = (F.linear(i.input, i.weight).float() / TEMPERATURE).log_softmax(-1)
    return policy_loss(log_p.gather(-1, i.others[0][:, None]), -(log_p.exp() * log_p).sum(-1))


def liger_log_probs() -> Loss:
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as Function

    def loss(i: Inputs) -> Tensor:
        nll, entropy = Function.apply(i.input, i.weight, *i.others, TEMPERATURE, -100, 1, True)
        return policy_loss(-nll, entropy)

    return loss


def four_of_one_layer(inputs: Inputs) -> Callable[[], None]:
    x, w = inputs.input.detach(), inputs.weight.detach()
    logits = torch.mm(x, w.t())
    g, dx, dw = torch.softmax(logits, -1), torch.empty_like(x), torch.empty_like(w)

    def run() -> None:
        torch.mm(x, w.t(), out=logits)
        torch.mm(x, w.t(), out=logits)
        torch.mm(g, w, out=dx)
        torch.mm(g.t(), x, out=dw)

    return run


def exact_log_probs(inputs: Inputs) -> dict[str, Tensor]:
    (target,), w = inputs.others, inputs.weight.detach().double()
    rows, total, gradient = len(target), w.new_zeros(()), None
    for first in range(0, rows, CHECKED_OF_INPUT):
        some = target[first : first + CHECKED_OF_INPUT]
        x = inputs.input[first : first + CHECKED_OF_INPUT].detach().double().requires_grad_(first == 0)
        log_p = (x @ w.t() / TEMPERATURE).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        found = -(log_p.gather(-1, some[:, None])[:, 0] + OF_ENTROPY * entropy).sum() / rows
        total += found.detach()
        if first == 0:
            (gradient,) = torch.autograd.grad(found, x)
    assert gradient is not None
    return {"loss": total, "input": gradient}


LOG_PROBS = LinearLoss(
    op="fused_linear_log_probs",
    points=LOG_PROBS_POINTS,
    providers={
        "liger_aot": our_log_probs,
        "torch": lambda: log_probs_of_layer,
        "torch_compile": lambda: compiled(log_probs_of_layer),
        "liger": liger_log_probs,
    },
    drawn=drawn_targets,
    products=four_of_one_layer,
    exact=exact_log_probs,
    largest_error=0.02,
)


def measured(
    module: str, text: str | None, losses: Mapping[str, LinearLoss], arguments: Sequence[str]
) -> int:
    """Measure, print, and write ``<op>_steps.json``, or by another ``record`` than the op. 1 where one of ours failed.

    Args:
        module: whose command this is; ``text`` is its help.
        losses: by the names that the command takes.
    """
    of = losses.get(next(iter(arguments), ""), next(iter(losses.values())))
    command = Command(module, text, of.providers, ";")
    add = command.parser.add_argument
    add("loss", choices=tuple(losses))
    add("--rounds", type=int, default=2, help="of all providers in turn, of 10 calls each")
    add("--shape", action="append", help="rows,k,vocabulary (may be repeated; default: all points)")
    options = command.read(arguments)
    asked = [tuple(map(int, shape.split(","))) for shape in options.shape or ()]
    shapes = [(rows, k, vocabulary) for rows, k, vocabulary in asked] or of.points
    file = command.file(f"{of.record or of.op}_steps")
    results: list[Result] = []
    for shape in shapes:
        print(" x ".join(map(str, shape)), flush=True)
        found = at(of, shape, options.providers, command.device, options.rounds)
        print("\n".join(map(line, found)), flush=True)
        results += found
        file.keep(results=results)
        torch.cuda.empty_cache()
    return int(any(r.failed and r.provider.startswith("liger_aot") for r in results))


if __name__ == "__main__":
    LOSSES = {"cross_entropy": CROSS_ENTROPY, "jsd": JSD, "log_probs": LOG_PROBS}
    sys.exit(measured("benchmarks.losses.linear", __doc__, LOSSES, sys.argv[1:]))
