"""How a kernel begins that may be launched before the kernel before it has ended (``pdl``)."""

import triton
import triton.language as tl

from csrc_triton.common.pdl import launch_dependents, wait_for_previous


@triton.jit
def begin(value, PDL: tl.constexpr):
    """``value``, an int32 >= 0: nothing is read or written before the kernel before this one has ended. Not of a size
    or stride, whose divisibility the compiler would forget."""
    if PDL:
        value = wait_for_previous(value)
        launch_dependents()
    return value
