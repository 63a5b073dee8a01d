"""Cross entropy with label smoothing, softcap and the greatest logit's column: the forms that know everything.

A softcap of 0 is none. Class weights are indexed by class, of which the columns may be a part.
"""

import triton
import triton.language as tl

from csrc_triton.losses.cross_entropy_rows import (
    BY_TARGET,
    WEIGHTED,
    WITH_PREDICTED,
    columns,
    logarithms,
    origin_of,
    row_factors,
    row_scales,
    store_statistics,
    target_of,
    weight_of,
)
from csrc_triton.norms.dyt import tanh_and_slope, units
from csrc_triton.softmax.softmax_statistics import LOG2_E, fold, include


@triton.jit
def capped(x, softcap):
    if softcap != 0.0:
        x = tanh_and_slope(x * units(1.0 / softcap))[0] * softcap
    return x


@triton.jit
def sum_of_weights(WEIGHT_SUM, vocabulary):
    """Without an address there is nothing that would be multiplied by it, or there are no weights."""
    return tl.load(WEIGHT_SUM, mask=WEIGHT_SUM.to(tl.int64) != 0, other=1.0 * vocabulary)


@triton.jit
def full_forward(
    LOSS, LSE, PARTS, PREDICTED, FLAG, X, T, W, WEIGHT_SUM, x_stride, ignore_index, n_rows, n_cols, words, vocab_start,
    vocabulary, smoothing, z_scale, softcap, flags, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program. For the greatest logit every vector of a block remembers the block that it was greatest in;
    those are read again at the end, which finds the first column of the greatest."""
    dtype: tl.constexpr = X.dtype.element_ty
    SHORT: tl.constexpr = 128 // dtype.primitive_bitwidth
    row = tl.program_id(0).to(tl.int64)
    here = row < n_rows
    t = target_of(T, row, here, words)
    ignored = t == ignore_index
    known = (t >= 0) & (t < vocabulary) & (ignored == 0)
    own = t - vocab_start
    R = X + row * x_stride
    x_t = tl.load(R + own, mask=known & (own >= 0) & (own < n_cols), other=0.0).to(tl.float32)
    x_t = capped(x_t, softcap)
    cols = columns(BLOCK, dtype)
    lse, nll, rest, weighted = 0.0, 0.0, 0.0, 0.0
    best = tl.full([], -1, tl.int64)
    if ignored == 0:
        peak = tl.full([BLOCK // SHORT], -3.4028234663852886e38, tl.float32)
        total = tl.zeros([BLOCK // SHORT], tl.float32)
        sums = tl.zeros([BLOCK // SHORT], tl.float32)
        greatest = tl.full([BLOCK // SHORT], -float("inf"), tl.float32)
        where = tl.zeros([BLOCK // SHORT], tl.int32)
        for first in range(0, n_cols, BLOCK):
            mask = first + cols < n_cols
            x = tl.load(R + (first + cols), mask=mask, other=-float("inf")).to(tl.float32)
            higher = tl.max(x, 1)
            where = tl.where(higher > greatest, first, where)
            greatest = tl.maximum(greatest, higher)
            x = tl.where(mask, capped(x, softcap), -float("inf"))
            peak, total = include(peak, total, x, LOG2_E, 1)
            w = tl.load(W + (vocab_start + first + cols), mask=mask & ((flags & WEIGHTED) != 0), other=1.0)
            sums += tl.sum(tl.where(mask, w * x, 0.0), 1)
        peak, total = fold(peak, total)
        lse, nll, rest = logarithms(peak, total, x_t)
        weighted = tl.sum(sums, 0)
        if (flags & WITH_PREDICTED) != 0:
            at = where[:, None] + cols
            again = tl.load(R + at, mask=at < n_cols, other=-float("inf")).to(tl.float32)
            at = tl.where((again == tl.max(greatest, 0)) & (at < n_cols), at, n_cols)
            best = (tl.min(tl.min(at, 1), 0) + vocab_start).to(tl.int64)
    tl.store(PREDICTED + row, best, mask=(flags & WITH_PREDICTED) != 0)
    weight_sum, w = sum_of_weights(WEIGHT_SUM, vocabulary), weight_of(W, t, known, flags)
    store_statistics(
        LOSS, LSE, PARTS, FLAG, row, here, n_rows, t, ignored, known, lse, nll, rest, x_t, w, weighted,
        weight_sum, vocabulary, smoothing, z_scale, flags,
    )  # fmt: skip


@triton.jit
def full_gradient(
    DX, X, LSE, PARTS, T, W, WEIGHT_SUM, GRAD, TOTALS, dx_stride, x_stride, g_stride, ignore_index, n_rows, n_cols,
    words, vocab_start, vocabulary, smoothing, z_scale, softcap, flags, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of a row a program."""
    pieces = tl.cdiv(n_cols, BLOCK)
    program = tl.program_id(0)
    row = (program // pieces).to(tl.int64)
    cols = program % pieces * BLOCK + tl.arange(0, BLOCK)
    here = row < n_rows
    t = target_of(T, row, here, words)
    ignored = t == ignore_index
    known = (t >= 0) & (t < vocabulary) & (ignored == 0)
    lse, origin, by = origin_of(LSE, row, here, n_rows, flags)
    x_t = tl.load(PARTS + row, mask=(flags & BY_TARGET) != 0, other=0.0)
    weight_sum = sum_of_weights(WEIGHT_SUM, vocabulary)
    scale, z = row_scales(GRAD, TOTALS, row, here, g_stride, flags)
    a, b, c = row_factors(
        scale, z, ignored, known, lse, x_t, weight_of(W, t, known, flags), weight_sum, vocabulary, smoothing, z_scale,
        flags,
    )  # fmt: skip
    mask = cols < n_cols
    x = tl.load(X + row * x_stride + cols, mask=mask & (ignored == 0), other=-float("inf")).to(tl.float32)
    w = tl.load(W + (vocab_start + cols), mask=mask & ((flags & WEIGHTED) != 0), other=1.0)
    slope = tl.full([BLOCK], 1.0, tl.float32)
    if softcap != 0.0:
        tanh, slope = tanh_and_slope(x * units(1.0 / softcap))
        x = tanh * softcap
        slope *= 1.0 / 256
    y = tl.exp2(tl.fma(x, LOG2_E, -origin)) * (a * by) - b * w
    y = tl.where(cols == t - vocab_start, y - c, y) * slope
    y = tl.where(ignored, 0.0, y)
    tl.store(DX + row * dx_stride + cols, y.to(DX.dtype.element_ty), mask=mask)
