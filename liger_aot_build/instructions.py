"""Which matrix instructions a kernel's machine code has, which register budgets it asks for, and whether it waits for
the kernel before it.

Opcodes were found by comparing binaries of ptxas 12.8 with what `nvdisasm -hex` prints of them; the AMD encodings are
those of the instruction set manuals (MI200, MI300, CDNA 4: VOP3P-MAI; RDNA 3, 3.5 and 4: VOP3P). A test counts matrix
instructions in the assembly, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

_SASS_BYTES = 16  # an instruction, since sm_70
_SASS_OPCODE = 0x1FF  # its bits 8:0; what follows them says what kinds of operands there are
# mma.sync, wgmma and tcgen05.mma, each of 16-bit and tf32 tiles.
_SASS_MATRIX = {0x03C: "HMMA", 0x1F0: "HGMMA", 0x1EA: "UTCHMMA"}
_SASS_SET_REGISTERS = 0x1C8
_SASS_BUDGET = 0x1FF  # bits 40:32
_SASS_WAIT = 0x02E  # ACQBULK: what griddepcontrol.wait becomes
# What reads or writes global memory: LD, LDG, ST, STG, ATOM, REDG, ATOM and ATOMG of float32, ATOMG, LDGSTS, UTMALDG,
# UTMASTG.
_SASS_GLOBAL = frozenset({0x180, 0x181, 0x185, 0x186, 0x18A, 0x18E, 0x1A2, 0x1A3, 0x1A8, 0x1AE, 0x1B4, 0x1B5})
# VOP3P by generation: the first word's bits 31:23, which say so, and the opcodes (bits 22:16) of matrix instructions.
# 0x58 and 0x59 only move accumulators.
_CDNA = (0x1A7, "MFMA", frozenset({0x2D, 0x2E, *range(0x35, 0x39), *range(0x40, 0x80)} - {0x58, 0x59}))
_RDNA = (0x198, "WMMA", frozenset(range(0x40, 0x60)))
_AMD_MATRIX = {"gfx9": _CDNA, "gfx11": _RDNA, "gfx12": _RDNA}


def sass_instructions(code: bytes) -> tuple[Mapping[str, int], tuple[int, ...], int | None]:
    """(matrix instructions by name, register budgets that warps change to, ascending, how many accesses to global
    memory stand before the wait for the kernel before it) of NVIDIA machine code; None where there is no such wait."""
    matrix: Counter[str] = Counter()
    budgets: set[int] = set()
    accesses, before_wait = 0, None
    for at in range(0, len(code) - _SASS_BYTES + 1, _SASS_BYTES):
        opcode = int.from_bytes(code[at : at + 2], "little") & _SASS_OPCODE
        if opcode in _SASS_MATRIX:
            matrix[_SASS_MATRIX[opcode]] += 1
        elif opcode == _SASS_SET_REGISTERS:
            budgets.add(int.from_bytes(code[at + 4 : at + 6], "little") & _SASS_BUDGET)
        elif opcode in _SASS_GLOBAL:
            accesses += 1
        elif opcode == _SASS_WAIT and before_wait is None:
            before_wait = accesses
    return dict(matrix), tuple(sorted(budgets)), before_wait


def amd_matrix_instructions(code: bytes, arch: str) -> Mapping[str, int]:
    """The same of AMD machine code. Instructions are one to three words long and are not decoded here: a constant that
    looks like one would be counted."""
    family, name, opcodes = next(known for prefix, known in _AMD_MATRIX.items() if arch.startswith(prefix))
    words = memoryview(code[: len(code) & ~3]).cast("I")
    count = sum(word >> 23 == family and word >> 16 & 0x7F in opcodes for word in words)
    return {name: count} if count else {}
