"""top_k_top_p_mask: logits, and -inf for those that top-k, top-p or min-p leave out.

Three launches: ``groups`` leaves the greatest logit of each group of 32 columns, ``threshold`` finds a row's threshold
from them (``threshold.py``), ``mask`` writes the row. Three more come after the first where top-p is given: two of
``tails`` and ``collect`` find the columns among which the threshold of a flat row lies (``bracket.py``). ``sample``
launches all but the last as well.
"""

import triton
import triton.language as tl

from csrc_triton.sampling.bracket import (
    FARTHEST,
    HELD,
    MEASURES,
    SAMPLED,
    STEPS,
    SUMS,
    bounds_of,
    distance,
    interval_of,
    row_of,
)
from csrc_triton.sampling.generator import LOG2_E, mass_of, packed
from csrc_triton.sampling.logits import GROUP, begin, columns_of_groups, given, last_kept_of, load_logits
from csrc_triton.sampling.threshold import find_threshold

AXES = {"dtype": ["bf16", "fp16", "fp32"]}
ALIGNED = ["X", "x_stride", "n"]
OF_ROW = {"X": "*dtype", "K": "*i32", "P": "*fp32", "MIN_P": "*fp32", "TEMPERATURE": "*fp32"}
DECLARATION = {
    "op": "top_k_top_p_mask",
    "kernels": {
        "logits_groups": {
            "arguments": {
                "GREATEST": "*fp32", "PARTS": "*fp32", "WORDS": "*i64", "X": "*dtype", "TEMPERATURE": "*fp32",
                "x_stride": "i64", "n": "i32", "groups": "i32", "row_words": "i32", "blocks": "i32",
            },
            "axes": AXES,
            "aligned": ALIGNED,
            "forms": {
                "block": {
                    "function": "groups_of_block", "constants": ["BLOCK", "PDL"], "defaults": {"PDL": 0}, "pdl": "PDL",
                },
            },
        },
        "logits_tails": {
            "arguments": {
                "TAILS": "*fp32", "PARTS": "*fp32", **OF_ROW, "x_stride": "i64", "n": "i32", "parts": "i32",
                "step": "i32", "blocks": "i32",
            },
            "axes": AXES,
            "aligned": ALIGNED,
            "forms": {
                "block": {
                    "function": "tails_of_sample", "constants": ["BLOCK", "PDL"], "defaults": {"PDL": 0},
                    "pdl": "PDL",
                },
            },
        },
        "logits_collect": {
            "arguments": {
                "WORDS": "*i64", "TAILS": "*fp32", "PARTS": "*fp32", **OF_ROW, "x_stride": "i64", "n": "i32",
                "parts": "i32", "sampled_blocks": "i32", "row_words": "i32", "blocks": "i32",
            },
            "axes": AXES,
            "aligned": ALIGNED,
            "forms": {
                "block": {
                    "function": "collect", "constants": ["BLOCK", "PDL"], "defaults": {"PDL": 0}, "pdl": "PDL",
                },
            },
        },
        "logits_threshold": {
            "arguments": {
                "LAST": "*i64", "GREATEST": "*fp32", "WORDS": "*i64", **OF_ROW, "x_stride": "i64", "n": "i32",
                "groups": "i32", "row_words": "i32",
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
                "Y": "*dtype", "X": "*dtype", "LAST": "*i64", "y_stride": "i64", "x_stride": "i64", "n": "i32",
                "blocks": "i32",
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
def groups_of_block(
    GREATEST, PARTS, WORDS, X, TEMPERATURE, x_stride, n, groups, row_words, blocks,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The greatest logit of each group in a block of columns; for ``tails_of_sample`` and ``collect`` also that of the
    block, its mass relative to it, and zeros where ``collect`` adds up."""
    blocks = begin(blocks, PDL)
    program = tl.program_id(0)
    at = program // blocks
    first = (program - at * blocks) * (BLOCK // GROUP)
    cols = columns_of_groups(first, BLOCK // GROUP)
    x = load_logits(X + at.to(tl.int64) * x_stride, cols, cols < n)
    group = first + tl.arange(0, BLOCK // GROUP)
    of_groups = tl.max(x, 1)
    tl.store(GREATEST + at.to(tl.int64) * (2 * groups) + group, of_groups, mask=group < groups)
    if PARTS.to(tl.int64) != 0:
        greatest = tl.max(of_groups, 0)
        scale = tl.div_rn(LOG2_E, given(TEMPERATURE, at, 1.0))
        powers = tl.exp2(tl.where(x == greatest, 0.0, x - greatest) * scale)
        tl.store(PARTS + 2 * program, greatest)
        tl.store(PARTS + 2 * program + 1, tl.sum(powers))
        if first == 0:
            tl.store(WORDS + at.to(tl.int64) * row_words + tl.arange(0, SUMS), tl.zeros([SUMS], tl.int64))


@triton.jit
def tails_of_sample(
    TAILS, PARTS, X, K, P, MIN_P, TEMPERATURE, x_stride, n, parts, step, blocks,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of a block of a row's sample: the mass beyond nine distances from the row's greatest logit, and the number of
    columns up to them. The second step's distances lie in one interval of the first one's."""
    blocks = begin(blocks, PDL)
    program = tl.program_id(0)
    at = program // blocks
    block = program - at * blocks
    row = at.to(tl.int64)
    cols = (block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP))[:, None] * (GROUP * SAMPLED)
    cols += tl.arange(0, GROUP)[None, :]
    x = load_logits(X + row * x_stride, cols, cols < n)
    alone, greatest, scale, tail = row_of(K, P, MIN_P, TEMPERATURE, PARTS, parts, n, at)
    if alone:
        TAILS += row * (STEPS * MEASURES) * blocks
        near = tl.full([], 0.0, tl.float32)
        far = near + FARTHEST
        if step > 0:
            near, far, _more, _less, _first, _last, _measured = interval_of(TAILS, blocks, near, far, tail, 0)
        distances = tl.where(x == greatest, 0.0, (greatest - x) * scale)
        powers = tl.exp2(-distances)
        TAILS += (step * blocks + block) * MEASURES
        for i in tl.static_range(9):
            bound = distance(near, far, i * 1.0, step)
            tl.store(TAILS + i, tl.sum(tl.where(distances > bound, powers, 0.0)))
            tl.store(TAILS + 16 + i, tl.sum((distances <= bound).to(tl.float32)))


@triton.jit
def collect(
    WORDS, TAILS, PARTS, X, K, P, MIN_P, TEMPERATURE, x_stride, n, parts, sampled_blocks, row_words, blocks,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A block of columns: add up its mass, and that above where the threshold is supposed; write down the columns
    around it, in any order. A row's words are the number of those columns, the two sums, nothing, and the columns."""
    blocks = begin(blocks, PDL)
    program = tl.program_id(0)
    at = program // blocks
    row = at.to(tl.int64)
    cols = (program - at * blocks) * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(X + row * x_stride, cols, cols < n)
    alone, greatest, scale, tail = row_of(K, P, MIN_P, TEMPERATURE, PARTS, parts, n, at)
    if alone:
        TAILS += row * (STEPS * MEASURES) * sampled_blocks
        low, high = bounds_of(TAILS, sampled_blocks, greatest, scale, tail)
        mass = mass_of(x, greatest, scale).to(tl.int64)
        inside = ((x >= low) & (x < high) & (cols < n)).to(tl.int32)
        place = tl.cumsum(inside, 0) - 1
        count = tl.sum(inside, 0)
        WORDS += row * row_words
        tl.atomic_add(WORDS + 1, tl.sum(mass, 0), sem="relaxed")
        tl.atomic_add(WORDS + 2, tl.sum(tl.where(x >= high, mass, 0), 0), sem="relaxed")
        if count > 0:
            place += tl.atomic_add(WORDS, count.to(tl.int64), sem="relaxed").to(tl.int32)
            tl.store(WORDS + SUMS + place, packed(x, cols), mask=(inside != 0) & (place < HELD))


@triton.jit
def threshold(
    LAST, GREATEST, WORDS, X, K, P, MIN_P, TEMPERATURE, x_stride, n, groups, row_words,
    GROUPS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row a program."""
    groups = begin(groups, PDL)
    at = tl.program_id(0)
    row = at.to(tl.int64)
    find_threshold(
        LAST, GREATEST + row * (2 * groups), WORDS + row * row_words, X + row * x_stride, n, K, P, MIN_P, TEMPERATURE,
        at, groups, row_words, GROUPS, TILE, WIDTH,
    )  # fmt: skip


@triton.jit
def mask_block(Y, X, LAST, y_stride, x_stride, n, blocks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A block of columns: -inf for those below the threshold, or after the last of those that equal it. NaN counts as
    -inf. Y may be X."""
    blocks = begin(blocks, PDL)
    program = tl.program_id(0)
    at = program // blocks
    cols = (program - at * blocks) * BLOCK + tl.arange(0, BLOCK)
    tau, limit = last_kept_of(LAST, at)
    x = tl.load(X + at.to(tl.int64) * x_stride + cols, mask=cols < n, other=0.0)
    wide = x.to(tl.float32)
    kept = (wide > tau) | ((wide == tau) & (cols <= limit))
    y = tl.where(kept, wide, -float("inf")).to(Y.dtype.element_ty)
    tl.store(Y + at.to(tl.int64) * y_stride + cols, y, mask=cols < n)
