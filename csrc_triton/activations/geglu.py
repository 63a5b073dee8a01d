"""GeGLU: y = gelu(gate) * up, with gelu(a) = a * Phi(a), Phi the normal distribution function.

``exact`` 0 takes Phi(a) ~ (1 + tanh(u)) / 2 with u = sqrt(2 / pi) * (a + 0.044715 a^3), written as the logistic
function of 2u: it keeps its relative precision where 1 + tanh(u) cancels. ``exact`` 1 takes erfc for the same reason.

Hendrycks and Gimpel, Gaussian Error Linear Units (2016); Shazeer, GLU Variants Improve Transformer (2020).
"""

import triton
import triton.language as tl

from csrc_triton.activations.elementwise import block_of
from csrc_triton.activations.gated import BACKWARD, BACKWARD_ARGUMENTS, FORWARD, FORWARD_ARGUMENTS
from csrc_triton.common.pdl_begin import begin

DECLARATION = {
    "op": "geglu",
    "kernels": {
        "geglu_forward": {"arguments": {**FORWARD_ARGUMENTS, "exact": "i32"}, **FORWARD},
        "geglu_backward": {"arguments": {**BACKWARD_ARGUMENTS, "exact": "i32"}, **BACKWARD},
    },
}


@triton.jit
def upper_tail(a, density):
    """1 - Phi(a) for a >= 0, given exp(-a^2 / 2): that times a polynomial in t = 1 / (1 + 0.35 a). Its coefficients
    are a least-maximum fit of the relative error on [0, 14]: half a roundoff of fp32."""
    t = 1.0 / (1.0 + 0.35 * a)
    p = -0.029145916923880577
    p = p * t + 0.14397165179252625
    p = p * t - 0.25571420788764954
    p = p * t + 0.1591741442680359
    p = p * t - 0.023109860718250275
    p = p * t + 0.10550802946090698
    p = p * t + 0.11983285844326019
    p = p * t + 0.13986186683177948
    p = p * t + 0.13962140679359436
    return p * t * density


@triton.jit
def gelu(a, exact):
    """(gelu(a) / a, the derivative of gelu at a)."""
    if exact != 0:
        density = tl.exp(-0.5 * a * a)
        tail = upper_tail(tl.abs(a), density)
        phi = tl.where(a < 0.0, tail, 1.0 - tail)
        slope = phi + a * density * 0.3989422804014327  # 1 / sqrt(2 pi)
    else:
        # Bounded where phi is 0 or 1 for long: a^2 may be infinite, and 0 * inf is no number.
        square = tl.minimum(a * a, 1e4)
        twice_u = a * (1.5957691216057308 + 0.07135481627260025 * square)
        e = tl.exp(-tl.abs(twice_u))
        r = 1.0 / (1.0 + e)
        phi = tl.where(twice_u < 0.0, e * r, r)
        # e r^2 is phi (1 - phi), without cancellation where phi is almost 1.
        slope = phi + a * (e * r * r) * (1.5957691216057308 + 0.21406444881780075 * square)
    return phi, slope


@triton.jit
def forward(
    Y, GATE, UP, y_stride, gate_stride, up_stride, n, blocks, exact, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    blocks = begin(blocks, PDL)
    row, first, cols, mask = block_of(n, blocks, BLOCK)
    gate = tl.load(GATE + (row * gate_stride + first) + cols, mask=mask).to(tl.float32)
    up = tl.load(UP + (row * up_stride + first) + cols, mask=mask).to(tl.float32)
    phi, _ = gelu(gate, exact)
    tl.store(Y + (row * y_stride + first) + cols, (gate * phi * up).to(Y.dtype.element_ty), mask=mask)


@triton.jit
def backward(
    DGATE, DUP, DY, GATE, UP, dgate_stride, dup_stride, dy_stride, gate_stride, up_stride, n, blocks,
    store_dgate, store_dup, exact,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, first, cols, mask = block_of(n, blocks, BLOCK)
    gate = tl.load(GATE + (row * gate_stride + first) + cols, mask=mask).to(tl.float32)
    up = tl.load(UP + (row * up_stride + first) + cols, mask=mask).to(tl.float32)
    dy = tl.load(DY + (row * dy_stride + first) + cols, mask=mask).to(tl.float32)
    phi, slope = gelu(gate, exact)
    dtype: tl.constexpr = DGATE.dtype.element_ty
    tl.store(
        DGATE + (row * dgate_stride + first) + cols,
        (dy * up * slope).to(dtype),
        mask=mask & (store_dgate != 0),
    )
    tl.store(
        DUP + (row * dup_stride + first) + cols, (dy * (gate * phi)).to(dtype), mask=mask & (store_dup != 0)
    )
