"""The walk of RMSNorm's backward over long rows, shared by several programs a row; see ``rmsnorm.backward_pairs``.

With ADD a further gradient of x is added to dx, which is then what ``fused_add_rmsnorm`` needs.
"""

import triton
import triton.language as tl

from csrc_triton.common.bf16x2 import even, odd, pack
from csrc_triton.common.exchange import missing, poll, post, sum_high


@triton.jit
def pair_dot(x, dy, w, offset, dtype: tl.constexpr, OFFSET: tl.constexpr):
    """Sum of x * dy * (w + offset). The offset is multiplied out: w + offset would be hoisted, in fp32 registers."""
    p = even(x, dtype) * even(dy, dtype)
    q = odd(x, dtype) * odd(dy, dtype)
    if OFFSET:
        return tl.sum((p * even(w, dtype) + p * offset) + (q * odd(w, dtype) + q * offset), 0)
    else:
        return tl.sum(p * even(w, dtype) + q * odd(w, dtype), 0)


@triton.jit
def pair_finish(
    x, dy, w, dw_even, dw_odd, c, rstd, offset, DX, mask, dtype: tl.constexpr, OFFSET: tl.constexpr,
    add=None, ADD: tl.constexpr = False,
):  # fmt: skip
    """Store one row's dx and return the two sums of dw with the row added; c holds rstd^3 and 1/n already."""
    a = even(dy, dtype) * rstd
    x_half = even(x, dtype)
    dx_even = even(w, dtype) * a - x_half * c
    if OFFSET:
        dx_even += offset * a
    if ADD:
        dx_even += even(add, dtype)
    dw_even += a * x_half
    a = odd(dy, dtype) * rstd
    x_half = odd(x, dtype)
    dx_odd = odd(w, dtype) * a - x_half * c
    if OFFSET:
        dx_odd += offset * a
    if ADD:
        dx_odd += odd(add, dtype)
    dw_odd += a * x_half
    tl.store(DX, pack(dx_even, dx_odd, dtype), mask=mask)
    return dw_even, dw_odd


@triton.jit
def load_pairs(pointer, mask, EXACT: tl.constexpr):
    if EXACT:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=mask, other=0)


@triton.jit
def load_added(pointer, offset, mask, ADD: tl.constexpr):
    if ADD:
        return tl.load(pointer + offset, mask=mask, other=0)
    else:
        return 0


@triton.jit
def walk_rows(
    X_at, DY_at, DX_at, RSTD, WORDS, w, mask, dx_mask, n, group, groups, part, n_rows, offset, dtype: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr, OFFSET: tl.constexpr,
    ADD_at=None, add_mask=None, ADD: tl.constexpr = False,
):  # fmt: skip
    """A program's part of every row of its group: dx is stored, the two sums of dw are returned."""
    dw_even = tl.zeros([BLOCK], tl.float32)
    dw_odd = tl.zeros([BLOCK], tl.float32)
    lane = tl.arange(0, triton.next_power_of_2(SPLIT))
    words_of = WORDS + tl.minimum(lane, SPLIT - 1)
    last_x = tl.zeros([BLOCK], tl.int32)
    last_dy = tl.zeros([BLOCK], tl.int32)
    last_rstd = 0.0
    for row in tl.range(group, n_rows, groups, num_stages=STAGES):
        last_row = tl.maximum(row - groups, group)
        words_at = words_of + last_row * SPLIT
        words = poll(words_at)
        x = load_pairs(X_at + row * n, mask, EXACT)
        dy = load_pairs(DY_at + row * n, mask, EXACT)
        rstd = tl.load(RSTD + row)
        post(WORDS + row * SPLIT + part, pair_dot(x, dy, w, offset, dtype, OFFSET))
        add = load_added(ADD_at, last_row * n, add_mask, ADD)
        if row >= groups:  # the `while` must sit inside an `if`: directly in the loop it turns pipelining off
            while missing(words):
                words = poll(words_at)
            c = sum_high(words, lane, SPLIT) / (2 * n) * last_rstd * last_rstd * last_rstd
            dw_even, dw_odd = pair_finish(
                last_x, last_dy, w, dw_even, dw_odd, c, last_rstd, offset,
                DX_at + last_row * n, dx_mask, dtype, OFFSET, add, ADD,
            )  # fmt: skip
        last_x = x
        last_dy = dy
        last_rstd = rstd
    steps = (n_rows - group + groups - 1) // groups
    if steps > 0:
        last_row = group + (steps - 1) * groups
        words_at = words_of + last_row * SPLIT
        words = poll(words_at)
        while missing(words):
            words = poll(words_at)
        c = sum_high(words, lane, SPLIT) / (2 * n) * last_rstd * last_rstd * last_rstd
        add = load_added(ADD_at, last_row * n, add_mask, ADD)
        dw_even, dw_odd = pair_finish(
            last_x, last_dy, w, dw_even, dw_odd, c, last_rstd, offset,
            DX_at + last_row * n, dx_mask, dtype, OFFSET, add, ADD,
        )  # fmt: skip
    return dw_even, dw_odd
