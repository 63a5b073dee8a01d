"""Kernels whose values need no others of their row: plain tensors and gated activations.

One scale for a row takes the whole row (``value_row``, and ``value_long`` for longer ones, which computes its values
twice); groups, and a scale that is given, take any BLOCK columns of it (``value_tile``).
"""

import triton
import triton.language as tl

from csrc_triton.activations.geglu import gelu
from csrc_triton.quantization.codes import (
    bound_of,
    columns,
    floor_of,
    largest_of,
    reciprocal_in,
    rounded,
    scale_of,
    store_groups,
    store_static,
    store_with,
    widened,
)
from csrc_triton.quantization.rows import store_row

FORMS = {
    "row": {
        "function": "row",
        "constants": ["BLOCK", "BLOCKS", "PDL"],
        "defaults": {"PDL": 0},
        "covers": "BLOCKS * BLOCK",
        "pdl": "PDL",
        "requires": {"scheme": ["token"]},
    },
    "long": {
        "function": "long",
        "constants": ["BLOCK", "PDL"],
        "defaults": {"PDL": 0},
        "pdl": "PDL",
        "requires": {"scheme": ["token"]},
    },
    "tile": {
        "function": "tile",
        "constants": ["STATIC", "GROUP", "BLOCK", "PDL"],
        "defaults": {"PDL": 0},
        "pdl": "PDL",
        "requires": {"scheme": ["tensor", "group64", "group128"]},
    },
}


GREATEST = tl.constexpr(3.4028234663852886e38)  # of fp32: no limit


@triton.jit
def swiglu(gate, up, alpha, up_offset, limit, PDL: tl.constexpr):
    """gate * sigmoid(alpha * gate) * (up + up_offset), with the gate at most ``limit`` and up between -limit and limit.
    NaN stays."""
    if limit < GREATEST:
        ALL: tl.constexpr = tl.PropagateNan.ALL
        gate = tl.minimum(gate, limit, propagate_nan=ALL)
        up = tl.maximum(tl.minimum(up, limit, propagate_nan=ALL), -limit, propagate_nan=ALL)
    if PDL:
        return gate * one_by_one_plus_exp(-alpha * gate) * (up + up_offset)
    else:
        return gate / (1.0 + tl.exp(-alpha * gate)) * (up + up_offset)


@triton.jit
def one_by_one_plus_exp(x):
    """1 / (1 + exp(x)), by the two approximations alone: the compiler's exp and division scale their arguments, so that
    results below 2^-126 keep their bits. Added to 1 such a power of e is nothing, and such a quotient is 0 here. PTX
    only."""
    e = tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * 1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
    )
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + e], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def value_at(X, UP, settings, cols, mask, GELU: tl.constexpr, PDL: tl.constexpr):
    """x, or f(gate) * up where there is an UP, rounded to the dtype. ``settings``: SwiGLU's alpha, up_offset and limit,
    or whether GELU is exact."""
    x = tl.load(X + cols, mask=mask, other=0.0)
    if UP is not None:
        dtype: tl.constexpr = x.dtype
        up = widened(tl.load(UP + cols, mask=mask, other=0.0), PDL)
        gate = widened(x, PDL)
        if GELU:
            phi, _ = gelu(gate, settings[0])
            x = rounded(gate * phi * up, dtype, PDL)
        else:
            x = rounded(swiglu(gate, up, settings[0], settings[1], settings[2], PDL), dtype, PDL)
    return x


@triton.jit
def value_row(
    Q, S, X, UP, settings, GIVEN, n, has_bound, powers,
    GELU: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Quantise one row, held in registers, by a scale of its own."""
    block = tl.arange(0, BLOCK)
    ys = ()
    for i in tl.static_range(BLOCKS):
        ys += (value_at(X, UP, settings, i * BLOCK + block, i * BLOCK + block < n, GELU, PDL),)
    store_row(Q, S, ys, n, bound_of(GIVEN, has_bound), powers, BLOCK, BLOCKS, PDL)


@triton.jit
def value_long(
    Q, S, X, UP, settings, GIVEN, n, has_bound, powers, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """``value_row`` of any length."""
    block = tl.arange(0, BLOCK)
    absmax = tl.zeros([BLOCK], tl.float32)
    for i in range(tl.cdiv(n, BLOCK)):
        cols = i * BLOCK + block
        y = value_at(X, UP, settings, cols, cols < n, GELU, PDL)  # 0 past the row's end, where the gate is 0
        absmax = tl.maximum(absmax, tl.abs(y.to(tl.float32)))
    to: tl.constexpr = Q.dtype.element_ty
    bound = bound_of(GIVEN, has_bound)
    s = scale_of(tl.max(absmax, 0), bound, powers, floor_of(to, 0), largest_of(to))
    tl.store(S, s)
    for i in range(tl.cdiv(n, BLOCK)):
        cols = i * BLOCK + block
        y = value_at(X, UP, settings, cols, cols < n, GELU, PDL)
        store_with(Q, y.to(tl.float32), cols, cols < n, s)


@triton.jit
def value_tile(
    Q, S, X, UP, settings, GIVEN, s_step, n, has_bound, powers,
    GELU: tl.constexpr, STATIC: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Quantise up to BLOCK columns, of n that are left of their row."""
    cols = columns(BLOCK, GROUP)
    mask = cols < n
    y = value_at(X, UP, settings, cols, mask, GELU, PDL)
    if STATIC:
        store_static(Q, widened(y, PDL), cols, mask, reciprocal_in(GIVEN))
    else:
        store_groups(
            Q, S, s_step, widened(y, PDL), 0, n, mask, bound_of(GIVEN, has_bound), powers, BLOCK, GROUP
        )
