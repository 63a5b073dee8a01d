"""sample: a token from each row of logits.

``choose`` leaves the best of each block of columns, ``combine`` the best of a row: it has the greatest logarithm of its
probability, less that of an exponentially distributed number (the Gumbel-max trick). With top-k, top-p or min-p the two
launches of ``top_k_top_p_mask`` that find a row's threshold come before them. With penalties, or tokens that are not
allowed, all read what ``adjust`` wrote: logits as float32, with these applied. Log-probabilities take two more:
``logprob_parts`` sums each block of columns, ``logprobs`` a row, of which it finds the greatest logits as top-k does.
"""

import triton
import triton.language as tl

from csrc_triton.common.pdl_begin import begin
from csrc_triton.sampling.bracket import COUNT, SUMS
from csrc_triton.sampling.generator import (
    LOG2_E,
    SAMPLE,
    column_of,
    exponential,
    in_order,
    log2_of,
    packed,
    words_of,
)
from csrc_triton.sampling.logits import (
    GROUP,
    columns_of_groups,
    given,
    last_word_of,
    load_logits,
    value_and_column,
)
from csrc_triton.sampling.ranks import NO_WORD, RANKED
from csrc_triton.sampling.screen import best_of_block, greatest_of_block
from csrc_triton.sampling.threshold import greatest_columns, tile_of

AXES = {"dtype": ["bf16", "fp16", "fp32"]}
DECLARATION = {
    "op": "sample",
    "uses": ["top_k_top_p_mask"],
    "kernels": {
        "sample_adjust": {
            "arguments": {
                "Y": "*fp32", "X": "*dtype", "ALLOWED": "*i32", "BAD": "*i32", "PROMPT": "*i32", "COUNTS": "*i32",
                "REPETITION": "*fp32", "PRESENCE": "*fp32", "FREQUENCY": "*fp32", "x_stride": "i64", "words": "i32",
                "bad": "i32", "n": "i32", "blocks": "i32",
            },
            "axes": AXES,
            "aligned": ["Y", "X", "COUNTS", "x_stride", "n"],
            "forms": {
                "block": {
                    "function": "adjust", "constants": ["BLOCK", "PDL"], "defaults": {"PDL": 0}, "pdl": "PDL",
                },
            },
        },
        "sample_choose": {
            "arguments": {
                "PART": "*i64", "X": "*dtype", "LAST": "*i64", "WORDS": "*i64", "TEMPERATURE": "*fp32",
                "SEEDS": "*i64", "POSITIONS": "*i64", "x_stride": "i64", "n": "i32", "row_words": "i32",
                "blocks": "i32",
            },
            "axes": AXES,
            "aligned": ["X", "x_stride", "n"],
            "forms": {
                "block": {
                    "function": "choose", "constants": ["BLOCK", "REPEATS", "FAST", "PDL"],
                    "defaults": {"REPEATS": 1, "FAST": False, "PDL": 0}, "pdl": "PDL",
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
        "sample_logprob_parts": {
            "arguments": {
                "GREATEST": "*fp32", "SUMS": "*fp32", "COUNTS": "*i32", "X": "*dtype", "TOKENS": "*i64",
                "x_stride": "i64", "n": "i32", "groups": "i32", "blocks": "i32",
            },
            "axes": AXES,
            "aligned": ["X", "x_stride", "n"],
            "forms": {
                "block": {
                    "function": "logprob_parts", "constants": ["BLOCK", "PDL"], "defaults": {"PDL": 0}, "pdl": "PDL",
                },
            },
        },
        "sample_logprobs": {
            "arguments": {
                "IDS": "*i64", "LOGPROBS": "*fp32", "RANKS": "*i64", "LIST": "*i32", "GREATEST": "*fp32",
                "SUMS": "*fp32", "COUNTS": "*i32", "X": "*dtype", "TOKENS": "*i64", "x_stride": "i64", "n": "i32",
                "groups": "i32", "blocks": "i32", "wanted": "i32",
            },
            "axes": AXES,
            "aligned": ["X", "x_stride", "n"],
            "forms": {
                "row": {
                    "function": "logprobs", "constants": ["BLOCK", "GROUPS", "TILE", "WIDTH", "PDL"],
                    "defaults": {"PDL": 0}, "pdl": "PDL",
                },
            },
        },
    },
}  # fmt: skip


@triton.jit
def bits_of(MASK, cols, mask):
    """Whether the bits of columns are set, where ``mask`` is."""
    word = tl.load(MASK + cols // GROUP, mask=mask, other=0)
    return ((word >> (cols % GROUP)) & 1) != 0


@triton.jit
def adjust(
    Y, X, ALLOWED, BAD, PROMPT, COUNTS, REPETITION, PRESENCE, FREQUENCY, x_stride, words, bad, n, blocks,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Logits with penalties, as in vLLM repetition, then frequency, then presence, and -inf for what is not allowed."""
    blocks = begin(blocks, PDL)
    program = tl.program_id(0)
    at = program // blocks
    cols = (program - at * blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n
    row = at.to(tl.int64)
    x = load_logits(X + row * x_stride, cols, mask)
    if ALLOWED.to(tl.int64) != 0:
        x = tl.where(bits_of(ALLOWED + row * words, cols, mask), x, -float("inf"))
    for i in range(bad):
        x = tl.where(cols == tl.load(BAD + row * bad + i), -float("inf"), x)
    repetition = given(REPETITION, at, 1.0)
    presence = given(PRESENCE, at, 0.0)
    frequency = given(FREQUENCY, at, 0.0)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        count = tl.load(COUNTS + row * n + cols, mask=mask & (COUNTS.to(tl.int64) != 0), other=0)
        seen = (count > 0) | bits_of(PROMPT + row * words, cols, mask & (PROMPT.to(tl.int64) != 0))
        repeated = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where(seen, repeated, x)
        x = tl.where(count > 0, tl.fma(-frequency, count.to(tl.float32), x) - presence, x)
    tl.store(Y + row * n + cols, x, mask=mask)


@triton.jit
def best_of_ranked(word, count, last, seed, position, scale):
    """The best of ``count`` columns that are written down, up to the ``last``, as ``choose`` scores them."""
    i = tl.arange(0, RANKED)
    cols = column_of(word).to(tl.int32)
    first, second, third, fourth = words_of(cols >> 2, seed, position, SAMPLE)
    random = tl.where((cols & 1) == 0, first, second)
    random = tl.where((cols & 2) == 0, random, tl.where((cols & 1) == 0, third, fourth))
    score = tl.fma(in_order((word >> 32).to(tl.int32)), scale, -log2_of(exponential(random)))
    return tl.max(tl.where((word >= last) & (i < count), packed(score, cols), NO_WORD), 0)


@triton.jit
def choose(
    PART, X, LAST, WORDS, TEMPERATURE, SEEDS, POSITIONS, x_stride, n, row_words, blocks,
    BLOCK: tl.constexpr, REPEATS: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best column of a block, with its score, in one word. A greedy row's score is the logit. Where ``threshold``
    wrote a row's candidates down, the row's first program has those for its block, the others have none."""
    blocks = begin(blocks, PDL)
    program = tl.program_id(0)
    at = program // blocks
    X += at.to(tl.int64) * x_stride
    temperature = given(TEMPERATURE, at, 1.0)
    seed = tl.load(SEEDS + at)
    position = tl.load(POSITIONS + at)
    scale = tl.div_rn(LOG2_E, temperature)
    WORDS += at.to(tl.int64) * row_words
    ranks = program == at * blocks
    # words before it is known how many count: each load takes as long as most of this kernel
    listed = WORDS.to(tl.int64) != 0
    count = tl.load(WORDS + COUNT, mask=listed, other=0).to(tl.int32)
    word = tl.load(WORDS + SUMS + tl.arange(0, RANKED), mask=listed & ranks, other=NO_WORD)
    last = last_word_of(LAST, at)
    best = tl.full([], NO_WORD, tl.int64)
    if count > 0:
        if ranks:
            best = best_of_ranked(word, count, last, seed, position, scale)
    else:
        tau, limit = value_and_column(last)
        first = (program - at * blocks) * (BLOCK // 4)
        filtered = LAST.to(tl.int64) != 0
        if temperature > 0.0:
            best = best_of_block(
                X, n, first, seed, position, scale, tau, limit, filtered, BLOCK, REPEATS, FAST
            )
        else:
            best = greatest_of_block(X, n, first * 4, tau, filtered, BLOCK)
    tl.store(PART + program, best)


@triton.jit
def combine(TOKENS, PART, blocks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The best column of a row."""
    blocks = begin(blocks, PDL)
    at = tl.program_id(0).to(tl.int64)
    best = tl.full([BLOCK], -9223372036854775808, tl.int64)
    for first in range(0, blocks, BLOCK):
        i = first + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(PART + at * blocks + i, mask=i < blocks, other=-9223372036854775808))
    tl.store(TOKENS + at, column_of(tl.max(best, 0)))


@triton.jit
def logprob_parts(
    GREATEST, SUMS, COUNTS, X, TOKENS, x_stride, n, groups, blocks, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Of a block of columns: the greatest logit of each group, the sum of powers relative to the greatest of all, and
    how many logits are at least the token's."""
    blocks = begin(blocks, PDL)
    program = tl.program_id(0)
    at = program // blocks
    first = (program - at * blocks) * (BLOCK // GROUP)
    X += at.to(tl.int64) * x_stride
    cols = columns_of_groups(first, BLOCK // GROUP)
    x = load_logits(X, cols, cols < n)
    own = load_logits(X, tl.load(TOKENS + at), True)
    group = first + tl.arange(0, BLOCK // GROUP)
    of_groups = tl.max(x, 1)
    tl.store(GREATEST + at.to(tl.int64) * groups + group, of_groups, mask=group < groups)
    greatest = tl.max(of_groups, 0)
    powers = tl.exp2(tl.where(x == greatest, 0.0, x - greatest) * LOG2_E)
    tl.store(SUMS + 2 * program, greatest)
    tl.store(SUMS + 2 * program + 1, tl.sum(tl.where(cols < n, powers, 0.0)))
    tl.store(COUNTS + program, tl.sum(((x >= own) & (cols < n)).to(tl.int32)))


@triton.jit
def logprobs(
    IDS, LOGPROBS, RANKS, LIST, GREATEST, SUMS, COUNTS, X, TOKENS, x_stride, n, groups, blocks, wanted,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The log-probabilities of a row's token and of its ``wanted`` greatest logits, the first of several first."""
    blocks = begin(blocks, PDL)
    at = tl.program_id(0).to(tl.int64)
    X += at * x_stride
    greatest = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    rank = tl.zeros([BLOCK], tl.int32)
    for first in range(0, blocks, BLOCK):
        i = first + tl.arange(0, BLOCK)
        part = at * blocks + i
        more = tl.load(SUMS + 2 * part, mask=i < blocks, other=-float("inf"))
        sums = tl.load(SUMS + 2 * part + 1, mask=i < blocks, other=0.0)
        higher = tl.maximum(greatest, more)
        total *= tl.exp2(tl.where(greatest == higher, 0.0, greatest - higher) * LOG2_E)
        total += sums * tl.exp2(tl.where(more == higher, 0.0, more - higher) * LOG2_E)
        greatest = higher
        rank += tl.load(COUNTS + part, mask=i < blocks, other=0)
    highest = tl.max(greatest, 0)
    total *= tl.exp2(tl.where(greatest == highest, 0.0, greatest - highest) * LOG2_E)
    log_total = tl.log2(tl.sum(total, 0)) * 0.6931471805599453
    token = tl.load(TOKENS + at)
    IDS += at * (wanted + 1)
    LOGPROBS += at * (wanted + 1)
    tl.store(IDS, token)
    tl.store(LOGPROBS, (load_logits(X, token, True) - highest) - log_total)
    tl.store(RANKS + at, tl.sum(rank, 0).to(tl.int64))
    if wanted > 0:
        LIST += at * groups
        active = greatest_columns(LIST, GREATEST + at * groups, X, n, wanted, groups, GROUPS, TILE, WIDTH)
        last = tl.full([], 9223372036854775807, tl.int64)
        for i in range(wanted):
            best = tl.full([TILE, WIDTH], -9223372036854775808, tl.int64)
            for first in range(0, active, TILE):
                _group, cols, _key, x = tile_of(LIST, X, n, first, active, TILE, WIDTH)
                word = packed(x, cols)
                best = tl.maximum(best, tl.where((word < last) & (cols < n), word, -9223372036854775808))
            last = tl.max(best)
            column = column_of(last)
            tl.store(IDS + 1 + i, column)
            tl.store(LOGPROBS + 1 + i, (load_logits(X, column, True) - highest) - log_total)
