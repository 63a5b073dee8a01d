"""Packed instructions: two operations a lane; mixed-precision multiply-add and dot products."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .arithmetic import OPERATIONS, clamp_to_one, fma_f32
from .errors import EmulatorError
from .instruction import Instruction
from .operand import BITS, Operand, Reader, Value, expect, reader
from .scalar import Step
from .wave import Wave

_HALF = np.uint32(16)


def _halves(instruction: Instruction, name: str, modifiers: tuple[str, str], default: int) -> list[Reader]:
    """One reader a source for the low (or high) result, by op_sel and neg_lo (or op_sel_hi and neg_hi)."""
    count = len(instruction.operands) - 1
    selected = instruction.bits(modifiers[0], default, count)
    negated = instruction.bits(modifiers[1], 0, count)
    return [
        _half(operand, name, high, negate)
        for operand, high, negate in zip(instruction.operands[1:], selected, negated, strict=True)
    ]


def _half(operand: Operand, name: str, high: int, negate: int) -> Reader:
    if operand != operand.unmodified():
        raise EmulatorError("sign modifier on a packed operand")
    if operand.kind not in ("vector", "scalar"):
        if high:
            raise EmulatorError("the high half of a constant is read")
        read = reader(operand, name)
    elif BITS[name] == 32:
        first = expect(operand, operand.kind, 2)
        read = reader(Operand(operand.kind, first + high), name)
    else:
        read = reader(operand, name, bool(high))
    return (lambda wave: -read(wave)) if negate else read


def build_packed(instruction: Instruction) -> Step:
    instruction.allow("op_sel", "op_sel_hi", "neg_lo", "neg_hi", "clamp")
    name = instruction.base_name
    if name == "v_dot2_f32_f16":
        return _dot(instruction)
    if name == "v_pk_mov_b32":
        return _packed_move(instruction)
    match = re.fullmatch(r"v_pk_(\w+)_(f32|f16|u16|i16|b16)", name)
    key = f"v_{match[1]}_{match[2]}" if match else ""
    if match and match[2] == "u16" and match[1] == "mad":
        function: Callable[..., Value] = lambda a, b, c: a * b + c  # noqa: E731
        kinds: tuple[str, ...] = ("u16",) * 3
    elif key in OPERATIONS:
        function, kinds = OPERATIONS[key].function, OPERATIONS[key].sources
    else:
        raise EmulatorError("unknown packed instruction")
    instruction.expect(1 + len(kinds))
    if "clamp" in instruction.modifiers:
        if match and match[2] not in ("f16", "f32"):
            raise EmulatorError("clamp on an integer result")
        plain = function
        function = lambda *sources: clamp_to_one(plain(*sources))  # noqa: E731
    low = _halves(instruction, kinds[-1], ("op_sel", "neg_lo"), 0)
    high = _halves(instruction, kinds[-1], ("op_sel_hi", "neg_hi"), 1)
    destination = instruction.operands[0]
    if BITS[kinds[-1]] == 32:
        return _pair_step(expect(destination, "vector", 2), function, low, high)
    register = expect(destination, "vector", 1)

    def step(wave: Wave) -> None:
        first = function(*[read(wave) for read in low]).view(np.uint16)
        second = function(*[read(wave) for read in high]).view(np.uint16)
        wave.set_vector(register, first.astype(np.uint32) | second.astype(np.uint32) << _HALF)

    return step


def _pair_step(register: int, function: Callable[..., Value], low: list[Reader], high: list[Reader]) -> Step:
    def step(wave: Wave) -> None:
        # Both results are computed before either is written: the registers may overlap.
        first = function(*[read(wave) for read in low]).view(np.uint32)
        second = function(*[read(wave) for read in high]).view(np.uint32)
        wave.set_vector(register, first)
        wave.set_vector(register + 1, second)

    return step


def _packed_move(instruction: Instruction) -> Step:
    """op_sel[0] picks the low result from the first source, op_sel[1] the high one from the second."""
    instruction.expect(3)
    selected = instruction.bits("op_sel", 0, 2)
    first, second = (
        _half(operand, "b32", high, 0)
        for operand, high in zip(instruction.operands[1:], selected, strict=True)
    )
    register = expect(instruction.operands[0], "vector", 2)
    copies = lambda read: [lambda wave: read(wave).copy()]  # noqa: E731
    return _pair_step(register, lambda a: a, copies(first), copies(second))


def build_mixed(instruction: Instruction) -> Step:
    """v_fma_mix: each source is an f32, or where op_sel_hi says so the half that op_sel picks of two f16."""
    instruction.allow("op_sel", "op_sel_hi", "clamp")
    instruction.expect(4)
    halves, is_half = instruction.bits("op_sel", 0, 3), instruction.bits("op_sel_hi", 0, 3)
    sources = [
        reader(operand, "f16" if narrow else "f32", bool(high and narrow))
        for operand, high, narrow in zip(instruction.operands[1:], halves, is_half, strict=True)
    ]
    register = expect(instruction.operands[0], "vector", 1)
    kind, clamps = instruction.base_name.removeprefix("v_fma_mix"), "clamp" in instruction.modifiers
    if kind not in ("_f32", "lo_f16", "hi_f16"):
        raise EmulatorError("unknown mixed-precision instruction")

    def step(wave: Wave) -> None:
        result = fma_f32(*[np.asarray(read(wave), np.float32) for read in sources])
        if clamps:
            result = clamp_to_one(result)
        if kind == "_f32":
            return wave.set_vector(register, result.view(np.uint32))
        half = result.astype(np.float16).view(np.uint16).astype(np.uint32)
        old = wave.vectors[register]
        if kind == "lo_f16":
            return wave.set_vector(register, old & np.uint32(0xFFFF0000) | half)
        return wave.set_vector(register, old & np.uint32(0xFFFF) | half << _HALF)

    return step


def _dot(instruction: Instruction) -> Step:
    """v_dot2_f32_f16: the sum of two products and an f32, rounded once."""
    instruction.allow("clamp")
    instruction.expect(4)
    operands = instruction.operands
    pairs = [[_half(operand, "f16", high, 0) for high in (0, 1)] for operand in operands[1:3]]
    addend = reader(operands[3], "f32")
    register, clamps = expect(operands[0], "vector", 1), "clamp" in instruction.modifiers

    def step(wave: Wave) -> None:
        total = np.broadcast_to(np.asarray(addend(wave), np.float64), wave.size)
        for a, b in zip(*pairs, strict=True):
            total = total + a(wave).astype(np.float64) * b(wave).astype(np.float64)
        result = total.astype(np.float32)
        wave.set_vector(register, (clamp_to_one(result) if clamps else result).view(np.uint32))

    return step
