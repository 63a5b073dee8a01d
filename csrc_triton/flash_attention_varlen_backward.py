"""Flash attention backward of packed sequences: dK and dV, then dQ, the same bits every time.

What each row needs, and the sinks' gradient, come from ``flash_attention_backward``'s kernels: to them all tokens are
one sequence.
"""

import triton
import triton.language as tl

from csrc_triton.attention_backward_arguments import READ
from csrc_triton.attention_gradients import key_tile, query_tile
from csrc_triton.attention_sequences import BOUNDS, DTYPES, SIZES, STRIDES, find, span

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

DECLARATION = {
    "op": "flash_attention_varlen_backward",
    "kernels": {
        "flash_attention_varlen_backward_keys": {
            **SHARED,
            "arguments": {
                "DK": "*dtype", "DV": "*dtype", **READ, **BOUNDS, "dk_head": "i32", "dk_row": "i32", **OF_READ,
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
            "arguments": {"DQ": "*dtype", **READ, **BOUNDS, "dq_head": "i32", "dq_row": "i32", **OF_READ, **NUMBERS},
            "aligned": ["DQ", *READ, "dq_head", "dq_row", *OF_READ, "dim", "padded"],
            "forms": {"tiles": {**QUERIES, "defaults": {"CAP": 0}}},
        },
        "flash_attention_varlen_backward_queries_capped": {
            "like": "flash_attention_varlen_backward_queries",
            "forms": {"tiles": {**QUERIES, "defaults": {"CAP": 1}}},
        },
    },
}  # fmt: skip


@triton.jit
def packed_key_tiles(
    DK, DV, Q, K, V, DY, LSE2, DELTA, BOUNDS_Q, BOUNDS_K, dk_head, dk_row, q_head, q_row, k_head, k_row,
    v_head, v_row, dy_head, dy_row, scale, cap, gradient_scale, tiles_a_head, ratio, dim, padded, sequences,
    tokens_q, tokens_k, right, left, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D1: tl.constexpr,
    D2: tl.constexpr, STAGES: tl.constexpr, CAP: tl.constexpr, PEELED: tl.constexpr,
):  # fmt: skip
    """dK and dV, which share strides, of BLOCK_N keys of a head of a sequence, the first keys first. LSE2 and DELTA are
    [heads, padded]; ``right`` and ``left`` are a sequence's with as many keys as queries."""
    tile = tl.program_id(0) % tiles_a_head
    head = (tl.program_id(0) // tiles_a_head).to(tl.int64)
    sequence, start_k, len_k, key = find(BOUNDS_K, tile, sequences, tokens_k, BLOCK_N)
    if (key < 0) | (key >= len_k):
        return
    start_q, len_q = span(BOUNDS_Q, sequence, sequences, tokens_q)
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
    DQ, Q, K, V, DY, LSE2, DELTA, BOUNDS_Q, BOUNDS_K, dq_head, dq_row, q_head, q_row, k_head, k_row, v_head,
    v_row, dy_head, dy_row, scale, cap, gradient_scale, tiles_a_head, ratio, dim, padded, sequences,
    tokens_q, tokens_k, right, left, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D1: tl.constexpr,
    D2: tl.constexpr, STAGES: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """dQ of BLOCK_M rows of a head of a sequence, the last rows first; the rest as in ``packed_key_tiles``."""
    tile = tiles_a_head - 1 - tl.program_id(0) % tiles_a_head
    head = (tl.program_id(0) // tiles_a_head).to(tl.int64)
    sequence, start_q, len_q, row = find(BOUNDS_Q, tile, sequences, tokens_q, BLOCK_M)
    if (row < 0) | (row >= len_q):
        return
    start_k, len_k = span(BOUNDS_K, sequence, sequences, tokens_k)
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
