"""Attention's backward by warp groups with a left bound or a soft cap, without a GPU: what is built and launched."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.attention.attention_candidates import BACKWARD, candidates, tables, without
from build_tools.audit import audit
from build_tools.build import Tree, make_plans
from build_tools.compile import compile_variants
from build_tools.paths import PROFILES
from build_tools.plan import Plan
from build_tools.profile import Profile
from liger_aot.ops.attention._operands import LOG2_E, MAX_SEQLEN
from liger_aot.runtime.manifest import Pack
from tests.harness.drivers import MULTIPROCESSORS
from tests.harness.planned_packs import tables_of
from tests.ops.attention.attention_cases import Problem
from tests.ops.attention.test_flash_attention_backward_groups import DIMS, launched

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
def pack() -> Pack:
    return tables_of("sm90")


# ---- What is built ----


def test_a_profile_must_name_them(tmp_path: Path) -> None:
    _, (plan,) = make_plans("sm80", (BACKWARD,))
    assert not set(NAMES) & set(plan.kernels)
    _, plan = planned(tmp_path)
    for name in NAMES:
        kernel = plan.kernels[name]
        capped, in_order = "_capped" in name, name.endswith("_ordered")
        last = ("f" if capped else "") + ("pi" if in_order else "i")
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
@pytest.mark.parametrize(("right", "last"), [(None, MAX_SEQLEN), (5, 500 + 5 + 1)])
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
    assert arguments[18:] == (
        [at, -(-MULTIPROCESSORS // 12)] if deterministic else [max(1, MULTIPROCESSORS // 12)]
    )


@pytest.mark.parametrize("deterministic", [False, True])
def test_numbers_of_a_soft_cap(pack: Pack, deterministic: bool) -> None:
    """No bounds here; the cap is what scores are, and what products are multiplied by before its tanh."""
    problem = Problem(1, 2, 1, 100, 200, 200, softcap=20.0, scale=0.5)
    launches, _ = launched(pack, problem, deterministic=deterministic)
    _, _, _, *arguments = launches["groups_256_capped_ordered" if deterministic else "groups_256_capped"]
    assert arguments[9] == 20.0 * LOG2_E and arguments[16:19] == [MAX_SEQLEN, -MAX_SEQLEN, 0.5 / 20.0]
    assert launches["finish"][8] == 0.5 and len(arguments) == (21 if deterministic else 20)


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
    assert set(launched(tables_of("sm80"), problem)[0]) == {"rows", "keys", "queries"}
