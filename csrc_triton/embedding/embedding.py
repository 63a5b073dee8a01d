"""Embedding: rows of a table by index, and the table's gradient, the same bits at every run.

Forward: an index outside the table reads nothing; its row of the result is NaN.

Backward: a segmented sum. The host has sorted the indices (``KEYS``, int32, and ``ORDER``, where each was); a segment
is a run of equal ones. The sorted order is cut into chunks of CHUNK wherever segments begin: a token that occurs ten
thousand times is no more work for a CTA than ten thousand that occur once. ``backward`` reduces the chunks. A segment
that lies in one chunk is stored; one that began before the chunk, or goes on after it, leaves a partial sum, and
``combine`` adds these up in order. More CTAs of the first launch store zeros in the rows of the table that get no
gradient: a table zeroed before would be written twice in part.
"""

import triton
import triton.language as tl

DECLARATION = {
    "op": "embedding",
    "kernels": {
        "embedding_forward": {
            "arguments": {
                "Y": "*dtype",
                "INDICES": "*i32",
                "TABLE": "*dtype",
                "y_stride": "i64",
                "table_stride": "i64",
                "tokens": "i64",
                "n_cols": "i32",
                "steps": "i32",
                "vocabulary": "i32",
                "index_words": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["Y", "TABLE", "y_stride", "table_stride", "n_cols"],
            "forms": {"tile": {"function": "forward", "constants": ["ROWS", "BLOCK"]}},
        },
        "embedding_backward": {
            "arguments": {
                "DTABLE": "*dtype",
                "PARTIALS": "*fp32",
                "DY": "*dtype",
                "KEYS": "*i32",
                "ORDER": "*i64",
                "dy_stride": "i64",
                "tokens": "i64",
                "n_cols": "i32",
                "blocks": "i32",
                "vocabulary": "i32",
                "padding": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["DTABLE", "PARTIALS", "DY", "dy_stride", "n_cols"],
            "forms": {
                "chunk": {
                    "function": "backward",
                    "constants": ["CHUNK", "ROWS", "BLOCK", "STAGES"],
                    "staged": ["DY"],
                }
            },
        },
        "embedding_combine": {
            "arguments": {
                "DTABLE": "*dtype",
                "PARTIALS": "*fp32",
                "KEYS": "*i32",
                "chunk": "i64",
                "chunks": "i64",
                "n_cols": "i32",
                "blocks": "i32",
                "vocabulary": "i32",
                "padding": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["DTABLE", "PARTIALS", "n_cols"],
            "forms": {"tile": {"function": "combine", "constants": ["ROWS", "BLOCK"]}},
        },
    },
}


@triton.jit
def forward(
    Y, INDICES, TABLE, y_stride, table_stride, tokens, n_cols, steps, vocabulary, index_words,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS tokens, BLOCK columns a program. The first ``steps`` programs have all tokens' first columns, and so on: a
    row of the table that occurs again is in the second-level cache still. Indices are one 32-bit word or two, the low
    one first."""
    program = tl.program_id(0)
    rows = (program % steps).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = program // steps * BLOCK + tl.arange(0, BLOCK)
    in_rows = rows < tokens
    in_row = (cols < n_cols)[None, :]
    index = tl.load(INDICES + rows * index_words, mask=in_rows, other=0)
    high = tl.load(INDICES + rows * index_words + 1, mask=in_rows & (index_words == 2), other=0)
    known = in_rows & (high == 0) & (index >= 0) & (index < vocabulary)
    x = tl.load(
        TABLE + index.to(tl.int64)[:, None] * table_stride + cols[None, :],
        mask=known[:, None] & in_row,
        other=float("nan"),
    )
    # Past the caches, which belong to the table.
    to = Y + rows[:, None] * y_stride + cols[None, :]
    tl.store(to, x, mask=in_rows[:, None] & in_row, cache_modifier=".cs")


@triton.jit
def backward(
    DTABLE, PARTIALS, DY, KEYS, ORDER, dy_stride, tokens, n_cols, blocks, vocabulary, padding,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The first CTAs reduce CHUNK sorted tokens, BLOCK columns each; the others zero ROWS rows of the table."""
    program = tl.program_id(0).to(tl.int64)
    reducing = tl.cdiv(tokens, CHUNK) * blocks
    if program < reducing:
        reduce_chunk(
            DTABLE, PARTIALS, DY, KEYS, ORDER, dy_stride, tokens, n_cols, blocks, vocabulary, padding,
            CHUNK, BLOCK, STAGES,
        )  # fmt: skip
    else:
        zero_rows(DTABLE, KEYS, (program - reducing) * ROWS, tokens, n_cols, vocabulary, padding, ROWS, BLOCK)


@triton.jit
def reduce_chunk(
    DTABLE, PARTIALS, DY, KEYS, ORDER, dy_stride, tokens, n_cols, blocks, vocabulary, padding,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """PARTIALS[chunks, 2, n_cols]: of the segment from before, of the one that goes on. A chunk inside one segment has
    the former alone."""
    program = tl.program_id(0)
    chunk = (program // blocks).to(tl.int64)
    cols = program % blocks * BLOCK + tl.arange(0, BLOCK)
    in_row = cols < n_cols
    first = chunk * CHUNK
    last = tl.minimum(first + CHUNK, tokens) - 1
    before = tl.load(KEYS + first - 1, mask=first > 0, other=0)
    began = (first == 0) | (before != tl.load(KEYS + first))  # whether this segment began in this chunk
    at = PARTIALS + chunk * 2 * n_cols
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.range(first, last + 1, num_stages=STAGES):
        key = tl.load(KEYS + i)
        following = tl.load(KEYS + i + 1, mask=i + 1 < tokens, other=0)
        token = tl.load(ORDER + i)
        total += tl.load(DY + token * dy_stride + cols, mask=in_row, other=0.0).to(tl.float32)
        ends = (i + 1 == tokens) | (following != key)
        wanted = (key >= 0) & (key < vocabulary) & (key != padding)
        tl.store(
            DTABLE + key.to(tl.int64) * n_cols + cols,
            total.to(DTABLE.dtype.element_ty),
            mask=in_row & (ends & began & wanted),
        )
        leaves = (ends | (i == last)) & (began == 0)
        tl.store(at + cols, total, mask=in_row & leaves)
        tl.store(at + n_cols + cols, total, mask=in_row & ((ends == 0) & (i == last) & began))
        began = began | ends
        total = tl.where(ends, 0.0, total)


@triton.jit
def zero_rows(
    DTABLE, KEYS, first, tokens, n_cols, vocabulary, padding, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Store zeros in those of the ROWS rows from ``first`` on that are no token's, or are the padding's."""
    rows = first + tl.arange(0, ROWS)
    # A binary search for all rows at once: the last key that is smaller, or the first key, stands at ``at``.
    at = tl.zeros([ROWS], tl.int64)
    length = tokens
    while length > 1:
        half = length >> 1
        at += tl.where(tl.load(KEYS + at + (half - 1)) < rows, half, 0)
        length -= half
    found = tl.load(KEYS + at) == rows
    found |= tl.load(KEYS + at + 1, mask=at + 1 < tokens, other=-1) == rows
    unwritten = (rows < vocabulary) & ((found == 0) | (rows == padding))
    zeros = tl.zeros([ROWS, BLOCK], DTABLE.dtype.element_ty)
    for column in range(0, n_cols, BLOCK):
        cols = column + tl.arange(0, BLOCK)
        to = DTABLE + rows[:, None] * n_cols + cols[None, :]
        tl.store(to, zeros, mask=unwritten[:, None] & (cols < n_cols)[None, :])


@triton.jit
def combine(
    DTABLE, PARTIALS, KEYS, chunk, chunks, n_cols, blocks, vocabulary, padding,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of the segment that begins in one chunk and goes on in the next, if there is one. ROWS partial sums
    are loaded at a time."""
    program = tl.program_id(0)
    own = (program // blocks).to(tl.int64)
    cols = program % blocks * BLOCK + tl.arange(0, BLOCK)
    in_row = cols < n_cols
    key = tl.load(KEYS + (own + 1) * chunk - 1)
    crosses = tl.load(KEYS + (own + 1) * chunk) == key
    before = tl.load(KEYS + own * chunk - 1, mask=own > 0, other=0)
    began = (own == 0) | (before != key)
    wanted = (key >= 0) & (key < vocabulary) & (key != padding)
    if crosses & began & wanted:
        total = tl.load(PARTIALS + (own * 2 + 1) * n_cols + cols, mask=in_row, other=0.0)
        parts = tl.zeros([ROWS, BLOCK], tl.float32)
        first = own + 1
        more = True
        while more:
            part = first + tl.arange(0, ROWS)
            # Sorted: the chunks that begin with the key follow each other.
            belongs = tl.load(KEYS + part * chunk, mask=part < chunks, other=0) == key
            belongs &= part < chunks
            parts += tl.load(
                PARTIALS + part[:, None] * 2 * n_cols + cols[None, :],
                mask=belongs[:, None] & in_row[None, :],
                other=0.0,
            )
            first += ROWS
            more = first < chunks
            if more:
                more = tl.load(KEYS + first * chunk) == key
        total += tl.sum(parts, 0)
        tl.store(DTABLE + key.to(tl.int64) * n_cols + cols, total.to(DTABLE.dtype.element_ty), mask=in_row)
