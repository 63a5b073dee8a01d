"""Flash attention forward of sequences that lie packed one behind the other: see ``attention_sequences``.

``packed_groups`` is for GPUs with TMA and wgmma, a kernel for each head dimension: see ``attention_packed_groups``.
``packed_tiles`` is for all others, and for left bounds and soft caps.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from csrc_triton.attention.attention_groups import Sizes, barriers, ring
from csrc_triton.attention.attention_packed_groups import (
    consume_packed,
    packed_board,
    produce_packed,
    schedule_packed,
)
from csrc_triton.attention.attention_packed_order import Packed, order_board
from csrc_triton.attention.attention_sequences import (
    BOUNDS,
    DTYPES,
    LONGEST,
    SIZES,
    STRIDES,
    find,
    report,
    span,
)
from csrc_triton.attention.attention_tiles import attend_tile

GROUPS = {
    "language": "gluon",
    "optional": True,
    "always_aligned": True,
    "matrix": True,
    "arguments": {
        "Q": "dtype[1, 1, 64, BOX]", "K": "dtype[1, 1, BLOCK_N, BOX]", "V": "dtype[1, 1, BLOCK_N, BOX]",
        "Y": "dtype[1, 1, 64, BOX]", "LSE": "*fp32", "SINKS": "*fp32", **BOUNDS, "FLAG": "*i64", "COUNT": "*i32",
        "scale": "fp32", "tiles": "i32", "heads": "i32", "ratio": "i32", "together": "i32", **SIZES, **LONGEST,
    },
    "axes": DTYPES,
    "host": ["cache_megabytes", "longest"],
    "aligned": [],
}  # fmt: skip
BY_GROUPS = {
    "function": "packed_groups",
    "constants": [
        "BLOCK_N",
        "D1",
        "D2",
        "BOX",
        "OUT",
        "STAGES",
        "WARP_GROUPS",
        "REGISTERS",
        "TURNS",
        "ASK",
        "MASK",
    ],
}

ONE_SPILLS = {"may_spill": "one register, once a tile, outside of the loops over its keys"}
# A head dimension's panels of columns, boxes and pieces of the output.
OF_64 = {"D1": 64, "D2": 0, "BOX": 64, "OUT": 64}
OF_96 = {"D1": 64, "D2": 32, "BOX": 32, "OUT": 64}
OF_128 = {"D1": 128, "D2": 0, "BOX": 64, "OUT": 128}
OF_192 = {"D1": 128, "D2": 64, "BOX": 64, "OUT": 128}
OF_256 = {"D1": 256, "D2": 0, "BOX": 64, "OUT": 128}

DECLARATION = {
    "op": "flash_attention_varlen",
    "uses": ["flash_attention_varlen_backward", "flash_attention_backward"],
    "kernels": {
        "flash_attention_varlen_forward": {
            "always_aligned": True,
            "matrix": True,
            "arguments": {
                "Y": "*dtype", "Q": "*dtype", "K": "*dtype", "V": "*dtype", "LSE": "*fp32", "SINKS": "*fp32",
                **BOUNDS, "FLAG": "*i64", "y_head": "i32", "y_row": "i32", **STRIDES, "scale": "fp32", "cap": "fp32",
                "tiles_a_head": "i32", "ratio": "i32", "dim": "i32", **SIZES, "left": "i32", **LONGEST,
            },
            "axes": DTYPES,
            "aligned": ["Y", "Q", "K", "V", "y_head", "y_row", *STRIDES, "dim"],
            "forms": {
                "tiles": {
                    "function": "packed_tiles",
                    "constants": ["BLOCK_M", "BLOCK_N", "D1", "D2", "STAGES"],
                }
            },
        },
        "flash_attention_varlen_forward_groups_64": {
            **GROUPS, "forms": {"groups": {**BY_GROUPS, "defaults": {**OF_64, "MASK": 1}}},
        },
        "flash_attention_varlen_forward_groups_96": {
            **GROUPS, "forms": {"groups": {**BY_GROUPS, "defaults": {**OF_96, "MASK": 1}}},
        },
        "flash_attention_varlen_forward_groups_128": {
            **GROUPS, "forms": {"groups": {**BY_GROUPS, "defaults": {**OF_128, "MASK": 1}}},
        },
        "flash_attention_varlen_forward_groups_192": {
            **GROUPS, "forms": {"groups": {**BY_GROUPS, "defaults": {**OF_192, "MASK": 1}}},
        },
        "flash_attention_varlen_forward_groups_256": {
            **GROUPS, "forms": {"groups": {**BY_GROUPS, "defaults": {**OF_256, "MASK": 1}}},
        },
        "flash_attention_varlen_forward_groups_64_full": {
            **GROUPS, "forms": {"groups": {**BY_GROUPS, "defaults": {**OF_64, "MASK": 0}}},
        },
        "flash_attention_varlen_forward_groups_96_full": {
            **GROUPS, "forms": {"groups": {**BY_GROUPS, "defaults": {**OF_96, "MASK": 0}}},
        },
        "flash_attention_varlen_forward_groups_128_full": {
            **GROUPS, "forms": {"groups": {**BY_GROUPS, "defaults": {**OF_128, "MASK": 0}}},
        },
        "flash_attention_varlen_forward_groups_192_full": {
            **GROUPS, "forms": {"groups": {**BY_GROUPS, "defaults": {**OF_192, "MASK": 0}}},
        },
        "flash_attention_varlen_forward_groups_256_full": {
            **GROUPS, "forms": {"groups": {**BY_GROUPS, "defaults": {**OF_256, "MASK": 0}}},
        },
        "flash_attention_varlen_forward_groups_64_short": {
            **GROUPS, "forms": {"groups": {**BY_GROUPS, "defaults": {**OF_64, "MASK": 1}}},
        },
        "flash_attention_varlen_forward_groups_96_short": {
            **GROUPS, "forms": {"groups": {**BY_GROUPS, **ONE_SPILLS, "defaults": {**OF_96, "MASK": 1}}},
        },
        "flash_attention_varlen_forward_groups_128_short": {
            **GROUPS, "forms": {"groups": {**BY_GROUPS, **ONE_SPILLS, "defaults": {**OF_128, "MASK": 1}}},
        },
    },
}  # fmt: skip


@triton.jit
def packed_tiles(
    Y, Q, K, V, LSE, SINKS, BOUNDS_Q, BOUNDS_K, FLAG, y_head, y_row, q_head, q_row, k_head, k_row, v_head,
    v_row, scale, cap, tiles_a_head, ratio, dim, sequences, tokens_q, tokens_k, right, left, longest_q,
    longest_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of a head of a sequence a program, the last rows first. LSE is [heads, tokens_q]; ``right`` and
    ``left`` are a sequence's with as many keys as queries, the rest is as ``flash_attention`` has it."""
    program = tl.program_id(0)
    if program < sequences:  # a head has more programs than there are sequences
        report(FLAG, BOUNDS_Q, program, tokens_q, longest_q)
        report(FLAG, BOUNDS_K, program, tokens_k, longest_k)
    head = program // tiles_a_head
    tile = tiles_a_head - 1 - program % tiles_a_head
    sequence, start_q, len_q, row = find(BOUNDS_Q, tile, sequences, tokens_q, BLOCK_M)
    if (row < 0) | (row >= len_q):
        return
    start_k, len_k = span(BOUNDS_K, sequence, sequences, tokens_k)
    first_q = start_q.to(tl.int64)
    first_k = start_k.to(tl.int64)
    wide = head.to(tl.int64)
    kv_head = (head // ratio).to(tl.int64)
    attend_tile(
        row, Y + wide * y_head + first_q * y_row, Q + wide * q_head + first_q * q_row,
        K + kv_head * k_head + first_k * k_row, V + kv_head * v_head + first_k * v_row, LSE + wide * tokens_q + first_q,
        SINKS + head, (SINKS.to(tl.int64) != 0) & (sequence < sequences), y_row, q_row, k_row, v_row, scale, cap, dim,
        len_q, len_k, right + len_k - len_q, left + len_k - len_q, BLOCK_M, BLOCK_N, D1, D2, STAGES,
    )  # fmt: skip


@gluon.jit
def packed_groups(
    Q, K, V, Y, LSE, SINKS, BOUNDS_Q, BOUNDS_K, FLAG, COUNT, scale, tiles, heads, ratio, together, sequences,
    tokens_q, tokens_k, right, longest_q, longest_k, BLOCK_N: gl.constexpr, D1: gl.constexpr, D2: gl.constexpr,
    BOX: gl.constexpr, OUT: gl.constexpr, STAGES: gl.constexpr, WARP_GROUPS: gl.constexpr, REGISTERS: gl.constexpr,
    TURNS: gl.constexpr, ASK: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """As ``flash_attention.forward_groups``, without a left bound and a soft cap. Tensor maps are over (place, head,
    row, column), as ``attention_packed_groups`` says; LSE, ``right`` and the report are ``packed_tiles``'."""
    z = Sizes(BLOCK_N, D1, D2, BOX, STAGES, WARP_GROUPS, MASK, TURNS)
    packed = Packed(BOUNDS_Q, BOUNDS_K, sequences, tokens_q, tokens_k, tiles, heads, ratio, together, right)
    q = ring(Q, WARP_GROUPS, 1, z)
    k = ring(K, STAGES, WARP_GROUPS, z)
    v = ring(V, STAGES, WARP_GROUPS, z)
    board = packed_board(WARP_GROUPS + 1)
    order = order_board()
    asked = barriers(1, 1)
    out = gl.allocate_shared_memory(Y.dtype, [WARP_GROUPS, 1, 1, 64, OUT], Y.layout)
    fence_async_shared()
    # the tuples stay literal: through a variable, constants would turn into run-time values
    if WARP_GROUPS == 3:
        gl.warp_specialize(
            [
                (consume_packed, (z, packed, q, k, v, board, out.index(0), Y, LSE, SINKS, scale, 0)),
                (consume_packed, (z, packed, q, k, v, board, out.index(1), Y, LSE, SINKS, scale, 1)),
                (consume_packed, (z, packed, q, k, v, board, out.index(2), Y, LSE, SINKS, scale, 2)),
                (produce_packed, (z, packed, Q, K, V, q, k, v, board, asked, ASK)),
                (schedule_packed, (z, packed, order, board, asked, COUNT, FLAG, longest_q, longest_k)),
            ],
            [4, 4, 1, 1],
            [REGISTERS, REGISTERS, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume_packed, (z, packed, q, k, v, board, out.index(0), Y, LSE, SINKS, scale, 0)),
                (consume_packed, (z, packed, q, k, v, board, out.index(1), Y, LSE, SINKS, scale, 1)),
                (produce_packed, (z, packed, Q, K, V, q, k, v, board, asked, ASK)),
                (schedule_packed, (z, packed, order, board, asked, COUNT, FLAG, longest_q, longest_k)),
            ],
            [4, 1, 1],
            [REGISTERS, 32, 32],
        )
