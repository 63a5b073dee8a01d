"""PolyNorm: y = w0 * norm(x^3) + w1 * norm(x^2) + w2 * norm(x) + b, norm(u) = u / sqrt(mean(u^2) + eps) over a row.

All forms of a kernel take the same arguments; a profile picks the form and its numbers by row length. Statistics are
fp32. The four parameters are numbers, not rows: they may be of x's dtype or fp32 in the same binary (``wide``).

Zhuo et al., Polynomial Composition Activations (2024).
"""

import triton
import triton.language as tl

DECLARATION = {
    "op": "poly_norm",
    "kernels": {
        "poly_norm_forward": {
            "arguments": {
                "Y": "*dtype",
                "X": "*dtype",
                "W": "*dtype",
                "W32": "*fp32",
                "B": "*dtype",
                "B32": "*fp32",
                "RSTD": "*fp32",
                "y_stride": "i64",
                "x_stride": "i64",
                "n_rows": "i64",
                "n_cols": "i32",
                "eps": "fp32",
                "wide": "i32",
                "store_rstd": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["Y", "X", "y_stride", "x_stride", "n_cols"],
            "forms": {
                "tile": {
                    "function": "forward_tile",
                    "constants": ["ROWS", "BLOCK"],
                    "covers": "BLOCK",
                },
                "row": {"function": "forward_row", "constants": ["BLOCK"], "covers": "BLOCK"},
                "long": {
                    "function": "forward_long",
                    "constants": ["BLOCK", "BLOCKS"],
                    "defaults": {"BLOCKS": 0},
                    "covers": "BLOCKS * BLOCK",
                    "any_length": "BLOCKS",
                },
            },
        },
        "poly_norm_backward": {
            "arguments": {
                "DX": "*dtype",
                "DY": "*dtype",
                "X": "*dtype",
                "W": "*dtype",
                "W32": "*fp32",
                "RSTD": "*fp32",
                "PARTIALS": "*fp32",
                "dx_stride": "i64",
                "dy_stride": "i64",
                "x_stride": "i64",
                "n_rows": "i64",
                "n_cols": "i32",
                "wide": "i32",
                "store_dx": "i32",
                "store_partials": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["DX", "DY", "X", "dx_stride", "dy_stride", "x_stride", "n_cols"],
            "forms": {
                "tile": {
                    "function": "backward_tile",
                    "constants": ["ROWS", "BLOCK", "STAGES"],
                    "covers": "BLOCK",
                    "staged": ["DY", "X"],
                },
                "row": {
                    "function": "backward_row",
                    "constants": ["BLOCKS", "BLOCK", "STAGES"],
                    "defaults": {"BLOCKS": 1},
                    "covers": "BLOCKS * BLOCK",
                    "staged": ["DY", "X"],
                },
                "long": {
                    "function": "backward_long",
                    "constants": ["BLOCK", "BLOCKS"],
                    "defaults": {"BLOCKS": 0},
                    "covers": "BLOCKS * BLOCK",
                    "any_length": "BLOCKS",
                },
            },
        },
        "poly_norm_sums": {
            "arguments": {"DW": "*weight", "DB": "*weight", "PARTIALS": "*fp32", "parts": "i32"},
            "axes": {"weight": ["bf16", "fp16", "fp32"]},
            "aligned": ["PARTIALS"],
            "forms": {"tile": {"function": "sums", "constants": ["PARTS"]}},
        },
    },
}


@triton.jit
def parameter(P, P32, i, wide):
    """P[i] as fp32, from P32 where the parameters are fp32."""
    narrow = tl.load(P + i, mask=wide == 0, other=0.0).to(tl.float32)
    return narrow + tl.load(P32 + i, mask=wide != 0, other=0.0)


@triton.jit
def sums_of_four(a, b, c, d, AXIS: tl.constexpr):
    """Four sums along AXIS, the tensors' last. Side by side in one tensor they cross the warps together, behind one
    barrier instead of four."""
    both = tl.sum(tl.join(tl.join(a, b), tl.join(c, d)), AXIS)
    even, odd = tl.split(both)
    sum_a, sum_b = tl.split(even)
    sum_c, sum_d = tl.split(odd)
    return sum_a, sum_b, sum_c, sum_d


@triton.jit
def sums_of_none(BLOCK: tl.constexpr):
    zeros = tl.zeros([BLOCK], tl.float32)
    return zeros, zeros, zeros, zeros


@triton.jit
def polynomial(x, c3, c2, c1, b):
    """c3 x^3 + c2 x^2 + c1 x + b."""
    return ((c3 * x + c2) * x + c1) * x + b


@triton.jit
def scales_of(sum_6, sum_4, sum_2, n_cols, eps):
    """1 / sqrt(mean(u^2) + eps) for x^3, x^2 and x."""
    n = n_cols.to(tl.float32)
    return tl.rsqrt(sum_6 / n + eps), tl.rsqrt(sum_4 / n + eps), tl.rsqrt(sum_2 / n + eps)


@triton.jit
def forward_tile(
    Y, X, W, W32, B, B32, RSTD, y_stride, x_stride, n_rows, n_cols, eps, wide, store_rstd,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS whole rows a program, held in registers; n_cols <= BLOCK."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_rows = rows < n_rows
    cols = tl.arange(0, BLOCK)
    mask = in_rows[:, None] & (cols < n_cols)[None, :]
    x = tl.load(X + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    w0, w1, w2 = parameter(W, W32, 0, wide), parameter(W, W32, 1, wide), parameter(W, W32, 2, wide)
    b = parameter(B, B32, 0, wide)
    s = x * x
    sum_6, sum_4, sum_2, _ = sums_of_four(s * s * s, s * s, s, tl.zeros_like(s), 1)
    r3, r2, r1 = scales_of(sum_6, sum_4, sum_2, n_cols, eps)
    stored = in_rows & (store_rstd != 0)
    tl.store(RSTD + rows * 3, r3, mask=stored)
    tl.store(RSTD + rows * 3 + 1, r2, mask=stored)
    tl.store(RSTD + rows * 3 + 2, r1, mask=stored)
    y = polynomial(x, (w0 * r3)[:, None], (w1 * r2)[:, None], (w2 * r1)[:, None], b)
    tl.store(Y + rows[:, None] * y_stride + cols[None, :], y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def store_scales(RSTD, row, r3, r2, r1, store_rstd):
    if store_rstd != 0:
        tl.store(RSTD + row * 3, r3)
        tl.store(RSTD + row * 3 + 1, r2)
        tl.store(RSTD + row * 3 + 2, r1)


@triton.jit
def forward_row(
    Y, X, W, W32, B, B32, RSTD, y_stride, x_stride, n_rows, n_cols, eps, wide, store_rstd, BLOCK: tl.constexpr
):  # fmt: skip
    """``forward_tile`` with one row a program, 1-D: a [1, BLOCK] tile with a masked row runs at half the speed."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    x = tl.load(X + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    w0, w1, w2 = parameter(W, W32, 0, wide), parameter(W, W32, 1, wide), parameter(W, W32, 2, wide)
    b = parameter(B, B32, 0, wide)
    s = x * x
    sum_6, sum_4, sum_2, _ = sums_of_four(s * s * s, s * s, s, tl.zeros_like(s), 0)
    r3, r2, r1 = scales_of(sum_6, sum_4, sum_2, n_cols, eps)
    store_scales(RSTD, row, r3, r2, r1, store_rstd)
    y = polynomial(x, w0 * r3, w1 * r2, w2 * r1, b)
    tl.store(Y + row * y_stride + cols, y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def forward_long(
    Y, X, W, W32, B, B32, RSTD, y_stride, x_stride, n_rows, n_cols, eps, wide, store_rstd,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One row of any length a program. It is read twice, the second time backwards and from the L1 cache, so
    that registers stay free for a second program. BLOCKS, where it is known, unrolls the loops, so that the blocks'
    loads are in flight together."""
    row = tl.program_id(0).to(tl.int64)
    X += row * x_stride
    Y += row * y_stride
    block = tl.arange(0, BLOCK)
    if BLOCKS > 0:
        blocks = BLOCKS
    else:
        blocks = tl.cdiv(n_cols, BLOCK)
    w0, w1, w2 = parameter(W, W32, 0, wide), parameter(W, W32, 1, wide), parameter(W, W32, 2, wide)
    b = parameter(B, B32, 0, wide)
    sixth = tl.zeros([BLOCK], tl.float32)
    fourth = tl.zeros([BLOCK], tl.float32)
    second = tl.zeros([BLOCK], tl.float32)
    for i in range(blocks):
        cols = i * BLOCK + block
        x = tl.load(X + cols, mask=cols < n_cols, other=0.0, eviction_policy="evict_last").to(tl.float32)
        s = x * x
        second += s
        fourth += s * s
        sixth += s * s * s
    sum_6, sum_4, sum_2, _ = sums_of_four(sixth, fourth, second, tl.zeros_like(second), 0)
    r3, r2, r1 = scales_of(sum_6, sum_4, sum_2, n_cols, eps)
    store_scales(RSTD, row, r3, r2, r1, store_rstd)
    c3, c2, c1 = w0 * r3, w1 * r2, w2 * r1
    for i in range(blocks):
        cols = (blocks - 1 - i) * BLOCK + block
        x = tl.load(X + cols, mask=cols < n_cols, other=0.0, eviction_policy="evict_first").to(tl.float32)
        y = polynomial(x, c3, c2, c1, b).to(Y.dtype.element_ty)
        tl.store(Y + cols, y, mask=cols < n_cols, eviction_policy="evict_first")


@triton.jit
def gradient(x, dy, a3, a2, a1, k3, k2, k1):
    """dx: dy times the polynomial's derivative, less what the statistics take. a are weight times scale; k are a times
    the scale's square times mean(dy * x^p)."""
    s = x * x
    return dy * ((3.0 * a3 * x + 2.0 * a2) * x + a1) - x * ((3.0 * k3 * s + 2.0 * k2) * s + k1)


@triton.jit
def store_partials_of(PARTIALS, program, d0, d1, d2, db, store_partials):
    """A program's sums, the gradients of the four parameters."""
    if store_partials != 0:
        tl.store(PARTIALS + program * 4, d0)
        tl.store(PARTIALS + program * 4 + 1, d1)
        tl.store(PARTIALS + program * 4 + 2, d2)
        tl.store(PARTIALS + program * 4 + 3, db)


@triton.jit
def backward_tile(
    DX, DY, X, W, W32, RSTD, PARTIALS, dx_stride, dy_stride, x_stride, n_rows, n_cols, wide, store_dx,
    store_partials,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Persistent programs, ROWS short rows a step; the next steps' loads are in flight meanwhile."""
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    in_row = cols < n_cols
    w0, w1, w2 = parameter(W, W32, 0, wide), parameter(W, W32, 1, wide), parameter(W, W32, 2, wide)
    n = n_cols.to(tl.float32)
    d0 = tl.zeros([ROWS], tl.float32)
    d1 = tl.zeros([ROWS], tl.float32)
    d2 = tl.zeros([ROWS], tl.float32)
    db = tl.zeros([ROWS], tl.float32)
    for step in tl.range(program, tl.cdiv(n_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = step * ROWS + tl.arange(0, ROWS)
        in_rows = rows < n_rows
        mask = in_rows[:, None] & in_row[None, :]
        x = tl.load(X + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(DY + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        r3 = tl.load(RSTD + rows * 3, mask=in_rows, other=0.0)
        r2 = tl.load(RSTD + rows * 3 + 1, mask=in_rows, other=0.0)
        r1 = tl.load(RSTD + rows * 3 + 2, mask=in_rows, other=0.0)
        p = dy * x
        s3, s2, s1, s0 = sums_of_four(p * x * x, p * x, p, dy, 1)
        a3, a2, a1 = w0 * r3, w1 * r2, w2 * r1
        k3, k2, k1 = a3 * r3 * r3 * (s3 / n), a2 * r2 * r2 * (s2 / n), a1 * r1 * r1 * (s1 / n)
        dx = gradient(x, dy, a3[:, None], a2[:, None], a1[:, None], k3[:, None], k2[:, None], k1[:, None])
        tl.store(
            DX + rows[:, None] * dx_stride + cols[None, :],
            dx.to(DX.dtype.element_ty),
            mask=mask & (store_dx != 0),
        )
        d0 += s3 * r3
        d1 += s2 * r2
        d2 += s1 * r1
        db += s0
    store_partials_of(
        PARTIALS, program, tl.sum(d0, 0), tl.sum(d1, 0), tl.sum(d2, 0), tl.sum(db, 0), store_partials
    )


@triton.jit
def backward_row(
    DX, DY, X, W, W32, RSTD, PARTIALS, dx_stride, dy_stride, x_stride, n_rows, n_cols, wide, store_dx,
    store_partials,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``backward_tile`` with one row a step, 1-D. A row whose next power of two would leave too many lanes idle is of
    several BLOCKS."""
    program = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    w0, w1, w2 = parameter(W, W32, 0, wide), parameter(W, W32, 1, wide), parameter(W, W32, 2, wide)
    n = n_cols.to(tl.float32)
    d0, d1, d2, db = 0.0, 0.0, 0.0, 0.0
    for row in tl.range(program, n_rows, tl.num_programs(0), num_stages=STAGES):
        r3, r2, r1 = tl.load(RSTD + row * 3), tl.load(RSTD + row * 3 + 1), tl.load(RSTD + row * 3 + 2)
        xs, dys = (), ()
        cubes, squares, values, ones = sums_of_none(BLOCK)
        for i in tl.static_range(BLOCKS):
            cols = i * BLOCK + block
            x = tl.load(X + row * x_stride + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
            dy = tl.load(DY + row * dy_stride + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
            p = dy * x
            cubes += p * x * x
            squares += p * x
            values += p
            ones += dy
            xs += (x,)
            dys += (dy,)
        s3, s2, s1, s0 = sums_of_four(cubes, squares, values, ones, 0)
        a3, a2, a1 = w0 * r3, w1 * r2, w2 * r1
        k3, k2, k1 = a3 * r3 * r3 * (s3 / n), a2 * r2 * r2 * (s2 / n), a1 * r1 * r1 * (s1 / n)
        for i in tl.static_range(BLOCKS):
            cols = i * BLOCK + block
            dx = gradient(xs[i], dys[i], a3, a2, a1, k3, k2, k1).to(DX.dtype.element_ty)
            tl.store(DX + row * dx_stride + cols, dx, mask=(cols < n_cols) & (store_dx != 0))
        d0 += s3 * r3
        d1 += s2 * r2
        d2 += s1 * r1
        db += s0
    store_partials_of(PARTIALS, program, d0, d1, d2, db, store_partials)


@triton.jit
def backward_long(
    DX, DY, X, W, W32, RSTD, PARTIALS, dx_stride, dy_stride, x_stride, n_rows, n_cols, wide, store_dx,
    store_partials,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Rows of any length, read twice: for the sums, then backwards for dx. BLOCKS is as in ``forward_long``."""
    program = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    if BLOCKS > 0:
        blocks = BLOCKS
    else:
        blocks = tl.cdiv(n_cols, BLOCK)
    w0, w1, w2 = parameter(W, W32, 0, wide), parameter(W, W32, 1, wide), parameter(W, W32, 2, wide)
    n = n_cols.to(tl.float32)
    d0, d1, d2, db = 0.0, 0.0, 0.0, 0.0
    for row in range(program, n_rows, tl.num_programs(0)):
        cubes, squares, values, ones = sums_of_none(BLOCK)
        for i in range(blocks):
            cols = i * BLOCK + block
            mask = cols < n_cols
            x = tl.load(X + row * x_stride + cols, mask=mask, other=0.0, eviction_policy="evict_last")
            dy = tl.load(DY + row * dy_stride + cols, mask=mask, other=0.0, eviction_policy="evict_last")
            x, dy = x.to(tl.float32), dy.to(tl.float32)
            p = dy * x
            cubes += p * x * x
            squares += p * x
            values += p
            ones += dy
        s3, s2, s1, s0 = sums_of_four(cubes, squares, values, ones, 0)
        r3, r2, r1 = tl.load(RSTD + row * 3), tl.load(RSTD + row * 3 + 1), tl.load(RSTD + row * 3 + 2)
        a3, a2, a1 = w0 * r3, w1 * r2, w2 * r1
        k3, k2, k1 = a3 * r3 * r3 * (s3 / n), a2 * r2 * r2 * (s2 / n), a1 * r1 * r1 * (s1 / n)
        for i in range(blocks):
            cols = (blocks - 1 - i) * BLOCK + block
            mask = cols < n_cols
            x = tl.load(X + row * x_stride + cols, mask=mask, other=0.0, eviction_policy="evict_first")
            dy = tl.load(DY + row * dy_stride + cols, mask=mask, other=0.0, eviction_policy="evict_first")
            dx = gradient(x.to(tl.float32), dy.to(tl.float32), a3, a2, a1, k3, k2, k1)
            tl.store(DX + row * dx_stride + cols, dx.to(DX.dtype.element_ty), mask=mask & (store_dx != 0))
        d0 += s3 * r3
        d1 += s2 * r2
        d2 += s1 * r1
        db += s0
    store_partials_of(PARTIALS, program, d0, d1, d2, db, store_partials)


@triton.jit
def sums(DW, DB, PARTIALS, parts, PARTS: tl.constexpr):
    """The gradients of the weight's three elements and of the bias from PARTIALS[parts, 4]; one program."""
    i = tl.arange(0, 4)
    total = tl.zeros([PARTS, 4], tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        total += tl.load(PARTIALS + part[:, None] * 4 + i[None, :], mask=(part < parts)[:, None], other=0.0)
    found = tl.sum(total, 0).to(DW.dtype.element_ty)
    tl.store(DW + i, found, mask=i < 3)
    tl.store(DB + i - 3, found, mask=i == 3)
