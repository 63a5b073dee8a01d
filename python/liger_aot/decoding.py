"""How decoding is launched: from a call's shapes and settings to its kernels, how many shares of the keys there are,
and the arguments. Nothing here looks at a length or a block table: those are the device's."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from liger_aot import pending
from liger_aot.attention import LOG2_E, LONGEST
from liger_aot.errors import ArgumentError
from liger_aot.runtime import OpOn

UNIT = 16  # what the aligned binaries assume of addresses (bytes), strides and the dimension (elements)
MOST_SPLITS = 256


class Settings:
    """As the op takes them, in its order. A bound of -1 is none; 0 splits leave their number to the profile."""

    __slots__ = ("left", "right", "scale", "softcap", "splits")

    def __init__(self, scale: float, left: int, right: int, softcap: float, splits: int) -> None:
        self.scale, self.left, self.right, self.softcap, self.splits = scale, left, right, softcap, splits


class Shape:
    """Of a call's tensors; a sequence may have ``capacity`` keys."""

    __slots__ = ("batch", "capacity", "dim", "heads", "kv_heads", "page_size", "pages", "tokens")

    def __init__(self, q: Tensor, k: Tensor, block_table: Tensor | None) -> None:
        self.batch, self.tokens, self.heads, self.dim = q.shape
        self.pages, self.page_size, self.kv_heads, _ = k.shape
        self.capacity = self.page_size * (1 if block_table is None else block_table.shape[1])


def best_splits(programs: int, blocks: int, slots: int, start: int) -> int:
    """The number of shares that is done first, where ``slots`` programs run at once, each block of keys costs a
    program 1 and its start and end ``start``, as much as a second launch."""
    best, least = 1, math.inf
    for splits in range(1, min(blocks, MOST_SPLITS) + 1):
        waves = -(-programs * splits // slots)
        cost = waves * (-(-blocks // splits) + start) + (start if splits > 1 else 0)
        if cost < least:
            best, least = splits, cost
    return best


class Plan:
    """All calls with tensors like these: of these shapes, strides, dtypes and alignment."""

    def __init__(
        self,
        on: OpOn,
        q: Tensor,
        k: Tensor,
        block_table: Tensor | None,
        settings: Settings,
        addresses_aligned: bool,
    ) -> None:
        shape = Shape(q, k, block_table)
        ratio = shape.heads // shape.kv_heads
        rows = shape.tokens * ratio
        paged = "" if block_table is None else "_paged"
        strides = [*_strides(q)[:3], *_strides(k)[:3]]
        aligned = addresses_aligned and not any(stride % UNIT for stride in (*strides, shape.dim))
        split = on.kernels[f"flash_decoding_split{paged}"]((q.dtype, aligned), shape.dim)
        if rows > split.numbers["block_m"]:
            split = on.kernels[f"flash_decoding_wide{paged}"]((q.dtype, aligned), shape.dim)
        combine = on.kernels["flash_decoding_combine"]((q.dtype, not shape.dim % UNIT), shape.dim)
        numbers = split.numbers
        block_m, block_n = numbers["block_m"], numbers["block_n"]
        left = LONGEST if settings.left < 0 else min(settings.left, LONGEST)
        right = LONGEST if settings.right < 0 else min(settings.right + 1, LONGEST)
        programs = shape.batch * shape.kv_heads * -(-rows // block_m)
        blocks = -(-shape.capacity // block_n)
        if settings.left >= 0:  # a window may start inside a block
            blocks = min(blocks, -(-(left + shape.tokens) // block_n) + 1)
        slots = on.multiprocessors * numbers["programs_per_multiprocessor"]
        splits = min(settings.splits, blocks) or best_splits(programs, blocks, slots, numbers["start"])
        if programs * splits >= 1 << 31 or shape.batch * shape.heads * shape.tokens >= 1 << 31:
            raise ArgumentError(
                f"flash_decoding: {shape.batch} sequences of {shape.tokens} x {shape.heads} queries are too many"
            )
        cap = settings.softcap
        scales = (cap or settings.scale) * LOG2_E, settings.scale / cap if cap else 0.0
        table_row = 0 if block_table is None else block_table.stride(0)
        page_bits = shape.page_size.bit_length() - 1
        sizes = (shape.kv_heads, ratio, shape.tokens, shape.dim, shape.capacity)
        self._on, self._split, self._combine = on, split, combine
        self._programs, self._rows, self._splits = (
            programs * splits,
            shape.batch * shape.heads * shape.tokens,
            splits,
        )
        self._flag = pending.flag("flash_decoding")
        self._split_numbers = (
            *strides, table_row, *scales, *sizes, shape.pages, page_bits, splits, left, right,
        )  # fmt: skip
        self._combine_numbers = (*sizes, splits, block_m, block_n, left, right)
        self._shape, self._lse_shape = q.shape, (shape.batch, shape.heads, shape.tokens)
        self._parts = self._rows * splits * (shape.dim + 1)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache_seqlens: Tensor | None,
        block_table: Tensor | None,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        on = self._on
        o, lse = q.new_empty(self._shape), q.new_empty(self._lse_shape, dtype=torch.float32)
        parts = q.new_empty(self._parts, dtype=torch.float32) if self._splits > 1 else None
        device, stream = on.device, on.stream(on.device)
        results = o.data_ptr(), lse.data_ptr(), _at(parts)
        lengths, sinks_at = _at(cache_seqlens), _at(sinks)
        self._split.launch(
            device, stream, self._programs, 1, 1,
            *results, self._flag, q.data_ptr(), k.data_ptr(), v.data_ptr(), _at(block_table), lengths, sinks_at,
            *self._split_numbers,
        )  # fmt: skip
        if parts is not None:
            self._combine.launch(
                device, stream, self._rows, 1, 1, *results, lengths, sinks_at, *self._combine_numbers
            )  # fmt: skip
        return o, lse


def _at(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _strides(t: Tensor) -> list[int]:
    """Those of dimensions of one element are free: what all binaries take."""
    return [stride if size > 1 else UNIT for size, stride in zip(t.shape, t.stride(), strict=True)]
