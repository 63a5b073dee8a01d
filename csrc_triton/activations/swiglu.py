"""SwiGLU: y = silu(gate) * up, with silu(a) = a / (1 + exp(-a)).

Shazeer, GLU Variants Improve Transformer (2020).
"""

import triton
import triton.language as tl

from csrc_triton.activations.elementwise import block_of
from csrc_triton.activations.gated import BACKWARD, BACKWARD_ARGUMENTS, FORWARD, FORWARD_ARGUMENTS

DECLARATION = {
    "op": "swiglu",
    "kernels": {
        "swiglu_forward": {"arguments": FORWARD_ARGUMENTS, **FORWARD},
        "swiglu_backward": {"arguments": BACKWARD_ARGUMENTS, **BACKWARD},
    },
}


@triton.jit
def forward(Y, GATE, UP, y_stride, gate_stride, up_stride, n, blocks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row, first, cols, mask = block_of(n, blocks, BLOCK, PDL)
    gate = tl.load(GATE + (row * gate_stride + first) + cols, mask=mask).to(tl.float32)
    up = tl.load(UP + (row * up_stride + first) + cols, mask=mask).to(tl.float32)
    # The logistic function, as the square of a root: exp2 and rsqrt are one instruction each, a division is ten.
    root = tl.rsqrt(1.0 + tl.exp2(gate * -1.4426950408889634))
    y = gate * (root * root) * up
    tl.store(Y + (row * y_stride + first) + cols, y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def backward(
    DGATE, DUP, DY, GATE, UP, dgate_stride, dup_stride, dy_stride, gate_stride, up_stride, n, blocks,
    store_dgate, store_dup,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, first, cols, mask = block_of(n, blocks, BLOCK)
    gate = tl.load(GATE + (row * gate_stride + first) + cols, mask=mask).to(tl.float32)
    up = tl.load(UP + (row * up_stride + first) + cols, mask=mask).to(tl.float32)
    dy = tl.load(DY + (row * dy_stride + first) + cols, mask=mask).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    dgate = dy * up * (silu * (1.0 - sigmoid) + sigmoid)
    dtype: tl.constexpr = DGATE.dtype.element_ty
    tl.store(DGATE + (row * dgate_stride + first) + cols, dgate.to(dtype), mask=mask & (store_dgate != 0))
    tl.store(DUP + (row * dup_stride + first) + cols, (dy * silu).to(dtype), mask=mask & (store_dup != 0))
