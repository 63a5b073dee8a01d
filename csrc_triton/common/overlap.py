"""Programmatic dependent launch: a kernel whose programs start before the kernel launched before it has ended.

The earlier kernel says from when on they may; the later one waits where it needs the other's results. Without such a
launch both are nothing. PTX ISA, griddepcontrol: sm_90 and later.
"""

import triton
import triton.language as tl


@triton.jit
def let_next_start():
    """The next kernel's programs may start once each program of this one has come here or ended."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def once_previous_ended(value):
    """``value``, an int32 that is not negative, once the kernel before this one has ended and what it wrote is to be
    seen. The wait's condition always holds: it has ptxas compute the value before it and not after."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred %known; setp.ge.s32 %known, $1, 0; @%known griddepcontrol.wait; mov.b32 $0, $1; }",
        "=r,r", [value], tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
