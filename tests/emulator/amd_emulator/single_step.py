"""Executing a few lines of assembly on one wave, for the tests of single instructions."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from .architecture import architecture
from .decode import decode as decode_words
from .encodings import assembled
from .instruction import Instruction
from .memory import Memory
from .program import WorkGroup, build_step
from .wave import LANES, MASK64, Wave


def decode(lines: Sequence[str], arch: str) -> list[Instruction]:
    """The instructions of lines of encodings.txt, one behind the other from address 0 on."""
    code = [assembled(line, arch) for line in lines]
    addresses = accumulate((4 * len(words) for words in code), initial=0)
    return [decode_words(words, address, arch) for words, address in zip(code, addresses, strict=False)]


def bits(values: Any, dtype: Any) -> np.ndarray:
    """Values, one a lane or one for all, as the uint32 rows of a register or a register pair."""
    lanes = np.ascontiguousarray(np.broadcast_to(np.asarray(values, dtype), LANES))
    if lanes.dtype.itemsize == 8:
        return lanes.view(np.uint32).reshape(LANES, 2).T
    return lanes.view(f"u{lanes.dtype.itemsize}").astype(np.uint32)[None]


def new_wave(
    index: int = 0, group: WorkGroup | None = None, local_bytes: int = 0, arch: str = "gfx942"
) -> Wave:
    return Wave(group or WorkGroup(Memory(), 0, local_bytes), index, architecture(arch).lanes)


def execute(
    *lines: str,
    arch: str = "gfx942",
    wave: Wave | None = None,
    vectors: Mapping[int, np.ndarray] | None = None,
    scalars: Mapping[int, int] | None = None,
    scc: int = 0,
    lanes: int = MASK64,
) -> Wave:
    """Run straight-line code; `vectors` are uint32 rows (see `bits`) by first register, `lanes` is EXEC, of
    which a wave of 32 takes the lower half."""
    wave = wave or new_wave(arch=arch)
    for register, rows in (vectors or {}).items():
        wave.vectors[register : register + len(rows)] = rows[..., : wave.size]
    for register, value in (scalars or {}).items():
        wave.scalars[register] = value & 0xFFFFFFFF
    wave.scc = scc
    wave.set_exec(lanes & (1 << wave.size) - 1)
    with np.errstate(all="ignore"):
        for instruction in decode(lines, arch):
            build_step(instruction)(wave)
    return wave


def f32(value: float) -> int:
    """The bit pattern of a float."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def f16(value: float) -> int:
    """The bit pattern of a half."""
    return int(struct.unpack("<H", struct.pack("<e", value))[0])


def result(wave: Wave, dtype: Any = np.uint32, register: int = 0) -> np.ndarray:
    """A vector register, or a pair of them, as values of a 32-bit or 64-bit dtype."""
    if np.dtype(dtype).itemsize == 8:
        return wave.vectors[register : register + 2].T.copy().view(dtype)[:, 0]
    return wave.vectors[register].view(dtype)
