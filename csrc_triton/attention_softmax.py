"""What the consumer groups of ``attention_groups`` do to a block of scores: masks, packing, partial sums of rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def masked(s, key, bounds, LEFT: gl.constexpr):
    """Minus infinity where a row does not see a key. ``key`` is the block's first, ``bounds`` the first key that each
    row sees and the one behind the last; the first counts only with LEFT."""
    first, last = bounds
    keys = gl.expand_dims(key + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout)), 0)
    s = gl.where(keys < gl.expand_dims(last, 1), s, float("-inf"))
    if LEFT:
        s = gl.where(keys >= gl.expand_dims(first, 1), s, float("-inf"))
    return s


@gluon.jit
def soft_cap(s, inner):
    """tanh(s * inner), or s where inner is 0."""
    if inner != 0.0:
        s = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [s * inner], gl.float32, True, 1)
    return s


@gluon.jit
def pack(e, dtype: gl.constexpr):
    """[M, N] of fp32 to [M, N / 2] of int32 that hold two values of ``dtype`` each."""
    low, high = gl.split(e.reshape([e.shape[0], e.shape[1] // 2, 2]))
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, True, 1
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, True, 1
        )


@gluon.jit
def unpack(x, dtype: gl.constexpr, layout: gl.constexpr, N: gl.constexpr):
    """What ``pack`` packed, as the operand of a product; no value moves."""
    low = x.to(gl.int16).to(dtype, bitcast=True)
    high = (x >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.convert_layout(gl.join(low, high).reshape([x.shape[0], N]), layout, assert_trivial=True)


@gluon.jit
def row_parts(e):
    """The sums of what each thread holds of a row, [M, 4]: the four threads of a row add up once, at the end."""
    return gl.sum(gl.sum(e.reshape([e.shape[0], e.shape[1] // 8, 4, 2]), 3), 1)
