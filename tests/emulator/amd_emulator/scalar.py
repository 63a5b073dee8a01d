"""Scalar instructions: arithmetic, comparisons, EXEC masks, branches and constant loads.

Scalar registers are Python ints, so an operation is a function on ints; what it sets SCC to is part of its
table.
"""

from __future__ import annotations

import operator
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .arithmetic import FLOAT_COMPARISONS, OPERATIONS
from .errors import EmulatorError
from .instruction import Instruction
from .operand import Operand, expect
from .wave import EXEC, MASK32, VCC, Wave

# What a step returns instead of None (go on) or an address (branch).
BARRIER, END = -1, -2
Step = Callable[[Wave], "int | None"]
Read = Callable[[Wave], int]

# These wait, hint or write caches back: the emulator has no pipeline and no caches.
NO_EFFECT = frozenset(
    {"s_nop", "s_waitcnt", "s_setprio", "s_sleep", "s_icache_inv", "s_clause", "s_delay_alu"}
    | {"s_waitcnt_depctr", "s_waitcnt_vscnt", "s_wait_alu", "s_set_inst_prefetch_distance", "s_sendmsg"}
    | {
        f"s_wait_{count}"
        for count in ("loadcnt", "storecnt", "dscnt", "kmcnt", "samplecnt", "bvhcnt", "expcnt")
    }
    | {"s_wait_loadcnt_dscnt", "s_wait_storecnt_dscnt", "s_wait_idle"}
    | {"s_dcache_inv", "s_dcache_inv_vol", "s_dcache_wb", "s_dcache_wb_vol"}
)
_COMPARE = {
    "eq": operator.eq,
    "lg": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
_BRANCH: dict[str, Callable[[Wave], bool]] = {
    "s_branch": lambda wave: True,
    "s_cbranch_scc0": lambda wave: not wave.scc,
    "s_cbranch_scc1": lambda wave: bool(wave.scc),
    "s_cbranch_vccz": lambda wave: wave.mask(VCC) == 0,
    "s_cbranch_vccnz": lambda wave: wave.mask(VCC) != 0,
    "s_cbranch_execz": lambda wave: wave.mask(EXEC) == 0,
    "s_cbranch_execnz": lambda wave: wave.mask(EXEC) != 0,
}
_LOGIC: dict[str, Callable[[int, int], int]] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "andn1": lambda a, b: ~a & b,
    "andn2": lambda a, b: a & ~b,
    "orn1": lambda a, b: ~a | b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}


_DEALLOCATE_REGISTERS = 3  # a message: the wave needs its registers no more
_FLOAT_TYPES: dict[str, Any] = {"f32": np.float32, "i32": np.int32, "u32": np.uint32, "b32": np.uint32}
# Scalar instructions on floats, and the vector instructions that do the same
_FLOATS = {f"s_{op}_f32": f"v_{op}_f32" for op in ("add", "sub", "mul", "min", "max", "fmaak", "fmamk")}
_FLOATS |= {f"s_{op}_f32": f"v_{op}_f32" for op in ("trunc", "ceil", "floor", "rndne")}
_FLOATS |= {f"s_cvt_{pair}": f"v_cvt_{pair}" for pair in ("f32_i32", "f32_u32", "i32_f32", "u32_f32")}
_FLOATS |= {"s_fmac_f32": "v_fma_f32"} | {f"s_cvt_{pair}": f"v_cvt_{pair}" for pair in ("f32_f16", "f16_f32")}
_FLOAT_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    f"s_cmp_{condition}_f32": compare for condition, compare in FLOAT_COMPARISONS.items()
}
_NARROW_LOADS = {
    "s_load_u8": (1, False),
    "s_load_i8": (1, True),
    "s_load_u16": (2, False),
    "s_load_i16": (2, True),
}


def signed(value: int, bits: int) -> int:
    """The two's complement meaning of the low bits of a value."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> bits - 1 else value


def _bit_field(value: int, control: int, bits: int, sign: bool) -> int:
    """Extract control[22:16] bits of a value from bit control[5:0] (32-bit: [4:0])."""
    width = control >> 16 & 0x7F
    field = value >> (control & bits - 1) & (1 << width) - 1
    return signed(field, width) if sign and width else field


def _bit_length(value: int, bits: int, sign: bool) -> int:
    """flbit: leading zeros, or for a signed value copies of the sign bit; -1 if there is nothing else."""
    if sign and value >> bits - 1:
        value = ~value & (1 << bits) - 1
    return bits - value.bit_length() if value else -1


# op -> (function of (a, width in bits), SCC is set to result != 0, width of the result: None for that of a)
_UNARY: dict[str, tuple[Callable[[int, int], int], bool, int | None]] = {
    "mov": (lambda a, bits: a, False, None),
    "not": (lambda a, bits: ~a, True, None),
    "brev": (lambda a, bits: int(f"{a:0{bits}b}"[::-1], 2), False, None),
    "abs": (lambda a, bits: abs(signed(a, bits)), True, None),
    "wqm": (lambda a, bits: sum(0xF << i for i in range(0, bits, 4) if a >> i & 0xF), True, None),
    "bcnt0_i32": (lambda a, bits: bits - a.bit_count(), True, 32),
    "bcnt1_i32": (lambda a, bits: a.bit_count(), True, 32),
    "ff0_i32": (lambda a, bits: (~a & a + 1).bit_length() - 1 if a != (1 << bits) - 1 else -1, False, 32),
    "ff1_i32": (lambda a, bits: (a & -a).bit_length() - 1, False, 32),
    "flbit_i32": (lambda a, bits: _bit_length(a, bits, sign=False), False, 32),
}
# op -> (function of (a, b, width in bits), SCC is set to result != 0, width of b: None for that of a)
_BINARY: dict[str, tuple[Callable[[int, int, int], int], bool, int | None]] = {
    **{op: (lambda a, b, bits, f=f: f(a, b), True, None) for op, f in _LOGIC.items()},  # type: ignore[misc]
    "lshl": (lambda a, b, bits: a << (b & bits - 1), True, 32),
    "lshr": (lambda a, b, bits: a >> (b & bits - 1), True, 32),
    "ashr": (lambda a, b, bits: signed(a, bits) >> (b & bits - 1), True, 32),
    "bfm": (lambda a, b, bits: (1 << (a & bits - 1)) - 1 << (b & bits - 1), False, 32),
    "mul": (lambda a, b, bits: a * b, False, None),
}
# Whole names, 32 bits: (function, SCC is set to result != 0)
_NAMED: dict[str, tuple[Callable[..., int], bool]] = {
    "s_mul_hi_u32": (lambda a, b: a * b >> 32, False),
    "s_mul_hi_i32": (lambda a, b: signed(a, 32) * signed(b, 32) >> 32, False),
    "s_sext_i32_i8": (lambda a: signed(a, 8), False),
    "s_sext_i32_i16": (lambda a: signed(a, 16), False),
    "s_flbit_i32": (lambda a: _bit_length(a, 32, sign=True), False),
    "s_pack_ll_b32_b16": (lambda a, b: a & 0xFFFF | (b & 0xFFFF) << 16, False),
    "s_pack_lh_b32_b16": (lambda a, b: a & 0xFFFF | b & 0xFFFF0000, False),
    "s_pack_hh_b32_b16": (lambda a, b: a >> 16 | b & 0xFFFF0000, False),
    "s_absdiff_i32": (lambda a, b: abs(signed(a, 32) - signed(b, 32)), True),
}


def build(instruction: Instruction) -> Step:
    """The step that executes a scalar instruction."""
    name = instruction.base_name
    if name in NO_EFFECT:
        if name == "s_sendmsg" and instruction.operands[0].value != _DEALLOCATE_REGISTERS:
            raise EmulatorError("a message that is not implemented")
        return lambda wave: None
    if name in ("s_barrier_signal", "s_barrier_wait"):
        return _split_barrier(instruction)
    if name in ("s_endpgm", "s_barrier"):
        signal = END if name == "s_endpgm" else BARRIER
        return lambda wave: signal
    if name in _BRANCH:
        instruction.expect(1)
        taken = _BRANCH[name]
        target = instruction.address + 4 + 4 * signed(int(instruction.operands[0].value), 16)
        return lambda wave: target if taken(wave) else None
    if name.startswith("s_load_"):
        return _load(instruction)
    instruction.allow()
    operands = instruction.operands
    if name == "s_setreg_imm32_b32":
        if operands[0].count == 2:  # rounding to nearest even, the one way there is here
            return lambda wave: None
        value = bool(int(operands[1].value) & 1)
        return lambda wave: setattr(wave, "saturates", value)
    if name in _FLOATS or name in _FLOAT_COMPARISONS:
        return _float_operation(instruction)
    if name in ("s_getpc_b64", "s_setpc_b64", "s_swappc_b64"):
        return _program_counter(instruction, operands)
    if match := re.fullmatch(r"s_(mov|add|mul|cmov|cmp)k_(?:(\w\w)_)?([iu])32", name):
        return _short_constant(operands, match[1], match[2], signed_constant=match[3] == "i")
    if match := re.fullmatch(r"s_cmp_(\w\w)_([iu])(32|64)", name):
        instruction.expect(2)
        return _compare(operands, _COMPARE[match[1]], int(match[3]), match[2] == "i")
    if match := re.fullmatch(r"s_bitset([01])_b32", name):
        instruction.expect(2)
        return _set_bit(operands, match[1] == "1")
    if match := re.fullmatch(r"s_bitcmp([01])_b(32|64)", name):
        instruction.expect(2)
        return _bit_compare(operands, int(match[1]), int(match[2]))
    return _arithmetic(instruction, operands)


def _split_barrier(instruction: Instruction) -> Step:
    """A barrier in two halves. Between them a wave may go on, but not touch LDS: what it does there would be neither
    before nor behind the barrier."""
    instruction.expect(1)
    (barrier,) = instruction.operands
    if signed(int(barrier.value), 16) != -1 or barrier.kind != "integer":
        raise EmulatorError("a barrier that is not the workgroup's")
    signals = instruction.base_name == "s_barrier_signal"

    def step(wave: Wave) -> int | None:
        if wave.signalled == signals:
            raise EmulatorError("a barrier's signal and wait are not in turn")
        wave.signalled = signals
        return None if signals else BARRIER

    return step


def _typed(value: int, kind: str) -> Any:
    if kind == "f16":
        return np.uint16(value & 0xFFFF).view(np.float16)
    return np.uint32(value).view(_FLOAT_TYPES[kind])


def _float_operation(instruction: Instruction) -> Step:
    """What vector instructions of the same name compute, for one value."""
    name, operands = instruction.base_name, instruction.operands
    if name in _FLOAT_COMPARISONS:
        instruction.expect(2)
        compare = _FLOAT_COMPARISONS[name]
        a, b = (_read(operand, 32) for operand in operands)

        def compared(wave: Wave) -> None:
            wave.scc = int(bool(compare(_typed(a(wave), "f32"), _typed(b(wave), "f32"))))

        return compared
    operation = OPERATIONS[_FLOATS[name]]
    given = [*operands[1:], operands[0]] if name == "s_fmac_f32" else [*operands[1:]]
    if len(given) != len(operation.sources):
        raise EmulatorError(f"{len(operands)} operands")
    reads = [(_read(operand, 32), kind) for operand, kind in zip(given, operation.sources, strict=True)]
    write = _write(operands[0], 32)

    def step(wave: Wave) -> None:
        result = np.asarray(operation.function(*[_typed(read(wave), kind) for read, kind in reads])).reshape(
            1
        )
        write(wave, int(result.view(f"u{result.dtype.itemsize}")[0]))

    return step


def _arithmetic(instruction: Instruction, operands: Sequence[Operand]) -> Step:
    """Instructions with a destination and one or two sources."""
    name = instruction.base_name
    if name in _NAMED:
        function, sets_scc = _NAMED[name]
        instruction.expect(1 + function.__code__.co_argcount)
        return _assign(operands, function, 32, 32, sets_scc, [32] * (len(operands) - 1))
    match = re.fullmatch(r"s_(\w+?)_([iub])(32|64)", name)
    if not match:
        raise EmulatorError("unknown scalar instruction")
    op, sign, bits = match[1], match[2] == "i", int(match[3])
    lanes = instruction.architecture.lanes
    if op.endswith("_saveexec") and op.removesuffix("_saveexec") in _LOGIC and bits == lanes:
        instruction.expect(2)
        return _save_exec(operands, _LOGIC[op.removesuffix("_saveexec")], lanes)
    if op in _UNARY:
        instruction.expect(2)
        unary, sets_scc, width = _UNARY[op]
        return _assign(operands, lambda a: unary(a, bits), bits, width or bits, sets_scc, [bits])
    instruction.expect(3) if op != "cmov" else instruction.expect(2)
    if op in _BINARY:
        binary, sets_scc, width = _BINARY[op]
        first = 32 if op == "bfm" else bits
        return _assign(
            operands, lambda a, b: binary(a, b, bits), bits, bits, sets_scc, [first, width or bits]
        )
    if op == "bfe":
        return _assign(operands, lambda a, b: _bit_field(a, b, bits, sign), bits, bits, True, [bits, 32])
    if op in ("add", "sub", "addc", "subb") and bits == 32:
        return _add(operands, op, overflow=sign)
    if op in ("add_nc", "sub_nc") and bits == 64:
        add = op == "add_nc"
        return _assign(operands, lambda a, b: a + b if add else a - b, 64, 64, False, [64, 64])
    if op in ("min", "max") and bits == 32:
        return _extremum(operands, min if op == "min" else max, sign)
    if op in ("cselect", "cmov"):
        return _select(operands, bits)
    if (shift := re.fullmatch(r"lshl([1-4])_add", op)) and bits == 32:
        return _shift_add(operands, int(shift[1]))
    raise EmulatorError("unknown scalar instruction")


def _read_bits(operand: Operand, bits: int, sign: bool) -> Read:
    if operand.kind == "scalar":
        register = expect(operand, "scalar", bits // 32)
        if bits == 64:
            return lambda wave: wave.scalar64(register)
        return lambda wave: wave.scalars[register]
    if operand.kind == "scc":
        return lambda wave: wave.scc
    if operand.kind == "null":
        return lambda wave: 0
    constant = operand.constant_bits(f"{'i' if sign else 'b'}{bits}")
    return lambda wave: constant


def _read(operand: Operand, bits: int, sign: bool = False) -> Read:
    if operand != operand.unmodified():
        raise EmulatorError("modifier on a scalar operand")
    read = _read_bits(operand, bits, sign)
    return (lambda wave: signed(read(wave), bits)) if sign else read


def _write(operand: Operand, bits: int) -> Callable[[Wave, int], None]:
    if operand.kind == "null":
        return lambda wave, value: None
    register = expect(operand, "scalar", bits // 32)
    if bits == 64:
        return lambda wave, value: wave.set_scalar64(register, value)
    if register in (EXEC, EXEC + 1):
        return lambda wave, value: wave.set_scalar(register, value)
    return lambda wave, value: wave.scalars.__setitem__(register, value & MASK32)


def _assign(
    operands: Sequence[Operand],
    function: Callable[..., int],
    bits: int,
    result_bits: int,
    sets_scc: bool,
    source_bits: list[int],
) -> Step:
    sources = [_read(operand, width) for operand, width in zip(operands[1:], source_bits, strict=True)]
    write, mask = _write(operands[0], result_bits), (1 << result_bits) - 1

    def unary(wave: Wave) -> None:
        result = function(only(wave)) & mask
        if sets_scc:
            wave.scc = int(result != 0)
        write(wave, result)

    def binary(wave: Wave) -> None:
        result = function(first(wave), second(wave)) & mask
        if sets_scc:
            wave.scc = int(result != 0)
        write(wave, result)

    if len(sources) == 1:
        (only,) = sources
        return unary
    first, second = sources
    return binary


def _add(operands: Sequence[Operand], op: str, overflow: bool) -> Step:
    """SCC is the carry or borrow; for the signed forms it is the overflow."""
    write, a, b = _write(operands[0], 32), _read(operands[1], 32), _read(operands[2], 32)
    sign, carries = -1 if op.startswith("sub") else 1, op in ("addc", "subb")

    def step(wave: Wave) -> None:
        x, y, carry = a(wave), b(wave), wave.scc if carries else 0
        if overflow:
            exact = signed(x, 32) + sign * signed(y, 32)
            wave.scc = int(not -(1 << 31) <= exact < 1 << 31)
        else:
            exact = x + sign * (y + carry)
            wave.scc = int(not 0 <= exact <= MASK32)
        write(wave, exact)

    return step


def _set_bit(operands: Sequence[Operand], value: bool) -> Step:
    """Of the destination, the bit that the source names; the others stay."""
    write, before, at = _write(operands[0], 32), _read(operands[0], 32), _read(operands[1], 32)
    if value:
        return lambda wave: write(wave, before(wave) | 1 << (at(wave) & 31))
    return lambda wave: write(wave, before(wave) & ~(1 << (at(wave) & 31)))


def _extremum(operands: Sequence[Operand], choose: Callable[[int, int], int], sign: bool) -> Step:
    """SCC says that the first operand was taken: for min it must be smaller, for max greater."""
    write, a, b = _write(operands[0], 32), _read(operands[1], 32, sign), _read(operands[2], 32, sign)

    def step(wave: Wave) -> None:
        x, y = a(wave), b(wave)
        result = choose(x, y)
        wave.scc = int(result == x and x != y)
        write(wave, result)

    return step


def _select(operands: Sequence[Operand], bits: int) -> Step:
    """cselect takes the first source if SCC, else the second; cmov leaves the destination instead."""
    write, taken = _write(operands[0], bits), _read(operands[1], bits)
    other = _read(operands[2] if len(operands) > 2 else operands[0], bits)
    return lambda wave: write(wave, taken(wave) if wave.scc else other(wave))


def _shift_add(operands: Sequence[Operand], shift: int) -> Step:
    write, a, b = _write(operands[0], 32), _read(operands[1], 32), _read(operands[2], 32)

    def step(wave: Wave) -> None:
        result = (a(wave) << shift) + b(wave)
        wave.scc = int(result > MASK32)
        write(wave, result)

    return step


def _compare(operands: Sequence[Operand], compare: Callable[[int, int], bool], bits: int, sign: bool) -> Step:
    a, b = _read(operands[0], bits, sign), _read(operands[1], bits, sign)

    def step(wave: Wave) -> None:
        wave.scc = int(compare(a(wave), b(wave)))

    return step


def _bit_compare(operands: Sequence[Operand], wanted: int, bits: int) -> Step:
    a, b = _read(operands[0], bits), _read(operands[1], 32)

    def step(wave: Wave) -> None:
        wave.scc = int(a(wave) >> (b(wave) & bits - 1) & 1 == wanted)

    return step


def _short_constant(
    operands: Sequence[Operand], op: str, condition: str | None, signed_constant: bool
) -> Step:
    """SOPK: a register and a 16-bit constant, sign-extended except for unsigned comparisons."""
    if len(operands) != 2 or operands[1].kind != "integer" or (op == "cmp") != (condition in _COMPARE):
        raise EmulatorError("unknown scalar instruction")
    raw = int(operands[1].value) & 0xFFFF
    value = signed(raw, 16) if signed_constant else raw
    constant = Operand("integer", value=value & MASK32)
    destination = operands[0]
    if op == "cmp":
        return _compare([destination, constant], _COMPARE[str(condition)], 32, signed_constant)
    if op == "add":
        return _add([destination, destination, constant], "add", overflow=True)
    if op == "cmov":
        return _select([destination, constant], 32)
    if op == "mul":
        return _assign([destination, destination, constant], operator.mul, 32, 32, False, [32, 32])
    return _assign([destination, constant], lambda a: a, 32, 32, False, [32])


def _save_exec(operands: Sequence[Operand], function: Callable[[int, int], int], lanes: int) -> Step:
    write, source, full = _write(operands[0], lanes), _read(operands[1], lanes), (1 << lanes) - 1

    def step(wave: Wave) -> None:
        old = wave.mask(EXEC)
        new = function(source(wave), old) & full
        write(wave, old)
        wave.set_exec(new)
        wave.scc = int(new != 0)

    return step


def _program_counter(instruction: Instruction, operands: Sequence[Operand]) -> Step:
    """Addresses in registers are device addresses; a step's address is one in the code object."""
    after = instruction.address + instruction.size
    if instruction.base_name == "s_getpc_b64":
        instruction.expect(1)
        write = _write(operands[0], 64)
        return lambda wave: write(wave, wave.group.code_address + after)
    target = _read(operands[-1], 64)
    if instruction.base_name == "s_setpc_b64":
        instruction.expect(1)
        return lambda wave: target(wave) - wave.group.code_address
    instruction.expect(2)
    save = _write(operands[0], 64)

    def swap(wave: Wave) -> int:
        address = target(wave) - wave.group.code_address
        save(wave, wave.group.code_address + after)
        return address

    return swap


def _load(instruction: Instruction) -> Step:
    instruction.expect(3)
    instruction.allow("offset", "glc", "dlc")
    name = instruction.base_name
    destination, base, offset = instruction.operands
    if name in _NARROW_LOADS:
        return _load_narrow(instruction, *_NARROW_LOADS[name])
    match = re.fullmatch(r"s_load_dword(?:x(2|3|4|8|16))?", name)
    if not match:
        raise EmulatorError("unknown scalar load")
    count = int(match[1] or 1)
    first = expect(destination, "scalar", count)
    pair = expect(base, "scalar", 2)
    constant = instruction.integer("offset") + (int(offset.value) if offset.kind == "integer" else 0)
    variable = _read(offset, 32) if offset.kind == "scalar" else None

    def step(wave: Wave) -> None:
        address = wave.scalar64(pair) + constant + (variable(wave) if variable else 0)
        data = wave.group.memory.read(address, 4 * count)
        wave.scalars[first : first + count] = struct.unpack(f"<{count}I", data)

    return step


def _load_narrow(instruction: Instruction, size: int, sign: bool) -> Step:
    """A load of less than a register, of whose word the rest is left out."""
    destination, base, offset = instruction.operands
    pair, write = expect(base, "scalar", 2), _write(destination, 32)
    if offset.kind == "scalar":
        raise EmulatorError("a narrow scalar load with an offset in a register")
    constant = instruction.integer("offset") + (int(offset.value) if offset.kind == "integer" else 0)

    def step(wave: Wave) -> None:
        value = wave.group.memory.read_narrow(wave.scalar64(pair) + constant, size)
        write(wave, signed(value, 8 * size) if sign else value)

    return step
