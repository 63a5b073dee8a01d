"""A loop with tl.dot that Triton 3.6 compiles for sm_90 with two races; only tests compile it.

Triton's issue 6691, and flash-linear-attention's issue 640 in its smallest form: its gated chunk_bwd_dqkwg uses the
state tiles of a loop in tl.dot and in a sum.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot_loop(
    A, B, C, S, n, SUM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """C = A B; with SUM also the sums of B's columns, out of the same tiles."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    total = tl.zeros([BLOCK_N], tl.float32)
    for i in range(n):
        k = i * BLOCK_K + inner
        a = tl.load(A + rows[:, None] * (n * BLOCK_K) + k[None, :])
        b = tl.load(B + k[:, None] * BLOCK_N + cols[None, :])
        if SUM:
            total += tl.sum(b.to(tl.float32), axis=0)
        product += tl.dot(a, b)
    tl.store(C + rows[:, None] * BLOCK_N + cols[None, :], product)
    tl.store(S + cols, total)
