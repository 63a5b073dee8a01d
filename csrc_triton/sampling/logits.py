"""Rows of logits, in groups of 32 columns: so many bits has a word of the masks."""

import triton
import triton.language as tl

from csrc_triton.sampling.generator import column_of, in_order

GROUP = tl.constexpr(32)
ALL_KEPT = tl.constexpr(0x7FFFFFFF)  # a column after the last
LOWEST = tl.constexpr(-2139095041)  # ordered(-inf)


@triton.jit
def given(POINTER, at, default):
    """What a call gives for a row, or the default where it gives nothing."""
    return tl.load(POINTER + at, mask=POINTER.to(tl.int64) != 0, other=default)


@triton.jit
def load_logits(X, cols, mask):
    """Logits as float32, with -inf for NaN and where ``mask`` is not set. Never -0."""
    x = tl.load(X + cols, mask=mask, other=-float("inf")).to(tl.float32)
    return tl.where(x == x, x, -float("inf")) + 0.0


@triton.jit
def columns_of_groups(first, count: tl.constexpr):
    """The columns of so many groups, a group a row."""
    return (first + tl.arange(0, count))[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def last_word_of(LAST, at):
    """The last column that is kept of a row, as ``packed`` has it; below all, where LAST is not given."""
    return given(LAST, at, LOWEST * 4294967296)


@triton.jit
def value_and_column(word):
    """(value, column) of a word: what is kept of a row are the values above that of the last, and those that equal it
    up to its column."""
    return in_order((word >> 32).to(tl.int32)), column_of(word).to(tl.int32)
