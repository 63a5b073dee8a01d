"""Flipping single bits of a kernel's code, to see how many of them a comparison of its results notices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from build_tools.elf import PT_LOAD, Elf

from .decode import Instruction
from .errors import EmulatorError
from .program import Program
from .scalar import NO_EFFECT

# Runs a program and returns its results; the limit is on the number of instructions.
Run = Callable[[Program, int], np.ndarray]


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


def flip_bits(image: bytes, arch: str, kernel: str, run: Run, samples: int, seed: int = 0) -> Counter[str]:
    """Flip random bits, one at a time, of instructions that `run` reaches, waits and the end left out.

    Returns how many flips were "refused" by the emulator, gave "different" results, or passed "unnoticed". A
    flip may well be harmless: a reserved bit, a lane mask of all ones, a register that holds the same.
    """
    program = Program(image, arch, kernel)
    expected = run(program, 50_000_000)
    code = [
        instruction for instruction in program.reached if instruction.name not in NO_EFFECT | {"s_endpgm"}
    ]
    rng = np.random.default_rng(seed)
    outcomes: Counter[str] = Counter()
    for _ in range(samples):
        instruction = code[rng.integers(len(code))]
        words = list(instruction.words)
        words[rng.integers(len(words))] ^= 1 << int(rng.integers(32))
        try:
            got = run(Program(overwrite(image, instruction, words), arch, kernel), 1_000_000)
        except EmulatorError:
            outcomes["refused"] += 1
        else:
            outcomes["unnoticed" if np.array_equal(got, expected, equal_nan=True) else "different"] += 1
    return outcomes
