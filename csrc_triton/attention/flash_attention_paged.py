"""Attention of packed queries to a paged cache: see ``paged`` and ``varlen``.

``paged_tiles`` is plain Triton. The queries of a token that share a head of keys are rows of one tile, as all of them
read the same keys: a tile is BLOCK_M of a sequence's (token, head) pairs. Where sequences have few queries each,
several programs may split a tile's keys (split KV), and ``combine_paged`` combines their parts. ``split_pages`` (in
``paged_split``) does the same with TMA and wgmma, for caches of q's dtype, also for a chunk of a prompt alone, whose
tiles of one head are too few for all multiprocessors.

``paged_warp_specialized`` is for GPUs with TMA and wgmma, and sequences of many queries. It is
``flash_attention_varlen.varlen_warp_specialized`` with keys by pages; a tile is of one head. A batch that mixes both
kinds of sequences is two launches, of which each leaves the other's sequences alone.

Kwon et al., PagedAttention (2023); Dao et al., FlashAttention and Flash-Decoding (2022, 2023).
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from csrc_triton.attention.flash_attention_varlen import TILE_DISTANCE, BroadcastOutput, zero_stage
from csrc_triton.attention.forward import consume_tile
from csrc_triton.attention.key_parts import (
    SEQUENCES,
    Split,
    chunk_of,
    keys_in_cache,
    parts_of,
    slots_before,
    with_parts,
    work_of,
)
from csrc_triton.attention.online_softmax import ping_pong_arrive
from csrc_triton.attention.paged import (
    HEAD_DIMS,
    PagedSequences,
    attend_pages,
    fill_paged_window,
    finalise,
    find_rows,
    load_pages,
    load_rows_of_q,
    paged_pipeline,
    pages_of_block,
    report_keys,
    scheduler_of,
    zero_unseen,
)
from csrc_triton.attention.paged_split import split_pages  # noqa: F401
from csrc_triton.attention.pipeline import Sizes, mbarriers, pipeline_of
from csrc_triton.attention.tile_scheduler import LOCAL, tile_pipeline
from csrc_triton.attention.varlen import (
    COORDINATES,
    DTYPES,
    WINDOW,
    broadcast_no_tile,
    broadcast_varlen_tile,
    divide,
    find_tile,
    first_tile,
    receive_varlen_tile,
    release_varlen_tile,
    report,
    span,
    window_memory,
)
from csrc_triton.common.pdl import launch_dependents, wait_for_previous

RESULTS = {"LSE": "*fp32", "OUT_PARTIAL": "*fp32", "LSE_PARTIAL": "*fp32"}
BATCH = {"CU_SEQLENS_Q": "*i32", "SEQUSED_K": "*i32", "TABLE": "*i32", "FLAG": "*i64"}
SIZES = {
    "sequences": "i32", "tokens": "i32", "capacity": "i32", "pages": "i32", "page_bits": "i32", "right": "i32",
    "left": "i32", "max_seqlen_q": "i32", "few": "i32",
}  # fmt: skip
FP8 = ["fp8e4nv", "fp8e4b8"]
FORM = {
    "function": "paged_warp_specialized",
    "constants": [
        "BLOCK_N", "BOX_KEYS", "D1", "OUT", "STAGES", "WARP_GROUPS", "PRODUCERS", "REGISTERS", "PING_PONG",
        "MASK", "PDL",
    ],
    "defaults": {"PRODUCERS": 1, "PDL": 0},
}  # fmt: skip
SPLIT = {
    "function": "split_pages",
    "constants": [
        "BLOCK_N", "BOX_KEYS", "HEAD_DIM", "STAGES", "WARP_GROUPS", "PRODUCERS", "CAPPED", "BY_LENGTHS", "DEPENDENT",
        "PDL",
    ],
    "defaults": {"PRODUCERS": 1, "CAPPED": 1, "PDL": 0},
    "pdl": "DEPENDENT",
    # by the producer warp, whose code comes first and which starts when the others have waited
    "loads_before_wait": 40,
}  # fmt: skip

DECLARATION = {
    "op": "flash_attention_paged",
    "kernels": {
        "flash_attention_paged_forward": {
            "language": "gluon",
            "optional": True,
            "always_aligned": True,
            "matrix": True,
            "arguments": {
                "Q": "dtype[1, 1, 64, 64]", "K": "dtype[1, 1, BOX_KEYS, 64]", "V": "dtype[1, 1, BOX_KEYS, 64]",
                "Y": "dtype[1, 1, 64, 64]", "LSE": "*fp32", "SINKS": "*fp32", **BATCH, "COUNTER": "*i32",
                "table_row": "i32", "scale": "fp32", "cap": "fp32", "tiles": "i32", "heads": "i32", "ratio": "i32",
                "dim": "i32", "keys_in_l2": "i32", **SIZES,
            },
            "axes": {**DTYPES, "head_dim": HEAD_DIMS, "mask": ["causal", "local"], "box_keys": [16, 64]},
            "gives": {
                "head_dim": {
                    64: {"D1": 64, "OUT": 64}, 128: {"D1": 128, "OUT": 128}, 256: {"D1": 256, "OUT": 128},
                },
                "mask": {"causal": {"MASK": 1}, "local": {"MASK": 2}},
            },
            "host": ["l2_megabytes"],
            "aligned": [],
            "forms": {
                "warp_specialized": FORM,
                "warp_specialized_spills": {
                    **FORM, "defaults": {"PDL": 0},
                    "may_spill": "a few registers, once a tile: none where keys are multiplied",
                },
            },
        },
        "flash_attention_paged_tiles": {
            "always_aligned": True,
            "arguments": {
                "OUT": "*dtype", **RESULTS, "Q": "*dtype", "K": "*cache", "V": "*cache", "SINKS": "*fp32", **BATCH,
                "out_token": "i32", "out_head": "i32", "q_token": "i32", "q_head": "i32", "k_page": "i64",
                "k_row": "i32", "k_head": "i32", "table_row": "i32", "scale": "fp32", "cap": "fp32", "ratio": "i32",
                "dim": "i32", **SIZES, "tiles": "i32", "kv_heads": "i32", "tiles_per_sequence": "i32",
                "splits": "i32", "K_SCALE": "*fp32", "V_SCALE": "*fp32", "scale_head": "i32",
            },
            "axes": {
                **DTYPES, "cache": ["dtype", "fp8e4nv", "fp8e4b8"], "head_dim": HEAD_DIMS, "wide": [False, True],
            },
            "only_with": {
                "K_SCALE": {"cache": FP8}, "V_SCALE": {"cache": FP8}, "scale_head": {"cache": FP8},
            },
            "host": ["startup_blocks", "ctas_to_saturate"],
            "aligned": [
                "OUT", "OUT_PARTIAL", "Q", "K", "V", "out_token", "out_head", "q_token", "q_head", "k_page", "k_row",
                "k_head", "dim",
            ],
            "forms": {
                "tiles": {
                    "function": "paged_tiles",
                    "constants": ["BLOCK_M", "BLOCK_N", "HEAD_DIM", "STAGES", "PDL", "TENSOR_MEMORY"],
                    "defaults": {"PDL": 0, "TENSOR_MEMORY": 0},
                }
            },
        },
        "flash_attention_paged_split": {
            "language": "gluon",
            "optional": True,
            "always_aligned": True,
            "matrix": True,
            "arguments": {
                "K": "dtype[1, 1, BOX_KEYS, 64]", "V": "dtype[1, 1, BOX_KEYS, 64]", "OUT": "*dtype", **RESULTS,
                "Q": "*dtype", "SINKS": "*fp32", **BATCH, "out_token": "i32", "out_head": "i32", "q_token": "i32",
                "q_head": "i32", "table_row": "i32", "scale": "fp32", "cap": "fp32", "ratio": "i32", "dim": "i32",
                **SIZES, "tiles": "i32", "kv_heads": "i32", "tiles_per_sequence": "i32", "splits": "i32",
                "least": "i32",
            },
            "axes": {**DTYPES, "head_dim": HEAD_DIMS, "wide": [False, True], "box_keys": [16, 64]},
            # boxes of 64 keys, of pages of 64 and more: for many rows of 128 columns, whose producers are the bound
            "excluded": [{"wide": [False], "box_keys": [64]}, {"head_dim": [64, 256], "box_keys": [64]}],
            "gives": {
                # many rows are of few sequences: their keys are split alike
                "wide": {
                    False: {"WARP_GROUPS": 1, "BY_LENGTHS": 1, "DEPENDENT": 1},
                    True: {"WARP_GROUPS": 2, "BY_LENGTHS": 0, "DEPENDENT": 0},
                }
            },
            "host": ["startup_blocks", "ctas_to_saturate", "waves", "least_keys", "lone_keys"],
            "aligned": ["OUT", "OUT_PARTIAL", "Q", "out_token", "out_head", "q_token", "q_head", "dim"],
            "forms": {
                "warp_specialized": SPLIT,
                "warp_specialized_spills": {
                    **SPLIT, "defaults": {"PDL": 0}, "may_spill": "a few arguments, before the warps part",
                },
            },
        },
        "flash_attention_paged_combine": {
            "always_aligned": True,
            "arguments": {
                "OUT": "*dtype", **RESULTS, "SINKS": "*fp32", "CU_SEQLENS_Q": "*i32", "SEQUSED_K": "*i32",
                "out_token": "i32", "out_head": "i32", "heads": "i32", "dim": "i32", "sequences": "i32",
                "tokens": "i32", "few": "i32", "splits": "i32", "slots": "i32", "least": "i32", "capacity": "i32",
                "left": "i32", "ratio": "i32", "tile_rows": "i32", "key_bits": "i32",
            },
            "axes": {**DTYPES, "head_dim": HEAD_DIMS},  # n is the number of parts
            "aligned": ["OUT", "OUT_PARTIAL", "out_token", "out_head", "dim"],
            "forms": {
                "tiles": {
                    "function": "combine_paged",
                    "constants": ["BLOCK_SPLITS", "HEAD_DIM", "BY_LENGTHS", "PDL"],
                    "defaults": {"BY_LENGTHS": 0, "PDL": 0},
                    "pdl": "PDL",
                    # CU_SEQLENS_Q and SEQUSED_K, for which the kernel before has waited before it let this one start
                    "loads_before_wait": 40,
                }
            },
        },
    },
}  # fmt: skip


# ---- Plain Triton ----


@triton.jit
def paged_tiles(
    OUT, LSE, OUT_PARTIAL, LSE_PARTIAL, Q, K, V, SINKS, CU_SEQLENS_Q, SEQUSED_K, TABLE, FLAG, out_token,
    out_head, q_token, q_head, k_page, k_row, k_head, table_row, scale, cap, ratio, dim, sequences, tokens, capacity,
    pages, page_bits, right, left, max_seqlen_q, few, tiles, kv_heads, tiles_per_sequence, splits,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
    TENSOR_MEMORY: tl.constexpr, K_SCALE=None, V_SCALE=None, scale_head=None,
):  # fmt: skip
    """A split of a tile's keys: a program for each of (splits, heads of K, tiles of a head). Tiles are numbered by
    sequence where each has ``tiles_per_sequence``, with those of tokens behind the last one at the end, else by
    ``find_rows``; sequences of more than ``few`` queries are left alone. Parts are of (split, sequence, token of
    ``few``, head).

    scale is times log2(e); with a soft cap, cap is scale / soft cap, and scale the soft cap times log2(e). Row r sees
    keys before r + right, from r + left on, where a sequence has as many keys as queries. LSE is [heads, tokens]."""
    if PDL:  # noqa: SIM102 (the outer is the compiler's)
        if splits > 1:  # see ``flash_decoding.split``: at once, and by programs without work too
            launch_dependents()
    program = tl.program_id(0)
    split_head = program // tiles
    tile = program - split_head * tiles
    split = split_head // kv_heads
    head = split_head - split * kv_heads
    if (tile < sequences) & (head == 0) & (split == 0):
        report(FLAG, CU_SEQLENS_Q, tile, tokens, max_seqlen_q)
        report_keys(FLAG, SEQUSED_K, tile, capacity)
    if tiles_per_sequence > 0:
        sequence = tl.minimum(tile // tiles_per_sequence, sequences)
        row = (tile - sequence * tiles_per_sequence) * BLOCK_M
        step = (tiles - sequences * tiles_per_sequence) * BLOCK_M
    else:
        sequence, row = find_rows(CU_SEQLENS_Q, tiles - 1 - tile, sequences, tokens, ratio, BLOCK_M)
        step = tiles * BLOCK_M
    start_q, len_q = span(CU_SEQLENS_Q, sequence, sequences, tokens)
    index = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, HEAD_DIM)
    keep = columns[None, :] < dim
    heads = kv_heads * ratio
    if sequence == sequences:  # tokens behind the last sequence
        for first in range(row, tl.where(split == 0, (tokens - start_q) * ratio, 0), step):
            token = start_q + (first + index) // ratio
            query_head = head * ratio + (first + index) % ratio
            valid = token < tokens
            to = OUT + token.to(tl.int64) * out_token + query_head.to(tl.int64) * out_head
            zeros = tl.zeros([BLOCK_M, HEAD_DIM], OUT.dtype.element_ty)
            tl.store(to[:, None] + columns[None, :], zeros, mask=valid[:, None] & keep)
            tl.store(LSE + query_head.to(tl.int64) * tokens + token, float("-inf"), mask=valid)
    elif (row >= 0) & (row < len_q * ratio) & (len_q <= few):
        rows = len_q * ratio
        at = tl.minimum(
            row + index, rows - 1
        )  # past the last its once more: the same values to the same place
        token = at // ratio
        query_head = head * ratio + (at - token * ratio)
        len_k = keys_in_cache(SEQUSED_K, sequence, sequences, capacity)
        past = len_k - len_q
        low = past + token + left
        high = tl.minimum(past + token + right, len_k)
        first_token = row // ratio
        last_token = (tl.minimum(row + BLOCK_M, rows) - 1) // ratio
        start = tl.minimum(tl.maximum(past + first_token + left, 0), len_k)
        stop = tl.maximum(tl.minimum(past + last_token + right, len_k), start)
        first = start // BLOCK_N
        last = tl.where(stop > start, (stop + BLOCK_N - 1) // BLOCK_N, first)
        each = (last - first + splits - 1) // splits
        begin = tl.minimum(first + split * each, last)
        end = tl.minimum(begin + each, last)

        of_query = Q + (start_q + token).to(tl.int64) * q_token + query_head.to(tl.int64) * q_head
        q = tl.load(of_query[:, None] + columns[None, :], mask=keep, other=0.0)
        base = head.to(tl.int64) * k_head
        if K_SCALE is not None:
            of_codes = tl.load(K_SCALE + head * scale_head, mask=K_SCALE.to(tl.int64) != 0, other=1.0)
            scale *= tl.where(cap != 0.0, 1.0, of_codes)
            cap *= of_codes
        acc, m, sums, bad = attend_pages(
            q, K + base, V + base, TABLE + sequence * table_row, begin, end, start, stop, low, high,
            past + last_token + left, tl.minimum(past + first_token + right, len_k), scale, cap, dim, pages,
            page_bits, k_page, k_row, BLOCK_N, HEAD_DIM, STAGES, PDL and not TENSOR_MEMORY,
        )  # fmt: skip
        if V_SCALE is not None:
            acc *= tl.load(V_SCALE + head * scale_head, mask=V_SCALE.to(tl.int64) != 0, other=1.0)
        tl.store(FLAG + tl.zeros([BLOCK_N], tl.int32), bad.to(tl.int64), mask=bad != 0)
        if splits == 1:
            lse, by = finalise(m, sums, SINKS, query_head)
            to = OUT + (start_q + token).to(tl.int64) * out_token + query_head.to(tl.int64) * out_head
            out = (acc * by[:, None]).to(OUT.dtype.element_ty)
            tl.store(to[:, None] + columns[None, :], out, mask=keep)
            tl.store(LSE + query_head.to(tl.int64) * tokens + (start_q + token), lse)
        else:
            part = acc / tl.where(sums > 0, sums, 1.0)[:, None]
            place = ((split * sequences + sequence).to(tl.int64) * few + token) * heads + query_head
            tl.store(OUT_PARTIAL + place[:, None] * dim + columns[None, :], part, mask=keep & (end > begin))
            tl.store(LSE_PARTIAL + place, m + tl.log2(sums))


@triton.jit
def parts_of_row(place, near_tiles, near_blocks, chunk, split, heads, BY_LENGTHS: tl.constexpr):
    """Where a row's result goes and what it is made of, of the ``place``-th row of (sequence, token of ``split.few``,
    head): (the row among all tokens, its head, how many parts it has, where the first is, from one to the next). A row
    that is not there, or done, has no parts."""
    of_token = place // heads
    head = place - of_token * heads
    sequence = of_token // split.few
    token = of_token - sequence * split.few
    start_q, len_q = span(split.cu_seqlens_q, sequence, split.sequences, split.tokens)
    parts = split.most
    begin = tl.cast(place, tl.int64)
    step = (split.sequences * split.few * heads).to(tl.int64)
    if BY_LENGTHS:  # noqa: SIM102 (the outer is the compiler's)
        if split.slots > 0:
            tiles, blocks = work_of(sequence, split)
            parts = parts_of(blocks, chunk, split)
            offsets = tl.arange(0, SEQUENCES)
            slot = slots_before(offsets, near_tiles, near_blocks, sequence, chunk, split)
            kv_heads = heads // split.ratio
            kv_head = head // split.ratio
            row = token * split.ratio + (head - kv_head * split.ratio)
            tile = row // split.rows
            own_rows = tl.minimum(split.few * split.ratio, split.rows)
            first_slot = ((slot + tile) * kv_heads + kv_head).to(tl.int64)
            begin = first_slot * own_rows + (row - tile * split.rows)
            step = (tiles * kv_heads).to(tl.int64) * own_rows
            parts = tl.where(parts > 1, parts, 0)
    there = (token < len_q) & (len_q <= split.few)
    return start_q + token, head, tl.where(there, parts, 0), begin, step


@triton.jit
def combine_paged(
    OUT, LSE, OUT_PARTIAL, LSE_PARTIAL, SINKS, CU_SEQLENS_Q, SEQUSED_K, out_token, out_head, heads, dim, sequences,
    tokens, few, splits, slots, least, capacity, left, ratio, tile_rows, key_bits,
    BLOCK_SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr, BY_LENGTHS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows from their parts, BLOCK_SPLITS of them at a time: (sequence, token of ``few``, head), of which each program
    takes every num_programs-th. Where ``slots`` is 0 all rows have ``splits`` parts, one behind the other as rows are;
    else (BY_LENGTHS) as many as ``split_pages`` made, in its programs' order, from ``least`` to ``key_bits`` as there;
    rows of one part are done. What lengths say of a program's first row is loaded before the wait for the parts."""
    split = Split(
        CU_SEQLENS_Q, SEQUSED_K, sequences, tokens, capacity, left, few, ratio, slots, splits, least, tile_rows,
        key_bits,
    )  # fmt: skip
    near_tiles = tl.zeros([SEQUENCES], tl.int32)
    near_blocks = near_tiles
    chunk = splits
    if BY_LENGTHS:  # noqa: SIM102 (the outer is the compiler's)
        if slots > 0:
            chunk, near_tiles, near_blocks = chunk_of(tl.arange(0, SEQUENCES), split)
    columns = tl.arange(0, HEAD_DIM)
    keep = columns < dim
    for place in range(tl.program_id(0), sequences * split.few * heads, tl.num_programs(0)):
        row, head, parts, begin, step = parts_of_row(
            place, near_tiles, near_blocks, chunk, split, heads, BY_LENGTHS
        )
        if PDL:  # see ``flash_decoding.combine``; once a program has waited this is nothing
            parts = wait_for_previous(parts)
        if parts > 0:
            acc = tl.zeros([HEAD_DIM], tl.float32)
            m = -1.0e30
            total = 0.0
            for first in range(0, parts, BLOCK_SPLITS):
                part = first + tl.arange(0, BLOCK_SPLITS)
                to = begin + part * step
                lse = tl.load(LSE_PARTIAL + to, mask=part < parts, other=float("-inf"))
                values = tl.load(
                    OUT_PARTIAL + to[:, None] * dim + columns[None, :],
                    mask=(part < parts)[:, None] & keep[None, :],
                    other=0.0,
                )
                # a part without keys has no values: anything may lie there
                values = tl.where((lse != float("-inf"))[:, None], values, 0.0)
                m, total, acc = with_parts(m, total, acc, lse, values)
            lse, by = finalise(m, total, SINKS, head)
            at = OUT + row.to(tl.int64) * out_token + head.to(tl.int64) * out_head
            tl.store(at + columns, (acc * by).to(OUT.dtype.element_ty), mask=keep)
            tl.store(LSE + head.to(tl.int64) * tokens + row, lse)


# ---- Warp groups (Gluon, Hopper) ----


@gluon.jit
def schedule(z, seqs, window, tile_pipe, requests, COUNTER, FLAG, max_seqlen_q):
    """The scheduling warp, as ``flash_attention_varlen.schedule``."""
    block: gl.constexpr = 64 * z.WARP_GROUPS
    i = 0
    s = 0
    fill_paged_window(0, seqs, window, block)
    end = first_tile(WINDOW, seqs, block)
    t = gl.program_id(0)
    while t < seqs.tiles:
        while divide(t, seqs.heads) >= end:
            s += WINDOW
            fill_paged_window(s, seqs, window, block)
            end = first_tile(s + WINDOW, seqs, block)
        tile = find_tile(t, s, window, seqs, z)
        if tile.m >= 0:
            broadcast_varlen_tile(tile, i, tile_pipe)
            mbarrier.wait(requests.index(0), i & 1)
            i += 1
        if (tile.m < 0) & (seqs.count < WINDOW):  # sorted: the last sequence's last tile was taken
            t = seqs.tiles
        else:
            t = gl.atomic_add(COUNTER, 1) + gl.num_programs(0)
    broadcast_no_tile(seqs, i, tile_pipe)
    for s in range(gl.program_id(0), seqs.count, gl.num_programs(0)):
        report(FLAG, seqs.cu_seqlens_q, s, seqs.tokens_q, max_seqlen_q)
        report_keys(FLAG, seqs.seqused_k, s, seqs.capacity)
    if gl.atomic_add(COUNTER + 1, 1) == gl.num_programs(0) - 1:  # the last program resets the counter
        gl.store(COUNTER, 0)
        gl.store(COUNTER + 1, 0)


@gluon.jit
def complete_stage(v, stage, key, start, stop, edges, z):
    """Wait for the V of a block with rows that hold no key, set those to zero and hand the stage to the consumers."""
    mbarrier.wait(v.full.index(z.STAGES), edges & 1)
    zero_unseen(v.first.index(stage), key, start, stop, z)
    mbarrier.arrive(v.full.index(stage), count=1)


@gluon.jit
def produce(
    z, seqs, Q, K, V, q, k, v, tile_pipe, requests, FLAG, dim, KEYS: gl.constexpr, VALUES: gl.constexpr
):  # fmt: skip
    """A producer warp: KEYS: loads Q and K, and requests the next tile; VALUES: loads V. V of a block with rows that
    hold no key arrives at a barrier of its own; the producer completes it when it has started what it loads next."""
    b = 0  # blocks of keys loaded
    i = 0  # tiles loaded
    edges = 0  # of all blocks those with rows that hold no key
    tile = receive_varlen_tile(0, tile_pipe, 1)
    while tile.t < seqs.tiles:
        release_varlen_tile(i, tile_pipe)
        row = tile.m * (64 * z.WARP_GROUPS)
        scheduler = scheduler_of(tile, seqs)
        first, last = scheduler.blocks(row, row + 64 * z.WARP_GROUPS, z)
        start = 0 * row
        if z.MASK == LOCAL:
            start = gl.maximum(row + scheduler.left, 0)
        head = divide(tile.head, seqs.ratio)
        edge = 0 * row
        for j in range(last - first):
            if KEYS:  # noqa: SIM102 (the outer is the compiler's)
                if j == gl.maximum(last - first - TILE_DISTANCE, 0):
                    mbarrier.arrive(requests.index(0), count=1)
            key = (last - 1 - j) * z.BLOCK_N
            stage = b % z.STAGES
            phase = ((b // z.STAGES) & 1) ^ 1
            pages = pages_of_block(tile.start_k, key, start, tile.len_k, seqs, K.block_shape[2], z)
            if KEYS:
                mbarrier.wait(k.empty.index(stage), phase)
                if tile.len_k > 0:
                    to, full = k.first.index(stage), k.full.index(stage)
                    load_pages(K, pages, head, key, start, tile.len_k, to, full, seqs, FLAG, True, z)
                else:  # the one block of no keys: all scores are masked, whatever they are
                    mbarrier.arrive(k.full.index(stage), count=1)
                if j == 0:
                    past_q = seqs.tokens_q - tile.len_q + row
                    for g in gl.static_range(z.WARP_GROUPS):
                        mbarrier.wait(q.empty.index(g), (i & 1) ^ 1)
                        if row + g * 64 < tile.len_q:
                            end = tile.start_q + tile.len_q
                            load_rows_of_q(Q, end, tile.head, past_q + g * 64, q, g, dim, z)
                        else:  # a warp group without rows waits all the same
                            mbarrier.arrive(q.full.index(g), count=1)
            if VALUES:
                if edge != 0:
                    complete_stage(v, (b - 1) % z.STAGES, key + z.BLOCK_N, start, tile.len_k, edges, z)
                    edges += 1
                mbarrier.wait(v.empty.index(stage), phase)
                edge = ((tile.len_k > 0) & ((key + z.BLOCK_N > tile.len_k) | (key < start))).to(gl.int32)
                if tile.len_k > 0:
                    to, full = v.first.index(stage), v.full.index(gl.where(edge != 0, z.STAGES, stage))
                    load_pages(V, pages, head, key, start, tile.len_k, to, full, seqs, FLAG, False, z)
                else:  # 0 times what lies there could be NaN
                    zero_stage(v, stage, z)
            b += 1
        if VALUES:  # noqa: SIM102 (the outer is the compiler's)
            if edge != 0:
                complete_stage(v, (b - 1) % z.STAGES, first * z.BLOCK_N, start, tile.len_k, edges, z)
                edges += 1
        i += 1
        tile = receive_varlen_tile(i, tile_pipe, 1)


@gluon.jit
def consume(z, seqs, q, k, v, tile_pipe, buffer, Y, LSE, SINKS, scale, cap, dim, g: gl.constexpr):
    """Consumer warp group g: rows 64 g to 64 g + 63 of each tile."""
    if g == z.WARP_GROUPS - 1:
        ping_pong_arrive(g, z)  # warp group 0 starts
    b = 0
    i = 0
    tile = receive_varlen_tile(0, tile_pipe, 4)
    while tile.t < seqs.tiles:
        output = BroadcastOutput(tile_pipe.first, (i & 1) * COORDINATES, seqs.tokens_q)
        b = consume_tile(
            tile.m, output, b, i, q, k, v, scheduler_of(tile, seqs), buffer, Y, LSE, SINKS, scale, cap, g, z,
            dim if z.D1 == 256 else None,
        )  # fmt: skip
        release_varlen_tile(i, tile_pipe)
        i += 1
        tile = receive_varlen_tile(i, tile_pipe, 4)
    tma.store_wait(0)


@gluon.jit
def paged_warp_specialized(
    Q, K, V, Y, LSE, SINKS, CU_SEQLENS_Q, SEQUSED_K, TABLE, FLAG, COUNTER, table_row, scale, cap, tiles, heads, ratio,
    dim, keys_in_l2, sequences, tokens, capacity, pages, page_bits, right, left, max_seqlen_q, few,
    BLOCK_N: gl.constexpr, BOX_KEYS: gl.constexpr, D1: gl.constexpr, OUT: gl.constexpr, STAGES: gl.constexpr,
    WARP_GROUPS: gl.constexpr, PRODUCERS: gl.constexpr, REGISTERS: gl.constexpr, PING_PONG: gl.constexpr,
    MASK: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """All tiles of sequences with more than ``few`` queries; 0: all, and tokens behind the last sequence. scale, cap,
    ``right`` and ``left`` are as in ``paged_tiles``; K and V are loaded in boxes of BOX_KEYS rows, which pages are
    multiples of. PRODUCERS: one warp loads Q, K and V, or a second one loads V: a warp takes as long for eight boxes of
    16 rows of K and of V as consumers for a block."""
    if PDL:  # noqa: SIM102 (the outer is the compiler's)
        if few > 0:  # ``split_pages`` is next, and takes places as programs leave them
            launch_dependents()
    gl.static_assert(WARP_GROUPS == 2)
    gl.static_assert(K.block_shape[2] == BOX_KEYS)
    OTHERS: gl.constexpr = (
        512 - WARP_GROUPS * REGISTERS
    )  # a multiprocessor has 65536, for threads of 128 a warp group
    z = Sizes(BLOCK_N, D1, 0, 64, STAGES, WARP_GROUPS, MASK, PING_PONG)
    seqs = PagedSequences(
        CU_SEQLENS_Q, SEQUSED_K, TABLE, table_row, sequences, tokens, tiles, heads, ratio, keys_in_l2, right,
        right - left, few, capacity, pages, page_bits,
    )  # fmt: skip
    q = pipeline_of(Q, WARP_GROUPS, 1, z)
    k = paged_pipeline(K, STAGES, z)
    v = paged_pipeline(V, STAGES + 1, z)  # the last barrier is the producer's own: see ``complete_stage``
    tile_pipe = tile_pipeline(COORDINATES, WARP_GROUPS + PRODUCERS)
    window = window_memory()
    requests = mbarriers(1, 1)
    out = gl.allocate_shared_memory(Y.dtype, [WARP_GROUPS, 1, 1, 64, OUT], Y.layout)
    fence_async_shared()
    # the tuples stay literal: through a variable, constants would turn into run-time values
    if PRODUCERS == 2:
        gl.warp_specialize(
            [
                (consume, (z, seqs, q, k, v, tile_pipe, out.index(0), Y, LSE, SINKS, scale, cap, dim, 0)),
                (consume, (z, seqs, q, k, v, tile_pipe, out.index(1), Y, LSE, SINKS, scale, cap, dim, 1)),
                (produce, (z, seqs, Q, K, V, q, k, v, tile_pipe, requests, FLAG, dim, True, False)),
                (produce, (z, seqs, Q, K, V, q, k, v, tile_pipe, requests, FLAG, dim, False, True)),
                (schedule, (z, seqs, window, tile_pipe, requests, COUNTER, FLAG, max_seqlen_q)),
            ],
            [4, 1, 1, 1],
            [REGISTERS, OTHERS, OTHERS, OTHERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (z, seqs, q, k, v, tile_pipe, out.index(0), Y, LSE, SINKS, scale, cap, dim, 0)),
                (consume, (z, seqs, q, k, v, tile_pipe, out.index(1), Y, LSE, SINKS, scale, cap, dim, 1)),
                (produce, (z, seqs, Q, K, V, q, k, v, tile_pipe, requests, FLAG, dim, True, True)),
                (schedule, (z, seqs, window, tile_pipe, requests, COUNTER, FLAG, max_seqlen_q)),
            ],
            [4, 1, 1],
            [REGISTERS, OTHERS, OTHERS],
        )
