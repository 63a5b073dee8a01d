"""The forward of softmax and log-softmax.

``scale`` is log2(e) / temperature. Log-softmax has no temperature: its kernels leave ``scale`` out, and it is None.

A row that fits in registers takes differences to its greatest value before the scaling, so that no finite input
overflows. A longer row uses ``online_softmax``.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from csrc_triton.common.bf16x2 import even, odd, pack
from csrc_triton.common.pipeline import (
    WHOLE_ROW_PIPELINE,
    RowFunctions,
    RowSizes,
    load_no_scalars,
    no_finalise,
    process_rows,
    read_always,
)
from csrc_triton.softmax.online_softmax import LN_2, LOG2_E, LOWEST, accumulate, reduce, vectors

# What the forwards declare; sparsemax has forms of its own.
DTYPES = {"dtype": ["bf16", "fp16", "fp32"]}
FORWARD_ARGUMENTS = {
    "Y": "*dtype",
    "X": "*dtype",
    "y_stride": "i64",
    "x_stride": "i64",
    "n_rows": "i64",
    "n_cols": "i32",
}
FORWARD_ALIGNED = ["Y", "X", "y_stride", "x_stride", "n_cols"]
FORWARD_FORMS = {
    "tile": {"function": "forward_tile", "constants": ["ROWS", "BLOCK"], "covers": "BLOCK"},
    "row": {"function": "forward_row", "constants": ["BLOCK"], "covers": "BLOCK"},
    "blocks": {
        "function": "forward_blocks",
        "constants": ["BLOCK", "BLOCKS"],
        "covers": "BLOCKS * BLOCK",
    },
    "long": {
        "function": "forward_long",
        "constants": ["BLOCK", "UNALIGNED"],
        "defaults": {"UNALIGNED": False},
    },
    "pipeline": {
        **WHOLE_ROW_PIPELINE,
        "function": "forward_pipeline",
        "constants": ["BLOCK", "STAGES", "PREFETCH", "IN_REGISTERS", "WHOLE"],
        "defaults": {"WHOLE": True},
        "any_length": "WHOLE",
    },
}


@triton.jit
def forward_tile(
    Y, X, y_stride, x_stride, n_rows, n_cols, ROWS: tl.constexpr, BLOCK: tl.constexpr, scale=None
):  # fmt: skip
    """ROWS whole rows a program, held in registers; n_cols <= BLOCK."""
    LOG: tl.constexpr = scale is None
    if LOG:
        scale = LOG2_E
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    x = tl.load(X + rows[:, None] * x_stride + cols[None, :], mask=mask, other=-float("inf")).to(tl.float32)
    x -= tl.max(x, 1)[:, None]
    power = tl.exp2(x * scale)
    total = tl.sum(power, 1)
    if LOG:
        y = x - (tl.log2(total) * LN_2)[:, None]
    else:
        y = power * (1.0 / total)[:, None]
    tl.store(Y + rows[:, None] * y_stride + cols[None, :], y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def forward_row(Y, X, y_stride, x_stride, n_rows, n_cols, BLOCK: tl.constexpr, scale=None):
    """``forward_tile`` with one row, 1-D: a [1, BLOCK] tile with a masked row runs at half the speed."""
    LOG: tl.constexpr = scale is None
    if LOG:
        scale = LOG2_E
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    x = tl.load(X + row * x_stride + cols, mask=mask, other=-float("inf")).to(tl.float32)
    x -= tl.max(x, 0)
    power = tl.exp2(x * scale)
    total = tl.sum(power, 0)
    if LOG:
        y = x - tl.log2(total) * LN_2
    else:
        y = power * (1.0 / total)
    tl.store(Y + row * y_stride + cols, y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def finalise(peak, total, greatest, scale, dtype: tl.constexpr, LOG: tl.constexpr):
    """(origin, last), what ``epilogue`` takes. With LOG, the greatest value and the logarithm of the sum; that value is
    not scaled, since the lowest values, less a scaled one, would be -inf. Else the peak and the inverse of the sum or,
    for 16-bit results, both in the origin: one operation an element fewer."""
    if LOG:
        return greatest, (tl.log2(total) + tl.fma(-greatest, scale, peak)) * LN_2
    elif dtype == tl.float32:
        return peak, 1.0 / total
    else:
        return peak + tl.log2(total), 1.0


@triton.jit
def epilogue(x, origin, last, scale, dtype: tl.constexpr, LOG: tl.constexpr):
    """y of a tile."""
    if LOG:
        y = (x - origin) - last
    elif dtype == tl.float32:
        y = tl.exp2(x * scale - origin) * last
    else:
        y = tl.exp2(x * scale - origin)
    return y.to(dtype)


@triton.jit
def in_range(total, origin, dtype: tl.constexpr, LOG: tl.constexpr):
    """Whether ``epilogue`` is exact enough: nothing overflowed, and the rounding error of a 16-bit result's origin,
    which is |origin| / 2^24, is below 1/20 of the result's."""
    fine = (total > 0.0) & (total < float("inf"))
    if not LOG and dtype == tl.bfloat16:
        fine = fine & (tl.abs(origin) < 2048.0)
    elif not LOG and dtype == tl.float16:
        fine = fine & (tl.abs(origin) < 512.0)
    return fine


@triton.jit
def forward_three_pass(Y, X, n_cols, scale, BLOCK: tl.constexpr, LOG: tl.constexpr):
    """A row of any length and any values, in three reads: for rows that are not ``in_range``, and those whose result is
    NaN."""
    cols = tl.arange(0, BLOCK)
    greatest = tl.full([BLOCK], -float("inf"), tl.float32)
    for first in range(0, n_cols, BLOCK):
        x = tl.load(X + (first + cols), mask=first + cols < n_cols, other=-float("inf"))
        greatest = tl.maximum(greatest, x.to(tl.float32))
    highest = tl.max(greatest, 0)
    powers = tl.zeros([BLOCK], tl.float32)
    for first in range(0, n_cols, BLOCK):
        x = tl.load(X + (first + cols), mask=first + cols < n_cols, other=-float("inf"))
        powers += tl.exp2((x.to(tl.float32) - highest) * scale)
    total = tl.sum(powers, 0)
    for first in range(0, n_cols, BLOCK):
        mask = first + cols < n_cols
        x = tl.load(X + (first + cols), mask=mask, other=-float("inf")).to(tl.float32) - highest
        if LOG:
            y = x - tl.log2(total) * LN_2
        else:
            y = tl.exp2(x * scale) * (1.0 / total)
        tl.store(Y + (first + cols), y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def forward_blocks(
    Y, X, y_stride, x_stride, n_rows, n_cols, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, scale=None
):  # fmt: skip
    """One row of at most BLOCKS * BLOCK columns a program, read twice: the second time backwards and from the
    first-level cache, so that registers stay free for a second program. The loops are unrolled: all loads of a row are
    in flight together."""
    LOG: tl.constexpr = scale is None
    if LOG:
        scale = LOG2_E
    dtype: tl.constexpr = X.dtype.element_ty
    SHORT: tl.constexpr = 128 // dtype.primitive_bitwidth
    row = tl.program_id(0).to(tl.int64)
    X += row * x_stride
    Y += row * y_stride
    peak = tl.full([BLOCK // SHORT], LOWEST, tl.float32)
    total = tl.zeros([BLOCK // SHORT], tl.float32)
    if LOG:
        greatest = tl.full([BLOCK // SHORT], -float("inf"), tl.float32)
    for i in tl.static_range(BLOCKS):
        cols = i * BLOCK + vectors(BLOCK, dtype, False)
        x = tl.load(X + cols, mask=cols < n_cols, other=-float("inf"), eviction_policy="evict_last")
        x = x.to(tl.float32)
        peak, total = accumulate(peak, total, x, scale, 1)
        if LOG:
            greatest = tl.maximum(greatest, tl.max(x, 1))
    peak, total = reduce(peak, total)
    if LOG:
        origin, last = finalise(peak, total, tl.max(greatest, 0), scale, dtype, LOG)
    else:
        origin, last = finalise(peak, total, 0.0, scale, dtype, LOG)
    if in_range(total, origin, dtype, LOG):
        for i in tl.static_range(BLOCKS):
            at = (BLOCKS - 1 - i) * BLOCK + tl.arange(0, BLOCK)
            reread = tl.load(X + at, mask=at < n_cols, other=0.0, eviction_policy="evict_first")
            y = epilogue(reread.to(tl.float32), origin, last, scale, dtype, LOG)
            tl.store(Y + at, y, mask=at < n_cols, eviction_policy="evict_first")
    else:
        forward_three_pass(Y, X, n_cols, scale, SHORT * 128, LOG)


@triton.jit
def forward_long(
    Y, X, y_stride, x_stride, n_rows, n_cols, BLOCK: tl.constexpr, UNALIGNED: tl.constexpr, scale=None
):  # fmt: skip
    """One row of any length a program. Its last columns, up to BLOCK of them, stay in registers. Those before them are
    whole blocks, without masks, read twice: the second time backwards, since what was read last is the likeliest to be
    still in a cache. The last columns are loaded after the loop, when its registers are free."""
    LOG: tl.constexpr = scale is None
    if LOG:
        scale = LOG2_E
    dtype: tl.constexpr = X.dtype.element_ty
    AXIS: tl.constexpr = 0 if UNALIGNED else 1
    SHORT: tl.constexpr = 128 // dtype.primitive_bitwidth
    row = tl.program_id(0).to(tl.int64)
    X += row * x_stride
    Y += row * y_stride
    blocks = tl.cdiv(tl.maximum(n_cols - BLOCK, 0), BLOCK)
    last_cols = blocks * BLOCK + vectors(BLOCK, dtype, UNALIGNED)
    last_mask = last_cols < n_cols
    cols = vectors(BLOCK, dtype, UNALIGNED)
    peak = tl.full([BLOCK // SHORT], LOWEST, tl.float32)
    total = tl.zeros([BLOCK // SHORT], tl.float32)
    if LOG:
        greatest = tl.full([BLOCK // SHORT], -float("inf"), tl.float32)
    for i in range(blocks):
        x = tl.load(X + (i * BLOCK + cols), eviction_policy="evict_last").to(tl.float32)
        peak, total = accumulate(peak, total, x, scale, AXIS)
        if LOG:
            greatest = tl.maximum(greatest, tl.max(x, AXIS))
    in_registers = tl.load(X + last_cols, mask=last_mask, other=-float("inf"), eviction_policy="evict_first")
    peak, total = reduce(peak, total)
    last_peak = tl.full([BLOCK // SHORT], LOWEST, tl.float32)
    last_total = tl.zeros([BLOCK // SHORT], tl.float32)
    last_peak, last_total = accumulate(last_peak, last_total, in_registers.to(tl.float32), scale, AXIS)
    last_peak, last_total = reduce(last_peak, last_total)
    higher = tl.maximum(peak, last_peak)
    total = total * tl.exp2(peak - higher) + last_total * tl.exp2(last_peak - higher)
    if LOG:
        greatest = tl.max(greatest, 0)
        greatest = tl.maximum(greatest, tl.max(tl.max(in_registers.to(tl.float32), AXIS), 0))
        origin, last = finalise(higher, total, greatest, scale, dtype, LOG)
    else:
        origin, last = finalise(higher, total, 0.0, scale, dtype, LOG)
    if in_range(total, origin, dtype, LOG):
        for i in range(blocks):
            at = (blocks - 1 - i) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(X + at, eviction_policy="evict_first").to(tl.float32)
            tl.store(Y + at, epilogue(x, origin, last, scale, dtype, LOG), eviction_policy="evict_first")
        y = epilogue(in_registers.to(tl.float32), origin, last, scale, dtype, LOG)
        tl.store(Y + last_cols, y, mask=last_mask, eviction_policy="evict_first")
    else:
        forward_three_pass(Y, X, n_cols, scale, SHORT * 128, LOG)


# The form ``pipeline`` (Gluon, Hopper). It takes differences to a maximum before the scaling, which no finite input
# overflows: one operation a column more than ``online_softmax``, and no second path for rows out of range.


@gluon.constexpr_function
def minus_infinity(dtype):
    """A 32-bit word of -inf."""
    return {"bf16": -0x7F0080, "fp16": -0x3FF0400, "fp32": -float("inf")}[dtype.name]


@gluon.jit
def powers(x, peak, scale):
    return gl.exp2((x - peak) * scale)


@gluon.jit
def init_stats(row, scalars, scale, LINES: gl.constexpr, layout: gl.constexpr):
    """(maximum, sum of powers relative to it) of each line."""
    lines: gl.constexpr = gl.SliceLayout(1, layout)
    return gl.full([LINES], LOWEST, gl.float32, lines), gl.zeros([LINES], gl.float32, lines)


@gluon.jit
def accumulate_stats(stats, tiles, scale, dtype: gl.constexpr):
    peak, total = stats
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
def reduce_stats(stats, scale):
    """The maximum, and the sum relative to it. A row of nothing but -inf, and one that holds +inf or NaN, gets NaN."""
    peak, total = stats
    highest = gl.max(peak, 0)
    return highest, gl.sum(total * powers(peak, highest, scale), 0)


@gluon.jit
def reduce_softmax(stats, scale, dtype: gl.constexpr):
    highest, total = reduce_stats(stats, scale)
    if dtype == gl.float32:
        return highest, 1.0 / total
    else:  # the inverse of the sum goes into the exponent: one operation a column fewer
        return highest, gl.log2(total)


@gluon.jit
def softmax_of(x, result, scale, dtype: gl.constexpr):
    highest, last = result
    if dtype == gl.float32:
        return powers(x, highest, scale) * last
    else:
        return gl.exp2((x - highest) * scale - last)


@gluon.jit
def epilogue_softmax(tiles, result, scale, dtype: gl.constexpr):
    x = tiles[0]
    if dtype == gl.float32:
        return softmax_of(x, result, scale, dtype)
    else:
        low = softmax_of(even(x, dtype), result, scale, dtype)
        high = softmax_of(odd(x, dtype), result, scale, dtype)
        return pack(low, high, dtype)


@gluon.jit
def reduce_log_softmax(stats, scale, dtype: gl.constexpr):
    highest, total = reduce_stats(stats, scale)
    return highest, gl.log2(total) * LN_2


@gluon.jit
def epilogue_log_softmax(tiles, result, scale, dtype: gl.constexpr):
    highest, last = result
    x = tiles[0]
    if dtype == gl.float32:
        return (x - highest) - last
    else:
        return pack((even(x, dtype) - highest) - last, (odd(x, dtype) - highest) - last, dtype)


@gluon.jit
def forward_pipeline(
    Y, X, y_stride, x_stride, n_rows, n_cols,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, PREFETCH: gl.constexpr, IN_REGISTERS: gl.constexpr, WHOLE: gl.constexpr,
    INTERLEAVE: gl.constexpr = None, scale=None,
):  # fmt: skip
    """Persistent programs that hold long rows in shared memory and registers: see ``pipeline.process_rows``."""
    dtype: gl.constexpr = X.dtype.element_ty
    FILL: gl.constexpr = minus_infinity(dtype)
    z = RowSizes(dtype, gl.num_warps(), BLOCK, STAGES, PREFETCH, IN_REGISTERS, WHOLE, INTERLEAVE or 1)
    if scale is None:
        f = RowFunctions(
            load_no_scalars, read_always, init_stats, accumulate_stats, reduce_log_softmax, epilogue_log_softmax,
            no_finalise, FILL,
        )  # fmt: skip
        process_rows(Y, (X,), y_stride, (x_stride,), n_rows, n_cols, LOG2_E, f, z)
    else:
        f = RowFunctions(
            load_no_scalars, read_always, init_stats, accumulate_stats, reduce_softmax, epilogue_softmax,
            no_finalise, FILL,
        )  # fmt: skip
        process_rows(Y, (X,), y_stride, (x_stride,), n_rows, n_cols, scale, f, z)
