"""Attention forward in plain Triton: a program walks the keys that a tile of rows of Q sees. After FlashAttention-2."""

import triton
import triton.language as tl


@triton.jit
def load_rows(X, rows, stride, columns, dim, length, MASKED: tl.constexpr):
    """[rows, columns] of a tensor, zero past ``dim`` columns and, with MASKED, outside its ``length`` rows."""
    at = X + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    keep = columns[None, :] < dim
    if MASKED:
        keep = keep & (rows[:, None] < length)
    return tl.load(at, mask=keep, other=0.0)


@triton.jit
def tile_step(
    key,
    K,
    V,
    k_row,
    v_row,
    q,
    q2,
    low,
    high,
    scale,
    cap,
    dim,
    len_k,
    acc,
    acc2,
    m,
    sums,
    MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
):
    """The block of keys from ``key`` on. ``low`` and ``high`` are the first key that each row sees and the one behind
    the last."""
    keys = key + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, D1)
    s = tl.dot(q, tl.trans(load_rows(K, keys, k_row, columns, dim, len_k, MASKED)))
    if D2 > 0:
        columns2 = tl.arange(0, D2) + D1
        s = tl.dot(q2, tl.trans(load_rows(K, keys, k_row, columns2, dim, len_k, MASKED)), s)
    if cap != 0.0:  # tanh(x) = 1 - 2 / (1 + exp(2 x))
        s = 1.0 - 2.0 / (1.0 + tl.exp2(s * (cap * 2.8853900817779268)))
    if MASKED:
        s = tl.where(keys[None, :] < high[:, None], s, float("-inf"))
        s = tl.where(keys[None, :] >= low[:, None], s, float("-inf"))
    new_m = tl.maximum(m, tl.max(s, 1) * scale)
    p = tl.exp2(s * scale - new_m[:, None])
    alpha = tl.exp2(m - new_m)
    sums = sums * alpha + tl.sum(p, 1)
    p = p.to(q.dtype)
    v = load_rows(V, keys, v_row, columns, dim, len_k, MASKED)
    acc = tl.dot(p, v, acc * alpha[:, None])
    if D2 > 0:
        v = load_rows(V, keys, v_row, tl.arange(0, D2) + D1, dim, len_k, MASKED)
        acc2 = tl.dot(p, v, acc2 * alpha[:, None])
    return acc, acc2, new_m, sums
