"""Sorting (token, expert) pairs by expert, on the device, the same way at every run.

A pair is one of a token's top-k choices: pair p is token p // top_k. The sorted order is padded: each expert's rows
begin at a multiple of ``tile_rows``, the rows of a matrix product's tile, so that a tile has one expert, and none has
rows of two. Rows of the padding hold no pair (ROW_PAIR and ROW_TOKEN are -1); whatever is computed from them is zero.

Three launches, which count, scan and place chunks of pairs. Pairs whose expert is out of range (in expert parallelism:
another rank's) have no row: POSITION is -1.
"""

import triton
import triton.language as tl


@triton.jit
def experts_of(INDICES, pair, mask, index_words, experts):
    """The experts of pairs, -1 where there is none. An index is one 32-bit word or two, the low one first."""
    at = INDICES + pair.to(tl.int64) * index_words
    expert = tl.load(at, mask=mask, other=-1)
    high = tl.load(at + 1, mask=mask & (index_words == 2), other=0)
    return tl.where((high == 0) & (expert >= 0) & (expert < experts), expert, -1)


@triton.jit
def padded_rows(TOTALS, expert, experts, tile_rows):
    """Rows of the padded order that experts have."""
    total = tl.load(TOTALS + expert, mask=expert < experts, other=0)
    return (total + tile_rows - 1) // tile_rows * tile_rows


@triton.jit
def count(COUNTS, INDICES, pairs, experts, chunks, index_words, CHUNK: tl.constexpr, EXPERTS: tl.constexpr):
    """COUNTS[experts, chunks]: how many of a chunk's pairs each expert has. A program a chunk."""
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    own = experts_of(INDICES, pair, pair < pairs, index_words, experts)
    for first in range(0, experts, EXPERTS):
        expert = first + tl.arange(0, EXPERTS)
        found = tl.sum((own[:, None] == expert[None, :]).to(tl.int32), 0)
        tl.store(COUNTS + expert.to(tl.int64) * chunks + chunk, found, mask=expert < experts)


@triton.jit
def scan(COUNTS, TOTALS, chunks, CHUNKS: tl.constexpr):
    """Each expert's counts become those of the chunks before; TOTALS[experts] are its pairs. A program an expert."""
    expert = tl.program_id(0)
    COUNTS += expert.to(tl.int64) * chunks
    total = 0
    for first in range(0, chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        found = tl.load(COUNTS + chunk, mask=chunk < chunks, other=0)
        tl.store(COUNTS + chunk, tl.cumsum(found, 0) - found + total, mask=chunk < chunks)
        total += tl.sum(found, 0)
    tl.store(TOTALS + expert, total)


@triton.jit
def place(
    POSITION, ROW_PAIR, ROW_TOKEN, TILE_EXPERT, OFFSETS, INDICES, COUNTS, TOTALS, pairs, experts, chunks, tiles, top_k,
    index_words, tile_rows, CHUNK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """POSITION[pairs]: a pair's row. ROW_PAIR[tiles * tile_rows], ROW_TOKEN: a row's pair and token.
    TILE_EXPERT[tiles + 1]: a tile's expert, and how many tiles are used. OFFSETS[experts + 1]: the first row of each
    expert.

    The first programs place a chunk of pairs each, the next write a tile's expert and mark its padding, the last one
    writes the offsets.
    """
    program = tl.program_id(0)
    if program < chunks:
        place_chunk(
            POSITION, ROW_PAIR, ROW_TOKEN, INDICES, COUNTS, TOTALS, program, pairs, experts, chunks, top_k, index_words,
            tile_rows, CHUNK, EXPERTS,
        )  # fmt: skip
    elif program < chunks + tiles:
        mark_tile(ROW_PAIR, ROW_TOKEN, TILE_EXPERT, TOTALS, program - chunks, experts, tile_rows, EXPERTS)
    else:
        write_offsets(TILE_EXPERT, OFFSETS, TOTALS, experts, tiles, tile_rows, EXPERTS)


@triton.jit
def place_chunk(
    POSITION, ROW_PAIR, ROW_TOKEN, INDICES, COUNTS, TOTALS, chunk, pairs, experts, chunks, top_k, index_words,
    tile_rows, CHUNK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, CHUNK)
    pair = chunk * CHUNK + lane
    own = experts_of(INDICES, pair, pair < pairs, index_words, experts)
    known = own >= 0
    # How many of the chunk's pairs before this one have the same expert.
    position = tl.zeros([CHUNK], tl.int32)
    for first in range(0, CHUNK, EXPERTS):
        other_lane = first + tl.arange(0, EXPERTS)
        other = chunk * CHUNK + other_lane
        theirs = experts_of(INDICES, other, other < pairs, index_words, experts)
        before = (other_lane[None, :] < lane[:, None]) & (theirs[None, :] == own[:, None])
        position += tl.sum(before.to(tl.int32), 1)
    position += tl.load(COUNTS + own.to(tl.int64) * chunks + chunk, mask=known, other=0)
    for first in range(0, experts, EXPERTS):
        expert = first + tl.arange(0, EXPERTS)
        rows = padded_rows(TOTALS, expert, experts, tile_rows)
        position += tl.sum(tl.where(expert[None, :] < own[:, None], rows[None, :], 0), 1)
    tl.store(POSITION + pair, tl.where(known, position, -1), mask=pair < pairs)
    tl.store(ROW_PAIR + position, pair, mask=known)
    tl.store(ROW_TOKEN + position, pair // top_k, mask=known)


@triton.jit
def mark_tile(ROW_PAIR, ROW_TOKEN, TILE_EXPERT, TOTALS, tile, experts, tile_rows, EXPERTS: tl.constexpr):
    first_row = tile * tile_rows
    own = 0  # experts that end before the tile
    start = 0  # the first row of the tile's expert
    offset = 0
    for first in range(0, experts, EXPERTS):
        expert = first + tl.arange(0, EXPERTS)
        rows = padded_rows(TOTALS, expert, experts, tile_rows)
        ends = offset + tl.cumsum(rows, 0)
        past = (ends <= first_row) & (expert < experts)
        own += tl.sum(past.to(tl.int32), 0)
        start += tl.sum(tl.where(past, rows, 0), 0)
        offset += tl.sum(rows, 0)
    used = own < experts
    tl.store(TILE_EXPERT + tile, tl.where(used, own, -1))
    total = tl.load(TOTALS + own, mask=used, other=0)
    for first in range(0, tile_rows, 16):
        row = first_row + first + tl.arange(0, 16)
        tl.store(ROW_PAIR + row, -1, mask=used & (row - start >= total))
        tl.store(ROW_TOKEN + row, -1, mask=used & (row - start >= total))


@triton.jit
def write_offsets(TILE_EXPERT, OFFSETS, TOTALS, experts, tiles, tile_rows, EXPERTS: tl.constexpr):
    offset = 0
    for first in range(0, experts, EXPERTS):
        expert = first + tl.arange(0, EXPERTS)
        rows = padded_rows(TOTALS, expert, experts, tile_rows)
        tl.store(OFFSETS + expert, offset + tl.cumsum(rows, 0) - rows, mask=expert < experts)
        offset += tl.sum(rows, 0)
    tl.store(OFFSETS + experts, offset)
    tl.store(TILE_EXPERT + tiles, offset // tile_rows)


@triton.jit
def gather(
    OUT, X, ROW_TOKEN, TILE_EXPERT, stride, n_words, blocks, tiles, tile_rows, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """OUT[tiles * tile_rows, n_words]: each row's token of X, zeros in the padding; both in 32-bit words. ROWS rows and
    BLOCK words a program; rows of tiles that are not used are left as they are."""
    program = tl.program_id(0)
    row = program // blocks * ROWS + tl.arange(0, ROWS)
    word = program % blocks * BLOCK + tl.arange(0, BLOCK)
    used = row < tl.load(TILE_EXPERT + tiles) * tile_rows
    token = tl.load(ROW_TOKEN + row, mask=used, other=-1)
    inside = (word < n_words)[None, :]
    at = X + token.to(tl.int64)[:, None] * stride + word[None, :]
    x = tl.load(at, mask=(token >= 0)[:, None] & inside, other=0)
    tl.store(OUT + row.to(tl.int64)[:, None] * n_words + word[None, :], x, mask=used[:, None] & inside)
