"""Codes of e4m3 beside queries: products in fp16, which has the codes exactly and is one instruction a pair away.

To bf16 the compiler converts through fp16 and fp32, which takes longer than loading the codes; shifts and masks in its
place took as long. So queries of bf16 become fp16, rows scaled by powers of two; P is fp16, too. PTX says that this
may be done: NVIDIA's instructions, but not with tcgen05, for which the compiler's pipeline takes pure functions alone.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def product_dtype(dtype, cache, PTX):
    """The dtype of products of queries with a cache. PTX: fp16 with codes, though the queries are bf16."""
    return tl.float16 if PTX and cache == tl.float8e4nv else dtype


@triton.jit
def queries_in(q, dtype: tl.constexpr):
    """(rows of q in ``dtype``, by what their scores are multiplied). bf16 in fp16: times the power of two that brings
    a row's largest element to [2^13, 2^14), exactly but for elements below 2^-31 of it."""
    if q.dtype == dtype:
        return q, tl.full([q.shape[0]], 1.0, tl.float32)
    else:
        peak = tl.max(tl.abs(q.to(tl.float32)), 1)
        exponent = tl.maximum(peak.to(tl.int32, bitcast=True) >> 23, 40)
        by = ((267 - exponent) << 23).to(tl.float32, bitcast=True)
        back = ((exponent - 13) << 23).to(tl.float32, bitcast=True)
        return (q.to(tl.float32) * by[:, None]).to(dtype), back


@triton.jit
def widened(codes, dtype: tl.constexpr, PTX: tl.constexpr, IN_PLACE: tl.constexpr):
    """A cache's elements in ``dtype``. IN_PLACE: codes are converted before the change of layout for a product, where
    each byte of V would be loaded alone; else after it (the compiler moves what is pure)."""
    if PTX and codes.dtype == tl.float8e4nv:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=&r,=r,r", [codes.to(tl.int8, bitcast=True)], dtype=tl.float16, is_pure=not IN_PLACE, pack=4,
        )  # fmt: skip
    else:
        return codes.to(dtype)
