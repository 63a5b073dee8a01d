"""Rows of which each is read whole before it is written, by programs that hold them (Gluon, Hopper).

What bounds it, at 132 multiprocessors and 4.1 TB/s of reads and writes: 31 bytes a nanosecond each, so 16.8 us for the
softmax of a row of 131072 16-bit columns. The latency of 1.2 to 1.5 us under load takes 19 to 24 KB of reads under way
at every moment. Two powers a column are 8.8 us of the special function units, and the 15 instructions a column that
they stand among 7.7 us of the schedulers (at 1.98 GHz): both fit beside the copies, but not before or after them. A
program that reads a row, adds it up and then writes it, alone on its multiprocessor, does not keep memory busy.

So a persistent program writes a row while it reads the next one and adds that up. Blocks of the rows go through a ring
of SLOTS + AHEAD blocks in shared memory, each copied AHEAD blocks or more before its use. A step of the loop finishes a
block of the row under way, gives its slot to a copy, and includes a block of the next row in the sums. The last KEPT
blocks of a row, the only ones with masks, don't pass through shared memory: they are loaded into the registers from
which the same blocks of the row before were written, and included last. So memory is read once, and between rows only
the included KEPT blocks and the reductions hold up the writes. 224 KB of shared memory and 128 KB of registers hold
rows of up to 320 KB: 163840 16-bit columns.

Of longer rows, the last blocks are held, SLOTS in shared memory and KEPT in registers, and those before them pass
through a ring of AHEAD blocks: to be included and, as soon as the row is, once more to be finished, backwards, since
what was read last is the likeliest to be in a cache still. Of 512 KB a half is held, and what 132 programs read again
is 34 of the second-level cache's 50 MB. Held blocks are finished last, and each slot is given to a copy of the next
row's. (Blocks of two rows in turn, as above, would put 150 MB of traffic between the first and the second read.)

Every thread reads back what it copied itself, and writes the same places: OUT may be the input. What a row needs
beside its elements, single values, is loaded ahead of its blocks: a load that stands behind theirs in the queue would
be waited for until they are there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from csrc_triton.common.norm_ring import lines_layout
from csrc_triton.common.row_ring_parts import (
    among,
    as_words,
    ask,
    elements_of,
    finish_kept,
    include_kept,
    lengths,
    load_kept,
    rings_of,
    tiles_in,
    wanted_of,
    words_of_block,
)


@gluon.jit
def walk_held(
    OUT, ins, out_stride, strides, n_rows, n_cols, given,
    look: gl.constexpr, wanted: gl.constexpr, begin: gl.constexpr, include: gl.constexpr, fold: gl.constexpr,
    finish: gl.constexpr, end: gl.constexpr, FILL: gl.constexpr,
    BLOCK: gl.constexpr, SLOTS: gl.constexpr, AHEAD: gl.constexpr, KEPT: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """``walk_rows`` of at most SLOTS + KEPT blocks."""
    gl.static_assert(AHEAD >= 1 and KEPT >= 1)
    dtype: gl.constexpr = OUT.dtype.element_ty
    WORDS: gl.constexpr = BLOCK // elements_of(dtype)
    LINES: gl.constexpr = WORDS // 4
    COPIES: gl.constexpr = SLOTS + AHEAD
    layout: gl.constexpr = lines_layout(gl.num_warps())
    at = words_of_block(LINES, layout)
    out, out_stride = as_words((OUT,), (out_stride,), at)
    ins, strides = as_words(ins, strides, at)
    blocks, n_kept = lengths(n_cols // elements_of(dtype), WORDS, KEPT)
    step = gl.num_programs(0).to(gl.int64)
    first = gl.program_id(0).to(gl.int64)
    zero = (n_rows >> 63).to(gl.int32)  # not in the loop over rows, in which n_rows is known to be positive
    rings = rings_of(ins, COPIES, LINES)
    ask_row, ask_block = first, 0
    for i in range(zero + COPIES):  # not unrolled
        there = (at >= 0) & (ask_row < n_rows) & (blocks > 0) & wanted(look(ask_row, given), given)
        ask(rings, i, ins, strides, ask_row, ask_block * WORDS, there)
        ask_block += 1
        ask_row = gl.where(ask_block < blocks, ask_row, ask_row + step)
        ask_block = gl.where(ask_block < blocks, ask_block, 0)
    asked = (look(ask_row, given), look(ask_row + step, given))
    told = look(first, given)
    kept = load_kept(ins, strides, first, n_kept, blocks, at, wanted(told, given), FILL, WORDS, KEPT)
    sums = begin(first, told, given, LINES, layout)
    told = look(first + step, given)
    for i in range(blocks):
        async_copy.wait_group(COPIES - 1)
        sums = include(sums, tiles_in(rings, i, layout), given, dtype)
        async_copy.commit_group()  # an empty one: the next wait is for the next block
    for turn in gl.static_range(TURNS - 1):
        sums = include_kept(sums, kept, given, include, dtype, turn, TURNS)
    slot = 0
    next_slot = blocks
    for row in range(first, n_rows, step):
        folded = fold(include_kept(sums, kept, given, include, dtype, TURNS - 1, TURNS), given, dtype)
        out_row = out[0] + row * out_stride[0]
        here = wanted(told, given)
        sums = begin(row + step, told, given, LINES, layout)
        told = look(row + 2 * step, given)
        ask_first = ask_row
        wants = wanted_of(asked, wanted, given)
        asked = (asked[1], look(ask_first + 2 * step, given))
        kept = finish_kept(
            out_row, ins, strides, kept, folded, row + step, n_rows, n_kept, blocks, at, here, given, zero,
            finish, FILL, dtype, WORDS,
        )  # fmt: skip
        for turn in gl.static_range(TURNS):
            for i in range(blocks * turn // TURNS, blocks * (turn + 1) // TURNS):
                async_copy.wait_group(AHEAD - 1)
                tiles = tiles_in(rings, slot, layout)
                next_tiles = tiles_in(rings, next_slot, layout)
                word = ask_block * WORDS
                there = (at >= 0) & (ask_row < n_rows) & among(wants, ask_row, ask_first, step)
                ask(rings, slot, ins, strides, ask_row, word, there)
                gl.store(out_row + i * WORDS, finish(tiles, folded, given, dtype))
                sums = include(sums, next_tiles, given, dtype)
                slot = gl.where(slot < COPIES - 1, slot + 1, 0)
                next_slot = gl.where(next_slot < COPIES - 1, next_slot + 1, 0)
                ask_block += 1
                ask_row = gl.where(ask_block < blocks, ask_row, ask_row + step)
                ask_block = gl.where(ask_block < blocks, ask_block, 0)
            if turn < TURNS - 1:  # what is left for the moment between two rows holds up the writes
                sums = include_kept(sums, kept, given, include, dtype, turn, TURNS)
        end(row, folded, given, dtype)
    async_copy.wait_group(0)


@gluon.jit
def ask_again(
    rings, slot, ins, strides, row, use, step, n_rows, again, at, wants, wants_from, WORDS: gl.constexpr
):  # fmt: skip
    """Begin the copy for a ``use`` of the ring: blocks of ``row`` from ``again`` - 1 to 0, then of the row after it
    from 0. ``wants`` are of the rows from ``wants_from`` on. The next use."""
    second = use < again
    block = gl.where(second, again - 1 - use, use - again)
    of = gl.where(second, row, row + step)
    there = (at >= 0) & (of < n_rows) & (again > 0) & among(wants, of, wants_from, step)
    ask(rings, slot, ins, strides, of, block * WORDS, there)
    last = use + 1 >= 2 * again
    return gl.where(last, row + step, row), gl.where(last, 0, use + 1)


@gluon.jit
def walk_again(
    OUT, ins, out_stride, strides, n_rows, n_cols, given,
    look: gl.constexpr, wanted: gl.constexpr, begin: gl.constexpr, include: gl.constexpr, fold: gl.constexpr,
    finish: gl.constexpr, end: gl.constexpr, FILL: gl.constexpr,
    BLOCK: gl.constexpr, SLOTS: gl.constexpr, AHEAD: gl.constexpr, KEPT: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """``walk_rows`` of any length."""
    gl.static_assert(SLOTS >= AHEAD and AHEAD >= 1 and KEPT >= 1)
    dtype: gl.constexpr = OUT.dtype.element_ty
    WORDS: gl.constexpr = BLOCK // elements_of(dtype)
    LINES: gl.constexpr = WORDS // 4
    layout: gl.constexpr = lines_layout(gl.num_warps())
    at = words_of_block(LINES, layout)
    out, out_stride = as_words((OUT,), (out_stride,), at)
    ins, strides = as_words(ins, strides, at)
    blocks, n_kept = lengths(n_cols // elements_of(dtype), WORDS, KEPT)
    again = gl.maximum(blocks - SLOTS, 0)
    held = blocks - again
    step = gl.num_programs(0).to(gl.int64)
    first = gl.program_id(0).to(gl.int64)
    zero = (n_rows >> 63).to(gl.int32)  # not in the loop over rows, in which n_rows is known to be positive
    ring = rings_of(ins, AHEAD, LINES)
    slots = rings_of(ins, SLOTS, LINES)
    ask_row, use = first - step, again
    for i in range(zero + AHEAD):  # not unrolled
        wants = wanted_of((look(ask_row, given), look(ask_row + step, given)), wanted, given)
        ask_row, use = ask_again(
            ring, i, ins, strides, ask_row, use, step, n_rows, again, at, wants, ask_row, WORDS
        )  # fmt: skip
    asked = (look(ask_row, given), look(ask_row + step, given), look(ask_row + 2 * step, given))
    told = look(first, given)
    here = wanted(told, given)
    for i in range(held):
        ask(slots, i, ins, strides, first, (again + i) * WORDS, (at >= 0) & here)
    kept = load_kept(ins, strides, first, n_kept, blocks, at, here, FILL, WORDS, KEPT)
    sums = begin(first, told, given, LINES, layout)
    told = look(first + step, given)
    slot = 0
    for row in range(first, n_rows, step):
        # A held block is asked for SLOTS - 1 groups of copies before it is waited for, or more; a block of the ring,
        # AHEAD - 1. Empty groups stand in for what is not asked for.
        for _ in range(held, SLOTS):
            async_copy.commit_group()
        ask_first = ask_row
        wants = wanted_of(asked, wanted, given)
        for turn in gl.static_range(TURNS):
            for i in range(again * turn // TURNS, again * (turn + 1) // TURNS):
                async_copy.wait_group(AHEAD - 1)
                tiles = tiles_in(ring, slot, layout)
                ask_row, use = ask_again(
                    ring, slot, ins, strides, ask_row, use, step, n_rows, again, at, wants, ask_first, WORDS
                )  # fmt: skip
                slot = gl.where(slot < AHEAD - 1, slot + 1, 0)
                sums = include(sums, tiles, given, dtype)
                if i < held:
                    sums = include(sums, tiles_in(slots, i, layout), given, dtype)
            if turn < TURNS - 1:
                sums = include_kept(sums, kept, given, include, dtype, turn, TURNS)
        for i in range(again, held):
            async_copy.wait_group(AHEAD - 1)
            sums = include(sums, tiles_in(slots, i, layout), given, dtype)
            async_copy.commit_group()
        folded = fold(include_kept(sums, kept, given, include, dtype, TURNS - 1, TURNS), given, dtype)
        out_row = out[0] + row * out_stride[0]
        here = wanted(told, given)
        sums = begin(row + step, told, given, LINES, layout)
        told = look(row + 2 * step, given)
        asked = (asked[1], asked[2], look(ask_first + 3 * step, given))
        for i in range(again):
            async_copy.wait_group(AHEAD - 1)
            tiles = tiles_in(ring, slot, layout)
            ask_row, use = ask_again(
                ring, slot, ins, strides, ask_row, use, step, n_rows, again, at, wants, ask_first, WORDS
            )  # fmt: skip
            slot = gl.where(slot < AHEAD - 1, slot + 1, 0)
            gl.store(out_row + (again - 1 - i) * WORDS, finish(tiles, folded, given, dtype))
        kept = finish_kept(
            out_row, ins, strides, kept, folded, row + step, n_rows, n_kept, blocks, at, here, given, zero,
            finish, FILL, dtype, WORDS,
        )  # fmt: skip
        for i in range(held):
            tiles = tiles_in(slots, i, layout)
            word = (again + i) * WORDS
            there = (at >= 0) & (row + step < n_rows) & here
            ask(slots, i, ins, strides, row + step, word, there)
            gl.store(out_row + word, finish(tiles, folded, given, dtype))
        end(row, folded, given, dtype)
    async_copy.wait_group(0)


@gluon.jit
def walk_rows(
    OUT, ins, out_stride, strides, n_rows, n_cols, given,
    look: gl.constexpr, wanted: gl.constexpr, begin: gl.constexpr, include: gl.constexpr, fold: gl.constexpr,
    finish: gl.constexpr, end: gl.constexpr, FILL: gl.constexpr,
    BLOCK: gl.constexpr, SLOTS: gl.constexpr, AHEAD: gl.constexpr, KEPT: gl.constexpr, WHOLE: gl.constexpr,
    TURNS: gl.constexpr,
):  # fmt: skip
    """Rows program_id, program_id + programs, ..., in blocks of BLOCK columns: WHOLE rows of at most SLOTS + KEPT
    blocks, or rows of any length.

    What is computed, where dtype is that of OUT and ``ins``, and all get what is ``given``: ``begin(row, told, given,
    LINES, layout)`` gives sums of nothing, a tuple of one value a line of a tile, and what else a row needs;
    ``include(sums, tiles, given, dtype)`` adds a block, of which it gets one tile of each input; ``fold(sums, given,
    dtype)`` makes of a row's sums what ``finish(tiles, folded, given, dtype)`` takes for the words of a block of OUT;
    ``end(row, folded, given, dtype)`` comes when all of a row's blocks are stored. What is past the end of a row is
    FILL to ``include``.

    ``look(row, given)`` loads what is ``told`` of a row beside its elements, a row of time before anything uses it, and
    for rows that are not there, before the first and past the last, too; ``wanted(told, given)``: whether the row is
    read at all. The blocks of one that is not are zeros, and FILL those that are kept."""
    if WHOLE:
        walk_held(
            OUT, ins, out_stride, strides, n_rows, n_cols, given, look, wanted, begin, include, fold, finish, end, FILL,
            BLOCK, SLOTS, AHEAD, KEPT, TURNS,
        )  # fmt: skip
    else:
        walk_again(
            OUT, ins, out_stride, strides, n_rows, n_cols, given, look, wanted, begin, include, fold, finish, end, FILL,
            BLOCK, SLOTS, AHEAD, KEPT, TURNS,
        )  # fmt: skip
