"""Matrix instructions: D = A B + C over the lanes of a wave.

MFMA, of CDNA: one block of 16x16 or 32x32. Lane L of 64 holds row (column) L % M of A (B), and K / (64 / M)
consecutive values along K.

WMMA, of RDNA: 16x16x16. On RDNA 4 lane L of 32 holds row (column) L % 16 of A (B), and K / 2 consecutive
values along K; on RDNA 3 all of them, and lanes 16 to 31 must hold the same as lanes 0 to 15. Row i of the
result is in register i % 8 of lanes from 16 (i / 8) on, on RDNA 3 in register i / 2 of lanes from 16 (i %
2) on.

Products and sums are in float64, rounded once: closer than the hardware, whose order of additions is not
published.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .errors import EmulatorError
from .instruction import Instruction
from .operand import DTYPES, Operand, expect, reader
from .scalar import Step
from .wave import LANES, Wave

_NAME = re.compile(
    r"v_mfma_(?P<result>f32|i32)_(?P<m>16|32)x(?P<n>16|32)x(?P<k>\d+)_?(?P<source>f16|bf16|f32|xf32|i8)(?P<dense>_1k)?"
)
_WMMA = re.compile(r"v_wmma_f32_16x16x16_(?P<source>f16|bf16)")
_WMMA_DEPTH = 16
_SMALLEST_NORMAL = np.float32(2.0**-126)


def _decode_f16(registers: np.ndarray) -> np.ndarray:
    return registers.view(np.float16).astype(np.float64)


def _decode_bf16(registers: np.ndarray) -> np.ndarray:
    return (registers.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


def _decode_f32(registers: np.ndarray) -> np.ndarray:
    return registers.view(np.float32).astype(np.float64)


def _decode_xf32(registers: np.ndarray) -> np.ndarray:
    """The upper 19 bits of a float; the rounding is not published, and cutting off loses most."""
    return _decode_f32(registers & np.uint32(0xFFFFE000))


def _decode_i8(registers: np.ndarray) -> np.ndarray:
    return registers.view(np.int8).astype(np.float64)


_DECODE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "f16": _decode_f16,
    "bf16": _decode_bf16,
    "f32": _decode_f32,
    "xf32": _decode_xf32,
    "i8": _decode_i8,
}
_VALUES_PER_REGISTER = {"f16": 2, "bf16": 2, "f32": 1, "xf32": 1, "i8": 4}
# gfx90a's f16 and bf16 matrix instructions read and write denormals as zeros; the others keep them.
_SMALLEST_SOURCE = {"f16": 2.0**-14, "bf16": 2.0**-126}


def build(instruction: Instruction) -> Step:
    """The step that executes a matrix instruction."""
    if instruction.name.startswith("v_wmma_"):
        return _build_wmma(instruction)
    arch = instruction.architecture
    match = _NAME.fullmatch(instruction.name)
    if not match or match["m"] != match["n"]:
        raise EmulatorError("unknown matrix instruction")
    instruction.expect(4)
    instruction.allow()
    size, depth, source = int(match["m"]), int(match["k"]), match["source"]
    if source == "bf16" and not match["dense"] and arch.name == "gfx90a":
        raise EmulatorError("the bf16 layout of gfx908 is not implemented")
    groups = LANES // size  # lanes that share a row
    registers, rest = divmod(depth, groups * _VALUES_PER_REGISTER[source])
    if rest or not registers:
        raise EmulatorError("this shape has several blocks, which is not implemented")
    flushes = arch.flushes_matrices and source in _SMALLEST_SOURCE
    operands = instruction.operands
    a, b = (
        _matrix(expect(operand, "vector", registers), registers, size, source, flushes)
        for operand in operands[1:3]
    )
    outputs = size * size // LANES
    result = match["result"]
    dtype = DTYPES[result]
    destination = expect(operands[0], "vector", outputs)
    read_addend = _addend(operands[3], outputs, result)
    # Row index from slow to fast: register / 4, group of lanes, register % 4.
    shape = (outputs // 4, groups, 4, size)

    def step(wave: Wave) -> None:
        if not wave.all_lanes:
            raise EmulatorError("matrix instruction with inactive lanes")
        product = (a(wave) @ b(wave).T).reshape(shape).transpose(0, 2, 1, 3).reshape(outputs, LANES)
        total = (product + read_addend(wave)).astype(dtype)
        if flushes:
            total = np.where(np.abs(total) < _SMALLEST_NORMAL, np.copysign(np.float32(0), total), total)
        wave.vectors[destination : destination + outputs] = total.view(np.uint32)

    return step


def _build_wmma(instruction: Instruction) -> Step:
    match = _WMMA.fullmatch(instruction.name)
    if not match:
        raise EmulatorError("unknown matrix instruction")
    instruction.expect(4)
    instruction.allow()
    lanes, doubled = instruction.architecture.lanes, "rdna3" in instruction.architecture.tables
    source, outputs = match["source"], 8
    registers = _WMMA_DEPTH // _VALUES_PER_REGISTER[source] // (1 if doubled else 2)
    a, b = (
        (_doubled_matrix if doubled else _halved_matrix)(
            expect(operand, "vector", registers), registers, source
        )
        for operand in instruction.operands[1:3]
    )
    destination = expect(instruction.operands[0], "vector", outputs)
    read_addend = _addend(instruction.operands[3], outputs, "f32")

    def step(wave: Wave) -> None:
        if not wave.all_lanes:
            raise EmulatorError("matrix instruction with inactive lanes")
        product = a(wave) @ b(wave).T
        rows = (
            product.reshape(outputs, 2, 16) if doubled else product.reshape(2, outputs, 16).transpose(1, 0, 2)
        )
        total = (rows.reshape(outputs, lanes) + read_addend(wave)).astype(np.float32)
        wave.vectors[destination : destination + outputs] = total.view(np.uint32)

    return step


def _doubled_matrix(first: int, registers: int, source: str) -> Callable[[Wave], np.ndarray]:
    """Read a source of RDNA 3 as float64 of shape (16, K)."""
    decode = _DECODE[source]

    def read(wave: Wave) -> np.ndarray:
        held = wave.vectors[first : first + registers]
        if (held[:, :16] != held[:, 16:]).any():
            raise EmulatorError("the upper lanes' part of a matrix is not that of the lower ones")
        return decode(np.ascontiguousarray(held[:, :16].T))

    return read


def _halved_matrix(first: int, registers: int, source: str) -> Callable[[Wave], np.ndarray]:
    """Read a source of RDNA 4 as float64 of shape (16, K)."""
    decode = _DECODE[source]

    def read(wave: Wave) -> np.ndarray:
        values = decode(np.ascontiguousarray(wave.vectors[first : first + registers].T))  # lane, value
        return np.concatenate((values[:16], values[16:]), axis=1)

    return read


def _addend(operand: Operand, registers: int, result: str) -> Callable[[Wave], np.ndarray]:
    if operand.kind != "vector":
        return reader(operand, result)
    first, dtype = expect(operand, "vector", registers), DTYPES[result]
    return lambda wave: wave.vectors[first : first + registers].view(dtype)


def _matrix(
    first: int, registers: int, size: int, source: str, flushes: bool
) -> Callable[[Wave], np.ndarray]:
    """Read a source as float64 of shape (size, K)."""
    decode, per_register = _DECODE[source], _VALUES_PER_REGISTER[source]
    shape = (registers, LANES // size, size, per_register)

    def read(wave: Wave) -> np.ndarray:
        values = decode(wave.vectors[first : first + registers])
        if flushes:
            values = np.where(np.abs(values) < _SMALLEST_SOURCE[source], 0.0, values)
        return values.reshape(shape).transpose(2, 1, 0, 3).reshape(size, -1)

    return read
