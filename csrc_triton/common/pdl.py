"""Programmatic dependent launch (PDL): a kernel's programs start before the kernel launched before it has ended.

The earlier kernel says when they may start; the later one waits where it needs the earlier one's results. In a launch
without PDL both instructions do nothing. PTX ISA, griddepcontrol: sm_90 and later.
"""

import triton
import triton.language as tl


@triton.jit
def launch_dependents():
    """Let the next kernel's programs start, once each program of this kernel has come here or ended."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wait_for_previous(value):
    """Wait until the kernel before this one has ended and its writes are visible; return ``value``, an int32 >= 0.
    The wait's condition always holds: it makes ptxas compute ``value`` before the wait and not after."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred %known; setp.ge.s32 %known, $1, 0; @%known griddepcontrol.wait; mov.b32 $0, $1; }",
        "=r,r", [value], tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def wait_for_previous_if(condition, value):
    """As ``wait_for_previous``, where the int32 ``condition`` is not 0, without a branch, which could move the wait."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred %wanted; setp.ne.s32 %wanted, $1, 0; @%wanted griddepcontrol.wait; mov.b32 $0, $2; }",
        "=r,r,r", [condition, value], tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
