"""Split KV: which keys tokens see, how programs split the keys of all sequences, and how a row is finalised.

A tile is a number of rows of one head of K: rows are the query heads that share it, token after token. A worker is one
program for each tile; its programs take the same keys. ``splits`` workers split the keys of each sequence, in equal
numbers of blocks or one more.

A part is what one worker takes. A sequence without keys counts as one block, so that its result is written. A part that
is not all of its sequence leaves partial results in the worker's slot.

The host sees to it that the blocks of a sequence times ``splits`` are below 2^31.
"""

import triton
import triton.language as tl
from triton.language.core import _aggregate as aggregate

NO_SCORE = tl.constexpr(-1.0e30)  # the largest score of no key: finite, so that a difference of two is no NaN


@aggregate
class Sequences:
    """All sequences of a call. LENGTHS is int32 or null, which means full."""

    LENGTHS: tl.tensor
    batch: tl.tensor
    tokens: tl.tensor
    capacity: tl.tensor
    left: tl.tensor  # a token sees ``left`` keys before its own
    right: tl.tensor  # and ``right`` from its own on

    @triton.constexpr_function
    def __init__(self, LENGTHS, batch, tokens, capacity, left, right):
        self.LENGTHS, self.batch, self.tokens, self.capacity = LENGTHS, batch, tokens, capacity
        self.left, self.right = left, right


@triton.jit
def divide(a, b):
    """a // b of numbers that are not negative: unsigned division takes half as long."""
    return (a.to(tl.uint32, bitcast=True) // b.to(tl.uint32, bitcast=True)).to(tl.int32, bitcast=True)


@triton.jit
def length_of(seqs, b):
    """(keys of sequence b, whether that is no length of this cache, what LENGTHS says)"""
    length = tl.load(seqs.LENGTHS + b, mask=seqs.LENGTHS.to(tl.int64) != 0, other=seqs.capacity)
    wrong = (length < 0) | (length > seqs.capacity)
    return tl.where(wrong, 0, length), wrong, length


@triton.jit
def token_of(row, by_ratio):
    """row // ratio, where row * ratio < 2^31 and by_ratio is 2^31 // ratio + 1: one multiplication."""
    return tl.umulhi((2 * row).to(tl.uint32, bitcast=True), by_ratio.to(tl.uint32, bitcast=True)).to(
        tl.int32, bitcast=True
    )


@triton.jit
def row_of(row, first_token, into, head, ratio, by_ratio):
    """(token, query head) of a tile's rows; the first is the ``into``-th of the heads of ``first_token``."""
    after = token_of(row + into, by_ratio)
    return first_token + after, head * ratio + (row + into - after * ratio)


@triton.jit
def visible_keys(length, first, last, seqs):
    """(first key that tokens ``first`` to ``last`` see, one after the last). Token t is at key length - tokens + t."""
    before = length - seqs.tokens
    start = tl.minimum(tl.maximum(before + first - seqs.left, 0), length)
    return start, tl.maximum(tl.minimum(before + last + seqs.right, length), start)


@triton.jit
def visible_blocks(length, seqs, BLOCK_N):
    """(first block of a sequence that any token sees, how many from there on), counted from key 0. BLOCK_N is a
    constant or uint32."""
    start, stop = visible_keys(length, 0, seqs.tokens - 1, seqs)
    first = (start.to(tl.uint32) // BLOCK_N).to(tl.int32)
    end = (tl.maximum(stop - 1, 0).to(tl.uint32) // BLOCK_N).to(tl.int32) + 1
    return first, tl.where(stop > start, end - first, 0)


@triton.jit
def keys_of(block, start, stop, BLOCK_N: tl.constexpr):
    """The keys of a block; instead of one outside of [start, stop) the nearest in it, so that all may be loaded (key 0
    of a sequence without any, which the cache has)."""
    return tl.maximum(tl.minimum(block * BLOCK_N + tl.arange(0, BLOCK_N), stop - 1), start)


@triton.jit
def columns_of(dim, D: tl.constexpr, UNIT: tl.constexpr):
    """D columns; instead of those past ``dim``, a multiple of UNIT, columns of the first UNIT, so that all may be
    loaded: what they give meets zeros of the query, or is not stored."""
    columns = tl.arange(0, D)
    unit = columns // UNIT * UNIT
    columns = tl.where(unit < dim, columns, columns - unit)
    return tl.max_contiguous(tl.multiple_of(columns, UNIT), UNIT)


@triton.jit
def page_of(TABLE, keys, page_bits):
    """The pages that hold ``keys``; TABLE is the sequence's own."""
    return tl.load(TABLE + (keys >> page_bits))


@triton.jit
def blocks_in(b, seqs, BLOCK_N):
    """Blocks that sequence b counts as."""
    length, _, _ = length_of(seqs, b)
    _, blocks = visible_blocks(length, seqs, BLOCK_N)
    return tl.maximum(blocks, 1)


@triton.jit
def first_block(worker, blocks, workers):
    """Where a worker's equal part of ``blocks`` begins."""
    return divide(worker * blocks, workers)


@triton.jit
def split_range(worker, splits, seqs, BLOCK_N):
    """What a worker takes: (its sequence, the first block of it, how many)."""
    b = divide(worker, splits)
    split = worker - b * splits
    blocks = blocks_in(b, seqs, BLOCK_N)
    n = tl.minimum(splits, blocks)
    first = first_block(split, blocks, n)
    return b, first, tl.where(split < n, first_block(split + 1, blocks, n) - first, 0)


@triton.jit
def part_of(b, begin, blocks, first_token, last_token, seqs, BLOCK_N):
    """A worker's part of sequence b, from its block ``begin`` on, ``blocks`` at most: (the three of ``length_of``, its
    blocks, whether it is the whole sequence, the keys that these tokens see as in ``visible_keys``, and the blocks that
    hold any of them: the first, one after the last)"""
    length, wrong, given = length_of(seqs, b)
    first, count = visible_blocks(length, seqs, BLOCK_N)
    count = tl.maximum(count, 1)
    here = tl.minimum(count - begin, blocks)
    start, stop = visible_keys(length, first_token, last_token, seqs)
    first += begin
    end = (tl.maximum(stop - 1, 0).to(tl.uint32) // BLOCK_N).to(tl.int32) + 1
    last = tl.minimum(first + here, tl.where(stop > start, end, 0))
    return length, wrong, given, here, here == count, start, stop, first, last


@triton.jit
def finalise(m, sums, sink):
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
