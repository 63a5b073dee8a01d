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
