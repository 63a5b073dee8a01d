"""Mixture of experts: each token's k experts, gated projections with SwiGLU, summed with the routing weights.

Forward: ``routing`` sorts the pairs of tokens and experts; ``up`` multiplies gathered tokens by the gate-up weights and
applies SwiGLU; ``down`` multiplies by the down weights; ``combine`` adds up each token's rows. Backward: the gradient
goes through the down weights, SwiGLU and the gate-up weights the same way; each weight's gradient is a sum over its
expert's rows. Nothing is added by atomics: results repeat to the bit.

Shazeer et al., Outrageously Large Neural Networks (2017); the grouping of rows into tiles of one expert as in
Gale et al., MegaBlocks (2022).
"""

import triton
import triton.language as tl

from csrc_triton.moe.matmul_tiles import down, down_backward, up, up_backward, weight_backward  # noqa: F401
from csrc_triton.moe.matmul_warp_specialized import down_backward as down_backward_warp_specialized  # noqa: F401
from csrc_triton.moe.matmul_warp_specialized import product as product_warp_specialized  # noqa: F401
from csrc_triton.moe.matmul_warp_specialized import up as up_warp_specialized  # noqa: F401
from csrc_triton.moe.matmul_warp_specialized import weight_backward as weight_backward_warp_specialized  # noqa: F401
from csrc_triton.moe.routing import count, gather, place, scan  # noqa: F401

FLOATS = {"dtype": ["bf16", "fp16", "fp32"]}
TILES = ["BLOCK_M", "BLOCK_N", "BLOCK_K", "STAGES", "GROUP", "TF32X3"]
WARP_SPECIALIZED = {
    "language": "gluon",
    "optional": True,
    "always_aligned": True,
    "matrix": True,
    "aligned": [],
}

DECLARATION = {
    "op": "fused_moe",
    "uses": ["column_sums"],
    "kernels": {
        "fused_moe_count": {
            "arguments": {
                "COUNTS": "*i32",
                "INDICES": "*i32",
                "pairs": "i32",
                "experts": "i32",
                "chunks": "i32",
                "index_words": "i32",
            },
            "axes": {},
            "aligned": [],
            "always_aligned": True,
            "forms": {"chunk": {"function": "count", "constants": ["CHUNK", "EXPERTS"]}},
        },
        "fused_moe_scan": {
            "arguments": {"COUNTS": "*i32", "TOTALS": "*i32", "chunks": "i32"},
            "axes": {},
            "aligned": [],
            "always_aligned": True,
            "forms": {"row": {"function": "scan", "constants": ["CHUNKS"]}},
        },
        "fused_moe_place": {
            "arguments": {
                "POSITION": "*i32",
                "ROW_PAIR": "*i32",
                "ROW_TOKEN": "*i32",
                "TILE_EXPERT": "*i32",
                "OFFSETS": "*i32",
                "INDICES": "*i32",
                "COUNTS": "*i32",
                "TOTALS": "*i32",
                "pairs": "i32",
                "experts": "i32",
                "chunks": "i32",
                "tiles": "i32",
                "top_k": "i32",
                "index_words": "i32",
                "tile_rows": "i32",
            },
            "axes": {},
            "aligned": [],
            "always_aligned": True,
            "forms": {"chunk": {"function": "place", "constants": ["CHUNK", "EXPERTS"]}},
        },
        "fused_moe_gather": {
            "optional": True,
            "always_aligned": True,
            "arguments": {
                "OUT": "*i32",
                "X": "*i32",
                "ROW_TOKEN": "*i32",
                "TILE_EXPERT": "*i32",
                "stride": "i64",
                "n_words": "i32",
                "blocks": "i32",
                "tiles": "i32",
                "tile_rows": "i32",
            },
            "axes": {},
            "aligned": ["OUT", "X"],
            "forms": {"tile": {"function": "gather", "constants": ["ROWS", "BLOCK"]}},
        },
        "fused_moe_up": {
            "arguments": {
                "ACT": "*dtype",
                "PRE": "*dtype",
                "X": "*dtype",
                "WEIGHT": "*dtype",
                "ROW_PAIR": "*i32",
                "ROW_TOKEN": "*i32",
                "TILE_EXPERT": "*i32",
                "x_stride": "i64",
                "hidden": "i32",
                "inner": "i32",
                "tiles": "i32",
                "column_tiles": "i32",
                "save": "i32",
            },
            "axes": FLOATS,
            "aligned": ["ACT", "PRE", "X", "WEIGHT", "x_stride", "hidden", "inner"],
            "forms": {"tile": {"function": "up", "constants": TILES, "defaults": {"TF32X3": False}}},
        },
        "fused_moe_down": {
            "arguments": {
                "Y": "*dtype",
                "ACT": "*dtype",
                "WEIGHT": "*dtype",
                "TILE_EXPERT": "*i32",
                "hidden": "i32",
                "inner": "i32",
                "tiles": "i32",
                "column_tiles": "i32",
            },
            "axes": FLOATS,
            "aligned": ["Y", "ACT", "WEIGHT", "hidden", "inner"],
            "forms": {"tile": {"function": "down", "constants": TILES, "defaults": {"TF32X3": False}}},
        },
        "fused_moe_combine": {
            "arguments": {
                "OUT": "*dtype",
                "Y": "*dtype",
                "POSITION": "*i32",
                "WEIGHTS": "*fp32",
                "hidden": "i32",
                "blocks": "i32",
                "top_k": "i32",
            },
            "axes": FLOATS,
            "aligned": ["OUT", "Y", "hidden"],
            "forms": {"tile": {"function": "combine", "constants": ["ROWS", "BLOCK"]}},
        },
        "fused_moe_down_backward": {
            "arguments": {
                "DPRE": "*dtype",
                "ACT": "*dtype",
                "DWEIGHTS": "*fp32",
                "DOUT": "*dtype",
                "WEIGHT": "*dtype",
                "PRE": "*dtype",
                "WEIGHTS": "*fp32",
                "ROW_PAIR": "*i32",
                "ROW_TOKEN": "*i32",
                "TILE_EXPERT": "*i32",
                "dout_stride": "i64",
                "hidden": "i32",
                "inner": "i32",
                "pairs": "i32",
                "tiles": "i32",
                "column_tiles": "i32",
            },
            "axes": FLOATS,
            "aligned": ["DPRE", "ACT", "DOUT", "WEIGHT", "PRE", "dout_stride", "hidden", "inner"],
            "forms": {"tile": {"function": "down_backward", "constants": TILES, "defaults": {"TF32X3": False}}},
        },
        "fused_moe_up_backward": {
            "arguments": {
                "DX": "*dtype",
                "DPRE": "*dtype",
                "WEIGHT": "*dtype",
                "TILE_EXPERT": "*i32",
                "hidden": "i32",
                "inner": "i32",
                "tiles": "i32",
                "column_tiles": "i32",
            },
            "axes": FLOATS,
            "aligned": ["DX", "DPRE", "WEIGHT", "hidden", "inner"],
            "forms": {"tile": {"function": "up_backward", "constants": TILES, "defaults": {"TF32X3": False}}},
        },
        "fused_moe_weight_backward": {
            "arguments": {
                "DWEIGHT": "*dtype",
                "TOKENS": "*dtype",
                "ROWS": "*dtype",
                "ROW_TOKEN": "*i32",
                "OFFSETS": "*i32",
                "token_stride": "i64",
                "hidden": "i32",
                "inner": "i32",
                "row_tiles": "i32",
                "column_tiles": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"], "gate_up": [False, True]},
            "aligned": ["DWEIGHT", "TOKENS", "ROWS", "token_stride", "hidden", "inner"],
            "forms": {
                "tile": {
                    "function": "weight_backward",
                    "constants": ["GATE_UP", "BLOCK_M", "BLOCK_N", "BLOCK_K", "STAGES", "TF32X3"],
                    "defaults": {"TF32X3": False},
                }
            },
        },
        "fused_moe_up_warp_specialized": {
            **WARP_SPECIALIZED,
            "arguments": {
                "ACT": "dtype[64, 64]",
                "PRE": "*dtype",
                "X": "*dtype",
                "B": "dtype[1, B_ROWS, 2, 64]",
                "ROW_PAIR": "*i32",
                "ROW_TOKEN": "*i32",
                "TILE_EXPERT": "*i32",
                "stride": "i64",
                "hidden": "i32",
                "inner": "i32",
                "tiles": "i32",
                "columns": "i32",
                "save": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16"]},
            "host": ["least_rows"],
            "aligned": ["X", "PRE", "stride", "hidden", "inner"],
            "forms": {
                "warp_specialized": {
                    "function": "up_warp_specialized",
                    "constants": ["BLOCK_N", "STAGES", "GROUP", "B_ROWS", "WARP_GROUPS", "REGISTERS"],
                }
            },
        },
        "fused_moe_product_warp_specialized": {
            **WARP_SPECIALIZED,
            "arguments": {
                "OUTPUT": "dtype[64, 64]",
                "A": "dtype[128, 64]",
                "B": "dtype[1, B_ROWS, PAIR, 64]",
                "TILE_EXPERT": "*i32",
                "depth": "i32",
                "tiles": "i32",
                "columns": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16"], "weight": ["down", "gate_up"]},
            "gives": {
                "weight": {
                    "down": {"PAIR": 1, "B_ROWS": 256, "BY_ROWS": False},
                    "gate_up": {"PAIR": 2, "B_ROWS": 32, "BY_ROWS": True},
                }
            },
            "forms": {
                "warp_specialized": {
                    "function": "product_warp_specialized",
                    "constants": [
                        "BLOCK_N", "STAGES", "GROUP", "PAIR", "BY_ROWS", "B_ROWS", "WARP_GROUPS", "REGISTERS",
                    ],
                }
            },
        },
        "fused_moe_down_backward_warp_specialized": {
            **WARP_SPECIALIZED,
            "arguments": {
                "DPRE": "dtype[64, 64]",
                "ACT": "dtype[64, 64]",
                "DWEIGHTS": "*fp32",
                "A": "dtype[128, 64]",
                "B": "dtype[1, 64, 1, 64]",
                "PRE": "*i32",
                "WEIGHTS": "*fp32",
                "ROW_PAIR": "*i32",
                "TILE_EXPERT": "*i32",
                "depth": "i32",
                "inner": "i32",
                "pairs": "i32",
                "tiles": "i32",
                "columns": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16"]},
            "aligned": ["PRE", "depth", "inner"],
            "forms": {
                "warp_specialized": {
                    "function": "down_backward_warp_specialized",
                    "constants": ["BLOCK_N", "STAGES", "GROUP", "WARP_GROUPS", "REGISTERS"],
                }
            },
        },
        "fused_moe_weight_backward_warp_specialized": {
            **WARP_SPECIALIZED,
            "arguments": {
                "DWEIGHT": "dtype[1, B_ROWS, PAIR, 64]",
                "A": "dtype[64, 64]",
                "B": "dtype[64, 64]",
                "OFFSETS": "*i32",
                "TOTALS": "*i32",
                "experts": "i32",
                "row_tiles": "i32",
                "column_tiles": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16"], "weight": ["down", "gate_up"]},
            "gives": {
                "weight": {"down": {"PAIR": 1, "B_ROWS": 64}, "gate_up": {"PAIR": 2, "B_ROWS": 32}}
            },
            "forms": {
                "warp_specialized": {
                    "function": "weight_backward_warp_specialized",
                    "constants": ["BLOCK_N", "STAGES", "GROUP", "PAIR", "B_ROWS", "WARP_GROUPS", "REGISTERS"],
                }
            },
        },
    },
}  # fmt: skip


@triton.jit
def combine(
    OUT, Y, POSITION, WEIGHTS, hidden, blocks, top_k, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """OUT[tokens, hidden]: BLOCK columns of the sum of a token's rows of Y, times WEIGHTS[tokens, top_k] unless that is
    null. ROWS of them are loaded at a time."""
    program = tl.program_id(0)
    token = (program // blocks).to(tl.int64)
    column = program % blocks * BLOCK + tl.arange(0, BLOCK)
    in_row = column < hidden
    weighted = WEIGHTS.to(tl.int64) != 0
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, top_k, ROWS):
        choice = first + tl.arange(0, ROWS)
        position = tl.load(POSITION + token * top_k + choice, mask=choice < top_k, other=-1)
        known = position >= 0
        weight = tl.load(WEIGHTS + token * top_k + choice, mask=known & weighted, other=1.0)
        at = Y + position.to(tl.int64)[:, None] * hidden + column[None, :]
        y = tl.load(at, mask=known[:, None] & in_row[None, :], other=0.0).to(tl.float32)
        total += tl.sum(y * weight[:, None], 0)
    tl.store(OUT + token * hidden + column, total.to(OUT.dtype.element_ty), mask=in_row)
