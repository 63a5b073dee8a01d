"""What the consumer groups of ``attention_groups`` do to a block of scores: masks, packing, partial sums of rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SEE_BEFORE = gl.constexpr("{ .reg .pred p; setp.lt.s32 p, $2, $3; selp.f32 $0, $1, 0fFF800000, p; }")
SEE_FROM = gl.constexpr("{ .reg .pred p; setp.ge.s32 p, $2, $3; selp.f32 $0, $1, 0fFF800000, p; }")


@gluon.jit
def here(x):
    """x, computed where it stands. What depends on a thread's number alone would be computed before the groups part and
    take a register in all of them, also in those that have few."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.int32, False, 1)


@gluon.jit
def less_own_keys(bound, s):
    """A bound of each row of scores ``s``, less the first key of a block that a thread holds. Its keys are 8 a + 2 b +
    c, with a b of its own: so all of them have the same bound, and what differs are constants, which take no registers
    while blocks are walked."""
    OF: gl.constexpr = s.reshape([s.shape[0], s.shape[1] // 8, 4, 2]).type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, OF)))
    b = here(2 * gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, OF)))))
    bound = gl.convert_layout(bound, ROW, assert_trivial=True)
    bound = gl.expand_dims(gl.expand_dims(gl.expand_dims(bound, 1), 2), 3)
    return bound - gl.expand_dims(gl.expand_dims(gl.expand_dims(b, 0), 1), 3)


@gluon.jit
def masked(s, key, bounds, LEFT: gl.constexpr):
    """Minus infinity where a row does not see a key. ``key`` is the block's first, ``bounds`` the first key that each
    row sees and the one behind the last; the first counts only with LEFT. In assembly, as LLVM packs the answers of all
    comparisons into words first: four times the instructions."""
    first, last = bounds
    parts = s.reshape([s.shape[0], s.shape[1] // 8, 4, 2])
    OF: gl.constexpr = parts.type.layout
    a = 8 * gl.arange(0, s.shape[1] // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, OF))))
    c = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, OF))))
    own = gl.expand_dims(gl.expand_dims(gl.expand_dims(a, 0), 2), 3)
    own += gl.expand_dims(gl.expand_dims(gl.expand_dims(c, 0), 1), 2)
    last = less_own_keys(last, s) - key
    parts = gl.inline_asm_elementwise(SEE_BEFORE, "=f,f,r,r", [parts, own, last], gl.float32, True, 1)
    if LEFT:
        first = less_own_keys(first, s) - key
        parts = gl.inline_asm_elementwise(SEE_FROM, "=f,f,r,r", [parts, own, first], gl.float32, True, 1)
    return gl.convert_layout(parts.reshape(s.shape), s.type.layout, assert_trivial=True)


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
