"""Fused linear cross entropy's own kernel: gradients that the forward has found, times that of the loss.

The chunks' losses and gradients are cross_entropy's kernels, the products are cuBLAS's or hipBLAS's.
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
    """X[n] *= BY, in place. The factor is 1 wherever the loss is what backward() is called on: then few programs look
    at one number and are done, with no word from the host."""
    by = tl.load(BY)
    if by != 1.0:
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        for first in range(tl.program_id(0).to(tl.int64) * BLOCK, n, step):
            at = first + tl.arange(0, BLOCK)
            x = tl.load(X + at, mask=at < n).to(tl.float32)
            tl.store(X + at, (x * by).to(X.dtype.element_ty), mask=at < n)
