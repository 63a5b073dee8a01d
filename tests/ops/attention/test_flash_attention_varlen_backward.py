"""The warp-specialised backward of packed sequences without a GPU: what is built, what is launched and when, its device
code run as Python."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_aot
from liger_aot.ops.attention._operands import HEAD_DIMS, LOG2_E, padded_head_dim
from liger_aot.ops.attention._varlen import MAX_TOKENS
from liger_aot.ops.attention._varlen_backward import UNIT, varlen_swizzle_heads
from liger_aot.ops.attention.flash_attention_varlen import FlashAttentionVarlen
from liger_aot.ops.attention.flash_attention_varlen_backward import FlashAttentionVarlenBackward
from liger_aot.runtime.manifest import Pack
from liger_aot_build.audit import audit
from liger_aot_build.build import make_plans
from tests.harness.drivers import bound_op
from tests.harness.planned_packs import compile_variants, tables_of
from tests.harness.recording import RecordingDriver, all_launches, recorded
from tests.harness.tolerances import REFERENCE
from tests.harness.warp_group_interpreter import GroupsDriver
from tests.ops.attention.attention_cases import FP16
from tests.ops.attention.varlen_cases import Problem, check_backward

OP = "flash_attention_varlen_backward"
DENSE = "flash_attention_backward"
KERNEL = f"{OP}_warp_specialized"
TILES = {f"{DENSE}_preprocess", f"{OP}_dkdv", f"{OP}_dq"}
WARP_SPECIALIZED = {f"{OP}_preprocess", KERNEL, f"{OP}_postprocess"}


# ---- What is built ----


def test_which_there_are() -> None:
    for arch in ("sm80", "gfx90a", "gfx942"):
        _, (plan,) = make_plans(arch, (OP,))
        assert not WARP_SPECIALIZED & set(plan.kernels)
    _, (plan,) = make_plans("sm90", (OP,))
    kernel = plan.kernels[KERNEL]
    assert set(kernel.tables) == {f"{dtype}/{dim}/aligned" for dtype in ("bf16", "fp16") for dim in HEAD_DIMS}
    for variant in kernel.variants.values():
        c = variant.constants
        assert c["D1"] + c["D2"] == variant.axes["head_dim"] and UNIT % c["BLOCK_M"] == 0
        assert c["BLOCK_N"] == (64 if c["D1"] + c["D2"] > 128 else 128)
    for variant in plan.kernels[f"{OP}_preprocess"].variants.values():
        assert UNIT % variant.constants["BLOCK_M"] == 0


def test_host_and_kernels_agree_on_padded_rows() -> None:
    assert import_module("csrc_triton.attention.varlen").UNIT.value == UNIT


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "dtype"), [(64, "bf16"), (128, "fp16"), (192, "fp16"), (256, "bf16")])
def test_what_was_baked(tmp_path: Path, dim: int, dtype: str) -> None:
    """Matrix instructions, the warp groups' registers, no local memory."""
    read, (plan,) = make_plans("sm90", (OP,))
    (variant,) = (
        v for v in plan.variants if v.kernel == KERNEL and v.axes == {"dtype": dtype, "head_dim": dim}
    )
    made = compile_variants([variant], read, cache=tmp_path / "cache")
    audited = audit(variant, made[variant.name], read.arch)
    budgets = {192: {192, 96, 32}, 256: {208, 64, 32}}.get(dim, {240, 24})
    assert audited.threads == (512 if dim > 128 else 384) and budgets <= set(audited.facts.register_budgets)
    assert audited.facts.matrix["HGMMA"] > 0 and audited.facts.local_bytes == 0 and audited.resident == 1
    rows = variant.constants["BLOCK_M"]
    assert [m["box"][2] for m in made[variant.name].maps] == [rows, 64, 64, rows, 64, 64, 1, 1]


# ---- What is launched ----


@pytest.fixture(scope="module")
def pack() -> Pack:
    return tables_of("sm90")


def launched(
    pack: Pack, problem: Problem, tensors: list[Any] | None = None, **other: Any
) -> tuple[dict[str, Any], str, tuple[Any, ...]]:
    """What one call launches, by kernel; the form and axes of the warp-specialised one; what the call returns."""
    op, made = recorded(FlashAttentionVarlenBackward, pack)
    q, k, v, cu_q, cu_k, sinks = tensors or problem.tensors()
    keywords = {key: value for key, value in problem.keywords(sinks).items() if key != "return_lse"}
    lse = torch.zeros(problem.heads, q.shape[0])
    found = op(q, q, k, v, q, lse, cu_q, cu_k, *problem.longest(), **keywords, **other)
    names = [d.loaded[KERNEL].name for d in made if KERNEL in d.loaded]
    variant = "".join(name.removeprefix(f"{KERNEL}-").partition("-aligned")[0] for name in names)
    return all_launches(made), variant, found


@pytest.mark.parametrize("causal", [False, True])
def test_maps_grids_and_numbers(pack: Pack, causal: bool) -> None:
    """From shapes alone: no number depends on what cu_seqlens hold."""
    problem = Problem(6, 2, (900, 100), (600, 900), 96, FP16, causal, scale=0.5, sinks=True, behind=(24, 36))
    tensors = problem.tensors()
    q, k, v, cu_q, cu_k, _ = tensors
    launches, variant, (dq, dk, dv, dsinks) = launched(pack, problem, tensors)
    assert set(launches) == {*WARP_SPECIALIZED, f"{DENSE}_sinks"} and variant == "narrow-fp16-96"
    padded = (1024 // 128 + 3) * 128
    row, kv_row = 6 * 96, 2 * 96

    programs, _, _, lse2, delta, *rest = launches[f"{OP}_preprocess"]
    assert programs == 6 * padded // 32 and delta == lse2 + 6 * padded * 4
    assert rest[:2] == [q.data_ptr(), q.data_ptr()] and rest[3:5] == [None, cu_q.data_ptr()]
    assert rest[5:] == [96, row, 96, row, padded // 32, 96, padded, 2, 1024]

    x, y, z, *arguments = launches[KERNEL]
    tiles = 1536 // 128 + 3
    assert (x, y, z) == (2 * tiles, 1, 1)
    for t, found in zip((q, k, v, q, dk, dv), arguments[:6], strict=True):
        tokens, heads, stride = t.shape[0], t.shape[1], t.shape[1] * 96
        assert found[:-1] == (
            t.data_ptr() - tokens * stride * 2, "fp16", (tokens + 1, heads, tokens, 96), (stride, 96, stride, 1),
            (1, 1, 64, 32),
        )  # fmt: skip
        assert stride in (row, kv_row)
    for at, found in zip((lse2, delta), arguments[6:8], strict=True):
        assert found[:4] == (at, "fp32", (1, 6, 1, padded), (16, padded, 16, 1)) and found[4] == (1, 1, 1, 64)
    dq32, *rest = arguments[8:]
    assert rest[:2] == [cu_q.data_ptr(), cu_k.data_ptr()]
    right = 1 if causal else MAX_TOKENS
    assert rest[2:] == [0.5 * LOG2_E, tiles, 3, padded, 1, 2, 1024, 1536, right]

    assert launches[f"{OP}_postprocess"] == (
        6 * padded // 64 * 3, 1, 1, dq.data_ptr(), dq32, cu_q.data_ptr(), 96, row, 0.5, padded // 64, 3, 96, 2, 1024,
    )  # fmt: skip
    assert launches[f"{DENSE}_sinks"][-5:] == (lse2, delta, 1, 6, padded)
    assert dq.shape == q.shape and dk.shape == dv.shape == k.shape and dsinks.shape == (6,)


def test_varlen_swizzle_heads() -> None:
    """All where sequences are short, a divisor of all; none where a head fills the GPU twice."""
    on: Any = SimpleNamespace(multiprocessors=132)
    loaded: Any = SimpleNamespace(numbers={"waves": 2})
    found = [varlen_swizzle_heads(on, loaded, 12, n) for n in (1, 22, 30, 60, 100, 132, 263, 264, 1000)]
    assert found == [12, 12, 6, 4, 3, 2, 2, 1, 1]
    assert [varlen_swizzle_heads(on, loaded, heads, n) for heads, n in ((7, 50), (1, 1))] == [1, 1]


VARIANTS = {
    "full": (Problem(2, 1, (100,), (200,), 64), "narrow-bf16-64"),
    "causal": (Problem(2, 1, (100,), (200,), 128, causal=True), "narrow-bf16-128"),
    "a right bound": (Problem(2, 1, (100,), (200,), 40, FP16, window=(None, 3)), "narrow-fp16-64"),
    "wide heads": (Problem(2, 1, (100,), (200,), 136), "wide-bf16-192"),
    "a left bound that binds nothing": (Problem(2, 1, (100,), (200,), 72, window=(300, 0)), "narrow-bf16-96"),
}
BY_TILES = {
    "a left bound": (Problem(2, 1, (100,), (200,), 64, window=(9, 0)), {}),
    "a soft cap": (Problem(2, 1, (100,), (200,), 64, softcap=5.0), {}),
    "deterministic": (Problem(2, 1, (100,), (200,), 64), {"deterministic": True}),
}
FULL = VARIANTS["full"][0]


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(pack: Pack, name: str) -> None:
    problem, wanted = VARIANTS[name]
    launches, variant, _ = launched(pack, problem)
    assert (set(launches), variant) == (WARP_SPECIALIZED, wanted)


@pytest.mark.parametrize("name", BY_TILES)
def test_by_tiles(pack: Pack, name: str) -> None:
    problem, keywords = BY_TILES[name]
    assert set(launched(pack, problem, **keywords)[0]) == TILES


def test_torchs_deterministic_algorithms_take_the_tiles(pack: Pack) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert set(launched(pack, FULL)[0]) == TILES
    finally:
        torch.use_deterministic_algorithms(False)


def test_no_tensor_maps_take_the_tiles(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordingDriver, "tensor_map", None)
    assert set(launched(pack, FULL)[0]) == TILES


def test_a_pack_without_them_has_the_tiles() -> None:
    assert set(launched(tables_of("sm80"), FULL)[0]) == TILES


def test_one_gradient_alone_takes_its_own_kernel(pack: Pack) -> None:
    q, k, v, cu_q, cu_k, _ = (problem := FULL).tensors()
    for need, kernels in (
        ((True, False, False), TILES - {f"{OP}_dkdv"}),
        ((False, True, True), TILES - {f"{OP}_dq"}),
        ((True, False, True), WARP_SPECIALIZED),
    ):
        op, made = recorded(FlashAttentionVarlen, pack)
        saved = (q, k, v, cu_q, cu_k, None, q, torch.zeros(2, 100))
        settings = (*problem.longest(), *problem.settings()[2:])
        found = op.run_backward((q, None), saved, settings, (*need, False, False, False))
        assert set(all_launches(made)) == kernels
        assert [g is not None for g in found] == [*need, False, False, False]


def test_by_tiles_where_no_map_can_start(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor larger than its address."""
    monkeypatch.setattr("liger_aot.ops.attention._varlen_backward.bytes_before", lambda t: 1 << 62)
    assert set(launched(pack, FULL)[0]) == TILES


def test_what_is_remembered_holds_no_tensor(pack: Pack) -> None:
    op, _ = recorded(FlashAttentionVarlenBackward, pack)
    q, k, v, *starts, _ = (problem := FULL).tensors()
    op(q, q, k, v, q, torch.zeros(2, 100), *starts, *problem.longest())
    left = [weakref.ref(t) for t in (q, k, v, *starts)]
    del q, k, v, starts
    assert [t() for t in left] == 5 * [None]


# ---- The device code ----


# Lengths of 1, none, ends in a block's first half and at its end; queries and keys of different lengths, rows that see
# no key, tokens behind the last sequence and none.
PROBLEMS = (
    Problem(2, 1, (130, 0, 1, 64), (70, 12, 200, 0), 64, causal=True, sinks=True, behind=(9, 5)),
    Problem(2, 2, (1, 129, 0), (128, 65, 0), 64, FP16),
    Problem(1, 1, (0, 100, 3), (20, 193, 1), 96, FP16, causal=True, behind=(1, 0)),
    Problem(3, 1, (65, 1), (1, 130), 72, behind=(0, 140)),
    Problem(2, 1, (20, 140, 0, 7), (150, 10, 3, 64), 128, causal=True, scale=0.5),
    Problem(1, 1, (64, 70), (128, 129), 104, FP16, window=(None, 3), sinks=True, behind=(80, 1)),
    Problem(1, 1, (300,), (50,), 128, scale=32.0),
    Problem(2, 1, (70, 0, 1, 64), (70, 12, 130, 0), 192, causal=True, sinks=True, behind=(9, 5)),
    Problem(4, 4, (65, 3), (64, 1), 136, FP16, behind=(0, 70)),  # two sets of heads
    Problem(2, 1, (129, 10), (65, 30), 256, FP16, causal=True, behind=(1, 0)),
    Problem(3, 1, (1, 64, 0), (66, 20, 3), 208, window=(None, 3), scale=0.5),
)


def seeds() -> Iterator[Any]:
    """The first problem of each kernel, and the others, which are slow."""
    seen = set()
    for seed, problem in enumerate(PROBLEMS):
        width = padded_head_dim(problem.dim)
        yield pytest.param(seed, marks=[pytest.mark.slow] if width in seen else [])
        seen.add(width)


@pytest.mark.interpreter
@pytest.mark.parametrize("seed", list(seeds()))
def test_gradients(pack: Pack, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the host's own launches, beside NaN behind and between sequences, in memory that holds NaN."""
    empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *size, **kind: empty(*size, **kind).fill_(math.nan))
    op = bound_op(FlashAttentionVarlenBackward, pack, GroupsDriver)
    problem = PROBLEMS[seed]
    check_backward(op, problem, REFERENCE, seed)
    variant = f"-{'fp16' if problem.dtype == FP16 else 'bf16'}-{padded_head_dim(problem.dim)}-aligned"
    loaded = [*op._own.of(torch.empty(1), "q")._loaded]
    assert any(name.startswith(KERNEL) and variant in name for name in loaded), loaded


@pytest.mark.parametrize("wrong", ["", "scale", "vary", "behind", "leak", "idle"])
def test_the_check_notices(wrong: str) -> None:
    """The reference passes; gradients that are off, vary, depend on neighbours, reach behind sequences or of keys
    without queries do not."""
    calls: list[int] = []

    def op(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, *others: Any, **keywords: Any) -> Any:
        calls.append(1)
        given = (t.nan_to_num() for t in (do, q, k, v, o))
        dq, dk, dv, dsinks = liger_aot.load(OP)(*given, *others, **keywords)
        if wrong == "scale":
            dq = dq * 1.05
        if wrong == "vary" and len(calls) == 2:
            dk = dk * 1.01
        if wrong == "behind":
            dv[-1] = 1.0
        if wrong == "leak" and v[:40].isnan().any():
            dq[60:62] = math.nan
        if wrong == "idle":
            dk[40:45] = 1.0
        return dq, dk, dv, dsinks

    problem = Problem(2, 1, (40, 0, 20, 7), (40, 12, 10, 0), 64, causal=True, sinks=True, behind=(9, 5))
    if not wrong:
        check_backward(op, problem, REFERENCE, 1)
        return
    said = {
        "scale": "off by",
        "vary": "from run to run",
        "behind": "behind the last",
        "leak": "beside NaN",
        "idle": "keys without queries",
    }
    with pytest.raises(AssertionError, match=said[wrong]):
        check_backward(op, problem, REFERENCE, 1)


@pytest.mark.interpreter
@pytest.mark.parametrize("starts", [(0, 60, 20), (0, 20, 900), (7, 20, 60), (0, -5, 60), (60, 0, 60)])
@pytest.mark.parametrize("which", [3, 4])
def test_starts_out_of_order_or_range(pack: Pack, starts: tuple[int, ...], which: int) -> None:
    """They give any numbers, but nothing waits for ever, and nothing beside the tensors is touched."""
    problem = Problem(1, 1, (20, 40), (20, 40), 64, causal=True)
    tensors = problem.tensors()
    tensors[which] = torch.tensor(starts, dtype=torch.int32)
    q, k, v, *_ = tensors
    op = bound_op(FlashAttentionVarlenBackward, pack, GroupsDriver)
    found = op(q, q, k, v, q, torch.zeros(1, 60), *tensors[3:5], *problem.longest(), causal=True)
    assert [g.shape for g in found[:3]] == [q.shape, k.shape, v.shape]
