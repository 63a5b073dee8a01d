"""From machine code to instructions, by the tables of opcodes.py.

What is not in the tables is refused with its words; `str(instruction)` is what LLVM's disassembler prints, but
for waits and for the patterns of ds_swizzle, which are numbers here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from . import cdna, rdna
from .architecture import architecture
from .errors import EmulatorError
from .instruction import Instruction
from .opcodes import forms


def split(code: bytes, address: int, arch: str) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The address and the words of each instruction of `code`, which starts at `address`.

    The length is a matter of the encoding alone, so that an unknown opcode does not hide what follows.
    """
    words = memoryview(code).cast("I")
    length = rdna.length if architecture(arch).rdna else cdna.length
    position = 0
    while position < len(words):
        second = words[position + 1] if position + 1 < len(words) else 0
        size = min(length(words[position], second), len(words) - position)
        yield address + 4 * position, tuple(words[position : position + size])
        position += size


def decode(words: tuple[int, ...], address: int, arch: str) -> Instruction:
    """The instruction that `words` encode on `arch`; an EmulatorError that names them if it is not known."""
    known = architecture(arch)
    isa = rdna if known.rdna else cdna
    try:
        if known.rdna and rdna.is_dual(words):
            first, second = rdna.dual(words, known)
            return replace(first, address=address, words=words, other=second)
        encoding, opcode, read = isa.classify(words[0], known)
        listed = forms(encoding, arch)
        if opcode not in listed:
            raise EmulatorError(f"unknown instruction: {encoding} opcode {opcode:#x}")
        if isa.length(words[0], words[1] if len(words) > 1 else 0) != len(words):
            raise EmulatorError("unknown encoding: cut off")
        name, operands, modifiers = read(listed[opcode], words, known)
    except EmulatorError as error:
        text = " ".join(f"{word:#010x}" for word in words)
        raise EmulatorError(f"{text} at {address:#x}: {error}") from None
    return Instruction(name, tuple(operands), modifiers, address, words, known)
