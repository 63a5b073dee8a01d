"""Vector instructions: those of arithmetic.py, and comparisons, carries, division, moves between lanes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from . import division
from .arithmetic import (
    FLOAT_COMPARISONS,
    FMA,
    OPERATIONS,
    SATURATING,
    from_e4m3,
    mad_f32,
    to_bf16,
    to_e4m3,
)
from .errors import EmulatorError
from .instruction import Instruction
from .lanes import (
    DPP_MODIFIERS,
    SDWA_MODIFIERS,
    destination,
    keeps_high_half,
    mask_reader,
    mask_writer,
    source,
)
from .operand import DTYPES, Operand, Reader, expect, raw_reader
from .packed import build_mixed, build_packed
from .scalar import Step
from .wave import LANE, MASK32, VCC, Wave, mask_of

_LARGEST = {"v_cvt_pk_fp8_f32": 240.0, "v_cvt_f16_f32": 65504.0, "v_cvt_pk_f16_f32": 65504.0}
_COMPARE: dict[str, Callable[..., np.ndarray]] = {**FLOAT_COMPARISONS, "ne": np.not_equal}


def build(instruction: Instruction) -> Step:
    """The step that executes a vector instruction (matrix instructions are in matrix.py)."""
    name = instruction.base_name
    if name in _SPECIAL:
        if name not in _OWN_MODIFIERS:
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
    """The result is a mask; inactive lanes give 0."""
    write, first = _mask_result(instruction, sets_exec)
    a, b = (source(instruction, first + i, i, name) for i in range(2))
    return lambda wave: write(wave, compare(a(wave), b(wave)) & wave.lanes)


def _mask_result(instruction: Instruction, sets_exec: bool) -> tuple[Callable[[Wave, np.ndarray], None], int]:
    """What writes the mask of a comparison, and the number of its first source. One that sets EXEC has no other
    destination on RDNA."""
    if not sets_exec:
        instruction.expect(3)
        return mask_writer(instruction, instruction.operands[0]), 1
    if instruction.architecture.rdna:
        instruction.expect(2)
        return lambda wave, lanes: wave.set_exec(mask_of(lanes)), 0
    instruction.expect(3)
    plain = mask_writer(instruction, instruction.operands[0])

    def write(wave: Wave, lanes: np.ndarray) -> None:
        plain(wave, lanes)
        wave.set_exec(mask_of(lanes))

    return write, 1


def _compare_class(instruction: Instruction) -> Step:
    """Whether a float is of one of the classes whose bits are set in the second source."""
    name = instruction.base_name.rsplit("_", 1)[1]
    store, first = _mask_result(instruction, "cmpx" in instruction.base_name)
    value, classes = source(instruction, first, 0, name), source(instruction, first + 1, 1, "u32")
    finfo = np.finfo(DTYPES[name])
    quiet = 1 << finfo.nmant - 1

    def step(wave: Wave) -> None:
        x = np.broadcast_to(value(wave), wave.size)
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
        store(wave, (classes(wave) >> kinds.astype(np.uint32) & 1).astype(bool) & wave.lanes)

    return step


def _conditional_move(instruction: Instruction) -> Step:
    """v_cndmask: the second source where the condition's bit is set, else the first."""
    instruction.expect(4)
    a, b = (source(instruction, 1 + i, i, "b32") for i in range(2))
    condition = mask_reader(instruction, instruction.operands[3])
    write = destination(instruction, "b32")
    return lambda wave: write(wave, np.where(condition(wave), b(wave), a(wave)))


def _carry(instruction: Instruction) -> Step:
    """Additions and subtractions with a carry out, and for addc and subb a carry in."""
    op = instruction.base_name.split("_")[1]
    carries = op in ("addc", "subb", "subbrev")
    instruction.expect(5 if carries else 4)
    a, b = (source(instruction, 2 + i, i, "u32") for i in range(2))
    if op in ("subrev", "subbrev"):
        a, b = b, a
    out = mask_writer(instruction, instruction.operands[1])
    carry_in = mask_reader(instruction, instruction.operands[4]) if carries else None
    sign = 1 if op.startswith("add") else -1
    write = destination(instruction, "u32")

    def step(wave: Wave) -> None:
        second = b(wave).astype(np.int64)
        if carry_in is not None:
            second = second + carry_in(wave)
        exact = a(wave).astype(np.int64) + sign * second
        write(wave, (exact & MASK32).astype(np.uint32))
        out(wave, ((exact < 0) | (exact > MASK32)) & wave.lanes)

    return step


def _wide_multiply_add(instruction: Instruction) -> Step:
    """v_mad_u64_u32 and v_mad_i64_i32; the carry out is computed for the unsigned form alone."""
    instruction.expect(5)
    narrow, wide = ("u32", "u64") if "u64" in instruction.base_name else ("i32", "i64")
    a, b = (source(instruction, 2 + i, i, narrow) for i in range(2))
    c = source(instruction, 4, 2, wide)
    out = mask_writer(instruction, instruction.operands[1])
    write, dtype = destination(instruction, wide), DTYPES[wide]

    def step(wave: Wave) -> None:
        product = a(wave).astype(dtype) * b(wave).astype(dtype)
        total = np.broadcast_to(product + c(wave), wave.size)
        carry = total < product if wide == "u64" else np.zeros(wave.size, np.bool_)
        write(wave, total)
        out(wave, carry & wave.lanes)

    return step


def _division(instruction: Instruction) -> Step:
    """v_div_scale, v_div_fmas and v_div_fixup: see division.py."""
    kind, name = instruction.base_name.split("_")[2:]
    write = destination(instruction, name)
    if kind == "scale":
        instruction.expect(5)
        value, denominator, numerator = (source(instruction, 2 + i, i, name) for i in range(3))
        flag = mask_writer(instruction, instruction.operands[1])

        def scale(wave: Wave) -> None:
            operands = [np.broadcast_to(read(wave), wave.size) for read in (value, denominator, numerator)]
            result, scaled = division.scale(*operands)
            write(wave, result)
            flag(wave, scaled & wave.lanes)

        return scale
    instruction.expect(4)
    sources = [source(instruction, 1 + i, i, name) for i in range(3)]
    if kind == "fixup":
        return _apply(division.fix_up, sources, write)
    a, b, c = sources
    vcc = mask_reader(instruction, Operand("scalar", VCC, instruction.architecture.mask_registers))
    return lambda wave: write(wave, division.multiply_add(a(wave), b(wave), c(wave), vcc(wave)))


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
    return lambda wave: wave.set_scalar(register, int(wave.vectors[vector, int(lane(wave)) & wave.size - 1]))


def _write_lane(instruction: Instruction) -> Step:
    instruction.expect(3)
    vector = expect(instruction.operands[0], "vector", 1)
    value, lane = source(instruction, 1, 0, "u32"), source(instruction, 2, 1, "u32")

    def step(wave: Wave) -> None:
        wave.vectors[vector, int(lane(wave)) & wave.size - 1] = value(wave)

    return step


def _swap_rows(instruction: Instruction) -> Step:
    """gfx950: the upper row of each two (of 16 or 32 lanes) of the first register and the lower one of the
    second change places."""
    instruction.expect(2)
    instruction.allow()
    size = 16 if "16" in instruction.base_name else 32
    first, second = (expect(operand, "vector", 1) for operand in instruction.operands)

    def step(wave: Wave) -> None:
        if not wave.all_lanes:
            raise EmulatorError("rows are swapped with inactive lanes")
        upper, lower = (wave.vectors[register].reshape(-1, 2, size) for register in (first, second))
        saved = upper[:, 1].copy()
        upper[:, 1] = lower[:, 0]
        lower[:, 0] = saved

    return step


def _permute_row(instruction: Instruction) -> Step:
    """v_permlane16 and v_permlanex16: a lane reads the lane of its row of 16, or of the other row of two, that
    four bits of the scalar sources name. op_sel[0]: inactive lanes are read too; op_sel[1]: else they read as
    0, not as nothing."""
    instruction.expect(4)
    instruction.allow("op_sel")
    inactive, zero = instruction.bits("op_sel", 0, 2)
    write = expect(instruction.operands[0], "vector", 1)
    values = source(instruction, 1, 0, "b32")
    low, high = (raw_reader(operand, "u32") for operand in instruction.operands[2:])
    numbers = LANE[: instruction.architecture.lanes]
    row = (numbers & ~15) ^ (16 if "x16" in instruction.base_name else 0)

    def step(wave: Wave) -> None:
        chosen = int(low(wave)) | int(high(wave)) << 32
        lane = row + (chosen >> 4 * (numbers & 15).astype(object) & 15).astype(np.int64)
        read = np.broadcast_to(values(wave), wave.size)[lane]
        there = np.ones(wave.size, np.bool_) if inactive else wave.lanes[lane]
        if zero:
            read, there = np.where(there, read, np.uint32(0)), np.ones(wave.size, np.bool_)
        np.copyto(wave.vectors[write], read, where=wave.lanes & there)

    return step


def _bit_operation(instruction: Instruction) -> Step:
    """v_bitop3: the result's bits by a table of the sources' bits, the first source's being the highest. The one of
    16 bits leaves the other half of its register: no compiled code reads that."""
    instruction.expect(4)
    instruction.allow("bitop3")
    table = instruction.integer("bitop3")
    name = "u16" if instruction.name.endswith("16") else "u32"
    dtype = DTYPES[name]
    sources = [source(instruction, 1 + i, i, name) for i in range(3)]
    write = destination(instruction, name, keep_high=True)

    def function(*given: Any) -> Any:
        result = dtype(0)
        for number in (n for n in range(8) if table >> n & 1):
            picked = ~dtype(0)
            for bit, value in zip((4, 2, 1), given, strict=True):
                picked = picked & (value if number & bit else ~value)
            result = result | picked
        return np.asarray(result)

    return _apply(function, sources, write)


def _scaled_fp8(instruction: Instruction) -> Step:
    """Two floats as OCP's e4m3 in one half of the register, of which the other stays."""
    instruction.expect(4)
    instruction.allow("op_sel")
    _expect_scale_of_one(instruction.operands[3])
    first, second = (_limited(source(instruction, 1 + i, i, "f32"), 448.0) for i in range(2))
    write = destination(instruction, "u16", keep_high=True)
    return lambda wave: write(wave, to_e4m3(first(wave)) | to_e4m3(second(wave)) << np.uint16(8))


def _from_scaled_fp8(instruction: Instruction) -> Step:
    """Two codes of OCP's e4m3, those of one half of the register, as two floats of 16 bits, which hold them exactly."""
    instruction.expect(3)
    instruction.allow("op_sel")
    _expect_scale_of_one(instruction.operands[2])
    codes, write = source(instruction, 1, 0, "u16"), destination(instruction, "b32")
    is_bf16 = "bf16" in instruction.name

    def bits_of(code: np.ndarray) -> np.ndarray:
        value = from_e4m3(code)
        return to_bf16(value) if is_bf16 else value.astype(np.float16).view(np.uint16).astype(np.uint32)

    def step(wave: Wave) -> None:
        code = np.asarray(codes(wave))
        write(wave, bits_of(code) | bits_of(code >> np.uint16(8)) << np.uint32(16))

    return step


def _expect_scale_of_one(scale: Operand) -> None:
    """Another scale would divide or multiply: no kernel asks for one."""
    if scale.kind != "float" or scale.value != 1.0 or scale != scale.unmodified():
        raise EmulatorError(f"a scale of {scale}")


def _scalar_function(instruction: Instruction) -> Step:
    """RDNA 4: exponentials and roots of a scalar register."""
    instruction.expect(2)
    instruction.allow()
    function = OPERATIONS[instruction.base_name.replace("v_s_", "v_")].function
    value = source(instruction, 1, 0, "f32")
    if instruction.operands[1].kind == "vector":
        raise EmulatorError("a vector register where a scalar one is read")
    register = expect(instruction.operands[0], "scalar", 1)

    def step(wave: Wave) -> None:
        wave.set_scalar(
            register, int(np.asarray(function(value(wave)), np.float32).reshape(1).view(np.uint32)[0])
        )

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
    numbers = LANE[: instruction.architecture.lanes]
    lower = np.array([(1 << min(max(lane - first, 0), 32)) - 1 for lane in numbers], np.uint32)
    return lambda wave: write(wave, np.bitwise_count(a(wave) & lower).astype(np.uint32) + b(wave))


_ACCUMULATE = {
    **{f"v_fmac_{name}": (name, function) for name, function in FMA.items()},
    "v_mac_f32": ("f32", mad_f32),
}
# These say themselves which modifiers they know.
_OWN_MODIFIERS = frozenset(
    {
        "v_permlane16_b32",
        "v_permlanex16_b32",
        "v_bitop3_b16",
        "v_bitop3_b32",
        *(f"v_cvt_scalef32_pk_{kinds}" for kinds in ("fp8_f32", "f16_fp8", "bf16_fp8")),
    }
)
_SPECIAL: dict[str, Callable[[Instruction], Step]] = {
    "v_nop": lambda instruction: lambda wave: None,
    "v_cndmask_b32": _conditional_move,
    "v_readfirstlane_b32": _read_first_lane,
    "v_readlane_b32": _read_lane,
    "v_writelane_b32": _write_lane,
    "v_swap_b32": _swap,
    "v_permlane16_swap_b32": _swap_rows,
    "v_permlane32_swap_b32": _swap_rows,
    "v_permlane16_b32": _permute_row,
    "v_permlanex16_b32": _permute_row,
    **{f"v_bitop3_b{bits}": _bit_operation for bits in (16, 32)},
    "v_cvt_scalef32_pk_fp8_f32": _scaled_fp8,
    **{f"v_cvt_scalef32_pk_{name}_fp8": _from_scaled_fp8 for name in ("f16", "bf16")},
    **{f"v_s_{op}_f32": _scalar_function for op in ("exp", "log", "rcp", "rsq", "sqrt")},
    "v_mad_u64_u32": _wide_multiply_add,
    "v_mad_i64_i32": _wide_multiply_add,
    **{f"v_{op}_co_u32": _carry for op in ("add", "sub", "subrev", "addc", "subb", "subbrev")},
    **{f"v_div_{op}_{name}": _division for op in ("scale", "fmas", "fixup") for name in ("f32", "f64")},
    **{f"v_cmp{x}_class_{name}": _compare_class for name in ("f16", "f32", "f64") for x in ("", "x")},
    **{f"v_mbcnt_{half}_u32_b32": _masked_bit_count for half in ("lo", "hi")},
}
