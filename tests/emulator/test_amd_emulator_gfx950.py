"""What gfx950's instructions have of their own on the AMD emulator; its matrix instructions are among those of
test_amd_emulator_matrix.py."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.emulator.amd_emulator import EmulatorError
from tests.emulator.amd_emulator.single_step import bits, execute, new_wave, result
from tests.emulator.amd_emulator.wave import LANE, Wave

F32, U32 = np.float32, np.uint32
RANDOM = np.random.default_rng(3).integers(0, 1 << 32, (4, 64), dtype=np.uint32)


def run(*lines: str, **state: Any) -> Wave:
    return execute(*lines, arch="gfx950", **state)


def test_three_operand_bit_operations() -> None:
    """Bit i of the table is the result for the sources' bits 4 i2 + 2 i1 + i0, the first source being the highest."""
    a, b, c = RANDOM[:3]
    vectors = {1: a[None], 2: b[None], 3: c[None]}
    for table, expected in ((0x96, a ^ b ^ c), (0xE4, np.where(0, 0, (a & c) | (b & ~c))), (1, ~(a | b | c))):
        wave = run(
            f"v_bitop3_b32 v0, v1, v2, v3 bitop3:{table if table < 10 else hex(table)}", vectors=vectors
        )
        np.testing.assert_array_equal(result(wave), expected)
    wave = run("v_bitop3_b16 v4, v1, v2, v3 bitop3:0x96", vectors=vectors | {4: bits(0xABCD0000, U32)})
    np.testing.assert_array_equal(result(wave, register=4), 0xABCD0000 | (a ^ b ^ c) & 0xFFFF)


def test_rows_change_places() -> None:
    vectors = {1: bits(LANE, U32), 2: bits(LANE + 100, U32)}
    wave = run("v_permlane32_swap_b32_e32 v1, v2", vectors=vectors)
    np.testing.assert_array_equal(result(wave, register=1), [*range(32), *range(100, 132)])
    np.testing.assert_array_equal(result(wave, register=2), [*range(32, 64), *range(132, 164)])
    wave = run("v_permlane16_swap_b32_e32 v1, v2", vectors=vectors)
    rows = [*range(16), *range(100, 116), *range(32, 48), *range(132, 148)]
    np.testing.assert_array_equal(result(wave, register=1), rows)
    rows = [*range(16, 32), *range(116, 132), *range(48, 64), *range(148, 164)]
    np.testing.assert_array_equal(result(wave, register=2), rows)
    with pytest.raises(EmulatorError, match="inactive lanes"):
        run("v_permlane16_swap_b32_e32 v1, v2", vectors=vectors, lanes=1)


@pytest.mark.parametrize(("line", "dtype", "rows"), [("b16", np.uint16, 4), ("b8", np.uint8, 8)])
def test_transposing_reads(line: str, dtype: Any, rows: int) -> None:
    """Of a matrix of 16 columns in LDS, of 16-bit numbers or bytes: each 16 lanes read 4 or 8 rows, and get a column
    each."""
    matrix = RANDOM.reshape(-1)[:128].view(dtype).reshape(4 * rows, 16)
    line = f"ds_read_b64_tr_{line} v[2:3], v0 offset:16"
    wave = new_wave(local_bytes=512 + 16, arch="gfx950")
    pairs = matrix.view(np.uint32).reshape(64, 2).T  # lane L: 8 bytes at 8 L
    at = bits(8 * LANE, U32)
    run("ds_write_b64 v0, v[4:5] offset:16", wave=wave, vectors={0: at, 4: np.ascontiguousarray(pairs)})
    wave.group.local.barrier()
    run(line, wave=wave, vectors={0: at})
    got = np.ascontiguousarray(wave.vectors[2:4].T).view(dtype)
    for lane in range(64):
        group, column = divmod(lane, 16)
        assert list(got[lane]) == [matrix[rows * group + row, column] for row in range(rows)]
    with pytest.raises(EmulatorError, match="inactive lanes"):
        run(line, wave=wave, lanes=1)


def test_maximum_of_nan_is_nan() -> None:
    nan = np.float32("nan")
    for first, second, third in ((nan, 1, 2), (1, nan, 2), (1, 2, nan)):
        vectors = {1: bits(first, F32), 2: bits(second, F32), 3: bits(third, F32)}
        for op in ("maximum3", "minimum3"):
            assert np.isnan(result(run(f"v_{op}_f32 v12, v1, v2, v3", vectors=vectors), F32, 12)).all()
    vectors = {1: bits(3.0, F32), 2: bits(-5.0, F32), 3: bits(4.0, F32)}
    assert set(result(run("v_maximum3_f32 v12, v1, v2, v3", vectors=vectors), F32, 12)) == {4}
    assert set(result(run("v_minimum3_f32 v12, v1, v2, v3", vectors=vectors), F32, 12)) == {-5}


def floats(dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Every finite number of an 8-bit or 16-bit type, the ties between neighbours, and what lies beside those."""
    kind = np.uint8 if np.dtype(dtype).itemsize == 1 else np.uint16
    every = np.arange(1 << 8 * np.dtype(dtype).itemsize, dtype=kind).view(dtype).astype(np.float64)
    finite = np.unique(every[np.isfinite(every)])
    ties = (finite[1:] + finite[:-1]) / 2
    with np.errstate(over="ignore"):
        values = np.concatenate((finite, ties)).astype(np.float32)
        values = np.concatenate(
            (values, np.nextafter(values, F32(np.inf)), np.nextafter(values, F32(-np.inf)))
        )
    wanted = np.clip(values, finite[0], finite[-1]).astype(dtype)
    return values, np.asarray(wanted)


def test_conversion_to_fp8() -> None:
    """Every number of OCP's e4m3, halfway between two, and beside that, against ml_dtypes; past 448 it saturates where
    the mode says so, as compiled kernels ask for."""
    values, wanted = floats(ml_dtypes.float8_e4m3fn)
    for first in range(0, len(values), 64):
        some = np.resize(values[first : first + 64], 64)
        vectors = {4: bits(0xAAAAAAAA, U32), 6: bits(some, F32), 5: bits(1.0, F32)}
        wave = new_wave(arch="gfx950")
        wave.saturates = True
        run("v_cvt_scalef32_pk_fp8_f32 v4, v6, v5, 1.0", wave=wave, vectors=vectors)
        codes = np.resize(wanted[first : first + 64].view(np.uint8), 64).astype(U32)
        np.testing.assert_array_equal(result(wave, register=4), codes | 0x38 << 8 | 0xAAAA0000)
    wave = run(
        "v_cvt_scalef32_pk_fp8_f32 v4, v7, v3, 1.0 op_sel:[0,0,0,1]",
        vectors={4: bits(0xAAAA, U32), 7: bits(449.0, F32), 3: bits(1e9, F32)},
    )
    # 448, and NaN: the mode does not saturate.
    assert set(result(wave, register=4)) == {0x7F7E << 16 | 0xAAAA}
    with pytest.raises(EmulatorError, match=r"a scale of 2\.0"):
        run("v_cvt_scalef32_pk_fp8_f32 v4, v7, v3, 2.0", vectors={7: bits(1.0, F32), 3: bits(1.0, F32)})


@pytest.mark.parametrize(("name", "dtype"), [("bf16", ml_dtypes.bfloat16), ("f16", np.float16)])
def test_conversion_from_fp8(name: str, dtype: Any) -> None:
    """Every code, in either half of the register, against ml_dtypes."""
    codes = np.arange(256, dtype=np.uint8)
    wanted = codes.view(ml_dtypes.float8_e4m3fn).astype(F32).reshape(64, 4)
    words = codes.view(U32)
    for half in range(2):
        line = f"v_cvt_scalef32_pk_{name}_fp8 v4, v6, 1.0" + " op_sel:[1,0,0]" * half
        got = np.ascontiguousarray(result(run(line, vectors={6: words[None]}), register=4))
        got = got.view(dtype).astype(F32).reshape(64, 2)
        np.testing.assert_array_equal(got, wanted[:, 2 * half : 2 * half + 2])
        numbers = ~np.isnan(got)
        assert np.array_equal(
            np.signbit(got)[numbers], np.signbit(wanted[:, 2 * half : 2 * half + 2])[numbers]
        )
    with pytest.raises(EmulatorError, match=r"a scale of 2\.0"):
        run(f"v_cvt_scalef32_pk_{name}_fp8 v4, v6, 2.0", vectors={6: words[None]})


def test_conversions_to_16_bits() -> None:
    specials = np.array(
        [0.0, -0.0, np.inf, -np.inf, 1e-45, 65519.0, 65520.0, 3.4e38, 1 + 2**-9, 1 + 3 * 2**-9], F32
    )
    values = np.resize(np.concatenate((specials, RANDOM[0].view(F32)[np.isfinite(RANDOM[0].view(F32))])), 64)
    vectors = {2: bits(values, F32), 3: bits(-values, F32)}
    for op, dtype in (("bf16", ml_dtypes.bfloat16), ("f16", np.float16)):
        got = result(run(f"v_cvt_pk_{op}_f32 v1, v2, v3", vectors=vectors), register=1)
        with np.errstate(over="ignore"):
            wanted = [x.astype(dtype).view(np.uint16).astype(U32) for x in (values, -values)]
        np.testing.assert_array_equal(got, wanted[0] | wanted[1] << 16)
    nan = run("v_cvt_pk_bf16_f32 v1, v2, v3", vectors={2: bits(0x7F800001, U32), 3: bits(0xFFFFFFFF, U32)})
    halves = np.ascontiguousarray(result(nan, register=1)).view(ml_dtypes.bfloat16)
    assert np.isnan(halves.astype(F32)).all()
