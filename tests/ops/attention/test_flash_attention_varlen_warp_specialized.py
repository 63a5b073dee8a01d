"""The warp-specialised varlen forward without a GPU: what is built and launched, where tensor maps end, results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_aot.errors import ArgumentError
from liger_aot.ops.attention._operands import HEAD_DIMS, LOG2_E
from liger_aot.ops.attention._varlen import MAX_TOKENS
from liger_aot.ops.attention.flash_attention_varlen import FlashAttentionVarlen, keys_in_l2
from liger_aot.runtime import device_errors
from liger_aot.runtime.manifest import Pack, Variant
from liger_aot_build.audit import audit
from liger_aot_build.build import make_plans
from tests.harness.drivers import bound_op
from tests.harness.planned_packs import compile_variants, tables_of
from tests.harness.recording import recorded
from tests.harness.tolerances import REFERENCE
from tests.harness.warp_group_interpreter import GroupsDriver
from tests.ops.attention.attention_cases import BF16, FP16, errors
from tests.ops.attention.varlen_cases import Problem

OP = "flash_attention_varlen"
KERNEL = f"{OP}_forward"
TILES = f"{KERNEL}_tiles"


# ---- What is built ----


def test_what_is_planned() -> None:
    for arch in ("sm80", "gfx90a", "gfx942"):
        _, (plan,) = make_plans(arch, (OP,))
        assert set(plan.kernels) == {TILES}
    _, (plan,) = make_plans("sm90", (OP,))
    assert set(plan.kernels) == {KERNEL, TILES}
    kernel = plan.kernels[KERNEL]
    assert kernel.kernel.signature() == "4444" + 6 * "p" + "f" + 10 * "i"
    assert {(v.axes["head_dim"], v.axes["mask"]) for v in kernel.variants.values()} == {
        (dim, mask) for dim in HEAD_DIMS for mask in ("full", "causal")
    }
    for variant in kernel.variants.values():
        c = variant.constants
        assert c["MASK"] == (variant.axes["mask"] == "causal")
        assert c["D1"] + c["D2"] == variant.axes["head_dim"] and c["D1"] % c["BOX"] == c["D2"] % c["BOX"] == 0
        assert c["OUT"] >= min(128, c["D1"])  # where the output goes through


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dim", "mask", "threads", "budgets"),
    [(64, "causal", 512, {160, 24}), (192, "causal", 384, {240, 32}), (256, "full", 384, {240, 32})],
)
def test_what_was_baked(tmp_path: Path, dim: int, mask: str, threads: int, budgets: set[int]) -> None:
    """Matrix instructions, register budgets, no local memory."""
    read, (plan,) = make_plans("sm90", (OP,))
    axes = {"dtype": "bf16", "head_dim": dim, "mask": mask}
    variant = next(v for v in plan.variants if v.kernel == KERNEL and v.axes == axes)
    compiled = compile_variants([variant], read, cache=tmp_path / "cache")
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
    assert kernel == KERNEL
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


def test_keys_in_l2() -> None:
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
    q, found = tensors[0], launches[KERNEL][3]
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


# Of each case the variant: its mask, and the length of its blocks of keys.
WARP_SPECIALIZED = {
    "full": ("full", 128, Problem(2, 1, (100,), (200,), 64)),
    "causal": ("causal", 128, Problem(2, 1, (100,), (4000,), 128, causal=True)),
    "causal, few keys": ("causal", 64, Problem(2, 1, (100,), (200,), 128, causal=True)),
    "a right bound": ("causal", 64, Problem(2, 1, (100,), (200,), 40, FP16, window=(None, 3))),
    "a right bound that binds nothing": ("full", 128, Problem(2, 1, (100,), (200,), 72, FP16, window=(None, 300))),
    "a left bound that binds nothing": ("causal", 64, Problem(2, 1, (100,), (200,), 192, window=(300, 0))),
    "sinks": ("full", 64, Problem(2, 1, (100,), (200,), 208, sinks=True)),
}  # fmt: skip
BY_TILES = {
    "a left bound": Problem(2, 1, (100,), (200,), 64, window=(9, 0)),
    "a soft cap": Problem(2, 1, (100,), (200,), 64, softcap=5.0),
}


def chosen(variant: Variant) -> tuple[str, int]:
    """Its mask and the length of its blocks of keys."""
    return ("full", "causal")[variant.numbers["mask"]], variant.numbers["block_n"]


@pytest.mark.parametrize("name", WARP_SPECIALIZED)
def test_which_variant(pack: Pack, name: str) -> None:
    *wanted, problem = WARP_SPECIALIZED[name]
    op, made = recorded(FlashAttentionVarlen, pack)
    *tensors, sinks = problem.tensors()
    op(*tensors, *problem.longest(), **problem.keywords(sinks))
    assert set(made[0].launches) == {KERNEL} and chosen(made[0].loaded[KERNEL]) == tuple(wanted)


def test_one_plan_for_all_lengths(pack: Pack) -> None:
    """max_seqlen_k chooses the variant, whatever it was in the calls before."""
    op, made = recorded(FlashAttentionVarlen, pack)
    *tensors, _ = Problem(2, 1, (100,), (200,), 64, causal=True).tensors()
    for max_seqlen_k in (200, 100_000, 1024, 1025, 200):
        op(*tensors, 100, max_seqlen_k, causal=True)
    (plan,) = op._plans.values()
    blocks = {n: of._loaded.numbers["block_n"] for n, of in plan._by_length.items()}
    assert blocks == {200: 64, 100_000: 128, 1024: 64, 1025: 128}
    assert len(plan._by_variant) == 2 and set(made[0].launches) == {KERNEL}


@pytest.mark.parametrize("name", BY_TILES)
def test_by_tiles(pack: Pack, name: str) -> None:
    problem = BY_TILES[name]
    assert set(launched(pack, problem, problem.tensors())[0]) == {TILES}


def test_by_tiles_where_no_map_can_start(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor larger than its address; other calls of the same plan are as ever."""
    before = []
    monkeypatch.setattr("liger_aot.ops.attention.flash_attention_varlen.bytes_before", lambda t: before[0])
    problem = Problem(2, 1, (100,), (200,), 64)
    for size, kernel in ((1 << 62, TILES), (0, KERNEL)):
        before[:] = [size]
        assert set(launched(pack, problem, problem.tensors())[0]) == {kernel}


# ---- The device code ----


# Lengths of 1, none, ends within a block and at its end; queries and keys of different lengths, rows that see no key,
# tokens behind the last sequence and none; two programs have several tiles each.
PROBLEMS = (
    Problem(2, 1, (200, 0, 1, 64), (270, 12, 200, 0), 64, causal=True, sinks=True, behind=(9, 5)),
    Problem(3, 3, (1, 129, 0, 300), (128, 165, 3, 40), 96, FP16),
    Problem(4, 2, (20, 140, 0, 7), (1150, 10, 3, 64), 128, causal=True, scale=0.5),
    Problem(1, 1, (129, 70), (140, 300), 160, FP16, causal=True, behind=(70, 0)),
    Problem(2, 1, (70, 0, 65), (64, 130, 20), 256, window=(None, 3)),
    Problem(1, 1, (5, 0, 70) * 22, (7, 3, 64) * 22, 64, behind=(3, 1)),  # more than are sorted at a time
)


@pytest.mark.interpreter
@pytest.mark.parametrize("seed", range(len(PROBLEMS)))
def test_results(pack: Pack, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the host's own launches, in memory that holds NaN: each sequence against float64, and its bits where NaN lies
    beside and behind it."""
    empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *size, **kind: empty(*size, **kind).fill_(math.nan))
    op = bound_op(FlashAttentionVarlen, pack, GroupsDriver)
    problem = PROBLEMS[seed]
    check_sequences(op, problem, REFERENCE, seed)
    on = op._own.of(torch.empty(1), "q")
    assert {name.partition("-")[0] for name in on._loaded} == {KERNEL}
    assert on.workspaces["counters"].on(0, 1).tolist() == [0]


def check_sequences(op: Any, problem: Problem, allowed: Mapping[str, float], seed: int) -> None:
    q, k, v, cu_q, cu_k, sinks = problem.tensors(seed)
    end_q, end_k = sum(problem.lengths_q), sum(problem.lengths_k)
    q[end_q:], k[end_k:], v[end_k:] = math.nan, math.nan, math.nan

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = op(*tensors, cu_q, cu_k, *problem.longest(), **problem.keywords(sinks))
        return found

    o, lse = run(q, k, v)
    assert not o[end_q:].any() and torch.isneginf(lse[:, end_q:]).all()
    pieces = [piece for piece in problem.pieces() if piece[0].len_q]
    for one, rows, keys in pieces if len(pieces) < 40 else pieces[::7]:
        own = q[rows][None], k[keys][None], v[keys][None], sinks
        assert max(errors(o[rows][None], lse[None, :, rows], own, one, allowed, approximate=False)) <= 1, one
    for kept in (pieces[::2], pieces[1::2]):
        alone = [torch.full_like(t, math.nan) for t in (q, k, v)]
        for _, rows, keys in kept:
            for t, of, own in zip(alone, (q, k, v), (rows, keys, keys), strict=True):
                t[own] = of[own]
        beside_nan, its_lse = run(*alone)
        for _, rows, _ in kept:
            assert torch.equal(beside_nan[rows], o[rows]) and torch.equal(its_lse[:, rows], lse[:, rows])
    past = cu_k.clone()
    past[-1] = k.shape[0] + 1000
    op(q, k, v, cu_q, past, problem.longest()[0], k.shape[0] + 1000, **problem.keywords(sinks))
    with pytest.raises(ArgumentError, match=f"{k.shape[0] + 1000}"):
        device_errors.raise_if_any(OP)
