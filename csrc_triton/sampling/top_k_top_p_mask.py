"""top_k_top_p_mask: logits, and -inf for those that top-k, top-p or min-p leave out.

Three launches: ``groups`` leaves the greatest logit of each group of 32 columns, ``threshold`` finds a row's threshold
from them (``threshold.py``), ``mask`` writes the row. Two more come after the first where top-k or top-p is given:
``bracket`` and ``collect`` find the columns among which the threshold lies (``bracket.py``, ``ranks.py``). ``sample``
launches all but the last as well.
"""

import triton
import triton.language as tl

from csrc_triton.common.pdl_begin import begin
from csrc_triton.sampling.bracket import (
    BOUNDS,
    BY_RANK,
    HELD,
    HIGHEST,
    NOT_BRACKETED,
    SUMS,
    bounds_by_sample,
    decided_by_mass,
    greatest_and_total,
    least_probable,
)
from csrc_triton.sampling.generator import LOG2_E, in_order, mass_of, packed
from csrc_triton.sampling.logits import GROUP, columns_of_groups, given, last_kept_of, load_logits
from csrc_triton.sampling.ranks import RANKED, bound_of_sets, keys_of_sets
from csrc_triton.sampling.threshold import find_threshold

AXES = {"dtype": ["bf16", "fp16", "fp32"]}
ALIGNED = ["X", "x_stride", "n"]
OF_ROW = {"X": "*dtype", "K": "*i32", "P": "*fp32", "MIN_P": "*fp32", "TEMPERATURE": "*fp32"}
DECLARATION = {
    "op": "top_k_top_p_mask",
    "kernels": {
        "logits_groups": {
            "arguments": {
                "GREATEST": "*fp32", "PARTS": "*fp32", "X": "*dtype", "TEMPERATURE": "*fp32", "x_stride": "i64",
                "n": "i32", "groups": "i32", "blocks": "i32",
            },
            "axes": AXES,
            "aligned": ALIGNED,
            "forms": {
                "block": {
                    "function": "groups_of_block", "constants": ["BLOCK", "PDL"], "defaults": {"PDL": 0}, "pdl": "PDL",
                },
            },
        },
        "logits_bracket": {
            "arguments": {
                "WORDS": "*i64", "GREATEST": "*fp32", "PARTS": "*fp32", **OF_ROW, "x_stride": "i64", "n": "i32",
                "groups": "i32", "parts": "i32", "row_words": "i32",
            },
            "axes": AXES,
            "aligned": ALIGNED,
            "forms": {
                "row": {
                    "function": "bracket", "constants": ["SAMPLE", "PART", "PDL"], "defaults": {"PDL": 0}, "pdl": "PDL",
                },
            },
        },
        "logits_collect": {
            "arguments": {
                "WORDS": "*i64", "GREATEST": "*fp32", "X": "*dtype", "TEMPERATURE": "*fp32", "x_stride": "i64",
                "n": "i32", "groups": "i32", "row_words": "i32", "blocks": "i32",
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
    GREATEST, PARTS, X, TEMPERATURE, x_stride, n, groups, blocks, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """The greatest logit of each group in a block of columns; for ``bracket`` also that of the block, and its mass
    relative to it."""
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


@triton.jit
def bracket(
    WORDS, GREATEST, PARTS, X, K, P, MIN_P, TEMPERATURE, x_stride, n, groups, parts, row_words,
    SAMPLE: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row a program: between which values ``collect`` finds the columns around the threshold."""
    parts = begin(parts, PDL)
    at = tl.program_id(0)
    row = at.to(tl.int64)
    WORDS += row * row_words
    wanted = given(K, at, n)
    wanted = tl.where(wanted > 0, tl.minimum(wanted, n), n)
    share = given(P, at, 1.0)
    least_share = given(MIN_P, at, 0.0)
    temperature = given(TEMPERATURE, at, 1.0)
    scale = tl.div_rn(LOG2_E, temperature)
    words = tl.full([], NOT_BRACKETED, tl.int64)
    highest = tl.full([], 0, tl.int32)
    by_rank = wanted <= RANKED // 2
    if (temperature > 0.0) & by_rank:
        sets = keys_of_sets(GREATEST + row * (2 * groups), groups)
        greatest = in_order(tl.max(sets, 0))
        if greatest > -float("inf"):
            low = bound_of_sets(sets, wanted)
            if least_share > 0.0:
                low = tl.maximum(low, least_probable(greatest, scale, tl.minimum(least_share, 1.0)))
            words = in_order(low).to(tl.int32, bitcast=True).to(tl.int64) << 32
            highest = greatest.to(tl.int32, bitcast=True)
    elif decided_by_mass(wanted, share, least_share, temperature, n):
        greatest, total = greatest_and_total(PARTS + row * (2 * parts), parts, scale)
        if (greatest > -float("inf")) & (greatest < float("inf")):
            low, high = bounds_by_sample(
                X + row * x_stride, n, groups, greatest, total, scale, share, SAMPLE, PART
            )
            words = low.to(tl.int32, bitcast=True).to(tl.int64) << 32
            words = words | (high.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
            highest = greatest.to(tl.int32, bitcast=True)
    i = tl.arange(0, 8)
    header = tl.where(i == BOUNDS, words, tl.where(i == HIGHEST, highest.to(tl.int64), 0))
    tl.store(WORDS + i, tl.where(i == BY_RANK, by_rank.to(tl.int64), header))


@triton.jit
def collect_greatest(WORDS, GREATEST, X, n, groups, first, low, BLOCK: tl.constexpr):
    """Write down the columns of a block that reach ``low``: few. Groups that do not are not read."""
    group = first + tl.arange(0, BLOCK // GROUP)
    greatest = tl.load(GREATEST + group, mask=group < groups, other=-float("inf"))
    cols = columns_of_groups(first, BLOCK // GROUP)
    reaching = (cols < n) & (greatest >= low)[:, None]
    x = load_logits(X, cols, reaching)
    reaching = reaching & (x >= low)
    place = tl.atomic_add(WORDS + tl.zeros_like(cols), 1, mask=reaching, sem="relaxed").to(tl.int32)
    tl.store(WORDS + SUMS + place, packed(x, cols), mask=reaching & (place < RANKED))


@triton.jit
def collect_inside(WORDS, X, n, first, low, high, greatest, scale, BLOCK: tl.constexpr):
    """Write down the columns of a block between two values; add up the mass of all, and of those above."""
    cols = first + tl.arange(0, BLOCK)
    x = load_logits(X, cols, cols < n)
    mass = mass_of(x, greatest, scale).to(tl.int64)
    inside = ((x >= low) & (x < high) & (cols < n)).to(tl.int32)
    place = tl.cumsum(inside, 0) - 1
    count = tl.sum(inside, 0)
    tl.atomic_add(WORDS + 1, tl.sum(mass, 0), sem="relaxed")
    tl.atomic_add(WORDS + 2, tl.sum(tl.where(x >= high, mass, 0), 0), sem="relaxed")
    if count > 0:
        place += tl.atomic_add(WORDS, count.to(tl.int64), sem="relaxed").to(tl.int32)
        tl.store(WORDS + SUMS + place, packed(x, cols), mask=(inside != 0) & (place < HELD))


@triton.jit
def collect(
    WORDS, GREATEST, X, TEMPERATURE, x_stride, n, groups, row_words, blocks, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A block of columns: write down those around the supposed threshold, in any order."""
    blocks = begin(blocks, PDL)
    program = tl.program_id(0)
    at = program // blocks
    block = program - at * blocks
    row = at.to(tl.int64)
    WORDS += row * row_words
    X += row * x_stride
    words = tl.load(WORDS + BOUNDS)
    by_rank = tl.load(WORDS + BY_RANK)
    if words != NOT_BRACKETED:
        low = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        if by_rank != 0:
            GREATEST += row * (2 * groups)
            collect_greatest(WORDS, GREATEST, X, n, groups, block * (BLOCK // GROUP), low, BLOCK)
        else:
            greatest = tl.load(WORDS + HIGHEST).to(tl.int32).to(tl.float32, bitcast=True)
            high = words.to(tl.int32).to(tl.float32, bitcast=True)
            scale = tl.div_rn(LOG2_E, given(TEMPERATURE, at, 1.0))
            collect_inside(WORDS, X, n, block * BLOCK, low, high, greatest, scale, BLOCK)


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
