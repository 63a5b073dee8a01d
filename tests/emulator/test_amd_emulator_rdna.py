"""What RDNA's instructions have of their own on the AMD emulator: waves of 32, halves of registers, two operations in
one instruction, permutations of rows, scalar floats, split barriers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.emulator.amd_emulator import EmulatorError, Memory
from tests.emulator.amd_emulator.program import WorkGroup
from tests.emulator.amd_emulator.single_step import bits, execute, f16, f32, new_wave, result
from tests.emulator.amd_emulator.wave import EXEC, LANE, VCC, Wave

F32, U32, U64 = np.float32, np.uint32, np.uint64
LANES = LANE[:32]
BOTH = ("gfx1100", "gfx1201")
RANDOM = np.random.default_rng(2).integers(0, 1 << 32, (4, 64), dtype=np.uint32)


def run(*lines: str, arch: str = "gfx1100", **state: Any) -> Wave:
    return execute(*lines, arch=arch, **state)


# ---- masks of 32 lanes


@pytest.mark.parametrize("arch", BOTH)
def test_masks_are_one_register(arch: str) -> None:
    vectors = {1: bits(LANE, U32), 24: bits(7, U32), 44: bits(LANE, U32)}
    wave = run("v_cmp_gt_u32_e64 s10, v5, v9", arch=arch, vectors={5: vectors[1], 9: vectors[24]})
    assert wave.scalars[10] == 0xFFFFFF00 and wave.scalars[11] == 0xDEADBEEF
    wave = run(
        "v_cmp_gt_u32_e32 vcc_lo, v5, v9", arch=arch, vectors={5: vectors[1], 9: vectors[24]}, lanes=0xFFF
    )
    assert wave.scalars[VCC] == 0xF00 and wave.scalars[VCC + 1] == 0xDEADBEEF
    wave = run(
        "v_cndmask_b32_e64 v6, v0, v1, s10",
        arch=arch,
        vectors={0: bits(5, U32), 1: bits(6, U32)},
        scalars={10: 0xF},
    )
    np.testing.assert_array_equal(result(wave, register=6), np.where(LANES < 4, 6, 5))


@pytest.mark.parametrize("arch", BOTH)
def test_comparisons_that_set_exec_alone(arch: str) -> None:
    wave = run("v_cmpx_gt_u32_e32 v5, v9", arch=arch, vectors={5: bits(LANE, U32), 9: bits(3, U32)})
    assert wave.scalars[EXEC] == 0xFFFFFFF0 and wave.scalars[VCC] == 0xDEADBEEF
    assert list(np.flatnonzero(wave.lanes)) == list(range(4, 32))
    wave = run("s_and_saveexec_b32 s4, s24", arch=arch, scalars={24: 0b1010}, lanes=0b0110)
    assert (wave.scalars[4], wave.scalars[EXEC], wave.scc) == (0b0110, 0b0010, 1)


@pytest.mark.parametrize("arch", BOTH)
def test_carries(arch: str) -> None:
    """64-bit sums by way of a mask; the last carry out goes nowhere."""
    a, b = RANDOM[:2].astype(np.uint64) | RANDOM[2:].astype(np.uint64) << np.uint64(32)
    vectors = {4: bits(a, U64), 44: bits(b, U64)}
    lines = ("v_add_co_u32 v4, s10, v4, v44", "v_add_co_ci_u32_e64 v5, null, v5, v45, s10")
    wave = run(*lines, arch=arch, vectors=vectors)
    np.testing.assert_array_equal(result(wave, U64, 4), (a + b)[:32])


@pytest.mark.parametrize("arch", BOTH)
def test_masked_counts_and_reads_of_lanes(arch: str) -> None:
    wave = run(
        "v_mbcnt_lo_u32_b32 v4, v24, v44", arch=arch, vectors={24: bits(0xFFFFFFFF, U32), 44: bits(1, U32)}
    )
    np.testing.assert_array_equal(result(wave, register=4), LANES + 1)
    vectors = {1: bits(LANE, U32)}
    assert run("v_readlane_b32 s4, v1, 33", arch=arch, vectors=vectors).scalars[4] == 1
    wave = run(
        "ds_bpermute_b32 v5, v6, v7 offset:16",
        arch=arch,
        vectors={6: bits(4 * LANE, U32), 7: bits(LANE, U32)},
    )
    np.testing.assert_array_equal(result(wave, register=5), (LANES + 4) % 32)


# ---- halves of registers


def test_results_of_16_bits_keep_the_other_half() -> None:
    one_two, three = bits(f16(1.0) | f16(2.0) << 16, U32), bits(f16(3.0) | f16(4.0) << 16, U32)
    vectors = {1: bits(0xAAAAAAAA, U32), 2: one_two, 3: three}
    wave = run("v_add_f16_e32 v1.h, v2.l, v3.h", vectors=vectors)
    assert set(result(wave, register=1)) == {0xAAAA | f16(5.0) << 16}
    wave = run("v_add_f16_e32 v1.l, v2.h, v3.h", vectors=vectors)
    assert set(result(wave, register=1)) == {0xAAAA0000 | f16(6.0)}
    wave = run("v_fma_f16 v1.h, v2.l, v3.h, s4", vectors=vectors, scalars={4: f16(0.5)})
    assert set(result(wave, register=1)) == {0xAAAA | f16(4.5) << 16}
    wave = run("v_cvt_f32_f16_e32 v1, v2.h", vectors=vectors)
    assert set(result(wave, F32, 1)) == {F32(2.0)}
    wave = run("v_cvt_f16_f32_e32 v1.l, v2", vectors=vectors | {2: bits(2.5, F32)}, arch="gfx1100")
    assert set(result(wave, register=1)) == {0xAAAA0000 | f16(2.5)}
    wave = run("v_cvt_f16_f32_e32 v1, v2", vectors=vectors | {2: bits(2.5, F32)}, arch="gfx1201")
    assert set(result(wave, register=1)) == {0xAAAA0000 | f16(2.5)}


@pytest.mark.parametrize("arch", BOTH)
def test_loads_of_16_bits_keep_the_other_half(arch: str) -> None:
    memory = Memory()
    address = memory.add(np.array([0x1234, 0x5678], np.uint16), "halves")
    for line, expected in (
        ("global_load_d16_b16 v1, v2, s[2:3]", 0xAAAA1234),
        ("global_load_d16_hi_b16 v1, v2, s[2:3]", 0x1234AAAA),
    ):
        wave = new_wave(group=WorkGroup(memory, 0, 0), arch=arch)
        state = {"vectors": {1: bits(0xAAAAAAAA, U32), 2: bits(0, U32)}, "wave": wave}
        run(line, arch=arch, scalars={2: address & 0xFFFFFFFF, 3: address >> 32}, **state)
        assert set(result(wave, register=1)) == {expected}
        wave = new_wave(local_bytes=4, arch=arch)
        lines = (
            "ds_store_b32 v2, v3",
            line.split()[0]
            .replace("global_load_d16_b16", "ds_load_u16_d16")
            .replace("global_load_d16_hi_b16", "ds_load_u16_d16_hi")
            + " v1, v2",
        )
        run(
            *lines,
            arch=arch,
            wave=wave,
            vectors={1: bits(0xAAAAAAAA, U32), 2: bits(0, U32), 3: bits(0x1234, U32)},
        )
        assert set(result(wave, register=1)) == {expected}


# ---- two operations in one instruction


@pytest.mark.parametrize("arch", BOTH)
def test_both_operations_read_before_either_writes(arch: str) -> None:
    vectors = {register: bits(LANE + 10 * register, F32) for register in range(6)}
    wave = run("v_dual_mov_b32 v0, v1 :: v_dual_add_f32 v1, v0, v3", arch=arch, vectors=vectors)
    np.testing.assert_array_equal(result(wave, F32, 0), LANES + 10)
    np.testing.assert_array_equal(result(wave, F32, 1), 2 * LANES + 30)
    wave = run("v_dual_add_f32 v2, v1, v3 :: v_dual_mov_b32 v1, v2", arch=arch, vectors=vectors, lanes=3)
    np.testing.assert_array_equal(result(wave, F32, 1), np.where(LANES < 2, LANES + 20, LANES + 10))
    np.testing.assert_array_equal(result(wave, F32, 2), np.where(LANES < 2, 2 * LANES + 40, LANES + 20))
    vectors = {register: bits(register, U32) for register in range(6)}
    wave = run("v_dual_fmac_f32 v0, v1, v2 :: v_dual_lshlrev_b32 v3, v4, v5", arch=arch, vectors=vectors)
    assert set(result(wave, register=3)) == {5 << 4}
    wave = run(
        "v_dual_cndmask_b32 v0, v1, v2 :: v_dual_fmamk_f32 v3, v4, 0x1234, v5",
        arch=arch,
        vectors=vectors | {4: bits(2.0, F32), 5: bits(1.0, F32)},
        scalars={VCC: 0xFF},
    )
    np.testing.assert_array_equal(result(wave, register=0), np.where(LANES < 8, 2, 1))
    constant = np.uint32(0x1234).view(F32)
    assert set(result(wave, F32, 3)) == {F32(np.float64(2.0) * constant + 1.0)}


# ---- lanes of rows


@pytest.mark.parametrize("arch", BOTH)
@pytest.mark.parametrize(
    ("control", "lanes"),
    [
        ("row_share:1 row_mask:0xf bank_mask:0xf fi:1", LANES // 16 * 16 + 1),
        ("row_xmask:5 row_mask:0xf bank_mask:0xf", LANES ^ 5),
        ("dpp8:[7,6,5,4,3,2,1,0]", LANES ^ 7),
        ("row_mirror row_mask:0xf bank_mask:0x3", np.where(LANES % 16 < 8, LANES ^ 15, 99)),
        ("row_ror:3 row_mask:0x1 bank_mask:0xf", np.where(LANES < 16, (LANES - 3) % 16, 99)),
    ],
)
def test_dpp(arch: str, control: str, lanes: np.ndarray) -> None:
    wave = run(f"v_mov_b32_dpp v1, v2 {control}", arch=arch, vectors={1: bits(99, U32), 2: bits(LANE, U32)})
    np.testing.assert_array_equal(result(wave, register=1), lanes)


def test_inactive_lanes_as_sources() -> None:
    vectors = {1: bits(99, U32), 2: bits(LANE, U32)}
    fetched = run(
        "v_mov_b32_dpp v1, v2 row_share:1 row_mask:0xf bank_mask:0xf fi:1", vectors=vectors, lanes=~2
    )
    np.testing.assert_array_equal(result(fetched, register=1), np.where(LANES == 1, 99, LANES // 16 * 16 + 1))
    kept = run("v_mov_b32_dpp v1, v2 row_xmask:5 row_mask:0xf bank_mask:0xf", vectors=vectors, lanes=~2)
    expected = np.where((LANES == 1) | (LANES == 4), 99, LANES ^ 5)
    np.testing.assert_array_equal(result(kept, register=1), expected)


@pytest.mark.parametrize("arch", BOTH)
def test_permutations_of_rows(arch: str) -> None:
    low, high = 0x76543210, 0x0123CDEF  # lane 8 reads 15, ..., lane 15 reads 0
    picks = np.array([low >> 4 * i & 15 for i in range(8)] + [high >> 4 * i & 15 for i in range(8)])
    row, state = (
        LANES // 16 * 16,
        {"vectors": {1: bits(99, U32), 2: bits(LANE, U32)}, "scalars": {1: low, 2: high}},
    )
    wave = run("v_permlane16_b32 v1, v2, s1, s2", arch=arch, **state)
    np.testing.assert_array_equal(result(wave, register=1), row + picks[LANES % 16])
    wave = run("v_permlanex16_b32 v1, v2, s1, s2", arch=arch, **state)
    np.testing.assert_array_equal(result(wave, register=1), (row ^ 16) + picks[LANES % 16])
    # Lane 3 is off: lanes that read it keep what they have, read 0, or read it all the same.
    reads = (row ^ 16) + picks[LANES % 16]
    for line, instead in (
        ("v_permlanex16_b32 v1, v2, s1, s2", 99),
        ("v_permlanex16_b32 v1, v2, s1, s2 op_sel:[1,0]", 3),
        ("v_permlane16_b32 v1, v2, s1, s2 op_sel:[0,1]", 0),
    ):
        wave = run(line, arch=arch, **state, lanes=~8)
        of = reads if "x16" in line else row + picks[LANES % 16]
        np.testing.assert_array_equal(
            result(wave, register=1), np.where(LANES == 3, 99, np.where(of == 3, instead, of))
        )


# ---- scalars


@pytest.mark.parametrize("arch", ["gfx1151", "gfx1201"])
@pytest.mark.parametrize(
    ("line", "a", "b", "expected"),
    [
        ("s_add_f32 s4, s24, s44", 1.5, 2.25, 3.75),
        ("s_sub_f32 s4, s24, s44", 1.5, 2.25, -0.75),
        ("s_mul_f32 s4, s24, s44", 1.5, 2.25, 3.375),
        ("s_fmac_f32 s4, s24, s44", 1.5, 2.0, 13.0),  # s4 is 10
        ("s_trunc_f32 s4, s24", -1.75, 0.0, -1.0),
        ("s_floor_f32 s4, s24", -1.75, 0.0, -2.0),
        ("s_fmaak_f32 s4, s24, s44, 0x42c80000", 2.0, 3.0, 106.0),
    ],
)
def test_scalar_floats(arch: str, line: str, a: float, b: float, expected: float) -> None:
    wave = run(line, arch=arch, scalars={4: f32(10.0), 24: f32(a), 44: f32(b)})
    assert wave.scalars[4] == f32(expected)


@pytest.mark.parametrize("arch", ["gfx1151", "gfx1201"])
def test_scalar_floats_and_integers(arch: str) -> None:
    assert run("s_cvt_f32_i32 s4, s24", arch=arch, scalars={24: -3}).scalars[4] == f32(-3.0)
    assert run("s_cvt_u32_f32 s4, s24", arch=arch, scalars={24: f32(7.9)}).scalars[4] == 7
    nan = 0x7FC00000
    for condition, expected in (("lt", (1, 0, 0)), ("nlt", (0, 1, 1)), ("u", (0, 0, 1)), ("neq", (1, 0, 1))):
        got = tuple(
            run(f"s_cmp_{condition}_f32 s4, s24", arch=arch, scalars={4: f32(1.0), 24: second}).scc
            for second in (f32(2.0), f32(1.0), nan)
        )
        assert got == expected, condition


def test_wide_scalar_integers() -> None:
    a, b = 0xFEDCBA9876543210, 0x1122334455667788
    scalars = {24: a & 0xFFFFFFFF, 25: a >> 32, 44: b & 0xFFFFFFFF, 45: b >> 32}
    for op, expected in (("s_add_nc_u64", a + b), ("s_sub_nc_u64", a - b), ("s_mul_u64", a * b)):
        wave = run(f"{op} s[4:5], s[24:25], s[44:45]", arch="gfx1201", scalars=scalars)
        assert wave.scalar64(4) == expected & (1 << 64) - 1, op


def test_functions_of_scalars() -> None:
    wave = run("v_s_exp_f32 s1, s3", arch="gfx1201", scalars={3: f32(3.0)})
    assert wave.scalars[1] == f32(8.0)


def test_no_register() -> None:
    """The null register reads 0, and takes what nobody wants."""
    before = list(run("s_mov_b32 s1, null", scalars={1: 5}).scalars)
    assert before[1] == 0
    wave = run("s_mov_b32 null, s1", scalars={1: 5})
    assert wave.scalars == [*before[:1], 5, *before[2:]]


def test_narrow_constant_loads() -> None:
    memory = Memory()
    address = memory.add(np.array([1, 0x80, 0xFF, 0x7F], np.uint8), "bytes")
    for line, expected in (
        ("s_load_u8 s5, s[2:3], 0x1", 0x80),
        ("s_load_i8 s5, s[2:3], 0x1", 0xFFFFFF80),
        ("s_load_i16 s5, s[2:3], 0x2", 0x7FFF),
    ):
        wave = new_wave(group=WorkGroup(memory, 0, 0), arch="gfx1201")
        run(line, arch="gfx1201", wave=wave, scalars={2: address & 0xFFFFFFFF, 3: address >> 32})
        assert wave.scalars[5] == expected, line
    with pytest.raises(EmulatorError, match="not aligned to 2 bytes"):
        wave = new_wave(group=WorkGroup(memory, 0, 0), arch="gfx1201")
        run(
            "s_load_i16 s5, s[2:3], 0x2",
            arch="gfx1201",
            wave=wave,
            scalars={2: address + 1 & 0xFFFFFFFF, 3: address >> 32},
        )


# ---- barriers in two halves


def test_split_barriers() -> None:
    wave = new_wave(arch="gfx1201", local_bytes=16)
    address = {0: bits(0, U32), 1: bits(5, U32)}
    run("ds_store_b32 v0, v1", "s_barrier_signal -1", arch="gfx1201", wave=wave, vectors=address)
    with pytest.raises(EmulatorError, match="between a barrier's signal and its wait"):
        run("ds_load_b32 v2, v0", arch="gfx1201", wave=wave)
    with pytest.raises(EmulatorError, match="not in turn"):
        run("s_barrier_signal -1", arch="gfx1201", wave=wave)
    run("s_barrier_wait -1", "ds_load_b32 v2, v0", arch="gfx1201", wave=wave)
    assert set(result(wave, register=2)) == {5}
    with pytest.raises(EmulatorError, match="not in turn"):
        run("s_barrier_wait -1", arch="gfx1201", wave=wave)
    with pytest.raises(EmulatorError, match="not the workgroup's"):
        run("s_barrier_signal 1", arch="gfx1201")


# ---- what is refused


@pytest.mark.parametrize(
    ("arch", "line", "message"),
    [
        ("gfx1100", "scratch_load_b32 v0, off, off", "unknown encoding"),
        ("gfx1201", "scratch_load_b32 v0, off, off", "unknown encoding"),
        (
            "gfx1100",
            "v_wmma_i32_16x16x16_iu8 v[0:7], v[8:11], v[12:15], v[0:7]",
            "unknown instruction: VOP3P",
        ),
        (
            "gfx1201",
            "v_wmma_f32_16x16x16_fp8_fp8 v[24:31], v[0:1], v[8:9], v[16:23]",
            "unknown instruction: VOP3P",
        ),
        (
            "gfx1100",
            "v_wmma_f32_16x16x16_f16 v[24:31], v[0:7], v[8:15], v[16:23] neg_lo:[1,0,0]",
            "modifier neg_lo",
        ),
        ("gfx1100", "s_sendmsg sendmsg(MSG_HS_TESSFACTOR)", "a message"),
        ("gfx1100", "ds_swizzle_b32 v8, v9 offset:0xc020", "rotation"),
        ("gfx1100", "s_getreg_b32 s0, hwreg(HW_REG_MODE)", "unknown instruction: SOPK"),
        ("gfx1100", "v_add_f32_e64 v0, s1, -|v2| mul:2", "modifier mul"),
    ],
)
def test_what_is_not_implemented_is_refused(arch: str, line: str, message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        run(line, arch=arch, vectors={register: bits(0, U32) for register in range(32)})
