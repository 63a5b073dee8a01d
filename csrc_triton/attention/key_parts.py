"""Which keys a program takes where keys are split by the sequences' lengths, which are on the device.

A head of keys has ``slots``, each a program's: (sequence, part of its keys, tile of its queries), in this order. A part
has at most ``chunk`` blocks of keys, which each program computes from all lengths, so that all parts have slots: short
sequences are one part, long ones are many, and all parts are about equally long. ``with_parts`` combines parts,
however keys were split.
"""

import triton
import triton.language as tl
from triton.language.core import _aggregate as aggregate

SEQUENCES = tl.constexpr(128)  # that are looked at together; ``offsets`` is their range, in any layout


@aggregate
class Split:
    """What decides how the keys of all sequences are split, of a call and its kernel."""

    cu_seqlens_q: tl.tensor
    seqused_k: tl.tensor
    sequences: tl.tensor
    tokens: tl.tensor
    capacity: tl.tensor
    left: tl.tensor
    few: tl.tensor  # sequences of more queries are another kernel's
    ratio: tl.tensor  # heads of Q a head of K
    slots: tl.tensor
    most: tl.tensor  # parts of a sequence
    least: tl.tensor  # blocks of a part, where there are two and more
    rows: tl.tensor  # of a tile
    key_bits: tl.tensor  # a block is 2^key_bits keys

    @triton.constexpr_function
    def __init__(
        self, cu_seqlens_q, seqused_k, sequences, tokens, capacity, left, few, ratio, slots, most, least, rows, key_bits
    ):  # fmt: skip
        self.cu_seqlens_q, self.seqused_k = cu_seqlens_q, seqused_k
        self.sequences, self.tokens = sequences, tokens
        self.capacity, self.left, self.few, self.ratio = capacity, left, few, ratio
        self.slots, self.most, self.least, self.rows, self.key_bits = slots, most, least, rows, key_bits


@triton.jit
def keys_in_cache(SEQUSED_K, s, sequences, capacity):
    """How many keys sequence s has; the one behind the last has none."""
    length = tl.load(SEQUSED_K + s, mask=s < sequences, other=0)
    return tl.minimum(tl.maximum(length, 0), capacity)


@triton.jit
def work_of(s, split):
    """(tiles of rows of sequences ``s``, blocks of keys that their queries see): sequences of another kernel and those
    without queries have one tile without keys, there is none behind the last sequence."""
    there = s < split.sequences
    start = tl.minimum(tl.maximum(tl.load(split.cu_seqlens_q + s, mask=there, other=0), 0), split.tokens)
    end = tl.minimum(tl.maximum(tl.load(split.cu_seqlens_q + s + 1, mask=there, other=0), 0), split.tokens)
    length = tl.maximum(end - start, 0)
    length = tl.where(length <= split.few, length, 0)
    len_k = keys_in_cache(split.seqused_k, s, split.sequences, split.capacity)
    first = tl.minimum(tl.maximum(len_k - length + split.left, 0), len_k) >> split.key_bits
    blocks = ((len_k + (1 << split.key_bits) - 1) >> split.key_bits) - first
    tiles = tl.maximum((length * split.ratio + split.rows - 1) // split.rows, 1)
    return tl.where(there, tiles, 0), tl.where(length > 0, blocks, 0)


@triton.jit
def parts_of(blocks, chunk, split):
    """In how many parts so many blocks are split; none are one part."""
    parts = tl.minimum((blocks + chunk - 1) // chunk, blocks // split.least)
    return tl.maximum(tl.minimum(parts, split.most), 1)


@triton.jit
def chunk_of(offsets, split):
    """(how many blocks a part has at most, so that all parts have a slot; tiles and blocks of the first sequences)"""
    near_tiles, near_blocks = work_of(offsets, split)
    rest = split.slots - tl.sum(near_tiles, 0)
    total = tl.sum(near_tiles * near_blocks, 0)
    for first in range(SEQUENCES, split.sequences, SEQUENCES):
        tiles, blocks = work_of(first + offsets, split)
        rest -= tl.sum(tiles, 0)
        total += tl.sum(tiles * blocks, 0)
    more = tl.maximum(rest, 1)  # each tile has one part that may not be full
    chunk = tl.where(rest > 0, (total + more - 1) // more, total)
    return tl.maximum(chunk, 1), near_tiles, near_blocks


@triton.jit
def passed_by(s, tiles, blocks, upto, slot, chunk, split):
    """Of sequences ``s``, with slots from ``upto`` on: (how many end at ``slot`` or before, where the last of those
    ends, where the last of all ends)"""
    ends = upto + tl.cumsum(tiles * parts_of(blocks, chunk, split), 0)
    passed = (ends <= slot) & (s < split.sequences)
    return tl.sum(passed.to(tl.int32), 0), tl.max(tl.where(passed, ends, 0), 0), tl.max(ends, 0)


@triton.jit
def sequence_of_slot(offsets, near_tiles, near_blocks, slot, chunk, split):
    """(the sequence that has this slot, its first slot); past all slots, the one behind the last."""
    found, before, upto = passed_by(offsets, near_tiles, near_blocks, 0, slot, chunk, split)
    for first in range(SEQUENCES, split.sequences, SEQUENCES):
        s = first + offsets
        tiles, blocks = work_of(s, split)
        more, end, upto = passed_by(s, tiles, blocks, upto, slot, chunk, split)
        found += more
        before = tl.maximum(before, end)
    return found, before


@triton.jit
def slots_before(offsets, near_tiles, near_blocks, sequence, chunk, split):
    """The first slot of a sequence."""
    before = tl.sum(tl.where(offsets < sequence, near_tiles * parts_of(near_blocks, chunk, split), 0), 0)
    for first in range(SEQUENCES, sequence, SEQUENCES):
        s = first + offsets
        tiles, blocks = work_of(s, split)
        before += tl.sum(tl.where(s < sequence, tiles * parts_of(blocks, chunk, split), 0), 0)
    return before


@triton.jit
def with_parts(m, total, acc, lse, values):
    """A row's largest LSE, sum and weighted values, together with those of more parts; all in base 2."""
    new_m = tl.maximum(m, tl.max(lse, 0))
    weights = tl.exp2(lse - new_m)
    by = tl.exp2(m - new_m)
    return new_m, total * by + tl.sum(weights, 0), acc * by + tl.sum(values * weights[:, None], 0)
