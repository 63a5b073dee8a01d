"""How decoding is launched: from a call's shapes and settings to its kernels, how many shares of the keys there are,
and the arguments. Nothing here looks at a length or a block table: those are the device's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError
from liger_aot.ops.attention._operands import LOG2_E, MAX_SEQLEN, WARP_GROUP_ROWS, TensorMapCache
from liger_aot.runtime import device_errors
from liger_aot.runtime.dispatch import Loaded, OpOn

UNIT = 16  # what the aligned binaries assume of addresses (bytes), strides and the dimension (elements)
MOST_SPLITS = 256
MOST = (1 << 31) - 1  # blocks times those who share them, in the kernels' arithmetic
UNEVEN = 0.6
MOST_OF_ONE = 1.6  # what a multiprocessor moves at most, as a multiple of its part of the memory's bandwidth
STREAMED = (
    128  # the largest dimension of the kernel that streams: beyond, programs of split are as fast as copies
)
STREAMED_ROWS = (
    16  # of queries a head of keys: with 32 (4 tokens of 8 heads) the wide kernel took 0.965 of its time
)
LARGEST_STRIDE = 1 << 38  # elements: what a tensor map can say


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


class Call:
    """What plans need of a call's shapes, strides and settings."""

    __slots__ = (
        "aligned",
        "left",
        "paged",
        "ratio",
        "right",
        "rows",
        "settings",
        "shape",
        "strides",
        "table_row",
    )

    def __init__(
        self, q: Tensor, k: Tensor, block_table: Tensor | None, settings: Settings, addresses_aligned: bool
    ) -> None:
        shape = self.shape = Shape(q, k, block_table)
        self.settings, self.paged = settings, block_table is not None
        self.ratio = shape.heads // shape.kv_heads
        self.rows = shape.tokens * self.ratio
        self.strides = [*_strides(q)[:3], *_strides(k)[:3]]
        self.aligned = addresses_aligned and not any(n % UNIT for n in (*self.strides, shape.dim))
        self.table_row = 0 if block_table is None else block_table.stride(0)
        self.left = MAX_SEQLEN if settings.left < 0 else min(settings.left, MAX_SEQLEN)
        self.right = MAX_SEQLEN if settings.right < 0 else min(settings.right + 1, MAX_SEQLEN)

    def blocks(self, block_n: int) -> int:
        """Of a sequence's keys, at most."""
        blocks = -(-self.shape.capacity // block_n)
        if self.settings.left >= 0:  # a window may start inside a block
            blocks = min(blocks, -(-(self.left + self.shape.tokens) // block_n) + 1)
        return blocks

    def shares(self, on: OpOn, numbers: Mapping[str, int], width: int, most: int = MOST_SPLITS) -> int:
        """How many programs share the keys of a sequence, where its queries are ``width`` tiles: unless the call says,
        ``most`` at most."""
        a_multiprocessor = numbers["programs_per_multiprocessor"]
        slots, busy = (
            n * on.multiprocessors for n in (a_multiprocessor, numbers.get("busy", a_multiprocessor))
        )
        blocks, programs = self.blocks(numbers["block_n"]), self.shape.batch * width
        return min(self.settings.splits, blocks) or best_splits(
            programs, blocks, slots, busy, numbers["start"], most
        )

    def mapped(self, on: OpOn) -> bool:
        """Whether there are tensor maps of keys and values."""
        return on.tensor_map is not None and 0 < min(self.strides) <= max(self.strides) < LARGEST_STRIDE

    @property
    def asked(self) -> tuple[Any, ...]:
        """The kernels' arguments from the scales to the sizes."""
        shape, cap = self.shape, self.settings.softcap
        scales = (cap or self.settings.scale) * LOG2_E, self.settings.scale / cap if cap else 0.0
        by_ratio = signed((1 << 31) // self.ratio + 1)
        return (*scales, shape.kv_heads, self.ratio, by_ratio, shape.tokens, shape.dim)

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        return self.shape.batch, self.shape.heads, self.shape.tokens


def best_splits(
    programs: int, blocks: int, slots: int, busy: int, start: int, most: int = MOST_SPLITS
) -> int:
    """The number of shares of a sequence, ``most`` at most, that is done first.

    ``busy`` programs at once keep memory busy, ``slots`` have room; a block of keys costs one of the busy 1, and a wave
    of programs ``start`` to start and end, as much as a second launch, which takes 1 / 16 more for each share that it
    weighs. A last wave that is not full follows others that end unevenly: as if it had UNEVEN of the busy ones more;
    a program or two too many are a second one for some multiprocessors, which move MOST_OF_ONE.
    So chosen, decoding on one NVIDIA H200 was within 2% of the fastest of the numbers tried at 11 sizes.
    """
    best, least = 1, math.inf
    for splits in range(1, min(blocks, most) + 1):
        waves, rest = divmod(programs * splits, slots)
        last = max(rest / busy, 1.0, -(-rest // busy) / MOST_OF_ONE) if rest else 0.0
        if waves and rest:
            last = min(last + UNEVEN, slots / busy)
        cost = -(-blocks // splits) * (waves * slots / busy + last) + start * (waves + (rest > 0))
        if splits > 1:
            cost += start + splits / 16
        if cost < least:
            best, least = splits, cost
    return best


class Plan:
    """All calls with tensors like these, by ``stream``, or by the split kernels: ``combine`` weighs their shares."""

    def __init__(self, on: OpOn, call: Call, q: Tensor, k: Tensor, stream: Loaded | None) -> None:
        shape, rows = call.shape, call.rows
        streams, split = stream is not None, stream
        if split is None:
            paged = "_paged" if call.paged else ""
            split = on.kernels[f"flash_decoding_split{paged}"]((q.dtype, call.aligned), shape.dim)
            if rows > split.numbers["block_m"]:
                split = on.kernels[f"flash_decoding_wide{paged}"]((q.dtype, call.aligned), shape.dim)
        combine = on.kernels["flash_decoding_combine"]((q.dtype, not shape.dim % UNIT), shape.dim)
        numbers = split.numbers
        block_m, block_n = numbers.get("block_m", WARP_GROUP_ROWS), numbers["block_n"]
        tiles = -(-rows // block_m)
        width = shape.kv_heads * tiles
        if streams:
            each, groups = 0, on.multiprocessors * numbers["programs_per_multiprocessor"] // width
        else:
            each = max(min(call.shares(on, numbers, width), MOST // max(call.blocks(block_n), 1)), 1)
            groups = shape.batch * each
        programs = width * groups
        if (
            programs >= 1 << 31
            or shape.batch * shape.heads * shape.tokens >= 1 << 31
            or call.ratio >= 1 << 15
        ):
            raise ArgumentError(
                f"flash_decoding: {shape.batch} sequences of {shape.tokens} x {shape.heads} queries, {call.ratio} for "
                "each head of keys, are too many"
            )
        part_rows = min(block_m, rows) if (each or groups) > 1 else 0
        self._on, self._split, self._combine = on, split, combine
        self._programs, self._rows = programs, shape.batch * shape.heads * shape.tokens
        self._flag = device_errors.flag("flash_decoding")
        encode: Any = on.tensor_map
        self._maps = [TensorMapCache(encode, split, name, k, "bshd").at for name in "KV"] if streams else None
        asked = (*call.asked, shape.batch, shape.capacity)
        bounds = call.left, call.right
        self._split_numbers: tuple[Any, ...]
        if streams:
            self._split_numbers = (*call.strides[:3], *asked, tiles, groups, part_rows, *bounds)
        else:
            page_bits = shape.page_size.bit_length() - 1
            self._split_numbers = (
                *call.strides, call.table_row, *asked, shape.pages, page_bits, tiles, each, part_rows, *bounds
            )  # fmt: skip
        self._combine_numbers = (
            shape.kv_heads, call.ratio, shape.tokens, shape.dim, shape.batch, shape.capacity, tiles, each, groups,
            part_rows, block_m, block_n, *bounds,
        )  # fmt: skip
        self._shape, self._lse_shape = q.shape, call.lse_shape
        part_lines = programs * part_rows * (1 if each else 2)
        self._parts, self._part_sums = part_lines * (shape.dim + 1), 4 * part_lines * shape.dim

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
        parts = q.new_empty(self._parts, dtype=torch.float32) if self._parts else None
        device, stream = on.device, on.stream(on.device)
        results = o.data_ptr(), lse.data_ptr(), at(parts), at(parts) + self._part_sums
        lengths, sinks_at = at(cache_seqlens), at(sinks)
        if self._maps is not None:
            k_map, v_map = self._maps
            self._split.launch(
                device, stream, self._programs, 1, 1, k_map(k.data_ptr()), v_map(v.data_ptr()),
                *results, self._flag, q.data_ptr(), lengths, sinks_at, *self._split_numbers,
            )  # fmt: skip
        else:
            self._split.launch(
                device, stream, self._programs, 1, 1, *results, self._flag,
                q.data_ptr(), k.data_ptr(), v.data_ptr(), at(block_table), lengths, sinks_at, *self._split_numbers,
            )  # fmt: skip
        if parts is not None:
            self._combine.launch(
                device, stream, self._rows, 1, 1, *results, lengths, sinks_at, *self._combine_numbers
            )  # fmt: skip
        return o, lse


def stream_for(on: OpOn, dtype: torch.dtype, call: Call) -> Loaded | None:
    """The kernel that streams a contiguous cache with tensor maps, where there is one and it is the faster: for few
    rows, as many heads of keys of all sequences as there are multiprocessors, and caches as long as its row says."""
    if not call.aligned or call.paged or call.settings.splits:
        return None
    kernel, shape = on.kernels.get("flash_decoding_stream"), call.shape
    width = shape.kv_heads
    if kernel is None or not call.mapped(on) or shape.dim > STREAMED or call.rows > STREAMED_ROWS:
        return None
    if shape.batch * width < on.multiprocessors:
        return None
    loaded = kernel((dtype, True), shape.dim)
    numbers = loaded.numbers
    groups = on.multiprocessors * numbers["programs_per_multiprocessor"] // width
    blocks = shape.batch * -(-shape.capacity // numbers["block_n"])
    long = width * blocks >= numbers["least_blocks"] * on.multiprocessors
    return loaded if groups and long and blocks * groups <= MOST else None


def at(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def signed(x: int) -> int:
    """An unsigned 32-bit number as the launcher takes it."""
    return x - (x >> 31 << 32)


def _strides(t: Tensor) -> list[int]:
    """Those of dimensions of one element are free: what all binaries take."""
    return [stride if size > 1 else UNIT for size, stride in zip(t.shape, t.stride(), strict=True)]
