"""Encodings of RDNA 3, 3.5 (gfx11) and 4 (gfx12): the fields are those of AMD's instruction set manuals of
these names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from .architecture import Architecture
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
from .instruction import Instruction, Modifier
from .opcodes import Form, forms
from .operand import Operand
from .wave import VCC

Reader = Callable[[Form, "tuple[int, ...]", Architecture], Parts]
_DPP8, _DPP8_INACTIVE, _DPP16 = 233, 234, 250  # as a first source: the last word says how lanes are read
_BEHIND = (LITERAL, _DPP8, _DPP8_INACTIVE, _DPP16)
_SCALAR_WITH_CONSTANT = (0x45, 0x46)  # s_fmaak_f32, s_fmamk_f32
_VECTOR_WITH_CONSTANT = (0x2C, 0x2D, 0x37, 0x38)  # v_fmamk_f32, v_fmaak_f32, and for f16
_DUAL_WITH_CONSTANT = (1, 2)
_SETREG_IMM32 = 0x13
# Of MODE: its number, the first bit, how many less one.
_FP16_OVFL, _ROUND_16_64 = 1 | 23 << 6, 1 | 2 << 6 | 1 << 11
_DPP_CONTROLS = {0x100: "row_shl", 0x110: "row_shr", 0x120: "row_ror", 0x150: "row_share", 0x160: "row_xmask"}
_DPP_MIRRORS = {0x140: "row_mirror", 0x141: "row_half_mirror"}
_SCOPES = (None, "SCOPE_SE", "SCOPE_DEV", "SCOPE_SYS")
_HINTS = (None, "NT", "HT")  # of temporal locality


def length(word: int, second: int) -> int:
    """How many words an instruction has that begins with these."""
    encoding = word >> 26
    if word >> 31 == 0:  # VOP1, VOP2 and VOPC
        return 2 if word & 0x1FF in _BEHIND or word >> 25 in _VECTOR_WITH_CONSTANT else 1
    if word >> 30 == 2:
        if word >> 23 == 0x17F:  # SOPP
            return 1
        if word >> 28 == 0xB and word >> 23 not in (0x17D, 0x17E):  # SOPK
            return 2 if word >> 23 & 0x1F == _SETREG_IMM32 else 1
        first, other = word & 0xFF, word >> 8 & 0xFF
        two = word >> 23 != 0x17D  # SOP1 has an opcode there
        given = first == LITERAL or (two and other == LITERAL)
        return 2 if given or (two and word >> 23 & 0x7F in _SCALAR_WITH_CONSTANT) else 1
    if encoding in (0x33, 0x35):  # VOP3P and VOP3
        sources = (second >> shift & 0x1FF for shift in (0, 9, 18))
        return 2 + (LITERAL in sources or second & 0x1FF in _BEHIND)
    if encoding == 0x32:  # VOPD
        given = word & 0x1FF == LITERAL or second & 0x1FF == LITERAL
        return 2 + (
            given or word >> 22 & 0xF in _DUAL_WITH_CONSTANT or word >> 17 & 0x1F in _DUAL_WITH_CONSTANT
        )
    # gfx12's vector memory, else LDS, constants, gfx11's memory.
    return 3 if encoding in (0x31, 0x34, 0x3B) else 2


def classify(word: int, architecture: Architecture) -> tuple[str, int, Reader]:
    """The encoding, the opcode in it, and what reads the other fields."""
    if (common := common_encoding(word)) is not None:
        name, opcode = common
        return name, opcode, _READERS[name]
    if word >> 24 == 0xCC:
        return "VOP3P", word >> 16 & 0x7F, _packed
    encoding, newer = word >> 26, "rdna4" in architecture.tables
    if encoding == 0x35:
        return "VOP3", word >> 16 & 0x3FF, _vop3
    if encoding == 0x36:
        return "DS", word >> 18 & 0xFF, _local_memory
    if encoding == 0x3D:
        return ("SMEM", word >> 13 & 0x3F, _scalar_memory) if newer else ("SMEM", word >> 18 & 0xFF, _smem3)
    if newer and word >> 24 in (0xEC, 0xEE):
        return "GLOBAL" if word >> 24 == 0xEE else "FLAT", word >> 14 & 0x7F, _flat
    if newer and encoding == 0x31:
        return "MUBUF", word >> 14 & 0xFF, _buffer
    if not newer and encoding == 0x37 and word >> 16 & 3 in (0, 2):
        return "GLOBAL" if word >> 17 & 1 else "FLAT", word >> 18 & 0x7F, _flat3
    if not newer and encoding == 0x38:
        return "MUBUF", word >> 18 & 0xFF, _buffer3
    raise EmulatorError("unknown encoding")


# ---- scalar instructions


def _literal(words: tuple[int, ...], at: int) -> int | None:
    return words[at] if len(words) > at else None


def _sop2(form: Form, words: tuple[int, ...], architecture: Architecture) -> Parts:
    word, literal = words[0], _literal(words, 1)
    d, a, b, *more = form.operands
    first = source(word & 0xFF, int(a), literal, architecture)
    fields = [(word >> 8 & 0xFF, int(x)) for x in (b, *more) if x != "k"]
    others = [source(code, count, literal, architecture) for code, count in fields]
    if "k" in form.operands:
        assert literal is not None
        others.insert(form.operands.index("k") - 2, constant(literal))
    return form.name, [scalar_register(word >> 16 & 0x7F, int(d), architecture), first, *others], {}


def _sop1(form: Form, words: tuple[int, ...], architecture: Architecture) -> Parts:
    word, (to, read) = words[0], form.operands
    operands = [scalar_register(word >> 16 & 0x7F, int(to), architecture)] if to != "-" else []
    if read == "b":  # the number of a barrier; -1 is the workgroup's
        operands.append(source(word & 0xFF, 1, None, architecture))
    elif read != "-":
        operands.append(source(word & 0xFF, int(read), _literal(words, 1), architecture))
    return form.name, operands, {}


def _sopc(form: Form, words: tuple[int, ...], architecture: Architecture) -> Parts:
    word, (a, b) = words[0], map(int, form.operands)
    literal = _literal(words, 1)
    operands = [source(word & 0xFF, a, literal, architecture)]
    return form.name, [*operands, source(word >> 8 & 0xFF, b, literal, architecture)], {}


def _sopk(form: Form, words: tuple[int, ...], architecture: Architecture) -> Parts:
    word, second = words[0], _literal(words, 1)
    if form.name == "s_setreg_imm32_b32":
        assert second is not None
        if word & 0xFFFF != _FP16_OVFL and (word & 0xFFFF, second) != (_ROUND_16_64, 0):
            raise EmulatorError(
                "unknown instruction: s_setreg of what is neither FP16_OVFL nor rounding to nearest"
            )
        kind = "wave mode" if architecture.ids_in_traps else "mode"
        bits = Operand(kind, word >> 6 & 31, (word >> 11 & 31) + 1)
        return form.name, [bits, Operand("integer", value=second)], {}
    return (
        form.name,
        [scalar_register(word >> 16 & 0x7F, 1, architecture), constant(word & 0xFFFF)],
        {},
    )


def _sopp(form: Form, words: tuple[int, ...], architecture: Architecture) -> Parts:
    return form.name, [Operand("integer", value=words[0] & 0xFFFF)] if form.operands else [], {}


def _smem3(form: Form, words: tuple[int, ...], architecture: Architecture) -> Parts:
    word, second = words
    modifiers: dict[str, Modifier] = {}
    for name, bit in (("glc", 14), ("dlc", 13)):
        if word >> bit & 1:
            modifiers[name] = None
    return _constant_load(form, word, second & 0x1FFFFF, 21, second >> 25, architecture, modifiers)


def _scalar_memory(form: Form, words: tuple[int, ...], architecture: Architecture) -> Parts:
    word, second = words
    if word >> 20 & 0x3F:
        raise EmulatorError("unknown encoding: hints to the constant cache")
    return _constant_load(form, word, second & 0xFFFFFF, 24, second >> 25, architecture, {})


def _constant_load(
    form: Form,
    word: int,
    offset: int,
    bits: int,
    register: int,
    architecture: Architecture,
    modifiers: dict[str, Modifier],
) -> Parts:
    if not form.operands:
        return form.name, [], {}
    value = (offset ^ 1 << bits - 1) - (1 << bits - 1)
    variable = scalar_register(register & 0x7F, 1, architecture)
    if variable.kind == "null" and (value or "rdna4" in architecture.tables):
        last = constant(value)
    else:
        last = variable
        if value or "rdna4" in architecture.tables:
            modifiers = {"offset": value, **modifiers}
    data, base, _ = form.operands
    to = scalar_register(word >> 6 & 0x7F, int(data), architecture)
    return form.name, [to, scalar_register((word & 0x3F) << 1, int(base), architecture), last], modifiers


# ---- vector instructions


def _mask(code: int, architecture: Architecture) -> Operand:
    return scalar_register(code & 0x7F, architecture.mask_registers, architecture)


def _with_halves(form: Form, operands: list[Operand], halves: list[str]) -> list[Operand]:
    """16-bit operands of a vector instruction name the half of their register."""
    tokens = [token for token in form.operands if token != "x"]
    return [
        replace(operand, half=half) if token == "h" and operand.kind == "vector" else operand
        for token, operand, half in zip(tokens, operands, halves, strict=True)
    ]


def _vector(form: Form, words: tuple[int, ...], architecture: Architecture) -> Parts:
    """VOP1, VOP2 and VOPC, whose second word may be a constant or DPP."""
    word, second = words[0], _literal(words, 1)
    first, other, to = word & 0x1FF, 256 + (word >> 9 & 0xFF), word >> 17 & 0xFF
    modifiers: dict[str, Modifier] = {}
    flags: list[Mapping[str, bool]] = [{}, {}]
    suffix = "_e32" * form.suffixed
    if first in _BEHIND[1:]:
        assert second is not None
        if not form.suffixed:
            raise EmulatorError("unknown encoding")
        first, flags, modifiers = _dpp(first, second)
        suffix, second = "_dpp", None
    tokens = [token for token in form.operands if token != "x"]
    codes, halves = [first, other], []
    left = 0
    for index, token in enumerate(tokens):
        if token in ("m", "c", "k"):
            halves.append("")
            continue
        if index == 0 and form.operands[0] != "x":
            code = 256 + to
        else:
            code, left = codes[left], left + 1
        if token == "h" and code >= 256:
            if code & 0x80 and not architecture.names_halves:
                raise EmulatorError("unknown encoding: the upper half of a register")
            halves.append(("h" if code & 0x80 else "l") * architecture.names_halves)
            code &= ~0x80
            if index == 0 and form.operands[0] != "x":
                to &= 0x7F
            else:
                codes[left - 1] = code
        else:
            halves.append("")
    vcc = _mask(VCC, architecture)
    sources: Sources = list(zip(codes, flags, strict=True))
    operands = vector_operands(form, to, sources, vcc, vcc, second, architecture)
    return form.name + suffix, _with_halves(form, operands, halves), modifiers


def _dpp(first: int, second: int) -> tuple[int, list[Mapping[str, bool]], dict[str, Modifier]]:
    """The first source of a DPP instruction, sign modifiers of both, and the modifiers that its last word holds."""
    if first != _DPP16:
        modifiers: dict[str, Modifier] = {"dpp8": tuple(second >> 8 + 3 * i & 7 for i in range(8))}
        return 256 + (second & 0xFF), [{}, {}], modifiers | ({"fi": 1} if first == _DPP8_INACTIVE else {})
    flags: list[Mapping[str, bool]] = [
        {"negate": bool(second >> 20 & 1), "absolute": bool(second >> 21 & 1)},
        {"negate": bool(second >> 22 & 1), "absolute": bool(second >> 23 & 1)},
    ]
    control = second >> 8 & 0x1FF
    modifiers = {}
    if control < 0x100:
        modifiers["quad_perm"] = tuple(control >> 2 * i & 3 for i in range(4))
    elif control in _DPP_MIRRORS:
        modifiers[_DPP_MIRRORS[control]] = None
    elif control & ~15 in _DPP_CONTROLS and (control & 15 or control >= 0x150):
        modifiers[_DPP_CONTROLS[control & ~15]] = control & 15
    else:
        raise EmulatorError(f"unknown DPP control {control:#x}")
    modifiers |= {"row_mask": second >> 28, "bank_mask": second >> 24 & 15}
    for name, bit in (("bound_ctrl", 19), ("fi", 18)):
        if second >> bit & 1:
            modifiers[name] = 1
    return 256 + (second & 0xFF), flags, modifiers


def _vop3(form: Form, words: tuple[int, ...], architecture: Architecture) -> Parts:
    word, second, literal = words[0], words[1], _literal(words, 2)
    has_mask = "m" in form.operands[1:]  # its field takes the place of abs and op_sel
    absolute = 0 if has_mask else word >> 8 & 7
    count = len(form.operands) - 1 - has_mask
    refuse_more_sources(second, count)
    codes = [second >> 9 * i & 0x1FF for i in range(3)]
    suffix = "_e64" * form.suffixed
    lanes: dict[str, Modifier] = {}
    if codes[0] in _BEHIND[1:]:
        assert literal is not None
        codes[0], flags, lanes = _dpp(codes[0], literal)
        if any(flags[0].values()) or any(flags[1].values()):
            raise EmulatorError("unknown encoding: sign modifiers in two places")
        suffix, literal = "_e64_dpp", None
    sources: Sources = [
        (code, {"negate": bool(second >> 29 + i & 1), "absolute": bool(absolute >> i & 1)})
        for i, code in enumerate(codes)
    ]
    mask = None
    if "m" in form.operands:
        mask = _mask(word >> 8 if has_mask else word, architecture)
    carry = _mask(second >> 18, architecture) if "c" in form.operands else None
    operands = vector_operands(form, word & 0xFF, sources, mask, carry, literal, architecture)
    modifiers: dict[str, Modifier] = {}
    selected = 0 if has_mask else word >> 11 & 15
    if "h" in form.operands and architecture.names_halves:
        order = [i for i, token in enumerate(form.operands[1:]) if token not in ("m", "c", "k")]
        halves = [""] * len(form.operands)
        halves[0] = "h" if selected & 8 else "l"
        for number, position in enumerate(order):
            halves[position + 1] = "h" if selected >> number & 1 else "l"
        if form.operands[0] == "x":
            halves = halves[1:]
        operands = _with_halves(form, operands, halves)
    if selected:
        shown = [selected >> i & 1 for i in range(form.selected or count)]
        with_result = not form.selected and form.operands[0] not in ("m", "x")
        modifiers["op_sel"] = (*shown, selected >> 3) if with_result else tuple(shown)
        if sum(b << i for i, b in enumerate(shown)) + (8 * (selected >> 3) if with_result else 0) != selected:
            raise EmulatorError("unknown encoding: op_sel of what is not there")
    if word >> 15 & 1:
        modifiers["clamp"] = None
    return form.name + suffix, operands, modifiers | output_scale(second >> 27 & 3) | lanes


def _packed(form: Form, words: tuple[int, ...], architecture: Architecture) -> Parts:
    """VOP3P: two operations a lane, products of mixed precision, matrix instructions."""
    word, second, literal = words[0], words[1], _literal(words, 2)
    mixed, count = form.name.startswith("v_fma_mix"), len(form.operands) - 1
    refuse_more_sources(second, count)
    if second & 0x1FF in _BEHIND[1:]:
        raise EmulatorError("unknown encoding: DPP of a packed instruction")
    high, negated = word >> 8 & 7, second >> 29
    sources: Sources = [
        (
            second >> 9 * i & 0x1FF,
            {"negate": bool(negated >> i & 1), "absolute": bool(high >> i & 1)} if mixed else {},
        )
        for i in range(3)
    ]
    operands = vector_operands(form, word & 0xFF, sources, None, None, literal, architecture)
    if form.name.startswith("v_wmma") and any(operand.kind != "vector" for operand in operands[1:3]):
        raise EmulatorError(f"unknown operand {operands[1]} or {operands[2]} as a matrix")
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


# ---- two operations in one instruction


def is_dual(words: tuple[int, ...]) -> bool:
    return words[0] >> 26 == 0x32


def dual(words: tuple[int, ...], architecture: Architecture) -> tuple[Instruction, Instruction]:
    """The two operations of a VOPD instruction."""
    if len(words) != length(words[0], words[1] if len(words) > 1 else 0):
        raise EmulatorError("unknown encoding: cut off")
    word, second, literal = words[0], words[1], _literal(words, 2)
    known = forms("VOPD", architecture.name)
    to = second >> 24 & 0xFF
    # The lowest bit of the second result is not that of the first.
    fields = (
        (word >> 22 & 0xF, word & 0x1FF, word >> 9 & 0xFF, to),
        (word >> 17 & 0x1F, second & 0x1FF, second >> 9 & 0xFF, (second >> 17 & 0x7F) << 1 | ~to & 1),
    )
    made = []
    vcc = _mask(VCC, architecture)
    for place, (opcode, first, other, result) in enumerate(fields):
        if opcode not in known or (place == 0 and opcode > 15):
            raise EmulatorError(f"unknown instruction: VOPD opcode {opcode:#x}")
        form = known[opcode]
        operands = vector_operands(
            form, result, [(first, {}), (256 + other, {})], None, vcc, literal, architecture
        )
        if form.operands[-1] == "c":  # the assembler leaves vcc out
            operands = [*operands[:-1], replace(operands[-1], implicit=True)]
        made.append(Instruction(form.name, tuple(operands), architecture=architecture))
    return made[0], made[1]


# ---- memory


def _local_memory(form: Form, words: tuple[int, ...], architecture: Architecture) -> Parts:
    word, second = words
    address = vector_register(second & 0xFF, 1)
    data = [second >> 8 & 0xFF, second >> 16 & 0xFF]
    if "_store" in form.name:
        to, more = [address], form.operands[1:]
    else:
        to, more = [vector_register(second >> 24, int(form.operands[0])), address], form.operands[2:]
    operands = to + [vector_register(d, int(n)) for d, n in zip(data, more, strict=False)]
    modifiers: dict[str, Modifier] = {}
    if "_2addr" in form.name:
        fields = {"offset0": word & 0xFF, "offset1": word >> 8 & 0xFF}
    else:
        fields = {"offset": word & 0xFFFF}
    modifiers |= {name: value for name, value in fields.items() if value}
    if word >> 17 & 1:
        raise EmulatorError("unknown encoding: global data share")
    return form.name, operands, modifiers


def _addressed(
    form: Form, data: int, result: int, address: int, base: int, returns: bool, architecture: Architecture
) -> list[Operand]:
    """The operands of a FLAT or GLOBAL instruction: an address a lane, or a scalar base and an offset a lane."""
    is_global, count = form.name.startswith("global"), int(form.operands[0])
    scalar = scalar_register(base, 2, architecture)
    has_base = is_global and scalar.kind != "null"
    if not is_global and scalar.kind != "null":
        raise EmulatorError("unknown encoding: a base of a flat instruction")
    pointer = vector_register(address, 1 if has_base else 2)
    stored = vector_register(data, count)
    loaded = vector_register(result, count // 2 if "cmpswap" in form.name else count)
    if "_load" in form.name:
        operands = [loaded, pointer]
    elif "_store" in form.name or not returns:
        operands = [pointer, stored]
    else:
        operands = [loaded, pointer, stored]
    return operands + ([scalar if has_base else Operand("off")] if is_global else [])


def _flat3(form: Form, words: tuple[int, ...], architecture: Architecture) -> Parts:
    """gfx11's FLAT and GLOBAL."""
    word, second = words
    hints = {name: None for name, bit in (("glc", 14), ("slc", 15), ("dlc", 13)) if word >> bit & 1}
    if not form.operands:
        return form.name, [], {**hints}
    operands = _addressed(
        form,
        second >> 8 & 0xFF,
        second >> 24,
        second & 0xFF,
        second >> 16 & 0x7F,
        "glc" in hints,
        architecture,
    )
    offset = (word & 0x1FFF ^ 0x1000) - 0x1000 if form.name.startswith("global") else word & 0xFFF
    return form.name, operands, {**({"offset": offset} if offset else {}), **hints}


def _policy(field: int, form: Form) -> dict[str, Modifier]:
    """gfx12's hints: scope in bits 19:18, temporal hint in bits 22:20 of the second word."""
    hint, scope = field >> 20 & 7, field >> 18 & 3
    modifiers: dict[str, Modifier] = {}
    if "_atomic" in form.name:
        if hint not in (0, 1):
            raise EmulatorError(f"unknown temporal hint {hint}")
        if hint:
            modifiers["th"] = "TH_ATOMIC_RETURN"
    elif hint:
        if hint >= len(_HINTS):
            raise EmulatorError(f"unknown temporal hint {hint}")
        kind = "STORE" if "_store" in form.name else "LOAD"
        modifiers["th"] = f"TH_{kind}_{_HINTS[hint]}"
    if scope:
        modifiers["scope"] = _SCOPES[scope]
    return modifiers


def _flat(form: Form, words: tuple[int, ...], architecture: Architecture) -> Parts:
    """gfx12's FLAT and GLOBAL."""
    word, second, third = words
    modifiers = _policy(second, form)
    if not form.operands:
        return form.name, [], modifiers
    operands = _addressed(
        form, second >> 23 & 0xFF, second & 0xFF, third & 0xFF, word & 0x7F, "th" in modifiers, architecture
    )
    offset = (third >> 8 ^ 0x800000) - 0x800000
    return form.name, operands, {**({"offset": offset} if offset else {}), **modifiers}


def _buffer_operands(
    form: Form, data: int, address: int, base: Operand, moved: Operand, flags: tuple[int, int]
) -> list[Operand]:
    counted = sum(flags)
    return [
        vector_register(data, int(form.operands[0])),
        vector_register(address, counted) if counted else Operand("off"),
        base,
        moved,
    ]


def _buffer3(form: Form, words: tuple[int, ...], architecture: Architecture) -> Parts:
    """gfx11's buffer instructions."""
    word, second = words
    hints = {name: None for name, bit in (("glc", 14), ("slc", 12), ("dlc", 13)) if word >> bit & 1}
    if not form.operands:
        return form.name, [], {**hints}
    has_index, has_offset = second >> 23 & 1, second >> 22 & 1
    base = scalar_register(4 * (second >> 16 & 0x1F), 4, architecture)
    operands = _buffer_operands(
        form,
        second >> 8 & 0xFF,
        second & 0xFF,
        base,
        source(second >> 24, 1, None, architecture),
        (has_index, has_offset),
    )
    return form.name, operands, _buffer_modifiers(has_index, has_offset, word & 0xFFF) | hints


def _buffer(form: Form, words: tuple[int, ...], architecture: Architecture) -> Parts:
    """gfx12's buffer instructions."""
    word, second, third = words
    if not form.operands:
        return form.name, [], _policy(second, form)
    has_index, has_offset = second >> 31, second >> 30 & 1
    operands = _buffer_operands(
        form,
        second & 0xFF,
        third & 0xFF,
        scalar_register(second >> 9 & 0x7F, 4, architecture),
        scalar_register(word & 0x7F, 1, architecture),
        (has_index, has_offset),
    )
    offset = (third >> 8 ^ 0x800000) - 0x800000
    return form.name, operands, _buffer_modifiers(has_index, has_offset, offset) | _policy(second, form)


def _buffer_modifiers(has_index: int, has_offset: int, offset: int) -> dict[str, Modifier]:
    flags = {"idxen": has_index, "offen": has_offset}
    modifiers: dict[str, Modifier] = {name: None for name, given in flags.items() if given}
    return modifiers | ({"offset": offset} if offset else {})


_READERS: Mapping[str, Reader] = {
    "VOP1": _vector, "VOP2": _vector, "VOPC": _vector, "SOP1": _sop1, "SOP2": _sop2, "SOPC": _sopc, "SOPK": _sopk,
    "SOPP": _sopp,
}  # fmt: skip
