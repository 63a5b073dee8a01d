"""The logarithm of a row's sum of powers, in one read: what ops need who write no normalised row.

Kept apart are the greatest value and log2 of the sum of powers relative to it: in one number the larger would take the
smaller one's digits.
"""

import triton
import triton.language as tl

from csrc_triton.softmax.softmax_statistics import LOWEST, fold, include, vectors


@triton.jit
def walk(X, n_cols, width, scale, BLOCK: tl.constexpr, STAGES: tl.constexpr, PADDED: tl.constexpr):
    """(peak, total, greatest) of each vector's place in a block, over all blocks. PADDED: the row lies in memory of
    ``width`` columns, whole vectors; what is past n_cols may hold anything."""
    SHORT: tl.constexpr = 128 // X.dtype.element_ty.primitive_bitwidth
    cols = vectors(BLOCK, X.dtype.element_ty, False)
    peak = tl.full([BLOCK // SHORT], LOWEST, tl.float32)
    total = tl.zeros([BLOCK // SHORT], tl.float32)
    greatest = tl.full([BLOCK // SHORT], -float("inf"), tl.float32)
    for first in tl.range(0, n_cols, BLOCK, num_stages=STAGES):
        x = tl.load(X + (first + cols), mask=first + cols < width, other=-float("inf")).to(tl.float32)
        if PADDED:
            x = tl.where(first + cols < n_cols, x, -float("inf"))
        peak, total = include(peak, total, x, scale, 1)
        greatest = tl.maximum(greatest, tl.max(x, 1))
    return peak, total, greatest


@triton.jit
def finished(X, peak, total, highest, n_cols, scale):
    """(greatest, log2 of the sum): of any values, enormous ones too."""
    last = tl.log2(total) + tl.fma(-highest, scale, peak)
    if ((total > 0.0) & (total < float("inf"))) == 0:
        highest, last = carefully(X, n_cols, scale, 128 * 128 // X.dtype.element_ty.primitive_bitwidth)
    return highest, last


@triton.jit
def statistics(X, n_cols, scale, BLOCK: tl.constexpr, STAGES: tl.constexpr, ODD: tl.constexpr):
    """(greatest value, log2 of the sum of powers relative to it). ODD: the row may start at any element; what lies
    before and after its aligned part is fewer elements than a vector each."""
    SHORT: tl.constexpr = 128 // X.dtype.element_ty.primitive_bitwidth
    if ODD:
        SIZE: tl.constexpr = 16 // SHORT
        before = (((16 - X.to(tl.int64) % 16) % 16) // SIZE).to(tl.int32)
        before = tl.minimum(before, n_cols)
        inner = tl.multiple_of((n_cols - before) // SHORT * SHORT, SHORT)
        body = tl.multiple_of(X + before, 16)
        peak, total, greatest = walk(body, inner, inner, scale, BLOCK, STAGES, False)
        peak, total = fold(peak, total)
        lane = tl.arange(0, 2 * SHORT)
        at = tl.where(lane < SHORT, lane, before + inner + lane - SHORT)
        outside = tl.where(lane < SHORT, lane < before, at < n_cols)
        x = tl.load(X + at, mask=outside, other=-float("inf")).to(tl.float32)
        peak, total = include(peak, total, x, scale, 0)
        highest = tl.maximum(tl.max(greatest, 0), tl.max(x, 0))
    else:
        peak, total, greatest = walk(X, n_cols, n_cols, scale, BLOCK, STAGES, False)
        peak, total = fold(peak, total)
        highest = tl.max(greatest, 0)
    return finished(X, peak, total, highest, n_cols, scale)


@triton.jit
def padded_statistics(X, n_cols, width, scale, BLOCK: tl.constexpr):
    """``statistics`` of a row in memory of ``width`` columns."""
    peak, total, greatest = walk(X, n_cols, width, scale, BLOCK, 1, True)
    peak, total = fold(peak, total)
    return finished(X, peak, total, tl.max(greatest, 0), n_cols, scale)


@triton.jit
def carefully(X, n_cols, scale, BLOCK: tl.constexpr):
    """In two reads: of enormous values, and of rows whose result is NaN."""
    cols = tl.arange(0, BLOCK)
    greatest = tl.full([BLOCK], -float("inf"), tl.float32)
    for first in range(0, n_cols, BLOCK):
        x = tl.load(X + (first + cols), mask=first + cols < n_cols, other=-float("inf"))
        greatest = tl.maximum(greatest, x.to(tl.float32))
    highest = tl.max(greatest, 0)
    powers = tl.zeros([BLOCK], tl.float32)
    for first in range(0, n_cols, BLOCK):
        x = tl.load(X + (first + cols), mask=first + cols < n_cols, other=-float("inf"))
        powers += tl.exp2((x.to(tl.float32) - highest) * scale)
    return highest, tl.log2(tl.sum(powers, 0))
