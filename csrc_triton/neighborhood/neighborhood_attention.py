"""Attention of each position to its neighbours in a sequence: those at most ``reach`` steps of ``dilation`` away.

A program has ROWS positions of one sequence and visits the neighbours one step after the other, as tiles of rows that
lie ``step * dilation`` positions further; the tiles of all steps overlap, so that the caches serve all but the first.
Windows are small: products with tensor cores would mostly be of what is masked.

The set of neighbours is symmetric. So the backward finds, in one visit, a position's dQ from the keys that it sees, and
its dK and dV from the queries that see it, which are at the same places.
"""

import triton
import triton.language as tl

FLOATS = {"dtype": ["bf16", "fp16", "fp32"]}

DECLARATION = {
    "op": "neighborhood_attention",
    "kernels": {
        "neighborhood_attention_forward": {
            "arguments": {
                "Y": "*dtype",
                "LSE": "*fp32",
                "Q": "*dtype",
                "K": "*dtype",
                "V": "*dtype",
                "length": "i32",
                "dim": "i32",
                "blocks": "i32",
                "reach": "i32",
                "dilation": "i32",
                "scale": "fp32",
            },
            "axes": FLOATS,
            "aligned": ["Y", "Q", "K", "V", "dim"],
            "forms": {"rows": {"function": "forward", "constants": ["ROWS", "DIM"]}},
        },
        "neighborhood_attention_backward": {
            "arguments": {
                "DQ": "*dtype",
                "DK": "*dtype",
                "DV": "*dtype",
                "DY": "*dtype",
                "Q": "*dtype",
                "K": "*dtype",
                "V": "*dtype",
                "Y": "*dtype",
                "LSE": "*fp32",
                "length": "i32",
                "dim": "i32",
                "blocks": "i32",
                "reach": "i32",
                "dilation": "i32",
                "scale": "fp32",
            },
            "axes": FLOATS,
            "aligned": ["DQ", "DK", "DV", "DY", "Q", "K", "V", "Y", "dim"],
            "forms": {"rows": {"function": "backward", "constants": ["ROWS", "DIM"]}},
        },
    },
}

LOG2_E = tl.constexpr(1.4426950408889634)
# Where a greatest score starts: not at -inf, whose difference from itself is NaN.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def load(X, base, rows, cols, length, dim):
    """(rows, cols) of a sequence that starts at row ``base``; zeros outside of it."""
    inside = ((rows >= 0) & (rows < length))[:, None] & (cols < dim)[None, :]
    at = (base + rows)[:, None] * dim + cols[None, :]
    return tl.load(X + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store(X, base, rows, cols, length, dim, x):
    inside = (rows < length)[:, None] & (cols < dim)[None, :]
    at = (base + rows)[:, None] * dim + cols[None, :]
    tl.store(X + at, x.to(X.dtype.element_ty), mask=inside)


@triton.jit
def place(length, blocks, ROWS: tl.constexpr, DIM: tl.constexpr):
    """The first row of a program's sequence, the program's positions in it, and the columns."""
    program = tl.program_id(0)
    base = (program // blocks).to(tl.int64) * length
    return base, program % blocks * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM)


@triton.jit
def forward(
    Y, LSE, Q, K, V, length, dim, blocks, reach, dilation, scale, ROWS: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    """LSE is of the scores in units of log(2)."""
    base, rows, cols = place(length, blocks, ROWS, DIM)
    q = load(Q, base, rows, cols, length, dim) * (scale * LOG2_E)
    peak = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    y = tl.zeros([ROWS, DIM], tl.float32)
    for step in range(-reach, reach + 1):
        others = rows + step * dilation
        score = tl.sum(q * load(K, base, others, cols, length, dim), 1)
        seen = (others >= 0) & (others < length)
        higher = tl.maximum(peak, tl.where(seen, score, LOWEST))
        power = tl.where(seen, tl.exp2(score - higher), 0.0)
        down = tl.exp2(peak - higher)
        total = total * down + power
        y = y * down[:, None] + power[:, None] * load(V, base, others, cols, length, dim)
        peak = higher
    total = tl.where(rows < length, total, 1.0)  # past the end there may be none
    store(Y, base, rows, cols, length, dim, y / total[:, None])
    tl.store(LSE + base + rows, peak + tl.log2(total), mask=rows < length)


@triton.jit
def backward(
    DQ, DK, DV, DY, Q, K, V, Y, LSE, length, dim, blocks, reach, dilation, scale, ROWS: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    base, rows, cols = place(length, blocks, ROWS, DIM)
    here = rows < length
    q, k = load(Q, base, rows, cols, length, dim), load(K, base, rows, cols, length, dim)
    v, dy = load(V, base, rows, cols, length, dim), load(DY, base, rows, cols, length, dim)
    delta = tl.sum(dy * load(Y, base, rows, cols, length, dim), 1)
    lse = tl.load(LSE + base + rows, mask=here, other=0.0)
    dq = tl.zeros([ROWS, DIM], tl.float32)
    dk = tl.zeros([ROWS, DIM], tl.float32)
    dv = tl.zeros([ROWS, DIM], tl.float32)
    for step in range(-reach, reach + 1):
        others = rows + step * dilation
        seen = here & (others >= 0) & (others < length)
        # the keys that these positions see
        other_k = load(K, base, others, cols, length, dim)
        score = tl.sum(q * other_k, 1) * (scale * LOG2_E)
        p = tl.where(seen, tl.exp2(score - lse), 0.0)
        dp = tl.sum(dy * load(V, base, others, cols, length, dim), 1)
        dq += (p * (dp - delta))[:, None] * other_k
        # the queries that see these positions
        other_q, other_dy = (
            load(Q, base, others, cols, length, dim),
            load(DY, base, others, cols, length, dim),
        )
        other_delta = tl.sum(other_dy * load(Y, base, others, cols, length, dim), 1)
        other_lse = tl.load(LSE + base + others, mask=seen, other=0.0)
        score = tl.sum(k * other_q, 1) * (scale * LOG2_E)
        p = tl.where(seen, tl.exp2(score - other_lse), 0.0)
        dp = tl.sum(v * other_dy, 1)
        dk += (p * (dp - other_delta))[:, None] * other_q
        dv += p[:, None] * other_dy
    store(DQ, base, rows, cols, length, dim, dq * scale)
    store(DK, base, rows, cols, length, dim, dk * scale)
    store(DV, base, rows, cols, length, dim, dv)
