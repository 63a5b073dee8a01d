"""GroupNorm of channels-last images that several CTAs share, a part in the shared memory of each."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_aot
from liger_aot.ops.norms._groupnorm_plan import Shape, pipeline_plan
from liger_aot_build.declaration import read_declaration
from liger_aot_build.plan import resolved
from liger_aot_build.profile import read_profile
from tests.harness.op_tests import BF16, FP16, FP32, Case, Way
from tests.harness.own_tables import way_with
from tests.ops.norms import test_groupnorm

PIPELINE = (
    'max_n = 1000, form = "pipeline", dtype = ["bf16", "fp16"], max_splits = 8, lines = 32, blocks = 2, stages = 9, '
    "prefetch = 2, groups = 4, lines_per_group = 64, splits_per_read = 2, exchange_warps = 4, registers = 24, "
    "num_warps = 4, programs_per_multiprocessor = 3, exchange_kb = 72, read_kb = 24, reduce_kb = 16, "
    "kb_for_one_cta = 96"
)
TABLES = "".join(
    f"""
[kernel.groupnorm_{direction}_channels_last]
provenance = "made up for a test"
rows = [
  {{ aligned = false, form = "two_pass", rows = 4, block = 64, groups = 2, num_warps = 4 }},
  {{ {PIPELINE} }},
  {{ form = "two_pass", rows = 4, block = 64, groups = 2, num_warps = 4 }},
]
"""
    for direction in ("forward", "backward")
)
# Images of one part and of several, of part of a tile; one image for the CTAs that share one, several, fewer for some.
# Groups that begin within a line, of one line, of four channels, of many lines.
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
# Another dtype; channels that are not aligned; more groups than a CTA has, groups of which a line has three, an image
# too large for shared memory.
OTHERS = (
    Case((2, 32, 5), FP32, channels_last=True),
    Case((2, 20, 5), BF16, channels_last=True, num_groups=2),
    Case((1, 64, 3), BF16, channels_last=True, num_groups=8),
    Case((1, 48, 3), FP16, channels_last=True, num_groups=16),
    Case((1, 256, 200), BF16, channels_last=True),
)


def launched(way: Way) -> set[str]:
    """Forms."""
    (on,) = way.op._own.bound.values()
    return {found[0].variant.name.split("-")[1] for found in on.plans.values()}


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "cases,form", [(CASES, "pipeline"), (OTHERS, "two_pass")], ids=["pipeline", "others"]
)
def test_images(cases: tuple[Case, ...], form: str, poisoned: None, tmp_path: Path) -> None:
    """One after another: a launch finds the workspace, and the barrier's counter in it, as the last one left them."""
    tests = test_groupnorm.TestGroupNorm()
    way = way_with(tests.op_class, tmp_path / "pack", TABLES)
    for seed, case in enumerate(cases):
        tests.check(way.op, case, way.allowed, seed=seed)
    assert launched(way) == {form}


@pytest.mark.interpreter
def test_nan_stays_in_its_group(tmp_path: Path) -> None:
    way = way_with(test_groupnorm.TestGroupNorm.op_class, tmp_path / "pack", TABLES)
    x = torch.randn(3, 10, 48).to(BF16)  # channels last, four groups of 12
    x[1, 0, 0] = torch.nan
    x.requires_grad_()
    y = way.op(x.movedim(-1, 1), 4)  # type: ignore[operator]
    y.backward(torch.ones_like(y))
    for t in (y.movedim(1, -1), x.grad):
        assert t is not None
        assert t[1, :, :12].isnan().all() and not t[1, :, 12:].isnan().any() and not t[[0, 2]].isnan().any()
    assert launched(way) == {"pipeline"}


def rows(direction: str) -> list[Mapping[str, int]]:
    kernel = read_declaration("groupnorm").kernels[f"groupnorm_{direction}_channels_last"]
    found: list[Mapping[str, int]] = []
    for row in (resolved(kernel, row) for row in read_profile("sm90").tables[kernel.name].rows):
        if row.form == "pipeline":
            constants = {**kernel.forms[row.form].defaults, **row.constants}
            found.append({**{name.lower(): value for name, value in constants.items()}, **row.host})
    assert found
    return found


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_plans(direction: str) -> None:
    """Every position is some part's, all CTAs are resident at once, and there are stages for a part's tiles, some of
    the next one's and those in flight."""
    on: Any = SimpleNamespace(multiprocessors=132)
    planned = 0
    for numbers in rows(direction):
        loaded: Any = SimpleNamespace(numbers=numbers)
        for images, channels, spatial in product((1, 3, 32), (128, 320, 512, 1280), (1, 64, 1000, 4096)):
            found = pipeline_plan(on, loaded, direction, Shape(images, channels, 32, spatial, True))
            if found is None:
                continue
            planned += 1
            assert (found.splits - 1) * found.length < spatial <= found.splits * found.length
            assert found.programs % found.splits == 0 and found.programs <= on.multiprocessors
            tiles = -(-found.length // (numbers["lines"] * 8 // channels * numbers["blocks"]))
            assert tiles + min(tiles, 2) <= numbers["stages"] - numbers["prefetch"]
            assert found.words >= images * found.splits * 32
        assert pipeline_plan(on, loaded, direction, Shape(1, 128, 32, 1 << 18, True)) is None  # too long
        assert pipeline_plan(on, loaded, direction, Shape(8, 1024, 64, 256, True)) is None  # too many groups
    assert planned > 20


def test_a_lone_long_image_takes_the_other_form() -> None:
    """No other image is read while its parts are exchanged."""
    on: Any = SimpleNamespace(multiprocessors=132)
    loaded: Any = SimpleNamespace(numbers=rows("forward")[0])
    assert pipeline_plan(on, loaded, "forward", Shape(1, 512, 32, 16384, True)) is None
    assert pipeline_plan(on, loaded, "forward", Shape(4, 512, 32, 16384, True)) is not None


@pytest.mark.gpu
def test_graphs_and_streams_at_once() -> None:
    """Launches that wait for their own programs, from several streams and graphs together."""
    op = liger_aot.load("groupnorm")
    op.preload()
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(8, 64, 64, 320, device="cuda", generator=generator).to(BF16).movedim(-1, 1)
    dy = torch.randn(8, 64, 64, 320, device="cuda", generator=generator).to(BF16).movedim(-1, 1)
    x.requires_grad_()

    def both() -> tuple[Tensor, Tensor]:
        y = op(x, 32)  # type: ignore[operator]
        return y.detach(), torch.autograd.grad(y, x, dy)[0]

    expected = both()
    streams = [torch.cuda.Stream() for _ in range(4)]
    graphs, captured = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            captured.append(both())
    torch.cuda.synchronize()
    eager = []
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=False):
            with torch.cuda.stream(stream):
                graph.replay()
        for stream in streams[2:]:
            with torch.cuda.stream(stream):
                eager.append(both())
    torch.cuda.synchronize()
    for found in (*captured, *eager):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
