"""How the programs of flash_decoding share the keys of all sequences: both kernels and the host must agree on it.

``width`` tiles of queries (of all heads of keys) take the same keys of a sequence; for each there are ``groups``
programs. There are two ways:

- By sequence: each is shared by ``each`` groups of its own, each of which has at most one piece.
- Evenly (``each`` is 0): all groups together take all blocks of all sequences, one sequence after the other, and a
  group as many as any other, to one: where it begins and ends is known from the lengths.

A sequence without keys counts as one block: someone writes its result. A piece of a sequence that is not all of it goes
to a slot of its program's. By sequence there is one; evenly there are two, the second for the piece that begins its
sequence: a group cannot have two of a kind.

The host sees to it that blocks of all sequences times groups, and those of one times ``each``, are below 2^31.
"""

import triton
import triton.language as tl

from csrc_triton.decoding.decoding_keys import blocks_of, length_of, seen_by

# Sequences that are looked at at once; ``many`` is their range, which Gluon gives a layout.
MANY = tl.constexpr(128)


@triton.jit
def over(a, b):
    """a // b of what is not negative: unsigned, which is half as long."""
    return (a.to(tl.uint32, bitcast=True) // b.to(tl.uint32, bitcast=True)).to(tl.int32, bitcast=True)


@triton.jit
def weight(LENGTHS, b, batch, tokens, capacity, left, right, BLOCK_N):
    """Blocks that sequences b count as; 0 past the last."""
    length, _, _ = length_of(LENGTHS, tl.minimum(b, batch - 1), capacity)
    _, blocks = blocks_of(length, tokens, left, right, BLOCK_N)
    return tl.where(b < batch, tl.maximum(blocks, 1), 0)


@triton.jit
def boundary(g, blocks, groups):
    """Where group g of ``groups`` begins, of ``blocks``."""
    return over(g * blocks, groups)


@triton.jit
def group_at(block, blocks, groups):
    """The group, of at most ``blocks``, that has this one of the blocks."""
    return over((block + 1) * groups - 1, blocks)


@triton.jit
def all_blocks(many, LENGTHS, batch, until, tokens, capacity, left, right, BLOCK_N):
    """(of all sequences, of those before ``until``)"""
    total = 0
    before = 0
    for first in range(0, batch, MANY):
        b = first + many
        w = weight(LENGTHS, b, batch, tokens, capacity, left, right, BLOCK_N)
        total += tl.sum(w, 0)
        before += tl.sum(tl.where(b < until, w, 0), 0)
    return total, before


@triton.jit
def sequence_at(many, block, LENGTHS, batch, tokens, capacity, left, right, BLOCK_N):
    """(the sequence that has this one of all blocks, blocks of those before it)"""
    found = 0
    before = 0
    upto = 0
    for first in range(0, batch, MANY):
        b = first + many
        w = weight(LENGTHS, b, batch, tokens, capacity, left, right, BLOCK_N)
        ends = upto + tl.cumsum(w, 0)
        passed = (ends <= block) & (b < batch)
        found += tl.sum(passed.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(passed, ends, 0), 0))
        upto = tl.max(ends, 0)
    return found, before


@triton.jit
def part_of(g, each, LENGTHS, batch, tokens, capacity, left, right, BLOCK_N):
    """Of group g where ``each`` groups share a sequence: (that sequence, the block of it where it begins, blocks)"""
    b = over(g, each)
    part = g - b * each
    w = weight(LENGTHS, b, batch, tokens, capacity, left, right, BLOCK_N)
    n = tl.minimum(each, w)
    first = boundary(part, w, n)
    return b, first, tl.where(part < n, boundary(part + 1, w, n) - first, 0)


@triton.jit
def even_work_of(many, g, groups, LENGTHS, batch, tokens, capacity, left, right, BLOCK_N):
    """Of group g where all share all evenly: (its first sequence, the block of that where it begins, blocks)"""
    total, _ = all_blocks(many, LENGTHS, batch, 0, tokens, capacity, left, right, BLOCK_N)
    n = tl.minimum(groups, total)
    first = boundary(g, total, n)
    blocks = tl.where(g < n, boundary(g + 1, total, n) - first, 0)
    b, before = sequence_at(many, first, LENGTHS, batch, tokens, capacity, left, right, BLOCK_N)
    return b, first - before, blocks


@triton.jit
def sharers_of(
    many, b, each, groups, LENGTHS, batch, tokens, capacity, left, right, BLOCK_N, EVENLY: tl.constexpr
):  # fmt: skip
    """Of sequence b: (the first group that has a piece of it, how many have). Without EVENLY, ``each`` is not 0."""
    w = weight(LENGTHS, b, batch, tokens, capacity, left, right, BLOCK_N)
    first = b * each
    count = tl.minimum(each, w)
    if EVENLY:  # noqa: SIM102 (the outer is the compiler's)
        if each == 0:
            total, before = all_blocks(many, LENGTHS, batch, b, tokens, capacity, left, right, BLOCK_N)
            n = tl.minimum(groups, total)
            first = group_at(before, total, n)
            count = group_at(before + w - 1, total, n) - first + 1
    return first, count


@triton.jit
def piece_of(
    LENGTHS, b, begin, blocks, first_token, last_token, tokens, capacity, left, right, BLOCK_N
):  # fmt: skip
    """Of sequence b from its block ``begin`` on, ``blocks`` at most: (as ``length_of``; how many; whether that is all
    of the sequence; first key that the tile of these tokens sees, behind the last; the first and behind the last of
    the blocks that have any of them)"""
    length, wrong, given = length_of(LENGTHS, b, capacity)
    first, count = blocks_of(length, tokens, left, right, BLOCK_N)
    count = tl.maximum(count, 1)
    here = tl.minimum(count - begin, blocks)
    start, stop = seen_by(length, first_token, last_token, tokens, left, right)
    first += begin
    behind = (tl.maximum(stop - 1, 0).to(tl.uint32) // BLOCK_N).to(tl.int32) + 1
    last = tl.minimum(first + here, tl.where(stop > start, behind, 0))
    return length, wrong, given, here, here == count, start, stop, first, last
