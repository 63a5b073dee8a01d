"""A norm's vectors (weight, scale, shift) and their gradients, where they may be float32 beside rows of 16 bits.

The dtype is a run-time kind: 0 there is none, 1 the rows' dtype, 2 float32 where that is another. An axis would double
the binaries. Pointers are of the rows' dtype, offsets count elements.
"""

import triton
import triton.language as tl


@triton.jit
def as_fp32(V):
    """The same address as a pointer to fp32."""
    return V.to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def load_vector(V, cols, mask, kind, start=0, WIDE: tl.constexpr = True):
    """The columns from ``start`` on, as fp32; zeros where there is none. Masks, no branch: the next loads must be free
    to move up past these. WIDE is not set where kind 2 is ruled out: a second load, masked off, held LayerNorm's
    forward, which loads two vectors with every row, at 0.80 of the copy instead of 0.95 (H200)."""
    if WIDE and V.dtype.element_ty != tl.float32:
        v = tl.load(V + start + cols, mask=mask & (kind == 1), other=0.0).to(tl.float32)
        return v + tl.load(as_fp32(V) + start + cols, mask=mask & (kind == 2), other=0.0)
    else:
        return tl.load(V + start + cols, mask=mask & (kind != 0), other=0.0).to(tl.float32)


@triton.jit
def store_as(OUT, cols, value, mask, kind, start=0, WIDE: tl.constexpr = True):
    """Store fp32 values as what ``kind`` says OUT is; nothing where it is 0. WIDE as in ``load_vector``."""
    if WIDE and OUT.dtype.element_ty != tl.float32:
        tl.store(OUT + start + cols, value.to(OUT.dtype.element_ty), mask=mask & (kind == 1))
        tl.store(as_fp32(OUT) + start + cols, value, mask=mask & (kind == 2))
    else:
        tl.store(OUT + start + cols, value.to(OUT.dtype.element_ty), mask=mask & (kind != 0))
