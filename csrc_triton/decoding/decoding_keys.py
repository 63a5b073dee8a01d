"""What both kernels of flash_decoding must agree on: which keys tokens see, and how a row is finished."""

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
def token_of(row, by_ratio):
    """row // ratio, where row * ratio < 2^31 and by_ratio is 2^31 // ratio + 1: one multiplication."""
    return tl.umulhi((2 * row).to(tl.uint32, bitcast=True), by_ratio.to(tl.uint32, bitcast=True)).to(
        tl.int32, bitcast=True
    )


@triton.jit
def row_of(row, first_token, into, head, ratio, by_ratio):
    """(token, query head) of rows of a tile, whose first is the ``into``-th of the heads of its first token."""
    ahead = token_of(row + into, by_ratio)
    return first_token + ahead, head * ratio + (row + into - ahead * ratio)


@triton.jit
def seen_by(length, first, last, tokens, left, right):
    """(first key that tokens ``first`` to ``last`` see, behind the last); token t stands at key length - tokens + t."""
    before = length - tokens
    start = tl.minimum(tl.maximum(before + first - left, 0), length)
    return start, tl.maximum(tl.minimum(before + last + right, length), start)


@triton.jit
def blocks_of(length, tokens, left, right, BLOCK_N):
    """(first block of a sequence that any token sees, how many from there on); counted from key 0. BLOCK_N is a
    constant or uint32."""
    start, stop = seen_by(length, 0, tokens - 1, tokens, left, right)
    first = (start.to(tl.uint32) // BLOCK_N).to(tl.int32)
    behind = (tl.maximum(stop - 1, 0).to(tl.uint32) // BLOCK_N).to(tl.int32) + 1
    return first, tl.where(stop > start, behind - first, 0)


@triton.jit
def keys_of(block, start, stop, BLOCK_N: tl.constexpr):
    """The keys of a block; for one outside of [start, stop) the nearest in it, so that all may be read (key 0 of a
    sequence without any, which the cache has)."""
    return tl.maximum(tl.minimum(block * BLOCK_N + tl.arange(0, BLOCK_N), stop - 1), start)


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
