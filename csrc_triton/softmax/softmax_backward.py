"""The backward of softmax, log-softmax and sparsemax: dx from y and dy with one sum a row.

    softmax      dx = y * (dy - sum(y * dy)) * scale
    log_softmax  dx = dy - exp(y) * sum(dy)
    sparsemax    dx = dy - mean of dy over the support, on the support, which is where y > 0; else 0

Softmax gives ``scale``, 1 / temperature; sparsemax gives SPARSE; where both are None it is log-softmax. A row that
holds NaN gives NaN.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from csrc_triton.common.bf16x2 import even, odd, pack, repack
from csrc_triton.common.pipeline import (
    RowFunctions,
    RowSizes,
    load_no_scalars,
    no_finalise,
    process_rows,
    read_always,
)

# What the backwards declare.
BACKWARD_ARGUMENTS = {
    "DX": "*dtype",
    "DY": "*dtype",
    "Y": "*dtype",
    "dx_stride": "i64",
    "dy_stride": "i64",
    "y_stride": "i64",
    "n_rows": "i64",
    "n_cols": "i32",
}
BACKWARD_ALIGNED = ["DX", "DY", "Y", "dx_stride", "dy_stride", "y_stride", "n_cols"]
TILE = {"function": "backward_tile", "constants": ["ROWS", "BLOCK"], "covers": "BLOCK"}
ROW = {"function": "backward_row", "constants": ["BLOCK"], "covers": "BLOCK"}
LONG = {"function": "backward_long", "constants": ["BLOCK"]}
# repack: see ``bf16x2.repack``
ROW_REPACKED = {**ROW, "constants": ["BLOCK", "REPACK"], "defaults": {"REPACK": False}}
LONG_REPACKED = {**LONG, "constants": ["BLOCK", "REPACK"], "defaults": {"REPACK": False}}


@triton.jit
def summand(y, dy, KIND: tl.constexpr):
    """What is summed over a row."""
    if KIND == "softmax":
        return y * dy
    elif KIND == "log_softmax":
        return dy
    else:
        return tl.where(y > 0.0, dy, 0.0)


@triton.jit
def support(y):
    """1 on the support of sparsemax, else 0."""
    return tl.where(y > 0.0, 1.0, 0.0)


@triton.jit
def gradient(y, dy, c, scale, KIND: tl.constexpr):
    """dx; c is the sum of the row, or for sparsemax the mean."""
    if KIND == "softmax":
        return y * (dy - c) * scale
    elif KIND == "log_softmax":
        return dy - tl.exp(y) * c
    else:
        return tl.where(y > 0.0, dy - c, y)


@triton.jit
def backward_tile(
    DX, DY, Y, dx_stride, dy_stride, y_stride, n_rows, n_cols, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    scale=None, SPARSE: tl.constexpr = None,
):  # fmt: skip
    """ROWS whole rows a program, held in registers; n_cols <= BLOCK."""
    KIND: tl.constexpr = "sparsemax" if SPARSE else ("log_softmax" if scale is None else "softmax")
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    y = tl.load(Y + rows[:, None] * y_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(DY + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    c = tl.sum(summand(y, dy, KIND), 1)
    if KIND == "sparsemax":
        c /= tl.sum(support(y), 1)
    dx = gradient(y, dy, c[:, None], scale, KIND)
    tl.store(DX + rows[:, None] * dx_stride + cols[None, :], dx.to(DX.dtype.element_ty), mask=mask)


@triton.jit
def backward_row(
    DX, DY, Y, dx_stride, dy_stride, y_stride, n_rows, n_cols, BLOCK: tl.constexpr, REPACK: tl.constexpr = None,
    scale=None, SPARSE: tl.constexpr = None,
):  # fmt: skip
    """``backward_tile`` with one row, 1-D."""
    KIND: tl.constexpr = "sparsemax" if SPARSE else ("log_softmax" if scale is None else "softmax")
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    y = tl.load(Y + row * y_stride + cols, mask=mask, other=0.0)
    dy = tl.load(DY + row * dy_stride + cols, mask=mask, other=0.0)
    wide = y.to(tl.float32)
    c = tl.sum(summand(wide, dy.to(tl.float32), KIND), 0)
    if KIND == "sparsemax":
        c /= tl.sum(support(wide), 0)
    if REPACK:
        y = repack(y)
        dy = repack(dy)
    dx = gradient(y.to(tl.float32), dy.to(tl.float32), c, scale, KIND)
    tl.store(DX + row * dx_stride + cols, dx.to(DX.dtype.element_ty), mask=mask)


@triton.jit
def backward_blocks(
    DX, DY, Y, dx_stride, dy_stride, y_stride, n_rows, n_cols, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """Log-softmax, one row of at most BLOCKS * BLOCK columns a program. dy is read twice, the second time backwards and
    from the first-level cache. The loops are unrolled: all loads of a row are in flight together."""
    row = tl.program_id(0).to(tl.int64)
    DX += row * dx_stride
    DY += row * dy_stride
    Y += row * y_stride
    lane = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(BLOCKS):
        cols = i * BLOCK + lane
        sums += tl.load(DY + cols, mask=cols < n_cols, other=0.0, eviction_policy="evict_last").to(tl.float32)
    c = tl.sum(sums, 0)
    for i in tl.static_range(BLOCKS):
        cols = (BLOCKS - 1 - i) * BLOCK + lane
        mask = cols < n_cols
        y = tl.load(Y + cols, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        dy = tl.load(DY + cols, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        dx = gradient(y, dy, c, None, "log_softmax").to(DX.dtype.element_ty)
        tl.store(DX + cols, dx, mask=mask, eviction_policy="evict_first")


@triton.jit
def backward_long(
    DX, DY, Y, dx_stride, dy_stride, y_stride, n_rows, n_cols, BLOCK: tl.constexpr, REPACK: tl.constexpr = None,
    scale=None, SPARSE: tl.constexpr = None,
):  # fmt: skip
    """One row of any length a program. Its last columns, up to BLOCK of them, stay in registers. Those before them are
    whole blocks, without masks, read twice, the second time backwards."""
    KIND: tl.constexpr = "sparsemax" if SPARSE else ("log_softmax" if scale is None else "softmax")
    row = tl.program_id(0).to(tl.int64)
    DX += row * dx_stride
    DY += row * dy_stride
    Y += row * y_stride
    cols = tl.arange(0, BLOCK)
    blocks = (tl.maximum(n_cols, 1) - 1) // BLOCK
    sums = tl.zeros([BLOCK], tl.float32)
    counts = tl.zeros([BLOCK], tl.float32)
    for i in range(blocks):
        at = i * BLOCK + cols
        dy = tl.load(DY + at, eviction_policy="evict_last").to(tl.float32)
        if KIND == "log_softmax":
            sums += dy
        else:
            y = tl.load(Y + at, eviction_policy="evict_last").to(tl.float32)
            sums += summand(y, dy, KIND)
            if KIND == "sparsemax":
                counts += support(y)
    last_cols = blocks * BLOCK + cols
    mask = last_cols < n_cols
    y = tl.load(Y + last_cols, mask=mask, other=0.0, eviction_policy="evict_first")
    dy = tl.load(DY + last_cols, mask=mask, other=0.0, eviction_policy="evict_first")
    wide = y.to(tl.float32)
    c = tl.sum(sums + summand(wide, dy.to(tl.float32), KIND), 0)
    if KIND == "sparsemax":
        c /= tl.sum(counts + support(wide), 0)
    for i in range(blocks):
        at = (blocks - 1 - i) * BLOCK + cols
        y_i = tl.load(Y + at, eviction_policy="evict_first").to(tl.float32)
        dy_i = tl.load(DY + at, eviction_policy="evict_first").to(tl.float32)
        dx = gradient(y_i, dy_i, c, scale, KIND).to(DX.dtype.element_ty)
        tl.store(DX + at, dx, eviction_policy="evict_first")
    if REPACK:
        y = repack(y)
        dy = repack(dy)
    dx = gradient(y.to(tl.float32), dy.to(tl.float32), c, scale, KIND).to(DX.dtype.element_ty)
    tl.store(DX + last_cols, dx, mask=mask, eviction_policy="evict_first")


# The form ``pipeline`` (Gluon, Hopper), of softmax alone.


@gluon.jit
def init_sums(row, scalars, scale, LINES: gl.constexpr, layout: gl.constexpr):
    return (gl.zeros([LINES], gl.float32, gl.SliceLayout(1, layout)),)


@gluon.jit
def accumulate_products(sums, tiles, scale, dtype: gl.constexpr):
    y, dy = tiles
    if dtype == gl.float32:
        products = y * dy
    else:
        low = even(y, dtype) * even(dy, dtype)
        products = low + odd(y, dtype) * odd(dy, dtype)
    return (sums[0] + gl.sum(products, 1),)


@gluon.jit
def reduce_sums(sums, scale, dtype: gl.constexpr):
    return (gl.sum(sums[0], 0),)


@gluon.jit
def epilogue(tiles, result, scale, dtype: gl.constexpr):
    y, dy = tiles
    c = result[0]
    if dtype == gl.float32:
        return gradient(y, dy, c, scale, "softmax")
    else:
        low = gradient(even(y, dtype), even(dy, dtype), c, scale, "softmax")
        high = gradient(odd(y, dtype), odd(dy, dtype), c, scale, "softmax")
        return pack(low, high, dtype)


@gluon.jit
def backward_pipeline(
    DX, DY, Y, dx_stride, dy_stride, y_stride, n_rows, n_cols, scale,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, PREFETCH: gl.constexpr, IN_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Persistent programs, rows of any length, of which parts stay in shared memory and registers: see
    ``pipeline.process_rows``."""
    dtype: gl.constexpr = DX.dtype.element_ty
    z = RowSizes(dtype, gl.num_warps(), BLOCK, STAGES, PREFETCH, IN_REGISTERS, False, 1)
    f = RowFunctions(
        load_no_scalars, read_always, init_sums, accumulate_products, reduce_sums, epilogue, no_finalise, 0
    )
    process_rows(DX, (Y, DY), dx_stride, (y_stride, dy_stride), n_rows, n_cols, scale, f, z)
