"""Loads and stores that the norms share: vectors (weight, scale, shift) that may be fp32 beside rows of 16 bits, rows,
blocks of a row.

A vector's dtype is a run-time kind: 0 there is none, 1 the rows' dtype, 2 fp32 where the rows' dtype is another. An
axis would double the binaries. Pointers are of the rows' dtype, offsets count elements.
"""

import triton
import triton.language as tl
from triton.language.core import _aggregate as aggregate


@aggregate
class Rows:
    """The first row of a tensor and the distance between rows, in elements."""

    pointer: tl.tensor
    stride: tl.tensor

    @triton.constexpr_function
    def __init__(self, pointer, stride):
        self.pointer, self.stride = pointer, stride


# No methods: Triton's interpreter does not know those of aggregates.
@triton.jit
def row_at(rows, i):
    """A pointer to the ``i``-th row of ``Rows``."""
    return rows.pointer + i * rows.stride


@triton.jit
def tile_at(rows, i, cols):
    """Pointers to a tile of rows ``i`` and columns."""
    return rows.pointer + i[:, None] * rows.stride + cols[None, :]


@triton.jit
def as_fp32(V):
    """The same address as a pointer to fp32."""
    return V.to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def load_vector(V, cols, mask, kind, start=0, WIDE: tl.constexpr = True):
    """The columns from ``start`` on, as fp32; zeros where there is no vector. Masks, no branch: the next loads must be
    free to move up past these. Without WIDE kind 2 is ruled out: a second load, masked off, slowed LayerNorm's forward,
    which loads two vectors with every row, from 0.95 of the copy to 0.80 (H200)."""
    if WIDE and V.dtype.element_ty != tl.float32:
        v = tl.load(V + start + cols, mask=mask & (kind == 1), other=0.0).to(tl.float32)
        return v + tl.load(as_fp32(V) + start + cols, mask=mask & (kind == 2), other=0.0)
    else:
        return tl.load(V + start + cols, mask=mask & (kind != 0), other=0.0).to(tl.float32)


@triton.jit
def load_packed(V, cols, mask, kind):
    """A vector of the rows' dtype as it is, for ``unpacked``: of 16 bits, it takes half the registers until then."""
    return tl.load(V + cols, mask=mask & (kind == 1), other=0.0)


@triton.jit
def unpacked(v, V, cols, mask, kind):
    """What ``load_packed`` gave as fp32; a vector that is fp32 beside rows of 16 bits is read here, after the sums that
    it was not waited for."""
    v = v.to(tl.float32)
    if V.dtype.element_ty != tl.float32:
        v += tl.load(as_fp32(V) + cols, mask=mask & (kind == 2), other=0.0)
    return v


@triton.jit
def store_as(OUT, cols, value, mask, kind, start=0, WIDE: tl.constexpr = True):
    """Store fp32 values as the dtype that ``kind`` says OUT has; nothing where it is 0. WIDE as in ``load_vector``."""
    if WIDE and OUT.dtype.element_ty != tl.float32:
        tl.store(OUT + start + cols, value.to(OUT.dtype.element_ty), mask=mask & (kind == 1))
        tl.store(as_fp32(OUT) + start + cols, value, mask=mask & (kind == 2))
    else:
        tl.store(OUT + start + cols, value.to(OUT.dtype.element_ty), mask=mask & (kind != 0))


@triton.jit
def load_blocks(X, n_cols, block, BLOCKS: tl.constexpr):
    """A row in blocks whose loads are all in flight before the first value is used; zeros past its end. The caches keep
    it for a second read."""
    xs = ()
    for i in tl.static_range(BLOCKS):
        cols = i * block.shape[0] + block
        xs += (tl.load(X + cols, mask=cols < n_cols, other=0.0, eviction_policy="evict_last"),)
    tl.debug_barrier()  # or the compiler moves the loads down to where they are used
    return xs


@triton.jit
def add_in_memory(SUMS, value, mask, is_first):
    """Add to sums in memory that this program alone writes; the first time they are not read."""
    before = tl.load(SUMS, mask=mask & (is_first == 0), other=0.0)
    tl.store(SUMS, before + value, mask=mask)
