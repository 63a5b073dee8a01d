"""Softmax and log-softmax of long rows that one program holds (Gluon, Hopper): what ``pipeline.process_rows`` computes.

Values are taken as differences to a maximum before they are scaled, which no finite input overflows: an operation a
column more than ``softmax_statistics`` uses, and no second way for rows of enormous values.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from csrc_triton.common.bf16x2 import even, odd, pack
from csrc_triton.common.pipeline import (
    RowFunctions,
    RowSizes,
    load_no_scalars,
    no_finalise,
    process_rows,
    read_always,
)

LN_2 = gl.constexpr(0.6931471805599453)
# Where maxima start: not at -inf, whose difference from itself is NaN.
LOWEST = gl.constexpr(-3.4028234663852886e38)


@gluon.constexpr_function
def nothing(dtype):
    """A word of -inf."""
    return {"bf16": -0x7F0080, "fp16": -0x3FF0400, "fp32": -float("inf")}[dtype.name]


@gluon.jit
def powers(x, peak, scale):
    return gl.exp2((x - peak) * scale)


@gluon.jit
def begin(row, told, scale, LINES: gl.constexpr, layout: gl.constexpr):
    """(maximum, sum of powers relative to it) of each line."""
    lines: gl.constexpr = gl.SliceLayout(1, layout)
    return gl.full([LINES], LOWEST, gl.float32, lines), gl.zeros([LINES], gl.float32, lines)


@gluon.jit
def include(sums, tiles, scale, dtype: gl.constexpr):
    peak, total = sums
    x = tiles[0]
    if dtype == gl.float32:
        higher = gl.maximum(peak, gl.max(x, 1))
        added = powers(x, higher[:, None], scale)
    else:
        low, high = even(x, dtype), odd(x, dtype)
        higher = gl.maximum(peak, gl.max(gl.maximum(low, high), 1))
        added = powers(low, higher[:, None], scale) + powers(high, higher[:, None], scale)
    return higher, total * powers(peak, higher, scale) + gl.sum(added, 1)


@gluon.jit
def fold(sums, scale):
    """The maximum, and the sum relative to it. A row of nothing but -inf, and one that holds +inf or NaN, gets NaN."""
    peak, total = sums
    highest = gl.max(peak, 0)
    return highest, gl.sum(total * powers(peak, highest, scale), 0)


@gluon.jit
def fold_powers(sums, scale, dtype: gl.constexpr):
    highest, total = fold(sums, scale)
    if dtype == gl.float32:
        return highest, 1.0 / total
    else:  # the inverse of the sum goes into the exponent: one operation a column fewer
        return highest, gl.log2(total)


@gluon.jit
def finish_power(x, folded, scale, dtype: gl.constexpr):
    highest, last = folded
    if dtype == gl.float32:
        return powers(x, highest, scale) * last
    else:
        return gl.exp2((x - highest) * scale - last)


@gluon.jit
def finish_powers(tiles, folded, scale, dtype: gl.constexpr):
    x = tiles[0]
    if dtype == gl.float32:
        return finish_power(x, folded, scale, dtype)
    else:
        low = finish_power(even(x, dtype), folded, scale, dtype)
        high = finish_power(odd(x, dtype), folded, scale, dtype)
        return pack(low, high, dtype)


@gluon.jit
def fold_logarithms(sums, scale, dtype: gl.constexpr):
    highest, total = fold(sums, scale)
    return highest, gl.log2(total) * LN_2


@gluon.jit
def finish_logarithms(tiles, folded, scale, dtype: gl.constexpr):
    highest, last = folded
    x = tiles[0]
    if dtype == gl.float32:
        return (x - highest) - last
    else:
        return pack((even(x, dtype) - highest) - last, (odd(x, dtype) - highest) - last, dtype)


@gluon.jit
def normalize_ring(
    Y, X, y_stride, x_stride, n_rows, n_cols, scale,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, PREFETCH: gl.constexpr, IN_REGISTERS: gl.constexpr, WHOLE: gl.constexpr,
    INTERLEAVE: gl.constexpr, LOG: gl.constexpr,
):  # fmt: skip
    """See ``pipeline.process_rows``."""
    FILL: gl.constexpr = nothing(X.dtype.element_ty)
    z = RowSizes(Y.dtype.element_ty, gl.num_warps(), BLOCK, STAGES, PREFETCH, IN_REGISTERS, WHOLE, INTERLEAVE)
    if LOG:
        f = RowFunctions(
            load_no_scalars,
            read_always,
            begin,
            include,
            fold_logarithms,
            finish_logarithms,
            no_finalise,
            FILL,
        )
        process_rows(Y, (X,), y_stride, (x_stride,), n_rows, n_cols, scale, f, z)
    else:
        f = RowFunctions(
            load_no_scalars, read_always, begin, include, fold_powers, finish_powers, no_finalise, FILL
        )
        process_rows(Y, (X,), y_stride, (x_stride,), n_rows, n_cols, scale, f, z)
