"""What all of attention's launches are made of: a call's shape and settings, its tensors' strides and tensor maps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from liger_aot.errors import ArgumentError
from liger_aot.runtime.dispatch import DTYPE_NAMES, Loaded, OpOn
from liger_aot.runtime.remembered import remember

LOG2_E = math.log2(math.e)
MAX_SEQLEN = 1 << 30  # of a sequence: a row's number and a bound add up in 32 bits
LARGEST_STRIDE = 1 << 31  # in elements; of a tensor map 2^39
WARP_GROUP_ROWS = 64  # rows of Q that one warp group owns
ADDRESS_UNIT = 16  # bytes
TILE_UNIT = 16  # elements: what kernels without tensor maps assume sizes and strides to be multiples of
MAP_UNIT = 8  # elements: 16 bytes, what a tensor map's strides are multiples of
COUNTER_WORDS = 1  # of 64 bits: the tile counter, two int32
VARLEN = "thd"  # the layout (token, head, dim) of sequences one behind the other
HEAD_DIMS = (64, 96, 128, 192, 256)  # that warp-specialised kernels are written for


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
    """All tokens of a varlen call count as one sequence."""
    if layout == VARLEN:
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


class TensorMapCache:
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
            known = remember(self._known, address, self._encode(address, *self._rest))
        return known


def checked_tiles(shape: Shape, tiles_per_head: int) -> int:
    """Tiles in all heads of q; ArgumentError where they or the lengths are too many for 32 bits."""
    tiles = tiles_per_head * shape.batch * shape.heads
    if tiles >= 1 << 31 or max(shape.len_q, shape.len_k) >= MAX_SEQLEN:
        raise ArgumentError(
            f"flash_attention: {shape.batch} x {shape.heads} heads of {shape.len_q} rows and {shape.len_k} keys are "
            f"too many: lengths must be below {MAX_SEQLEN}, tiles of rows below 2^31"
        )
    return tiles


def swizzle_heads(on: OpOn, loaded: Loaded, tiles_per_head: int, settings: Settings) -> int:
    """How many heads have interleaved tiles, of kernels with a program a tile. With a bound tiles differ: as many heads
    as fit onto the GPU together, so that no long tile starts last."""
    if settings.left < 0 and settings.right < 0:
        return 1
    return max(1, on.multiprocessors * loaded.variant.resident // tiles_per_head)


def scales_of(settings: Settings) -> tuple[float, float]:
    """What scores are multiplied by in base 2, and what before a soft cap's tanh."""
    cap = settings.softcap
    return (cap or settings.scale) * LOG2_E, settings.scale / cap if cap else 0.0


def bounds_of(shape: Shape, settings: Settings) -> tuple[int, int]:
    """(right, left): row r sees keys from r + left on, before r + right."""
    past = shape.len_k - shape.len_q
    right = past + settings.right + 1 if settings.right >= 0 else MAX_SEQLEN
    return right, past - settings.left if settings.left >= 0 else -MAX_SEQLEN


def strides_of(t: Tensor, layout: str) -> tuple[int, int, int]:
    """(batch, head, row) in elements; that of a dimension of one element is free."""
    strides = [stride if size > 1 else ADDRESS_UNIT for size, stride in zip(t.shape, t.stride(), strict=True)]
    if layout == VARLEN:
        return 0, strides[1], strides[0]
    return (strides[0], strides[2], strides[1]) if layout == "bshd" else (strides[0], strides[1], strides[2])


def padded_head_dim(dim: int) -> int:
    """The warp-specialised kernels' head dimension for tensors of ``dim``; ``check_dim`` refuses larger ones."""
    return next((width for width in HEAD_DIMS if dim <= width), HEAD_DIMS[-1])


def keys_of(shape: Sequence[int]) -> int:
    """How many keys a call with as many keys as queries has, by q's shape: what chooses a variant."""
    return shape[-3] if len(shape) > 2 else 1
