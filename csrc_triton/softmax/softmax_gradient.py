"""The backward of softmax, log-softmax and sparsemax: dx from y and dy with one sum a row.

    softmax      dx = y * (dy - sum(y * dy)) * scale
    log_softmax  dx = dy - exp(y) * sum(dy)
    sparsemax    dx = dy - mean of dy over the support, on the support, which is where y > 0; else 0

KIND names the op. A row that holds NaN gives NaN.
"""

import triton
import triton.language as tl

from csrc_triton.common.bf16x2 import repack
from csrc_triton.common.pipeline import ROW_PIPELINE

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
BACKWARD_FORMS = {
    "tile": {"function": "backward_tile", "constants": ["ROWS", "BLOCK"], "covers": "BLOCK"},
    "row": {
        "function": "backward_row",
        "constants": ["BLOCK", "REPACK"],
        "defaults": {"REPACK": False},
        "covers": "BLOCK",
    },
    "blocks": {"function": "backward_blocks", "constants": ["BLOCK", "BLOCKS"], "covers": "BLOCKS * BLOCK"},
    "long": {
        "function": "backward_long",
        "constants": ["BLOCK", "REPACK"],
        "defaults": {"REPACK": False},
    },
}
BACKWARD = {
    "axes": {"dtype": ["bf16", "fp16", "fp32"]},
    "aligned": ["DX", "DY", "Y", "dx_stride", "dy_stride", "y_stride", "n_cols"],
    "forms": BACKWARD_FORMS,
}
# Sparsemax has no ring.
BACKWARD_WITH_RING = {
    **BACKWARD,
    "forms": {
        **BACKWARD_FORMS,
        "pipeline": {**ROW_PIPELINE, "function": "backward_ring"},
    },
}


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
    """1 on sparsemax's support, else 0."""
    return tl.where(y > 0.0, 1.0, 0.0)


@triton.jit
def gradient(y, dy, c, scale, KIND: tl.constexpr):
    """dx; c is the row's sum, sparsemax's the mean."""
    if KIND == "softmax":
        return y * (dy - c) * scale
    elif KIND == "log_softmax":
        return dy - tl.exp(y) * c
    else:
        return tl.where(y > 0.0, dy - c, y)


@triton.jit
def gradient_tile(
    DX, DY, Y, dx_stride, dy_stride, y_stride, n_rows, n_cols, scale,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """ROWS whole rows a program, held in registers; n_cols <= BLOCK."""
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
def gradient_row(
    DX, DY, Y, dx_stride, dy_stride, y_stride, n_cols, scale,
    BLOCK: tl.constexpr, REPACK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """``gradient_tile`` with one row, 1-D. REPACK: see ``packed.repack``."""
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
def gradient_blocks(
    DX, DY, Y, dx_stride, dy_stride, y_stride, n_cols, scale,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """One row of at most BLOCKS * BLOCK columns a program, read twice: the second time backwards and from the
    first-level cache. The loops are unrolled: all of a row's loads are in flight together."""
    row = tl.program_id(0).to(tl.int64)
    DX += row * dx_stride
    DY += row * dy_stride
    Y += row * y_stride
    lane = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    counts = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(BLOCKS):
        cols = i * BLOCK + lane
        mask = cols < n_cols
        dy = tl.load(DY + cols, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if KIND == "log_softmax":
            sums += dy
        else:
            y = tl.load(Y + cols, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
            sums += summand(y, dy, KIND)
            if KIND == "sparsemax":
                counts += support(y)
    c = tl.sum(sums, 0)
    if KIND == "sparsemax":
        c /= tl.sum(counts, 0)
    for i in tl.static_range(BLOCKS):
        cols = (BLOCKS - 1 - i) * BLOCK + lane
        mask = cols < n_cols
        y = tl.load(Y + cols, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        dy = tl.load(DY + cols, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        dx = gradient(y, dy, c, scale, KIND).to(DX.dtype.element_ty)
        tl.store(DX + cols, dx, mask=mask, eviction_policy="evict_first")


@triton.jit
def gradient_long(
    DX, DY, Y, dx_stride, dy_stride, y_stride, n_cols, scale,
    BLOCK: tl.constexpr, REPACK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """One row of any length a program. Its last columns, up to BLOCK of them, stay in registers; what is before them is
    whole blocks, without masks, read twice, the second time backwards."""
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
    kept_cols = blocks * BLOCK + cols
    mask = kept_cols < n_cols
    y = tl.load(Y + kept_cols, mask=mask, other=0.0, eviction_policy="evict_first")
    dy = tl.load(DY + kept_cols, mask=mask, other=0.0, eviction_policy="evict_first")
    wide = y.to(tl.float32)
    c = tl.sum(sums + summand(wide, dy.to(tl.float32), KIND), 0)
    if KIND == "sparsemax":
        c /= tl.sum(counts + support(wide), 0)
    for i in range(blocks):
        at = (blocks - 1 - i) * BLOCK + cols
        y_again = tl.load(Y + at, eviction_policy="evict_first").to(tl.float32)
        dy_again = tl.load(DY + at, eviction_policy="evict_first").to(tl.float32)
        dx = gradient(y_again, dy_again, c, scale, KIND).to(DX.dtype.element_ty)
        tl.store(DX + at, dx, eviction_policy="evict_first")
    if REPACK:
        y = repack(y)
        dy = repack(dy)
    dx = gradient(y.to(tl.float32), dy.to(tl.float32), c, scale, KIND).to(DX.dtype.element_ty)
    tl.store(DX + kept_cols, dx, mask=mask, eviction_policy="evict_first")
