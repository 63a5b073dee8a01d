"""GroupNorm of channels-last images that teams of programs hold, a part each: candidates for Hopper."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from build_tools.audit import audit
from build_tools.compile import compile_variants
from build_tools.declaration import read_declaration
from build_tools.paths import PROFILES
from build_tools.plan import check_row, make_variant
from build_tools.profile import read_profile, read_row
from build_tools.tune import read_problems
from liger_aot.group_plans import HANDOVER, Shape, held_plan
from tests import test_groupnorm
from tests.op_tests import BF16, FP16, FP32, Case, Way
from tests.own_tables import way_with

HELD = (
    'max_n = 1000, form = "held", dtype = ["bf16", "fp16"], split = 8, lines = 32, fold = 2, slots = 9, ahead = 2, '
    "groups = 4, members = 64, talkers = 4, registers = 24, num_warps = 4, programs_per_multiprocessor = 3"
)
TABLES = "".join(
    f"""
[kernel.groupnorm_{way}_last]
provenance = "made up for a test"
rows = [
  {{ aligned = false, form = "last", rows = 4, block = 64, groups = 2, num_warps = 4 }},
  {{ {HELD} }},
  {{ form = "last", rows = 4, block = 64, groups = 2, num_warps = 4 }},
]
"""
    for way in ("forward", "backward")
)
# Images of one part and of several, of part of a tile; one image a team, several, fewer for some teams. Groups that
# begin within a line, of one line, of four channels, of many lines.
CASES = (
    Case((1, 16, 4, 4), BF16, channels_last=True),
    Case((1, 32, 25, 4), FP16, channels_last=True, num_groups=4, wide=True),
    Case((5, 32, 10, 3), BF16, channels_last=True, num_groups=4, offset=300.0),
    Case((7, 48, 10, 4), FP16, channels_last=True, num_groups=4, weight=None),
    Case((3, 80, 11, 2), BF16, channels_last=True, num_groups=2, bias=None, wide=True),
    Case((13, 16, 3, 3), FP16, channels_last=True, num_groups=4),
    Case((2, 256, 17, 1), BF16, channels_last=True, num_groups=1),
    Case((1, 16, 1, 1), BF16, channels_last=True),
)
# Another dtype; channels that are not aligned; more groups than a program has, groups of which a line has three, an
# image too large to be held.
OTHERS = (
    Case((2, 32, 5), FP32, channels_last=True),
    Case((2, 20, 5), BF16, channels_last=True, num_groups=2),
    Case((1, 64, 3), BF16, channels_last=True, num_groups=8),
    Case((1, 48, 3), FP16, channels_last=True, num_groups=16),
    Case((1, 256, 40), BF16, channels_last=True),
)
KERNELS = ("groupnorm_forward_last", "groupnorm_backward_last")


def launched(way: Way) -> set[str]:
    """Forms."""
    (on,) = way.op._own.bound.values()
    return {found[0].variant.name.split("-")[1] for key, found in on.plans.items() if key != "words"}


@pytest.mark.interpreter
@pytest.mark.parametrize("cases,form", [(CASES, "held"), (OTHERS, "last")], ids=["held", "others"])
def test_images(cases: tuple[Case, ...], form: str, poisoned: None, tmp_path: Path) -> None:
    """One after another: a launch takes the words, and the barrier's counter, as the last one left them."""
    tests = test_groupnorm.TestGroupNorm()
    way = way_with(tests.op_class, tmp_path / "pack", TABLES)
    for seed, case in enumerate(cases):
        tests.check(way.op, case, way.allowed, seed=seed)
    assert launched(way) == {form}


@pytest.mark.interpreter
def test_what_is_no_number_stays_in_its_group(tmp_path: Path) -> None:
    way = way_with(test_groupnorm.TestGroupNorm.op_class, tmp_path / "pack", TABLES)
    x = torch.randn(3, 10, 48).to(BF16)  # channels last, four groups of 12
    x[1, 0, 0] = torch.nan
    x.requires_grad_()
    y = way.op(x.movedim(-1, 1), 4)  # type: ignore[operator]
    y.backward(torch.ones_like(y))
    for t in (y.movedim(1, -1), x.grad):
        assert t is not None
        assert t[1, :, :12].isnan().all() and not t[1, :, 12:].isnan().any() and not t[[0, 2]].isnan().any()
    assert launched(way) == {"held"}


@pytest.mark.parametrize("kernel", KERNELS)
def test_plans(kernel: str) -> None:
    """Every place is some part's, all programs are resident at once, and a part's tiles and those of the next one that
    come during the exchange fit in the ring."""
    multiprocessors = 132
    for numbers in candidates(kernel):
        loaded = SimpleNamespace(numbers=numbers)
        for images, channels, places in (
            (32, 320, 4096),
            (64, 1280, 256),
            (1, 512, 64),
            (3, 128, 1000),
            (1, 640, 1),
        ):
            found = held_plan(multiprocessors, loaded, Shape(images, channels, 32, places, True))
            assert found is not None
            assert (found.split - 1) * found.length < places <= found.split * found.length
            assert found.programs % found.split == 0 and found.programs <= multiprocessors
            tiles = -(-found.length // (numbers["lines"] * 8 // channels))
            assert tiles + min(tiles, HANDOVER) <= numbers["slots"] - numbers["ahead"]
            assert found.words >= images * found.split * 32
        assert held_plan(multiprocessors, loaded, Shape(1, 128, 32, 1 << 18, True)) is None


def candidates(kernel: str) -> list[dict[str, int]]:
    problems = read_problems(PROFILES / "candidates" / f"sm90-{kernel}.toml")
    found = [dict(c) for problem in problems for c in problem.candidates if c["form"] == "held"]
    assert found
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_no_candidate_spills(kernel: str, dtype: str, tmp_path: Path) -> None:
    profile, declared = read_profile("sm90"), read_declaration("groupnorm").kernels[kernel]
    row = read_row("a candidate", {**candidates(kernel)[0], "max_n": 64}, profile.arch)
    check_row(declared, row, profile)
    variant = make_variant("groupnorm", declared, row, {"dtype": dtype}, True)
    compiled = compile_variants([variant], profile, cache=tmp_path, workers=1, progress=False)
    audited = audit(variant, compiled[variant.name], profile.arch)  # refuses a binary that spills
    assert audited.resident >= variant.host["programs_per_multiprocessor"]
