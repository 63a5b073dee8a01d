"""What the walks of ``row_ring`` share: tiles, copies to shared memory, and the blocks of a row kept in registers.

A tile is of lines of 16 bytes, four words; rows of 16-bit elements are taken as pairs in int32. There are as many
inputs, each a row of the same length, as tuples hold.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy


@gluon.constexpr_function
def word_of(dtype):
    """What a tile is of: float32, or int32 that holds two elements of 16 bits."""
    return gl.float32 if dtype.primitive_bitwidth == 32 else gl.int32


@gluon.constexpr_function
def elements_of(dtype):
    """Of a word."""
    return 32 // dtype.primitive_bitwidth


@gluon.jit
def words_of_block(LINES: gl.constexpr, layout: gl.constexpr):
    """The words of a block as a tile."""
    line = gl.arange(0, LINES, layout=gl.SliceLayout(1, layout))
    return line[:, None] * 4 + gl.arange(0, 4, layout=gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def lengths(n, WORDS: gl.constexpr, KEPT: gl.constexpr):
    """Of a row of n words: its whole blocks, and the words of the up to KEPT blocks after them."""
    blocks = gl.cdiv(gl.maximum(n - KEPT * WORDS, 0), WORDS)
    return blocks, n - blocks * WORDS


@gluon.jit
def as_words(pointers, strides, at):
    """Pointers to rows and the rows' strides as pointers to the words of a block and strides of words."""
    words, of_words = (), ()
    for i in gl.static_range(len(pointers)):
        word = gl.pointer_type(word_of(pointers[i].dtype.element_ty))
        words += (pointers[i].to(word, bitcast=True) + at,)
        of_words += (strides[i] // elements_of(pointers[i].dtype.element_ty),)
    return words, of_words


@gluon.jit
def rings_of(words, COPIES: gl.constexpr, LINES: gl.constexpr):
    """Shared memory for so many blocks of each input."""
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    rings = ()
    for i in gl.static_range(len(words)):
        rings += (gl.allocate_shared_memory(words[i].dtype.element_ty, [COPIES, LINES, 4], shared),)
    return rings


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
def load_kept(
    ins, strides, row, n_kept, blocks, at, here, FILL: gl.constexpr, WORDS: gl.constexpr, KEPT: gl.constexpr
):
    """A row's last blocks, in registers: of each a tile of each input."""
    kept = ()
    for i in gl.static_range(KEPT):
        kept += (tiles_at(ins, strides, row, (blocks + i) * WORDS, (at < n_kept - i * WORDS) & here, FILL),)
    return kept


@gluon.jit
def include_kept(
    sums,
    kept,
    given,
    include: gl.constexpr,
    dtype: gl.constexpr,
    TURN: gl.constexpr = 0,
    TURNS: gl.constexpr = 1,
):
    """The ``TURN``-th of TURNS parts of the kept blocks."""
    for i in gl.static_range(TURN * len(kept) // TURNS, (TURN + 1) * len(kept) // TURNS):
        sums = include(sums, kept[i], given, dtype)
    return sums


@gluon.jit
def finish_kept(
    out_row, ins, strides, kept, folded, next_row, n_rows, n_kept, blocks, at, here, given, zero,
    finish: gl.constexpr, FILL: gl.constexpr, dtype: gl.constexpr, WORDS: gl.constexpr,
):  # fmt: skip
    """The next row's blocks, each loaded, if the row is ``here``, as soon as the one under way has left its registers.
    ``zero`` is 0, but where the compiler can't know it, or it would keep fp32 copies of kept pairs, too."""
    new = ()
    for i in gl.static_range(len(kept)):
        tiles = ()
        for j in gl.static_range(len(ins)):
            if dtype == gl.float32:
                tiles += (kept[i][j],)
            else:
                tiles += (kept[i][j] ^ zero,)
        word = (blocks + i) * WORDS
        mask = at < n_kept - i * WORDS
        gl.store(out_row + word, finish(tiles, folded, given, dtype), mask=mask)
        new += (tiles_at(ins, strides, next_row, word, mask & (next_row < n_rows) & here, FILL),)
    return new


@gluon.jit
def wanted_of(told, wanted: gl.constexpr, given):
    """``wanted`` of what is told of some rows, a tuple."""
    found = ()
    for i in gl.static_range(len(told)):
        found += (wanted(told[i], given),)
    return found


@gluon.jit
def among(wants, row, first, step):
    """The one of rows ``first``, ``first`` + ``step``, ... that is ``row``'s."""
    found = wants[0]
    for i in gl.static_range(len(wants) - 1):
        found = gl.where(row == first + (i + 1) * step, wants[i + 1], found)
    return found


@gluon.jit
def look_nowhere(row, given):
    """``look`` where nothing is told of a row beside its elements."""
    return ()


@gluon.jit
def always(told, given):
    """``wanted`` where every row is read."""
    return True


@gluon.jit
def end_plainly(row, folded, given, dtype: gl.constexpr):
    """``end`` where all that is stored are a row's blocks."""
