"""Squared ReLU: y = max(x, 0)^2, element by element. NaN stays NaN.

So et al., Primer: Searching for Efficient Transformers for Language Modeling (2021).
"""

import triton
import triton.language as tl

from csrc_triton.activations.elementwise import block_of

DECLARATION = {
    "op": "relu_squared",
    "kernels": {
        "relu_squared_forward": {
            "arguments": {
                "Y": "*dtype",
                "X": "*dtype",
                "y_stride": "i64",
                "x_stride": "i64",
                "n": "i64",
                "blocks": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["Y", "X", "y_stride", "x_stride", "n"],
            "forms": {"flat": {"function": "forward", "constants": ["BLOCK"]}},
        },
        "relu_squared_backward": {
            "arguments": {
                "DX": "*dtype",
                "DY": "*dtype",
                "X": "*dtype",
                "dx_stride": "i64",
                "dy_stride": "i64",
                "x_stride": "i64",
                "n": "i64",
                "blocks": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["DX", "DY", "X", "dx_stride", "dy_stride", "x_stride", "n"],
            "forms": {"flat": {"function": "backward", "constants": ["BLOCK"]}},
        },
    },
}


@triton.jit
def forward(Y, X, y_stride, x_stride, n, blocks, BLOCK: tl.constexpr):
    row, first, cols, mask = block_of(n, blocks, BLOCK)
    x = tl.load(X + (row * x_stride + first) + cols, mask=mask).to(tl.float32)
    positive = tl.where(x <= 0.0, 0.0, x)
    tl.store(Y + (row * y_stride + first) + cols, (positive * positive).to(Y.dtype.element_ty), mask=mask)


@triton.jit
def backward(DX, DY, X, dx_stride, dy_stride, x_stride, n, blocks, BLOCK: tl.constexpr):
    row, first, cols, mask = block_of(n, blocks, BLOCK)
    x = tl.load(X + (row * x_stride + first) + cols, mask=mask).to(tl.float32)
    dy = tl.load(DY + (row * dy_stride + first) + cols, mask=mask).to(tl.float32)
    dx = tl.where(x <= 0.0, 0.0, 2.0 * x * dy)
    tl.store(DX + (row * dx_stride + first) + cols, dx.to(DX.dtype.element_ty), mask=mask)
