"""top_k_top_p_mask: logits, and -inf for those that top-k, top-p or min-p leave out.

Three launches: ``groups`` leaves the greatest logit of each group of 32 columns, ``threshold`` finds a row's threshold
from them (``threshold.py``), ``mask`` writes the row. ``sample`` launches the first two as well.
"""

import triton
import triton.language as tl

from csrc_triton.sampling.logits import GROUP, begin, columns_of_groups, load_logits
from csrc_triton.sampling.threshold import find_threshold

AXES = {"dtype": ["bf16", "fp16", "fp32"]}
ALIGNED = ["X", "x_stride", "n"]
DECLARATION = {
    "op": "top_k_top_p_mask",
    "kernels": {
        "logits_groups": {
            "arguments": {
                "GREATEST": "*fp32", "X": "*dtype", "x_stride": "i64", "n": "i32", "groups": "i32", "blocks": "i32",
            },
            "axes": AXES,
            "aligned": ALIGNED,
            "forms": {
                "block": {
                    "function": "groups_of_block", "constants": ["BLOCK", "PDL"], "defaults": {"PDL": 0}, "pdl": "PDL",
                },
            },
        },
        "logits_threshold": {
            "arguments": {
                "TAU": "*fp32", "LIMIT": "*i32", "LIST": "*i32", "GREATEST": "*fp32", "X": "*dtype", "K": "*i32",
                "P": "*fp32", "MIN_P": "*fp32", "TEMPERATURE": "*fp32", "x_stride": "i64", "n": "i32", "groups": "i32",
            },
            "axes": AXES,
            "aligned": ALIGNED,
            "forms": {
                "row": {
                    "function": "threshold", "constants": ["GROUPS", "TILE", "WIDTH", "PDL"], "defaults": {"PDL": 0},
                    "pdl": "PDL",
                },
            },
        },
        "top_k_top_p_mask": {
            "arguments": {
                "Y": "*dtype", "X": "*dtype", "TAU": "*fp32", "LIMIT": "*i32", "y_stride": "i64", "x_stride": "i64",
                "n": "i32", "blocks": "i32",
            },
            "axes": AXES,
            "aligned": ["Y", "X", "y_stride", "x_stride", "n"],
            "forms": {
                "block": {
                    "function": "mask_block", "constants": ["BLOCK", "PDL"], "defaults": {"PDL": 0}, "pdl": "PDL",
                },
            },
        },
    },
}  # fmt: skip


@triton.jit
def groups_of_block(GREATEST, X, x_stride, n, groups, blocks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The greatest logit of each group in a block of columns."""
    blocks = begin(blocks, PDL)
    program = tl.program_id(0)
    at = program // blocks
    first = (program - at * blocks) * (BLOCK // GROUP)
    cols = columns_of_groups(first, BLOCK // GROUP)
    x = load_logits(X + at.to(tl.int64) * x_stride, cols, cols < n)
    group = first + tl.arange(0, BLOCK // GROUP)
    tl.store(GREATEST + at.to(tl.int64) * groups + group, tl.max(x, 1), mask=group < groups)


@triton.jit
def threshold(
    TAU, LIMIT, LIST, GREATEST, X, K, P, MIN_P, TEMPERATURE, x_stride, n, groups,
    GROUPS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row a program."""
    groups = begin(groups, PDL)
    at = tl.program_id(0)
    row = at.to(tl.int64)
    find_threshold(
        TAU, LIMIT, LIST + row * groups, GREATEST + row * groups, X + row * x_stride, n, K, P, MIN_P, TEMPERATURE, at,
        groups, GROUPS, TILE, WIDTH,
    )  # fmt: skip


@triton.jit
def mask_block(Y, X, TAU, LIMIT, y_stride, x_stride, n, blocks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A block of columns: -inf for those below the threshold, or after the last of those that equal it. NaN counts as
    -inf. Y may be X."""
    blocks = begin(blocks, PDL)
    program = tl.program_id(0)
    at = program // blocks
    cols = (program - at * blocks) * BLOCK + tl.arange(0, BLOCK)
    tau, limit = tl.load(TAU + at), tl.load(LIMIT + at)
    x = tl.load(X + at.to(tl.int64) * x_stride + cols, mask=cols < n, other=0.0)
    wide = x.to(tl.float32)
    kept = (wide > tau) | ((wide == tau) & (cols <= limit))
    y = tl.where(kept, wide, -float("inf")).to(Y.dtype.element_ty)
    tl.store(Y + at.to(tl.int64) * y_stride + cols, y, mask=cols < n)
