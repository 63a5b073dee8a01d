"""sample: a token from each row of logits.

Four launches. ``groups`` leaves the greatest logit of each group of 32 columns, ``threshold`` finds what top-k, top-p
and min-p keep, ``choose`` leaves the best of each block of columns, ``combine`` the best of a row. The best has the
greatest logarithm of its probability, less that of an exponentially distributed number: the Gumbel-max trick. Calls
without top-k, top-p and min-p have the last two launches alone.
"""

import triton
import triton.language as tl

from csrc_triton.sampling.generator import (
    LOG2_E,
    SAMPLE,
    column_of,
    exponential,
    log2_of,
    packed,
    words_of,
)
from csrc_triton.sampling.logits import GROUP, LOGITS, begin, given, logits_at, row_of
from csrc_triton.sampling.threshold import ALL_KEPT

AXES = {"dtype": ["bf16", "fp16", "fp32"]}
DECLARATION = {
    "op": "sample",
    "uses": ["top_k_top_p_mask"],
    "kernels": {
        "sample_choose": {
            "arguments": {
                "PART": "*i64", **LOGITS, "TAU": "*fp32", "LIMIT": "*i32", "TEMPERATURE": "*fp32", "SEEDS": "*i64",
                "POSITIONS": "*i64", "blocks": "i32",
            },
            "axes": AXES,
            "aligned": ["X", "x_stride", "n"],
            "forms": {
                "block": {
                    "function": "choose", "constants": ["BLOCK", "PDL"], "defaults": {"PDL": 0}, "pdl": "PDL",
                },
            },
        },
        "sample_combine": {
            "arguments": {"TOKENS": "*i64", "PART": "*i64", "blocks": "i32"},
            "axes": {},
            "always_aligned": True,
            "aligned": [],
            "forms": {
                "row": {
                    "function": "combine", "constants": ["BLOCK", "PDL"], "defaults": {"PDL": 0}, "pdl": "PDL",
                },
            },
        },
    },
}  # fmt: skip


@triton.jit
def choose(
    PART, X, ALLOWED, BAD, PROMPT, COUNTS, REPETITION, PRESENCE, FREQUENCY, x_stride, counts_stride, words, bad, n,
    TAU, LIMIT, TEMPERATURE, SEEDS, POSITIONS, blocks, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best column of a block, with its score, in one word. A greedy row's score is the logit."""
    blocks = begin(blocks, PDL)
    program = tl.program_id(0)
    at = program // blocks
    quarters = (program - at * blocks) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    row = row_of(
        at, X, ALLOWED, BAD, PROMPT, COUNTS, REPETITION, PRESENCE, FREQUENCY, x_stride, counts_stride, words, bad, n
    )  # fmt: skip
    temperature = given(TEMPERATURE, at, 1.0)
    tau = given(TAU, at, -float("inf"))
    limit = given(LIMIT, at, ALL_KEPT)
    best = tl.full([BLOCK // 4], -9223372036854775808, tl.int64)
    if temperature > 0.0:
        scale = tl.div_rn(LOG2_E, temperature)
        random = words_of(quarters, tl.load(SEEDS + at), tl.load(POSITIONS + at), SAMPLE)
        for i in tl.static_range(4):
            cols = quarters * 4 + i
            x = logits_at(row, cols, cols < n)
            kept = (x > tau) | ((x == tau) & (cols <= limit))
            score = tl.fma(x, scale, -log2_of(exponential(random[i])))
            best = tl.maximum(best, packed(tl.where(kept, score, -float("inf")), cols))
    else:
        for i in tl.static_range(4):
            cols = quarters * 4 + i
            best = tl.maximum(best, packed(logits_at(row, cols, cols < n), cols))
    tl.store(PART + program, tl.max(best, 0))


@triton.jit
def combine(TOKENS, PART, blocks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The best column of a row."""
    blocks = begin(blocks, PDL)
    at = tl.program_id(0).to(tl.int64)
    best = tl.full([BLOCK], -9223372036854775808, tl.int64)
    for first in range(0, blocks, BLOCK):
        i = first + tl.arange(0, BLOCK)
        best = tl.maximum(
            best, tl.load(PART + at * blocks + i, mask=i < blocks, other=-9223372036854775808)
        )
    tl.store(TOKENS + at, column_of(tl.max(best, 0)))
