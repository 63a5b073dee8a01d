"""Kullback-Leibler divergence of log-probabilities x from y, summed or element by element, and its gradient by x.

kind: 0, y holds probabilities; 1, log-probabilities.
"""

import triton
import triton.language as tl

from csrc_triton.losses.divergence import BACKWARD, BOTH, FORWARD, both_blocks, gradient_blocks, sum_blocks

DECLARATION = {
    "op": "kl_div",
    "uses": ["divergence_sums"],
    "kernels": {"kl_div_forward": FORWARD, "kl_div_both": BOTH, "kl_div_backward": BACKWARD},
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
            number, each, "probabilities", BLOCK, STAGES, FAST,
        )  # fmt: skip
    else:
        sum_blocks(
            LOSS, PARTIALS, X, Y, LABELS, x_stride, y_stride, n, total, blocks, ignored, label_words,
            number, each, "forward", BLOCK, STAGES, FAST,
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
            scale, number, "probabilities", BLOCK, STAGES, FAST,
        )  # fmt: skip
    else:
        both_blocks(
            PARTIALS, DX, X, Y, LABELS, COUNT, x_stride, y_stride, n, total, blocks, ignored, label_words,
            scale, number, "forward", BLOCK, STAGES, FAST,
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
            label_words, scale, number, each, fresh, "probabilities", BLOCK, STAGES, FAST,
        )  # fmt: skip
    else:
        gradient_blocks(
            DX, DLOSS, X, Y, LABELS, COUNT, dloss_stride, x_stride, y_stride, n, total, blocks, ignored,
            label_words, scale, number, each, fresh, "forward", BLOCK, STAGES, FAST,
        )  # fmt: skip
