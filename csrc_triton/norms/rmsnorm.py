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

from csrc_triton.common.bf16x2 import repack
from csrc_triton.common.pdl_begin import begin
from csrc_triton.norms.norm_backward import (
    BACKWARD_PIPELINE,
    SPLIT_ROWS,
    PipelineSizes,
    load_halves,
    pipelined_backward,
    plus,
    rms_backward_long,
    rms_backward_rows,
    rms_backward_tiles,
    split_rms_backward,
    store_halves,
)
from csrc_triton.norms.norm_vectors import Rows, load_vector

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
                    "constants": ["ROWS", "BLOCK"],
                    "covers": "BLOCK",
                },
                "in_registers": {
                    "function": "forward_in_registers",
                    "constants": ["BLOCK", "BLOCKS", "PDL"],
                    "defaults": {"PDL": 0},
                    "covers": "BLOCKS * BLOCK",
                    "pdl": "PDL",
                },
                "long": {
                    "function": "forward_long",
                    "constants": ["BLOCK", "BLOCKS", "IN_REGISTERS", "REVERSE", "BYPASS_L1", "EXACT"],
                    "defaults": {
                        "BLOCKS": 0,
                        "IN_REGISTERS": 0,
                        "REVERSE": True,
                        "BYPASS_L1": False,
                        "EXACT": False,
                    },
                    "covers": "IN_REGISTERS + BLOCKS * BLOCK",
                    "any_length": "BLOCKS",
                },
            },
        },
        "rmsnorm_split": {
            "arguments": {
                "Y": "*dtype",
                "X": "*dtype",
                "W": "*weight",
                "RSTD": "*fp32",
                "SUMS": "*fp32",
                "y_stride": "i64",
                "x_stride": "i64",
                "n_cols": "i32",
                "parts": "i32",
                "combine": "i32",
                "eps": "fp32",
                "offset": "fp32",
                "has_weight": "i32",
                "round_first": "i32",
                "store_rstd": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"], "weight": ["dtype", "fp32"]},
            "aligned": ["Y", "X", "W", "y_stride", "x_stride", "n_cols"],
            "optional": True,
            "host": ["from_n", "up_to_rows"],
            "forms": {
                "split": {
                    "function": "forward_split",
                    "constants": ["BLOCK", "PARTS", "PDL"],
                    "defaults": {"PDL": 0},
                    "pdl": "PDL",
                }
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
            "host": ["rows_for_one_cta"],
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
                "split": {
                    **SPLIT_ROWS,
                    "function": "backward_split",
                    "requires": {"dtype": ["bf16", "fp16"], "weight": ["dtype"], "aligned": [True]},
                },
                "pipeline": {**BACKWARD_PIPELINE, "function": "backward_pipeline"},
            },
        },
    },
}


@triton.jit
def forward_tile(
    Y, X, W, RSTD, y_stride, x_stride, n_rows, n_cols, eps, offset, has_weight, round_first, store_rstd,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS whole rows a program, held in registers; n_cols <= BLOCK."""
    dtype: tl.constexpr = X.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    in_row = cols < n_cols
    mask = (rows < n_rows)[:, None] & in_row[None, :]
    x = tl.load(X + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0)
    w = load_vector(W, cols, in_row, has_weight, 0, False) + offset
    xf = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(xf * xf, 1) / n_cols + eps)
    tl.store(RSTD + rows, rstd, mask=(rows < n_rows) & (store_rstd != 0))
    y = xf * rstd[:, None]
    if round_first != 0:
        y = y.to(dtype).to(tl.float32)
    tl.store(Y + rows[:, None] * y_stride + cols[None, :], (y * w[None, :]).to(dtype), mask=mask)


@triton.jit
def forward_in_registers(
    Y, X, W, RSTD, y_stride, x_stride, n_rows, n_cols, eps, offset, has_weight, round_first, store_rstd,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row of at most BLOCKS * BLOCK columns a program, held in registers. For few rows, where a program has a
    multiprocessor to itself: all loads are in flight together, the weight's too."""
    dtype: tl.constexpr = X.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    X += row * x_stride
    Y += row * y_stride
    block = tl.arange(0, BLOCK)
    store_rstd = begin(store_rstd, PDL)
    xs, ws = (), ()
    for i in tl.static_range(BLOCKS):
        cols = i * BLOCK + block
        xs += (tl.load(X + cols, mask=cols < n_cols, other=0.0),)
    for i in tl.static_range(BLOCKS):
        cols = i * BLOCK + block
        ws += (tl.load(W + cols, mask=(cols < n_cols) & (has_weight != 0), other=0.0),)
    squares = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(BLOCKS):
        x = xs[i].to(tl.float32)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, 0) / n_cols + eps)
    if store_rstd != 0:
        tl.store(RSTD + row, rstd)
    for i in tl.static_range(BLOCKS):
        cols = i * BLOCK + block
        y = xs[i].to(tl.float32) * rstd
        y = tl.where(round_first != 0, y.to(dtype).to(tl.float32), y)
        tl.store(Y + cols, (y * (ws[i].to(tl.float32) + offset)).to(dtype), mask=cols < n_cols)


@triton.jit
def forward_split(
    Y, X, W, RSTD, SUMS, y_stride, x_stride, n_cols, parts, combine, eps, offset, has_weight, round_first, store_rstd,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row by ``parts`` programs of BLOCK columns, at most PARTS, in two launches: the first writes each part's sum of
    squares; the second, with ``combine``, reads those of all parts and writes y."""
    dtype: tl.constexpr = X.dtype.element_ty
    program = tl.program_id(0)
    row = (program // parts).to(tl.int64)
    part = program % parts
    cols = part * BLOCK + tl.arange(0, BLOCK)
    store_rstd = begin(store_rstd, PDL)
    x = tl.load(X + row * x_stride + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    SUMS += row * parts
    if combine == 0:
        tl.store(SUMS + part, tl.sum(x * x, 0))
    else:
        w = tl.load(W + cols, mask=(cols < n_cols) & (has_weight != 0), other=0.0).to(tl.float32) + offset
        at = tl.arange(0, PARTS)
        sums = tl.load(SUMS + at, mask=at < parts, other=0.0)
        rstd = tl.rsqrt(tl.sum(sums, 0) / n_cols + eps)
        tl.store(RSTD + row, rstd, mask=(part == 0) & (store_rstd != 0))
        y = x * rstd
        y = tl.where(round_first != 0, y.to(dtype).to(tl.float32), y)
        tl.store(Y + row * y_stride + cols, (y * w).to(dtype), mask=cols < n_cols)


@triton.jit
def load_block(X, cols, n_cols, EVICT: tl.constexpr, EXACT: tl.constexpr):
    if EXACT:
        return tl.load(X + cols, eviction_policy=EVICT)
    else:
        return tl.load(X + cols, mask=cols < n_cols, other=0.0, eviction_policy=EVICT)


@triton.jit
def scale_block(
    Y, x, W, cols, n_cols, rstd, offset, has_weight, round_first, dtype: tl.constexpr,
    BYPASS_L1: tl.constexpr, EXACT: tl.constexpr, LLAMA: tl.constexpr,
):  # fmt: skip
    """Normalise, scale and store a block of a row, x in fp32. LLAMA: there is a weight and no offset, and x * rstd is
    rounded first; what is known here costs nothing per element."""
    if EXACT:
        mask = cols >= 0
    else:
        mask = cols < n_cols
    if LLAMA:
        w = tl.load(W + cols, cache_modifier=".cg" if BYPASS_L1 else "").to(tl.float32)
        y = (x * rstd).to(dtype).to(tl.float32)
    else:
        w = tl.load(
            W + cols, mask=mask & (has_weight != 0), other=0.0, cache_modifier=".cg" if BYPASS_L1 else ""
        )
        w = w.to(tl.float32)
        w += offset
        y = x * rstd
        # A select, not a branch: the loads of the next block must be free to move up past this.
        y = tl.where(round_first != 0, y.to(dtype).to(tl.float32), y)
    if EXACT:
        tl.store(Y + cols, (y * w).to(dtype), eviction_policy="evict_first")
    else:
        tl.store(Y + cols, (y * w).to(dtype), mask=mask, eviction_policy="evict_first")


@triton.jit
def scale_row(
    Y, X, W, head, blocks, n_cols, rstd, offset, has_weight, round_first, dtype: tl.constexpr,
    BLOCK: tl.constexpr, IN_REGISTERS: tl.constexpr, REVERSE: tl.constexpr, BYPASS_L1: tl.constexpr,
    EXACT: tl.constexpr, LLAMA: tl.constexpr,
):  # fmt: skip
    """The second read of a row, then its first IN_REGISTERS columns, ``head``: unpacked last, they take few registers
    until then."""
    for i in range(blocks):
        if REVERSE:  # what was read last is the likeliest to be still in the cache
            cols = IN_REGISTERS + (blocks - 1 - i) * BLOCK + tl.arange(0, BLOCK)
        else:
            cols = IN_REGISTERS + i * BLOCK + tl.arange(0, BLOCK)
        x = load_block(X, cols, n_cols, "evict_first", EXACT).to(tl.float32)
        scale_block(
            Y, x, W, cols, n_cols, rstd, offset, has_weight, round_first, dtype, BYPASS_L1, EXACT, LLAMA
        )  # fmt: skip
    if IN_REGISTERS > 0:
        cols = tl.arange(0, IN_REGISTERS)
        if dtype != tl.float32:
            head = repack(head)
        head = head.to(tl.float32)
        scale_block(
            Y, head, W, cols, n_cols, rstd, offset, has_weight, round_first, dtype, BYPASS_L1, EXACT, LLAMA
        )  # fmt: skip


@triton.jit
def forward_long(
    Y, X, W, RSTD, y_stride, x_stride, n_rows, n_cols, eps, offset, has_weight, round_first, store_rstd,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, IN_REGISTERS: tl.constexpr, REVERSE: tl.constexpr,
    BYPASS_L1: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One row of any length a program. It is read twice, the second time from the L1 cache, so that registers stay
    free for a second program; only the first IN_REGISTERS columns are held in registers (PTX). BLOCKS, where it is
    known, unrolls the loops, so that the blocks' loads are in flight together; EXACT leaves out the masks where n_cols
    is IN_REGISTERS + BLOCKS * BLOCK; BYPASS_L1 keeps the weight out of the L1 cache, which then holds more of the row.
    """
    dtype: tl.constexpr = X.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    X += row * x_stride
    Y += row * y_stride
    block = tl.arange(0, BLOCK)
    if BLOCKS > 0:
        blocks = BLOCKS
    else:
        blocks = tl.cdiv(tl.maximum(n_cols - IN_REGISTERS, 0), BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for i in range(blocks):
        x = load_block(X, IN_REGISTERS + i * BLOCK + block, n_cols, "evict_last", EXACT).to(tl.float32)
        squares += x * x
    if IN_REGISTERS > 0:
        head = load_block(X, tl.arange(0, IN_REGISTERS), n_cols, "evict_first", EXACT)
        xf = head.to(tl.float32)
        square_sum = tl.sum(squares, 0) + tl.sum(xf * xf, 0)
    else:
        square_sum = tl.sum(squares, 0)
    rstd = tl.rsqrt(square_sum / n_cols + eps)
    if store_rstd != 0:
        tl.store(RSTD + row, rstd)
    if IN_REGISTERS == 0:
        head = rstd  # not used
    if EXACT:  # these rows have no instruction to spare: one addition of zero costs 0.15 of the copy
        if (has_weight != 0) & (round_first != 0) & (offset == 0.0):
            scale_row(
                Y, X, W, head, blocks, n_cols, rstd, offset, has_weight, round_first, dtype,
                BLOCK, IN_REGISTERS, REVERSE, BYPASS_L1, EXACT, True,
            )  # fmt: skip
        else:
            scale_row(
                Y, X, W, head, blocks, n_cols, rstd, offset, has_weight, round_first, dtype,
                BLOCK, IN_REGISTERS, REVERSE, BYPASS_L1, EXACT, False,
            )  # fmt: skip
    else:
        scale_row(
            Y, X, W, head, blocks, n_cols, rstd, offset, has_weight, round_first, dtype,
            BLOCK, IN_REGISTERS, REVERSE, BYPASS_L1, EXACT, False,
        )  # fmt: skip


@triton.jit
def store_sums(dw, DW, PARTIALS, cols, mask, store_partials, store_dw):
    """A program's sums of dw: one row of the partials or, where it is the only program, the gradient itself."""
    tl.store(PARTIALS + cols, dw, mask=mask & (store_partials != 0))
    tl.store(DW + cols, dw.to(DW.dtype.element_ty), mask=mask & (store_dw != 0))


@triton.jit
def backward_tile(
    DX, DY, X, W, RSTD, DW, PARTIALS, WORDS, dx_stride, dy_stride, x_stride, n_rows, n_cols, offset,
    has_weight, store_dx, store_partials, store_dw,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """See ``rms_backward_tiles``."""
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    in_row = cols < n_cols
    w = load_vector(W, cols, in_row, has_weight, 0, False) + offset
    x = Rows(X, x_stride)
    dw = rms_backward_tiles(
        Rows(DX, dx_stride), Rows(DY, dy_stride), x, x, RSTD, w, n_rows, n_cols, 0, store_dx, ROWS, BLOCK, STAGES, False
    )  # fmt: skip
    store_sums(tl.sum(dw, 0), DW, PARTIALS + program * n_cols, cols, in_row, store_partials, store_dw)


@triton.jit
def backward_row(
    DX, DY, X, W, RSTD, DW, PARTIALS, WORDS, dx_stride, dy_stride, x_stride, n_rows, n_cols, offset,
    has_weight, store_dx, store_partials, store_dw,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """See ``rms_backward_rows``."""
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    w = load_vector(W, cols, mask, has_weight, 0, False) + offset
    x = Rows(X, x_stride)
    dw = rms_backward_rows(
        Rows(DX, dx_stride), Rows(DY, dy_stride), x, x, RSTD, w, n_rows, n_cols, 0, store_dx, BLOCK, STAGES, False
    )  # fmt: skip
    store_sums(dw, DW, PARTIALS + program * n_cols, cols, mask, store_partials, store_dw)


@triton.jit
def backward_long(
    DX, DY, X, W, RSTD, DW, PARTIALS, WORDS, dx_stride, dy_stride, x_stride, n_rows, n_cols, offset,
    has_weight, store_dx, store_partials, store_dw,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See ``rms_backward_long``."""
    x = Rows(X, x_stride)
    rms_backward_long(
        Rows(DX, dx_stride), Rows(DY, dy_stride), x, x, RSTD, W, PARTIALS, n_rows, n_cols, offset, has_weight, 0,
        store_dx, store_partials, ROWS, BLOCK, False, False,
    )  # fmt: skip


@triton.jit
def backward_split(
    DX, DY, X, W, RSTD, DW, PARTIALS, WORDS, dx_stride, dy_stride, x_stride, n_rows, n_cols, offset,
    has_weight, store_dx, store_partials, store_dw,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """See ``split_rms_backward``."""
    split_rms_backward(
        DX, DY, X, X, RSTD, W, PARTIALS, WORDS, n_rows, n_cols, offset, has_weight, 0, store_dx, store_partials,
        SPLITS, BLOCK, STAGES, False,
    )  # fmt: skip


@gluon.jit
def backward_pipeline(
    DX, DY, X, W, RSTD, DW, PARTIALS, WORDS, dx_stride, dy_stride, x_stride, n_rows, n_cols, offset,
    has_weight, store_dx, store_partials, store_dw,
    BLOCKS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """See ``pipelined_backward``."""
    z = PipelineSizes(gl.num_warps(), BLOCKS, BLOCK, STAGES)
    program = gl.program_id(0).to(gl.int64)
    ws = plus(load_halves(W, 0, n_cols, has_weight, BLOCKS, BLOCK, z.layout), offset)
    x = Rows(X, x_stride)
    dw, _ = pipelined_backward(
        Rows(DX, dx_stride), Rows(DY, dy_stride), x, x, RSTD, ws, program, n_rows, gl.num_programs(0).to(gl.int64),
        n_cols, store_dx, False, z,
    )  # fmt: skip
    store_halves(PARTIALS + program * n_cols, dw, n_cols, store_partials, BLOCKS, BLOCK)
