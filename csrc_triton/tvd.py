"""Total variation distance of probabilities, summed or element by element, and its gradient by x. kind is not used."""

import triton
import triton.language as tl

from csrc_triton.divergence import both_blocks, gradient_blocks, sum_blocks

DECLARATION = {
    "op": "tvd",
    "kernels": {
        "tvd_forward": {
            "arguments": {
                "LOSS": "*fp32",
                "PARTIALS": "*fp32",
                "X": "*dtype",
                "Y": "*dtype",
                "LABELS": "*i32",
                "x_stride": "i64",
                "y_stride": "i64",
                "n": "i64",
                "total": "i32",
                "blocks": "i32",
                "ignored": "i64",
                "label_words": "i32",
                "number": "fp32",
                "kind": "i32",
                "each": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["LOSS", "X", "Y", "x_stride", "y_stride", "n"],
            "forms": {
                "walk": {
                    "function": "forward",
                    "constants": ["BLOCK", "STAGES", "FAST"],
                    "defaults": {"STAGES": 1, "FAST": False},
                    "staged": ["X", "Y"],
                }
            },
        },
        "tvd_both": {
            "arguments": {
                "PARTIALS": "*fp32",
                "DX": "*dtype",
                "X": "*dtype",
                "Y": "*dtype",
                "LABELS": "*i32",
                "COUNT": "*fp32",
                "x_stride": "i64",
                "y_stride": "i64",
                "n": "i64",
                "total": "i32",
                "blocks": "i32",
                "ignored": "i64",
                "label_words": "i32",
                "scale": "fp32",
                "number": "fp32",
                "kind": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["DX", "X", "Y", "x_stride", "y_stride", "n"],
            "forms": {
                "walk": {
                    "function": "both",
                    "constants": ["BLOCK", "STAGES", "FAST"],
                    "defaults": {"STAGES": 1, "FAST": False},
                    "staged": ["X", "Y"],
                }
            },
        },
        "tvd_backward": {
            "arguments": {
                "DX": "*dtype",
                "DLOSS": "*fp32",
                "X": "*dtype",
                "Y": "*dtype",
                "LABELS": "*i32",
                "COUNT": "*fp32",
                "dloss_stride": "i64",
                "x_stride": "i64",
                "y_stride": "i64",
                "n": "i64",
                "total": "i32",
                "blocks": "i32",
                "ignored": "i64",
                "label_words": "i32",
                "scale": "fp32",
                "number": "fp32",
                "kind": "i32",
                "each": "i32",
                "fresh": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["DX", "DLOSS", "X", "Y", "dloss_stride", "x_stride", "y_stride", "n"],
            "forms": {
                "walk": {
                    "function": "backward",
                    "constants": ["BLOCK", "STAGES", "FAST"],
                    "defaults": {"STAGES": 1, "FAST": False},
                    "staged": ["X", "Y"],
                }
            },
        },
    },
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
