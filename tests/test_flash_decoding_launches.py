"""Decoding's host side: what is launched with which numbers, from shapes alone, and how many programs share the
keys."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from liger_aot.attention import LONGEST
from liger_aot.decoding import best_splits
from liger_aot.ops.flash_decoding import FlashDecoding
from tests.conftest import built_pack
from tests.decoding_cases import BF16, FP16, SMALL, Problem, Recorder, recorded

# ---- What is launched ----


@pytest.fixture
def sm90() -> tuple[FlashDecoding, Recorder]:
    return recorded("sm90")


def test_one_share_is_one_launch(sm90: tuple[FlashDecoding, Recorder]) -> None:
    op, driver = sm90
    problem = Problem(8, 2, 1, 300, (300, 20), 128, FP16, splits=1)
    tensors = problem.tensors()
    o, lse = op(*tensors[:3], cache_seqlens=tensors[3], splits=1, return_lse=True)
    ((variant, device, stream, x, y, z, *arguments),) = driver.launches
    assert variant.name.startswith("flash_decoding_split-") and "fp16-aligned" in variant.name
    assert (device, stream, x, y, z) == (-1, 7, 2 * 2, 1, 1)
    at = [t.data_ptr() for t in tensors[:3]]
    assert arguments[:3] == [o.data_ptr(), lse.data_ptr(), 0] and arguments[4:7] == at
    assert arguments[7:10] == [0, tensors[3].data_ptr(), 0]
    strides = [1024, 16, 128, 300 * 256, 256, 128]  # of q's one token: any
    assert arguments[10:17] == [*strides, 0]
    assert arguments[17:19] == [pytest.approx(128**-0.5 * math.log2(math.e)), 0.0]
    assert arguments[19:] == [2, 4, 1, 128, 300, 2, 8, 1, LONGEST, 1]


def test_shares_are_two_launches(sm90: tuple[FlashDecoding, Recorder]) -> None:
    op, driver = sm90
    problem = Problem(40, 2, 1, 256, (256, 20), 64, page=64, splits=2, window=(100, None), softcap=10.0)
    tensors = problem.tensors()
    op(*tensors[:3], **problem.keywords(tensors))
    (split, *of_split), (combine, *of_combine) = driver.launches
    assert split.name.startswith("flash_decoding_wide_paged-")  # 20 rows a head of keys
    assert combine.name.startswith("flash_decoding_combine-")
    assert of_split[2] == 2 * 2 * 2 and of_combine[2] == 2 * 40
    assert of_split[5:8] == of_combine[5:8] and of_split[7]  # results and shares
    numbers = split.numbers
    log2_e = math.log2(math.e)
    assert of_split[21:24] == [4, pytest.approx(10 * log2_e), pytest.approx(64**-0.5 / 10)]
    assert of_split[24:] == [2, 20, 1, 64, 256, 11, 6, 2, 100, 1]
    assert of_combine[8] == tensors[3].data_ptr() and not of_combine[9]
    assert of_combine[10:] == [2, 20, 1, 64, 256, 2, numbers["block_m"], numbers["block_n"], 100, 1]


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
    op(*tensors[:3], **problem.keywords(tensors))
    other = problem._replace(lengths=(1, 3000)).tensors(seed=1)

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("a value was read")

    for name in ("item", "tolist", "__int__", "__bool__", "cpu", "numpy"):
        monkeypatch.setattr(Tensor, name, refuse)
    op(*other[:3], **problem.keywords(other))
    monkeypatch.undo()
    first, second = (driver.launches[i : i + 2] for i in (0, 2))
    for a, b in zip(first, second, strict=True):
        assert a[:5] == b[:5] and a[-10:] == b[-10:]


def test_a_window_bounds_the_shares(sm90: tuple[FlashDecoding, Recorder]) -> None:
    """100 keys are in three blocks of 64 at most, whatever the cache holds."""
    op, driver = sm90
    q, k, v, *_ = Problem(8, 8, 1, 1 << 14, (1 << 14,), 128).tensors()
    op(q, k, v, window=(99, None), splits=64)
    assert driver.launches[0][3] == 8 * 3


@pytest.mark.parametrize("arch", ["sm80", "sm90", "gfx90a", "gfx942"])
def test_the_small_problems_take_every_binary(arch: str) -> None:
    op, driver = recorded(arch)
    for problem in (p._replace(dtype=dtype) for p in SMALL for dtype in (BF16, FP16)):
        tensors = problem.tensors()
        op(*tensors[:3], **problem.keywords(tensors))
    used = {variant.name for variant, *_ in driver.launches}
    assert used == set(built_pack(arch).op("flash_decoding").variants)


# ---- How many shares ----


def test_shares_fill_the_gpu() -> None:
    """132 multiprocessors of 2 programs each."""
    assert best_splits(programs=8, blocks=2048, slots=264, start=2) == 33
    assert best_splits(programs=264, blocks=128, slots=264, start=2) == 1
    assert best_splits(programs=1, blocks=4096, slots=264, start=2) == 256
    assert best_splits(programs=1, blocks=3, slots=264, start=2) == 1  # a second launch takes longer
    assert best_splits(programs=1, blocks=0, slots=264, start=2) == 1
    # 396 programs are a wave and a half
    assert best_splits(programs=396, blocks=128, slots=264, start=2) > 1


@pytest.mark.parametrize("programs", [1, 7, 100, 300, 1024])
@pytest.mark.parametrize("blocks", [1, 5, 128, 2048])
def test_no_other_number_of_shares_is_done_earlier(programs: int, blocks: int) -> None:
    def cost(splits: int) -> int:
        return math.ceil(programs * splits / 264) * (math.ceil(blocks / splits) + 2) + 2 * (splits > 1)

    found = best_splits(programs, blocks, 264, 2)
    assert cost(found) == min(map(cost, range(1, min(blocks, 256) + 1)))
