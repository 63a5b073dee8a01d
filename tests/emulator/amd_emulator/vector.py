"""Vector instructions: those of arithmetic.py, and comparisons, carries, division, moves between lanes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from . import division
from .arithmetic import FMA, OPERATIONS, SATURATING, mad_f32
from .decode import Instruction
from .errors import EmulatorError
from .lanes import DPP_MODIFIERS, SDWA_MODIFIERS, destination, keeps_high_half, source
from .operand import DTYPES, Reader, expect, raw_reader
from .packed import build_mixed, build_packed
from .scalar import Step
from .wave import LANE, LANES, MASK32, VCC, Wave, lanes_of, mask_of

_LARGEST = {"v_cvt_pk_fp8_f32": 240.0, "v_cvt_f16_f32": 65504.0}
_COMPARE: dict[str, Callable[..., np.ndarray]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lg": lambda a, b: (a < b) | (a > b),
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
    "neq": np.not_equal,
    "nlt": lambda a, b: ~(a < b),
    "nle": lambda a, b: ~(a <= b),
    "ngt": lambda a, b: ~(a > b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
}


def build(instruction: Instruction) -> Step:
    """The step that executes a vector instruction (matrix instructions are in matrix.py)."""
    name = instruction.base_name
    if name in _SPECIAL:
        instruction.allow(*DPP_MODIFIERS, *SDWA_MODIFIERS)
        return _SPECIAL[name](instruction)
    if name.startswith("v_pk_") or name == "v_dot2_f32_f16":
        return build_packed(instruction)
    if name.startswith("v_fma_mix"):
        return build_mixed(instruction)
    instruction.allow("clamp", "op_sel", *DPP_MODIFIERS, *SDWA_MODIFIERS)
    if (match := re.fullmatch(r"v_cmp(x?)_(\w+)_([fiu])(16|32|64)", name)) and match[2] in _COMPARE:
        return _compare(instruction, _COMPARE[match[2]], match[3] + match[4], bool(match[1]))
    if name in _ACCUMULATE:
        return _multiply_accumulate(instruction, *_ACCUMULATE[name])
    if name not in OPERATIONS:
        raise EmulatorError("unknown vector instruction")
    operation = OPERATIONS[name]
    instruction.expect(1 + len(operation.sources))
    sources = [source(instruction, 1 + i, i, kind) for i, kind in enumerate(operation.sources)]
    if (largest := _LARGEST.get(name)) is not None:
        sources = [_limited(read, largest) for read in sources]
    write = destination(instruction, operation.result, keeps_high_half(name))
    function = operation.function
    if "clamp" in instruction.modifiers and operation.result[0] != "f":
        if name not in SATURATING:
            raise EmulatorError("clamp on an integer result is not implemented here")
        function = SATURATING[name]
    return _apply(function, sources, write)


def _limited(read: Reader, largest: float) -> Reader:
    """A source as a conversion sees it under FP16_OVFL: finite values stay within what the result can hold."""

    def limited(wave: Wave) -> Any:
        value = read(wave)
        if not wave.saturates:
            return value
        return np.where(np.isfinite(value), np.clip(value, -largest, largest), value).astype(np.float32)

    return limited


def _apply(
    function: Callable[..., object], sources: list[Reader], write: Callable[[Wave, object], None]
) -> Step:
    if len(sources) == 1:
        (only,) = sources
        return lambda wave: write(wave, function(only(wave)))
    if len(sources) == 2:
        first, second = sources
        return lambda wave: write(wave, function(first(wave), second(wave)))
    first, second, third = sources
    return lambda wave: write(wave, function(first(wave), second(wave), third(wave)))


def _multiply_accumulate(instruction: Instruction, name: str, function: Callable[..., object]) -> Step:
    """The destination is the addend."""
    instruction.expect(3)
    sources = [source(instruction, 1 + i, i, name) for i in range(2)]
    addend = instruction.operands[0]
    sources.append(raw_reader(addend, name))
    return _apply(function, sources, destination(instruction, name, keep_high=True))


def _compare(
    instruction: Instruction, compare: Callable[..., np.ndarray], name: str, sets_exec: bool
) -> Step:
    """The result is a scalar register pair with a bit a lane; inactive lanes give 0."""
    instruction.expect(3)
    a, b = (source(instruction, 1 + i, i, name) for i in range(2))
    register = expect(instruction.operands[0], "scalar", 2)

    def step(wave: Wave) -> None:
        mask = mask_of(compare(a(wave), b(wave)) & wave.lanes)
        wave.set_scalar64(register, mask)
        if sets_exec:
            wave.set_exec(mask)

    return step


def _compare_class(instruction: Instruction) -> Step:
    """Whether a float is of one of the classes whose bits are set in the second source."""
    instruction.expect(3)
    name = instruction.base_name.rsplit("_", 1)[1]
    value, classes = source(instruction, 1, 0, name), source(instruction, 2, 1, "u32")
    register = expect(instruction.operands[0], "scalar", 2)
    finfo = np.finfo(DTYPES[name])
    quiet = 1 << finfo.nmant - 1

    def step(wave: Wave) -> None:
        x = np.broadcast_to(value(wave), LANES)
        negative, size = np.signbit(x), np.abs(x)
        bits = np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")
        kinds = np.select(
            [
                np.isnan(x) & ((bits & bits.dtype.type(quiet)) == 0),
                np.isnan(x),
                np.isinf(x),
                size == 0,
                size < finfo.smallest_normal,
            ],
            [0, 1, np.where(negative, 2, 9), np.where(negative, 5, 6), np.where(negative, 4, 7)],
            np.where(negative, 3, 8),
        )
        wave.set_scalar64(
            register, mask_of((classes(wave) >> kinds.astype(np.uint32) & 1).astype(bool) & wave.lanes)
        )

    return step


def _conditional_move(instruction: Instruction) -> Step:
    """v_cndmask: the second source where the condition's bit is set, else the first."""
    instruction.expect(4)
    a, b = (source(instruction, 1 + i, i, "b32") for i in range(2))
    condition = expect(instruction.operands[3], "scalar", 2)
    write = destination(instruction, "b32")
    return lambda wave: write(wave, np.where(lanes_of(wave.scalar64(condition)), b(wave), a(wave)))


def _carry(instruction: Instruction) -> Step:
    """Additions and subtractions with a carry out, and for addc and subb a carry in."""
    op = instruction.base_name.split("_")[1]
    carries = op in ("addc", "subb", "subbrev")
    instruction.expect(5 if carries else 4)
    a, b = (source(instruction, 2 + i, i, "u32") for i in range(2))
    if op in ("subrev", "subbrev"):
        a, b = b, a
    out = expect(instruction.operands[1], "scalar", 2)
    carry_in = expect(instruction.operands[4], "scalar", 2) if carries else None
    sign = 1 if op.startswith("add") else -1
    write = destination(instruction, "u32")

    def step(wave: Wave) -> None:
        second = b(wave).astype(np.int64)
        if carry_in is not None:
            second = second + lanes_of(wave.scalar64(carry_in))
        exact = a(wave).astype(np.int64) + sign * second
        write(wave, (exact & MASK32).astype(np.uint32))
        wave.set_scalar64(out, mask_of(((exact < 0) | (exact > MASK32)) & wave.lanes))

    return step


def _wide_multiply_add(instruction: Instruction) -> Step:
    """v_mad_u64_u32 and v_mad_i64_i32; the carry out is computed for the unsigned form alone."""
    instruction.expect(5)
    narrow, wide = ("u32", "u64") if "u64" in instruction.name else ("i32", "i64")
    a, b = (source(instruction, 2 + i, i, narrow) for i in range(2))
    c = source(instruction, 4, 2, wide)
    out = expect(instruction.operands[1], "scalar", 2)
    write, dtype = destination(instruction, wide), DTYPES[wide]

    def step(wave: Wave) -> None:
        product = a(wave).astype(dtype) * b(wave).astype(dtype)
        total = np.broadcast_to(product + c(wave), LANES)
        carry = total < product if wide == "u64" else np.zeros(LANES, np.bool_)
        write(wave, total)
        wave.set_scalar64(out, mask_of(carry & wave.lanes))

    return step


def _division(instruction: Instruction) -> Step:
    """v_div_scale, v_div_fmas and v_div_fixup: see division.py."""
    kind, name = instruction.base_name.split("_")[2:]
    write = destination(instruction, name)
    if kind == "scale":
        instruction.expect(5)
        value, denominator, numerator = (source(instruction, 2 + i, i, name) for i in range(3))
        flag = expect(instruction.operands[1], "scalar", 2)

        def scale(wave: Wave) -> None:
            operands = [np.broadcast_to(read(wave), LANES) for read in (value, denominator, numerator)]
            result, scaled = division.scale(*operands)
            write(wave, result)
            wave.set_scalar64(flag, mask_of(scaled & wave.lanes))

        return scale
    instruction.expect(4)
    sources = [source(instruction, 1 + i, i, name) for i in range(3)]
    if kind == "fixup":
        return _apply(division.fix_up, sources, write)
    a, b, c = sources
    return lambda wave: write(
        wave, division.multiply_add(a(wave), b(wave), c(wave), lanes_of(wave.scalar64(VCC)))
    )


def _read_first_lane(instruction: Instruction) -> Step:
    """The lowest active lane, or lane 0 if none is."""
    instruction.expect(2)
    register = expect(instruction.operands[0], "scalar", 1)
    value = source(instruction, 1, 0, "b32")

    def step(wave: Wave) -> None:
        lanes = value(wave)
        wave.set_scalar(register, int(lanes[wave.lanes.argmax()] if lanes.ndim else lanes))

    return step


def _read_lane(instruction: Instruction) -> Step:
    instruction.expect(3)
    register = expect(instruction.operands[0], "scalar", 1)
    vector = expect(instruction.operands[1], "vector", 1)
    lane = source(instruction, 2, 1, "u32")
    return lambda wave: wave.set_scalar(register, int(wave.vectors[vector, int(lane(wave)) & 63]))


def _write_lane(instruction: Instruction) -> Step:
    instruction.expect(3)
    vector = expect(instruction.operands[0], "vector", 1)
    value, lane = source(instruction, 1, 0, "u32"), source(instruction, 2, 1, "u32")

    def step(wave: Wave) -> None:
        wave.vectors[vector, int(lane(wave)) & 63] = value(wave)

    return step


def _swap(instruction: Instruction) -> Step:
    instruction.expect(2)
    first, second = (expect(operand, "vector", 1) for operand in instruction.operands)

    def step(wave: Wave) -> None:
        saved = wave.vectors[first].copy()
        wave.set_vector(first, wave.vectors[second])
        wave.set_vector(second, saved)

    return step


def _masked_bit_count(instruction: Instruction) -> Step:
    """v_mbcnt: how many bits of the source stand for lower lanes than this one, plus the second source."""
    instruction.expect(3)
    a, b = (source(instruction, 1 + i, i, "u32") for i in range(2))
    write, first = destination(instruction, "u32"), 32 * ("_hi_" in instruction.name)
    lower = np.array([(1 << min(max(lane - first, 0), 32)) - 1 for lane in LANE], np.uint32)
    return lambda wave: write(wave, np.bitwise_count(a(wave) & lower).astype(np.uint32) + b(wave))


_ACCUMULATE = {
    **{f"v_fmac_{name}": (name, function) for name, function in FMA.items()},
    "v_mac_f32": ("f32", mad_f32),
}
_SPECIAL: dict[str, Callable[[Instruction], Step]] = {
    "v_nop": lambda instruction: lambda wave: None,
    "v_cndmask_b32": _conditional_move,
    "v_readfirstlane_b32": _read_first_lane,
    "v_readlane_b32": _read_lane,
    "v_writelane_b32": _write_lane,
    "v_swap_b32": _swap,
    "v_mad_u64_u32": _wide_multiply_add,
    "v_mad_i64_i32": _wide_multiply_add,
    **{f"v_{op}_co_u32": _carry for op in ("add", "sub", "subrev", "addc", "subb", "subbrev")},
    **{f"v_div_{op}_{name}": _division for op in ("scale", "fmas", "fixup") for name in ("f32", "f64")},
    **{f"v_cmp_class_{name}": _compare_class for name in ("f16", "f32", "f64")},
    **{f"v_mbcnt_{half}_u32_b32": _masked_bit_count for half in ("lo", "hi")},
}
