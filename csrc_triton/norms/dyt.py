"""DyT: y = weight * tanh(alpha * x) + bias over rows of n_cols; alpha is one number for all.

Elements are independent: a program takes a tile of ROWS x BLOCK, whatever n_cols is, or is persistent and has the same
columns of many rows. In the backward all are persistent, so that the sums over rows stay in registers and the partial
sums are few; ``sums`` is their second level. Alpha, weight and bias are of x's dtype or fp32, a run-time kind
(``norm_vectors``).

Zhu, Chen, He, LeCun and Liu, Transformers without Normalization (2025).
"""

import triton
import triton.language as tl

from csrc_triton.common.tanh import tanh_and_slope, tanh_of, units
from csrc_triton.norms.column_sums import column_sums
from csrc_triton.norms.norm_vectors import load_vector

DECLARATION = {
    "op": "dyt",
    "kernels": {
        "dyt_forward": {
            "arguments": {
                "Y": "*dtype",
                "X": "*dtype",
                "ALPHA": "*dtype",
                "W": "*dtype",
                "B": "*dtype",
                "y_stride": "i64",
                "x_stride": "i64",
                "n_rows": "i64",
                "n_cols": "i32",
                "blocks": "i32",
                "alpha_kind": "i32",
                "w_kind": "i32",
                "b_kind": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["Y", "X", "W", "B", "y_stride", "x_stride", "n_cols"],
            "forms": {
                "tile": {"function": "forward_tile", "constants": ["ROWS", "BLOCK"]},
                "rows": {"function": "forward_rows", "constants": ["ROWS", "BLOCK"]},
                "row": {"function": "forward_row", "constants": ["BLOCK", "STAGES"], "staged": ["X"]},
            },
        },
        "dyt_backward": {
            "arguments": {
                "DX": "*dtype",
                "DY": "*dtype",
                "X": "*dtype",
                "ALPHA": "*dtype",
                "W": "*dtype",
                "PARTIALS": "*fp32",
                "ALPHAS": "*fp32",
                "dx_stride": "i64",
                "dy_stride": "i64",
                "x_stride": "i64",
                "width": "i64",
                "dbias_at": "i64",
                "n_rows": "i64",
                "n_cols": "i32",
                "blocks": "i32",
                "alpha_kind": "i32",
                "w_kind": "i32",
                "store_dx": "i32",
                "store_dweight": "i32",
                "store_dbias": "i32",
                "store_dalpha": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": [
                "DX",
                "DY",
                "X",
                "W",
                "PARTIALS",
                "dx_stride",
                "dy_stride",
                "x_stride",
                "width",
                "dbias_at",
                "n_cols",
            ],
            "forms": {
                "tile": {
                    "function": "backward_tile",
                    "constants": ["ROWS", "BLOCK", "STAGES"],
                    "staged": ["DY", "X"],
                },
                "row": {
                    "function": "backward_row",
                    "constants": ["BLOCK", "STAGES"],
                    "staged": ["DY", "X"],
                },
            },
        },
        "dyt_sums": {
            "arguments": {
                "DWEIGHT": "*weight",
                "DBIAS": "*weight",
                "DALPHA": "*weight",
                "PARTIALS": "*fp32",
                "ALPHAS": "*fp32",
                "parts": "i32",
                "width": "i32",
                "dbias_at": "i32",
                "alphas": "i32",
                "store_dalpha": "i32",
            },
            "axes": {"weight": ["bf16", "fp16", "fp32"]},
            "aligned": [],
            "forms": {"tile": {"function": "sums", "constants": ["BLOCK", "PARTS"]}},
        },
    },
}


@triton.jit
def forward_tile(
    Y, X, ALPHA, W, B, y_stride, x_stride, n_rows, n_cols, blocks, alpha_kind, w_kind, b_kind,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS rows of BLOCK columns a program, ``blocks`` programs side by side."""
    program = tl.program_id(0)
    first = (program // blocks).to(tl.int64) * ROWS
    rows = tl.arange(0, ROWS)
    cols = program % blocks * BLOCK + tl.arange(0, BLOCK)
    in_row = cols < n_cols
    mask = (rows < n_rows - first)[:, None] & in_row[None, :]
    unit = units(load_vector(ALPHA, 0, alpha_kind != 0, alpha_kind))
    w = load_vector(W, cols, in_row, w_kind) + (w_kind == 0)
    b = load_vector(B, cols, in_row, b_kind)
    x_at = X + first * x_stride + rows[:, None] * x_stride + cols[None, :]
    x = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
    y = tanh_of(x * unit) * w[None, :] + b[None, :]
    y_at = Y + first * y_stride + rows[:, None] * y_stride + cols[None, :]
    tl.store(y_at, y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def forward_rows(
    Y, X, ALPHA, W, B, y_stride, x_stride, n_rows, n_cols, blocks, alpha_kind, w_kind, b_kind,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``forward_tile`` row by row, 1-D, with all loads in flight before the first value is used: a barrier keeps the
    compiler from moving the loads of later rows down to where they are used."""
    program = tl.program_id(0)
    first = (program // blocks).to(tl.int64) * ROWS
    cols = program % blocks * BLOCK + tl.arange(0, BLOCK)
    in_row = cols < n_cols
    xs = ()
    for i in tl.static_range(ROWS):
        xs += (tl.load(X + (first + i) * x_stride + cols, mask=in_row & (first + i < n_rows), other=0.0),)
    unit = units(load_vector(ALPHA, 0, alpha_kind != 0, alpha_kind))
    w = load_vector(W, cols, in_row, w_kind) + (w_kind == 0)
    b = load_vector(B, cols, in_row, b_kind)
    tl.debug_barrier()
    for i in tl.static_range(ROWS):
        y = tanh_of(xs[i].to(tl.float32) * unit) * w + b
        y_at = Y + (first + i) * y_stride + cols
        tl.store(y_at, y.to(Y.dtype.element_ty), mask=in_row & (first + i < n_rows))


@triton.jit
def forward_row(
    Y, X, ALPHA, W, B, y_stride, x_stride, n_rows, n_cols, blocks, alpha_kind, w_kind, b_kind,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Persistent groups of ``blocks`` programs side by side, a row a step, with weight and bias in registers; the next
    rows' loads are in flight meanwhile."""
    program = tl.program_id(0)
    cols = program % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n_cols
    unit = units(load_vector(ALPHA, 0, alpha_kind != 0, alpha_kind))
    w = load_vector(W, cols, mask, w_kind) + (w_kind == 0)
    b = load_vector(B, cols, mask, b_kind)
    group = (program // blocks).to(tl.int64)
    for row in tl.range(group, n_rows, tl.num_programs(0) // blocks, num_stages=STAGES):
        x = tl.load(X + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
        y = tanh_of(x * unit) * w + b
        tl.store(Y + row * y_stride + cols, y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def backward_tile(
    DX, DY, X, ALPHA, W, PARTIALS, ALPHAS, dx_stride, dy_stride, x_stride, width, dbias_at, n_rows, n_cols, blocks,
    alpha_kind, w_kind, store_dx, store_dweight, store_dbias, store_dalpha,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Persistent groups of ``blocks`` programs side by side, ROWS rows a step; the next steps' loads are in flight
    meanwhile. PARTIALS has a row of ``width`` for each group: dweight from column 0, dbias from ``dbias_at``. ALPHAS
    has one number a program."""
    program = tl.program_id(0)
    group = (program // blocks).to(tl.int64)
    rows = tl.arange(0, ROWS)
    cols = program % blocks * BLOCK + tl.arange(0, BLOCK)
    in_row = cols < n_cols
    alpha = load_vector(ALPHA, 0, alpha_kind != 0, alpha_kind)
    unit = units(alpha)
    scale = (load_vector(W, cols, in_row, w_kind) + (w_kind == 0)) * (alpha * (1 / 256))
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    dbias = tl.zeros([ROWS, BLOCK], tl.float32)
    dalpha = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in tl.range(group, tl.cdiv(n_rows, ROWS), tl.num_programs(0) // blocks, num_stages=STAGES):
        first = step * ROWS
        mask = (rows < n_rows - first)[:, None] & in_row[None, :]
        x_at = X + first * x_stride + rows[:, None] * x_stride + cols[None, :]
        dy_at = DY + first * dy_stride + rows[:, None] * dy_stride + cols[None, :]
        x = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_at, mask=mask, other=0.0).to(tl.float32)
        tanh, slope = tanh_and_slope(x * unit)
        dz = dy * slope  # without the factor weight / 256, which follows where it is cheap
        dx_at = DX + first * dx_stride + rows[:, None] * dx_stride + cols[None, :]
        tl.store(dx_at, (dz * scale[None, :]).to(DX.dtype.element_ty), mask=mask & (store_dx != 0))
        dweight += dy * tanh
        dbias += dy
        dalpha += dz * x
    store_sums(
        PARTIALS + group * width, ALPHAS + program, tl.sum(dweight, 0), tl.sum(dbias, 0), tl.sum(dalpha, 0),
        W, w_kind, cols, in_row, dbias_at, store_dweight, store_dbias, store_dalpha,
    )  # fmt: skip


@triton.jit
def backward_row(
    DX, DY, X, ALPHA, W, PARTIALS, ALPHAS, dx_stride, dy_stride, x_stride, width, dbias_at, n_rows, n_cols, blocks,
    alpha_kind, w_kind, store_dx, store_dweight, store_dbias, store_dalpha,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``backward_tile`` with one row a step, 1-D: the mask does not change, and a thread has the same columns in
    every row."""
    program = tl.program_id(0)
    group = (program // blocks).to(tl.int64)
    cols = program % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n_cols
    alpha = load_vector(ALPHA, 0, alpha_kind != 0, alpha_kind)
    unit = units(alpha)
    scale = (load_vector(W, cols, mask, w_kind) + (w_kind == 0)) * (alpha * (1 / 256))
    dweight = tl.zeros([BLOCK], tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    dalpha = tl.zeros([BLOCK], tl.float32)
    for row in tl.range(group, n_rows, tl.num_programs(0) // blocks, num_stages=STAGES):
        x = tl.load(X + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(DY + row * dy_stride + cols, mask=mask, other=0.0).to(tl.float32)
        tanh, slope = tanh_and_slope(x * unit)
        dz = dy * slope
        dx = (dz * scale).to(DX.dtype.element_ty)
        tl.store(DX + row * dx_stride + cols, dx, mask=mask & (store_dx != 0))
        dweight += dy * tanh
        dbias += dy
        dalpha += dz * x
    store_sums(
        PARTIALS + group * width, ALPHAS + program, dweight, dbias, dalpha, W, w_kind, cols, mask, dbias_at,
        store_dweight, store_dbias, store_dalpha,
    )  # fmt: skip


@triton.jit
def store_sums(
    at, alpha_at, dweight, dbias, dalpha, W, w_kind, cols, mask, dbias_at, store_dweight, store_dbias, store_dalpha
):  # fmt: skip
    """Store a program's sums: its columns of a row of the partials, and one number. dalpha's terms are still to be
    multiplied by the weight, which is read again: in registers it would cost more."""
    tl.store(at + cols, dweight, mask=mask & (store_dweight != 0))
    tl.store(at + dbias_at + cols, dbias, mask=mask & (store_dbias != 0))
    if store_dalpha != 0:
        w = load_vector(W, cols, mask, w_kind) + (w_kind == 0)
        tl.store(alpha_at, tl.sum(dalpha * w, 0) * (1 / 256))


@triton.jit
def sums(
    DWEIGHT, DBIAS, DALPHA, PARTIALS, ALPHAS, parts, width, dbias_at, alphas, store_dalpha,
    BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """dweight and dbias from PARTIALS[parts, width], where dbias has the columns from ``dbias_at`` on: a multiple of
    BLOCK. The last program has no columns, but dalpha from ALPHAS[alphas]."""
    out = DWEIGHT
    if tl.program_id(0) * BLOCK >= dbias_at:
        out = DBIAS - dbias_at
    column_sums(out, PARTIALS, parts, width, BLOCK, PARTS)
    if (store_dalpha != 0) & (tl.program_id(0) == tl.num_programs(0) - 1):
        total = tl.zeros([PARTS * BLOCK], tl.float32)
        for first in range(0, alphas, PARTS * BLOCK):
            i = first + tl.arange(0, PARTS * BLOCK)
            total += tl.load(ALPHAS + i, mask=i < alphas, other=0.0)
        tl.store(DALPHA, tl.sum(total, 0).to(DALPHA.dtype.element_ty))
