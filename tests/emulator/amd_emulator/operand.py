"""Operands: what an instruction names, and building closures that read it from a wave."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from .errors import EmulatorError
from .wave import EXEC, FIRST_ACCUMULATOR, M0, TRAPS, VCC, Wave

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

# (number in the scalar register file, registers) -> name
_NAMED = {
    (VCC, 2): "vcc",
    (VCC, 1): "vcc_lo",
    (VCC + 1, 1): "vcc_hi",
    (M0, 1): "m0",
    (EXEC, 2): "exec",
    (EXEC, 1): "exec_lo",
    (EXEC + 1, 1): "exec_hi",
}

# What a reader returns: an array over the 64 lanes, or a numpy scalar that broadcasts over them.
Value = Any
Reader = Callable[[Wave], Value]


@dataclass(frozen=True)
class Operand:
    """One operand. `kind` is vector, scalar, scc, null (reads as 0), integer, float, off, or mode and wave mode, which
    stand for `count` bits of that register from `register` on. `half` is that of a vector register which RDNA's 16-bit
    instructions name, "l" or "h"; an `implicit` operand is not written down.

    `register` numbers vector registers with the accumulation registers after the 256 others; `count` is how many
    32-bit registers it stands for.
    """

    kind: str
    register: int = 0
    count: int = 1
    value: int | float = 0
    literal: bool = False  # a 32-bit constant behind the instruction, not one of the inline ones
    negate: bool = False
    absolute: bool = False
    sign_extend: bool = False
    half: str = ""
    implicit: bool = False

    def __str__(self) -> str:
        """As the assembler writes it."""
        text = self._plain_text() + f".{self.half}" * bool(self.half)
        if self.absolute:
            text = f"|{text}|"
        if self.sign_extend:
            text = f"sext({text})"
        if self.negate:  # -1 is not the same as neg(1)
            text = f"neg({text})" if self.kind in ("integer", "float") and not self.absolute else f"-{text}"
        return text

    def _plain_text(self) -> str:
        if self.kind == "integer":
            return f"{self.value:#x}" if self.literal else str(self.value)
        if self.kind == "float":  # the one that is not short is 1 / (2 pi)
            return (
                str(self.value)
                if self.count == 2
                else f"{self.value:.8g}"
                if self.value % 0.5
                else str(self.value)
            )
        if self.kind == "scc":
            return "src_scc"
        if self.kind in ("off", "null"):
            return self.kind
        if self.kind in ("mode", "wave mode"):
            name = self.kind.upper().replace(" ", "_")
            return f"hwreg(HW_REG_{name}, {self.register}, {self.count})"
        if self.kind == "scalar" and (self.register, self.count) in _NAMED:
            return _NAMED[self.register, self.count]
        name, first = self.register_file()
        if self.kind == "scalar" and self.register >= TRAPS:
            name, first = "ttmp", self.register - TRAPS
        return f"{name}{first}" if self.count == 1 else f"{name}[{first}:{first + self.count - 1}]"

    def register_file(self) -> tuple[str, int]:
        """ "v", "a" or "s" and the number there; "" for what is no numbered register."""
        if self.kind == "vector":
            accumulator = self.register >= FIRST_ACCUMULATOR
            return "va"[accumulator], self.register - FIRST_ACCUMULATOR * accumulator
        return ("s", self.register) if self.kind == "scalar" and self.register < VCC else ("", 0)

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
    if operand.kind == "null":
        return lambda wave: dtype(0)
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
        return lambda wave: wave.vectors[register : register + 2].T.copy().view(dtype).reshape(-1)
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
        return lambda wave: _typed(wave.scalars[register], dtype)
    shift = 16 * high_half
    return lambda wave: np.uint16(wave.scalars[register] >> shift & 0xFFFF).view(dtype)


@lru_cache(maxsize=1 << 16)  # making a numpy scalar takes longer than finding one
def _typed(bits: int, dtype: Any) -> Any:
    """32 bits as a value of `dtype`."""
    return np.uint32(bits).view(dtype)
