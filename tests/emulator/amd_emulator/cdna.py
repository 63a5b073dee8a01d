"""Encodings of gfx90a, gfx942 and gfx950: the fields are those of AMD's "Instinct MI200", "Instinct MI300" and "CDNA 4"
instruction set manuals."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from .architecture import ARCHITECTURES, Architecture
from .errors import EmulatorError
from .fields import (
    LITERAL,
    Parts,
    Sources,
    common_encoding,
    constant,
    output_scale,
    refuse_more_sources,
    scalar_register,
    source,
    vector_operands,
    vector_register,
)
from .instruction import Modifier
from .opcodes import Form
from .operand import Operand
from .wave import VCC

Reader = Callable[[Form, "tuple[int, ...]", Architecture], Parts]
_CDNA = ARCHITECTURES["gfx942"]  # scalar registers are the same on all of them
# Bits of the register MODE: its number, the first bit, how many less one
_FP16_OVFL, _ROUND_16_64 = 1 | 23 << 6, 1 | 2 << 6 | 1 << 11
_VOP2_WITH_CONSTANT = (0x17, 0x18, 0x24, 0x25)  # v_fmamk, v_fmaak and their like
_SDWA, _DPP = 249, 250  # as a source: the second word says how lanes are read
_SELECT = (*(f"BYTE_{i}" for i in range(4)), "WORD_0", "WORD_1", "DWORD")
_UNUSED = ("UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE")
_ROW_SHIFTS = {0x100: "row_shl", 0x110: "row_shr", 0x120: "row_ror", 0x150: "row_newbcast"}
_DPP_CONTROLS: dict[int, tuple[str, Modifier]] = {
    **{0x130 + 4 * i: (f"wave_{name}", 1) for i, name in enumerate(("shl", "rol", "shr", "ror"))},
    0x140: ("row_mirror", None),
    0x141: ("row_half_mirror", None),
    0x142: ("row_bcast", 15),
    0x143: ("row_bcast", 31),
}
# The three bits of a vector memory instruction that are hints to the caches
_HINTS = {"gfx90a": ("glc", "slc", "scc"), "gfx942": ("sc0", "nt", "sc1"), "gfx950": ("sc0", "nt", "sc1")}


def length(word: int, second: int) -> int:
    """How many words an instruction has that begins with these."""
    if word >> 30 == 3:  # VOP3, VOP3P and memory
        return 2
    if word >> 31 == 0:  # VOP1, VOP2 and VOPC
        opcode = word >> 25
        return 2 if word & 0x1FF in (LITERAL, _SDWA, _DPP) or opcode in _VOP2_WITH_CONSTANT else 1
    if word >> 23 == 0x17F:  # SOPP
        return 1
    if word >> 28 == 0xB and word >> 23 not in (0x17D, 0x17E):  # SOPK, of which one has a constant
        return 2 if word >> 23 == 0x174 else 1
    first, second = word & 0xFF, word >> 8 & 0xFF
    return 2 if first == LITERAL or (second == LITERAL and word >> 23 != 0x17D) else 1


def classify(word: int, architecture: Architecture) -> tuple[str, int, Reader]:
    """The encoding, the opcode in it, and what reads the other fields."""
    if (common := common_encoding(word)) is not None:
        name, opcode = common
        return name, opcode, _READERS[name]
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
    return scalar_register(code, count, _CDNA)


def _source(code: int, count: int, literal: int | None) -> Operand:
    return source(code, count, literal, _CDNA)


def _vector_operands(
    form: Form, to: int, sources: Sources, mask: Operand | None, carry: Operand | None, literal: int | None
) -> list[Operand]:
    return vector_operands(form, to, sources, mask, carry, literal, _CDNA)


# ---- scalar instructions


def _sop2(form: Form, words: tuple[int, ...], architecture: Architecture) -> Parts:
    word, second = words[0], words[1] if len(words) > 1 else None
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


def _sop1(form: Form, words: tuple[int, ...], architecture: Architecture) -> Parts:
    word, second = words[0], words[1] if len(words) > 1 else None
    to, source = form.operands
    operands = [_scalar(word >> 16 & 0x7F, int(to))] if to != "-" else []
    return form.name, operands + ([_source(word & 0xFF, int(source), second)] if source != "-" else []), {}


def _sopc(form: Form, words: tuple[int, ...], architecture: Architecture) -> Parts:
    word, second = words[0], words[1] if len(words) > 1 else None
    a, b = map(int, form.operands)
    return form.name, [_source(word & 0xFF, a, second), _source(word >> 8 & 0xFF, b, second)], {}


def _sopk(form: Form, words: tuple[int, ...], architecture: Architecture) -> Parts:
    word, second = words[0], words[1] if len(words) > 1 else None
    if form.name == "s_setreg_imm32_b32":
        assert second is not None
        if word & 0xFFFF != _FP16_OVFL and (word & 0xFFFF, second) != (_ROUND_16_64, 0):
            raise EmulatorError(
                "unknown instruction: s_setreg of what is neither FP16_OVFL nor rounding to nearest"
            )
        bits = Operand("mode", word >> 6 & 31, (word >> 11 & 31) + 1)
        return form.name, [bits, Operand("integer", value=second)], {}
    return form.name, [_scalar(word >> 16 & 0x7F, 1), constant(word & 0xFFFF)], {}


def _sopp(form: Form, words: tuple[int, ...], architecture: Architecture) -> Parts:
    return form.name, [Operand("integer", value=words[0] & 0xFFFF)] if form.operands else [], {}


def _scalar_memory(form: Form, words: tuple[int, ...], architecture: Architecture) -> Parts:
    word, second = words[0], words[1] if len(words) > 1 else None
    assert second is not None
    if not form.operands:
        return form.name, [], {}
    modifiers: dict[str, Modifier] = {}
    value = (second & 0x1FFFFF ^ 0x100000) - 0x100000  # 21 bits, signed
    has_constant, has_register = word >> 17 & 1, word >> 14 & 1
    if has_register or not has_constant:
        offset = _scalar((second >> 25 if has_register else second) & 0x7F, 1)
        if has_register and has_constant:
            modifiers["offset"] = value
    else:
        offset = constant(value)
    if word >> 16 & 1:
        modifiers["glc"] = None
    data, base, _ = form.operands
    return (
        form.name,
        [_scalar(word >> 6 & 0x7F, int(data)), _scalar((word & 0x3F) << 1, int(base)), offset],
        modifiers,
    )


# ---- vector instructions

_VCC = Operand("scalar", VCC, 2)


def _vector(form: Form, words: tuple[int, ...], architecture: Architecture) -> Parts:
    """VOP1, VOP2 and VOPC, whose second word may be a constant, DPP or SDWA."""
    word, second = words[0], words[1] if len(words) > 1 else None
    first, other = word & 0x1FF, 256 + (word >> 9 & 0xFF)
    if first in (_SDWA, _DPP):
        if second is None or not form.suffixed:
            raise EmulatorError("unknown encoding")
        return (_sdwa if first == _SDWA else _dpp)(form, word, second)
    operands = _vector_operands(form, word >> 17 & 0xFF, [(first, {}), (other, {})], _VCC, _VCC, second)
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
    return f"{form.name}_dpp", _vector_operands(form, word >> 17 & 0xFF, sources, _VCC, _VCC, None), modifiers


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
        modifiers |= output_scale(second >> 14 & 3)
        if not form.name.endswith("f32_fp8"):  # those have whole results, of which LLVM prints nothing
            modifiers |= {
                "dst_sel": _choice(_SELECT, second >> 8 & 7),
                "dst_unused": _choice(_UNUSED, second >> 11 & 3),
            }
    modifiers["src0_sel"] = _choice(_SELECT, second >> 16 & 7)
    if len([t for t in form.operands[1:] if t not in ("m", "c")]) > 1:
        modifiers["src1_sel"] = _choice(_SELECT, second >> 24 & 7)
    return (
        f"{form.name}_sdwa",
        _vector_operands(form, word >> 17 & 0xFF, sources, mask, _VCC, None),
        modifiers,
    )


def _choice(names: Sequence[str], number: int) -> str:
    if number >= len(names):
        raise EmulatorError(f"unknown SDWA selection {number}")
    return names[number]


def _vop3(form: Form, words: tuple[int, ...], architecture: Architecture) -> Parts:
    word, second = words[0], words[1] if len(words) > 1 else None
    assert second is not None
    if form.name.startswith("v_bitop3_"):
        return _bit_operation(form, word, second)
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
    refuse_more_sources(second, len(form.operands) - 1 - has_mask)
    operands = _vector_operands(form, word & 0xFF, sources, mask, carry, None)
    modifiers: dict[str, Modifier] = {}
    selected = 0 if has_mask else word >> 11 & 15
    if selected:
        count = len(form.operands) - 1
        modifiers["op_sel"] = (*(selected >> i & 1 for i in range(count)), selected >> 3)
    if word >> 15 & 1:
        modifiers["clamp"] = None
    return form.name + "_e64" * form.suffixed, operands, modifiers | output_scale(second >> 27 & 3)


def _bit_operation(form: Form, word: int, second: int) -> Parts:
    """v_bitop3, whose truth table takes the place of the sources' modifiers."""
    if word >> 11 & 31:
        raise EmulatorError("unknown encoding")
    sources: Sources = [(second >> 9 * i & 0x1FF, {}) for i in range(3)]
    table = second >> 29 | (word >> 8 & 7) << 3 | (second >> 27 & 3) << 6
    return form.name, _vector_operands(form, word & 0xFF, sources, None, None, None), {"bitop3": table}


def _packed(form: Form, words: tuple[int, ...], architecture: Architecture) -> Parts:
    """VOP3P: two operations a lane, products of mixed precision, moves of accumulators and matrix instructions."""
    word, second = words[0], words[1] if len(words) > 1 else None
    assert second is not None
    if form.name.startswith("v_mfma"):
        return _matrix(form, word, second)
    mixed, count = form.name.startswith("v_fma_mix"), len(form.operands) - 1
    refuse_more_sources(second, count)
    high, negated = word >> 8 & 7, second >> 29
    sources: Sources = [
        (
            second >> 9 * i & 0x1FF,
            {"negate": bool(negated >> i & 1), "absolute": bool(high >> i & 1)} if mixed else {},
        )
        for i in range(3)
    ]
    operands = _vector_operands(form, word & 0xFF, sources, None, None, None)
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
    operands = [vector_register(word & 0xFF, d, in_accumulators)]
    for code, count, accumulator in (
        (second & 0x1FF, a, second >> 27 & 1),
        (second >> 9 & 0x1FF, b, second >> 28 & 1),
        (second >> 18 & 0x1FF, c, in_accumulators),
    ):
        if code >= 256:
            operands.append(vector_register(code - 256, count, accumulator))
        elif len(operands) == 3:  # C alone may be a constant
            operands.append(_source(code, count, None))
        else:
            raise EmulatorError(f"unknown operand {code:#x}")
    fields = {"cbsz": word >> 8 & 7, "abid": word >> 11 & 15, "blgp": second >> 29}
    return form.name, operands, {name: value for name, value in fields.items() if value}


# ---- memory


def _local_memory(form: Form, words: tuple[int, ...], architecture: Architecture) -> Parts:
    word, second = words[0], words[1] if len(words) > 1 else None
    assert second is not None
    in_accumulators = word >> 25 & 1
    address = vector_register(second & 0xFF, 1)
    data = [second >> 8 & 0xFF, second >> 16 & 0xFF]
    if "_write" in form.name:
        operands = [
            address,
            *(
                vector_register(d, int(n), in_accumulators)
                for d, n in zip(data, form.operands[1:], strict=False)
            ),
        ]
    else:
        to, _, *more = form.operands
        operands = [vector_register(second >> 24, int(to), in_accumulators), address]
        operands += [vector_register(d, int(n), in_accumulators) for d, n in zip(data, more, strict=False)]
    modifiers: dict[str, Modifier] = {}
    if re.search(r"_(read|write)2", form.name):
        fields = {"offset0": word & 0xFF, "offset1": word >> 8 & 0xFF}
    else:
        fields = {"offset": word & 0xFFFF}
    modifiers |= {name: value for name, value in fields.items() if value}
    if word >> 16 & 1:
        modifiers["gds"] = None
    return form.name, operands, modifiers


def _flat(form: Form, words: tuple[int, ...], architecture: Architecture) -> Parts:
    """FLAT and GLOBAL: an address a lane, or for the latter a scalar base and an offset a lane."""
    word, second = words[0], words[1] if len(words) > 1 else None
    assert second is not None
    is_global, count = word >> 15 & 1, int(form.operands[0])
    in_accumulators, base = second >> 23 & 1, second >> 16 & 0x7F
    has_base = is_global and base != 0x7F
    address = vector_register(second & 0xFF, 1 if has_base else 2)
    data = vector_register(second >> 8 & 0xFF, count, in_accumulators)
    result_count = count // 2 if "cmpswap" in form.name else count
    result = vector_register(second >> 24, result_count, in_accumulators)
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
    return (
        form.name,
        operands,
        modifiers | _hints(architecture.name, word >> 16 & 1, word >> 17 & 1, word >> 25 & 1),
    )


def _buffer(form: Form, words: tuple[int, ...], architecture: Architecture) -> Parts:
    word, second = words[0], words[1] if len(words) > 1 else None
    assert second is not None
    hints = _hints(architecture.name, word >> 14 & 1, word >> 17 & 1, word >> 15 & 1)
    if not form.operands:
        return form.name, [], hints
    has_index, has_offset = word >> 13 & 1, word >> 12 & 1
    operands = [
        vector_register(second >> 8 & 0xFF, int(form.operands[0]), second >> 23 & 1),
        vector_register(second & 0xFF, has_index + has_offset) if has_index or has_offset else Operand("off"),
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


_READERS: Mapping[str, Reader] = {
    "VOP1": _vector, "VOP2": _vector, "VOPC": _vector, "SOP1": _sop1, "SOP2": _sop2, "SOPC": _sopc, "SOPK": _sopk,
    "SOPP": _sopp,
}  # fmt: skip
