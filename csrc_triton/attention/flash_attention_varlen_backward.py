"""Flash attention backward of packed sequences, in two ways as ``flash_attention_backward``.

In plain Triton dK and dV come from one kernel, dQ from another, the same bits every time; what each row needs comes
from ``flash_attention_backward``'s kernel, to which all tokens are one sequence. By warp groups (see
``attention_packed_backward``) sums of rows and dQ are padded, a sequence at a time: ``packed_row_sums`` makes them,
``packed_backward_groups`` and, for wide heads, ``packed_backward_roles`` add dQ up, ``packed_finish`` rounds it. The
sinks' gradient is the dense form's in both.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from csrc_triton.attention.attention_backward_arguments import (
    D64,
    D96,
    D128,
    D192,
    D256,
    GROUPS_CONSTANTS,
    READ,
    ROLES_CONSTANTS,
)
from csrc_triton.attention.attention_backward_consumer import by_groups
from csrc_triton.attention.attention_backward_groups import BackwardSizes
from csrc_triton.attention.attention_backward_roles import by_roles
from csrc_triton.attention.attention_backward_rows import finish_rows, sum_rows
from csrc_triton.attention.attention_gradients import key_tile, query_tile
from csrc_triton.attention.attention_packed_backward import packed_tile, put_zeros
from csrc_triton.attention.varlen import CU_SEQLENS, DTYPES, SIZES, STRIDES, UNIT, find, span

OF_READ = {**STRIDES, "dy_head": "i32", "dy_row": "i32"}
NUMBERS = {
    "scale": "fp32", "cap": "fp32", "gradient_scale": "fp32", "tiles_a_head": "i32", "ratio": "i32", "dim": "i32",
    "padded": "i32", **SIZES, "left": "i32",
}  # fmt: skip
SHARED = {"always_aligned": True, "matrix": True, "axes": DTYPES}
KEYS = {
    "function": "packed_key_tiles",
    "constants": ["BLOCK_M", "BLOCK_N", "D1", "D2", "STAGES", "CAP", "PEELED"],
}
QUERIES = {"function": "packed_query_tiles", "constants": ["BLOCK_M", "BLOCK_N", "D1", "D2", "STAGES", "CAP"]}
GROUPS = {
    "language": "gluon",
    "optional": True,
    **SHARED,
    "arguments": {
        "Q": "dtype[1, 1, BLOCK_M, BOX]", "K": "dtype[1, 1, 64, BOX]", "V": "dtype[1, 1, 64, BOX]",
        "DY": "dtype[1, 1, BLOCK_M, BOX]", "DK": "dtype[1, 1, 64, BOX]", "DV": "dtype[1, 1, 64, BOX]",
        "LSE2": "fp32[1, 1, 1, BLOCK_M]", "DELTA": "fp32[1, 1, 1, BLOCK_M]", "DQ32": "*fp32", **CU_SEQLENS,
        "scale": "fp32", "tiles_a_head": "i32", "ratio": "i32", "padded": "i32", "section": "i32", **SIZES,
    },
    "aligned": [],
}  # fmt: skip
# One kernel for full and causal calls: a right bound that hides nothing costs nothing but in blocks that it masks.
BY_GROUPS = {"function": "packed_backward_groups", "constants": GROUPS_CONSTANTS}
BY_ROLES = {"function": "packed_backward_roles", "constants": ROLES_CONSTANTS}

DECLARATION = {
    "op": "flash_attention_varlen_backward",
    "uses": ["flash_attention_backward"],
    "kernels": {
        "flash_attention_varlen_backward_keys": {
            **SHARED,
            "arguments": {
                "DK": "*dtype", "DV": "*dtype", **READ, **CU_SEQLENS, "dk_head": "i32", "dk_row": "i32", **OF_READ,
                **NUMBERS,
            },
            "aligned": ["DK", "DV", *READ, "dk_head", "dk_row", *OF_READ, "dim", "padded"],
            "forms": {"tiles": {**KEYS, "defaults": {"CAP": 0, "PEELED": 1}}},
        },
        "flash_attention_varlen_backward_keys_capped": {
            "like": "flash_attention_varlen_backward_keys",
            "forms": {"tiles": {**KEYS, "defaults": {"CAP": 1, "PEELED": 1}}},
        },
        "flash_attention_varlen_backward_queries": {
            **SHARED,
            "arguments": {
                "DQ": "*dtype", **READ, **CU_SEQLENS, "dq_head": "i32", "dq_row": "i32", **OF_READ, **NUMBERS,
            },
            "aligned": ["DQ", *READ, "dq_head", "dq_row", *OF_READ, "dim", "padded"],
            "forms": {"tiles": {**QUERIES, "defaults": {"CAP": 0}}},
        },
        "flash_attention_varlen_backward_queries_capped": {
            "like": "flash_attention_varlen_backward_queries",
            "forms": {"tiles": {**QUERIES, "defaults": {"CAP": 1}}},
        },
        "flash_attention_varlen_backward_groups_64": {
            **GROUPS, "forms": {"groups": {**BY_GROUPS, "defaults": {**D64, "BOUNDED": 1}}},
        },
        "flash_attention_varlen_backward_groups_96": {
            **GROUPS, "forms": {"groups": {**BY_GROUPS, "defaults": {**D96, "BOUNDED": 1}}},
        },
        "flash_attention_varlen_backward_groups_128": {
            **GROUPS, "forms": {"groups": {**BY_GROUPS, "defaults": {**D128, "BOUNDED": 1}}},
        },
        "flash_attention_varlen_backward_groups_192": {
            **GROUPS, "forms": {"roles": {**BY_ROLES, "defaults": {**D192, "BOUNDED": 1}}},
        },
        "flash_attention_varlen_backward_groups_256": {
            **GROUPS, "forms": {"roles": {**BY_ROLES, "defaults": {**D256, "BOUNDED": 1}}},
        },
        "flash_attention_varlen_backward_rows": {
            "optional": True,
            "always_aligned": True,
            "arguments": {
                "LSE2": "*fp32", "DELTA": "*fp32", "Y": "*dtype", "DY": "*dtype", "LSE": "*fp32", "DLSE": "*fp32",
                "CU_SEQLENS_Q": "*i32", "y_head": "i32", "y_row": "i32", "dy_head": "i32", "dy_row": "i32",
                "tiles_a_head": "i32", "dim": "i32", "padded": "i32", "sequences": "i32", "tokens_q": "i32",
            },
            "axes": DTYPES,
            "aligned": ["LSE2", "DELTA", "Y", "DY", "y_head", "y_row", "dy_head", "dy_row", "dim", "padded"],
            "forms": {"tiles": {"function": "packed_row_sums", "constants": ["BLOCK_M", "D1"]}},
        },
        "flash_attention_varlen_backward_finish": {
            "optional": True,
            "always_aligned": True,
            "arguments": {
                "DQ": "*dtype", "DQ32": "*fp32", "CU_SEQLENS_Q": "*i32", "dq_head": "i32", "dq_row": "i32",
                "scale": "fp32", "tiles_a_head": "i32", "pieces": "i32", "dim": "i32", "sequences": "i32",
                "tokens_q": "i32",
            },
            "axes": DTYPES,
            "aligned": ["DQ", "DQ32", "dq_head", "dq_row", "dim"],
            "forms": {"tiles": {"function": "packed_finish", "constants": ["WIDTH"]}},
        },
    },
}  # fmt: skip


@triton.jit
def packed_key_tiles(
    DK, DV, Q, K, V, DY, LSE2, DELTA, CU_SEQLENS_Q, CU_SEQLENS_K, dk_head, dk_row, q_head, q_row, k_head, k_row,
    v_head, v_row, dy_head, dy_row, scale, cap, gradient_scale, tiles_a_head, ratio, dim, padded, sequences,
    tokens_q, tokens_k, right, left, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D1: tl.constexpr,
    D2: tl.constexpr, STAGES: tl.constexpr, CAP: tl.constexpr, PEELED: tl.constexpr,
):  # fmt: skip
    """dK and dV, which share strides, of BLOCK_N keys of a head of a sequence, the first keys first. LSE2 and DELTA are
    [heads, padded]; ``right`` and ``left`` are a sequence's with as many keys as queries."""
    tile = tl.program_id(0) % tiles_a_head
    head = (tl.program_id(0) // tiles_a_head).to(tl.int64)
    sequence, start_k, len_k, key = find(CU_SEQLENS_K, tile, sequences, tokens_k, BLOCK_N)
    if (key < 0) | (key >= len_k):
        return
    start_q, len_q = span(CU_SEQLENS_Q, sequence, sequences, tokens_q)
    past = len_k - len_q
    first_q = start_q.to(tl.int64)
    first_k = start_k.to(tl.int64)
    first_head = head * ratio
    to = head * dk_head + first_k * dk_row
    at = first_head * padded + first_q
    key_tile(
        key, DK + to, DV + to, Q + first_head * q_head + first_q * q_row, K + head * k_head + first_k * k_row,
        V + head * v_head + first_k * v_row, DY + first_head * dy_head + first_q * dy_row, LSE2 + at, DELTA + at,
        dk_row, q_head, q_row, k_row, v_row, dy_head, dy_row, scale, cap, gradient_scale, ratio, dim, padded, len_q,
        len_k, right + past, left + past, BLOCK_M, BLOCK_N, D1, D2, STAGES, CAP, True, PEELED,
    )  # fmt: skip


@triton.jit
def packed_query_tiles(
    DQ, Q, K, V, DY, LSE2, DELTA, CU_SEQLENS_Q, CU_SEQLENS_K, dq_head, dq_row, q_head, q_row, k_head, k_row, v_head,
    v_row, dy_head, dy_row, scale, cap, gradient_scale, tiles_a_head, ratio, dim, padded, sequences,
    tokens_q, tokens_k, right, left, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D1: tl.constexpr,
    D2: tl.constexpr, STAGES: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """dQ of BLOCK_M rows of a head of a sequence, the last rows first; the rest as in ``packed_key_tiles``."""
    tile = tiles_a_head - 1 - tl.program_id(0) % tiles_a_head
    head = (tl.program_id(0) // tiles_a_head).to(tl.int64)
    sequence, start_q, len_q, row = find(CU_SEQLENS_Q, tile, sequences, tokens_q, BLOCK_M)
    if (row < 0) | (row >= len_q):
        return
    start_k, len_k = span(CU_SEQLENS_K, sequence, sequences, tokens_k)
    past = len_k - len_q
    first_q = start_q.to(tl.int64)
    first_k = start_k.to(tl.int64)
    kv_head = head // ratio
    at = head * padded + first_q
    query_tile(
        row, DQ + head * dq_head + first_q * dq_row, Q + head * q_head + first_q * q_row,
        K + kv_head * k_head + first_k * k_row, V + kv_head * v_head + first_k * v_row,
        DY + head * dy_head + first_q * dy_row, LSE2 + at, DELTA + at, dq_row, q_row, k_row, v_row, dy_row, scale, cap,
        gradient_scale, dim, len_q, len_k, right + past, left + past, BLOCK_M, BLOCK_N, D1, D2, STAGES, CAP, True,
    )  # fmt: skip


@gluon.jit
def packed_backward_groups(
    Q, K, V, DY, DK, DV, LSE2, DELTA, DQ32, CU_SEQLENS_Q, CU_SEQLENS_K, scale, tiles_a_head, ratio, padded, section,
    sequences, tokens_q, tokens_k, right, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D1: gl.constexpr,
    D2: gl.constexpr, BOX: gl.constexpr, Q_STAGES: gl.constexpr, DY_STAGES: gl.constexpr, AHEAD: gl.constexpr,
    WARP_GROUPS: gl.constexpr, REGISTERS: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    """As ``flash_attention_backward.backward_groups``, of 128 keys of a head of a sequence, the first keys first.

    The tensor maps are over (place, head, row, column), as ``flash_attention_varlen`` says, those of LSE2 and DELTA
    over (1, head, 1, row). DQ32 is [heads, padded / 64] tiles; ``right`` is a sequence's with as many keys as queries.
    """
    gl.static_assert(WARP_GROUPS == 2 and BLOCK_N == 128)
    z = BackwardSizes(BLOCK_M, BLOCK_N, D1, D2, BOX, Q_STAGES, DY_STAGES, AHEAD, BOUNDED, 1)
    tile, len_k, from_right = packed_tile(
        CU_SEQLENS_Q, CU_SEQLENS_K, tiles_a_head, ratio, section, sequences, tokens_q, tokens_k, right, z
    )
    if tile.steps > 0:
        heads = gl.num_programs(0) // tiles_a_head * ratio
        by_groups(
            Q, K, V, DY, DK, DV, LSE2, DELTA, DQ32, None, tile, scale, tiles_a_head, heads, padded, len_k, from_right,
            REGISTERS, z,
        )  # fmt: skip
    else:
        put_zeros(DK, tile, len_k, z)
        put_zeros(DV, tile, len_k, z)


@gluon.jit
def packed_backward_roles(
    Q, K, V, DY, DK, DV, LSE2, DELTA, DQ32, CU_SEQLENS_Q, CU_SEQLENS_K, scale, tiles_a_head, ratio, padded, section,
    sequences, tokens_q, tokens_k, right, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D1: gl.constexpr,
    D2: gl.constexpr, BOX: gl.constexpr, Q_STAGES: gl.constexpr, DY_STAGES: gl.constexpr, WARP_GROUPS: gl.constexpr,
    REGISTERS: gl.constexpr, DQ_REGISTERS: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    """As ``packed_backward_groups``, of 64 keys: three consumer groups have a role each."""
    gl.static_assert(WARP_GROUPS == 3 and BLOCK_N == 64 and D2 > 0)
    z = BackwardSizes(BLOCK_M, BLOCK_N, D1, D2, BOX, Q_STAGES, DY_STAGES, 0, BOUNDED, 1)
    tile, len_k, from_right = packed_tile(
        CU_SEQLENS_Q, CU_SEQLENS_K, tiles_a_head, ratio, section, sequences, tokens_q, tokens_k, right, z
    )
    if tile.steps > 0:
        heads = gl.num_programs(0) // tiles_a_head * ratio
        by_roles(
            Q, K, V, DY, DK, DV, LSE2, DELTA, DQ32, None, tile, scale, tiles_a_head, heads, padded, len_k, from_right,
            REGISTERS, DQ_REGISTERS, z,
        )  # fmt: skip
    else:
        put_zeros(DK, tile, len_k, z)
        put_zeros(DV, tile, len_k, z)


@triton.jit
def packed_row_sums(
    LSE2, DELTA, Y, DY, LSE, DLSE, CU_SEQLENS_Q, y_head, y_row, dy_head, dy_row, tiles_a_head, dim, padded,
    sequences, tokens_q, BLOCK_M: tl.constexpr, D1: tl.constexpr,
):  # fmt: skip
    """``sum_rows`` of BLOCK_M rows of the padded ones; LSE2 and DELTA are [heads, padded]. Those that no sequence has
    are as rows that see no key."""
    tile = tl.program_id(0) % tiles_a_head
    head = (tl.program_id(0) // tiles_a_head).to(tl.int64)
    at = tile * BLOCK_M
    _, start, length, row = find(CU_SEQLENS_Q, at // UNIT, sequences, tokens_q, UNIT)
    row += at % UNIT
    to = head * padded + at + tl.arange(0, BLOCK_M)
    first = start.to(tl.int64)
    from_row = head * tokens_q + first
    sum_rows(
        row + tl.arange(0, BLOCK_M), LSE2 + to, DELTA + to, Y + head * y_head + first * y_row,
        DY + head * dy_head + first * dy_row, LSE + from_row, DLSE + from_row, DLSE.to(tl.int64) != 0, y_row, dy_row,
        dim, length, D1,
    )  # fmt: skip


@triton.jit
def packed_finish(
    DQ, DQ32, CU_SEQLENS_Q, dq_head, dq_row, scale, tiles_a_head, pieces, dim, sequences, tokens_q,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """``finish_rows`` of WIDTH columns of 64 padded rows a program, a piece of ``pieces`` in a row."""
    tile = tl.program_id(0) // pieces
    head = tile // tiles_a_head
    at = (tile - head * tiles_a_head) * 64
    _, start, length, row = find(CU_SEQLENS_Q, at // UNIT, sequences, tokens_q, UNIT)
    row += at % UNIT
    if (row < 0) | (row >= length):
        return
    finish_rows(
        DQ + head.to(tl.int64) * dq_head + start.to(tl.int64) * dq_row,
        DQ32 + tl.program_id(0).to(tl.int64) * (64 * WIDTH), dq_row, scale, row,
        (tl.program_id(0) - tile * pieces) * WIDTH, dim, length, WIDTH,
    )  # fmt: skip
