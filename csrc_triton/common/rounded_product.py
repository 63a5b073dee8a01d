"""A product that is rounded before it is added to others."""

import triton
import triton.language as tl

from csrc_triton.common.target import target


@triton.constexpr_function
def is_ptx(chip):
    return chip is not None and chip.startswith("sm")


@triton.jit
def rounded_product(a, b):
    """a * b in float32 for a sum across threads. Fused into the sum's first addition, the product of one thread is not
    rounded and that of the other is, and threads that hold copies of one sum hold two numbers: where they write it to
    one address, either may stay."""
    CHIP: tl.constexpr = target()
    if is_ptx(CHIP):
        return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, True, 1)
    else:
        return a * b
