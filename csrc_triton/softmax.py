"""Softmax over rows: y = exp(x / T - max) / sum, and its backward.

``scale`` is log2(e) / T forward and 1 / T backward.
"""

import triton
import triton.language as tl

from csrc_triton.softmax_gradient import gradient_blocks, gradient_long, gradient_row, gradient_tile
from csrc_triton.softmax_statistics import normalize_blocks, normalize_long, normalize_row, normalize_tile

DECLARATION = {
    "op": "softmax",
    "kernels": {
        "softmax_forward": {
            "arguments": {
                "Y": "*dtype",
                "X": "*dtype",
                "y_stride": "i64",
                "x_stride": "i64",
                "n_rows": "i64",
                "n_cols": "i32",
                "scale": "fp32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["Y", "X", "y_stride", "x_stride", "n_cols"],
            "forms": {
                "tile": {"function": "forward_tile", "constants": ["ROWS", "BLOCK"], "covers": "BLOCK"},
                "row": {"function": "forward_row", "constants": ["BLOCK"], "covers": "BLOCK"},
                "blocks": {
                    "function": "forward_blocks",
                    "constants": ["BLOCK", "BLOCKS", "HOLD", "STREAM"],
                    "defaults": {"HOLD": True, "STREAM": False},
                    "covers": "BLOCKS * BLOCK",
                },
                "long": {
                    "function": "forward_long",
                    "constants": ["BLOCK", "KEEP", "EARLY", "HOLD", "STREAM", "ACROSS", "REPACK"],
                    "defaults": {
                        "EARLY": False,
                        "HOLD": True,
                        "STREAM": False,
                        "ACROSS": False,
                        "REPACK": False,
                    },
                },
            },
        },
        "softmax_backward": {
            "arguments": {
                "DX": "*dtype",
                "DY": "*dtype",
                "Y": "*dtype",
                "dx_stride": "i64",
                "dy_stride": "i64",
                "y_stride": "i64",
                "n_rows": "i64",
                "n_cols": "i32",
                "scale": "fp32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["DX", "DY", "Y", "dx_stride", "dy_stride", "y_stride", "n_cols"],
            "forms": {
                "tile": {"function": "backward_tile", "constants": ["ROWS", "BLOCK"], "covers": "BLOCK"},
                "row": {
                    "function": "backward_row",
                    "constants": ["BLOCK", "REPACK"],
                    "defaults": {"REPACK": False},
                    "covers": "BLOCK",
                },
                "blocks": {
                    "function": "backward_blocks",
                    "constants": ["BLOCK", "BLOCKS"],
                    "covers": "BLOCKS * BLOCK",
                },
                "long": {
                    "function": "backward_long",
                    "constants": ["BLOCK", "REPACK"],
                    "defaults": {"REPACK": False},
                },
            },
        },
    },
}


@triton.jit
def forward_tile(Y, X, y_stride, x_stride, n_rows, n_cols, scale, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    normalize_tile(Y, X, y_stride, x_stride, n_rows, n_cols, scale, ROWS, BLOCK, False)


@triton.jit
def forward_row(Y, X, y_stride, x_stride, n_rows, n_cols, scale, BLOCK: tl.constexpr):
    normalize_row(Y, X, y_stride, x_stride, n_cols, scale, BLOCK, False)


@triton.jit
def forward_blocks(
    Y, X, y_stride, x_stride, n_rows, n_cols, scale, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, HOLD: tl.constexpr,
    STREAM: tl.constexpr,
):  # fmt: skip
    normalize_blocks(Y, X, y_stride, x_stride, n_cols, scale, BLOCK, BLOCKS, HOLD, STREAM, False)


@triton.jit
def forward_long(
    Y, X, y_stride, x_stride, n_rows, n_cols, scale, BLOCK: tl.constexpr, KEEP: tl.constexpr, EARLY: tl.constexpr,
    HOLD: tl.constexpr, STREAM: tl.constexpr, ACROSS: tl.constexpr, REPACK: tl.constexpr,
):  # fmt: skip
    normalize_long(
        Y, X, y_stride, x_stride, n_cols, scale, BLOCK, KEEP, EARLY, HOLD, STREAM, ACROSS, REPACK, False
    )


@triton.jit
def backward_tile(
    DX, DY, Y, dx_stride, dy_stride, y_stride, n_rows, n_cols, scale, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    gradient_tile(DX, DY, Y, dx_stride, dy_stride, y_stride, n_rows, n_cols, scale, ROWS, BLOCK, "softmax")


@triton.jit
def backward_row(
    DX, DY, Y, dx_stride, dy_stride, y_stride, n_rows, n_cols, scale, BLOCK: tl.constexpr, REPACK: tl.constexpr
):  # fmt: skip
    gradient_row(DX, DY, Y, dx_stride, dy_stride, y_stride, n_cols, scale, BLOCK, REPACK, "softmax")


@triton.jit
def backward_blocks(
    DX, DY, Y, dx_stride, dy_stride, y_stride, n_rows, n_cols, scale, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    gradient_blocks(DX, DY, Y, dx_stride, dy_stride, y_stride, n_cols, scale, BLOCK, BLOCKS, "softmax")


@triton.jit
def backward_long(
    DX, DY, Y, dx_stride, dy_stride, y_stride, n_rows, n_cols, scale, BLOCK: tl.constexpr, REPACK: tl.constexpr
):  # fmt: skip
    gradient_long(DX, DY, Y, dx_stride, dy_stride, y_stride, n_cols, scale, BLOCK, REPACK, "softmax")
