"""What the fields of an instruction's words name: registers and constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .architecture import Architecture
from .errors import EmulatorError
from .instruction import Modifier
from .opcodes import Form
from .operand import Operand
from .wave import EXEC, FIRST_ACCUMULATOR, M0, TRAPS, VCC

Parts = tuple[str, list[Operand], dict[str, Modifier]]
Sources = Sequence[tuple[int, Mapping[str, bool]]]  # the code of each, and Operand's modifiers
LITERAL = 255  # as a source: a constant behind the instruction
_NULL, _RDNA_M0 = 124, 125
_OUTPUT_SCALE = (("mul", 2), ("mul", 4), ("div", 2))
_FLOATS = (0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 4.0, -4.0, 0.15915494309189532)


def common_encoding(word: int) -> tuple[str, int] | None:
    """The encoding of an instruction, and its opcode, where CDNA and RDNA have the same: of scalar arithmetic and of
    vector instructions of one word."""
    if word >> 31 == 0:
        if word >> 25 == 0x3F:
            return "VOP1", word >> 9 & 0xFF
        return ("VOPC", word >> 17 & 0xFF) if word >> 25 == 0x3E else ("VOP2", word >> 25)
    if word >> 30 != 2:
        return None
    if word >> 23 == 0x17D:
        return "SOP1", word >> 8 & 0xFF
    if word >> 23 in (0x17E, 0x17F):
        return "SOPC" if word >> 23 == 0x17E else "SOPP", word >> 16 & 0x7F
    return ("SOPK", word >> 23 & 0x1F) if word >> 28 == 0xB else ("SOP2", word >> 23 & 0x7F)


def scalar_register(code: int, count: int, architecture: Architecture) -> Operand:
    """The scalar register that a field of 7 bits names; wider ones are refused where they can't begin there."""
    rdna, last = architecture.rdna, 105 if architecture.rdna else 101
    if rdna and code == _NULL:
        return Operand("null", count=count)
    if rdna and code == _RDNA_M0 and count == 1:
        return Operand("scalar", M0)
    traps = range(TRAPS, TRAPS + 16) if rdna else ()
    if not (code <= last or code in (VCC, VCC + 1, EXEC, EXEC + 1, *traps) or (code == M0 and not rdna)):
        raise EmulatorError(f"unknown operand {code:#x}")
    if count > 1 and (
        code % (2 if count == 2 else 4)
        or (code + count - 1 > last and (code, count) not in ((VCC, 2), (EXEC, 2)))
    ):
        raise EmulatorError(f"unknown operand {code:#x} of {count} registers")
    return Operand("scalar", code, count)


def vector_register(code: int, count: int, accumulator: int | bool = False) -> Operand:
    if code + count > FIRST_ACCUMULATOR:
        raise EmulatorError(f"unknown operand v{code} of {count} registers")
    return Operand("vector", code + FIRST_ACCUMULATOR * bool(accumulator), count)


def source(code: int, count: int, literal: int | None, architecture: Architecture) -> Operand:
    """The operand that a source field of 9 bits (or of 8, without vectors) names."""
    if code >= 256:
        return vector_register(code - 256, count)
    if 128 <= code <= 208:
        return Operand("integer", value=code - 128 if code <= 192 else 192 - code)
    if 240 <= code <= 248:
        return Operand("float", count=count, value=_FLOATS[code - 240])
    if code == 253:
        return Operand("scc")
    if code == LITERAL and literal is not None:
        return constant(literal)
    return scalar_register(code, count, architecture)


def constant(value: int) -> Operand:
    return Operand("integer", value=value, literal=True)


def vector_operands(
    form: Form,
    to: int,
    sources: Sources,
    mask: Operand | None,
    carry: Operand | None,
    literal: int | None,
    architecture: Architecture,
) -> list[Operand]:
    """The operands of a vector instruction in the assembler's order; `to` is the destination's field."""
    made: list[Operand] = []
    left = iter(sources)
    for index, token in enumerate(form.operands):
        if token == "x":
            continue
        if token in ("m", "c"):
            special = mask if token == "m" else carry
            assert special is not None
            made.append(special)
        elif token == "k":
            assert literal is not None
            made.append(constant(literal))
        else:
            is_source = bool(index)  # the destination, or the mask in its place, comes first
            code, flags = next(left) if is_source else (to, {})
            if token == "S":
                operand = scalar_register(code, 1, architecture)
            elif token == "a1":
                operand = vector_register(code & 0xFF, 1, accumulator=True)
            elif is_source:
                operand = source(code, 1 if token == "h" else int(token), literal, architecture)
            else:
                operand = vector_register(code, 1 if token == "h" else int(token))
            if any(flags.values()):
                operand = replace(operand, **flags)
            made.append(operand)
    return made


def refuse_more_sources(second: int, count: int) -> None:
    """The fields of sources that an instruction does not have are zero."""
    if second & (1 << 27) - 1 & -(1 << 9 * count):
        raise EmulatorError(f"unknown encoding: more than {count} sources")


def output_scale(field: int) -> dict[str, Modifier]:
    if not field:
        return {}
    name, value = _OUTPUT_SCALE[field - 1]
    return {name: value}
