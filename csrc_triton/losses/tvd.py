"""Total variation distance of probabilities, summed or element by element, and its gradient by x. kind is not used."""

import triton
import triton.language as tl

from csrc_triton.losses.divergence import BACKWARD, BOTH, FORWARD, both_blocks, gradient_blocks, sum_blocks

DECLARATION = {
    "op": "tvd",
    "uses": ["divergence_sums"],
    "kernels": {"tvd_forward": FORWARD, "tvd_both": BOTH, "tvd_backward": BACKWARD},
}


@triton.jit
def forward(
    LOSS, PARTIALS, X, Y, LABELS, x_stride, y_stride, n, total, blocks, ignored, label_words, number,
    kind, each,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    sum_blocks(
        LOSS, PARTIALS, X, Y, LABELS, x_stride, y_stride, n, total, blocks, ignored, label_words, number,
        each, "total_variation", BLOCK, STAGES, FAST,
    )  # fmt: skip


@triton.jit
def both(
    PARTIALS, DX, X, Y, LABELS, COUNT, x_stride, y_stride, n, total, blocks, ignored, label_words, scale,
    number, kind,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    both_blocks(
        PARTIALS, DX, X, Y, LABELS, COUNT, x_stride, y_stride, n, total, blocks, ignored, label_words,
        scale, number, "total_variation", BLOCK, STAGES, FAST,
    )  # fmt: skip


@triton.jit
def backward(
    DX, DLOSS, X, Y, LABELS, COUNT, dloss_stride, x_stride, y_stride, n, total, blocks, ignored,
    label_words, scale, number, kind, each, fresh,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    gradient_blocks(
        DX, DLOSS, X, Y, LABELS, COUNT, dloss_stride, x_stride, y_stride, n, total, blocks, ignored,
        label_words, scale, number, each, fresh, "total_variation", BLOCK, STAGES, FAST,
    )  # fmt: skip
