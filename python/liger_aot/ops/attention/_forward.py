"""How attention's forward is launched: from a call's shapes and settings to a kernel, its grid and its arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError
from liger_aot.runtime.dispatch import DTYPE_NAMES, REMEMBERED, Loaded, OpOn
from liger_aot.runtime.workspaces import StreamWords

LOG2_E = math.log2(math.e)
LONGEST = 1 << 30  # of a sequence: a row's number and a bound add up in 32 bits
LARGEST_STRIDE = 1 << 31  # in elements; of a tensor map 2^39
GROUP_ROWS = 64  # rows of Q that one warp group owns
ADDRESS_UNIT = 16  # bytes
TILE_UNIT = 16  # elements: what kernels of tiles assume sizes and strides to be multiples of
COUNTERS = 1  # words: the scheduler's two zeros, of 32 bits each
PACKED = "thd"  # the layout (token, head, dim) of sequences one behind the other


class Shape(NamedTuple):
    batch: int
    heads: int
    kv_heads: int
    len_q: int
    len_k: int
    dim: int


class Settings(NamedTuple):
    """As the op takes them, in its order. A bound of -1 is none; rows and keys are aligned at their ends."""

    scale: float
    left: int
    right: int
    softcap: float
    layout: str
    deterministic: bool = False  # gradients of the same bits every time


def shape_of(q: Tensor, k: Tensor, layout: str) -> Shape:
    """What is packed counts as one sequence."""
    if layout == PACKED:
        return Shape(1, q.shape[1], k.shape[1], q.shape[0], k.shape[0], q.shape[2])
    length, head = (1, 2) if layout == "bshd" else (2, 1)
    a, b = q.shape, k.shape
    return Shape(a[0], a[head], b[head], a[length], b[length], a[3])


def bounded(shape: Shape, settings: Settings) -> Settings:
    """The settings without the bounds that bind no row."""
    left, right = settings.left, settings.right
    return settings._replace(
        left=-1 if left >= shape.len_k - 1 else left, right=-1 if right >= shape.len_q - 1 else right
    )


def fits(t: Tensor, unit: int) -> bool:
    """Whether a kernel can read ``t``, whose last dimension is contiguous: the address is a multiple of 16 bytes, sizes
    and strides of ``unit`` elements."""
    outer = zip(t.shape[:-1], t.stride()[:-1], strict=True)
    return (
        not t.data_ptr() % ADDRESS_UNIT
        and not t.shape[-1] % unit
        and all(size == 1 or (stride % unit == 0 and stride < LARGEST_STRIDE) for size, stride in outer)
    )


def fitted(t: Tensor, unit: int) -> Tensor:
    """``t``, or a copy that ``fits``, with columns of zeros at its end where they are needed."""
    if fits(t, unit):
        return t
    n = t.shape[-1]
    wide = t.new_zeros((*t.shape[:-1], -(-n // unit) * unit))
    wide[..., :n].copy_(t)
    return wide


class Maps:
    """Tensor maps of one layout by address: memory comes back to the same places."""

    __slots__ = ("_encode", "_known", "_rest")

    def __init__(
        self, encode: Callable[..., Any], loaded: Loaded, argument: str, t: Tensor, layout: str
    ) -> None:
        """For tensors like ``t``: over (batch, head, row, column), as the kernels see them."""
        order = (0, 2, 1, 3) if layout == "bshd" else (0, 1, 2, 3)
        box, swizzle = loaded.variant.maps[argument]
        sizes = tuple(t.shape[i] for i in order)
        # the stride of a dimension of one element is free; the driver checks it all the same
        strides = tuple(t.stride(i) if t.shape[i] > 1 else ADDRESS_UNIT for i in order[:-1])
        self._encode = encode
        self._rest = (DTYPE_NAMES[t.dtype], sizes, (*strides, 1), box, swizzle)
        self._known: dict[int, Any] = {}

    def at(self, address: int) -> Any:
        known = self._known.get(address)
        if known is None:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            known = self._known[address] = self._encode(address, *self._rest)
        return known


class GroupsPlan:
    """A forward by warp groups, for all calls with tensors like these."""

    def __init__(self, on: OpOn, q: Tensor, k: Tensor, v: Tensor, settings: Settings) -> None:
        shape = shape_of(q, k, settings.layout)
        loaded = groups_kernel(on, q.dtype, shape, settings)
        numbers = loaded.numbers
        tiles_a_head = -(-shape.len_q // (GROUP_ROWS * numbers["warp_groups"]))
        all_heads = shape.batch * shape.heads
        tiles = checked_tiles(shape, tiles_a_head)
        section = section_of(shape, numbers["cache_megabytes"], q.element_size())
        self._on, self._loaded = on, loaded
        self._programs = min(tiles, on.multiprocessors * loaded.variant.resident)
        self._numbers = (
            shape.len_q,
            *scales_of(settings),
            tiles,
            tiles_a_head,
            shape.heads,
            all_heads,
            shape.heads // shape.kv_heads,
            section * tiles_a_head,
            section,
            shape.len_q,
            shape.len_k,
            *bounds_of(shape, settings),
        )
        assert on.tensor_map is not None
        o = torch.empty(q.shape, dtype=q.dtype, device="meta")
        named = (("Q", q), ("K", k), ("V", v), ("Y", o))
        self._maps = tuple(Maps(on.tensor_map, loaded, name, t, settings.layout).at for name, t in named)
        self._lse_shape = (shape.batch, shape.heads, shape.len_q)
        self._counters = on.plans.setdefault("counters", StreamWords(q.device))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        on = self._on
        o = q.new_empty(q.shape)
        lse = q.new_empty(self._lse_shape, dtype=torch.float32)
        stream = on.stream(on.device)
        q_map, k_map, v_map, o_map = self._maps
        self._loaded.launch(
            on.device,
            stream,
            self._programs,
            1,
            1,
            q_map(q.data_ptr()),
            k_map(k.data_ptr()),
            v_map(v.data_ptr()),
            o_map(o.data_ptr()),
            lse.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            self._counters.on(stream, COUNTERS).data_ptr(),
            *self._numbers,
        )
        return o, lse


def groups_kernel(on: OpOn, dtype: torch.dtype, shape: Shape, settings: Settings) -> Loaded:
    """The kernel by warp groups for a call: a causal one over few keys may have one of its own."""
    kernel, key = "flash_attention_forward", (dtype, True)
    if settings.left >= 0 or settings.softcap:
        kernel += "_local"
    elif settings.right >= 0:
        short = on.kernels.get(short_kernel(shape.dim))
        if short is not None and shape.len_k <= (loaded := short(key, shape.dim)).numbers["longest"]:
            return loaded
        kernel += "_causal"
    return on.kernels[kernel](key, shape.dim)


def short_kernel(dim: int) -> str:
    """That of causal calls over few keys; a pack need not have it."""
    return f"flash_attention_forward_short_{max(-(-dim // 32) * 32, 64)}"


class TilesPlan:
    """A forward by programs of one tile each, for all calls with tensors like these."""

    def __init__(self, on: OpOn, q: Tensor, k: Tensor, v: Tensor, settings: Settings) -> None:
        shape = shape_of(q, k, settings.layout)
        loaded = on.kernels["flash_attention_forward_tiles"]((q.dtype, True), shape.dim)
        tiles_a_head = -(-shape.len_q // loaded.numbers["block_m"])
        self._on, self._loaded = on, loaded
        self._programs = checked_tiles(shape, tiles_a_head)
        o = torch.empty(q.shape, dtype=q.dtype, device="meta")
        self._numbers = (
            *(stride for t in (o, q, k, v) for stride in strides_of(t, settings.layout)),
            *scales_of(settings),
            tiles_a_head,
            heads_in_turns(on, loaded, tiles_a_head, settings),
            shape.heads,
            shape.heads // shape.kv_heads,
            shape.dim,
            shape.len_q,
            shape.len_k,
            *bounds_of(shape, settings),
        )
        self._lse_shape = (shape.batch, shape.heads, shape.len_q)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        on = self._on
        o = q.new_empty(q.shape)
        lse = q.new_empty(self._lse_shape, dtype=torch.float32)
        self._loaded.launch(
            on.device,
            on.stream(on.device),
            self._programs,
            1,
            1,
            o.data_ptr(),
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            lse.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            *self._numbers,
        )
        return o, lse


def checked_tiles(shape: Shape, tiles_a_head: int) -> int:
    """Tiles in all heads of q; ArgumentError where they or the lengths are too many for 32 bits."""
    tiles = tiles_a_head * shape.batch * shape.heads
    if tiles >= 1 << 31 or max(shape.len_q, shape.len_k) >= LONGEST:
        raise ArgumentError(
            f"flash_attention: {shape.batch} x {shape.heads} heads of {shape.len_q} rows and {shape.len_k} keys are "
            f"too many: lengths must be below {LONGEST}, tiles of rows below 2^31"
        )
    return tiles


def heads_in_turns(on: OpOn, loaded: Loaded, tiles_a_head: int, settings: Settings) -> int:
    """How many heads at a time take turns to start a tile, of kernels with a program a tile. With a bound tiles differ:
    as many as fit onto the GPU together, so that no long tile starts late."""
    if settings.left < 0 and settings.right < 0:
        return 1
    return max(1, on.multiprocessors * loaded.variant.resident // tiles_a_head)


def section_of(shape: Shape, megabytes: int, element_bytes: int) -> int:
    """Heads of q whose keys and values fit into L2 together: within them masked tiles go longest first."""
    bytes_a_head = 2 * shape.len_k * shape.dim * element_bytes
    section = max(1, (megabytes << 20) // bytes_a_head) * (shape.heads // shape.kv_heads)
    return min(shape.batch * shape.heads, section)


def scales_of(settings: Settings) -> tuple[float, float]:
    """What scores are multiplied by in base 2, and what before a soft cap's tanh."""
    cap = settings.softcap
    return (cap or settings.scale) * LOG2_E, settings.scale / cap if cap else 0.0


def bounds_of(shape: Shape, settings: Settings) -> tuple[int, int]:
    """(right, left): row r sees keys from r + left on, before r + right."""
    past = shape.len_k - shape.len_q
    right = past + settings.right + 1 if settings.right >= 0 else LONGEST
    return right, past - settings.left if settings.left >= 0 else -LONGEST


def strides_of(t: Tensor, layout: str) -> tuple[int, int, int]:
    """(batch, head, row) in elements; that of a dimension of one element is free."""
    strides = [stride if size > 1 else ADDRESS_UNIT for size, stride in zip(t.shape, t.stride(), strict=True)]
    if layout == PACKED:
        return 0, strides[1], strides[0]
    return (strides[0], strides[2], strides[1]) if layout == "bshd" else (strides[0], strides[1], strides[2])


def unit_of(on: OpOn) -> int:
    """What sizes and strides must be multiples of, in elements."""
    return 8 if by_groups(on) else TILE_UNIT


def by_groups(on: OpOn) -> bool:
    return "flash_attention_forward" in on.kernels


def plan_for(on: OpOn, q: Tensor, k: Tensor, v: Tensor, settings: Settings) -> GroupsPlan | TilesPlan:
    """The way of a call with tensors like these, all of which ``fits``, on their device."""
    settings = bounded(shape_of(q, k, settings.layout), settings)
    return (GroupsPlan if by_groups(on) else TilesPlan)(on, q, k, v, settings)
