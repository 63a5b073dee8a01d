"""What both kernels of flash_decoding must agree on: which keys a tile of rows sees and how splits share them, and how
a row is finished."""

import triton
import triton.language as tl

NOTHING = tl.constexpr(-1.0e30)  # the largest score of no key: finite, so that a difference of two is no NaN


@triton.jit
def length_of(LENGTHS, batch, capacity):
    """(keys of a sequence, whether that is no length of this cache): LENGTHS is int32 or null, which means full."""
    length = tl.load(LENGTHS + batch, mask=LENGTHS.to(tl.int64) != 0, other=capacity)
    wrong = (length < 0) | (length > capacity)
    return tl.where(wrong, 0, length), wrong, length


@triton.jit
def share(length, tokens, ratio, tile, left, right, splits, BLOCK_M, BLOCK_N):
    """(first key that a tile of BLOCK_M rows sees, behind the last, blocks of keys a share, shares that have any, at
    least 1). Row r is token r // ratio, and stands at key length - tokens + r // ratio. Blocks are counted from key 0.
    """
    before = length - tokens
    last_token = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // ratio, tokens - 1)
    start = tl.minimum(tl.maximum(before + tile * BLOCK_M // ratio - left, 0), length)
    stop = tl.maximum(tl.minimum(before + last_token + right, length), start)
    blocks = tl.where(stop > start, tl.cdiv(stop, BLOCK_N) - start // BLOCK_N, 0)
    each = tl.maximum(tl.cdiv(blocks, splits), 1)
    return start, stop, each, tl.maximum(tl.cdiv(blocks, each), 1)


@triton.jit
def keys_of(block, start, stop, BLOCK_N: tl.constexpr):
    """The keys of a block; for one outside of [start, stop) the nearest in it, so that all may be read."""
    return tl.minimum(tl.maximum(block * BLOCK_N + tl.arange(0, BLOCK_N), start), stop - 1)


@triton.jit
def columns_of(dim, D: tl.constexpr, UNIT: tl.constexpr):
    """D columns; those past ``dim``, a multiple of UNIT, are columns of the first UNIT again, so that all may be read:
    what is computed from them meets zeros of the query, or is not kept."""
    columns = tl.arange(0, D)
    unit = columns // UNIT * UNIT
    columns = tl.where(unit < dim, columns, columns - unit)
    return tl.max_contiguous(tl.multiple_of(columns, UNIT), UNIT)


@triton.jit
def page_of(TABLE, keys, page_bits):
    """The pages that hold ``keys``; TABLE is the sequence's own."""
    return tl.load(TABLE + (keys >> page_bits))


@triton.jit
def finish(m, sums, sink):
    """(natural logarithm of a row's sum, what its weighted values are multiplied by), from the largest score and the
    sum in base 2. Without keys and sink -inf and 0; a sum that is NaN stays one."""
    top = tl.maximum(m, sink)
    by = tl.exp2(m - top)
    sums = sums * by + tl.exp2(sink - top)
    return (top + tl.log2(sums)) * 0.6931471805599453, tl.where(sums == 0.0, 0.0, by / sums)


@triton.jit
def sink_of(SINKS, head):
    """The score of a head's sink in base 2; -inf without."""
    sink = tl.load(SINKS + head, mask=SINKS.to(tl.int64) != 0, other=float("-inf"))
    return sink * 1.4426950408889634
