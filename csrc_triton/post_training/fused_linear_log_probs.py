"""The log-probability of one token a row, the entropy and the log-sum-exp of the row's logits over a temperature, and
their gradient over the logits.

With y = x * log2(e) / temperature, less its greatest value, a row's statistics are

    greatest   of x
    total      log2 of sum(2^y)
    mean       of y under the probabilities p = 2^y / sum(2^y)
    chosen     x at the target

of which the host makes the results: log-probability (chosen - greatest) / temperature - total ln(2), log-sum-exp
greatest / temperature + total ln(2), entropy (total - mean) ln(2). Statistics of the parts of a vocabulary add up: the
host does that, too. As log(p) = (y - total) ln(2), every gradient of these results is

    d x_v = at_target [v = target] - p_v (constant + slope (y_v - total))

with three numbers a row, which the host gives.

The logits lie in memory of ``width`` columns, whole vectors. Rows of an ignored target are not read: their statistics
and gradients are 0. A target that is not in ``n_cols`` columns after ``start`` but in the vocabulary is another part's;
one outside of the vocabulary gives NaN, and its number is written to the device error flag, FLAG.
"""

import triton
import triton.language as tl

from csrc_triton.softmax.online_softmax import LOWEST, vectors

DECLARATION = {
    "op": "fused_linear_log_probs",
    "kernels": {
        "fused_linear_log_probs_statistics": {
            "arguments": {
                "STATISTICS": "*fp32",
                "X": "*dtype",
                "TARGET": "*i32",
                "FLAG": "*i64",
                "stride": "i64",
                "n_cols": "i32",
                "width": "i32",
                "words": "i32",
                "ignored": "i64",
                "start": "i64",
                "vocabulary": "i64",
                "scale": "fp32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "always_aligned": True,  # the logits lie in the op's own memory
            "aligned": ["X", "stride", "width"],
            "forms": {"row": {"function": "statistics", "constants": ["BLOCK"]}},
        },
        "fused_linear_log_probs_gradient": {
            "arguments": {
                "X": "*dtype",
                "STATISTICS": "*fp32",
                "FACTORS": "*fp32",
                "TARGET": "*i32",
                "stride": "i64",
                "n_cols": "i32",
                "width": "i32",
                "words": "i32",
                "ignored": "i64",
                "start": "i64",
                "blocks": "i32",
                "scale": "fp32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "always_aligned": True,
            "aligned": ["X", "stride", "width"],
            "forms": {"tile": {"function": "gradient", "constants": ["BLOCK"]}},
        },
    },
}

# The least y whose power is not 0, and so whose product with it may count. Where x is -inf, y would be, too.
LEAST = tl.constexpr(-150.0)


@triton.jit
def target_of(TARGET, row, words):
    """A target of one 32-bit word or two, the low one first."""
    low = tl.load(TARGET + row * words).to(tl.int64)
    high = tl.load(TARGET + row * words + 1, mask=words == 2, other=0).to(tl.int64)
    return tl.where(words == 2, (high << 32) | (low & 0xFFFFFFFF), low)


@triton.jit
def combine(higher, greatest, total, moment, scale):
    """(sum of 2^y, sum of 2^y y) relative to another greatest value."""
    down = tl.maximum((greatest - higher) * scale, LEAST)
    power = tl.exp2(down)
    return total * power, (moment + total * down) * power


@triton.jit
def statistics(
    STATISTICS, X, TARGET, FLAG, stride, n_cols, width, words, ignored, start, vocabulary, scale, BLOCK: tl.constexpr
):  # fmt: skip
    """STATISTICS[rows, 4] of one row a program; scale is log2(e) / temperature."""
    row = tl.program_id(0).to(tl.int64)
    X += row * stride
    STATISTICS += row * 4
    target = target_of(TARGET, row, words)
    if target != ignored:
        SHORT: tl.constexpr = 128 // X.dtype.element_ty.primitive_bitwidth
        cols = vectors(BLOCK, X.dtype.element_ty, False)
        greatest = tl.full([BLOCK // SHORT], LOWEST, tl.float32)
        total = tl.zeros([BLOCK // SHORT], tl.float32)
        moment = tl.zeros([BLOCK // SHORT], tl.float32)
        for first in tl.range(0, n_cols, BLOCK, num_stages=1):
            x = tl.load(X + (first + cols), mask=first + cols < width, other=0.0).to(tl.float32)
            x = tl.where(first + cols < n_cols, x, -float("inf"))
            higher = tl.maximum(greatest, tl.max(x, 1))
            total, moment = combine(higher, greatest, total, moment, scale)
            greatest = higher
            y = (x - greatest[:, None]) * scale
            power = tl.exp2(y)
            total += tl.sum(power, 1)
            moment += tl.sum(power * tl.maximum(y, LEAST), 1)
        highest = tl.max(greatest, 0)
        total, moment = combine(highest, greatest, total, moment, scale)
        total, moment = tl.sum(total, 0), tl.sum(moment, 0)
        known = (target >= 0) & (target < vocabulary)
        here = known & (target >= start) & (target < start + n_cols)
        chosen = tl.load(X + (target - start), mask=here, other=0.0).to(tl.float32)
        tl.store(STATISTICS, highest)
        tl.store(STATISTICS + 1, tl.log2(total))
        tl.store(STATISTICS + 2, moment / total)
        tl.store(STATISTICS + 3, tl.where(known, chosen, float("nan")))
        tl.store(FLAG, target, mask=known == 0)
    else:
        tl.store(STATISTICS + tl.arange(0, 4), tl.zeros([4], tl.float32))


@triton.jit
def gradient(
    X, STATISTICS, FACTORS, TARGET, stride, n_cols, width, words, ignored, start, blocks, scale, BLOCK: tl.constexpr
):  # fmt: skip
    """BLOCK columns of a row a program, overwritten with the gradient; FACTORS[rows, 3] are at_target, constant and
    slope."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    cols = program % blocks * BLOCK + tl.arange(0, BLOCK)
    X += row * stride
    target = target_of(TARGET, row, words)
    counts = target != ignored
    greatest, total = tl.load(STATISTICS + row * 4), tl.load(STATISTICS + row * 4 + 1)
    at_target, constant = tl.load(FACTORS + row * 3), tl.load(FACTORS + row * 3 + 1)
    slope = tl.load(FACTORS + row * 3 + 2)
    x = tl.load(X + cols, mask=(cols < width) & counts, other=0.0).to(tl.float32)
    y = (x - greatest) * scale - total
    dx = -tl.exp2(y) * (constant + slope * tl.maximum(y, LEAST))
    dx = tl.where(cols == target - start, dx + at_target, dx)
    dx = tl.where((cols < n_cols) & counts, dx, 0.0)
    tl.store(X + cols, dx.to(X.dtype.element_ty), mask=cols < width)
