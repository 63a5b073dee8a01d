"""Flash attention backward: dQ, dK, dV and the gradient of the sinks, the same bits every time.

Every gradient is summed by one program in a fixed order, so that nothing is added atomically: ``row_sums`` works out
what each row needs, ``key_tiles`` a block of keys (all rows and query heads that see it), ``query_tiles`` a block of
rows. The probabilities are computed twice.
"""

import triton
import triton.language as tl

from csrc_triton.attention_gradients import key_tile, query_tile
from csrc_triton.attention_tiles import load_rows

DECLARATION = {
    "op": "flash_attention_backward",
    "kernels": {
        "flash_attention_backward_rows": {
            "always_aligned": True,
            "arguments": {
                "LSE2": "*fp32",
                "DELTA": "*fp32",
                "Y": "*dtype",
                "DY": "*dtype",
                "LSE": "*fp32",
                "DLSE": "*fp32",
                "y_batch": "i64",
                "y_head": "i32",
                "y_row": "i32",
                "dy_batch": "i64",
                "dy_head": "i32",
                "dy_row": "i32",
                "tiles_a_head": "i32",
                "heads": "i32",
                "dim": "i32",
                "len_q": "i32",
                "padded": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16"]},
            "aligned": [
                "LSE2", "DELTA", "Y", "DY", "y_batch", "y_head", "y_row", "dy_batch", "dy_head", "dy_row", "dim",
                "padded",
            ],
            "forms": {"tiles": {"function": "row_sums", "constants": ["BLOCK_M", "D1"]}},
        },
        "flash_attention_backward_keys": {
            "always_aligned": True,
            "matrix": True,
            "arguments": {
                "DK": "*dtype",
                "DV": "*dtype",
                "Q": "*dtype",
                "K": "*dtype",
                "V": "*dtype",
                "DY": "*dtype",
                "LSE2": "*fp32",
                "DELTA": "*fp32",
                "dk_batch": "i64",
                "dk_head": "i32",
                "dk_row": "i32",
                "q_batch": "i64",
                "q_head": "i32",
                "q_row": "i32",
                "k_batch": "i64",
                "k_head": "i32",
                "k_row": "i32",
                "v_batch": "i64",
                "v_head": "i32",
                "v_row": "i32",
                "dy_batch": "i64",
                "dy_head": "i32",
                "dy_row": "i32",
                "scale": "fp32",
                "cap": "fp32",
                "gradient_scale": "fp32",
                "tiles_a_head": "i32",
                "heads": "i32",
                "ratio": "i32",
                "dim": "i32",
                "padded": "i32",
                "len_q": "i32",
                "len_k": "i32",
                "right": "i32",
                "left": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16"]},
            "aligned": [
                "DK", "DV", "Q", "K", "V", "DY", "LSE2", "DELTA", "dk_batch", "dk_head", "dk_row", "q_batch", "q_head",
                "q_row", "k_batch", "k_head", "k_row", "v_batch", "v_head", "v_row", "dy_batch", "dy_head", "dy_row",
                "dim", "padded",
            ],
            "forms": {
                "tiles": {
                    "function": "key_tiles",
                    "constants": ["BLOCK_M", "BLOCK_N", "D1", "D2", "STAGES", "CAP"],
                    "defaults": {"CAP": 0},
                }
            },
        },
        "flash_attention_backward_keys_capped": {
            "like": "flash_attention_backward_keys",
            "forms": {
                "tiles": {
                    "function": "key_tiles",
                    "constants": ["BLOCK_M", "BLOCK_N", "D1", "D2", "STAGES", "CAP"],
                    "defaults": {"CAP": 1},
                }
            },
        },
        "flash_attention_backward_queries": {
            "always_aligned": True,
            "matrix": True,
            "arguments": {
                "DQ": "*dtype",
                "Q": "*dtype",
                "K": "*dtype",
                "V": "*dtype",
                "DY": "*dtype",
                "LSE2": "*fp32",
                "DELTA": "*fp32",
                "dq_batch": "i64",
                "dq_head": "i32",
                "dq_row": "i32",
                "q_batch": "i64",
                "q_head": "i32",
                "q_row": "i32",
                "k_batch": "i64",
                "k_head": "i32",
                "k_row": "i32",
                "v_batch": "i64",
                "v_head": "i32",
                "v_row": "i32",
                "dy_batch": "i64",
                "dy_head": "i32",
                "dy_row": "i32",
                "scale": "fp32",
                "cap": "fp32",
                "gradient_scale": "fp32",
                "tiles_a_head": "i32",
                "heads": "i32",
                "ratio": "i32",
                "dim": "i32",
                "padded": "i32",
                "len_q": "i32",
                "len_k": "i32",
                "right": "i32",
                "left": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16"]},
            "aligned": [
                "DQ", "Q", "K", "V", "DY", "LSE2", "DELTA", "dq_batch", "dq_head", "dq_row", "q_batch", "q_head",
                "q_row", "k_batch", "k_head", "k_row", "v_batch", "v_head", "v_row", "dy_batch", "dy_head", "dy_row",
                "dim", "padded",
            ],
            "forms": {
                "tiles": {
                    "function": "query_tiles",
                    "constants": ["BLOCK_M", "BLOCK_N", "D1", "D2", "STAGES", "CAP"],
                    "defaults": {"CAP": 0},
                }
            },
        },
        "flash_attention_backward_queries_capped": {
            "like": "flash_attention_backward_queries",
            "forms": {
                "tiles": {
                    "function": "query_tiles",
                    "constants": ["BLOCK_M", "BLOCK_N", "D1", "D2", "STAGES", "CAP"],
                    "defaults": {"CAP": 1},
                }
            },
        },
        "flash_attention_backward_sinks": {
            "always_aligned": True,
            "arguments": {
                "DSINKS": "*fp32",
                "SINKS": "*fp32",
                "LSE2": "*fp32",
                "DELTA": "*fp32",
                "batch": "i32",
                "heads": "i32",
                "padded": "i32",
            },
            "axes": {},
            "aligned": ["LSE2", "DELTA", "padded"],
            "forms": {"row": {"function": "sink_sums", "constants": ["BLOCK"]}},
        },
    },
}  # fmt: skip


@triton.jit
def row_sums(
    LSE2, DELTA, Y, DY, LSE, DLSE, y_batch, y_head, y_row, dy_batch, dy_head, dy_row, tiles_a_head, heads,
    dim, len_q, padded, BLOCK_M: tl.constexpr, D1: tl.constexpr,
):  # fmt: skip
    """DELTA = rowsum(DY * Y) - DLSE, and LSE in base 2; both [batch, heads, padded].

    Rows past ``len_q`` and rows that see no key get an infinite LSE, which makes their probabilities 0, and a delta of
    0, whatever DLSE is there.
    """
    tile = tl.program_id(0) % tiles_a_head
    both = tl.program_id(0) // tiles_a_head
    batch = (both // heads).to(tl.int64)
    head = (both % heads).to(tl.int64)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, D1)
    y = load_rows(Y + batch * y_batch + head * y_head, rows, y_row, columns, dim, len_q, True)
    dy = load_rows(DY + batch * dy_batch + head * dy_head, rows, dy_row, columns, dim, len_q, True)
    delta = tl.sum(y.to(tl.float32) * dy.to(tl.float32), 1)
    from_row = both.to(tl.int64) * len_q + rows
    keep = rows < len_q
    lse = tl.load(LSE + from_row, mask=keep, other=float("-inf"))
    delta -= tl.load(DLSE + from_row, mask=keep & (DLSE.to(tl.int64) != 0), other=0.0)
    sees = lse != float("-inf")
    to_row = both.to(tl.int64) * padded + rows
    tl.store(LSE2 + to_row, tl.where(sees, lse * 1.4426950408889634, float("inf")))
    tl.store(DELTA + to_row, tl.where(sees, delta, 0.0))


@triton.jit
def key_tiles(
    DK, DV, Q, K, V, DY, LSE2, DELTA, dk_batch, dk_head, dk_row, q_batch, q_head, q_row, k_batch, k_head,
    k_row, v_batch, v_head, v_row, dy_batch, dy_head, dy_row, scale, cap, gradient_scale, tiles_a_head,
    heads, ratio, dim, padded, len_q, len_k, right, left, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    D1: tl.constexpr, D2: tl.constexpr, STAGES: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """dK and dV, which share strides, of BLOCK_N keys of a head of K. The first keys, which most rows see, come first.

    ``heads`` are K's, each shared by ``ratio`` of Q's. ``scale`` and ``cap`` as the forward takes them;
    ``gradient_scale`` is d score / d (q k) without the soft cap's slope.
    """
    tile = tl.program_id(0) % tiles_a_head
    both = tl.program_id(0) // tiles_a_head
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
    heads, ratio, dim, padded, len_q, len_k, right, left, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    D1: tl.constexpr, D2: tl.constexpr, STAGES: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """dQ of BLOCK_M rows of a head, the last rows first. ``heads`` are Q's; the rest as in ``key_tiles``."""
    tile = tiles_a_head - 1 - tl.program_id(0) % tiles_a_head
    both = tl.program_id(0) // tiles_a_head
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
