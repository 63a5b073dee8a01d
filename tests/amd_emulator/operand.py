"""Operands: parsing their text and building closures that read them from a wave."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .errors import EmulatorError
from .wave import EXEC, FIRST_ACCUMULATOR, M0, VCC, Wave

# The suffixes of instruction names, as numpy types. b is a plain bit pattern.
DTYPES: dict[str, type[np.generic]] = {
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
    **{f"{kind}{bits}": getattr(np, f"uint{bits}") for kind in "ub" for bits in (16, 32, 64)},
}
BITS = {name: 8 * np.dtype(dtype).itemsize for name, dtype in DTYPES.items()}
_UNSIGNED = {16: np.uint16, 32: np.uint32, 64: np.uint64}
_SIGN = {bits: dtype(1 << bits - 1) for bits, dtype in _UNSIGNED.items()}

# name -> (number in the scalar register file, registers)
_NAMED = {
    "vcc": (VCC, 2),
    "vcc_lo": (VCC, 1),
    "vcc_hi": (VCC + 1, 1),
    "m0": (M0, 1),
    "exec": (EXEC, 2),
    "exec_lo": (EXEC, 1),
    "exec_hi": (EXEC + 1, 1),
}
_REGISTER = re.compile(r"(?P<file>[vsa])(?:(?P<one>\d+)|\[(?P<first>\d+)(?::(?P<last>\d+))?\])")

# What a reader returns: an array over the 64 lanes, or a numpy scalar that broadcasts over them.
Value = Any
Reader = Callable[[Wave], Value]


@dataclass(frozen=True)
class Operand:
    """One operand. `kind` is vector, scalar, scc, integer, float or off.

    `register` numbers vector registers with the accumulation registers after the 256 others.
    """

    kind: str
    register: int = 0
    count: int = 1
    value: int | float = 0
    literal: bool = False  # a 32-bit constant behind the instruction, not one of the inline ones
    negate: bool = False
    absolute: bool = False
    sign_extend: bool = False

    @classmethod
    def parse(cls, text: str) -> Operand:
        for pattern, flags in (
            (r"sext\((.*)\)", {"sign_extend": True}),
            (r"neg\((.*)\)|-((?:\||[a-z]).*)", {"negate": True}),
            (r"abs\((.*)\)|\|(.*)\|", {"absolute": True}),
        ):
            if match := re.fullmatch(pattern, text):
                inner = next(group for group in match.groups() if group is not None)
                return replace(cls.parse(inner), **flags)
        if match := _REGISTER.fullmatch(text):
            first = int(match["one"] or match["first"])
            count = int(match["last"]) - first + 1 if match["last"] else 1
            if match["file"] == "s":
                return cls("scalar", first, count)
            return cls("vector", first + FIRST_ACCUMULATOR * (match["file"] == "a"), count)
        if text in _NAMED:
            return cls("scalar", *_NAMED[text])
        if text in ("off", "scc", "src_scc"):
            return cls(text.removeprefix("src_"))
        if re.fullmatch(r"0x[0-9a-f]+|-?\d+", text):
            return cls("integer", value=int(text, 0), literal=text.startswith("0x"))
        if re.fullmatch(r"-?\d+\.\d+(e[+-]?\d+)?", text):
            return cls("float", value=float(text))
        raise EmulatorError(f"unknown operand {text!r}")

    def unmodified(self) -> Operand:
        return replace(self, negate=False, absolute=False, sign_extend=False)

    def constant_bits(self, name: str) -> int:
        """The bit pattern of a constant where an operand of type `name` is read."""
        bits = BITS[name]
        if self.kind == "float":
            if name in ("i16", "u16", "b16"):
                raise EmulatorError("a floating-point constant for a 16-bit integer")
            return int.from_bytes(struct.pack({64: "<d", 32: "<f", 16: "<e"}[bits], self.value), "little")
        value = int(self.value)
        if bits == 64 and self.literal:
            if name == "f64":
                value <<= 32  # a literal is the high half of a double
            elif name == "i64":
                value -= (value & 1 << 31) << 1
        return value & (1 << bits) - 1


def expect(operand: Operand, kind: str, count: int) -> int:
    """The register number of an operand that must be `count` registers of that kind."""
    if operand.kind != kind or operand.count != count:
        raise EmulatorError(f"expected {count} {kind} register(s), found {operand}")
    return operand.register


def modify(read: Reader, operand: Operand, name: str) -> Reader:
    """Apply the operand's |x| and -x. On plain bits they act on the sign bit, as on a float."""
    if not (operand.negate or operand.absolute):
        return read
    if name[0] not in "fb":
        raise EmulatorError(f"sign modifier on an operand of type {name}")
    dtype, pattern, sign = DTYPES[name], _UNSIGNED[BITS[name]], _SIGN[BITS[name]]
    negate, absolute = operand.negate, operand.absolute

    def modified(wave: Wave) -> Value:
        bits = read(wave).view(pattern)
        if absolute:
            bits = bits & ~sign
        return (bits ^ sign if negate else bits).view(dtype)

    return modified


def raw_reader(operand: Operand, name: str, high_half: bool = False) -> Reader:
    """Read an operand as type `name` without its modifiers; `high_half` of a 32-bit register if set."""
    dtype, bits = DTYPES[name], BITS[name]
    if operand.kind == "vector":
        return _vector_reader(expect(operand, "vector", max(1, bits // 32)), dtype, bits, high_half)
    if operand.kind == "scalar":
        return _scalar_reader(expect(operand, "scalar", max(1, bits // 32)), dtype, bits, high_half)
    if operand.kind == "scc":
        return lambda wave: _UNSIGNED[bits](wave.scc).view(dtype)
    if operand.kind == "off":
        raise EmulatorError("'off' where a value is read")
    constant = _UNSIGNED[bits](0 if high_half else operand.constant_bits(name)).view(dtype)
    return lambda wave: constant


def reader(operand: Operand, name: str, high_half: bool = False) -> Reader:
    """Read an operand as type `name`, with its modifiers."""
    if operand.sign_extend:
        raise EmulatorError("sext() outside SDWA")
    return modify(raw_reader(operand, name, high_half), operand, name)


def _vector_reader(register: int, dtype: Any, bits: int, high_half: bool) -> Reader:
    if bits == 64:
        return lambda wave: wave.vectors[register : register + 2].T.copy().view(dtype).reshape(64)
    if dtype is np.uint32:
        return lambda wave: wave.vectors[register]
    if dtype is np.float32:
        return lambda wave: wave.floats[register]
    if bits == 32:
        return lambda wave: wave.vectors[register].view(dtype)
    # Little-endian halves: the low one first.
    return lambda wave: wave.vectors[register].view(dtype)[high_half::2]


def _scalar_reader(register: int, dtype: Any, bits: int, high_half: bool) -> Reader:
    if bits == 64:
        return lambda wave: np.uint64(wave.scalar64(register)).view(dtype)
    if bits == 32:
        return lambda wave: np.uint32(wave.scalars[register]).view(dtype)
    shift = 16 * high_half
    return lambda wave: np.uint16(wave.scalars[register] >> shift & 0xFFFF).view(dtype)
