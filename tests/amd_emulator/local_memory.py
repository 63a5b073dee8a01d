"""Local memory (LDS) of a workgroup, which knows who wrote and read each byte since the last barrier.

Between two barriers a byte may not be written by one wave and touched by another: on hardware the result
would depend on which comes first. Writing the value that is already there is allowed (Triton lets several
waves store the same element). Reading bytes that nobody wrote is an error.
"""

from __future__ import annotations

import numpy as np

from .errors import EmulatorError
from .memory import word_indices
from .wave import LANE, LANES, Wave

# States of a byte: the number of the one wave that wrote (read) it since the barrier, or one of these.
_SETTLED, _UNWRITTEN = 254, 255  # in `_writer`: written before the barrier, never written
_SEVERAL, _NOBODY = 254, 255  # in `_reader`
_ALL_BYTES = 0x01010101  # times a state: that state in the four bytes of a word


class LocalMemory:
    def __init__(self, size: int) -> None:
        """`size` in bytes."""
        self._size = size
        padded = -(-size // 4) * 4
        self._data = np.zeros(padded, np.uint8)
        self._writer = np.full(padded, _UNWRITTEN, np.uint8)
        self._reader = np.full(padded, _NOBODY, np.uint8)

    def barrier(self) -> None:
        """All waves of the workgroup have arrived: what was written may be read by all."""
        self._writer[self._writer < _SETTLED] = _SETTLED
        self._reader.fill(_NOBODY)

    def load(self, wave: Wave, addresses: np.ndarray, size: int) -> np.ndarray:
        """Read `size` bytes in each active lane at `addresses` (int64, 64 lanes).

        Returns uint32 of shape (words, 64); 1 and 2 bytes are zero-extended, inactive lanes are 0.
        """
        active = self._check(wave, addresses, size, "read")
        if size < 4:
            result = np.zeros((1, LANES), np.uint32)
            for byte in range(size):
                offsets = addresses[active] + byte
                self._note_read(wave, offsets, offsets, self._writer, self._reader, 1)
                result[0, active] |= self._data[offsets].astype(np.uint32) << np.uint32(8 * byte)
            return result
        result = np.zeros((LANES, size // 4), np.uint32)
        indices = word_indices(addresses[active], size)
        writer, reader = self._writer.view(np.uint32), self._reader.view(np.uint32)
        self._note_read(wave, indices, indices * 4, writer, reader, _ALL_BYTES)
        result[active] = self._data.view(np.uint32)[indices]
        return result.T

    def store(self, wave: Wave, addresses: np.ndarray, data: np.ndarray, size: int) -> None:
        """Write the low `size` bytes of `data` (uint32, shape (words, 64)) in each active lane."""
        active = self._check(wave, addresses, size, "write")
        if size < 4:
            for byte in range(size):
                offsets = addresses[active] + byte
                values = (data[0, active] >> np.uint32(8 * byte)).astype(np.uint8)
                self._note_write(wave, offsets, offsets, values, self._data, self._writer, self._reader, 1)
            return
        indices, values = word_indices(addresses[active], size), data.T[active]
        views = [array.view(np.uint32) for array in (self._data, self._writer, self._reader)]
        self._note_write(wave, indices, indices * 4, values, *views, _ALL_BYTES)

    def _check(self, wave: Wave, addresses: np.ndarray, size: int, verb: str) -> np.ndarray:
        """The active lanes; refuses what is out of bounds or not aligned to min(size, 4) bytes."""
        active = LANE if wave.all_lanes else np.flatnonzero(wave.lanes)
        wrong = (addresses > self._size - size) | ((addresses & min(size, 4) - 1) != 0)
        if (wrong & wave.lanes).any():
            lane = int(np.argmax(wrong & wave.lanes))
            raise EmulatorError(
                f"lane {lane}: LDS {verb} of {size} bytes at byte {addresses[lane]} of {self._size}: "
                "out of bounds or not aligned"
            )
        return active

    def _note_read(
        self,
        wave: Wave,
        indices: np.ndarray,
        offsets: np.ndarray,
        writer: np.ndarray,
        reader: np.ndarray,
        unit: int,
    ) -> None:
        """Check and record a read of the bytes (unit 1) or words at `indices`; `offsets` are in bytes."""
        written = writer[indices]
        fine = (written == _SETTLED * unit) | (written == wave.index * unit)
        if not fine.all():
            self._check_writers(wave, offsets[~fine], unit, "read")
        mine = wave.index * unit
        read = reader[indices]
        if (read == mine).all():
            return
        if unit == 1 or ((read == mine) | (read == _NOBODY * unit) | (read == _SEVERAL * unit)).all():
            alone = (read == mine) | (read == _NOBODY * unit)
            reader[indices] = np.where(alone, mine, _SEVERAL * unit)
            return
        for byte in range(4):  # words whose bytes differ in state
            at = offsets + byte
            read = self._reader[at]
            self._reader[at] = np.where((read == wave.index) | (read == _NOBODY), wave.index, _SEVERAL)

    def _note_write(
        self,
        wave: Wave,
        indices: np.ndarray,
        offsets: np.ndarray,
        values: np.ndarray,
        data: np.ndarray,
        writer: np.ndarray,
        reader: np.ndarray,
        unit: int,
    ) -> None:
        """Check, do and record a write."""
        mine = wave.index * unit
        read, written = reader[indices], writer[indices]
        fine = (read == _NOBODY * unit) | (read == mine)
        fine &= (written == _SETTLED * unit) | (written == _UNWRITTEN * unit) | (written == mine)
        changed = ~fine & (data[indices] != values)
        if changed.any():
            self._check_writers(wave, offsets[changed], unit, "write")
            self._check_readers(wave, offsets[changed], unit)
        data[indices] = values
        writer[indices] = mine

    def _check_writers(self, wave: Wave, offsets: np.ndarray, unit: int, verb: str) -> None:
        for offset in (offsets[:, None] + np.arange(1 if unit == 1 else 4)).reshape(-1):
            state = int(self._writer[offset])
            if state == _UNWRITTEN and verb == "read":
                raise EmulatorError(f"LDS read of byte {offset}, which was never written")
            if state < _SETTLED and state != wave.index:
                raise EmulatorError(
                    f"LDS {verb} of byte {offset}, which wave {state} wrote since the last barrier"
                )

    def _check_readers(self, wave: Wave, offsets: np.ndarray, unit: int) -> None:
        for offset in (offsets[:, None] + np.arange(1 if unit == 1 else 4)).reshape(-1):
            state = int(self._reader[offset])
            if state not in (_NOBODY, wave.index):
                who = "several waves" if state == _SEVERAL else f"wave {state}"
                raise EmulatorError(f"LDS write of byte {offset}, which {who} read since the last barrier")
