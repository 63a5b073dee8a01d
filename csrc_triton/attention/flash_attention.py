"""Flash attention forward: Y = softmax(Q K^T scale) V by blocks of keys, and the log of each row's sum (LSE).

``forward_warp_specialized`` is for GPUs with TMA and wgmma, ``forward_tiles`` for all others.

The warp-specialised kernel follows FlashAttention-3 (Shah et al., 2024): a producer warp loads Q, K and V with TMA;
consumer warp groups own 64 query rows each and multiply with wgmma.

- It is persistent: a program takes tiles (64 rows a warp group, of one head) from a counter in global memory, and the
  producer loads the next tile while the consumers finish this one.
- Tensor maps have four dimensions (batch, head, row, column): what lies outside reads as zero and is not written, so
  that any strides, lengths and head dimensions work without a copy.
- With PING_PONG the softmax of one warp group overlaps with the products of another.
- With SHARED_PIPELINE K and V share one pipeline. Where two stages of both do not fit beside Q, three stages of one
  pipeline allow longer blocks than two pairs would.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from csrc_triton.attention.forward import HEAD_DIMS, PANELS, Head, OutputTile, attend_tile, consume_tile
from csrc_triton.attention.online_softmax import ping_pong_arrive
from csrc_triton.attention.pipeline import Sizes, load_tile, pipeline_of
from csrc_triton.attention.tile_scheduler import (
    FULL,
    TileScheduler,
    broadcast_tile,
    receive_tile,
    swizzled_tile,
    tile_pipeline,
)

DECLARATION = {
    "op": "flash_attention",
    "uses": ["flash_attention_backward"],
    "kernels": {
        "flash_attention_forward": {
            "language": "gluon",
            "optional": True,
            "always_aligned": True,
            "matrix": True,
            "arguments": {
                "Q": "dtype[1, 1, 64, BOX]",
                "K": "dtype[1, 1, BLOCK_N, BOX]",
                "V": "dtype[1, 1, BLOCK_N, BOX]",
                "Y": "dtype[1, 1, 64, BOX]",
                "LSE": "*fp32",
                "SINKS": "*fp32",
                "COUNTER": "*i32",
                "lse_stride": "i64",
                "scale": "fp32",
                "cap": "fp32",
                "tiles": "i32",
                "tiles_per_head": "i32",
                "heads": "i32",
                "all_heads": "i32",
                "ratio": "i32",
                "swizzle_tiles": "i32",
                "swizzle_heads": "i32",
                "len_q": "i32",
                "len_k": "i32",
                "right": "i32",
                "left": "i32",
            },
            "axes": {
                "dtype": ["bf16", "fp16"],
                "head_dim": HEAD_DIMS,
                "mask": ["full", "causal", "local"],
            },
            "gives": {
                "head_dim": PANELS,
                "mask": {"full": {"MASK": 0}, "causal": {"MASK": 1}, "local": {"MASK": 2}},
            },
            "host": ["l2_megabytes"],
            "aligned": [],
            "forms": {
                "warp_specialized": {
                    "function": "forward_warp_specialized",
                    "constants": [
                        "BLOCK_N", "D1", "D2", "BOX", "OUT", "STAGES", "WARP_GROUPS", "REGISTERS", "PING_PONG", "MASK",
                        "PREFETCH_TILE", "SHARED_PIPELINE", "BROADCAST_TILE",
                    ],
                    "defaults": {"PREFETCH_TILE": 1, "SHARED_PIPELINE": 0, "BROADCAST_TILE": 0},
                }
            },
        },
        "flash_attention_forward_tiles": {
            "optional": True,
            "always_aligned": True,
            "matrix": True,
            "arguments": {
                "Y": "*dtype",
                "Q": "*dtype",
                "K": "*dtype",
                "V": "*dtype",
                "LSE": "*fp32",
                "SINKS": "*fp32",
                "y_batch": "i64",
                "y_head": "i32",
                "y_row": "i32",
                "q_batch": "i64",
                "q_head": "i32",
                "q_row": "i32",
                "k_batch": "i64",
                "k_head": "i32",
                "k_row": "i32",
                "v_batch": "i64",
                "v_head": "i32",
                "v_row": "i32",
                "scale": "fp32",
                "cap": "fp32",
                "tiles_per_head": "i32",
                "swizzle_heads": "i32",
                "heads": "i32",
                "ratio": "i32",
                "dim": "i32",
                "len_q": "i32",
                "len_k": "i32",
                "right": "i32",
                "left": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16"], "head_dim": HEAD_DIMS},
            "gives": {"head_dim": PANELS},
            "aligned": [
                "Y", "Q", "K", "V", "y_batch", "y_head", "y_row", "q_batch", "q_head", "q_row",
                "k_batch", "k_head", "k_row", "v_batch", "v_head", "v_row", "dim",
            ],
            "forms": {
                "tiles": {
                    "function": "forward_tiles",
                    "constants": ["BLOCK_M", "BLOCK_N", "D1", "D2", "STAGES"],
                }
            },
        },
    },
}  # fmt: skip


@gluon.jit
def wait_empty(pipeline, n, z):
    mbarrier.wait(pipeline.empty.index(n % z.STAGES), ((n // z.STAGES) & 1) ^ 1)


@gluon.jit
def take_tile(i, scheduler, tile_pipe, COUNTER, z):
    """Take a tile and broadcast it as the consumers' i-th."""
    t = gl.atomic_add(COUNTER, 1) + gl.num_programs(0)
    broadcast_tile(t, i, scheduler, tile_pipe, z)
    return t


@gluon.jit
def produce(z, scheduler, Q, K, V, q, k, v, tile_pipe, COUNTER):
    """The producer warp: takes tiles, broadcasts them and loads Q, K and V.

    With PREFETCH_TILE it takes the next tile before it loads this one's blocks. That tile then waits for this program,
    however long the blocks take, while at the end other programs have none. Without, it takes the tile after the last
    load, when the consumers still have all stages to compute: too late where tiles are short.
    """
    b = 0  # blocks of keys loaded; with SHARED_PIPELINE tiles of K and V
    i = 0  # tiles taken
    t = gl.program_id(0)
    broadcast_tile(t, 0, scheduler, tile_pipe, z)
    while t < scheduler.tiles:
        m, batch, head = scheduler.decode(t, z)
        if z.PREFETCH_TILE:
            t = take_tile(i + 1, scheduler, tile_pipe, COUNTER, z)
        row = m * (64 * z.WARP_GROUPS)
        first, last = scheduler.blocks(row, row + 64 * z.WARP_GROUPS, z)
        for j in range(last - first):
            key = (last - 1 - j) * z.BLOCK_N
            stage = b % z.STAGES
            phase = ((b // z.STAGES) & 1) ^ 1
            mbarrier.wait(k.empty.index(stage), phase)
            load_tile(K, batch, head // scheduler.ratio, key, k, stage, z)
            if j == 0:
                for g in gl.static_range(z.WARP_GROUPS):
                    mbarrier.wait(q.empty.index(g), (i & 1) ^ 1)
                    load_tile(Q, batch, head, row + g * 64, q, g, z)
            if z.SHARED_PIPELINE:
                if j > 0:
                    b += 1
                    wait_empty(v, b, z)
                    load_tile(V, batch, head // scheduler.ratio, key + z.BLOCK_N, v, b % z.STAGES, z)
            else:
                mbarrier.wait(v.empty.index(stage), phase)
                load_tile(V, batch, head // scheduler.ratio, key, v, stage, z)
            b += 1
        if z.SHARED_PIPELINE:
            wait_empty(v, b, z)
            load_tile(V, batch, head // scheduler.ratio, first * z.BLOCK_N, v, b % z.STAGES, z)
            b += 1
        i += 1
        if not z.PREFETCH_TILE:
            t = take_tile(i, scheduler, tile_pipe, COUNTER, z)
    if gl.atomic_add(COUNTER + 1, 1) == gl.num_programs(0) - 1:  # the last program resets the counter
        gl.store(COUNTER, 0)
        gl.store(COUNTER + 1, 0)


@gluon.jit
def consume(z, scheduler, q, k, v, tile_pipe, buffer, Y, LSE, lse_stride, SINKS, scale, cap, g: gl.constexpr):
    """Consumer warp group g: rows 64 g to 64 g + 63 of each tile."""
    if g == z.WARP_GROUPS - 1:
        ping_pong_arrive(g, z)  # warp group 0 starts
    b = 0
    i = 0
    t, tile, batch, head = receive_tile(0, tile_pipe, z)
    while t < scheduler.tiles:
        if not z.BROADCAST_TILE:
            tile, batch, head = scheduler.decode(t, z)
        lse = (batch * scheduler.heads + head).to(gl.int64) * lse_stride
        output = OutputTile(tile, batch, head, batch * 0, lse, scheduler.len_q, batch >= 0)
        b = consume_tile(tile, output, b, i, q, k, v, scheduler, buffer, Y, LSE, SINKS, scale, cap, g, z)
        i += 1
        t, tile, batch, head = receive_tile(i, tile_pipe, z)
    tma.store_wait(0)


@gluon.jit
def forward_warp_specialized(
    Q,
    K,
    V,
    Y,
    LSE,
    SINKS,
    COUNTER,
    lse_stride,
    scale,
    cap,
    tiles,
    tiles_per_head,
    heads,
    all_heads,
    ratio,
    swizzle_tiles,
    swizzle_heads,
    len_q,
    len_k,
    right,
    left,
    BLOCK_N: gl.constexpr,
    D1: gl.constexpr,
    D2: gl.constexpr,
    BOX: gl.constexpr,
    OUT: gl.constexpr,
    STAGES: gl.constexpr,
    WARP_GROUPS: gl.constexpr,
    REGISTERS: gl.constexpr,
    PING_PONG: gl.constexpr,
    MASK: gl.constexpr,
    PREFETCH_TILE: gl.constexpr,
    SHARED_PIPELINE: gl.constexpr,
    BROADCAST_TILE: gl.constexpr,
):
    """WARP_GROUPS consumer warp groups of REGISTERS registers a thread, and a producer warp.

    Q, K, V, Y are tensor maps over (batch, head, row, column) with boxes of 64 or BLOCK_N rows and BOX columns. scale
    is times log2(e); with a soft cap, cap is scale / soft cap, and scale the soft cap times log2(e). COUNTER is two
    zeros, which the last program resets. Y is stored through buffers of OUT columns.
    """
    z = Sizes(
        BLOCK_N,
        D1,
        D2,
        BOX,
        STAGES,
        WARP_GROUPS,
        MASK,
        PING_PONG,
        PREFETCH_TILE,
        SHARED_PIPELINE,
        BROADCAST_TILE,
    )
    scheduler = TileScheduler(
        tiles,
        tiles_per_head,
        heads,
        all_heads,
        ratio,
        swizzle_tiles,
        swizzle_heads,
        len_q,
        len_k,
        right,
        left,
    )
    q = pipeline_of(Q, WARP_GROUPS, 1, z)
    k = pipeline_of(K, STAGES, WARP_GROUPS, z)
    v = k
    if SHARED_PIPELINE:
        gl.static_assert(MASK == FULL)  # a warp group skips whole tiles alone
    else:
        v = pipeline_of(V, STAGES, WARP_GROUPS, z)
    tile_pipe = tile_pipeline(4 if BROADCAST_TILE else 1, WARP_GROUPS)
    out = gl.allocate_shared_memory(Y.dtype, [WARP_GROUPS, 1, 1, 64, OUT], Y.layout)
    fence_async_shared()
    # the tuples stay literal: through a variable, constants would turn into run-time values
    if WARP_GROUPS == 3:
        gl.warp_specialize(
            [
                (consume, (z, scheduler, q, k, v, tile_pipe, out.index(0), Y, LSE, lse_stride, SINKS, scale, cap, 0)),
                (consume, (z, scheduler, q, k, v, tile_pipe, out.index(1), Y, LSE, lse_stride, SINKS, scale, cap, 1)),
                (consume, (z, scheduler, q, k, v, tile_pipe, out.index(2), Y, LSE, lse_stride, SINKS, scale, cap, 2)),
                (produce, (z, scheduler, Q, K, V, q, k, v, tile_pipe, COUNTER)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (z, scheduler, q, k, v, tile_pipe, out.index(0), Y, LSE, lse_stride, SINKS, scale, cap, 0)),
                (consume, (z, scheduler, q, k, v, tile_pipe, out.index(1), Y, LSE, lse_stride, SINKS, scale, cap, 1)),
                (produce, (z, scheduler, Q, K, V, q, k, v, tile_pipe, COUNTER)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip


@triton.jit
def forward_tiles(
    Y,
    Q,
    K,
    V,
    LSE,
    SINKS,
    y_batch,
    y_head,
    y_row,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    scale,
    cap,
    tiles_per_head,
    swizzle_heads,
    heads,
    ratio,
    dim,
    len_q,
    len_k,
    right,
    left,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BLOCK_M rows of a head of Q a program, the last rows of a head first. ``swizzle_heads``: see ``swizzled_tile``;
    the other arguments are ``forward_warp_specialized``'s."""
    batch_head, number = swizzled_tile(tiles_per_head, swizzle_heads)
    tile = tiles_per_head - 1 - number
    batch = (batch_head // heads).to(tl.int64)
    head = batch_head % heads
    Q += batch * q_batch + head.to(tl.int64) * q_head
    Y += batch * y_batch + head.to(tl.int64) * y_head
    K += batch * k_batch + (head // ratio).to(tl.int64) * k_head
    V += batch * v_batch + (head // ratio).to(tl.int64) * v_head
    LSE += batch_head.to(tl.int64) * len_q
    h = Head(
        Y, Q, K, V, LSE, SINKS + head, SINKS.to(tl.int64) != 0, y_row, q_row, k_row, v_row, scale, cap, dim, len_q,
        len_k, right, left,
    )  # fmt: skip
    attend_tile(tile * BLOCK_M, h, BLOCK_M, BLOCK_N, D1, D2, STAGES)
