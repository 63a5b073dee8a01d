"""tanh and its derivative, in fp32.

exp2 and rsqrt are one instruction on every architecture; exp and a division are five to ten. In units of
u = 2 z / log(2), with R = 2 / (1 + exp(2 z)) = rsqrt(0.5 + 0.5 exp2(u))^2, tanh(z) is 1 - R.
"""

import triton
import triton.language as tl


@triton.jit
def units(alpha):
    """u / x for z = alpha * x."""
    return alpha * 2.8853900817779268


@triton.jit
def with_small(tanh, u):
    """``tanh``, whose relative error grows towards u = 0; below 1.4 an odd polynomial, a minimax fit of the relative
    error there: 7 roundoffs of fp32."""
    square = u * u
    p = -2.696148784561883e-05 * square + 0.0006602721170074503
    p = p * square - 0.013873561260146227
    p = p * square + 0.3465734402427185
    return tl.where(tl.abs(u) < 1.4, u * p, tanh)


@triton.jit
def tanh_of(u):
    root = tl.rsqrt(0.5 + 0.5 * tl.exp2(u))
    return with_small(1.0 - root * root, u)


@triton.jit
def tanh_and_slope(u):
    """tanh, and 256 times its derivative 1 - tanh^2 = exp(-2 |z|) R^2 with R of -|u|: without cancellation, and with
    few of the subnormals that exp2 flushes to zero."""
    size = tl.abs(u)
    e = tl.exp2(8.0 - size)
    root = tl.rsqrt(0.5 + (0.5 / 256) * e)
    r = root * root
    tanh = with_small(r - 1.0, size).to(tl.int32, bitcast=True)
    tanh |= u.to(tl.int32, bitcast=True) & -2147483648  # the sign
    return tanh.to(tl.float32, bitcast=True), e * r * r
