"""Vector memory instructions: global and buffer loads, stores and atomics, and LDS (ds_) instructions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from .errors import EmulatorError
from .instruction import Instruction
from .operand import Operand, Value, expect, reader
from .scalar import Step
from .wave import LANE, MASK64, POISON, Wave

# suffix -> (bytes, sign-extended)
_LOADS = (
    {"ubyte": (1, False), "sbyte": (1, True), "ushort": (2, False), "sshort": (2, True), "short": (2, False)}
    | {"dword": (4, False), "dwordx2": (8, False), "dwordx3": (12, False), "dwordx4": (16, False)}
    | {"u8": (1, False), "i8": (1, True), "u16": (2, False), "i16": (2, True)}
    | {"b32": (4, False), "b64": (8, False), "b96": (12, False), "b128": (16, False)}
)
_STORES = {"byte": 1, "short": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16} | {
    "b8": 1,
    "b16": 2,
    "b32": 4,
    "b64": 8,
    "b96": 12,
    "b128": 16,
}
_CACHE_HINTS = ("glc", "slc", "dlc", "sc0", "sc1", "nt", "th", "scope")
# Of which these write back or empty some.
_CACHES = ("wbl2", "inv", "wbinvl1", "wbinvl1_vol", "gl0_inv", "gl1_inv", "wb")
# suffix -> (dtype, new value from (old, operand))
_ATOMICS: dict[str, tuple[type[np.generic], Callable[[Value, Value], Value]]] = {
    "add": (np.uint32, lambda old, x: old + x),
    "sub": (np.uint32, lambda old, x: old - x),
    "smin": (np.int32, np.minimum),
    "smax": (np.int32, np.maximum),
    "umin": (np.uint32, np.minimum),
    "umax": (np.uint32, np.maximum),
    "and": (np.uint32, lambda old, x: old & x),
    "or": (np.uint32, lambda old, x: old | x),
    "xor": (np.uint32, lambda old, x: old ^ x),
    "swap": (np.uint32, lambda old, x: x),
    "add_x2": (np.uint64, lambda old, x: old + x),
    "swap_x2": (np.uint64, lambda old, x: x),
    "add_f32": (np.float32, lambda old, x: old + x),
    "add_f64": (np.float64, lambda old, x: old + x),
    "pk_add_f16": (np.float16, lambda old, x: old + x),
}
Address = Callable[[Wave], "tuple[np.ndarray, np.ndarray]"]  # (uint64 addresses, lanes that access memory)


def build(instruction: Instruction) -> Step:
    """The step that executes a global_, flat_ or buffer_ instruction."""
    family, _, rest = instruction.base_name.partition("_")
    if rest in _CACHES:
        return lambda wave: None  # there are none
    instruction.allow("offset", "offen", *_CACHE_HINTS)
    op, _, what = rest.partition("_")
    operands = [*instruction.operands]
    # The register that an atomic returns to is an operand of its own, except in a buffer instruction.
    returns = op == "atomic" and bool(instruction.modifiers.keys() & {"glc", "sc0", "th"})
    if family == "buffer":
        instruction.expect(4)
        data, result, address = operands[0], operands[0], _buffer_address(instruction, operands)
    elif family in ("global", "flat"):
        result = operands.pop(0) if returns or op == "load" else None
        pointer = operands.pop(0)
        data = result if op == "load" else operands.pop(0)
        address = _global_address(instruction, pointer, operands)
    else:
        raise EmulatorError("unknown memory instruction")
    if op == "load":
        return _load(what, data, address, instruction.architecture.rdna)
    if op == "store":
        return _store(what, data, address)
    if op == "atomic":
        return _atomic(what, data, address, result if returns else None)
    raise EmulatorError("unknown memory instruction")


def _global_address(instruction: Instruction, pointer: Operand, rest: Sequence[Operand]) -> Address:
    """A 64-bit address a lane, or a scalar base and a 32-bit offset a lane; and a constant offset."""
    constant = instruction.integer("offset")
    if rest and rest[0].kind == "scalar":
        base, offset = expect(rest[0], "scalar", 2), expect(pointer, "vector", 1)
        return lambda wave: (
            wave.vectors[offset].astype(np.uint64) + np.uint64(wave.scalar64(base) + constant & MASK64),
            wave.lanes,
        )
    if len(rest) > 1 or (rest and rest[0].kind != "off"):
        raise EmulatorError("unknown address form")
    address = reader(pointer, "u64")
    return lambda wave: (address(wave) + np.uint64(constant & MASK64), wave.lanes)


def _buffer_address(instruction: Instruction, operands: Sequence[Operand]) -> Address:
    """A raw buffer: lanes past the descriptor's number of bytes read 0 and write nothing."""
    has_offset = "offen" in instruction.modifiers
    offset = expect(operands[1], "vector", 1) if has_offset else None
    if not has_offset and operands[1].kind != "off":
        raise EmulatorError("unknown address form")
    descriptor, scalar_offset = expect(operands[2], "scalar", 4), reader(operands[3], "u32")
    constant, swizzle = instruction.integer("offset"), 30 if instruction.architecture.rdna else 31

    def address(wave: Wave) -> tuple[np.ndarray, np.ndarray]:
        low, high, limit, _ = wave.scalars[descriptor : descriptor + 4]
        if high >> swizzle:
            raise EmulatorError("swizzled buffers are not implemented")
        moved = int(scalar_offset(wave))
        lane_offset = (
            np.zeros(wave.size, np.uint64) if offset is None else wave.vectors[offset].astype(np.uint64)
        )
        total = lane_offset + np.uint64(constant)
        inside = wave.lanes & (total < np.uint64(max(limit - moved, 0)))
        return total + np.uint64((low | (high & 0xFFFF) << 32) + moved), inside

    return address


def _extend(values: np.ndarray, size: int, signed: bool) -> np.ndarray:
    if not signed:
        return values
    narrow = np.int8 if size == 1 else np.int16
    return values.astype(narrow).astype(np.int32).view(np.uint32)


def _parse_load(what: str) -> tuple[int, bool, str]:
    """(bytes, sign-extended, "" or "lo" or "hi": the half register it goes to)"""
    match = re.fullmatch(r"(\w+?)(_d16)?(_hi)?", what)
    if not match or match[1] not in _LOADS or (match[3] and not match[2]):
        raise EmulatorError("unknown load")
    return *_LOADS[match[1]], ("hi" if match[3] else "lo") if match[2] else ""


def _to_half(values: np.ndarray, half: str, kept: np.ndarray | None) -> np.ndarray:
    """A d16 load leaves the other half of its register alone (`kept` is the register), but with SRAM ECC, which
    CDNA has, nothing of use is in it."""
    values = values & np.uint32(0xFFFF)
    if kept is not None:
        if half == "hi":
            return values << np.uint32(16) | kept & np.uint32(0xFFFF)
        return values | kept & np.uint32(0xFFFF0000)
    return (
        values << np.uint32(16) | np.uint32(POISON & 0xFFFF)
        if half == "hi"
        else values | np.uint32(POISON & ~0xFFFF)
    )


def _load(what: str, data: Operand, address: Address, keeps: bool) -> Step:
    size, signed, half = _parse_load(what)
    register = expect(data, "vector", max(1, size // 4))

    def step(wave: Wave) -> None:
        addresses, lanes = address(wave)
        values = _extend(wave.group.memory.load(addresses, size, lanes), size, signed)
        if half:
            values = _to_half(values, half, wave.vectors[register] if keeps else None)
        wave.set_vectors(register, values)

    return step


def _parse_store(what: str) -> tuple[int, bool]:
    """(bytes, from the high half of the register)"""
    plain = what.removesuffix("_d16_hi")
    if plain not in _STORES:
        raise EmulatorError("unknown store")
    return _STORES[plain], plain != what


def _stored(wave: Wave, register: int, size: int, high: bool) -> np.ndarray:
    values = wave.vectors[register : register + max(1, size // 4)]
    return values >> np.uint32(16) if high else values


def _store(what: str, data: Operand, address: Address) -> Step:
    size, high = _parse_store(what)
    register = expect(data, "vector", max(1, size // 4))

    def step(wave: Wave) -> None:
        addresses, lanes = address(wave)
        wave.group.memory.store(addresses, _stored(wave, register, size, high), size, lanes)

    return step


def _atomic(what: str, data: Operand, address: Address, result: Operand | None) -> Step:
    """Lanes take their turns in order; on hardware the order is open."""
    compares = what in ("cmpswap", "cmpswap_x2")
    dtype, function = _ATOMICS.get(what.replace("cmpswap", "swap"), (None, None))
    if dtype is None or function is None:
        raise EmulatorError("unknown atomic")
    count = 2 if what.endswith(("_x2", "f64")) else 1
    size = 4 * count
    register = expect(data, "vector", count * (2 if compares else 1))
    returned = expect(Operand(result.kind, result.register, count), "vector", count) if result else None

    def turn(wave: Wave, addresses: np.ndarray, lanes: np.ndarray) -> None:
        memory = wave.group.memory
        old = memory.load(addresses, size, lanes)
        operand = wave.vectors[register : register + count]
        new = function(_join(old, dtype), _join(operand, dtype))
        stored = np.ascontiguousarray(new).view(np.uint32).reshape(wave.size, count).T
        if compares:
            expected = wave.vectors[register + count : register + 2 * count]
            stored = np.where((old == expected).all(axis=0), operand, old)
        memory.store(addresses, stored, size, lanes)
        if returned is not None:
            np.copyto(wave.vectors[returned : returned + count], old, where=lanes)

    def step(wave: Wave) -> None:
        addresses, lanes = address(wave)
        active = np.flatnonzero(lanes)
        if np.unique(addresses[active]).size == active.size:
            return turn(wave, addresses, lanes)
        for lane in active:
            turn(wave, addresses, lane == LANE[: wave.size])

    return step


def _join(rows: np.ndarray, dtype: type[np.generic]) -> np.ndarray:
    """uint32 of shape (n, 64) as one value of `dtype` (or a pair of halves) a lane."""
    return np.ascontiguousarray(rows.T).view(dtype)


def build_local(instruction: Instruction) -> Step:
    """The step that executes a ds_ instruction."""
    name, architecture = instruction.base_name, instruction.architecture
    instruction.allow("offset", "offset0", "offset1")
    operands = [*instruction.operands]
    if name in ("ds_bpermute_b32", "ds_permute_b32"):
        instruction.expect(3)
        return _permute(*operands, instruction.integer("offset"), pulls=name == "ds_bpermute_b32")
    if name == "ds_swizzle_b32":
        instruction.expect(2)
        return _swizzle(*operands, instruction.words[0] & 0xFFFF, architecture.lanes)
    if name in ("ds_read_b64_tr_b8", "ds_read_b64_tr_b16"):
        instruction.expect(2)
        dtype = np.uint8 if name.endswith("b8") else np.uint16
        return _read_transposed(*operands, instruction.integer("offset"), dtype)
    match = re.fullmatch(r"ds_(read|write)(2)?(st64)?_(\w+)", name)
    if not match or (match[3] and not match[2]):
        raise EmulatorError("unknown LDS instruction")
    reads, two, what = match[1] == "read", bool(match[2]), match[4]
    instruction.expect(2 + (two and not reads))
    size = (_parse_load(what) if reads else _parse_store(what))[0]
    if two and size not in (4, 8):
        raise EmulatorError("unknown LDS instruction")
    if two:
        unit = size * (64 if match[3] else 1)
        offsets = [instruction.integer("offset0") * unit, instruction.integer("offset1") * unit]
    else:
        offsets = [instruction.integer("offset")]
    if reads:
        return _read_local(what, operands, offsets, architecture.rdna)
    return _write_local(what, operands, offsets)


def _read_local(what: str, operands: Sequence[Operand], offsets: list[int], keeps: bool) -> Step:
    size, signed, half = _parse_load(what)
    count = max(1, size // 4)
    register, address = expect(operands[0], "vector", count * len(offsets)), expect(operands[1], "vector", 1)

    def step(wave: Wave) -> None:
        base = wave.vectors[address].astype(np.int64)
        parts = [
            _extend(wave.group.local.load(wave, base + offset, size), size, signed) for offset in offsets
        ]
        for index, values in enumerate(parts):
            first = register + index * count
            if half:
                values = _to_half(values, half, wave.vectors[first] if keeps else None)
            wave.set_vectors(first, values)

    return step


def _write_local(what: str, operands: Sequence[Operand], offsets: list[int]) -> Step:
    size, high = _parse_store(what)
    address = expect(operands[0], "vector", 1)
    registers = [expect(operand, "vector", max(1, size // 4)) for operand in operands[1:]]

    def step(wave: Wave) -> None:
        base = wave.vectors[address].astype(np.int64)
        for register, offset in zip(registers, offsets, strict=True):
            wave.group.local.store(wave, base + offset, _stored(wave, register, size, high), size)

    return step


def _permute(result: Operand, lane_bytes: Operand, data: Operand, offset: int, pulls: bool) -> Step:
    """ds_bpermute reads from the lane whose number times 4 is given, ds_permute writes to it; not LDS."""
    register, index, values = (expect(operand, "vector", 1) for operand in (result, lane_bytes, data))

    def step(wave: Wave) -> None:
        lane = wave.vectors[index] + np.uint32(offset) >> np.uint32(2) & np.uint32(wave.size - 1)
        source = wave.vectors[values]
        if pulls:
            return wave.set_vector(register, np.where(wave.lanes[lane], source[lane], np.uint32(0)))
        moved = np.zeros(wave.size, np.uint32)
        moved[lane[wave.lanes]] = source[wave.lanes]
        return wave.set_vector(register, moved)

    return step


def _read_transposed(
    result: Operand, address: Operand, offset: int, dtype: type[np.uint8] | type[np.uint16]
) -> Step:
    """gfx950: each lane reads four 16-bit values or eight of 8 bits. The 16 lanes of a row thus hold a matrix of 4
    rows, four lanes each, or of 8, two lanes each, and 16 columns; lane number i of the row is given column i."""
    register, base = expect(result, "vector", 2), expect(address, "vector", 1)

    def step(wave: Wave) -> None:
        if not wave.all_lanes:
            raise EmulatorError("a transposing load with inactive lanes")
        read = wave.group.local.load(wave, wave.vectors[base].astype(np.int64) + offset, 8)
        rows = 8 // np.dtype(dtype).itemsize
        parts = np.ascontiguousarray(read.T).view(dtype).reshape(-1, rows, 16)  # row of lanes, row, column
        columns = np.ascontiguousarray(parts.transpose(0, 2, 1)).reshape(wave.size, rows)
        wave.set_vectors(register, columns.view(np.uint32).T)

    return step


def _swizzle(result: Operand, data: Operand, control: int, lanes: int) -> Step:
    """A fixed pattern within four lanes (bit 15 set) or within 32: and, or, xor masks of 5 bits."""
    register, values = expect(result, "vector", 1), expect(data, "vector", 1)
    numbers = LANE[:lanes]
    if control & 0x8000:
        if control >= 0xC000:
            raise EmulatorError("a rotation or a Fourier pattern of ds_swizzle")
        lane = (numbers & ~3) + np.array([control >> 2 * i & 3 for i in range(4)])[numbers & 3]
    else:
        lane = numbers & 32 | (numbers & 31 & control | control >> 5 & 31) ^ (control >> 10 & 31)

    def step(wave: Wave) -> None:
        wave.set_vector(register, np.where(wave.lanes[lane], wave.vectors[values][lane], np.uint32(0)))

    return step
