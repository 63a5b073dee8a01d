"""LayerNorm: y = (x - mean) / sqrt(var + eps) * weight + bias over rows of n_cols.

Statistics are fp32, and never a difference of large sums: two passes over registers, or ``block_moments``.
STATS[n_rows, 2] holds mean and 1 / sqrt(var + eps). Weight and bias are of x's dtype or fp32 (``norm_vectors``). All
forms of a kernel take the same arguments; a profile picks the form and its numbers by row length.

Ba, Kiros and Hinton, Layer Normalization (2016).
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from csrc_triton.norms.layernorm_held import held_row
from csrc_triton.norms.layernorm_long import long_of, scaled, walk_blocks
from csrc_triton.norms.layernorm_pairs import walk_rows
from csrc_triton.norms.norm_backward import (
    BACKWARD_PIPELINE,
    columns_of,
    ring_layout,
    store_halves,
    walk_ring,
)
from csrc_triton.norms.norm_vectors import as_fp32, load_vector

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
                "long": {
                    "function": "forward_long",
                    "constants": ["BLOCK", "BLOCKS"],
                    "defaults": {"BLOCKS": 0},
                    "covers": "BLOCKS * BLOCK",
                    "any_length": "BLOCKS",
                },
                "folded": {
                    "function": "forward_folded",
                    "constants": ["BLOCK", "BLOCKS"],
                    "defaults": {"BLOCKS": 0},
                    "covers": "BLOCKS * BLOCK",
                    "any_length": "BLOCKS",
                    "requires": {"aligned": [True]},
                },
                "held": {
                    "function": "forward_held",
                    "constants": ["BLOCK", "BLOCKS", "TOGETHER"],
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
                    "constants": ["PIECES", "BLOCK", "STAGES"],
                    "defaults": {"PIECES": 1},
                    "covers": "PIECES * BLOCK",
                    "staged": ["DY", "X"],
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
                    "may_spill": "more programs with fewer registers may hide the exchange better",
                },
                "pipeline": {**BACKWARD_PIPELINE, "function": "backward_ring"},
            },
        },
    },
}  # fmt: skip


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
    apart = tl.where(in_row[None, :], x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(apart * apart, 1) / n_cols + eps)
    tl.store(STATS + rows * 2, mean, mask=in_rows & (store_stats != 0))
    tl.store(STATS + rows * 2 + 1, rstd, mask=in_rows & (store_stats != 0))
    y = scaled(apart * rstd[:, None], W, B, cols[None, :], in_row[None, :], w_kind, b_kind)
    tl.store(Y + rows[:, None] * y_stride + cols[None, :], y.to(Y.dtype.element_ty), mask=mask)


# fp32 vectors beside rows of 16 bits (kind 2) double a binary: the dtype is asked once, before anything is loaded,
# because a branch further down costs up to a fifth of the copy (measured on the H200). So only two kinds of row take
# them, ``tile`` and the last one, for any length; the host sends them there.


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
    apart = tl.where(mask, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(apart * apart, 0) / n_cols + eps)
    if store_stats != 0:
        tl.store(STATS + row * 2, mean)
        tl.store(STATS + row * 2 + 1, rstd)
    y = scaled(apart * rstd, W, B, cols, mask, w_kind, b_kind)
    tl.store(Y + row * y_stride + cols, y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def forward_long(
    Y, X, W, B, STATS, y_stride, x_stride, n_rows, n_cols, eps, w_kind, b_kind, store_stats,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One row of any length a program, read twice: for the statistics and for y, from the first-level cache, so that
    registers stay free for a second program. BLOCKS, where it is known, unrolls the loops, so that the blocks' loads
    are in flight together, and leaves out vectors of kind 2."""
    long_of(
        Y, X, W, B, STATS, y_stride, x_stride, n_cols, eps, w_kind, b_kind, store_stats, BLOCK, BLOCKS, 1
    )  # fmt: skip


@triton.jit
def forward_folded(
    Y, X, W, B, STATS, y_stride, x_stride, n_rows, n_cols, eps, w_kind, b_kind, store_stats,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """``forward_long`` with the statistics of 16 bytes, one load, added up first: a third of the registers."""
    fold: tl.constexpr = 128 // X.dtype.element_ty.primitive_bitwidth
    long_of(
        Y, X, W, B, STATS, y_stride, x_stride, n_cols, eps, w_kind, b_kind, store_stats, BLOCK, BLOCKS, fold
    )  # fmt: skip


@triton.jit
def forward_held(
    Y, X, W, B, STATS, y_stride, x_stride, n_rows, n_cols, eps, w_kind, b_kind, store_stats,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """``forward_folded`` with all loads of a row under way before the first is used; at the second read, those of
    TOGETHER blocks."""
    fold: tl.constexpr = 128 // X.dtype.element_ty.primitive_bitwidth
    held_row(
        Y, X, W, B, STATS, y_stride, x_stride, n_cols, eps, w_kind, b_kind, store_stats, BLOCK, BLOCKS, TOGETHER,
        fold,
    )  # fmt: skip


@triton.jit
def add_both(a, b, c, d):
    return a + c, b + d


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
        normal = (x - mean[:, None]) * rstd[:, None]
        grad = dy * w[None, :]  # 0 past the row's end, and with it all that is added up
        along, offset = tl.reduce((grad * normal, grad), 1, add_both)
        along *= rstd / n_cols
        offset *= rstd / n_cols
        dx = grad * rstd[:, None] - (normal * along[:, None] + offset[:, None])
        tl.store(
            DX + rows[:, None] * dx_stride + cols[None, :],
            dx.to(DX.dtype.element_ty),
            mask=mask & (store_dx != 0),
        )
        dw += dy * normal
        db += dy
    PARTIALS += program * width
    store_sums(tl.sum(dw, 0), tl.sum(db, 0), PARTIALS, cols, in_row, db_column, store_dw, store_db)


@triton.jit
def backward_row(
    DX, DY, X, W, STATS, PARTIALS, WORDS, dx_stride, dy_stride, x_stride, n_rows, n_cols, width, db_column,
    w_kind, store_dx, store_dw, store_db,
    PIECES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``backward_tile`` with one row a step, 1-D. PIECES blocks make up a row whose next power of two would idle too
    many lanes."""
    program = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    w, dw, db = (), (), ()
    for i in tl.static_range(PIECES):
        cols = i * BLOCK + block
        w += (load_vector(W, cols, cols < n_cols, w_kind) + (w_kind == 0),)
        dw += (tl.zeros([BLOCK], tl.float32),)
        db += (tl.zeros([BLOCK], tl.float32),)
    for row in tl.range(program, n_rows, tl.num_programs(0), num_stages=STAGES):
        mean = tl.load(STATS + row * 2)
        rstd = tl.load(STATS + row * 2 + 1)
        normals, dys = (), ()
        for i in tl.static_range(PIECES):
            cols = i * BLOCK + block
            mask = cols < n_cols
            x = tl.load(X + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
            dy = tl.load(DY + row * dy_stride + cols, mask=mask, other=0.0).to(tl.float32)
            normal = (x - mean) * rstd
            grad = dy * w[i]
            if i == 0:
                dots, grads = grad * normal, grad
            else:
                dots, grads = dots + grad * normal, grads + grad
            normals += (normal,)
            dys += (dy,)
        along, offset = tl.reduce((dots, grads), 0, add_both)
        along *= rstd / n_cols
        offset *= rstd / n_cols
        next_dw, next_db = (), ()
        for i in tl.static_range(PIECES):
            cols = i * BLOCK + block
            dx = dys[i] * w[i] * rstd - (normals[i] * along + offset)
            mask = (cols < n_cols) & (store_dx != 0)
            tl.store(DX + row * dx_stride + cols, dx.to(DX.dtype.element_ty), mask=mask)
            next_dw += (dw[i] + dys[i] * normals[i],)
            next_db += (db[i] + dys[i],)
        dw, db = next_dw, next_db
    for i in tl.static_range(PIECES):
        cols = i * BLOCK + block
        store_sums(
            dw[i], db[i], PARTIALS + program * width, cols, cols < n_cols, db_column, store_dw, store_db
        )


@triton.jit
def backward_long(
    DX, DY, X, W, STATS, PARTIALS, WORDS, dx_stride, dy_stride, x_stride, n_rows, n_cols, width, db_column,
    w_kind, store_dx, store_dw, store_db,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of any length, ROWS a step, read twice: for the two sums, then for dx. The program's row of partials is
    added to in memory, by the one program that owns it."""
    walk_blocks(
        DX, DY, X, W, STATS, PARTIALS + tl.program_id(0).to(tl.int64) * width, dx_stride, dy_stride, x_stride, n_rows,
        n_cols, db_column, w_kind, store_dx, store_dw, store_db, ROWS, BLOCK,
    )  # fmt: skip


@triton.jit
def backward_pairs(
    DX, DY, X, W, STATS, PARTIALS, WORDS, dx_stride, dy_stride, x_stride, n_rows, n_cols, width, db_column,
    w_kind, store_dx, store_dw, store_db,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Long contiguous rows of 16-bit elements, two to a register, and a weight of their dtype. As many programs share
    a row as hold it at BLOCK pairs each, SPLIT at most; see ``layernorm_pairs``. WORDS[n_rows, programs a row] must be
    zero. EXACT leaves out the masks where n_cols is 2 * SPLIT * BLOCK."""
    dtype: tl.constexpr = X.dtype.element_ty
    pairs: tl.constexpr = tl.pointer_type(tl.int32)
    ones: tl.constexpr = 0x3F803F80 if dtype == tl.bfloat16 else 0x3C003C00
    lanes: tl.constexpr = max(
        32, triton.next_power_of_2(SPLIT)
    )  # a whole warp: an integer reduction of one step
    if EXACT:
        n: tl.constexpr = SPLIT * BLOCK
        split: tl.constexpr = SPLIT
    else:
        n = n_cols // 2
        split = tl.cdiv(n, BLOCK)
    group = (tl.program_id(0) // split).to(tl.int64)
    groups = (tl.num_programs(0) // split).to(tl.int64)
    part = tl.program_id(0) % split
    cols = part * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n
    if EXACT:
        in_row = cols >= 0
    else:
        in_row = mask
    w = tl.load(W.to(pairs, bitcast=True) + cols, mask=in_row & (w_kind != 0), other=ones)
    dw_even, dw_odd, db_even, db_odd = walk_rows(
        X.to(pairs, bitcast=True) + cols, DY.to(pairs, bitcast=True) + cols, DX.to(pairs, bitcast=True) + cols,
        STATS, WORDS, w, mask, in_row & (store_dx != 0), n, group, groups, part, split, n_rows,
        dtype, lanes, BLOCK, STAGES, EXACT,
    )  # fmt: skip
    PARTIALS += group * width
    store_sums(dw_even, db_even, PARTIALS, 2 * cols, mask, db_column, store_dw, store_db)
    store_sums(dw_odd, db_odd, PARTIALS, 2 * cols + 1, mask, db_column, store_dw, store_db)


@gluon.jit
def backward_ring(
    DX, DY, X, W, STATS, PARTIALS, WORDS, dx_stride, dy_stride, x_stride, n_rows, n_cols, width, db_column,
    w_kind, store_dx, store_dw, store_db,
    PIECES: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Persistent programs, a long row a step, held in shared memory: see ``norm_backward``."""
    layout: gl.constexpr = ring_layout(gl.num_warps())
    program = gl.program_id(0).to(gl.int64)
    ms = ()  # column by column: with halves_of the loop spills, 0.887 of the copy instead of 0.948 at 11008 (H200)
    for i in gl.static_range(2 * PIECES):
        cols = columns_of(i, BLOCK, layout)
        mask = cols < n_cols
        ms += (gl.where(mask & (w_kind == 0), 1.0, load_vector(W, cols, mask, w_kind)),)
    dw, db = walk_ring(
        DX, DY, X, X, STATS, ms, dx_stride, dy_stride, x_stride, x_stride, program, n_rows,
        gl.num_programs(0).to(gl.int64), n_cols, store_dx, False, True, True, False, PIECES, BLOCK, STAGES,
        layout,
    )  # fmt: skip
    PARTIALS += program * width
    store_halves(PARTIALS, dw, n_cols, store_dw, PIECES, BLOCK)
    store_halves(PARTIALS + db_column, db, n_cols, store_db, PIECES, BLOCK)
