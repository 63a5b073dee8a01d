"""Elementwise and matrix kernels as Triton compiles them, run on the AMD emulator, against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import triton
import triton.language as tl

from tests.emulator.amd_emulator.architecture import architecture
from tests.emulator.amd_emulator.comparison import DTYPES, UNIT_ROUNDOFF, check, random, untouched, wide
from tests.emulator.amd_emulator.triton_kernel import compile_kernel
from tests.emulator.emulated_cases import on_architectures

ARCHS = on_architectures((), quick=False)


@triton.jit
def activations(Y, X, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    x = tl.load(X + at, mask=mask, other=0.0)
    positive = tl.abs(x) + 0.5
    tl.store(Y + at, x * tl.sigmoid(x), mask=mask)
    tl.store(Y + n + at, 0.5 * x * (1 + tl.erf(x * 0.7071067811865476)), mask=mask)
    tl.store(Y + 2 * n + at, tl.log(positive), mask=mask)
    tl.store(Y + 3 * n + at, tl.sqrt(positive), mask=mask)
    tl.store(Y + 4 * n + at, tl.cos(x * 3) + tl.sin(x), mask=mask)
    tl.store(Y + 5 * n + at, x / positive, mask=mask)
    tl.store(Y + 6 * n + at, tl.floor(x * 3) + tl.ceil(x), mask=mask)
    tl.store(Y + 7 * n + at, tl.extra.libdevice.tanh(x), mask=mask)


@pytest.mark.parametrize("arch", on_architectures(()))
def test_elementary_functions(arch: str) -> None:
    types = {"Y": "*fp32", "X": "*fp32", "n": "i32"}
    kernel = compile_kernel(activations, arch, types, {"BLOCK": 256}, num_warps=2)
    n = 500
    x, y = random(n, scale=3), untouched(8, n)
    kernel.run((2,), y, x, n)
    w = wide(x)
    positive = np.abs(w) + 0.5
    erf = np.vectorize(math.erf)
    check(y[0], w / (1 + np.exp(-w)), "fp32", 8 + 4 * np.abs(w).max())
    check(y[1], 0.5 * w * (1 + erf(w / np.sqrt(2))), "fp32", 8, np.abs(w))
    check(y[2], np.log(positive), "fp32", 8, 1)
    check(y[3], np.sqrt(positive), "fp32", 2)
    check(y[4], np.cos(3 * w) + np.sin(w), "fp32", 4 * np.abs(w).max(), 2)
    check(y[5], w / positive, "fp32", 2)
    third = wide(x * np.float32(3))
    check(y[6], np.floor(third) + np.ceil(w), "fp32", 0)
    check(y[7], np.tanh(w), "fp32", 8)


@triton.jit
def cast(Y, X, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + at, tl.load(X + at, mask=at < n).to(Y.dtype.element_ty), mask=at < n)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("source", "target"), [("fp32", "bf16"), ("fp32", "fp16"), ("bf16", "fp32"), ("fp16", "fp32")]
)
def test_casts_are_exact(arch: str, source: str, target: str) -> None:
    """Every half or bfloat16; floats at ties, among denormals, at the ends."""
    kernel = compile_kernel(cast, arch, {"Y": f"*{target}", "X": f"*{source}", "n": "i32"}, {"BLOCK": 4096})
    if source == "fp32":
        bits = (
            np.arange(0, 1 << 16, 7, dtype=np.uint16).view(DTYPES[target]).astype(np.float32).view(np.uint32)
        )
        # Half a unit in the last place, unless denormal.
        half = np.uint32(1 << (15 if target == "bf16" else 12))
        x = np.concatenate([bits, bits + half, bits + half - 1, bits + half + 1]).view(np.float32)
        x = x[~np.isnan(x)]
    else:
        x = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[source])
    y = untouched(x.size, dtype=target)
    kernel.run((-(-x.size // 4096),), y, x, x.size)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(wide(y), wide(x.astype(DTYPES[target])))


@triton.jit
def integers(Y, X, n, d, e, BLOCK: tl.constexpr):
    at = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    mask = at < n
    x = tl.load(X + at, mask=mask, other=0)
    tl.store(Y + at, x // d + x % 7 + (x.to(tl.int64) * e) // (at + 3) + (x >> 3), mask=mask)


@pytest.mark.parametrize("arch", ARCHS)
def test_integer_division(arch: str) -> None:
    types = {"Y": "*i64", "X": "*i32", "n": "i32", "d": "i32", "e": "i64"}
    kernel = compile_kernel(integers, arch, types, {"BLOCK": 128}, num_warps=1)
    x = np.random.default_rng(0).integers(-(1 << 31), 1 << 31, 200).astype(np.int32)
    y, d, e = np.zeros(200, np.int64), -1237, 123456789012
    kernel.run((2,), y, x, 200, d, e)

    def divide(a: int, b: int) -> int:
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)  # C: towards zero

    exact = []
    for i, v in enumerate(x.tolist()):
        product = (v * e + (1 << 63)) % (1 << 64) - (1 << 63)
        exact.append(divide(v, d) + v - 7 * divide(v, 7) + divide(product, i + 3) + (v >> 3))
    np.testing.assert_array_equal(y, np.array(exact))


@triton.jit
def doubles(Y, X, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < n, other=1.0)
    tl.store(Y + at, x / 3.0, mask=at < n)
    tl.store(Y + n + at, tl.sqrt(tl.abs(x)), mask=at < n)


@pytest.mark.parametrize("arch", ARCHS)
def test_doubles_are_correctly_rounded(arch: str) -> None:
    kernel = compile_kernel(
        doubles, arch, {"Y": "*fp64", "X": "*fp64", "n": "i32"}, {"BLOCK": 128}, num_warps=1
    )
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal(100) * 10.0 ** rng.integers(-300, 300, 100), np.zeros((2, 100))
    kernel.run((1,), y, x, 100)
    np.testing.assert_array_equal(y, [x / 3.0, np.sqrt(np.abs(x))])


@triton.jit
def scan_and_argmax(Y, INDEX, X, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(X + row * n + cols, mask=cols < n, other=-float("inf"))
    tl.store(INDEX + row, tl.argmax(x, 0))
    tl.store(Y + row * n + cols, tl.cumsum(tl.where(cols < n, x, 0.0), 0), mask=cols < n)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("num_warps", [1, 4])
def test_scan_and_argmax(arch: str, num_warps: int) -> None:
    types = {"Y": "*fp32", "INDEX": "*i32", "X": "*fp32", "n": "i32"}
    kernel = compile_kernel(scan_and_argmax, arch, types, {"BLOCK": 512}, num_warps=num_warps)
    x, y, index = random(2, 400), untouched(2, 400), np.zeros(2, np.int32)
    kernel.run((2,), y, index, x, 400)
    check(y, wide(x).cumsum(1), "fp32", 16, np.abs(wide(x)).cumsum(1))
    np.testing.assert_array_equal(index, x.argmax(1))


@triton.jit
def atomics(SUMS, COUNTS, X, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    x = tl.load(X + at, mask=mask, other=0.0)
    tl.atomic_add(SUMS + at % 7, x, mask=mask)
    tl.atomic_add(SUMS + 7, tl.sum(x, 0))
    tl.atomic_add(COUNTS, 1)
    tl.atomic_max(COUNTS + 1 + tl.zeros_like(at), at, mask=mask)
    tl.atomic_cas(COUNTS + 2, 0, tl.program_id(0) + 5)


@pytest.mark.parametrize("arch", ARCHS)
def test_atomics(arch: str) -> None:
    types = {"SUMS": "*fp32", "COUNTS": "*i32", "X": "*fp32", "n": "i32"}
    kernel = compile_kernel(atomics, arch, types, {"BLOCK": 128}, num_warps=2)
    x, sums, counts = random(300), np.zeros(8, np.float32), np.zeros(3, np.int32)
    kernel.run((3,), sums, counts, x, 300)
    groups = [wide(x)[i::7] for i in range(7)] + [wide(x)]
    check(sums, np.array([g.sum() for g in groups]), "fp32", 300, np.array([np.abs(g).sum() for g in groups]))
    assert list(counts) == [3, 299, 5]


# ---- matrix products


@triton.jit
def matmul(
    C, A, B, m, n, k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for first in range(0, k, BK):
        depth = first + tl.arange(0, BK)
        a_mask = (rows < m)[:, None] & (depth < k)[None, :]
        b_mask = (depth < k)[:, None] & (cols < n)[None, :]
        a = tl.load(A + rows[:, None] * k + depth[None, :], mask=a_mask, other=0.0)
        b = tl.load(B + depth[:, None] * n + cols[None, :], mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    mask = (rows < m)[:, None] & (cols < n)[None, :]
    tl.store(C + rows[:, None] * n + cols[None, :], acc.to(C.dtype.element_ty), mask=mask)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("dtype", "tile", "num_warps", "instruction"),
    [
        ("fp16", (64, 64, 32), 4, 16),
        ("bf16", (64, 32, 32), 2, 32),
        ("fp32", (32, 32, 16), 1, 0),
        ("bf16", (16, 16, 64), 1, 0),
    ],
)
def test_matmul(arch: str, dtype: str, tile: tuple[int, int, int], num_warps: int, instruction: int) -> None:
    run_matmul(arch, dtype, tile, num_warps, instruction, "ieee", terms=8)


def test_matmul_in_reduced_precision() -> None:
    """What Triton takes on gfx942 for fp32 unless told otherwise: operands of 10 mantissa bits."""
    run_matmul("gfx942", "fp32", (32, 32, 16), 1, 0, "tf32", terms=2 * 2.0**14)
    with pytest.raises(AssertionError, match="of the limit"):
        run_matmul("gfx942", "fp32", (32, 32, 16), 1, 0, "tf32", terms=8)


def run_matmul(
    arch: str,
    dtype: str,
    tile: tuple[int, int, int],
    num_warps: int,
    instruction: int,
    precision: str,
    terms: float,
) -> None:
    types = dict.fromkeys("CAB", f"*{dtype}") | dict.fromkeys("mnk", "i32")
    constants = dict(zip(("BM", "BN", "BK"), tile, strict=True)) | {"PRECISION": precision}
    m, n, k = tile[0] + 16, tile[1], 80
    aligned = ("C", "A", "B", "n", "k")
    if architecture(arch).lanes == 32:  # as many work-items; there is one matrix instruction
        num_warps, instruction = 2 * num_warps, 0
    kernel = compile_kernel(
        matmul, arch, types, constants, aligned, num_warps, matrix_instr_nonkdim=instruction
    )
    a, b, c = random(m, k, dtype=dtype), random(k, n, dtype=dtype, seed=1), untouched(m, n, dtype=dtype)
    kernel.run((2, 1), c, a, b, m, n, k)
    check(c, wide(a) @ wide(b), dtype, terms, np.abs(wide(a)) @ np.abs(wide(b)))


@triton.jit
def attention(
    OUT, LSE, Q, K, V, scale, length,
    CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    base = head.to(tl.int64) * length * D
    rows = block * BM + tl.arange(0, BM)
    dim = tl.arange(0, D)
    at = base + rows[:, None] * D + dim[None, :]
    q = tl.load(Q + at, mask=rows[:, None] < length, other=0.0)
    m = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    end = tl.minimum((block + 1) * BM, length) if CAUSAL else length
    for first in range(0, end, BN):
        cols = first + tl.arange(0, BN)
        keys = cols[None, :] < length
        k = tl.load(K + base + cols[None, :] * D + dim[:, None], mask=keys, other=0.0)
        s = tl.dot(q, k) * (scale * 1.4426950408889634)
        ok = keys & (rows[:, None] >= cols[None, :]) if CAUSAL else keys
        s = tl.where(ok, s, -1e30)
        new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        shrink = tl.exp2(m - new)
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(V + base + cols[:, None] * D + dim[None, :], mask=cols[:, None] < length, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        m = new
    tl.store(OUT + at, (acc / total[:, None]).to(OUT.dtype.element_ty), mask=rows[:, None] < length)
    tl.store(LSE + head * length + rows, m * 0.6931471805599453 + tl.log(total), mask=rows < length)


@pytest.mark.parametrize(("arch", "dtype", "causal"), on_architectures(("fp16", True), ("bf16", False)))
def test_attention(arch: str, dtype: str, causal: bool) -> None:
    types = dict.fromkeys(("OUT", "Q", "K", "V"), f"*{dtype}") | {
        "LSE": "*fp32",
        "scale": "fp32",
        "length": "i32",
    }
    constants = {"CAUSAL": causal, "BM": 64, "BN": 32, "D": 64}
    kernel = compile_kernel(attention, arch, types, constants, ("OUT", "Q", "K", "V"), num_warps=4)
    length = 83
    q, k, v = (random(2, length, 64, dtype=dtype, seed=seed) for seed in range(3))
    o, lse = untouched(2, length, 64, dtype=dtype), untouched(2, length)
    kernel.run((2, 2), o, lse, q, k, v, 0.125, length)
    scores = np.einsum("htd,hsd->hts", wide(q), wide(k)) * 0.125
    if causal:
        scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
    e = np.exp(scores)
    p = e / e.sum(-1, keepdims=True)
    check(lse, np.log(e.sum(-1)), "fp32", 16, np.abs(scores[np.isfinite(scores)]).max() + np.log(length))
    # p is rounded to the dtype too
    rounding = UNIT_ROUNDOFF[dtype] * 2.0**24
    check(
        o,
        np.einsum("hts,hsd->htd", p, wide(v)),
        dtype,
        64 + rounding,
        np.einsum("hts,hsd->htd", p, np.abs(wide(v))),
    )
