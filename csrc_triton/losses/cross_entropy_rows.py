"""Cross entropy over rows of logits: what the forwards and the gradients share.

Of a row x with target t, class weights w, label smoothing s and V classes:

    lse  = log sum_v exp(x_v)
    loss = (1 - s) w_t (lse - x_t) + s / V (sum_v w_v lse - sum_v w_v x_v) + z_scale lse^2
    d loss / d x_v = exp(x_v - lse) A - B w_v - C [v = t]

with A = (1 - s) w_t + s / V sum_v w_v + 2 z_scale lse, B = s / V and C = (1 - s) w_t. A softcap c stands before all
that: x = c tanh(logit / c). Targets are int32 words, one or two each, so that one binary reads both widths.
"""

import triton
import triton.language as tl

from csrc_triton.softmax.softmax_statistics import LN_2, LOG2_E, include

WEIGHTED = tl.constexpr(1)  # W holds class weights
BY_TARGET = tl.constexpr(2)  # loss and gradient of a row times its target's probability
WITH_PARTS = tl.constexpr(4)  # PARTS is written, or holds the target's logit
WITH_PREDICTED = tl.constexpr(8)  # PREDICTED is written
DIVIDED = tl.constexpr(16)  # gradients are divided by TOTALS
WITH_REST = tl.constexpr(1024)  # LSE has a second row: what the first, rounded, lacks in units of log(2)
GIVEN = tl.constexpr(32)  # gradients are multiplied by GRAD


@triton.jit
def target_of(T, row, here, words):
    low = tl.load(T + row * words, mask=here, other=0)
    high = tl.load(T + row * words + (words - 1), mask=here, other=0)
    return target_from(low, high, words)


@triton.jit
def target_from(low, high, words):
    """A target from its lowest and its highest word."""
    high = tl.where(words == 2, high, low >> 31)
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def weight_of(W, t, known, flags):
    """A class's weight; 1 where there are none."""
    return tl.load(W + t, mask=known & ((flags & WEIGHTED) != 0), other=1.0)


@triton.jit
def store_statistics(
    LOSS, LSE, PARTS, FLAG, row, here, n_rows, t, ignored, known, lse, nll, rest, x_t, w, weighted, weight_sum,
    vocabulary, smoothing, z_scale, flags,
):  # fmt: skip
    """The statistics of a row, or of a tensor of rows, those of them that are ``here``. Ignored ones are 0; a target
    outside of the vocabulary gives NaN and is written to FLAG, which the host looks at later."""
    z = z_scale * lse * lse
    smooth = (smoothing / vocabulary) * (weight_sum * lse - weighted)
    loss = (1.0 - smoothing) * w * nll + tl.where(smoothing != 0.0, smooth, 0.0) + z
    scale = by_target(lse, x_t, flags)
    loss = tl.where(known, loss * scale, float("nan"))
    tl.store(LOSS + row, tl.where(ignored, 0.0, loss), mask=here)
    tl.store(LSE + row, tl.where(ignored, 0.0, lse), mask=here)
    tl.store(LSE + n_rows + row, tl.where(ignored, 0.0, rest), mask=here & ((flags & WITH_REST) != 0))
    parts = here & ((flags & WITH_PARTS) != 0)
    tl.store(PARTS + row, tl.where(ignored, 0.0, x_t), mask=parts)
    tl.store(PARTS + n_rows + row, tl.where(ignored, 0.0, weighted + x_t * 0.0), mask=parts)
    tl.store(PARTS + 2 * n_rows + row, tl.where(ignored, 0.0, z * scale), mask=parts)
    wrong = here & (known == 0) & (ignored == 0) & (FLAG.to(tl.int64) != 0)
    tl.store(FLAG + row * 0, t, mask=wrong)


@triton.jit
def store_row(
    LOSS, LSE, PARTS, FLAG, row, here, n_rows, t, ignored, known, lse, x_t, w, weighted, weight_sum, vocabulary,
    smoothing, z_scale, flags,
):  # fmt: skip
    """``store_statistics`` of rows whose lse is all that is known of their sums."""
    store_statistics(
        LOSS, LSE, PARTS, FLAG, row, here, n_rows, t, ignored, known, lse, lse - x_t, 0.0, x_t, w, weighted, weight_sum,
        vocabulary, smoothing, z_scale, flags,
    )  # fmt: skip


@triton.jit
def logarithms(peak, total, x_t):
    """(lse, lse - x_t, what lse lacks in units of log(2)). The second comes from differences, not from lse. A peak is a
    rounded product, but the same in all that is relative to it."""
    powers = tl.log2(total)
    lse = tl.fma(peak, LN_2, powers * LN_2)
    return lse, tl.fma(peak, LN_2, -x_t) + powers * LN_2, tl.fma(-lse, LOG2_E, peak) + powers


@triton.jit
def by_target(lse, x_t, flags):
    return tl.where((flags & BY_TARGET) != 0, tl.exp2((x_t - lse) * LOG2_E), 1.0)


@triton.jit
def row_scales(GRAD, TOTALS, row, here, g_stride, flags):
    """What multiplies a row's gradient, and that of its z-loss."""
    scale = tl.load(GRAD + row * g_stride, mask=here & ((flags & GIVEN) != 0), other=1.0)
    divided = (flags & DIVIDED) != 0
    z = scale / tl.load(TOTALS + 1, mask=divided, other=1.0)
    return scale / tl.load(TOTALS, mask=divided, other=1.0), z


@triton.jit
def row_factors(scale, z, ignored, known, lse, x_t, w, weight_sum, vocabulary, smoothing, z_scale, flags):
    """(A, B, C) of the gradient, each times the row's scale. NaN where the target is outside of the vocabulary, 0 in
    an ignored row."""
    by = by_target(lse, x_t, flags)
    scale *= by
    z *= by
    of_target = (1.0 - smoothing) * w
    a = scale * (of_target + (smoothing / vocabulary) * weight_sum) + z * (2.0 * z_scale * lse)
    keep = ignored == 0
    a = tl.where(keep, tl.where(known, a, float("nan")), 0.0)
    return a, tl.where(keep, scale * (smoothing / vocabulary), 0.0), tl.where(keep, scale * of_target, 0.0)


@triton.jit
def origin_of(LSE, row, here, n_rows, flags):
    """(lse, origin, by): 2^(x log2(e) - origin) by is exp(x - lse), without the roundings of lse and of the origin."""
    lse = tl.load(LSE + row, mask=here, other=0.0)
    rest = tl.load(LSE + n_rows + row, mask=here & ((flags & WITH_REST) != 0), other=0.0)
    origin = lse * LOG2_E
    rest += tl.fma(lse, LOG2_E, -origin)
    return lse, origin, tl.where(rest == rest, tl.exp2(-rest), 1.0)  # NaN where lse is infinite


@triton.jit
def columns(BLOCK: tl.constexpr, dtype: tl.constexpr):
    """Columns of a block, those of one 16-byte vector along the second axis."""
    SHORT: tl.constexpr = 128 // dtype.primitive_bitwidth
    return tl.arange(0, BLOCK // SHORT)[:, None] * SHORT + tl.arange(0, SHORT)[None, :]


@triton.jit
def split(R, n_cols, SPLIT: tl.constexpr):
    """A row that starts anywhere, as a body that starts and ends at boundaries of cache lines, 128 bytes (pointer,
    first column, length), and what ``around`` gives. Else every load of an odd vocabulary's rows would be one element
    wide, and no line would be written whole."""
    LINE: tl.constexpr = 1024 // R.dtype.element_ty.primitive_bitwidth
    if SPLIT:
        to_boundary = (-R.to(tl.int64)) & 127
        before = tl.minimum((to_boundary // (128 // LINE)).to(tl.int32), n_cols)
        return tl.multiple_of(R + before, 128), before, (n_cols - before) // LINE * LINE
    else:
        return R, 0, n_cols


@triton.jit
def around(R, before, length, n_cols, COUNT: tl.constexpr):
    """The columns around a body, fewer than a line on either side, and their mask."""
    LINE: tl.constexpr = 1024 // R.dtype.element_ty.primitive_bitwidth
    tl.static_assert(COUNT >= 2 * LINE)
    i = tl.arange(0, COUNT)
    last = before + length + i - LINE
    return tl.where(i < LINE, i, last), tl.where(i < LINE, i < before, last < n_cols)


@triton.jit
def statistics(
    BODY, peak, total, first, end, scale, BLOCK: tl.constexpr, STAGES: tl.constexpr, EVICT: tl.constexpr
):
    """The pairs (peak, total) with the columns from ``first`` to ``end``: one for each 16-byte vector of a block, so
    that the loop has no exchange between threads."""
    cols = columns(BLOCK, BODY.dtype.element_ty)
    for at in tl.range(first, end, BLOCK, num_stages=STAGES):
        x = tl.load(BODY + (at + cols), mask=at + cols < end, other=-float("inf"), eviction_policy=EVICT)
        peak, total = include(peak, total, x.to(tl.float32), scale, 1)
    return peak, total


@triton.jit
def first_statistics(R, before, length, n_cols, scale, BLOCK: tl.constexpr, SPLIT: tl.constexpr):
    """The pairs to start with: of no columns or, one to a pair, of those around the body."""
    VECTORS: tl.constexpr = BLOCK * R.dtype.element_ty.primitive_bitwidth // 128
    if SPLIT:
        cols, mask = around(R, before, length, n_cols, VECTORS)
        x = tl.load(R + cols, mask=mask, other=-float("inf")).to(tl.float32) * scale
        peak = tl.maximum(x, -3.4028234663852886e38)
        return peak, tl.exp2(x - peak)
    else:
        peak = tl.full([VECTORS], -3.4028234663852886e38, tl.float32)
        return peak, tl.zeros([VECTORS], tl.float32)


@triton.jit
def row_statistics(x):
    """(peak, total) of rows in registers; a row of nothing but -inf has a total of 0."""
    peak = tl.maximum(tl.max(x, 1) * LOG2_E, -3.4028234663852886e38)
    return peak, tl.sum(tl.exp2(x * LOG2_E - peak[:, None]), 1)


@triton.jit
def gradient_of(x, cols, first, last, origin, a, b, c, t, PATCH: tl.constexpr):
    """The gradient of a tile whose columns lie in [first, last). Only one that holds the target compares columns; with
    PATCH the caller sees to the target."""
    y = tl.exp2(tl.fma(x, LOG2_E, -origin)) * a - b
    if not PATCH:  # noqa: SIM102 (a constant, and numbers on the device)
        if (t >= first) & (t < last):
            y = tl.where(cols == t, y - c, y)
    return y
