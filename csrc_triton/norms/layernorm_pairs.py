"""The walk of LayerNorm's backward over long rows, shared by several programs a row; see ``layernorm.backward_pairs``.

The programs of a group walk the rows together and exchange their parts of each row's two sums. A row is finished one
step late: the neighbours' words of the previous row are asked for before the sums of this one, so that the exchange
costs no time. Waiting needs a cooperative launch.

Registers decide the speed: the sums of dw and db take four a pair, everything else stays packed.
"""

import triton
import triton.language as tl

from csrc_triton.common.bf16x2 import even, odd, pack
from csrc_triton.common.exchange import missing, poll, post_two, sum_high, sum_low
from csrc_triton.norms.rmsnorm_pairs import load_pairs


@triton.jit
def pair_sums(x, dy, w, dtype: tl.constexpr):
    """Sums of dy * w * x and of dy * w. The rows are of 16 bits: fp32 has room for a mean 2^8 deviations away."""
    first = even(dy, dtype) * even(w, dtype)
    second = odd(dy, dtype) * odd(w, dtype)
    return tl.sum(first * even(x, dtype) + second * odd(x, dtype), 0), tl.sum(first + second, 0)


@triton.jit
def finish_half(x, dy, w, dw, db, scale, shift, along, offset):
    """One half of the pairs in fp32: dx, and the sums of dw and db with the row added. x * scale + shift is the
    normalised x; along and offset hold 1 / sqrt(var + eps) already."""
    normal = x * scale + shift
    return w * (dy * scale) - (normal * along + offset), dw + dy * normal, db + dy


@triton.jit
def walk_rows(
    X_at, DY_at, DX_at, STATS, WORDS, w, mask, dx_mask, n, group, groups, part, split, n_rows,
    dtype: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """A program's part of every row of its group: dx is stored, the sums of dw and db are returned."""
    dw_even = tl.zeros([BLOCK], tl.float32)
    dw_odd = tl.zeros([BLOCK], tl.float32)
    db_even = tl.zeros([BLOCK], tl.float32)
    db_odd = tl.zeros([BLOCK], tl.float32)
    lane = tl.arange(0, LANES)
    words_of = WORDS + tl.minimum(lane, split - 1)
    last_x = tl.zeros([BLOCK], tl.int32)
    last_dy = tl.zeros([BLOCK], tl.int32)
    last_mean = 0.0
    last_rstd = 0.0
    end = group + (n_rows - 1 - group) // groups * groups
    for next_row in tl.range(group, n_rows + groups, groups, num_stages=STAGES):
        row = tl.minimum(next_row, end)  # the last step repeats a row: that does no harm
        last_row = tl.maximum(next_row - groups, group)
        words_at = words_of + last_row * split
        words = poll(words_at)
        x = load_pairs(X_at + row * n, mask, EXACT)
        dy = load_pairs(DY_at + row * n, mask, EXACT)
        mean = tl.load(STATS + row * 2)
        rstd = tl.load(STATS + row * 2 + 1)
        dot, total = pair_sums(x, dy, w, dtype)
        post_two(WORDS + row * split + part, (dot - mean * total) * rstd, total)
        if (
            next_row > group
        ):  # the `while` must sit inside an `if`: directly in the loop it turns pipelining off
            while missing(words):
                words = poll(words_at)
            along = sum_high(words, lane, split) / (2 * n) * last_rstd
            offset = sum_low(words, lane, split) / (2 * n) * last_rstd
            shift = -last_mean * last_rstd
            dx_even, dw_even, db_even = finish_half(
                even(last_x, dtype), even(last_dy, dtype), even(w, dtype), dw_even, db_even,
                last_rstd, shift, along, offset,
            )  # fmt: skip
            dx_odd, dw_odd, db_odd = finish_half(
                odd(last_x, dtype), odd(last_dy, dtype), odd(w, dtype), dw_odd, db_odd,
                last_rstd, shift, along, offset,
            )  # fmt: skip
            tl.store(DX_at + last_row * n, pack(dx_even, dx_odd, dtype), mask=dx_mask)
        last_x = x
        last_dy = dy
        last_mean = mean
        last_rstd = rstd
    return dw_even, dw_odd, db_even, db_odd
