"""How vector instructions read and write lanes: DPP, SDWA, halves of registers (op_sel), clamp."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .arithmetic import clamp_to_one
from .errors import EmulatorError
from .instruction import Instruction, Modifier
from .operand import BITS, DTYPES, Operand, Reader, Value, expect, modify, raw_reader, reader
from .wave import LANE, Wave, lanes_of, mask_of

_DPP_CONTROLS = (
    "quad_perm",
    *(f"row_{kind}" for kind in ("shl", "shr", "ror", "bcast", "newbcast", "mirror", "half_mirror")),
    *("row_share", "row_xmask", "dpp8"),
    *(f"wave_{kind}" for kind in ("shl", "shr", "rol", "ror")),
)
DPP_MODIFIERS = (*_DPP_CONTROLS, "row_mask", "bank_mask", "bound_ctrl", "fi")
SDWA_MODIFIERS = ("dst_sel", "dst_unused", "src0_sel", "src1_sel")
# selector -> (first bit, bits)
_SELECT = {
    **{f"BYTE_{i}": (8 * i, 8) for i in range(4)},
    **{f"WORD_{i}": (16 * i, 16) for i in range(2)},
    "DWORD": (0, 32),
}
Writer = Callable[[Wave, Value], None]


def dpp_sources(control: str, value: Modifier, lanes: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """The lane that each of so many lanes reads, and whether there is one (else the lane number means nothing)."""
    all_lanes = LANE[:lanes]
    row, lane_in_row = all_lanes & ~15, all_lanes & 15
    everywhere = np.ones(lanes, np.bool_)
    if control in ("quad_perm", "dpp8"):
        picks = np.array(value)
        return (all_lanes & -len(picks)) + picks[all_lanes & len(picks) - 1], everywhere
    if control == "row_mirror":
        return row + 15 - lane_in_row, everywhere
    if control == "row_half_mirror":
        return row + (lane_in_row ^ 7), everywhere
    assert isinstance(value, int)
    amount = value
    if control == "row_shl":
        return np.minimum(all_lanes + amount, lanes - 1), lane_in_row + amount < 16
    if control == "row_shr":
        return np.maximum(all_lanes - amount, 0), lane_in_row >= amount
    if control == "row_ror":
        return row + (lane_in_row - amount & 15), everywhere
    if control in ("row_newbcast", "row_share"):
        return row + amount, everywhere
    if control == "row_xmask":
        return row + (lane_in_row ^ amount), everywhere
    if control == "row_bcast" and amount == 15:
        return np.maximum(row - 1, 0), row > 0
    if control == "row_bcast" and amount == 31:
        return np.full(lanes, 31), all_lanes > 31
    if control.startswith("wave_") and amount == 1:
        step = 1 if control.endswith("l") else -1
        wraps = control.startswith("wave_ro")
        source = all_lanes + step
        return source & 63, everywhere if wraps else (source & 63) == source
    raise EmulatorError(f"unknown DPP control {control}:{value}")


def _dpp(instruction: Instruction) -> tuple[np.ndarray, np.ndarray] | None:
    for control in _DPP_CONTROLS:
        if control in instruction.modifiers:
            return dpp_sources(control, instruction.modifiers[control], instruction.architecture.lanes)
    return None


def source(instruction: Instruction, position: int, slot: int, name: str) -> Reader:
    """Read operand number `position` as type `name`; `slot` is its number among the sources."""
    operand = instruction.operands[position]
    if instruction.sdwa and slot < 2:
        return _sdwa_source(operand, instruction.modifiers[f"src{slot}_sel"], name)
    if operand.sign_extend:
        raise EmulatorError("sext() outside SDWA")
    dpp = _dpp(instruction)
    if dpp and slot == 0:
        if operand.half == "h":
            raise EmulatorError("DPP on the upper half of a register")
        zero, inactive = "bound_ctrl" in instruction.modifiers, "fi" in instruction.modifiers
        return modify(_dpp_source(operand, dpp, name, zero, inactive), operand, name)
    return reader(operand, name, BITS[name] == 16 and _is_high(instruction, operand, slot))


def _is_high(instruction: Instruction, operand: Operand, slot: int) -> bool:
    """Whether a 16-bit operand is the high half of its register."""
    if operand.half:
        return operand.half == "h"
    return bool(instruction.bits("op_sel", 0, slot + 1)[slot])


def _dpp_source(
    operand: Operand, dpp: tuple[np.ndarray, np.ndarray], name: str, zero: bool, inactive: bool
) -> Reader:
    """`zero`: what has no source reads 0; `inactive`: inactive lanes are a source too."""
    lane, exists = dpp
    if operand.kind != "vector":
        raise EmulatorError("DPP on an operand that is not a vector register")
    read = raw_reader(operand, name)
    if not zero:  # lanes without a source are not written at all
        return lambda wave: read(wave)[lane]
    nothing = DTYPES[name](0)
    if inactive:
        return lambda wave: np.where(exists, read(wave)[lane], nothing)
    return lambda wave: np.where(exists & wave.lanes[lane], read(wave)[lane], nothing)


def _sdwa_source(operand: Operand, selector: Modifier, name: str) -> Reader:
    if BITS[name] == 64:
        raise EmulatorError("SDWA on a 64-bit operand")
    first, bits = _SELECT[str(selector)]
    read = raw_reader(operand.unmodified(), "b32")
    dtype, sign = DTYPES[name], np.uint32(1 << bits - 1)
    mask, shift, sign_extend = np.uint32((1 << bits) - 1), np.uint32(first), operand.sign_extend
    narrow = BITS[name] == 16

    def select(wave: Wave) -> Value:
        value = read(wave) >> shift & mask
        if sign_extend:
            value = (value ^ sign) - sign
        return value.astype(np.uint16).view(dtype) if narrow else value.view(dtype)

    return modify(select, operand, name)


def written_lanes(instruction: Instruction) -> Callable[[Wave], np.ndarray] | None:
    """The lanes that a DPP instruction writes; None where that is EXEC."""
    dpp = _dpp(instruction)
    if dpp is None:
        return None
    lane, exists = dpp
    rows, banks = instruction.integer("row_mask", 15), instruction.integer("bank_mask", 15)
    numbers = LANE[: instruction.architecture.lanes]
    enabled = (rows >> (numbers >> 4) & banks >> ((numbers & 15) >> 2) & 1).astype(np.bool_)
    if "bound_ctrl" in instruction.modifiers:
        return lambda wave: wave.lanes & enabled
    enabled = enabled & exists
    if "fi" in instruction.modifiers:
        return lambda wave: wave.lanes & enabled
    return lambda wave: wave.lanes & enabled & wave.lanes[lane]


def destination(instruction: Instruction, name: str, keep_high: bool = False) -> Writer:
    """Write a result of type `name` to the first operand, in the lanes that the instruction writes.

    The clamp modifier of floats is applied here, that of integers is part of their function. A 16-bit result
    clears the high half of its register, or keeps it if `keep_high`, and on RDNA always.
    """
    write = _plain_destination(instruction, name, keep_high or instruction.architecture.rdna)
    if "clamp" not in instruction.modifiers or name[0] != "f":
        return write
    return lambda wave, value: write(wave, clamp_to_one(value))


def _plain_destination(instruction: Instruction, name: str, keep_high: bool) -> Writer:
    operand, bits = instruction.operands[0], BITS[name]
    register = expect(operand, "vector", max(1, bits // 32))
    lanes = written_lanes(instruction)
    if bits == 64:
        if lanes or instruction.modifiers.get("dst_sel", "DWORD") != "DWORD":
            raise EmulatorError("DPP or SDWA on a 64-bit result")
        return lambda wave, value: wave.set_vectors(register, pair(value, wave.size))
    if bits == 16 or "dst_sel" in instruction.modifiers:
        return _partial_destination(instruction, register, bits, keep_high)
    if lanes:
        return lambda wave, value: np.copyto(wave.vectors[register], value.view(np.uint32), where=lanes(wave))
    if name == "f32":
        return _float_destination(register)
    return lambda wave, value: wave.set_vector(register, value.view(np.uint32))


def _float_destination(register: int) -> Writer:
    def write(wave: Wave, value: Value) -> None:
        if wave.all_lanes:
            wave.floats[register] = value
        else:
            np.copyto(wave.floats[register], value, where=wave.lanes)

    return write


def pair(value: Value, lanes: int) -> np.ndarray:
    """64-bit values as uint32 of shape (2, lanes), low words first."""
    return np.ascontiguousarray(np.broadcast_to(value, lanes)).view(np.uint32).reshape(lanes, 2).T


def _partial_destination(instruction: Instruction, register: int, bits: int, keep_high: bool) -> Writer:
    """Place a result in some bits of the register; the others are zeroed or kept."""
    first, width, keeps = 0, 32, False
    if "dst_sel" in instruction.modifiers:
        first, width = _SELECT[str(instruction.modifiers["dst_sel"])]
        unused = instruction.modifiers["dst_unused"]
        if unused not in ("UNUSED_PAD", "UNUSED_PRESERVE"):
            raise EmulatorError(f"dst_unused:{unused} is not implemented")
        keeps = unused == "UNUSED_PRESERVE"
    else:
        sources = len(instruction.operands) - 1
        half = instruction.operands[0].half
        selected = int(half == "h") if half else instruction.bits("op_sel", 0, sources + 1)[sources]
        keeps = keep_high or bool(selected)
        first, width = 16 * selected, 16 if keeps else 32
    lanes = written_lanes(instruction)
    pattern = np.uint16 if bits == 16 else np.uint32
    shift, mask = np.uint32(first), np.uint32((1 << width) - 1)
    kept = ~(mask << shift)

    def write(wave: Wave, value: Value) -> None:
        placed = (value.view(pattern).astype(np.uint32) & mask) << shift
        if keeps:
            placed = placed | wave.vectors[register] & kept
        np.copyto(wave.vectors[register], placed, where=wave.lanes if lanes is None else lanes(wave))

    return write


def keeps_high_half(name: str) -> bool:
    """Whether a 16-bit instruction keeps the other half of its result register: those of three operands do."""
    return bool(re.match(r"v_(fma|fmac|mad|med3|min3|max3|div_fixup)_[fui]16$|v_cvt_pk_fp8_f32$", name))


def mask_reader(instruction: Instruction, operand: Operand) -> Callable[[Wave], np.ndarray]:
    """Read a mask as one bool a lane."""
    if operand.kind == "null":
        nothing = np.zeros(instruction.architecture.lanes, np.bool_)
        return lambda wave: nothing
    register = expect(operand, "scalar", instruction.architecture.mask_registers)
    if instruction.architecture.mask_registers == 2:
        return lambda wave: lanes_of(wave.scalar64(register))
    return lambda wave: lanes_of(wave.scalars[register], wave.size)


def mask_writer(instruction: Instruction, operand: Operand) -> Callable[[Wave, np.ndarray], None]:
    """Write one bool a lane as a mask."""
    if operand.kind == "null":
        return lambda wave, lanes: None
    register = expect(operand, "scalar", instruction.architecture.mask_registers)
    if instruction.architecture.mask_registers == 2:
        return lambda wave, lanes: wave.set_scalar64(register, mask_of(lanes))
    return lambda wave, lanes: wave.set_scalar(register, mask_of(lanes))
