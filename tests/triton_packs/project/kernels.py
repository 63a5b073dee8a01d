"""One kernel of each kind of argument that Triton takes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def _on_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)  # (9, 4): gfx942


# As many projects do: a constant, and a function, that a module chooses when it is imported, by the GPU.
OFFSET = tl.constexpr(2.0 if _on_hopper() else 3.0)

if _on_hopper():

    @triton.jit
    def scaled(x):
        """On Hopper."""
        return x * 0.5

else:

    @triton.jit
    def scaled(x):
        """Elsewhere."""
        return x * 0.25


@triton.jit
def square(x):
    """Passed as a constant."""
    return x * x


@triton.jit
def negate(x):
    """Passed as a constant."""
    return -x


@triton.jit
def add(X, Y, OUT, n, by, BLOCK: tl.constexpr):
    """OUT = X + by * Y: pointers, a size, a float."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < n).to(tl.float32)
    y = tl.load(Y + at, mask=at < n).to(tl.float32)
    tl.store(OUT + at, (x + by * y).to(OUT.dtype.element_ty), mask=at < n)


@triton.jit
def mapped(X, OUT, n, FUNCTION: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """OUT = SCALE * FUNCTION(X): a function and a float as constants."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < n)
    tl.store(OUT + at, FUNCTION(x) * SCALE, mask=at < n)


@triton.jit
def pair(tensors, n, BLOCK: tl.constexpr):
    """A tuple of pointers: the second is twice the first."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(tensors[1] + at, tl.load(tensors[0] + at, mask=at < n) * 2, mask=at < n)


@triton.jit
def by_gpu(X, OUT, n, BLOCK: tl.constexpr):
    """Reads a global and calls a function that the module chose by the GPU."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(OUT + at, scaled(tl.load(X + at, mask=at < n)) + OFFSET, mask=at < n)


@triton.heuristics({"BLOCK": lambda arguments: triton.next_power_of_2(arguments["n"])})
@triton.jit
def total(X, OUT, n, BLOCK: tl.constexpr):
    """The sum of a row; its block is computed from n."""
    at = tl.arange(0, BLOCK)
    tl.store(OUT, tl.sum(tl.load(X + at, mask=at < n, other=0.0)))


@triton.autotune(
    [triton.Config({"BLOCK": 128}, num_warps=1), triton.Config({"BLOCK": 256}, num_warps=2)], key=["n"]
)
@triton.jit
def tuned(X, OUT, n, BLOCK: tl.constexpr):
    """OUT = X + 1; its block is the tuner's choice."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(OUT + at, tl.load(X + at, mask=at < n) + 1, mask=at < n)


@triton.jit
def copied(SOURCE, OUT, n, BLOCK: tl.constexpr):
    """A tensor descriptor that the host makes."""
    at = tl.program_id(0) * BLOCK
    tl.store(OUT + at + tl.arange(0, BLOCK), SOURCE.load([at]))


@triton.jit
def needs_clusters(X, n, BLOCK: tl.constexpr):
    """Asks for clusters of blocks: it can't be built for sm80."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(X + at, tl.load(X + at, mask=at < n) * 2, mask=at < n)


def made(power: int):  # type: ignore[no-untyped-def]
    """A factory: functions of one name."""
    POWER = tl.constexpr(power)

    @triton.jit
    def raised(X, OUT, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(X + at, mask=at < n)
        y = x
        for _ in tl.static_range(POWER - 1):
            y *= x
        tl.store(OUT + at, y, mask=at < n)

    return raised


cube, fourth = made(3), made(4)
