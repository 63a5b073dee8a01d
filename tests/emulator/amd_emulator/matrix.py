"""Matrix instructions (MFMA): D = A B + C over the 64 lanes of a wave.

One block of 16x16 or 32x32. Lane L holds row (column) L % M of A (B), and K / (64 / M) consecutive values
along K. Products and sums are in float64, rounded once: closer than the hardware, whose order of additions
is not published.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .decode import Instruction
from .errors import EmulatorError
from .operand import DTYPES, Operand, expect, reader
from .scalar import Step
from .wave import LANES, Wave

_NAME = re.compile(
    r"v_mfma_(?P<result>f32|i32)_(?P<m>16|32)x(?P<n>16|32)x(?P<k>\d+)_?(?P<source>f16|bf16|f32|xf32|i8)(?P<dense>_1k)?"
)
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


def build(instruction: Instruction, arch: str) -> Step:
    """The step that executes a matrix instruction on `arch`."""
    match = _NAME.fullmatch(instruction.name)
    if not match or match["m"] != match["n"]:
        raise EmulatorError("unknown matrix instruction")
    instruction.expect(4)
    instruction.allow()
    size, depth, source = int(match["m"]), int(match["k"]), match["source"]
    if source == "bf16" and not match["dense"] and arch == "gfx90a":
        raise EmulatorError("the bf16 layout of gfx908 is not implemented")
    groups = LANES // size  # lanes that share a row
    registers, rest = divmod(depth, groups * _VALUES_PER_REGISTER[source])
    if rest or not registers:
        raise EmulatorError("this shape has several blocks, which is not implemented")
    flushes = arch == "gfx90a" and source in _SMALLEST_SOURCE
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
