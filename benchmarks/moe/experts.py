"""Mixture of experts on this machine's GPU: TFLOP/s of ours beside Liger's and torch's grouped matrix product.

    python -m benchmarks.moe.experts
    python -m benchmarks.moe.experts --models qwen3 --tokens 1024,8192

bf16. A forward is 6 pairs hidden inner FLOPs, its backward twice as many; pairs are tokens times top k. ``products``
are the matrix products alone, by torch's grouped product of rows that lie sorted: no routing, gathering, activation or
sum over experts. ``torch`` is what Transformers' ``grouped_mm`` does. Indices are uniform. Providers take turns,
results are medians. Every result is compared with the fp64 sum over experts of some tokens before it is timed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import measure
from benchmarks.providers import first_line
from benchmarks.steps import Command
from benchmarks.workload import relative_error

PRODUCTS = "products"
CHECKED = 64  # tokens
LARGEST_ERROR = 0.02  # three roundings to bf16 are 0.005; what is wrong is off by far more


class Model(NamedTuple):
    hidden: int
    inner: int
    experts: int
    top_k: int


MODELS = {
    "mixtral": Model(4096, 14336, 8, 2),
    "qwen3": Model(2048, 768, 128, 8),
    "gpt-oss": Model(2880, 2880, 32, 4),  # its sizes; the activation is SwiGLU
}
TOKENS = (1024, 8192, 32768)
Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Inputs:
    x: Tensor
    gate_up: Tensor
    down: Tensor
    indices: Tensor
    weights: Tensor
    dy: Tensor

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        return self.x, self.gate_up, self.down, self.indices, self.weights

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self.x, self.gate_up, self.down, self.weights


@dataclass(frozen=True)
class Result:
    """One provider at a size, bf16."""

    model: str
    tokens: int
    direction: str
    provider: str
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    tflops: float | None = None
    error: float | None = None
    failed: str | None = None


def drawn(model: Model, tokens: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    g = torch.Generator(device).manual_seed(tokens)
    hidden, inner, experts, top_k = model

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        made = torch.empty(shape, device=device, dtype=dtype)
        return made.normal_(generator=g).mul_(scale)

    scores = torch.rand(tokens, experts, device=device, generator=g)
    weights, indices = scores.topk(top_k, -1)
    return Inputs(
        normal(tokens, hidden).requires_grad_(),
        normal(experts, 2 * inner, hidden, scale=hidden**-0.5).requires_grad_(),
        normal(experts, hidden, inner, scale=inner**-0.5).requires_grad_(),
        indices,
        weights.softmax(-1).to(dtype).requires_grad_(),
        normal(tokens, hidden),
    )


def flops(model: Model, tokens: int, direction: str) -> float:
    forward = 6.0 * tokens * model.top_k * model.hidden * model.inner
    return forward if direction == "forward" else 2 * forward


# ---- Providers ----


def ours() -> Experts:
    import liger_aot

    op: Experts = liger_aot.load("fused_moe")
    return op


def liger() -> Experts:
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    def run(x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        y: Tensor = LigerFusedMoEFunction.apply(x, gate_up, down, indices.int(), weights)
        return y

    return run


def sorted_pairs(indices: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """(the pairs in the order of their experts, where each expert's end)"""
    flat = indices.flatten()
    return flat.argsort(), torch.bincount(flat, minlength=experts).cumsum(0).int()


def grouped(x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    order, ends = sorted_pairs(indices, gate_up.shape[0])
    gate, up = grouped_product(x[order // indices.shape[1]], gate_up.mT, ends).chunk(2, -1)
    rows = grouped_product(F.silu(gate) * up, down.mT, ends) * weights.flatten()[order].unsqueeze(-1)
    back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
    return rows[back].view(*indices.shape, -1).sum(1).to(x.dtype)


def grouped_product(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    product: Any = torch._grouped_mm
    found: Tensor = product(a, b, offs=ends)
    return found


PROVIDERS: Mapping[str, Callable[[], Experts]] = {
    "liger_aot": ours,
    "torch": lambda: grouped,
    "liger": liger,
}


def products(inputs: Inputs, direction: str) -> Callable[[], object]:
    """The matrix products alone."""
    x, gate_up, down, indices, _ = (t.detach() for t in inputs.arguments)
    order, ends = sorted_pairs(indices, gate_up.shape[0])
    tokens = order // indices.shape[1]
    rows, grads = x[tokens], inputs.dy[tokens]
    act, both = (
        torch.randn(len(order), n, device=x.device, dtype=x.dtype) for n in (down.shape[2], gate_up.shape[1])
    )

    def forward() -> None:
        grouped_product(rows, gate_up.mT, ends)
        grouped_product(act, down.mT, ends)

    def backward() -> None:
        grouped_product(grads, down, ends)
        grouped_product(both, gate_up, ends)
        grouped_product(grads.t(), act, ends)
        grouped_product(both.t(), rows, ends)

    return forward if direction == "forward" else backward


# ---- What is measured ----


def exact(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """(y, dx) of the first tokens in fp64."""
    x = inputs.x[:CHECKED].detach().double().requires_grad_()
    y = torch.zeros_like(x)
    for expert, (gate_up, down) in enumerate(zip(inputs.gate_up, inputs.down, strict=True)):
        share = (inputs.weights[:CHECKED] * (inputs.indices[:CHECKED] == expert)).sum(-1, keepdim=True)
        gate, up = (x @ gate_up.detach().double().t()).chunk(2, -1)
        y = y + share.detach().double() * ((F.silu(gate) * up) @ down.detach().double().t())
    (dx,) = torch.autograd.grad(y, x, inputs.dy[:CHECKED].double())
    return y.detach(), dx


def prepared(
    experts: Experts, inputs: Inputs, direction: str, wanted: tuple[Tensor, Tensor]
) -> tuple[Callable[[], object], float]:
    """A provider's call, and its error."""
    if direction == "forward":

        def forward() -> Tensor:
            with torch.no_grad():
                return experts(*inputs.arguments)

        return forward, relative_error(forward()[:CHECKED], wanted[0])
    y = experts(*inputs.arguments)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, inputs.leaves, inputs.dy, retain_graph=True)

    return backward, relative_error(backward()[0][:CHECKED], wanted[1])


def at(
    name: str, tokens: int, direction: str, names: Sequence[str], device: torch.device, rounds: int
) -> list[Result]:
    inputs = drawn(MODELS[name], tokens, device)
    wanted = exact(inputs)
    made: list[Result] = []
    errors: dict[str, float | None] = {}
    runs: dict[str, Callable[[], object]] = {}
    for provider in (*names, PRODUCTS):
        try:
            if provider == PRODUCTS:
                runs[provider], errors[provider] = products(inputs, direction), None
                runs[provider]()
                continue
            runs[provider], error = prepared(PROVIDERS[provider](), inputs, direction, wanted)
            if not error < LARGEST_ERROR:
                raise ArithmeticError(f"error against fp64 {error}")
            errors[provider] = error
        except Exception as error:
            runs.pop(provider, None)
            failed = f"{type(error).__name__}: {first_line(error)}"
            made.append(Result(name, tokens, direction, provider, failed=failed))
    calls = {provider: [measure.Call(run)] for provider, run in runs.items()}
    for provider, samples in measure.time_interleaved(calls, rounds=rounds, min_ms=1.0).items():
        t = measure.summarize(samples)
        rate = flops(MODELS[name], tokens, direction) / t.median_ms / 1e9
        made.append(
            Result(name, tokens, direction, provider, t.median_ms, t.p20_ms, t.p80_ms, rate, errors[provider])
        )
    return made


def line(r: Result) -> str:
    if r.failed:
        return f"  {r.provider:12s} failed: {r.failed}"
    text = f"  {r.provider:12s} {r.median_ms:8.3f} ms  {r.tflops:5.0f} TFLOP/s"
    return text if r.error is None else f"{text}  error {r.error:.1e}"


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and write ``experts.json``. 1 where one of ours failed."""
    command = Command("benchmarks.moe.experts", __doc__, PROVIDERS)
    command.several("models", list(MODELS))
    command.several("tokens", TOKENS)
    command.parser.add_argument(
        "--rounds", type=int, default=2, help="of all providers in turn, of 10 calls each"
    )
    options = command.read(arguments)
    return command.measure(
        "experts",
        list(product(options.models, options.tokens, ("forward", "backward"))),
        lambda point: at(*point, options.providers, command.device, options.rounds),
        lambda point, found: "\n".join(("{}, {} tokens, {}".format(*point), *map(line, found))),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
