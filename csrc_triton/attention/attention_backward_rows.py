"""What attention's backward does to rows before and after its products: their sums, and dQ from float32 to theirs."""

import triton
import triton.language as tl

from csrc_triton.attention.forward import load_rows


@triton.jit
def sum_rows(rows, LSE2, DELTA, Y, DY, LSE, DLSE, with_dlse, y_row, dy_row, dim, length, D1: tl.constexpr):
    """DELTA = rowsum(DY * Y) - DLSE, and LSE in base 2, of rows of one head; tensors start at its first row.

    Rows past ``length`` and rows that see no key get an infinite LSE, which makes their probabilities 0, and a delta of
    0, whatever DLSE is there.
    """
    columns = tl.arange(0, D1)
    y = load_rows(Y, rows, y_row, columns, dim, length, True)
    dy = load_rows(DY, rows, dy_row, columns, dim, length, True)
    delta = tl.sum(y.to(tl.float32) * dy.to(tl.float32), 1)
    keep = rows < length
    lse = tl.load(LSE + rows, mask=keep, other=float("-inf"))
    delta -= tl.load(DLSE + rows, mask=keep & with_dlse, other=0.0)
    sees = lse != float("-inf")
    tl.store(LSE2, tl.where(sees, lse * 1.4426950408889634, float("inf")))
    tl.store(DELTA, tl.where(sees, delta, 0.0))


@triton.jit
def finish_rows(DQ, DQ32, dq_row, scale, row, column, dim, length, WIDTH: tl.constexpr):
    """WIDTH columns of the 64 rows from ``row`` on, of one head: from the order of accumulators at DQ32, scaled and
    rounded. Rows from ``length`` on are not written."""
    # slabs of 8 columns; in each: 16 rows a warp, 8 rows, 4 pairs of columns, both halves of the 16 rows, a pair
    x = tl.load(DQ32 + tl.arange(0, 64 * WIDTH)) * scale
    x = tl.permute(tl.reshape(x, [WIDTH // 8, 4, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5])
    rows = row + tl.arange(0, 64)
    columns = column + tl.arange(0, WIDTH)
    to = DQ + rows.to(tl.int64)[:, None] * dq_row + columns[None, :]
    keep = (rows[:, None] < length) & (columns[None, :] < dim)
    tl.store(to, tl.reshape(x, [64, WIDTH]).to(DQ.dtype.element_ty), mask=keep)
