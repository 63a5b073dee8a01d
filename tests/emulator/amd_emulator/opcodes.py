"""The instructions that the emulator knows, by encoding and opcode, with the registers that each operand takes.

The tables are in cdna_opcodes.py and rdna_opcodes.py. An operand is written as how many 32-bit registers it
takes, in the order of the assembler:

- `1`, `2` ...: first the destination, then the sources; comparisons (SOPC) and stores have sources alone.
- `h`: half of a vector register, which RDNA names.
- `a1`: an accumulator. `S`: a scalar destination of a vector instruction. `k`: a constant in the instruction.
- `m`: a mask that is written: VCC, or the scalar registers that the 64-bit encoding names. `c`: one that is read.
- `x`: the destination is EXEC, and not written down. `b`: a barrier.
- `o`: the offset of a scalar load. `-`: a field that the instruction has no use for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from . import cdna_opcodes, rdna_opcodes
from .architecture import architecture

ENCODINGS = (
    *("SOP1", "SOP2", "SOPC", "SOPK", "SOPP", "SMEM", "VOP1", "VOP2", "VOPC", "VOP3", "VOP3P", "VOPD"),
    *("DS", "FLAT", "GLOBAL", "MUBUF"),
)
_OPCODES = {**cdna_opcodes.OPCODES, **rdna_opcodes.OPCODES}
# Names that have one encoding of 32 bits and none of 64
_SHORT_ONLY = frozenset({"v_nop", "v_readfirstlane_b32", "v_swap_b32", "v_accvgpr_mov_b32"})
_FAMILIES = {"FLAT": "flat", "GLOBAL": "global", "MUBUF": "buffer"}
# Names with fewer bits of op_sel than operands
_SELECTED = {"v_permlane16_b32": 2, "v_permlanex16_b32": 2}


@dataclass(frozen=True)
class Form:
    """A row of the tables: `name` as the assembler has it, without a suffix; `operands` as the module says.

    `suffixed` names have several encodings: `_e32`, `_e64`, `_sdwa`, `_dpp` tells them apart. `selected`: how
    many bits of op_sel it has, where they are not one an operand.
    """

    name: str
    operands: tuple[str, ...]
    suffixed: bool = False
    selected: int = 0


def same_operation(name: str) -> str:
    """CDNA's name of an operation that RDNA calls otherwise; without the prefix of one of two in an instruction."""
    name = name.replace("v_dual_", "v_")
    return rdna_opcodes.SAME.get(name, name)


@cache
def forms(encoding: str, arch: str) -> dict[int, Form]:
    """The instructions of an encoding on `arch`, by opcode."""
    known = architecture(arch)
    short = encoding in ("VOP1", "VOP2")
    found = {
        opcode: Form(name, operands, short and _has_long_form(name, operands), _SELECTED.get(name, 0))
        for table in known.tables
        for opcode, name, operands in _listed((encoding, table))
    }
    if encoding == "VOPC":
        listed = rdna_opcodes.comparisons() if known.rdna else cdna_opcodes.comparisons()
        found |= {opcode: Form(name, operands, True) for opcode, (name, operands) in listed.items()}
    elif encoding == "VOP3":  # also the long forms of the three short encodings
        for of, first in (("VOPC", 0), ("VOP2", 0x100), ("VOP1", 0x180 if known.rdna else 0x140)):
            found |= {first + opcode: form for opcode, form in forms(of, arch).items() if form.suffixed}
    elif encoding in _FAMILIES:
        names = rdna_opcodes.memory() if known.rdna else cdna_opcodes.MEMORY
        family = _FAMILIES[encoding]
        found |= {o: Form(f"{family}_{name}", (str(_data_registers(name)),)) for o, name in names.items()}
        if encoding == "FLAT" and arch == "gfx90a":
            del found[0x4D], found[0x4E]
    return found


def _listed(key: tuple[str, str]) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    for operands, text in _OPCODES.get(key, {}).items():
        words = text.split()
        for opcode, name in zip(words[::2], words[1::2], strict=True):
            yield int(opcode, 16), name, tuple(operands.split())


def _has_long_form(name: str, operands: tuple[str, ...]) -> bool:
    return name not in _SHORT_ONLY and "k" not in operands


def _data_registers(name: str) -> int:
    if "dwordx" in name:
        return int(name[-1])
    bits = name.rpartition("_")[2][1:]
    wide = 2 if name.endswith(("_x2", "f64")) else max(1, int(bits) // 32) if bits.isdecimal() else 1
    return 2 * wide if "cmpswap" in name else wide
