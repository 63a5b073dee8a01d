"""Kernels that need a whole row before its first code: the norms, and one scale for a row.

In registers: BLOCKS blocks of BLOCK columns, whose loads are all in flight together; BLOCKS is any number, so that a
row of 5120 is five blocks. Longer rows are read again for each step: from the cache, where they fit.
"""

import triton
import triton.language as tl

from csrc_triton.common.bf16x2 import multiply_pairs
from csrc_triton.norms.norm_vectors import load_vector
from csrc_triton.quantization.codes import (
    bound_of,
    columns,
    floor_of,
    greater,
    largest_of,
    reciprocal_in,
    rounded,
    scale_of,
    store_groups,
    store_static,
    store_with,
    widened,
    zeros_like_sizes,
)

CONSTANTS = ["STATIC", "GROUP", "BLOCK", "BLOCKS", "PDL"]
SCHEMES = {
    "tensor": {"STATIC": 1, "GROUP": 0},
    "token": {"STATIC": 0, "GROUP": 0},
    "group64": {"STATIC": 0, "GROUP": 64},
    "group128": {"STATIC": 0, "GROUP": 128},
}
AXES = {
    "dtype": ["bf16", "fp16"],
    "out": ["fp8e4nv", "fp8e4b8", "i8"],
    "scheme": ["tensor", "token", "group64", "group128"],
}
BY_TOKEN = [{"out": ["i8"], "scheme": ["tensor", "group64", "group128"]}]  # int8 is for rows alone
NORM_FORMS = {
    "row": {
        "function": "row",
        "constants": CONSTANTS,
        "defaults": {"PDL": 0},
        "covers": "BLOCKS * BLOCK",
        "pdl": "PDL",
    },
    "long": {
        "function": "long",
        "constants": ["STATIC", "GROUP", "BLOCK", "PDL"],
        "defaults": {"PDL": 0},
        "pdl": "PDL",
    },
}


@triton.jit
def load_sum(X, RESIDUAL, cols, mask, PDL: tl.constexpr):
    """x, or the rounded sum of x and the residual."""
    x = tl.load(X + cols, mask=mask, other=0.0)
    if RESIDUAL is not None:
        residual = tl.load(RESIDUAL + cols, mask=mask, other=0.0)
        x = rounded(widened(x, PDL) + widened(residual, PDL), x.dtype, PDL)
    return x


@triton.jit
def normalised(x, mean, rstd, w, b, mask, round_first, CENTERED: tl.constexpr, PDL: tl.constexpr):
    """What the norm gives, rounded to its dtype."""
    dtype: tl.constexpr = x.dtype
    h = widened(x, PDL)
    if CENTERED:
        y = tl.where(mask, (h - mean) * rstd * w + b, 0.0)
    else:
        y = h * rstd
        if round_first != 0:
            y = rounded(y, dtype, PDL).to(tl.float32)
        y = y * w
    return rounded(y, dtype, PDL)


@triton.jit
def all_normalised(
    xs, ws, bs, mean, rstd, n, offset, round_first,
    CENTERED: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What the norm gives for the blocks of a row."""
    ys = ()
    for i in tl.static_range(BLOCKS):
        b = 0.0
        if CENTERED:
            b = widened(bs[i], PDL)
        w = widened(ws[i], PDL) + offset
        mask = i * BLOCK + columns(BLOCK, GROUP) < n
        ys += (normalised(xs[i], mean, rstd, w, b, mask, round_first, CENTERED, PDL),)
    return ys


@triton.jit
def products(xs, ws, rstd, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    """The same where RMSNorm rounds before it multiplies by weights without an offset: both factors have 16 bits, and
    one instruction multiplies a pair and rounds."""
    ys = ()
    for i in tl.static_range(BLOCKS):
        ys += (multiply_pairs(rounded(widened(xs[i], PDL) * rstd, xs[i].dtype, PDL), ws[i]),)
    return ys


@triton.jit
def norm_row(
    Q, S, SUM, X, RESIDUAL, W, B, GIVEN, s_step, n, eps, offset, w_kind, b_kind, round_first, has_bound, powers,
    CENTERED: tl.constexpr, STATIC: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Normalise and quantise one row, held in registers; pointers are to the row's first elements. RESIDUAL is added
    first, and the sum stored as SUM; CENTERED is LayerNorm, with a bias B. GIVEN: the scale, or the bound of absmax."""
    block = columns(BLOCK, GROUP)
    xs, ws, bs = (), (), ()
    for i in tl.static_range(BLOCKS):
        xs += (load_sum(X, RESIDUAL, i * BLOCK + block, i * BLOCK + block < n, PDL),)
    for i in tl.static_range(BLOCKS):  # before the sums: their latency passes beside the rows'
        cols = i * BLOCK + block
        ws += (tl.load(W + cols, mask=(cols < n) & (w_kind != 0), other=0.0),)
        if CENTERED:
            bs += (tl.load(B + cols, mask=(cols < n) & (b_kind != 0), other=0.0),)
    mean = 0.0
    if CENTERED:
        total = tl.zeros(block.shape, tl.float32)
        for i in tl.static_range(BLOCKS):
            total += widened(xs[i], PDL)
        mean = tl.sum(total) / n
    squares = tl.zeros(block.shape, tl.float32)
    for i in tl.static_range(BLOCKS):
        h = widened(xs[i], PDL)
        if CENTERED:
            h = tl.where(i * BLOCK + block < n, h - mean, 0.0)
        squares += h * h
        if RESIDUAL is not None:
            tl.store(SUM + (i * BLOCK + block), xs[i], mask=i * BLOCK + block < n)
    rstd = tl.rsqrt(tl.sum(squares) / n + eps)
    if PDL and (not CENTERED):
        if (round_first != 0) & (offset == 0.0):
            ys = products(xs, ws, rstd, BLOCKS, PDL)
        else:
            ys = all_normalised(
                xs, ws, bs, mean, rstd, n, offset, round_first, False, GROUP, BLOCK, BLOCKS, PDL
            )
    else:
        ys = all_normalised(
            xs, ws, bs, mean, rstd, n, offset, round_first, CENTERED, GROUP, BLOCK, BLOCKS, PDL
        )
    bound, reciprocal = float("inf"), 0.0
    if STATIC:
        reciprocal = reciprocal_in(GIVEN)
    else:
        bound = bound_of(GIVEN, has_bound)
    for i in tl.static_range(BLOCKS):
        cols = i * BLOCK + block
        if STATIC:
            store_static(Q, widened(ys[i], PDL), cols, cols < n, reciprocal)
        elif GROUP > 0:
            store_groups(
                Q, S, s_step, widened(ys[i], PDL), i * BLOCK, n, cols < n, bound, powers, BLOCK, GROUP
            )
    if (not STATIC) and GROUP == 0:
        store_row(Q, S, ys, n, bound, powers, BLOCK, BLOCKS, PDL)


@triton.jit
def store_row(Q, S, ys, n, bound, powers, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    """Codes and the scale of a row in registers."""
    to: tl.constexpr = Q.dtype.element_ty
    absmax = zeros_like_sizes([BLOCK], ys[0].dtype, PDL)
    for i in tl.static_range(BLOCKS):
        absmax = greater(absmax, ys[i], PDL)
    s = scale_of(tl.max(absmax.to(tl.float32), 0), bound, powers, floor_of(to, 0), largest_of(to))
    tl.store(S, s)
    for i in tl.static_range(BLOCKS):
        cols = i * BLOCK + tl.arange(0, BLOCK)
        store_with(Q, widened(ys[i], PDL), cols, cols < n, s)


@triton.jit
def norm_long(
    Q, S, SUM, X, RESIDUAL, W, B, GIVEN, s_step, n, eps, offset, w_kind, b_kind, round_first, has_bound, powers,
    CENTERED: tl.constexpr, STATIC: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``norm_row`` of any length. The sum, which may lie over the residual, is written in the last step alone."""
    block = columns(BLOCK, GROUP)
    blocks = tl.cdiv(n, BLOCK)
    mean = 0.0
    if CENTERED:
        total = tl.zeros(block.shape, tl.float32)
        for i in range(blocks):
            cols = i * BLOCK + block
            total += load_sum(X, RESIDUAL, cols, cols < n, PDL).to(tl.float32)
        mean = tl.sum(total) / n
    squares = tl.zeros(block.shape, tl.float32)
    for i in range(blocks):
        cols = i * BLOCK + block
        h = load_sum(X, RESIDUAL, cols, cols < n, PDL).to(tl.float32)
        if CENTERED:
            h = tl.where(cols < n, h - mean, 0.0)
        squares += h * h
    rstd = tl.rsqrt(tl.sum(squares) / n + eps)
    bound = float("inf")
    reciprocal = 0.0
    if STATIC:
        reciprocal = reciprocal_in(GIVEN)
    else:
        bound = bound_of(GIVEN, has_bound)
    s = 0.0
    if (not STATIC) and GROUP == 0:
        absmax = tl.zeros(block.shape, tl.float32)
        for i in range(blocks):
            cols = i * BLOCK + block
            x = load_sum(X, RESIDUAL, cols, cols < n, PDL)
            w = load_vector(W, cols, cols < n, w_kind, 0, False) + offset
            b = 0.0
            if CENTERED:
                b = load_vector(B, cols, cols < n, b_kind, 0, False)
            y = normalised(x, mean, rstd, w, b, cols < n, round_first, CENTERED, PDL)
            absmax = tl.maximum(absmax, tl.abs(y.to(tl.float32)))
        to: tl.constexpr = Q.dtype.element_ty
        s = scale_of(tl.max(absmax, 0), bound, powers, floor_of(to, 0), largest_of(to))
        tl.store(S, s)
    for i in range(blocks):
        cols = i * BLOCK + block
        x = load_sum(X, RESIDUAL, cols, cols < n, PDL)
        if RESIDUAL is not None:
            tl.store(SUM + cols, x, mask=cols < n)
        w = load_vector(W, cols, cols < n, w_kind, 0, False) + offset
        b = 0.0
        if CENTERED:
            b = load_vector(B, cols, cols < n, b_kind, 0, False)
        y = normalised(x, mean, rstd, w, b, cols < n, round_first, CENTERED, PDL).to(tl.float32)
        if STATIC:
            store_static(Q, y, cols, cols < n, reciprocal)
        elif GROUP > 0:
            store_groups(Q, S, s_step, y, i * BLOCK, n, cols < n, bound, powers, BLOCK, GROUP)
        else:
            store_with(Q, y, cols, cols < n, s)
