"""The tile scheduler of attention's backward and the semaphore that orders dQ: their device code, run as Python.

Programs run one after the other, in the order of their numbers. Where none of them then waits for a semaphore that
nobody has released, none waits for ever in any schedule that starts them in this order.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from csrc_triton.attention import backward_scheduler as scheduler
from csrc_triton.attention import tile_scheduler
from liger_aot.ops.attention._backward import MOST_HEADS_IN_ORDER, ordered_swizzle_heads
from liger_aot.ops.attention._operands import MAX_SEQLEN

FIELDS = ("batch", "kv_head", "head", "key", "row", "rows", "steps")


class Number(int):
    """A scalar or an address of the device's."""

    def to(self, _: object) -> Number:
        return self

    def __add__(self, other: int) -> Number:
        return Number(int(self) + other)


class Device:
    """Semaphores, from address 1 on, and the programs that added to what each is for, in order."""

    def __init__(self) -> None:
        self.program = self.programs = 0
        self.semaphores: dict[int, int] = {}
        self.added: dict[int, list[int]] = {}

    def assembly(self, what: object, _: str, operands: list[int], *rest: Any) -> None:
        at, number = operands
        if what is scheduler.ACQUIRE:
            assert self.semaphores.get(at, 0) == number, "nobody releases this semaphore"
            self.added.setdefault(at, []).append(self.program)
        else:
            assert what is scheduler.RELEASE
            self.semaphores[at] = number


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
    plain = ("first_block", "next_block", "interleaved_heads", "tile_at")
    changed = {
        "gl": gl,
        "mbarrier": nothing,
        "KeyTile": tile_of,
        "store_scalar": lambda to, i, value, warps: to.__setitem__(i.value, value),
        "load_scalar": lambda source, i, warps: source[i.value],
        "swizzled_tile": swizzled,
        **{name: getattr(scheduler, name).fn for name in plain},
    }
    for name, value in changed.items():
        monkeypatch.setattr(scheduler, name, value)
    monkeypatch.setattr(tile_scheduler, "tl", gl)
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
@pytest.mark.parametrize(("swizzle", "warps", "ratio"), [(1, 1, 3), (3, 1, 2), (2, 3, 4)])
def test_who_adds_to_which_block(
    device: Device,
    len_q: int,
    len_k: int,
    before: int | None,
    after: int | None,
    block_m: int,
    block_n: int,
    swizzle: int,
    warps: int,
    ratio: int,
) -> None:
    """Each block of rows of each query head is added to once by each tile of keys that it sees, or sees in part; keys
    that no row sees have the first block."""
    batch, kv_heads = 2, 2
    mask = 0 if before is after is None else 1 if before is None else 2
    right = len_k - len_q + after + 1 if after is not None else MAX_SEQLEN
    left = len_k - len_q - before if before is not None else None
    padded = -(-len_q // 128) * 128
    tiles = -(-len_k // block_n)
    z = SimpleNamespace(BLOCK_M=block_m, BLOCK_N=block_n, MASK=mask)
    semaphore = SimpleNamespace(ready=SimpleNamespace(index=lambda _: None, shape=[warps]))
    semaphore.added = semaphore.ready
    semaphore.interleaved = scheduler.interleaved_heads(ratio, z)
    assert (semaphore.interleaved > 0) == (mask == 1 and ratio > MOST_HEADS_IN_ORDER)
    wanted: dict[int, list[int]] = {}
    device.programs = batch * kv_heads * tiles
    missing = {(b, h, t) for b in range(batch) for h in range(kv_heads) for t in range(tiles)}
    for program in range(device.programs):
        device.program = program
        tile = scheduler.ordered_tile.fn(tiles, swizzle, kv_heads, ratio, len_q, right, z, left)
        missing.remove((tile.batch, tile.kv_head, tile.key // block_n))
        for w in range(warps):
            scheduler.semaphore_warp.fn(
                z, tile, Number(1), semaphore, tiles, kv_heads * ratio, padded, right, w
            )
        if mask == 1:
            semaphore.path = scheduler.write_path.fn(tile, padded, semaphore.interleaved, z)
            check_path(tile, padded, semaphore, z)
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


def check_path(tile: Any, padded: int, semaphore: Any, z: Any) -> None:
    """The consumers go from block to block as the producer and the semaphore warps do."""
    head, row = tile.head, scheduler.first_block(tile, z, semaphore)
    at, count = semaphore.path[scheduler.START.value], 0
    place = at
    for _ in range(tile.steps):
        assert at == row - tile.row and place == (head - tile.head) * padded + at
        assert tile.head <= head and 0 <= at < tile.rows
        head, row = scheduler.next_block(head, row, tile, z, semaphore)
        at, count, gap = scheduler.next_offset.fn(at, count, semaphore)
        place += gap


@pytest.mark.parametrize(("mask", "swizzle"), [(0, 4), (1, 1), (1, 2), (1, 4), (1, 100)])
def test_longest_tiles_of_several_heads_start_together(device: Device, mask: int, swizzle: int) -> None:
    """Each tile of keys once; without a bound head by head, else ``swizzle`` heads interleaved, longest first."""
    kv_heads, heads, tiles = 3, 6, 8
    z = SimpleNamespace(BLOCK_M=64, BLOCK_N=128, MASK=mask)
    device.programs = heads * tiles
    found = []
    for program in range(heads * tiles):
        device.program = program
        tile = scheduler.key_tile.fn(tiles, swizzle, kv_heads, 1, tiles * 128, 1, z)
        found.append((tile.batch * kv_heads + tile.kv_head, tile.key // 128, int(tile.steps)))
    together = min(swizzle, heads) if mask else 1
    sets = [found[i : i + together * tiles] for i in range(0, len(found), together * tiles)]
    shorter = 2 if mask else 0  # blocks of rows from a tile to the next
    assert sorted(found) == [(h, t, 16 - shorter * t) for h in range(heads) for t in range(tiles)]
    assert all(part == sorted(part, key=lambda one: (-one[2], one[1], one[0])) for part in sets)


def test_ordered_swizzle_heads() -> None:
    assert scheduler.MOST_HEADS_IN_ORDER.value == MOST_HEADS_IN_ORDER
    on: Any = SimpleNamespace(multiprocessors=132)
    once: Any = SimpleNamespace(numbers={"waves": 1, "waves_gqa": 4})
    twice: Any = SimpleNamespace(numbers={"waves": 2, "waves_gqa": 1})
    assert [ordered_swizzle_heads(on, once, tiles, 1) for tiles in (4, 128, 200)] == [33, 2, 1]
    assert [ordered_swizzle_heads(on, once, 32, ratio) for ratio in (1, 2, 3)] == [5, 5, 20]
    assert [ordered_swizzle_heads(on, twice, 32, ratio) for ratio in (1, 2, 3)] == [10, 10, 5]
