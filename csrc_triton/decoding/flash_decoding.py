"""Decoding: a few query tokens against a long cache of keys and values, which many programs split (split KV).

``split_kv`` says which keys a program takes. A program that has all keys of a sequence writes the results; otherwise it
writes the weighted values, divided by their sum, and the base-2 logarithm of that sum (OUT_PARTIAL, LSE_PARTIAL), and
``combine`` combines a row's parts. The host chooses the number of programs from shapes alone; which keys each one takes
follows on the device from the lengths. Wide variants of ``split`` have taller tiles, for more rows than a tile of the
others has. ``split_kv_wgmma`` has the kernel for GPUs with TMA and wgmma.

The cache is contiguous (a "page" is a whole sequence) or paged: TABLE[batch, i] is the page of the keys from i * page
size on. A page that is not there is not read: rows that would see it are NaN, and its number goes to FLAG, as does a
length that the cache does not have.

Dao et al., Flash-Decoding (2023); Kwon et al., PagedAttention (2023).
"""

import triton
import triton.language as tl

from csrc_triton.attention.forward import p_exponent
from csrc_triton.attention.key_parts import with_parts
from csrc_triton.common.fp8 import product_dtype, queries_in, widened
from csrc_triton.common.pdl import launch_dependents, wait_for_previous
from csrc_triton.decoding.split_kv import (
    NO_SCORE,
    Sequences,
    blocks_in,
    columns_of,
    divide,
    finalise,
    keys_of,
    page_of,
    part_of,
    row_of,
    sink_of,
    split_range,
    token_of,
)
from csrc_triton.decoding.split_kv_wgmma import split_and_combine  # noqa: F401

# What the kernel of split_kv_wgmma takes behind the tensor maps of keys and values.
RESULTS = {
    "OUT": "*dtype", "LSE": "*fp32", "OUT_PARTIAL": "*fp32", "LSE_PARTIAL": "*fp32", "FLAG": "*i64",
}  # fmt: skip
QUERIES = {"q_batch": "i64", "q_token": "i32", "q_head": "i32"}
SIZES = {
    "scale": "fp32", "cap": "fp32", "kv_heads": "i32", "ratio": "i32", "by_ratio": "i32", "tokens": "i32", "dim": "i32",
}  # fmt: skip
BOUNDS = {"left": "i32", "right": "i32"}
CODES = {"cache": ["fp8e4nv", "fp8e4b8"]}

DECLARATION = {
    "op": "flash_decoding",
    "kernels": {
        "flash_decoding_split": {
            "arguments": {
                **RESULTS, "Q": "*dtype", "K": "*cache", "V": "*cache", "TABLE": "*i32", "LENGTHS": "*i32",
                "SINKS": "*fp32", **QUERIES, "k_page": "i64", "k_row": "i32", "k_head": "i32", "table_row": "i64",
                **SIZES, "batch": "i32", "capacity": "i32", "pages": "i32", "page_bits": "i32", "tiles": "i32",
                "splits": "i32", "partial_rows": "i32", **BOUNDS,
                "K_SCALE": "*fp32", "V_SCALE": "*fp32", "scale_head": "i32",
            },
            "axes": {
                "dtype": ["bf16", "fp16"], "paged": [False, True], "wide": [False, True],
                "cache": ["dtype", "fp8e4nv", "fp8e4b8"],
            },
            "only_with": {"K_SCALE": CODES, "V_SCALE": CODES, "scale_head": CODES},
            "host": ["startup_blocks", "ctas_to_saturate"],
            "aligned": [
                "OUT", "OUT_PARTIAL", "Q", "K", "V", "q_batch", "q_token", "q_head", "k_page", "k_row", "k_head", "dim",
            ],
            "forms": {
                "tile": {
                    "function": "split",
                    "constants": ["BLOCK_M", "BLOCK_N", "D", "UNIT", "STAGES", "PAGED", "PDL", "TENSOR_MEMORY"],
                    "defaults": {"UNIT": 16, "PDL": 0, "TENSOR_MEMORY": 0},
                }
            },
        },
        "flash_decoding_fused": {
            "language": "gluon",
            "optional": True,
            "always_aligned": True,
            "matrix": True,
            "arguments": {
                "K": "dtype[1, 1, BOX_KEYS, 64]", "V": "dtype[1, 1, BOX_KEYS, 64]", **RESULTS, "COUNTERS": "*i32",
                "Q": "*dtype", "TABLE": "*i32", "LENGTHS": "*i32", "SINKS": "*fp32", **QUERIES, "table_row": "i64",
                **SIZES, "capacity": "i32", "pages": "i32", "page_bits": "i32", "splits": "i32", "by_splits": "i32",
                **BOUNDS,
            },
            "axes": {
                "dtype": ["bf16", "fp16"], "head_dim": [64, 128],
                "keys": ["contiguous", "pages", "large_pages", "whole"], "many": [False, True],
                "block_m": [8, 16, 32],
            },
            # large_pages: of 64 keys and more; many: of sequences, in pages of any size; whole: in pages, and not split
            "excluded": [
                {"many": [True], "head_dim": [64]},
                {"many": [True], "keys": ["large_pages"]},
                {"many": [False], "keys": ["whole"]},
                {"many": [True], "block_m": [16, 32]},
                {"head_dim": [64], "block_m": [16, 32]},
                {"keys": ["pages"], "block_m": [16, 32]},
            ],
            "gives": {
                "keys": {
                    "contiguous": {"PAGED": False, "WHOLE": False},
                    "pages": {"PAGED": True, "WHOLE": False},
                    "large_pages": {"PAGED": True, "WHOLE": False},
                    "whole": {"PAGED": True, "WHOLE": True},
                }
            },
            "host": ["startup_blocks", "parts", "part_keys"],
            "aligned": ["OUT", "OUT_PARTIAL", "Q", "q_batch", "q_token", "q_head", "dim"],
            "forms": {
                "wgmma": {
                    "function": "split_and_combine",
                    "constants": [
                        "BLOCK_M", "BLOCK_N", "BOX_KEYS", "HEAD_DIM", "STAGES", "BLOCK_SPLITS", "PAGED", "WHOLE", "PDL",
                    ],
                    "defaults": {"PDL": 0},
                    "pdl": "PDL",
                }
            },
        },
        "flash_decoding_combine": {
            "arguments": {
                "OUT": "*dtype", "LSE": "*fp32", "OUT_PARTIAL": "*fp32", "LSE_PARTIAL": "*fp32", "LENGTHS": "*i32",
                "SINKS": "*fp32", "kv_heads": "i32", "ratio": "i32", "tokens": "i32", "dim": "i32", "batch": "i32",
                "capacity": "i32", "tiles": "i32", "splits": "i32", "partial_rows": "i32",
                "block_m": "i32", "block_n": "i32", **BOUNDS,
            },
            "axes": {"dtype": ["bf16", "fp16"]},
            "aligned": ["OUT", "OUT_PARTIAL", "dim"],
            "forms": {
                "tile": {
                    "function": "combine",
                    "constants": ["BLOCK_SPLITS", "D", "PDL"],
                    "defaults": {"PDL": 0},
                    "pdl": "PDL",
                    # LENGTHS, for which split, which is no dependent launch, has waited
                    "loads_before_wait": 1,
                }
            },
        },
    },
}  # fmt: skip


@triton.jit
def split(
    OUT, LSE, OUT_PARTIAL, LSE_PARTIAL, FLAG, Q, K, V, TABLE, LENGTHS, SINKS,
    q_batch, q_token, q_head, k_page, k_row, k_head, table_row, scale, cap, kv_heads, ratio, by_ratio,
    tokens, dim, batch, capacity, pages, page_bits, tiles, splits, partial_rows, left, right,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, UNIT: tl.constexpr, STAGES: tl.constexpr,
    PAGED: tl.constexpr, PDL: tl.constexpr, TENSOR_MEMORY: tl.constexpr, K_SCALE=None, V_SCALE=None, scale_head=None,
):  # fmt: skip
    """A tile's part of a sequence. Programs that read the same keys have consecutive numbers.

    scale is times log2(e); with a soft cap, cap is scale / soft cap, and scale the soft cap times log2(e). A page is
    2^page_bits keys. by_ratio: see ``token_of``. A cache of fp8 codes has scales, null for 1, of heads that lie
    scale_head apart; codes are exact in the dtype in which they are multiplied, q's or fp16.
    """
    if PDL:  # noqa: SIM102 (the outer is the compiler's)
        # At once, and by programs without work too: ``combine`` starts when each program of this kernel has said so or
        # ended. Then all of them have started, and none waits for a place that ``combine`` takes. Where there is no
        # ``combine``, the next kernel is another's, which must not start early.
        if partial_rows > 0:
            launch_dependents()
    program = tl.program_id(0)
    width = tiles * kv_heads
    worker = divide(program, width)
    in_worker = program - worker * width
    head = divide(in_worker, tiles)
    tile = in_worker - head * tiles
    seqs = Sequences(LENGTHS, batch, tokens, capacity, left, right)
    sequence, begin, blocks = split_range(worker, splits, seqs, BLOCK_N)
    if blocks > 0:
        b = sequence.to(tl.int64)
        # rows past the last are the last once more: the same values to the same place
        rows = tl.minimum(tl.arange(0, BLOCK_M), tokens * ratio - 1 - tile * BLOCK_M)
        first_token = divide(tile * BLOCK_M, ratio)
        into = tile * BLOCK_M - first_token * ratio
        last_token = first_token + token_of(
            into + tl.minimum(BLOCK_M, tokens * ratio - tile * BLOCK_M) - 1, by_ratio
        )
        length, wrong, given, _, whole, start, stop, first, last = part_of(
            b, begin, blocks, first_token, last_token, seqs, BLOCK_N
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
        v_scale = 1.0
        if K_SCALE is not None:
            k_scale = scale_of_head(K_SCALE, head, scale_head)
            v_scale = scale_of_head(V_SCALE, head, scale_head)
            scale *= tl.where(cap != 0.0, 1.0, k_scale)
            cap *= k_scale
        PTX: tl.constexpr = PDL and not TENSOR_MEMORY  # see ``common.fp8``
        DTYPE: tl.constexpr = product_dtype(q.dtype, K.dtype.element_ty, PTX)
        q, by_row = queries_in(q, DTYPE)
        acc = tl.zeros([BLOCK_M, D], tl.float32)
        m = tl.full([BLOCK_M], NO_SCORE, tl.float32)
        # where several warps have a row's keys, sums are kept by column and reduced after the loop
        BY_COLUMN: tl.constexpr = BLOCK_M == 16
        sums = tl.zeros([BLOCK_M, BLOCK_N] if BY_COLUMN else [BLOCK_M], tl.float32)
        for j in tl.range(first, last, num_stages=STAGES):
            key = keys_of(j, start, stop, BLOCK_N)
            if PAGED:
                there = (page >= 0) & (page < pages)
                unknown = tl.where(there, unknown, page)
                here = tl.where(there, page, 0).to(tl.int64)
                at = here * k_page + (key & ((1 << page_bits) - 1)).to(tl.int64) * k_row
                # for the next block: else the pipeline would give half of its stages to the table
                page = page_of(TABLE, keys_of(j + 1, start, stop, BLOCK_N), page_bits)
            else:
                at = key.to(tl.int64) * k_row
            k = widened(tl.load(K + at[:, None] + near[None, :]), DTYPE, PTX, False)
            s = tl.dot(q, tl.trans(k))
            if Q.dtype.element_ty != DTYPE:
                s *= by_row[:, None]
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
            p = tl.exp2(s - (new_m - p_exponent(DTYPE))[:, None])
            by = tl.exp2(m - new_m)
            m = new_m
            if BY_COLUMN:
                sums = sums * by[:, None] + p
            else:
                sums = sums * by + tl.sum(p, 1)
            v = widened(tl.load(V + at[:, None] + near[None, :]), DTYPE, PTX, True)
            acc = tl.dot(p.to(DTYPE), v, acc * by[:, None])
        if PAGED:
            flag = FLAG + tl.zeros([BLOCK_N], tl.int32)
            tl.store(flag, unknown.to(tl.int64), mask=(unknown != 0) & flagged)
            wrong = wrong | (tl.max((unknown != 0).to(tl.int32), 0) > 0)
        total = tl.where(wrong, float("nan"), tl.sum(sums, 1) if BY_COLUMN else sums)
        m -= p_exponent(DTYPE)
        keep = in_cols[None, :]
        if whole:
            lse, by = finalise(m, total, sink_of(SINKS, query_head))
            by *= v_scale
            heads = kv_heads * ratio
            to = (b * tokens + token) * heads + query_head
            tl.store(
                OUT + to[:, None] * dim + cols[None, :],
                (acc * by[:, None]).to(OUT.dtype.element_ty),
                mask=keep,
            )
            tl.store(LSE + (b * heads + query_head) * tokens + token, lse)
        else:
            by = tl.where(total == 0.0, 0.0, v_scale / total)
            to = program.to(tl.int64) * partial_rows + rows
            tl.store(OUT_PARTIAL + to[:, None] * dim + cols[None, :], acc * by[:, None], mask=keep)
            tl.store(LSE_PARTIAL + to, m + tl.log2(total))


@triton.jit
def scale_of_head(SCALE, head, scale_head):
    return tl.load(SCALE + head * scale_head, mask=SCALE.to(tl.int64) != 0, other=1.0)


@triton.jit
def combine(
    OUT, LSE, OUT_PARTIAL, LSE_PARTIAL, LENGTHS, SINKS, kv_heads, ratio, tokens, dim, batch, capacity, tiles, splits,
    partial_rows, block_m, block_n, left, right,
    BLOCK_SPLITS: tl.constexpr, D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row from its parts, BLOCK_SPLITS of them at a time. block_m, block_n: those of ``split``."""
    at = tl.program_id(0)
    batch_head = divide(at, tokens * ratio)
    row = at - batch_head * (tokens * ratio)
    b = divide(batch_head, kv_heads)
    kv_head = batch_head - b * kv_heads
    seqs = Sequences(LENGTHS, batch, tokens, capacity, left, right)
    parts = tl.minimum(splits, blocks_in(b, seqs, block_n.to(tl.uint32)))
    if PDL:
        # Wait until ``split`` has ended and what it wrote is visible. Programs with nothing to combine wait, too: the
        # next kernel of the stream waits for this one alone, which must not end before ``split``. LENGTHS may be read
        # before: ``split`` does not write it, and started when all kernels before it had ended.
        parts = wait_for_previous(parts)
    if parts > 1:
        cols = tl.arange(0, D)
        in_cols = cols < dim
        acc = tl.zeros([D], tl.float32)
        tile = divide(row, block_m)
        width = tiles * kv_heads
        program = b * splits * width + kv_head * tiles + tile
        first_row = program.to(tl.int64) * partial_rows + (row - tile * block_m)
        step = width.to(tl.int64) * partial_rows
        m = NO_SCORE
        total = 0.0
        for first in range(0, parts, BLOCK_SPLITS):
            part = first + tl.arange(0, BLOCK_SPLITS)
            valid = part < parts
            to = first_row + part * step
            lse = tl.load(LSE_PARTIAL + to, mask=valid, other=float("-inf"))
            values = tl.load(
                OUT_PARTIAL + to[:, None] * dim + cols[None, :],
                mask=valid[:, None] & in_cols[None, :],
                other=0.0,
            )
            m, total, acc = with_parts(m, total, acc, lse, values)
        token = divide(row, ratio)
        head = kv_head * ratio + row - token * ratio
        heads = kv_heads * ratio
        lse, by = finalise(m, total, sink_of(SINKS, head))
        out = OUT + ((b.to(tl.int64) * tokens + token) * heads + head) * dim + cols
        tl.store(out, (acc * by).to(OUT.dtype.element_ty), mask=in_cols)
        tl.store(LSE + (b.to(tl.int64) * heads + head) * tokens + token, lse)
