"""Flash attention backward: dQ, dK, dV and the gradient of the sinks.

``preprocess_rows`` computes the statistics of rows; then there are two ways. In plain Triton (``backward_tiles``) one
program sums each gradient in a fixed order, so that it has the same bits every time: ``dkdv_tiles`` for a tile of keys
(all rows and query heads that see it), ``dq_tiles`` for a tile of rows; probabilities are computed twice. The
warp-specialised kernels for Hopper compute them once: see ``backward_consumers``. They add dQ up in float32, which
``postprocess_dq`` scales and rounds.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from csrc_triton.attention.backward_consumers import run_narrow, run_wide
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
from csrc_triton.attention.backward_scheduler import key_tile, ordered_tile
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
from csrc_triton.attention.tile_scheduler import swizzled_tile

DTYPE = {"dtype": ["bf16", "fp16"]}
STRIDES = {
    "q_batch": "i64", "q_head": "i32", "q_row": "i32", "k_batch": "i64", "k_head": "i32", "k_row": "i32",
    "v_batch": "i64", "v_head": "i32", "v_row": "i32", "dy_batch": "i64", "dy_head": "i32", "dy_row": "i32",
}  # fmt: skip
SIZES = {
    "scale": "fp32", "cap": "fp32", "gradient_scale": "fp32", "tiles_per_head": "i32", "swizzle_heads": "i32",
    "heads": "i32", "ratio": "i32", "dim": "i32", "padded": "i32", "len_q": "i32", "len_k": "i32", "right": "i32",
    "left": "i32",
}  # fmt: skip

DECLARATION = {
    "op": "flash_attention_backward",
    "kernels": {
        "flash_attention_backward_preprocess": {
            "always_aligned": True,
            "arguments": {
                "LSE2": "*fp32", "DELTA": "*fp32", "Y": "*dtype", "DY": "*dtype", "LSE": "*fp32", "DLSE": "*fp32",
                "y_batch": "i64", "y_head": "i32", "y_row": "i32", "dy_batch": "i64", "dy_head": "i32",
                "dy_row": "i32", "tiles_per_head": "i32", "heads": "i32", "dim": "i32", "len_q": "i32",
                "padded": "i32",
            },
            "axes": DTYPE,
            "aligned": [
                "LSE2", "DELTA", "Y", "DY", "y_batch", "y_head", "y_row", "dy_batch", "dy_head", "dy_row", "dim",
                "padded",
            ],
            "forms": {"tiles": {"function": "preprocess_rows", "constants": ["BLOCK_M", "D1"]}},
        },
        "flash_attention_backward_dkdv": {
            "always_aligned": True,
            "matrix": True,
            "arguments": {
                "DK": "*dtype", "DV": "*dtype", **READ, "dk_batch": "i64", "dk_head": "i32", "dk_row": "i32",
                **STRIDES, **SIZES,
            },
            "axes": {**DTYPE, "softcap": [False, True]},
            "aligned": ["DK", "DV", *READ, "dk_batch", "dk_head", "dk_row", *STRIDES, "dim", "padded"],
            "forms": {"tiles": {"function": "dkdv_tiles", "constants": TILES_CONSTANTS}},
        },
        "flash_attention_backward_dq": {
            "always_aligned": True,
            "matrix": True,
            "arguments": {
                "DQ": "*dtype", **READ, "dq_batch": "i64", "dq_head": "i32", "dq_row": "i32", **STRIDES, **SIZES,
            },
            "axes": {**DTYPE, "softcap": [False, True]},
            "aligned": ["DQ", *READ, "dq_batch", "dq_head", "dq_row", *STRIDES, "dim", "padded"],
            "forms": {"tiles": {"function": "dq_tiles", "constants": TILES_CONSTANTS}},
        },
        "flash_attention_backward_sinks": {
            "always_aligned": True,
            "arguments": {
                "DSINKS": "*fp32", "SINKS": "*fp32", "LSE2": "*fp32", "DELTA": "*fp32", "batch": "i32",
                "heads": "i32", "padded": "i32",
            },
            "axes": {},
            "aligned": ["LSE2", "DELTA", "padded"],
            "forms": {"row": {"function": "dsinks", "constants": ["BLOCK"]}},
        },
        "flash_attention_backward_warp_specialized": {
            "language": "gluon",
            "optional": True,
            "always_aligned": True,
            "matrix": True,
            "arguments": {
                **MAPS, "scale": "fp32", "tiles_per_head": "i32", "kv_heads": "i32", "ratio": "i32", "padded": "i32",
                "len_q": "i32", "len_k": "i32", "right": "i32", "left": "i32", "cap": "fp32", "SEMAPHORE": "*i32",
                "swizzle_heads": "i32",
            },
            "axes": {
                **DTYPE,
                "head_dim": [64, 96, 128, 192, 256],
                "mask": ["full", "causal", "local"],
                "softcap": [False, True],
                "deterministic": [False, True],
            },
            # a soft cap where it does not spill, with both bounds
            "excluded": [
                {"softcap": [True], "head_dim": [64, 96, 128, 192]},
                {"softcap": [True], "mask": ["full", "causal"]},
            ],
            "only_with": {
                "left": {"mask": ["local"]},
                "cap": {"softcap": [True]},
                "SEMAPHORE": {"deterministic": [True]},
            },
            "gives": {
                "head_dim": HEAD_DIMS,
                "mask": {"full": {"MASK": 0}, "causal": {"MASK": 1}, "local": {"MASK": 2}},
            },
            "host": ["waves", "waves_gqa"],
            "aligned": [],
            "forms": {
                "narrow": {
                    "function": "warp_specialized",
                    "constants": [*NARROW_CONSTANTS, "MASK"],
                    "requires": {"head_dim": NARROW},
                },
                "wide": {
                    "function": "warp_specialized_wide",
                    "constants": [*WIDE_CONSTANTS, "MASK", "SOFTCAP"],
                    "requires": {"head_dim": WIDE},
                },
            },
        },
        "flash_attention_backward_postprocess": {
            "optional": True,
            "always_aligned": True,
            "arguments": {
                "DQ": "*dtype", "DQ32": "*fp32", "dq_batch": "i64", "dq_head": "i32", "dq_row": "i32",
                "scale": "fp32", "tiles_per_head": "i32", "heads": "i32", "pieces": "i32", "dim": "i32", "len_q": "i32",
            },
            "axes": DTYPE,
            "aligned": ["DQ", "DQ32", "dq_batch", "dq_head", "dq_row", "dim"],
            "forms": {"tiles": {"function": "postprocess_dq", "constants": ["WIDTH"]}},
        },
    },
}  # fmt: skip


@triton.jit
def preprocess_rows(
    LSE2, DELTA, Y, DY, LSE, DLSE, y_batch, y_head, y_row, dy_batch, dy_head, dy_row, tiles_per_head, heads,
    dim, len_q, padded, BLOCK_M: tl.constexpr, D1: tl.constexpr,
):  # fmt: skip
    """``preprocess`` of BLOCK_M rows; LSE2 and DELTA are [batch, heads, padded]."""
    tile = tl.program_id(0) % tiles_per_head
    batch_head = tl.program_id(0) // tiles_per_head
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    first = batch_head.to(tl.int64) * len_q
    to = batch_head.to(tl.int64) * padded + rows
    preprocess(
        rows, LSE2 + to, DELTA + to, Y + batch * y_batch + head * y_head, DY + batch * dy_batch + head * dy_head,
        LSE + first, DLSE + first, DLSE.to(tl.int64) != 0, y_row, dy_row, dim, len_q, D1,
    )  # fmt: skip


@triton.jit
def dkdv_tiles(
    DK, DV, Q, K, V, DY, LSE2, DELTA, dk_batch, dk_head, dk_row, q_batch, q_head, q_row, k_batch, k_head,
    k_row, v_batch, v_head, v_row, dy_batch, dy_head, dy_row, scale, cap, gradient_scale, tiles_per_head,
    swizzle_heads, heads, ratio, dim, padded, len_q, len_k, right, left, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    D1: tl.constexpr, D2: tl.constexpr, STAGES: tl.constexpr, FP16_FLUSHES: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """dK and dV, which share strides, of BLOCK_N keys of a head of K. The first keys, which most rows see, come first.

    ``swizzle_heads`` is ``swizzled_tile``'; ``heads`` are K's; the rest is as in ``Problem``.
    """
    batch_head, tile = swizzled_tile(tiles_per_head, swizzle_heads)
    batch = (batch_head // heads).to(tl.int64)
    head = batch_head % heads
    K += batch * k_batch + head.to(tl.int64) * k_head
    V += batch * v_batch + head.to(tl.int64) * v_head
    DK += batch * dk_batch + head.to(tl.int64) * dk_head
    DV += batch * dk_batch + head.to(tl.int64) * dk_head
    Q += batch * q_batch + (head * ratio).to(tl.int64) * q_head
    DY += batch * dy_batch + (head * ratio).to(tl.int64) * dy_head
    at = (batch * heads + head) * ratio * padded
    x = Inputs(Q, K, V, DY, LSE2 + at, DELTA + at, q_head, q_row, k_row, v_row, dy_head, dy_row)
    p = Problem(scale, cap, gradient_scale, ratio, dim, padded, len_q, len_k, right, left)
    z = TileSizes(BLOCK_M, BLOCK_N, D1, D2, STAGES, FP16_FLUSHES, SOFTCAP, False)
    dkdv_tile(tile * BLOCK_N, DK, DV, dk_row, x, p, z)


@triton.jit
def dq_tiles(
    DQ, Q, K, V, DY, LSE2, DELTA, dq_batch, dq_head, dq_row, q_batch, q_head, q_row, k_batch, k_head,
    k_row, v_batch, v_head, v_row, dy_batch, dy_head, dy_row, scale, cap, gradient_scale, tiles_per_head,
    swizzle_heads, heads, ratio, dim, padded, len_q, len_k, right, left, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    D1: tl.constexpr, D2: tl.constexpr, STAGES: tl.constexpr, FP16_FLUSHES: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """dQ of BLOCK_M rows of a head, the last rows first. ``heads`` are Q's; the rest is as in ``dkdv_tiles``."""
    batch_head, number = swizzled_tile(tiles_per_head, swizzle_heads)
    tile = tiles_per_head - 1 - number
    batch = (batch_head // heads).to(tl.int64)
    head = batch_head % heads
    Q += batch * q_batch + head.to(tl.int64) * q_head
    DY += batch * dy_batch + head.to(tl.int64) * dy_head
    DQ += batch * dq_batch + head.to(tl.int64) * dq_head
    K += batch * k_batch + (head // ratio).to(tl.int64) * k_head
    V += batch * v_batch + (head // ratio).to(tl.int64) * v_head
    at = batch_head.to(tl.int64) * padded
    row = tile * BLOCK_M
    x = Inputs(Q, K, V, DY, LSE2 + at, DELTA + at, q_head, q_row, k_row, v_row, dy_head, dy_row)
    p = Problem(scale, cap, gradient_scale, ratio, dim, padded, len_q, len_k, right, left)
    z = TileSizes(BLOCK_M, BLOCK_N, D1, D2, STAGES, FP16_FLUSHES, SOFTCAP, False)
    dq_tile(row, DQ, dq_row, x, p, z)


@triton.jit
def dsinks(DSINKS, SINKS, LSE2, DELTA, batch, heads, padded, BLOCK: tl.constexpr):
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
def warp_specialized(
    Q, K, V, DY, DK, DV, LSE2, DELTA, DQ32, scale, tiles_per_head, kv_heads, ratio, padded, len_q, len_k, right,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D1: gl.constexpr, D2: gl.constexpr, BOX: gl.constexpr,
    Q_STAGES: gl.constexpr, DY_STAGES: gl.constexpr, PIPELINED_SCORES: gl.constexpr, WARP_GROUPS: gl.constexpr,
    REGISTERS: gl.constexpr, MASK: gl.constexpr, left=None, cap=None, SEMAPHORE=None, swizzle_heads=None,
):  # fmt: skip
    """dK and dV of 128 keys of a head of K, and what they add to dQ.

    Tensor maps are as ``InputMaps`` says, DQ32 as ``Outputs``. Row r sees the keys before r + right if there is a MASK,
    and from r + left on if it is LOCAL. ``swizzle_heads`` are ``key_tile``'s or, where a SEMAPHORE makes dQ
    deterministic, ``ordered_tile``'s.
    """
    gl.static_assert(WARP_GROUPS == 2 and BLOCK_N == 128)
    z = BackwardSizes(BLOCK_M, BLOCK_N, D1, D2, BOX, Q_STAGES, DY_STAGES, PIPELINED_SCORES, MASK)
    if SEMAPHORE is None:
        tile = key_tile(tiles_per_head, swizzle_heads, kv_heads, ratio, len_q, right, z, left)
    else:
        tile = ordered_tile(tiles_per_head, swizzle_heads, kv_heads, ratio, len_q, right, z, left)
    run_narrow(
        InputMaps(Q, K, V, DY, LSE2, DELTA), Outputs(DK, DV, DQ32), SEMAPHORE, tile, scale, tiles_per_head,
        kv_heads * ratio, padded, len_k, right, REGISTERS, z, left,
    )  # fmt: skip


@gluon.jit
def warp_specialized_wide(
    Q, K, V, DY, DK, DV, LSE2, DELTA, DQ32, scale, tiles_per_head, kv_heads, ratio, padded, len_q, len_k, right,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D1: gl.constexpr, D2: gl.constexpr, BOX: gl.constexpr,
    Q_STAGES: gl.constexpr, DY_STAGES: gl.constexpr, WARP_GROUPS: gl.constexpr, REGISTERS: gl.constexpr,
    DQ_REGISTERS: gl.constexpr, MASK: gl.constexpr, SOFTCAP: gl.constexpr, left=None, cap=None, SEMAPHORE=None,
    swizzle_heads=None,
):  # fmt: skip
    """As ``warp_specialized``, of 64 keys. With SOFTCAP, ``cap`` and ``scale`` are as the forward takes them."""
    gl.static_assert(WARP_GROUPS == 3 and D2 > 0)
    z = BackwardSizes(BLOCK_M, BLOCK_N, D1, D2, BOX, Q_STAGES, DY_STAGES, 0, MASK, SOFTCAP)
    if SEMAPHORE is None:
        tile = key_tile(tiles_per_head, swizzle_heads, kv_heads, ratio, len_q, right, z, left)
    else:
        tile = ordered_tile(tiles_per_head, swizzle_heads, kv_heads, ratio, len_q, right, z, left)
    run_wide(
        InputMaps(Q, K, V, DY, LSE2, DELTA), Outputs(DK, DV, DQ32), SEMAPHORE, tile, scale, tiles_per_head,
        kv_heads * ratio, padded, len_k, right, REGISTERS, DQ_REGISTERS, z, left, cap,
    )  # fmt: skip


@triton.jit
def postprocess_dq(
    DQ, DQ32, dq_batch, dq_head, dq_row, scale, tiles_per_head, heads, pieces, dim, len_q, WIDTH: tl.constexpr
):
    """``postprocess`` of WIDTH columns of 64 rows a program, one of ``pieces`` in a row."""
    tile = tl.program_id(0) // pieces
    batch_head = tile // tiles_per_head
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    postprocess(
        DQ + batch * dq_batch + head * dq_head, DQ32 + tl.program_id(0).to(tl.int64) * (64 * WIDTH), dq_row, scale,
        (tile - batch_head * tiles_per_head) * 64, (tl.program_id(0) - tile * pieces) * WIDTH, dim, len_q, WIDTH,
    )  # fmt: skip
