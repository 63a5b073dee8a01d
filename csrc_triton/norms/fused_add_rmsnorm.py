"""Residual addition and RMSNorm in one pass: sum = x + residual, y = rmsnorm(sum) * (offset + weight).

``sum`` is rounded to the dtype first and everything else is computed from the rounded values, so that the backward,
which reads ``sum`` alone, sees what the forward saw. Statistics are fp32, row offsets int64, the length of a row a
run-time argument. ``w_kind`` is a kind of ``norm_vectors``.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from csrc_triton.common.bf16x2 import even, odd, pack
from csrc_triton.common.pdl_begin import almost_done, begin
from csrc_triton.norms.norm_backward import (
    BACKWARD_PIPELINE,
    SPLIT_ROWS,
    PipelineSizes,
    as_x2,
    load_halves,
    pipelined_backward,
    plus,
    rms_backward_long,
    rms_backward_rows,
    rms_backward_tiles,
    split_rms_backward,
    store_halves,
)
from csrc_triton.norms.norm_vectors import Rows, as_fp32, load_packed, load_vector, store_as, unpacked

DECLARATION = {
    "op": "fused_add_rmsnorm",
    "uses": ["column_sums"],
    "kernels": {
        "fused_add_rmsnorm_forward": {
            "arguments": {
                "Y": "*dtype", "SUM": "*dtype", "X": "*dtype", "RESIDUAL": "*dtype", "W": "*dtype", "RSTD": "*fp32",
                "y_stride": "i64", "sum_stride": "i64", "x_stride": "i64", "residual_stride": "i64",
                "n_rows": "i64", "n_cols": "i32", "eps": "fp32", "offset": "fp32", "w_kind": "i32",
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
                "in_registers": {
                    "function": "forward_in_registers",
                    "constants": ["BLOCK", "BLOCKS", "EARLY", "PDL"],
                    "defaults": {"EARLY": 0, "PDL": 0},
                    "covers": "BLOCKS * BLOCK",
                    "pdl": "PDL",
                },
                "persistent": {
                    "function": "forward_persistent",
                    "constants": ["BLOCK", "BLOCKS", "PDL"],
                    "defaults": {"PDL": 0},
                    "covers": "BLOCKS * BLOCK",
                    "requires": {"dtype": ["bf16", "fp16"], "aligned": [True]},
                    "pdl": "PDL",
                },
                "long": {
                    "function": "forward_long",
                    "constants": ["BLOCK", "BLOCKS", "IN_REGISTERS"],
                    "defaults": {"BLOCKS": 0, "IN_REGISTERS": 0},
                    "covers": "IN_REGISTERS + BLOCKS * BLOCK",
                    "any_length": "BLOCKS",
                },
            },
        },
        "fused_add_rmsnorm_backward": {
            "arguments": {
                "DX": "*dtype", "DY": "*dtype", "DSUM": "*dtype", "SUM": "*dtype", "W": "*dtype", "RSTD": "*fp32",
                "DW": "*dtype", "PARTIALS": "*fp32", "WORDS": "*i64", "dx_stride": "i64", "dy_stride": "i64",
                "dsum_stride": "i64", "sum_stride": "i64", "n_rows": "i64", "n_cols": "i32", "offset": "fp32",
                "w_kind": "i32", "has_dsum": "i32", "store_dx": "i32", "store_partials": "i32",
                "store_dw": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "host": ["rows_for_one_cta"],
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
                "split": {**SPLIT_ROWS, "function": "backward_split"},
                "pipeline": {**BACKWARD_PIPELINE, "function": "backward_pipeline"},
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
    w_kind, round_first, store_rstd,
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
    w = load_vector(W, cols, in_row, w_kind) + offset
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
    w_kind, round_first, store_rstd,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``forward_tile`` with one row a program, 1-D."""
    dtype: tl.constexpr = X.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    x = tl.load(X + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(RESIDUAL + row * residual_stride + cols, mask=mask, other=0.0).to(tl.float32)
    w = load_vector(W, cols, mask, w_kind) + offset
    total = (x + residual).to(dtype)
    tl.store(SUM + row * sum_stride + cols, total, mask=mask)
    h = total.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(h * h, 0) / n_cols + eps)
    if store_rstd != 0:
        tl.store(RSTD + row, rstd)
    tl.store(Y + row * y_stride + cols, scaled(h, rstd, w, round_first, dtype), mask=mask)


@triton.jit
def forward_in_registers(
    Y, SUM, X, RESIDUAL, W, RSTD, y_stride, sum_stride, x_stride, residual_stride, n_rows, n_cols, eps, offset,
    w_kind, round_first, store_rstd,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row of at most BLOCKS * BLOCK columns a program, held in registers and read once. All its loads are in flight
    together, the weight's too; each element is read before its place is written."""
    dtype: tl.constexpr = X.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    store_rstd = begin(store_rstd, PDL, EARLY)  # no address needs it: they are computed before the wait
    X += row * x_stride
    RESIDUAL += row * residual_stride
    Y += row * y_stride
    SUM += row * sum_stride
    block = tl.arange(0, BLOCK)
    xs, residuals, ws = (), (), ()
    for i in tl.static_range(BLOCKS):
        cols = i * BLOCK + block
        xs += (tl.load(X + cols, mask=cols < n_cols, other=0.0),)
        residuals += (tl.load(RESIDUAL + cols, mask=cols < n_cols, other=0.0),)
    for i in tl.static_range(BLOCKS):
        cols = i * BLOCK + block
        ws += (load_packed(W, cols, cols < n_cols, w_kind),)
    totals = ()
    squares = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(BLOCKS):
        cols = i * BLOCK + block
        total = (xs[i].to(tl.float32) + residuals[i].to(tl.float32)).to(dtype)
        tl.store(SUM + cols, total, mask=cols < n_cols)
        h = total.to(tl.float32)
        squares += h * h
        totals += (total,)
    rstd = tl.rsqrt(tl.sum(squares, 0) / n_cols + eps)
    almost_done(PDL, EARLY)
    if store_rstd != 0:
        tl.store(RSTD + row, rstd)
    for i in tl.static_range(BLOCKS):
        cols = i * BLOCK + block
        w = unpacked(ws[i], W, cols, cols < n_cols, w_kind) + offset
        y = scaled(totals[i].to(tl.float32), rstd, w, round_first, dtype)
        tl.store(Y + cols, y, mask=cols < n_cols)


@triton.jit
def load_blocks_x2(P, block, n_pairs, BLOCKS: tl.constexpr):
    """The first ``n_pairs`` pairs of a row of 16-bit elements, in blocks; zeros past them."""
    row = ()
    for i in tl.static_range(BLOCKS):
        pairs = i * block.shape[0] + block
        row += (tl.load(as_x2(P) + pairs, mask=pairs < n_pairs, other=0),)
    return row


@triton.jit
def forward_persistent(
    Y, SUM, X, RESIDUAL, W, RSTD, y_stride, sum_stride, x_stride, residual_stride, n_rows, n_cols, eps, offset,
    w_kind, round_first, store_rstd,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs that walk the rows, one of at most BLOCKS * BLOCK columns at a time. The next row is on its way to
    registers meanwhile, as pairs of 16-bit elements: as elements it would take twice as many. The weight is read with
    every row. An fp32 weight, which few calls have, and rounding before the weight are behind branches: by masked loads
    and selects 1024 rows of 5120 took 6% longer (H200)."""
    dtype: tl.constexpr = X.dtype.element_ty
    block = tl.arange(0, BLOCK // 2)
    n_pairs = n_cols // 2
    first = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64)
    store_rstd = begin(store_rstd, PDL, False)
    xs = load_blocks_x2(X + first * x_stride, block, n_pairs, BLOCKS)
    residuals = load_blocks_x2(RESIDUAL + first * residual_stride, block, n_pairs, BLOCKS)
    for row in range(first, n_rows, step):
        next_row = row + step
        n_next = tl.where(next_row < n_rows, n_pairs, 0)
        next_xs = load_blocks_x2(X + next_row * x_stride, block, n_next, BLOCKS)
        next_residuals = load_blocks_x2(RESIDUAL + next_row * residual_stride, block, n_next, BLOCKS)
        totals = ()
        squares = tl.zeros([BLOCK // 2], tl.float32)
        for i in tl.static_range(BLOCKS):
            pairs = i * (BLOCK // 2) + block
            x, residual = xs[i], residuals[i]
            total = pack(even(x, dtype) + even(residual, dtype), odd(x, dtype) + odd(residual, dtype), dtype)
            tl.store(as_x2(SUM + row * sum_stride) + pairs, total, mask=pairs < n_pairs)
            low, high = even(total, dtype), odd(total, dtype)
            squares += low * low + high * high
            totals += (total,)
        ws = load_blocks_x2(W, block, tl.where(w_kind == 1, n_pairs, 0), BLOCKS)
        rstd = tl.rsqrt(tl.sum(squares, 0) / n_cols + eps)
        tl.store(RSTD + row, rstd, mask=store_rstd != 0)
        for i in tl.static_range(BLOCKS):
            pairs = i * (BLOCK // 2) + block
            low, high = even(totals[i], dtype) * rstd, odd(totals[i], dtype) * rstd
            if round_first != 0:
                rounded = pack(low, high, dtype)
                low, high = even(rounded, dtype), odd(rounded, dtype)
            w_low, w_high = even(ws[i], dtype), odd(ws[i], dtype)
            if w_kind == 2:
                w_low = tl.load(as_fp32(W) + 2 * pairs, mask=pairs < n_pairs, other=0.0)
                w_high = tl.load(as_fp32(W) + 2 * pairs + 1, mask=pairs < n_pairs, other=0.0)
            low *= w_low + offset
            high *= w_high + offset
            tl.store(as_x2(Y + row * y_stride) + pairs, pack(low, high, dtype), mask=pairs < n_pairs)
        xs, residuals = next_xs, next_residuals
    almost_done(PDL, False)


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
    w_kind, round_first, store_rstd,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, IN_REGISTERS: tl.constexpr,
):  # fmt: skip
    """One row of any length a program. x and residual are read twice, the second time from the cache and last block
    first, and nothing is written before: so both results may lie over the arguments. The sum of the first
    IN_REGISTERS columns is held in registers; BLOCKS, where it is known, unrolls the loops, so that the blocks' loads
    are in flight together."""
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
        blocks = tl.cdiv(tl.maximum(n_cols - IN_REGISTERS, 0), BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for i in range(blocks):
        h = add_block(X, RESIDUAL, IN_REGISTERS + i * BLOCK + block, n_cols, "evict_last").to(tl.float32)
        squares += h * h
    square_sum = tl.sum(squares, 0)
    if IN_REGISTERS > 0:
        head = add_block(X, RESIDUAL, tl.arange(0, IN_REGISTERS), n_cols, "evict_first")
        h = head.to(tl.float32)
        square_sum += tl.sum(h * h, 0)
    rstd = tl.rsqrt(square_sum / n_cols + eps)
    if store_rstd != 0:
        tl.store(RSTD + row, rstd)
    for i in range(blocks):
        cols = IN_REGISTERS + (blocks - 1 - i) * BLOCK + block
        total = add_block(X, RESIDUAL, cols, n_cols, "evict_first")
        w = load_vector(W, cols, cols < n_cols, w_kind) + offset
        y = scaled(total.to(tl.float32), rstd, w, round_first, dtype)
        tl.store(SUM + cols, total, mask=cols < n_cols, eviction_policy="evict_first")
        tl.store(Y + cols, y, mask=cols < n_cols, eviction_policy="evict_first")
    if IN_REGISTERS > 0:
        cols = tl.arange(0, IN_REGISTERS)
        w = load_vector(W, cols, cols < n_cols, w_kind) + offset
        y = scaled(head.to(tl.float32), rstd, w, round_first, dtype)
        tl.store(SUM + cols, head, mask=cols < n_cols, eviction_policy="evict_first")
        tl.store(Y + cols, y, mask=cols < n_cols, eviction_policy="evict_first")


@triton.jit
def store_sums(dw, DW, PARTIALS, cols, mask, w_kind, store_partials, store_dw):
    """A program's sums of dw: one row of the partials or, where it is the only program, the gradient itself."""
    tl.store(PARTIALS + cols, dw, mask=mask & (store_partials != 0))
    store_as(DW, cols, dw, mask & (store_dw != 0), w_kind)


@triton.jit
def backward_tile(
    DX, DY, DSUM, SUM, W, RSTD, DW, PARTIALS, WORDS, dx_stride, dy_stride, dsum_stride, sum_stride, n_rows, n_cols,
    offset, w_kind, has_dsum, store_dx, store_partials, store_dw,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """See ``rms_backward_tiles``."""
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    in_row = cols < n_cols
    w = load_vector(W, cols, in_row, w_kind) + offset
    dw = rms_backward_tiles(
        Rows(DX, dx_stride), Rows(DY, dy_stride), Rows(SUM, sum_stride), Rows(DSUM, dsum_stride), RSTD, w, n_rows,
        n_cols, has_dsum, store_dx, ROWS, BLOCK, STAGES, True,
    )  # fmt: skip
    sums = tl.sum(dw, 0)
    store_sums(sums, DW, PARTIALS + program * n_cols, cols, in_row, w_kind, store_partials, store_dw)


@triton.jit
def backward_row(
    DX, DY, DSUM, SUM, W, RSTD, DW, PARTIALS, WORDS, dx_stride, dy_stride, dsum_stride, sum_stride, n_rows, n_cols,
    offset, w_kind, has_dsum, store_dx, store_partials, store_dw,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """See ``rms_backward_rows``."""
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    w = load_vector(W, cols, mask, w_kind) + offset
    dw = rms_backward_rows(
        Rows(DX, dx_stride), Rows(DY, dy_stride), Rows(SUM, sum_stride), Rows(DSUM, dsum_stride), RSTD, w, n_rows,
        n_cols, has_dsum, store_dx, BLOCK, STAGES, True,
    )  # fmt: skip
    store_sums(dw, DW, PARTIALS + program * n_cols, cols, mask, w_kind, store_partials, store_dw)


@triton.jit
def backward_long(
    DX, DY, DSUM, SUM, W, RSTD, DW, PARTIALS, WORDS, dx_stride, dy_stride, dsum_stride, sum_stride, n_rows, n_cols,
    offset, w_kind, has_dsum, store_dx, store_partials, store_dw,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See ``rms_backward_long``."""
    rms_backward_long(
        Rows(DX, dx_stride), Rows(DY, dy_stride), Rows(SUM, sum_stride), Rows(DSUM, dsum_stride), RSTD, W, PARTIALS,
        n_rows, n_cols, offset, w_kind, has_dsum, store_dx, store_partials, ROWS, BLOCK, True, True,
    )  # fmt: skip


@triton.jit
def backward_split(
    DX, DY, DSUM, SUM, W, RSTD, DW, PARTIALS, WORDS, dx_stride, dy_stride, dsum_stride, sum_stride, n_rows, n_cols,
    offset, w_kind, has_dsum, store_dx, store_partials, store_dw,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """See ``split_rms_backward``; the weight is of the rows' dtype."""
    split_rms_backward(
        DX, DY, SUM, DSUM, RSTD, W, PARTIALS, WORDS, n_rows, n_cols, offset, w_kind, has_dsum, store_dx, store_partials,
        SPLITS, BLOCK, STAGES, True,
    )  # fmt: skip


@gluon.jit
def backward_pipeline(
    DX, DY, DSUM, SUM, W, RSTD, DW, PARTIALS, WORDS, dx_stride, dy_stride, dsum_stride, sum_stride, n_rows, n_cols,
    offset, w_kind, has_dsum, store_dx, store_partials, store_dw,
    BLOCKS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """See ``pipelined_backward``."""
    z = PipelineSizes(gl.num_warps(), BLOCKS, BLOCK, STAGES, ADDED=True)
    program = gl.program_id(0).to(gl.int64)
    ws = plus(load_halves(W, 0, n_cols, w_kind, BLOCKS, BLOCK, z.layout), offset)
    dw, _ = pipelined_backward(
        Rows(DX, dx_stride), Rows(DY, dy_stride), Rows(SUM, sum_stride), Rows(DSUM, dsum_stride), RSTD, ws, program,
        n_rows, gl.num_programs(0).to(gl.int64), n_cols, store_dx, has_dsum != 0, z,
    )  # fmt: skip
    store_halves(PARTIALS + program * n_cols, dw, n_cols, store_partials, BLOCKS, BLOCK)
