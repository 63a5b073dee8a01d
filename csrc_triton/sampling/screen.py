"""The best column of a block, of which few are scored.

The noise of a column is -log2(E) with E = -log2(1 - v), where v is its word as a fraction. E is at least v * log2(e),
so -log2(v * log2(e)) bounds the noise from above, and nearly equals it where v is small, as it is where a column wins.
Each column's bound takes a conversion and one logarithm of the machine; one reduction gives the four columns (of one
Philox block) with the greatest bound and the greatest bound of the others. The four are scored as documented. If a
bound of the others reaches that score, which is rare, all are. What is chosen so is, bit for bit, what scoring all
would choose.
"""

import triton
import triton.language as tl

from csrc_triton.sampling.generator import SAMPLE, exponential, in_order, log2_of, packed, words_of
from csrc_triton.sampling.logits import load_logits
from csrc_triton.sampling.ranks import NO_WORD

# By how much a bound must stay below a score, beside a millionth of the score: for the errors of logarithms, of which
# the polynomials' are 2e-6, and of rounding.
SLACK = tl.constexpr(1e-3)


@triton.jit
def noise_bound(words, FAST: tl.constexpr):
    """At least -log2(exponential(words)), to 1e-5: 32 - log2(log2(e)) - log2(word + 1/2). FAST: one instruction for the
    logarithm, PTX only."""
    x = words.to(tl.float32) + 0.5
    if FAST:
        log = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        log = tl.log2(x)
    return 31.471234 - log


@triton.jit
def two_best(a, i, b, c, j, d):
    """(the greatest, the lowest place of it, the greatest of the others)"""
    first = (a > c) | ((a == c) & (i < j))
    return tl.where(first, a, c), tl.where(first, i, j), tl.maximum(tl.minimum(a, c), tl.maximum(b, d))


@triton.jit
def four_columns(t, COUNT: tl.constexpr):
    """The columns of a (COUNT, 4) tensor."""
    even, odd = tl.split(tl.reshape(t, [COUNT, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def scored(x, cols, random, scale, tau, limit):
    """The words of columns, as documented."""
    kept = (x > tau) | ((x == tau) & (cols <= limit))
    score = tl.fma(x, scale, -log2_of(exponential(random)))
    return packed(tl.where(kept, score, -float("inf")), cols)


@triton.jit
def best_of_all(X, n, first, seed, position, scale, tau, limit, COUNT: tl.constexpr, REPEATS: tl.constexpr):
    """The best of REPEATS * COUNT * 4 columns, all of which are scored."""
    best = tl.full([COUNT], NO_WORD, tl.int64)
    for part in range(REPEATS):
        quarters = first + part * COUNT + tl.arange(0, COUNT)
        random = words_of(quarters, seed, position, SAMPLE)
        for i in tl.static_range(4):
            cols = quarters * 4 + i
            best = tl.maximum(
                best, scored(load_logits(X, cols, cols < n), cols, random[i], scale, tau, limit)
            )
    return tl.max(best, 0)


@triton.jit
def best_of_quarter(X, n, quarter, seed, position, scale, tau, limit):
    """The best of four columns."""
    i = tl.arange(0, 4)
    cols = quarter * 4 + i
    first, second, third, fourth = words_of(quarter, seed, position, SAMPLE)
    random = tl.where(i == 0, first, tl.where(i == 1, second, tl.where(i == 2, third, fourth)))
    return tl.max(scored(load_logits(X, cols, cols < n), cols, random, scale, tau, limit), 0)


@triton.jit
def greatest_of_block(X, n, first, tau, filtered, BLOCK: tl.constexpr):
    """The word of the greatest logit of a block that begins at column ``first``, the first of several. All loads are in
    flight together."""
    WIDTH: tl.constexpr = 128 // X.dtype.element_ty.primitive_bitwidth  # columns a vector
    group = tl.arange(0, BLOCK // WIDTH)
    cols = first + group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = tl.load(X + cols, mask=cols < n, other=-float("inf")).to(tl.float32)
    if filtered:
        x = tl.where(x >= tau, x, -float("inf"))
    greatest = tl.max(x, 1)
    greatest = tl.where(greatest == greatest, greatest, -float("inf"))
    top, group = tl.max(greatest, 0, return_indices=True)
    best = packed(tl.full([], -float("inf"), tl.float32), first)
    if top > -float("inf"):
        few = first + group * WIDTH + tl.arange(0, WIDTH)
        best = tl.max(packed(load_logits(X, few, few < n), few), 0)
    return best


@triton.jit
def best_of_block(
    X, n, first, seed, position, scale, tau, limit, filtered,
    BLOCK: tl.constexpr, REPEATS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The word of the best column of a block that begins at column 4 * first, with scores as documented. A thread has
    REPEATS times four columns or more, one after the other."""
    COUNT: tl.constexpr = BLOCK // 4 // REPEATS
    lane = tl.arange(0, COUNT)
    greatest = tl.full([COUNT], -float("inf"), tl.float32)
    others = greatest
    place = first + lane
    for part in tl.static_range(REPEATS):
        quarters = first + part * COUNT + lane
        cols = quarters[:, None] * 4 + tl.arange(0, 4)[None, :]
        x = tl.load(X + cols, mask=cols < n, other=-float("inf")).to(tl.float32)
        if filtered:
            x = tl.where(x >= tau, x, -float("inf"))
        x0, x1, x2, x3 = four_columns(x, COUNT)
        w0, w1, w2, w3 = words_of(quarters, seed, position, SAMPLE)
        x0 = tl.fma(x0, scale, noise_bound(w0, FAST))
        x1 = tl.fma(x1, scale, noise_bound(w1, FAST))
        x2 = tl.fma(x2, scale, noise_bound(w2, FAST))
        x3 = tl.fma(x3, scale, noise_bound(w3, FAST))
        bound = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
        bound = tl.where(bound == bound, bound, -float("inf"))
        place = tl.where(bound > greatest, quarters, place)
        others = tl.maximum(others, tl.minimum(bound, greatest))
        greatest = tl.maximum(bound, greatest)
    top, quarter, second = tl.reduce((greatest, place, others), 0, two_best)
    best = packed(tl.full([], -float("inf"), tl.float32), first * 4)
    if top > -float("inf"):
        best = best_of_quarter(X, n, quarter, seed, position, scale, tau, limit)
        score = in_order((best >> 32).to(tl.int32))
        # Not of infinities, whose difference is NaN
        certain = second < score - (SLACK + tl.abs(score) * 1e-6)
        if not certain:
            best = best_of_all(X, n, first, seed, position, scale, tau, limit, COUNT, REPEATS)
    return best
