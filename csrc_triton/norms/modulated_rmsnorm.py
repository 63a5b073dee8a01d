"""RMSNorm with a scale and a shift per group of rows (AdaLN): y = x * rstd * (offset + weight) * (1 + scale) + shift.

A group is ``rows_per_group`` rows that follow each other, a run-time number. Scale, shift and their gradients are of
x's dtype or fp32, and so is the weight: kinds of ``norm_vectors``. Statistics are fp32, row offsets int64, the length
of a row a run-time argument.

A ``part`` of a group a program: vectors are read once and kept, as are a row's elements; PIECES blocks make up a row
whose next power of two would idle too many lanes. In the forward parts are short: programs that share out all rows
evenly wait for the slowest multiprocessor (0.90 of the copy instead of 0.94 at 4096 columns, H200).

Groups of few rows, and long rows, are read row by row (``held``, ``long``): vectors are read with every row, and the
aligned variants are for vectors of x's dtype alone (WIDE of ``norm_vectors``).

On Hopper rows are copied to shared memory ahead of their use (``ring``): those of the forward in parts of 2 to 4 rows,
so that no multiprocessor is left alone with the last one, and in the backward where that is faster.

The backward has two sums over the rows of a group: of dy, which is dshift, and of dy * x * rstd, which is dscale but
for the weight and dweight but for 1 + scale.

Peebles and Xie, Scalable Diffusion Models with Transformers (2022).
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from csrc_triton.common.norm_ring import halves_of, plus, ring_layout, store_halves, times, walk_ring
from csrc_triton.common.overlap import once_previous_ended
from csrc_triton.common.ring_forms import NORM_RING
from csrc_triton.norms.modulated_ring import walk_forward
from csrc_triton.norms.modulated_rows import (
    add_up,
    factors,
    hold_row,
    job_of,
    modulated,
    run_of,
    walk_part,
    walk_row,
    walk_tokens,
)
from csrc_triton.norms.norm_vectors import load_vector, store_as

DECLARATION = {
    "op": "modulated_rmsnorm",
    "uses": ["column_sums"],
    "kernels": {
        "modulated_rmsnorm_forward": {
            "arguments": {
                "Y": "*dtype", "X": "*dtype", "SCALE": "*dtype", "SHIFT": "*dtype", "W": "*dtype",
                "RSTD": "*fp32", "y_stride": "i64", "x_stride": "i64", "scale_stride": "i64",
                "shift_stride": "i64", "n_rows": "i64", "n_cols": "i32", "rows_per_group": "i64",
                "rows_per_part": "i64", "parts": "i32", "eps": "fp32", "offset": "fp32", "scale_kind": "i32",
                "shift_kind": "i32", "weight_kind": "i32", "round_first": "i32", "store_rstd": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": [
                "Y", "X", "SCALE", "SHIFT", "W", "y_stride", "x_stride", "scale_stride", "shift_stride",
                "n_cols",
            ],
            "forms": {
                "part": {
                    "function": "forward_part",
                    "constants": ["PIECES", "BLOCK", "STAGES", "RUN"],
                    "defaults": {"PIECES": 1, "RUN": 8},
                    "covers": "PIECES * BLOCK",
                    "staged": ["X"],
                },
                "ring": {
                    "language": "gluon",
                    "function": "forward_ring",
                    "constants": ["PIECES", "BLOCK", "STAGES", "RUN"],
                    "defaults": {"RUN": 8},
                    "covers": "2 * PIECES * BLOCK",
                    "requires": {"dtype": ["bf16", "fp16"], "aligned": [True]},
                },
                "long": {
                    "function": "forward_long",
                    "constants": ["BLOCK", "BLOCKS", "WIDE"],
                    "defaults": {"BLOCKS": 0, "WIDE": False},
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
                "any": {
                    "function": "forward_long",
                    "constants": ["BLOCK", "BLOCKS", "WIDE"],
                    "defaults": {"BLOCKS": 0, "WIDE": True},
                    "covers": "BLOCKS * BLOCK",
                    "any_length": "BLOCKS",
                    "requires": {"aligned": [False]},
                },
            },
        },
        "modulated_rmsnorm_backward": {
            "arguments": {
                "DX": "*dtype", "DY": "*dtype", "X": "*dtype", "SCALE": "*dtype", "W": "*dtype",
                "RSTD": "*fp32", "NORMAL": "*fp32", "PLAIN": "*fp32", "dx_stride": "i64", "dy_stride": "i64",
                "x_stride": "i64", "scale_stride": "i64", "n_cols": "i32", "rows_per_group": "i64",
                "rows_per_part": "i64", "parts": "i32", "offset": "fp32", "scale_kind": "i32",
                "weight_kind": "i32", "store_dx": "i32", "store_normal": "i32", "store_plain": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": [
                "DX", "DY", "X", "SCALE", "W", "NORMAL", "PLAIN", "dx_stride", "dy_stride", "x_stride",
                "scale_stride", "n_cols",
            ],
            "forms": {
                "part": {
                    "function": "backward_part",
                    "constants": ["PIECES", "BLOCK", "STAGES"],
                    "defaults": {"PIECES": 1},
                    "covers": "PIECES * BLOCK",
                    "staged": ["DY", "X"],
                },
                "long": {"function": "backward_long", "constants": ["ROWS", "BLOCK"]},
                "ring": {**NORM_RING, "function": "backward_ring"},
            },
        },
        "modulated_rmsnorm_sums": {
            "arguments": {
                "DSCALE": "*dtype", "DSHIFT": "*dtype", "DW": "*dtype", "NORMAL": "*fp32", "PLAIN": "*fp32",
                "SCALE": "*dtype", "W": "*dtype", "scale_stride": "i64", "n_cols": "i32", "groups": "i32",
                "parts": "i32", "offset": "fp32", "scale_kind": "i32", "weight_kind": "i32",
                "dscale_kind": "i32", "dshift_kind": "i32", "dw_kind": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["DSCALE", "DSHIFT", "DW", "NORMAL", "PLAIN", "SCALE", "W", "scale_stride", "n_cols"],
            "forms": {
                "tile": {
                    "function": "sums",
                    "constants": ["BLOCK", "PARTS", "PDL"],
                    "defaults": {"PDL": 0},
                    "pdl": "PDL",
                }
            },
        },
        "modulated_rmsnorm_backward_tokens": {
            "arguments": {
                "DX": "*dtype", "DSCALE": "*dtype", "DSHIFT": "*dtype", "DY": "*dtype", "X": "*dtype",
                "SCALE": "*dtype", "W": "*dtype", "RSTD": "*fp32", "PARTIALS": "*fp32", "dx_stride": "i64",
                "dy_stride": "i64", "x_stride": "i64", "scale_stride": "i64", "n_rows": "i64",
                "n_cols": "i32", "offset": "fp32", "scale_kind": "i32", "weight_kind": "i32",
                "store_dx": "i32", "dscale_kind": "i32", "dshift_kind": "i32", "store_partials": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": [
                "DX", "DSCALE", "DSHIFT", "DY", "X", "SCALE", "W", "PARTIALS", "dx_stride", "dy_stride",
                "x_stride", "scale_stride", "n_cols",
            ],
            "forms": {
                "long": {
                    "function": "tokens_long",
                    "constants": ["BLOCK", "BLOCKS", "WIDE"],
                    "defaults": {"BLOCKS": 0, "WIDE": False},
                    "covers": "BLOCKS * BLOCK",
                    "any_length": "BLOCKS",
                    "requires": {"aligned": [True]},
                },
                "any": {
                    "function": "tokens_long",
                    "constants": ["BLOCK", "BLOCKS", "WIDE"],
                    "defaults": {"BLOCKS": 0, "WIDE": True},
                    "covers": "BLOCKS * BLOCK",
                    "any_length": "BLOCKS",
                    "requires": {"aligned": [False]},
                },
            },
        },
    },
}  # fmt: skip


@triton.jit
def forward_part(
    Y, X, SCALE, SHIFT, W, RSTD, y_stride, x_stride, scale_stride, shift_stride, n_rows, n_cols, rows_per_group,
    rows_per_part, parts, eps, offset, scale_kind, shift_kind, weight_kind, round_first, store_rstd,
    PIECES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """A part of a group a program; the next rows' loads are in flight meanwhile. RUN is for the host alone: the most
    rows of a part."""
    group, first, last = run_of(rows_per_group, rows_per_part, parts)
    block = tl.arange(0, BLOCK)
    part = 1.0 / n_cols
    ms, shifts = (), ()
    for i in tl.static_range(PIECES):
        cols = i * BLOCK + block
        m, w = factors(SCALE, W, cols, cols < n_cols, scale_kind, weight_kind, offset, group * scale_stride)
        ms += (m * w,)
        shifts += (load_vector(SHIFT, cols, cols < n_cols, shift_kind, group * shift_stride),)
    for row in tl.range(first, last, num_stages=STAGES):
        xs = ()
        squares = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(PIECES):
            cols = i * BLOCK + block
            x = tl.load(X + row * x_stride + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
            squares += x * x
            xs += (x,)
        rstd = tl.rsqrt(tl.sum(squares, 0) * part + eps)
        tl.store(RSTD + row, rstd, mask=store_rstd != 0)
        for i in tl.static_range(PIECES):
            cols = i * BLOCK + block
            y = modulated(xs[i], rstd, ms[i], shifts[i], round_first, Y.dtype.element_ty)
            tl.store(Y + row * y_stride + cols, y, mask=cols < n_cols)


@gluon.jit
def forward_ring(
    Y, X, SCALE, SHIFT, W, RSTD, y_stride, x_stride, scale_stride, shift_stride, n_rows, n_cols, rows_per_group,
    rows_per_part, parts, eps, offset, scale_kind, shift_kind, weight_kind, round_first, store_rstd,
    PIECES: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, RUN: gl.constexpr,
):  # fmt: skip
    """``forward_part`` with rows that pass through shared memory: see ``modulated_ring``."""
    group, first, last = run_of(rows_per_group, rows_per_part, parts)
    walk_forward(
        Y, X, SCALE, SHIFT, W, RSTD, y_stride, x_stride, group * scale_stride, group * shift_stride, first, last,
        n_cols, eps, offset, scale_kind, shift_kind, weight_kind, round_first, store_rstd, PIECES, BLOCK, STAGES,
        ring_layout(gl.num_warps()),
    )  # fmt: skip


@triton.jit
def forward_long(
    Y, X, SCALE, SHIFT, W, RSTD, y_stride, x_stride, scale_stride, shift_stride, n_rows, n_cols, rows_per_group,
    rows_per_part, parts, eps, offset, scale_kind, shift_kind, weight_kind, round_first, store_rstd,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One row of any length a program. BLOCKS, where it is known, unrolls the loops, so that the blocks' loads are in
    flight together. WIDE allows for fp32 vectors beside rows of 16 bits."""
    walk_row(
        Y, X, SCALE, SHIFT, W, RSTD, y_stride, x_stride, scale_stride, shift_stride, n_cols, rows_per_group, eps,
        offset, scale_kind, shift_kind, weight_kind, round_first, store_rstd, BLOCK, BLOCKS, WIDE,
    )  # fmt: skip


@triton.jit
def forward_held(
    Y, X, SCALE, SHIFT, W, RSTD, y_stride, x_stride, scale_stride, shift_stride, n_rows, n_cols, rows_per_group,
    rows_per_part, parts, eps, offset, scale_kind, shift_kind, weight_kind, round_first, store_rstd,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """``forward_long`` with all loads of a row under way before the first is used; at the second read, those of
    TOGETHER blocks."""
    hold_row(
        Y, X, SCALE, SHIFT, W, RSTD, y_stride, x_stride, scale_stride, shift_stride, n_cols, rows_per_group, eps,
        offset, scale_kind, shift_kind, weight_kind, round_first, store_rstd, BLOCK, BLOCKS, TOGETHER,
    )  # fmt: skip


@triton.jit
def backward_part(
    DX, DY, X, SCALE, W, RSTD, NORMAL, PLAIN, dx_stride, dy_stride, x_stride, scale_stride, n_cols, rows_per_group,
    rows_per_part, parts, offset, scale_kind, weight_kind, store_dx, store_normal, store_plain,
    PIECES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A part of a group a program, as in ``forward_part``. NORMAL and PLAIN get the sums of dy * x * rstd and of dy, a
    row a program."""
    program = tl.program_id(0).to(tl.int64)
    group, first, last = run_of(rows_per_group, rows_per_part, parts)
    block = tl.arange(0, BLOCK)
    part = 1.0 / n_cols
    ms, normals, plains = (), (), ()
    for i in tl.static_range(PIECES):
        cols = i * BLOCK + block
        m, w = factors(SCALE, W, cols, cols < n_cols, scale_kind, weight_kind, offset, group * scale_stride)
        ms += (m * w,)
        normals += (tl.zeros([BLOCK], tl.float32),)
        plains += (tl.zeros([BLOCK], tl.float32),)
    for row in tl.range(first, last, num_stages=STAGES):
        rstd = tl.load(RSTD + row)
        xs, dys = (), ()
        dots = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(PIECES):
            cols = i * BLOCK + block
            x = tl.load(X + row * x_stride + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
            dy = tl.load(DY + row * dy_stride + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
            dots += x * (ms[i] * dy)
            xs += (x,)
            dys += (dy,)
        c = tl.sum(dots, 0) * part * rstd * rstd * rstd
        next_normals, next_plains = (), ()
        for i in tl.static_range(PIECES):
            cols = i * BLOCK + block
            a = dys[i] * rstd
            dx = (ms[i] * a - xs[i] * c).to(DX.dtype.element_ty)
            tl.store(DX + row * dx_stride + cols, dx, mask=(cols < n_cols) & (store_dx != 0))
            next_normals += (normals[i] + a * xs[i],)
            next_plains += (plains[i] + dys[i],)
        normals, plains = next_normals, next_plains
    for i in tl.static_range(PIECES):
        cols = i * BLOCK + block
        tl.store(NORMAL + program * n_cols + cols, normals[i], mask=(cols < n_cols) & (store_normal != 0))
        tl.store(PLAIN + program * n_cols + cols, plains[i], mask=(cols < n_cols) & (store_plain != 0))


@triton.jit
def backward_long(
    DX, DY, X, SCALE, W, RSTD, NORMAL, PLAIN, dx_stride, dy_stride, x_stride, scale_stride, n_cols, rows_per_group,
    rows_per_part, parts, offset, scale_kind, weight_kind, store_dx, store_normal, store_plain,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``backward_row`` for rows of any length, ROWS a step, read twice; the sums are added to in memory."""
    walk_part(
        DX, DY, X, SCALE, W, RSTD, NORMAL, PLAIN, dx_stride, dy_stride, x_stride, scale_stride, n_cols,
        rows_per_group, rows_per_part, parts, offset, scale_kind, weight_kind, store_dx, store_normal, store_plain,
        ROWS, BLOCK,
    )  # fmt: skip


@gluon.jit
def backward_ring(
    DX, DY, X, SCALE, W, RSTD, NORMAL, PLAIN, dx_stride, dy_stride, x_stride, scale_stride, n_cols, rows_per_group,
    rows_per_part, parts, offset, scale_kind, weight_kind, store_dx, store_normal, store_plain,
    PIECES: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """``backward_part`` for long rows, held in shared memory: see ``norm_ring``. A part is every ``parts``-th row of a
    group: with a step that is known, addresses would take twice the registers."""
    layout: gl.constexpr = ring_layout(gl.num_warps())
    program = gl.program_id(0).to(gl.int64)
    group = (gl.program_id(0) // parts).to(gl.int64)
    first = group * rows_per_group + gl.program_id(0) % parts
    last = (group + 1) * rows_per_group
    ms = times(
        plus(halves_of(SCALE, group * scale_stride, n_cols, scale_kind, PIECES, BLOCK, layout), 1.0),
        plus(halves_of(W, 0, n_cols, weight_kind, PIECES, BLOCK, layout), offset),
    )
    normals, plains = walk_ring(
        DX, DY, X, X, RSTD, ms, dx_stride, dy_stride, x_stride, x_stride, first, last, parts.to(gl.int64), n_cols,
        store_dx, False, False, True, False, PIECES, BLOCK, STAGES, layout,
    )  # fmt: skip
    store_halves(NORMAL + program * n_cols, normals, n_cols, store_normal, PIECES, BLOCK)
    store_halves(PLAIN + program * n_cols, plains, n_cols, store_plain, PIECES, BLOCK)


@triton.jit
def sums(
    DSCALE, DSHIFT, DW, NORMAL, PLAIN, SCALE, W, scale_stride, n_cols, groups, parts, offset, scale_kind, weight_kind,
    dscale_kind, dshift_kind, dw_kind,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The second level: BLOCK columns of one row of dscale, dshift or dw a program, PARTS parts a step."""
    if PDL:
        parts = once_previous_ended(parts)  # by the kernel before this one NORMAL and PLAIN are written
    blocks = tl.cdiv(n_cols, BLOCK)
    job = tl.program_id(0) // blocks
    group, first, last, is_dscale, is_dshift, is_dw = job_of(job, groups, parts, dscale_kind, dshift_kind)
    cols = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    in_row = cols < n_cols
    if is_dw:
        total = add_up(
            NORMAL, SCALE, first, last, cols, in_row, n_cols, parts, scale_stride, scale_kind, BLOCK, PARTS, True
        )  # fmt: skip
    else:
        total = add_up(
            tl.where(is_dshift, PLAIN, NORMAL), SCALE, first, last, cols, in_row, n_cols, parts, scale_stride,
            scale_kind, BLOCK, PARTS, False,
        )  # fmt: skip
    w = load_vector(W, cols, in_row & is_dscale, weight_kind) + offset
    start = group.to(tl.int64) * n_cols
    store_as(DSCALE, cols, total * w, in_row & is_dscale, dscale_kind, start)
    store_as(DSHIFT, cols, total, in_row & is_dshift, dshift_kind, start)
    store_as(DW, cols, total, in_row & is_dw, dw_kind)


@triton.jit
def tokens_long(
    DX, DSCALE, DSHIFT, DY, X, SCALE, W, RSTD, PARTIALS, dx_stride, dy_stride, x_stride, scale_stride, n_rows, n_cols,
    offset, scale_kind, weight_kind, store_dx, dscale_kind, dshift_kind, store_partials,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The backward where a group is one row: dscale and dshift are a row's own. Constants as in ``forward_long``."""
    walk_tokens(
        DX, DSCALE, DSHIFT, DY, X, SCALE, W, RSTD, PARTIALS, dx_stride, dy_stride, x_stride, scale_stride, n_rows,
        n_cols, offset, scale_kind, weight_kind, store_dx, dscale_kind, dshift_kind, store_partials, BLOCK, BLOCKS,
        WIDE,
    )  # fmt: skip
