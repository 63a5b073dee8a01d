"""The packed forward by warp groups without a GPU: what is built, what is launched, where tensor maps end, the trial of
its candidates."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_aot
from benchmarks.attention import attention, attention_trial_packed
from build_tools.audit import audit
from build_tools.build import make_plans
from build_tools.compile import compile_variants
from liger_aot.ops.attention._operands import HEAD_DIMS, LOG2_E
from liger_aot.ops.attention._varlen import MAX_TOKENS
from liger_aot.ops.attention.flash_attention_varlen import FlashAttentionVarlen, groups_kernel, keys_in_l2
from liger_aot.runtime import device_errors
from liger_aot.runtime.manifest import Pack
from tests.harness.drivers import bound_op
from tests.harness.planned_packs import tables_of
from tests.harness.recording import recorded
from tests.harness.tolerances import REFERENCE
from tests.harness.warp_group_interpreter import GroupsDriver
from tests.ops.attention.attention_cases import BF16, FP16
from tests.ops.attention.varlen_cases import Problem

OP = "flash_attention_varlen"
TILES = f"{OP}_forward"
KERNEL = f"{TILES}_groups"


# ---- What is built ----


def test_a_profile_must_name_them() -> None:
    groups = {groups_kernel(dim, kind) for dim in HEAD_DIMS for kind in ("", "full")}
    groups |= {groups_kernel(dim, "short") for dim in (64, 96, 128)}
    for arch in ("sm80", "gfx90a", "gfx942"):
        _, (plan,) = make_plans(arch, (OP,))
        assert not groups & set(plan.kernels)
    _, (plan,) = make_plans("sm90", (OP,))
    assert groups | {TILES} == set(plan.kernels)
    for name in groups:
        kernel, dim = plan.kernels[name], int(name.removeprefix(f"{KERNEL}_").partition("_")[0])
        assert kernel.kernel.signature() == "4444" + 6 * "p" + "f" + 10 * "i"
        for variant in kernel.variants.values():
            c = variant.constants
            assert c["MASK"] == (not name.endswith("_full"))
            assert c["D1"] + c["D2"] == dim and c["D1"] % c["BOX"] == c["D2"] % c["BOX"] == 0
            assert c["OUT"] >= min(128, c["D1"])  # where the output goes through


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dim", "kind", "threads", "budgets"),
    [(64, "short", 512, {160, 24}), (192, "", 384, {240, 32}), (256, "full", 384, {240, 32})],
)
def test_what_was_baked(tmp_path: Path, dim: int, kind: str, threads: int, budgets: set[int]) -> None:
    """Matrix instructions, register budgets, no local memory."""
    read, (plan,) = make_plans("sm90", (OP,))
    name = groups_kernel(dim, kind)
    (variant,) = (v for v in plan.variants if v.kernel == name and v.axes["dtype"] == "bf16")
    compiled = compile_variants([variant], read, cache=tmp_path / "cache", workers=1, progress=False)
    audited = audit(variant, compiled[variant.name], read.arch)
    assert audited.threads == threads and budgets <= set(audited.facts.register_budgets)
    assert audited.facts.matrix["HGMMA"] > 0 and audited.facts.local_bytes == 0 and audited.resident == 1
    keys = variant.constants["BLOCK_N"]
    assert [m["box"] for m in compiled[variant.name].maps] == [
        [1, 1, rows, 64] for rows in (64, keys, keys, 64)
    ]


# ---- What is launched ----


@pytest.fixture
def pack() -> Pack:
    return tables_of("sm90")


def launched(pack: Pack, problem: Problem, tensors: list[Any]) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    """What one call launches, by kernel, and what it returns."""
    op, made = recorded(FlashAttentionVarlen, pack)
    *tensors, sinks = tensors
    return made[0].launches, op(*tensors, *problem.longest(), **problem.keywords(sinks))


@pytest.mark.parametrize("causal", [False, True])
def test_maps_grids_and_numbers(pack: Pack, causal: bool) -> None:
    """From shapes alone: no number depends on what cu_seqlens hold."""
    problem = Problem(6, 2, (900, 100), (600, 3900), 96, FP16, causal, scale=0.5, sinks=True, behind=(24, 36))
    tensors = problem.tensors()
    q, k, v, cu_q, cu_k, sinks = tensors
    launches, (o, lse) = launched(pack, problem, tensors)
    ((kernel, (x, y, z, *arguments)),) = launches.items()
    assert kernel == groups_kernel(96, "" if causal else "full")
    tiles = 1024 // 128 + 3
    assert (x, y, z) == (2, 1, 1)  # a multiprocessor each
    for t, keys, found in zip((q, k, v, o), (64, 128, 128, 64), arguments[:4], strict=True):
        tokens, heads, row = t.shape[0], t.shape[1], t.shape[1] * 96
        assert found == (
            t.data_ptr() - tokens * row * 2, "fp16", (tokens + 1, heads, tokens, 96), (row, 96, row, 1),
            (1, 1, keys, 32), 2,
        )  # fmt: skip
    flag, count = arguments[8:10]
    assert arguments[4:8] == [t.data_ptr() for t in (lse, sinks, cu_q, cu_k)] and flag == device_errors.flag(
        OP
    )
    assert count
    right = 1 if causal else MAX_TOKENS
    assert arguments[10:] == [
        0.5 * LOG2_E, 6 * tiles, 6, 3, keys_in_l2(96, 16, 2), 2, 1024, 4536, right, 900, 3900,
    ]  # fmt: skip
    assert o.shape == q.shape and lse.shape == (6, 1024)


def test_keys_together() -> None:
    assert keys_in_l2(128, 16, 2) == (16 << 20) // 512 and keys_in_l2(96, 1, 2) == (1 << 20) // 384


def elements(
    found: tuple[Any, ...], place: int, head: int, row: int, column: int, t: Tensor
) -> tuple[int, ...] | None:
    """What of ``t`` TMA reads or writes at coordinates of a map: (token, head, column); None where it is outside."""
    address, _, sizes, strides, _, _ = found
    at = (place, head, row, column)
    if not all(0 <= c < size for c, size in zip(at, sizes, strict=True)):
        return None
    offset = address - t.data_ptr() + t.element_size() * sum(c * s for c, s in zip(at, strides, strict=True))
    index = offset // t.element_size()
    assert offset % t.element_size() == 0
    token, rest = divmod(index, t.stride(0))
    return token, *divmod(rest, t.stride(1))


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("strided", [False, True])
def test_maps_end_where_a_sequence_does(pack: Pack, tokens: int, strided: bool) -> None:
    """Row ``tokens - length + r`` at place ``start + length`` is row r of any sequence, its rows from ``length`` on are
    outside of the map, and nothing else of the tensor is in reach."""
    problem = Problem(2, 2, (tokens,), (tokens,), 64)
    tensors = problem.tensors()
    if strided:
        tensors[0] = torch.zeros(tokens, 3, 2, 64, dtype=BF16)[:, 1]
    launches, _ = launched(pack, problem, tensors)
    q, found = tensors[0], launches[groups_kernel(64, "full")][3]
    for start in range(tokens + 1):
        for length in range(tokens - start + 1):
            place, past = start + length, tokens - length
            for r in range(-1 if past else 0, length + 192):
                seen = elements(found, place, 1, past + r, 63, q)
                if 0 <= r < length:
                    assert seen == (start + r, 1, 63)
                elif r >= 0:
                    assert seen is None
    assert elements(found, tokens, 2, 0, 0, q) is None and elements(found, tokens, 0, 0, 64, q) is None


GROUPS = {
    "full": ("full", Problem(2, 1, (100,), (200,), 64)),
    "causal": ("", Problem(2, 1, (100,), (4000,), 128, causal=True)),
    "causal, short": ("short", Problem(2, 1, (100,), (200,), 128, causal=True)),
    "a right bound": ("short", Problem(2, 1, (100,), (200,), 40, FP16, window=(None, 3))),
    "a right bound that binds nothing": ("full", Problem(2, 1, (100,), (200,), 72, FP16, window=(None, 300))),
    "a left bound that binds nothing": ("", Problem(2, 1, (100,), (200,), 192, window=(300, 0))),
    "sinks": ("full", Problem(2, 1, (100,), (200,), 208, sinks=True)),
}
BY_TILES = {
    "a left bound": Problem(2, 1, (100,), (200,), 64, window=(9, 0)),
    "a soft cap": Problem(2, 1, (100,), (200,), 64, softcap=5.0),
}


@pytest.mark.parametrize("name", GROUPS)
def test_by_groups(pack: Pack, name: str) -> None:
    kind, problem = GROUPS[name]
    assert set(launched(pack, problem, problem.tensors())[0]) == {groups_kernel(problem.dim, kind)}


@pytest.mark.parametrize("lacks", ["full", "short"])
def test_a_pack_without_a_kind(pack: Pack, lacks: str) -> None:
    """The kernel for all computes its calls."""
    problem = Problem(2, 1, (100,), (200,), 64, causal=lacks == "short")
    op, made = recorded(FlashAttentionVarlen, pack)
    on = op._own.of(torch.empty(1), "q")
    on.kernels = {name: kernel for name, kernel in on.kernels.items() if not name.endswith(lacks)}
    *tensors, sinks = problem.tensors()
    op(*tensors, *problem.longest(), **problem.keywords(sinks))
    assert set(made[0].launches) == {groups_kernel(64)}


def test_one_plan_for_short_and_long(pack: Pack) -> None:
    """What a call says of its longest sequence chooses, whatever the calls before it said."""
    op, made = recorded(FlashAttentionVarlen, pack)
    problem = Problem(2, 1, (100,), (200,), 64, causal=True)
    *tensors, sinks = problem.tensors()
    for longest, kind in ((200, "short"), (100_000, ""), (1024, "short"), (1025, "")):
        made[0].launches.clear()
        op(*tensors, 100, longest, **problem.keywords(sinks))
        assert set(made[0].launches) == {groups_kernel(64, kind)}
    assert len(op._plans) == 1


@pytest.mark.parametrize("name", BY_TILES)
def test_by_tiles(pack: Pack, name: str) -> None:
    problem = BY_TILES[name]
    assert set(launched(pack, problem, problem.tensors())[0]) == {TILES}


def test_by_tiles_where_no_map_can_start(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor larger than its address; other calls of the same plan are as ever."""
    before = []
    monkeypatch.setattr("liger_aot.ops.attention._varlen_groups.bytes_before", lambda t: before[0])
    for size, kernel in ((1 << 62, TILES), (0, groups_kernel(64, "full"))):
        before[:] = [size]
        _, problem = GROUPS["full"]
        assert set(launched(pack, problem, problem.tensors())[0]) == {kernel}


# ---- The device code ----


# Lengths of 1, none, ends within a block and at its end; queries and keys of different lengths, rows that see no key,
# tokens behind the last sequence and none; two programs have several tiles each.
PROBLEMS = (
    ("short", Problem(2, 1, (200, 0, 1, 64), (270, 12, 200, 0), 64, causal=True, sinks=True, behind=(9, 5))),
    ("full", Problem(3, 3, (1, 129, 0, 300), (128, 165, 3, 40), 96, FP16)),
    ("", Problem(4, 2, (20, 140, 0, 7), (1150, 10, 3, 64), 128, causal=True, scale=0.5)),
    ("", Problem(1, 1, (129, 70), (140, 300), 160, FP16, causal=True, behind=(70, 0))),
    ("", Problem(2, 1, (70, 0, 65), (64, 130, 20), 256, window=(None, 3))),
    (
        "full",
        Problem(1, 1, (5, 0, 70) * 22, (7, 3, 64) * 22, 64, behind=(3, 1)),
    ),  # more than are sorted at a time
)


@pytest.mark.interpreter
@pytest.mark.parametrize("seed", range(len(PROBLEMS)))
def test_results(pack: Pack, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the host's own launches, beside NaN behind and between sequences, in memory that holds NaN."""
    empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *size, **kind: empty(*size, **kind).fill_(math.nan))
    op = bound_op(FlashAttentionVarlen, pack, GroupsDriver)
    kind, problem = PROBLEMS[seed]
    on = op._own.of(torch.empty(1), "q")
    found = attention_trial_packed.check(
        op, reference_tiles, on, groups_kernel(problem.dim, kind), problem, REFERENCE, seed, "cpu"
    )
    assert not found["wrong"], found
    assert on.plans["counters"].on(0, 1).tolist() == [0]


# ---- The trial ----


@pytest.mark.parametrize("kind", ["", "full", "short"])
@pytest.mark.parametrize("width", HEAD_DIMS)
def test_cases_are_the_kernels(pack: Pack, width: int, kind: str) -> None:
    """Each case of a kernel is one that the host would give it, or the one for few keys."""
    cases = attention_trial_packed.cases_of(groups_kernel(width, kind))
    assert len(cases) > 3
    for problem in cases:
        if sum(problem.lengths_q) < 3000:
            may = {groups_kernel(width, k) for k in ({kind} if kind == "full" else {"", "short"})}
            assert set(launched(pack, problem, problem.tensors())[0]) <= may, problem


@pytest.mark.parametrize("wrong", ["", "scale", "vary", "launched", "behind", "leak"])
def test_checks_notice(wrong: str) -> None:
    """The reference passes; results that are off, vary, depend on neighbours or reach behind sequences, and another
    kernel do not."""
    reference = liger_aot.load(OP)
    calls: list[int] = []

    def op(q: Tensor, k: Tensor, v: Tensor, *others: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        calls.append(1)
        o, lse = reference(q, *(t.nan_to_num() for t in (k, v)), *others, **keywords)
        if wrong == "scale":
            o = o * 1.05
        if wrong == "vary" and len(calls) == 2:
            o = o * 1.01
        if wrong == "behind":
            o[-1] = 1.0
        if wrong == "leak" and v[:40].isnan().any():
            o[40:50] = torch.nan
        return o, lse

    on = SimpleNamespace(_loaded={f"{'another' if wrong == 'launched' else KERNEL + '_64'}-groups": None})
    problem = Problem(2, 1, (40, 0, 20, 7), (40, 12, 10, 0), 64, causal=True, behind=(9, 5))
    found = attention_trial_packed.check(
        op, reference_tiles, on, f"{KERNEL}_64", problem, REFERENCE, 1, "cpu"
    )
    assert bool(found["wrong"]) == bool(wrong), found
    assert {
        "": "",
        "scale": "errors",
        "vary": "from run to run",
        "launched": "were launched",
        "behind": "behind the last",
        "leak": "beside it",
    }[wrong] in found["wrong"]


def reference_tiles(q: Tensor, k: Tensor, v: Tensor, *others: Any, **keywords: Any) -> Any:
    return liger_aot.load(OP)(q, k.nan_to_num(), v.nan_to_num(), *others, **keywords)


def test_what_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uneven and even sequences of the same FLOPs; every provider gives o."""
    monkeypatch.setattr(attention, "TOKENS", 80)
    monkeypatch.setattr(attention, "WIDTH", 128)
    packed, dense = liger_aot.load(OP), liger_aot.load("flash_attention")
    runs, flops = attention_trial_packed.runs({3: (packed, packed)}, dense, 64, 20, True, "cpu")
    assert list(runs) == list(flops) == ["tiles", "3", "flash_attention_2", "dense"]
    assert runs["tiles"]()[0].shape == runs["3"]()[0].shape == (64, 2, 64)
    assert runs["dense"]()[0].shape == (4, 20, 2, 64)
    assert flops["3"] == flops["tiles"] == pytest.approx(flops["dense"], rel=0.01)
