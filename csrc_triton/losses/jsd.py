"""Generalised Jensen-Shannon divergence of log-probabilities, summed, and its gradient by x.

kind: 0, beta is 0: KL(P || Q); 1, beta is 1: KL(Q || P); 2, between. each is not used: the loss is always
summed up.
"""

import triton
import triton.language as tl

from csrc_triton.losses.divergence import BACKWARD, BOTH, FORWARD, both_blocks, gradient_blocks, sum_blocks

DECLARATION = {
    "op": "jsd",
    "uses": ["divergence_sums"],
    "kernels": {"jsd_forward": FORWARD, "jsd_both": BOTH, "jsd_backward": BACKWARD},
}


@triton.jit
def forward(
    LOSS, PARTIALS, X, Y, LABELS, x_stride, y_stride, n, total, blocks, ignored, label_words, number,
    kind, each,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    if kind == 0:
        sum_blocks(
            LOSS, PARTIALS, X, Y, LABELS, x_stride, y_stride, n, total, blocks, ignored, label_words,
            number, 0, "forward", BLOCK, STAGES, FAST,
        )  # fmt: skip
    elif kind == 1:
        sum_blocks(
            LOSS, PARTIALS, X, Y, LABELS, x_stride, y_stride, n, total, blocks, ignored, label_words,
            number, 0, "reverse", BLOCK, STAGES, FAST,
        )  # fmt: skip
    else:
        sum_blocks(
            LOSS, PARTIALS, X, Y, LABELS, x_stride, y_stride, n, total, blocks, ignored, label_words,
            number, 0, "mixed", BLOCK, STAGES, FAST,
        )  # fmt: skip


@triton.jit
def both(
    PARTIALS, DX, X, Y, LABELS, COUNT, x_stride, y_stride, n, total, blocks, ignored, label_words, scale,
    number, kind,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    if kind == 0:
        both_blocks(
            PARTIALS, DX, X, Y, LABELS, COUNT, x_stride, y_stride, n, total, blocks, ignored, label_words,
            scale, number, "forward", BLOCK, STAGES, FAST,
        )  # fmt: skip
    elif kind == 1:
        both_blocks(
            PARTIALS, DX, X, Y, LABELS, COUNT, x_stride, y_stride, n, total, blocks, ignored, label_words,
            scale, number, "reverse", BLOCK, STAGES, FAST,
        )  # fmt: skip
    else:
        both_blocks(
            PARTIALS, DX, X, Y, LABELS, COUNT, x_stride, y_stride, n, total, blocks, ignored, label_words,
            scale, number, "mixed", BLOCK, STAGES, FAST,
        )  # fmt: skip


@triton.jit
def backward(
    DX, DLOSS, X, Y, LABELS, COUNT, dloss_stride, x_stride, y_stride, n, total, blocks, ignored,
    label_words, scale, number, kind, each, fresh,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    if kind == 0:
        gradient_blocks(
            DX, DLOSS, X, Y, LABELS, COUNT, dloss_stride, x_stride, y_stride, n, total, blocks, ignored,
            label_words, scale, number, 0, fresh, "forward", BLOCK, STAGES, FAST,
        )  # fmt: skip
    elif kind == 1:
        gradient_blocks(
            DX, DLOSS, X, Y, LABELS, COUNT, dloss_stride, x_stride, y_stride, n, total, blocks, ignored,
            label_words, scale, number, 0, fresh, "reverse", BLOCK, STAGES, FAST,
        )  # fmt: skip
    else:
        gradient_blocks(
            DX, DLOSS, X, Y, LABELS, COUNT, dloss_stride, x_stride, y_stride, n, total, blocks, ignored,
            label_words, scale, number, 0, fresh, "mixed", BLOCK, STAGES, FAST,
        )  # fmt: skip
