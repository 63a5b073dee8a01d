"""Grouped matrix products in plain Triton: one tile a program, rows in the padded order of ``routing``.

Gate and up interleave: column 2 i of a gate-up tile is gate i, 2 i + 1 up i. A thread then holds both, and what is
saved for the backward (PRE, in the order of the pairs) and its gradient (DPRE, in the padded order) lie in memory so,
too. Weights are read as they are, row i of the gate and row i of the up projection ``inner`` rows apart.
"""

import triton
import triton.language as tl


@triton.jit
def multiply(a, b, acc, TF32X3: tl.constexpr):
    """acc + a b. Float32 is multiplied as float32, or on matrix units by three products of its parts."""
    return tl.dot(a, b, acc, input_precision="tf32x3" if TF32X3 else "ieee")


@triton.jit
def tile_of(TILE_EXPERT, tiles, column_tiles, GROUP: tl.constexpr):
    """(row tile, column tile, the row tile's expert; -1: nothing to do). GROUP row tiles share the columns of a weight
    while they are in the L2 cache."""
    program = tl.program_id(0)
    used = tl.load(TILE_EXPERT + tiles)
    before = program // (GROUP * column_tiles) * GROUP
    width = tl.minimum(GROUP, tiles - before)
    inside = program - before * column_tiles
    row_tile = before + inside % width
    expert = tl.load(TILE_EXPERT + row_tile)
    return row_tile, inside // width, tl.where(row_tile < used, expert, -1)


@triton.jit
def interleaved(index, inner):
    """The row of a gate-up weight that interleaved column ``index`` is."""
    return (index & 1).to(tl.int64) * inner + (index >> 1)


@triton.jit
def up(
    ACT, PRE, X, WEIGHT, ROW_PAIR, ROW_TOKEN, TILE_EXPERT, x_stride, hidden, inner, tiles, column_tiles, save,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    TF32X3: tl.constexpr,
):  # fmt: skip
    """ACT[rows, inner] = silu(gate) * up, gate and up of tokens X by WEIGHT[experts, 2 inner, hidden]; with ``save``
    also PRE[pairs, 2 inner], both interleaved."""
    row_tile, column_tile, expert = tile_of(TILE_EXPERT, tiles, column_tiles, GROUP)
    if expert >= 0:
        row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        pair = tl.load(ROW_PAIR + row)
        known = pair >= 0
        column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        in_columns = column < 2 * inner
        depth = tl.arange(0, BLOCK_K)
        token = tl.load(ROW_TOKEN + row)
        a_at = X + token.to(tl.int64)[:, None] * x_stride + depth[None, :]
        b_row = expert.to(tl.int64) * 2 * inner + interleaved(column, inner)
        b_at = WEIGHT + b_row[None, :] * hidden + depth[:, None]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(0, hidden, BLOCK_K, num_stages=STAGES):
            inside = depth < hidden - k
            a = tl.load(a_at + k, mask=known[:, None] & inside[None, :], other=0.0)
            b = tl.load(b_at + k, mask=in_columns[None, :] & inside[:, None], other=0.0)
            acc = multiply(a, b, acc, TF32X3)
        if save != 0:
            to = PRE + pair.to(tl.int64)[:, None] * (2 * inner) + column[None, :]
            tl.store(to, acc.to(PRE.dtype.element_ty), mask=known[:, None] & in_columns[None, :])
        gate, value = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N // 2, 2]))
        act = gate / (1.0 + tl.exp(-gate)) * value
        half = column_tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        to = ACT + row.to(tl.int64)[:, None] * inner + half[None, :]
        tl.store(to, act.to(ACT.dtype.element_ty), mask=(half < inner)[None, :])


@triton.jit
def down(
    Y, ACT, WEIGHT, TILE_EXPERT, hidden, inner, tiles, column_tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    TF32X3: tl.constexpr,
):  # fmt: skip
    """Y[rows, hidden] = ACT[rows, inner] times WEIGHT[experts, hidden, inner]."""
    row_tile, column_tile, expert = tile_of(TILE_EXPERT, tiles, column_tiles, GROUP)
    if expert >= 0:
        row = (row_tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        in_columns = column < hidden
        depth = tl.arange(0, BLOCK_K)
        a_at = ACT + row[:, None] * inner + depth[None, :]
        b_at = WEIGHT + (expert.to(tl.int64) * hidden + column)[None, :] * inner + depth[:, None]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(0, inner, BLOCK_K, num_stages=STAGES):
            inside = depth < inner - k
            a = tl.load(a_at + k, mask=inside[None, :], other=0.0)
            b = tl.load(b_at + k, mask=in_columns[None, :] & inside[:, None], other=0.0)
            acc = multiply(a, b, acc, TF32X3)
        to = Y + row[:, None] * hidden + column[None, :]
        tl.store(to, acc.to(Y.dtype.element_ty), mask=in_columns[None, :])


@triton.jit
def down_backward(
    DPRE, ACT, DWEIGHTS, DOUT, WEIGHT, PRE, WEIGHTS, ROW_PAIR, ROW_TOKEN, TILE_EXPERT, dout_stride, hidden, inner,
    pairs, tiles, column_tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    TF32X3: tl.constexpr,
):  # fmt: skip
    """DPRE[rows, 2 inner], the gradient of gate and up, interleaved; ACT[rows, inner], the activations times the
    routing weight; DWEIGHTS[column tiles, pairs], this tile's part of the routing weights' gradient. From the gradient
    DOUT of the tokens, WEIGHT[experts, hidden, inner], and PRE[pairs, 2 inner] of ``up``."""
    row_tile, column_tile, expert = tile_of(TILE_EXPERT, tiles, column_tiles, GROUP)
    if expert >= 0:
        row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        pair = tl.load(ROW_PAIR + row)
        known = pair >= 0
        column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        in_columns = column < inner
        depth = tl.arange(0, BLOCK_K)
        token = tl.load(ROW_TOKEN + row)
        a_at = DOUT + token.to(tl.int64)[:, None] * dout_stride + depth[None, :]
        b_at = WEIGHT + (expert.to(tl.int64) * hidden + depth)[:, None] * inner + column[None, :]
        step = inner.to(tl.int64)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(0, hidden, BLOCK_K, num_stages=STAGES):
            inside = depth < hidden - k
            a = tl.load(a_at + k, mask=known[:, None] & inside[None, :], other=0.0)
            b = tl.load(b_at + k * step, mask=in_columns[None, :] & inside[:, None], other=0.0)
            acc = multiply(a, b, acc, TF32X3)
        both = column_tile * (2 * BLOCK_N) + tl.arange(0, 2 * BLOCK_N)
        at = PRE + pair.to(tl.int64)[:, None] * (2 * inner) + both[None, :]
        pre = tl.load(at, mask=known[:, None] & (both < 2 * inner)[None, :], other=0.0).to(tl.float32)
        gate, value = tl.split(tl.reshape(pre, [BLOCK_M, BLOCK_N, 2]))
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        silu = gate * sigmoid
        act = silu * value
        tl.store(DWEIGHTS + column_tile.to(tl.int64) * pairs + pair, tl.sum(acc * act, 1), mask=known)
        weight = tl.load(WEIGHTS + pair, mask=known, other=0.0)[:, None]
        to = ACT + row.to(tl.int64)[:, None] * inner + column[None, :]
        tl.store(to, (act * weight).to(ACT.dtype.element_ty), mask=in_columns[None, :])
        acc *= weight
        dgate = acc * value * (silu * (1.0 - sigmoid) + sigmoid)
        dpre = tl.reshape(tl.join(dgate, acc * silu), [BLOCK_M, 2 * BLOCK_N])
        to = DPRE + row.to(tl.int64)[:, None] * (2 * inner) + both[None, :]
        tl.store(to, dpre.to(DPRE.dtype.element_ty), mask=(both < 2 * inner)[None, :])


@triton.jit
def up_backward(
    DX, DPRE, WEIGHT, TILE_EXPERT, hidden, inner, tiles, column_tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    TF32X3: tl.constexpr,
):  # fmt: skip
    """DX[rows, hidden] = DPRE[rows, 2 inner], interleaved, times WEIGHT[experts, 2 inner, hidden]."""
    row_tile, column_tile, expert = tile_of(TILE_EXPERT, tiles, column_tiles, GROUP)
    if expert >= 0:
        row = (row_tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        in_columns = column < hidden
        depth = tl.arange(0, BLOCK_K)
        a_at = DPRE + row[:, None] * (2 * inner) + depth[None, :]
        b_row = expert.to(tl.int64) * 2 * inner + interleaved(depth, inner)
        b_at = WEIGHT + b_row[:, None] * hidden + column[None, :]
        step = hidden.to(tl.int64)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(0, 2 * inner, BLOCK_K, num_stages=STAGES):
            inside = depth < 2 * inner - k
            a = tl.load(a_at + k, mask=inside[None, :], other=0.0)
            b = tl.load(b_at + k // 2 * step, mask=in_columns[None, :] & inside[:, None], other=0.0)
            acc = multiply(a, b, acc, TF32X3)
        to = DX + row[:, None] * hidden + column[None, :]
        tl.store(to, acc.to(DX.dtype.element_ty), mask=in_columns[None, :])


@triton.jit
def weight_backward(
    DWEIGHT, TOKENS, ROWS, ROW_TOKEN, OFFSETS, token_stride, hidden, inner, row_tiles, column_tiles,
    GATE_UP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    TF32X3: tl.constexpr,
):  # fmt: skip
    """A weight's gradient, a sum over its expert's rows: DWEIGHT[experts, hidden, inner] of TOKENS (the gradient of the
    result, gathered) and ROWS (the weighted activations); with GATE_UP DWEIGHT[experts, 2 inner, hidden] of ROWS (DPRE,
    interleaved) and TOKENS (x, gathered). An expert without rows gets zeros."""
    program = tl.program_id(0)
    expert = program // (row_tiles * column_tiles)
    tile = program - expert * (row_tiles * column_tiles)
    row = tile % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile // row_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    first = tl.load(OFFSETS + expert)
    end = tl.load(OFFSETS + expert + 1)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if GATE_UP:
        in_rows, in_columns = row < 2 * inner, column < hidden
        for k in tl.range(first, end, BLOCK_K, num_stages=STAGES):
            at = k + depth
            token = tl.load(ROW_TOKEN + at, mask=at < end, other=-1)
            a = ROWS + at.to(tl.int64)[None, :] * (2 * inner) + row[:, None]
            b = TOKENS + token.to(tl.int64)[:, None] * token_stride + column[None, :]
            a = tl.load(a, mask=in_rows[:, None] & (at < end)[None, :], other=0.0)
            b = tl.load(b, mask=(token >= 0)[:, None] & in_columns[None, :], other=0.0)
            acc = multiply(a, b, acc, TF32X3)
        to = (expert.to(tl.int64) * 2 * inner + interleaved(row, inner))[:, None] * hidden + column[None, :]
    else:
        in_rows, in_columns = row < hidden, column < inner
        for k in tl.range(first, end, BLOCK_K, num_stages=STAGES):
            at = k + depth
            token = tl.load(ROW_TOKEN + at, mask=at < end, other=-1)
            a = TOKENS + token.to(tl.int64)[None, :] * token_stride + row[:, None]
            b = ROWS + at.to(tl.int64)[:, None] * inner + column[None, :]
            a = tl.load(a, mask=in_rows[:, None] & (token >= 0)[None, :], other=0.0)
            b = tl.load(b, mask=(at < end)[:, None] & in_columns[None, :], other=0.0)
            acc = multiply(a, b, acc, TF32X3)
        to = (expert.to(tl.int64) * hidden + row)[:, None] * inner + column[None, :]
    tl.store(DWEIGHT + to, acc.to(DWEIGHT.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])
