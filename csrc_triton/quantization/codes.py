"""How values become 8-bit codes and scales: what all kernels of this family share.

A dynamic scale is s = max(min(absmax, bound), floor) / largest, in fp32, rounded up to a power of two where that is
asked for (ue8m0); absmax passes over NaN. A code is value / s, correctly rounded to fp32 and then, to nearest even, to
the codes' dtype. A static scale, one for the whole tensor, multiplies by 1 / s instead. Both are vLLM's forms.

``largest`` is 448 for e4m3, 224 for e4m3fnuz (vLLM's choice: that dtype reaches 240) and 127 for int8; what lies beyond
becomes it. NaN stays NaN in fp8 and is 0 in int8. An infinite absmax gives an infinite scale, with which finite values
become 0 and infinite ones NaN.

Constants: STATIC, whether the scale is given; GROUP, how many columns share a scale, 0 where a whole row does.
"""

import triton
import triton.language as tl

from csrc_triton.common.bf16x2 import greater_pairs, round_pairs, widen_pairs
from csrc_triton.common.target import target

FLOOR_OF_GROUPS = tl.constexpr(1e-10)  # of a group's absmax, and of int8's: vLLM's eps
FLOOR_OF_ROWS = tl.constexpr(
    0.001953125
)  # of a row's absmax in fp8: s is at least 1 / (448 * 512), as vLLM's
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, in the lowest bits


@triton.constexpr_function
def largest_of(dtype):
    """The largest value of a code."""
    if dtype == tl.int8:
        return 127.0
    return 224.0 if dtype == tl.float8e4b8 else 448.0


@triton.constexpr_function
def floor_of(dtype, group):
    """The least absmax that a scale is made of. For fp8 by rows it is 1 / 512, whatever ``largest`` is."""
    return FLOOR_OF_ROWS.value if group == 0 and dtype != tl.int8 else FLOOR_OF_GROUPS.value


@triton.jit
def rounded(x, dtype: tl.constexpr, PDL: tl.constexpr):
    """fp32 values in ``dtype``. Where there is programmatic dependent launch there is PTX, too."""
    if PDL and dtype != tl.float32:
        return round_pairs(x, dtype)
    else:
        return x.to(dtype)


@triton.jit
def widened(x, PDL: tl.constexpr):
    """Values in fp32."""
    if PDL and x.dtype != tl.float32:
        return widen_pairs(x)
    else:
        return x.to(tl.float32)


@triton.jit
def zeros_like_sizes(shape, dtype: tl.constexpr, PDL: tl.constexpr):
    """What ``greater`` begins with."""
    return tl.zeros(shape, dtype if PDL and dtype != tl.float32 else tl.float32)


@triton.jit
def greater(greatest, y, PDL: tl.constexpr):
    """The greater of ``greatest`` and abs(y), which passes over NaN: 16-bit pairs where there is PTX."""
    if PDL and y.dtype != tl.float32:
        return greater_pairs(greatest, y)
    else:
        return tl.maximum(greatest, tl.abs(y.to(tl.float32)))


@triton.jit
def columns(BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """BLOCK columns: in a line, or as a tile with a group a row."""
    if GROUP > 0:
        return tl.arange(0, BLOCK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    else:
        return tl.arange(0, BLOCK)


@triton.jit
def bound_of(BOUND, has_bound):
    """The upper bound of absmax."""
    return tl.load(BOUND, mask=has_bound != 0, other=float("inf"))


@triton.jit
def scale_of(absmax, bound, powers, FLOOR: tl.constexpr, LARGEST: tl.constexpr):
    """A dynamic scale; ``powers``: the next power of two from it on."""
    top = tl.maximum(tl.minimum(absmax, bound), FLOOR)
    by: tl.constexpr = 1.0 / LARGEST
    q = top * by
    s = tl.where(top == float("inf"), top, tl.fma(tl.fma(q, LARGEST, -top), -by, q))
    bits = s.to(tl.int32, bitcast=True)
    bits = tl.where(powers != 0, (bits + 0x7FFFFF) & 0x7F800000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def reciprocal_of(s):
    """(1 / s negated, s) for ``divide``, where an infinite s is 0: else its remainders were NaN. One Newton step makes
    of the fast reciprocal the correctly rounded one, except for at most 39 of the 2^23 mantissas, if the fast one is 2
    units in the last place off there; a test on a GPU compares the codes of all mantissas. div.rn, which has a branch
    for special values, took a fifth of the copy's speed (H200) and makes swiglu_quantize's longest rows spill."""
    fast = 1.0 / s
    finite = tl.where(s == float("inf"), 0.0, s)
    return tl.fma(tl.fma(finite, fast, -1.0), fast, fast * -1.0), finite


@triton.jit
def divide(values, minus, s):
    """values / s, correctly rounded, from the correctly rounded reciprocal, negated (Markstein, 1990). A negative zero
    stays one: what would be 0 - 0 elsewhere is a product here, and
    -values, which would be 0 - values, an instruction of its own, as well."""
    q = values * (minus * -1.0)
    return tl.fma(tl.fma(q, s, values * -1.0), minus, q)


@triton.jit
def to_e4m3(q):
    """fp32 to e4m3, rounded once and saturated, by the instruction that 8.9 has as well as 9.0 and later. PTX only."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
        }""",
        "=r,f,f,f,f", [q], dtype=tl.float8e4nv, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def encode(q, dtype: tl.constexpr):
    """Codes of what was divided by its scale."""
    LARGEST: tl.constexpr = largest_of(dtype)
    if dtype == tl.int8:
        q = tl.where(q == q, q, 0.0)
        q = tl.minimum(tl.maximum(q, -LARGEST), LARGEST)
        return (q + ROUNDER).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        if dtype == tl.float8e4b8:  # sm90's conversion saturates by itself, at e4m3's largest
            q = tl.where(q > LARGEST, LARGEST, tl.where(q < -LARGEST, -LARGEST, q))
        # For 8.9 Triton 3.6.0 rounds to fp16 on the way (cvt.rz.f16.f32, then cvt.rn.satfinite.e4m3x2.f16x2): a value
        # just above the middle of two codes may get the lower one.
        if dtype == tl.float8e4nv and target() == "sm89":
            return to_e4m3(q)
        else:
            return q.to(dtype)


@triton.jit
def reciprocal_in(SCALE):
    """1 / the scale of a whole tensor."""
    return tl.div_rn(1.0, tl.load(SCALE))


@triton.jit
def store_static(Q, values, cols, mask, reciprocal):
    """Codes by a scale for the whole tensor."""
    tl.store(Q + cols, encode(values * reciprocal, Q.dtype.element_ty), mask=mask)


@triton.jit
def store_with(Q, values, cols, mask, s):
    """Codes of values that share the scale ``s``."""
    minus, finite = reciprocal_of(s)
    q = divide(values, minus, finite)
    tl.store(Q + cols, encode(q, Q.dtype.element_ty), mask=mask)


@triton.jit
def store_groups(
    Q, S, s_step, values, start, n, mask, bound, powers, BLOCK: tl.constexpr, GROUP: tl.constexpr
):
    """Codes and scales of the groups of a tile whose first column is ``start``; S is the row's first scale, and scales
    lie ``s_step`` apart."""
    dtype: tl.constexpr = Q.dtype.element_ty
    s = scale_of(tl.max(tl.abs(values), 1), bound, powers, floor_of(dtype, GROUP), largest_of(dtype))
    groups = start // GROUP + tl.arange(0, BLOCK // GROUP)
    tl.store(S + groups * s_step, s, mask=groups * GROUP < n)
    minus, finite = reciprocal_of(s)
    q = divide(values, minus[:, None], finite[:, None])
    tl.store(Q + (start + columns(BLOCK, GROUP)), encode(q, dtype), mask=mask)
