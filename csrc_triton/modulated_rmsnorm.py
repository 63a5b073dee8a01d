"""RMSNorm with a scale and a shift per group of rows (AdaLN): y = x * rstd * (offset + weight) * (1 + scale) + shift.

A group is ``rows_per_group`` rows that follow each other, a run-time number. Scale, shift and their gradients are of
x's dtype or fp32, and so is the weight: kinds of ``norm_vectors``. Statistics are fp32, row offsets int64, the length
of a row a run-time argument.

Where vectors are read with every row, the aligned variants are for vectors of x's dtype alone: a second, masked-off
load of each held LayerNorm's forward at 0.80 of the copy instead of 0.95 (H200), and there are three here. fp32 vectors
beside rows of 16 bits take the generic variants.

The backward has two sums over the rows of a group: of dy, which is dshift, and of dy * x * rstd, which is dscale but
for the weight and dweight but for 1 + scale.

Peebles and Xie, Scalable Diffusion Models with Transformers (2022).
"""

import triton
import triton.language as tl

from csrc_triton.modulated_rows import (
    add_up,
    factors,
    group_of_program,
    job_of,
    modulated,
    run_of,
    walk_part,
    walk_row,
    walk_tokens,
)
from csrc_triton.norm_vectors import load_known, load_vector, store_as

DECLARATION = {
    "op": "modulated_rmsnorm",
    "kernels": {
        "modulated_rmsnorm_forward": {
            "arguments": {
                "Y": "*dtype",
                "X": "*dtype",
                "SCALE": "*dtype",
                "SHIFT": "*dtype",
                "W": "*dtype",
                "RSTD": "*fp32",
                "y_stride": "i64",
                "x_stride": "i64",
                "scale_stride": "i64",
                "shift_stride": "i64",
                "n_rows": "i64",
                "n_cols": "i32",
                "rows_per_group": "i64",
                "eps": "fp32",
                "offset": "fp32",
                "scale_kind": "i32",
                "shift_kind": "i32",
                "weight_kind": "i32",
                "round_first": "i32",
                "store_rstd": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": [
                "Y",
                "X",
                "SCALE",
                "SHIFT",
                "W",
                "y_stride",
                "x_stride",
                "scale_stride",
                "shift_stride",
                "n_cols",
            ],
            "forms": {
                "tile": {
                    "function": "forward_tile",
                    "constants": ["ROWS", "BLOCK"],
                    "covers": "BLOCK",
                    "requires": {"aligned": [True]},
                },
                "row": {
                    "function": "forward_row",
                    "constants": ["BLOCK"],
                    "covers": "BLOCK",
                    "requires": {"aligned": [True]},
                },
                "long": {
                    "function": "forward_long",
                    "constants": ["BLOCK", "BLOCKS", "WIDE"],
                    "defaults": {"BLOCKS": 0, "WIDE": False},
                    "covers": "BLOCKS * BLOCK",
                    "any_length": "BLOCKS",
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
                "DX": "*dtype",
                "DY": "*dtype",
                "X": "*dtype",
                "SCALE": "*dtype",
                "W": "*dtype",
                "RSTD": "*fp32",
                "NORMAL": "*fp32",
                "PLAIN": "*fp32",
                "dx_stride": "i64",
                "dy_stride": "i64",
                "x_stride": "i64",
                "scale_stride": "i64",
                "n_cols": "i32",
                "rows_per_group": "i64",
                "rows_per_part": "i64",
                "parts": "i32",
                "offset": "fp32",
                "scale_kind": "i32",
                "weight_kind": "i32",
                "store_dx": "i32",
                "store_normal": "i32",
                "store_plain": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": [
                "DX",
                "DY",
                "X",
                "SCALE",
                "W",
                "NORMAL",
                "PLAIN",
                "dx_stride",
                "dy_stride",
                "x_stride",
                "scale_stride",
                "n_cols",
            ],
            "forms": {
                "row": {
                    "function": "backward_row",
                    "constants": ["BLOCK", "STAGES"],
                    "covers": "BLOCK",
                    "staged": ["DY", "X"],
                },
                "long": {"function": "backward_long", "constants": ["ROWS", "BLOCK"]},
            },
        },
        "modulated_rmsnorm_sums": {
            "arguments": {
                "DSCALE": "*dtype",
                "DSHIFT": "*dtype",
                "DW": "*dtype",
                "NORMAL": "*fp32",
                "PLAIN": "*fp32",
                "SCALE": "*dtype",
                "W": "*dtype",
                "scale_stride": "i64",
                "n_cols": "i32",
                "groups": "i32",
                "parts": "i32",
                "offset": "fp32",
                "scale_kind": "i32",
                "weight_kind": "i32",
                "dscale_kind": "i32",
                "dshift_kind": "i32",
                "dw_kind": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["DSCALE", "DSHIFT", "DW", "NORMAL", "PLAIN", "SCALE", "W", "scale_stride", "n_cols"],
            "forms": {"tile": {"function": "sums", "constants": ["BLOCK", "PARTS"]}},
        },
        "modulated_rmsnorm_backward_tokens": {
            "arguments": {
                "DX": "*dtype",
                "DSCALE": "*dtype",
                "DSHIFT": "*dtype",
                "DY": "*dtype",
                "X": "*dtype",
                "SCALE": "*dtype",
                "W": "*dtype",
                "RSTD": "*fp32",
                "PARTIALS": "*fp32",
                "dx_stride": "i64",
                "dy_stride": "i64",
                "x_stride": "i64",
                "scale_stride": "i64",
                "n_rows": "i64",
                "n_cols": "i32",
                "offset": "fp32",
                "scale_kind": "i32",
                "weight_kind": "i32",
                "store_dx": "i32",
                "dscale_kind": "i32",
                "dshift_kind": "i32",
                "store_partials": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": [
                "DX",
                "DSCALE",
                "DSHIFT",
                "DY",
                "X",
                "SCALE",
                "W",
                "PARTIALS",
                "dx_stride",
                "dy_stride",
                "x_stride",
                "scale_stride",
                "n_cols",
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
}


@triton.jit
def forward_tile(
    Y, X, SCALE, SHIFT, W, RSTD, y_stride, x_stride, scale_stride, shift_stride, n_rows, n_cols, rows_per_group, eps,
    offset, scale_kind, shift_kind, weight_kind, round_first, store_rstd,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS short rows a program, of one group or of several."""
    dtype: tl.constexpr = X.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    in_row = cols < n_cols
    mask = (rows < n_rows)[:, None] & in_row[None, :]
    x = tl.load(X + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    group = (rows // rows_per_group)[:, None]
    m = 1.0 + tl.load(SCALE + group * scale_stride + cols[None, :], mask=mask).to(tl.float32)
    shift = load_known(SHIFT, group * shift_stride + cols[None, :], mask, shift_kind, 0, False)
    if weight_kind != 0:
        m *= (tl.load(W + cols, mask=in_row, other=0.0).to(tl.float32) + offset)[None, :]
    rstd = tl.rsqrt(tl.sum(x * x, 1) / n_cols + eps)
    tl.store(RSTD + rows, rstd, mask=(rows < n_rows) & (store_rstd != 0))
    y = modulated(x, rstd[:, None], m, shift, round_first, dtype)
    tl.store(Y + rows[:, None] * y_stride + cols[None, :], y, mask=mask)


@triton.jit
def forward_row(
    Y, X, SCALE, SHIFT, W, RSTD, y_stride, x_stride, scale_stride, shift_stride, n_rows, n_cols, rows_per_group, eps,
    offset, scale_kind, shift_kind, weight_kind, round_first, store_rstd,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program, 1-D. All vectors are asked for before the reduction; an absent weight costs nothing."""
    dtype: tl.constexpr = X.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    x = tl.load(X + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    group = group_of_program(rows_per_group)
    m = 1.0 + tl.load(SCALE + group * scale_stride + cols, mask=mask).to(tl.float32)
    shift = load_known(SHIFT, cols, mask, shift_kind, group * shift_stride, False)
    if weight_kind != 0:
        m *= tl.load(W + cols, mask=mask, other=0.0).to(tl.float32) + offset
    rstd = tl.rsqrt(tl.sum(x * x, 0) / n_cols + eps)
    if store_rstd != 0:
        tl.store(RSTD + row, rstd)
    tl.store(Y + row * y_stride + cols, modulated(x, rstd, m, shift, round_first, dtype), mask=mask)


@triton.jit
def forward_long(
    Y, X, SCALE, SHIFT, W, RSTD, y_stride, x_stride, scale_stride, shift_stride, n_rows, n_cols, rows_per_group, eps,
    offset, scale_kind, shift_kind, weight_kind, round_first, store_rstd,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One row of any length a program. BLOCKS, where it is known, unrolls the loops, so that the blocks' loads are in
    flight together. WIDE allows for fp32 vectors beside rows of 16 bits."""
    walk_row(
        Y, X, SCALE, SHIFT, W, RSTD, y_stride, x_stride, scale_stride, shift_stride, n_cols, rows_per_group, eps,
        offset, scale_kind, shift_kind, weight_kind, round_first, store_rstd, BLOCK, BLOCKS, WIDE,
    )  # fmt: skip


@triton.jit
def backward_row(
    DX, DY, X, SCALE, W, RSTD, NORMAL, PLAIN, dx_stride, dy_stride, x_stride, scale_stride, n_cols, rows_per_group,
    rows_per_part, parts, offset, scale_kind, weight_kind, store_dx, store_normal, store_plain,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A part of a group a program; the next rows' loads are in flight meanwhile. NORMAL and PLAIN get the sums of
    dy * x * rstd and of dy, a row a program."""
    program = tl.program_id(0).to(tl.int64)
    group, first, last = run_of(rows_per_group, rows_per_part, parts)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    m, w = factors(SCALE, W, cols, mask, scale_kind, weight_kind, offset, group * scale_stride, 0)
    m *= w
    normal = tl.zeros([BLOCK], tl.float32)
    plain = tl.zeros([BLOCK], tl.float32)
    for row in tl.range(first, last, num_stages=STAGES):
        x = tl.load(X + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(DY + row * dy_stride + cols, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + row)
        c = tl.sum(x * (m * dy), 0) / n_cols
        a = dy * rstd
        dx = m * a - x * (c * rstd * rstd * rstd)
        tl.store(DX + row * dx_stride + cols, dx.to(DX.dtype.element_ty), mask=mask & (store_dx != 0))
        normal += a * x
        plain += dy
    tl.store(NORMAL + program * n_cols + cols, normal, mask=mask & (store_normal != 0))
    tl.store(PLAIN + program * n_cols + cols, plain, mask=mask & (store_plain != 0))


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


@triton.jit
def sums(
    DSCALE, DSHIFT, DW, NORMAL, PLAIN, SCALE, W, scale_stride, n_cols, groups, parts, offset, scale_kind, weight_kind,
    dscale_kind, dshift_kind, dw_kind,
    BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The second level: BLOCK columns of one row of dscale, dshift or dw a program, PARTS parts a step."""
    blocks = tl.cdiv(n_cols, BLOCK)
    job = tl.program_id(0) // blocks
    group, first, last, is_dscale, is_dshift, is_dw = job_of(job, groups, parts, dscale_kind, dshift_kind)
    cols = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    in_row = cols < n_cols
    total = add_up(
        NORMAL, PLAIN, SCALE, first, last, cols, in_row, n_cols, parts, scale_stride, scale_kind, is_dshift, is_dw,
        BLOCK, PARTS,
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
