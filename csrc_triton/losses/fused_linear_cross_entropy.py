"""The kernel of the fused linear losses: gradients that the forward has found, times the gradient of the loss.

The losses and gradients of chunks are cross_entropy's kernels, the matrix products cuBLAS's or hipBLAS's.
"""

import triton
import triton.language as tl

DECLARATION = {
    "op": "fused_linear_cross_entropy",
    "uses": ["cross_entropy"],
    "kernels": {
        "fused_linear_cross_entropy_scale": {
            "arguments": {"X": "*dtype", "BY": "*fp32", "n": "i64"},
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["X", "n"],
            "forms": {"flat": {"function": "scale", "constants": ["BLOCK"]}},
        }
    },
}


@triton.jit
def scale(X, BY, n, BLOCK: tl.constexpr):
    """X[n] *= BY, in place. The factor is 1 wherever backward() is called on the loss itself: then each program reads
    that number and returns, and the host need not know it."""
    by = tl.load(BY)
    if by != 1.0:
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        for first in range(tl.program_id(0).to(tl.int64) * BLOCK, n, step):
            at = first + tl.arange(0, BLOCK)
            x = tl.load(X + at, mask=at < n).to(tl.float32)
            tl.store(X + at, (x * by).to(X.dtype.element_ty), mask=at < n)
