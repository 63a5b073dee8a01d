"""Flash attention forward of variable-length sequences, which lie packed one behind the other: see ``varlen``.

``varlen_warp_specialized`` is for GPUs with TMA and wgmma, ``varlen_tiles`` for all others, and for left bounds and
soft caps. The former is ``flash_attention.forward_warp_specialized`` with these differences:

- A scheduling warp of its own takes tiles from the counter, finds their sequences and broadcasts them to the producer
  and the consumers (``varlen``). It waits for memory several times over: done by the producer, that would leave the
  consumers without keys.
- It takes a tile when the producer requests it, TILE_DISTANCE blocks before the end of the one before: earlier, the
  tile would wait for this program while others have none, and the last programs end late.
- Tensor maps are over (place, head, row, column); place and row both step from token to token, there are as many rows
  as tokens, and the map starts that many rows before the tensor. Then row ``tokens - length + r`` at place ``start +
  length`` is a sequence's row r, and behind its last one TMA itself ends: rows there read as zeros, whatever lies in
  memory, and are not written. So neither NaN behind a sequence's values nor another sequence's output needs care.
  Triton's ragged_tma and FlashAttention's output on Hopper do the same. But no box wholly behind a sequence is loaded:
  an H200 then reads where the map starts, which may be nobody's memory (an illegal access).
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.core import _aggregate as aggregate

from csrc_triton.attention.forward import HEAD_DIMS, PANELS, Head, OutputTile, attend_tile, consume_tile
from csrc_triton.attention.online_softmax import ping_pong_arrive
from csrc_triton.attention.pipeline import Sizes, load_scalar, load_tile, mbarriers, pipeline_of
from csrc_triton.attention.tile_scheduler import tile_pipeline
from csrc_triton.attention.varlen import (
    COORDINATES,
    CU_SEQLENS,
    DTYPES,
    MAX_SEQLENS,
    SIZES,
    STRIDES,
    WINDOW,
    Sequences,
    broadcast_no_tile,
    broadcast_varlen_tile,
    divide,
    fill_window,
    find,
    find_tile,
    first_tile,
    receive_varlen_tile,
    release_varlen_tile,
    report,
    span,
    window_memory,
)

FORM = {
    "function": "varlen_warp_specialized",
    "constants": [
        "BLOCK_N",
        "D1",
        "D2",
        "BOX",
        "OUT",
        "STAGES",
        "WARP_GROUPS",
        "REGISTERS",
        "PING_PONG",
        "MASK",
    ],
}

DECLARATION = {
    "op": "flash_attention_varlen",
    "uses": ["flash_attention_varlen_backward", "flash_attention_backward"],
    "kernels": {
        "flash_attention_varlen_forward": {
            "language": "gluon",
            "optional": True,
            "always_aligned": True,
            "matrix": True,
            "arguments": {
                "Q": "dtype[1, 1, 64, BOX]", "K": "dtype[1, 1, BLOCK_N, BOX]", "V": "dtype[1, 1, BLOCK_N, BOX]",
                "Y": "dtype[1, 1, 64, BOX]", "LSE": "*fp32", "SINKS": "*fp32", **CU_SEQLENS, "FLAG": "*i64",
                "COUNTER": "*i32", "scale": "fp32", "tiles": "i32", "heads": "i32", "ratio": "i32",
                "keys_in_l2": "i32", **SIZES, **MAX_SEQLENS,
            },
            "axes": {**DTYPES, "head_dim": HEAD_DIMS, "mask": ["full", "causal"]},
            "gives": {"head_dim": PANELS, "mask": {"full": {"MASK": 0}, "causal": {"MASK": 1}}},
            "host": ["l2_megabytes"],
            "aligned": [],
            "forms": {
                "warp_specialized": FORM,
                "warp_specialized_spills": {
                    **FORM, "may_spill": "one register, once a tile, outside of the loops over keys",
                },
            },
        },
        "flash_attention_varlen_forward_tiles": {
            "always_aligned": True,
            "matrix": True,
            "arguments": {
                "Y": "*dtype", "Q": "*dtype", "K": "*dtype", "V": "*dtype", "LSE": "*fp32", "SINKS": "*fp32",
                **CU_SEQLENS, "FLAG": "*i64", "y_head": "i32", "y_row": "i32", **STRIDES, "scale": "fp32",
                "cap": "fp32", "tiles_per_head": "i32", "ratio": "i32", "dim": "i32", **SIZES, "left": "i32",
                **MAX_SEQLENS,
            },
            "axes": {**DTYPES, "head_dim": HEAD_DIMS},
            "gives": {"head_dim": PANELS},
            "aligned": ["Y", "Q", "K", "V", "y_head", "y_row", *STRIDES, "dim"],
            "forms": {
                "tiles": {
                    "function": "varlen_tiles",
                    "constants": ["BLOCK_M", "BLOCK_N", "D1", "D2", "STAGES"],
                }
            },
        },
    },
}  # fmt: skip
TILE_DISTANCE = gl.constexpr(3)  # the producer requests the next tile so many blocks before a tile's last


@triton.jit
def varlen_tiles(
    Y, Q, K, V, LSE, SINKS, CU_SEQLENS_Q, CU_SEQLENS_K, FLAG, y_head, y_row, q_head, q_row, k_head, k_row, v_head,
    v_row, scale, cap, tiles_per_head, ratio, dim, sequences, tokens_q, tokens_k, right, left, max_seqlen_q,
    max_seqlen_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of a head of a sequence a program, the last rows first. LSE is [heads, tokens_q]; ``right`` and
    ``left`` are those of a sequence with as many keys as queries; all else is as in ``flash_attention``."""
    program = tl.program_id(0)
    if program < sequences:  # a head has more programs than there are sequences
        report(FLAG, CU_SEQLENS_Q, program, tokens_q, max_seqlen_q)
        report(FLAG, CU_SEQLENS_K, program, tokens_k, max_seqlen_k)
    head = program // tiles_per_head
    tile = tiles_per_head - 1 - program % tiles_per_head
    sequence, start_q, len_q, row = find(CU_SEQLENS_Q, tile, sequences, tokens_q, BLOCK_M)
    if (row < 0) | (row >= len_q):
        return
    start_k, len_k = span(CU_SEQLENS_K, sequence, sequences, tokens_k)
    first_q = start_q.to(tl.int64)
    first_k = start_k.to(tl.int64)
    wide = head.to(tl.int64)
    kv_head = (head // ratio).to(tl.int64)
    h = Head(
        Y + wide * y_head + first_q * y_row, Q + wide * q_head + first_q * q_row,
        K + kv_head * k_head + first_k * k_row, V + kv_head * v_head + first_k * v_row,
        LSE + wide * tokens_q + first_q, SINKS + head, (SINKS.to(tl.int64) != 0) & (sequence < sequences),
        y_row, q_row, k_row, v_row, scale, cap, dim, len_q, len_k, right + len_k - len_q, left + len_k - len_q,
    )  # fmt: skip
    attend_tile(row, h, BLOCK_M, BLOCK_N, D1, D2, STAGES)


@gluon.jit
def schedule(z, seqs, window, tile_pipe, requests, COUNTER, FLAG, max_seqlen_q, max_seqlen_k):
    """The scheduling warp: broadcasts tiles and, behind the last, that there is none. At its end it reports what is
    wrong with sequences."""
    block: gl.constexpr = 64 * z.WARP_GROUPS
    i = 0
    s = 0
    fill_window(0, seqs, window, block)
    end = first_tile(WINDOW, seqs, block)
    t = gl.program_id(0)
    while t < seqs.tiles:
        while divide(t, seqs.heads) >= end:
            s += WINDOW
            fill_window(s, seqs, window, block)
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
        report(FLAG, seqs.cu_seqlens_k, s, seqs.tokens_k, max_seqlen_k)
    if gl.atomic_add(COUNTER + 1, 1) == gl.num_programs(0) - 1:  # the last program resets the counter
        gl.store(COUNTER, 0)
        gl.store(COUNTER + 1, 0)


@gluon.jit
def zero_stage(pipeline, stage, z):
    """Fill a stage with zeros, by the producer itself."""
    zero_panel(pipeline.first.index(stage), z.BLOCK_N * z.D1)
    if z.D2 > 0:
        zero_panel(pipeline.second.index(stage), z.BLOCK_N * z.D2)
    fence_async_shared()
    mbarrier.arrive(pipeline.full.index(stage), count=1)


@gluon.jit
def zero_panel(panel, values: gl.constexpr):
    """``values`` of 16 bits. Zeros need no swizzled layout, whose addresses would take registers from all tiles."""
    lanes: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    words = panel._reinterpret(gl.int32, [values // 2], mbarrier.MBarrierLayout())
    words.store(gl.zeros([values // 2], gl.int32, lanes))


@gluon.jit
def produce(z, seqs, Q, K, V, q, k, v, tile_pipe, requests):
    """The producer warp: loads Q, K and V, and requests the next tile."""
    b = 0  # blocks of keys loaded
    i = 0  # tiles loaded
    tile = receive_varlen_tile(0, tile_pipe, 1)
    while tile.t < seqs.tiles:
        release_varlen_tile(i, tile_pipe)
        row = tile.m * (64 * z.WARP_GROUPS)
        first, last = tile.scheduler(seqs).blocks(row, row + 64 * z.WARP_GROUPS, z)
        place_k = tile.start_k + tile.len_k
        past_k = seqs.tokens_k - tile.len_k
        for j in range(last - first):
            if j == gl.maximum(last - first - TILE_DISTANCE, 0):
                mbarrier.arrive(requests.index(0), count=1)
            key = past_k + (last - 1 - j) * z.BLOCK_N
            stage = b % z.STAGES
            phase = ((b // z.STAGES) & 1) ^ 1
            mbarrier.wait(k.empty.index(stage), phase)
            if tile.len_k > 0:
                load_tile(K, place_k, tile.head // seqs.ratio, key, k, stage, z)
            else:  # the one block of no keys: all scores are masked, whatever they are
                mbarrier.arrive(k.full.index(stage), count=1)
            if j == 0:
                past_q = seqs.tokens_q - tile.len_q + row
                for g in gl.static_range(z.WARP_GROUPS):
                    mbarrier.wait(q.empty.index(g), (i & 1) ^ 1)
                    if row + g * 64 < tile.len_q:
                        load_tile(Q, tile.start_q + tile.len_q, tile.head, past_q + g * 64, q, g, z)
                    else:  # a warp group without rows waits all the same
                        mbarrier.arrive(q.full.index(g), count=1)
            mbarrier.wait(v.empty.index(stage), phase)
            if tile.len_k > 0:
                load_tile(V, place_k, tile.head // seqs.ratio, key, v, stage, z)
            else:  # 0 times what lies there could be NaN
                zero_stage(v, stage, z)
            b += 1
        i += 1
        tile = receive_varlen_tile(i, tile_pipe, 1)


@aggregate
class BroadcastOutput:
    """The ``OutputTile`` of a broadcast tile, read from shared memory when it is needed: the loop over keys leaves few
    registers."""

    values: gl.shared_memory_descriptor
    at: gl.tensor
    tokens_q: gl.tensor

    @gluon.constexpr_function
    def __init__(self, values, at, tokens_q):
        self.values, self.at, self.tokens_q = values, at, tokens_q

    @gluon.jit
    def load(self):
        m = load_scalar(self.values, self.at + 1, 4)
        head = load_scalar(self.values, self.at + 2, 4)
        start = load_scalar(self.values, self.at + 3, 4)
        length = load_scalar(self.values, self.at + 4, 4)
        inside = load_scalar(self.values, self.at + 8, 4)
        lse = head.to(gl.int64) * self.tokens_q.to(gl.uint32) + start
        return OutputTile(m, start + length, head, self.tokens_q - length, lse, length, inside != 0)


@gluon.jit
def consume(z, seqs, q, k, v, tile_pipe, buffer, Y, LSE, SINKS, scale, g: gl.constexpr):
    """Consumer warp group g: rows 64 g to 64 g + 63 of each tile."""
    if g == z.WARP_GROUPS - 1:
        ping_pong_arrive(g, z)  # warp group 0 starts
    b = 0
    i = 0
    tile = receive_varlen_tile(0, tile_pipe, 4)
    while tile.t < seqs.tiles:
        output = BroadcastOutput(tile_pipe.first, (i & 1) * COORDINATES, seqs.tokens_q)
        b = consume_tile(
            tile.m, output, b, i, q, k, v, tile.scheduler(seqs), buffer, Y, LSE, SINKS, scale, scale, g, z
        )
        release_varlen_tile(i, tile_pipe)
        i += 1
        tile = receive_varlen_tile(i, tile_pipe, 4)
    tma.store_wait(0)


@gluon.jit
def varlen_warp_specialized(
    Q, K, V, Y, LSE, SINKS, CU_SEQLENS_Q, CU_SEQLENS_K, FLAG, COUNTER, scale, tiles, heads, ratio, keys_in_l2,
    sequences, tokens_q, tokens_k, right, max_seqlen_q, max_seqlen_k, BLOCK_N: gl.constexpr, D1: gl.constexpr,
    D2: gl.constexpr, BOX: gl.constexpr, OUT: gl.constexpr, STAGES: gl.constexpr, WARP_GROUPS: gl.constexpr,
    REGISTERS: gl.constexpr, PING_PONG: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """As ``flash_attention.forward_warp_specialized``, without a left bound and a soft cap. LSE, ``right`` and the
    report are as in ``varlen_tiles``."""
    z = Sizes(BLOCK_N, D1, D2, BOX, STAGES, WARP_GROUPS, MASK, PING_PONG)
    seqs = Sequences(
        CU_SEQLENS_Q, CU_SEQLENS_K, sequences, tokens_q, tokens_k, tiles, heads, ratio, keys_in_l2, right
    )
    q = pipeline_of(Q, WARP_GROUPS, 1, z)
    k = pipeline_of(K, STAGES, WARP_GROUPS, z)
    v = pipeline_of(V, STAGES, WARP_GROUPS, z)
    tile_pipe = tile_pipeline(COORDINATES, WARP_GROUPS + 1)
    window = window_memory()
    requests = mbarriers(1, 1)
    out = gl.allocate_shared_memory(Y.dtype, [WARP_GROUPS, 1, 1, 64, OUT], Y.layout)
    fence_async_shared()
    # the tuples stay literal: through a variable, constants would turn into run-time values
    if WARP_GROUPS == 3:
        gl.warp_specialize(
            [
                (consume, (z, seqs, q, k, v, tile_pipe, out.index(0), Y, LSE, SINKS, scale, 0)),
                (consume, (z, seqs, q, k, v, tile_pipe, out.index(1), Y, LSE, SINKS, scale, 1)),
                (consume, (z, seqs, q, k, v, tile_pipe, out.index(2), Y, LSE, SINKS, scale, 2)),
                (produce, (z, seqs, Q, K, V, q, k, v, tile_pipe, requests)),
                (schedule, (z, seqs, window, tile_pipe, requests, COUNTER, FLAG, max_seqlen_q, max_seqlen_k)),
            ],
            [4, 4, 1, 1],
            [REGISTERS, REGISTERS, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (z, seqs, q, k, v, tile_pipe, out.index(0), Y, LSE, SINKS, scale, 0)),
                (consume, (z, seqs, q, k, v, tile_pipe, out.index(1), Y, LSE, SINKS, scale, 1)),
                (produce, (z, seqs, Q, K, V, q, k, v, tile_pipe, requests)),
                (schedule, (z, seqs, window, tile_pipe, requests, COUNTER, FLAG, max_seqlen_q, max_seqlen_k)),
            ],
            [4, 1, 1],
            [REGISTERS, 32, 32],
        )
