"""Memory as ``warp_group_interpreter`` has it: pointers that stay within living tensors, tensor maps, shared memory."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.harness import storages

TYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "i32": torch.int32, "i64": torch.int64,
}  # fmt: skip


def memory(address: int, dtype: torch.dtype, elements: int) -> Tensor:
    """What lies at an address, which a living tensor must hold."""
    size = elements * dtype.itemsize
    (found,) = storages.living([address]).items() or [(0, 0)]
    assert found[0] <= address and address + size <= sum(found), (
        f"no tensor holds {size} bytes at {address:#x}"
    )
    array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
    return torch.from_numpy(array).view(dtype)


def storages_of(at: Pointer, distances: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of each storage that holds elements at ``distances``: its memory, which ones, where they lie in it."""
    size, left = at.dtype.itemsize, torch.ones(distances.shape, dtype=torch.bool)
    while left.any():
        first = at.address + int(distances[left][0]) * size
        memory(first, at.dtype, 1)
        ((storage, length),) = storages.living([first]).items()
        beside = (first - storage) % size  # where elements lie in the storage
        start, count = storage + beside, (length - beside) // size
        elements = distances - (start - at.address) // size
        inside = left & (elements >= 0) & (elements < count)
        yield memory(start, at.dtype, count), inside, elements[inside]
        left &= ~inside


class Pointer:
    """An address, or one behind it for each element of a tensor of distances."""

    def __init__(self, address: int | None, dtype: torch.dtype, behind: Tensor | None = None) -> None:
        self.address, self.dtype, self.behind = address or 0, dtype, behind

    def __add__(self, elements: Any) -> Pointer:
        if isinstance(elements, Tensor) and elements.dim():
            behind = 0 if self.behind is None else self.behind
            return Pointer(self.address, self.dtype, elements.long() + behind)
        return Pointer(self.address + int(elements) * self.dtype.itemsize, self.dtype, self.behind)

    def to(self, integers: torch.dtype) -> Pointer:
        return self

    def __ne__(self, number: object) -> bool:
        return self.address != number

    __hash__ = None  # type: ignore[assignment]


def load(at: Pointer, mask: Any = True, other: float = 0.0) -> Tensor:
    """One value, or one for each distance; integers as wide ones."""
    if at.behind is not None:
        found = torch.full(at.behind.shape, other, dtype=at.dtype)
        there = torch.as_tensor(mask).expand(found.shape)
        values = torch.empty(int(there.sum()), dtype=at.dtype)
        for places, which, elements in storages_of(at, at.behind[there]):
            values[which] = places[elements]
        found[there] = values
        return found if at.dtype.is_floating_point else found.long()
    if not mask:
        return torch.as_tensor(other)
    value = memory(at.address, at.dtype, 1)[0]
    return value.clone() if at.dtype.is_floating_point else value.long()


def store(at: Pointer, values: Any, mask: Any = True) -> None:
    if at.behind is None:
        if mask:
            memory(at.address, at.dtype, 1)[0] = values
        return
    mask = torch.as_tensor(mask).expand(at.behind.shape)
    for places, which, elements in storages_of(at, at.behind[mask]):
        places[elements] = values[mask][which].to(at.dtype)


def atomic_add(at: Pointer, number: int, sem: str = "acq_rel", scope: str = "gpu") -> Tensor:
    """Programs run one after the other, and one warp of each counts."""
    before = load(at)
    store(at, before + number)
    return before


class TensorMap:
    """What the host asked the driver to encode. For a box wholly outside of it a GPU touches the address that the map
    starts at: before the tensor for those of packed sequences."""

    layout = None

    def __init__(self, address: int, dtype: str, sizes: Any, strides: Any, box: Any, swizzle: int) -> None:
        self.address, self.dtype, self.sizes, self.strides = address, TYPES[dtype], sizes, strides
        self.block_shape = box
        self.block_type = SimpleNamespace(nbytes=math.prod(box) * self.dtype.itemsize)

    def inside(self, at: list[Any]) -> tuple[Tensor, tuple[slice, ...]]:
        """The part of the box at ``at`` that memory holds, and where in the box it is; both may be empty."""
        ranges = [
            (max(0, -int(c)), min(box, size - int(c)), int(c))
            for c, box, size in zip(at, self.block_shape, self.sizes, strict=True)
        ]
        if not all(low < high for low, high, _ in ranges):
            memory(self.address, self.dtype, 1)
            return torch.empty([0] * len(at), dtype=self.dtype), (slice(0),) * len(at)
        first = sum((c + low) * s for (low, _, c), s in zip(ranges, self.strides, strict=True))
        shape = [high - low for low, high, _ in ranges]
        last = sum((n - 1) * s for n, s in zip(shape, self.strides, strict=True))
        flat = memory(self.address + first * self.dtype.itemsize, self.dtype, last + 1)
        return flat.as_strided(shape, self.strides), tuple(slice(low, high) for low, high, _ in ranges)


class Shared:
    """A descriptor of shared memory."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.dtype, self.shape = values, values.dtype, list(values.shape)

    def index(self, i: Any) -> Shared:
        return Shared(self.values[int(i)])

    def slice(self, start: Any, length: Any, dim: int = 0) -> Shared:
        return Shared(self.values.narrow(dim, int(start), int(length)))

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.values.view([int(n) for n in shape]))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.values.permute(order))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        sizes = [int(n) for n in shape]
        if len(sizes) == 2:
            return PanelRows(self.values, dtype, sizes)
        return Shared(self.values.view(dtype).flatten()[: math.prod(sizes)].view(sizes))

    def load(self, layout: Any) -> Tensor:
        return self.values.clone()

    def store(self, values: Tensor) -> None:
        assert values.dtype == self.dtype and values.shape == self.values.shape
        self.values.copy_(values)


class PanelRows(Shared):
    """A tile (1, 1, rows, columns) as TMA with the widest swizzle leaves it: panels of 128 bytes a row behind each
    other. An index is so many rows of a panel; places in a row are swizzled, so a row is kept or gets one value."""

    def __init__(self, values: Tensor, dtype: torch.dtype, sizes: list[int]) -> None:
        super().__init__(values.view(dtype)[0, 0].unflatten(1, (-1, 128 // dtype.itemsize)).transpose(0, 1))
        self._together = sizes[1] * dtype.itemsize // 128
        assert sizes[0] * sizes[1] == self.values.numel() and not self.values.shape[1] % self._together

    def index(self, i: Any) -> Shared:
        panel, rows = divmod(int(i) * self._together, self.values.shape[1])
        return PanelPart(self.values[panel, rows : rows + self._together])


class PanelPart(Shared):
    def load(self, layout: Any) -> Tensor:
        return self.values.flatten().clone()

    def store(self, values: Tensor) -> None:
        assert values.numel() == self.values.numel() and values.dtype == self.dtype
        rows = values.view(self.values.shape)
        kept = (rows == self.values).all(1)
        assert (kept | (rows == rows[:, :1]).all(1)).all(), "places are swizzled"
        self.values.copy_(rows)
