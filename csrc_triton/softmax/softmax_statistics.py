"""Softmax and log-softmax over rows: what the forwards of both ops share.

exp is computed as a power of two: ``scale`` holds log2(e). A row in registers takes differences to its greatest value
before the scaling, so that no finite input overflows. A long row is walked with one pair (the greatest scaled value,
the sum of powers relative to it) for each 16-byte vector of a tile, so that its loop needs no exchange between threads
and 1.125 powers an element (Milakov and Gimelshein, Online normalizer calculation for softmax, 2018).
"""

import triton
import triton.language as tl

from csrc_triton.common.bf16x2 import repack
from csrc_triton.common.pipeline import ROW_PIPELINE

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
        "constants": ["BLOCK", "BLOCKS", "HOLD", "STREAM"],
        "defaults": {"HOLD": True, "STREAM": False},
        "covers": "BLOCKS * BLOCK",
    },
    "long": {
        "function": "forward_long",
        "constants": ["BLOCK", "KEEP", "EARLY", "HOLD", "STREAM", "ACROSS", "REPACK"],
        "defaults": {"EARLY": False, "HOLD": True, "STREAM": False, "ACROSS": False, "REPACK": False},
    },
    "pipeline": {**ROW_PIPELINE, "function": "forward_ring"},
}

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Where greatest scaled values start: not at -inf, whose difference from itself is NaN.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def normalize_tile(
    Y,
    X,
    y_stride,
    x_stride,
    n_rows,
    n_cols,
    scale,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOG: tl.constexpr,
):
    """ROWS whole rows a program, held in registers; n_cols <= BLOCK."""
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
def normalize_row(Y, X, y_stride, x_stride, n_cols, scale, BLOCK: tl.constexpr, LOG: tl.constexpr):
    """``normalize_tile`` with one row, 1-D: a [1, BLOCK] tile with a masked row runs at half the speed."""
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
def vectors(BLOCK: tl.constexpr, dtype: tl.constexpr, ACROSS: tl.constexpr):
    """Columns of a block as a tile whose short axis holds as many elements as 16 bytes do: the elements of one vector
    load or, ACROSS, elements far apart, which one thread holds where loads are one element wide."""
    SHORT: tl.constexpr = 128 // dtype.primitive_bitwidth
    LONG: tl.constexpr = BLOCK // SHORT
    if ACROSS:
        return tl.arange(0, SHORT)[:, None] * LONG + tl.arange(0, LONG)[None, :]
    else:
        return tl.arange(0, LONG)[:, None] * SHORT + tl.arange(0, SHORT)[None, :]


@triton.jit
def include(peak, total, x, scale, AXIS: tl.constexpr):
    """The pairs with a tile's values added, which are reduced along AXIS. A peak is a rounded product, but the same in
    all that is relative to it, so its rounding cancels; a power costs one multiply-add."""
    higher = tl.maximum(peak, tl.max(x, AXIS) * scale)
    powers = tl.exp2(x * scale - tl.expand_dims(higher, AXIS))
    return higher, total * tl.exp2(peak - higher) + tl.sum(powers, AXIS)


@triton.jit
def fold(peak, total):
    """All pairs as one."""
    highest = tl.max(peak, 0)
    return highest, tl.sum(total * tl.exp2(peak - highest), 0)


@triton.jit
def finish(x, origin, last, scale, dtype: tl.constexpr, LOG: tl.constexpr):
    """y of a tile. With LOG, origin is the greatest value and last the logarithm of the sum; else origin is the peak
    and last the inverse of the sum, or, for 16-bit results, origin is both: one operation an element fewer."""
    if LOG:
        y = (x - origin) - last
    elif dtype == tl.float32:
        y = tl.exp2(x * scale - origin) * last
    else:
        y = tl.exp2(x * scale - origin)
    return y.to(dtype)


@triton.jit
def origin_and_last(peak, total, greatest, scale, dtype: tl.constexpr, LOG: tl.constexpr):
    """What ``finish`` takes. The greatest value, which LOG alone needs, is not scaled: the lowest values, less a scaled
    one, would be -inf."""
    if LOG:
        return greatest, (tl.log2(total) + tl.fma(-greatest, scale, peak)) * LN_2
    elif dtype == tl.float32:
        return peak, 1.0 / total
    else:
        return peak + tl.log2(total), 1.0


@triton.jit
def in_reach(total, origin, dtype: tl.constexpr, LOG: tl.constexpr):
    """Whether ``finish`` is right: nothing overflowed, and the rounding error of a 16-bit result's origin, which is
    |origin| / 2^24, is below 1/20 of the result's."""
    fine = (total > 0.0) & (total < float("inf"))
    if not LOG and dtype == tl.bfloat16:
        fine = fine & (tl.abs(origin) < 2048.0)
    elif not LOG and dtype == tl.float16:
        fine = fine & (tl.abs(origin) < 512.0)
    return fine


@triton.jit
def normalize_carefully(Y, X, n_cols, scale, BLOCK: tl.constexpr, LOG: tl.constexpr):
    """A row of any length and any values, as ``normalize_row``, in three reads: for rows of enormous values, and those
    whose result is NaN."""
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
def normalize_blocks(
    Y, X, y_stride, x_stride, n_cols, scale, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, HOLD: tl.constexpr,
    STREAM: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """One row of at most BLOCKS * BLOCK columns a program, read twice: the second time backwards and from the
    first-level cache, so that registers stay free for a second program. The loops are unrolled: all of a row's loads
    are in flight together. HOLD and STREAM are as in ``normalize_long``."""
    dtype: tl.constexpr = X.dtype.element_ty
    SHORT: tl.constexpr = 128 // dtype.primitive_bitwidth
    FIRST: tl.constexpr = "evict_last" if HOLD else ""
    CACHE: tl.constexpr = ".cs" if STREAM else ""
    EVICT: tl.constexpr = "" if STREAM else "evict_first"
    row = tl.program_id(0).to(tl.int64)
    X += row * x_stride
    Y += row * y_stride
    peak = tl.full([BLOCK // SHORT], LOWEST, tl.float32)
    total = tl.zeros([BLOCK // SHORT], tl.float32)
    if LOG:
        greatest = tl.full([BLOCK // SHORT], -float("inf"), tl.float32)
    for i in tl.static_range(BLOCKS):
        cols = i * BLOCK + vectors(BLOCK, dtype, False)
        x = tl.load(X + cols, mask=cols < n_cols, other=-float("inf"), eviction_policy=FIRST).to(tl.float32)
        peak, total = include(peak, total, x, scale, 1)
        if LOG:
            greatest = tl.maximum(greatest, tl.max(x, 1))
    peak, total = fold(peak, total)
    if LOG:
        origin, last = origin_and_last(peak, total, tl.max(greatest, 0), scale, dtype, LOG)
    else:
        origin, last = origin_and_last(peak, total, 0.0, scale, dtype, LOG)
    if in_reach(total, origin, dtype, LOG):
        for i in tl.static_range(BLOCKS):
            at = (BLOCKS - 1 - i) * BLOCK + tl.arange(0, BLOCK)
            again = tl.load(X + at, mask=at < n_cols, other=0.0, eviction_policy="evict_first")
            y = finish(again.to(tl.float32), origin, last, scale, dtype, LOG)
            tl.store(Y + at, y, mask=at < n_cols, cache_modifier=CACHE, eviction_policy=EVICT)
    else:
        normalize_carefully(Y, X, n_cols, scale, SHORT * 128, LOG)


@triton.jit
def normalize_long(
    Y, X, y_stride, x_stride, n_cols, scale, BLOCK: tl.constexpr, KEEP: tl.constexpr, EARLY: tl.constexpr,
    HOLD: tl.constexpr, STREAM: tl.constexpr, ACROSS: tl.constexpr, REPACK: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """One row of any length a program. Its last columns, up to KEEP of them, stay in registers; what is before them is
    whole blocks, without masks, read twice: the second time backwards, since what was read last is the likeliest to be
    in a cache still, the more so if HOLD asks the caches to keep it. EARLY asks for the kept columns before the blocks;
    else they are asked for before the first reduction between threads, when the registers of the loop are free. REPACK
    makes the kept columns be unpacked twice instead of living on in fp32. STREAM writes past the caches."""
    dtype: tl.constexpr = X.dtype.element_ty
    AXIS: tl.constexpr = 0 if ACROSS else 1
    SHORT: tl.constexpr = 128 // dtype.primitive_bitwidth
    FIRST: tl.constexpr = "evict_last" if HOLD else ""
    CACHE: tl.constexpr = ".cs" if STREAM else ""
    EVICT: tl.constexpr = "" if STREAM else "evict_first"
    row = tl.program_id(0).to(tl.int64)
    X += row * x_stride
    Y += row * y_stride
    blocks = tl.cdiv(tl.maximum(n_cols - KEEP, 0), BLOCK)
    kept_cols = blocks * BLOCK + vectors(KEEP, dtype, ACROSS)
    kept_mask = kept_cols < n_cols
    if EARLY:
        kept = tl.load(X + kept_cols, mask=kept_mask, other=-float("inf"), eviction_policy="evict_first")
    cols = vectors(BLOCK, dtype, ACROSS)
    peak = tl.full([BLOCK // SHORT], LOWEST, tl.float32)
    total = tl.zeros([BLOCK // SHORT], tl.float32)
    if LOG:
        greatest = tl.full([BLOCK // SHORT], -float("inf"), tl.float32)
    for i in range(blocks):
        x = tl.load(X + (i * BLOCK + cols), eviction_policy=FIRST).to(tl.float32)
        peak, total = include(peak, total, x, scale, AXIS)
        if LOG:
            greatest = tl.maximum(greatest, tl.max(x, AXIS))
    if not EARLY:
        kept = tl.load(X + kept_cols, mask=kept_mask, other=-float("inf"), eviction_policy="evict_first")
    peak, total = fold(peak, total)
    kept_peak = tl.full([KEEP // SHORT], LOWEST, tl.float32)
    kept_total = tl.zeros([KEEP // SHORT], tl.float32)
    kept_peak, kept_total = include(kept_peak, kept_total, kept.to(tl.float32), scale, AXIS)
    kept_peak, kept_total = fold(kept_peak, kept_total)
    higher = tl.maximum(peak, kept_peak)
    total = total * tl.exp2(peak - higher) + kept_total * tl.exp2(kept_peak - higher)
    if LOG:
        greatest_of_all = tl.maximum(tl.max(greatest, 0), tl.max(tl.max(kept.to(tl.float32), AXIS), 0))
        origin, last = origin_and_last(higher, total, greatest_of_all, scale, dtype, LOG)
    else:
        origin, last = origin_and_last(higher, total, 0.0, scale, dtype, LOG)
    if in_reach(total, origin, dtype, LOG):
        for i in range(blocks):
            at = (blocks - 1 - i) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(X + at, eviction_policy="evict_first").to(tl.float32)
            y = finish(x, origin, last, scale, dtype, LOG)
            tl.store(Y + at, y, cache_modifier=CACHE, eviction_policy=EVICT)
        if REPACK:
            kept = repack(kept)
        y = finish(kept.to(tl.float32), origin, last, scale, dtype, LOG)
        tl.store(Y + kept_cols, y, mask=kept_mask, cache_modifier=CACHE, eviction_policy=EVICT)
    else:
        normalize_carefully(Y, X, n_cols, scale, SHORT * 128, LOG)
