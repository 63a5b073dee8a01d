"""Cross entropy over rows of logits: what the forwards and the gradients share.

Of a row x with target t, class weights w, label smoothing s and V classes:

    lse  = log sum_v exp(x_v)
    loss = (1 - s) w_t (lse - x_t) + s / V (sum_v w_v lse - sum_v w_v x_v) + z_scale lse^2
    d loss / d x_v = exp(x_v - lse) A - B w_v - C [v = t]

with A = (1 - s) w_t + s / V sum_v w_v + 2 z_scale lse, B = s / V and C = (1 - s) w_t. A softcap c stands before all
that: x = c tanh(logit / c). Targets are int32 words, one or two each, so that one binary reads both widths.

With ``vocab_start`` and ``vocabulary`` the columns are a part of the classes.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from csrc_triton.softmax.online_softmax import LN_2, LOG2_E, LOWEST, accumulate, vectors

WEIGHTED = tl.constexpr(1)  # W holds class weights
BY_TARGET = tl.constexpr(2)  # loss and gradient of a row times its target's probability
WITH_PARTS = tl.constexpr(4)  # PARTS is written, or holds the target's logit
WITH_PREDICTED = tl.constexpr(8)  # PREDICTED is written
DIVIDED = tl.constexpr(16)  # gradients are divided by TOTALS
GIVEN = tl.constexpr(32)  # gradients are multiplied by GRAD
WITH_REST = tl.constexpr(1024)  # LSE has a second row: what the first, rounded, lacks in units of log(2)


class Target(NamedTuple):
    """Of a row, or of a tensor of rows."""

    t: tl.tensor  # the class, int64
    ignored: tl.tensor
    known: tl.tensor  # not ignored, and a class


class RowLoss(NamedTuple):
    """What the loss of a row is."""

    vocabulary: tl.tensor
    smoothing: tl.tensor
    z_scale: tl.tensor
    flags: tl.tensor


class RowSums(NamedTuple):
    """What is known of the sum of exp(x) of a row."""

    lse: tl.tensor
    nll: tl.tensor  # lse less the target's logit
    rest: tl.tensor  # what lse lacks, rounded, in units of log(2)


class RowResults(NamedTuple):
    """Where the results of rows go."""

    LOSS: tl.tensor
    LSE: tl.tensor
    PARTS: tl.tensor
    FLAG: tl.tensor
    n_rows: tl.tensor


@triton.jit
def load_target(T, row, here, words):
    low = tl.load(T + row * words, mask=here, other=0)
    high = tl.load(T + row * words + (words - 1), mask=here, other=0)
    return join_words(low, high, words)


@triton.jit
def join_words(low, high, words):
    """A target from its lowest and its highest word."""
    high = tl.where(words == 2, high, low >> 31)
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def target_of(T, row, here, words, ignore_index, vocabulary):
    t = load_target(T, row, here, words)
    ignored = t == ignore_index
    return Target(t, ignored, (t >= 0) & (t < vocabulary) & (ignored == 0))


@triton.jit
def weight_of(W, t, known, flags):
    """A class's weight; 1 where there are none."""
    return tl.load(W + t, mask=known & ((flags & WEIGHTED) != 0), other=1.0)


@triton.jit
def store_results(out, row, here, target, sums, x_t, w, weighted, weight_sum, loss):
    """The results of a row, or of those rows of a tensor that are ``here``. Ignored ones are 0; a target outside of the
    vocabulary gives NaN and is written to FLAG, which the host reads later."""
    LOSS, LSE, PARTS, FLAG, n_rows = out
    ignored = target.ignored
    z = loss.z_scale * sums.lse * sums.lse
    smooth = (loss.smoothing / loss.vocabulary) * (weight_sum * sums.lse - weighted)
    found = (1.0 - loss.smoothing) * w * sums.nll + tl.where(loss.smoothing != 0.0, smooth, 0.0) + z
    scale = by_target(sums.lse, x_t, loss.flags)
    found = tl.where(target.known, found * scale, float("nan"))
    tl.store(LOSS + row, tl.where(ignored, 0.0, found), mask=here)
    tl.store(LSE + row, tl.where(ignored, 0.0, sums.lse), mask=here)
    with_rest = here & ((loss.flags & WITH_REST) != 0)
    tl.store(LSE + n_rows + row, tl.where(ignored, 0.0, sums.rest), mask=with_rest)
    parts = here & ((loss.flags & WITH_PARTS) != 0)
    tl.store(PARTS + row, tl.where(ignored, 0.0, x_t), mask=parts)
    tl.store(PARTS + n_rows + row, tl.where(ignored, 0.0, weighted + x_t * 0.0), mask=parts)
    tl.store(PARTS + 2 * n_rows + row, tl.where(ignored, 0.0, z * scale), mask=parts)
    wrong = here & (target.known == 0) & (ignored == 0) & (FLAG.to(tl.int64) != 0)
    tl.store(FLAG + row * 0, target.t, mask=wrong)


@triton.jit
def row_sums(peak, total, x_t):
    """``RowSums`` of a row's statistics (``online_softmax``). nll comes from differences, not from lse."""
    powers = tl.log2(total)
    lse = tl.fma(peak, LN_2, powers * LN_2)
    return RowSums(lse, tl.fma(peak, LN_2, -x_t) + powers * LN_2, tl.fma(-lse, LOG2_E, peak) + powers)


@triton.jit
def by_target(lse, x_t, flags):
    return tl.where((flags & BY_TARGET) != 0, tl.exp2((x_t - lse) * LOG2_E), 1.0)


@triton.jit
def row_scales(GRAD, TOTALS, row, here, g_stride, flags):
    """What multiplies the gradient of a row, and that of its z-loss."""
    scale = tl.load(GRAD + row * g_stride, mask=here & ((flags & GIVEN) != 0), other=1.0)
    divided = (flags & DIVIDED) != 0
    z = scale / tl.load(TOTALS + 1, mask=divided, other=1.0)
    return scale / tl.load(TOTALS, mask=divided, other=1.0), z


@triton.jit
def row_factors(scale, z, target, lse, x_t, w, weight_sum, loss):
    """(A, B, C) of the gradient, each times the row's scale. NaN where the target is outside of the vocabulary, 0 in
    an ignored row."""
    by = by_target(lse, x_t, loss.flags)
    scale *= by
    z *= by
    of_target = (1.0 - loss.smoothing) * w
    of_class = loss.smoothing / loss.vocabulary
    a = scale * (of_target + of_class * weight_sum) + z * (2.0 * loss.z_scale * lse)
    counts = target.ignored == 0
    a = tl.where(counts, tl.where(target.known, a, float("nan")), 0.0)
    return a, tl.where(counts, scale * of_class, 0.0), tl.where(counts, scale * of_target, 0.0)


@triton.jit
def origin_of(LSE, row, here, n_rows, flags):
    """(lse, origin, by): 2^(x log2(e) - origin) by is exp(x - lse), without the roundings of lse and of the origin."""
    lse = tl.load(LSE + row, mask=here, other=0.0)
    rest = tl.load(LSE + n_rows + row, mask=here & ((flags & WITH_REST) != 0), other=0.0)
    origin = lse * LOG2_E
    rest += tl.fma(lse, LOG2_E, -origin)
    return lse, origin, tl.where(rest == rest, tl.exp2(-rest), 1.0)  # NaN where lse is infinite


@triton.jit
def row_body(R, n_cols, UNALIGNED: tl.constexpr):
    """The body of a row that starts anywhere (pointer, first column, length): it starts and ends at boundaries of cache
    lines, 128 bytes. What is left are its ``edges``. Otherwise every load of the rows of an odd vocabulary would be one
    element wide, and no line would be written whole."""
    LINE: tl.constexpr = 1024 // R.dtype.element_ty.primitive_bitwidth
    if UNALIGNED:
        to_boundary = (-R.to(tl.int64)) & 127
        before = tl.minimum((to_boundary // (128 // LINE)).to(tl.int32), n_cols)
        return tl.multiple_of(R + before, 128), before, (n_cols - before) // LINE * LINE
    else:
        return R, 0, n_cols


@triton.jit
def edges(R, before, length, n_cols, COUNT: tl.constexpr):
    """The columns before and after a body, less than a line on either side, and their mask."""
    LINE: tl.constexpr = 1024 // R.dtype.element_ty.primitive_bitwidth
    tl.static_assert(COUNT >= 2 * LINE)
    i = tl.arange(0, COUNT)
    last = before + length + i - LINE
    return tl.where(i < LINE, i, last), tl.where(i < LINE, i < before, last < n_cols)


@triton.jit
def init_stats(R, before, length, n_cols, BLOCK: tl.constexpr, UNALIGNED: tl.constexpr):
    """The statistics to start with: of no columns or, UNALIGNED, of one column of the edges each."""
    VECTORS: tl.constexpr = BLOCK * R.dtype.element_ty.primitive_bitwidth // 128
    if UNALIGNED:
        cols, mask = edges(R, before, length, n_cols, VECTORS)
        x = tl.load(R + cols, mask=mask, other=-float("inf")).to(tl.float32) * LOG2_E
        peak = tl.maximum(x, LOWEST)
        return peak, tl.exp2(x - peak)
    else:
        peak = tl.full([VECTORS], LOWEST, tl.float32)
        return peak, tl.zeros([VECTORS], tl.float32)


@triton.jit
def accumulate_columns(
    BODY, peak, total, first, last, BLOCK: tl.constexpr, STAGES: tl.constexpr, EVICT: tl.constexpr
):
    """The statistics with the columns from ``first`` to ``last``."""
    cols = vectors(BLOCK, BODY.dtype.element_ty, False)
    for at in tl.range(first, last, BLOCK, num_stages=STAGES):
        x = tl.load(BODY + (at + cols), mask=at + cols < last, other=-float("inf"), eviction_policy=EVICT)
        peak, total = accumulate(peak, total, x.to(tl.float32), LOG2_E, 1)
    return peak, total


@triton.jit
def row_stats(x):
    """(peak, total) of whole rows in registers; a row of nothing but -inf has a total of 0."""
    peak = tl.maximum(tl.max(x, 1) * LOG2_E, LOWEST)
    return peak, tl.sum(tl.exp2(x * LOG2_E - peak[:, None]), 1)


@triton.jit
def gradient_of(x, cols, first, last, origin, a, b, c, t, PATCH: tl.constexpr):
    """The gradient of a tile whose columns lie in [first, last). Only a tile that holds the target compares columns;
    with PATCH the caller writes the target's column."""
    y = tl.exp2(tl.fma(x, LOG2_E, -origin)) * a - b
    if not PATCH:  # noqa: SIM102 (a constant, and numbers on the device)
        if (t >= first) & (t < last):
            y = tl.where(cols == t, y - c, y)
    return y
