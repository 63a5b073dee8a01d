"""Log-softmax of a row of logits over a temperature, at chosen columns alone, and its backward.

Forward: one read of the row, of which STATISTICS keeps the log-sum-exp (``online_softmax``). Backward:
dx = (the gradients of x's column - softmax(x) * the sum of all of the row's) / temperature.

A column outside of the row reads nothing: its result is NaN, it gives no gradient, and its number is written to the
device error flag, FLAG. A token that the mask leaves out has 0, and its row is not read.

Of every ``x_positions`` rows of logits the first ``positions`` have chosen columns. They are all, or all but the last:
the logits after a sequence's last token.
"""

import triton
import triton.language as tl

from csrc_triton.common.token_mask import token_counts
from csrc_triton.softmax.online_softmax import LN_2, log_sum_exp

DECLARATION = {
    "op": "selective_log_softmax",
    "kernels": {
        "selective_log_softmax_forward": {
            "arguments": {
                "OUT": "*fp32",
                "STATISTICS": "*fp32",
                "X": "*dtype",
                "INDEX": "*i32",
                "FLAG": "*i64",
                "MASK": "*i32",
                "x_stride": "i64",
                "n_cols": "i32",
                "chosen": "i32",
                "index_words": "i32",
                "mask_kind": "i32",
                "positions": "i32",
                "x_positions": "i32",
                "scale": "fp32",
                "inverse": "fp32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["X", "x_stride", "n_cols"],
            "forms": {
                "row": {
                    "function": "forward",
                    "constants": ["BLOCK", "UNALIGNED"],
                    "defaults": {"UNALIGNED": False},
                }
            },
        },
        "selective_log_softmax_backward": {
            "arguments": {
                "DX": "*dtype",
                "DOUT": "*fp32",
                "X": "*dtype",
                "INDEX": "*i32",
                "STATISTICS": "*fp32",
                "MASK": "*i32",
                "x_stride": "i64",
                "n_cols": "i32",
                "parts": "i32",
                "chosen": "i32",
                "index_words": "i32",
                "mask_kind": "i32",
                "positions": "i32",
                "x_positions": "i32",
                "scale": "fp32",
                "inverse": "fp32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["DX", "X", "x_stride", "n_cols"],
            "forms": {
                "tile": {
                    "function": "backward",
                    "constants": ["BLOCK", "STEPS", "UNALIGNED"],
                    "defaults": {"UNALIGNED": False},
                }
            },
        },
    },
}

CHOSEN = tl.constexpr(32)  # columns a step of the loops over the chosen ones


@triton.jit
def column(INDEX, at, index_words, n_cols, mask):
    """(columns, whether they are in the row). An index is one 32-bit word or two, the low one first."""
    index = tl.load(INDEX + at * index_words, mask=mask, other=0)
    high = tl.load(INDEX + at * index_words + 1, mask=mask & (index_words == 2), other=0)
    return index, mask & (high == 0) & (index >= 0) & (index < n_cols)


@triton.jit
def forward(
    OUT, STATISTICS, X, INDEX, FLAG, MASK, x_stride, n_cols, chosen, index_words, mask_kind, positions, x_positions,
    scale, inverse,
    BLOCK: tl.constexpr, UNALIGNED: tl.constexpr,
):  # fmt: skip
    """One row a program. OUT[rows, chosen], STATISTICS[rows, 2]; scale is log2(e) / temperature, inverse
    1 / temperature."""
    program = tl.program_id(0)
    row = program.to(tl.int64)
    if token_counts(MASK, row, mask_kind, True) == 0:
        tl.store(STATISTICS + row * 2 + tl.arange(0, 2), 0.0)
        for first in range(0, chosen, CHOSEN):
            lane = first + tl.arange(0, CHOSEN)
            tl.store(OUT + row * chosen + lane, 0.0, mask=lane < chosen)
        return
    X += (program // positions * x_positions + program % positions).to(tl.int64) * x_stride
    greatest, last = log_sum_exp(X, n_cols, scale, BLOCK, UNALIGNED)
    tl.store(STATISTICS + row * 2, greatest)
    tl.store(STATISTICS + row * 2 + 1, last)
    for first in range(0, chosen, CHOSEN):
        lane = first + tl.arange(0, CHOSEN)
        at, mask = row * chosen + lane, lane < chosen
        index, known = column(INDEX, at, index_words, n_cols, mask)
        x = tl.load(X + index, mask=known, other=float("nan")).to(tl.float32)
        tl.store(OUT + at, (x - greatest) * inverse - last * LN_2, mask=mask)
        unknown = mask & (known == 0)
        if tl.max(unknown.to(tl.int32), 0) != 0:
            low = index.to(tl.int64)
            high = tl.load(INDEX + at * index_words + 1, mask=unknown & (index_words == 2), other=0).to(
                tl.int64
            )
            whole = tl.where(index_words == 2, (high << 32) | (low & 0xFFFFFFFF), low)
            tl.store(FLAG + tl.zeros([CHOSEN], tl.int32), whole, mask=unknown)


@triton.jit
def backward(
    DX, DOUT, X, INDEX, STATISTICS, MASK, x_stride, n_cols, parts, chosen, index_words, mask_kind, positions,
    x_positions, scale, inverse,
    BLOCK: tl.constexpr, STEPS: tl.constexpr, UNALIGNED: tl.constexpr,
):  # fmt: skip
    """STEPS blocks of a row a program, where DX may be X: what a row has in common takes several loads that wait for
    each other. A row whose gradients are all zero is not read, nor one whose token does not count. UNALIGNED: rows may
    start at any element; blocks start at aligned ones, if the rows of X and of DX are off by as much."""
    program = tl.program_id(0)
    x_row = program // parts
    start = program % parts * (BLOCK * STEPS)
    X += x_row.to(tl.int64) * x_stride
    DX += x_row.to(tl.int64) * n_cols
    position = x_row % x_positions
    row = tl.where(position < positions, x_row // x_positions * positions + position, 0).to(tl.int64)
    chosen = tl.where(token_counts(MASK, row, mask_kind, position < positions), chosen, 0)
    total = 0.0
    wanted = 0
    for begin in range(0, chosen, CHOSEN):
        lane = begin + tl.arange(0, CHOSEN)
        at, mask = row * chosen + lane, lane < chosen
        _, known = column(INDEX, at, index_words, n_cols, mask)
        dout = tl.load(DOUT + at, mask=known, other=0.0)
        total += tl.sum(dout, 0)
        wanted += tl.sum((dout != 0.0).to(tl.int32), 0)
    greatest = tl.load(STATISTICS + row * 2, mask=wanted > 0, other=0.0)
    last = tl.load(STATISTICS + row * 2 + 1, mask=wanted > 0, other=0.0)
    of_all = -total * inverse
    # The first of the chosen columns, which most often is the only one.
    column_0, known_0 = column(INDEX, row * chosen, index_words, n_cols, chosen > 0)
    of_0 = tl.load(DOUT + row * chosen, mask=known_0, other=0.0) * inverse
    column_0 = tl.where(known_0, column_0, -1)
    alike = False
    if UNALIGNED:
        SIZE: tl.constexpr = X.dtype.element_ty.primitive_bitwidth // 8
        offset = X.to(tl.int64) % 16
        alike = offset == DX.to(tl.int64) % 16
        start -= tl.where(alike, offset // SIZE, 0).to(tl.int32)
    cols = tl.arange(0, BLOCK)
    for first in tl.range(start, tl.minimum(start + BLOCK * STEPS, n_cols), BLOCK, num_stages=1):
        if UNALIGNED:
            if alike & (first >= 0) & (first + BLOCK <= n_cols) & (wanted > 0):
                from_here = tl.multiple_of(X + first, 16)
                to_here = tl.multiple_of(DX + first, 16)
                x = tl.load(from_here + cols)
                dx = gradient(
                    x, DOUT, INDEX, row, first, greatest, last, of_all, column_0, of_0, n_cols, chosen, index_words,
                    scale, inverse, BLOCK,
                )  # fmt: skip
                tl.store(to_here + cols, dx.to(DX.dtype.element_ty))
            else:
                store_masked(
                    DX, X, DOUT, INDEX, row, first, wanted, greatest, last, of_all, column_0, of_0, n_cols, chosen,
                    index_words, scale, inverse, BLOCK,
                )  # fmt: skip
        else:
            store_masked(
                DX, X, DOUT, INDEX, row, first, wanted, greatest, last, of_all, column_0, of_0, n_cols, chosen,
                index_words, scale, inverse, BLOCK,
            )  # fmt: skip


@triton.jit
def store_masked(
    DX, X, DOUT, INDEX, row, first, wanted, greatest, last, of_all, column_0, of_0, n_cols, chosen, index_words, scale,
    inverse,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """dx of those of the BLOCK columns from ``first`` on that are in the row."""
    cols = first + tl.arange(0, BLOCK)
    inside = (cols >= 0) & (cols < n_cols)
    x = tl.load(X + cols, mask=inside & (wanted > 0), other=-float("inf"))
    dx = gradient(
        x, DOUT, INDEX, row, first, greatest, last, of_all, column_0, of_0, n_cols, chosen, index_words, scale, inverse,
        BLOCK,
    )  # fmt: skip
    tl.store(DX + cols, dx.to(DX.dtype.element_ty), mask=inside)


@triton.jit
def gradient(
    x, DOUT, INDEX, row, first, greatest, last, of_all, column_0, of_0, n_cols, chosen, index_words, scale, inverse,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """dx of BLOCK columns; ``of_all`` is the factor of the row's probabilities, ``of_0`` the gradient of column_0."""
    dx = tl.exp2((x.to(tl.float32) - greatest) * scale - last) * of_all
    cols = first + tl.arange(0, BLOCK)
    if (column_0 >= first) & (column_0 < first + BLOCK):
        dx += tl.where(cols == column_0, of_0, 0.0)
    for i in range(1, chosen):
        index, known = column(INDEX, row * chosen + i, index_words, n_cols, True)
        if known & (index >= first) & (index < first + BLOCK):
            dout = tl.load(DOUT + row * chosen + i)
            dx += tl.where(cols == index, dout * inverse, 0.0)
    return dx
