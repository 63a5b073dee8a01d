"""Residual addition and RMSNorm in one pass: sum = x + residual, y = rmsnorm(sum) * (offset + weight).

``sum`` is rounded to the dtype first and everything else is computed from the rounded values, so that the backward,
which reads ``sum`` alone, sees what the forward saw. Statistics are fp32, row offsets int64, the length of a row a
run-time argument. ``has_weight`` is a kind of ``norm_vectors``.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from csrc_triton.common.norm_ring import halves_of, plus, ring_layout, store_halves, walk_ring
from csrc_triton.common.packed import repack
from csrc_triton.common.ring_forms import NORM_RING
from csrc_triton.norms.norm_vectors import load_vector, store_as
from csrc_triton.norms.rmsnorm_pairs import walk_rows

DECLARATION = {
    "op": "fused_add_rmsnorm",
    "uses": ["column_sums"],
    "kernels": {
        "fused_add_rmsnorm_forward": {
            "arguments": {
                "Y": "*dtype", "SUM": "*dtype", "X": "*dtype", "RESIDUAL": "*dtype", "W": "*dtype", "RSTD": "*fp32",
                "y_stride": "i64", "sum_stride": "i64", "x_stride": "i64", "residual_stride": "i64",
                "n_rows": "i64", "n_cols": "i32", "eps": "fp32", "offset": "fp32", "has_weight": "i32",
                "round_first": "i32", "store_rstd": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": [
                "Y", "SUM", "X", "RESIDUAL", "W", "y_stride", "sum_stride", "x_stride", "residual_stride", "n_cols",
            ],
            "forms": {
                "tile": {
                    "function": "forward_tile",
                    "constants": ["ROWS", "BLOCK"],
                    "covers": "BLOCK",
                },
                "row": {"function": "forward_row", "constants": ["BLOCK"], "covers": "BLOCK"},
                "long": {
                    "function": "forward_long",
                    "constants": ["BLOCK", "BLOCKS", "KEEP", "REPACK"],
                    "defaults": {"BLOCKS": 0, "KEEP": 0, "REPACK": False},
                    "covers": "KEEP + BLOCKS * BLOCK",
                    "any_length": "BLOCKS",
                },
            },
        },
        "fused_add_rmsnorm_backward": {
            "arguments": {
                "DX": "*dtype", "DY": "*dtype", "DSUM": "*dtype", "SUM": "*dtype", "W": "*dtype", "RSTD": "*fp32",
                "DW": "*dtype", "PARTIALS": "*fp32", "WORDS": "*i64", "dx_stride": "i64", "dy_stride": "i64",
                "dsum_stride": "i64", "sum_stride": "i64", "n_rows": "i64", "n_cols": "i32", "offset": "fp32",
                "has_weight": "i32", "has_dsum": "i32", "store_dx": "i32", "store_partials": "i32",
                "store_dw": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "host": ["lone_rows"],
            "aligned": [
                "DX", "DY", "DSUM", "SUM", "W", "DW", "PARTIALS", "dx_stride", "dy_stride", "dsum_stride",
                "sum_stride", "n_cols",
            ],
            "forms": {
                "tile": {
                    "function": "backward_tile",
                    "constants": ["ROWS", "BLOCK", "STAGES"],
                    "covers": "BLOCK",
                    "staged": ["DY", "DSUM", "SUM"],
                },
                "row": {
                    "function": "backward_row",
                    "constants": ["BLOCK", "STAGES"],
                    "covers": "BLOCK",
                    "staged": ["DY", "DSUM", "SUM"],
                },
                "long": {"function": "backward_long", "constants": ["ROWS", "BLOCK"]},
                "pairs": {
                    "function": "backward_pairs",
                    "constants": ["SPLIT", "BLOCK", "STAGES", "EXACT"],
                    "defaults": {"EXACT": False},
                    "contiguous": True,
                    "covers": "2 * SPLIT * BLOCK",
                    "requires": {"dtype": ["bf16", "fp16"], "aligned": [True]},
                    "cooperative": "SPLIT",
                    "may_spill": "168 registers let half as many programs again hide the exchange",
                },
                "ring": {**NORM_RING, "function": "backward_ring"},
            },
        },
    },
}  # fmt: skip


@triton.jit
def scaled(h, rstd, w, round_first, dtype: tl.constexpr):
    """y in ``dtype`` from the sum in fp32; a select, not a branch: loads must be free to move past it."""
    y = h * rstd
    return (tl.where(round_first != 0, y.to(dtype).to(tl.float32), y) * w).to(dtype)


@triton.jit
def forward_tile(
    Y, SUM, X, RESIDUAL, W, RSTD, y_stride, sum_stride, x_stride, residual_stride, n_rows, n_cols, eps, offset,
    has_weight, round_first, store_rstd,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS short rows a program, held in registers."""
    dtype: tl.constexpr = X.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    in_row = cols < n_cols
    mask = (rows < n_rows)[:, None] & in_row[None, :]
    x = tl.load(X + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(RESIDUAL + rows[:, None] * residual_stride + cols[None, :], mask=mask, other=0.0)
    w = load_vector(W, cols, in_row, has_weight) + offset
    total = (x + residual.to(tl.float32)).to(dtype)
    tl.store(SUM + rows[:, None] * sum_stride + cols[None, :], total, mask=mask)
    h = total.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(h * h, 1) / n_cols + eps)
    tl.store(RSTD + rows, rstd, mask=(rows < n_rows) & (store_rstd != 0))
    y = scaled(h, rstd[:, None], w[None, :], round_first, dtype)
    tl.store(Y + rows[:, None] * y_stride + cols[None, :], y, mask=mask)


@triton.jit
def forward_row(
    Y, SUM, X, RESIDUAL, W, RSTD, y_stride, sum_stride, x_stride, residual_stride, n_rows, n_cols, eps, offset,
    has_weight, round_first, store_rstd,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``forward_tile`` with one row a program, 1-D."""
    dtype: tl.constexpr = X.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    x = tl.load(X + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(RESIDUAL + row * residual_stride + cols, mask=mask, other=0.0).to(tl.float32)
    w = load_vector(W, cols, mask, has_weight) + offset
    total = (x + residual).to(dtype)
    tl.store(SUM + row * sum_stride + cols, total, mask=mask)
    h = total.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(h * h, 0) / n_cols + eps)
    if store_rstd != 0:
        tl.store(RSTD + row, rstd)
    tl.store(Y + row * y_stride + cols, scaled(h, rstd, w, round_first, dtype), mask=mask)


@triton.jit
def add_block(X, RESIDUAL, cols, n_cols, EVICT: tl.constexpr):
    """The sum of one block of a row, rounded to the dtype."""
    mask = cols < n_cols
    x = tl.load(X + cols, mask=mask, other=0.0, eviction_policy=EVICT)
    residual = tl.load(RESIDUAL + cols, mask=mask, other=0.0, eviction_policy=EVICT)
    return (x.to(tl.float32) + residual.to(tl.float32)).to(X.dtype.element_ty)


@triton.jit
def forward_long(
    Y, SUM, X, RESIDUAL, W, RSTD, y_stride, sum_stride, x_stride, residual_stride, n_rows, n_cols, eps, offset,
    has_weight, round_first, store_rstd,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, KEEP: tl.constexpr, REPACK: tl.constexpr,
):  # fmt: skip
    """One row of any length a program. x and residual are read twice, the second time from the cache and last block
    first, and nothing is written before: so both results may lie over the arguments. The sum of KEEP columns is held
    in registers; BLOCKS, where it is known, unrolls the loops, so that the blocks' loads are in flight together."""
    dtype: tl.constexpr = X.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    X += row * x_stride
    RESIDUAL += row * residual_stride
    Y += row * y_stride
    SUM += row * sum_stride
    block = tl.arange(0, BLOCK)
    if BLOCKS > 0:
        blocks = BLOCKS
    else:
        blocks = tl.cdiv(tl.maximum(n_cols - KEEP, 0), BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for i in range(blocks):
        h = add_block(X, RESIDUAL, KEEP + i * BLOCK + block, n_cols, "evict_last").to(tl.float32)
        squares += h * h
    square_sum = tl.sum(squares, 0)
    if KEEP > 0:
        kept = add_block(X, RESIDUAL, tl.arange(0, KEEP), n_cols, "evict_first")
        h = kept.to(tl.float32)
        square_sum += tl.sum(h * h, 0)
    rstd = tl.rsqrt(square_sum / n_cols + eps)
    if store_rstd != 0:
        tl.store(RSTD + row, rstd)
    for i in range(blocks):
        cols = KEEP + (blocks - 1 - i) * BLOCK + block
        total = add_block(X, RESIDUAL, cols, n_cols, "evict_first")
        w = load_vector(W, cols, cols < n_cols, has_weight) + offset
        y = scaled(total.to(tl.float32), rstd, w, round_first, dtype)
        tl.store(SUM + cols, total, mask=cols < n_cols, eviction_policy="evict_first")
        tl.store(Y + cols, y, mask=cols < n_cols, eviction_policy="evict_first")
    if KEEP > 0:
        cols = tl.arange(0, KEEP)
        if REPACK:
            kept = repack(kept)
        w = load_vector(W, cols, cols < n_cols, has_weight) + offset
        y = scaled(kept.to(tl.float32), rstd, w, round_first, dtype)
        tl.store(SUM + cols, kept, mask=cols < n_cols, eviction_policy="evict_first")
        tl.store(Y + cols, y, mask=cols < n_cols, eviction_policy="evict_first")


@triton.jit
def store_sums(dw, DW, PARTIALS, cols, mask, has_weight, store_partials, store_dw):
    """A program's sums of dw: one row of the partials or, from a lone program, the gradient itself."""
    tl.store(PARTIALS + cols, dw, mask=mask & (store_partials != 0))
    store_as(DW, cols, dw, mask & (store_dw != 0), has_weight)


@triton.jit
def backward_tile(
    DX, DY, DSUM, SUM, W, RSTD, DW, PARTIALS, WORDS, dx_stride, dy_stride, dsum_stride, sum_stride, n_rows, n_cols,
    offset, has_weight, has_dsum, store_dx, store_partials, store_dw,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Persistent programs, ROWS short rows a step; the next steps' loads are in flight meanwhile."""
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    in_row = cols < n_cols
    w = load_vector(W, cols, in_row, has_weight) + offset
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in tl.range(program, tl.cdiv(n_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = step * ROWS + tl.arange(0, ROWS)
        mask = (rows < n_rows)[:, None] & in_row[None, :]
        h = tl.load(SUM + rows[:, None] * sum_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(DY + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dsum_at = DSUM + rows[:, None] * dsum_stride + cols[None, :]
        dsum = tl.load(dsum_at, mask=mask & (has_dsum != 0), other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + rows, mask=rows < n_rows, other=0.0)
        c = tl.sum(h * (w[None, :] * dy), 1) / n_cols
        a = dy * rstd[:, None]
        dx = w[None, :] * a - h * (c * rstd * rstd * rstd)[:, None] + dsum
        dx_at = DX + rows[:, None] * dx_stride + cols[None, :]
        tl.store(dx_at, dx.to(DX.dtype.element_ty), mask=mask & (store_dx != 0))
        dw += a * h
    sums = tl.sum(dw, 0)
    store_sums(sums, DW, PARTIALS + program * n_cols, cols, in_row, has_weight, store_partials, store_dw)


@triton.jit
def backward_row(
    DX, DY, DSUM, SUM, W, RSTD, DW, PARTIALS, WORDS, dx_stride, dy_stride, dsum_stride, sum_stride, n_rows, n_cols,
    offset, has_weight, has_dsum, store_dx, store_partials, store_dw,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``backward_tile`` with one row a step, 1-D: a [1, BLOCK] tile with a masked row runs at half the speed."""
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    w = load_vector(W, cols, mask, has_weight) + offset
    dw = tl.zeros([BLOCK], tl.float32)
    for row in tl.range(program, n_rows, tl.num_programs(0), num_stages=STAGES):
        h = tl.load(SUM + row * sum_stride + cols, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(DY + row * dy_stride + cols, mask=mask, other=0.0).to(tl.float32)
        dsum = tl.load(DSUM + row * dsum_stride + cols, mask=mask & (has_dsum != 0), other=0.0)
        rstd = tl.load(RSTD + row)
        c = tl.sum(h * (w * dy), 0) / n_cols
        a = dy * rstd
        dx = w * a - h * (c * rstd * rstd * rstd) + dsum.to(tl.float32)
        tl.store(DX + row * dx_stride + cols, dx.to(DX.dtype.element_ty), mask=mask & (store_dx != 0))
        dw += a * h
    store_sums(dw, DW, PARTIALS + program * n_cols, cols, mask, has_weight, store_partials, store_dw)


@triton.jit
def backward_long(
    DX, DY, DSUM, SUM, W, RSTD, DW, PARTIALS, WORDS, dx_stride, dy_stride, dsum_stride, sum_stride, n_rows, n_cols,
    offset, has_weight, has_dsum, store_dx, store_partials, store_dw,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of any length, ROWS a step, read twice: for the dot product, then for dx. The program's row of partials is
    added to in memory, by the one program that owns it."""
    program = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    for step in range(program, tl.cdiv(n_rows, ROWS), tl.num_programs(0)):
        rows = step * ROWS + tl.arange(0, ROWS)
        in_rows = (rows < n_rows)[:, None]
        SUM_at = SUM + rows[:, None] * sum_stride + block[None, :]
        DY_at = DY + rows[:, None] * dy_stride + block[None, :]
        DSUM_at = DSUM + rows[:, None] * dsum_stride + block[None, :]
        DX_at = DX + rows[:, None] * dx_stride + block[None, :]
        dot = tl.zeros([ROWS, BLOCK], tl.float32)
        for first in range(0, n_cols, BLOCK):
            in_row = block < n_cols - first
            mask = in_rows & in_row[None, :]
            h = tl.load(SUM_at + first, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
            dy = tl.load(DY_at + first, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
            w = load_vector(W, first + block, in_row, has_weight) + offset
            dot += h * (w[None, :] * dy)
        rstd = tl.load(RSTD + rows, mask=rows < n_rows, other=0.0)
        c = tl.sum(dot, 1) / n_cols * rstd * rstd * rstd
        for first in range(0, n_cols, BLOCK):
            in_row = block < n_cols - first
            mask = in_rows & in_row[None, :]
            h = tl.load(SUM_at + first, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            dy = tl.load(DY_at + first, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            dsum = tl.load(DSUM_at + first, mask=mask & (has_dsum != 0), other=0.0).to(tl.float32)
            w = load_vector(W, first + block, in_row, has_weight) + offset
            a = dy * rstd[:, None]
            dx = (w[None, :] * a - h * c[:, None] + dsum).to(DX.dtype.element_ty)
            tl.store(DX_at + first, dx, mask=mask & (store_dx != 0))
            partial_mask = in_row & (store_partials != 0)
            partial_at = PARTIALS + program * n_cols + first + block
            before = tl.load(partial_at, mask=partial_mask & (step != program), other=0.0)
            tl.store(partial_at, before + tl.sum(a * h, 0), mask=partial_mask)
        tl.debug_barrier()  # the next step reads the partials, perhaps in other threads


@triton.jit
def backward_pairs(
    DX, DY, DSUM, SUM, W, RSTD, DW, PARTIALS, WORDS, dx_stride, dy_stride, dsum_stride, sum_stride, n_rows, n_cols,
    offset, has_weight, has_dsum, store_dx, store_partials, store_dw,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """As RMSNorm's (``rmsnorm.backward_pairs``): long contiguous rows of 16-bit elements, a weight of their dtype,
    SPLIT programs a row. The gradient of the sum is read one step late, when a row is finished."""
    dtype: tl.constexpr = SUM.dtype.element_ty
    pairs: tl.constexpr = tl.pointer_type(tl.int32)
    if EXACT:
        n: tl.constexpr = SPLIT * BLOCK
    else:
        n = n_cols // 2
    group = (tl.program_id(0) // SPLIT).to(tl.int64)
    groups = (tl.num_programs(0) // SPLIT).to(tl.int64)
    part = tl.program_id(0) % SPLIT
    cols = part * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n
    if EXACT:
        in_row = cols >= 0
    else:
        in_row = mask
    SUM_at = SUM.to(pairs, bitcast=True) + cols
    DY_at = DY.to(pairs, bitcast=True) + cols
    DX_at = DX.to(pairs, bitcast=True) + cols
    DSUM_at = DSUM.to(pairs, bitcast=True) + cols
    w = tl.load(W.to(pairs, bitcast=True) + cols, mask=in_row & (has_weight != 0), other=0)
    dx_mask = in_row & (store_dx != 0)
    dsum_mask = in_row & (has_dsum != 0)
    dw_even, dw_odd = walk_rows(
        SUM_at, DY_at, DX_at, RSTD, WORDS, w, mask, dx_mask, n, group, groups, part, n_rows, offset, dtype,
        SPLIT, BLOCK, STAGES, EXACT, True, DSUM_at, dsum_mask, True,
    )  # fmt: skip
    partials = PARTIALS + group * n_cols + cols.to(tl.int64) * 2
    tl.store(partials, dw_even, mask=mask & (store_partials != 0))
    tl.store(partials + 1, dw_odd, mask=mask & (store_partials != 0))


@gluon.jit
def backward_ring(
    DX, DY, DSUM, SUM, W, RSTD, DW, PARTIALS, WORDS, dx_stride, dy_stride, dsum_stride, sum_stride, n_rows, n_cols,
    offset, has_weight, has_dsum, store_dx, store_partials, store_dw,
    PIECES: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Persistent programs, a long row a step, held in shared memory: see ``norm_ring``."""
    layout: gl.constexpr = ring_layout(gl.num_warps())
    program = gl.program_id(0).to(gl.int64)
    ms = plus(halves_of(W, 0, n_cols, has_weight, PIECES, BLOCK, layout), offset)
    sums, _ = walk_ring(
        DX, DY, SUM, DSUM, RSTD, ms, dx_stride, dy_stride, sum_stride, dsum_stride, program, n_rows,
        gl.num_programs(0).to(gl.int64), n_cols, store_dx, has_dsum != 0, False, False, True, PIECES, BLOCK,
        STAGES, layout,
    )  # fmt: skip
    store_halves(PARTIALS + program * n_cols, sums, n_cols, store_partials, PIECES, BLOCK)
