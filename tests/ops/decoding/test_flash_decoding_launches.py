"""Decoding's host side: what is launched with which numbers, from shapes alone, and how many programs split the
keys."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from liger_aot.ops.attention._operands import MAX_SEQLEN
from liger_aot.ops.decoding.flash_decoding import FlashDecoding
from liger_aot.ops.split_kv import best_splits
from tests.harness.drivers import MULTIPROCESSORS, bound_op
from tests.harness.planned_packs import tables_of
from tests.ops.decoding.decoding_cases import (
    BF16,
    FP8,
    FP16,
    SMALL,
    Problem,
    Recorder,
    fp8_of,
    recorded,
)

# ---- What is launched ----


@pytest.fixture
def sm90() -> tuple[FlashDecoding, Recorder]:
    return recorded("sm90")


def test_one_split_is_one_launch(sm90: tuple[FlashDecoding, Recorder]) -> None:
    op, driver = sm90
    problem = Problem(8, 2, 1, 300, (300, 20), 128, FP16, splits=1)
    tensors = problem.tensors()
    o, lse = op(*tensors[:3], cache_seqlens=tensors[3], splits=1, return_lse=True)
    ((variant, device, stream, x, y, z, *arguments),) = driver.launches
    assert variant.name.startswith("flash_decoding_split-") and "-fp16-" in variant.name
    assert (device, stream, x, y, z) == (-1, 7, 2 * 2, 1, 1)
    at = [t.data_ptr() for t in tensors[:3]]
    assert arguments[:4] == [o.data_ptr(), lse.data_ptr(), 0, 0] and arguments[5:8] == at
    assert arguments[8:11] == [0, tensors[3].data_ptr(), 0]
    strides = [1024, 16, 128, 300 * 256, 256, 128]  # of q's one token: any
    assert arguments[11:18] == [*strides, 0]
    assert arguments[18:20] == [pytest.approx(128**-0.5 * math.log2(math.e)), 0.0]
    by_ratio = (1 << 31) // 4 + 1
    assert arguments[20:] == [2, 4, by_ratio, 1, 128, 2, 300, 2, 8, 1, 1, 0, MAX_SEQLEN, 1]


def test_splits_are_two_launches(sm90: tuple[FlashDecoding, Recorder]) -> None:
    op, driver = sm90
    problem = Problem(40, 2, 1, 256, (256, 20), 64, page=64, splits=2, window=(100, None), softcap=10.0)
    tensors = problem.tensors()
    op(*tensors[:3], **problem.keywords(tensors))
    (split, *of_split), (combine, *of_combine) = driver.launches
    assert split.name.startswith("flash_decoding_split-tile-bf16-paged-wide-")  # 20 rows a head of keys
    assert combine.name.startswith("flash_decoding_combine-")
    assert of_split[2] == 2 * 2 * 2 and of_combine[2] == 2 * 40
    assert of_split[5:9] == of_combine[5:9]  # results and parts
    assert of_split[8] == of_split[7] + 4 * 8 * 20 * 64  # sums behind values: 8 programs, 20 rows of 64
    numbers = split.numbers
    log2_e = math.log2(math.e)
    assert of_split[22:25] == [4, pytest.approx(10 * log2_e), pytest.approx(64**-0.5 / 10)]
    by_ratio = (1 << 31) // 20 + 1
    assert of_split[25:] == [2, 20, by_ratio, 1, 64, 2, 256, 11, 6, 1, 2, 20, 100, 1]
    assert of_combine[9] == tensors[3].data_ptr() and not of_combine[10]
    block = numbers["block_m"], numbers["block_n"]
    assert of_combine[11:] == [2, 20, 1, 64, 2, 256, 1, 2, 20, *block, 100, 1]


@pytest.mark.parametrize("way", ["address", "stride", "dim"])
def test_what_is_not_aligned_takes_the_generic_binary(sm90: tuple[FlashDecoding, Recorder], way: str) -> None:
    op, driver = sm90
    q, k, v, *_ = Problem(
        2, 1, 1, 64, (64,), 72 if way == "dim" else 64, shift=int(way == "address")
    ).tensors()
    if way == "stride":
        k, v = (F.pad(t, (0, 8))[..., :64] for t in (k, v))
    op(q, k, v, splits=1)
    assert "generic" in driver.launches[0][0].name
    q, k, v, *_ = Problem(2, 1, 1, 64, (64,), 64).tensors()
    op(q, k, v)
    assert "aligned" in driver.launches[-1][0].name


def test_no_call_looks_at_lengths(
    sm90: tuple[FlashDecoding, Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the grid depends on is in the shapes: a second call with other lengths and pages launches the same."""
    op, driver = sm90
    problem = Problem(8, 2, 1, 4096, (4096, 20), 128, page=16)
    tensors = problem.tensors()
    op(*tensors[:3], **{**problem.keywords(tensors), "splits": 3})
    other = problem._replace(lengths=(1, 3000)).tensors(seed=1)

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("a value was read")

    for name in ("item", "tolist", "__int__", "__bool__", "cpu", "numpy"):
        monkeypatch.setattr(Tensor, name, refuse)
    op(*other[:3], **{**problem.keywords(other), "splits": 3})
    monkeypatch.undo()
    first, second = (driver.launches[i : i + 2] for i in (0, 2))
    for a, b in zip(first, second, strict=True):
        assert a[:5] == b[:5] and a[-13:] == b[-13:]


def test_a_window_bounds_the_splits(sm90: tuple[FlashDecoding, Recorder]) -> None:
    """100 keys are in three blocks of 64 at most, whatever the cache holds."""
    op, driver = sm90
    q, k, v, *_ = Problem(8, 8, 1, 1 << 14, (1 << 14,), 128).tensors()
    op(q, k, v, window=(99, None), splits=64)
    assert driver.launches[0][3] == 8 * 3


@pytest.mark.parametrize("arch", ["sm80", "sm90", "gfx90a", "gfx942"])
def test_the_small_problems_take_every_binary(arch: str) -> None:
    op, driver = recorded(arch)
    for problem in (p._replace(dtype=dtype) for p in (*SMALL, *FP8) for dtype in (BF16, FP16)):
        tensors = problem.tensors(fp8=fp8_of(op) if problem.fp8 else None)
        op(*tensors[:3], **problem.keywords(tensors))
    used = {variant.name for variant, *_ in driver.launches}
    # but those by tensor maps, which the recorder has none of
    assert used == {v for v in tables_of(arch).op("flash_decoding").variants if "_fused" not in v}


# ---- How many splits ----


def test_splits_fill_the_gpu() -> None:
    """132 multiprocessors with room for 2 programs each, all of which are needed."""
    every = {"places": 264, "saturating": 264, "startup_blocks": 2}
    assert best_splits(programs=8, blocks=2048, **every) == 33
    assert best_splits(programs=264, blocks=128, **every) == 1
    assert best_splits(programs=1, blocks=4096, **every) == 256
    assert best_splits(programs=1, blocks=3, **every) == 1  # a second launch takes longer
    assert best_splits(programs=1, blocks=0, **every) == 1
    # 396 programs are a wave and a half
    assert best_splits(programs=396, blocks=128, **every) > 1


# Programs of one split, blocks, and the fraction of a copy that each number of splits had (NVIDIA H200, 132
# multiprocessors with 3 programs each).
MEASURED = {
    (8, 128): {8: 0.586, 16: 0.687, 24: 0.675, 32: 0.679},
    (8, 512): {8: 0.609, 16: 0.863, 19: 0.830, 24: 0.856, 32: 0.855},
    (8, 2048): {8: 0.631, 16: 0.987, 18: 0.880, 24: 0.986, 32: 0.980},
    (24, 256): {4: 0.834, 5: 0.898, 8: 0.908, 11: 0.914},
    (64, 128): {1: 0.640, 2: 0.918, 3: 0.918, 4: 0.919, 6: 0.886},
    (64, 512): {1: 0.650, 2: 1.017, 3: 1.021, 4: 1.018, 6: 1.006},
    (160, 256): {1: 0.991, 2: 0.979, 3: 0.893, 4: 0.876, 6: 0.931},
    (256, 128): {1: 1.035, 2: 0.880, 3: 0.979, 4: 0.897, 6: 0.962},
    (256, 512): {1: 1.037, 2: 0.911, 3: 1.029, 4: 0.937, 6: 1.024},
    (384, 256): {1: 1.046, 2: 1.021, 3: 1.019, 4: 1.014, 6: 1.009},
    (1024, 128): {1: 0.947, 2: 0.998, 3: 0.994, 5: 0.997},
}


@pytest.mark.parametrize("size", MEASURED)
def test_splits_are_those_that_were_fast(size: tuple[int, int]) -> None:
    """One within 3% of the fastest, or between such."""
    measured = MEASURED[size]
    fast = [splits for splits, of_copy in measured.items() if of_copy > 0.97 * max(measured.values())]
    found = best_splits(*size, places=396, saturating=132, startup_blocks=2)
    assert min(fast) <= found <= max(fast) and measured.get(found, 1.0) > 0.97 * max(measured.values())


# ---- Many sequences ----


class Maps(Recorder):
    """Of a GPU with tensor maps."""

    def tensor_map(self, *arguments: Any) -> tuple[Any, ...]:
        return arguments


def launches(problem: Problem, **keywords: Any) -> list[tuple[Any, ...]]:
    """What is launched where there are tensor maps."""
    made: list[Maps] = []
    op = bound_op(FlashDecoding, tables_of("sm90"), lambda op, pack: made.append(Maps(op, pack)) or made[-1])
    tensors = problem.tensors()
    op(*tensors[:3], **{**problem.keywords(tensors), **keywords})
    return made[0].launches


def of_many(count: int, capacity: int, page: int = 64, dim: int = 128) -> Problem:
    return Problem(8, 2, 1, capacity, (200,) * count, dim, page=page)


@pytest.mark.parametrize(
    ("problem", "kernels"),
    [
        (of_many(MULTIPROCESSORS, 1024), ["fused"]),
        (of_many(MULTIPROCESSORS, 1024, dim=64), ["fused"]),
        (of_many(7 * MULTIPROCESSORS, 4096), ["fused"]),
        (of_many(7 * MULTIPROCESSORS, 4096, page=0), ["fused"]),
        # room for so many keys, of which most sequences may have few: none is split
        (of_many(5 * MULTIPROCESSORS, 1024, dim=256), ["split"]),
        (of_many(5 * MULTIPROCESSORS, 4096, dim=256), ["split"]),
        (of_many(3, 1 << 14, dim=256), ["split", "combine"]),
    ],
)
def test_many_sequences(problem: Problem, kernels: list[str]) -> None:
    launched = [variant.name.split("-")[0] for variant, *_ in launches(problem)]
    assert launched == [f"flash_decoding_{kernel}" for kernel in kernels]
