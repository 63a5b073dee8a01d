"""The state of one wave: registers, the EXEC mask, the program counter."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .program import WorkGroup

LANES = 64  # of the largest wave
LANE = np.arange(LANES)
MASK32, MASK64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
# Numbers of special registers in the scalar register file.
VCC, TRAPS, M0, EXEC = 106, 108, 124, 126
FIRST_ACCUMULATOR = 256
# What registers hold before they are written: a large negative number as an integer, and as a float too.
POISON = 0xDEADBEEF


@lru_cache(maxsize=4096)  # kernels have few masks
def lanes_of(mask: int, size: int = LANES) -> np.ndarray:
    """A mask of as many bits as a wave has lanes as one bool a lane, read-only."""
    data = np.frombuffer(mask.to_bytes(size // 8, "little"), np.uint8)
    lanes = np.unpackbits(data, bitorder="little").view(np.bool_)
    lanes.flags.writeable = False
    return lanes


def mask_of(lanes: np.ndarray) -> int:
    """One bool a lane as a mask."""
    return int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")


class Wave:
    """Lanes in lockstep, `size` of them: 64 or 32.

    `scalars` holds Python ints of 32 bits; `vectors` is uint32 of shape (512, size), VGPRs then AGPRs; `lanes`
    is EXEC as bools, and `all_lanes` says that it is full. `floats` is `vectors` seen as float32. `signalled`: it has
    said that it reached a barrier, and not waited yet.
    """

    __slots__ = (
        "_full",
        "all_lanes",
        "done",
        "floats",
        "group",
        "index",
        "lanes",
        "pc",
        "saturates",
        "scalars",
        "scc",
        "signalled",
        "size",
        "vectors",
    )

    def __init__(self, group: WorkGroup | None, index: int, size: int = LANES) -> None:
        self.group: Any = group
        self.index = index
        self.size = size
        self._full = (1 << size) - 1
        self.scalars = [POISON] * 128
        self.vectors = np.full((2 * FIRST_ACCUMULATOR, size), POISON, np.uint32)
        self.floats = self.vectors.view(np.float32)
        self.scc = 0
        # FP16_OVFL of MODE: conversions to 16 and 8 bits overflow to the largest value.
        self.saturates = False
        self.pc = 0
        self.done = False
        self.signalled = False
        self.set_exec(self._full)

    def set_exec(self, mask: int) -> None:
        self.scalars[EXEC], self.scalars[EXEC + 1] = mask & MASK32, mask >> 32
        self.all_lanes = mask == self._full
        self.lanes = lanes_of(mask, self.size)

    def scalar64(self, register: int) -> int:
        return self.scalars[register] | self.scalars[register + 1] << 32

    def set_scalar(self, register: int, value: int) -> None:
        self.scalars[register] = value & MASK32
        if register in (EXEC, EXEC + 1):
            self.set_exec(self.scalar64(EXEC) & self._full)

    def set_scalar64(self, register: int, value: int) -> None:
        self.scalars[register], self.scalars[register + 1] = value & MASK32, value >> 32 & MASK32
        if register == EXEC:
            self.set_exec(value & self._full)

    def mask(self, register: int) -> int:
        """The bits of all lanes in the scalar register, or in the pair, that holds them."""
        return self.scalar64(register) if self.size == LANES else self.scalars[register]

    def set_mask(self, register: int, mask: int) -> None:
        if self.size == LANES:
            self.set_scalar64(register, mask)
        else:
            self.set_scalar(register, mask)

    def set_vector(self, register: int, bits: Any) -> None:
        """Write uint32 values, one a lane or one for all, to the active lanes of a vector register."""
        if self.all_lanes:
            self.vectors[register] = bits
        else:
            np.copyto(self.vectors[register], bits, where=self.lanes)

    def set_vectors(self, register: int, rows: np.ndarray) -> None:
        """Write uint32 of shape (n, size) to the active lanes of n vector registers."""
        if self.all_lanes:
            self.vectors[register : register + len(rows)] = rows
        else:
            np.copyto(self.vectors[register : register + len(rows)], rows, where=self.lanes)
