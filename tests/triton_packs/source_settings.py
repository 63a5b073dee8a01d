"""A module that kernels of ``source_cases`` read by its name."""

import triton
import triton.language as tl

SIZE = tl.constexpr(128)


@triton.jit
def scaled(x):
    return x * SIZE


@triton.jit
def tripled(x):
    return x * 3
