"""What paged attention accepts and how it is launched: from a call's shapes and settings to its kernels, how they split
keys, and the arguments. Nothing here looks at a length or a block table of a GPU: those are on the device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.attention._checks import (
    check_caches_alike,
    check_dim,
    check_heads,
    check_integers,
    check_operand,
    check_page_size,
    check_sinks,
)
from liger_aot.ops.attention._operands import (
    ADDRESS_UNIT,
    COUNTER_WORDS,
    LARGEST_STRIDE,
    MAX_SEQLEN,
    TILE_UNIT,
    VARLEN,
    WARP_GROUP_ROWS,
    Settings,
    TensorMapCache,
    scales_of,
)
from liger_aot.ops.attention._varlen import (
    LARGEST_BLOCK,
    MAX_TOKENS,
    bytes_before,
    check_starts,
    map_operand,
    tiles_of,
    token_strides,
)
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.kv_cache import FP8, check_scales, scale_head
from liger_aot.ops.op import check_same_device, check_tensor
from liger_aot.ops.split_kv import DECODING, MAX_SPLITS, PAGED, best_splits
from liger_aot.runtime import device_errors
from liger_aot.runtime.dispatch import Loaded, OpOn

NAME = "flash_attention_paged"
HEAD_DIMS = (64, 128, 256)  # that kernels are written for; others run as the next
BOXES = (64, 16)  # keys of a TMA box, which pages are multiples of
MAP_STRIDE = 1 << 38  # elements: a tensor map's strides are below
PARTIAL_ELEMENTS = 1 << 28  # of all parts: 1 GiB
NARROW_ROWS = 16  # of a head of keys, in one tile by plain kernels
LONG_KEYS = 512  # of a sequence: fewer are faster by plain kernels where all multiprocessors have some
FEW_ROWS = 128  # of a head of keys: with more they are worth the forward kernel, which has a tile a head of q
SPLIT_BLOCK = 1.15  # what a block of keys takes the split kernel, in blocks of the forward kernel
ROWS_COMBINED = 5  # in the time of a key of the forward kernel
COMBINE_PROGRAMS = 32  # of a multiprocessor, which walk the rows, where most may have nothing to combine
TAIL_PROGRAMS = 8  # at most, of plain kernels, for tokens behind the last sequence


def head_dim_of(dim: int) -> int:
    """The kernels' head dimension for tensors of ``dim``; ``check_dim`` refuses larger ones."""
    return next((width for width in HEAD_DIMS if dim <= width), HEAD_DIMS[-1])


class PagedSettings(NamedTuple):
    """As the op takes them, in its order. A bound of -1 is none; 0 splits leave their number to the profile, 0 as
    max_seqlen_k the longest sequence to the block table."""

    max_seqlen_q: int
    max_seqlen_k: int
    scale: float
    left: int
    right: int
    softcap: float
    splits: int


class PagedShape(NamedTuple):
    tokens: int
    heads: int
    kv_heads: int
    dim: int
    pages: int
    page_size: int
    sequences: int
    capacity: int  # keys of a sequence, at most

    @property
    def ratio(self) -> int:
        """Heads of q a head of k."""
        return self.heads // self.kv_heads if self.kv_heads else 1


def paged_shape(q: Tensor, k: Tensor, block_table: Tensor, max_seqlen_k: int) -> PagedShape:
    capacity = block_table.shape[1] * k.shape[1]
    tokens, heads, dim = q.shape
    capacity = min(capacity, max_seqlen_k) if max_seqlen_k else capacity
    pages, page_size, kv_heads, _ = k.shape
    return PagedShape(tokens, heads, kv_heads, dim, pages, page_size, block_table.shape[0], capacity)


# ---- What is accepted ----


def check_paged(op: str, tensors: Tensors, settings: PagedSettings) -> None:
    """Raise for everything that is wrong with a call, but for what its starts, lengths and block table hold."""
    q, k, v, cu_q, seqused_k, block_table, sinks, k_scale, v_scale = tensors
    check_operand(op, "q", q, q, 3)
    check_dim(op, q.shape[2])
    _check_caches(op, q, k, v)
    check_heads(op, q.shape[1], k.shape[2], "k_cache")
    for name, t in (("cu_seqlens_q", cu_q), ("seqused_k", seqused_k), ("block_table", block_table)):
        check_integers(op, name, t, q)
    if seqused_k.dim() != 1:
        raise ArgumentError(f"{op}: seqused_k must be of shape (sequences,), got {tuple(seqused_k.shape)}")
    count = seqused_k.shape[0]
    if cu_q.shape != (count + 1,):
        raise ArgumentError(
            f"{op}: cu_seqlens_q must be of shape ({count + 1},): where each of seqused_k's sequences starts, then "
            f"where the last one ends; got {tuple(cu_q.shape)}"
        )
    if block_table.dim() != 2 or block_table.shape[0] != count:
        raise ArgumentError(
            f"{op}: block_table must be of shape ({count}, pages of a sequence), a row for each of seqused_k's "
            f"sequences; got {tuple(block_table.shape)}"
        )
    if block_table.shape[1] > 1 and block_table.stride(1) != 1:
        raise ArgumentError(
            f"{op}: rows of block_table must be contiguous, got strides {block_table.stride()}"
        )
    shape = paged_shape(q, k, block_table, settings.max_seqlen_k)
    if (shape.tokens + LARGEST_BLOCK * (count + 1)) * shape.ratio >= MAX_TOKENS:
        raise ArgumentError(
            f"{op}: {shape.tokens} tokens in {count} sequences, {shape.ratio} heads of q for each of k_cache, are too "
            f"many: tokens and {LARGEST_BLOCK} times the sequences, times those heads, must be below {MAX_TOKENS}"
        )
    if (words := count * block_table.stride(0)) >= 1 << 31:
        raise ArgumentError(f"{op}: block_table must end within 2^31 elements, got {words}")
    if shape.capacity >= MAX_SEQLEN:
        raise ArgumentError(f"{op}: a sequence may have fewer than {MAX_SEQLEN} keys, got {shape.capacity}")
    check_sinks(op, sinks, q, shape.heads)
    check_scales(op, k_scale, v_scale, "k_cache", k, "q", q)


def _check_caches(op: str, q: Tensor, k: Any, v: Any) -> None:
    """Strides and sizes that the kernels read 16 elements at a time; a cache is never copied."""
    for name, t in (("k_cache", k), ("v_cache", v)):
        if not isinstance(t, Tensor):
            raise ArgumentTypeError(f"{op}: {name} must be a torch.Tensor, got {type(t).__name__}")
        if t.dtype not in (q.dtype, *FP8):
            allowed = ", ".join(str(d).removeprefix("torch.") for d in FP8)
            raise ArgumentTypeError(
                f"{op}: {name} must be of q's dtype {q.dtype} or {allowed}, got {t.dtype}"
            )
        check_same_device(op, name, t, "q", q)
        if t.dim() != 4:
            raise ArgumentError(
                f"{op}: {name} must be (pages, page_size, kv_heads, dim), got shape {tuple(t.shape)}"
            )
    check_caches_alike(op, q, k, v)
    if k.shape[3] > 1 and k.stride(3) != 1:
        raise ArgumentError(
            f"{op}: the last dimension of k_cache must be contiguous, got strides {k.stride()}"
        )
    sizes = list(zip(k.shape, k.stride(), strict=True))
    if k.shape[3] % TILE_UNIT or any(size > 1 and stride % TILE_UNIT for size, stride in sizes[:3]):
        raise ArgumentError(
            f"{op}: the last dimension and the strides of k_cache must be multiples of {TILE_UNIT} elements, got shape "
            f"{tuple(k.shape)} with strides {k.stride()}"
        )
    if any(size > 1 and stride >= LARGEST_STRIDE for size, stride in sizes[1:]):
        raise ArgumentError(
            f"{op}: strides of k_cache but the first must be below {LARGEST_STRIDE}, got {k.stride()}"
        )
    check_page_size(op, k)


def check_out(op: str, out: Any, q: Any) -> None:
    """Memory for the result, of q's shape, dtype and device."""
    check_tensor(op, "q", q)
    check_tensor(op, "out", out)
    check_same_device(op, "out", out, "q", q)
    if out.shape != q.shape:
        raise ArgumentError(f"{op}: out must have q's shape {tuple(q.shape)}, got {tuple(out.shape)}")
    if out.dtype != q.dtype:
        raise ArgumentTypeError(f"{op}: out must be of q's dtype {q.dtype}, got {out.dtype}")


def check_aligned(op: str, k: Tensor, v: Tensor) -> None:
    """Of what a GPU reads, and ``check`` can't see."""
    for name, t in (("k_cache", k), ("v_cache", v)):
        if t.data_ptr() % ADDRESS_UNIT:
            raise ArgumentError(
                f"{op}: {name} must start at a multiple of {ADDRESS_UNIT} bytes, got {t.data_ptr()}"
            )


def check_values(op: str, tensors: Tensors, settings: PagedSettings) -> None:
    """ArgumentError for starts, a length, or a page that is looked at, out of range; on the CPU alone, where looking
    costs nothing."""
    q, k, _, cu_q, seqused_k, block_table, *_ = tensors
    if q.device.type != "cpu":
        return
    shape = paged_shape(q, k, block_table, settings.max_seqlen_k)
    check_starts(op, "q", cu_q, shape.tokens, settings.max_seqlen_q)
    lengths = seqused_k.long()
    wrong = (lengths < 0) | (lengths > shape.capacity)
    if wrong.any():
        raise ArgumentError(
            f"{op}: seqused_k must be in [0, {shape.capacity}], what block_table or max_seqlen_k allows; got "
            f"{int(lengths[wrong][0])}"
        )
    first = torch.arange(block_table.shape[1], device=q.device) * shape.page_size
    queries = cu_q.long().diff()[:, None]
    looked_at = (first < lengths[:, None]) & (queries > 0)
    if settings.left >= 0:
        looked_at &= first + shape.page_size > lengths[:, None] - queries - settings.left
    wrong = looked_at & ((block_table < 0) | (block_table >= shape.pages))
    if wrong.any():
        raise ArgumentError(
            f"{op}: block_table must be in [0, {shape.pages}), the pages of k_cache, where a sequence has keys; got "
            f"{int(block_table[wrong][0])}"
        )


# ---- How it is launched ----


class Call:
    """What plans need of a call's shapes, strides and settings."""

    def __init__(self, q: Tensor, k: Tensor, block_table: Tensor, settings: PagedSettings) -> None:
        shape = self.shape = paged_shape(q, k, block_table, settings.max_seqlen_k)
        # bounds that bind no row are none
        left = -1 if settings.left >= shape.capacity - 1 else settings.left
        longest = self.longest = max(min(settings.max_seqlen_q, shape.tokens), 1)
        right = -1 if settings.right >= longest - 1 else settings.right
        self.settings = settings._replace(left=left, right=right)
        self.causal = settings.right >= 0
        self.dtypes = q.dtype, k.dtype
        self.right = min(settings.right + 1, MAX_TOKENS) if settings.right >= 0 else MAX_TOKENS
        self.left = -min(left, MAX_TOKENS) if left >= 0 else -MAX_TOKENS
        self.table_row = block_table.stride(0) if shape.sequences > 1 else 0
        self.strides = [
            stride if size > 1 else TILE_UNIT for size, stride in zip(k.shape, k.stride(), strict=True)
        ][:3]

    def mapped(self, on: OpOn) -> bool:
        """Whether the caches have tensor maps and their elements are operands of wgmma as they lie there."""
        strides = 0 < min(self.strides) <= max(self.strides) < MAP_STRIDE
        return on.tensor_map is not None and strides and self.dtypes[0] == self.dtypes[1]

    @property
    def scales(self) -> tuple[float, float]:
        s = self.settings
        return scales_of(Settings(s.scale, s.left, s.right, s.softcap, VARLEN))

    def sizes(self, few: int) -> tuple[int, ...]:
        """The kernels' arguments from ``sequences`` to ``few``, but for max_seqlen_q as the caller has it."""
        shape = self.shape
        bits = shape.page_size.bit_length() - 1
        return (
            shape.sequences, shape.tokens, shape.capacity, shape.pages, bits, self.right, self.left,
            # a length past the tokens is reported all the same
            min(self.settings.max_seqlen_q, shape.tokens), few,
        )  # fmt: skip

    def blocks(self, block_n: int, queries: int) -> int:
        """Of a tile's keys, at most."""
        blocks = -(-self.shape.capacity // block_n)
        if self.settings.left >= 0:  # a window may start inside a block
            blocks = min(blocks, -(-(self.settings.left + 1 + queries) // block_n) + 1)
        return max(blocks, 1)


class Results(NamedTuple):
    out: Tensor
    lse: Tensor


class TilesPlan:
    """By tiles of (token, head) pairs: all sequences, or those of at most ``few`` queries and tokens behind the last
    sequence; with tensor maps of the cache where ``split_for`` finds a kernel, else by plain kernels."""

    def __init__(self, on: OpOn, call: Call, q: Tensor, k: Tensor, out: Tensor, few: int | None) -> None:
        shape = call.shape
        queries = min(call.longest, call.longest if few is None else few)
        key = (*call.dtypes, head_dim_of(shape.dim))
        loaded = split_for(on, call, queries)
        self._mapped = loaded is not None
        if loaded is None:
            kernel = on.kernels[f"{NAME}_tiles"]
            loaded = kernel((*key, False, True), shape.dim)
            if queries * shape.ratio > loaded.numbers["block_m"]:
                loaded = kernel((*key, True, True), shape.dim)
        numbers = loaded.numbers
        rows = rows_of(numbers)
        self._on, self._loaded = on, loaded
        each = -(-queries * shape.ratio // rows)
        found = tiles_of(shape.tokens * shape.ratio, rows, shape.sequences)
        by_sequence = self._mapped or few is not None or shape.sequences * each < found
        slots = 0
        least = least_blocks(numbers)
        if self._mapped:
            tiles = shape.sequences * each
            mixed = few is not None
            if by_lengths(on, loaded, call, queries, mixed):
                slots = slots_for(on, loaded, call, queries, mixed)
        elif by_sequence:
            tail = max(min(-(-shape.tokens * shape.ratio // rows), TAIL_PROGRAMS), 1)
            tiles = shape.sequences * each + tail
        else:
            tiles, each = found, 0
        splits = 1
        if slots:
            split = slots > tiles_bound(call, rows, queries)
            splits = min(call.blocks(numbers["block_n"], queries) // least, MAX_SPLITS) if split else 1
            tiles, each = slots, 0
            parts = slots * shape.kv_heads * min(queries * shape.ratio, rows) if split else 0
            self._programs = slots * shape.kv_heads
        else:
            if each:
                splits = splits_for(on, loaded, call, queries, call.settings.splits)
            parts = splits * shape.sequences * queries * shape.heads if splits > 1 else 0
            self._programs = tiles * shape.kv_heads * splits
        if max(self._programs, parts) >= 1 << 31:
            raise ArgumentError(
                f"{NAME}: {shape.tokens} tokens of {shape.heads} heads in {shape.sequences} sequences are too many"
            )
        self._flag = device_errors.flag(NAME)
        out_head, out_token, q_head, q_token = token_strides(out, q)
        # where tiles are found by their number, none is another kernel's
        bound = queries if by_sequence else MAX_TOKENS
        self._maps: list[Any] = []
        if self._mapped:
            encode: Any = on.tensor_map
            self._maps = [TensorMapCache(encode, loaded, name, k, "bshd").at for name in "KV"]
        self._numbers = (
            out_token, out_head, q_token, q_head, *(() if self._mapped else call.strides), call.table_row,
            *call.scales, shape.ratio, shape.dim, *call.sizes(bound), tiles, shape.kv_heads, each, splits,
            *((least,) if self._mapped else ()),
        )  # fmt: skip
        self._partials, self._lse_partial = parts * (shape.dim + 1), 4 * parts * shape.dim
        self._rows = shape.sequences * queries * shape.heads
        if slots:
            self._rows = min(self._rows, on.multiprocessors * COMBINE_PROGRAMS)
        self._combine: Loaded | None = None
        if parts:
            self._combine = on.kernels[f"{NAME}_combine"]((q.dtype, key[-1], True), splits)
        self._combine_numbers = (
            out_token, out_head, shape.heads, shape.dim, shape.sequences, shape.tokens, queries, splits, slots, least,
            shape.capacity, call.left, shape.ratio, rows, numbers["block_n"].bit_length() - 1,
        )  # fmt: skip
        self._coded = call.dtypes[1] in FP8

    def __call__(self, tensors: Tensors, to: Results) -> None:
        q, k, v, cu_q, seqused_k, block_table, sinks, k_scale, v_scale = tensors
        on = self._on
        stream = on.stream(on.device)
        partials = q.new_empty(self._partials, dtype=torch.float32) if self._partials else None
        results = to.out.data_ptr(), to.lse.data_ptr(), at(partials), at(partials) + self._lse_partial
        scales: tuple[int, ...] = ()
        if self._coded:
            scales = at(k_scale), at(v_scale), scale_head(k_scale, v_scale)
        lists = at(sinks), cu_q.data_ptr(), seqused_k.data_ptr(), block_table.data_ptr(), self._flag
        if self._maps:
            k_map, v_map = self._maps
            self._loaded.launch(
                on.device, stream, self._programs, 1, 1, k_map(k.data_ptr()), v_map(v.data_ptr()), *results,
                q.data_ptr(), *lists, *self._numbers,
            )  # fmt: skip
        else:
            self._loaded.launch(
                on.device, stream, self._programs, 1, 1, *results, q.data_ptr(), k.data_ptr(), v.data_ptr(), *lists,
                *self._numbers, *scales,
            )  # fmt: skip
        if self._combine is not None:
            self._combine.launch(
                on.device, stream, self._rows, 1, 1, *results, at(sinks), cu_q.data_ptr(), seqused_k.data_ptr(),
                *self._combine_numbers,
            )  # fmt: skip


class WarpSpecializedPlan:
    """With tensor maps: all sequences, or those of more than ``few`` queries where that is not 0."""

    def __init__(
        self, on: OpOn, loaded: Loaded, call: Call, q: Tensor, k: Tensor, out: Tensor, few: int
    ) -> None:
        shape, numbers = call.shape, loaded.numbers
        tiles = tiles_of(shape.tokens, WARP_GROUP_ROWS * numbers["warp_groups"], shape.sequences)
        tiles *= shape.heads
        self._on, self._loaded = on, loaded
        self._programs = min(tiles, on.multiprocessors * loaded.variant.resident)
        self._flag = device_errors.flag(NAME)
        keys_in_l2 = (numbers["l2_megabytes"] << 20) // (2 * shape.dim * q.element_size())
        self._numbers = (
            call.table_row, *call.scales, tiles, shape.heads, shape.ratio, shape.dim, keys_in_l2, *call.sizes(few)
        )  # fmt: skip
        encode: Any = on.tensor_map
        self._q_map = TensorMapCache(encode, loaded, "Q", map_operand(q), "bhsd").at
        self._k_map, self._v_map = (TensorMapCache(encode, loaded, name, k, "bshd").at for name in "KV")
        self._y_map = TensorMapCache(encode, loaded, "Y", map_operand(out), "bhsd").at
        self._before = bytes_before(q), bytes_before(out)
        # The tile counter: zeros, which launches leave as zeros.
        self._counters = on.workspace("counters", q.device)

    def starts(self, q: Tensor, out: Tensor) -> list[int]:
        """Where the maps of q and of the result start: before 0 for a tensor that is larger than its own address."""
        return [t.data_ptr() - before for t, before in zip((q, out), self._before, strict=True)]

    def __call__(self, tensors: Tensors, to: Results) -> None:
        q, k, v, cu_q, seqused_k, block_table, sinks, *_ = tensors
        on = self._on
        stream = on.stream(on.device)
        q_at, y_at = self.starts(q, to.out)
        self._loaded.launch(
            on.device, stream, self._programs, 1, 1, self._q_map(q_at), self._k_map(k.data_ptr()),
            self._v_map(v.data_ptr()), self._y_map(y_at), to.lse.data_ptr(), at(sinks), cu_q.data_ptr(),
            seqused_k.data_ptr(), block_table.data_ptr(), self._flag,
            self._counters.on(stream, COUNTER_WORDS).data_ptr(), *self._numbers,
        )  # fmt: skip


class Plan:
    """All launches of calls with tensors like these."""

    def __init__(self, on: OpOn, tensors: Tensors, out: Tensor, settings: PagedSettings) -> None:
        q, k, _, _, _, block_table, *_ = tensors
        call = Call(q, k, block_table, settings)
        shape = call.shape
        self._lse_shape = shape.heads, shape.tokens
        self._tiles: TilesPlan | None = None
        self._groups: WarpSpecializedPlan | None = None
        loaded = warp_specialized_for(on, call)
        few = max(FEW_ROWS // shape.ratio, 1)
        if loaded and call.longest > few and split_for(on, call, call.longest) is None:
            mixed = few if shape.sequences > 1 else 0
            self._groups = WarpSpecializedPlan(on, loaded, call, q, k, out, mixed)
        if self._groups is None or shape.sequences > 1:
            self._tiles = TilesPlan(on, call, q, k, out, few if self._groups else None)
        self._whole = (on, call, like(q), like(k), like(out)) if self._groups else None

    def __call__(self, tensors: Tensors, out: Tensor | None, lse: Tensor | None) -> tuple[Tensor, Tensor]:
        q = tensors[0]
        to = Results(
            q.new_empty(q.shape) if out is None else out,
            q.new_empty(self._lse_shape, dtype=torch.float32) if lse is None else lse,
        )
        groups, tiles = self._groups, self._tiles
        if groups is not None and self._whole is not None and min(groups.starts(q, to.out)) < 0:
            groups, tiles = None, TilesPlan(*self._whole, None)  # no map can start there
        for plan in (groups, tiles):
            if plan is not None:
                plan(tensors, to)
        return to


def warp_specialized_for(on: OpOn, call: Call) -> Loaded | None:
    """The warp-specialised kernel for the call, None where there is none: it is for a right bound, and for caches of
    q's dtype."""
    kernel, shape = on.kernels.get(f"{NAME}_forward"), call.shape
    if kernel is None or not call.causal or not call.mapped(on):
        return None
    box = next(n for n in BOXES if not shape.page_size % n)
    mask = "local" if call.settings.left >= 0 or call.settings.softcap else "causal"
    key = call.dtypes[0], head_dim_of(shape.dim), mask, box, True
    return kernel(key, shape.capacity) if kernel.serves(key) else None


def split_for(on: OpOn, call: Call, queries: int) -> Loaded | None:
    """The kernel with tensor maps for sequences of at most so many queries, None where there is none or another is
    faster: the tiles for rows that they have in one, where all multiprocessors have some and keys are few or sequences
    very many; another kernel for more rows than a warp group's two tiles, unless splitting keys is worth combining
    them. Of those rows two warp groups a tile take long parts, one takes short ones of few tiles: two programs a
    multiprocessor start and end beside each other."""
    shape = call.shape
    rows = queries * shape.ratio
    narrow = split_kernel(on, call, False)
    if rows > FEW_ROWS:
        wide = split_kernel(on, call, True)
        if wide is None or not split_pays(on, wide, call, queries):
            return None
        keys = call.blocks(1, queries) // splits_for(on, wide, call, queries, 0)
        capped = call.settings.softcap and not wide.numbers.get("capped", 1)
        short = (
            narrow is not None
            and few_tiles(on, narrow, call, queries)
            and keys < wide.numbers.get("least_keys", 0)
        )
        return narrow if capped or short else wide
    if narrow is not None and rows <= NARROW_ROWS and shape.sequences * shape.kv_heads > on.multiprocessors:
        few = call.blocks(1, queries) < LONG_KEYS
        return None if few or not some_waves(on, narrow, call, queries) else narrow
    return narrow


def split_kernel(on: OpOn, call: Call, wide: bool) -> Loaded | None:
    """The split kernel of one or two warp groups a tile, by the largest boxes that it has and pages are multiples of;
    None without any."""
    kernel, shape = on.kernels.get(f"{NAME}_split"), call.shape
    if kernel is None or not call.mapped(on):
        return None
    keys = ((call.dtypes[0], head_dim_of(shape.dim), wide, n, True) for n in BOXES if not shape.page_size % n)
    key = next((key for key in keys if kernel.serves(key)), None)
    return None if key is None else kernel(key, shape.dim)


def some_waves(on: OpOn, loaded: Loaded, call: Call, queries: int) -> bool:
    """Whether each multiprocessor has a program of its own, and not very many, before keys are split."""
    here, waves = on.multiprocessors, loaded.numbers.get("waves", 0)
    return here < tiles_in(call, loaded.numbers, queries) <= waves * here * loaded.variant.resident


def by_lengths(on: OpOn, loaded: Loaded, call: Call, queries: int, mixed: bool) -> bool:
    """Whether the kernel's programs are told apart by the sequences' lengths, on the device: beside another kernel's
    sequences (``mixed``), which are told apart as well, or where each multiprocessor has a program and not many, and
    sequences may be longer than a part. Else their keys are split alike: with few programs lengths cost more to read
    than they save, many even out, and a caller who asks for splits has as many."""
    numbers = loaded.numbers
    if not numbers.get("waves", 0) or call.settings.splits:
        return False
    long = call.blocks(numbers["block_n"], queries) >= least_blocks(numbers)
    return mixed or (long and some_waves(on, loaded, call, queries))


def least_blocks(numbers: Mapping[str, int]) -> int:
    """Of a part, where keys are split by the sequences' lengths."""
    return max(numbers.get("least_keys", 0) // numbers["block_n"], 1)


def tiles_bound(call: Call, rows: int, queries: int) -> int:
    """Tiles of a head of keys, at most: each sequence has one and more."""
    shape = call.shape
    each = -(-queries * shape.ratio // rows)
    return min(shape.sequences * each, shape.tokens * shape.ratio // rows + shape.sequences)


def slots_for(on: OpOn, loaded: Loaded, call: Call, queries: int, mixed: bool) -> int:
    """How many programs a head of keys has where keys are split by the sequences' lengths. Beside another kernel's
    sequences (``mixed``) as many as if all were alike, for combining takes time that it needs."""
    shape, numbers = call.shape, loaded.numbers
    rows = rows_of(numbers)
    tiles = tiles_bound(call, rows, queries)
    parts = call.blocks(numbers["block_n"], queries) // least_blocks(numbers)
    if mixed:
        more = tiles * (splits_for(on, loaded, call, queries, 0) - 1)
    else:
        more = numbers["waves"] * on.multiprocessors * loaded.variant.resident // shape.kv_heads
    held = PARTIAL_ELEMENTS // (shape.kv_heads * min(queries * shape.ratio, rows) * (shape.dim + 1))
    return max(min(tiles + more, tiles * parts, held), tiles)


def split_pays(on: OpOn, loaded: Loaded, call: Call, queries: int) -> bool:
    """Whether many queries are faster with their keys split than by the forward kernel: where the split programs run in
    one wave and each reads so many keys fewer that this outweighs combining (1 x 256 on 512 or 2048 keys and 1 x 384 on
    8192 did not, 1 x 64 on 1024, 1 x 128 on 2048 and 4 x 64 on 4096 did: NVIDIA H200, 2026-11-28). Only a caller who
    says how long sequences are knows: a block table may be far longer."""
    if not call.settings.max_seqlen_k:
        return False
    shape, block = call.shape, loaded.numbers["block_n"]
    splits, blocks = splits_for(on, loaded, call, queries, 0), call.blocks(block, queries)
    if (
        splits == 1
        or tiles_in(call, loaded.numbers, queries) * splits > on.multiprocessors * loaded.variant.resident
    ):
        return False
    fewer = block * (blocks - SPLIT_BLOCK * -(-blocks // splits))
    return fewer * ROWS_COMBINED >= shape.sequences * queries * shape.heads


def rows_of(numbers: Mapping[str, int]) -> int:
    """Of a tile."""
    return numbers.get("block_m", WARP_GROUP_ROWS * numbers.get("warp_groups", 1))


def tiles_in(call: Call, numbers: Mapping[str, int], queries: int) -> int:
    """Of all sequences and heads of keys, with so many queries each."""
    shape = call.shape
    return shape.sequences * shape.kv_heads * -(-queries * shape.ratio // rows_of(numbers))


def few_tiles(on: OpOn, loaded: Loaded, call: Call, queries: int) -> bool:
    """Whether there are at most half as many tiles as multiprocessors."""
    return 2 * tiles_in(call, loaded.numbers, queries) <= on.multiprocessors


def splits_for(on: OpOn, loaded: Loaded, call: Call, queries: int, asked: int) -> int:
    """How many programs split a tile's keys: as many as ``asked`` for, 0: by the profile."""
    shape, numbers = call.shape, loaded.numbers
    blocks = call.blocks(numbers["block_n"], queries)
    most = PARTIAL_ELEMENTS // (shape.sequences * queries * shape.heads * (shape.dim + 1))
    most = max(min(most, MAX_SPLITS), 1)
    if asked:
        return min(asked, blocks, most)
    programs = tiles_in(call, numbers, queries)
    here, places = on.multiprocessors, loaded.variant.resident
    saturating = numbers.get("ctas_to_saturate", places)
    if few_tiles(on, loaded, call, queries) and queries * shape.ratio > rows_of(numbers):
        saturating = places  # tiles of a head share its keys: not memory is the bound
    costs = DECODING if "block_m" in numbers else PAGED
    startup = numbers["startup_blocks"]
    splits = best_splits(programs, blocks, places * here, saturating * here, startup, most, costs)
    lone, alone = numbers.get("lone_keys", 0), here // programs  # one program a multiprocessor
    if (
        lone
        and 1 < alone < splits
        and call.shape.capacity >= alone * lone
        and alone * programs * costs.multiprocessor_limit >= here
    ):
        return alone
    return splits


def like(t: Tensor) -> Tensor:
    """Of the same layout, without memory."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def at(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


# ---- In plain torch ----


def gathered(cache: Tensor, block_table: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The keys of all sequences one behind the other, (sequences * capacity, kv_heads, dim); pages that the cache does
    not have count as page 0."""
    known = (block_table >= 0) & (block_table < cache.shape[0])
    found = cache.view(torch.uint8) if cache.dtype in FP8 else cache
    found = found[torch.where(known, block_table, 0).long()]
    found = (found.view(cache.dtype) if cache.dtype in FP8 else found).to(dtype).flatten(0, 2)
    return found if scale is None else found * scale.to(dtype).reshape(-1, 1)


def seen_in_cache(
    cu_q: Tensor, seqused_k: Tensor, tokens: int, capacity: int, left: int, right: int
) -> tuple[Tensor, Tensor]:
    """(queries, keys of all sequences): whether a query sees a key; and whether a query is in any sequence. No value is
    looked at on the host."""
    count = seqused_k.shape[0]
    starts = cu_q.long()
    place = torch.arange(tokens, device=cu_q.device)
    sequence = (starts[1:, None] <= place).sum(0)
    inside = sequence < count
    lengths = torch.cat([starts.diff(), starts.new_zeros(1)])
    keys = torch.cat([seqused_k.long(), starts.new_zeros(1)])[sequence]
    own = (place - starts[sequence] + keys - lengths[sequence])[:, None]
    key = torch.arange(capacity, device=cu_q.device)
    seen = key < keys[:, None]
    if right >= 0:
        seen = seen & (key <= own + right)
    if left >= 0:
        seen = seen & (key >= own - left)
    of_own = sequence[:, None] == torch.arange(count, device=cu_q.device)
    return (of_own[:, :, None] & seen[:, None]).flatten(1), inside


def finite(t: Tensor, seen: Tensor) -> Tensor:
    """Zeros where no query sees a key: pages may hold anything there."""
    return torch.where(seen.any(0)[:, None, None], t, 0.0)


def neutral(lse: Tensor, inside: Tensor) -> Tensor:
    return torch.where(inside, lse, -math.inf)


def key_of(tensors: Sequence[Any], settings: Any) -> tuple[Any, ...]:
    """All that a plan depends on."""
    return (*(None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors), settings)
