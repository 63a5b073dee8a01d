"""Where a program's block of elements lies, for ops that work element by element on rows a stride apart.

Contiguous tensors come as one row of all their elements, so no lane idles at a row's end; rows with gaps, or halves of
a packed tensor, come as they are. ``n`` is int64: one row may hold 2^31 elements and more.
"""

import triton
import triton.language as tl

from csrc_triton.common.pdl_begin import begin


@triton.jit
def block_of(n, blocks, BLOCK: tl.constexpr, PDL: tl.constexpr = 0):
    """(row, first column, columns from there on, mask) of this program: ``blocks`` programs a row of n. The division is
    done before the wait for the kernel before this one (``begin``)."""
    program = tl.program_id(0)
    row = begin(program // blocks, PDL).to(tl.int64)
    first = (program % blocks).to(tl.int64) * BLOCK
    cols = tl.arange(0, BLOCK)
    return row, first, cols, cols < n - first
