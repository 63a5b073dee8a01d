"""From the machine code of gfx90a and gfx942 to instructions, by the tables of opcodes.py.

The fields of each encoding are those of AMD's "Instinct MI200" and "Instinct MI300" instruction set manuals. What is
not in the tables is refused with its words; `str(instruction)` is what LLVM's disassembler prints, but for waits and
for the patterns of ds_swizzle, which are numbers here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from .errors import EmulatorError
from .opcodes import Form, forms
from .operand import Operand
from .wave import FIRST_ACCUMULATOR, VCC

Modifier = int | str | tuple[int, ...] | None  # None: a bare word

# Bits of the register MODE: its number, the first bit, how many less one
_FP16_OVFL, _ROUND_16_64 = 1 | 23 << 6, 1 | 2 << 6 | 1 << 11
_VOP2_WITH_CONSTANT = (0x17, 0x18, 0x24, 0x25)  # v_fmamk, v_fmaak and their like
_LITERAL, _SDWA, _DPP = (
    255,
    249,
    250,
)  # as a source: the second word is a constant, or says how lanes are read
_SELECT = (*(f"BYTE_{i}" for i in range(4)), "WORD_0", "WORD_1", "DWORD")
_UNUSED = ("UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE")
_OUTPUT_SCALE = (("mul", 2), ("mul", 4), ("div", 2))
_ROW_SHIFTS = {0x100: "row_shl", 0x110: "row_shr", 0x120: "row_ror", 0x150: "row_newbcast"}
_DPP_CONTROLS: dict[int, tuple[str, Modifier]] = {
    **{0x130 + 4 * i: (f"wave_{name}", 1) for i, name in enumerate(("shl", "rol", "shr", "ror"))},
    0x140: ("row_mirror", None),
    0x141: ("row_half_mirror", None),
    0x142: ("row_bcast", 15),
    0x143: ("row_bcast", 31),
}
_HEXADECIMAL = frozenset({"row_mask", "bank_mask"})
# The three bits of a vector memory instruction that are hints to the caches
_HINTS = {"gfx90a": ("glc", "slc", "scc"), "gfx942": ("sc0", "nt", "sc1")}


@dataclass(frozen=True)
class Instruction:
    """One instruction. `address` is in bytes; `name` keeps the encoding's suffix (`_e32`, `_dpp`)."""

    name: str
    operands: tuple[Operand, ...] = ()
    modifiers: Mapping[str, Modifier] = field(default_factory=dict)
    address: int = 0
    words: tuple[int, ...] = ()

    def __str__(self) -> str:
        text = " ".join((self.name, ", ".join(map(str, self.operands)))).rstrip()
        for name, value in self.modifiers.items():
            text += f" {name}" if value is None else f" {name}:{self._value_text(name, value)}"
        return text

    def _value_text(self, name: str, value: Modifier) -> str:
        if isinstance(value, tuple):
            return f"[{','.join(map(str, value))}]"
        hexadecimal = name in _HEXADECIMAL or self.name.startswith("s_")
        return f"{value:#x}" if hexadecimal else str(value)

    @property
    def size(self) -> int:
        return 4 * len(self.words)

    @cached_property
    def base_name(self) -> str:
        """The name without the encoding's suffix."""
        return re.sub(r"_(e32|e64|dpp|sdwa)$", "", self.name)

    @property
    def sdwa(self) -> bool:
        return self.name.endswith("_sdwa")

    def integer(self, modifier: str, default: int = 0) -> int:
        """The value of a numeric modifier."""
        value = self.modifiers.get(modifier, default)
        assert isinstance(value, int)
        return value

    def bits(self, modifier: str, default: int, count: int) -> tuple[int, ...]:
        """The value of a modifier such as op_sel:[0,1,0]; operands it does not name take the default."""
        given = self.modifiers.get(modifier, ())
        assert isinstance(given, tuple)
        return given + (default,) * (count - len(given))

    def expect(self, *counts: int) -> None:
        """Refuse another number of operands than the caller implements."""
        if len(self.operands) not in counts:
            raise EmulatorError(f"{len(self.operands)} operands instead of {' or '.join(map(str, counts))}")

    def allow(self, *modifiers: str) -> None:
        """Refuse every modifier that the caller does not implement."""
        unknown = self.modifiers.keys() - set(modifiers)
        if unknown:
            raise EmulatorError(f"modifier {', '.join(sorted(unknown))} is not implemented here")


def split(code: bytes, address: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The address and the words of each instruction of `code`, which starts at `address`.

    The length is a matter of the encoding alone, so that an unknown opcode does not hide what follows.
    """
    words = memoryview(code).cast("I")
    position = 0
    while position < len(words):
        size = min(_length(words[position]), len(words) - position)
        yield address + 4 * position, tuple(words[position : position + size])
        position += size


def _length(word: int) -> int:
    """How many words an instruction has that begins with `word`."""
    if word >> 30 == 3:  # VOP3, VOP3P and memory
        return 2
    if word >> 31 == 0:  # VOP1, VOP2 and VOPC
        opcode = word >> 25
        return 2 if word & 0x1FF in (_LITERAL, _SDWA, _DPP) or opcode in _VOP2_WITH_CONSTANT else 1
    if word >> 23 == 0x17F:  # SOPP
        return 1
    if word >> 28 == 0xB and word >> 23 not in (0x17D, 0x17E):  # SOPK, of which one has a constant
        return 2 if word >> 23 == 0x174 else 1
    first, second = word & 0xFF, word >> 8 & 0xFF
    return 2 if first == _LITERAL or (second == _LITERAL and word >> 23 != 0x17D) else 1


def decode(words: tuple[int, ...], address: int, arch: str) -> Instruction:
    """The instruction that `words` encode on `arch`; an EmulatorError that names them if it is not known."""
    try:
        encoding, opcode, read = _classify(words[0])
        known = forms(encoding, arch)
        if opcode not in known:
            raise EmulatorError(f"unknown instruction: {encoding} opcode {opcode:#x}")
        form = known[opcode]
        second = words[1] if len(words) > 1 else None
        name, operands, modifiers = read(form, words[0], second, arch)
    except EmulatorError as error:
        text = " ".join(f"{word:#010x}" for word in words)
        raise EmulatorError(f"{text} at {address:#x}: {error}") from None
    return Instruction(name, tuple(operands), modifiers, address, words)


Parts = tuple[str, list[Operand], dict[str, Modifier]]
Reader = Callable[[Form, int, "int | None", str], Parts]


def _classify(word: int) -> tuple[str, int, Reader]:
    """The encoding, the opcode in it, and what reads the other fields."""
    if word >> 31 == 0:
        if word >> 25 == 0x3F:
            return "VOP1", word >> 9 & 0xFF, _vector
        if word >> 25 == 0x3E:
            return "VOPC", word >> 17 & 0xFF, _vector
        return "VOP2", word >> 25, _vector
    if word >> 23 == 0x17D:
        return "SOP1", word >> 8 & 0xFF, _sop1
    if word >> 23 == 0x17E:
        return "SOPC", word >> 16 & 0x7F, _sopc
    if word >> 23 == 0x17F:
        return "SOPP", word >> 16 & 0x7F, _sopp
    if word >> 28 == 0xB:
        return "SOPK", word >> 23 & 0x1F, _sopk
    if word >> 30 == 2:
        return "SOP2", word >> 23 & 0x7F, _sop2
    if word >> 23 == 0x1A7:
        return "VOP3P", word >> 16 & 0x7F, _packed
    encoding = word >> 26
    if encoding == 0x34:
        return "VOP3", word >> 16 & 0x3FF, _vop3
    if encoding == 0x30:
        return "SMEM", word >> 18 & 0xFF, _scalar_memory
    if encoding == 0x36:
        return "DS", word >> 17 & 0xFF, _local_memory
    if encoding == 0x37 and word >> 14 & 3 in (0, 2):
        return "GLOBAL" if word >> 15 & 1 else "FLAT", word >> 18 & 0x7F, _flat
    if encoding == 0x38:
        return "MUBUF", word >> 18 & 0x7F, _buffer
    raise EmulatorError("unknown encoding")


# ---- operands


def _scalar(code: int, count: int) -> Operand:
    """The scalar register that a field of 7 bits names; wider ones are refused where they can't begin there."""
    if not (code <= 101 or code in (VCC, VCC + 1, 124, 126, 127)):
        raise EmulatorError(f"unknown operand {code:#x}")
    if count > 1 and (
        code % min(count, 4) or (code + count - 1 > 101 and (code, count) not in ((VCC, 2), (126, 2)))
    ):
        raise EmulatorError(f"unknown operand {code:#x} of {count} registers")
    return Operand("scalar", code, count)


def _vector_register(code: int, count: int, accumulator: int | bool = False) -> Operand:
    if code + count > FIRST_ACCUMULATOR:
        raise EmulatorError(f"unknown operand v{code} of {count} registers")
    return Operand("vector", code + FIRST_ACCUMULATOR * bool(accumulator), count)


def _source(code: int, count: int, literal: int | None) -> Operand:
    """The operand that a source field of 9 bits (or of 8, without vectors) names."""
    if code >= 256:
        return _vector_register(code - 256, count)
    if 128 <= code <= 208:
        return Operand("integer", value=code - 128 if code <= 192 else 192 - code)
    if 240 <= code <= 248:
        return Operand("float", count=count, value=_FLOATS[code - 240])
    if code == 253:
        return Operand("scc")
    if code == _LITERAL and literal is not None:
        return Operand("integer", value=literal, literal=True)
    return _scalar(code, count)


_FLOATS = (0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 4.0, -4.0, 0.15915494309189532)


def _constant(value: int) -> Operand:
    return Operand("integer", value=value, literal=True)


# ---- scalar instructions


def _sop2(form: Form, word: int, second: int | None, arch: str) -> Parts:
    d, a, b = map(int, form.operands)
    return (
        form.name,
        [
            _scalar(word >> 16 & 0x7F, d),
            _source(word & 0xFF, a, second),
            _source(word >> 8 & 0xFF, b, second),
        ],
        {},
    )


def _sop1(form: Form, word: int, second: int | None, arch: str) -> Parts:
    to, source = form.operands
    operands = [_scalar(word >> 16 & 0x7F, int(to))] if to != "-" else []
    return form.name, operands + ([_source(word & 0xFF, int(source), second)] if source != "-" else []), {}


def _sopc(form: Form, word: int, second: int | None, arch: str) -> Parts:
    a, b = map(int, form.operands)
    return form.name, [_source(word & 0xFF, a, second), _source(word >> 8 & 0xFF, b, second)], {}


def _sopk(form: Form, word: int, second: int | None, arch: str) -> Parts:
    if form.name == "s_setreg_imm32_b32":
        assert second is not None
        if word & 0xFFFF != _FP16_OVFL and (word & 0xFFFF, second) != (_ROUND_16_64, 0):
            raise EmulatorError(
                "unknown instruction: s_setreg of what is neither FP16_OVFL nor rounding to nearest"
            )
        bits = Operand("mode", word >> 6 & 31, (word >> 11 & 31) + 1)
        return form.name, [bits, Operand("integer", value=second)], {}
    return form.name, [_scalar(word >> 16 & 0x7F, 1), _constant(word & 0xFFFF)], {}


def _sopp(form: Form, word: int, second: int | None, arch: str) -> Parts:
    return form.name, [Operand("integer", value=word & 0xFFFF)] if form.operands else [], {}


def _scalar_memory(form: Form, word: int, second: int | None, arch: str) -> Parts:
    assert second is not None
    if not form.operands:
        return form.name, [], {}
    modifiers: dict[str, Modifier] = {}
    constant = (second & 0x1FFFFF ^ 0x100000) - 0x100000  # 21 bits, signed
    has_constant, has_register = word >> 17 & 1, word >> 14 & 1
    if has_register or not has_constant:
        offset = _scalar((second >> 25 if has_register else second) & 0x7F, 1)
        if has_register and has_constant:
            modifiers["offset"] = constant
    else:
        offset = _constant(constant)
    if word >> 16 & 1:
        modifiers["glc"] = None
    data, base, _ = form.operands
    return (
        form.name,
        [_scalar(word >> 6 & 0x7F, int(data)), _scalar((word & 0x3F) << 1, int(base)), offset],
        modifiers,
    )


# ---- vector instructions

Sources = Sequence[tuple[int, Mapping[str, bool]]]  # the code of each, and Operand's modifiers


def _operands(
    form: Form, to: int, sources: Sources, mask: Operand | None, carry: Operand | None, literal: int | None
) -> list[Operand]:
    """The operands in the assembler's order; `to` is the destination's field."""
    made: list[Operand] = []
    left = iter(sources)
    for token in form.operands:
        if token in ("m", "c"):
            special = mask if token == "m" else carry
            assert special is not None
            made.append(special)
        elif token == "k":
            assert literal is not None
            made.append(_constant(literal))
        else:
            is_source = bool(made)  # the destination, or the mask in its place, comes first
            code, flags = next(left) if is_source else (to, {})
            if token == "S":
                operand = _scalar(code, 1)
            elif token == "a1":
                operand = _vector_register(code & 0xFF, 1, accumulator=True)
            elif is_source:
                operand = _source(code, int(token), literal)
            else:
                operand = _vector_register(code, int(token))
            made.append(replace(operand, **flags) if any(flags.values()) else operand)
    return made


_VCC = Operand("scalar", VCC, 2)


def _vector(form: Form, word: int, second: int | None, arch: str) -> Parts:
    """VOP1, VOP2 and VOPC, whose second word may be a constant, DPP or SDWA."""
    first, other = word & 0x1FF, 256 + (word >> 9 & 0xFF)
    if first in (_SDWA, _DPP):
        if second is None or not form.suffixed:
            raise EmulatorError("unknown encoding")
        return (_sdwa if first == _SDWA else _dpp)(form, word, second)
    operands = _operands(form, word >> 17 & 0xFF, [(first, {}), (other, {})], _VCC, _VCC, second)
    return form.name + "_e32" * form.suffixed, operands, {}


def _dpp(form: Form, word: int, second: int) -> Parts:
    sources: Sources = [
        (256 + (second & 0xFF), {"negate": bool(second >> 20 & 1), "absolute": bool(second >> 21 & 1)}),
        (256 + (word >> 9 & 0xFF), {"negate": bool(second >> 22 & 1), "absolute": bool(second >> 23 & 1)}),
    ]
    control = second >> 8 & 0x1FF
    modifiers: dict[str, Modifier] = {}
    if control < 0x100:
        modifiers["quad_perm"] = tuple(control >> 2 * i & 3 for i in range(4))
    elif control in _DPP_CONTROLS:
        name, value = _DPP_CONTROLS[control]
        modifiers[name] = value
    elif control & ~15 in _ROW_SHIFTS and (control & 15 or control & ~15 == 0x150):
        modifiers[_ROW_SHIFTS[control & ~15]] = control & 15
    else:
        raise EmulatorError(f"unknown DPP control {control:#x}")
    modifiers |= {"row_mask": second >> 28, "bank_mask": second >> 24 & 15}
    if second >> 19 & 1:
        modifiers["bound_ctrl"] = 1
    return f"{form.name}_dpp", _operands(form, word >> 17 & 0xFF, sources, _VCC, _VCC, None), modifiers


def _sdwa(form: Form, word: int, second: int) -> Parts:
    def source(code: int, fields: int) -> tuple[int, Mapping[str, bool]]:
        """`fields` from bit 3 on: sext, neg, abs; bit 7: a scalar register."""
        flags = {"sign_extend": 3, "negate": 4, "absolute": 5}
        return code + 256 * (not fields >> 7 & 1), {
            name: bool(fields >> bit & 1) for name, bit in flags.items()
        }

    sources: Sources = [source(second & 0xFF, second >> 16 & 0xFF), source(word >> 9 & 0xFF, second >> 24)]
    modifiers: dict[str, Modifier] = {}
    mask = _VCC
    if form.operands[0] == "m":
        if second >> 15 & 1:
            mask = _scalar(second >> 8 & 0x7F, 2)
    else:
        if second >> 13 & 1:
            modifiers["clamp"] = None
        modifiers |= _output_scale(second >> 14 & 3)
        modifiers |= {
            "dst_sel": _choice(_SELECT, second >> 8 & 7),
            "dst_unused": _choice(_UNUSED, second >> 11 & 3),
        }
    modifiers["src0_sel"] = _choice(_SELECT, second >> 16 & 7)
    if len([t for t in form.operands[1:] if t not in ("m", "c")]) > 1:
        modifiers["src1_sel"] = _choice(_SELECT, second >> 24 & 7)
    return f"{form.name}_sdwa", _operands(form, word >> 17 & 0xFF, sources, mask, _VCC, None), modifiers


def _choice(names: Sequence[str], number: int) -> str:
    if number >= len(names):
        raise EmulatorError(f"unknown SDWA selection {number}")
    return names[number]


def _output_scale(field: int) -> dict[str, Modifier]:
    if not field:
        return {}
    name, value = _OUTPUT_SCALE[field - 1]
    return {name: value}


def _vop3(form: Form, word: int, second: int | None, arch: str) -> Parts:
    assert second is not None
    has_mask = "m" in form.operands[1:]  # its field takes the place of abs and op_sel
    absolute = 0 if has_mask else word >> 8 & 7
    sources: Sources = [
        (second >> 9 * i & 0x1FF, {"negate": bool(second >> 29 + i & 1), "absolute": bool(absolute >> i & 1)})
        for i in range(3)
    ]
    mask = None
    if "m" in form.operands:
        mask = _scalar((word >> 8 if has_mask else word) & 0x7F, 2)
    carry = _scalar(second >> 18 & 0x7F, 2) if "c" in form.operands else None
    _refuse_more_sources(second, len(form.operands) - 1 - has_mask)
    operands = _operands(form, word & 0xFF, sources, mask, carry, None)
    modifiers: dict[str, Modifier] = {}
    selected = 0 if has_mask else word >> 11 & 15
    if selected:
        count = len(form.operands) - 1
        modifiers["op_sel"] = (*(selected >> i & 1 for i in range(count)), selected >> 3)
    if word >> 15 & 1:
        modifiers["clamp"] = None
    return form.name + "_e64" * form.suffixed, operands, modifiers | _output_scale(second >> 27 & 3)


def _refuse_more_sources(second: int, count: int) -> None:
    """The fields of sources that an instruction does not have are zero."""
    if second & (1 << 27) - 1 & -(1 << 9 * count):
        raise EmulatorError(f"unknown encoding: more than {count} sources")


def _packed(form: Form, word: int, second: int | None, arch: str) -> Parts:
    """VOP3P: two operations a lane, products of mixed precision, moves of accumulators and matrix instructions."""
    assert second is not None
    if form.name.startswith("v_mfma"):
        return _matrix(form, word, second)
    mixed, count = form.name.startswith("v_fma_mix"), len(form.operands) - 1
    _refuse_more_sources(second, count)
    high, negated = word >> 8 & 7, second >> 29
    sources: Sources = [
        (
            second >> 9 * i & 0x1FF,
            {"negate": bool(negated >> i & 1), "absolute": bool(high >> i & 1)} if mixed else {},
        )
        for i in range(3)
    ]
    operands = _operands(form, word & 0xFF, sources, None, None, None)
    if form.name.startswith("v_accvgpr"):
        return form.name, operands, {}
    default = 0 if mixed else 1  # of op_sel_hi
    modifiers: dict[str, Modifier] = {}
    for name, given_bits, usual in (
        ("op_sel", word >> 11 & 7, 0),
        ("op_sel_hi", second >> 27 & 3 | (word >> 14 & 1) << 2, default),
        ("neg_lo", 0 if mixed else negated, 0),
        ("neg_hi", 0 if mixed else high, 0),
    ):
        given = tuple(given_bits >> i & 1 for i in range(count))
        if given != (usual,) * count:
            modifiers[name] = given
    if word >> 15 & 1:
        modifiers["clamp"] = None
    return form.name, operands, modifiers


def _matrix(form: Form, word: int, second: int) -> Parts:
    d, a, b, c = map(int, form.operands)
    in_accumulators = word >> 15 & 1  # D, and C where it is a register
    operands = [_vector_register(word & 0xFF, d, in_accumulators)]
    for code, count, accumulator in (
        (second & 0x1FF, a, second >> 27 & 1),
        (second >> 9 & 0x1FF, b, second >> 28 & 1),
        (second >> 18 & 0x1FF, c, in_accumulators),
    ):
        if code >= 256:
            operands.append(_vector_register(code - 256, count, accumulator))
        elif len(operands) == 3:  # C alone may be a constant
            operands.append(_source(code, count, None))
        else:
            raise EmulatorError(f"unknown operand {code:#x}")
    fields = {"cbsz": word >> 8 & 7, "abid": word >> 11 & 15, "blgp": second >> 29}
    return form.name, operands, {name: value for name, value in fields.items() if value}


# ---- memory


def _local_memory(form: Form, word: int, second: int | None, arch: str) -> Parts:
    assert second is not None
    in_accumulators = word >> 25 & 1
    address = _vector_register(second & 0xFF, 1)
    data = [second >> 8 & 0xFF, second >> 16 & 0xFF]
    if "_write" in form.name:
        operands = [
            address,
            *(
                _vector_register(d, int(n), in_accumulators)
                for d, n in zip(data, form.operands[1:], strict=False)
            ),
        ]
    else:
        to, _, *more = form.operands
        operands = [_vector_register(second >> 24, int(to), in_accumulators), address]
        operands += [_vector_register(d, int(n), in_accumulators) for d, n in zip(data, more, strict=False)]
    modifiers: dict[str, Modifier] = {}
    if re.search(r"_(read|write)2", form.name):
        fields = {"offset0": word & 0xFF, "offset1": word >> 8 & 0xFF}
    else:
        fields = {"offset": word & 0xFFFF}
    modifiers |= {name: value for name, value in fields.items() if value}
    if word >> 16 & 1:
        modifiers["gds"] = None
    return form.name, operands, modifiers


def _flat(form: Form, word: int, second: int | None, arch: str) -> Parts:
    """FLAT and GLOBAL: an address a lane, or for the latter a scalar base and an offset a lane."""
    assert second is not None
    is_global, count = word >> 15 & 1, int(form.operands[0])
    in_accumulators, base = second >> 23 & 1, second >> 16 & 0x7F
    has_base = is_global and base != 0x7F
    address = _vector_register(second & 0xFF, 1 if has_base else 2)
    data = _vector_register(second >> 8 & 0xFF, count, in_accumulators)
    result_count = count // 2 if "cmpswap" in form.name else count
    result = _vector_register(second >> 24, result_count, in_accumulators)
    if "_load" in form.name:
        operands = [result, address]
    elif "_store" in form.name or not word >> 16 & 1:  # an atomic without a result
        operands = [address, data]
    else:
        operands = [result, address, data]
    if is_global:
        operands.append(_scalar(base, 2) if has_base else Operand("off"))
    offset = (word & 0x1FFF ^ 0x1000) - 0x1000 if is_global else word & 0xFFF
    modifiers: dict[str, Modifier] = {"offset": offset} if offset else {}
    if word >> 13 & 1:
        modifiers["lds"] = None
    return form.name, operands, modifiers | _hints(arch, word >> 16 & 1, word >> 17 & 1, word >> 25 & 1)


def _buffer(form: Form, word: int, second: int | None, arch: str) -> Parts:
    assert second is not None
    hints = _hints(arch, word >> 14 & 1, word >> 17 & 1, word >> 15 & 1)
    if not form.operands:
        return form.name, [], hints
    has_index, has_offset = word >> 13 & 1, word >> 12 & 1
    operands = [
        _vector_register(second >> 8 & 0xFF, int(form.operands[0]), second >> 23 & 1),
        _vector_register(second & 0xFF, has_index + has_offset)
        if has_index or has_offset
        else Operand("off"),
        _scalar(4 * (second >> 16 & 0x1F), 4),
        _source(second >> 24, 1, None),
    ]
    modifiers: dict[str, Modifier] = {}
    flags = {"idxen": has_index, "offen": has_offset}
    modifiers |= {name: None for name, given in flags.items() if given}
    if word & 0xFFF:
        modifiers["offset"] = word & 0xFFF
    modifiers |= hints
    if word >> 16 & 1:
        modifiers["lds"] = None
    return form.name, operands, modifiers


def _hints(arch: str, *given: int) -> dict[str, Modifier]:
    return {name: None for name, bit in zip(_HINTS[arch], given, strict=True) if bit}
