"""Codes of e4m3 as values of 16 bits."""

import triton
import triton.language as tl


@triton.jit
def widened(codes, dtype: tl.constexpr, PTX: tl.constexpr):
    """fp8 codes in ``dtype``, which has them exactly (``codes`` of another dtype are only converted).

    With PTX, four codes of e4m3 at a time. The compiler's own way is one conversion a code or more, which have a
    quarter of the other instructions' throughput and less. Here exponent and mantissa move to their places in 16 bits,
    the sign beside them, and a product with a power of two corrects the exponent's bias, that of subnormal codes too.
    NaN is the code with all bits but the sign set: adding one sets the byte's top bit, which prmt copies to all 16.
    Not pure: else the compiler converts after the change of layout for a product, where each byte of V is loaded alone.
    """
    if not PTX or codes.dtype != tl.float8e4nv:
        return codes.to(dtype)
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, n, a;
            and.b32 n, $2, 0x7F7F7F7F;
            add.u32 n, n, 0x01010101;
            prmt.b32 t, $2, 0, 0x1404;
            prmt.b32 a, n, 0, 0x9988;
            shr.u32 $0, t, 4;
            lop3.b32 $0, $0, 0x07F007F0, a, 0xEA;
            lop3.b32 $0, t, 0x80008000, $0, 0xEA;
            prmt.b32 t, $2, 0, 0x3424;
            prmt.b32 a, n, 0, 0xBBAA;
            shr.u32 $1, t, 4;
            lop3.b32 $1, $1, 0x07F007F0, a, 0xEA;
            lop3.b32 $1, t, 0x80008000, $1, 0xEA;
            mov.b32 t, 0x7B807B80;
            mov.b32 a, 0x80008000;
            fma.rn.bf16x2 $0, $0, t, a;
            fma.rn.bf16x2 $1, $1, t, a;
            }""",
            "=&r,=&r,r", [codes.to(tl.int8, bitcast=True)], dtype=tl.bfloat16, is_pure=False, pack=4,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, n, a;
            and.b32 n, $2, 0x7F7F7F7F;
            add.u32 n, n, 0x01010101;
            prmt.b32 t, $2, 0, 0x1404;
            prmt.b32 a, n, 0, 0x9988;
            shr.u32 $0, t, 1;
            lop3.b32 $0, $0, 0x3F803F80, a, 0xEA;
            lop3.b32 $0, t, 0x80008000, $0, 0xEA;
            prmt.b32 t, $2, 0, 0x3424;
            prmt.b32 a, n, 0, 0xBBAA;
            shr.u32 $1, t, 1;
            lop3.b32 $1, $1, 0x3F803F80, a, 0xEA;
            lop3.b32 $1, t, 0x80008000, $1, 0xEA;
            mov.b32 t, 0x5C005C00;
            mul.rn.f16x2 $0, $0, t;
            mul.rn.f16x2 $1, $1, t;
            }""",
            "=&r,=&r,r", [codes.to(tl.int8, bitcast=True)], dtype=tl.float16, is_pure=False, pack=4,
        )  # fmt: skip
