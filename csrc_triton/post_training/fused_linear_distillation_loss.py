"""Distillation: a row of the student's logits compared with the teacher's (the soft loss) and with a target (the hard
loss), and the gradient of both over the student's.

One row a program. The soft losses are ``divergence``'s of the two softmaxes at a temperature, or ``cosine``, 1 less the
cosine of the two rows of logits. First the statistics: the logarithms of the sums of powers or, for cosine, the norms
and the product. Then the divergence and the sum of its derivatives dx by the student's log-probabilities. Then, with q
the student's probability, the gradient (dx - q * sum(dx)) / temperature and, of the hard loss, q at temperature 1, less
1 at the target.

The logits lie in memory of ``width`` columns, whole vectors. The student may have fewer classes than the teacher:
``n_hard``. The host makes the logits of those that it lacks 0, and drops their gradient.
"""

import triton
import triton.language as tl

from csrc_triton.losses.cross_entropy_rows import load_target
from csrc_triton.losses.divergence import (
    LN_2,
    LOG2_E,
    NO_PROBABILITY,
    factors,
    per_label,
    sum_vectors,
    terms,
)
from csrc_triton.softmax.online_softmax import log_sum_exp_padded

DECLARATION = {
    "op": "fused_linear_distillation_loss",
    "uses": ["fused_linear_cross_entropy"],
    "kernels": {
        "fused_linear_distillation_rows": {
            "arguments": {
                "SOFT": "*fp32",
                "HARD": "*fp32",
                "STUDENT": "*dtype",
                "TEACHER": "*dtype",
                "TARGET": "*i32",
                "COUNT": "*fp32",
                "GRAD": "*fp32",
                "FLAG": "*i64",
                "stride": "i64",
                "n_cols": "i32",
                "n_hard": "i32",
                "width": "i32",
                "ignored": "i64",
                "target_words": "i32",
                "scale": "fp32",
                "inverse": "fp32",
                "beta": "fp32",
                "soft": "fp32",
                "hard": "fp32",
                "write": "i32",
            },
            "axes": {
                "dtype": ["bf16", "fp16", "fp32"],
                "kind": ["forward", "reverse", "mixed", "cosine"],
            },
            "gives": {
                "kind": {
                    "forward": {"KIND": 1},
                    "reverse": {"KIND": 2},
                    "mixed": {"KIND": 3},
                    "cosine": {"KIND": 5},
                }
            },
            "always_aligned": True,  # the logits lie in the op's own memory
            "aligned": ["STUDENT", "TEACHER", "stride", "width"],
            "forms": {
                "row": {
                    "function": "rows",
                    "constants": ["KIND", "BLOCK", "FAST"],
                    "defaults": {"FAST": False},
                }
            },
        },
    },
}
COSINE = tl.constexpr(5)  # KIND, after divergence's
LEAST_NORM = tl.constexpr(1e-12)


@triton.jit
def logits(X, cols, width):
    return tl.load(X + cols, mask=cols < width, other=0.0).to(tl.float32)


@triton.jit
def rows(
    SOFT, HARD, STUDENT, TEACHER, TARGET, COUNT, GRAD, FLAG, stride, n_cols, n_hard, width, ignored, target_words,
    scale, inverse, beta, soft, hard, write, KIND: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """SOFT[row] and HARD[row] are the row's losses, before their weights ``soft`` and ``hard`` and the division by
    COUNT, which the gradient has. scale is log2(e) / temperature, inverse 1 / temperature, beta the number of
    ``terms``. A row whose target is ``ignored`` has no loss and no gradient."""
    row = tl.program_id(0).to(tl.int64)
    STUDENT += row * stride
    TEACHER += row * stride
    t = load_target(TARGET, row, True, target_words)
    counts = t != ignored
    known = counts & (t >= 0) & (t < n_hard)
    outer = per_label(1.0, COUNT) * tl.load(GRAD, mask=GRAD.to(tl.int64) != 0, other=1.0)
    if counts:
        at_target = tl.load(STUDENT + t, mask=known, other=float("nan")).to(tl.float32)
        tl.store(FLAG + row * 0, t, mask=known == 0)
        by_hard = tl.where(known, outer * hard, float("nan"))
        target = tl.where(known, t, -1).to(tl.int32)
        if KIND == COSINE:
            greatest, last = log_sum_exp_padded(STUDENT, n_hard, width, LOG2_E, BLOCK)
            squares = tl.zeros([BLOCK // 8], tl.float32)
            of_teacher = tl.zeros([BLOCK // 8], tl.float32)
            products = tl.zeros([BLOCK // 8], tl.float32)
            for first in range(0, n_cols, BLOCK):
                cols = first + tl.arange(0, BLOCK)
                x = tl.where(cols < n_cols, logits(STUDENT, cols, width), 0.0)
                y = tl.where(cols < n_cols, logits(TEACHER, cols, width), 0.0)
                squares += sum_vectors(x * x, BLOCK)
                of_teacher += sum_vectors(y * y, BLOCK)
                products += sum_vectors(x * y, BLOCK)
            norm = tl.maximum(tl.sqrt(tl.sum(squares, 0)), LEAST_NORM)
            teacher = tl.maximum(tl.sqrt(tl.sum(of_teacher, 0)), LEAST_NORM)
            cosine = tl.sum(products, 0) / norm / teacher
            tl.store(SOFT + row, 1.0 - cosine)
            tl.store(HARD + row, (greatest - at_target) + last * LN_2)
            by_soft = outer * soft
            by_student = by_soft * cosine / norm / norm
            by_teacher = -by_soft / norm / teacher
            if write != 0:
                for first in range(0, n_cols, BLOCK):
                    cols = first + tl.arange(0, BLOCK)
                    x, y = logits(STUDENT, cols, width), logits(TEACHER, cols, width)
                    gradient = x * by_student + y * by_teacher
                    gradient += hard_gradient(x, cols, n_hard, greatest, last, target, by_hard)
                    tl.store(STUDENT + cols, gradient.to(STUDENT.dtype.element_ty), mask=cols < width)
        else:
            s_greatest, s_last = log_sum_exp_padded(STUDENT, n_cols, width, scale, BLOCK)
            t_greatest, t_last = log_sum_exp_padded(TEACHER, n_cols, width, scale, BLOCK)
            greatest, last = s_greatest, s_last  # at temperature 1, of the student's own classes
            if (inverse != 1.0) | (n_hard != n_cols):
                greatest, last = log_sum_exp_padded(STUDENT, n_hard, width, LOG2_E, BLOCK)
            losses = tl.zeros([BLOCK // 8], tl.float32)
            slopes = tl.zeros([BLOCK // 8], tl.float32)
            for first in range(0, n_cols, BLOCK):
                cols = first + tl.arange(0, BLOCK)
                x = log_probability(logits(STUDENT, cols, width), cols, n_cols, s_greatest, s_last, inverse)
                y = log_probability(logits(TEACHER, cols, width), cols, n_cols, t_greatest, t_last, inverse)
                term, dx = terms(x, y, beta, KIND, FAST)
                losses += sum_vectors(term, BLOCK)
                slopes += sum_vectors(dx, BLOCK)
            factor, slope = factors(KIND)
            tl.store(SOFT + row, tl.sum(losses, 0) * factor)
            tl.store(HARD + row, (greatest - at_target) + last * LN_2)
            if write != 0:
                slope *= outer * soft * inverse
                of_all = tl.sum(slopes, 0) * slope
                for first in range(0, n_cols, BLOCK):
                    cols = first + tl.arange(0, BLOCK)
                    logit = logits(STUDENT, cols, width)
                    x = log_probability(logit, cols, n_cols, s_greatest, s_last, inverse)
                    y = log_probability(
                        logits(TEACHER, cols, width), cols, n_cols, t_greatest, t_last, inverse
                    )
                    dx = terms(x, y, beta, KIND, FAST)[1]
                    gradient = dx * slope - tl.exp2(x * LOG2_E) * of_all
                    gradient += hard_gradient(logit, cols, n_hard, greatest, last, target, by_hard)
                    tl.store(STUDENT + cols, gradient.to(STUDENT.dtype.element_ty), mask=cols < width)
    else:
        tl.store(SOFT + row, 0.0)
        tl.store(HARD + row, 0.0)
        if write != 0:
            for first in range(0, n_cols, BLOCK):
                cols = first + tl.arange(0, BLOCK)
                tl.store(STUDENT + cols, tl.zeros([BLOCK], STUDENT.dtype.element_ty), mask=cols < width)


@triton.jit
def log_probability(logit, cols, n_cols, greatest, last, inverse):
    return tl.where(cols < n_cols, (logit - greatest) * inverse - last * LN_2, NO_PROBABILITY)


@triton.jit
def hard_gradient(logit, cols, n_hard, greatest, last, target, by):
    q = tl.where(cols < n_hard, tl.exp2((logit - greatest) * LOG2_E - last), 0.0)
    return tl.where(by == 0.0, 0.0, (q - (cols == target).to(tl.float32)) * by)
