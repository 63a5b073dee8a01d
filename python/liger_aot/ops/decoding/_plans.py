"""How decoding is launched: from a call's shapes and settings to its kernels, how they split keys, and the arguments.
Nothing here looks at a length or a block table: those are on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.attention._operands import (
    LOG2_E,
    MAX_SEQLEN,
    WARP_GROUP_ROWS,
    TensorMapCache,
    padded_head_dim,
)
from liger_aot.ops.kv_cache import lacking
from liger_aot.ops.split_kv import MAX_SPLITS, best_splits
from liger_aot.runtime import device_errors
from liger_aot.runtime.dispatch import Loaded, OpOn

NAME = "flash_decoding"
UNIT = 16  # what the aligned binaries assume of addresses (bytes), strides and the dimension (elements)
MAX_PRODUCT = (1 << 31) - 1  # blocks times the workers that split them, in the kernels' arithmetic
MAP_STRIDE = 1 << 38  # elements: a tensor map's strides are below
GRID_DEPTH = (1 << 16) - 1  # what the last dimension of a grid has at most
RECIPROCAL = 1 << 32  # up to where the fused kernel multiplies instead of dividing
ONE_SPLIT_WAVES, ONE_SPLIT_KEYS = 4, 2048  # from how many waves of programs, up to which room: Call.whole
WHOLE_DIM = 128  # for which the fused kernel takes sequences that it doesn't split: suits_whole
# Parts of a sequence whose table has room for two and more of PART_KEYS: parts_of_room
PART_KEYS, WAVES, FEW_PARTS, MORE_PARTS = 2048, 3, 4, 8
FEWEST_ROWS = 8  # of q a head of keys that the fused kernel computes
LARGE_PAGE = 64  # keys: the fused kernel loads them at once
ONE_WAVE_KEYS = 4096  # up to which it leaves those of a contiguous cache whole: suits_whole
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

    def splits(self, on: OpOn, numbers: Mapping[str, int], width: int, most: int = MAX_SPLITS) -> int:
        """How many workers of ``width`` programs split the keys of a sequence: unless the call says, ``most`` at
        most."""
        per_multiprocessor = numbers["programs_per_multiprocessor"]
        places, saturating = (
            n * on.multiprocessors
            for n in (per_multiprocessor, numbers.get("ctas_to_saturate", per_multiprocessor))
        )
        blocks, programs = self.blocks(numbers["block_n"]), self.shape.batch * width
        return min(self.settings.splits, blocks) or best_splits(
            programs, blocks, places, saturating, numbers["startup_blocks"], most
        )

    def whole(self, on: OpOn, numbers: Mapping[str, int], width: int) -> bool:
        """Whether the split kernel leaves each sequence of a paged cache whole. Tables have room for the longest
        sequence, so most parts may be empty, and cost more than a last wave of many that is not full (NVIDIA H200, 256
        sequences of 96 of 2048 keys: 90 us in two splits, 45 us in one; all 2048 in one: 4.4 TB/s)."""
        places = numbers["programs_per_multiprocessor"] * on.multiprocessors
        few_keys = self.paged and self.shape.capacity <= ONE_SPLIT_KEYS
        return few_keys and self.shape.batch * width >= ONE_SPLIT_WAVES * places

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
    """All calls with tensors like these, by the persistent kernel or the split kernel, and ``combine``."""

    def __init__(
        self, on: OpOn, call: Call, q: Tensor, k: Tensor, scale_head: int, persistent: Loaded | None
    ) -> None:
        shape, rows = call.shape, call.rows
        split = persistent
        if split is None:
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
        block_m, block_n = numbers.get("block_m", WARP_GROUP_ROWS), numbers["block_n"]
        tiles = -(-rows // block_m)
        width = shape.kv_heads * tiles
        if persistent is not None:
            splits, workers = 0, on.multiprocessors * numbers["programs_per_multiprocessor"] // width
        else:
            most = 1 if call.whole(on, numbers, width) else MAX_SPLITS
            splits = call.splits(on, numbers, width, most)
            splits = max(min(splits, MAX_PRODUCT // max(call.blocks(block_n), 1)), 1)
            workers = shape.batch * splits
        programs = width * workers
        if (
            programs >= 1 << 31
            or shape.batch * shape.heads * shape.tokens >= 1 << 31
            or call.ratio >= 1 << 15
        ):
            raise ArgumentError(
                f"{NAME}: {shape.batch} sequences of {shape.tokens} x {shape.heads} queries, {call.ratio} for "
                "each head of keys, are too many"
            )
        partial_rows = min(block_m, rows) if (splits or workers) > 1 else 0
        self._on, self._split, self._combine = on, split, combine
        self._programs, self._rows = programs, shape.batch * shape.heads * shape.tokens
        self._flag = device_errors.flag(NAME)
        sizes = (*call.sizes, shape.batch, shape.capacity)
        bounds = call.left, call.right
        self._maps: list[Any] | None = None
        self._split_numbers: tuple[Any, ...]
        if persistent is not None:
            assert on.tensor_map is not None
            self._maps = [TensorMapCache(on.tensor_map, split, name, k, "bshd").at for name in "KV"]
            self._split_numbers = (*call.strides[:3], *sizes, tiles, workers, partial_rows, *bounds)
        else:
            page_bits = shape.page_size.bit_length() - 1
            self._split_numbers = (
                *call.strides, call.table_row, *sizes, shape.pages, page_bits, tiles, splits, partial_rows, *bounds
            )  # fmt: skip
        self._codes = k.dtype != q.dtype
        self._scale_head = scale_head
        self._combine_numbers = (
            shape.kv_heads, call.ratio, shape.tokens, shape.dim, shape.batch, shape.capacity, tiles, splits, workers,
            partial_rows, block_m, block_n, *bounds,
        )  # fmt: skip
        self._shape, self._lse_shape = q.shape, call.lse_shape
        partials = programs * partial_rows * (1 if splits else 2)
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
    scale_head: int,
    settings: Settings,
    addresses_aligned: bool,
) -> SplitPlan | FusedPlan:
    """The plan of all calls with tensors like these. The kernels by tensor maps take no codes: wgmma's operands lie in
    shared memory in q's dtype."""
    call = Call(q, k, block_table, settings, addresses_aligned)
    if k.dtype != q.dtype:
        return SplitPlan(on, call, q, k, scale_head, None)
    persistent = persistent_for(on, q.dtype, call)
    fused = persistent is None or fills_two_waves(on, call)
    plan = fused_for(on, call, q, k) if fused else None
    return plan or SplitPlan(on, call, q, k, scale_head, persistent)


def persistent_for(on: OpOn, dtype: torch.dtype, call: Call) -> Loaded | None:
    """The persistent kernel where there is one and it is the faster: of a contiguous cache with tensor maps, for few
    rows, as many heads of keys of all sequences as there are multiprocessors, and caches as long as its row says."""
    kernel, shape = on.kernels.get(f"{NAME}_persistent"), call.shape
    if kernel is None or not call.aligned or call.paged or call.settings.splits or not call.mapped(on):
        return None
    key, width = (dtype, padded_head_dim(shape.dim), True), shape.kv_heads
    if not kernel.serves(key) or shape.batch * width < on.multiprocessors:
        return None
    loaded = kernel(key, shape.dim)
    numbers = loaded.numbers
    workers = on.multiprocessors * numbers["programs_per_multiprocessor"] // width
    blocks = shape.batch * -(-shape.capacity // numbers["block_n"])
    long = width * blocks >= numbers["min_blocks_per_multiprocessor"] * on.multiprocessors
    few = call.rows <= numbers["max_rows"]
    return loaded if few and workers and long and blocks * workers <= MAX_PRODUCT else None


def fused_for(on: OpOn, call: Call, q: Tensor, k: Tensor) -> FusedPlan | None:
    """None where there is no kernel that combines its own parts for the call."""
    shape, asked = call.shape, call.settings.splits
    kernel = on.kernels.get(f"{NAME}_fused")
    if kernel is None or not call.aligned or not call.mapped(on) or not 0 < shape.batch <= GRID_DEPTH:
        return None
    block_m = 1 << max(call.rows - 1, FEWEST_ROWS - 1).bit_length()
    key = q.dtype, fused_head_dim(shape.dim), keys_of(call), block_m, True
    if not call.rows or not kernel.serves(key):
        return None
    loaded = kernel(key, shape.dim)
    numbers = loaded.numbers
    programs = shape.batch * shape.kv_heads
    places = numbers["programs_per_multiprocessor"] * on.multiprocessors
    parts = parts_of_room(on, call, numbers, programs)
    whole = q.dtype, fused_head_dim(shape.dim), "whole", block_m, True
    if call.paged and asked < 2 and not parts and programs > places and kernel.serves(whole):
        return FusedPlan(on, kernel(whole, shape.dim), call, q, k, 1)
    # A program that loads each block by one instruction can keep a multiprocessor busy: one wave of such, where there
    # is one. Pages of 64: 1 x 8192 keys in 16 splits 12.6 us, in 32 13.8 us; 8 x 8192 in 4, of two waves, 65 us.
    one_wave = (
        numbers["box_keys"] == numbers["block_n"]
        and programs * (4 if call.paged else 1) <= on.multiprocessors
    )
    most = on.multiprocessors // programs if one_wave else MAX_SPLITS
    if parts and programs > places:
        most = parts  # full tables would be best in up to 32, sequences of few keys not
    splits = max(call.splits(on, numbers, shape.kv_heads, most), parts)
    if splits == 1 and not asked and not parts and not suits_whole(on, call, numbers, programs):
        return None
    blocks = max(call.blocks(numbers["block_n"]), 1)
    elements = splits * shape.kv_heads * numbers["block_m"] * numbers["head_dim"]
    if splits * splits * blocks >= RECIPROCAL or elements >= PARTIAL_ELEMENTS:
        return None
    return FusedPlan(on, loaded, call, q, k, splits)


def parts_of_room(on: OpOn, call: Call, numbers: Mapping[str, int], programs: int) -> int:
    """In how many parts the fused kernel splits sequences in pages at least, since those of a batch are of different
    lengths as a rule, and the host knows none of them: by what their tables have room for. 0 where that is not for two
    parts of PART_KEYS, or says nothing. Dimension 128, NVIDIA H200, FlashAttention-3 in brackets: 8 sequences of 1024
    to 32768 keys in 8 parts 135 us, in 4 157 (160); 32 of 128 to 8192 in 4 138, in one 151 (154), in pages of 16 141
    and 187 (155), 32 of 8192 in 2 249, in one 244; 64 of 128 to 8192 in 4 263, in one 281 (279). From WAVES waves of
    programs on they are one part each: 128 of 8192 keys with 64 heads 953 us, in two 959 (956). By the row of "whole",
    of which more programs run at once, these are 1061, and 64 of 128 to 8192 292; but 256 of 96 keys, with room for
    8192, 31, and 40 here (64)."""
    keys = call.blocks(numbers["block_n"]) * numbers["block_n"]
    several = call.paged and call.shape.batch > 1 and not call.settings.splits
    if not several or keys < 2 * PART_KEYS or numbers["head_dim"] != WHOLE_DIM:
        return 0
    if programs >= WAVES * numbers["programs_per_multiprocessor"] * on.multiprocessors:
        return 1
    return min(keys // PART_KEYS, FEW_PARTS if programs > on.multiprocessors else MORE_PARTS)


def fills_two_waves(on: OpOn, call: Call) -> bool:
    """Whether whole sequences of a contiguous cache are two waves of the fused kernel's programs, one a multiprocessor,
    that leave few multiprocessors idle: 32 x 8192 keys 240 us (torch 240, the persistent kernel 258), 32 x 32768 941
    (936, 947); but 17 x 8192, with most of the second wave idle, 175 (135, in 4 parts 145). NVIDIA H200."""
    idle = 2 * on.multiprocessors - call.shape.batch * call.shape.kv_heads
    return not call.paged and call.shape.dim == WHOLE_DIM and 0 <= idle <= on.multiprocessors // 16


def suits_whole(on: OpOn, call: Call, numbers: Mapping[str, int], programs: int) -> bool:
    """Whether the fused kernel is the faster where it splits no sequence. In pages: where all programs run at once, of
    dimension 128 (32 sequences of 96 keys 8.5 us, by the split kernel 9.6 us; of dimension 64, pages of 16: slower). Of
    a contiguous cache: of more than ONE_WAVE_KEYS of dimension 128 only where two waves are full (12 x 16384 keys: 214
    us, which is 0.88 of a copy; the split kernel had 0.99 to 1.04 of it at such sizes). NVIDIA H200."""
    if call.paged:
        places = numbers["programs_per_multiprocessor"] * on.multiprocessors
        return numbers["head_dim"] == WHOLE_DIM and programs <= places
    block_n = numbers["block_n"]
    few_keys = call.blocks(block_n) * block_n <= ONE_WAVE_KEYS
    return numbers["head_dim"] != WHOLE_DIM or few_keys or fills_two_waves(on, call)


def keys_of(call: Call) -> str:
    """Of the fused kernel's axis "keys", for sequences that may be split."""
    if not call.paged:
        return "contiguous"
    large = call.shape.page_size >= LARGE_PAGE and fused_head_dim(call.shape.dim) == WHOLE_DIM
    return "large_pages" if large else "pages"


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
