"""Flipping single bits of a kernel's code, to see how many of them the tests of an op notice."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from liger_aot_build.elf import PT_LOAD, Elf

from .instruction import Instruction
from .scalar import NO_EFFECT


def overwrite(image: bytes, instruction: Instruction, words: Sequence[int]) -> bytes:
    """The code object with other words in an instruction's place."""
    (segment,) = [
        segment
        for segment in Elf(image).segments
        if segment.type == PT_LOAD and 0 <= instruction.address - segment.address < segment.file_size
    ]
    start = segment.offset + instruction.address - segment.address
    data = b"".join(word.to_bytes(4, "little") for word in words)
    return image[:start] + data + image[start + len(data) :]


def flipped(image: bytes, reached: Sequence[Instruction], rng: np.random.Generator) -> bytes:
    """The code object with one random bit flipped in an instruction of ``reached``, waits and the end left out."""
    code = [instruction for instruction in reached if instruction.name not in NO_EFFECT | {"s_endpgm"}]
    instruction = code[rng.integers(len(code))]
    words = list(instruction.words)
    words[rng.integers(len(words))] ^= 1 << int(rng.integers(32))
    return overwrite(image, instruction, words)
