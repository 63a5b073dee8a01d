"""Sparsemax's backward by vectors of 16 bytes: dy is read only where y has support, which is a small part of most rows.

A vector of dy is loaded where any of its elements is needed; of a row that is all support, all are. Nothing else is
needed of dy: dx is 0, or y's NaN, elsewhere.
"""

import triton
import triton.language as tl

from csrc_triton.packed import repack
from csrc_triton.softmax_gradient import gradient, summand, support
from csrc_triton.softmax_statistics import vectors


@triton.jit
def needed_of(y):
    """Whether a vector, a line of a tile, has support: for each of its elements."""
    return tl.broadcast_to((tl.max(y.to(tl.float32), 1) > 0.0)[:, None], y.shape)


@triton.jit
def add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def mean_of(sums, counts):
    """In one exchange between threads."""
    total, count = tl.reduce((sums, counts), 0, add_both)
    return total / count


@triton.jit
def gradient_vectors(
    DX, DY, Y, dx_stride, dy_stride, y_stride, n_cols, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, HOLD: tl.constexpr
):  # fmt: skip
    """One row of at most BLOCKS * BLOCK columns a program, or, where BLOCKS is 0, of any length. HOLD: in registers;
    else read twice, the second time backwards and from the cache."""
    row = tl.program_id(0).to(tl.int64)
    DX += row * dx_stride
    DY += row * dy_stride
    Y += row * y_stride
    cols = vectors(BLOCK, Y.dtype.element_ty, False)
    if HOLD:
        hold_row(DX, DY, Y, cols, n_cols, BLOCK, BLOCKS)
    else:
        blocks = tl.cdiv(n_cols, BLOCK) if BLOCKS == 0 else BLOCKS
        read_twice(DX, DY, Y, cols, n_cols, blocks, BLOCK)


@triton.jit
def hold_row(DX, DY, Y, cols, n_cols, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    ys, dys = (), ()
    for i in tl.static_range(BLOCKS):
        at = cols + i * BLOCK
        ys += (tl.load(Y + at, mask=at < n_cols, other=0.0, eviction_policy="evict_first"),)
    tl.debug_barrier()  # or the compiler takes the loads down to where they are used
    for i in tl.static_range(BLOCKS):
        at = cols + i * BLOCK
        mask = needed_of(ys[i]) & (at < n_cols)
        dys += (tl.load(DY + at, mask=mask, other=0.0, eviction_policy="evict_first"),)
    tl.debug_barrier()
    for i in tl.static_range(BLOCKS):
        wide = ys[i].to(tl.float32)
        added = tl.sum(summand(wide, dys[i].to(tl.float32), "sparsemax"), 1)
        counted = tl.sum(support(wide), 1)
        if i == 0:
            sums, counts = added, counted
        else:
            sums, counts = sums + added, counts + counted
    c = mean_of(sums, counts)
    for i in tl.static_range(BLOCKS):
        at = cols + i * BLOCK
        y, dy = repack(ys[i]).to(tl.float32), repack(dys[i]).to(tl.float32)
        dx = gradient(y, dy, c, 1.0, "sparsemax").to(DX.dtype.element_ty)
        tl.store(DX + at, dx, mask=at < n_cols, eviction_policy="evict_first")


@triton.jit
def read_twice(DX, DY, Y, cols, n_cols, blocks, BLOCK: tl.constexpr):
    lines: tl.constexpr = cols.shape[0]
    sums = tl.zeros([lines], tl.float32)
    counts = tl.zeros([lines], tl.float32)
    for i in range(blocks):
        at = cols + i * BLOCK
        y = tl.load(Y + at, mask=at < n_cols, other=0.0, eviction_policy="evict_last")
        mask = needed_of(y) & (at < n_cols)
        dy = tl.load(DY + at, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        wide = y.to(tl.float32)
        sums += tl.sum(summand(wide, dy, "sparsemax"), 1)
        counts += tl.sum(support(wide), 1)
    c = mean_of(sums, counts)
    for i in range(blocks):
        at = (blocks - 1 - i) * BLOCK + cols
        y = tl.load(Y + at, mask=at < n_cols, other=0.0, eviction_policy="evict_first")
        mask = needed_of(y) & (at < n_cols)
        dy = tl.load(DY + at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        dx = gradient(y.to(tl.float32), dy, c, 1.0, "sparsemax").to(DX.dtype.element_ty)
        tl.store(DX + at, dx, mask=at < n_cols, eviction_policy="evict_first")
