"""Asynchronous copies of rows through shared memory (Gluon, Hopper), and a persistent loop over rows that uses them.

First the parts that every pipeline of this project has: buffers of several stages, a copy into a stage, a read. Every
thread reads back what it copied itself, so no barrier stands between a copy and its use.

Then ``process_rows``, for ops that must read a row whole before they write it (softmax, cross entropy). What bounds it,
at 132 multiprocessors and 4.1 TB/s of reads and writes: 31 bytes a nanosecond each, so 16.8 us for the softmax of a row
of 131072 16-bit columns. The latency of 1.2 to 1.5 us under load takes 19 to 24 KB of reads in flight at every moment.
Two powers a column are 8.8 us of the special function units, and the 15 instructions a column that they stand among
7.7 us of the schedulers (at 1.98 GHz): both fit beside the copies, but not before or after them. A program that reads a
row, reduces it and then writes it, alone on its multiprocessor, does not keep memory busy.

So a persistent program writes a row while it reads and accumulates the next one. Blocks of the rows go through
STAGES + PREFETCH buffers in shared memory, each copied PREFETCH blocks or more before its use. A step of the loop
writes a block of the current row, starts a copy into its buffer, and accumulates a block of the next row. The last
IN_REGISTERS blocks of a row, the only ones with masks, bypass shared memory: they are loaded into the registers from
which the same blocks of the row before were written, and accumulated last. So memory is read once, and between rows
only these blocks and the reductions hold up the writes. 224 KB of shared memory and 128 KB of registers hold rows of up
to 320 KB: 163840 16-bit columns.

Of longer rows, the last blocks stay on chip, STAGES in shared memory and IN_REGISTERS in registers. Those before them
pass through PREFETCH buffers twice: once to be accumulated, and once more, backwards, to be written, since what was
read last is the likeliest to be still in a cache. Of 512 KB a half stays, and what 132 programs read again is 34 of the
second-level cache's 50 MB. Blocks that stay are written last, and each buffer then takes a copy of the next row.
(Interleaving two rows, as above, would put 150 MB of traffic between the first and the second read.)

Every thread writes the places that it read: OUT may be the input. Scalars that a row needs beside its elements are
loaded ahead of its blocks: a load queued behind theirs would wait for them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.core import _aggregate as aggregate

# The form of a kernel that runs ``process_rows``, beside the function's name: on whole rows, and on rows of any length.
ROW_PIPELINE = {
    "language": "gluon",
    "constants": ["BLOCK", "STAGES", "PREFETCH", "IN_REGISTERS"],
    "requires": {"aligned": [True]},
}
WHOLE_ROW_PIPELINE = {**ROW_PIPELINE, "covers": "STAGES * BLOCK + IN_REGISTERS * BLOCK"}


@gluon.constexpr_function
def vector_layout(warps):
    """The layout of a tile of [lines, 4] 32-bit words: 16 bytes a thread."""
    return gl.BlockedLayout([1, 4], [32, 1], [warps, 1], [1, 0])


@gluon.constexpr_function
def word_of(dtype):
    """The type of a tile's words: float32, or int32 that holds two elements of 16 bits."""
    return gl.float32 if dtype.primitive_bitwidth == 32 else gl.int32


@gluon.constexpr_function
def elements_a_word(dtype):
    return 32 // dtype.primitive_bitwidth


@gluon.jit
def add_two(a, b, c, d):
    """The combine function of a reduction of two sums at once."""
    return a + c, b + d


@gluon.jit
def tile_offsets(LINES: gl.constexpr, layout: gl.constexpr):
    """The offsets of a tile's words in memory, [LINES, 4]."""
    line = gl.arange(0, LINES, layout=gl.SliceLayout(1, layout))
    return line[:, None] * 4 + gl.arange(0, 4, layout=gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def allocate_tiles(inputs: gl.constexpr, dtype: gl.constexpr, STAGES: gl.constexpr, LINES: gl.constexpr):
    """Buffers for STAGES tiles of each of so many inputs: a tuple, one an input."""
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    buffers = ()
    for _ in gl.static_range(inputs):
        buffers += (gl.allocate_shared_memory(dtype, [STAGES, LINES, 4], shared),)
    return buffers


@gluon.jit
def copy_tile(buffer, stage, pointers, mask):
    """Start to copy a tile into a stage of its buffer; zeros where masked. ``commit_group`` ends a group of them."""
    async_copy.async_copy_global_to_shared(buffer.index(stage), pointers, mask=mask)


@gluon.jit
def read_tiles(buffers, stage, layout: gl.constexpr):
    """A tile of each input, from a stage."""
    tiles = ()
    for i in gl.static_range(len(buffers)):
        tiles += (buffers[i].index(stage).load(layout),)
    return tiles


@gluon.jit
def next_stage(stage, stages):
    return gl.where(stage < stages - 1, stage + 1, 0)


@gluon.jit
def load_no_scalars(row, args):
    """``RowFunctions.load_scalars`` of rows that need nothing beside their elements."""
    return ()


@gluon.jit
def read_always(scalars, args):
    """``RowFunctions.is_read`` where every row is read."""
    return True


@gluon.jit
def no_finalise(row, result, args, dtype: gl.constexpr):
    """``RowFunctions.finalise`` where nothing but the row is written."""


@aggregate
class RowFunctions:
    """What ``process_rows`` computes. All functions get its ``args``; ``dtype`` is that of OUT and the inputs.

    - ``load_scalars(row, args)``: a row's values beside its elements, loaded a row ahead of their use; for rows that
      are not there, before the first and past the last, too.
    - ``is_read(scalars, args)``: whether the row is read at all. The tiles of one that is not are zeros, and FILL those
      in registers.
    - ``init(row, scalars, args, LINES, layout)``: the accumulators, a tuple of one value a line of a tile and of what
      else the row needs.
    - ``accumulate(sums, tiles, args, dtype)``: the accumulators with a block added: a tile of each input. Past the end
      of a row a tile holds FILL.
    - ``reduce(sums, args, dtype)``: the row's result.
    - ``epilogue(tiles, result, args, dtype)``: a tile of OUT.
    - ``finalise(row, result, args, dtype)``: called when all of a row's blocks are stored.
    """

    load_scalars: gl.constexpr
    is_read: gl.constexpr
    init: gl.constexpr
    accumulate: gl.constexpr
    reduce: gl.constexpr
    epilogue: gl.constexpr
    finalise: gl.constexpr
    FILL: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, load_scalars, is_read, init, accumulate, reduce, epilogue, finalise, FILL):
        self.load_scalars, self.is_read = gl.constexpr(load_scalars), gl.constexpr(is_read)
        self.init, self.accumulate = gl.constexpr(init), gl.constexpr(accumulate)
        self.reduce, self.epilogue = gl.constexpr(reduce), gl.constexpr(epilogue)
        self.finalise, self.FILL = gl.constexpr(finalise), gl.constexpr(FILL)


@aggregate
class RowSizes:
    """The numbers of ``ROW_PIPELINE``, whether rows are WHOLE, in how many parts the blocks in registers are
    accumulated between others (INTERLEAVE), and what follows from them."""

    STAGES: gl.constexpr
    PREFETCH: gl.constexpr
    IN_REGISTERS: gl.constexpr
    WHOLE: gl.constexpr
    INTERLEAVE: gl.constexpr
    dtype: gl.constexpr
    WORDS: gl.constexpr  # 32-bit words of a block
    LINES: gl.constexpr  # 16-byte lines of a block
    layout: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, dtype, warps, BLOCK, STAGES, PREFETCH, IN_REGISTERS, WHOLE, INTERLEAVE):
        words = BLOCK // elements_a_word(dtype)
        self.STAGES, self.PREFETCH = gl.constexpr(STAGES), gl.constexpr(PREFETCH)
        self.IN_REGISTERS, self.WHOLE = gl.constexpr(IN_REGISTERS), gl.constexpr(WHOLE)
        self.INTERLEAVE, self.dtype = gl.constexpr(INTERLEAVE), gl.constexpr(dtype)
        self.WORDS, self.LINES = gl.constexpr(words), gl.constexpr(words // 4)
        self.layout = gl.constexpr(vector_layout(warps))


@gluon.jit
def row_blocks(n, z):
    """Of a row of n words: its whole blocks, and the words of the up to IN_REGISTERS blocks after them."""
    blocks = gl.cdiv(gl.maximum(n - z.IN_REGISTERS * z.WORDS, 0), z.WORDS)
    return blocks, n - blocks * z.WORDS


@gluon.jit
def as_words(pointers, strides, offsets):
    """Pointers to rows and the rows' strides, as pointers to the words of a block and strides in words."""
    words, word_strides = (), ()
    for i in gl.static_range(len(pointers)):
        word = gl.pointer_type(word_of(pointers[i].dtype.element_ty))
        words += (pointers[i].to(word, bitcast=True) + offsets,)
        word_strides += (strides[i] // elements_a_word(pointers[i].dtype.element_ty),)
    return words, word_strides


@gluon.jit
def copy_block(buffers, stage, ins, strides, row, word, mask):
    """Start to copy a block of a row of each input, as one group."""
    for i in gl.static_range(len(ins)):
        copy_tile(buffers[i], stage, ins[i] + (row * strides[i] + word), mask)
    async_copy.commit_group()


@gluon.jit
def load_tiles(ins, strides, row, word, mask, FILL: gl.constexpr):
    """A block's tile of each input, from memory."""
    tiles = ()
    for i in gl.static_range(len(ins)):
        tiles += (gl.load(ins[i] + (row * strides[i] + word), mask=mask, other=FILL),)
    return tiles


@gluon.jit
def load_registers(ins, strides, row, n_words, blocks, offsets, is_read, f, z):
    """A row's last blocks, in registers: a tile of each input, of each block."""
    loaded = ()
    for i in gl.static_range(z.IN_REGISTERS):
        mask = (offsets < n_words - i * z.WORDS) & is_read
        loaded += (load_tiles(ins, strides, row, (blocks + i) * z.WORDS, mask, f.FILL),)
    return loaded


@gluon.jit
def accumulate_registers(sums, in_registers, args, f, z, PART: gl.constexpr = 0, PARTS: gl.constexpr = 1):
    """Accumulate the ``PART``-th of PARTS parts of the blocks in registers."""
    first: gl.constexpr = PART * len(in_registers) // PARTS
    for i in gl.static_range(first, (PART + 1) * len(in_registers) // PARTS):
        sums = f.accumulate(sums, in_registers[i], args, z.dtype)
    return sums


@gluon.jit
def write_registers(
    out_row,
    ins,
    strides,
    in_registers,
    result,
    next_row,
    n_rows,
    n_words,
    blocks,
    offsets,
    read_next,
    args,
    zero,
    f,
    z,
):
    """Write the row's blocks from registers, and load the next row's, if it is read: each as soon as the one before
    has left its registers. ``zero`` is 0, but unknown to the compiler, which would keep fp32 copies of bf16x2."""
    loaded = ()
    for i in gl.static_range(len(in_registers)):
        tiles = ()
        for j in gl.static_range(len(ins)):
            if z.dtype == gl.float32:
                tiles += (in_registers[i][j],)
            else:
                tiles += (in_registers[i][j] ^ zero,)
        word = (blocks + i) * z.WORDS
        mask = offsets < n_words - i * z.WORDS
        gl.store(out_row + word, f.epilogue(tiles, result, args, z.dtype), mask=mask)
        loaded += (load_tiles(ins, strides, next_row, word, mask & (next_row < n_rows) & read_next, f.FILL),)
    return loaded


@gluon.jit
def are_read(scalars, args, f):
    """``is_read`` of the scalars of some rows, a tuple."""
    reads = ()
    for i in gl.static_range(len(scalars)):
        reads += (f.is_read(scalars[i], args),)
    return reads


@gluon.jit
def read_of(reads, row, first, step):
    """The one of ``reads``, of rows ``first``, ``first`` + ``step``, ..., that is ``row``'s."""
    found = reads[0]
    for i in gl.static_range(len(reads) - 1):
        found = gl.where(row == first + (i + 1) * step, reads[i + 1], found)
    return found


@gluon.jit
def process_whole_rows(OUT, ins, out_stride, strides, n_rows, n_cols, args, f, z):
    """``process_rows`` of at most STAGES + IN_REGISTERS blocks."""
    gl.static_assert(z.PREFETCH >= 1 and z.IN_REGISTERS >= 1)
    BUFFERS: gl.constexpr = z.STAGES + z.PREFETCH
    offsets = tile_offsets(z.LINES, z.layout)
    out, out_stride = as_words((OUT,), (out_stride,), offsets)
    ins, strides = as_words(ins, strides, offsets)
    blocks, n_words = row_blocks(n_cols // elements_a_word(z.dtype), z)
    step = gl.num_programs(0).to(gl.int64)
    first = gl.program_id(0).to(gl.int64)
    zero = (n_rows >> 63).to(gl.int32)  # not in the loop over rows, in which n_rows is known to be positive
    buffers = allocate_tiles(len(ins), word_of(z.dtype), BUFFERS, z.LINES)
    copy_row, block = first, 0
    for i in range(zero + BUFFERS):  # not unrolled
        mask = (offsets >= 0) & (copy_row < n_rows) & (blocks > 0)
        mask = mask & f.is_read(f.load_scalars(copy_row, args), args)
        copy_block(buffers, i, ins, strides, copy_row, block * z.WORDS, mask)
        block += 1
        copy_row = gl.where(block < blocks, copy_row, copy_row + step)
        block = gl.where(block < blocks, block, 0)
    copy_scalars = (f.load_scalars(copy_row, args), f.load_scalars(copy_row + step, args))
    scalars = f.load_scalars(first, args)
    is_read = f.is_read(scalars, args)
    in_registers = load_registers(ins, strides, first, n_words, blocks, offsets, is_read, f, z)
    sums = f.init(first, scalars, args, z.LINES, z.layout)
    scalars = f.load_scalars(first + step, args)
    for i in range(blocks):
        async_copy.wait_group(BUFFERS - 1)
        sums = f.accumulate(sums, read_tiles(buffers, i, z.layout), args, z.dtype)
        async_copy.commit_group()  # an empty one: the next wait is for the next block
    for part in gl.static_range(z.INTERLEAVE - 1):
        sums = accumulate_registers(sums, in_registers, args, f, z, part, z.INTERLEAVE)
    stage = 0
    next_row_stage = blocks
    for row in range(first, n_rows, step):
        sums = accumulate_registers(sums, in_registers, args, f, z, z.INTERLEAVE - 1, z.INTERLEAVE)
        result = f.reduce(sums, args, z.dtype)
        out_row = out[0] + row * out_stride[0]
        read_next = f.is_read(scalars, args)
        sums = f.init(row + step, scalars, args, z.LINES, z.layout)
        scalars = f.load_scalars(row + 2 * step, args)
        copy_first = copy_row
        reads = are_read(copy_scalars, args, f)
        copy_scalars = (copy_scalars[1], f.load_scalars(copy_first + 2 * step, args))
        in_registers = write_registers(
            out_row, ins, strides, in_registers, result, row + step, n_rows, n_words, blocks, offsets, read_next, args,
            zero, f, z,
        )  # fmt: skip
        for part in gl.static_range(z.INTERLEAVE):
            for i in range(blocks * part // z.INTERLEAVE, blocks * (part + 1) // z.INTERLEAVE):
                async_copy.wait_group(z.PREFETCH - 1)
                tiles = read_tiles(buffers, stage, z.layout)
                next_tiles = read_tiles(buffers, next_row_stage, z.layout)
                word = block * z.WORDS
                mask = (offsets >= 0) & (copy_row < n_rows) & read_of(reads, copy_row, copy_first, step)
                copy_block(buffers, stage, ins, strides, copy_row, word, mask)
                gl.store(out_row + i * z.WORDS, f.epilogue(tiles, result, args, z.dtype))
                sums = f.accumulate(sums, next_tiles, args, z.dtype)
                stage = next_stage(stage, BUFFERS)
                next_row_stage = next_stage(next_row_stage, BUFFERS)
                block += 1
                copy_row = gl.where(block < blocks, copy_row, copy_row + step)
                block = gl.where(block < blocks, block, 0)
            if part < z.INTERLEAVE - 1:  # what is left for the moment between two rows holds up the writes
                sums = accumulate_registers(sums, in_registers, args, f, z, part, z.INTERLEAVE)
        f.finalise(row, result, args, z.dtype)
    async_copy.wait_group(0)


@gluon.jit
def copy_reread(
    buffers, stage, ins, strides, row, use, step, n_rows, reread, offsets, reads, reads_from, z
):  # fmt: skip
    """Start the copy for a ``use`` of the buffers: blocks of ``row`` from ``reread`` - 1 to 0, then of the row after it
    from 0. ``reads`` are of the rows from ``reads_from`` on. Returns the row and the number of the next use."""
    second = use < reread
    block = gl.where(second, reread - 1 - use, use - reread)
    copy_row = gl.where(second, row, row + step)
    mask = (offsets >= 0) & (copy_row < n_rows) & (reread > 0) & read_of(reads, copy_row, reads_from, step)
    copy_block(buffers, stage, ins, strides, copy_row, block * z.WORDS, mask)
    last = use + 1 >= 2 * reread
    return gl.where(last, row + step, row), gl.where(last, 0, use + 1)


@gluon.jit
def process_long_rows(OUT, ins, out_stride, strides, n_rows, n_cols, args, f, z):
    """``process_rows`` of any length."""
    gl.static_assert(z.STAGES >= z.PREFETCH and z.PREFETCH >= 1 and z.IN_REGISTERS >= 1)
    offsets = tile_offsets(z.LINES, z.layout)
    out, out_stride = as_words((OUT,), (out_stride,), offsets)
    ins, strides = as_words(ins, strides, offsets)
    blocks, n_words = row_blocks(n_cols // elements_a_word(z.dtype), z)
    reread = gl.maximum(blocks - z.STAGES, 0)
    in_shared = blocks - reread
    step = gl.num_programs(0).to(gl.int64)
    first = gl.program_id(0).to(gl.int64)
    zero = (n_rows >> 63).to(gl.int32)  # not in the loop over rows, in which n_rows is known to be positive
    passing = allocate_tiles(len(ins), word_of(z.dtype), z.PREFETCH, z.LINES)
    staying = allocate_tiles(len(ins), word_of(z.dtype), z.STAGES, z.LINES)
    copy_row, use = first - step, reread
    for i in range(zero + z.PREFETCH):  # not unrolled
        copy_scalars = (f.load_scalars(copy_row, args), f.load_scalars(copy_row + step, args))
        reads = are_read(copy_scalars, args, f)
        copy_row, use = copy_reread(
            passing, i, ins, strides, copy_row, use, step, n_rows, reread, offsets, reads, copy_row, z
        )  # fmt: skip
    copy_scalars = (
        f.load_scalars(copy_row, args), f.load_scalars(copy_row + step, args), f.load_scalars(copy_row + 2 * step, args)
    )  # fmt: skip
    scalars = f.load_scalars(first, args)
    is_read = f.is_read(scalars, args)
    for i in range(in_shared):
        copy_block(staying, i, ins, strides, first, (reread + i) * z.WORDS, (offsets >= 0) & is_read)
    in_registers = load_registers(ins, strides, first, n_words, blocks, offsets, is_read, f, z)
    sums = f.init(first, scalars, args, z.LINES, z.layout)
    scalars = f.load_scalars(first + step, args)
    stage = 0
    for row in range(first, n_rows, step):
        # A block that stays is copied STAGES - 1 groups of copies before it is waited for, or more; one that passes,
        # PREFETCH - 1. Empty groups stand in for blocks that are not there.
        for _ in range(in_shared, z.STAGES):
            async_copy.commit_group()
        copy_first = copy_row
        reads = are_read(copy_scalars, args, f)
        for part in gl.static_range(z.INTERLEAVE):
            for i in range(reread * part // z.INTERLEAVE, reread * (part + 1) // z.INTERLEAVE):
                async_copy.wait_group(z.PREFETCH - 1)
                tiles = read_tiles(passing, stage, z.layout)
                copy_row, use = copy_reread(
                    passing, stage, ins, strides, copy_row, use, step, n_rows, reread, offsets, reads, copy_first, z
                )  # fmt: skip
                stage = next_stage(stage, z.PREFETCH)
                sums = f.accumulate(sums, tiles, args, z.dtype)
                if i < in_shared:
                    sums = f.accumulate(sums, read_tiles(staying, i, z.layout), args, z.dtype)
            if part < z.INTERLEAVE - 1:
                sums = accumulate_registers(sums, in_registers, args, f, z, part, z.INTERLEAVE)
        for i in range(reread, in_shared):
            async_copy.wait_group(z.PREFETCH - 1)
            sums = f.accumulate(sums, read_tiles(staying, i, z.layout), args, z.dtype)
            async_copy.commit_group()
        sums = accumulate_registers(sums, in_registers, args, f, z, z.INTERLEAVE - 1, z.INTERLEAVE)
        result = f.reduce(sums, args, z.dtype)
        out_row = out[0] + row * out_stride[0]
        read_next = f.is_read(scalars, args)
        sums = f.init(row + step, scalars, args, z.LINES, z.layout)
        scalars = f.load_scalars(row + 2 * step, args)
        copy_scalars = (copy_scalars[1], copy_scalars[2], f.load_scalars(copy_first + 3 * step, args))
        for i in range(reread):
            async_copy.wait_group(z.PREFETCH - 1)
            tiles = read_tiles(passing, stage, z.layout)
            copy_row, use = copy_reread(
                passing, stage, ins, strides, copy_row, use, step, n_rows, reread, offsets, reads, copy_first, z
            )  # fmt: skip
            stage = next_stage(stage, z.PREFETCH)
            gl.store(out_row + (reread - 1 - i) * z.WORDS, f.epilogue(tiles, result, args, z.dtype))
        in_registers = write_registers(
            out_row, ins, strides, in_registers, result, row + step, n_rows, n_words, blocks, offsets, read_next, args,
            zero, f, z,
        )  # fmt: skip
        for i in range(in_shared):
            tiles = read_tiles(staying, i, z.layout)
            word = (reread + i) * z.WORDS
            copy_block(
                staying, i, ins, strides, row + step, word, (offsets >= 0) & (row + step < n_rows) & read_next
            )
            gl.store(out_row + word, f.epilogue(tiles, result, args, z.dtype))
        f.finalise(row, result, args, z.dtype)
    async_copy.wait_group(0)


@gluon.jit
def process_rows(OUT, ins, out_stride, strides, n_rows, n_cols, args, f, z):
    """Rows program_id, program_id + programs, ..., in blocks of BLOCK columns: whole rows of at most
    STAGES + IN_REGISTERS blocks, or, with WHOLE 0, rows of any length.

    Args:
        OUT, ins: the output and a tuple of inputs, rows of the same length and dtype.
        args: whatever the functions of ``f`` need.
        f: ``RowFunctions``.
        z: ``RowSizes``.
    """
    if z.WHOLE:
        process_whole_rows(OUT, ins, out_stride, strides, n_rows, n_cols, args, f, z)
    else:
        process_long_rows(OUT, ins, out_stride, strides, n_rows, n_cols, args, f, z)
