"""The backward of softmax and log-softmax of long rows that one program holds (Gluon, Hopper): what is computed;
``pipeline.process_rows`` goes over the rows. KIND is as in ``softmax_gradient``."""

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
from csrc_triton.softmax.softmax_gradient import gradient, summand


@gluon.jit
def begin(row, told, scale, LINES: gl.constexpr, layout: gl.constexpr):
    return (gl.zeros([LINES], gl.float32, gl.SliceLayout(1, layout)),)


@gluon.jit
def fold(sums, scale, dtype: gl.constexpr):
    return (gl.sum(sums[0], 0),)


@gluon.jit
def summands(y, dy, dtype: gl.constexpr, KIND: gl.constexpr):
    if dtype == gl.float32:
        return summand(y, dy, KIND)
    else:
        low = summand(even(y, dtype), even(dy, dtype), KIND)
        return low + summand(odd(y, dtype), odd(dy, dtype), KIND)


@gluon.jit
def gradients(y, dy, c, scale, dtype: gl.constexpr, KIND: gl.constexpr):
    if dtype == gl.float32:
        return gradient(y, dy, c, scale, KIND)
    else:
        low = gradient(even(y, dtype), even(dy, dtype), c, scale, KIND)
        high = gradient(odd(y, dtype), odd(dy, dtype), c, scale, KIND)
        return pack(low, high, dtype)


@gluon.jit
def include_softmax(sums, tiles, scale, dtype: gl.constexpr):
    return (sums[0] + gl.sum(summands(tiles[0], tiles[1], dtype, "softmax"), 1),)


@gluon.jit
def finish_softmax(tiles, folded, scale, dtype: gl.constexpr):
    return gradients(tiles[0], tiles[1], folded[0], scale, dtype, "softmax")


@gluon.jit
def include_log_softmax(sums, tiles, scale, dtype: gl.constexpr):
    return (sums[0] + gl.sum(summands(tiles[0], tiles[1], dtype, "log_softmax"), 1),)


@gluon.jit
def finish_log_softmax(tiles, folded, scale, dtype: gl.constexpr):
    return gradients(tiles[0], tiles[1], folded[0], scale, dtype, "log_softmax")


@gluon.jit
def gradient_ring(
    DX, DY, Y, dx_stride, dy_stride, y_stride, n_rows, n_cols, scale,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, PREFETCH: gl.constexpr, IN_REGISTERS: gl.constexpr, WHOLE: gl.constexpr,
    INTERLEAVE: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """See ``pipeline.process_rows``."""
    z = RowSizes(
        DX.dtype.element_ty, gl.num_warps(), BLOCK, STAGES, PREFETCH, IN_REGISTERS, WHOLE, INTERLEAVE
    )
    if KIND == "softmax":
        f = RowFunctions(
            load_no_scalars, read_always, begin, include_softmax, fold, finish_softmax, no_finalise, 0
        )
        process_rows(DX, (Y, DY), dx_stride, (y_stride, dy_stride), n_rows, n_cols, scale, f, z)
    else:
        f = RowFunctions(
            load_no_scalars, read_always, begin, include_log_softmax, fold, finish_log_softmax, no_finalise, 0
        )
        process_rows(DX, (Y, DY), dx_stride, (y_stride, dy_stride), n_rows, n_cols, scale, f, z)
