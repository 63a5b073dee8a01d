"""Flash attention forward: Y = softmax(Q K^T scale) V by blocks of keys, and the log of each row's sum (LSE).

``forward_groups`` is for GPUs with TMA and wgmma: see ``attention_groups``. ``forward_tiles`` is for all others.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from csrc_triton.attention.attention_consumer import consume
from csrc_triton.attention.attention_groups import FULL, Sizes, Work, ring
from csrc_triton.attention.attention_producer import board_ring, produce
from csrc_triton.attention.attention_tiles import attend_tile
from csrc_triton.attention.attention_turns import in_turns

GROUPS_FORM = {
    "function": "forward_groups",
    "constants": [
        "BLOCK_N", "D1", "D2", "BOX", "OUT", "STAGES", "WARP_GROUPS", "REGISTERS", "TURNS", "MASK", "LATE", "ONE_RING",
        "TOLD",
    ],
}  # fmt: skip

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
                "COUNT": "*i32",
                "lse_stride": "i64",
                "scale": "fp32",
                "cap": "fp32",
                "tiles": "i32",
                "tiles_a_head": "i32",
                "heads": "i32",
                "all_heads": "i32",
                "ratio": "i32",
                "section": "i32",
                "section_heads": "i32",
                "len_q": "i32",
                "len_k": "i32",
                "right": "i32",
                "left": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16"]},
            "host": ["cache_megabytes", "longest"],
            "aligned": [],
            "forms": {"groups": {**GROUPS_FORM, "defaults": {"MASK": 0, "LATE": 0, "ONE_RING": 0, "TOLD": 0}}},
        },
        "flash_attention_forward_causal": {
            "like": "flash_attention_forward",
            "forms": {"groups": {**GROUPS_FORM, "defaults": {"MASK": 1, "LATE": 0, "ONE_RING": 0, "TOLD": 0}}},
        },
        "flash_attention_forward_local": {
            "like": "flash_attention_forward",
            "forms": {"groups": {**GROUPS_FORM, "defaults": {"MASK": 2, "LATE": 0, "ONE_RING": 0, "TOLD": 0}}},
        },
        "flash_attention_forward_short_64": {
            "like": "flash_attention_forward",
            "forms": {"groups": {**GROUPS_FORM, "defaults": {"MASK": 1, "LATE": 0, "ONE_RING": 0, "TOLD": 0}}},
        },
        "flash_attention_forward_short_96": {
            "like": "flash_attention_forward",
            "forms": {"groups": {**GROUPS_FORM, "defaults": {"MASK": 1, "LATE": 0, "ONE_RING": 0, "TOLD": 0}}},
        },
        "flash_attention_forward_short_128": {
            "like": "flash_attention_forward",
            "forms": {"groups": {**GROUPS_FORM, "defaults": {"MASK": 1, "LATE": 0, "ONE_RING": 0, "TOLD": 0}}},
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
                "tiles_a_head": "i32",
                "section": "i32",
                "heads": "i32",
                "ratio": "i32",
                "dim": "i32",
                "len_q": "i32",
                "len_k": "i32",
                "right": "i32",
                "left": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16"]},
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
def forward_groups(
    Q,
    K,
    V,
    Y,
    LSE,
    SINKS,
    COUNT,
    lse_stride,
    scale,
    cap,
    tiles,
    tiles_a_head,
    heads,
    all_heads,
    ratio,
    section,
    section_heads,
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
    TURNS: gl.constexpr,
    MASK: gl.constexpr,
    LATE: gl.constexpr,
    ONE_RING: gl.constexpr,
    TOLD: gl.constexpr,
):
    """WARP_GROUPS consumer groups of REGISTERS registers a thread, and a producer warp.

    Q, K, V, Y are tensor maps over (batch, head, row, column) with boxes of 64 or BLOCK_N rows and BOX columns. scale
    is times log2(e); with a soft cap, cap is scale / soft cap, and scale the soft cap times log2(e). COUNT is two
    zeros, which the last block leaves as zeros again. Y leaves through buffers of OUT columns.
    """
    z = Sizes(BLOCK_N, D1, D2, BOX, STAGES, WARP_GROUPS, MASK, TURNS, LATE, ONE_RING, TOLD)
    work = Work(
        tiles, tiles_a_head, heads, all_heads, ratio, section, section_heads, len_q, len_k, right, left
    )
    q = ring(Q, WARP_GROUPS, 1, z)
    k = ring(K, STAGES, WARP_GROUPS, z)
    v = k
    if ONE_RING:
        gl.static_assert(MASK == FULL)  # a group passes over no block alone
    else:
        v = ring(V, STAGES, WARP_GROUPS, z)
    board = board_ring(WARP_GROUPS, z)
    out = gl.allocate_shared_memory(Y.dtype, [WARP_GROUPS, 1, 1, 64, OUT], Y.layout)
    fence_async_shared()
    # the tuples stay literal: through a variable, constants would turn into run-time values
    if WARP_GROUPS == 3:
        gl.warp_specialize(
            [
                (consume, (z, work, q, k, v, board, out.index(0), Y, LSE, lse_stride, SINKS, scale, cap, 0)),
                (consume, (z, work, q, k, v, board, out.index(1), Y, LSE, lse_stride, SINKS, scale, cap, 1)),
                (consume, (z, work, q, k, v, board, out.index(2), Y, LSE, lse_stride, SINKS, scale, cap, 2)),
                (produce, (z, work, Q, K, V, q, k, v, board, COUNT)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (z, work, q, k, v, board, out.index(0), Y, LSE, lse_stride, SINKS, scale, cap, 0)),
                (consume, (z, work, q, k, v, board, out.index(1), Y, LSE, lse_stride, SINKS, scale, cap, 1)),
                (produce, (z, work, Q, K, V, q, k, v, board, COUNT)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )


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
    tiles_a_head,
    section,
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
    """BLOCK_M rows of a head of Q a program, the last rows of a head first. ``section`` is ``in_turns``', the
    other arguments ``forward_groups``'."""
    both, number = in_turns(tiles_a_head, section)
    tile = tiles_a_head - 1 - number
    batch = (both // heads).to(tl.int64)
    head = both % heads
    Q += batch * q_batch + head.to(tl.int64) * q_head
    Y += batch * y_batch + head.to(tl.int64) * y_head
    K += batch * k_batch + (head // ratio).to(tl.int64) * k_head
    V += batch * v_batch + (head // ratio).to(tl.int64) * v_head
    LSE += both.to(tl.int64) * len_q
    attend_tile(
        tile * BLOCK_M, Y, Q, K, V, LSE, SINKS + head, SINKS.to(tl.int64) != 0, y_row, q_row, k_row, v_row, scale, cap,
        dim, len_q, len_k, right, left, BLOCK_M, BLOCK_N, D1, D2, STAGES,
    )  # fmt: skip
