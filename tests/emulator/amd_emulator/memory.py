"""Global memory: the host arrays that a kernel may touch, at made-up device addresses.

Every access is checked: inside one array, in bytes that hold a value, aligned, and not a write to read-only
memory.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from .errors import EmulatorError
from .wave import LANE

_FIRST_ADDRESS = 0x7F00_0000_0000
_PAGE = 0x10000  # arrays start at multiples of this, with at least this much unmapped between them


@dataclass(frozen=True, eq=False)
class _Region:
    """One array: `data` its bytes, `valid` which of them hold a value (None: all)."""

    base: int
    data: np.ndarray
    valid: np.ndarray | None
    writable: bool
    name: str

    @property
    def end(self) -> int:
        return self.base + self.data.size


_UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_WORDS = np.arange(4)[:, None]


def _units(data: np.ndarray, unit: int) -> np.ndarray:
    """The whole units of 1, 2 or 4 bytes of a byte array."""
    return data[: data.size & -unit].view(_UNITS[unit])


def _indices(offsets: np.ndarray, unit: int, size: int) -> np.ndarray:
    """Indices of the units of accesses of `size` bytes, of shape (units, accesses)."""
    first = (offsets >> (unit >> 1))[None]  # 4 >> 1 == 2, 2 >> 1 == 1, 1 >> 1 == 0: the logarithms
    return first + _WORDS[: size // 4] if size > 4 else first


class Memory:
    """The device memory of a launch: arrays of the host, read and written in place."""

    def __init__(self) -> None:
        self._regions: list[_Region] = []
        self._bases: list[int] = []
        self._next = _FIRST_ADDRESS

    def add(self, array: np.ndarray, name: str, *, initialised: bool = True) -> int:
        """Make a contiguous array of any dtype accessible, and return its device address.

        The bytes of an array that is not `initialised` are poison until a kernel writes them: reading one is
        an EmulatorError. An array that numpy calls read-only may not be written.
        """
        if not array.flags.c_contiguous:
            raise ValueError(f"{name} is not contiguous")
        data = array.reshape(-1).view(np.uint8)
        valid = None if initialised else np.zeros(data.size, np.bool_)
        region = _Region(self._next, data, valid, array.flags.writeable, name)
        self._next += -(-data.size // _PAGE) * _PAGE + _PAGE
        self._regions.append(region)
        self._bases.append(region.base)
        return region.base

    @contextmanager
    def holding(self, data: bytes, name: str) -> Iterator[int]:
        """Make read-only bytes accessible for a while."""
        address = self.add(np.frombuffer(data, np.uint8), name)
        try:
            yield address
        finally:
            position = self._bases.index(address)
            del self._bases[position], self._regions[position]

    def read(self, address: int, size: int) -> bytes:
        """A scalar read of 32-bit words."""
        if address % 4:
            raise EmulatorError(f"scalar read at {address:#x}, which is not aligned to 4 bytes")
        region = self._find(address, size, "read")
        offset = address - region.base
        if region.valid is not None and not region.valid[offset : offset + size].all():
            raise EmulatorError(f"read of {size} uninitialised bytes at byte {offset} of {region.name}")
        return region.data[offset : offset + size].tobytes()

    def read_narrow(self, address: int, size: int) -> int:
        """A scalar read of 1 or 2 bytes."""
        if address % size:
            raise EmulatorError(f"scalar read at {address:#x}, which is not aligned to {size} bytes")
        region = self._find(address, size, "read")
        offset = address - region.base
        if region.valid is not None and not region.valid[offset : offset + size].all():
            raise EmulatorError(f"read of {size} uninitialised bytes at byte {offset} of {region.name}")
        return int.from_bytes(region.data[offset : offset + size].tobytes(), "little")

    def load(self, addresses: np.ndarray, size: int, lanes: np.ndarray) -> np.ndarray:
        """Read `size` bytes in each lane of `lanes` at `addresses` (uint64, one a lane).

        Returns uint32 of shape (words, lanes); 1 and 2 bytes are zero-extended, other lanes are 0.
        """
        result = np.zeros((max(1, size // 4), lanes.size), np.uint32)
        unit = min(size, 4)
        for region, offsets, active in self._spread(addresses, size, lanes, "read"):
            if region.valid is not None:
                _require_valid(region, offsets, active, size)
            values = _units(region.data, unit).take(_indices(offsets, unit, size))
            if active.size == lanes.size:
                return values.astype(np.uint32, copy=False)
            result[:, active] = values
        return result

    def store(self, addresses: np.ndarray, data: np.ndarray, size: int, lanes: np.ndarray) -> None:
        """Write the low `size` bytes of `data` (uint32, shape (words, lanes)) in each lane of `lanes`."""
        unit = min(size, 4)
        for region, offsets, active in self._spread(addresses, size, lanes, "write"):
            if not region.writable:
                raise EmulatorError(f"write to {region.name}, which is read-only")
            indices = _indices(offsets, unit, size)
            values = data if active.size == lanes.size else data[:, active]
            _units(region.data, unit)[indices] = values.astype(_UNITS[unit], copy=False)
            if region.valid is not None:
                _units(region.valid, unit)[indices] = 0x01010101 & (1 << 8 * unit) - 1

    def _spread(
        self, addresses: np.ndarray, size: int, lanes: np.ndarray, verb: str
    ) -> Iterator[tuple[_Region, np.ndarray, np.ndarray]]:
        """Group the active lanes by the array they touch: (array, byte offsets, lane numbers)."""
        active = LANE[: lanes.size] if lanes.all() else np.flatnonzero(lanes)
        if active.size < lanes.size:
            addresses = addresses[active]
        misaligned = addresses & np.uint64(min(size, 4) - 1)
        if misaligned.any():
            at = int(np.argmax(misaligned))
            raise EmulatorError(
                f"lane {active[at]}: {verb} of {size} bytes at {int(addresses[at]):#x}, which is not aligned"
            )
        while active.size:
            low, high = int(addresses.min()), int(addresses.max())
            try:
                region = self._find(low, size, verb)
            except EmulatorError as error:
                raise EmulatorError(f"lane {active[int(np.argmin(addresses))]}: {error}") from None
            if high + size <= region.end:
                yield region, (addresses - np.uint64(region.base)).view(np.int64), active
                return
            inside = addresses <= np.uint64(region.end - size)
            yield region, (addresses[inside] - np.uint64(region.base)).view(np.int64), active[inside]
            addresses, active = addresses[~inside], active[~inside]

    def _find(self, address: int, size: int, verb: str) -> _Region:
        position = bisect.bisect_right(self._bases, address) - 1
        if position >= 0:
            region = self._regions[position]
            if address + size <= region.end:
                return region
        access = f"{verb} of {size} bytes at {address:#x}"
        if not self._regions:
            raise EmulatorError(f"{access}: there is no memory")
        near = min(
            self._regions, key=lambda region: min(abs(address - region.base), abs(address - region.end))
        )
        raise EmulatorError(
            f"{access}, byte {address - near.base} of {near.name}, which has {near.data.size} bytes"
        )


def _require_valid(region: _Region, offsets: np.ndarray, active: np.ndarray, size: int) -> None:
    assert region.valid is not None
    holds = region.valid[offsets[:, None] + np.arange(size)].all(axis=1)
    if not holds.all():
        first = int(np.argmin(holds))
        raise EmulatorError(
            f"lane {active[first]}: read of {size} bytes at byte {offsets[first]} of {region.name}, "
            "which are not all initialised"
        )
