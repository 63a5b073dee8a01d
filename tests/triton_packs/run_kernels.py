"""Kernels that the tests of running from packs launch."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Pair(NamedTuple):
    pointer: Any
    size: Any


@triton.jit
def add(X, Y, Z, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Z + at, tl.load(X + at, mask=at < n) + tl.load(Y + at, mask=at < n), mask=at < n)


@triton.jit
def every_type(
    X, b: tl.int8, h: tl.int16, i, q: tl.int64, B: tl.uint8, H: tl.uint16, W: tl.uint32, Q: tl.uint64,
    e: tl.float16, y: tl.bfloat16, f, d: tl.float64, flag, nothing, one, WORD: tl.constexpr,
):  # fmt: skip
    tl.store(X, i + f)


@triton.jit(do_not_specialize=["n"])
def tuples(pair, several, n):
    tl.store(pair[0], n + several[1][0])


@triton.jit
def of_descriptors(A, n, B):
    B.store([0, 0], A.load([0, 0]))


@triton.jit
def double(x):
    return x * 2


@triton.jit
def apply(X, FUNCTION: tl.constexpr, n):
    tl.store(X + n, FUNCTION(tl.load(X + n)))


@triton.autotune(
    [triton.Config({"BLOCK": block}, num_warps=warps) for block, warps in ((64, 1), (128, 4), (256, 8))],
    key=["n"],
)
@triton.jit
def tuned(X, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(X + at, at, mask=at < n)
