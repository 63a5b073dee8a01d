"""Rows of which each is read whole before it is written, by programs that hold them (Gluon, Hopper).

What bounds it, at 132 multiprocessors and 4.1 TB/s of reads and writes: 31 bytes a nanosecond each, so 16.8 us for the
softmax of a row of 131072 16-bit columns. The latency of 1.2 to 1.5 us under load takes 19 to 24 KB of reads under way
at every moment. Two powers a column are 8.3 us of the special function units, and 12 other instructions a column 7 us
of the schedulers: both fit beside the copies, but not before or after them. One program a multiprocessor that reads a
row, adds it up and then writes it leaves the memory alone for a third of the time.

So a persistent program writes a row while it reads the next one and adds that up. Blocks of the rows go through a ring
of SLOTS + AHEAD blocks in shared memory, each copied AHEAD blocks or more before its use. A step of the loop finishes a
block of the row under way, gives its slot to a copy, and includes a block of the next row in the sums. The last KEPT
blocks of a row, the only ones with masks, don't pass through shared memory: they are loaded into the registers from
which the same blocks of the row before were written, and included last. So memory is read once, and between rows only
the included KEPT blocks and the reductions hold up the writes.

Every thread reads back what it copied itself. A tile is of lines of 16 bytes; rows of 16-bit elements are taken as
pairs in int32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from csrc_triton.norm_ring import lines_layout


@gluon.constexpr_function
def word_of(dtype):
    """What a tile is of: float32, or int32 that holds two elements of 16 bits."""
    return gl.float32 if dtype.primitive_bitwidth == 32 else gl.int32


@gluon.constexpr_function
def elements_of(dtype):
    """Of a word."""
    return 32 // dtype.primitive_bitwidth


@gluon.jit
def as_words(pointer, at):
    """A pointer to rows as one to the words of a block of them."""
    word: gl.constexpr = word_of(pointer.dtype.element_ty)
    return pointer.to(gl.pointer_type(word), bitcast=True) + at


@gluon.jit
def ask(rings, slot, ins, strides, row, word, there):
    """Begin to copy a block of whole lines; zeros if it is not there."""
    for i in gl.static_range(len(ins)):
        pointers = ins[i] + (row * strides[i] + word)
        async_copy.async_copy_global_to_shared(rings[i].index(slot), pointers, mask=there)
    async_copy.commit_group()


@gluon.jit
def tiles_in(rings, slot, layout: gl.constexpr):
    """A block's tile of each input, from shared memory."""
    tiles = ()
    for i in gl.static_range(len(rings)):
        tiles += (rings[i].index(slot).load(layout),)
    return tiles


@gluon.jit
def tiles_at(ins, strides, row, word, mask, FILL: gl.constexpr):
    """A block's tile of each input, from memory."""
    tiles = ()
    for i in gl.static_range(len(ins)):
        tiles += (gl.load(ins[i] + (row * strides[i] + word), mask=mask, other=FILL),)
    return tiles


@gluon.jit
def unpacked_again(tiles, zero):
    """The same tiles, not known to be: fp32 copies of what is kept in pairs would be kept, too."""
    same = ()
    for i in gl.static_range(len(tiles)):
        if tiles[i].dtype == gl.int32:
            same += (tiles[i] ^ zero,)
        else:
            same += (tiles[i],)
    return same


@gluon.jit
def walk_rows(
    OUT, ins, out_stride, strides, n_rows, n_cols, scale,
    begin: gl.constexpr, include: gl.constexpr, fold: gl.constexpr, finish: gl.constexpr, FILL: gl.constexpr,
    BLOCK: gl.constexpr, SLOTS: gl.constexpr, AHEAD: gl.constexpr, KEPT: gl.constexpr,
):  # fmt: skip
    """Rows program_id, program_id + programs, ... of at most SLOTS + KEPT blocks of BLOCK columns.

    What is computed, from one tile of each input, of lines of four words, where dtype is that of OUT and ``ins``:
    ``begin(LINES, layout)`` gives sums of nothing, a tuple of one value a line; ``include(sums, tiles, scale, dtype)``
    adds a block; ``fold(sums, scale, dtype)`` makes of a row's sums what ``finish(tiles, folded, scale, dtype)`` takes
    for the words of a block of OUT. What is past the end of a row is FILL to ``include``."""
    gl.static_assert(AHEAD >= 1 and KEPT >= 1)
    dtype: gl.constexpr = OUT.dtype.element_ty
    FEW: gl.constexpr = elements_of(dtype)
    WORDS: gl.constexpr = BLOCK // FEW
    LINES: gl.constexpr = WORDS // 4
    COPIES: gl.constexpr = SLOTS + AHEAD
    layout: gl.constexpr = lines_layout(gl.num_warps())
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    line = gl.arange(0, LINES, layout=gl.SliceLayout(1, layout))
    at = line[:, None] * 4 + gl.arange(0, 4, layout=gl.SliceLayout(0, layout))[None, :]
    out, out_stride, n = as_words(OUT, at), out_stride // FEW, n_cols // FEW
    words, in_words, rings = (), (), ()
    for i in gl.static_range(len(ins)):
        words += (as_words(ins[i], at),)
        in_words += (strides[i] // FEW,)
        rings += (gl.allocate_shared_memory(word_of(dtype), [COPIES, LINES, 4], shared),)
    blocks = gl.cdiv(gl.maximum(n - KEPT * WORDS, 0), WORDS)
    n_kept = n - blocks * WORDS
    step = gl.num_programs(0).to(gl.int64)
    first = gl.program_id(0).to(gl.int64)
    zero = (n_rows >> 63).to(gl.int32)
    ask_row, ask_block = first, 0
    for i in range(zero + COPIES):  # not unrolled
        there = (at >= 0) & (ask_row < n_rows) & (blocks > 0)
        ask(rings, i, words, in_words, ask_row, ask_block * WORDS, there)
        ask_block += 1
        ask_row = gl.where(ask_block < blocks, ask_row, ask_row + step)
        ask_block = gl.where(ask_block < blocks, ask_block, 0)
    kept = ()
    for i in gl.static_range(KEPT):
        mask = at < n_kept - i * WORDS
        kept += (tiles_at(words, in_words, first, (blocks + i) * WORDS, mask, FILL),)
    sums = begin(LINES, layout)
    for i in range(blocks):
        async_copy.wait_group(COPIES - 1)
        sums = include(sums, tiles_in(rings, i, layout), scale, dtype)
        async_copy.commit_group()  # an empty one: the next wait is for the next block
    slot = 0
    next_slot = blocks
    for row in range(first, n_rows, step):
        for i in gl.static_range(KEPT):
            sums = include(sums, kept[i], scale, dtype)
        folded = fold(sums, scale, dtype)
        out_row = out + row * out_stride
        new = ()
        for i in gl.static_range(KEPT):
            mask = at < n_kept - i * WORDS
            word = (blocks + i) * WORDS
            gl.store(out_row + word, finish(unpacked_again(kept[i], zero), folded, scale, dtype), mask=mask)
            new += (tiles_at(words, in_words, row + step, word, mask & (row + step < n_rows), FILL),)
        kept = new
        sums = begin(LINES, layout)
        for i in range(blocks):
            async_copy.wait_group(AHEAD - 1)
            tiles = tiles_in(rings, slot, layout)
            next_tiles = tiles_in(rings, next_slot, layout)
            ask(rings, slot, words, in_words, ask_row, ask_block * WORDS, (at >= 0) & (ask_row < n_rows))
            gl.store(out_row + i * WORDS, finish(tiles, folded, scale, dtype))
            sums = include(sums, next_tiles, scale, dtype)
            slot = gl.where(slot < COPIES - 1, slot + 1, 0)
            next_slot = gl.where(next_slot < COPIES - 1, next_slot + 1, 0)
            ask_block += 1
            ask_row = gl.where(ask_block < blocks, ask_row, ask_row + step)
            ask_block = gl.where(ask_block < blocks, ask_block, 0)
    async_copy.wait_group(0)
