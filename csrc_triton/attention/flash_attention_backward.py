"""Flash attention backward: dQ, dK, dV and the gradient of the sinks.

``row_sums`` works out what each row needs; then there are two ways. In plain Triton every gradient is summed by one
program in a fixed order, so that it has the same bits every time: ``key_tiles`` for a block of keys (all rows and query
heads that see it), ``query_tiles`` for a block of rows; the probabilities are computed twice. By warp groups they are
computed once: ``backward_groups`` (see ``attention_backward_groups``) adds dQ up in float32, ``finish`` rounds it.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from csrc_triton.attention.attention_backward_arguments import (
    BY_GROUPS,
    CAUSAL,
    D64,
    D96,
    D128,
    FINISH,
    GROUPS,
    IN_ORDER,
    KEYS,
    LOCAL_KERNELS,
    QUERIES,
    ROLES_KERNELS,
    ROWS,
    SINKS,
    TILES_CONSTANTS,
)
from csrc_triton.attention.attention_backward_consumer import by_groups
from csrc_triton.attention.attention_backward_groups import BackwardSizes, tile_of_keys
from csrc_triton.attention.attention_backward_order import tile_in_order
from csrc_triton.attention.attention_backward_roles import by_roles
from csrc_triton.attention.attention_backward_rows import finish_rows, sum_rows
from csrc_triton.attention.attention_gradients import key_tile, query_tile
from csrc_triton.attention.tile_scheduler import swizzled_tile

KEY_TILES = {"function": "key_tiles", "constants": TILES_CONSTANTS}
QUERY_TILES = {"function": "query_tiles", "constants": TILES_CONSTANTS}

DECLARATION = {
    "op": "flash_attention_backward",
    "kernels": {
        "flash_attention_backward_rows": ROWS,
        "flash_attention_backward_keys": {**KEYS, "forms": {"tiles": {**KEY_TILES, "defaults": {"CAP": 0}}}},
        "flash_attention_backward_keys_capped": {**KEYS, "forms": {"tiles": {**KEY_TILES, "defaults": {"CAP": 1}}}},
        "flash_attention_backward_queries": {**QUERIES, "forms": {"tiles": {**QUERY_TILES, "defaults": {"CAP": 0}}}},
        "flash_attention_backward_queries_capped": {
            **QUERIES, "forms": {"tiles": {**QUERY_TILES, "defaults": {"CAP": 1}}},
        },
        "flash_attention_backward_sinks": SINKS,
        "flash_attention_backward_groups_64": {
            **GROUPS, "forms": {"groups": {**BY_GROUPS, "defaults": {**D64, "BOUNDED": 0}}},
        },
        "flash_attention_backward_groups_64_ordered": {
            **IN_ORDER, "forms": {"groups": {**BY_GROUPS, "defaults": {**D64, "BOUNDED": 0}}},
        },
        "flash_attention_backward_groups_64_causal": {
            **CAUSAL, "forms": {"groups": {**BY_GROUPS, "defaults": {**D64, "BOUNDED": 1}}},
        },
        "flash_attention_backward_groups_64_causal_ordered": {
            **IN_ORDER, "forms": {"groups": {**BY_GROUPS, "defaults": {**D64, "BOUNDED": 1}}},
        },
        "flash_attention_backward_groups_96": {
            **GROUPS, "forms": {"groups": {**BY_GROUPS, "defaults": {**D96, "BOUNDED": 0}}},
        },
        "flash_attention_backward_groups_96_ordered": {
            **IN_ORDER, "forms": {"groups": {**BY_GROUPS, "defaults": {**D96, "BOUNDED": 0}}},
        },
        "flash_attention_backward_groups_96_causal": {
            **CAUSAL, "forms": {"groups": {**BY_GROUPS, "defaults": {**D96, "BOUNDED": 1}}},
        },
        "flash_attention_backward_groups_96_causal_ordered": {
            **IN_ORDER, "forms": {"groups": {**BY_GROUPS, "defaults": {**D96, "BOUNDED": 1}}},
        },
        "flash_attention_backward_groups_128": {
            **GROUPS, "forms": {"groups": {**BY_GROUPS, "defaults": {**D128, "BOUNDED": 0}}},
        },
        "flash_attention_backward_groups_128_ordered": {
            **IN_ORDER, "forms": {"groups": {**BY_GROUPS, "defaults": {**D128, "BOUNDED": 0}}},
        },
        "flash_attention_backward_groups_128_causal": {
            **CAUSAL, "forms": {"groups": {**BY_GROUPS, "defaults": {**D128, "BOUNDED": 1}}},
        },
        "flash_attention_backward_groups_128_causal_ordered": {
            **IN_ORDER, "forms": {"groups": {**BY_GROUPS, "defaults": {**D128, "BOUNDED": 1}}},
        },
        **ROLES_KERNELS,
        **LOCAL_KERNELS,
        "flash_attention_backward_finish": FINISH,
    },
}  # fmt: skip


@triton.jit
def row_sums(
    LSE2, DELTA, Y, DY, LSE, DLSE, y_batch, y_head, y_row, dy_batch, dy_head, dy_row, tiles_a_head, heads,
    dim, len_q, padded, BLOCK_M: tl.constexpr, D1: tl.constexpr,
):  # fmt: skip
    """``sum_rows`` of BLOCK_M rows; LSE2 and DELTA are [batch, heads, padded]."""
    tile = tl.program_id(0) % tiles_a_head
    both = tl.program_id(0) // tiles_a_head
    batch = (both // heads).to(tl.int64)
    head = (both % heads).to(tl.int64)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    first = both.to(tl.int64) * len_q
    to = both.to(tl.int64) * padded + rows
    sum_rows(
        rows, LSE2 + to, DELTA + to, Y + batch * y_batch + head * y_head, DY + batch * dy_batch + head * dy_head,
        LSE + first, DLSE + first, DLSE.to(tl.int64) != 0, y_row, dy_row, dim, len_q, D1,
    )  # fmt: skip


@triton.jit
def key_tiles(
    DK, DV, Q, K, V, DY, LSE2, DELTA, dk_batch, dk_head, dk_row, q_batch, q_head, q_row, k_batch, k_head,
    k_row, v_batch, v_head, v_row, dy_batch, dy_head, dy_row, scale, cap, gradient_scale, tiles_a_head,
    section, heads, ratio, dim, padded, len_q, len_k, right, left, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    D1: tl.constexpr, D2: tl.constexpr, STAGES: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """dK and dV, which share strides, of BLOCK_N keys of a head of K. The first keys, which most rows see, come first.

    ``section`` is ``swizzled_tile``'. ``heads`` are K's, each shared by ``ratio`` of Q's. ``scale`` and ``cap`` as the
    forward takes them; ``gradient_scale`` is d score / d (q k) without the soft cap's slope.
    """
    both, tile = swizzled_tile(tiles_a_head, section)
    batch = (both // heads).to(tl.int64)
    head = both % heads
    K += batch * k_batch + head.to(tl.int64) * k_head
    V += batch * v_batch + head.to(tl.int64) * v_head
    DK += batch * dk_batch + head.to(tl.int64) * dk_head
    DV += batch * dk_batch + head.to(tl.int64) * dk_head
    Q += batch * q_batch + (head * ratio).to(tl.int64) * q_head
    DY += batch * dy_batch + (head * ratio).to(tl.int64) * dy_head
    at = (batch * heads + head) * ratio * padded
    key_tile(
        tile * BLOCK_N, DK, DV, Q, K, V, DY, LSE2 + at, DELTA + at, dk_row, q_head, q_row, k_row, v_row, dy_head,
        dy_row, scale, cap, gradient_scale, ratio, dim, padded, len_q, len_k, right, left, BLOCK_M, BLOCK_N, D1, D2,
        STAGES, CAP, False, True,
    )  # fmt: skip


@triton.jit
def query_tiles(
    DQ, Q, K, V, DY, LSE2, DELTA, dq_batch, dq_head, dq_row, q_batch, q_head, q_row, k_batch, k_head,
    k_row, v_batch, v_head, v_row, dy_batch, dy_head, dy_row, scale, cap, gradient_scale, tiles_a_head,
    section, heads, ratio, dim, padded, len_q, len_k, right, left, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    D1: tl.constexpr, D2: tl.constexpr, STAGES: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """dQ of BLOCK_M rows of a head, the last rows first. ``heads`` are Q's; the rest as in ``key_tiles``."""
    both, number = swizzled_tile(tiles_a_head, section)
    tile = tiles_a_head - 1 - number
    batch = (both // heads).to(tl.int64)
    head = both % heads
    Q += batch * q_batch + head.to(tl.int64) * q_head
    DY += batch * dy_batch + head.to(tl.int64) * dy_head
    DQ += batch * dq_batch + head.to(tl.int64) * dq_head
    K += batch * k_batch + (head // ratio).to(tl.int64) * k_head
    V += batch * v_batch + (head // ratio).to(tl.int64) * v_head
    at = both.to(tl.int64) * padded
    query_tile(
        tile * BLOCK_M, DQ, Q, K, V, DY, LSE2 + at, DELTA + at, dq_row, q_row, k_row, v_row, dy_row, scale, cap,
        gradient_scale, dim, len_q, len_k, right, left, BLOCK_M, BLOCK_N, D1, D2, STAGES, CAP, False,
    )  # fmt: skip


@triton.jit
def sink_sums(DSINKS, SINKS, LSE2, DELTA, batch, heads, padded, BLOCK: tl.constexpr):
    """One head a program: minus the sum over rows of the sink's probability times delta; its value, 0, adds nothing."""
    head = tl.program_id(0)
    sink = tl.load(SINKS + head) * 1.4426950408889634
    total = tl.zeros([BLOCK], tl.float32)
    for b in range(batch):
        at = (tl.cast(b, tl.int64) * heads + head) * padded
        for start in range(0, padded, BLOCK):
            rows = start + tl.arange(0, BLOCK)
            lse = tl.load(LSE2 + at + rows, mask=rows < padded, other=float("inf"))
            delta = tl.load(DELTA + at + rows, mask=rows < padded, other=0.0)
            total += tl.exp2(sink - lse) * delta
    tl.store(DSINKS + head, -tl.sum(total))


@gluon.jit
def backward_groups(
    Q, K, V, DY, DK, DV, LSE2, DELTA, DQ32, scale, tiles_a_head, kv_heads, ratio, padded, len_q, len_k, right,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D1: gl.constexpr, D2: gl.constexpr, BOX: gl.constexpr,
    Q_STAGES: gl.constexpr, DY_STAGES: gl.constexpr, AHEAD: gl.constexpr, WARP_GROUPS: gl.constexpr,
    REGISTERS: gl.constexpr, BOUNDED: gl.constexpr, left=None, TURNS=None, section=None,
):  # fmt: skip
    """dK and dV of 128 keys of a head of K, and what they add to dQ: two consumer groups and a producer warp.

    The tensor maps are over (batch, head, row, column), those of LSE2 and DELTA over (batch, head, 1, row). DQ32 is
    [batch, heads, padded / 64] tiles as ``add_dq`` lays them out. Row r sees the keys before r + right where BOUNDED,
    and from r + left on where there is ``left``. With TURNS one warp more keeps the order in which programs add to dQ:
    see ``keep_order``, and ``tile_in_order`` for ``section``, which without TURNS is as in ``tile_of_keys``.
    """
    gl.static_assert(WARP_GROUPS == 2 and BLOCK_N == 128)
    z = BackwardSizes(BLOCK_M, BLOCK_N, D1, D2, BOX, Q_STAGES, DY_STAGES, AHEAD, BOUNDED)
    if TURNS is None:
        tile = tile_of_keys(tiles_a_head, section, kv_heads, ratio, len_q, right, z, left)
    else:
        tile = tile_in_order(tiles_a_head, section, kv_heads, ratio, len_q, right, z, left)
    by_groups(
        Q, K, V, DY, DK, DV, LSE2, DELTA, DQ32, TURNS, tile, scale, tiles_a_head, kv_heads * ratio, padded, len_k,
        right, REGISTERS, z, left,
    )  # fmt: skip


@gluon.jit
def backward_roles(
    Q, K, V, DY, DK, DV, LSE2, DELTA, DQ32, scale, tiles_a_head, kv_heads, ratio, padded, len_q, len_k, right,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D1: gl.constexpr, D2: gl.constexpr, BOX: gl.constexpr,
    Q_STAGES: gl.constexpr, DY_STAGES: gl.constexpr, WARP_GROUPS: gl.constexpr, REGISTERS: gl.constexpr,
    DQ_REGISTERS: gl.constexpr, BOUNDED: gl.constexpr, left=None, cap=None, TURNS=None,
    section=None,
):  # fmt: skip
    """As ``backward_groups``, of 64 keys: three consumer groups have a role each, and three warps keep the order. With
    a soft cap, ``cap`` and ``scale`` are as the forward takes them."""
    gl.static_assert(WARP_GROUPS == 3 and D2 > 0)
    z = BackwardSizes(BLOCK_M, BLOCK_N, D1, D2, BOX, Q_STAGES, DY_STAGES, 0, BOUNDED)
    if TURNS is None:
        tile = tile_of_keys(tiles_a_head, section, kv_heads, ratio, len_q, right, z, left)
    else:
        tile = tile_in_order(tiles_a_head, section, kv_heads, ratio, len_q, right, z, left)
    by_roles(
        Q, K, V, DY, DK, DV, LSE2, DELTA, DQ32, TURNS, tile, scale, tiles_a_head, kv_heads * ratio, padded, len_k,
        right, REGISTERS, DQ_REGISTERS, z, left, cap,
    )  # fmt: skip


@triton.jit
def finish(
    DQ, DQ32, dq_batch, dq_head, dq_row, scale, tiles_a_head, heads, pieces, dim, len_q, WIDTH: tl.constexpr
):
    """``finish_rows`` of WIDTH columns of 64 rows a program, a piece of ``pieces`` in a row."""
    tile = tl.program_id(0) // pieces
    both = tile // tiles_a_head
    batch = (both // heads).to(tl.int64)
    head = (both % heads).to(tl.int64)
    finish_rows(
        DQ + batch * dq_batch + head * dq_head, DQ32 + tl.program_id(0).to(tl.int64) * (64 * WIDTH), dq_row, scale,
        (tile - both * tiles_a_head) * 64, (tl.program_id(0) - tile * pieces) * WIDTH, dim, len_q, WIDTH,
    )  # fmt: skip
