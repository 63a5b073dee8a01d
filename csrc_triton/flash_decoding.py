"""Decoding: a few query tokens against a long cache of keys and values, which many programs share.

A tile is BLOCK_M rows of one head of keys: all query heads that share it (RATIO), token after token. ``split`` walks
one share of a tile's keys and leaves the weighted values, divided by their sum, and the base-2 logarithm of that sum
(PARTS, PART_LSE); ``combine`` weighs a row's shares. Where a tile's keys are one share, ``split`` writes the results
itself. How many shares there are at most is the host's to say, from shapes alone; how many a sequence has, and how long
they are, follows on the device from its length: programs without a share return at once. The ``wide`` kernels are for
more rows than a tile of the others has: the profile gives them taller tiles.

The cache is contiguous (a "page" is a whole sequence) or paged: TABLE[batch, i] is where the keys from i * page size on
lie. A page that is not there is not read: rows that would see it are NaN, and its number goes to FLAG; likewise a
length that the cache does not have.

Dao et al., Flash-Decoding (2023); Kwon et al., PagedAttention (2023).
"""

import triton
import triton.language as tl

from csrc_triton.decoding_keys import NOTHING, columns_of, finish, keys_of, length_of, page_of, share, sink_of
from csrc_triton.overlap import let_next_start, once_previous_ended

DECLARATION = {
    "op": "flash_decoding",
    "kernels": {
        "flash_decoding_split": {
            "arguments": {
                "OUT": "*dtype", "LSE": "*fp32", "PARTS": "*fp32", "FLAG": "*i64", "Q": "*dtype",
                "K": "*dtype", "V": "*dtype", "TABLE": "*i32", "LENGTHS": "*i32", "SINKS": "*fp32",
                "q_batch": "i64", "q_token": "i32", "q_head": "i32", "k_page": "i64", "k_row": "i32", "k_head": "i32",
                "table_row": "i64", "scale": "fp32", "cap": "fp32", "kv_heads": "i32", "ratio": "i32",
                "tokens": "i32", "dim": "i32", "capacity": "i32", "pages": "i32", "page_bits": "i32",
                "splits": "i32", "left": "i32", "right": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16"]},
            "aligned": [
                "OUT", "PARTS", "Q", "K", "V", "q_batch", "q_token", "q_head", "k_page", "k_row", "k_head", "dim",
            ],
            "forms": {
                "tile": {
                    "function": "split",
                    "constants": ["BLOCK_M", "BLOCK_N", "D", "UNIT", "STAGES", "START", "PAGED", "OVERLAP"],
                    "defaults": {"UNIT": 16, "PAGED": 0, "OVERLAP": 0},
                }
            },
        },
        "flash_decoding_split_paged": {
            "like": "flash_decoding_split",
            "forms": {
                "tile": {
                    "function": "split",
                    "constants": ["BLOCK_M", "BLOCK_N", "D", "UNIT", "STAGES", "START", "PAGED", "OVERLAP"],
                    "defaults": {"UNIT": 16, "PAGED": 1, "OVERLAP": 0},
                }
            },
        },
        "flash_decoding_wide": {"like": "flash_decoding_split"},
        "flash_decoding_wide_paged": {"like": "flash_decoding_split_paged"},
        "flash_decoding_combine": {
            "arguments": {
                "OUT": "*dtype", "LSE": "*fp32", "PARTS": "*fp32", "LENGTHS": "*i32",
                "SINKS": "*fp32", "kv_heads": "i32", "ratio": "i32", "tokens": "i32", "dim": "i32",
                "capacity": "i32", "splits": "i32", "block_m": "i32", "block_n": "i32", "left": "i32",
                "right": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16"]},
            "aligned": ["OUT", "PARTS", "dim"],
            "forms": {
                "tile": {
                    "function": "combine",
                    "constants": ["SHARES", "D", "OVERLAP"],
                    "defaults": {"OVERLAP": 0},
                    "follows": "OVERLAP",
                }
            },
        },
    },
}  # fmt: skip


@triton.jit
def split(
    OUT, LSE, PARTS, FLAG, Q, K, V, TABLE, LENGTHS, SINKS, q_batch, q_token, q_head,
    k_page, k_row, k_head, table_row, scale, cap, kv_heads, ratio, tokens, dim,
    capacity, pages, page_bits, splits, left, right,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, UNIT: tl.constexpr, STAGES: tl.constexpr,
    START: tl.constexpr, PAGED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One share of one tile. Programs that read the same keys follow each other, then those of the heads beside.

    scale is times log2(e); with a soft cap, cap is scale / soft cap, and scale the soft cap times log2(e). A row sees
    ``left`` keys before its own and ``right`` from its own on. A page is 2^page_bits keys. START is for the host
    alone: the blocks that could be read in the time that a program takes to start and end.
    """
    if OVERLAP:  # noqa: SIM102 (the outer is the compiler's)
        # At once, and by programs without a share too: ``combine`` is let in when each program has said so or ended, so
        # no program of ours is left to start, and none waits for the room that it takes. Without it, the next kernel is
        # another's: that is not let in.
        if splits > 1:
            let_next_start()
    program = tl.program_id(0)
    tiles = tl.cdiv(tokens * ratio, BLOCK_M)
    tile = program % tiles
    head = program // tiles % kv_heads
    part = program // (tiles * kv_heads) % splits
    batch = (program // (tiles * kv_heads) // splits).to(tl.int64)
    length, wrong, given = length_of(LENGTHS, batch, capacity)
    start, stop, each, used = share(length, tokens, ratio, tile, left, right, splits, BLOCK_M, BLOCK_N)
    if part < used:
        flagged = FLAG.to(tl.int64) != 0
        tl.store(FLAG, given.to(tl.int64), mask=wrong & flagged)
        # what is left of the last tile does its last row again: the same values to the same place
        rows = tl.minimum(tile * BLOCK_M + tl.arange(0, BLOCK_M), tokens * ratio - 1)
        token = rows // ratio
        query_head = head * ratio + rows % ratio
        cols = tl.arange(0, D)
        in_cols = cols < dim
        near = columns_of(dim, D, UNIT)
        of_query = Q + batch * q_batch + token.to(tl.int64) * q_token + query_head.to(tl.int64) * q_head
        q = tl.load(of_query[:, None] + cols[None, :], mask=in_cols[None, :], other=0.0)
        base = head.to(tl.int64) * k_head
        if not PAGED:
            base += batch * k_page
        K += base
        V += base
        TABLE += batch * table_row

        own = length - tokens + token
        low = own - left
        high = tl.minimum(own + right, length)
        seen = tl.maximum(high - low, 0).to(tl.uint32, bitcast=True)
        all_low, all_high = tl.max(low, 0), tl.min(high, 0)
        acc = tl.zeros([BLOCK_M, D], tl.float32)
        m = tl.full([BLOCK_M], NOTHING, tl.float32)
        # where the warps share a row's keys, sums of columns are added up once, at the end
        BY_COLUMN: tl.constexpr = BLOCK_M == 16
        sums = tl.zeros([BLOCK_M, BLOCK_N] if BY_COLUMN else [BLOCK_M], tl.float32)
        first = start // BLOCK_N + part * each
        last = tl.minimum(first + each, tl.cdiv(stop, BLOCK_N))
        unknown = tl.zeros([BLOCK_N], tl.int32)
        page = unknown
        if PAGED:
            page = page_of(TABLE, keys_of(first, start, stop, BLOCK_N), page_bits)
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
            if (j * BLOCK_N < all_low) | (j * BLOCK_N + BLOCK_N > all_high):
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
        if used == 1:
            lse, by = finish(m, total, sink_of(SINKS, query_head))
            heads = kv_heads * ratio
            to = (batch * tokens + token) * heads + query_head
            tl.store(
                OUT + to[:, None] * dim + cols[None, :],
                (acc * by[:, None]).to(OUT.dtype.element_ty),
                mask=keep,
            )
            tl.store(LSE + (batch * heads + query_head) * tokens + token, lse)
        else:
            by = tl.where(total == 0.0, 0.0, 1.0 / total)
            to = ((batch * kv_heads + head) * tokens * ratio + rows) * splits + part
            tl.store(PARTS + to[:, None] * dim + cols[None, :], acc * by[:, None], mask=keep)
            tl.store(
                PARTS + dim * (tl.num_programs(0) // tiles).to(tl.int64) * tokens * ratio + to,
                m + tl.log2(total),
            )


@triton.jit
def combine(
    OUT, LSE, PARTS, LENGTHS, SINKS, kv_heads, ratio, tokens, dim, capacity, splits, block_m, block_n, left,
    right,
    SHARES: tl.constexpr, D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row of those that have several shares, SHARES of them at a time. block_m, block_n: those of ``split``."""
    at = tl.program_id(0).to(tl.int64)
    row = (at % (tokens * ratio)).to(tl.int32)
    both = at // (tokens * ratio)
    batch = both // kv_heads
    length, _, _ = length_of(LENGTHS, batch, capacity)
    _, _, _, used = share(length, tokens, ratio, row // block_m, left, right, splits, block_m, block_n)
    if OVERLAP:
        # Until ``split`` has ended and all that it wrote is to be seen: PARTS may be read. A program with nothing to
        # combine waits, too: what follows in the stream waits for this kernel alone, which must not end before
        # ``split``. LENGTHS may be read before: ``split`` does not write it, and began when all before it had ended.
        used = once_previous_ended(used)
    if used > 1:
        cols = tl.arange(0, D)
        in_cols = cols < dim
        acc = tl.zeros([D], tl.float32)
        sums_at = PARTS + tl.num_programs(0).to(tl.int64) * splits * dim + at * splits
        m = NOTHING
        total = 0.0
        for first in range(0, used, SHARES):
            part = first + tl.arange(0, SHARES)
            there = part < used
            lse = tl.load(sums_at + part, mask=there, other=float("-inf"))
            values = tl.load(
                PARTS + (at * splits + part)[:, None] * dim + cols[None, :],
                mask=there[:, None] & in_cols[None, :],
                other=0.0,
            )
            new_m = tl.maximum(m, tl.max(lse, 0))
            weight = tl.exp2(lse - new_m)
            by = tl.exp2(m - new_m)
            m = new_m
            total = total * by + tl.sum(weight, 0)
            acc = acc * by + tl.sum(values * weight[:, None], 0)
        token = row // ratio
        head = (both % kv_heads).to(tl.int32) * ratio + row % ratio
        heads = kv_heads * ratio
        lse, by = finish(m, total, sink_of(SINKS, head))
        out = OUT + ((batch * tokens + token) * heads + head) * dim + cols
        tl.store(out, (acc * by).to(OUT.dtype.element_ty), mask=in_cols)
        tl.store(LSE + (batch * heads + head) * tokens + token, lse)
