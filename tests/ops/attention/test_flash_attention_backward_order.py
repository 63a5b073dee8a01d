"""The order in which attention's backward adds to dQ: the device code of the ordering warp, run as Python.

Programs run one after the other, in the order of their numbers. Where none of them then waits for a turn that is not
there, none waits for ever in any schedule that starts them in this order.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from csrc_triton.attention import attention_backward_groups as groups
from csrc_triton.attention import attention_backward_order as ordering
from csrc_triton.attention import tile_scheduler
from liger_aot.ops.attention._backward_groups import QUERY_HEADS_TAKE_TURNS, heads_in_order
from liger_aot.ops.attention._operands import MAX_SEQLEN

FIELDS = ("batch", "kv_head", "head", "key", "row", "rows", "steps")


class Number(int):
    """A scalar or an address of the device's."""

    def to(self, _: object) -> Number:
        return self

    def __add__(self, other: int) -> Number:
        return Number(int(self) + other)


class Device:
    """Memory of turns, from address 1 on, and the programs that added to what each is for, in order."""

    def __init__(self) -> None:
        self.program = self.programs = 0
        self.turns: dict[int, int] = {}
        self.added: dict[int, list[int]] = {}

    def assembly(self, what: object, _: str, operands: list[int], *rest: Any) -> None:
        at, number = operands
        if what is ordering.AWAIT:
            assert self.turns.get(at, 0) == number, "nobody passes this turn on"
            self.added.setdefault(at, []).append(self.program)
        else:
            assert what is ordering.PASS_ON
            self.turns[at] = number


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    gl = SimpleNamespace(
        program_id=lambda axis: made.program,
        num_programs=lambda axis: made.programs,
        maximum=max,
        minimum=min,
        static_range=range,
        where=lambda condition, a, b: a if condition else b,
        allocate_shared_memory=lambda dtype, shape, layout: {},
        inline_asm_elementwise=made.assembly,
        int32=None,
        int64=None,
    )
    swizzled = tile_scheduler.swizzled_tile.fn
    nothing = SimpleNamespace(arrive=lambda *_, **__: None, wait=lambda *_: None, MBarrierLayout=lambda: None)
    for module, instead in (
        (
            groups,
            {
                "gl": gl,
                "KeyTile": tile_of,
                "tile_at": groups.tile_at.fn,
                "swizzled_tile": swizzled,
            },
        ),
        (
            ordering,
            {
                "gl": gl,
                "mbarrier": nothing,
                "first_row": groups.first_row.fn,
                "next_rows": groups.next_rows.fn,
                "inner_heads": ordering.inner_heads.fn,
                "write_note": lambda notes, what, value: notes.__setitem__(what.value, value),
                "noted": lambda notes, what: notes[what.value],
                "tile_at": groups.tile_at.fn,
                "swizzled_tile": swizzled,
            },
        ),
        (tile_scheduler, {"tl": gl}),
    ):
        for name, value in instead.items():
            monkeypatch.setattr(module, name, value)
    return made


def tile_of(*values: int) -> SimpleNamespace:
    return SimpleNamespace(**dict(zip(FIELDS, map(Number, values), strict=True)))


@pytest.mark.parametrize(("block_m", "block_n"), [(64, 128), (128, 128), (64, 64)])
# keys before and behind its own that a row sees
@pytest.mark.parametrize(
    ("before", "after"), [*((None, n) for n in (None, 0, 63, 200, 1000)), (0, 0), (70, 5), (200, None)]
)
@pytest.mark.parametrize(
    ("len_q", "len_k"), [(1, 1), (512, 512), (300, 300), (777, 300), (300, 777), (1000, 40), (40, 1000)]
)
@pytest.mark.parametrize(("section", "warps", "ratio"), [(1, 1, 3), (3, 1, 2), (2, 3, 4)])
def test_turns(
    device: Device,
    len_q: int,
    len_k: int,
    before: int | None,
    after: int | None,
    block_m: int,
    block_n: int,
    section: int,
    warps: int,
    ratio: int,
) -> None:
    """Each block of rows of each query head is added to once by each block of keys that it sees, or sees in part; keys
    that no row sees have the first block."""
    batch, kv_heads = 2, 2
    bounded = 0 if before is after is None else 1 if before is None else 2
    right = len_k - len_q + after + 1 if after is not None else MAX_SEQLEN
    left = len_k - len_q - before if before is not None else None
    padded = -(-len_q // 128) * 128
    tiles = -(-len_k // block_n)
    z = SimpleNamespace(BLOCK_M=block_m, BLOCK_N=block_n, BOUNDED=bounded)
    order = SimpleNamespace(turn=SimpleNamespace(index=lambda _: None, shape=[warps]))
    order.added = order.turn
    order.inner = ordering.inner_heads(ratio, z)
    assert (order.inner > 0) == (bounded == 1 and ratio > QUERY_HEADS_TAKE_TURNS)
    wanted: dict[int, list[int]] = {}
    device.programs = batch * kv_heads * tiles
    missing = {(b, h, t) for b in range(batch) for h in range(kv_heads) for t in range(tiles)}
    for program in range(device.programs):
        device.program = program
        tile = ordering.tile_in_order.fn(tiles, section, kv_heads, ratio, len_q, right, z, left)
        missing.remove((tile.batch, tile.kv_head, tile.key // block_n))
        for w in range(warps):
            ordering.keep_order.fn(z, tile, Number(1), order, tiles, kv_heads * ratio, padded, right, w)
        if bounded == 1:
            order.walk = ordering.write_walk.fn(tile, padded, order.inner, z)
            walked_alike(tile, padded, order, z)
        first = (tile.batch * kv_heads + tile.kv_head) * ratio
        # the last row of the block sees the tile's first key, and the first one the last
        rows = [
            row
            for row in range(0, len_q, block_m)
            if row + block_m - 1 + right > tile.key and (left is None or row + left < tile.key + block_n)
        ]
        for head in range(first, first + ratio):
            for row in rows or [0]:
                at = 1 + head * (padded // block_m) + row // block_m
                wanted.setdefault(at, []).append(program)
    assert device.added == wanted and not missing


def walked_alike(tile: Any, padded: int, order: Any, z: Any) -> None:
    """The consumers go from block to block as the producer and the ordering warps do."""
    head, row = tile.head, groups.first_row.fn(tile, z, order)
    at, count = order.walk[ordering.START.value], 0
    place = at
    for _ in range(tile.steps):
        assert at == row - tile.row and place == (head - tile.head) * padded + at
        assert tile.head <= head and 0 <= at < tile.rows
        head, row = groups.next_rows.fn(head, row, tile, z, order)
        at, count, gap = ordering.next_step.fn(at, count, order)
        place += gap


@pytest.mark.parametrize("section", [None, 1, 2, 4, 100])
def test_longest_blocks_of_several_heads_start_together(device: Device, section: int | None) -> None:
    """Each block of keys once; heads in sections, longest first."""
    kv_heads, heads, tiles = 3, 6, 8
    z = SimpleNamespace(BLOCK_M=64, BLOCK_N=128, BOUNDED=1)
    device.programs = heads * tiles
    found = []
    for program in range(heads * tiles):
        device.program = program
        tile = groups.tile_of_keys.fn(tiles, section, kv_heads, 1, tiles * 128, 1, z)
        found.append((tile.batch * kv_heads + tile.kv_head, tile.key // 128, int(tile.steps)))
    together = min(section or 1, heads)
    sections = [found[i : i + together * tiles] for i in range(0, len(found), together * tiles)]
    assert sorted(found) == [(h, t, 16 - 2 * t) for h in range(heads) for t in range(tiles)]
    assert all(part == sorted(part, key=lambda one: (-one[2], one[0])) for part in sections)


def test_heads_that_take_turns_in_order() -> None:
    on: Any = SimpleNamespace(multiprocessors=132)
    narrow: Any = SimpleNamespace(numbers={})
    wide: Any = SimpleNamespace(numbers={"fillings": 2})
    assert [heads_in_order(on, narrow, tiles, 1, True) for tiles in (4, 128, 200)] == [33, 2, 1]
    assert [heads_in_order(on, wide, 32, ratio, False) for ratio in (1, 2, 3)] == [10, 10, 5]
    assert [heads_in_order(on, wide, 32, ratio, True) for ratio in (1, 2, 3)] == [10, 10, 20]
