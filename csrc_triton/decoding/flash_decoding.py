"""Decoding: a few query tokens against a long cache of keys and values, which many programs share.

A tile is BLOCK_M rows of one head of keys: all query heads that share it (RATIO), token after token. Programs share the
keys as ``decoding_work`` says. Where a program has all keys of a sequence, it writes the results; where not, it leaves
the weighted values, divided by their sum, and the base-2 logarithm of that sum (PARTS, PART_SUMS), and ``combine``
weighs a row's pieces. The host says from shapes alone how many programs there are; which keys are whose follows on the
device from the lengths. The ``wide`` kernels are for more rows than a tile of the others has: the profile gives them
taller tiles. ``split_stream`` is for a contiguous cache on GPUs with TMA and wgmma.

The cache is contiguous (a "page" is a whole sequence) or paged: TABLE[batch, i] is where the keys from i * page size on
lie. A page that is not there is not read: rows that would see it are NaN, and its number goes to FLAG; likewise a
length that the cache does not have.

Dao et al., Flash-Decoding (2023); Kwon et al., PagedAttention (2023).
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from csrc_triton.attention.pipeline import Pipeline, Sizes, pipeline_of
from csrc_triton.common.overlap import let_next_start, once_previous_ended
from csrc_triton.decoding.decoding_keys import (
    NOTHING,
    columns_of,
    finish,
    keys_of,
    page_of,
    row_of,
    sink_of,
    token_of,
)
from csrc_triton.decoding.decoding_once import SHARE, share
from csrc_triton.decoding.decoding_stream import attend, stream
from csrc_triton.decoding.decoding_work import MANY, over, part_of, piece_of, sharers_of

DECLARATION = {
    "op": "flash_decoding",
    "kernels": {
        "flash_decoding_split": {
            "arguments": {
                "OUT": "*dtype", "LSE": "*fp32", "PARTS": "*fp32", "PART_SUMS": "*fp32", "FLAG": "*i64", "Q": "*dtype",
                "K": "*dtype", "V": "*dtype", "TABLE": "*i32", "LENGTHS": "*i32", "SINKS": "*fp32",
                "q_batch": "i64", "q_token": "i32", "q_head": "i32", "k_page": "i64", "k_row": "i32", "k_head": "i32",
                "table_row": "i64", "scale": "fp32", "cap": "fp32", "kv_heads": "i32", "ratio": "i32",
                "by_ratio": "i32", "tokens": "i32", "dim": "i32", "batch": "i32", "capacity": "i32", "pages": "i32",
                "page_bits": "i32", "tiles": "i32", "each": "i32", "part_rows": "i32", "left": "i32", "right": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16"]},
            "host": ["busy"],
            "aligned": [
                "OUT", "PARTS", "Q", "K", "V", "q_batch", "q_token", "q_head", "k_page", "k_row", "k_head", "dim",
            ],
            "forms": {
                "tile": {
                    "function": "split",
                    "constants": ["BLOCK_M", "BLOCK_N", "D", "UNIT", "STAGES", "START", "PAGED", "PDL"],
                    "defaults": {"UNIT": 16, "PAGED": 0, "PDL": 0},
                }
            },
        },
        "flash_decoding_split_paged": {
            "like": "flash_decoding_split",
            "forms": {
                "tile": {
                    "function": "split",
                    "constants": ["BLOCK_M", "BLOCK_N", "D", "UNIT", "STAGES", "START", "PAGED", "PDL"],
                    "defaults": {"UNIT": 16, "PAGED": 1, "PDL": 0},
                }
            },
        },
        "flash_decoding_wide": {"like": "flash_decoding_split"},
        "flash_decoding_wide_paged": {"like": "flash_decoding_split_paged"},
        "flash_decoding_stream": {
            "language": "gluon",
            "optional": True,
            "always_aligned": True,
            "matrix": True,
            "arguments": {
                "K": "dtype[1, 1, BLOCK_N, BOX]", "V": "dtype[1, 1, BLOCK_N, BOX]",
                "OUT": "*dtype", "LSE": "*fp32", "PARTS": "*fp32", "PART_SUMS": "*fp32", "FLAG": "*i64", "Q": "*dtype",
                "LENGTHS": "*i32", "SINKS": "*fp32", "q_batch": "i64", "q_token": "i32", "q_head": "i32",
                "scale": "fp32", "cap": "fp32", "kv_heads": "i32", "ratio": "i32", "by_ratio": "i32", "tokens": "i32",
                "dim": "i32", "batch": "i32", "capacity": "i32", "tiles": "i32", "groups": "i32", "part_rows": "i32",
                "left": "i32", "right": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16"]},
            "host": ["least_blocks"],
            "aligned": ["OUT", "PARTS", "Q", "q_batch", "q_token", "q_head", "dim"],
            "forms": {
                "stream": {
                    "function": "split_stream",
                    "constants": ["BLOCK_N", "D1", "D2", "BOX", "STAGES", "PDL"],
                    "defaults": {"PDL": 0},
                }
            },
        },
        "flash_decoding_once": {
            "language": "gluon",
            "optional": True,
            "always_aligned": True,
            "matrix": True,
            "arguments": {"K": "dtype[1, 1, BLOCK_N, 64]", "V": "dtype[1, 1, BLOCK_N, 64]", **SHARE},
            "axes": {"dtype": ["bf16", "fp16"]},
            "aligned": ["OUT", "PARTS", "Q", "q_batch", "q_token", "q_head", "dim"],
            "forms": {
                "once": {
                    "function": "once",
                    "constants": ["BLOCK_M", "BLOCK_N", "D", "STAGES", "SHARES", "START", "PAGED"],
                    "defaults": {"PAGED": 0},
                }
            },
        },
        "flash_decoding_once_paged": {
            "like": "flash_decoding_once",
            "arguments": {"K": "dtype[1, 1, 16, 64]", "V": "dtype[1, 1, 16, 64]", **SHARE},
            "forms": {
                "once": {
                    "function": "once",
                    "constants": ["BLOCK_M", "BLOCK_N", "D", "STAGES", "SHARES", "START", "PAGED"],
                    "defaults": {"PAGED": 1},
                }
            },
        },
        "flash_decoding_combine": {
            "arguments": {
                "OUT": "*dtype", "LSE": "*fp32", "PARTS": "*fp32", "PART_SUMS": "*fp32", "LENGTHS": "*i32",
                "SINKS": "*fp32", "kv_heads": "i32", "ratio": "i32", "tokens": "i32", "dim": "i32", "batch": "i32",
                "capacity": "i32", "tiles": "i32", "each": "i32", "groups": "i32", "part_rows": "i32", "block_m": "i32",
                "block_n": "i32", "left": "i32", "right": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16"]},
            "aligned": ["OUT", "PARTS", "dim"],
            "forms": {
                "tile": {
                    "function": "combine",
                    "constants": ["SHARES", "D", "EVENLY", "PDL"],
                    "defaults": {"EVENLY": 0, "PDL": 0},
                    "pdl": "PDL",
                }
            },
        },
    },
}  # fmt: skip


@triton.jit
def split(
    OUT, LSE, PARTS, PART_SUMS, FLAG, Q, K, V, TABLE, LENGTHS, SINKS, q_batch, q_token, q_head,
    k_page, k_row, k_head, table_row, scale, cap, kv_heads, ratio, by_ratio, tokens, dim,
    batch, capacity, pages, page_bits, tiles, each, part_rows, left, right,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, UNIT: tl.constexpr, STAGES: tl.constexpr,
    START: tl.constexpr, PAGED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile's share of a sequence. Programs that read the same keys follow each other.

    scale is times log2(e); with a soft cap, cap is scale / soft cap, and scale the soft cap times log2(e). A row sees
    ``left`` keys before its own and ``right`` from its own on. A page is 2^page_bits keys. by_ratio: see ``token_of``.
    START is for the host alone: the blocks that could be read in the time that a program takes to start and end.
    """
    if PDL:  # noqa: SIM102 (the outer is the compiler's)
        # At once, and by programs without work too: ``combine`` is let in when each program has said so or ended, so
        # no program of ours is left to start, and none waits for the room that it takes. Without it, the next kernel is
        # another's: that is not let in.
        if part_rows > 0:
            let_next_start()
    program = tl.program_id(0)
    width = tiles * kv_heads
    group = over(program, width)
    lane = program - group * width
    head = over(lane, tiles)
    tile = lane - head * tiles
    sequence, begin, blocks = part_of(group, each, LENGTHS, batch, tokens, capacity, left, right, BLOCK_N)
    if blocks > 0:
        b = sequence.to(tl.int64)
        # what is left of the last tile does its last row again: the same values to the same place
        rows = tl.minimum(tl.arange(0, BLOCK_M), tokens * ratio - 1 - tile * BLOCK_M)
        first_token = over(tile * BLOCK_M, ratio)
        into = tile * BLOCK_M - first_token * ratio
        last_token = first_token + token_of(
            into + tl.minimum(BLOCK_M, tokens * ratio - tile * BLOCK_M) - 1, by_ratio
        )
        length, wrong, given, _, whole, start, stop, first, last = piece_of(
            LENGTHS, b, begin, blocks, first_token, last_token, tokens, capacity, left, right, BLOCK_N
        )
        base = head.to(tl.int64) * k_head
        if not PAGED:
            base += b * k_page
        K += base
        V += base
        TABLE += b * table_row
        unknown = tl.zeros([BLOCK_N], tl.int32)
        page = unknown
        if PAGED:
            page = page_of(TABLE, keys_of(first, start, stop, BLOCK_N), page_bits)
        flagged = FLAG.to(tl.int64) != 0
        tl.store(FLAG, given.to(tl.int64), mask=wrong & flagged)
        token, query_head = row_of(rows, first_token, into, head, ratio, by_ratio)
        cols = tl.arange(0, D)
        in_cols = cols < dim
        near = columns_of(dim, D, UNIT)
        of_query = Q + b * q_batch + token.to(tl.int64) * q_token + query_head.to(tl.int64) * q_head
        q = tl.load(of_query[:, None] + cols[None, :], mask=in_cols[None, :], other=0.0)
        own = length - tokens + token
        low = own - left
        high = tl.minimum(own + right, length)
        seen = tl.maximum(high - low, 0).to(tl.uint32, bitcast=True)
        inner_low = length - tokens + last_token - left
        inner_high = tl.minimum(length - tokens + first_token + right, length)
        acc = tl.zeros([BLOCK_M, D], tl.float32)
        m = tl.full([BLOCK_M], NOTHING, tl.float32)
        # where the warps share a row's keys, sums of columns are added up once, at the end
        BY_COLUMN: tl.constexpr = BLOCK_M == 16
        sums = tl.zeros([BLOCK_M, BLOCK_N] if BY_COLUMN else [BLOCK_M], tl.float32)
        for j in tl.range(first, last, num_stages=STAGES):
            line = keys_of(j, start, stop, BLOCK_N)
            if PAGED:
                there = (page >= 0) & (page < pages)
                unknown = tl.where(there, unknown, page)
                here = tl.where(there, page, 0).to(tl.int64)
                at = here * k_page + (line & ((1 << page_bits) - 1)).to(tl.int64) * k_row
                # a block ahead: else the pipeline would give half of its stages to the table
                page = page_of(TABLE, keys_of(j + 1, start, stop, BLOCK_N), page_bits)
            else:
                at = line.to(tl.int64) * k_row
            k = tl.load(K + at[:, None] + near[None, :])
            s = tl.dot(q, tl.trans(k))
            if cap != 0.0:  # tanh(x) = 1 - 2 / (1 + exp(2 x))
                s = 1.0 - 2.0 / (1.0 + tl.exp2(s * (cap * 2.8853900817779268)))
            keys = j * BLOCK_N + tl.arange(0, BLOCK_N)
            s = s * scale
            if (j * BLOCK_N < inner_low) | (j * BLOCK_N + BLOCK_N > inner_high):
                behind = (keys[None, :] - low[:, None]).to(
                    tl.uint32, bitcast=True
                )  # one comparison for both ends
                s = tl.where(behind < seen[:, None], s, float("-inf"))
            new_m = tl.maximum(m, tl.max(s, 1))
            p = tl.exp2(s - new_m[:, None])
            by = tl.exp2(m - new_m)
            m = new_m
            if BY_COLUMN:
                sums = sums * by[:, None] + p
            else:
                sums = sums * by + tl.sum(p, 1)
            v = tl.load(V + at[:, None] + near[None, :])
            acc = tl.dot(p.to(q.dtype), v, acc * by[:, None])
        if PAGED:
            flag = FLAG + tl.zeros([BLOCK_N], tl.int32)
            tl.store(flag, unknown.to(tl.int64), mask=(unknown != 0) & flagged)
            wrong = wrong | (tl.max((unknown != 0).to(tl.int32), 0) > 0)
        total = tl.where(wrong, float("nan"), tl.sum(sums, 1) if BY_COLUMN else sums)
        keep = in_cols[None, :]
        if whole:
            lse, by = finish(m, total, sink_of(SINKS, query_head))
            heads = kv_heads * ratio
            to = (b * tokens + token) * heads + query_head
            tl.store(
                OUT + to[:, None] * dim + cols[None, :],
                (acc * by[:, None]).to(OUT.dtype.element_ty),
                mask=keep,
            )
            tl.store(LSE + (b * heads + query_head) * tokens + token, lse)
        else:
            by = tl.where(total == 0.0, 0.0, 1.0 / total)
            to = program.to(tl.int64) * part_rows + rows
            tl.store(PARTS + to[:, None] * dim + cols[None, :], acc * by[:, None], mask=keep)
            tl.store(PART_SUMS + to, m + tl.log2(total))


@gluon.jit
def split_stream(
    K, V, OUT, LSE, PARTS, PART_SUMS, FLAG, Q, LENGTHS, SINKS, q_batch, q_token, q_head,
    scale, cap, kv_heads, ratio, by_ratio, tokens, dim, batch, capacity, tiles, groups, part_rows, left, right,
    BLOCK_N: gl.constexpr, D1: gl.constexpr, D2: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """All sequences evenly, by ``decoding_stream``: tiles are of 64 rows. K and V are tensor maps over
    (batch, head, key, column) with boxes of BLOCK_N keys and BOX columns."""
    if PDL:  # noqa: SIM102 (as in split)
        if part_rows > 0:
            let_next_start()
    z = Sizes(BLOCK_N, D1, D2, BOX, STAGES, 1, 0, 0)
    program = gl.program_id(0)
    width = tiles * kv_heads
    group = over(program, width)
    lane = program - group * width
    head = over(lane, tiles)
    tile = lane - head * tiles
    first_token = over(tile * 64, ratio)
    into = tile * 64 - first_token * ratio
    count = gl.minimum(tokens * ratio - tile * 64, 64)
    last_token = first_token + token_of(into + count - 1, by_ratio)
    k = pipeline_of(K, STAGES, 1, z)
    v = pipeline_of(V, STAGES, 1, z)
    q_first = gl.allocate_shared_memory(K.dtype, [1, 1, 1, 64, D1], K.layout)
    q_second = q_first
    if D2 > 0:
        q_second = gl.allocate_shared_memory(K.dtype, [1, 1, 1, 64, D2], K.layout)
    q = Pipeline(q_first, q_second, k.full, k.empty)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                attend,
                (
                    z, q, k, v, OUT, LSE, PARTS, PART_SUMS, FLAG, Q, SINKS, q_batch, q_token, q_head, scale, cap,
                    kv_heads, ratio, by_ratio, dim, program, part_rows, count, into,
                    head, group, groups, LENGTHS, first_token, last_token, batch, tokens, capacity, left, right,
                ),
            ),
            (
                stream,
                (
                    z, K, V, k, v,
                    head, group, groups, LENGTHS, first_token, last_token, batch, tokens, capacity, left, right,
                ),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip


@gluon.jit
def once(
    K, V, OUT, LSE, PARTS, PART_SUMS, FLAG, COUNTS, Q, TABLE, LENGTHS, SINKS, q_batch, q_token, q_head,
    table_row, scale, cap, kv_heads, ratio, by_ratio, tokens, dim, capacity, pages, page_bits, each, by_each,
    left, right,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SHARES: gl.constexpr,
    START: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """Sharing and combining in one launch, by ``decoding_once``; the grid is (heads of keys, each, sequences)."""
    share(
        K, V, OUT, LSE, PARTS, PART_SUMS, FLAG, COUNTS, Q, TABLE, LENGTHS, SINKS, q_batch, q_token, q_head,
        table_row, scale, cap, kv_heads, ratio, by_ratio, tokens, dim, capacity, pages, page_bits, each, by_each,
        left, right, BLOCK_M, BLOCK_N, D, STAGES, SHARES, PAGED,
    )  # fmt: skip


@triton.jit
def combine(
    OUT, LSE, PARTS, PART_SUMS, LENGTHS, SINKS, kv_heads, ratio, tokens, dim, batch, capacity, tiles, each,
    groups, part_rows, block_m, block_n, left, right,
    SHARES: tl.constexpr, D: tl.constexpr, EVENLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row of those that have several pieces, SHARES of them at a time. block_m, block_n: those of ``split``."""
    at = tl.program_id(0)
    both = over(at, tokens * ratio)
    row = at - both * (tokens * ratio)
    b = over(both, kv_heads)
    kv_head = both - b * kv_heads
    many = tl.arange(0, MANY)
    n = block_n.to(tl.uint32)
    group, used = sharers_of(many, b, each, groups, LENGTHS, batch, tokens, capacity, left, right, n, EVENLY)
    if PDL:
        # Until ``split`` has ended and all that it wrote is to be seen: PARTS may be read. A program with nothing to
        # combine waits, too: what follows in the stream waits for this kernel alone, which must not end before
        # ``split``. LENGTHS may be read before: ``split`` does not write it, and began when all before it had ended.
        used = once_previous_ended(used)
    if used > 1:
        cols = tl.arange(0, D)
        in_cols = cols < dim
        acc = tl.zeros([D], tl.float32)
        tile = over(row, block_m)
        width = tiles * kv_heads
        program = group * width + kv_head * tiles + tile
        lines = part_rows  # of a program, in one slot or two
        if EVENLY:
            lines = part_rows * tl.where(each > 0, 1, 2)
        first_line = program.to(tl.int64) * lines + (row - tile * block_m)
        step = width.to(tl.int64) * lines
        m = NOTHING
        total = 0.0
        for first in range(0, used, SHARES):
            part = first + tl.arange(0, SHARES)
            there = part < used
            to = first_line + part * step
            if EVENLY:
                to += tl.where(part == 0, lines - part_rows, 0)
            lse = tl.load(PART_SUMS + to, mask=there, other=float("-inf"))
            values = tl.load(
                PARTS + to[:, None] * dim + cols[None, :], mask=there[:, None] & in_cols[None, :], other=0.0
            )
            new_m = tl.maximum(m, tl.max(lse, 0))
            weight = tl.exp2(lse - new_m)
            by = tl.exp2(m - new_m)
            m = new_m
            total = total * by + tl.sum(weight, 0)
            acc = acc * by + tl.sum(values * weight[:, None], 0)
        token = over(row, ratio)
        head = kv_head * ratio + row - token * ratio
        heads = kv_heads * ratio
        lse, by = finish(m, total, sink_of(SINKS, head))
        out = OUT + ((b.to(tl.int64) * tokens + token) * heads + head) * dim + cols
        tl.store(out, (acc * by).to(OUT.dtype.element_ty), mask=in_cols)
        tl.store(LSE + (b.to(tl.int64) * heads + head) * tokens + token, lse)
