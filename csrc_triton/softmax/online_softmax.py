"""Online softmax: the greatest value of a row and the sum of its powers, in one read.

exp is computed as a power of two: ``scale`` holds log2(e). The statistics are (peak, total): the greatest scaled value,
and the sum of powers relative to it. A tile has them for each 16-byte vector, so that a loop over tiles exchanges
nothing between threads and takes 1.125 powers an element.

Milakov and Gimelshein, Online normalizer calculation for softmax (2018).
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Where the greatest scaled value starts: not at -inf, whose difference from itself is NaN.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def vectors(BLOCK: tl.constexpr, dtype: tl.constexpr, UNALIGNED: tl.constexpr):
    """The columns of a block as a tile whose short axis holds as many elements as 16 bytes do: the elements of one
    vector load. UNALIGNED, where loads are one element wide: elements far apart, which one thread still holds."""
    SHORT: tl.constexpr = 128 // dtype.primitive_bitwidth
    LONG: tl.constexpr = BLOCK // SHORT
    if UNALIGNED:
        return tl.arange(0, SHORT)[:, None] * LONG + tl.arange(0, LONG)[None, :]
    else:
        return tl.arange(0, LONG)[:, None] * SHORT + tl.arange(0, SHORT)[None, :]


@triton.jit
def accumulate(peak, total, x, scale, AXIS: tl.constexpr):
    """The statistics with the values of a tile, reduced along AXIS. A peak is a rounded product, but everything is
    relative to the same one, so the rounding cancels; a power costs one multiply-add."""
    higher = tl.maximum(peak, tl.max(x, AXIS) * scale)
    powers = tl.exp2(x * scale - tl.expand_dims(higher, AXIS))
    return higher, total * tl.exp2(peak - higher) + tl.sum(powers, AXIS)


@triton.jit
def reduce(peak, total):
    """The statistics of all vectors as those of the row."""
    highest = tl.max(peak, 0)
    return highest, tl.sum(total * tl.exp2(peak - highest), 0)


# The log-sum-exp of a row, for ops that do not write the normalised row. It is kept as two numbers, the greatest value
# and log2 of the sum of powers relative to it: in their sum the larger one would round off digits of the smaller.


@triton.jit
def accumulate_row(X, n_cols, width, scale, BLOCK: tl.constexpr, PADDED: tl.constexpr):
    """(peak, total, greatest value) of each vector of a block, over all blocks of a row. PADDED: the row has room for
    ``width`` columns, whole vectors; those past n_cols may hold anything."""
    SHORT: tl.constexpr = 128 // X.dtype.element_ty.primitive_bitwidth
    cols = vectors(BLOCK, X.dtype.element_ty, False)
    peak = tl.full([BLOCK // SHORT], LOWEST, tl.float32)
    total = tl.zeros([BLOCK // SHORT], tl.float32)
    greatest = tl.full([BLOCK // SHORT], -float("inf"), tl.float32)
    for first in tl.range(0, n_cols, BLOCK, num_stages=1):
        x = tl.load(X + (first + cols), mask=first + cols < width, other=-float("inf")).to(tl.float32)
        if PADDED:
            x = tl.where(first + cols < n_cols, x, -float("inf"))
        peak, total = accumulate(peak, total, x, scale, 1)
        greatest = tl.maximum(greatest, tl.max(x, 1))
    return peak, total, greatest


@triton.jit
def log_sum(X, peak, total, highest, n_cols, scale):
    """(greatest value, log2 of the sum) from the row's statistics; values whose scaling overflows take two passes."""
    last = tl.log2(total) + tl.fma(-highest, scale, peak)
    if ((total > 0.0) & (total < float("inf"))) == 0:
        highest, last = log_sum_two_pass(X, n_cols, scale, 128 * 128 // X.dtype.element_ty.primitive_bitwidth)
    return highest, last


@triton.jit
def log_sum_exp(X, n_cols, scale, BLOCK: tl.constexpr, UNALIGNED: tl.constexpr):
    """(greatest value, log2 of the sum of powers relative to it). UNALIGNED: the row may start at any element; before
    and after its aligned part lies less than a vector."""
    SHORT: tl.constexpr = 128 // X.dtype.element_ty.primitive_bitwidth
    if UNALIGNED:
        SIZE: tl.constexpr = 16 // SHORT
        before = (((16 - X.to(tl.int64) % 16) % 16) // SIZE).to(tl.int32)
        before = tl.minimum(before, n_cols)
        inner = tl.multiple_of((n_cols - before) // SHORT * SHORT, SHORT)
        body = tl.multiple_of(X + before, 16)
        peak, total, greatest = accumulate_row(body, inner, inner, scale, BLOCK, False)
        peak, total = reduce(peak, total)
        lane = tl.arange(0, 2 * SHORT)
        at = tl.where(lane < SHORT, lane, before + inner + lane - SHORT)
        outside = tl.where(lane < SHORT, lane < before, at < n_cols)
        x = tl.load(X + at, mask=outside, other=-float("inf")).to(tl.float32)
        peak, total = accumulate(peak, total, x, scale, 0)
        highest = tl.maximum(tl.max(greatest, 0), tl.max(x, 0))
    else:
        peak, total, greatest = accumulate_row(X, n_cols, n_cols, scale, BLOCK, False)
        peak, total = reduce(peak, total)
        highest = tl.max(greatest, 0)
    return log_sum(X, peak, total, highest, n_cols, scale)


@triton.jit
def log_sum_exp_padded(X, n_cols, width, scale, BLOCK: tl.constexpr):
    """``log_sum_exp`` of an aligned row with room for ``width`` columns."""
    peak, total, greatest = accumulate_row(X, n_cols, width, scale, BLOCK, True)
    peak, total = reduce(peak, total)
    return log_sum(X, peak, total, tl.max(greatest, 0), n_cols, scale)


@triton.jit
def log_sum_two_pass(X, n_cols, scale, BLOCK: tl.constexpr):
    """In two reads, for values of any size, and for rows whose result is NaN."""
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
