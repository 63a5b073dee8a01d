"""Local memory (LDS) of a workgroup, which knows who wrote and read each byte since the last barrier.

Between two barriers a byte may not be written by one wave and touched by another: on hardware the result
would depend on which comes first. Writing the value that is already there is allowed (Triton lets several
waves store the same element). Reading bytes that nobody wrote is an error.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from .errors import EmulatorError
from .wave import Wave

# States of a byte: the number of the one wave that wrote (read) it since the barrier, or one of these.
_SETTLED, _UNWRITTEN = 254, 255  # in `_writer`: written before the barrier, never written
_SEVERAL, _NOBODY = 254, 255  # in `_reader`
# Accesses are to units of 1, 2 or 4 bytes. Unit -> its type, and what makes of a state that state in each byte of it
_UNITS = {1: (np.uint8, 1), 2: (np.uint16, 0x0101), 4: (np.uint32, 0x01010101)}
_WORDS = np.arange(4)[:, None]


class LocalMemory:
    def __init__(self, size: int) -> None:
        """`size` in bytes."""
        self._size = size
        padded = -(-size // 4) * 4
        self._writer = np.full(padded, _UNWRITTEN, np.uint8)
        self._reader = np.full(padded, _NOBODY, np.uint8)
        arrays = (np.zeros(padded, np.uint8), self._writer, self._reader)
        self._views = {unit: [array.view(dtype) for array in arrays] for unit, (dtype, _) in _UNITS.items()}
        # What was written and read since the barrier: (unit, indices); None where that is so much that a barrier
        # had better look at all of the memory.
        self._written: list[tuple[int, np.ndarray]] | None = []
        self._read: list[tuple[int, np.ndarray]] | None = []
        self._most = max(16, size // 1024)

    def barrier(self) -> None:
        """All waves of the workgroup have arrived: what was written may be read by all."""
        if self._written is None:
            self._writer[self._writer < _SETTLED] = _SETTLED
        else:
            for unit, indices in self._written:
                self._views[unit][1][indices] = _SETTLED * _UNITS[unit][1]
        if self._read is None:
            self._reader.fill(_NOBODY)
        else:
            for unit, indices in self._read:
                self._views[unit][2][indices] = _NOBODY * _UNITS[unit][1]
        self._written, self._read = [], []

    def load(self, wave: Wave, addresses: np.ndarray, size: int) -> np.ndarray:
        """Read `size` bytes in each active lane at `addresses` (int64, one a lane).

        Returns uint32 of shape (words, lanes); 1 and 2 bytes are zero-extended, inactive lanes are 0.
        """
        unit, indices = self._indices(wave, addresses, size, "read")
        self._note_read(wave, unit, indices)
        values = self._views[unit][0].take(indices)
        if wave.all_lanes:
            return values if unit == 4 else values.astype(np.uint32)
        result = np.zeros((len(indices), wave.size), np.uint32)
        result[:, wave.lanes] = values
        return result

    def store(self, wave: Wave, addresses: np.ndarray, data: np.ndarray, size: int) -> None:
        """Write the low `size` bytes of `data` (uint32, shape (words, lanes)) in each active lane."""
        unit, indices = self._indices(wave, addresses, size, "write")
        values = data if wave.all_lanes else data[:, wave.lanes]
        values = values if unit == 4 else values.astype(_UNITS[unit][0])
        self._note_write(wave, unit, indices, values)
        self._views[unit][0][indices] = values

    def _indices(self, wave: Wave, addresses: np.ndarray, size: int, verb: str) -> tuple[int, np.ndarray]:
        """The unit of an access and which units it touches, of shape (units a lane, active lanes); refuses what is out
        of bounds or not aligned to min(size, 4) bytes."""
        if wave.signalled:
            raise EmulatorError(f"LDS {verb} between a barrier's signal and its wait")
        unit = min(size, 4)
        active = addresses if wave.all_lanes else addresses[wave.lanes]
        if active.size and (active.max() > self._size - size or np.bitwise_or.reduce(active) & unit - 1):
            wrong = wave.lanes & ((addresses > self._size - size) | ((addresses & unit - 1) != 0))
            lane = int(np.argmax(wrong))
            raise EmulatorError(
                f"lane {lane}: LDS {verb} of {size} bytes at byte {addresses[lane]} of {self._size}: "
                "out of bounds or not aligned"
            )
        first = (active >> (unit >> 1))[None]  # 4 >> 1 == 2, 2 >> 1 == 1, 1 >> 1 == 0: the logarithms
        return unit, first + _WORDS[: size // 4] if size > 4 else first

    def _note_read(self, wave: Wave, unit: int, indices: np.ndarray) -> None:
        """Check and record a read."""
        _, writer, reader = self._views[unit]
        each = _UNITS[unit][1]
        mine, settled, nobody, several = (s * each for s in (wave.index, _SETTLED, _NOBODY, _SEVERAL))
        written = writer.take(indices)
        if not _all_are(written, settled):
            fine = (written == settled) | (written == mine)
            if not fine.all():
                self._check_writers(wave, unit, indices[~fine], "read")
        read = reader.take(indices)
        if _all_are(read, mine):
            return
        alone = (read == mine) | (read == nobody)
        if alone.all():
            reader[indices] = mine
        elif (alone | (read == several)).all():
            reader[indices] = np.where(alone, reader.dtype.type(mine), reader.dtype.type(several))
        else:  # units whose bytes differ in state
            at = _bytes_of(unit, indices)
            read = self._reader[at]
            self._reader[at] = np.where((read == wave.index) | (read == _NOBODY), wave.index, _SEVERAL)
        self._read = self._noted(self._read, unit, indices)

    def _note_write(self, wave: Wave, unit: int, indices: np.ndarray, values: np.ndarray) -> None:
        """Check and record a write."""
        data, writer, reader = self._views[unit]
        each = _UNITS[unit][1]
        mine, settled, nobody, unwritten = (s * each for s in (wave.index, _SETTLED, _NOBODY, _UNWRITTEN))
        read, written = reader.take(indices), writer.take(indices)
        if not (
            (_all_are(read, nobody) or _all_are(read, mine))
            and (_all_are(written, settled) or _all_are(written, mine))
        ):
            fine = (read == nobody) | (read == mine)
            fine &= (written == settled) | (written == unwritten) | (written == mine)
            changed = ~fine & (data[indices] != values)
            if changed.any():
                self._check_writers(wave, unit, indices[changed], "write")
                self._check_readers(wave, unit, indices[changed])
        writer[indices] = mine
        self._written = self._noted(self._written, unit, indices)

    def _noted(
        self, before: list[tuple[int, np.ndarray]] | None, unit: int, indices: np.ndarray
    ) -> list[tuple[int, np.ndarray]] | None:
        if before is None or len(before) == self._most:
            return None
        before.append((unit, indices))
        return before

    def _check_writers(self, wave: Wave, unit: int, indices: np.ndarray, verb: str) -> None:
        for offset in _bytes_of(unit, indices):
            state = int(self._writer[offset])
            if state == _UNWRITTEN and verb == "read":
                raise EmulatorError(f"LDS read of byte {offset}, which was never written")
            if state < _SETTLED and state != wave.index:
                raise EmulatorError(
                    f"LDS {verb} of byte {offset}, which wave {state} wrote since the last barrier"
                )

    def _check_readers(self, wave: Wave, unit: int, indices: np.ndarray) -> None:
        for offset in _bytes_of(unit, indices):
            state = int(self._reader[offset])
            if state not in (_NOBODY, wave.index):
                who = "several waves" if state == _SEVERAL else f"wave {state}"
                raise EmulatorError(f"LDS write of byte {offset}, which {who} read since the last barrier")


def _bytes_of(unit: int, indices: np.ndarray) -> np.ndarray:
    """The numbers of the bytes of some units."""
    return (indices.reshape(-1, 1) * unit + np.arange(unit)).reshape(-1)


def _all_are(states: np.ndarray, state: int) -> bool:
    """Whether all are the same one; comparing bytes is the fastest way for as few as a wave has."""
    return states.tobytes() == _repeated(state, states.dtype, states.size)


@lru_cache(maxsize=4096)
def _repeated(state: int, dtype: np.dtype, count: int) -> bytes:
    return np.full(count, state, dtype).tobytes()
