"""bf16x2 and fp16x2: two 16-bit elements in one 32-bit register.

The compiler gives each 16-bit element of a tensor a register of its own, and keeps fp32 copies that were made before a
reduction alive across it. Long rows run out of registers that way. ``repack`` ends the life of the copies; the other
functions work on rows that were loaded as int32.
"""

import triton
import triton.language as tl


@triton.jit
def repack(x):
    """Identity on a 16-bit tensor, opaque to the compiler: later uses convert it again from packed registers, instead
    of keeping the fp32 copies. PTX only."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)


@triton.jit
def round_pairs(x, dtype: tl.constexpr):
    """fp32 values in ``dtype``, one instruction a pair: one by one the conversion takes the pipeline of exp, which has
    an eighth of the others' width. PTX only."""
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.jit
def widen_pairs(x):
    """A 16-bit tensor in fp32, an instruction an element: where the compiler splits a pair of bfloat16 first, the upper
    one takes two. PTX only."""
    if x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=&r,=r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return x.to(tl.float32)


@triton.jit
def multiply_pairs(x, y):
    """x * y of two 16-bit tensors, rounded once, one instruction a pair. PTX of 9.0 and later only."""
    if x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.jit
def greater_pairs(greatest, x):
    """The greater of ``greatest`` and abs(x), passing over NaN, one instruction a pair. PTX only."""
    if x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 size; abs.bf16x2 size, $2; max.bf16x2 $0, $1, size; }",
            "=r,r,r", [greatest, x], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 size; abs.f16x2 size, $2; max.f16x2 $0, $1, size; }",
            "=r,r,r", [greatest, x], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def even(x2, dtype: tl.constexpr):
    """The even (low) element of each pair, as fp32."""
    if dtype == tl.bfloat16:
        return (x2 << 16).to(tl.float32, bitcast=True)
    else:
        return x2.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def odd(x2, dtype: tl.constexpr):
    """The odd (high) element of each pair, as fp32."""
    if dtype == tl.bfloat16:
        return (x2 & -65536).to(tl.float32, bitcast=True)
    else:
        return (x2 >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def pack(low, high, dtype: tl.constexpr):
    """Round two fp32 tensors to ``dtype`` and pack them, low elements even: one instruction a pair. PTX only."""
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def bf16_parts(x):
    """An fp32 tensor as the sum of three of bfloat16, to the last bit."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)
