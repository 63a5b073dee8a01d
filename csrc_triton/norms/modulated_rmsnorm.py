"""RMSNorm with a scale and a shift per group of rows (AdaLN): y = x * rstd * (offset + weight) * (1 + scale) + shift.

A group is ``rows_per_group`` rows that follow each other, a run-time number. Scale, shift and their gradients are of
x's dtype or fp32, and so is the weight: kinds of ``norm_vectors``. Statistics are fp32, row offsets int64, the length
of a row a run-time argument.

A program has a ``part`` of a group: vectors are read once and stay in registers, as do a row's elements; BLOCKS blocks
make up a row whose next power of two would leave too many lanes idle. In the forward parts are short: where programs
divide all rows evenly, the launch waits for the slowest multiprocessor (0.90 of the copy instead of 0.94 at 4096
columns, H200).

Groups of few rows, and long rows, are read row by row (``prefetched``, ``long``): vectors are read with every row, and
the aligned variants are for vectors of x's dtype alone (WIDE of ``norm_vectors``).

On Hopper rows are copied to shared memory ahead of their use (``pipeline``): in the forward in parts of 2 to 4 rows, so
that no multiprocessor is left alone with the last one, and in the backward where that is faster.

The backward has two sums over the rows of a group: of dy, which is dshift, and of dy * x_hat with x_hat = x * rstd,
which is dscale but for the weight and dweight but for 1 + scale.

Peebles and Xie, Scalable Diffusion Models with Transformers (2022).
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from csrc_triton.common.bf16x2 import even, odd, pack
from csrc_triton.common.pdl import wait_for_previous
from csrc_triton.common.pipeline import copy_tile, next_stage
from csrc_triton.norms.norm_backward import (
    BACKWARD_PIPELINE,
    PipelineSizes,
    allocate_blocks,
    as_x2,
    load_halves,
    pipelined_backward,
    plus,
    store_halves,
    times,
    x2_layout,
)
from csrc_triton.norms.norm_vectors import Rows, add_in_memory, load_blocks, load_vector, store_as

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
            "host": ["max_part_rows", "min_group_rows"],
            "aligned": [
                "Y", "X", "SCALE", "SHIFT", "W", "y_stride", "x_stride", "scale_stride", "shift_stride",
                "n_cols",
            ],
            "forms": {
                "part": {
                    "function": "forward_part",
                    "constants": ["BLOCK", "STAGES"],
                    "covers": "BLOCK",
                    "staged": ["X"],
                },
                "pipeline": {
                    "language": "gluon",
                    "function": "forward_pipeline",
                    "constants": ["BLOCKS", "BLOCK", "STAGES"],
                    "covers": "2 * BLOCKS * BLOCK",
                    "requires": {"dtype": ["bf16", "fp16"], "aligned": [True]},
                },
                "long": {"function": "forward_long", "constants": ["BLOCK", "WIDE"], "defaults": {"WIDE": False}},
                "prefetched": {
                    "function": "forward_prefetched",
                    "constants": ["BLOCK", "BLOCKS", "IN_FLIGHT"],
                    "covers": "BLOCKS * BLOCK",
                    "requires": {"aligned": [True]},
                },
            },
        },
        "modulated_rmsnorm_backward": {
            "arguments": {
                "DX": "*dtype", "DY": "*dtype", "X": "*dtype", "SCALE": "*dtype", "W": "*dtype",
                "RSTD": "*fp32", "XHAT_SUMS": "*fp32", "DY_SUMS": "*fp32", "dx_stride": "i64", "dy_stride": "i64",
                "x_stride": "i64", "scale_stride": "i64", "n_cols": "i32", "rows_per_group": "i64",
                "rows_per_part": "i64", "parts": "i32", "offset": "fp32", "scale_kind": "i32",
                "weight_kind": "i32", "store_dx": "i32", "store_xhat_sums": "i32", "store_dy_sums": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": [
                "DX", "DY", "X", "SCALE", "W", "XHAT_SUMS", "DY_SUMS", "dx_stride", "dy_stride", "x_stride",
                "scale_stride", "n_cols",
            ],
            "forms": {
                "part": {
                    "function": "backward_part",
                    "constants": ["BLOCKS", "BLOCK", "STAGES"],
                    "defaults": {"BLOCKS": 1},
                    "covers": "BLOCKS * BLOCK",
                    "staged": ["DY", "X"],
                },
                "long": {"function": "backward_long", "constants": ["ROWS", "BLOCK"]},
                "pipeline": {**BACKWARD_PIPELINE, "function": "backward_pipeline"},
            },
        },
        "modulated_rmsnorm_sums": {
            "arguments": {
                "DSCALE": "*dtype", "DSHIFT": "*dtype", "DW": "*dtype", "XHAT_SUMS": "*fp32", "DY_SUMS": "*fp32",
                "SCALE": "*dtype", "W": "*dtype", "scale_stride": "i64", "n_cols": "i32", "groups": "i32",
                "parts": "i32", "offset": "fp32", "scale_kind": "i32", "weight_kind": "i32",
                "dscale_kind": "i32", "dshift_kind": "i32", "dw_kind": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["DSCALE", "DSHIFT", "DW", "XHAT_SUMS", "DY_SUMS", "SCALE", "W", "scale_stride", "n_cols"],
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
                "long": {"function": "tokens_long", "constants": ["BLOCK", "WIDE"], "defaults": {"WIDE": False}},
            },
        },
    },
}  # fmt: skip


@triton.jit
def modulated(x, rstd, m, shift, round_first, dtype: tl.constexpr):
    """y in ``dtype`` from x in fp32 and m, the weight times 1 + scale. A select, not a branch: loads must be free to
    move past it."""
    y = x * rstd
    y = tl.where(round_first != 0, y.to(dtype).to(tl.float32), y)
    return (y * m + shift).to(dtype)


@triton.jit
def group_of_program(rows_per_group):
    """The group of a program that has one row. No grid has 2^31 programs: the quotient is one of int32, for a third of
    the instructions of an int64 one."""
    return (tl.program_id(0) // rows_per_group.to(tl.int32)).to(tl.int64)


@triton.jit
def part_of(rows_per_group, rows_per_part, parts):
    """A program's group, the first row of its part of it, and the first row after that."""
    group = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    first = group * rows_per_group + part * rows_per_part
    return group, first, tl.minimum(first + rows_per_part, (group + 1) * rows_per_group)


@triton.jit
def factors(
    SCALE, W, cols, mask, scale_kind, weight_kind, offset, row_start, start=0, WIDE: tl.constexpr = True
):
    """1 + scale and offset + weight of the columns from ``start`` on; the row of scale begins at ``row_start``."""
    m = 1.0 + load_vector(SCALE, cols, mask, scale_kind, row_start + start, WIDE)
    return m, load_vector(W, cols, mask, weight_kind, start, WIDE) + offset


@triton.jit
def forward_part(
    Y, X, SCALE, SHIFT, W, RSTD, y_stride, x_stride, scale_stride, shift_stride, n_rows, n_cols, rows_per_group,
    rows_per_part, parts, eps, offset, scale_kind, shift_kind, weight_kind, round_first, store_rstd,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A part of a group a program; the next rows' loads are in flight meanwhile."""
    group, first, last = part_of(rows_per_group, rows_per_part, parts)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    inverse_n = 1.0 / n_cols
    m, w = factors(SCALE, W, cols, mask, scale_kind, weight_kind, offset, group * scale_stride)
    m *= w
    shift = load_vector(SHIFT, cols, mask, shift_kind, group * shift_stride)
    for row in tl.range(first, last, num_stages=STAGES):
        x = tl.load(X + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, 0) * inverse_n + eps)
        tl.store(RSTD + row, rstd, mask=store_rstd != 0)
        y = modulated(x, rstd, m, shift, round_first, Y.dtype.element_ty)
        tl.store(Y + row * y_stride + cols, y, mask=mask)


@gluon.jit
def copy_row(xs, stage, X, n, live, BLOCK: gl.constexpr, layout: gl.constexpr):
    """Start to copy a row; zeros if it is not there."""
    block = gl.arange(0, BLOCK, layout=layout)
    for i in gl.static_range(len(xs)):
        copy_tile(xs[i], stage, X + i * BLOCK, (block < n - i * BLOCK) & live)
    async_copy.commit_group()


@gluon.jit
def normalise_x2(low, high, rstd, round_first, dtype: gl.constexpr):
    """x * rstd, rounded to ``dtype`` if ``round_first``."""
    low, high = low * rstd, high * rstd
    rounded = pack(low, high, dtype)
    return gl.where(round_first, even(rounded, dtype), low), gl.where(round_first, odd(rounded, dtype), high)


@gluon.jit
def forward_pipeline(
    Y, X, SCALE, SHIFT, W, RSTD, y_stride, x_stride, scale_stride, shift_stride, n_rows, n_cols, rows_per_group,
    rows_per_part, parts, eps, offset, scale_kind, shift_kind, weight_kind, round_first, store_rstd,
    BLOCKS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """``forward_part`` with rows that pass through shared memory: 16-bit elements as bf16x2, in blocks and halves as
    in ``norm_backward``. STAGES rows are copied ahead of their use, before scale and shift are loaded: the kernel is
    bound by how much is in flight, and here no compiler moves loads to where they are used."""
    layout: gl.constexpr = x2_layout(gl.num_warps())
    group, first, last = part_of(rows_per_group, rows_per_part, parts)
    scale_start, shift_start = group * scale_stride, group * shift_stride
    dtype: gl.constexpr = X.dtype.element_ty
    block = gl.arange(0, BLOCK, layout=layout)
    n = n_cols // 2
    inverse_n = 1.0 / n_cols
    y_stride, x_stride = y_stride >> 1, x_stride >> 1  # in pairs
    X = as_x2(X) + block
    Y = as_x2(Y) + block
    xs = ()
    for _ in gl.static_range(BLOCKS):
        xs += (allocate_blocks(STAGES, BLOCK),)
    for i in gl.static_range(STAGES):
        copy_row(xs, i, X + (first + i) * x_stride, n, first + i < last, BLOCK, layout)
    ws = plus(load_halves(SCALE, scale_start, n_cols, scale_kind, BLOCKS, BLOCK, layout), 1.0)
    shifts = load_halves(SHIFT, shift_start, n_cols, shift_kind, BLOCKS, BLOCK, layout)
    if weight_kind != 0:
        ws = times(ws, plus(load_halves(W, 0, n_cols, weight_kind, BLOCKS, BLOCK, layout), offset))
    stage = 0
    for row in range(first, last):
        async_copy.wait_group(STAGES - 1)
        tiles = ()
        squares = gl.zeros([BLOCK], gl.float32, layout)
        for i in gl.static_range(BLOCKS):
            x = xs[i].index(stage).load(layout)
            low, high = even(x, dtype), odd(x, dtype)
            squares = squares + low * low
            squares = squares + high * high
            tiles += (x,)
        rstd = gl.rsqrt(gl.sum(squares, 0) * inverse_n + eps)
        later = row + STAGES
        copy_row(xs, stage, X + later * x_stride, n, later < last, BLOCK, layout)
        stage = next_stage(stage, STAGES)
        if store_rstd != 0:
            gl.store(RSTD + row, rstd)
        for i in gl.static_range(BLOCKS):
            low, high = normalise_x2(
                even(tiles[i], dtype), odd(tiles[i], dtype), rstd, round_first != 0, dtype
            )
            low = low * ws[2 * i] + shifts[2 * i]
            high = high * ws[2 * i + 1] + shifts[2 * i + 1]
            gl.store(Y + row * y_stride + i * BLOCK, pack(low, high, dtype), mask=block < n - i * BLOCK)
    async_copy.wait_group(0)


@triton.jit
def scale_row(
    Y, X, SCALE, SHIFT, W, scale_start, shift_start, blocks, n_cols, rstd, offset, scale_kind, shift_kind, weight_kind,
    round_first,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """The second read of a row. Not WEIGHTED: there is no weight, and it costs nothing."""
    for i in range(blocks):
        cols = (blocks - 1 - i) * BLOCK + tl.arange(0, BLOCK)
        mask = cols < n_cols
        x = tl.load(X + cols, mask=mask, eviction_policy="evict_first").to(tl.float32)
        m = 1.0 + load_vector(SCALE, cols, mask, scale_kind, scale_start, WIDE)
        shift = load_vector(SHIFT, cols, mask, shift_kind, shift_start, WIDE)
        if WEIGHTED:
            m *= load_vector(W, cols, mask, weight_kind, 0, WIDE) + offset
        y = modulated(x, rstd, m, shift, round_first, X.dtype.element_ty)
        tl.store(Y + cols, y, mask=mask, eviction_policy="evict_first")


@triton.jit
def forward_long(
    Y, X, SCALE, SHIFT, W, RSTD, y_stride, x_stride, scale_stride, shift_stride, n_rows, n_cols, rows_per_group,
    rows_per_part, parts, eps, offset, scale_kind, shift_kind, weight_kind, round_first, store_rstd,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One row of any length a program. WIDE allows for fp32 vectors beside rows of 16 bits."""
    row = tl.program_id(0).to(tl.int64)
    group = group_of_program(rows_per_group)
    X += row * x_stride
    Y += row * y_stride
    block = tl.arange(0, BLOCK)
    blocks = tl.cdiv(n_cols, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for i in range(blocks):
        cols = i * BLOCK + block
        x = tl.load(X + cols, mask=cols < n_cols, other=0.0, eviction_policy="evict_last").to(tl.float32)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, 0) / n_cols + eps)
    if store_rstd != 0:
        tl.store(RSTD + row, rstd)
    scale_start = group * scale_stride
    shift_start = group * shift_stride
    if WIDE or weight_kind != 0:
        scale_row(
            Y, X, SCALE, SHIFT, W, scale_start, shift_start, blocks, n_cols, rstd, offset, scale_kind, shift_kind,
            weight_kind, round_first, BLOCK, WIDE, True,
        )  # fmt: skip
    else:
        scale_row(
            Y, X, SCALE, SHIFT, W, scale_start, shift_start, blocks, n_cols, rstd, offset, scale_kind, shift_kind,
            weight_kind, round_first, BLOCK, WIDE, False,
        )  # fmt: skip


@triton.jit
def scale_blocks(
    Y, X, SCALE, SHIFT, W, block, n_cols, rstd, offset, scale_kind, shift_kind, round_first,
    BLOCK: tl.constexpr, COUNT: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """COUNT blocks of the second read, whose loads are in flight together."""
    xs, scales, shifts, ws = (), (), (), ()
    for i in tl.static_range(COUNT):
        cols = i * BLOCK + block
        xs += (tl.load(X + cols, mask=cols < n_cols, other=0.0, eviction_policy="evict_first"),)
    for i in tl.static_range(COUNT):
        cols = i * BLOCK + block
        mask = cols < n_cols
        scales += (tl.load(SCALE + cols, mask=mask & (scale_kind != 0), other=0.0),)
        shifts += (tl.load(SHIFT + cols, mask=mask & (shift_kind != 0), other=0.0),)
        if WEIGHTED:
            ws += (tl.load(W + cols, mask=mask, other=0.0),)
    for i in tl.static_range(COUNT):
        cols = i * BLOCK + block
        m = 1.0 + scales[i].to(tl.float32)
        if WEIGHTED:
            m *= ws[i].to(tl.float32) + offset
        shift = shifts[i].to(tl.float32)
        y = modulated(xs[i].to(tl.float32), rstd, m, shift, round_first, X.dtype.element_ty)
        tl.store(Y + cols, y, mask=cols < n_cols, eviction_policy="evict_first")


@triton.jit
def forward_prefetched(
    Y, X, SCALE, SHIFT, W, RSTD, y_stride, x_stride, scale_stride, shift_stride, n_rows, n_cols, rows_per_group,
    rows_per_part, parts, eps, offset, scale_kind, shift_kind, weight_kind, round_first, store_rstd,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, IN_FLIGHT: tl.constexpr,
):  # fmt: skip
    """``forward_long`` with all loads of a row in flight before the first value is used; at the second read, those of
    IN_FLIGHT blocks."""
    row = tl.program_id(0).to(tl.int64)
    group = group_of_program(rows_per_group)
    X += row * x_stride
    Y += row * y_stride
    SCALE += group * scale_stride
    SHIFT += group * shift_stride
    block = tl.arange(0, BLOCK)
    xs = load_blocks(X, n_cols, block, BLOCKS)
    squares = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(BLOCKS):
        x = xs[i].to(tl.float32)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, 0) / n_cols + eps)
    if store_rstd != 0:
        tl.store(RSTD + row, rstd)
    if weight_kind != 0:  # fewer blocks together: registers are those of both branches
        for i in tl.static_range(BLOCKS):
            scale_blocks(
                Y + i * BLOCK, X + i * BLOCK, SCALE + i * BLOCK, SHIFT + i * BLOCK, W + i * BLOCK, block,
                n_cols - i * BLOCK, rstd, offset, scale_kind, shift_kind, round_first, BLOCK, 1, True,
            )  # fmt: skip
    else:
        for i in tl.static_range(0, BLOCKS, IN_FLIGHT):
            scale_blocks(
                Y + i * BLOCK, X + i * BLOCK, SCALE + i * BLOCK, SHIFT + i * BLOCK, W, block,
                n_cols - i * BLOCK, rstd, offset, scale_kind, shift_kind, round_first, BLOCK,
                IN_FLIGHT if i + IN_FLIGHT < BLOCKS else BLOCKS - i, False,
            )  # fmt: skip


@triton.jit
def backward_part(
    DX, DY, X, SCALE, W, RSTD, XHAT_SUMS, DY_SUMS, dx_stride, dy_stride, x_stride, scale_stride, n_cols, rows_per_group,
    rows_per_part, parts, offset, scale_kind, weight_kind, store_dx, store_xhat_sums, store_dy_sums,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A part of a group a program, as in ``forward_part``. XHAT_SUMS and DY_SUMS get the sums of dy * x_hat and of
    dy, a row a program."""
    program = tl.program_id(0).to(tl.int64)
    group, first, last = part_of(rows_per_group, rows_per_part, parts)
    block = tl.arange(0, BLOCK)
    inverse_n = 1.0 / n_cols
    ms, xhat_sums, dy_sums = (), (), ()
    for i in tl.static_range(BLOCKS):
        cols = i * BLOCK + block
        m, w = factors(SCALE, W, cols, cols < n_cols, scale_kind, weight_kind, offset, group * scale_stride)
        ms += (m * w,)
        xhat_sums += (tl.zeros([BLOCK], tl.float32),)
        dy_sums += (tl.zeros([BLOCK], tl.float32),)
    for row in tl.range(first, last, num_stages=STAGES):
        rstd = tl.load(RSTD + row)
        xs, dys = (), ()
        dots = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(BLOCKS):
            cols = i * BLOCK + block
            x = tl.load(X + row * x_stride + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
            dy = tl.load(DY + row * dy_stride + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
            dots += x * (ms[i] * dy)
            xs += (x,)
            dys += (dy,)
        c = tl.sum(dots, 0) * inverse_n * rstd * rstd * rstd
        next_xhats, next_dys = (), ()
        for i in tl.static_range(BLOCKS):
            cols = i * BLOCK + block
            a = dys[i] * rstd
            dx = (ms[i] * a - xs[i] * c).to(DX.dtype.element_ty)
            tl.store(DX + row * dx_stride + cols, dx, mask=(cols < n_cols) & (store_dx != 0))
            next_xhats += (xhat_sums[i] + a * xs[i],)
            next_dys += (dy_sums[i] + dys[i],)
        xhat_sums, dy_sums = next_xhats, next_dys
    for i in tl.static_range(BLOCKS):
        cols = i * BLOCK + block
        tl.store(
            XHAT_SUMS + program * n_cols + cols, xhat_sums[i], mask=(cols < n_cols) & (store_xhat_sums != 0)
        )
        tl.store(DY_SUMS + program * n_cols + cols, dy_sums[i], mask=(cols < n_cols) & (store_dy_sums != 0))


@triton.jit
def load_two(X_at, DY_at, start, mask, EVICT: tl.constexpr):
    """x and dy in fp32."""
    x = tl.load(X_at + start, mask=mask, other=0.0, eviction_policy=EVICT)
    dy = tl.load(DY_at + start, mask=mask, other=0.0, eviction_policy=EVICT)
    return x.to(tl.float32), dy.to(tl.float32)


@triton.jit
def backward_long(
    DX, DY, X, SCALE, W, RSTD, XHAT_SUMS, DY_SUMS, dx_stride, dy_stride, x_stride, scale_stride, n_cols, rows_per_group,
    rows_per_part, parts, offset, scale_kind, weight_kind, store_dx, store_xhat_sums, store_dy_sums,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``backward_part`` for rows of any length, ROWS a step, read twice; the sums are added to in memory."""
    program = tl.program_id(0).to(tl.int64)
    group, first, last = part_of(rows_per_group, rows_per_part, parts)
    scale_start = group * scale_stride
    XHAT_SUMS += program * n_cols
    DY_SUMS += program * n_cols
    block = tl.arange(0, BLOCK)
    for step in range(first, last, ROWS):
        rows = step + tl.arange(0, ROWS)
        in_rows = (rows < last)[:, None]
        X_at = X + rows[:, None] * x_stride + block[None, :]
        DY_at = DY + rows[:, None] * dy_stride + block[None, :]
        DX_at = DX + rows[:, None] * dx_stride + block[None, :]
        rstd = tl.load(RSTD + rows, mask=rows < last, other=0.0)[:, None]
        dot = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in range(0, n_cols, BLOCK):
            in_row = block < n_cols - start
            m, w = factors(SCALE, W, block, in_row, scale_kind, weight_kind, offset, scale_start, start)
            x, dy = load_two(X_at, DY_at, start, in_rows & in_row[None, :], "evict_last")
            dot += x * ((m * w)[None, :] * dy)
        c = (tl.sum(dot, 1) / n_cols)[:, None] * rstd * rstd * rstd
        for start in range(0, n_cols, BLOCK):
            in_row = block < n_cols - start
            mask = in_rows & in_row[None, :]
            m, w = factors(SCALE, W, block, in_row, scale_kind, weight_kind, offset, scale_start, start)
            x, dy = load_two(X_at, DY_at, start, mask, "evict_first")
            a = dy * rstd
            dx = (m * w)[None, :] * a - x * c
            tl.store(DX_at + start, dx.to(DX.dtype.element_ty), mask=mask & (store_dx != 0))
            add_in_memory(
                XHAT_SUMS + start + block, tl.sum(a * x, 0), in_row & (store_xhat_sums != 0), step == first
            )
            add_in_memory(
                DY_SUMS + start + block, tl.sum(dy, 0), in_row & (store_dy_sums != 0), step == first
            )
        tl.debug_barrier()  # the next step reads the sums, perhaps in other threads


@gluon.jit
def backward_pipeline(
    DX, DY, X, SCALE, W, RSTD, XHAT_SUMS, DY_SUMS, dx_stride, dy_stride, x_stride, scale_stride, n_cols, rows_per_group,
    rows_per_part, parts, offset, scale_kind, weight_kind, store_dx, store_xhat_sums, store_dy_sums,
    BLOCKS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """``backward_part`` with rows held in shared memory: see ``pipelined_backward``. A part is every ``parts``-th row
    of a group: with a step that is known, addresses would take twice the registers."""
    z = PipelineSizes(gl.num_warps(), BLOCKS, BLOCK, STAGES, DB=True)
    program = gl.program_id(0).to(gl.int64)
    group = (gl.program_id(0) // parts).to(gl.int64)
    first = group * rows_per_group + gl.program_id(0) % parts
    last = (group + 1) * rows_per_group
    ws = times(
        plus(load_halves(SCALE, group * scale_stride, n_cols, scale_kind, BLOCKS, BLOCK, z.layout), 1.0),
        plus(load_halves(W, 0, n_cols, weight_kind, BLOCKS, BLOCK, z.layout), offset),
    )
    x = Rows(X, x_stride)
    xhat_sums, dy_sums = pipelined_backward(
        Rows(DX, dx_stride), Rows(DY, dy_stride), x, x, RSTD, ws, first, last, parts.to(gl.int64), n_cols, store_dx,
        False, z,
    )  # fmt: skip
    store_halves(XHAT_SUMS + program * n_cols, xhat_sums, n_cols, store_xhat_sums, BLOCKS, BLOCK)
    store_halves(DY_SUMS + program * n_cols, dy_sums, n_cols, store_dy_sums, BLOCKS, BLOCK)


@triton.jit
def sum_rows(
    FROM, SCALE, first, last, cols, in_row, n_cols, parts, scale_stride, scale_kind,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """The sum over rows of FROM, each times its group's 1 + scale if SCALED, PARTS rows a step."""
    total = tl.zeros([PARTS, BLOCK], tl.float32)
    for step in range(first, last, PARTS):
        rows = (step + tl.arange(0, PARTS))[:, None]
        mask = (rows < last) & in_row[None, :]
        value = tl.load(FROM + rows.to(tl.int64) * n_cols + cols[None, :], mask=mask, other=0.0)
        if SCALED:
            scale_at = (rows // parts).to(tl.int64) * scale_stride + cols[None, :]
            value *= 1.0 + load_vector(SCALE, scale_at, mask, scale_kind)
        total += value
    return tl.sum(total, 0)


@triton.jit
def job_of(job, groups, parts, dscale_kind, dshift_kind):
    """What the second level's ``job``-th row is: its group, its first part and the first after it, and whether it is of
    dscale, dshift or dw. dw is the sum over the parts of all groups."""
    dscale_jobs = tl.where(dscale_kind != 0, groups, 0)
    dshift_jobs = tl.where(dshift_kind != 0, groups, 0)
    is_dscale = job < dscale_jobs
    is_dw = job >= dscale_jobs + dshift_jobs
    is_dshift = (is_dscale | is_dw) == 0
    group = tl.where(is_dw, 0, tl.where(is_dscale, job, job - dscale_jobs))
    first = group * parts
    last = tl.where(is_dw, groups * parts, first + parts)
    return group, first, last, is_dscale, is_dshift, is_dw


@triton.jit
def sums(
    DSCALE, DSHIFT, DW, XHAT_SUMS, DY_SUMS, SCALE, W, scale_stride, n_cols, groups, parts, offset, scale_kind,
    weight_kind, dscale_kind, dshift_kind, dw_kind,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The second level: BLOCK columns of one row of dscale, dshift or dw a program, PARTS parts a step."""
    if PDL:
        parts = wait_for_previous(parts)  # by the kernel before this one XHAT_SUMS and DY_SUMS are written
    blocks = tl.cdiv(n_cols, BLOCK)
    job = tl.program_id(0) // blocks
    group, first, last, is_dscale, is_dshift, is_dw = job_of(job, groups, parts, dscale_kind, dshift_kind)
    cols = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    in_row = cols < n_cols
    if is_dw:
        total = sum_rows(
            XHAT_SUMS, SCALE, first, last, cols, in_row, n_cols, parts, scale_stride, scale_kind, BLOCK, PARTS, True
        )  # fmt: skip
    else:
        total = sum_rows(
            tl.where(is_dshift, DY_SUMS, XHAT_SUMS), SCALE, first, last, cols, in_row, n_cols, parts, scale_stride,
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
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The backward where a group is one row: dscale and dshift are a row's own. Persistent programs, rows of any length
    that are read twice; a program's row of partials of dw is added to in memory. Constants as in ``forward_long``."""
    program = tl.program_id(0).to(tl.int64)
    PARTIALS += program * n_cols
    block = tl.arange(0, BLOCK)
    blocks = tl.cdiv(n_cols, BLOCK)
    for row in range(program, n_rows, tl.num_programs(0)):
        X_at = X + row * x_stride + block
        DY_at = DY + row * dy_stride + block
        rstd = tl.load(RSTD + row)
        dot = tl.zeros([BLOCK], tl.float32)
        for i in range(blocks):
            start = i * BLOCK
            mask = block < n_cols - start
            x, dy = load_two(X_at, DY_at, start, mask, "evict_last")
            m, w = factors(
                SCALE, W, block, mask, scale_kind, weight_kind, offset, row * scale_stride, start, WIDE
            )
            dot += x * (m * w * dy)
        c = tl.sum(dot, 0) / n_cols * rstd * rstd * rstd
        for i in range(blocks):
            start = i * BLOCK
            mask = block < n_cols - start
            x, dy = load_two(X_at, DY_at, start, mask, "evict_first")
            m, w = factors(
                SCALE, W, block, mask, scale_kind, weight_kind, offset, row * scale_stride, start, WIDE
            )
            a = dy * rstd
            dx = (m * w * a - x * c).to(DX.dtype.element_ty)
            tl.store(DX + row * dx_stride + start + block, dx, mask=mask & (store_dx != 0))
            store_as(DSCALE, block, a * x * w, mask, dscale_kind, row * n_cols + start, WIDE)
            store_as(DSHIFT, block, dy, mask, dshift_kind, row * n_cols + start, WIDE)
            add_in_memory(PARTIALS + start + block, a * x * m, mask & (store_partials != 0), row == program)
        tl.debug_barrier()  # the next step reads the partials, perhaps in other threads
