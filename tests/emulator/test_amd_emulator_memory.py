"""Memory of the AMD emulator: what each access reads and writes, and that every wrong one is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.emulator.amd_emulator import EmulatorError, Memory
from tests.emulator.amd_emulator.program import WorkGroup
from tests.emulator.amd_emulator.single_step import bits, execute, f16, new_wave, result
from tests.emulator.amd_emulator.wave import LANE, MASK32, POISON, Wave

U8, U16, U32, U64, F32 = np.uint8, np.uint16, np.uint32, np.uint64, np.float32
ADDRESS, DATA = 2, 8  # v[2:3] and v8..


def on(array: np.ndarray, **options: Any) -> tuple[Wave, int]:
    """A wave whose memory is one array, and its address."""
    memory = Memory()
    address = memory.add(array, "x", **options)
    return new_wave(group=WorkGroup(memory, 0, 0)), address


def test_loads_of_every_size() -> None:
    array = np.arange(2048, dtype=U8).astype(U8)
    wave, address = on(array)
    lines = [
        f"global_load_{what} v{register}, v[2:3], off offset:16"
        for what, register in (("ubyte", 8), ("sbyte", 9), ("ushort", 10), ("sshort", 11), ("dword", 12))
    ]
    lines += [f"global_load_dwordx{n} v[{16 * n}:{17 * n - n + n - 1}], v[2:3], off" for n in (2, 3, 4)]
    execute(*lines, wave=wave, vectors={ADDRESS: bits(address + 16 * LANE.astype(U64), U64)})
    at = 16 * LANE + 16
    np.testing.assert_array_equal(result(wave, U32, 8), array[at])
    np.testing.assert_array_equal(result(wave, np.int32, 9), array[at].view(np.int8))
    np.testing.assert_array_equal(result(wave, U32, 10), array.view(U16)[at // 2])
    np.testing.assert_array_equal(result(wave, np.int32, 11), array.view(np.int16)[at // 2])
    np.testing.assert_array_equal(result(wave, U32, 12), array.view(U32)[at // 4])
    for n in (2, 3, 4):
        for word in range(n):
            expected = array.view(U32)[4 * LANE + word]
            np.testing.assert_array_equal(result(wave, U32, 16 * n + word), expected)


def test_stores_of_every_size_change_nothing_else() -> None:
    values = bits(LANE + 0x11223300, U32)
    for what, size, shift in (("byte", 1, 0), ("short", 2, 0), ("short_d16_hi", 2, 16), ("dword", 4, 0)):
        array = np.full(64 * 8, 0xEE, U8)
        wave, address = on(array)
        vectors = {ADDRESS: bits(address + 8 * LANE.astype(U64), U64), DATA: values}
        execute(f"global_store_{what} v[2:3], v8, off offset:4", wave=wave, vectors=vectors, lanes=0xF0)
        for lane in range(64):
            expected = bytearray(b"\xee" * 8)
            if 4 <= lane < 8:
                expected[4 : 4 + size] = int(values[0, lane] >> shift).to_bytes(4, "little")[:size]
            assert bytes(array[8 * lane : 8 * lane + 8]) == bytes(expected)
    array = np.zeros(256, U32)
    wave, address = on(array)
    vectors = {
        ADDRESS: bits(address + 16 * LANE.astype(U64), U64),
        DATA: np.arange(256, dtype=U32).reshape(4, 64),
    }
    execute("global_store_dwordx4 v[2:3], v[8:11], off", wave=wave, vectors=vectors)
    np.testing.assert_array_equal(array.reshape(64, 4), np.arange(256).reshape(4, 64).T)


def test_scalar_base_and_negative_offset() -> None:
    array = np.arange(128, dtype=U32)
    wave, address = on(array)
    base = address + 64
    execute(
        "global_load_dword v8, v4, s[6:7] offset:-64",
        "s_load_dwordx4 s[8:11], s[6:7], 0x10",
        "s_load_dword s12, s[6:7], s13",
        wave=wave,
        vectors={4: bits(4 * LANE, U32)},
        scalars={6: base & MASK32, 7: base >> 32, 13: 8},
    )
    np.testing.assert_array_equal(result(wave, U32, 8), LANE)
    assert wave.scalars[8:13] == [20, 21, 22, 23, 18]


def test_lanes_may_read_different_arrays() -> None:
    memory = Memory()
    first, second = memory.add(np.full(4, 1, U32), "first"), memory.add(np.full(4, 2, U32), "second")
    wave = new_wave(group=WorkGroup(memory, 0, 0))
    addresses = np.where(LANE % 2 == 0, first, second).astype(U64)
    execute("global_load_dword v8, v[2:3], off", wave=wave, vectors={ADDRESS: bits(addresses, U64)})
    np.testing.assert_array_equal(result(wave, U32, 8), LANE % 2 + 1)


@pytest.mark.parametrize(
    ("line", "shift", "message"),
    [
        (
            "global_load_dword v8, v[2:3], off",
            4,
            r"lane 63: read of 4 bytes at 0x\w+, byte 256 of x, which has 256",
        ),
        ("global_load_dword v8, v[2:3], off", -4, "lane 0: read of 4 bytes at 0x\\w+, byte -4 of x"),
        ("global_load_dwordx2 v[8:9], v[2:3], off", 0, "lane 63: read of 8 bytes"),
        ("global_store_byte v[2:3], v8, off", 4, "lane 63: write of 1 bytes"),
        ("global_load_dword v8, v[2:3], off", 2, "lane 0: read of 4 bytes at 0x\\w+, which is not aligned"),
        ("global_load_ushort v8, v[2:3], off", 1, "not aligned"),
    ],
)
def test_out_of_bounds_and_misaligned(line: str, shift: int, message: str) -> None:
    wave, address = on(np.zeros(64, U32))
    vectors = {ADDRESS: bits(address + shift + 4 * LANE.astype(np.int64), np.int64), DATA: bits(0, U64)}
    with pytest.raises(EmulatorError, match=message):
        execute(line, wave=wave, vectors=vectors)
    execute(line, wave=wave, vectors=vectors, lanes=0)  # lanes that are off touch nothing


def test_uninitialised_bytes_are_poison() -> None:
    array = np.zeros(65, U32)
    wave, address = on(array, initialised=False)
    vectors = {ADDRESS: bits(address + 4 * LANE.astype(U64), U64), DATA: bits(7, U32)}
    with pytest.raises(
        EmulatorError, match="lane 0: read of 4 bytes at byte 0 of x, which are not all initialised"
    ):
        execute("global_load_dword v9, v[2:3], off", wave=wave, vectors=vectors)
    execute("global_store_dword v[2:3], v8, off", wave=wave, vectors=vectors, lanes=0xFF)
    execute("global_load_dword v9, v[2:3], off", wave=wave, vectors=vectors, lanes=0xFF)
    with pytest.raises(EmulatorError, match="lane 8"):
        execute("global_load_dword v9, v[2:3], off", wave=wave, vectors=vectors, lanes=0x1FF)
    execute("global_store_short v[2:3], v8, off", wave=wave, vectors=vectors, lanes=0x100)
    with pytest.raises(EmulatorError, match="lane 8"):  # half of it is written now
        execute("global_load_dword v9, v[2:3], off", wave=wave, vectors=vectors, lanes=0x100)
    with pytest.raises(EmulatorError, match="uninitialised"):
        execute("s_load_dword s8, s[6:7], 0x100", wave=wave, scalars={6: address & MASK32, 7: address >> 32})


def test_read_only_and_discontiguous_arrays() -> None:
    array = np.zeros(64, U32)
    array.flags.writeable = False
    wave, address = on(array)
    with pytest.raises(EmulatorError, match="write to x, which is read-only"):
        execute("global_store_dword v[2:3], v8, off", wave=wave, vectors={ADDRESS: bits(address, U64)})
    with pytest.raises(ValueError, match="x is not contiguous"):
        Memory().add(np.zeros((4, 4))[:, :2], "x")


def test_arrays_of_any_shape_and_size() -> None:
    memory = Memory()
    scalar, empty = np.array(3.0, np.float64), np.zeros((0, 5), np.float16)
    first, nothing, third = (memory.add(array, "x") for array in (scalar, empty, np.zeros(3, U8)))
    assert memory.read(first, 8) == scalar.tobytes()
    assert first < nothing < third and not any(address % 256 for address in (first, nothing, third))
    with pytest.raises(EmulatorError):
        memory.read(nothing, 4)


def test_half_register_loads_leave_no_usable_other_half() -> None:
    wave, address = on(np.full(64, 0x12345678, U32))
    vectors = {ADDRESS: bits(address, U64), 8: bits(0, U32), 9: bits(0, U32)}
    execute(
        "global_load_short_d16 v8, v[2:3], off",
        "global_load_short_d16_hi v9, v[2:3], off",
        wave=wave,
        vectors=vectors,
    )
    assert set(result(wave, U32, 8)) == {POISON & 0xFFFF0000 | 0x5678}
    assert set(result(wave, U32, 9)) == {0x56780000 | POISON & 0xFFFF}


# ---- buffers


def test_buffer_bounds_are_silent() -> None:
    """Past the descriptor's size lanes read 0 and write nothing; past the array it is still an error."""
    array = np.arange(64, dtype=U32)
    wave, address = on(array)
    scalars = {4: address & MASK32, 5: address >> 32, 6: 40, 7: 0x27000, 8: 8}
    vectors = {4: bits(4 * LANE, U32), 9: bits(99, U32)}
    lines = (
        "buffer_load_dword v8, v4, s[4:7], 0 offen",
        "buffer_load_dword v10, v4, s[4:7], s8 offen offset:4",
    )
    execute(
        *lines,
        "buffer_store_dword v9, v4, s[4:7], 0 offen offset:36",
        wave=wave,
        vectors=vectors,
        scalars=scalars,
    )
    np.testing.assert_array_equal(result(wave, U32, 8), [i if i < 10 else 0 for i in range(64)])
    np.testing.assert_array_equal(result(wave, U32, 10), [i + 3 if i < 7 else 0 for i in range(64)])
    np.testing.assert_array_equal(array, [99 if i == 9 else i for i in range(64)])
    with pytest.raises(EmulatorError, match="byte 256 of x"):
        execute(lines[0], wave=wave, vectors={4: bits(4 * LANE + 4, U32)}, scalars={6: 0x7FFFFFFE})
    with pytest.raises(EmulatorError, match="swizzled"):
        execute(lines[0], wave=wave, scalars={5: address >> 32 | 1 << 31})


def test_buffer_without_lane_offset() -> None:
    wave, address = on(np.arange(64, dtype=U32))
    scalars = {4: address & MASK32, 5: address >> 32, 6: 256, 7: 0, 8: 8}
    execute("buffer_load_dwordx2 v[8:9], off, s[4:7], s8 offset:4", wave=wave, scalars=scalars)
    assert set(result(wave, U32, 8)) == {3} and set(result(wave, U32, 9)) == {4}


# ---- atomics


@pytest.mark.parametrize(
    ("line", "start", "operand", "end"),
    [
        ("global_atomic_add v[2:3], v8, off", 5, 2, 5 + 2 * 64),
        ("global_atomic_sub v[2:3], v8, off", 5, 2, 5 - 2 * 64 & MASK32),
        ("global_atomic_smax v[2:3], v8, off", -5 & MASK32, -7 & MASK32, -5 & MASK32),
        ("global_atomic_umin v[2:3], v8, off", 9, 7, 7),
        ("global_atomic_or v[2:3], v8, off", 8, 7, 15),
        ("global_atomic_swap v[2:3], v8, off", 8, 7, 7),
    ],
)
def test_integer_atomics_on_one_address(line: str, start: int, operand: int, end: int) -> None:
    array = np.array([start, 0], U32)
    wave, address = on(array)
    execute(line, wave=wave, vectors={ADDRESS: bits(address, U64), DATA: bits(operand, U32)})
    assert list(array) == [end, 0]


def test_atomics_return_the_old_value() -> None:
    array = np.zeros(2, F32)
    wave, address = on(array)
    vectors = {ADDRESS: bits(address, U64), DATA: bits(1.5, F32)}
    execute("global_atomic_add_f32 v9, v[2:3], v8, off sc0", wave=wave, vectors=vectors, lanes=0b1011)
    assert array[0] == 4.5
    assert sorted(result(wave, F32, 9)[[0, 1, 3]]) == [0.0, 1.5, 3.0]
    assert result(wave, U32, 9)[2] == POISON
    wide = np.arange(64, dtype=U64) << U64(32)
    wave, address = on(wide)
    vectors = {ADDRESS: bits(address + 8 * LANE.astype(U64), U64), DATA: bits((1 << 33) + 1, U64)}
    execute(
        "global_atomic_add_x2 v[10:11], v[2:3], v[8:9], off glc", arch="gfx90a", wave=wave, vectors=vectors
    )
    np.testing.assert_array_equal(result(wave, U64, 10), LANE.astype(U64) << U64(32))
    np.testing.assert_array_equal(wide, (LANE.astype(U64) + U64(2)) * U64(1 << 32) + U64(1))


def test_compare_and_swap() -> None:
    array = np.array([7, 8], U32)
    wave, address = on(array)
    vectors = {
        ADDRESS: bits(address, U64),
        DATA: bits(LANE + 100, U32),
        DATA + 1: bits(np.where(LANE == 5, 7, 8), U32),
    }
    execute("global_atomic_cmpswap v10, v[2:3], v[8:9], off sc0", wave=wave, vectors=vectors)
    assert list(array) == [105, 8]
    np.testing.assert_array_equal(result(wave, U32, 10), [7 if i <= 5 else 105 for i in range(64)])


def test_packed_and_buffer_atomics() -> None:
    array = np.zeros(64, U32)
    wave, address = on(array)
    scalars = {4: address & MASK32, 5: address >> 32, 6: 128, 7: 0}
    vectors = {4: bits(4 * LANE, U32), DATA: bits(f16(1.0) | f16(2.0) << 16, U32)}
    execute("buffer_atomic_pk_add_f16 v8, v4, s[4:7], 0 offen", wave=wave, vectors=vectors, scalars=scalars)
    np.testing.assert_array_equal(array, [f16(1.0) | f16(2.0) << 16 if i < 32 else 0 for i in range(64)])


# ---- LDS


def local_wave(size: int, index: int = 0) -> Wave:
    return new_wave(index, WorkGroup(Memory(), 0, size))


def test_local_loads_and_stores() -> None:
    wave = local_wave(4096)
    values = np.random.default_rng(0).integers(0, 1 << 32, (4, 64), dtype=np.uint32)
    lines = (
        "ds_write_b128 v2, v[8:11]",
        "ds_read_b128 v[12:15], v2",
        "ds_read_b64 v[16:17], v2 offset:8",
        "ds_read2_b32 v[18:19], v2 offset0:1 offset1:3",
        "ds_read2_b64 v[20:23], v2 offset0:1 offset1:0",
        "ds_read_i8 v24, v2 offset:5",
        "ds_read_u16 v25, v2 offset:6",
        "ds_write_b8 v2, v8 offset:15",
        "ds_write_b16_d16_hi v2, v9 offset:12",
        "ds_read_b32 v26, v2 offset:12",
    )
    execute(*lines, wave=wave, vectors={2: bits(16 * LANE, U32), 8: values})
    np.testing.assert_array_equal(wave.vectors[12:16], values)
    np.testing.assert_array_equal(wave.vectors[16:18], values[2:])
    np.testing.assert_array_equal(wave.vectors[18:20], values[[1, 3]])
    np.testing.assert_array_equal(wave.vectors[20:24], values[[2, 3, 0, 1]])
    np.testing.assert_array_equal(result(wave, np.int32, 24), (values[1] >> 8).astype(np.int8))
    np.testing.assert_array_equal(result(wave, U32, 25), values[1] >> 16)
    expected = values[0] << 24 | values[3] & 0xFF0000 | values[1] >> 16
    np.testing.assert_array_equal(result(wave, U32, 26), expected)


def test_strided_pairs() -> None:
    wave = local_wave(4096)
    lines = (
        "ds_write2st64_b32 v2, v8, v9 offset0:1 offset1:2",
        "ds_read2st64_b32 v[10:11], v2 offset0:2 offset1:1",
    )
    execute(*lines, wave=wave, vectors={2: bits(4 * LANE, U32), 8: bits(LANE, U32), 9: bits(LANE + 100, U32)})
    np.testing.assert_array_equal(result(wave, U32, 10), LANE + 100)
    np.testing.assert_array_equal(result(wave, U32, 11), LANE)
    execute("v_add_u32_e32 v2, 0x100, v2", "ds_read_b32 v12, v2", wave=wave)
    np.testing.assert_array_equal(result(wave, U32, 12), LANE)


@pytest.mark.parametrize(
    ("line", "first", "message"),
    [
        ("ds_write_b32 v2, v8", 4, "lane 63: LDS write of 4 bytes at byte 256 of 256"),
        ("ds_write_b64 v2, v[8:9]", 0, "lane 63: LDS write of 8 bytes at byte 252 of 256"),
        ("ds_write_b32 v2, v8", 2, "lane 0: LDS write of 4 bytes at byte 2 of 256"),
        ("ds_read_b32 v8, v2", 0, "LDS read of byte 0, which was never written"),
        ("ds_read_u8 v8, v2", 0, "LDS read of byte 0, which was never written"),
    ],
)
def test_wrong_local_accesses(line: str, first: int, message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        execute(line, wave=local_wave(256), vectors={2: bits(4 * LANE + first, U32), 8: bits(0, U64)})


def access(group: WorkGroup, index: int, *lines: str, at: int = 0, value: Any = 1) -> Wave:
    """One lane of a wave runs LDS instructions on byte `at`."""
    wave = new_wave(index, group)
    return execute(*lines, wave=wave, vectors={2: bits(at, U32), 8: bits(value, U32)}, lanes=1)


def test_waves_need_a_barrier_between_write_and_read() -> None:
    group = WorkGroup(Memory(), 0, 64)
    access(group, 0, "ds_write_b32 v2, v8", "ds_read_b32 v9, v2")  # its own values it may read
    with pytest.raises(EmulatorError, match="LDS read of byte 0, which wave 0 wrote since the last barrier"):
        access(group, 1, "ds_read_b32 v9, v2")
    with pytest.raises(EmulatorError, match="LDS read of byte 3, which wave 0 wrote"):
        access(group, 1, "ds_read_u8 v9, v2", at=3)
    group.local.barrier()
    assert result(access(group, 1, "ds_read_b32 v9, v2"), U32, 9)[0] == 1


def test_waves_need_a_barrier_between_read_and_write() -> None:
    group = WorkGroup(Memory(), 0, 64)
    access(group, 0, "ds_write_b32 v2, v8")
    group.local.barrier()
    access(group, 0, "ds_read_u16 v9, v2", at=2)
    with pytest.raises(EmulatorError, match="LDS write of byte 2, which wave 0 read since the last barrier"):
        access(group, 1, "ds_write_b32 v2, v8", value=0x10001)
    access(group, 1, "ds_write_b16 v2, v8", at=0, value=5)  # the other half nobody reads
    access(group, 2, "ds_read_u16 v9, v2", at=2)
    with pytest.raises(EmulatorError, match="several waves read"):
        access(group, 0, "ds_write_b16 v2, v8", at=2, value=9)
    group.local.barrier()
    access(group, 1, "ds_write_b32 v2, v8", value=9)


def test_two_waves_may_write_the_same_value_only() -> None:
    group = WorkGroup(Memory(), 0, 64)
    access(group, 0, "ds_write_b64 v2, v[8:9]", value=3)
    access(group, 1, "ds_write_b32 v2, v8", value=3)
    with pytest.raises(EmulatorError, match="LDS write of byte 0, which wave 1 wrote since the last barrier"):
        access(group, 2, "ds_write_b32 v2, v8", value=4)


def test_values_pass_between_lanes_without_memory() -> None:
    vectors = {2: bits(4 * (63 - LANE), U32), 8: bits(LANE + 10, U32)}
    lines = (
        "ds_bpermute_b32 v9, v2, v8",
        "ds_permute_b32 v10, v2, v8",
        "ds_swizzle_b32 v11, v8 offset:0x8055",
    )
    wave = execute(*lines, "ds_swizzle_b32 v12, v8 offset:swizzle(SWAP,16)", vectors=vectors)
    np.testing.assert_array_equal(result(wave, U32, 9), 73 - LANE)
    np.testing.assert_array_equal(result(wave, U32, 10), 73 - LANE)
    np.testing.assert_array_equal(result(wave, U32, 11), (LANE & ~3) + 1 + 10)
    np.testing.assert_array_equal(result(wave, U32, 12), (LANE ^ 16) + 10)
    wave = execute("ds_bpermute_b32 v9, v2, v8", vectors={9: bits(99, U32), **vectors}, lanes=0b11)
    assert list(result(wave, U32, 9)[:3]) == [0, 0, 99]  # the sources are off


@pytest.mark.parametrize(
    "line",
    [
        "ds_add_u32 v2, v8",
        "global_atomic_inc v[2:3], v8, off",
        "scratch_load_dword v8, off, s4",
        "buffer_load_dword v8, v4, s[4:7], 0 idxen",
        "s_buffer_load_dword s8, s[4:7], 0x0",
    ],
)
def test_what_is_not_implemented_is_refused(line: str) -> None:
    with pytest.raises(EmulatorError):
        execute(line)
