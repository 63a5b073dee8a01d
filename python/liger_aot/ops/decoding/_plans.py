"""How decoding is launched: from a call's shapes and settings to its kernels, how they split keys, and the arguments.
Nothing here looks at a length or a block table: those are on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.attention._operands import LOG2_E, MAX_SEQLEN, TensorMapCache
from liger_aot.ops.kv_cache import lacking
from liger_aot.ops.split_kv import MAX_SPLITS, best_splits
from liger_aot.runtime import device_errors
from liger_aot.runtime.dispatch import Loaded, OpOn

NAME = "flash_decoding"
UNIT = 16  # what the aligned binaries assume of addresses (bytes), strides and the dimension (elements)
MAX_PRODUCT = (1 << 31) - 1  # blocks times the programs that split them, in the kernels' arithmetic
MAP_STRIDE = 1 << 38  # elements: a tensor map's strides are below
GRID_DEPTH = (1 << 16) - 1  # what the last dimension of a grid has at most
RECIPROCAL = 1 << 32  # up to where the fused kernel multiplies instead of dividing
WHOLE_WAVES = 2.5  # of programs, from which on sequences of different lengths are whole: unequal_parts
MOST_PARTS = 32  # of such a sequence
FEWEST_ROWS = 8  # of q a head of keys that the fused kernel computes
LARGE_PAGE = 64  # keys: the fused kernel loads them at once
PARTIAL_ELEMENTS = 1 << 31  # of a sequence: distances between parts are 32-bit numbers


class Settings(NamedTuple):
    """As the op takes them, in its order. A bound of -1 is none; 0 splits leave their number to the profile."""

    scale: float
    left: int
    right: int
    softcap: float
    splits: int


class Shape:
    """Of a call's tensors; a sequence may have ``capacity`` keys."""

    __slots__ = ("batch", "capacity", "dim", "heads", "kv_heads", "page_size", "pages", "tokens")

    def __init__(self, q: Tensor, k: Tensor, block_table: Tensor | None) -> None:
        self.batch, self.tokens, self.heads, self.dim = q.shape
        self.pages, self.page_size, self.kv_heads, _ = k.shape
        self.capacity = self.page_size * (1 if block_table is None else block_table.shape[1])


class Call:
    """What plans need of a call's shapes, strides and settings; ``full``: it gives no lengths, all keys are there."""

    __slots__ = (
        "aligned",
        "full",
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
        self,
        q: Tensor,
        k: Tensor,
        block_table: Tensor | None,
        full: bool,
        settings: Settings,
        addresses_aligned: bool,
    ) -> None:
        self.full = full
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

    def splits(self, on: OpOn, numbers: Mapping[str, int], width: int) -> int:
        """How many workers of ``width`` programs split the keys of a sequence: as many as the call says, or its
        sequences' lengths ask for, or are the fastest for full ones."""
        blocks, programs = self.blocks(numbers["block_n"]), self.shape.batch * width
        per_multiprocessor = numbers["programs_per_multiprocessor"]
        places, saturating = (
            n * on.multiprocessors
            for n in (per_multiprocessor, numbers.get("ctas_to_saturate", per_multiprocessor))
        )
        parts = self.unequal_parts(numbers, programs, places)
        if self.settings.splits or parts * programs >= places:
            return min(self.settings.splits, blocks) or parts
        # One wave of programs that load many keys by one instruction, where there is one. Of few sequences in pages
        # such a program can keep a multiprocessor busy: 1 x 8192 keys in 16 splits 12.6 us, in 32 13.8 us.
        most = MAX_SPLITS
        if numbers.get("box_keys", 0) >= LARGE_PAGE:
            if not self.paged:
                most = places // programs or most
            elif 4 * programs <= on.multiprocessors:
                most = on.multiprocessors // programs
        return max(parts, best_splits(programs, blocks, places, saturating, numbers["startup_blocks"], most))

    def keys(self, block_n: int) -> int:
        """Of a sequence, at most, in whole blocks."""
        return self.blocks(block_n) * block_n

    def unequal_parts(self, numbers: Mapping[str, int], programs: int, places: int) -> int:
        """Into how many parts each of several sequences is split whose lengths the host does not know; 0: as if all
        were full. A long sequence that is one part may end long after all others, unless these are many: from
        WHOLE_WAVES waves of programs on each sequence is one part, as empty parts cost time, too. Of fewer, it is
        ``parts``, or as many as two waves of programs, where there is room for ``part_keys`` in each. NVIDIA H200,
        pages of 16, FlashAttention-3 in brackets: 128 sequences of 128 to 8192 keys in 4 parts 528 us, in one 555
        (521); 4 of 4096 to 65536 in 16 144, in 8 193 (168); 256 of 96 keys with room for 8192 in one 33, in 4 47
        (63)."""
        if self.full or self.shape.batch == 1:
            return 0
        if programs >= WHOLE_WAVES * places:
            return 1
        parts = numbers.get("parts", MOST_PARTS)
        room = self.keys(numbers["block_n"]) // numbers.get("part_keys", MAX_SEQLEN)
        return min(room, max(2 * places // programs, parts), MOST_PARTS) if room >= parts else 0

    def mapped(self, on: OpOn) -> bool:
        """Whether there are tensor maps of keys and values."""
        return on.tensor_map is not None and 0 < min(self.strides) <= max(self.strides) < MAP_STRIDE

    @property
    def sizes(self) -> tuple[Any, ...]:
        """The kernels' arguments from the scales to the dimension."""
        shape, cap = self.shape, self.settings.softcap
        scales = (cap or self.settings.scale) * LOG2_E, self.settings.scale / cap if cap else 0.0
        by_ratio = signed((1 << 31) // self.ratio + 1)
        return (*scales, shape.kv_heads, self.ratio, by_ratio, shape.tokens, shape.dim)

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        return self.shape.batch, self.shape.heads, self.shape.tokens


class SplitPlan:
    """All calls with tensors like these, by the split kernel and ``combine``."""

    def __init__(self, on: OpOn, call: Call, q: Tensor, k: Tensor, scale_head: int) -> None:
        shape, rows = call.shape, call.rows
        kernel = on.kernels[f"{NAME}_split"]
        try:
            split = kernel((q.dtype, call.paged, False, k.dtype, call.aligned), shape.dim)
        except ArgumentTypeError:
            if k.dtype == q.dtype:
                raise
            raise lacking(NAME, "k_cache", k.dtype) from None
        if rows > split.numbers["block_m"]:
            split = kernel((q.dtype, call.paged, True, k.dtype, call.aligned), shape.dim)
        combine = on.kernels[f"{NAME}_combine"]((q.dtype, not shape.dim % UNIT), shape.dim)
        numbers = split.numbers
        block_m, block_n = numbers["block_m"], numbers["block_n"]
        tiles = -(-rows // block_m)
        width = shape.kv_heads * tiles
        splits = call.splits(on, numbers, width)
        splits = max(min(splits, MAX_PRODUCT // max(call.blocks(block_n), 1)), 1)
        programs = width * shape.batch * splits
        if (
            programs >= 1 << 31
            or shape.batch * shape.heads * shape.tokens >= 1 << 31
            or call.ratio >= 1 << 15
        ):
            raise ArgumentError(
                f"{NAME}: {shape.batch} sequences of {shape.tokens} x {shape.heads} queries, {call.ratio} for "
                "each head of keys, are too many"
            )
        partial_rows = min(block_m, rows) if splits > 1 else 0
        self._on, self._split, self._combine = on, split, combine
        self._programs, self._rows = programs, shape.batch * shape.heads * shape.tokens
        self._flag = device_errors.flag(NAME)
        sizes = (*call.sizes, shape.batch, shape.capacity)
        bounds = call.left, call.right
        page_bits = shape.page_size.bit_length() - 1
        self._split_numbers = (
            *call.strides, call.table_row, *sizes, shape.pages, page_bits, tiles, splits, partial_rows, *bounds
        )  # fmt: skip
        self._codes = k.dtype != q.dtype
        self._scale_head = scale_head
        self._combine_numbers = (
            shape.kv_heads, call.ratio, shape.tokens, shape.dim, shape.batch, shape.capacity, tiles, splits,
            partial_rows, block_m, block_n, *bounds,
        )  # fmt: skip
        self._shape, self._lse_shape = q.shape, call.lse_shape
        partials = programs * partial_rows
        self._partials, self._lse_partial = partials * (shape.dim + 1), 4 * partials * shape.dim

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache_seqlens: Tensor | None,
        block_table: Tensor | None,
        sinks: Tensor | None,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        on = self._on
        o, lse = q.new_empty(self._shape), q.new_empty(self._lse_shape, dtype=torch.float32)
        partials = q.new_empty(self._partials, dtype=torch.float32) if self._partials else None
        device, stream = on.device, on.stream(on.device)
        results = o.data_ptr(), lse.data_ptr(), at(partials), at(partials) + self._lse_partial
        lengths, sinks_at = at(cache_seqlens), at(sinks)
        self._split.launch(
            device, stream, self._programs, 1, 1, *results, self._flag,
            q.data_ptr(), k.data_ptr(), v.data_ptr(), at(block_table), lengths, sinks_at, *self._split_numbers,
            *((at(k_scale), at(v_scale), self._scale_head) if self._codes else ()),
        )  # fmt: skip
        if partials is not None:
            self._combine.launch(
                device, stream, self._rows, 1, 1, *results, lengths, sinks_at, *self._combine_numbers
            )  # fmt: skip
        return o, lse


class FusedPlan:
    """All calls with tensors like these, by the kernel that combines its own parts."""

    def __init__(self, on: OpOn, loaded: Loaded, call: Call, q: Tensor, k: Tensor, splits: int) -> None:
        shape, width = call.shape, call.shape.kv_heads
        self._on, self._loaded = on, loaded
        self._grid = width, splits, shape.batch
        self._flag = device_errors.flag(NAME)
        encode: Any = on.tensor_map
        self._k_map, self._v_map = (TensorMapCache(encode, loaded, name, k, "bshd").at for name in "KV")
        by_splits = signed(RECIPROCAL // splits + 1) if splits > 1 else 0
        self._numbers = (
            *call.strides[:3], call.table_row, *call.sizes, shape.capacity, shape.pages,
            shape.page_size.bit_length() - 1, splits, by_splits, call.left, call.right,
        )  # fmt: skip
        self._shape, self._lse_shape = q.shape, call.lse_shape
        rows, columns = loaded.numbers["block_m"], loaded.numbers["head_dim"]
        partials = width * splits * shape.batch * rows if splits > 1 else 0
        self._partials, self._lse_partial = partials * (columns + 1), 4 * partials * columns
        self._words = (width * shape.batch + 1) // 2  # of 64 bits: two counters each
        # Where programs count who has ended: zeros, which launches leave as zeros.
        self._counters = on.workspace("counters", q.device)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache_seqlens: Tensor | None,
        block_table: Tensor | None,
        sinks: Tensor | None,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        on = self._on
        o, lse = q.new_empty(self._shape), q.new_empty(self._lse_shape, dtype=torch.float32)
        device, stream = on.device, on.stream(on.device)
        partials = counters = None
        if self._partials:
            partials = q.new_empty(self._partials, dtype=torch.float32)
            counters = self._counters.on(stream, self._words)
        self._loaded.launch(
            device, stream, *self._grid, self._k_map(k.data_ptr()), self._v_map(v.data_ptr()), o.data_ptr(),
            lse.data_ptr(), at(partials), at(partials) + self._lse_partial, self._flag, at(counters), q.data_ptr(),
            at(block_table), at(cache_seqlens), at(sinks), *self._numbers,
        )  # fmt: skip
        return o, lse


def plan_for(
    on: OpOn,
    q: Tensor,
    k: Tensor,
    block_table: Tensor | None,
    full: bool,
    scale_head: int,
    settings: Settings,
    addresses_aligned: bool,
) -> SplitPlan | FusedPlan:
    """The plan of all calls with tensors like these. The kernel by tensor maps takes no codes: wgmma's operands lie in
    shared memory in q's dtype."""
    call = Call(q, k, block_table, full, settings, addresses_aligned)
    plan = fused_for(on, call, q, k) if k.dtype == q.dtype else None
    return plan or SplitPlan(on, call, q, k, scale_head)


def fused_for(on: OpOn, call: Call, q: Tensor, k: Tensor) -> FusedPlan | None:
    """None where there is no kernel that combines its own parts for the call."""
    shape = call.shape
    kernel = on.kernels.get(f"{NAME}_fused")
    if kernel is None or not call.aligned or not call.mapped(on) or not 0 < shape.batch <= GRID_DEPTH:
        return None
    block_m = 1 << max(call.rows - 1, FEWEST_ROWS - 1).bit_length()
    head_dim = fused_head_dim(shape.dim)
    key = q.dtype, head_dim, keys_of(call), False, block_m, True
    if not call.rows or not kernel.serves(key):
        return None
    loaded = kernel(key, shape.dim)
    many = q.dtype, head_dim, "pages" if call.paged else "contiguous", True, block_m, True
    of_many = kernel(many, shape.dim) if kernel.serves(many) else None
    if of_many is not None and takes_many(on, call, loaded.numbers, of_many.numbers):
        loaded = of_many
    splits = call.splits(on, loaded.numbers, shape.kv_heads)
    whole = q.dtype, head_dim, "whole", True, block_m, True
    if call.paged and splits == 1 and kernel.serves(whole) and loaded is of_many:
        loaded = kernel(whole, shape.dim)
    numbers = loaded.numbers
    blocks = max(call.blocks(numbers["block_n"]), 1)
    elements = splits * shape.kv_heads * numbers["block_m"] * numbers["head_dim"]
    if splits * splits * blocks >= RECIPROCAL or elements >= PARTIAL_ELEMENTS:
        return None
    return FusedPlan(on, loaded, call, q, k, splits)


def takes_many(on: OpOn, call: Call, few: Mapping[str, int], many: Mapping[str, int]) -> bool:
    """Whether the row of many programs is the faster: each has fewer keys on their way, but more of them run at once.
    Of a full contiguous cache: where the other row's programs would be more than half a wave, and this one's, unsplit,
    are a wave at most (17 x 8192 keys 133 us instead of 143, 34 x 8192 257 instead of 269; 64 x 8192, which are more,
    548 instead of 480). Of pages: where the other row's programs are more than a wave, and its boxes are of few keys
    (34 x 8192 in pages of 16: 275 instead of 296) or tables short (256 x 96: 33 instead of 45). NVIDIA H200."""
    programs = call.shape.batch * call.shape.kv_heads
    places, of_many = (n["programs_per_multiprocessor"] * on.multiprocessors for n in (few, many))
    if not call.paged:
        return call.full and places < 2 * programs <= 2 * of_many
    short = call.keys(few["block_n"]) < few["parts"] * few["part_keys"]
    return programs > places and (short or few["box_keys"] < LARGE_PAGE)


def keys_of(call: Call) -> str:
    """Of the fused kernel's axis "keys"."""
    if not call.paged:
        return "contiguous"
    return "large_pages" if call.shape.page_size >= LARGE_PAGE else "pages"


def fused_head_dim(dim: int) -> int:
    """The fused kernel's head dimension for tensors of ``dim``, a power of two."""
    return max(1 << (dim - 1).bit_length(), 64)


def at(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def signed(x: int) -> int:
    """An unsigned 32-bit number as the launcher takes it."""
    return x - (x >> 31 << 32)


def _strides(t: Tensor) -> list[int]:
    """Those of dimensions of one element are free: what all binaries take."""
    return [stride if size > 1 else UNIT for size, stride in zip(t.shape, t.stride(), strict=True)]
