"""Row kernels as Triton compiles them, run on the AMD emulator, against float64."""

from __future__ import annotations

import numpy as np
import pytest
import triton
import triton.language as tl

from tests.emulator.amd_emulator.comparison import DTYPES, UNTOUCHED, check, random, untouched, wide
from tests.emulator.amd_emulator.triton_kernel import compile_kernel
from tests.emulator.emulated_cases import on_architectures

ARCHS = on_architectures((), quick=False)


@triton.jit
def rmsnorm(Y, X, W, RSTD, stride, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    x = tl.load(X + row * stride + cols, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(W + cols, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / n + eps)
    tl.store(RSTD + row, rstd)
    tl.store(Y + row * stride + cols, (x * rstd * w).to(Y.dtype.element_ty), mask=mask)


@pytest.mark.parametrize(
    ("arch", "dtype", "n", "block", "num_warps", "aligned"),
    on_architectures(
        ("bf16", 1000, 1024, 4, True),
        ("bf16", 999, 1024, 4, False),
        ("bf16", 3, 64, 1, False),
        ("fp16", 4096, 4096, 8, True),
        ("fp16", 257, 512, 2, False),
        ("fp32", 5000, 8192, 16, True),
        ("fp32", 129, 256, 1, False),
    ),
)
def test_rmsnorm(arch: str, dtype: str, n: int, block: int, num_warps: int, aligned: bool) -> None:
    """One row a program, int64 strides; the gap between rows must stay as it was."""
    types = {
        "Y": f"*{dtype}",
        "X": f"*{dtype}",
        "W": f"*{dtype}",
        "RSTD": "*fp32",
        "stride": "i64",
        "n": "i32",
    }
    hints = ("Y", "X", "W", "stride") if aligned else ()
    kernel = compile_kernel(rmsnorm, arch, {**types, "eps": "fp32"}, {"BLOCK": block}, hints, num_warps)
    stride = -(-n // 16) * 16 + 16 if aligned else n + 3
    x, w = random(3, stride, dtype=dtype), random(n, dtype=dtype, seed=1)
    y, rstd = untouched(3, stride, dtype=dtype), untouched(3)
    kernel.run((3,), y, x, w, rstd, stride, n, 1e-6)
    rows = wide(x[:, :n])
    exact = 1 / np.sqrt((rows**2).mean(1) + float(np.float32(1e-6)))
    check(rstd, exact, "fp32", 16)
    check(y[:, :n], rows * exact[:, None] * wide(w), dtype, 20)
    assert (y[:, n:] == UNTOUCHED).all()


@triton.jit
def softmax(Y, X, rows, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    mask = (r < rows)[:, None] & (c < n)[None, :]
    x = tl.load(X + r[:, None] * n + c[None, :], mask=mask, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 1)[:, None])
    tl.store(Y + r[:, None] * n + c[None, :], (e / tl.sum(e, 1)[:, None]).to(Y.dtype.element_ty), mask=mask)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("dtype", "tile", "n", "num_warps"),
    [
        ("bf16", (16, 32), 17, 1),
        ("fp16", (4, 256), 255, 4),
        ("fp32", (8, 128), 128, 2),
        ("fp32", (2, 1024), 600, 8),
    ],
)
def test_softmax_of_several_rows(
    arch: str, dtype: str, tile: tuple[int, int], n: int, num_warps: int
) -> None:
    types = {"Y": f"*{dtype}", "X": f"*{dtype}", "rows": "i32", "n": "i32"}
    constants = {"ROWS": tile[0], "BLOCK": tile[1]}
    kernel = compile_kernel(softmax, arch, types, constants, num_warps=num_warps)
    rows = tile[0] + 1  # the second program has one row
    x, y = random(rows, n, dtype=dtype, scale=5), untouched(rows, n, dtype=dtype)
    kernel.run((2,), y, x, rows, n)
    e = np.exp(wide(x) - wide(x).max(1, keepdims=True))
    # exp magnifies the error of its argument, which is as large as the row's spread
    check(y, e / e.sum(1, keepdims=True), dtype, 2 * np.ptp(wide(x)) + 16)


@triton.jit
def cross_entropy(LOSS, GRAD, X, TARGET, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    X += row * n
    GRAD += row * n
    log2e: tl.constexpr = 1.4426950408889634
    target = tl.load(TARGET + row)
    m = -float("inf")
    s = 0.0
    for first in range(0, n, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        x = tl.load(X + cols, mask=cols < n, other=-float("inf")).to(tl.float32) * log2e
        new = tl.maximum(m, tl.max(x, 0))
        s = s * tl.exp2(m - new) + tl.sum(tl.exp2(x - new), 0)
        m = new
    lse = m + tl.log2(s)
    for first in range(0, n, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        x = tl.load(X + cols, mask=cols < n, other=0.0).to(tl.float32) * log2e
        p = tl.exp2(x - lse) - tl.where(cols == target, 1.0, 0.0)
        tl.store(GRAD + cols, p.to(GRAD.dtype.element_ty), mask=cols < n)
    tl.store(LOSS + row, lse / log2e - tl.load(X + target).to(tl.float32))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("dtype", "n", "num_warps"), [("bf16", 1001, 4), ("fp16", 512, 1), ("fp32", 300, 2)])
def test_cross_entropy_in_loops(arch: str, dtype: str, n: int, num_warps: int) -> None:
    types = {"LOSS": "*fp32", "GRAD": f"*{dtype}", "X": f"*{dtype}", "TARGET": "*i64", "n": "i32"}
    kernel = compile_kernel(cross_entropy, arch, types, {"BLOCK": 256}, num_warps=num_warps)
    x, grad, loss = random(3, n, dtype=dtype, scale=3), untouched(3, n, dtype=dtype), untouched(3)
    target = np.array([0, n - 1, 5], np.int64)
    kernel.run((3,), loss, grad, x, target, n)
    logits = wide(x)
    lse = np.log(np.exp(logits).sum(1))
    hot = np.arange(n) == target[:, None]
    probability = np.exp(logits - lse[:, None])
    spread = np.abs(logits).max() + lse.max()
    check(loss, lse - logits[hot], "fp32", 16, spread)
    check(grad, probability - hot, dtype, 8 * spread, probability + hot)


@triton.jit
def layernorm_backward(DX, PARTIALS, DY, X, W, rows, n, eps, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    w = tl.load(W + cols, mask=mask, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], tl.float32)
    for row in tl.range(program, rows, tl.num_programs(0), num_stages=2):
        at = row.to(tl.int64) * n + cols
        x = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(DY + at, mask=mask, other=0.0).to(tl.float32)
        mean = tl.sum(x, 0) / n
        centred = tl.where(mask, x - mean, 0.0)
        rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / n + eps)
        normal = centred * rstd
        scaled = dy * w
        a = tl.sum(scaled, 0) / n
        b = tl.sum(scaled * normal, 0) / n
        tl.store(DX + at, ((scaled - a - normal * b) * rstd).to(DX.dtype.element_ty), mask=mask)
        dw += dy * normal
    tl.store(PARTIALS + program * n + cols, dw, mask=mask)


@pytest.mark.parametrize(
    ("arch", "dtype", "n", "num_warps", "aligned"),
    on_architectures(("bf16", 512, 2, True), ("fp32", 333, 4, False)),
)
def test_persistent_backward(arch: str, dtype: str, n: int, num_warps: int, aligned: bool) -> None:
    """Programs loop over rows by the size of the grid, a hidden argument of the kernel."""
    types = dict.fromkeys(("DX", "DY", "X", "W"), f"*{dtype}")
    types |= {"PARTIALS": "*fp32", "rows": "i32", "n": "i32", "eps": "fp32"}
    hints = ("DX", "DY", "X", "W", "PARTIALS", "n") if aligned else ()
    kernel = compile_kernel(layernorm_backward, arch, types, {"BLOCK": 512}, hints, num_warps)
    x, dy = random(7, n, dtype=dtype), random(7, n, dtype=dtype, seed=1)
    w = random(n, dtype=dtype, seed=2)
    dx, partials = untouched(7, n, dtype=dtype), untouched(3, n)
    kernel.run((3,), dx, partials, dy, x, w, 7, n, 1e-5)
    centred = wide(x) - wide(x).mean(1, keepdims=True)
    rstd = 1 / np.sqrt((centred**2).mean(1, keepdims=True) + float(np.float32(1e-5)))
    normal, scaled = centred * rstd, wide(dy) * wide(w)
    a, b = scaled.mean(1, keepdims=True), (scaled * normal).mean(1, keepdims=True)
    check(dx, (scaled - a - normal * b) * rstd, dtype, 32, rstd * (np.abs(scaled) + 1 + np.abs(normal)))
    terms = wide(dy) * normal
    check(partials, np.stack([terms[i::3].sum(0) for i in range(3)]), "fp32", 32, np.abs(terms).sum(0) + 1)


@triton.jit
def rope(Y, X, COS, SIN, HALF: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = row * 2 * HALF + tl.arange(0, 2 * HALF)
    half = row * HALF + tl.arange(0, HALF)
    even, odd = tl.split(tl.reshape(tl.load(X + at).to(tl.float32), (HALF, 2)))
    cos = tl.load(COS + half)
    sin = tl.load(SIN + half)
    turned = tl.join(even * cos - odd * sin, odd * cos + even * sin)
    tl.store(Y + at, tl.reshape(turned, (2 * HALF,)).to(Y.dtype.element_ty))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_by_reshape_split_and_join(arch: str, dtype: str) -> None:
    types = {"Y": f"*{dtype}", "X": f"*{dtype}", "COS": "*fp32", "SIN": "*fp32"}
    kernel = compile_kernel(rope, arch, types, {"HALF": 64}, ("Y", "X", "COS", "SIN"), num_warps=1)
    x, y = random(2, 64, 2, dtype=dtype), untouched(2, 64, 2, dtype=dtype)
    angle = random(2, 64, seed=1)
    cos, sin = np.cos(angle), np.sin(angle)
    kernel.run((2,), y, x, cos, sin)
    even, odd, c, s = wide(x[..., 0]), wide(x[..., 1]), wide(cos), wide(sin)
    exact = np.stack([even * c - odd * s, odd * c + even * s], -1)
    check(y, exact, dtype, 4, np.abs(wide(x)).sum(-1, keepdims=True))
