"""The logits that are sampled from: a row of the model's, with penalties and without what is not allowed.

A row is read in groups of 32 columns: so many bits has a word of the masks.
"""

import triton
import triton.language as tl
from triton.language.core import _aggregate as aggregate

from csrc_triton.common.pdl import launch_dependents, wait_for_previous

GROUP = tl.constexpr(32)
# What kernels that read logits take, in this order; null for what a call does not give.
LOGITS = {
    "X": "*dtype", "ALLOWED": "*i32", "BAD": "*i32", "PROMPT": "*i32", "COUNTS": "*i32", "REPETITION": "*fp32",
    "PRESENCE": "*fp32", "FREQUENCY": "*fp32", "x_stride": "i64", "counts_stride": "i64", "words": "i32",
    "bad": "i32", "n": "i32",
}  # fmt: skip


@triton.jit
def begin(value, PDL: tl.constexpr):
    """``value``, an int32 >= 0: nothing is read or written before the kernel before this one has ended. Not of a size
    or stride, whose divisibility the compiler would forget."""
    if PDL:
        value = wait_for_previous(value)
        launch_dependents()
    return value


@aggregate
class Row:
    """One row: the pointers are its own."""

    X: tl.tensor
    ALLOWED: tl.tensor
    BAD: tl.tensor
    PROMPT: tl.tensor
    COUNTS: tl.tensor
    repetition: tl.tensor
    presence: tl.tensor
    frequency: tl.tensor
    allowed: tl.tensor  # whether there is such a mask
    penalised: tl.tensor  # whether any penalty changes anything
    bad: tl.tensor
    n: tl.tensor

    @triton.constexpr_function
    def __init__(
        self, X, ALLOWED, BAD, PROMPT, COUNTS, repetition, presence, frequency, allowed, penalised, bad, n
    ):
        self.X, self.ALLOWED, self.BAD, self.PROMPT, self.COUNTS = X, ALLOWED, BAD, PROMPT, COUNTS
        self.repetition, self.presence, self.frequency = repetition, presence, frequency
        self.allowed, self.penalised, self.bad, self.n = allowed, penalised, bad, n


@triton.jit
def row_of(
    row, X, ALLOWED, BAD, PROMPT, COUNTS, REPETITION, PRESENCE, FREQUENCY, x_stride, counts_stride, words, bad, n
):  # fmt: skip
    r = row.to(tl.int64)
    repetition = given(REPETITION, r, 1.0)
    presence = given(PRESENCE, r, 0.0)
    frequency = given(FREQUENCY, r, 0.0)
    penalised = (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)
    return Row(
        X + r * x_stride, ALLOWED + r * words, BAD + r * bad, PROMPT + r * words, COUNTS + r * counts_stride,
        repetition, presence, frequency, ALLOWED.to(tl.int64) != 0, penalised, bad, n,
    )  # fmt: skip


@triton.jit
def given(POINTER, at, default):
    """What a call gives for a row, or the default where it gives nothing."""
    return tl.load(POINTER + at, mask=POINTER.to(tl.int64) != 0, other=default)


@triton.jit
def bits_of(MASK, cols, mask):
    """Whether the bits of columns are set; all of them where ``mask`` is not."""
    word = tl.load(MASK + cols // GROUP, mask=mask, other=-1)
    return ((word >> (cols % GROUP)) & 1) != 0


@triton.jit
def logits_at(r, cols, mask):
    """The values of columns as float32; -inf where ``mask`` is not set, for what is not allowed, and for NaN. Never
    -0. Penalties as in vLLM: repetition, then frequency, then presence."""
    x = tl.load(r.X + cols, mask=mask, other=-float("inf")).to(tl.float32)
    x = tl.where(x == x, x, -float("inf"))
    if r.allowed:
        x = tl.where(bits_of(r.ALLOWED, cols, mask), x, -float("inf"))
    for i in range(r.bad):
        x = tl.where(cols == tl.load(r.BAD + i), -float("inf"), x)
    if r.penalised:
        count = tl.load(r.COUNTS + cols, mask=mask & (r.COUNTS.to(tl.int64) != 0), other=0)
        in_prompt = mask & (r.PROMPT.to(tl.int64) != 0)
        seen = (count > 0) | (bits_of(r.PROMPT, cols, in_prompt) & in_prompt)
        repeated = tl.where(x > 0.0, tl.div_rn(x, r.repetition), x * r.repetition)
        x = tl.where(seen, repeated, x)
        x = tl.where(count > 0, tl.fma(-r.frequency, count.to(tl.float32), x) - r.presence, x)
        x = tl.where(x == x, x, -float("inf"))
    return x + 0.0
