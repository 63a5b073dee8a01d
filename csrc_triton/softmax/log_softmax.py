"""Log-softmax over rows: y = x - max - log(sum of exp(x - max)), and its backward."""

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
    LOG2_E,
    normalize_blocks,
    normalize_long,
    normalize_row,
    normalize_tile,
)

DECLARATION = {
    "op": "log_softmax",
    "kernels": {
        "log_softmax_forward": {
            "arguments": FORWARD_ARGUMENTS,
            "axes": DTYPES,
            "aligned": FORWARD_ALIGNED,
            "forms": FORWARD_FORMS,
        },
        "log_softmax_backward": {"arguments": BACKWARD_ARGUMENTS, **BACKWARD_WITH_RING},
    },
}


@triton.jit
def forward_tile(Y, X, y_stride, x_stride, n_rows, n_cols, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    normalize_tile(Y, X, y_stride, x_stride, n_rows, n_cols, LOG2_E, ROWS, BLOCK, True)


@triton.jit
def forward_row(Y, X, y_stride, x_stride, n_rows, n_cols, BLOCK: tl.constexpr):
    normalize_row(Y, X, y_stride, x_stride, n_cols, LOG2_E, BLOCK, True)


@triton.jit
def forward_blocks(
    Y, X, y_stride, x_stride, n_rows, n_cols, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, HOLD: tl.constexpr,
    STREAM: tl.constexpr,
):  # fmt: skip
    normalize_blocks(Y, X, y_stride, x_stride, n_cols, LOG2_E, BLOCK, BLOCKS, HOLD, STREAM, True)


@triton.jit
def forward_long(
    Y, X, y_stride, x_stride, n_rows, n_cols, BLOCK: tl.constexpr, KEEP: tl.constexpr, EARLY: tl.constexpr,
    HOLD: tl.constexpr, STREAM: tl.constexpr, ACROSS: tl.constexpr, REPACK: tl.constexpr,
):  # fmt: skip
    normalize_long(
        Y, X, y_stride, x_stride, n_cols, LOG2_E, BLOCK, KEEP, EARLY, HOLD, STREAM, ACROSS, REPACK, True
    )


@gluon.jit
def forward_ring(
    Y, X, y_stride, x_stride, n_rows, n_cols, BLOCK: gl.constexpr, STAGES: gl.constexpr, PREFETCH: gl.constexpr,
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
        LOG2_E,
        BLOCK,
        STAGES,
        PREFETCH,
        IN_REGISTERS,
        WHOLE,
        INTERLEAVE,
        True,
    )


@triton.jit
def backward_tile(
    DX, DY, Y, dx_stride, dy_stride, y_stride, n_rows, n_cols, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    gradient_tile(DX, DY, Y, dx_stride, dy_stride, y_stride, n_rows, n_cols, 1.0, ROWS, BLOCK, "log_softmax")


@triton.jit
def backward_row(
    DX, DY, Y, dx_stride, dy_stride, y_stride, n_rows, n_cols, BLOCK: tl.constexpr, REPACK: tl.constexpr
):  # fmt: skip
    gradient_row(DX, DY, Y, dx_stride, dy_stride, y_stride, n_cols, 1.0, BLOCK, REPACK, "log_softmax")


@triton.jit
def backward_blocks(
    DX, DY, Y, dx_stride, dy_stride, y_stride, n_rows, n_cols, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    gradient_blocks(DX, DY, Y, dx_stride, dy_stride, y_stride, n_cols, 1.0, BLOCK, BLOCKS, "log_softmax")


@triton.jit
def backward_long(
    DX, DY, Y, dx_stride, dy_stride, y_stride, n_rows, n_cols, BLOCK: tl.constexpr, REPACK: tl.constexpr
):  # fmt: skip
    gradient_long(DX, DY, Y, dx_stride, dy_stride, y_stride, n_cols, 1.0, BLOCK, REPACK, "log_softmax")


@gluon.jit
def backward_ring(
    DX, DY, Y, dx_stride, dy_stride, y_stride, n_rows, n_cols, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    PREFETCH: gl.constexpr, IN_REGISTERS: gl.constexpr, WHOLE: gl.constexpr,
    INTERLEAVE: gl.constexpr,
):  # fmt: skip
    """``forward_ring`` with two tensors to read."""
    gradient_ring(
        DX, DY, Y, dx_stride, dy_stride, y_stride, n_rows, n_cols, 1.0, BLOCK, STAGES, PREFETCH, IN_REGISTERS, WHOLE,
        INTERLEAVE, "log_softmax",
    )  # fmt: skip
