"""Attention's backward by warp groups without a GPU: what is built, what is launched and when, the order of dQ."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.attention.attention_candidates import BACKWARD, OPS, candidates, tables
from build_tools.audit import audit
from build_tools.build import Tree, make_plans
from build_tools.compile import Compiled, compile_variants
from build_tools.errors import AuditError
from build_tools.paths import PROFILES
from build_tools.plan import Plan
from build_tools.profile import Profile
from liger_aot.ops.attention._operands import LOG2_E, MAX_SEQLEN
from liger_aot.ops.attention.flash_attention_backward import FlashAttentionBackward
from liger_aot.runtime.dispatch import OpOn
from liger_aot.runtime.manifest import Pack
from tests.harness.drivers import MULTIPROCESSORS, InterpreterDriver
from tests.harness.planned_packs import tables_of
from tests.harness.recording import RecordingDriver, recorded
from tests.ops.attention.attention_cases import FP16, Problem

DIMS = (64, 96, 128, 192, 256)


def planned(folder: Path, number: int) -> tuple[Profile, Plan]:
    """Of a profile with the candidates of that number."""
    text = (PROFILES / "sm90.toml").read_text().partition(f"\n[kernel.{BACKWARD}_groups")[0]
    text += tables("sm90", candidates("sm90", "backward")[number], "a test")
    (folder / "sm90.toml").write_text(text)
    profile, (plan,) = make_plans("sm90", (BACKWARD,), Tree(profiles=folder))
    return profile, plan


# ---- What is built ----


def test_a_profile_must_name_them(tmp_path: Path) -> None:
    any_order = {f"{BACKWARD}_groups_{dim}{kind}" for dim in DIMS for kind in ("", "_causal")}
    groups = any_order | {f"{name}_ordered" for name in any_order}
    for arch in ("sm80", "gfx90a", "gfx942"):
        _, (plan,) = make_plans(arch, (BACKWARD,))
        assert not groups & set(plan.kernels)
    _, (plan,) = make_plans("sm90", (BACKWARD,))
    assert any_order | {f"{BACKWARD}_finish"} <= set(plan.kernels)
    _, plan = planned(tmp_path, 0)
    assert groups <= set(plan.kernels)
    for name in groups:
        kernel = plan.kernels[name]
        last = "pi" if name.endswith("_ordered") else "i" if "_causal" in name else ""
        assert kernel.kernel.signature() == "44444444" + "pf" + 7 * "i" + last
        for variant in kernel.variants.values():
            c = variant.constants
            assert c["D1"] + c["D2"] == int(re.findall(r"\d+", name)[0])
            assert c["BLOCK_N"] == (128 if c["D1"] + c["D2"] <= 128 else 64)
            assert c["BOUNDED"] == ("_causal" in name)
            assert variant.arguments["LSE2"] == f"tensordesc<fp32[1, 1, 1, {c['BLOCK_M']}]>"


def baked(variant: Any, profile: Profile, folder: Path) -> Compiled:
    made = compile_variants([variant], profile, cache=folder / "cache", workers=1, progress=False)
    return made[variant.name]


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "registers"), [(192, {192, 96, 32}), (256, {208, 64, 32})])
def test_what_was_baked_with_roles(tmp_path: Path, dim: int, registers: set[int]) -> None:
    """Three warp groups, whose registers differ, in the shared memory of one block."""
    read, (plan,) = make_plans("sm90", (BACKWARD,))
    kernel = f"{BACKWARD}_groups_{dim}"
    (variant,) = (v for v in plan.variants if v.kernel == kernel and v.axes["dtype"] == "fp16")
    audited = audit(variant, baked(variant, read, tmp_path), read.arch)
    assert audited.threads == 512 and registers <= set(audited.facts.register_budgets)
    assert audited.facts.matrix["HGMMA"] > 0 and audited.facts.local_bytes == 0 and audited.resident == 1


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "ahead"), [(96, True), (64, False)])
def test_what_was_baked(tmp_path: Path, dim: int, ahead: bool) -> None:
    """Matrix instructions, register budgets, no local memory; at 64 without AHEAD a register too many is refused."""
    packs = candidates("sm90", "backward")
    number = next(i for i, p in enumerate(packs) if p[f"{BACKWARD}_groups_{dim}"][0][1]["ahead"] is ahead)
    read, plan = planned(tmp_path, number)
    variant = next(
        v for v in plan.variants if v.kernel == f"{BACKWARD}_groups_{dim}" and v.axes["dtype"] == "bf16"
    )
    compiled = baked(variant, read, tmp_path)
    if not ahead:
        with pytest.raises(AuditError, match="spills"):
            audit(variant, compiled, read.arch)
        return
    audited = audit(variant, compiled, read.arch)
    assert audited.threads == 384 and {240, 24} <= set(audited.facts.register_budgets)
    assert audited.facts.matrix["HGMMA"] > 0 and audited.facts.local_bytes == 0 and audited.resident == 1
    boxes = [[1, 1, rows, 32] for rows in (64, 64, 64, 64, 64, 64)] + 2 * [[1, 1, 1, 64]]
    assert [m["box"] for m in compiled.maps] == boxes
    assert [m["swizzle"] for m in compiled.maps] == 6 * [2] + 2 * [0]


# ---- What is launched ----


class Recorder(RecordingDriver):
    prefix = f"{BACKWARD}_"


@pytest.fixture(scope="module")
def pack() -> Pack:
    return tables_of("sm90")


def launched(
    pack: Pack, problem: Problem, **other: Any
) -> tuple[dict[str, tuple[Any, ...]], tuple[Any, ...]]:
    """What one call launches, by kernel, and what it returns."""
    op, made = recorded(FlashAttentionBackward, pack, Recorder)
    q, k, v, sinks = problem.tensors()
    keywords = {key: value for key, value in problem.keywords(sinks).items() if key != "return_lse"}
    lse = torch.zeros(problem.batch, problem.heads, problem.len_q)
    return made[0].launches, (q, k, v, *op(q, q, k, v, q, lse, **keywords, **other))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_maps_grids_and_numbers(pack: Pack, layout: str) -> None:
    problem = Problem(2, 6, 2, 1000, 1500, 72, layout=layout, causal=True, scale=0.5)
    launches, (q, k, _, dq, dk, dv, _) = launched(pack, problem)
    assert set(launches) == {"rows", "groups_96_causal", "finish"}
    padded = 1024
    lse2, delta = launches["rows"][3:5]
    x, y, z, *arguments = launches["groups_96_causal"]
    assert (x, y, z) == (2 * 2 * 12, 1, 1)  # 12 tiles of 128 keys
    order = (0, 2, 1, 3) if layout == "bshd" else (0, 1, 2, 3)
    # dim 72 is read as 80, from copies
    for t, found in zip((q, k, k, q, k, k), arguments[:6], strict=True):
        seen = torch.empty(*t.shape[:-1], 80).permute(order)
        assert found[1:] == ("bf16", tuple(seen.shape), seen.stride(), (1, 1, 64, 32), 2)
    strides = (6 * padded, padded, 16, 1)
    for at, found in zip((lse2, delta), arguments[6:8], strict=True):
        assert found == (at, "fp32", (2, 6, 1, padded), strides, (1, 1, 1, 64), 0)
    sums, *numbers = arguments[8:]
    assert numbers == [0.5 * LOG2_E, 12, 2, 3, padded, 1000, 1500, 501, max(1, MULTIPROCESSORS // 12)]
    x, y, z, _, from_sums, *rest = launches["finish"]
    assert (x, y, z) == (2 * 6 * padded // 64 * 3, 1, 1) and from_sums == sums
    rows = (1000 * 6 * 80, 80, 6 * 80) if layout == "bshd" else (1000 * 6 * 80, 1000 * 80, 80)
    assert rest == [*rows, 0.5, padded // 64, 6, 3, 80, 1000]
    assert dq.shape == q.shape and dk.shape == dv.shape == k.shape


def test_wide_heads(pack: Pack) -> None:
    """A block has 64 keys; dim 200 is read as 208, in two panels of 128 columns."""
    problem = Problem(2, 6, 2, 1000, 1500, 200, FP16, layout="bhsd")
    launches, (q, k, _, dq, dk, dv, _) = launched(pack, problem)
    x, y, z, *arguments = launches["groups_256"]
    assert (x, y, z) == (2 * 2 * 24, 1, 1)  # 24 tiles of 64 keys
    for t, found in zip((q, k, k, q, k, k), arguments[:6], strict=True):
        seen = torch.empty(*t.shape[:-1], 208)
        assert found[1:] == ("fp16", tuple(seen.shape), seen.stride(), (1, 1, 64, 64), 3)
    assert arguments[10:14] == [24, 2, 3, 1024]
    assert launches["finish"][0] == 2 * 6 * 1024 // 64 * 8
    assert dq.shape == q.shape and dk.shape == dv.shape == k.shape


@pytest.mark.parametrize("deterministic", [False, True])
def test_sums_are_zeros_of_whole_blocks(
    pack: Pack, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind them the turns, an int32 for each block of 128 rows."""
    made: list[Tensor] = []
    original = Tensor.new_zeros

    def new_zeros(self: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        made.append(original(self, *arguments, **keywords))
        return made[-1]

    monkeypatch.setattr(Tensor, "new_zeros", new_zeros)
    launches, _ = launched(pack, Problem(1, 2, 1, 130, 70, 64), deterministic=deterministic)
    (zeros,) = made
    elements, turns = 2 * 256 * 64, 2 * 2 if deterministic else 0
    assert zeros.dtype == torch.float32 and zeros.shape == (elements + turns,)
    assert not zeros.view(torch.int32).any()
    at = zeros.data_ptr()
    arguments = launches["groups_64_ordered" if deterministic else "groups_64"][3:]
    assert arguments[8] == launches["finish"][4] == at
    assert arguments[16] == MAX_SEQLEN  # no bound
    # of heads of one tile each as many start together as there are multiprocessors
    assert arguments[17:] == ((at + 4 * elements, MULTIPROCESSORS) if deterministic else ())


GROUPS = {
    "full": (Problem(1, 2, 1, 100, 200, 64), "groups_64"),
    "causal": (Problem(1, 2, 1, 100, 200, 128, FP16, causal=True), "groups_128_causal"),
    "a right bound": (Problem(1, 2, 1, 100, 200, 40, window=(None, 3)), "groups_64_causal"),
    "one row": (Problem(1, 2, 1, 1, 200, 104, causal=True), "groups_128"),
    "sinks": (Problem(1, 2, 1, 100, 200, 96, sinks=True), "groups_96"),
    "wide heads": (Problem(1, 2, 1, 100, 200, 136), "groups_192"),
    "the widest": (Problem(1, 2, 1, 100, 200, 256, causal=True), "groups_256_causal"),
    "a left bound": (Problem(1, 2, 1, 100, 200, 64, window=(9, 0)), "groups_64_local"),
    "the widest, a soft cap": (Problem(1, 2, 1, 100, 200, 256, softcap=5.0), "groups_256_capped"),
}
TILES = {
    "a soft cap": Problem(1, 2, 1, 100, 200, 64, softcap=5.0),
    "both": Problem(1, 2, 1, 100, 200, 128, window=(9, 0), softcap=5.0),
}


@pytest.mark.parametrize("name", GROUPS)
def test_by_groups(pack: Pack, name: str) -> None:
    problem, kernel = GROUPS[name]
    sinks = {"sinks"} if problem.sinks else set()
    assert set(launched(pack, problem)[0]) == {"rows", kernel, "finish"} | sinks


@pytest.mark.parametrize("name", TILES)
def test_by_tiles(pack: Pack, name: str) -> None:
    assert set(launched(pack, TILES[name])[0]) == {"rows", "keys_capped", "queries_capped"}


@pytest.mark.parametrize("name", GROUPS)
def test_deterministic(pack: Pack, name: str) -> None:
    """The kernels in order; what is for the tiles stays theirs."""
    problem, kernel = GROUPS[name]
    sinks = {"sinks"} if problem.sinks else set()
    in_order = {"rows", f"{kernel}_ordered", "finish"} | sinks
    assert set(launched(pack, problem, deterministic=True)[0]) == in_order
    torch.use_deterministic_algorithms(True)
    try:
        assert set(launched(pack, problem)[0]) == in_order
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", TILES)
def test_deterministic_by_tiles(pack: Pack, name: str) -> None:
    found = launched(pack, TILES[name], deterministic=True)[0]
    assert set(found) == {"rows", "keys_capped", "queries_capped"}


def test_one_gradient_alone_takes_its_own_kernel(pack: Pack) -> None:
    from liger_aot.ops.attention._backward import gradients
    from liger_aot.ops.attention._operands import Settings

    q, k, v, _ = Problem(1, 2, 1, 100, 200, 64).tensors()
    recorder = Recorder(BACKWARD, pack)
    on = OpOn(pack.op(BACKWARD), recorder, -1, 2)
    saved, settings = (q, k, v, None, q, torch.zeros(1, 2, 100)), Settings(0.125, -1, -1, 0.0, "bshd")
    for needed, kernels in (
        ((True, False, False, False), {"rows", "queries"}),
        ((False, True, False, False), {"rows", "keys"}),
        ((True, False, True, False), {"rows", "groups_64", "finish"}),
    ):
        recorder.launches.clear()
        found = gradients(on, (q, None), saved, settings, needed)
        assert set(recorder.launches) == kernels
        assert [g is not None for g in found] == list(needed)


# ---- The order of dQ ----


def accumulators(rows: Tensor) -> Tensor:
    """[64, N] of rows as ``add_dq`` lays them out: by thread of the warp group, from the layout of wgmma's results."""
    out = torch.empty(rows.numel())
    for r in range(64):
        for c in range(rows.shape[1]):
            thread = 32 * (r // 16) + 4 * (r % 8) + c % 8 // 2
            out[512 * (c // 8) + 4 * thread + 2 * (r % 16 // 8) + c % 2] = rows[r, c]
    return out


@pytest.mark.interpreter
@pytest.mark.parametrize(("dim", "columns"), [(64, 64), (80, 96), (144, 192)])
def test_finish(pack: Pack, dim: int, columns: int) -> None:
    """Two heads of 100 rows in two tiles each, in a tensor whose rows lie apart."""
    on = OpOn(pack.op(BACKWARD), InterpreterDriver(BACKWARD, pack), -1, 2)
    loaded = on.kernels[f"{BACKWARD}_finish"]((FP16, True), dim)
    sums = torch.randn(2, 128, columns)
    laid = torch.cat([accumulators(tile) for tile in sums.view(-1, 64, columns)])
    dq = torch.full((1, 100, 2, dim + 16), torch.nan, dtype=FP16)
    pieces = columns // loaded.numbers["width"]
    strides = (dq.stride(0), dq.stride(2), dq.stride(1))
    loaded.launch(
        -1, 0, 4 * pieces, 1, 1, dq.data_ptr(), laid.data_ptr(), *strides, 0.25, 2, 2, pieces, dim, 100
    )
    wanted = (sums[:, :100, :dim] * 0.25).to(FP16)
    assert torch.equal(dq[0, :, :, :dim].transpose(0, 1), wanted) and dq[..., dim:].isnan().all()


def test_candidates_are_written_once() -> None:
    for direction in OPS:
        packs = candidates("sm90", direction)
        for kernel in {k for p in packs for k in p}:
            rows = [json.dumps([problem.max_n, row]) for p in packs for problem, row in p.get(kernel, ())]
            assert len(set(rows)) == len(rows)
