"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * (offset + weight) over rows of n_cols.

All forms of a kernel take the same arguments; a profile picks the form and its numbers by row length. Statistics are
fp32. Row offsets are int64. ``n_cols`` is a run-time argument: a row that is not a power of two is masked, and the mask
does not change inside a loop.

Zhang and Sennrich, Root Mean Square Layer Normalization (2019).
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from csrc_triton.common.norm_ring import halves_of, plus, ring_layout, store_halves, walk_ring
from csrc_triton.common.packed import repack
from csrc_triton.common.ring_forms import NORM_RING
from csrc_triton.norms.rmsnorm_long import load_block, scale_row
from csrc_triton.norms.rmsnorm_pairs import walk_rows

DECLARATION = {
    "op": "rmsnorm",
    "uses": ["column_sums"],
    "kernels": {
        "rmsnorm_forward": {
            "arguments": {
                "Y": "*dtype",
                "X": "*dtype",
                "W": "*weight",
                "RSTD": "*fp32",
                "y_stride": "i64",
                "x_stride": "i64",
                "n_rows": "i64",
                "n_cols": "i32",
                "eps": "fp32",
                "offset": "fp32",
                "has_weight": "i32",
                "round_first": "i32",
                "store_rstd": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"], "weight": ["dtype", "fp32"]},
            "aligned": ["Y", "X", "W", "y_stride", "x_stride", "n_cols"],
            "forms": {
                "tile": {
                    "function": "forward_tile",
                    "constants": ["ROWS", "BLOCK", "REPACK"],
                    "defaults": {"REPACK": False},
                    "covers": "BLOCK",
                },
                "long": {
                    "function": "forward_long",
                    "constants": ["BLOCK", "BLOCKS", "KEEP", "REVERSE", "REPACK", "BYPASS", "EXACT"],
                    "defaults": {
                        "BLOCKS": 0,
                        "KEEP": 0,
                        "REVERSE": True,
                        "REPACK": False,
                        "BYPASS": False,
                        "EXACT": False,
                    },
                    "covers": "KEEP + BLOCKS * BLOCK",
                    "any_length": "BLOCKS",
                },
            },
        },
        "rmsnorm_backward": {
            "arguments": {
                "DX": "*dtype",
                "DY": "*dtype",
                "X": "*dtype",
                "W": "*weight",
                "RSTD": "*fp32",
                "DW": "*weight",
                "PARTIALS": "*fp32",
                "WORDS": "*i64",
                "dx_stride": "i64",
                "dy_stride": "i64",
                "x_stride": "i64",
                "n_rows": "i64",
                "n_cols": "i32",
                "offset": "fp32",
                "has_weight": "i32",
                "store_dx": "i32",
                "store_partials": "i32",
                "store_dw": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"], "weight": ["dtype", "fp32"]},
            "host": ["lone_rows"],
            "aligned": [
                "DX",
                "DY",
                "X",
                "W",
                "DW",
                "PARTIALS",
                "dx_stride",
                "dy_stride",
                "x_stride",
                "n_cols",
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
                    "constants": ["BLOCK", "STAGES"],
                    "covers": "BLOCK",
                    "staged": ["DY", "X"],
                },
                "long": {"function": "backward_long", "constants": ["ROWS", "BLOCK"]},
                "pairs": {
                    "function": "backward_pairs",
                    "constants": ["SPLIT", "BLOCK", "STAGES", "EXACT"],
                    "defaults": {"EXACT": False},
                    "contiguous": True,
                    "covers": "2 * SPLIT * BLOCK",
                    "requires": {"dtype": ["bf16", "fp16"], "weight": ["dtype"], "aligned": [True]},
                    "cooperative": "SPLIT",
                    "may_spill": "168 registers let half as many programs again hide the exchange",
                },
                "ring": {**NORM_RING, "function": "backward_ring"},
            },
        },
    },
}


@triton.jit
def forward_tile(
    Y, X, W, RSTD, y_stride, x_stride, n_rows, n_cols, eps, offset, has_weight, round_first, store_rstd,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, REPACK: tl.constexpr,
):  # fmt: skip
    """ROWS whole rows a program, held in registers; n_cols <= BLOCK."""
    dtype: tl.constexpr = X.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    in_row = cols < n_cols
    mask = (rows < n_rows)[:, None] & in_row[None, :]
    x = tl.load(X + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0)
    w = tl.load(W + cols, mask=in_row & (has_weight != 0), other=0.0).to(tl.float32) + offset
    xf = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(xf * xf, 1) / n_cols + eps)
    tl.store(RSTD + rows, rstd, mask=(rows < n_rows) & (store_rstd != 0))
    if REPACK:
        xf = repack(x).to(tl.float32)
    y = xf * rstd[:, None]
    if round_first != 0:
        y = y.to(dtype).to(tl.float32)
    tl.store(Y + rows[:, None] * y_stride + cols[None, :], (y * w[None, :]).to(dtype), mask=mask)


@triton.jit
def forward_long(
    Y, X, W, RSTD, y_stride, x_stride, n_rows, n_cols, eps, offset, has_weight, round_first, store_rstd,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, KEEP: tl.constexpr, REVERSE: tl.constexpr, REPACK: tl.constexpr,
    BYPASS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One row of any length a program. It is read twice, the second time from the first-level cache, so that registers
    stay free for a second program; only KEEP columns are held, asked for before the first reduction. BLOCKS, where it
    is known, unrolls the loops, so that the blocks' loads are in flight together; EXACT leaves out the masks where
    n_cols is KEEP + BLOCKS * BLOCK; BYPASS keeps the weight out of the first-level cache, which then holds more of the
    row."""
    dtype: tl.constexpr = X.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    X += row * x_stride
    Y += row * y_stride
    block = tl.arange(0, BLOCK)
    if BLOCKS > 0:
        blocks = BLOCKS
    else:
        blocks = tl.cdiv(tl.maximum(n_cols - KEEP, 0), BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for i in range(blocks):
        x = load_block(X, KEEP + i * BLOCK + block, n_cols, "evict_last", EXACT).to(tl.float32)
        squares += x * x
    if KEEP > 0:
        kept_cols = tl.arange(0, KEEP)
        kept = load_block(X, kept_cols, n_cols, "evict_first", EXACT)
        xf = kept.to(tl.float32)
        square_sum = tl.sum(squares, 0) + tl.sum(xf * xf, 0)
    else:
        square_sum = tl.sum(squares, 0)
    rstd = tl.rsqrt(square_sum / n_cols + eps)
    if store_rstd != 0:
        tl.store(RSTD + row, rstd)
    if KEEP == 0:
        kept = rstd  # nothing is kept: any value will do
    if EXACT:  # the longest rows have no instruction to spare: one addition of zero costs 0.15 of the copy
        if (has_weight != 0) & (round_first != 0) & (offset == 0.0):
            scale_row(
                Y, X, W, kept, blocks, n_cols, rstd, offset, has_weight, round_first, dtype,
                BLOCK, KEEP, REVERSE, REPACK, BYPASS, EXACT, "llama",
            )  # fmt: skip
        elif (has_weight != 0) & (round_first == 0):
            scale_row(
                Y, X, W, kept, blocks, n_cols, rstd, offset, has_weight, round_first, dtype,
                BLOCK, KEEP, REVERSE, REPACK, BYPASS, EXACT, "gemma",
            )  # fmt: skip
        else:
            scale_row(
                Y, X, W, kept, blocks, n_cols, rstd, offset, has_weight, round_first, dtype,
                BLOCK, KEEP, REVERSE, REPACK, BYPASS, EXACT, "any",
            )  # fmt: skip
    else:
        scale_row(
            Y, X, W, kept, blocks, n_cols, rstd, offset, has_weight, round_first, dtype,
            BLOCK, KEEP, REVERSE, REPACK, BYPASS, EXACT, "any",
        )  # fmt: skip


@triton.jit
def store_sums(dw, DW, PARTIALS, cols, mask, store_partials, store_dw):
    """A program's sums of dw: one row of the partials or, from a lone program, the gradient itself."""
    tl.store(PARTIALS + cols, dw, mask=mask & (store_partials != 0))
    tl.store(DW + cols, dw.to(DW.dtype.element_ty), mask=mask & (store_dw != 0))


@triton.jit
def backward_tile(
    DX, DY, X, W, RSTD, DW, PARTIALS, WORDS, dx_stride, dy_stride, x_stride, n_rows, n_cols, offset,
    has_weight, store_dx, store_partials, store_dw,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Persistent programs, ROWS short rows a step; the next steps' loads are in flight meanwhile."""
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    in_row = cols < n_cols
    w = tl.load(W + cols, mask=in_row & (has_weight != 0), other=0.0).to(tl.float32) + offset
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in tl.range(program, tl.cdiv(n_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = step * ROWS + tl.arange(0, ROWS)
        mask = (rows < n_rows)[:, None] & in_row[None, :]
        x = tl.load(X + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(DY + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + rows, mask=rows < n_rows, other=0.0)
        c = tl.sum(x * (w[None, :] * dy), 1) / n_cols
        a = dy * rstd[:, None]
        dx = w[None, :] * a - x * (c * rstd * rstd * rstd)[:, None]
        tl.store(
            DX + rows[:, None] * dx_stride + cols[None, :],
            dx.to(DX.dtype.element_ty),
            mask=mask & (store_dx != 0),
        )
        dw += a * x
    store_sums(tl.sum(dw, 0), DW, PARTIALS + program * n_cols, cols, in_row, store_partials, store_dw)


@triton.jit
def backward_row(
    DX, DY, X, W, RSTD, DW, PARTIALS, WORDS, dx_stride, dy_stride, x_stride, n_rows, n_cols, offset,
    has_weight, store_dx, store_partials, store_dw,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``backward_tile`` with one row a step, 1-D: a [1, BLOCK] tile with a masked row runs at half the speed."""
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    w = tl.load(W + cols, mask=mask & (has_weight != 0), other=0.0).to(tl.float32) + offset
    dw = tl.zeros([BLOCK], tl.float32)
    for row in tl.range(program, n_rows, tl.num_programs(0), num_stages=STAGES):
        x = tl.load(X + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(DY + row * dy_stride + cols, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + row)
        c = tl.sum(x * (w * dy), 0) / n_cols
        a = dy * rstd
        dx = w * a - x * (c * rstd * rstd * rstd)
        tl.store(DX + row * dx_stride + cols, dx.to(DX.dtype.element_ty), mask=mask & (store_dx != 0))
        dw += a * x
    store_sums(dw, DW, PARTIALS + program * n_cols, cols, mask, store_partials, store_dw)


@triton.jit
def backward_long(
    DX, DY, X, W, RSTD, DW, PARTIALS, WORDS, dx_stride, dy_stride, x_stride, n_rows, n_cols, offset,
    has_weight, store_dx, store_partials, store_dw,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of any length, ROWS a step, read twice: for the dot product, then for dx. The program's row of partials is
    added to in memory, by the one program that owns it."""
    program = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    for step in range(program, tl.cdiv(n_rows, ROWS), tl.num_programs(0)):
        rows = step * ROWS + tl.arange(0, ROWS)
        in_rows = (rows < n_rows)[:, None]
        dot = tl.zeros([ROWS, BLOCK], tl.float32)
        for first in range(0, n_cols, BLOCK):
            cols = first + block
            mask = in_rows & (cols < n_cols)[None, :]
            x_at = X + rows[:, None] * x_stride + cols[None, :]
            dy_at = DY + rows[:, None] * dy_stride + cols[None, :]
            x = tl.load(x_at, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
            dy = tl.load(dy_at, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
            w = tl.load(W + cols, mask=(cols < n_cols) & (has_weight != 0), other=0.0).to(tl.float32) + offset
            dot += x * (w[None, :] * dy)
        rstd = tl.load(RSTD + rows, mask=rows < n_rows, other=0.0)
        c = tl.sum(dot, 1) / n_cols * rstd * rstd * rstd
        for first in range(0, n_cols, BLOCK):
            cols = first + block
            in_row = cols < n_cols
            mask = in_rows & in_row[None, :]
            x_at = X + rows[:, None] * x_stride + cols[None, :]
            dy_at = DY + rows[:, None] * dy_stride + cols[None, :]
            x = tl.load(x_at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            dy = tl.load(dy_at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            w = tl.load(W + cols, mask=in_row & (has_weight != 0), other=0.0).to(tl.float32) + offset
            a = dy * rstd[:, None]
            dx = (w[None, :] * a - x * c[:, None]).to(DX.dtype.element_ty)
            tl.store(DX + rows[:, None] * dx_stride + cols[None, :], dx, mask=mask & (store_dx != 0))
            partial_mask = in_row & (store_partials != 0)
            partial_at = PARTIALS + program * n_cols + cols
            before = tl.load(partial_at, mask=partial_mask & (step != program), other=0.0)
            tl.store(partial_at, before + tl.sum(a * x, 0), mask=partial_mask)
        tl.debug_barrier()  # the next step reads the partials, perhaps in other threads


@triton.jit
def backward_pairs(
    DX, DY, X, W, RSTD, DW, PARTIALS, WORDS, dx_stride, dy_stride, x_stride, n_rows, n_cols, offset,
    has_weight, store_dx, store_partials, store_dw,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Long contiguous rows of 16-bit elements, two to a register; BLOCK pairs a program, SPLIT programs a row.

    The SPLIT programs walk the rows together and exchange their parts of each row's dot product through
    WORDS[n_rows, SPLIT] (zeroed). A row is finished one step late: the neighbours' words of the previous row are asked
    for before the dot product of this one, so that the exchange costs no time. Waiting needs a cooperative launch.

    Registers decide the speed here. One stride (the row's length) instead of three and, where n_cols is exactly
    2 * SPLIT * BLOCK, no masks (EXACT) are worth 0.05 to 0.2 of the copy."""
    dtype: tl.constexpr = X.dtype.element_ty
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
    X_at = X.to(pairs, bitcast=True) + cols
    DY_at = DY.to(pairs, bitcast=True) + cols
    DX_at = DX.to(pairs, bitcast=True) + cols
    if EXACT:
        dx_mask = (cols >= 0) & (store_dx != 0)
        w_mask = (cols >= 0) & (has_weight != 0)
    else:
        dx_mask = mask & (store_dx != 0)
        w_mask = mask & (has_weight != 0)
    w = tl.load(W.to(pairs, bitcast=True) + cols, mask=w_mask, other=0)
    if EXACT:  # registers again: an offset that is zero is left out
        if offset == 0.0:
            dw_even, dw_odd = walk_rows(
                X_at, DY_at, DX_at, RSTD, WORDS, w, mask, dx_mask, n, group, groups, part, n_rows, offset, dtype,
                SPLIT, BLOCK, STAGES, EXACT, False,
            )  # fmt: skip
        else:
            dw_even, dw_odd = walk_rows(
                X_at, DY_at, DX_at, RSTD, WORDS, w, mask, dx_mask, n, group, groups, part, n_rows, offset, dtype,
                SPLIT, BLOCK, STAGES, EXACT, True,
            )  # fmt: skip
    else:
        dw_even, dw_odd = walk_rows(
            X_at, DY_at, DX_at, RSTD, WORDS, w, mask, dx_mask, n, group, groups, part, n_rows, offset, dtype,
            SPLIT, BLOCK, STAGES, EXACT, True,
        )  # fmt: skip
    partials = PARTIALS + group * n_cols + cols.to(tl.int64) * 2
    tl.store(partials, dw_even, mask=mask & (store_partials != 0))
    tl.store(partials + 1, dw_odd, mask=mask & (store_partials != 0))


@gluon.jit
def backward_ring(
    DX, DY, X, W, RSTD, DW, PARTIALS, WORDS, dx_stride, dy_stride, x_stride, n_rows, n_cols, offset,
    has_weight, store_dx, store_partials, store_dw,
    PIECES: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Persistent programs, a long row a step, held in shared memory: see ``norm_ring``."""
    layout: gl.constexpr = ring_layout(gl.num_warps())
    program = gl.program_id(0).to(gl.int64)
    ms = plus(halves_of(W, 0, n_cols, has_weight, PIECES, BLOCK, layout), offset)
    sums, _ = walk_ring(
        DX, DY, X, X, RSTD, ms, dx_stride, dy_stride, x_stride, x_stride, program, n_rows,
        gl.num_programs(0).to(gl.int64), n_cols, store_dx, False, False, False, False, PIECES, BLOCK, STAGES,
        layout,
    )  # fmt: skip
    store_halves(PARTIALS + program * n_cols, sums, n_cols, store_partials, PIECES, BLOCK)
