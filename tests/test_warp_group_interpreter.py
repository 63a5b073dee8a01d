"""What the interpreter of warp groups notices."""

from __future__ import annotations

import pytest
import torch

from tests.warp_group_interpreter import Barrier, Memory, TensorMap, Warps


def test_all_wait() -> None:
    """Warps that wait for each other end with an error; one whose barrier comes does not wait."""
    warps, first, second, seen = Warps(), Barrier(1), Barrier(1), []

    def work(mine: Barrier, other: Barrier, begins: bool) -> None:
        if begins:
            other.arrive()
        warps.wait(lambda: mine.passed(0))
        seen.append(begins)
        other.arrive()

    with pytest.raises(AssertionError, match="all of 2 warps wait"):
        warps.run([lambda: work(first, second, False), lambda: work(second, first, False)])
    assert not seen
    first, second = Barrier(1), Barrier(2)
    warps.run([lambda: work(first, second, False), lambda: work(second, first, True), second.arrive])
    assert seen == [False, True]


def test_an_error_ends_all() -> None:
    warps, never = Warps(), Barrier(1)

    def fails() -> None:
        raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        warps.run([lambda: warps.wait(lambda: never.passed(0)), fails])


def test_phases() -> None:
    """A phase ends with the last arrival and the last of the bytes that it expects."""
    barrier = Barrier(2)
    assert barrier.passed(1) and not barrier.passed(0)
    barrier.arrive(expected=8)
    barrier.arrive()
    assert not barrier.passed(0)
    barrier.copies.append(lambda: 8)
    assert barrier.passed(0) and not barrier.passed(1)
    with pytest.raises(AssertionError, match="too many"):
        barrier.arrive(3)


def test_maps_end_where_a_tensor_does() -> None:
    t = torch.arange(15, dtype=torch.float32).view(3, 5)
    of = TensorMap(t.data_ptr(), "fp32", (3, 4), (5, 1), [2, 2], 0)
    assert of.read([2, 3]).tolist() == [[13, 0], [0, 0]] and not of.read([3, 0]).any()
    of.write([1, 3], torch.full((2, 2), -1.0))
    assert t[1:, 3].tolist() == [-1, -1] and t[1:, 4].tolist() == [9, 14]


def test_views_share_memory() -> None:
    whole = Memory(torch.zeros(2, 4, 6))
    whole.index(1).slice(2, 2, dim=1).permute((1, 0)).store(torch.ones(2, 4))
    assert whole.tensor.sum() == whole.index(1).reshape([24]).load(None).sum() == 8
