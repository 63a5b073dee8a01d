"""Vector instructions of the AMD emulator against the instruction set manual's definitions."""

from __future__ import annotations

import struct
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from tests.emulator.amd_emulator import EmulatorError
from tests.emulator.amd_emulator.arithmetic import OPERATIONS, SATURATING, fma_f16, fma_f32, fma_f64
from tests.emulator.amd_emulator.decode import decode
from tests.emulator.amd_emulator.encodings import assembled
from tests.emulator.amd_emulator.operand import DTYPES
from tests.emulator.amd_emulator.single_step import bits, execute, f16, f32, result
from tests.emulator.amd_emulator.vector import build
from tests.emulator.amd_emulator.wave import MASK32

F16, F32, F64, U32, I32, U64 = np.float16, np.float32, np.float64, np.uint32, np.int32, np.uint64
TOP = 0x80000000
RANDOM = np.random.default_rng(1).integers(0, 1 << 32, (4, 64), dtype=np.uint32)


@pytest.mark.parametrize(
    ("line", "sources", "expected"),
    [
        ("v_add_u32_e32 v0, v1, v2", (MASK32, 2), 1),
        ("v_sub_u32_e32 v0, v1, v2", (1, 2), MASK32),
        ("v_subrev_u32_e32 v0, v1, v2", (1, 2), 1),
        ("v_add_u32_e64 v0, v1, v2 clamp", (MASK32, 2), MASK32),
        ("v_sub_u32_e64 v0, v1, 1 clamp", (0, 0), 0),
        ("v_add3_u32 v0, v1, v2, v3", (TOP, TOP, 7), 7),
        ("v_mul_lo_u32 v0, v1, v2", (0x10001, 0x10001), 0x20001),
        ("v_mul_hi_u32 v0, v1, v2", (MASK32, MASK32), MASK32 - 1),
        ("v_mul_hi_i32 v0, v1, v2", (MASK32, 5), MASK32),
        ("v_mul_u32_u24_e32 v0, v1, v2", (0xFF000003, 5), 15),
        ("v_mul_i32_i24_e32 v0, v1, v2", (0x00FFFFFF, 5), -5 & MASK32),
        ("v_mad_u32_u24 v0, v1, v2, v3", (0xFF000003, 5, 1), 16),
        ("v_mad_i32_i24 v0, v1, v2, v3", (0x00FFFFFF, 5, 1), -4 & MASK32),
        ("v_lshlrev_b32_e32 v0, v1, v2", (33, 3), 6),
        ("v_lshrrev_b32_e32 v0, v1, v2", (31, TOP), 1),
        ("v_ashrrev_i32_e32 v0, v1, v2", (31, TOP), MASK32),
        ("v_lshl_add_u32 v0, v1, v2, v3", (3, 4, 5), 53),
        ("v_add_lshl_u32 v0, v1, v2, v3", (3, 4, 5), 224),
        ("v_lshl_or_b32 v0, v1, v2, v3", (3, 4, 5), 0x35),
        ("v_and_or_b32 v0, v1, v2, v3", (0b1100, 0b1010, 1), 0b1001),
        ("v_or3_b32 v0, v1, v2, v3", (1, 2, 4), 7),
        ("v_xad_u32 v0, v1, v2, v3", (0b1100, 0b1010, 1), 0b0111),
        ("v_not_b32_e32 v0, v1", (5,), ~5 & MASK32),
        ("v_bfe_u32 v0, v1, v2, v3", (0xABCDE, 4, 8), 0xCD),
        ("v_bfe_i32 v0, v1, v2, v3", (0xABCDE, 4, 8), 0xFFFFFFCD),
        ("v_bfe_i32 v0, v1, v2, v3", (0xABCDE, 4, 0), 0),
        ("v_bfe_i32 v0, v1, v2, v3", (TOP, 24, 16), 0xFFFFFF80),  # past the top there are copies of the sign
        ("v_bfi_b32 v0, v1, v2, v3", (0xFF00, 0xAAAA, 0x5555), 0xAA55),
        ("v_bfm_b32 v0, v1, v2", (3, 4), 0b1110000),
        ("v_bfrev_b32_e32 v0, v1", (0b1011,), 0b1101 << 28),
        ("v_ffbh_u32_e32 v0, v1", (1 << 20,), 11),
        ("v_ffbh_u32_e32 v0, v1", (0,), MASK32),
        ("v_ffbl_b32_e32 v0, v1", (0b101000,), 3),
        ("v_bcnt_u32_b32 v0, v1, v2", (0xF0F0, 3), 11),
        ("v_alignbit_b32 v0, v1, v2, v3", (0x1, TOP, 31), 3),
        ("v_alignbyte_b32 v0, v1, v2, v3", (0x11223344, 0x55667788, 1), 0x44556677),
        ("v_perm_b32 v0, v1, v2, v3", (0x33221100, 0x77665544, 0x07060504), 0x33221100),
        ("v_perm_b32 v0, v1, v2, v3", (0x33221100, 0x77665544, 0x0C000103), 0x00445577),
        ("v_perm_b32 v0, v1, v2, v3", (0x00008000, TOP, 0x0B0A0908), 0x00FFFF00),
        ("v_med3_i32 v0, v1, v2, v3", (MASK32, 5, 3), 3),
        ("v_max3_u32 v0, v1, v2, v3", (MASK32, 5, 3), MASK32),
        ("v_min_i32_e32 v0, v1, v2", (MASK32, 5), MASK32),
        ("v_add_u16_e32 v0, v1, v2", (0x1FFFF, 2), 1),
        ("v_lshlrev_b16_e32 v0, v1, v2", (17, 0xFFFF), 0xFFFE),
        ("v_ashrrev_i16_e32 v0, v1, v2", (4, 0x8000), 0xF800),
    ],
)
def test_integers(line: str, sources: tuple[int, ...], expected: int) -> None:
    wave = execute(line, vectors={1 + i: bits(source, U32) for i, source in enumerate(sources)})
    assert set(result(wave)) == {expected}


@pytest.mark.parametrize(
    ("line", "sources", "expected"),
    [
        ("v_add_f32_e32 v0, v1, v2", (1.5, 2.25), 3.75),
        ("v_sub_f32_e32 v0, v1, v2", (1.5, 2.25), -0.75),
        ("v_subrev_f32_e32 v0, v1, v2", (1.5, 2.25), 0.75),
        ("v_mul_f32_e64 v0, -v1, |v2|", (1.5, -2.0), -3.0),
        ("v_add_f32_e64 v0, -|v1|, v2", (1.5, 2.0), 0.5),
        ("v_add_f32_e64 v0, v1, v2 clamp", (1.5, 2.0), 1.0),
        ("v_mul_f32_e64 v0, v1, v2 clamp", (np.inf, 0.0), 0.0),  # NaN clamps to zero
        ("v_max_f32_e32 v0, v1, v2", (np.nan, -2.0), -2.0),
        ("v_min_f32_e32 v0, v1, v2", (3.0, np.nan), 3.0),
        ("v_max3_f32 v0, v1, v2, v3", (1.0, 3.0, 2.0), 3.0),
        ("v_med3_f32 v0, v1, v2, v3", (1.0, 3.0, 2.0), 2.0),
        ("v_fma_f32 v0, v1, v2, v3", (1 + 2.0**-23, 1 - 2.0**-23, -1.0), -(2.0**-46)),
        ("v_fmac_f32_e32 v0, v1, v2", (3.0, 4.0), 12.5),  # v0 starts at 0.5
        ("v_fmaak_f32 v0, v1, v2, 0x40000000", (3.0, 4.0), 14.0),
        ("v_fmamk_f32 v0, v1, 0x40000000, v2", (3.0, 4.0), 10.0),
        ("v_rndne_f32_e32 v0, v1", (2.5,), 2.0),
        ("v_trunc_f32_e32 v0, v1", (-2.5,), -2.0),
        ("v_floor_f32_e32 v0, v1", (-2.5,), -3.0),
        ("v_ceil_f32_e32 v0, v1", (-2.5,), -2.0),
        ("v_fract_f32_e32 v0, v1", (-2.25,), 0.75),
        ("v_fract_f32_e32 v0, v1", (-(2.0**-40),), 1 - 2.0**-24),
        ("v_rcp_f32_e32 v0, v1", (-8.0,), -0.125),
        ("v_rcp_f32_e32 v0, v1", (2.0**127,), 0.0),  # 2^-127 is a denormal, and flushed
        ("v_rsq_f32_e32 v0, v1", (16.0,), 0.25),
        ("v_sqrt_f32_e32 v0, v1", (2.0**-130,), 0.0),
        ("v_exp_f32_e32 v0, v1", (-3.0,), 0.125),
        ("v_exp_f32_e32 v0, v1", (-127.0,), 0.0),
        ("v_log_f32_e32 v0, v1", (32.0,), 5.0),
        ("v_log_f32_e32 v0, v1", (2.0**-130,), -np.inf),
        ("v_sin_f32_e32 v0, v1", (0.25,), 1.0),
        ("v_cos_f32_e32 v0, v1", (0.5,), -1.0),
        ("v_sin_f32_e32 v0, v1", (300.25,), 0.0),
        ("v_frexp_mant_f32_e32 v0, v1", (12.0,), 0.75),
        ("v_mul_f32_e32 v0, 0.15915494, v1", (2.0,), 0.31830987334251404),
        ("v_add_f32_e32 v0, 1, v1", (0.0,), 2.0**-149),  # an integer constant is a bit pattern
    ],
)
def test_floats(line: str, sources: tuple[float, ...], expected: float) -> None:
    vectors = {1 + i: bits(source, F32) for i, source in enumerate(sources)}
    wave = execute(line, vectors={0: bits(0.5, F32), **vectors})
    assert set(result(wave)) == {f32(expected)}


def test_multiply_add_without_fusion() -> None:
    vectors = {0: bits(-1, F32), 1: bits(1 + 2.0**-23, F32), 2: bits(1 - 2.0**-23, F32)}
    wave = execute(
        "v_mac_f32_e32 v0, v1, v2", "v_madmk_f32 v3, v1, 0x80000001, v0", arch="gfx90a", vectors=vectors
    )
    assert set(result(wave, F32)) == {0.0}
    assert set(result(wave, F32, 3)) == {0.0}  # the denormal constant is flushed


def test_doubles() -> None:
    rng = np.random.default_rng(2)
    a, b, c = rng.standard_normal((3, 64))
    vectors = {2: bits(a, F64), 4: bits(b, F64), 6: bits(c, F64)}
    lines = ("v_fma_f64 v[8:9], v[2:3], v[4:5], v[6:7]", "v_add_f64 v[10:11], v[2:3], -v[4:5]")
    wave = execute(
        *lines, "v_mul_f64 v[12:13], v[2:3], 4.0", "v_cvt_f32_f64_e32 v14, 0x40080000", vectors=vectors
    )
    exact = [float(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in zip(a, b, c, strict=True)]
    np.testing.assert_array_equal(result(wave, F64, 8), exact)
    np.testing.assert_array_equal(result(wave, F64, 10), a - b)
    np.testing.assert_array_equal(result(wave, F64, 12), 4 * a)
    assert set(result(wave, F32, 14)) == {3.0}  # a literal is the high half


def rounded(value: Fraction, dtype: Any) -> float:
    """The nearest value of a dtype, ties to even, computed on integers."""
    if value == 0:
        return 0.0
    precision = np.finfo(dtype).nmant + 1
    exponent = 0
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, int(np.finfo(dtype).minexp)) - precision + 1)
    return float(round(value / unit) * unit)  # Python rounds ties of fractions to even


@pytest.mark.parametrize(
    ("function", "dtype", "spread"), [(fma_f16, F16, 4), (fma_f32, F32, 30), (fma_f64, F64, 200)]
)
def test_multiply_add_rounds_once(function: Any, dtype: Any, spread: int) -> None:
    """Random operands, and sums made to lie next to a tie, where rounding twice goes wrong."""
    rng = np.random.default_rng(3)
    scales = 2.0 ** rng.integers(-spread, spread, (3, 256))
    a, b, c = (rng.standard_normal((3, 256)) * scales).astype(dtype)
    step = 2.0 ** -(np.finfo(dtype).nmant + 1)
    a[:64], b[:64] = 1 + 2 * step, step  # c + a * b is a hair above a tie
    c[:64] = (1 + rng.integers(0, 100, 64) * 2 * step).astype(dtype)
    a[64:128], b[64:128], c[64:128] = 1 - step, step, c[:64]  # and below
    got = function(a, b, c)
    assert got.dtype == dtype
    terms = zip(a, b, c, strict=True)
    exact = [
        rounded(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)), dtype) for x, y, z in terms
    ]
    np.testing.assert_array_equal(got.astype(F64), exact)


def test_permute_with_one_selector_for_all_lanes() -> None:
    vectors = {1: bits(0x33221100, U32), 2: bits(0x8000, U32)}
    wave = execute("v_perm_b32 v0, v1, v2, s8", vectors=vectors, scalars={8: 0x0D0C0807})
    assert set(result(wave)) == {0xFF00FF33}


def test_table_returns_what_it_declares() -> None:
    """For arrays and for scalars: a wrong dtype would be stored as other bits."""
    assert OPERATIONS
    with np.errstate(all="ignore"):
        for name, operation in OPERATIONS.items():
            lanes = [np.resize(RANDOM[i].view(DTYPES[kind]), 64) for i, kind in enumerate(operation.sources)]
            for sources in (lanes, [lane[0] for lane in lanes]):
                assert operation.function(*sources).dtype == DTYPES[operation.result], name
        assert {f(np.uint16(1), np.uint16(2)).dtype for n, f in SATURATING.items() if n.endswith("u16")} == {
            np.dtype(np.uint16)
        }


def test_half_to_float_for_every_half() -> None:
    for start in range(0, 1 << 16, 64 * 64):
        for first in range(start, start + 64 * 64, 64 * 16):
            halves = np.arange(first, first + 64, dtype=np.uint32)
            got = result(execute("v_cvt_f32_f16_e32 v0, v1", vectors={1: halves[None]}), F32)
            exact = [struct.unpack("<e", struct.pack("<H", half))[0] for half in halves]
            np.testing.assert_array_equal(got, np.array(exact, F32))


def test_float_to_half_rounds_to_even_and_keeps_denormals() -> None:
    rng = np.random.default_rng(4)
    values = np.concatenate([
        (1 + rng.integers(0, 2048, 16) * 2.0**-11) * 2.0 ** rng.integers(-14, 15, 16),  # every other is a tie
        rng.integers(0, 4096, 16) * 2.0**-25,  # denormals and their ties
        rng.standard_normal(28) * 100,
        [65519.99, -65520.0, 2.0**-26, np.inf],
    ]).astype(F32)  # fmt: skip
    got = result(execute("v_cvt_f16_f32_e32 v0, v1", vectors={1: bits(values, F32)}))
    exact = [f16(rounded(Fraction(float(v)), F16)) if abs(v) < 65520 else 0 for v in values[:-1]]
    np.testing.assert_array_equal(got[:61], exact[:61])
    assert list(got[61:]) == [f16(-np.inf), 0, f16(np.inf)]


def test_rounding_towards_zero_into_two_halves() -> None:
    vectors = {1: bits(1 + 2.0**-11 + 2.0**-20, F32), 2: bits(-1e9, F32)}
    wave = execute("v_cvt_pkrtz_f16_f32 v0, v1, v2", vectors=vectors)
    assert set(result(wave)) == {f16(1.0) | f16(-65504.0) << 16}


@pytest.mark.parametrize(
    ("line", "value", "expected"),
    [
        ("v_cvt_i32_f32_e32 v0, v1", -2.9, -2 & MASK32),
        ("v_cvt_i32_f32_e32 v0, v1", 1e20, TOP - 1),
        ("v_cvt_i32_f32_e32 v0, v1", np.nan, 0),
        ("v_cvt_u32_f32_e32 v0, v1", -5.0, 0),
        ("v_cvt_u32_f32_e32 v0, v1", 4e9, 4000000000),
        ("v_cvt_u32_f32_e32 v0, v1", np.inf, MASK32),
        ("v_frexp_exp_i32_f32_e32 v0, v1", 12.0, 4),
        ("v_frexp_exp_i32_f32_e32 v0, v1", np.inf, 0),
    ],
)
def test_float_to_integer(line: str, value: float, expected: int) -> None:
    assert set(result(execute(line, vectors={1: bits(value, F32)}))) == {expected}


def test_integer_to_float() -> None:
    vectors = {1: RANDOM[:1], 2: bits(0x00C30000, U32)}
    lines = ("v_cvt_f32_i32_e32 v3, v1", "v_cvt_f32_u32_e32 v4, v1", "v_cvt_f32_ubyte2_e32 v5, v2")
    wave = execute(*lines, "v_cvt_f64_i32_e32 v[6:7], v1", vectors=vectors)
    np.testing.assert_array_equal(
        result(wave, F32, 3), [rounded(Fraction(int(x)), F32) for x in RANDOM[0].view(I32)]
    )
    np.testing.assert_array_equal(result(wave, F32, 4), [rounded(Fraction(int(x)), F32) for x in RANDOM[0]])
    assert set(result(wave, F32, 5)) == {0xC3}
    np.testing.assert_array_equal(result(wave, F64, 6), RANDOM[0].view(I32))


# ---- division

DIVISION = (
    "v_div_scale_f32 v3, s[8:9], v2, v2, v1",
    "v_div_scale_f32 v4, vcc, v1, v2, v1",
    "v_rcp_f32_e32 v5, v3",
    "v_fma_f32 v6, -v3, v5, 1.0",
    "v_fmac_f32_e32 v5, v6, v5",
    "v_mul_f32_e32 v6, v4, v5",
    "v_fma_f32 v7, -v3, v6, v4",
    "v_fmac_f32_e32 v6, v7, v5",
    "v_fma_f32 v3, -v3, v6, v4",
    "v_div_fmas_f32 v3, v3, v5, v6",
    "v_div_fixup_f32 v0, v3, v2, v1",
)


def test_division_is_correctly_rounded() -> None:
    """LLVM's sequence, which only works if the scaling, the fused multiply-adds and the repair are all right."""
    rng = np.random.default_rng(6)
    a, b = (rng.standard_normal((2, 512)) * 2.0 ** rng.integers(-125, 125, (2, 512))).astype(F32)
    special = np.array([0.0, -0.0, 1.0, np.inf, -np.inf, np.nan, 2.0**-149, 2.0**127], F32)
    a = np.concatenate([a, np.repeat(special, 8)])
    b = np.concatenate([b, np.tile(special, 8)])
    with np.errstate(all="ignore"):
        exact = a / b
    for start in range(0, a.size, 64):
        part = slice(start, start + 64)
        wave = execute(*DIVISION, vectors={1: bits(a[part], F32), 2: bits(b[part], F32)})
        got, wanted = result(wave, F32), exact[part]
        np.testing.assert_array_equal(got, wanted)
        np.testing.assert_array_equal(
            np.signbit(got)[~np.isnan(wanted)], np.signbit(wanted)[~np.isnan(wanted)]
        )


# ---- packed


def test_packed_floats() -> None:
    vectors = {
        2: bits(2.0, F32),
        3: bits(3.0, F32),
        4: bits(10.0, F32),
        5: bits(20.0, F32),
        6: bits(1.0, F32),
    }
    vectors[7] = bits(-1.0, F32)
    wave = execute("v_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7]", vectors=vectors)
    assert (set(result(wave, F32, 0)), set(result(wave, F32, 1))) == ({21.0}, {59.0})
    wave = execute("v_pk_mul_f32 v[0:1], v[2:3], v[4:5] op_sel:[1,0] op_sel_hi:[0,1]", vectors=vectors)
    assert (set(result(wave, F32, 0)), set(result(wave, F32, 1))) == ({30.0}, {40.0})
    wave = execute("v_pk_add_f32 v[2:3], v[2:3], v[4:5] neg_lo:[1,0] neg_hi:[0,1]", vectors=vectors)
    assert (set(result(wave, F32, 2)), set(result(wave, F32, 3))) == ({8.0}, {-17.0})
    wave = execute("v_pk_mov_b32 v[2:3], v[2:3], v[2:3] op_sel:[1,0]", vectors=vectors)
    assert (set(result(wave, F32, 2)), set(result(wave, F32, 3))) == ({3.0}, {2.0})
    wave = execute("v_pk_mul_f32 v[0:1], v[2:3], 4.0 op_sel_hi:[1,0]", vectors=vectors)
    assert (set(result(wave, F32, 0)), set(result(wave, F32, 1))) == ({8.0}, {12.0})


def test_packed_halves() -> None:
    vectors = {1: bits(f16(1.0) | f16(2.0) << 16, U32), 2: bits(f16(3.0) | f16(5.0) << 16, U32)}
    wave = execute("v_pk_add_f16 v0, v1, v2", vectors=vectors)
    assert set(result(wave)) == {f16(4.0) | f16(7.0) << 16}
    wave = execute("v_pk_fma_f16 v0, v1, v2, v2 op_sel:[1,0,0] neg_hi:[0,1,0]", vectors=vectors)
    assert set(result(wave)) == {f16(9.0) | f16(-5.0) << 16}
    wave = execute("v_pk_lshlrev_b16 v0, 4, v1 op_sel_hi:[0,1]", vectors={1: bits(0x00120034, U32)})
    assert set(result(wave)) == {0x01200340}
    wave = execute(
        "v_pk_mad_u16 v0, v1, v2, v1", vectors={1: bits(0x00030002, U32), 2: bits(0x00050004, U32)}
    )
    assert set(result(wave)) == {18 << 16 | 10}
    wave = execute("v_dot2_f32_f16 v0, v1, v2, v3", vectors={**vectors, 3: bits(0.5, F32)})
    assert set(result(wave, F32)) == {13.5}


def test_mixed_precision() -> None:
    vectors = {
        0: bits(0, U32),
        1: bits(f16(1.5) | f16(2.0) << 16, U32),
        2: bits(3.0, F32),
        3: bits(f16(0.5), U32),
    }
    wave = execute("v_fma_mix_f32 v0, v1, v2, v3 op_sel:[1,0,0] op_sel_hi:[1,0,1]", vectors=vectors)
    assert set(result(wave, F32)) == {6.5}
    wave = execute("v_fma_mixhi_f16 v0, v1, v2, v3 op_sel_hi:[1,0,1]", vectors=vectors)
    assert set(result(wave)) == {f16(5.0) << 16}
    vectors[0] = bits(MASK32, U32)
    wave = execute("v_fma_mixlo_f16 v0, v1, v2, -v3 op_sel_hi:[1,0,1]", vectors=vectors)
    assert set(result(wave)) == {0xFFFF0000 | f16(4.0)}


def test_conversion_to_fp8() -> None:
    """Each pair of codes in its half of the register; every value of e4m3fnuz, the ties between them, what overflows
    and what has no code, in torch's words where those are the hardware's."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fnuz).float()
    values = np.unique(codes[~codes.isnan()].numpy())
    ties = (values[1:] + values[:-1]) / 2
    near = np.concatenate([np.nextafter(ties, np.float32(s * np.inf)) for s in (-1, 1)])
    every = np.concatenate([values, -values, ties, near]).astype(np.float32)
    wanted = torch.from_numpy(every).to(torch.float8_e4m3fnuz).view(torch.uint8).numpy()
    for first in range(0, len(every), 64):
        a, b = (np.resize(every[first : first + 64], 64), np.full(64, -1.0, np.float32))
        vectors = {0: bits(0x1234ABCD, U32), 1: a.view(U32), 2: b.view(U32)}
        low = result(execute("v_cvt_pk_fp8_f32 v0, v1, v2", vectors=vectors))
        high = result(execute("v_cvt_pk_fp8_f32 v0, v1, v2 op_sel:[0,0,1]", vectors=vectors))
        pairs = np.resize(wanted[first : first + 64], 64).astype(U32) | 0xC000
        assert np.array_equal(low, pairs | 0x12340000) and np.array_equal(high, pairs << 16 | 0xABCD)
    vectors = {0: bits(0, U32), 1: bits(249.0, F32), 2: bits(np.inf, F32)}
    assert set(result(execute("v_cvt_pk_fp8_f32 v0, -v1, |v2|", vectors=vectors))) == {0x8080}


def test_conversion_from_fp8() -> None:
    """Every code of e4m3fnuz, one of each byte or two of each half, in torch's words."""
    wanted = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fnuz).float().numpy()
    for first in range(0, 256, 64):
        codes = np.arange(first, first + 64, dtype=U32)
        other = codes ^ U32(85)
        vectors = {0: bits(0, U32), 2: codes | other << U32(8) | other << U32(16) | codes << U32(24)}
        for line, expected in (
            ("v_cvt_f32_fp8_e32 v0, v2", (codes,)),
            ("v_cvt_f32_fp8_sdwa v0, v2 src0_sel:BYTE_2", (other,)),
            ("v_cvt_pk_f32_fp8_e32 v[0:1], v2", (codes, other)),
            ("v_cvt_pk_f32_fp8_sdwa v[0:1], v2 src0_sel:WORD_1", (other, codes)),
        ):
            wave = execute(line, vectors=vectors)
            for register, found in enumerate(expected):
                got = wave.vectors[register].view(F32)
                assert np.array_equal(got, wanted[found], equal_nan=True), line


def test_conversions_that_saturate() -> None:
    """Under the mode bit FP16_OVFL what overflows becomes the largest value; infinities and NaN do not."""
    vectors = {0: bits(0, U32), 1: bits(1e9, F32), 2: bits(np.inf, F32)}
    mode = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1"
    wave = execute(mode, vectors=vectors)
    assert wave.saturates and not execute("v_nop", vectors=vectors).saturates
    for line, wanted in (
        ("v_cvt_pk_fp8_f32 v0, -v1, |v2|", 0x80FF),
        ("v_cvt_f16_f32_e32 v0, v1", f16(65504.0)),
    ):
        step = build(decode(assembled(line, "gfx942"), 0, "gfx942"))
        step(wave)
        assert set(result(wave)) == {wanted}


@pytest.mark.parametrize(
    ("line", "arch", "message"),
    [
        ("v_cvt_f32_bf8_e32 v0, v1", "gfx942", "unknown instruction: VOP1 opcode 0x55"),
        ("v_mul_f32_e64 v0, v1, v2 mul:2", "gfx942", "modifier mul"),
        ("v_mad_u32_u24 v0, v1, v2, v3 clamp", "gfx942", "clamp"),
        ("v_pk_add_f16 v0, v1, 1.0", "gfx942", "high half of a constant"),
        ("v_mov_b32_e32 v0, src_shared_base", "gfx942", "unknown operand"),
    ],
)
def test_what_is_not_implemented_is_refused(line: str, arch: str, message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        execute(line, arch=arch)
