"""The tile scheduler of the warp-specialised varlen forward: its device code as Python functions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from csrc_triton.attention import varlen
from tests.harness import storages
from tests.harness.warp_group_interpreter import Block, Code, Const, Pointer, device_values
from tests.ops.attention.varlen_cases import starts_of

WARP_GROUPS = 2
ROWS = 64 * WARP_GROUPS
PROGRAMS = 4


def taken(
    lengths_q: tuple[int, ...],
    lengths_k: tuple[int, ...],
    heads: int,
    ratio: int,
    keys_in_l2: int,
    causal: bool,
    behind: int = 0,
) -> list[tuple[int, int, int]]:
    """(its sequence's start, head, tile of the head) of every tile that is needed, in the order of their numbers."""
    storages.watch()
    starts = [starts_of(lengths) for lengths in (lengths_q, lengths_k)]
    tokens_q, tokens_k = sum(lengths_q) + behind, sum(lengths_k)
    sequences = len(lengths_q)
    tiles = (tokens_q // ROWS + sequences + 1) * heads
    code = Code(Block((0, 0, 0), (PROGRAMS, 1, 1)))
    device = SimpleNamespace(
        **{
            name: code.python(getattr(varlen, name))
            for name in ("Sequences", "window_memory", "fill_window", "first_tile", "find_tile", "WINDOW")
        }
    )
    cu_seqlens = (Pointer(t.data_ptr(), torch.int32) for t in starts)
    numbers = (sequences, tokens_q, tokens_k, tiles, heads, ratio, keys_in_l2, 1)
    seqs = device.Sequences(*cu_seqlens, *(torch.tensor(n) for n in numbers))
    z: Any = SimpleNamespace(WARP_GROUPS=Const(WARP_GROUPS), MASK=Const(causal))
    window = device.window_memory()
    found = []
    with device_values():
        s, end = torch.tensor(-device.WINDOW), torch.tensor(0)
        for t in map(torch.tensor, range(tiles)):
            while t // heads >= end:
                s = s + device.WINDOW
                device.fill_window(s, seqs, window, Const(ROWS))
                end = device.first_tile(s + device.WINDOW, seqs, Const(ROWS))
            tile = device.find_tile(t, s, window, seqs, z)
            if tile.m >= 0:
                found.append((int(tile.start_q), int(tile.head), int(tile.m)))
    return found


def wanted(lengths_q: tuple[int, ...], heads: int) -> set[tuple[int, int, int]]:
    starts = starts_of(lengths_q).tolist()
    return {
        (start, head, tile)
        for start, length in zip(starts, lengths_q, strict=False)
        for head in range(heads)
        for tile in range(-(-length // ROWS))
    }


MANY = tuple((7 * i) % 300 for i in range(150))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("lengths", "heads", "ratio", "behind"),
    [
        ((300,), 5, 1, 0),
        ((0, 129, 1000, 0, 128), 6, 3, 0),
        ((64,) * 64, 2, 1, 0),
        (MANY, 2, 2, 0),
        (MANY, 3, 1, 200),
    ],
)
def test_every_tile_once(lengths: tuple[int, ...], heads: int, ratio: int, behind: int, causal: bool) -> None:
    """Of sequences in one window and in several, one head at a time and all interleaved."""
    for keys_in_l2 in (0, 1 << 20):
        found = taken(lengths, lengths[::-1], heads, ratio, keys_in_l2, causal, behind)
        assert len(set(found)) == len(found)
        assert set(found) == wanted((*lengths, behind), heads)


def test_the_longest_sequence_first() -> None:
    """By keys, and equal ones as they lie."""
    found = taken((128, 256, 64, 128), (50, 7, 900, 50), 2, 1, 0, False)
    assert [start for start, head, tile in found if not head and not tile] == [384, 0, 448, 128]


def test_one_head_after_another_without_a_bound() -> None:
    found = taken((300,), (300,), 3, 1, 1 << 20, False)
    assert [(head, tile) for _, head, tile in found] == [(h, m) for h in range(3) for m in range(3)]


def head_sets(found: list[tuple[int, int, int]]) -> list[set[int]]:
    """Sets of interleaved heads, in order."""
    made: list[set[int]] = []
    last = -1
    for _, head, tile in found:
        if tile > last:
            made.append(set())
        made[-1].add(head)
        last = tile
    return made


def test_l2_swizzle() -> None:
    """Whole heads of K, of nearly the same number: as many as fit into L2, or as give each program MIN_TILES tiles."""
    long = (40 * ROWS,)
    assert head_sets(taken(long, long, 10, 1, 3 * long[0], True)) == [{0, 1, 2}, {3, 4, 5}, {6, 7, 8, 9}]
    assert head_sets(taken(long, long, 8, 2, 0, True)) == [{0, 1}, {2, 3}, {4, 5}, {6, 7}]
    assert head_sets(taken((ROWS,), (ROWS,), 12, 1, 0, True)) == [set(range(12))]
    assert PROGRAMS * varlen.MIN_TILES.value == 8
    tiles = [tile for _, _, tile in taken(long, long, 2, 1, 1 << 30, True)]
    assert tiles == sorted(tiles, reverse=True)
