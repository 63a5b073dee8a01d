"""A call's sizes, and the sorting of its pairs of tokens and experts: see csrc_triton/moe/routing.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_aot.runtime.dispatch import OpOn

WORDS = {torch.int32: 1, torch.int64: 2}  # 32-bit words an index
LARGEST_TILE = 128  # rows
_ALWAYS = (True,)  # the key of kernels with no axes and no generic variant


class Sizes(NamedTuple):
    """Of a problem; ``inner`` is the intermediate size of the experts."""

    tokens: int
    hidden: int
    experts: int
    inner: int
    top_k: int

    @property
    def pairs(self) -> int:
        return self.tokens * self.top_k

    @property
    def rows_an_expert(self) -> int:
        return -(-self.pairs // self.experts)


class Routing(NamedTuple):
    """The pairs sorted by expert, in the padded order: addresses on the device."""

    position: int  # (pairs,) a pair's row
    row_pair: int  # (tiles * tile_rows,) a row's pair
    row_token: int  # (tiles * tile_rows,) and its token
    tile_expert: int  # (tiles + 1,) a tile's expert, and how many tiles are used
    offsets: int  # (experts + 1,) the first row of each expert
    totals: int  # (experts,) the pairs of each
    tiles: int  # at most so many
    tile_rows: int
    memory: Tensor  # what they lie in

    @property
    def rows(self) -> int:
        return self.tiles * self.tile_rows


def route(on: OpOn, indices: Tensor, sizes: Sizes, tile_rows: int) -> Routing:
    """Sort the pairs of contiguous ``indices`` by expert."""
    pairs, experts, words = sizes.pairs, sizes.experts, WORDS[indices.dtype]
    count, scan, place = (
        on.kernels[f"fused_moe_{step}"](_ALWAYS, pairs) for step in ("count", "scan", "place")
    )
    chunks = -(-pairs // place.numbers["chunk"])
    tiles = (pairs + min(experts, pairs) * (tile_rows - 1)) // tile_rows
    lengths = (pairs, tiles * tile_rows, tiles * tile_rows, tiles + 1, experts + 1, experts, experts * chunks)
    memory = indices.new_empty(sum(lengths), dtype=torch.int32)
    places, at = [], memory.data_ptr()
    for length in lengths:
        places.append(at)
        at += 4 * length
    position, row_pair, row_token, tile_expert, offsets, totals, counts = places
    stream, device, indices_at = on.stream(on.device), on.device, indices.data_ptr()
    count.launch(device, stream, chunks, 1, 1, counts, indices_at, pairs, experts, chunks, words)
    scan.launch(device, stream, experts, 1, 1, counts, totals, chunks)
    place.launch(
        device, stream, chunks + tiles + 1, 1, 1,
        position, row_pair, row_token, tile_expert, offsets, indices_at, counts, totals, pairs, experts, chunks, tiles,
        sizes.top_k, words, tile_rows,
    )  # fmt: skip
    return Routing(position, row_pair, row_token, tile_expert, offsets, totals, tiles, tile_rows, memory)


def gathered(on: OpOn, at: int, stride: int, like: Tensor, sizes: Sizes, routing: Routing) -> Tensor:
    """(rows, hidden): each row's token of those at an address, ``stride`` elements apart; zeros in the padding. Of 16
    bits an element, all aligned."""
    n = sizes.hidden
    out = like.new_empty((routing.rows, n))
    loaded = on.kernels["fused_moe_gather"](_ALWAYS, n)
    blocks = -(-(n // 2) // loaded.block)
    loaded.launch(
        on.device, on.stream(on.device), -(-routing.rows // loaded.rows) * blocks, 1, 1,
        out.data_ptr(), at, routing.row_token, routing.tile_expert, stride // 2, n // 2, blocks, routing.tiles,
        routing.tile_rows,
    )  # fmt: skip
    return out
