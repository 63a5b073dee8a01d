"""Softmax over rows: y = exp(x / T - max) / sum, and its backward.

``scale`` is log2(e) / T forward and 1 / T backward.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from csrc_triton.softmax.softmax_gradient import (
    BACKWARD_ARGUMENTS,
    BACKWARD_WITH_RING,
    gradient_blocks,
    gradient_long,
    gradient_row,
    gradient_tile,
)
from csrc_triton.softmax.softmax_gradient_ring import gradient_ring
from csrc_triton.softmax.softmax_ring import normalize_ring
from csrc_triton.softmax.softmax_statistics import (
    DTYPES,
    FORWARD_ALIGNED,
    FORWARD_ARGUMENTS,
    FORWARD_FORMS,
    normalize_blocks,
    normalize_long,
    normalize_row,
    normalize_tile,
)

DECLARATION = {
    "op": "softmax",
    "kernels": {
        "softmax_forward": {
            "arguments": {**FORWARD_ARGUMENTS, "scale": "fp32"},
            "axes": DTYPES,
            "aligned": FORWARD_ALIGNED,
            "forms": FORWARD_FORMS,
        },
        "softmax_backward": {"arguments": {**BACKWARD_ARGUMENTS, "scale": "fp32"}, **BACKWARD_WITH_RING},
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


@gluon.jit
def forward_ring(
    Y, X, y_stride, x_stride, n_rows, n_cols, scale, BLOCK: gl.constexpr, STAGES: gl.constexpr, PREFETCH: gl.constexpr,
    IN_REGISTERS: gl.constexpr, WHOLE: gl.constexpr,
    INTERLEAVE: gl.constexpr,
):  # fmt: skip
    """Persistent programs, a long row a step, held in shared memory and registers: see ``common/pipeline.py``."""
    normalize_ring(
        Y,
        X,
        y_stride,
        x_stride,
        n_rows,
        n_cols,
        scale,
        BLOCK,
        STAGES,
        PREFETCH,
        IN_REGISTERS,
        WHOLE,
        INTERLEAVE,
        False,
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


@gluon.jit
def backward_ring(
    DX, DY, Y, dx_stride, dy_stride, y_stride, n_rows, n_cols, scale, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    PREFETCH: gl.constexpr, IN_REGISTERS: gl.constexpr, WHOLE: gl.constexpr,
    INTERLEAVE: gl.constexpr,
):  # fmt: skip
    """``forward_ring`` with two tensors to read."""
    gradient_ring(
        DX, DY, Y, dx_stride, dy_stride, y_stride, n_rows, n_cols, scale, BLOCK, STAGES, PREFETCH, IN_REGISTERS, WHOLE,
        INTERLEAVE, "softmax",
    )  # fmt: skip
