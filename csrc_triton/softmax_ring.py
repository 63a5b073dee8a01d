"""Softmax and log-softmax of long rows that one program holds (Gluon, Hopper).

What bounds it, at 132 multiprocessors and 4.1 TB/s of reads and writes: 31 bytes a nanosecond each, so 16.8 us for a
row of 131072 16-bit columns. The latency of 1.2 to 1.5 us under load takes 19 to 24 KB of reads under way at every
moment. Two powers a column are 8.3 us of the special function units, and 11 other instructions a column 6 us of the
schedulers: both fit beside the copies, but not before or after them. One program a multiprocessor that reads a row,
adds it up and then writes it leaves the memory alone for a third of the time.

So a persistent program writes a row while it reads the next one and adds that up. Blocks of the rows go through a ring
of SLOTS + AHEAD blocks in shared memory, each copied AHEAD blocks or more before its use. A step of the loop writes a
block of the row under way, gives its slot to a copy, and includes a block of the next row in the maxima and sums. The
last KEPT blocks of a row, the only ones with masks, don't pass through shared memory: they are loaded into the
registers from which the same blocks of the row before were written, and included last. So memory is read once, and
between rows only the included KEPT blocks and two reductions hold up the writes.

Every thread reads back what it copied itself. A tile is of lines of 16 bytes; rows of 16-bit elements are taken as
pairs in int32. Values are taken as differences to a maximum before they are scaled, which no finite input overflows: a
multiply more than ``softmax_statistics`` uses, and no second way for rows of enormous values.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from csrc_triton.norm_ring import lines_layout
from csrc_triton.packed import even, odd, pair_up

LN_2 = gl.constexpr(0.6931471805599453)
# Where maxima start: not at -inf, whose difference from itself is NaN.
LOWEST = gl.constexpr(-3.4028234663852886e38)


@gluon.constexpr_function
def words_of(columns, dtype):
    """32-bit words of so many columns."""
    return columns * dtype.primitive_bitwidth // 32


@gluon.constexpr_function
def nothing(dtype):
    """A word of -inf."""
    return {"bf16": -0x7F0080, "fp16": -0x3FF0400, "fp32": -float("inf")}[dtype.name]


@gluon.jit
def as_words(pointer, dtype: gl.constexpr):
    """A pointer to pairs in int32, unless elements are of 32 bits themselves."""
    if dtype == gl.float32:
        return pointer
    else:
        return pointer.to(gl.pointer_type(gl.int32), bitcast=True)


@gluon.jit
def powers(x, peak, scale):
    return gl.exp2((x - peak) * scale)


@gluon.jit
def include(peak, total, x, scale, dtype: gl.constexpr):
    """The pair (maximum, sum of powers relative to it) of each line, with a tile added."""
    if dtype == gl.float32:
        higher = gl.maximum(peak, gl.max(x, 1))
        added = powers(x, higher[:, None], scale)
    else:
        low, high = even(x, dtype), odd(x, dtype)
        higher = gl.maximum(peak, gl.max(gl.maximum(low, high), 1))
        added = powers(low, higher[:, None], scale) + powers(high, higher[:, None], scale)
    return higher, total * powers(peak, higher, scale) + gl.sum(added, 1)


@gluon.jit
def fold(peak, total, scale, dtype: gl.constexpr, LOG: gl.constexpr):
    """What ``finish`` takes, from all lines' pairs: the maximum, and what the sum makes of powers. A row of nothing but
    -inf, and one that holds +inf or NaN, gets NaN."""
    highest = gl.max(peak, 0)
    total = gl.sum(total * powers(peak, highest, scale), 0)
    if LOG:
        return highest, gl.log2(total) * LN_2
    elif dtype == gl.float32:
        return highest, 1.0 / total
    else:
        return highest, gl.log2(total)


@gluon.jit
def finish_part(x, highest, last, scale, dtype: gl.constexpr, LOG: gl.constexpr):
    if LOG:
        return (x - highest) - last
    elif dtype == gl.float32:
        return powers(x, highest, scale) * last
    else:  # the inverse of the sum goes into the exponent: one operation an element fewer
        return gl.exp2((x - highest) * scale - last)


@gluon.jit
def finish(x, highest, last, scale, dtype: gl.constexpr, LOG: gl.constexpr):
    """y of a tile."""
    if dtype == gl.float32:
        return finish_part(x, highest, last, scale, dtype, LOG)
    else:
        low = finish_part(even(x, dtype), highest, last, scale, dtype, LOG)
        high = finish_part(odd(x, dtype), highest, last, scale, dtype, LOG)
        return pair_up(low, high, dtype)


@gluon.jit
def normalize_ring(
    Y, X, y_stride, x_stride, n_rows, n_cols, scale,
    BLOCK: gl.constexpr, SLOTS: gl.constexpr, AHEAD: gl.constexpr, KEPT: gl.constexpr, LOG: gl.constexpr,
):  # fmt: skip
    """Rows program_id, program_id + programs, ... of at most SLOTS + KEPT blocks of BLOCK columns."""
    gl.static_assert(AHEAD >= 1)
    dtype: gl.constexpr = X.dtype.element_ty
    WORDS: gl.constexpr = words_of(BLOCK, dtype)
    LINES: gl.constexpr = WORDS // 4
    COPIES: gl.constexpr = SLOTS + AHEAD
    FEW: gl.constexpr = BLOCK // WORDS  # columns a word
    NOTHING: gl.constexpr = nothing(dtype)
    layout: gl.constexpr = lines_layout(gl.num_warps())
    line = gl.arange(0, LINES, layout=gl.SliceLayout(1, layout))
    at = line[:, None] * 4 + gl.arange(0, 4, layout=gl.SliceLayout(0, layout))[None, :]
    X = as_words(X, dtype) + at
    Y = as_words(Y, dtype) + at
    x_stride, y_stride, n = x_stride // FEW, y_stride // FEW, n_cols // FEW
    blocks = gl.cdiv(gl.maximum(n - KEPT * WORDS, 0), WORDS)
    n_kept = n - blocks * WORDS
    step = gl.num_programs(0).to(gl.int64)
    first = gl.program_id(0).to(gl.int64)
    zero = (n_rows >> 63).to(gl.int32)  # unknown to the compiler: fp32 copies of what is kept would be kept, too
    ring = gl.allocate_shared_memory(
        gl.float32 if dtype == gl.float32 else gl.int32,
        [COPIES, LINES, 4],
        gl.SwizzledSharedLayout(1, 1, 1, [1, 0]),
    )
    ask_row, ask_block = first, 0
    for i in range(zero + COPIES):  # not unrolled
        there = (ask_row < n_rows) & (blocks > 0)
        async_copy.async_copy_global_to_shared(
            ring.index(i), X + (ask_row * x_stride + ask_block * WORDS), mask=(at >= 0) & there
        )
        async_copy.commit_group()
        ask_block += 1
        ask_row = gl.where(ask_block < blocks, ask_row, ask_row + step)
        ask_block = gl.where(ask_block < blocks, ask_block, 0)
    kept = ()
    for i in gl.static_range(KEPT):
        places = X + (first * x_stride + (blocks + i) * WORDS)
        kept += (gl.load(places, mask=at < n_kept - i * WORDS, other=NOTHING),)
    peak = gl.full([LINES], LOWEST, gl.float32, gl.SliceLayout(1, layout))
    total = gl.zeros([LINES], gl.float32, gl.SliceLayout(1, layout))
    for i in range(blocks):
        async_copy.wait_group(COPIES - 1)
        peak, total = include(peak, total, ring.index(i).load(layout), scale, dtype)
        async_copy.commit_group()  # an empty one: the next wait is for the next block
    for i in gl.static_range(KEPT):
        peak, total = include(peak, total, kept[i], scale, dtype)
    highest, last = fold(peak, total, scale, dtype, LOG)
    slot = 0
    next_slot = blocks
    for row in range(first, n_rows, step):
        x_row = X + (row + step) * x_stride
        y_row = Y + row * y_stride
        new = ()
        for i in gl.static_range(KEPT):
            x = kept[i] if dtype == gl.float32 else kept[i] ^ zero
            y = finish(x, highest, last, scale, dtype, LOG)
            mask = at < n_kept - i * WORDS
            gl.store(y_row + (blocks + i) * WORDS, y, mask=mask)
            mask = mask & (row + step < n_rows)
            new += (gl.load(x_row + (blocks + i) * WORDS, mask=mask, other=NOTHING),)
        peak = gl.full([LINES], LOWEST, gl.float32, gl.SliceLayout(1, layout))
        total = gl.zeros([LINES], gl.float32, gl.SliceLayout(1, layout))
        for i in range(blocks):
            async_copy.wait_group(AHEAD - 1)
            x = ring.index(slot).load(layout)
            next_x = ring.index(next_slot).load(layout)
            async_copy.async_copy_global_to_shared(
                ring.index(slot),
                X + (ask_row * x_stride + ask_block * WORDS),
                mask=(at >= 0) & (ask_row < n_rows),
            )
            async_copy.commit_group()
            gl.store(y_row + i * WORDS, finish(x, highest, last, scale, dtype, LOG))
            peak, total = include(peak, total, next_x, scale, dtype)
            slot = gl.where(slot < COPIES - 1, slot + 1, 0)
            next_slot = gl.where(next_slot < COPIES - 1, next_slot + 1, 0)
            ask_block += 1
            ask_row = gl.where(ask_block < blocks, ask_row, ask_row + step)
            ask_block = gl.where(ask_block < blocks, ask_block, 0)
        kept = new
        for i in gl.static_range(KEPT):
            peak, total = include(peak, total, kept[i], scale, dtype)
        highest, last = fold(peak, total, scale, dtype, LOG)
    async_copy.wait_group(0)
