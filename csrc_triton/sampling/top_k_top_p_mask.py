"""top_k_top_p_mask: logits, and -inf for those that top-k, top-p or min-p leave out.

Three launches: ``groups`` leaves the greatest logit of each group of 32 columns, ``threshold`` finds a row's threshold
from them (``threshold.py``), ``mask`` writes the row. Others come after the first: where top-p is given, ``bracket``
and ``collect`` find the columns among which the threshold of a flat row lies (``bracket.py``); of few rows with a small
top-k ``collect`` finds those that ``threshold`` compares (``ranks.py``), by as many programs as a row has blocks.
``sample`` launches all but the last as well.
"""

import triton
import triton.language as tl

from csrc_triton.common.pdl_begin import begin
from csrc_triton.sampling.bracket import (
    BOUNDS,
    HELD,
    HIGHEST,
    NOT_BRACKETED,
    SUMS,
    bounds_by_sample,
    decided_by_mass,
    greatest_and_total,
)
from csrc_triton.sampling.generator import LOG2_E, in_order, mass_of, packed
from csrc_triton.sampling.logits import (
    GROUP,
    columns_of_groups,
    given,
    last_word_of,
    load_logits,
    value_and_column,
)
from csrc_triton.sampling.ranks import RANKED, add_two, keys_of_sets, least_of_greatest, wanted_of
from csrc_triton.sampling.threshold import find_threshold

AXES = {"dtype": ["bf16", "fp16", "fp32"]}
ALIGNED = ["X", "x_stride", "n"]
OF_ROW = {"X": "*dtype", "K": "*i32", "P": "*fp32", "MIN_P": "*fp32", "TEMPERATURE": "*fp32"}
THRESHOLD = {
    "function": "threshold", "constants": ["GROUPS", "TILE", "WIDTH", "PDL"], "defaults": {"PDL": 0}, "pdl": "PDL",
    "loads_before_wait": 4,
}  # fmt: skip
DECLARATION = {
    "op": "top_k_top_p_mask",
    "kernels": {
        "logits_groups": {
            "arguments": {
                "GREATEST": "*fp32", "PARTS": "*fp32", "WORDS": "*i64", "X": "*dtype", "TEMPERATURE": "*fp32",
                "x_stride": "i64", "n": "i32", "groups": "i32", "row_words": "i32", "blocks": "i32", "fours": "i32",
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
                "WORDS": "*i64", "PARTS": "*fp32", **OF_ROW, "x_stride": "i64", "n": "i32", "groups": "i32",
                "parts": "i32", "row_words": "i32",
            },
            "axes": AXES,
            "aligned": ALIGNED,
            "forms": {
                "row": {
                    "function": "bracket", "constants": ["SAMPLE", "PDL"], "defaults": {"PDL": 0}, "pdl": "PDL",
                },
            },
        },
        "logits_collect": {
            "arguments": {
                "WORDS": "*i64", "GREATEST": "*fp32", "X": "*dtype", "K": "*i32", "MIN_P": "*fp32",
                "TEMPERATURE": "*fp32", "x_stride": "i64", "n": "i32", "groups": "i32", "row_words": "i32",
                "programs": "i32", "collected": "i32",
            },
            "axes": AXES,
            "aligned": ALIGNED,
            "host": ["few_rows"],
            "forms": {
                "block": {
                    "function": "collect", "constants": ["BLOCK", "PDL"], "defaults": {"PDL": 0}, "pdl": "PDL",
                    "loads_before_wait": 16,
                },
            },
        },
        "logits_threshold": {
            "arguments": {
                "LAST": "*i64", "GREATEST": "*fp32", "WORDS": "*i64", **OF_ROW, "x_stride": "i64", "n": "i32",
                "groups": "i32", "row_words": "i32", "collected": "i32",
            },
            "axes": AXES,
            "always_aligned": True,  # it reads few of the columns
            "aligned": [],
            "forms": {
                "row": THRESHOLD,
                "row_spills": {**THRESHOLD, "may_spill": "up to ten words of a thread: ptxas finds no way without"},
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
                    "loads_before_wait": 16,
                },
            },
        },
    },
}  # fmt: skip


@triton.jit
def groups_of_block(
    GREATEST, PARTS, WORDS, X, TEMPERATURE, x_stride, n, groups, row_words, blocks, fours,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The greatest logit of each group in a block of columns, where ``fours`` is not 0 also of each four of them; for
    ``bracket`` that of the block, and its mass relative to it. A row's first program clears the words before the row's
    columns."""
    blocks = begin(blocks, PDL)
    program = tl.program_id(0)
    at = program // blocks
    first = (program - at * blocks) * (BLOCK // GROUP)
    cols = columns_of_groups(first, BLOCK // GROUP)
    x = load_logits(X + at.to(tl.int64) * x_stride, cols, cols < n)
    group = first + tl.arange(0, BLOCK // GROUP)
    of_groups = tl.max(x, 1)
    GREATEST += at.to(tl.int64) * (2 * groups)
    tl.store(GREATEST + group, of_groups, mask=group < groups)
    if fours != 0:
        four = first // 4 + tl.arange(0, BLOCK // GROUP // 4)
        of_fours = tl.max(tl.reshape(of_groups, [BLOCK // GROUP // 4, 4]), 1)
        tl.store(GREATEST + groups + four, of_fours, mask=four * 4 < groups)
    if first == 0:
        i = tl.arange(0, SUMS)
        words = tl.where(i == BOUNDS, NOT_BRACKETED, 0).to(tl.int64)
        tl.store(WORDS + at.to(tl.int64) * row_words + i, words)
    if PARTS.to(tl.int64) != 0:
        greatest = tl.max(of_groups, 0)
        scale = tl.div_rn(LOG2_E, given(TEMPERATURE, at, 1.0))
        powers = tl.exp2(tl.where(x == greatest, 0.0, x - greatest) * scale)
        tl.store(PARTS + 2 * program, greatest)
        tl.store(PARTS + 2 * program + 1, tl.sum(powers))


@triton.jit
def bracket(
    WORDS, PARTS, X, K, P, MIN_P, TEMPERATURE, x_stride, n, groups, parts, row_words,
    SAMPLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row a program: between which values ``collect`` finds the columns around the threshold."""
    parts = begin(parts, PDL)
    at = tl.program_id(0)
    row = at.to(tl.int64)
    WORDS += row * row_words
    share = given(P, at, 1.0)
    temperature = given(TEMPERATURE, at, 1.0)
    if decided_by_mass(given(K, at, n), share, given(MIN_P, at, 0.0), temperature, n):
        scale = tl.div_rn(LOG2_E, temperature)
        greatest, total = greatest_and_total(PARTS + row * (2 * parts), parts, scale)
        if (greatest > -float("inf")) & (greatest < float("inf")):
            low, high = bounds_by_sample(X + row * x_stride, n, groups, greatest, total, scale, share, SAMPLE)
            words = low.to(tl.int32, bitcast=True).to(tl.int64) << 32
            words = words | (high.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
            tl.store(WORDS + BOUNDS, words)
            tl.store(WORDS + HIGHEST, greatest.to(tl.int32, bitcast=True).to(tl.int64))


@triton.jit
def collect_greatest(
    WORDS, GREATEST, X, MIN_P, temperature, at, n, groups, wanted, first, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Write down the columns of the block from ``first`` on that may be among the ``wanted`` greatest, in any order.
    ``groups`` wrote none of the logits: they are loaded before it has ended."""
    least_share = given(MIN_P, at, 0.0)
    cols = first + tl.arange(0, BLOCK)
    x = load_logits(X, cols, cols < n)
    first = begin(first, PDL)
    sets = keys_of_sets(GREATEST, groups)
    greatest = in_order(tl.max(sets, 0))
    if greatest > -float("inf"):
        scale = tl.div_rn(LOG2_E, temperature)
        low = in_order(least_of_greatest(sets, greatest, wanted, least_share, scale))
        reaching = (cols < n) & (x >= low)
        place = tl.atomic_add(WORDS + tl.zeros_like(cols), 1, mask=reaching, sem="relaxed").to(tl.int32)
        tl.store(WORDS + SUMS + place, packed(x, cols), mask=reaching & (place < RANKED))
        if first == 0:
            tl.store(WORDS + HIGHEST, greatest.to(tl.int32, bitcast=True).to(tl.int64))


@triton.jit
def collect_near(
    WORDS, X, temperature, n, program, programs, BLOCK: tl.constexpr
):  # fmt: skip
    """Add up the mass of every so many blocks, and that above where the threshold is supposed; write down the columns
    around it, in any order."""
    words = tl.load(WORDS + BOUNDS)
    if words != NOT_BRACKETED:
        greatest = tl.load(WORDS + HIGHEST).to(tl.int32).to(tl.float32, bitcast=True)
        low = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        high = words.to(tl.int32).to(tl.float32, bitcast=True)
        scale = tl.div_rn(LOG2_E, temperature)
        total = tl.zeros([BLOCK // 4], tl.int64)
        above = tl.zeros([BLOCK // 4], tl.int64)
        for first in range(program * BLOCK, n, programs * BLOCK):
            # fours: what a thread loads together it adds up alone
            cols = first + tl.arange(0, BLOCK // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
            x = load_logits(X, cols, cols < n)
            mass = mass_of(x, greatest, scale).to(tl.int64)
            total += tl.sum(mass, 1)
            above += tl.sum(tl.where(x >= high, mass, 0), 1)
            inside = ((x >= low) & (x < high) & (cols < n)).to(tl.int32)
            in_four = tl.sum(inside, 1)
            before = tl.cumsum(in_four, 0) - in_four
            count = tl.sum(in_four, 0)
            if count > 0:
                before += tl.atomic_add(WORDS, count.to(tl.int64), sem="relaxed").to(tl.int32)
                place = before[:, None] + tl.cumsum(inside, 1) - 1
                tl.store(WORDS + SUMS + place, packed(x, cols), mask=(inside != 0) & (place < HELD))
        all_mass, mass_above = tl.reduce((total, above), 0, add_two)
        tl.atomic_add(WORDS + 1, all_mass, sem="relaxed")
        tl.atomic_add(WORDS + 2, mass_above, sem="relaxed")


@triton.jit
def collect(
    WORDS, GREATEST, X, K, MIN_P, TEMPERATURE, x_stride, n, groups, row_words, programs, collected,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write down the columns of a row among which the threshold is: those that ``bracket`` says, or, where
    ``collected`` is not 0, those of a small top-k. ``programs`` have a row together, of which each has every so many
    blocks; where ``collected`` is not 0, one."""
    program = tl.program_id(0)
    at = program // programs
    program -= at * programs
    row = at.to(tl.int64)
    WORDS += row * row_words
    X += row * x_stride
    wanted = wanted_of(K, at, n)
    temperature = given(TEMPERATURE, at, 1.0)
    if (collected != 0) & (wanted <= RANKED // 2) & (temperature > 0.0):
        GREATEST += row * (2 * groups)
        collect_greatest(
            WORDS, GREATEST, X, MIN_P, temperature, at, n, groups, wanted, program * BLOCK, BLOCK, PDL
        )
    else:
        programs = begin(programs, PDL)
        collect_near(WORDS, X, temperature, n, program, programs, BLOCK)


@triton.jit
def threshold(
    LAST, GREATEST, WORDS, X, K, P, MIN_P, TEMPERATURE, x_stride, n, groups, row_words, collected,
    GROUPS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row a program. What a call gives for the row is loaded before the kernels before this one have ended: they
    write none of it."""
    at = tl.program_id(0)
    row = at.to(tl.int64)
    wanted = wanted_of(K, at, n)
    share = given(P, at, 1.0)
    least_share = given(MIN_P, at, 0.0)
    temperature = given(TEMPERATURE, at, 1.0)
    groups = begin(groups, PDL)
    find_threshold(
        LAST, GREATEST + row * (2 * groups), WORDS + row * row_words, X + row * x_stride, n, wanted, share, least_share,
        temperature, at, groups, row_words, collected, GROUPS, TILE, WIDTH,
    )  # fmt: skip


@triton.jit
def mask_block(Y, X, LAST, y_stride, x_stride, n, blocks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A block of columns: -inf for those below the threshold, or after the last of those that equal it. NaN counts as
    -inf. Y may be X."""
    program = tl.program_id(0)
    at = program // blocks
    cols = (program - at * blocks) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at.to(tl.int64) * x_stride + cols, mask=cols < n, other=0.0)
    blocks = begin(blocks, PDL)
    tau, limit = value_and_column(last_word_of(LAST, at))
    wide = x.to(tl.float32)
    kept = (wide > tau) | ((wide == tau) & (cols <= limit))
    y = tl.where(kept, wide, -float("inf")).to(Y.dtype.element_ty)
    tl.store(Y + at.to(tl.int64) * y_stride + cols, y, mask=cols < n)
