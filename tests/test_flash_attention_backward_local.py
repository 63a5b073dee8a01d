"""Attention's backward by warp groups with a left bound or a soft cap, without a GPU: what is built, what is launched,
and gradients against float64, of the device code as Python."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import liger_aot
from benchmarks.attention_candidates import BACKWARD, candidates, tables, without
from build_tools.audit import audit
from build_tools.build import Tree, make_plans
from build_tools.compile import compile_variants
from build_tools.paths import PROFILES
from build_tools.plan import Plan
from build_tools.profile import Profile
from liger_aot.attention import LOG2_E, LONGEST
from liger_aot.manifest import Pack
from liger_aot.ops.flash_attention_backward import FlashAttentionBackward
from tests.attention_cases import FP16, Problem
from tests.attention_gradients import gradient_errors
from tests.conftest import built_pack
from tests.drivers import MULTIPROCESSORS, bound_op
from tests.pack_edits import add_kernels
from tests.test_flash_attention_backward_groups import DIMS, launched
from tests.tolerances import REFERENCE

KINDS = [*(f"{dim}_local" for dim in DIMS), "256_capped"]
NAMES = [f"{BACKWARD}_groups_{kind}{order}" for kind in KINDS for order in ("", "_ordered")]


def planned(folder: Path) -> tuple[Profile, Plan]:
    """Of sm90's profile with the first candidates."""
    text = (PROFILES / "sm90.toml").read_text()
    for direction in ("local", "capped"):
        chosen = candidates("sm90", direction)[0]
        text = without(text, direction) + tables("sm90", chosen, "a test")
    (folder / "sm90.toml").write_text(text)
    profile, (plan,) = make_plans("sm90", (BACKWARD,), Tree(profiles=folder))
    return profile, plan


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    """The built one, with the kernels in its manifest, without binaries."""
    folder = tmp_path_factory.mktemp("pack")
    shutil.copytree(built_pack("sm90").folder, folder / "sm90")
    _, plan = planned(folder)
    add_kernels(folder / "sm90" / f"{BACKWARD}.json", plan)
    return Pack(folder / "sm90")


# ---- What is built ----


def test_a_profile_must_name_them(tmp_path: Path) -> None:
    _, (plan,) = make_plans("sm80", (BACKWARD,))
    assert not set(NAMES) & set(plan.kernels)
    _, plan = planned(tmp_path)
    for name in NAMES:
        kernel = plan.kernels[name]
        capped, in_order = "_capped" in name, name.endswith("_ordered")
        last = ("f" if capped else "") + ("pi" if in_order else "")
        assert kernel.kernel.signature() == "44444444" + "pf" + 8 * "i" + last
        assert {v.constants["BOUNDED"] for v in kernel.variants.values()} == {3 if capped else 2}


@pytest.mark.slow
def test_what_was_baked(tmp_path: Path) -> None:
    """Of each form, and in order: matrix instructions, registers of the groups, no local memory."""
    read, plan = planned(tmp_path)
    kernels = [f"{BACKWARD}_groups_{kind}" for kind in ("64_local", "128_local_ordered", "256_capped")]
    variants = [v for v in plan.variants if v.kernel in kernels and v.axes["dtype"] == "bf16"]
    made = compile_variants(variants, read, cache=tmp_path / "cache", workers=1, progress=False)
    for variant in variants:
        audited = audit(variant, made[variant.name], read.arch)
        assert audited.facts.matrix["HGMMA"] > 0 and audited.facts.local_bytes == 0 and audited.resident == 1
        assert variant.constants["REGISTERS"] in audited.facts.register_budgets
    assert len(variants) == 3


# ---- What is launched ----


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("right", "last"), [(None, LONGEST), (5, 500 + 5 + 1)])
def test_grids_and_numbers(pack: Pack, deterministic: bool, right: int | None, last: int) -> None:
    """As without a left bound, and the bound: row r sees keys from r + 500 - 7 on."""
    problem = Problem(2, 6, 2, 1000, 1500, 64, window=(7, right), scale=0.5)
    launches, _ = launched(pack, problem, deterministic=deterministic)
    kernel = "groups_64_local_ordered" if deterministic else "groups_64_local"
    assert set(launches) == {"rows", kernel, "finish"}
    x, y, z, *arguments = launches[kernel]
    assert (x, y, z) == (2 * 2 * 12, 1, 1)
    assert arguments[9:18] == [0.5 * LOG2_E, 12, 2, 3, 1024, 1000, 1500, last, 500 - 7]
    at = arguments[8] + 4 * 2 * 6 * 1024 * 64
    assert arguments[18:] == ([at, -(-MULTIPROCESSORS // 12)] if deterministic else [])


@pytest.mark.parametrize("deterministic", [False, True])
def test_numbers_of_a_soft_cap(pack: Pack, deterministic: bool) -> None:
    """No bounds here; the cap is what scores are, and what products are multiplied by before its tanh."""
    problem = Problem(1, 2, 1, 100, 200, 200, softcap=20.0, scale=0.5)
    launches, _ = launched(pack, problem, deterministic=deterministic)
    _, _, _, *arguments = launches["groups_256_capped_ordered" if deterministic else "groups_256_capped"]
    assert arguments[9] == 20.0 * LOG2_E and arguments[16:19] == [LONGEST, -LONGEST, 0.5 / 20.0]
    assert launches["finish"][8] == 0.5 and len(arguments) == (21 if deterministic else 19)


WAYS = {
    "a window": (Problem(1, 2, 1, 100, 200, 128, window=(9, 0)), "groups_128_local"),
    "as wide as the keys": (Problem(1, 2, 1, 100, 200, 64, window=(199, 0)), "groups_64_causal"),
    "one key less": (Problem(1, 2, 1, 100, 200, 64, causal=True, window=(198, None)), "groups_64_local"),
    "a left bound alone": (Problem(1, 2, 1, 100, 200, 256, window=(9, None)), "groups_256_local"),
    "a soft cap": (Problem(1, 2, 1, 100, 200, 208, causal=True, softcap=5.0), "groups_256_capped"),
}


@pytest.mark.parametrize("name", WAYS)
def test_by_groups(pack: Pack, name: str) -> None:
    problem, kernel = WAYS[name]
    assert set(launched(pack, problem)[0]) == {"rows", kernel, "finish"}


def test_by_tiles(pack: Pack) -> None:
    """Soft caps of narrower heads, and where the pack has no such kernel."""
    problem = Problem(1, 2, 1, 100, 200, 64, window=(9, 0))
    assert set(launched(pack, problem._replace(softcap=5.0))[0]) == {"rows", "keys_capped", "queries_capped"}
    assert set(launched(built_pack("sm80"), problem)[0]) == {"rows", "keys", "queries"}


# ---- Gradients ----

# Windows that are smaller than a block, that end at an edge of one or a row beside it (a block's last row alone does
# not see a group's first key; a tile's last key alone is seen by a block of rows), and that are almost as long as the
# sequence; rows that see no key and keys that no row sees.
PROBLEMS = (
    Problem(1, 2, 1, 300, 300, 64, window=(40, 0)),
    Problem(1, 2, 1, 300, 300, 64, FP16, causal=True, window=(128, None)),
    Problem(2, 2, 1, 300, 300, 64, window=(190, 0), sinks=True),
    Problem(1, 1, 1, 300, 300, 64, window=(129, 0)),
    Problem(1, 1, 1, 257, 300, 64, window=(64, 63)),
    Problem(1, 1, 1, 200, 500, 64, window=(50, 0)),  # keys that no row sees: two tiles and a part
    Problem(1, 1, 1, 500, 200, 64, window=(50, 0)),  # rows that see none
    Problem(1, 1, 1, 400, 90, 64, window=(50, None)),
    Problem(1, 1, 1, 200, 333, 64, window=(0, 0)),
    Problem(1, 1, 1, 300, 300, 64, window=(298, 0)),
    Problem(1, 2, 1, 1, 300, 64, window=(30, 0)),
    Problem(1, 4, 2, 250, 300, 96, FP16, "bhsd", window=(70, 3)),
    Problem(1, 2, 1, 250, 300, 96, window=(48, None)),
    Problem(1, 2, 1, 300, 300, 128, window=(126, 0)),
    Problem(1, 1, 1, 300, 300, 128, window=(65, 0)),
    Problem(1, 2, 1, 260, 380, 104, FP16, "bhsd", window=(100, 20)),
    Problem(1, 2, 1, 150, 400, 128, window=(63, 0)),
    Problem(1, 2, 1, 260, 260, 192, window=(126, 0)),
    Problem(1, 2, 1, 130, 300, 200, FP16, window=(64, 10)),
    Problem(1, 1, 1, 300, 300, 256, window=(65, None)),
    Problem(1, 2, 1, 200, 260, 256, window=(70, 0), softcap=2.0, sinks=True),
    Problem(1, 2, 1, 150, 100, 256, causal=True, softcap=2.0),
    Problem(1, 1, 1, 70, 200, 216, FP16, "bhsd", softcap=50.0, scale=0.5),
)


@pytest.mark.interpreter
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_gradients(pack: Pack, problem: Problem, deterministic: bool, request: pytest.FixtureRequest) -> None:
    """Memory holds NaN until it is written in the deterministic calls alone: torch has no other way to fill it."""
    if deterministic:
        request.getfixturevalue("poisoned")
    from tests.warp_group_interpreter import WarpGroupDriver

    drivers: list[Any] = []

    def driver(op: str, of: Pack) -> Any:
        drivers.append(WarpGroupDriver(op, of))
        return drivers[-1]

    q, k, v, sinks = problem.tensors()
    keywords = {key: value for key, value in problem.keywords(sinks).items() if key != "return_lse"}
    o, lse = liger_aot.load("flash_attention")(q, k, v, **keywords, return_lse=True)
    do = torch.randn(o.shape).to(o.dtype)
    op = bound_op(FlashAttentionBackward, pack, driver)
    found = op(do, q, k, v, o, lse, deterministic=deterministic, **keywords)
    width = next(width for width in DIMS if problem.dim <= width)
    kind = f"{width}_{'capped' if problem.softcap else 'local'}{'_ordered' if deterministic else ''}"
    assert f"{BACKWARD}_groups_{kind}" in drivers[0].launched
    worst = gradient_errors(found, (q, k, v, sinks), do, None, problem, REFERENCE, approximate=False)
    assert max(worst.values()) <= 1, worst
