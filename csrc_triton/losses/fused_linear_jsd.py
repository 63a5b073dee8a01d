"""Generalised Jensen-Shannon divergence of two models' logits, row by row, and its gradient over the student's.

One row a program, in three reads of both models' logits: the logarithms of the sums of powers; the divergence and the
sum of its derivatives by the student's log-probabilities x; and, with dx that derivative and q the student's
probability, the gradient (dx - q * sum(dx)) / temperature. ``divergence`` has the formulas, ``jsd`` the kinds.

The logits lie in memory of ``width`` columns, whole vectors; the gradient is zero past n_cols.
"""

import triton
import triton.language as tl

from csrc_triton.losses.divergence import (
    JENSEN_SHANNON,
    LN_2,
    LOG2_E,
    NO_PROBABILITY,
    factors,
    label_counts,
    per_label,
    sum_vectors,
    terms,
)
from csrc_triton.softmax.online_softmax import log_sum_exp_padded

DECLARATION = {
    "op": "fused_linear_jsd",
    "uses": ["divergence_sums", "fused_linear_cross_entropy"],
    "kernels": {
        "fused_linear_jsd_rows": {
            "arguments": {
                "LOSSES": "*fp32",
                "STUDENT": "*dtype",
                "TEACHER": "*dtype",
                "LABELS": "*i32",
                "COUNT": "*fp32",
                "GRAD": "*fp32",
                "stride": "i64",
                "n_cols": "i32",
                "width": "i32",
                "ignored": "i64",
                "label_words": "i32",
                "scale": "fp32",
                "inverse": "fp32",
                "per_row": "fp32",
                "beta": "fp32",
                "write": "i32",
            },
            **JENSEN_SHANNON,
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


@triton.jit
def log_probability(X, cols, n_cols, width, greatest, last, inverse):
    x = tl.load(X + cols, mask=cols < width, other=0.0).to(tl.float32)
    return tl.where(cols < n_cols, (x - greatest) * inverse - last * LN_2, NO_PROBABILITY)


@triton.jit
def rows(
    LOSSES, STUDENT, TEACHER, LABELS, COUNT, GRAD, stride, n_cols, width, ignored, label_words, scale, inverse, per_row,
    beta, write, KIND: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """scale is log2(e) / temperature, inverse 1 / temperature, per_row what the divergence of a row is multiplied by in
    the loss, to be divided by COUNT where that is given; beta is the number of ``terms``."""
    row = tl.program_id(0).to(tl.int64)
    LOSSES += row
    STUDENT += row * stride
    TEACHER += row * stride
    outer = per_label(per_row, COUNT) * tl.load(GRAD, mask=GRAD.to(tl.int64) != 0, other=1.0)
    if label_counts(LABELS, row, ignored, label_words, True):
        s_greatest, s_last = log_sum_exp_padded(STUDENT, n_cols, width, scale, BLOCK)
        t_greatest, t_last = log_sum_exp_padded(TEACHER, n_cols, width, scale, BLOCK)
        losses = tl.zeros([BLOCK // 8], tl.float32)
        slopes = tl.zeros([BLOCK // 8], tl.float32)
        for first in range(0, n_cols, BLOCK):
            cols = first + tl.arange(0, BLOCK)
            x = log_probability(STUDENT, cols, n_cols, width, s_greatest, s_last, inverse)
            y = log_probability(TEACHER, cols, n_cols, width, t_greatest, t_last, inverse)
            term, dx = terms(x, y, beta, KIND, FAST)
            losses += sum_vectors(term, BLOCK)
            slopes += sum_vectors(dx, BLOCK)
        summand, slope = factors(KIND)
        tl.store(LOSSES, tl.sum(losses, 0) * summand)
        if write != 0:
            slope *= outer * inverse
            of_all = tl.sum(slopes, 0) * slope
            for first in range(0, n_cols, BLOCK):
                cols = first + tl.arange(0, BLOCK)
                x = log_probability(STUDENT, cols, n_cols, width, s_greatest, s_last, inverse)
                y = log_probability(TEACHER, cols, n_cols, width, t_greatest, t_last, inverse)
                dx = terms(x, y, beta, KIND, FAST)[1]
                gradient = dx * slope - tl.exp2(x * LOG2_E) * of_all
                tl.store(STUDENT + cols, gradient.to(STUDENT.dtype.element_ty), mask=cols < width)
    else:
        tl.store(LOSSES, 0.0)
        if write != 0:
            for first in range(0, n_cols, BLOCK):
                cols = first + tl.arange(0, BLOCK)
                tl.store(STUDENT + cols, tl.zeros([BLOCK], STUDENT.dtype.element_ty), mask=cols < width)
