"""Kernels that functions make when they are called, as others write them: no import makes one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.jit import constexpr_function

BLOCK = 256
OFFSET = tl.constexpr(1.0)


def _grid(n: int) -> tuple[int]:
    return (triton.cdiv(n, BLOCK),)


class Scale:
    """A method that makes a kernel, once an object: over a number, and a module that it imports itself."""

    def __init__(self, by: float) -> None:
        self.by, self.kernel = by, None

    def __call__(self, x: torch.Tensor, out: torch.Tensor, n: int) -> None:
        if self.kernel is None:
            self.kernel = self._made()
        self.kernel[_grid(n)](x, out, n, BLOCK)

    def _made(self) -> Any:
        import triton.language as language

        BY = language.constexpr(self.by)

        @triton.jit(do_not_specialize=["n"])
        def scaled(X, OUT, n, SIZE: language.constexpr):  # type: ignore[no-untyped-def]
            at = language.program_id(0) * SIZE + language.arange(0, SIZE)
            x = language.load(X + at, mask=at < n)
            language.store(OUT + at, x * BY + OFFSET, mask=at < n)

        return scaled


def rounded(x: torch.Tensor, out: torch.Tensor, n: int, to: tl.dtype) -> None:
    """Over a dtype, of which Triton's hash says nothing; the kernel is made anew at each call."""

    @triton.jit
    def cast(X, OUT, n, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        x = tl.load(X + at, mask=at < n)
        tl.store(OUT + at, x.to(to).to(tl.float32), mask=at < n)

    cast[_grid(n)](x, out, n, SIZE=BLOCK)


def reduced(x: torch.Tensor, out: torch.Tensor, n: int, power: int, operator: Any) -> None:
    """Over functions: one of the language, one that is made here as well and has a variable of its own, and one that
    runs while the kernel is compiled."""
    POWER = tl.constexpr(power)
    START = tl.constexpr(-1e30)

    @constexpr_function
    def times(count):  # type: ignore[no-untyped-def]
        return count * power

    @triton.jit
    def raised(x, times_more: tl.constexpr = 1):  # type: ignore[no-untyped-def]
        y = x
        for _ in tl.static_range(POWER - times_more):
            y *= x
        return y

    @triton.heuristics({"SIZE": lambda arguments: triton.next_power_of_2(arguments["n"])})
    @triton.jit
    def row(X, OUT, n, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, SIZE)
        x = operator(tl.load(X + at, mask=at < n, other=START), 0.0)
        tl.store(OUT + at, raised(x) + times(2), mask=at < n)

    row[(1,)](x, out, n)


def with_an_object(x: torch.Tensor, out: torch.Tensor, n: int, size: int) -> None:
    """Over an object, which can't be written down."""
    options = SimpleNamespace(by=tl.constexpr(size))

    @triton.jit
    def multiplied(X, OUT, n, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        tl.store(OUT + at, tl.load(X + at, mask=at < n) * options.by, mask=at < n)

    multiplied[_grid(n)](x, out, n, SIZE=BLOCK)


def launch_all(n: int = 1000, device: str = "cuda", objects: bool = True) -> dict[str, torch.Tensor]:
    """Each with two values; what they wrote, by name."""
    made: dict[str, torch.Tensor] = {}
    x = torch.randn(1024, generator=torch.Generator().manual_seed(0)).to(device)[:n]

    def out(name: str) -> torch.Tensor:
        made[name] = torch.zeros(1024, device=device)
        return made[name]

    for by in (2.0, 0.5):
        Scale(by)(x, out(f"scaled {by}"), n)
    for to in (tl.float16, tl.bfloat16):
        rounded(x, out(f"cast {to}"), n, to)
    for power, operator in ((2, tl.maximum), (3, tl.maximum), (2, tl.minimum)):
        reduced(x, out(f"row {power} {operator.__name__}"), n, power, operator)
    if objects:
        with_an_object(x, out("object"), n, 3)
    return made


def expected(name: str, x: torch.Tensor) -> torch.Tensor:
    """What one of these has written, where ``x`` is what they read."""
    kind, _, rest = name.partition(" ")
    if kind == "scaled":
        return x * float(rest) + 1
    if kind == "cast":
        return x.to(torch.float16 if rest == "fp16" else torch.bfloat16).float()
    power, operator = rest.split()
    y = x.clamp(min=0) if operator == "maximum" else x.clamp(max=0)
    result = y
    for _ in range(int(power) - 1):
        result = result * y
    return result + 2 * int(power)


if __name__ == "__main__":
    from tests.triton_packs.project import made_in_calls

    made_in_calls.launch_all()
