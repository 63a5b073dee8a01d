"""Attention's warp-specialised backward without a GPU: what is built, what is launched and when, and its gradients: the
device code as Python, by the host's launches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_aot
from liger_aot.ops.attention._backward import gradients
from liger_aot.ops.attention._operands import HEAD_DIMS, LOG2_E, MAX_SEQLEN, Settings, padded_head_dim
from liger_aot.ops.attention.flash_attention_backward import FlashAttentionBackward
from liger_aot.runtime.dispatch import OpOn
from liger_aot.runtime.manifest import Pack
from liger_aot_build.audit import audit
from liger_aot_build.build import make_plans
from tests.harness.drivers import MULTIPROCESSORS, InterpreterDriver, bound_op
from tests.harness.planned_packs import compile_variants, tables_of
from tests.harness.recording import RecordingDriver, recorded
from tests.harness.tolerances import REFERENCE
from tests.harness.warp_group_interpreter import GroupsDriver
from tests.ops.attention.attention_cases import FP16, Problem
from tests.ops.attention.attention_gradients import gradient_errors

BACKWARD = "flash_attention_backward"
KERNEL = f"{BACKWARD}_warp_specialized"
TILES = {"preprocess", "dkdv", "dq"}
WARP_SPECIALIZED = {"preprocess", "warp_specialized", "postprocess"}


# ---- What is built ----


def test_which_there_are() -> None:
    """Every head dimension and mask in both orders, a soft cap at 256; no architecture but sm90 has any."""
    for arch in ("sm80", "gfx90a", "gfx942"):
        _, (plan,) = make_plans(arch, (BACKWARD,))
        assert KERNEL not in plan.kernels
    _, (plan,) = make_plans("sm90", (BACKWARD,))
    kernel = plan.kernels[KERNEL]
    masks = [(dim, mask, False) for dim in HEAD_DIMS for mask in ("full", "causal", "local")]
    assert set(kernel.tables) == {
        f"{dtype}/{dim}/{mask}/{str(softcap).lower()}/{deterministic}/aligned"
        for dtype in ("bf16", "fp16")
        for dim, mask, softcap in (*masks, (256, "local", True))
        for deterministic in ("false", "true")
    }
    for variant in kernel.variants.values():
        c, axes = variant.constants, variant.axes
        assert c["D1"] + c["D2"] == axes["head_dim"] and c["BLOCK_N"] == (
            64 if c["D1"] + c["D2"] > 128 else 128
        )
        given = {"left": axes["mask"] == "local", "cap": axes["softcap"], "SEMAPHORE": axes["deterministic"]}
        assert {name: name in variant.arguments for name in given} == given
        assert [*variant.arguments][-1] == "swizzle_heads"
        assert variant.arguments["LSE2"] == f"tensordesc<fp32[1, 1, 1, {c['BLOCK_M']}]>"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dim", "mask", "softcap", "deterministic", "registers"),
    [
        (64, "local", False, False, {240, 24}),
        (96, "full", False, False, {240, 24}),
        (128, "local", False, True, {240, 24}),
        (192, "full", False, False, {192, 96, 32}),
        (256, "local", True, False, {208, 64, 32}),
    ],
)
def test_what_was_baked(
    tmp_path: Path, dim: int, mask: str, softcap: bool, deterministic: bool, registers: set[int]
) -> None:
    """Matrix instructions, the warp groups' registers, no local memory, the boxes of tensor maps."""
    read, (plan,) = make_plans("sm90", (BACKWARD,))
    wanted = {
        "dtype": "bf16", "head_dim": dim, "mask": mask, "softcap": softcap, "deterministic": deterministic,
    }  # fmt: skip
    (variant,) = (v for v in plan.variants if v.kernel == KERNEL and v.axes == wanted)
    made = compile_variants([variant], read, cache=tmp_path / "cache")
    audited = audit(variant, made[variant.name], read.arch)
    assert audited.threads == (512 if dim > 128 else 384)
    assert registers <= set(audited.facts.register_budgets)
    assert audited.facts.matrix["HGMMA"] > 0 and audited.facts.local_bytes == 0 and audited.resident == 1
    rows, box = variant.constants["BLOCK_M"], 32 if dim == 96 else 64
    maps = made[variant.name].maps
    assert [m["box"] for m in maps[:6]] == [[1, 1, n, box] for n in (rows, 64, 64, rows, 64, 64)]
    assert [m["box"] for m in maps[6:]] == 2 * [[1, 1, 1, rows]]
    assert [m["swizzle"] for m in maps] == 6 * [2 if dim == 96 else 3] + 2 * [0]


# ---- What is launched ----


class Recorder(RecordingDriver):
    prefix = f"{BACKWARD}_"


@pytest.fixture(scope="module")
def pack() -> Pack:
    return tables_of("sm90")


def launched(
    pack: Pack, problem: Problem, **other: Any
) -> tuple[dict[str, tuple[Any, ...]], str, tuple[Any, ...]]:
    """What one call launches, by kernel; the form and axes of the warp-specialised one; the tensors given and found."""
    op, made = recorded(FlashAttentionBackward, pack, Recorder)
    q, k, v, sinks = problem.tensors()
    keywords = {key: value for key, value in problem.keywords(sinks).items() if key != "return_lse"}
    lse = torch.zeros(problem.batch, problem.heads, problem.len_q)
    found = op(q, q, k, v, q, lse, **keywords, **other)
    loaded = made[0].loaded.get("warp_specialized")
    variant = "" if loaded is None else loaded.name.removeprefix(f"{KERNEL}-").partition("-aligned")[0]
    return made[0].launches, variant, (q, k, v, *found)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_maps_grids_and_numbers(pack: Pack, layout: str) -> None:
    problem = Problem(2, 6, 2, 1000, 1500, 72, layout=layout, causal=True, scale=0.5)
    launches, variant, (q, k, _, dq, dk, dv, _) = launched(pack, problem)
    assert set(launches) == WARP_SPECIALIZED and variant == "narrow-bf16-96-causal"
    padded = 1024
    lse2, delta = launches["preprocess"][3:5]
    x, y, z, *arguments = launches["warp_specialized"]
    assert (x, y, z) == (2 * 2 * 12, 1, 1)  # 12 tiles of 128 keys
    order = (0, 2, 1, 3) if layout == "bshd" else (0, 1, 2, 3)
    # dim 72 is read as 80, from copies
    for t, found in zip((q, k, k, q, k, k), arguments[:6], strict=True):
        seen = torch.empty(*t.shape[:-1], 80).permute(order)
        assert found[1:] == ("bf16", tuple(seen.shape), seen.stride(), (1, 1, 64, 32), 2)
    strides = (6 * padded, padded, 16, 1)
    for at, found in zip((lse2, delta), arguments[6:8], strict=True):
        assert found == (at, "fp32", (2, 6, 1, padded), strides, (1, 1, 1, 64), 0)
    dq32, *numbers = arguments[8:]
    assert numbers == [0.5 * LOG2_E, 12, 2, 3, padded, 1000, 1500, 501, max(1, MULTIPROCESSORS // 12)]
    x, y, z, _, from_dq32, *rest = launches["postprocess"]
    assert (x, y, z) == (2 * 6 * padded // 64 * 3, 1, 1) and from_dq32 == dq32
    rows = (1000 * 6 * 80, 80, 6 * 80) if layout == "bshd" else (1000 * 6 * 80, 1000 * 80, 80)
    assert rest == [*rows, 0.5, padded // 64, 6, 3, 80, 1000]
    assert dq.shape == q.shape and dk.shape == dv.shape == k.shape


def test_wide_heads(pack: Pack) -> None:
    """A tile has 64 keys; dim 200 is read as 208, in two panels of 128 columns."""
    problem = Problem(2, 6, 2, 1000, 1500, 200, FP16, layout="bhsd")
    launches, variant, (q, k, _, dq, dk, dv, _) = launched(pack, problem)
    assert variant == "wide-fp16-256-full"
    x, y, z, *arguments = launches["warp_specialized"]
    assert (x, y, z) == (2 * 2 * 24, 1, 1)  # 24 tiles of 64 keys
    for t, found in zip((q, k, k, q, k, k), arguments[:6], strict=True):
        seen = torch.empty(*t.shape[:-1], 208)
        assert found[1:] == ("fp16", tuple(seen.shape), seen.stride(), (1, 1, 64, 64), 3)
    assert arguments[10:14] == [24, 2, 3, 1024]
    assert launches["postprocess"][0] == 2 * 6 * 1024 // 64 * 8
    assert dq.shape == q.shape and dk.shape == dv.shape == k.shape


@pytest.mark.parametrize("deterministic", [False, True])
def test_dq_starts_as_zeros_of_whole_blocks(
    pack: Pack, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind them the semaphore, an int32 for each block of 128 rows."""
    made: list[Tensor] = []
    original = Tensor.new_zeros

    def new_zeros(self: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        made.append(original(self, *arguments, **keywords))
        return made[-1]

    monkeypatch.setattr(Tensor, "new_zeros", new_zeros)
    launches, variant, _ = launched(pack, Problem(1, 2, 1, 130, 70, 64), deterministic=deterministic)
    assert variant == "narrow-bf16-64-full" + ("-deterministic" if deterministic else "")
    (zeros,) = made
    elements, semaphores = 2 * 256 * 64, 2 * 2 if deterministic else 0
    assert zeros.dtype == torch.float32 and zeros.shape == (elements + semaphores,)
    assert not zeros.view(torch.int32).any()
    at = zeros.data_ptr()
    arguments = launches["warp_specialized"][3:]
    assert arguments[8] == launches["postprocess"][4] == at
    assert arguments[16] == MAX_SEQLEN  # no bound
    # of heads of one tile each as many start together as there are multiprocessors
    assert arguments[17:] == ((at + 4 * elements, MULTIPROCESSORS) if deterministic else (1,))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("right", "last"), [(None, MAX_SEQLEN), (5, 500 + 5 + 1)])
def test_numbers_of_a_left_bound(pack: Pack, deterministic: bool, right: int | None, last: int) -> None:
    """Row r sees keys from r + 500 - 7 on."""
    problem = Problem(2, 6, 2, 1000, 1500, 64, window=(7, right), scale=0.5)
    launches, variant, _ = launched(pack, problem, deterministic=deterministic)
    assert variant == "narrow-bf16-64-local" + ("-deterministic" if deterministic else "")
    x, y, z, *arguments = launches["warp_specialized"]
    assert (x, y, z) == (2 * 2 * 12, 1, 1)
    assert arguments[9:18] == [0.5 * LOG2_E, 12, 2, 3, 1024, 1000, 1500, last, 500 - 7]
    at = arguments[8] + 4 * 2 * 6 * 1024 * 64
    swizzle = -(-MULTIPROCESSORS // 12) if deterministic else max(1, MULTIPROCESSORS // 12)
    assert arguments[18:] == ([at, swizzle] if deterministic else [swizzle])


@pytest.mark.parametrize("deterministic", [False, True])
def test_numbers_of_a_soft_cap(pack: Pack, deterministic: bool) -> None:
    """No bounds here; the cap is what scores are, and what products are multiplied by before its tanh."""
    problem = Problem(1, 2, 1, 100, 200, 200, softcap=20.0, scale=0.5)
    launches, _, _ = launched(pack, problem, deterministic=deterministic)
    _, _, _, *arguments = launches["warp_specialized"]
    assert arguments[9] == 20.0 * LOG2_E and arguments[16:19] == [MAX_SEQLEN, -MAX_SEQLEN, 0.5 / 20.0]
    assert launches["postprocess"][8] == 0.5 and len(arguments) == (21 if deterministic else 20)


VARIANTS = {
    "full": (Problem(1, 2, 1, 100, 200, 64), "narrow-bf16-64-full"),
    "causal": (Problem(1, 2, 1, 100, 200, 128, FP16, causal=True), "narrow-fp16-128-causal"),
    "a right bound": (Problem(1, 2, 1, 100, 200, 40, window=(None, 3)), "narrow-bf16-64-causal"),
    "one row": (Problem(1, 2, 1, 1, 200, 104, causal=True), "narrow-bf16-128-full"),
    "sinks": (Problem(1, 2, 1, 100, 200, 96, sinks=True), "narrow-bf16-96-full"),
    "wide heads": (Problem(1, 2, 1, 100, 200, 136), "wide-bf16-192-full"),
    "the widest": (Problem(1, 2, 1, 100, 200, 256, causal=True), "wide-bf16-256-causal"),
    "a left bound": (Problem(1, 2, 1, 100, 200, 256, window=(9, None)), "wide-bf16-256-local"),
    "a window": (Problem(1, 2, 1, 100, 200, 64, window=(9, 0)), "narrow-bf16-64-local"),
    "as wide as the keys": (Problem(1, 2, 1, 100, 200, 64, window=(199, 0)), "narrow-bf16-64-causal"),
    "one key less": (
        Problem(1, 2, 1, 100, 200, 64, causal=True, window=(198, None)),
        "narrow-bf16-64-local",
    ),
    "a soft cap": (
        Problem(1, 2, 1, 100, 200, 208, causal=True, softcap=5.0),
        "wide-bf16-256-local-softcap",
    ),
}
BY_TILES = {
    "a soft cap": Problem(1, 2, 1, 100, 200, 64, softcap=5.0),
    "both": Problem(1, 2, 1, 100, 200, 128, window=(9, 0), softcap=5.0),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(pack: Pack, name: str) -> None:
    """Those of a call, in any order and in a fixed one: asked for by the call, or by torch for all."""
    problem, wanted = VARIANTS[name]
    kernels = WARP_SPECIALIZED | ({"sinks"} if problem.sinks else set())
    launches, variant, _ = launched(pack, problem)
    assert (set(launches), variant) == (kernels, wanted)
    launches, variant, _ = launched(pack, problem, deterministic=True)
    assert (set(launches), variant) == (kernels, f"{wanted}-deterministic")
    torch.use_deterministic_algorithms(True)
    try:
        launches, variant, _ = launched(pack, problem)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (set(launches), variant) == (kernels, f"{wanted}-deterministic")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", BY_TILES)
def test_by_tiles(pack: Pack, name: str, deterministic: bool) -> None:
    """Soft caps of narrower heads."""
    assert set(launched(pack, BY_TILES[name], deterministic=deterministic)[0]) == TILES


def test_a_pack_without_them_has_the_tiles() -> None:
    problem = Problem(1, 2, 1, 100, 200, 64, window=(9, 0))
    assert set(launched(tables_of("sm80"), problem)[0]) == TILES


def test_one_gradient_alone_takes_its_own_kernel(pack: Pack) -> None:
    q, k, v, _ = Problem(1, 2, 1, 100, 200, 64).tensors()
    recorder = Recorder(BACKWARD, pack)
    on = OpOn(pack.op(BACKWARD), recorder, -1, 2)
    saved, settings = (q, k, v, None, q, torch.zeros(1, 2, 100)), Settings(0.125, -1, -1, 0.0, "bshd")
    for needed, kernels in (
        ((True, False, False, False), TILES - {"dkdv"}),
        ((False, True, False, False), TILES - {"dq"}),
        ((True, False, True, False), WARP_SPECIALIZED),
    ):
        recorder.launches.clear()
        found = gradients(on, (q, None), saved, settings, needed)
        assert set(recorder.launches) == kernels
        assert [g is not None for g in found] == list(needed)


# ---- The device code ----


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
def test_postprocess(pack: Pack, dim: int, columns: int) -> None:
    """Two heads of 100 rows in two tiles each, in a tensor whose rows lie apart."""
    on = OpOn(pack.op(BACKWARD), InterpreterDriver(BACKWARD, pack), -1, 2)
    loaded = on.kernels[f"{BACKWARD}_postprocess"]((FP16, True), dim)
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


PROBLEMS = (
    Problem(1, 2, 1, 300, 300, 64),
    Problem(2, 2, 1, 130, 333, 64, FP16, "bhsd", causal=True, sinks=True),
    Problem(1, 1, 1, 300, 130, 96, causal=True),
    Problem(1, 4, 2, 200, 300, 128, FP16),
    Problem(1, 2, 1, 260, 260, 104, causal=True),
    Problem(1, 1, 1, 150, 200, 192, window=(None, 20)),
    Problem(1, 2, 1, 130, 70, 256, FP16),
    # deterministic, query heads are interleaved
    Problem(1, 4, 1, 200, 260, 64, FP16, "bhsd", causal=True),
    Problem(2, 3, 1, 260, 130, 192, causal=True),
    # Windows that are smaller than a block, that end at an edge of one or a row beside it (a block's last row alone
    # does not see a group's first key; a tile's last key alone is seen by a block of rows), and that are almost as long
    # as the sequence; rows that see no key and keys that no row sees.
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
    # soft caps
    Problem(1, 2, 1, 200, 260, 256, window=(70, 0), softcap=2.0, sinks=True),
    Problem(1, 2, 1, 150, 100, 256, causal=True, softcap=2.0),
    Problem(1, 1, 1, 70, 200, 216, FP16, "bhsd", softcap=50.0, scale=0.5),
)


def axes_of(problem: Problem, deterministic: bool) -> str:
    """The values of the axes behind the dtype, as a variant's name has them."""
    left = problem.window is not None and problem.window[0] is not None
    bound = problem.causal or problem.window is not None
    mask = "local" if left or problem.softcap else "causal" if bound else "full"
    flags = ("softcap",) * bool(problem.softcap) + ("deterministic",) * deterministic
    return "-".join((str(padded_head_dim(problem.dim)), mask, *flags))


def cases() -> Iterator[Any]:
    """The first of each choice of the axes, and the others, which are slow."""
    seen = set()
    for problem, deterministic in [(p, True) for p in PROBLEMS] + [(p, False) for p in PROBLEMS[::3]]:
        axes = axes_of(problem, deterministic)
        yield pytest.param(problem, deterministic, marks=[pytest.mark.slow] if axes in seen else [])
        seen.add(axes)


@pytest.mark.interpreter
@pytest.mark.parametrize(("problem", "deterministic"), list(cases()), ids=str)
def test_gradients(pack: Pack, problem: Problem, deterministic: bool, request: pytest.FixtureRequest) -> None:
    """Memory holds NaN until it is written in the deterministic calls alone: torch has no other way to fill it."""
    if deterministic:
        request.getfixturevalue("poisoned")
    q, k, v, sinks = problem.tensors()
    keywords = {key: value for key, value in problem.keywords(sinks).items() if key != "return_lse"}
    o, lse = liger_aot.load("flash_attention")(q, k, v, **keywords, return_lse=True)
    do = torch.randn(o.shape).to(o.dtype)
    op = bound_op(FlashAttentionBackward, pack, GroupsDriver)
    found = op(do, q, k, v, o, lse, deterministic=deterministic, **keywords)
    dtype = "fp16" if problem.dtype == FP16 else "bf16"
    loaded = [*op._own.of(torch.empty(1), "q")._loaded]
    assert any(f"-{dtype}-{axes_of(problem, deterministic)}-aligned" in name for name in loaded), loaded
    worst = gradient_errors(found, (q, k, v, sinks), do, None, problem, REFERENCE, approximate=False)
    assert max(worst.values()) <= 1, worst
