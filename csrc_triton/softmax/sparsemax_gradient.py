"""Sparsemax's backward by vectors of 16 bytes: dy is read only where y has support, which is a small part of most rows.

A vector of dy is loaded where any of its elements is needed; of a row that is all support, all are. Nothing else is
needed of dy: dx is 0, or y's NaN, elsewhere.
"""

import triton
import triton.language as tl

from csrc_triton.softmax.softmax_gradient import gradient, summand, support
from csrc_triton.softmax.softmax_statistics import vectors


@triton.jit
def add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def load_both(Y, DY, at, n_cols, EVICT: tl.constexpr):
    """y, and dy in the vectors, lines of a tile, that have support; in fp32, 0 where there is none."""
    in_row = at < n_cols
    y = tl.load(Y + at, mask=in_row, other=0.0, eviction_policy=EVICT).to(tl.float32)
    needed = tl.broadcast_to((tl.max(y, 1) > 0.0)[:, None], y.shape)
    dy = tl.load(DY + at, mask=needed & in_row, other=0.0, eviction_policy=EVICT)
    return y, dy.to(tl.float32)


@triton.jit
def gradient_vectors(
    DX, DY, Y, dx_stride, dy_stride, y_stride, n_cols, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """One row of at most BLOCKS * BLOCK columns a program or, where BLOCKS is 0, of any length; read twice, the second
    time backwards and from the cache."""
    row = tl.program_id(0).to(tl.int64)
    DX += row * dx_stride
    DY += row * dy_stride
    Y += row * y_stride
    cols = vectors(BLOCK, Y.dtype.element_ty, False)
    if BLOCKS > 0:
        blocks = BLOCKS
    else:
        blocks = tl.cdiv(n_cols, BLOCK)
    sums = tl.zeros([cols.shape[0]], tl.float32)
    counts = tl.zeros([cols.shape[0]], tl.float32)
    for i in range(blocks):
        y, dy = load_both(Y, DY, cols + i * BLOCK, n_cols, "evict_last")
        sums += tl.sum(summand(y, dy, "sparsemax"), 1)
        counts += tl.sum(support(y), 1)
    total, count = tl.reduce((sums, counts), 0, add_both)  # in one exchange between threads
    for i in range(blocks):
        at = cols + (blocks - 1 - i) * BLOCK
        y, dy = load_both(Y, DY, at, n_cols, "evict_first")
        dx = gradient(y, dy, total / count, 1.0, "sparsemax").to(DX.dtype.element_ty)
        tl.store(DX + at, dx, mask=at < n_cols, eviction_policy="evict_first")
