"""Cross entropy of the student's logits, and the total variation distance of its softmax from the teacher's: both of
each row, and the gradient of the student's logits.

With p the student's probabilities, q the teacher's and s the sign of p - q, a row's distance is the sum of |p - q| / 2
and its derivative by a logit p (s - sigma) / 2, where sigma is the sum of p s. The forward reads both rows twice, once
for the log-sum-exps (``online_softmax``); STATISTICS keeps those and sigma, which is all that the backward needs.

An ignored row is not read: its results and its gradient are 0. A target that is no class gives NaN, and is written to
the device error flag, FLAG.
"""

import triton
import triton.language as tl

from csrc_triton.losses.cross_entropy_rows import load_target
from csrc_triton.softmax.online_softmax import LN_2, LOG2_E, log_sum_exp

DECLARATION = {
    "op": "cross_entropy_tvd",
    "kernels": {
        "cross_entropy_tvd_forward": {
            "arguments": {
                "CE": "*fp32",
                "TVD": "*fp32",
                "STATISTICS": "*fp32",
                "X": "*dtype",
                "Y": "*dtype",
                "TARGET": "*i32",
                "FLAG": "*i64",
                "x_stride": "i64",
                "y_stride": "i64",
                "n_cols": "i32",
                "ignored": "i64",
                "target_words": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["X", "Y", "x_stride", "y_stride", "n_cols"],
            "forms": {
                "row": {
                    "function": "forward",
                    "constants": ["BLOCK", "UNALIGNED"],
                    "defaults": {"UNALIGNED": False},
                }
            },
        },
        "cross_entropy_tvd_backward": {
            "arguments": {
                "DX": "*dtype",
                "DCE": "*fp32",
                "DTVD": "*fp32",
                "STATISTICS": "*fp32",
                "X": "*dtype",
                "Y": "*dtype",
                "TARGET": "*i32",
                "x_stride": "i64",
                "y_stride": "i64",
                "n_cols": "i32",
                "blocks": "i32",
                "ignored": "i64",
                "target_words": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["DX", "X", "Y", "x_stride", "y_stride", "n_cols"],
            "forms": {"tile": {"function": "backward", "constants": ["BLOCK"]}},
        },
    },
}


@triton.jit
def probabilities(X, cols, n_cols, greatest, last):
    x = tl.load(X + cols, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
    return tl.exp2((x - greatest) * LOG2_E - last)


@triton.jit
def sign_of(difference):
    """0 where there is none, as torch has it; NaN stays NaN."""
    return tl.where(difference > 0.0, 1.0, tl.where(difference < 0.0, -1.0, difference))


@triton.jit
def forward(
    CE, TVD, STATISTICS, X, Y, TARGET, FLAG, x_stride, y_stride, n_cols, ignored, target_words,
    BLOCK: tl.constexpr, UNALIGNED: tl.constexpr,
):  # fmt: skip
    """One row a program. STATISTICS[rows, 5]: of each model the greatest logit and log2 of the sum of powers relative
    to it, and sigma."""
    row = tl.program_id(0).to(tl.int64)
    STATISTICS += row * 5
    t = load_target(TARGET, row, True, target_words)
    if t == ignored:
        tl.store(CE + row, 0.0)
        tl.store(TVD + row, 0.0)
    else:
        X += row * x_stride
        Y += row * y_stride
        x_greatest, x_last = log_sum_exp(X, n_cols, LOG2_E, BLOCK, UNALIGNED)
        y_greatest, y_last = log_sum_exp(Y, n_cols, LOG2_E, BLOCK, UNALIGNED)
        distances = tl.zeros([BLOCK], tl.float32)
        signed = tl.zeros([BLOCK], tl.float32)
        for first in range(0, n_cols, BLOCK):
            cols = first + tl.arange(0, BLOCK)
            p = probabilities(X, cols, n_cols, x_greatest, x_last)
            difference = p - probabilities(Y, cols, n_cols, y_greatest, y_last)
            distances += tl.abs(difference)
            signed += p * sign_of(difference)
        tl.store(STATISTICS, x_greatest)
        tl.store(STATISTICS + 1, x_last)
        tl.store(STATISTICS + 2, y_greatest)
        tl.store(STATISTICS + 3, y_last)
        tl.store(STATISTICS + 4, tl.sum(signed, 0))
        known = (t >= 0) & (t < n_cols)
        at_target = tl.load(X + t, mask=known, other=float("nan")).to(tl.float32)
        tl.store(CE + row, (x_greatest - at_target) + x_last * LN_2)
        tl.store(TVD + row, tl.where(known, tl.sum(distances, 0) * 0.5, float("nan")))
        tl.store(FLAG + row * 0, t, mask=known == 0)


@triton.jit
def backward(
    DX, DCE, DTVD, STATISTICS, X, Y, TARGET, x_stride, y_stride, n_cols, blocks, ignored, target_words,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of a row a program; DX is contiguous."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    cols = program % blocks * BLOCK + tl.arange(0, BLOCK)
    DX += row * n_cols
    t = load_target(TARGET, row, True, target_words)
    if t == ignored:
        tl.store(DX + cols, tl.zeros([BLOCK], DX.dtype.element_ty), mask=cols < n_cols)
    else:
        STATISTICS += row * 5
        p = probabilities(X + row * x_stride, cols, n_cols, tl.load(STATISTICS), tl.load(STATISTICS + 1))
        q = probabilities(Y + row * y_stride, cols, n_cols, tl.load(STATISTICS + 2), tl.load(STATISTICS + 3))
        known = (t >= 0) & (t < n_cols)
        of_ce = tl.where(known, tl.load(DCE + row), float("nan"))
        of_tvd = tl.load(DTVD + row) * 0.5
        dx = p * of_ce + p * (sign_of(p - q) - tl.load(STATISTICS + 4)) * of_tvd
        dx -= tl.where(cols == t, of_ce, 0.0)
        tl.store(DX + cols, dx.to(DX.dtype.element_ty), mask=cols < n_cols)
