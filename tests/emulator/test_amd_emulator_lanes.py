"""How the AMD emulator's vector instructions pick, write, compare and move lanes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.amd_emulator.single_step import bits, execute, f16, result
from tests.emulator.amd_emulator.wave import LANE, MASK32, VCC, mask_of

F16, F32, U32, I32, U64 = np.float16, np.float32, np.uint32, np.int32, np.uint64
TOP = 0x80000000
RANDOM = np.random.default_rng(1).integers(0, 1 << 32, (4, 64), dtype=np.uint32)


def test_halves_of_registers() -> None:
    """op_sel picks halves; a 16-bit result clears the other half, unless the instruction has three sources."""
    vectors = {0: bits(0xAAAAAAAA, U32), 1: bits(f16(1.0) | f16(2.0) << 16, U32), 2: bits(f16(3.0), U32)}
    assert set(result(execute("v_add_f16_e32 v0, v1, v2", vectors=vectors))) == {f16(4.0)}
    wave = execute("v_fma_f16 v0, v1, v2, v2 op_sel:[1,0,0,0]", vectors=vectors)
    assert set(result(wave)) == {0xAAAA0000 | f16(9.0)}
    wave = execute("v_fma_f16 v0, v1, v2, v2 op_sel:[0,0,0,1]", vectors=vectors)
    assert set(result(wave)) == {0xAAAA | f16(6.0) << 16}
    wave = execute("v_pack_b32_f16 v0, v1, v2 op_sel:[1,0,0]", vectors=vectors)
    assert set(result(wave)) == {f16(2.0) | f16(3.0) << 16}


def test_inactive_lanes_keep_their_values() -> None:
    for line in ("v_add_u32_e32 v0, v1, v1", "v_add_f32_e32 v0, v1, v1", "v_lshlrev_b64 v[0:1], 1, v[2:3]"):
        vectors = {0: bits(9, U32), 1: bits(8, U32), 2: bits(1, U64)}
        wave = execute(line, vectors=vectors, lanes=0b101)
        assert list(np.flatnonzero(result(wave) != 9)) == [0, 2]


# ---- DPP


def dpp(control: str, *, lanes: int = (1 << 64) - 1) -> np.ndarray:
    """Which lane each lane read in a v_mov_b32_dpp; 99 where nothing was written."""
    vectors = {0: bits(99, U32), 1: bits(LANE, U32)}
    return result(execute(f"v_mov_b32_dpp v0, v1 {control}", arch="gfx90a", vectors=vectors, lanes=lanes))


def test_dpp_within_quads_and_rows() -> None:
    np.testing.assert_array_equal(
        dpp("quad_perm:[3,2,0,1]"), [4 * (i // 4) + (3, 2, 0, 1)[i % 4] for i in range(64)]
    )
    np.testing.assert_array_equal(dpp("row_mirror"), [16 * (i // 16) + 15 - i % 16 for i in range(64)])
    np.testing.assert_array_equal(dpp("row_half_mirror"), [8 * (i // 8) + 7 - i % 8 for i in range(64)])
    np.testing.assert_array_equal(dpp("row_ror:3"), [16 * (i // 16) + (i % 16 - 3) % 16 for i in range(64)])
    np.testing.assert_array_equal(dpp("row_shl:2"), [i + 2 if i % 16 < 14 else 99 for i in range(64)])
    np.testing.assert_array_equal(dpp("row_shr:2"), [i - 2 if i % 16 >= 2 else 99 for i in range(64)])
    np.testing.assert_array_equal(
        dpp("row_shr:2 bound_ctrl:0"), [i - 2 if i % 16 >= 2 else 0 for i in range(64)]
    )


def test_dpp_broadcasts() -> None:
    np.testing.assert_array_equal(
        dpp("row_bcast:15"), [16 * (i // 16) - 1 if i >= 16 else 99 for i in range(64)]
    )
    np.testing.assert_array_equal(dpp("row_bcast:31"), [31 if i >= 32 else 99 for i in range(64)])
    np.testing.assert_array_equal(
        dpp("row_bcast:15 row_mask:0xa"), [16 * (i // 16) - 1 if i // 16 in (1, 3) else 99 for i in range(64)]
    )


def test_dpp_wave_shifts() -> None:
    np.testing.assert_array_equal(dpp("wave_shr:1"), [99, *range(63)])
    np.testing.assert_array_equal(dpp("wave_shl:1"), [*range(1, 64), 99])
    np.testing.assert_array_equal(dpp("wave_ror:1"), [63, *range(63)])


def test_dpp_masks_and_inactive_sources() -> None:
    expected = [i - 1 if i % 16 and (i % 16) // 4 in (0, 2) else 99 for i in range(64)]
    np.testing.assert_array_equal(dpp("row_shr:1 bank_mask:0x5"), expected)
    # Lane 4 is off: it is not written, and lane 5 has no source.
    off = ((1 << 64) - 1) ^ 1 << 4
    expected = [i - 1 if i % 16 and i not in (4, 5) else 99 for i in range(64)]
    np.testing.assert_array_equal(dpp("row_shr:1", lanes=off), expected)
    expected = [99 if i == 4 else i - 1 if i % 16 and i != 5 else 0 for i in range(64)]
    np.testing.assert_array_equal(dpp("row_shr:1 bound_ctrl:0", lanes=off), expected)


def test_dpp_on_arithmetic_applies_to_the_first_source() -> None:
    vectors = {0: bits(0.5, F32), 1: bits(LANE, F32), 2: bits(100.0, F32)}
    wave = execute("v_sub_f32_dpp v0, -v1, v2 row_ror:1", arch="gfx90a", vectors=vectors)
    np.testing.assert_array_equal(
        result(wave, F32), [-(16 * (i // 16) + (i - 1) % 16) - 100.0 for i in range(64)]
    )
    wave = execute("v_fmac_f32_dpp v0, v1, v2 row_newbcast:3", arch="gfx90a", vectors=vectors)
    np.testing.assert_array_equal(result(wave, F32), [0.5 + 100.0 * (16 * (i // 16) + 3) for i in range(64)])


# ---- SDWA


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "v_add_u32_sdwa v0, v1, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_1 src1_sel:WORD_1",
            0x33 + 0x5566,
        ),
        (
            "v_add_u32_sdwa v0, sext(v1), v2 dst_sel:DWORD src0_sel:BYTE_3 src1_sel:DWORD",
            (0x55667788 - 0x78) & MASK32,
        ),
        (
            "v_add_u32_sdwa v0, v1, v2 dst_sel:BYTE_2 dst_unused:UNUSED_PAD src0_sel:BYTE_0 src1_sel:BYTE_0",
            0xCC0000,
        ),
        ("v_mov_b32_sdwa v0, v1 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:WORD_0", 0x3344AAAA),
        ("v_mov_b32_sdwa v0, v1 dst_sel:BYTE_0 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_2", 0xAAAAAA22),
    ],
)
def test_sdwa_integers(line: str, expected: int) -> None:
    vectors = {0: bits(0xAAAAAAAA, U32), 1: bits(0x88223344, U32), 2: bits(0x55667788, U32)}
    assert set(result(execute(line, arch="gfx90a", vectors=vectors))) == {expected}


def test_sdwa_floats_and_comparisons() -> None:
    vectors = {1: bits(f16(1.5) | f16(-2.5) << 16, U32), 2: bits(f16(-2.5), U32)}
    wave = execute("v_cvt_f32_f16_sdwa v0, -v1 dst_sel:DWORD src0_sel:WORD_1", arch="gfx90a", vectors=vectors)
    assert set(result(wave, F32)) == {2.5}
    line = "v_cmp_eq_f16_sdwa s[8:9], v1, v2 src0_sel:WORD_1 src1_sel:WORD_0"
    assert execute(line, arch="gfx90a", vectors=vectors, lanes=0b11).scalar64(8) == 0b11
    line = "v_add_f16_sdwa v0, |v1|, v2 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:WORD_0"
    assert set(result(execute(line, arch="gfx90a", vectors=vectors))) == {0}


# ---- comparisons, carries, moves between lanes


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lt", [1, 0, 0, 0]),
        ("eq", [0, 1, 0, 0]),
        ("le", [1, 1, 0, 0]),
        ("gt", [0, 0, 1, 0]),
        ("lg", [1, 0, 1, 0]),
        ("ge", [0, 1, 1, 0]),
        ("o", [1, 1, 1, 0]),
        ("u", [0, 0, 0, 1]),
        ("nge", [1, 0, 0, 1]),
        ("nlg", [0, 1, 0, 1]),
        ("ngt", [1, 1, 0, 1]),
        ("nle", [0, 0, 1, 1]),
        ("neq", [1, 0, 1, 1]),
        ("nlt", [0, 1, 1, 1]),
    ],
)
def test_float_comparisons(name: str, expected: list[int]) -> None:
    """Less, equal, greater, unordered in the first four lanes; lanes that are off give 0."""
    vectors = {1: bits([1, 2, 3, np.nan] * 16, F32), 2: bits(2.0, F32)}
    wave = execute(f"v_cmp_{name}_f32_e64 s[8:9], v1, v2", vectors=vectors, lanes=0xF)
    assert wave.scalar64(8) == sum(bit << i for i, bit in enumerate(expected))


def test_integer_comparisons_and_exec() -> None:
    vectors = {1: bits(LANE - 3, I32), 4: bits((LANE.astype(np.int64) - 2) << 33, np.int64)}
    wave = execute("v_cmp_gt_i32_e32 vcc, 0, v1", "v_cmp_lt_u32_e64 s[8:9], v1, 2", vectors=vectors)
    assert (wave.scalar64(VCC), wave.scalar64(8)) == (0b111, 0b11000)
    wave = execute("v_cmp_ge_i64_e32 vcc, 0, v[4:5]", "v_cmpx_eq_u32_e32 vcc, 1, v1", vectors=vectors)
    assert wave.scalar64(VCC) == 0b10000 and mask_of(wave.lanes) == 0b10000


def test_float_classes() -> None:
    signalling, quiet = np.array([0x7F800001, 0x7FC00000], U32).view(F32)
    values = [signalling, quiet, -np.inf, -1.0, -(2.0**-140), -0.0, 0.0, 2.0**-140, 1.0, np.inf]
    vectors = {1: bits(np.resize(np.array(values, F32), 64), F32), 2: bits(1 << (LANE % 10), U32)}
    assert execute("v_cmp_class_f32_e64 s[8:9], v1, v2", vectors=vectors, lanes=0x3FF).scalar64(8) == 0x3FF
    line = "v_cmp_class_f32_e64 s[8:9], v1, s10"
    wave = execute(line, vectors=vectors, scalars={10: 0x204}, lanes=0x3FF)
    assert wave.scalar64(8) == 1 << 2 | 1 << 9


def test_carries_chain_to_64_bits() -> None:
    rng = np.random.default_rng(5)
    a, b = rng.integers(0, 1 << 63, (2, 64), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    vectors = {2: bits(a, U64), 4: bits(b, U64)}
    lines = ["v_add_co_u32_e32 v6, vcc, v2, v4", "v_addc_co_u32_e32 v7, vcc, v3, v5, vcc"]
    wave = execute(*lines, vectors=vectors)
    np.testing.assert_array_equal(result(wave, U64, 6), a + b)
    overflow = sum(1 << i for i in range(64) if int(a[i]) + int(b[i]) >> 64)
    assert wave.scalar64(VCC) == overflow
    lines = ["v_sub_co_u32_e64 v6, s[8:9], v2, v4", "v_subb_co_u32_e64 v7, s[8:9], v3, v5, s[8:9]"]
    wave = execute(*lines, vectors=vectors, lanes=0xFFFF0000FFFF0000)
    np.testing.assert_array_equal(result(wave, U64, 6)[wave.lanes], (a - b)[wave.lanes])
    assert wave.scalar64(8) == mask_of((a < b) & wave.lanes)
    wave = execute("v_subrev_co_u32_e32 v6, vcc, v2, v4", vectors=vectors)
    np.testing.assert_array_equal(result(wave, U32, 6), (b - a).astype(U32))


def test_wide_multiply_add() -> None:
    a, b = RANDOM[0], RANDOM[1]
    c = np.full(64, (1 << 64) - 5, np.uint64)
    lines = ("v_mad_u64_u32 v[6:7], s[8:9], v1, v2, v[4:5]", "v_mad_i64_i32 v[10:11], vcc, v1, v2, v[4:5]")
    wave = execute(*lines, vectors={1: a[None], 2: b[None], 4: bits(c, U64)})
    exact = [int(x) * int(y) + int(z) for x, y, z in zip(a, b, c, strict=True)]
    np.testing.assert_array_equal(
        result(wave, U64, 6), np.array([e & (1 << 64) - 1 for e in exact], np.uint64)
    )
    assert wave.scalar64(8) == sum(1 << i for i, e in enumerate(exact) if e >> 64)
    exact = [int(x) * int(y) - 5 for x, y in zip(a.view(I32), b.view(I32), strict=True)]
    np.testing.assert_array_equal(result(wave, np.int64, 10), exact)


def test_64_bit_shifts_and_additions() -> None:
    a = np.arange(64, dtype=np.uint64) << np.uint64(40) | np.uint64(TOP)
    lines = (
        "v_lshlrev_b64 v[6:7], v1, v[2:3]",
        "v_lshrrev_b64 v[8:9], 36, v[2:3]",
        "v_ashrrev_i64 v[10:11], 63, v[4:5]",
        "v_lshl_add_u64 v[12:13], v[2:3], 3, v[4:5]",
    )
    wave = execute(*lines, vectors={1: bits(LANE, U32), 2: bits(a, U64), 4: bits(-7, np.int64)})
    np.testing.assert_array_equal(
        result(wave, U64, 6), [int(x) << i & (1 << 64) - 1 for i, x in enumerate(a)]
    )
    np.testing.assert_array_equal(result(wave, U64, 8), a >> np.uint64(36))
    assert set(result(wave, np.int64, 10)) == {-1}
    np.testing.assert_array_equal(result(wave, U64, 12), a * np.uint64(8) - np.uint64(7))


def test_moves_between_lanes() -> None:
    lines = ("v_readfirstlane_b32 s8, v1", "v_readlane_b32 s9, v1, 63", "v_writelane_b32 v2, s8, 5")
    wave = execute(*lines, vectors={1: bits(LANE + 7, U32), 2: bits(0, U32)}, lanes=0b11000)
    assert wave.scalars[8:10] == [10, 70]
    assert list(np.flatnonzero(result(wave, U32, 2))) == [5] and result(wave, U32, 2)[5] == 10
    wave = execute("v_swap_b32 v1, v2", vectors={1: bits(1, U32), 2: bits(2, U32)}, lanes=0b10)
    assert list(result(wave, U32, 1)[:3]) == [1, 2, 1] and list(result(wave, U32, 2)[:3]) == [2, 1, 2]


def test_bits_of_lower_lanes() -> None:
    lines = ("v_mbcnt_lo_u32_b32 v0, -1, 0", "v_mbcnt_hi_u32_b32 v0, -1, v0")
    np.testing.assert_array_equal(result(execute(*lines)), LANE)
    wave = execute("v_mbcnt_lo_u32_b32 v0, s8, 3", scalars={8: 0b10100})
    np.testing.assert_array_equal(result(wave), [3 + (i > 2) + (i > 4) for i in range(64)])


def test_conditional_move() -> None:
    vectors = {1: bits(1.0, F32), 2: bits(2.0, F32)}
    wave = execute("v_cndmask_b32_e64 v0, -v1, |v2|, s[8:9]", vectors=vectors, scalars={8: 0b101, 9: 0})
    np.testing.assert_array_equal(result(wave, F32), [2.0 if i in (0, 2) else -1.0 for i in range(64)])


def test_accumulation_registers() -> None:
    lines = ("v_accvgpr_write_b32 a3, v1", "v_accvgpr_read_b32 v0, a3")
    np.testing.assert_array_equal(result(execute(*lines, vectors={1: bits(LANE, U32)})), LANE)
