"""A call of another project's function, and how far its results are from plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Call:
    """A differentiable function of a project's and the same in plain torch.

    Attributes:
        arguments: makes them; of those that require gradients the gradients are compared.
        plain: is given the arguments in float64.
        slack: the most that a result may differ from plain torch, root mean square over that of the result's values.
        differentiated: gradients are those of so many results, the first; None: of all that have one.
    """

    name: str
    arguments: Callable[[], tuple[Any, ...]]
    run: Callable[..., Any]
    plain: Callable[..., Any]
    slack: float
    differentiated: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of a call: how far its worst result is from plain torch, or why it did not run."""

    far: float = 0.0
    what: str = ""
    failed: str = ""


def run(call: Call) -> None:
    """Forward and backward, for a recorder."""
    torch.manual_seed(0)
    arguments = call.arguments()
    list(_results(call, call.run(*arguments), arguments))


def outcome(call: Call) -> Outcome:
    """Run a call forward and backward, and compare."""
    torch.manual_seed(0)
    arguments = call.arguments()
    wide = tuple(map(_wide, arguments))  # before the call, which may overwrite them
    try:
        made = list(_results(call, call.run(*arguments), arguments))
    except Exception as error:
        return Outcome(failed=f"{type(error).__name__}: {error}"[:300])
    expected = list(_results(call, call.plain(*wide), wide))
    if [name for name, _ in made] != [name for name, _ in expected]:
        return Outcome(failed=f"results are {[n for n, _ in made]}, expected {[n for n, _ in expected]}")
    far = [(_far(a, b), name) for (name, a), (_, b) in zip(made, expected, strict=True)]
    worst, what = max(far)
    return Outcome(worst, what)


def _wide(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    wider = value.detach().clone()
    if value.is_floating_point():
        wider = wider.double()
    elif value.is_complex():
        wider = wider.to(torch.complex128)
    return wider.requires_grad_(value.requires_grad)


def _results(call: Call, value: Any, arguments: tuple[Any, ...]) -> Iterator[tuple[str, Tensor]]:
    outputs = [t for t in (value if isinstance(value, tuple) else (value,)) if isinstance(t, Tensor)]
    inputs = [(i, t) for i, t in enumerate(arguments) if isinstance(t, Tensor) and t.requires_grad]
    yield from ((f"result {i}", t.detach()) for i, t in enumerate(outputs))
    made = [t for t in outputs[: call.differentiated] if t.requires_grad]
    if not made or not inputs:
        return
    generator = torch.Generator().manual_seed(5)
    grads = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in made]
    found = torch.autograd.grad(made, [t for _, t in inputs], grads, allow_unused=True)
    for (i, t), gradient in zip(inputs, found, strict=True):
        yield f"gradient of argument {i}", torch.zeros_like(t) if gradient is None else gradient


def _far(made: Tensor, expected: Tensor) -> float:
    """NaN, or another shape, is infinitely far. Values below 2^-24 count as 0: arguments are of the order of 1."""
    if made.shape != expected.shape:
        return float("inf")
    a, b = made.double(), expected.double()
    size = float(b.square().mean().sqrt()) if b.numel() else 0.0
    off = float((a - b).square().mean().sqrt()) if b.numel() else 0.0
    found = off / max(size, 2.0**-24)
    return found if found == found else float("inf")
