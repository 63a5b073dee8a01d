"""Scalar instructions of the AMD emulator against the instruction set manual's definitions."""

from __future__ import annotations

import pytest

from tests.emulator.amd_emulator import EmulatorError
from tests.emulator.amd_emulator.program import build_step
from tests.emulator.amd_emulator.single_step import decode, execute, new_wave
from tests.emulator.amd_emulator.wave import EXEC, MASK32, MASK64, VCC

A, B, D = 2, 4, 6  # first registers of the operands and of the result
TOP = 0x80000000


def run(line: str, a: int, b: int = 0, scc: int = 0) -> tuple[int, int]:
    """(64 bits at the destination, SCC) after a line that reads s[2:3] and s[4:5] and writes s6 or s[6:7]."""
    scalars = {A: a, A + 1: a >> 32, B: b, B + 1: b >> 32, D: 0, D + 1: 0}
    wave = execute(line, scalars=scalars, scc=scc)
    return wave.scalar64(D), wave.scc


@pytest.mark.parametrize(
    ("line", "a", "b", "carry", "result", "scc"),
    [
        ("s_add_u32 s6, s2, s4", MASK32, 1, 0, 0, 1),
        ("s_add_u32 s6, s2, s4", 5, 7, 1, 12, 0),
        ("s_addc_u32 s6, s2, s4", MASK32, 0, 1, 0, 1),
        ("s_addc_u32 s6, s2, s4", 5, 7, 1, 13, 0),
        ("s_sub_u32 s6, s2, s4", 3, 5, 0, MASK32 - 1, 1),
        ("s_sub_u32 s6, s2, s4", 5, 5, 1, 0, 0),
        ("s_subb_u32 s6, s2, s4", 5, 5, 1, MASK32, 1),
        ("s_add_i32 s6, s2, s4", TOP - 1, 1, 0, TOP, 1),
        ("s_add_i32 s6, s2, s4", MASK32, 1, 0, 0, 0),
        ("s_sub_i32 s6, s2, s4", TOP, 1, 0, TOP - 1, 1),
        ("s_sub_i32 s6, s2, -1", 1, 0, 0, 2, 0),
        ("s_lshl1_add_u32 s6, s2, s4", 3, 5, 0, 11, 0),
        ("s_lshl4_add_u32 s6, s2, s4", TOP, 5, 0, 5, 1),
    ],
)
def test_carry_and_overflow(line: str, a: int, b: int, carry: int, result: int, scc: int) -> None:
    assert run(line, a, b, carry) == (result, scc)


@pytest.mark.parametrize(
    ("line", "a", "b", "result", "scc"),
    [
        ("s_and_b32 s6, s2, s4", 0b1100, 0b1010, 0b1000, 1),
        ("s_and_b32 s6, s2, s4", 0b1100, 0b0011, 0, 0),
        ("s_andn2_b64 s[6:7], s[2:3], s[4:5]", MASK64, TOP << 1, MASK64 ^ TOP << 1, 1),
        ("s_orn2_b32 s6, s2, s4", 1, MASK32, 1, 1),
        ("s_xnor_b32 s6, s2, s4", 5, MASK32 ^ 5, 0, 0),
        ("s_nand_b32 s6, s2, s4", MASK32, MASK32, 0, 0),
        ("s_not_b64 s[6:7], s[2:3]", MASK64, 0, 0, 0),
        ("s_lshl_b32 s6, s2, s4", 3, 31, TOP, 1),
        ("s_lshl_b32 s6, s2, s4", 3, 32, 3, 1),  # only five bits of the amount count
        ("s_lshl_b64 s[6:7], s[2:3], s4", 1, 63, 1 << 63, 1),
        ("s_lshr_b64 s[6:7], s[2:3], s4", MASK64, 60, 15, 1),
        ("s_ashr_i32 s6, s2, 31", TOP, 0, MASK32, 1),
        ("s_ashr_i64 s[6:7], s[2:3], 63", 1 << 63, 0, MASK64, 1),
        ("s_bfe_u32 s6, s2, 0x80004", 0xABCDE, 0, 0xCD, 1),
        ("s_bfe_i32 s6, s2, 0x80004", 0xABCDE, 0, 0xFFFFFFCD, 1),
        ("s_bfe_u64 s[6:7], s[2:3], 0x80020", 0x12_00000000, 0, 0x12, 1),
        ("s_bfm_b32 s6, s2, s4", 3, 4, 0b1110000, 0),
        ("s_brev_b32 s6, s2", 1, 0, TOP, 0),
        ("s_bcnt1_i32_b64 s6, s[2:3]", MASK64, 0, 64, 1),
        ("s_bcnt0_i32_b32 s6, s2", MASK32, 0, 0, 0),
        ("s_ff1_i32_b32 s6, s2", 0b101000, 0, 3, 0),
        ("s_ff1_i32_b64 s6, s[2:3]", 0, 0, MASK32, 0),
        ("s_ff0_i32_b32 s6, s2", 0b0111, 0, 3, 0),
        ("s_flbit_i32_b32 s6, s2", 1 << 20, 0, 11, 0),
        ("s_flbit_i32 s6, s2", 0xFFF00000, 0, 12, 0),
        ("s_abs_i32 s6, s2", -5 & MASK32, 0, 5, 1),
        ("s_sext_i32_i8 s6, s2", 0x180, 0, 0xFFFFFF80, 0),
        ("s_sext_i32_i16 s6, s2", 0x17FFF, 0, 0x7FFF, 0),
        ("s_pack_ll_b32_b16 s6, s2, s4", 0x11112222, 0x33334444, 0x44442222, 0),
        ("s_pack_lh_b32_b16 s6, s2, s4", 0x11112222, 0x33334444, 0x33332222, 0),
        ("s_mul_i32 s6, s2, s4", 0x10001, 0x10001, 0x20001, 0),
        ("s_mul_hi_u32 s6, s2, s4", MASK32, MASK32, MASK32 - 1, 0),
        ("s_mul_hi_i32 s6, s2, s4", MASK32, 5, MASK32, 0),
        ("s_min_i32 s6, s2, s4", MASK32, 1, MASK32, 1),
        ("s_min_u32 s6, s2, s4", MASK32, 1, 1, 0),
        ("s_max_i32 s6, s2, s4", MASK32, 1, 1, 0),
        ("s_max_u32 s6, s2, s4", MASK32, 1, MASK32, 1),
        ("s_mov_b64 s[6:7], -1", 0, 0, MASK64, 0),
        ("s_mov_b32 s6, 1.0", 0, 0, 0x3F800000, 0),
        ("s_movk_i32 s6, 0x8000", 0, 0, 0xFFFF8000, 0),
        ("s_wqm_b64 s[6:7], s[2:3]", 0x0010_0001, 0, 0x00F0_000F, 1),
    ],
)
def test_result_and_scc(line: str, a: int, b: int, result: int, scc: int) -> None:
    assert run(line, a, b) == (result, scc)


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
@pytest.mark.parametrize(
    ("line", "a", "before", "after"),
    [
        ("s_bitset0_b32 s6, 31", 0, 0xAA5A5A5A, 0x2A5A5A5A),
        ("s_bitset0_b32 s6, s2", 32 + 1, 0xAA5A5A5A, 0xAA5A5A58),
        ("s_bitset1_b32 s6, s2", 2, 0xAA5A5A5A, 0xAA5A5A5E),
    ],
)
def test_one_bit_of_the_destination(line: str, a: int, before: int, after: int, arch: str) -> None:
    wave = execute(line, arch=arch, scalars={A: a, D: before, D + 1: 7}, scc=1)
    assert (wave.scalar64(D), wave.scc) == (7 << 32 | after, 1)


@pytest.mark.parametrize(
    ("line", "a", "b", "scc"),
    [
        ("s_cmp_lt_i32 s2, s4", MASK32, 0, 1),
        ("s_cmp_lt_u32 s2, s4", MASK32, 0, 0),
        ("s_cmp_ge_i32 s2, s4", 4, 4, 1),
        ("s_cmp_lg_u64 s[2:3], s[4:5]", 1 << 40, 1 << 41, 1),
        ("s_cmp_eq_u64 s[2:3], 0", 1 << 40, 0, 0),
        ("s_cmpk_eq_i32 s2, 0xffff", MASK32, 0, 1),
        ("s_cmpk_lt_u32 s2, 0xffff", 0xFFFE, 0, 1),
        ("s_cmpk_gt_i32 s2, 0x8000", 0, 0, 1),
        ("s_bitcmp1_b32 s2, s4", 0b100, 2, 1),
        ("s_bitcmp0_b32 s2, s4", 0b100, 2 + 32, 0),
        ("s_bitcmp1_b64 s[2:3], s4", 1 << 40, 40, 1),
    ],
)
def test_comparison(line: str, a: int, b: int, scc: int) -> None:
    assert run(line, a, b, scc=1 - scc)[1] == scc


def test_select_and_conditional_move() -> None:
    assert run("s_cselect_b32 s6, s2, s4", 7, 9, scc=1)[0] == 7
    assert run("s_cselect_b64 s[6:7], s[2:3], s[4:5]", 7, 9 << 40, scc=0)[0] == 9 << 40
    assert run("s_cmov_b32 s6, s2", 7, scc=0)[0] == 0
    assert run("s_cmov_b32 s6, s2", 7, scc=1)[0] == 7


def test_short_constants_change_their_register() -> None:
    wave = execute("s_addk_i32 s2, 0xffff", "s_mulk_i32 s4, 0xfffe", scalars={A: 5, B: 3})
    assert (wave.scalars[A], wave.scalars[B], wave.scc) == (4, -6 & MASK32, 0)
    assert execute("s_addk_i32 s2, 0x1", scalars={A: TOP - 1}).scc == 1


@pytest.mark.parametrize(
    ("op", "result"),
    [("and", 0b1000), ("or", 0b1110), ("xor", 0b0110), ("andn2", 0b0100), ("andn1", 0b0010)],
)
def test_save_exec(op: str, result: int) -> None:
    wave = execute(f"s_{op}_saveexec_b64 s[6:7], s[2:3]", scalars={A: 0b1100, A + 1: 0}, lanes=0b1010)
    assert (wave.scalar64(EXEC), wave.scalar64(D), wave.scc) == (result, 0b1010, 1)
    assert list(wave.lanes.nonzero()[0]) == [i for i in range(64) if result >> i & 1]
    assert not wave.all_lanes


def test_writes_to_halves_of_exec() -> None:
    wave = execute("s_mov_b32 exec_lo, 3", "s_mov_b32 exec_hi, 1")
    assert list(wave.lanes.nonzero()[0]) == [0, 1, 32]


@pytest.mark.parametrize(
    ("name", "vcc", "lanes", "scc", "taken"),
    [
        ("s_branch", 0, 1, 0, True),
        ("s_cbranch_scc0", 0, 1, 0, True),
        ("s_cbranch_scc0", 0, 1, 1, False),
        ("s_cbranch_scc1", 0, 1, 1, True),
        ("s_cbranch_vccz", 0, 1, 0, True),
        ("s_cbranch_vccz", 1 << 40, 1, 0, False),
        ("s_cbranch_vccnz", 1 << 40, 1, 0, True),
        ("s_cbranch_execz", 0, 0, 0, True),
        ("s_cbranch_execz", 0, 1 << 40, 0, False),
        ("s_cbranch_execnz", 0, 1 << 40, 0, True),
    ],
)
def test_branches(name: str, vcc: int, lanes: int, scc: int, taken: bool) -> None:
    wave = new_wave()
    wave.set_scalar64(VCC, vcc)
    wave.set_exec(lanes)
    wave.scc = scc
    forward, backward = decode((f"{name} 3", f"{name} 0xfffe"), "gfx942")
    assert build_step(forward)(wave) == (forward.address + 16 if taken else None)
    assert build_step(backward)(wave) == (backward.address - 4 if taken else None)


@pytest.mark.parametrize(
    "line", ["s_sendmsg 1", "s_trap 2", "s_memtime s[6:7]", "s_getreg_b32 s6, 1", "s_setreg_b32 1, s6"]
)
def test_what_has_no_meaning_here_is_refused(line: str) -> None:
    with pytest.raises(EmulatorError):
        execute(line)
