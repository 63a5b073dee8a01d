"""Matrix instructions of the AMD emulator: where each lane's values go, and the arithmetic, against plain loops."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.emulator.amd_emulator import EmulatorError
from tests.emulator.amd_emulator.single_step import bits, execute
from tests.emulator.amd_emulator.wave import FIRST_ACCUMULATOR

BF16 = ml_dtypes.bfloat16
# (name, arch, size, K, dtype of A and B, dtype of the result)
SHAPES = [
    ("v_mfma_f32_16x16x16f16", "gfx90a", 16, 16, np.float16, np.float32),
    ("v_mfma_f32_32x32x8f16", "gfx90a", 32, 8, np.float16, np.float32),
    ("v_mfma_f32_16x16x16bf16_1k", "gfx90a", 16, 16, BF16, np.float32),
    ("v_mfma_f32_32x32x8bf16_1k", "gfx90a", 32, 8, BF16, np.float32),
    ("v_mfma_f32_16x16x4f32", "gfx90a", 16, 4, np.float32, np.float32),
    ("v_mfma_f32_32x32x2f32", "gfx90a", 32, 2, np.float32, np.float32),
    ("v_mfma_i32_16x16x16i8", "gfx90a", 16, 16, np.int8, np.int32),
    ("v_mfma_f32_16x16x16_f16", "gfx942", 16, 16, np.float16, np.float32),
    ("v_mfma_f32_32x32x8_bf16", "gfx942", 32, 8, BF16, np.float32),
    ("v_mfma_f32_16x16x8_xf32", "gfx942", 16, 8, np.float32, np.float32),
    ("v_mfma_i32_32x32x16_i8", "gfx942", 32, 16, np.int8, np.int32),
    ("v_mfma_f32_16x16x32_f16", "gfx950", 16, 32, np.float16, np.float32),
    ("v_mfma_f32_16x16x32_bf16", "gfx950", 16, 32, BF16, np.float32),
    ("v_mfma_f32_32x32x16_f16", "gfx950", 32, 16, np.float16, np.float32),
    ("v_mfma_f32_32x32x16_bf16", "gfx950", 32, 16, BF16, np.float32),
]


def operand(matrix: np.ndarray) -> np.ndarray:
    """(size, K) in registers: lane L holds row L % size, and its share of K in order of L // size."""
    size, depth = matrix.shape
    share = depth * size // 64
    rows = np.stack([matrix[lane % size, lane // size * share :][:share] for lane in range(64)])
    return np.ascontiguousarray(rows).view(np.uint32).T


def place(size: int, register: int, lane: int) -> tuple[int, int]:
    """Row and column of an element of the result, as the manual's tables have them."""
    if size == 16:
        return 4 * (lane // 16) + register, lane % 16
    return 8 * (register // 4) + 4 * (lane // 32) + register % 4, lane % 32


def registers(first: int, count: int, file: str = "v") -> str:
    return f"{file}[{first}:{first + count - 1}]" if count > 1 else f"{file}{first}"


@pytest.mark.parametrize(
    ("name", "arch", "size", "depth", "dtype", "out"), SHAPES, ids=[s[0] for s in SHAPES]
)
def test_layout_and_product(name: str, arch: str, size: int, depth: int, dtype: Any, out: Any) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(-8, 8, (2, size, depth)).astype(dtype)  # b is transposed: (N, K)
    c = rng.integers(-100, 100, (size, size)).astype(out)
    outputs = size * size // 64
    addend = np.array([[c[place(size, r, lane)] for lane in range(64)] for r in range(outputs)], out)
    vectors = {0: operand(a), 8: operand(b), 16: addend.view(np.uint32)}
    ab = [registers(first, len(vectors[first])) for first in (0, 8)]
    lines = [
        f"{name} {registers(16, outputs)}, {ab[0]}, {ab[1]}, {registers(16, outputs)}",
        f"{name} {registers(0, outputs, 'a')}, {ab[0]}, {ab[1]}, 0",
    ]
    wave = execute(*lines, arch=arch, vectors=vectors)
    product = [
        [sum(int(a[i, k]) * int(b[j, k]) for k in range(depth)) for j in range(size)] for i in range(size)
    ]
    for register in range(outputs):
        for lane in range(64):
            i, j = place(size, register, lane)
            assert wave.vectors[16 + register].view(out)[lane] == product[i][j] + c[i, j]
            assert wave.vectors[FIRST_ACCUMULATOR + register].view(out)[lane] == product[i][j]


@pytest.mark.parametrize(("arch", "expected"), [("gfx90a", 0.0), ("gfx942", 2.0**-15 * 16)])
def test_denormals(arch: str, expected: float) -> None:
    """gfx90a reads f16 and bf16 denormals as zero, gfx942 keeps them."""
    name = "v_mfma_f32_16x16x16f16" if arch == "gfx90a" else "v_mfma_f32_16x16x16_f16"
    a, b = np.full((16, 16), 2.0**-15, np.float16), np.ones((16, 16), np.float16)
    vectors = {0: operand(a), 2: operand(b)}
    wave = execute(f"{name} v[4:7], v[0:1], v[2:3], 0", arch=arch, vectors=vectors)
    assert set(wave.vectors[4].view(np.float32)) == {np.float32(expected)}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("v_mfma_f32_4x4x4_16b_f16 v[0:3], v[4:5], v[6:7], 0", "unknown instruction: VOP3P"),
        ("v_mfma_f32_16x16x4_4b_f16 v[0:15], v[16:17], v[18:19], 0", "unknown instruction: VOP3P"),
        ("v_mfma_f32_16x16x16_f16 v[0:3], v[4:5], v[6:7], 0 cbsz:1", "modifier cbsz"),
        ("v_mfma_f32_16x16x32_fp8_fp8 v[0:3], v[4:5], v[6:7], 0", "unknown instruction: VOP3P"),
    ],
)
def test_what_is_not_implemented_is_refused(line: str, message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        execute(line)


def test_all_lanes_must_be_active() -> None:
    with pytest.raises(EmulatorError, match="inactive lanes"):
        execute("v_mfma_f32_16x16x16_f16 v[0:3], v[4:5], v[6:7], 0", vectors={4: bits(0, np.uint64)}, lanes=1)


# ---- WMMA: waves of 32, 16x16x16


def wmma_operand(matrix: np.ndarray, arch: str) -> np.ndarray:
    """(16, 16) in registers: lane L holds row L % 16, on RDNA 3 all of it, on RDNA 4 the half that is L / 16."""
    lanes = [
        matrix[lane % 16] if arch == "gfx1100" else matrix[lane % 16, lane // 16 * 8 :][:8]
        for lane in range(32)
    ]
    registers = np.ascontiguousarray(np.stack(lanes)).view(np.uint32).T
    return np.concatenate((registers, registers), axis=1)  # `execute` takes the lower half


def wmma_place(arch: str, register: int, lane: int) -> tuple[int, int]:
    """Row and column of an element of the result, as the manuals' tables have them."""
    if arch == "gfx1100":
        return 2 * register + lane // 16, lane % 16
    return register + 8 * (lane // 16), lane % 16


@pytest.mark.parametrize("arch", ["gfx1100", "gfx1201"])
@pytest.mark.parametrize("dtype", [np.float16, BF16], ids=["f16", "bf16"])
def test_wmma(arch: str, dtype: Any) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(-8, 8, (2, 16, 16)).astype(dtype)  # b is transposed: (N, K)
    c = rng.integers(-100, 100, (16, 16)).astype(np.float32)
    held = [[c[wmma_place(arch, r, lane % 32)] for lane in range(64)] for r in range(8)]
    vectors = {
        0: wmma_operand(a, arch),
        8: wmma_operand(b, arch),
        16: np.array(held, np.float32).view(np.uint32),
    }
    last = len(vectors[0]) - 1
    line = f"v_wmma_f32_16x16x16_{'f16' if dtype is np.float16 else 'bf16'} v[24:31], v[0:{last}], v[8:{8 + last}]"
    wave = execute(f"{line}, v[16:23]", arch=arch, vectors=vectors)
    for register in range(8):
        for lane in range(32):
            i, j = wmma_place(arch, register, lane)
            product = sum(int(a[i, k]) * int(b[j, k]) for k in range(16))
            assert wave.vectors[24 + register].view(np.float32)[lane] == product + c[i, j]


def test_wmma_wants_both_halves_of_a_wave_alike() -> None:
    """RDNA 3 reads each row of a matrix from two lanes: a layout that fills one of them alone is noticed."""
    vectors = {first: wmma_operand(np.ones((16, 16), np.float16), "gfx1100") for first in (0, 8)}
    line = "v_wmma_f32_16x16x16_f16 v[24:31], v[0:7], v[8:15], v[16:23]"
    vectors[16] = np.zeros((8, 64), np.uint32)
    execute(line, arch="gfx1100", vectors=vectors)
    vectors[8] = vectors[8].copy()
    vectors[8][3, 20] ^= np.uint32(1)
    with pytest.raises(EmulatorError, match="not that of the lower ones"):
        execute(line, arch="gfx1100", vectors=vectors)
    with pytest.raises(EmulatorError, match="inactive lanes"):
        execute(line, arch="gfx1100", vectors=vectors, lanes=0xFFFF)
