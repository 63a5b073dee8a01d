"""The grouped matrix products of a mixture of experts: which kernels take them, and their launches.

``TileProducts`` are in plain Triton, for all dtypes, layouts and GPUs. ``WarpSpecializedProducts`` read weights and
rows by tensor maps. Both gather tokens as they go, but for the warp-specialised backward, whose tokens are gathered
before. Activations and gradients are written in the padded order of ``routing``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_aot.ops.moe._routing import LARGEST_TILE, Routing, Sizes, gathered, route
from liger_aot.runtime.dispatch import DTYPE_NAMES, Loaded, OpOn
from liger_aot.runtime.remembered import remember


class Tokens(NamedTuple):
    """Rows (tokens, hidden) with contiguous elements: an address and how many elements apart they are."""

    at: int
    stride: int


class TileProducts:
    """A call's products, from its routing on.

    Args:
        aligned: whether addresses, strides and sizes are multiples of 16.
        up: the binary of ``up``.
        tile_rows: of all products.
    """

    def __init__(
        self, on: OpOn, like: Tensor, sizes: Sizes, indices: Tensor, aligned: bool, up: Loaded, tile_rows: int
    ) -> None:
        self.on, self.like, self.sizes = on, like, sizes
        self.key = (like.dtype, aligned)
        self._up = up
        self.routing: Routing = route(on, indices, sizes, tile_rows)

    def rows(self, columns: int) -> Tensor:
        """Memory for a matrix in the padded order."""
        return self.like.new_empty((self.routing.rows, columns))

    def launch(self, loaded: Loaded, programs: int, *arguments: Any) -> None:
        loaded.launch(self.on.device, self.on.stream(self.on.device), programs, 1, 1, *arguments)

    def _tiles(self, loaded: Loaded, columns: int) -> tuple[int, int]:
        """(programs, column tiles) of a product of so many columns."""
        tiles = -(-columns // loaded.numbers["block_n"])
        return self.routing.tiles * tiles, tiles

    def up(self, x: Tokens, gate_up: Tensor, pre: Tensor | None) -> Tensor:
        """The activations (rows, inner); the projections of each pair go to ``pre``, if there is one."""
        _, hidden, _, inner, _ = self.sizes
        act, loaded, routing = self.rows(inner), self._up, self.routing
        programs, columns = self._tiles(loaded, 2 * inner)
        self.launch(
            loaded, programs, act.data_ptr(), 0 if pre is None else pre.data_ptr(), x.at, gate_up.data_ptr(),
            routing.row_pair, routing.row_token, routing.tile_expert, x.stride, hidden, inner, routing.tiles, columns,
            int(pre is not None),
        )  # fmt: skip
        return act

    def down(self, act: Tensor, down: Tensor) -> Tensor:
        """(rows, hidden) of the activations."""
        return self._product("fused_moe_down", act, down)

    def up_backward(self, dpre: Tensor, gate_up: Tensor) -> Tensor:
        """(rows, hidden), each expert's part of dx."""
        return self._product("fused_moe_up_backward", dpre, gate_up)

    def _product(self, kernel: str, a: Tensor, weight: Tensor) -> Tensor:
        _, hidden, _, inner, _ = self.sizes
        y, routing = self.rows(hidden), self.routing
        loaded = self.on.kernels[kernel](self.key, routing.tile_rows)
        programs, columns = self._tiles(loaded, hidden)
        self.launch(
            loaded, programs, y.data_ptr(), a.data_ptr(), weight.data_ptr(), routing.tile_expert, hidden, inner,
            routing.tiles, columns,
        )  # fmt: skip
        return y

    def down_backward(
        self, dy: Tokens, down: Tensor, pre: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(the gradient of gate and up, the weighted activations, partial sums of the routing weights' gradient)."""
        _, hidden, _, inner, _ = self.sizes
        routing, pairs = self.routing, self.sizes.pairs
        loaded = self.on.kernels["fused_moe_down_backward"](self.key, routing.tile_rows)
        programs, columns = self._tiles(loaded, inner)
        dpre, act, partials = self.rows(2 * inner), self.rows(inner), self._partials(columns)
        self.launch(
            loaded, programs, dpre.data_ptr(), act.data_ptr(), partials.data_ptr(), dy.at, down.data_ptr(),
            pre.data_ptr(), weights.data_ptr(), routing.row_pair, routing.row_token, routing.tile_expert, dy.stride,
            hidden, inner, pairs, routing.tiles, columns,
        )  # fmt: skip
        return dpre, act, partials

    def _partials(self, columns: int) -> Tensor:
        """Zeros: nobody writes those of pairs without an expert."""
        return self.like.new_zeros((columns, self.sizes.pairs), dtype=torch.float32)

    def down_weight_backward(self, dy: Tokens, act: Tensor) -> Tensor:
        """(experts, hidden, inner)"""
        _, hidden, experts, inner, _ = self.sizes
        return self._weight(self.like.new_empty((experts, hidden, inner)), dy, act, False)

    def gate_up_weight_backward(self, x: Tokens, dpre: Tensor) -> Tensor:
        """(experts, 2 inner, hidden)"""
        _, hidden, experts, inner, _ = self.sizes
        return self._weight(self.like.new_empty((experts, 2 * inner, hidden)), x, dpre, True)

    def _weight(self, dweight: Tensor, tokens: Tokens, rows: Tensor, gate_up: bool) -> Tensor:
        _, hidden, experts, inner, _ = self.sizes
        dtype, aligned = self.key
        loaded = self.on.kernels["fused_moe_weight_backward"](
            (dtype, gate_up, aligned), self.sizes.rows_an_expert
        )
        _, height, width = dweight.shape
        tiles = -(-height // loaded.numbers["block_m"]), -(-width // loaded.numbers["block_n"])
        self.launch(
            loaded, experts * tiles[0] * tiles[1], dweight.data_ptr(), tokens.at, rows.data_ptr(),
            self.routing.row_token, self.routing.offsets, tokens.stride, hidden, inner, *tiles,
        )  # fmt: skip
        return dweight

    def combine(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        """(tokens, hidden): the sums of each token's rows, times the float32 weights if there are any."""
        tokens, hidden, _, _, top_k = self.sizes
        out = self.like.new_empty((tokens, hidden))
        loaded = self.on.kernels["fused_moe_combine"](self.key, hidden)
        blocks = -(-hidden // loaded.block)
        self.launch(
            loaded, tokens * blocks, out.data_ptr(), rows.data_ptr(), self.routing.position,
            0 if weights is None else weights.data_ptr(), hidden, blocks, top_k,
        )  # fmt: skip
        return out


class WarpSpecializedProducts(TileProducts):
    """The same by persistent kernels with tensor maps; tiles have 128 rows."""

    _last: tuple[Tokens, Tensor] | None = None  # what was gathered last

    def up(self, x: Tokens, gate_up: Tensor, pre: Tensor | None) -> Tensor:
        _, hidden, _, inner, _ = self.sizes
        loaded, routing, act = self._up, self.routing, self.rows(inner)
        self._launch(
            loaded, 2 * inner, self._rows(loaded, "ACT", act), 0 if pre is None else pre.data_ptr(), x.at,
            self._weights(loaded, "B", gate_up, 2), routing.row_pair, routing.row_token, routing.tile_expert, x.stride,
            hidden, inner, after=(int(pre is not None),),
        )  # fmt: skip
        return act

    def _product(self, kernel: str, a: Tensor, weight: Tensor) -> Tensor:
        hidden, depth = self.sizes.hidden, a.shape[1]
        which, pair = ("down", 1) if kernel == "fused_moe_down" else ("gate_up", 2)
        loaded, y = self._loaded("product", which), self.rows(hidden)
        self._launch(
            loaded, hidden, self._rows(loaded, "OUTPUT", y), self._rows(loaded, "A", a),
            self._weights(loaded, "B", weight, pair), self.routing.tile_expert, depth,
        )  # fmt: skip
        return y

    def down_backward(
        self, dy: Tokens, down: Tensor, pre: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        _, hidden, _, inner, _ = self.sizes
        loaded, routing = self._loaded("down_backward"), self.routing
        dpre, act = self.rows(2 * inner), self.rows(inner)
        partials = self._partials(-(-inner // loaded.numbers["block_n"]))
        self._launch(
            loaded, inner, self._rows(loaded, "DPRE", dpre), self._rows(loaded, "ACT", act), partials.data_ptr(),
            self._rows(loaded, "A", self._gathered(dy)), self._weights(loaded, "B", down, 1), pre.data_ptr(),
            weights.data_ptr(), routing.row_pair, routing.tile_expert, hidden, inner, self.sizes.pairs,
        )  # fmt: skip
        return dpre, act, partials

    def _weight(self, dweight: Tensor, tokens: Tokens, rows: Tensor, gate_up: bool) -> Tensor:
        which, pair = ("gate_up", 2) if gate_up else ("down", 1)
        loaded = self._loaded("weight_backward", which)
        taken = self._gathered(tokens)
        a, b = (rows, taken) if gate_up else (taken, rows)
        experts, height, width = dweight.shape
        tiles = -(-height // LARGEST_TILE), -(-width // loaded.numbers["block_n"])
        self.launch(
            loaded, min(experts * tiles[0] * tiles[1], self.on.multiprocessors),
            self._weights(loaded, "DWEIGHT", dweight, pair), self._rows(loaded, "A", a), self._rows(loaded, "B", b),
            self.routing.offsets, self.routing.totals, experts, *tiles,
        )  # fmt: skip
        return dweight

    def _gathered(self, tokens: Tokens) -> Tensor:
        """(rows, hidden): the tokens in the padded order; of the result's gradient once for both kernels."""
        if self._last is None or self._last[0] != tokens:
            self._last = None
            self._last = (
                tokens,
                gathered(self.on, tokens.at, tokens.stride, self.like, self.sizes, self.routing),
            )
        return self._last[1]

    def _loaded(self, step: str, *axes: str) -> Loaded:
        return self.on.kernels[f"fused_moe_{step}_warp_specialized"](
            (self.like.dtype, *axes, True), self.sizes.rows_an_expert
        )

    def _launch(self, loaded: Loaded, columns: int, *before: Any, after: tuple[Any, ...] = ()) -> None:
        """A product of so many columns, whose last arguments are how many tiles there are."""
        programs, tiles = self._tiles(loaded, columns)
        self.launch(
            loaded, min(programs, self.on.multiprocessors), *before, self.routing.tiles, tiles, *after
        )

    def _rows(self, loaded: Loaded, argument: str, t: Tensor) -> Any:
        """A map of a matrix."""
        return self._map(loaded, argument, t, tuple(t.shape), (t.shape[1], 1))

    def _weights(self, loaded: Loaded, argument: str, t: Tensor, pair: int) -> Any:
        """A map over (expert, row / pair, row % pair, column): with 2, rows of the first and second half alternate."""
        experts, rows, columns = t.shape
        half = rows // pair
        sizes, strides = (experts, half, pair, columns), (rows * columns, columns, half * columns, 1)
        return self._map(loaded, argument, t, sizes, strides)

    def _map(
        self, loaded: Loaded, argument: str, t: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]
    ) -> Any:
        box, swizzle = loaded.variant.maps[argument]
        what = (t.data_ptr(), DTYPE_NAMES[t.dtype], sizes, strides, box, swizzle)
        known = self.on.plans.get(what)
        if known is None:
            assert self.on.tensor_map is not None
            known = remember(self.on.plans, what, self.on.tensor_map(*what))
        return known


def products(on: OpOn, like: Tensor, sizes: Sizes, indices: Tensor, aligned: bool) -> TileProducts:
    """A call's products, by warp-specialised kernels where there are any and experts have enough rows."""
    n, key = sizes.rows_an_expert, (like.dtype, aligned)
    kernel = on.kernels.get("fused_moe_up_warp_specialized")
    if kernel is not None and on.tensor_map is not None and kernel.serves(key):
        up = kernel(key, n)
        if n >= up.numbers["least_rows"]:
            return WarpSpecializedProducts(on, like, sizes, indices, aligned, up, LARGEST_TILE)
    up = on.kernels["fused_moe_up"](key, n)
    return TileProducts(on, like, sizes, indices, aligned, up, up.numbers["block_m"])
