"""Divergences between two distributions over the last dimension: the kernels of kl_div, jsd and tvd.

x is the student's (it gets the gradient), y the teacher's. The axis ``kind`` names the summand and its derivative by x:

    probabilities    y (log y - x)                            KL(y || x), y probabilities, x log-probabilities
    forward          P (y - x)                                KL(P || Q), P = exp(y), Q = exp(x)
    reverse          Q (x - y)                                KL(Q || P)
    mixed            beta P (y - m) + (1 - beta) Q (x - m)    Jensen-Shannon, m = log(beta P + (1 - beta) Q)
    total_variation  |x - y| / 2

A probability of zero adds nothing, whatever its logarithm is multiplied by. NaN gives NaN.

Programs are persistent; the sum of each is one fp32 number in PARTIALS, which ``divergence_sums`` adds up. Tensors
without gaps and labels come as one row of all their elements. A row whose label is ``ignored`` is not read: it adds
nothing, and its gradient is zero.

mixed, with h and l the greater and the smaller of x and y, w_h and w_l their weights (y's is beta, x's 1 - beta),
u = (h - l) log2(e), c = w_l 2^-u, s = w_h + c and L = log2(s), is -ln(2) 2^(h log2(e)) (s L + c u): two powers and one
logarithm, and no difference of nearly equal logarithms. Its derivative by x is -ln(2) 2^(h log2(e)) times w_h L where x
is the greater, else c (L + u).
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
PROBABILITIES, FORWARD_KL, REVERSE_KL, MIXED, TOTAL_VARIATION = (tl.constexpr(i) for i in range(5))  # KIND
# What a masked element is read as: finite in every dtype, its power is zero.
NO_PROBABILITY = tl.constexpr(-60000.0)
# A difference of logarithms whose power is zero, in place of infinity, which zero may not be multiplied by.
FARTHEST = tl.constexpr(1e30)

# What each divergence declares, beside its kinds. number: a parameter of the kind.
PERSISTENT = {"constants": ["KIND", "BLOCK", "FAST"], "defaults": {"FAST": False}}
INPUTS = {"X": "*dtype", "Y": "*dtype", "LABELS": "*i32"}
ROWS = {
    "x_stride": "i64",
    "y_stride": "i64",
    "n": "i64",
    "total": "i32",
    "blocks": "i32",
    "ignored": "i64",
    "label_words": "i32",
}
FORWARD = {
    "arguments": {"LOSS": "*fp32", "PARTIALS": "*fp32", **INPUTS, **ROWS, "number": "fp32", "each": "i32"},
    "aligned": ["LOSS", "X", "Y", "x_stride", "y_stride", "n"],
    "forms": {"persistent": {"function": "forward", **PERSISTENT}},
}
BOTH = {
    "arguments": {
        "PARTIALS": "*fp32",
        "DX": "*dtype",
        **INPUTS,
        "COUNT": "*fp32",
        **ROWS,
        "scale": "fp32",
        "number": "fp32",
    },
    "aligned": ["DX", "X", "Y", "x_stride", "y_stride", "n"],
    "forms": {"persistent": {"function": "both", **PERSISTENT}},
}
BACKWARD = {
    "arguments": {
        "DX": "*dtype",
        "DLOSS": "*fp32",
        **INPUTS,
        "COUNT": "*fp32",
        "dloss_stride": "i64",
        **ROWS,
        "scale": "fp32",
        "number": "fp32",
        "each": "i32",
        "fresh": "i32",
    },
    "aligned": ["DX", "DLOSS", "X", "Y", "dloss_stride", "x_stride", "y_stride", "n"],
    "forms": {"persistent": {"function": "backward", **PERSISTENT}},
}
# Jensen-Shannon's kinds: its ends are Kullback-Leibler divergences.
JENSEN_SHANNON = {
    "axes": {"dtype": ["bf16", "fp16", "fp32"], "kind": ["forward", "reverse", "mixed"]},
    "gives": {"kind": {"forward": {"KIND": 1}, "reverse": {"KIND": 2}, "mixed": {"KIND": 3}}},
}


@triton.jit
def logarithm(x, FAST: tl.constexpr):
    """log2. FAST: one instruction, off by 2^-22 at most between 0.5 and 2 and relatively elsewhere, instead of 25 that
    are off by half of that; PTX only. On AMD log2 is one instruction and two that care for subnormals."""
    if FAST:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def terms(x, y, number, KIND: tl.constexpr, FAST: tl.constexpr):
    """(summand, derivative), to be multiplied by ``factors``. ``number`` is the least value that a logarithm is taken
    of, or for mixed the smaller weight, x's as a negative number: a difference from 1 would have fewer of its digits.
    """
    if KIND == PROBABILITIES:
        term = y * (logarithm(tl.maximum(y, number), FAST) * LN_2 - x)
        return tl.where(y == 0.0, 0.0, term), y
    elif KIND == FORWARD_KL:
        p = tl.exp2(y * LOG2_E)
        return tl.where(p == 0.0, 0.0, p * (y - x)), p
    elif KIND == REVERSE_KL:
        q = tl.exp2(x * LOG2_E)
        term = tl.where(q == 0.0, 0.0, q * (x - y))
        return term, term + q
    elif KIND == MIXED:
        # A difference of infinities is NaN, which a minimum drops: both probabilities are zero then.
        u = tl.minimum(tl.abs(x - y) * LOG2_E, FARTHEST)
        higher = tl.exp2(tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL) * LOG2_E)
        x_is_higher = x > y
        smaller = tl.abs(number)
        greater = 1.0 - smaller
        lost = smaller - (1.0 - greater)
        x_weight = tl.where(number < 0.0, smaller, greater)
        y_weight = tl.where(number < 0.0, greater, smaller)
        lower_weight = tl.where(x_is_higher, y_weight, x_weight)
        higher_weight = (1.0 - lower_weight) + lost  # faster than to choose once more, and as exact
        c = lower_weight * tl.exp2(-u)
        s = higher_weight + c
        log_s = logarithm(s, FAST)
        slope = tl.where(x_is_higher, higher_weight * log_s, c * (log_s + u))
        return higher * (s * log_s + c * u), higher * slope
    else:
        tl.static_assert(KIND == TOTAL_VARIATION)
        difference = x - y
        sign = tl.where(difference > 0.0, 1.0, tl.where(difference < 0.0, -1.0, difference))
        return tl.abs(difference), sign


@triton.jit
def factors(KIND: tl.constexpr):
    """What a summand and its derivative are multiplied by, once a program where that is possible."""
    if KIND == MIXED:
        return -LN_2, -LN_2
    elif KIND == TOTAL_VARIATION:
        return 0.5, 0.5
    elif KIND == REVERSE_KL:
        return 1.0, 1.0
    else:
        return 1.0, -1.0


@triton.jit
def per_label(scale, COUNT):
    """``scale`` divided by the number of labels that count, if COUNT is given; 0 if none does."""
    count = tl.load(COUNT, mask=COUNT.to(tl.int64) != 0, other=1.0)
    return tl.where(count > 0.0, scale / tl.maximum(count, 1.0), 0.0)


@triton.jit
def label_counts(LABELS, rows, ignored, label_words, mask):
    """Whether rows count. Labels are one 32-bit word or two, the low one first, or 0: there are none."""
    low = tl.load(LABELS + rows * label_words, mask=mask & (label_words > 0), other=0)
    high = tl.load(LABELS + rows * label_words + 1, mask=mask & (label_words == 2), other=0)
    wide = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
    label = tl.where(label_words == 2, wide, low.to(tl.int64))
    return mask & ((label_words == 0) | (label != ignored))


@triton.jit
def load_block(
    X, Y, LABELS, x_stride, y_stride, n, blocks, ignored, label_words, block, KIND: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """(x, y, row, first column, mask) of a block; a row that is ignored reads as one of no probability."""
    row = (block // blocks).to(tl.int64)
    first = (block % blocks).to(tl.int64) * BLOCK
    cols = tl.arange(0, BLOCK)
    inside = cols < n - first
    mask = inside & label_counts(LABELS, row, ignored, label_words, True)
    x = tl.load(X + (row * x_stride + first) + cols, mask=mask, other=NO_PROBABILITY).to(tl.float32)
    y = tl.load(Y + (row * y_stride + first) + cols, mask=mask, other=NO_PROBABILITY).to(tl.float32)
    if KIND == PROBABILITIES:
        y = tl.where(mask, y, 0.0)
    return x, y, row, first, inside


@triton.jit
def sum_vectors(term, BLOCK: tl.constexpr):
    """Sums of 8 neighbours, which one thread holds: fewer registers for accumulators."""
    return tl.sum(tl.reshape(term, [BLOCK // 8, 8]), 1)


@triton.jit
def forward(
    LOSS, PARTIALS, X, Y, LABELS, x_stride, y_stride, n, total, blocks, ignored, label_words, number, each,
    KIND: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The sum of each program, or with ``each`` the summands. ``total`` blocks in all, ``blocks`` of them a row."""
    program = tl.program_id(0)
    factor, _ = factors(KIND)
    if each == 0:
        sums = tl.zeros([BLOCK // 8], tl.float32)
        for block in tl.range(program, total, tl.num_programs(0), num_stages=1):
            x, y, row, first, inside = load_block(
                X, Y, LABELS, x_stride, y_stride, n, blocks, ignored, label_words, block, KIND, BLOCK
            )
            sums += sum_vectors(terms(x, y, number, KIND, FAST)[0], BLOCK)
        tl.store(PARTIALS + program, tl.sum(sums, 0) * factor)
    else:
        for block in range(program, total, tl.num_programs(0)):
            x, y, row, first, inside = load_block(
                X, Y, LABELS, x_stride, y_stride, n, blocks, ignored, label_words, block, KIND, BLOCK
            )
            term = terms(x, y, number, KIND, FAST)[0] * factor
            tl.store(LOSS + (row * n + first) + tl.arange(0, BLOCK), term, mask=inside)


@triton.jit
def both(
    PARTIALS, DX, X, Y, LABELS, COUNT, x_stride, y_stride, n, total, blocks, ignored, label_words, scale, number,
    KIND: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The sum of each program, and the gradient by x of the sum of all times ``scale``."""
    program = tl.program_id(0)
    factor, slope = factors(KIND)
    slope = per_label(scale * slope, COUNT)
    sums = tl.zeros([BLOCK // 8], tl.float32)
    for block in tl.range(program, total, tl.num_programs(0), num_stages=1):
        x, y, row, first, inside = load_block(
            X, Y, LABELS, x_stride, y_stride, n, blocks, ignored, label_words, block, KIND, BLOCK
        )
        term, dx = terms(x, y, number, KIND, FAST)
        sums += sum_vectors(term, BLOCK)
        to = DX + (row * n + first) + tl.arange(0, BLOCK)
        tl.store(to, (dx * slope).to(DX.dtype.element_ty), mask=inside)
    tl.store(PARTIALS + program, tl.sum(sums, 0) * factor)


@triton.jit
def backward(
    DX, DLOSS, X, Y, LABELS, COUNT, dloss_stride, x_stride, y_stride, n, total, blocks, ignored, label_words, scale,
    number, each, fresh,
    KIND: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The gradient by x. ``each``: DLOSS has a number for each element, else one. Unless ``fresh``, DX already holds
    the gradient for a DLOSS of 1."""
    outer = tl.load(DLOSS, mask=each == 0, other=1.0)
    if (fresh != 0) | (outer != 1.0):
        slope = per_label(scale * factors(KIND)[1], COUNT) * outer
        for block in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=1):
            x, y, row, first, inside = load_block(
                X, Y, LABELS, x_stride, y_stride, n, blocks, ignored, label_words, block, KIND, BLOCK
            )
            cols = tl.arange(0, BLOCK)
            weights = DLOSS + (row * dloss_stride + first) + cols
            dloss = tl.load(weights, mask=inside & (each != 0), other=1.0)
            dx = terms(x, y, number, KIND, FAST)[1] * slope * dloss
            tl.store(DX + (row * n + first) + cols, dx.to(DX.dtype.element_ty), mask=inside)
