"""LayerNorm: y = (x - mean) / sqrt(var + eps) * weight + bias over rows of n_cols.

Statistics are fp32, and never a difference of large sums: two passes over registers, or ``moments``.
STATS[n_rows, 2] holds mean and 1 / sqrt(var + eps). Weight and bias are of x's dtype or fp32 (``norm_vectors``). All
forms of a kernel take the same arguments; a profile picks the form and its numbers by row length.

Ba, Kiros and Hinton, Layer Normalization (2016).
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from csrc_triton.common.pdl_begin import begin
from csrc_triton.common.pipeline import add_two
from csrc_triton.norms.moments import block_moments, tile_moments
from csrc_triton.norms.norm_backward import (
    BACKWARD_PIPELINE,
    SPLIT_ROWS,
    PipelineSizes,
    columns_of,
    pipelined_backward,
    split_centered_backward,
    store_halves,
)
from csrc_triton.norms.norm_vectors import (
    Rows,
    add_in_memory,
    as_fp32,
    load_blocks,
    load_vector,
    tile_at,
)

DECLARATION = {
    "op": "layernorm",
    "uses": ["column_sums"],
    "kernels": {
        "layernorm_forward": {
            "arguments": {
                "Y": "*dtype", "X": "*dtype", "W": "*dtype", "B": "*dtype", "STATS": "*fp32",
                "y_stride": "i64", "x_stride": "i64", "n_rows": "i64", "n_cols": "i32", "eps": "fp32",
                "w_kind": "i32", "b_kind": "i32", "store_stats": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["Y", "X", "W", "B", "y_stride", "x_stride", "n_cols"],
            "forms": {
                "tile": {"function": "forward_tile", "constants": ["ROWS", "BLOCK"], "covers": "BLOCK"},
                "row": {"function": "forward_row", "constants": ["BLOCK"], "covers": "BLOCK"},
                "in_registers": {
                    "function": "forward_in_registers",
                    "constants": ["BLOCK", "BLOCKS", "PDL"],
                    "defaults": {"PDL": 0},
                    "covers": "BLOCKS * BLOCK",
                    "pdl": "PDL",
                },
                "long": {"function": "forward_long", "constants": ["BLOCK"]},
                "vectorised": {
                    "function": "forward_vectorised",
                    "constants": ["BLOCK", "BLOCKS"],
                    "defaults": {"BLOCKS": 0},
                    "covers": "BLOCKS * BLOCK",
                    "any_length": "BLOCKS",
                    "requires": {"aligned": [True]},
                },
                "prefetched": {
                    "function": "forward_prefetched",
                    "constants": ["BLOCK", "BLOCKS", "IN_FLIGHT"],
                    "covers": "BLOCKS * BLOCK",
                    "requires": {"aligned": [True]},
                },
            },
        },
        "layernorm_backward": {
            "arguments": {
                "DX": "*dtype", "DY": "*dtype", "X": "*dtype", "W": "*dtype", "STATS": "*fp32",
                "PARTIALS": "*fp32", "WORDS": "*i64", "dx_stride": "i64", "dy_stride": "i64",
                "x_stride": "i64", "n_rows": "i64", "n_cols": "i32", "width": "i32", "db_column": "i32",
                "w_kind": "i32", "store_dx": "i32", "store_dw": "i32", "store_db": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": [
                "DX", "DY", "X", "W", "PARTIALS", "dx_stride", "dy_stride", "x_stride", "n_cols", "width",
                "db_column",
            ],
            "forms": {
                "tile": {
                    "function": "backward_tile",
                    "constants": ["ROWS", "BLOCK", "STAGES"],
                    "covers": "BLOCK",
                    "staged": ["DY", "X"],
                },
                "row": {
                    "function": "backward_row",
                    "constants": ["BLOCKS", "BLOCK", "STAGES"],
                    "defaults": {"BLOCKS": 1},
                    "covers": "BLOCKS * BLOCK",
                    "staged": ["DY", "X"],
                },
                "long": {"function": "backward_long", "constants": ["ROWS", "BLOCK"]},
                "split": {**SPLIT_ROWS, "function": "backward_split"},
                "pipeline": {**BACKWARD_PIPELINE, "function": "backward_pipeline"},
            },
        },
    },
}  # fmt: skip


@triton.jit
def scaled(x_hat, W, B, cols, mask, w_kind, b_kind):
    w = tl.load(W + cols, mask=mask & (w_kind != 0), other=1.0).to(tl.float32)
    b = tl.load(B + cols, mask=mask & (b_kind != 0), other=0.0).to(tl.float32)
    return x_hat * w + b


@triton.jit
def tile_of(
    Y, X, W, B, STATS, y_stride, x_stride, n_rows, n_cols, eps, w_kind, b_kind, store_stats,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    in_rows = rows < n_rows
    in_row = cols < n_cols
    mask = in_rows[:, None] & in_row[None, :]
    x = tl.load(X + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, 1) / n_cols
    centered = tl.where(in_row[None, :], x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centered * centered, 1) / n_cols + eps)
    tl.store(STATS + rows * 2, mean, mask=in_rows & (store_stats != 0))
    tl.store(STATS + rows * 2 + 1, rstd, mask=in_rows & (store_stats != 0))
    y = scaled(centered * rstd[:, None], W, B, cols[None, :], in_row[None, :], w_kind, b_kind)
    tl.store(Y + rows[:, None] * y_stride + cols[None, :], y.to(Y.dtype.element_ty), mask=mask)


# fp32 vectors beside rows of 16 bits (kind 2) double a binary: a kernel branches on the kind once, before it loads
# anything, because a branch further down costs up to a fifth of the copy (H200). So only form ``tile`` and the last row
# of a table, for any length, take them; the host sends them there.


@triton.jit
def forward_tile(
    Y, X, W, B, STATS, y_stride, x_stride, n_rows, n_cols, eps, w_kind, b_kind, store_stats,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS whole rows a program, held in registers; n_cols <= BLOCK."""
    if (w_kind != 2) & (b_kind != 2):
        tile_of(
            Y, X, W, B, STATS, y_stride, x_stride, n_rows, n_cols, eps, w_kind, b_kind, store_stats, ROWS, BLOCK
        )  # fmt: skip
    else:
        tile_of(
            Y, X, as_fp32(W), as_fp32(B), STATS, y_stride, x_stride, n_rows, n_cols, eps, w_kind, b_kind,
            store_stats, ROWS, BLOCK,
        )  # fmt: skip


@triton.jit
def forward_row(
    Y, X, W, B, STATS, y_stride, x_stride, n_rows, n_cols, eps, w_kind, b_kind, store_stats,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``forward_tile`` with one row a program, 1-D: a [1, BLOCK] tile with a masked row runs at half the speed. No
    vectors of kind 2."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    x = tl.load(X + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, 0) / n_cols
    centered = tl.where(mask, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centered * centered, 0) / n_cols + eps)
    if store_stats != 0:
        tl.store(STATS + row * 2, mean)
        tl.store(STATS + row * 2 + 1, rstd)
    y = scaled(centered * rstd, W, B, cols, mask, w_kind, b_kind)
    tl.store(Y + row * y_stride + cols, y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def forward_in_registers(
    Y, X, W, B, STATS, y_stride, x_stride, n_rows, n_cols, eps, w_kind, b_kind, store_stats,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row of at most BLOCKS * BLOCK columns a program, held in registers. For few rows, where a program has a
    multiprocessor to itself: all loads are in flight together, those of weight and bias too. No vectors of kind 2."""
    row = tl.program_id(0).to(tl.int64)
    X += row * x_stride
    Y += row * y_stride
    block = tl.arange(0, BLOCK)
    store_stats = begin(store_stats, PDL)
    xs, ws, bs = (), (), ()
    for i in tl.static_range(BLOCKS):
        cols = i * BLOCK + block
        xs += (tl.load(X + cols, mask=cols < n_cols, other=0.0),)
    for i in tl.static_range(BLOCKS):
        cols = i * BLOCK + block
        ws += (tl.load(W + cols, mask=(cols < n_cols) & (w_kind != 0), other=1.0),)
        bs += (tl.load(B + cols, mask=(cols < n_cols) & (b_kind != 0), other=0.0),)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(BLOCKS):
        total += xs[i].to(tl.float32)
    mean = tl.sum(total, 0) / n_cols
    squares = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(BLOCKS):
        centered = tl.where(i * BLOCK + block < n_cols, xs[i].to(tl.float32) - mean, 0.0)
        squares += centered * centered
    rstd = tl.rsqrt(tl.sum(squares, 0) / n_cols + eps)
    if store_stats != 0:
        tl.store(STATS + row * 2, mean)
        tl.store(STATS + row * 2 + 1, rstd)
    for i in tl.static_range(BLOCKS):
        cols = i * BLOCK + block
        y = (xs[i].to(tl.float32) - mean) * rstd * ws[i].to(tl.float32) + bs[i].to(tl.float32)
        tl.store(Y + cols, y.to(Y.dtype.element_ty), mask=cols < n_cols)


@triton.jit
def scale_row(Y, X, W, B, mean, rstd, n_cols, w_kind, b_kind, blocks, BLOCK: tl.constexpr):
    """The second read of a row, last block first: what was read last is the likeliest to be still in the cache."""
    lane = tl.arange(0, BLOCK)
    for i in range(blocks):
        cols = (blocks - 1 - i) * BLOCK + lane
        mask = cols < n_cols
        x = tl.load(X + cols, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        y = scaled((x - mean) * rstd, W, B, cols, mask, w_kind, b_kind)
        tl.store(Y + cols, y.to(Y.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit
def forward_blocks(
    Y, X, W, B, STATS, y_stride, x_stride, n_cols, eps, w_kind, b_kind, store_stats,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """A program's row, read twice: for the statistics and for y, from the L1 cache, so that registers stay free for a
    second program. BLOCKS is 0 where it is not known."""
    row = tl.program_id(0).to(tl.int64)
    X += row * x_stride
    Y += row * y_stride
    if BLOCKS > 0:
        blocks = BLOCKS
    else:
        blocks = tl.cdiv(n_cols, BLOCK)
    mean, deviations = block_moments(X, n_cols, blocks, BLOCK, VECTOR)
    rstd = tl.rsqrt(deviations / n_cols + eps)
    if store_stats != 0:
        tl.store(STATS + row * 2, mean)
        tl.store(STATS + row * 2 + 1, rstd)
    if BLOCKS == 0:
        if (w_kind == 2) | (b_kind == 2):
            scale_row(Y, X, as_fp32(W), as_fp32(B), mean, rstd, n_cols, w_kind, b_kind, blocks, BLOCK)
        else:
            scale_row(Y, X, W, B, mean, rstd, n_cols, w_kind, b_kind, blocks, BLOCK)
    else:
        scale_row(Y, X, W, B, mean, rstd, n_cols, w_kind, b_kind, blocks, BLOCK)


@triton.jit
def forward_long(
    Y, X, W, B, STATS, y_stride, x_stride, n_rows, n_cols, eps, w_kind, b_kind, store_stats, BLOCK: tl.constexpr
):  # fmt: skip
    """One row of any length and alignment a program, read twice."""
    forward_blocks(
        Y, X, W, B, STATS, y_stride, x_stride, n_cols, eps, w_kind, b_kind, store_stats, BLOCK, 0, 1
    )  # fmt: skip


@triton.jit
def forward_vectorised(
    Y, X, W, B, STATS, y_stride, x_stride, n_rows, n_cols, eps, w_kind, b_kind, store_stats,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """``forward_long`` for aligned rows: the statistics are of 16-byte vectors, one load, for a third of the registers.
    BLOCKS, where it is known, unrolls the loops, so that the blocks' loads are in flight together, and leaves out
    vectors of kind 2."""
    vector: tl.constexpr = 128 // X.dtype.element_ty.primitive_bitwidth
    forward_blocks(
        Y, X, W, B, STATS, y_stride, x_stride, n_cols, eps, w_kind, b_kind, store_stats, BLOCK, BLOCKS, vector
    )  # fmt: skip


@triton.jit
def scale_blocks(
    Y, X, W, B, mean, rstd, n_cols, w_kind, b_kind, block, COUNT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """COUNT blocks of the second read, whose loads are in flight together."""
    xs, ws, bs = (), (), ()
    for i in tl.static_range(COUNT):
        cols = i * BLOCK + block
        xs += (tl.load(X + cols, mask=cols < n_cols, other=0.0, eviction_policy="evict_first"),)
    for i in tl.static_range(COUNT):
        cols = i * BLOCK + block
        mask = cols < n_cols
        ws += (tl.load(W + cols, mask=mask & (w_kind != 0), other=1.0),)
        bs += (tl.load(B + cols, mask=mask & (b_kind != 0), other=0.0),)
    for i in tl.static_range(COUNT):
        cols = i * BLOCK + block
        y = (xs[i].to(tl.float32) - mean) * rstd * ws[i].to(tl.float32) + bs[i].to(tl.float32)
        tl.store(Y + cols, y.to(Y.dtype.element_ty), mask=cols < n_cols, eviction_policy="evict_first")


@triton.jit
def forward_prefetched(
    Y, X, W, B, STATS, y_stride, x_stride, n_rows, n_cols, eps, w_kind, b_kind, store_stats,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, IN_FLIGHT: tl.constexpr,
):  # fmt: skip
    """``forward_vectorised`` with all loads of a row in flight before the first value is used; at the second read,
    those of IN_FLIGHT blocks."""
    vector: tl.constexpr = 128 // X.dtype.element_ty.primitive_bitwidth
    row = tl.program_id(0).to(tl.int64)
    X += row * x_stride
    Y += row * y_stride
    block = tl.arange(0, BLOCK)
    xs = load_blocks(X, n_cols, block, BLOCKS)
    mean, deviations = tile_moments(xs, n_cols, BLOCK, vector)
    rstd = tl.rsqrt(deviations / n_cols + eps)
    if store_stats != 0:
        tl.store(STATS + row * 2, mean)
        tl.store(STATS + row * 2 + 1, rstd)
    for i in tl.static_range(0, BLOCKS, IN_FLIGHT):
        scale_blocks(
            Y + i * BLOCK, X + i * BLOCK, W + i * BLOCK, B + i * BLOCK, mean, rstd, n_cols - i * BLOCK, w_kind, b_kind,
            block, IN_FLIGHT if i + IN_FLIGHT < BLOCKS else BLOCKS - i, BLOCK,
        )  # fmt: skip


@triton.jit
def store_sums(dw, db, PARTIALS, cols, mask, db_column, store_dw, store_db):
    """A program's row of the partials: its sums of dw and from ``db_column`` on those of db, where they are wanted."""
    tl.store(PARTIALS + cols, dw, mask=mask & (store_dw != 0))
    tl.store(PARTIALS + db_column + cols, db, mask=mask & (store_db != 0))


@triton.jit
def backward_tile(
    DX, DY, X, W, STATS, PARTIALS, WORDS, dx_stride, dy_stride, x_stride, n_rows, n_cols, width, db_column,
    w_kind, store_dx, store_dw, store_db,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Persistent programs, ROWS short rows a step; the next steps' loads are in flight meanwhile."""
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    in_row = cols < n_cols
    w = load_vector(W, cols, in_row, w_kind) + (w_kind == 0)
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    db = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in tl.range(program, tl.cdiv(n_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = step * ROWS + tl.arange(0, ROWS)
        in_rows = rows < n_rows
        mask = in_rows[:, None] & in_row[None, :]
        x = tl.load(X + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(DY + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(STATS + rows * 2, mask=in_rows, other=0.0)
        rstd = tl.load(STATS + rows * 2 + 1, mask=in_rows, other=0.0)
        x_hat = (x - mean[:, None]) * rstd[:, None]
        grad = dy * w[None, :]  # 0 past the row's end, and with it all that is added up
        along, offset = tl.reduce((grad * x_hat, grad), 1, add_two)
        along *= rstd / n_cols
        offset *= rstd / n_cols
        dx = grad * rstd[:, None] - (x_hat * along[:, None] + offset[:, None])
        tl.store(
            DX + rows[:, None] * dx_stride + cols[None, :],
            dx.to(DX.dtype.element_ty),
            mask=mask & (store_dx != 0),
        )
        dw += dy * x_hat
        db += dy
    PARTIALS += program * width
    store_sums(tl.sum(dw, 0), tl.sum(db, 0), PARTIALS, cols, in_row, db_column, store_dw, store_db)


@triton.jit
def backward_row(
    DX, DY, X, W, STATS, PARTIALS, WORDS, dx_stride, dy_stride, x_stride, n_rows, n_cols, width, db_column,
    w_kind, store_dx, store_dw, store_db,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``backward_tile`` with one row a step, 1-D. A row whose next power of two would leave too many lanes idle is
    of several BLOCKS."""
    program = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    w, dw, db = (), (), ()
    for i in tl.static_range(BLOCKS):
        cols = i * BLOCK + block
        w += (load_vector(W, cols, cols < n_cols, w_kind) + (w_kind == 0),)
        dw += (tl.zeros([BLOCK], tl.float32),)
        db += (tl.zeros([BLOCK], tl.float32),)
    for row in tl.range(program, n_rows, tl.num_programs(0), num_stages=STAGES):
        mean = tl.load(STATS + row * 2)
        rstd = tl.load(STATS + row * 2 + 1)
        x_hats, dys = (), ()
        for i in tl.static_range(BLOCKS):
            cols = i * BLOCK + block
            mask = cols < n_cols
            x = tl.load(X + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
            dy = tl.load(DY + row * dy_stride + cols, mask=mask, other=0.0).to(tl.float32)
            x_hat = (x - mean) * rstd
            grad = dy * w[i]
            if i == 0:
                dots, grads = grad * x_hat, grad
            else:
                dots, grads = dots + grad * x_hat, grads + grad
            x_hats += (x_hat,)
            dys += (dy,)
        along, offset = tl.reduce((dots, grads), 0, add_two)
        along *= rstd / n_cols
        offset *= rstd / n_cols
        next_dw, next_db = (), ()
        for i in tl.static_range(BLOCKS):
            cols = i * BLOCK + block
            dx = dys[i] * w[i] * rstd - (x_hats[i] * along + offset)
            mask = (cols < n_cols) & (store_dx != 0)
            tl.store(DX + row * dx_stride + cols, dx.to(DX.dtype.element_ty), mask=mask)
            next_dw += (dw[i] + dys[i] * x_hats[i],)
            next_db += (db[i] + dys[i],)
        dw, db = next_dw, next_db
    for i in tl.static_range(BLOCKS):
        cols = i * BLOCK + block
        store_sums(
            dw[i], db[i], PARTIALS + program * width, cols, cols < n_cols, db_column, store_dw, store_db
        )


@triton.jit
def load_step(
    x, dy, W, rows, cols, in_rows, in_row, w_kind, EVICT: tl.constexpr
):  # fmt: skip
    """x, dy and dy * weight of one block of some rows in fp32; 0 where there is none."""
    mask = in_rows[:, None] & in_row[None, :]
    xs = tl.load(tile_at(x, rows, cols), mask=mask, other=0.0, eviction_policy=EVICT)
    dys = tl.load(tile_at(dy, rows, cols), mask=mask, other=0.0, eviction_policy=EVICT)
    dys = dys.to(tl.float32)
    w = load_vector(W, cols, in_row, w_kind) + (w_kind == 0)
    return xs.to(tl.float32), dys, dys * w[None, :]


@triton.jit
def backward_long(
    DX, DY, X, W, STATS, PARTIALS, WORDS, dx_stride, dy_stride, x_stride, n_rows, n_cols, width, db_column,
    w_kind, store_dx, store_dw, store_db,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of any length, ROWS a step, read twice: for the two sums, then for dx. The program's row of partials is
    added to in memory."""
    program = tl.program_id(0).to(tl.int64)
    PARTIALS += program * width
    dx, dy, x = Rows(DX, dx_stride), Rows(DY, dy_stride), Rows(X, x_stride)
    block = tl.arange(0, BLOCK)
    for step in range(program, tl.cdiv(n_rows, ROWS), tl.num_programs(0)):
        rows = step * ROWS + tl.arange(0, ROWS)
        in_rows = rows < n_rows
        mean = tl.load(STATS + rows * 2, mask=in_rows, other=0.0)[:, None]
        rstd = tl.load(STATS + rows * 2 + 1, mask=in_rows, other=0.0)
        dots = tl.zeros([ROWS, BLOCK], tl.float32)
        sums = tl.zeros([ROWS, BLOCK], tl.float32)
        for first in range(0, n_cols, BLOCK):
            cols = first + block
            xs, _, grad = load_step(x, dy, W, rows, cols, in_rows, cols < n_cols, w_kind, "evict_last")
            dots += grad * (xs - mean)
            sums += grad
        along = (tl.sum(dots, 1) * rstd / n_cols)[:, None]
        offset = (tl.sum(sums, 1) / n_cols)[:, None]
        rstd = rstd[:, None]
        for first in range(0, n_cols, BLOCK):
            cols = first + block
            in_row = cols < n_cols
            xs, dys, grad = load_step(x, dy, W, rows, cols, in_rows, in_row, w_kind, "evict_first")
            x_hat = (xs - mean) * rstd
            dxs = (grad - x_hat * along - offset) * rstd
            mask = in_rows[:, None] & in_row[None, :] & (store_dx != 0)
            tl.store(tile_at(dx, rows, cols), dxs.to(DX.dtype.element_ty), mask=mask)
            is_first = step == program
            add_in_memory(PARTIALS + cols, tl.sum(dys * x_hat, 0), in_row & (store_dw != 0), is_first)
            add_in_memory(PARTIALS + db_column + cols, tl.sum(dys, 0), in_row & (store_db != 0), is_first)
        tl.debug_barrier()  # the next step reads the partials, perhaps in other threads


@triton.jit
def backward_split(
    DX, DY, X, W, STATS, PARTIALS, WORDS, dx_stride, dy_stride, x_stride, n_rows, n_cols, width, db_column,
    w_kind, store_dx, store_dw, store_db,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """See ``split_centered_backward``; the weight is of the rows' dtype. A row is split between as many programs as
    hold it at BLOCK pairs each, SPLITS at most."""
    n = n_cols // 2
    splits = tl.cdiv(n, BLOCK)
    dw_even, dw_odd, db_even, db_odd = split_centered_backward(
        DX, DY, X, W, STATS, WORDS, n_rows, n, splits, w_kind, store_dx, SPLITS, BLOCK, STAGES
    )  # fmt: skip
    cols = tl.program_id(0) % splits * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n
    PARTIALS += (tl.program_id(0) // splits).to(tl.int64) * width
    store_sums(dw_even, db_even, PARTIALS, 2 * cols, mask, db_column, store_dw, store_db)
    store_sums(dw_odd, db_odd, PARTIALS, 2 * cols + 1, mask, db_column, store_dw, store_db)


@gluon.jit
def backward_pipeline(
    DX, DY, X, W, STATS, PARTIALS, WORDS, dx_stride, dy_stride, x_stride, n_rows, n_cols, width, db_column,
    w_kind, store_dx, store_dw, store_db,
    BLOCKS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """See ``pipelined_backward``."""
    z = PipelineSizes(gl.num_warps(), BLOCKS, BLOCK, STAGES, CENTERED=True, DB=True)
    program = gl.program_id(0).to(gl.int64)
    ws = ()  # column by column: with load_halves the loop spills, 0.887 of the copy instead of 0.948 at 11008 (H200)
    for i in gl.static_range(2 * BLOCKS):
        cols = columns_of(i, BLOCK, z.layout)
        mask = cols < n_cols
        ws += (gl.where(mask & (w_kind == 0), 1.0, load_vector(W, cols, mask, w_kind)),)
    x = Rows(X, x_stride)
    dw, db = pipelined_backward(
        Rows(DX, dx_stride), Rows(DY, dy_stride), x, x, STATS, ws, program, n_rows, gl.num_programs(0).to(gl.int64),
        n_cols, store_dx, False, z,
    )  # fmt: skip
    PARTIALS += program * width
    store_halves(PARTIALS, dw, n_cols, store_dw, BLOCKS, BLOCK)
    store_halves(PARTIALS + db_column, db, n_cols, store_db, BLOCKS, BLOCK)
