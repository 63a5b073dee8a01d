"""Decoding's benchmark without a GPU: its inputs, its providers' results, what is counted, and its candidates."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError, Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.decoding import decoding, decoding_candidates
from benchmarks.decoding.decoding import POINTS, UNEVEN, Point
from build_tools.declaration import read_declaration
from build_tools.paths import PROFILES
from build_tools.plan import check_row
from build_tools.profile import HOST_NUMBERS, OPTIONS, read_profile, read_row
from build_tools.tune import read_problems

CPU = torch.device("cpu")
SMALL = Point(batch=2, cached=96, dim=16, heads=6, kv_heads=2)
KERNELS = list(read_declaration("flash_decoding").kernels)


@pytest.mark.parametrize(
    "point", [SMALL, replace(SMALL, page=16), replace(SMALL, tokens=3, page=32), replace(SMALL, kv_heads=6)]
)
def test_providers_are_right_and_errors_are_seen(point: Point) -> None:
    inputs = decoding.drawn(point, CPU, 0)
    for name in ("liger_aot", "torch"):
        if decoding.offers(name, point):
            result = decoding.PROVIDERS[name]()(inputs)
            assert decoding.error(point, inputs, result) < 0.01
            result[-1, :, -1] = 0
            assert decoding.error(point, inputs, result) > 0.2
    other = decoding.drawn(point, CPU, 1)
    assert decoding.error(point, inputs, decoding.ours()(other)) > 0.5


def test_peers_have_what_they_can() -> None:
    assert decoding.offers("cudnn", SMALL)
    assert not decoding.offers("torch", replace(SMALL, page=16))
    assert not decoding.offers("flash_attention_2", replace(SMALL, tokens=2))


def test_points() -> None:
    assert len(set(POINTS)) == len(POINTS) and not set(POINTS) & set(UNEVEN)
    inputs = decoding.drawn(SMALL, CPU, 0)
    assert SMALL.bytes == sum(t.numel() * t.element_size() for t in (inputs.k, inputs.v))
    for point in (*POINTS, *UNEVEN):
        assert point.heads % point.kv_heads == 0 and (not point.page or point.cached % point.page == 0)


@pytest.mark.parametrize(("gib", "largest"), [(139.8, 128 * 131072), (79.1, 32 * 131072)])
def test_caches_that_a_gpu_holds_are_measured(
    gib: float, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H200 and H100."""
    properties = Namespace(total_memory=gib * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    most = decoding.largest_cache(CPU)
    usual = [p for p in POINTS if (p.dim, p.kv_heads) == (128, 8)]
    assert max(p.batch * p.cached for p in usual if p.bytes <= most) == largest


@pytest.mark.parametrize("kernel", KERNELS)
def test_candidates_fit_the_kernel(kernel: str) -> None:
    profile, declared = read_profile("sm90"), read_declaration("flash_decoding").kernels[kernel]
    problems = read_problems(PROFILES / "candidates" / f"sm90-{kernel}.toml")
    bounds = {"stream": [64, 96, None], "once": [64, None], "once_paged": [64, None]}
    kind = kernel.removeprefix("flash_decoding_")
    assert [p.max_n for p in problems] == bounds.get(kind, [64, 128, None])
    for problem in problems:
        assert len({json.dumps(c) for c in problem.candidates}) == len(problem.candidates)
        for candidate in problem.candidates:
            row = read_row("candidate", {**candidate, "dtype": list(problem.dtypes)}, profile.arch)
            check_row(declared, row, profile)
            widest = candidate["d"] if "d" in candidate else candidate["d1"] + candidate["d2"]
            assert all(n <= widest for n in problem.sizes)
    # the row that is used now is among what it is compared with
    now = {
        r.max_n: {**r.constants, **r.options, **r.host}
        for r in profile.table(kernel).rows
        if not r.when.get("aligned")
    }
    for problem in problems:
        assert now[problem.max_n] in [_numbers(c) for c in problem.candidates]


def _numbers(candidate: object) -> dict[str, int]:
    assert isinstance(candidate, dict)
    lower = (*OPTIONS, *HOST_NUMBERS)
    return {k if k in lower else k.upper(): v for k, v in candidate.items() if k != "form"}


def test_points_of_chosen_sizes() -> None:
    sizes = decoding_candidates.read_sizes("1x8192,8x32768")
    assert sizes == ((1, 8192), (8, 32768))
    found = decoding_candidates.points("flash_decoding_combine", 64, sizes)
    assert found == [Point(1, 8192, dim=64), Point(8, 32768, dim=64)]
    paged = decoding_candidates.points("flash_decoding_wide_paged", 128, sizes)
    assert [(p.batch, p.page, p.tokens) for p in paged] == [(1, 64, 4), (8, 64, 4), (8, 16, 4)]
    for text in ("", "1x", "8192", "0x5"):
        with pytest.raises(ArgumentTypeError, match="batch x keys, such as 1x8192"):
            decoding_candidates.read_sizes(text)


@pytest.mark.slow  # compiles all of flash_decoding
def test_a_candidate_is_a_pack_with_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from build_tools.tune import Problem
    from liger_aot.runtime.manifest import Pack

    row = {
        "form": "tile", "block_m": 16, "block_n": 32, "d": 64, "stages": 2, "start": 5, "num_warps": 2,
        "programs_per_multiprocessor": 7,
    }  # fmt: skip
    other = Problem(128, (128,), ("bf16",), ({**row, "d": 128},))
    problems = (Problem(64, (64,), ("bf16", "fp16"), (row,)), other)
    monkeypatch.setattr(decoding_candidates, "read_problems", lambda path: problems)
    options = Namespace(folder=tmp_path, arch="sm90", kernel="flash_decoding_split", dims=[64])
    assert decoding_candidates.build(options) == 0
    (entry,) = json.loads((tmp_path / "candidates.json").read_text())
    assert entry == {"kernel": "flash_decoding_split", "max_n": 64, "n": [64], "row": row}
    kernel = Pack(tmp_path / "0" / "sm90").op("flash_decoding").kernels["flash_decoding_split"]
    bound, name = kernel.tables["fp16/aligned"][0]
    assert bound == 64 and name.endswith("block_n32-d64-stages2-start5-warps2-programs7")


def test_the_best_candidate_is_good_everywhere() -> None:
    def entry(kernel: str, *fractions: float, refused: str = "") -> dict[str, object]:
        made = {"kernel": kernel, "max_n": 64, "row": {}, "of_copy": dict(enumerate(fractions))}
        return {**made, "refused": refused} if refused else made

    entries = [entry("a", 0.9, 0.5), entry("a", 0.8, 0.7), entry("a", 0.9, 0.9, refused="error"), entry("b")]
    assert decoding_candidates.best(entries) == {("a", 64): entries[1]}
