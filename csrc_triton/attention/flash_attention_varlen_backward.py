"""Flash attention backward of varlen (packed) sequences, in two ways as ``flash_attention_backward``.

In plain Triton dK and dV come from one kernel, dQ from another, the same bits every time; the statistics of rows come
from ``flash_attention_backward``'s kernel, to which all tokens are one sequence. For the warp-specialised kernels
statistics and dQ have padded rows (``backward_scheduler``): ``varlen_preprocess_rows`` makes them,
``varlen_postprocess_dq`` rounds dQ. The sinks' gradient is the dense form's in both.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from csrc_triton.attention.backward_consumers import run_narrow, run_wide, store_zeros
from csrc_triton.attention.backward_producer import (
    HEAD_DIMS,
    MAPS,
    NARROW,
    NARROW_CONSTANTS,
    WIDE,
    WIDE_CONSTANTS,
    BackwardSizes,
    InputMaps,
    Outputs,
)
from csrc_triton.attention.backward_scheduler import varlen_key_tile
from csrc_triton.attention.backward_tiles import (
    READ,
    TILES_CONSTANTS,
    Inputs,
    Problem,
    TileSizes,
    dkdv_tile,
    dq_tile,
    postprocess,
    preprocess,
)
from csrc_triton.attention.tile_scheduler import CAUSAL
from csrc_triton.attention.varlen import CU_SEQLENS, DTYPES, SIZES, STRIDES, UNIT, find, span

OF_READ = {**STRIDES, "dy_head": "i32", "dy_row": "i32"}
NUMBERS = {
    "scale": "fp32", "cap": "fp32", "gradient_scale": "fp32", "tiles_per_head": "i32", "ratio": "i32", "dim": "i32",
    "padded": "i32", **SIZES, "left": "i32",
}  # fmt: skip

DECLARATION = {
    "op": "flash_attention_varlen_backward",
    "uses": ["flash_attention_backward"],
    "kernels": {
        "flash_attention_varlen_backward_dkdv": {
            "always_aligned": True,
            "matrix": True,
            "axes": {**DTYPES, "softcap": [False, True]},
            "arguments": {
                "DK": "*dtype", "DV": "*dtype", **READ, **CU_SEQLENS, "dk_head": "i32", "dk_row": "i32", **OF_READ,
                **NUMBERS,
            },
            "aligned": ["DK", "DV", *READ, "dk_head", "dk_row", *OF_READ, "dim", "padded"],
            "forms": {
                "tiles": {
                    "function": "varlen_dkdv_tiles",
                    "constants": [*TILES_CONSTANTS, "PEELED"],
                    "defaults": {"PEELED": 1},
                },
            },
        },
        "flash_attention_varlen_backward_dq": {
            "always_aligned": True,
            "matrix": True,
            "axes": {**DTYPES, "softcap": [False, True]},
            "arguments": {
                "DQ": "*dtype", **READ, **CU_SEQLENS, "dq_head": "i32", "dq_row": "i32", **OF_READ, **NUMBERS,
            },
            "aligned": ["DQ", *READ, "dq_head", "dq_row", *OF_READ, "dim", "padded"],
            "forms": {"tiles": {"function": "varlen_dq_tiles", "constants": TILES_CONSTANTS}},
        },
        # One for full and causal calls: a right bound that hides nothing costs nothing but masks on some blocks.
        "flash_attention_varlen_backward_warp_specialized": {
            "language": "gluon",
            "optional": True,
            "always_aligned": True,
            "matrix": True,
            "arguments": {
                **MAPS, **CU_SEQLENS, "scale": "fp32", "tiles_per_head": "i32", "ratio": "i32", "padded": "i32",
                "swizzle_heads": "i32", **SIZES,
            },
            "axes": {**DTYPES, "head_dim": [64, 96, 128, 192, 256]},
            "gives": {"head_dim": HEAD_DIMS},
            "host": ["waves"],
            "aligned": [],
            "forms": {
                "narrow": {
                    "function": "varlen_warp_specialized",
                    "constants": NARROW_CONSTANTS,
                    "requires": {"head_dim": NARROW},
                },
                "wide": {
                    "function": "varlen_warp_specialized_wide",
                    "constants": WIDE_CONSTANTS,
                    "requires": {"head_dim": WIDE},
                },
            },
        },
        "flash_attention_varlen_backward_preprocess": {
            "optional": True,
            "always_aligned": True,
            "arguments": {
                "LSE2": "*fp32", "DELTA": "*fp32", "Y": "*dtype", "DY": "*dtype", "LSE": "*fp32", "DLSE": "*fp32",
                "CU_SEQLENS_Q": "*i32", "y_head": "i32", "y_row": "i32", "dy_head": "i32", "dy_row": "i32",
                "tiles_per_head": "i32", "dim": "i32", "padded": "i32", "sequences": "i32", "tokens_q": "i32",
            },
            "axes": DTYPES,
            "aligned": ["LSE2", "DELTA", "Y", "DY", "y_head", "y_row", "dy_head", "dy_row", "dim", "padded"],
            "forms": {"tiles": {"function": "varlen_preprocess_rows", "constants": ["BLOCK_M", "D1"]}},
        },
        "flash_attention_varlen_backward_postprocess": {
            "optional": True,
            "always_aligned": True,
            "arguments": {
                "DQ": "*dtype", "DQ32": "*fp32", "CU_SEQLENS_Q": "*i32", "dq_head": "i32", "dq_row": "i32",
                "scale": "fp32", "tiles_per_head": "i32", "pieces": "i32", "dim": "i32", "sequences": "i32",
                "tokens_q": "i32",
            },
            "axes": DTYPES,
            "aligned": ["DQ", "DQ32", "dq_head", "dq_row", "dim"],
            "forms": {"tiles": {"function": "varlen_postprocess_dq", "constants": ["WIDTH"]}},
        },
    },
}  # fmt: skip


@triton.jit
def varlen_dkdv_tiles(
    DK, DV, Q, K, V, DY, LSE2, DELTA, CU_SEQLENS_Q, CU_SEQLENS_K, dk_head, dk_row, q_head, q_row, k_head, k_row,
    v_head, v_row, dy_head, dy_row, scale, cap, gradient_scale, tiles_per_head, ratio, dim, padded, sequences,
    tokens_q, tokens_k, right, left, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D1: tl.constexpr,
    D2: tl.constexpr, STAGES: tl.constexpr, FP16_FLUSHES: tl.constexpr, SOFTCAP: tl.constexpr, PEELED: tl.constexpr,
):  # fmt: skip
    """dK and dV, which share strides, of BLOCK_N keys of a head of a sequence, the first keys first. LSE2 and DELTA are
    [heads, padded]; ``right`` and ``left`` are those of a sequence with as many keys as queries."""
    tile = tl.program_id(0) % tiles_per_head
    head = (tl.program_id(0) // tiles_per_head).to(tl.int64)
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
    x = Inputs(
        Q + first_head * q_head + first_q * q_row, K + head * k_head + first_k * k_row,
        V + head * v_head + first_k * v_row, DY + first_head * dy_head + first_q * dy_row, LSE2 + at, DELTA + at,
        q_head, q_row, k_row, v_row, dy_head, dy_row,
    )  # fmt: skip
    p = Problem(scale, cap, gradient_scale, ratio, dim, padded, len_q, len_k, right + past, left + past)
    z = TileSizes(BLOCK_M, BLOCK_N, D1, D2, STAGES, FP16_FLUSHES, SOFTCAP, True, PEELED)
    dkdv_tile(key, DK + to, DV + to, dk_row, x, p, z)


@triton.jit
def varlen_dq_tiles(
    DQ, Q, K, V, DY, LSE2, DELTA, CU_SEQLENS_Q, CU_SEQLENS_K, dq_head, dq_row, q_head, q_row, k_head, k_row, v_head,
    v_row, dy_head, dy_row, scale, cap, gradient_scale, tiles_per_head, ratio, dim, padded, sequences,
    tokens_q, tokens_k, right, left, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D1: tl.constexpr,
    D2: tl.constexpr, STAGES: tl.constexpr, FP16_FLUSHES: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """dQ of BLOCK_M rows of a head of a sequence, the last rows first; the rest is as in ``varlen_dkdv_tiles``."""
    tile = tiles_per_head - 1 - tl.program_id(0) % tiles_per_head
    head = (tl.program_id(0) // tiles_per_head).to(tl.int64)
    sequence, start_q, len_q, row = find(CU_SEQLENS_Q, tile, sequences, tokens_q, BLOCK_M)
    if (row < 0) | (row >= len_q):
        return
    start_k, len_k = span(CU_SEQLENS_K, sequence, sequences, tokens_k)
    past = len_k - len_q
    first_q = start_q.to(tl.int64)
    first_k = start_k.to(tl.int64)
    kv_head = head // ratio
    at = head * padded + first_q
    x = Inputs(
        Q + head * q_head + first_q * q_row, K + kv_head * k_head + first_k * k_row,
        V + kv_head * v_head + first_k * v_row, DY + head * dy_head + first_q * dy_row, LSE2 + at, DELTA + at, q_head,
        q_row, k_row, v_row, dy_head, dy_row,
    )  # fmt: skip
    p = Problem(scale, cap, gradient_scale, ratio, dim, padded, len_q, len_k, right + past, left + past)
    z = TileSizes(BLOCK_M, BLOCK_N, D1, D2, STAGES, FP16_FLUSHES, SOFTCAP, True)
    dq_tile(row, DQ + head * dq_head + first_q * dq_row, dq_row, x, p, z)


@gluon.jit
def varlen_warp_specialized(
    Q, K, V, DY, DK, DV, LSE2, DELTA, DQ32, CU_SEQLENS_Q, CU_SEQLENS_K, scale, tiles_per_head, ratio, padded,
    swizzle_heads, sequences, tokens_q, tokens_k, right, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    D1: gl.constexpr, D2: gl.constexpr, BOX: gl.constexpr, Q_STAGES: gl.constexpr, DY_STAGES: gl.constexpr,
    PIPELINED_SCORES: gl.constexpr, WARP_GROUPS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """As ``flash_attention_backward.warp_specialized``, of 128 keys of a head of a sequence, the first keys first.

    Tensor maps are over (place, head, row, column), as the varlen forward's, those of LSE2 and DELTA over (1, head, 1,
    padded row). DQ32 is [heads, padded / 64] tiles; ``right`` is that of a sequence with as many keys as queries.
    """
    gl.static_assert(WARP_GROUPS == 2 and BLOCK_N == 128)
    z = BackwardSizes(BLOCK_M, BLOCK_N, D1, D2, BOX, Q_STAGES, DY_STAGES, PIPELINED_SCORES, CAUSAL, 0, 1)
    tile, len_k, from_right = varlen_key_tile(
        CU_SEQLENS_Q,
        CU_SEQLENS_K,
        tiles_per_head,
        ratio,
        swizzle_heads,
        sequences,
        tokens_q,
        tokens_k,
        right,
        z,
    )
    if tile.steps > 0:
        heads = gl.num_programs(0) // tiles_per_head * ratio
        run_narrow(
            InputMaps(Q, K, V, DY, LSE2, DELTA), Outputs(DK, DV, DQ32), None, tile, scale, tiles_per_head, heads,
            padded, len_k, from_right, REGISTERS, z,
        )  # fmt: skip
    else:
        store_zeros(DK, tile, len_k, z)
        store_zeros(DV, tile, len_k, z)


@gluon.jit
def varlen_warp_specialized_wide(
    Q, K, V, DY, DK, DV, LSE2, DELTA, DQ32, CU_SEQLENS_Q, CU_SEQLENS_K, scale, tiles_per_head, ratio, padded,
    swizzle_heads, sequences, tokens_q, tokens_k, right, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    D1: gl.constexpr, D2: gl.constexpr, BOX: gl.constexpr, Q_STAGES: gl.constexpr, DY_STAGES: gl.constexpr,
    WARP_GROUPS: gl.constexpr, REGISTERS: gl.constexpr, DQ_REGISTERS: gl.constexpr,
):  # fmt: skip
    """As ``varlen_warp_specialized``, of 64 keys."""
    gl.static_assert(WARP_GROUPS == 3 and BLOCK_N == 64 and D2 > 0)
    z = BackwardSizes(BLOCK_M, BLOCK_N, D1, D2, BOX, Q_STAGES, DY_STAGES, 0, CAUSAL, 0, 1)
    tile, len_k, from_right = varlen_key_tile(
        CU_SEQLENS_Q,
        CU_SEQLENS_K,
        tiles_per_head,
        ratio,
        swizzle_heads,
        sequences,
        tokens_q,
        tokens_k,
        right,
        z,
    )
    if tile.steps > 0:
        heads = gl.num_programs(0) // tiles_per_head * ratio
        run_wide(
            InputMaps(Q, K, V, DY, LSE2, DELTA), Outputs(DK, DV, DQ32), None, tile, scale, tiles_per_head, heads,
            padded, len_k, from_right, REGISTERS, DQ_REGISTERS, z,
        )  # fmt: skip
    else:
        store_zeros(DK, tile, len_k, z)
        store_zeros(DV, tile, len_k, z)


@triton.jit
def varlen_preprocess_rows(
    LSE2, DELTA, Y, DY, LSE, DLSE, CU_SEQLENS_Q, y_head, y_row, dy_head, dy_row, tiles_per_head, dim, padded,
    sequences, tokens_q, BLOCK_M: tl.constexpr, D1: tl.constexpr,
):  # fmt: skip
    """``preprocess`` of BLOCK_M rows of the padded ones; LSE2 and DELTA are [heads, padded]. Those that no sequence has
    are as rows that see no key."""
    tile = tl.program_id(0) % tiles_per_head
    head = (tl.program_id(0) // tiles_per_head).to(tl.int64)
    at = tile * BLOCK_M
    _, start, length, row = find(CU_SEQLENS_Q, at // UNIT, sequences, tokens_q, UNIT)
    row += at % UNIT
    to = head * padded + at + tl.arange(0, BLOCK_M)
    first = start.to(tl.int64)
    from_row = head * tokens_q + first
    preprocess(
        row + tl.arange(0, BLOCK_M), LSE2 + to, DELTA + to, Y + head * y_head + first * y_row,
        DY + head * dy_head + first * dy_row, LSE + from_row, DLSE + from_row, DLSE.to(tl.int64) != 0, y_row, dy_row,
        dim, length, D1,
    )  # fmt: skip


@triton.jit
def varlen_postprocess_dq(
    DQ, DQ32, CU_SEQLENS_Q, dq_head, dq_row, scale, tiles_per_head, pieces, dim, sequences, tokens_q,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """``postprocess`` of WIDTH columns of 64 padded rows a program, a piece of ``pieces`` in a row."""
    tile = tl.program_id(0) // pieces
    head = tile // tiles_per_head
    at = (tile - head * tiles_per_head) * 64
    _, start, length, row = find(CU_SEQLENS_Q, at // UNIT, sequences, tokens_q, UNIT)
    row += at % UNIT
    if (row < 0) | (row >= length):
        return
    postprocess(
        DQ + head.to(tl.int64) * dq_head + start.to(tl.int64) * dq_row,
        DQ32 + tl.program_id(0).to(tl.int64) * (64 * WIDTH), dq_row, scale, row,
        (tl.program_id(0) - tile * pieces) * WIDTH, dim, length, WIDTH,
    )  # fmt: skip
