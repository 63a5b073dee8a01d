"""KL divergence of a row of a linear layer's logits from given probabilities, and its gradient over the logits.

With x the logits over the temperature and q the probabilities, the divergence is the sum of q (log(max(q, eps)) - x),
plus the logarithm of the sum of exp(x) times the sum of q: one read of both rows. Its gradient, (softmax(x) * sum(q) -
q) / temperature, takes another.

The logits lie in memory of ``width`` columns, whole vectors; the gradient is zero past n_cols.
"""

import triton
import triton.language as tl

from csrc_triton.losses.divergence import LN_2, label_counts, per_label, sum_vectors
from csrc_triton.softmax.online_softmax import log_sum_exp_padded

DECLARATION = {
    "op": "fused_linear_kl_div",
    "uses": ["fused_linear_cross_entropy"],
    "kernels": {
        "fused_linear_kl_div_rows": {
            "arguments": {
                "LOSSES": "*fp32",
                "X": "*dtype",
                "Q": "*target",
                "LABELS": "*i32",
                "COUNT": "*fp32",
                "GRAD": "*fp32",
                "stride": "i64",
                "q_stride": "i64",
                "n_cols": "i32",
                "width": "i32",
                "ignored": "i64",
                "label_words": "i32",
                "scale": "fp32",
                "inverse": "fp32",
                "eps": "fp32",
                "per_row": "fp32",
                "write": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"], "target": ["bf16", "fp16", "fp32"]},
            "excluded": [
                {"dtype": ["bf16"], "target": ["fp16"]},
                {"dtype": ["fp16"], "target": ["bf16"]},
                {"dtype": ["fp32"], "target": ["bf16", "fp16"]},
            ],
            "aligned": ["X", "Q", "stride", "q_stride", "n_cols", "width"],
            "forms": {"row": {"function": "rows", "constants": ["BLOCK"]}},
        },
    },
}


@triton.jit
def rows(
    LOSSES, X, Q, LABELS, COUNT, GRAD, stride, q_stride, n_cols, width, ignored, label_words, scale, inverse, eps,
    per_row, write, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program. scale is log2(e) / temperature, inverse 1 / temperature; the loss and the gradient are times
    per_row, divided by COUNT where that is given, the gradient also times GRAD."""
    row = tl.program_id(0).to(tl.int64)
    X = tl.multiple_of(X + row * stride, 128)  # the op's own memory
    width = tl.multiple_of(width, 64)
    Q += row * q_stride
    weight = per_label(per_row, COUNT)
    if label_counts(LABELS, row, ignored, label_words, True):
        greatest, last = log_sum_exp_padded(X, n_cols, width, scale, BLOCK)
        losses = tl.zeros([BLOCK // 8], tl.float32)
        sums = tl.zeros([BLOCK // 8], tl.float32)
        for first in range(0, n_cols, BLOCK):
            cols = first + tl.arange(0, BLOCK)
            q = tl.load(Q + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
            x = tl.load(X + cols, mask=cols < width, other=0.0).to(tl.float32)
            apart = tl.log2(tl.maximum(q, eps)) * LN_2 - ((x - greatest) * inverse - last * LN_2)
            losses += sum_vectors(tl.where(q == 0.0, 0.0, q * apart), BLOCK)
            sums += sum_vectors(q, BLOCK)
        tl.store(LOSSES + row, tl.sum(losses, 0) * weight)
        if write != 0:
            slope = weight * inverse * tl.load(GRAD, mask=GRAD.to(tl.int64) != 0, other=1.0)
            of_all = tl.sum(sums, 0) * slope
            for first in range(0, n_cols, BLOCK):
                cols = first + tl.arange(0, BLOCK)
                q = tl.load(Q + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
                x = tl.load(X + cols, mask=cols < width, other=0.0).to(tl.float32)
                p = tl.where(cols < n_cols, tl.exp2((x - greatest) * scale - last), 0.0)
                tl.store(X + cols, (p * of_all - q * slope).to(X.dtype.element_ty), mask=cols < width)
    else:
        tl.store(LOSSES + row, 0.0)
        if write != 0:
            for first in range(0, n_cols, BLOCK):
                cols = first + tl.arange(0, BLOCK)
                tl.store(X + cols, tl.zeros([BLOCK], X.dtype.element_ty), mask=cols < width)
