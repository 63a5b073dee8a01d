"""Attention's backward without a GPU: the AMD binaries on the emulator, the device code on Triton's interpreter, the op
that is the backward alone, what is launched."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_aot
from liger_aot.errors import ArgumentError, ArgumentTypeError, NotBuilt
from liger_aot.ops.attention._operands import LOG2_E, MAX_SEQLEN, Settings, swizzle_heads
from liger_aot.ops.attention.flash_attention import FlashAttention
from liger_aot.ops.attention.flash_attention_backward import FlashAttentionBackward
from liger_aot.ops.attention.flash_attention_varlen import FlashAttentionVarlen
from liger_aot_build.build import make_plans
from tests.conftest import built_pack
from tests.emulator.emulated_cases import emulated
from tests.harness import recording
from tests.harness.drivers import EmulatorDriver, InterpreterDriver, bound_op
from tests.harness.planned_packs import tables_of
from tests.harness.tolerances import REFERENCE
from tests.ops.attention.attention_cases import BF16, EMPTY, FP16, Problem
from tests.ops.attention.attention_gradients import (
    FAINT,
    SMALL_GRADIENTS,
    check_gradients,
    faint_errors,
    gradient_errors,
)

ARCHS = ("sm80", "sm90", "gfx90a", "gfx942")
CASES = [(seed, problem) for seed, problem in enumerate((*SMALL_GRADIENTS, *EMPTY))]


@pytest.mark.parametrize(("seed", "problem"), CASES, ids=str)
def test_cpu(seed: int, problem: Problem) -> None:
    check_gradients(liger_aot.load("flash_attention"), problem, REFERENCE, seed=seed)


def test_limits_notice_what_is_wrong() -> None:
    """Gradients of another scale, another mask, another delta, another dlse: each is past the limits."""
    problem = Problem(1, 2, 1, 30, 40, 64, causal=True, sinks=True, softcap=3.0)
    tensors = problem.tensors()
    generator = torch.Generator().manual_seed(1)
    do = torch.randn(1, 30, 2, 64, generator=generator).to(BF16)
    dlse = torch.randn(1, 2, 30, generator=generator)
    op, backward = liger_aot.load("flash_attention"), liger_aot.load("flash_attention_backward")
    keywords = {key: value for key, value in problem.keywords(tensors[3]).items() if key != "return_lse"}
    o, lse = op(*tensors[:3], **keywords, return_lse=True)

    def worst(o: Tensor = o, dlse: Tensor | None = dlse, **other: Any) -> dict[str, float]:
        found = backward(do, *tensors[:3], o, lse, dlse=dlse, **{**keywords, **other})
        return gradient_errors(found, tensors, do, given, problem, REFERENCE, approximate=False)

    given = dlse
    assert max(worst().values()) <= 1
    wrong = (worst(scale=0.15), worst(causal=False), worst(softcap=3.5), worst(o=o * 0.9), worst(dlse=None))
    for errors in wrong:
        assert min(errors["dq"], errors["dk"]) > 1, errors


# ---- The binaries and the device code ----


@pytest.mark.parametrize(("seed", "problem", "arch"), emulated(CASES), ids=str)
def test_amd_binaries(seed: int, problem: Problem, arch: str, poisoned: None) -> None:
    pack = built_pack(arch)
    op = bound_op(FlashAttention, pack, EmulatorDriver)
    check_gradients(op, problem, dict(pack.tolerance), seed=seed)


@pytest.mark.parametrize(("gap", "size"), FAINT)
@pytest.mark.parametrize("arch", ["gfx90a", "gfx942"])
def test_subnormal_factors_on_amd(arch: str, gap: float, size: float) -> None:
    """gfx90a's matrix instructions read subnormal float16 numbers as zeros."""
    pack = built_pack(arch)
    forward, backward = (bound_op(c, pack, EmulatorDriver) for c in (FlashAttention, FlashAttentionBackward))

    def run(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, ...]:
        gradients: tuple[Tensor, ...] = backward(do, q, k, v, *forward(q, k, v, return_lse=True))
        return gradients[:3]

    worst = faint_errors(run, gap, size, dict(pack.tolerance))
    assert max(worst.values()) <= 1, worst


@pytest.mark.parametrize(("gap", "size"), FAINT)
def test_what_is_allowed_of_subnormal_factors(gap: float, size: float) -> None:
    """Factors that are rounded to float16; zeros in the place of subnormal ones are too far off, in dk and dv."""

    def rounded(t: Tensor) -> Tensor:
        return t.to(FP16).double()

    def flushed(t: Tensor) -> Tensor:
        return torch.where(rounded(t).abs() < torch.finfo(FP16).tiny, 0, rounded(t))

    def errors(factor: Any) -> dict[str, float]:
        def run(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, ...]:
            a, b, c, g = (t[0, :, 0].double() for t in (q, k, v, do))
            p = torch.softmax(a @ b.mT / 8, -1)
            delta = (g * (p @ c)).sum(-1, keepdim=True)
            ds = p * (factor(g) @ factor(c).mT - delta)
            found = factor(ds) @ factor(b) / 8, factor(ds).mT @ factor(a) / 8, factor(p).mT @ factor(g)
            return tuple(t.to(FP16)[None, :, None] for t in found)

        return faint_errors(run, gap, size, REFERENCE)

    assert max(errors(rounded).values()) <= 1
    assert max(errors(flushed).values()) > 10


@pytest.mark.parametrize("op", ["flash_attention_backward", "flash_attention_varlen_backward"])
def test_who_multiplies_float16_in_float32(op: str) -> None:
    """Every row of gfx90a: the test above has one head dimension alone."""
    for arch in ARCHS:
        _, (plan,) = make_plans(arch, (op,))
        for kernel in (f"{op}_dkdv", f"{op}_dq"):
            for variant in plan.kernels[kernel].variants.values():
                assert variant.constants["FP16_FLUSHES"] == (arch == "gfx90a"), variant.name


@pytest.mark.parametrize("kind", ["preprocess", "dkdv", "dkdv/true", "dq", "dq/true"])
def test_every_row_of_the_tables_has_a_problem(kind: str) -> None:
    """Of a kernel without a soft cap, or with one."""
    kernel, _, softcap = kind.partition("/")
    axis = "" if kernel == "preprocess" else f"{softcap or 'false'}/"
    problems = [p for p in SMALL_GRADIENTS if not axis or bool(p.softcap) == bool(softcap)]
    for arch in ("gfx90a", "gfx942"):
        kernels = built_pack(arch).op("flash_attention_backward").kernels
        for dtype, name in ((BF16, "bf16"), (FP16, "fp16")):
            low = 0
            for bound, variant in kernels[f"flash_attention_backward_{kernel}"].tables[
                f"{name}/{axis}aligned"
            ]:
                high = bound or 256
                assert any(p.dtype == dtype and low < p.dim <= high for p in problems), variant
                low = high


@pytest.mark.interpreter
@pytest.mark.parametrize("arch", ["sm90", pytest.param("gfx942", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("seed", "problem"), CASES, ids=str)
def test_tiles_on_the_interpreter(seed: int, problem: Problem, arch: str, poisoned: None) -> None:
    """sm90's forward, Gluon, doesn't run there."""
    if arch == "gfx942":
        check_gradients(
            bound_op(FlashAttention, built_pack(arch), InterpreterDriver), problem, REFERENCE, seed=seed
        )
        return
    q, k, v, sinks = problem.tensors(seed)
    keywords = {key: value for key, value in problem.keywords(sinks).items() if key != "return_lse"}
    o, lse = liger_aot.load("flash_attention")(q, k, v, **keywords, return_lse=True)
    do = torch.randn(o.shape).to(o.dtype)
    op = bound_op(FlashAttentionBackward, built_pack(arch), InterpreterDriver)
    found = op(do, q, k, v, o, lse, **keywords)
    worst = gradient_errors(found, (q, k, v, sinks), do, None, problem, REFERENCE, approximate=False)
    assert max(worst.values()) <= 1, worst


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "offset", [15, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 12, 20, 23, 26, 29))]
)
def test_windows_that_end_at_the_edge_of_a_block(offset: int) -> None:
    """Several blocks of rows and keys: which of them take a mask must be right to the row. At these offsets a bound of
    one of the problems lies at the edge of a block of 32 rows or 64 keys, or one beside it."""
    op = bound_op(FlashAttention, built_pack("gfx942"), InterpreterDriver)
    for problem in (
        Problem(1, 2, 1, 200, 300, 16, FP16, window=(150 + offset, offset)),
        Problem(1, 1, 1, 300, 270 + offset, 16, FP16, causal=True),
        Problem(1, 1, 1, 260 + offset, 290, 16, FP16, window=(200, None)),
    ):
        check_gradients(op, problem, REFERENCE, seed=offset)


# ---- Which gradients, of what ----


def test_only_what_is_needed() -> None:
    """Alone, every gradient has the bits that it has among all; no other is made."""
    op = bound_op(FlashAttention, built_pack("gfx942"), EmulatorDriver)
    problem = Problem(1, 2, 1, 20, 30, 64, causal=True, sinks=True)
    tensors = problem.tensors()
    do = torch.randn(1, 20, 2, 64).to(BF16)

    def run(indices: tuple[int, ...]) -> tuple[Tensor, ...]:
        given = [t.detach().clone() for t in tensors if t is not None]
        leaves = [given[i].requires_grad_() for i in indices]
        o, _ = op(*given[:3], **problem.keywords(given[3]))
        return torch.autograd.grad(o, leaves, do)

    whole = run((0, 1, 2, 3))
    for i in range(4):
        (one,) = run((i,))
        assert torch.equal(one, whole[i])


def test_a_gradient_of_any_strides() -> None:
    op = bound_op(FlashAttentionBackward, built_pack("gfx942"), EmulatorDriver)
    problem = Problem(1, 2, 2, 20, 30, 64)
    q, k, v, _ = problem.tensors()
    o, lse = liger_aot.load("flash_attention")(q, k, v, return_lse=True)
    for do in (
        torch.ones(1, 1, 1, 1, dtype=BF16).expand(o.shape),
        torch.randn(1, 64, 20, 2).to(BF16).permute(0, 2, 3, 1),
        torch.randn(1, 20, 2, 65).to(BF16)[..., 1:],
        torch.randn(1, 2, 20, 64).to(BF16).transpose(1, 2),
        torch.randn(1, 1, 2, 64).to(BF16).expand(o.shape),
    ):
        plain = do.clone(memory_format=torch.contiguous_format)
        for got, wanted in zip(op(do, q, k, v, o, lse), op(plain, q, k, v, o, lse), strict=True):
            assert got is wanted is None or torch.equal(got, wanted)


@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_see_nothing(sinks: bool) -> None:
    """Their gradients are zeros, whatever the gradient of their lse: that of -inf is often NaN."""
    op = bound_op(FlashAttention, built_pack("gfx942"), EmulatorDriver)
    problem = Problem(1, 1, 1, 30, 10, 64, causal=True, sinks=sinks)
    q, k, v, s = problem.tensors()
    o, lse = op(q.requires_grad_(), k, v, **problem.keywords(s))
    dlse = torch.where(torch.isinf(lse), math.nan, 1.0)
    (dq,) = torch.autograd.grad((o, lse), q, (torch.ones_like(o), dlse))
    assert not dq[:, :20].any() and dq[:, 20:].any(2).any(2).all() and torch.isfinite(dq).all()


def test_no_gradient_of_o() -> None:
    problem = Problem(1, 2, 1, 8, 9, 16, torch.float32, sinks=True)
    q, k, v, sinks = problem.tensors()
    op = liger_aot.load("flash_attention")
    _, lse = op(q.requires_grad_(), k, v, **problem.keywords(sinks))
    (got,) = torch.autograd.grad(lse.sum(), q)
    scores = torch.einsum("bqhd,bkgd->bhqk", leaf := q.detach().requires_grad_(), k) * 0.25
    scores = torch.cat([scores, sinks[None, :, None, None].expand(1, 2, 8, 1)], -1)  # type: ignore[index]
    (wanted,) = torch.autograd.grad(torch.logsumexp(scores, -1).sum(), leaf)
    torch.testing.assert_close(got, wanted)


# ---- The backward alone ----


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_strides_of_one_head(device: str) -> None:
    """Those of a new tensor, as the kernels' results have them: along one head others would be contiguous, too."""
    q, k = torch.randn(2, 7, 1, 16, device=device), torch.randn(2, 5, 1, 16, device=device)
    o, lse = torch.randn_like(q), torch.randn(2, 1, 7, device=device)
    dense = liger_aot.load("flash_attention_backward")(*(t.half() for t in (q, q, k, k, o)), lse)
    starts = (torch.tensor([0, n], dtype=torch.int32).to(device) for n in (14, 10))
    packed = (t.half().flatten(0, 1) for t in (q, q, k, k, o))
    do, *others, o = packed
    backward = liger_aot.load("flash_attention_varlen_backward")
    given = do, *others, o, lse.movedim(0, 1).flatten(1), *starts, 14, 10
    for gradients in (dense, backward(*given)):
        for g in gradients[:3]:
            assert g.stride() == torch.empty(g.shape).stride()


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_alone_it_is_autograds(layout: str) -> None:
    problem = Problem(2, 2, 1, 20, 30, 40, layout=layout, causal=True, sinks=True)
    pack = built_pack("gfx942")
    forward, backward = (bound_op(c, pack, EmulatorDriver) for c in (FlashAttention, FlashAttentionBackward))
    leaves = [t.requires_grad_() for t in problem.tensors() if t is not None]
    o, lse = forward(*leaves[:3], **problem.keywords(leaves[3]))
    do, dlse = torch.randn(o.shape).to(o.dtype), torch.randn(lse.shape)
    wanted = torch.autograd.grad((o, lse), leaves, (do, dlse))
    keywords = {key: value for key, value in problem.keywords(leaves[3]).items() if key != "return_lse"}
    with torch.no_grad():  # as in a backward
        got = backward(do, *leaves[:3], o.detach(), lse.detach(), dlse=dlse, **keywords)
        again = backward(do, *leaves[:3], o.detach(), lse.detach(), dlse=dlse, **keywords)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


def test_alone_under_compile() -> None:
    op = liger_aot.load("flash_attention_backward")
    q, k, v, sinks = Problem(1, 4, 2, 20, 30, 16, torch.float32, sinks=True).tensors()
    o, lse = liger_aot.load("flash_attention")(q, k, v, sinks=sinks, return_lse=True)
    for given in (sinks, None):
        torch.compiler.reset()
        compiled = torch.compile(lambda *t: op(*t, sinks=given), fullgraph=True, backend="aot_eager")  # noqa: B023
        for a, b in zip(compiled(o, q, k, v, o, lse), op(o, q, k, v, o, lse, sinks=given), strict=True):
            assert a is b is None or torch.equal(a, b)


Q, K = torch.ones(2, 6, 4, 16, dtype=BF16), torch.ones(2, 6, 2, 16, dtype=BF16)
LSE = torch.ones(2, 4, 6)
BAD: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "no tensor": (([1.0], Q, K, K, Q, LSE), {}, ArgumentTypeError, "do must be a torch.Tensor"),
    "do's shape": ((Q[:, :3], Q, K, K, Q, LSE), {}, ArgumentError, r"do must be of shape \(2, 6, 4, 16\)"),
    "do's dtype": ((Q.half(), Q, K, K, Q, LSE), {}, ArgumentTypeError, "do must be of q's dtype"),
    "o's shape": ((Q, Q, K, K, K, LSE), {}, ArgumentError, "o must be of shape"),
    "lse's shape": ((Q, Q, K, K, Q, LSE.mT), {}, ArgumentError, r"lse must be of shape \(2, 4, 6\)"),
    "lse's dtype": ((Q, Q, K, K, Q, LSE.half()), {}, ArgumentTypeError, "lse must be float32"),
    "lse is None": ((Q, Q, K, K, Q, None), {}, ArgumentTypeError, "lse must be a torch.Tensor"),
    "dlse": ((Q, Q, K, K, Q, LSE), {"dlse": LSE[0]}, ArgumentError, "dlse must be of shape"),
    "devices": ((Q, Q, K, K, Q.to("meta"), LSE), {}, ArgumentError, "o is on meta"),
    "heads": ((Q, Q, Q[:, :, :3], Q[:, :, :3], Q, LSE), {}, ArgumentError, "must be a multiple"),
    "window": ((Q, Q, K, K, Q, LSE), {"window": (5, -2)}, ArgumentError, "window must be two numbers"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    arguments, keywords, error, text = BAD[name]
    with pytest.raises(error, match=f"flash_attention_backward: .*{text}"):
        liger_aot.load("flash_attention_backward")(*arguments, **keywords)


# ---- What is launched ----


class Recorder(recording.RecordingDriver):
    prefix = "flash_attention_backward_"
    tensor_map = None  # type: ignore[assignment]


def recorded(problem: Problem, arch: str, lse: Tensor | None = None) -> recording.RecordingDriver:
    op, made = recording.recorded(FlashAttentionBackward, tables_of(arch), Recorder)
    q, k, v, sinks = problem.tensors()
    keywords = {key: value for key, value in problem.keywords(sinks).items() if key != "return_lse"}
    op(q, q, k, v, q, torch.zeros(problem.batch, problem.heads, problem.len_q), **keywords)
    return made[0]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_grids_and_numbers(arch: str, layout: str) -> None:
    problem = Problem(2, 6, 2, 1000, 1500, 64, layout=layout, window=(7, 5))
    driver = recorded(problem, arch)
    numbers = {kind: variant.numbers for kind, variant in driver.loaded.items()}
    assert set(driver.launches) == {"preprocess", "dkdv", "dq"}
    unit = max(n["block_m"] for n in numbers.values())
    padded = math.ceil(1000 / unit) * unit
    x, y, z, *rows = driver.launches["preprocess"]
    assert (x, y, z) == (12 * padded // numbers["preprocess"]["block_m"], 1, 1)
    strides = (1000 * 6 * 64, 64, 6 * 64) if layout == "bshd" else (1000 * 6 * 64, 1000 * 64, 64)
    assert rows[6:] == [*strides, *strides, x // 12, 6, 64, 1000, padded]
    assert rows[1] - rows[0] == 4 * 12 * padded and rows[5] is None
    keyed = (1500 * 2 * 64, 64, 2 * 64) if layout == "bshd" else (1500 * 2 * 64, 1500 * 64, 64)
    shared = (*strides, *keyed, *keyed, *strides, LOG2_E / 8, 0.0, 0.125)
    sizes = (3, 64, padded, 1000, 1500, 500 + 5 + 1, 500 - 7)
    x, _, _, *keys = driver.launches["dkdv"]
    tiles = math.ceil(1500 / numbers["dkdv"]["block_n"])
    assert x == 4 * tiles and tuple(keys[8:]) == (*keyed, *shared, tiles, 1, 2, *sizes)
    x, _, _, *queries = driver.launches["dq"]
    tiles = math.ceil(1000 / numbers["dq"]["block_m"])
    assert x == 12 * tiles and tuple(queries[7:]) == (*strides, *shared, tiles, 1, 6, *sizes)
    assert rows[:2] == keys[6:8] == queries[5:7]


@pytest.mark.parametrize(
    ("bounds", "tiles", "swizzle"),
    [((-1, -1), 4, 1), ((-1, 0), 4, 8), ((9, -1), 5, 6), ((9, 9), 32, 1), ((-1, 0), 1000, 1)],
)
def test_heads_that_fit_are_interleaved(bounds: tuple[int, int], tiles: int, swizzle: int) -> None:
    """16 multiprocessors hold 2 programs each."""
    on: Any = SimpleNamespace(multiprocessors=16)
    loaded: Any = SimpleNamespace(variant=SimpleNamespace(resident=2))
    assert swizzle_heads(on, loaded, tiles, Settings(1.0, *bounds, 0.0, "bshd")) == swizzle


def test_what_depends_on_settings() -> None:
    driver = recorded(Problem(1, 2, 2, 100, 60, 64, softcap=20.0, sinks=True), "sm90")
    assert set(driver.launches) == {"preprocess", "dkdv", "dq", "sinks"}
    assert all("-softcap-" in driver.loaded[kernel].name for kernel in ("dkdv", "dq"))
    x, y, z, *keys = driver.launches["dkdv"]
    assert keys[8 + 15 : 8 + 18] == [20.0 * LOG2_E, 0.125 / 20.0, 0.125] and keys[-2:] == [
        MAX_SEQLEN,
        -MAX_SEQLEN,
    ]
    x, y, z, *rest = driver.launches["sinks"]
    assert (x, y, z) == (2, 1, 1) and rest[4:] == [1, 2, 128]


def test_a_column_more_than_kernels_read() -> None:
    """dim 72 is read as 80; what comes back has 72."""
    driver = recorded(Problem(2, 2, 2, 10, 20, 72), "sm80")
    assert driver.launches["dkdv"][3 + 8 :][:3] == (20 * 2 * 80, 80, 160)
    op = bound_op(FlashAttentionBackward, tables_of("sm80"), Recorder)
    q, k, v, _ = Problem(1, 2, 2, 10, 20, 72).tensors()
    shapes = [g.shape for g in op(q, q, k, v, q, torch.zeros(1, 2, 10))[:3]]
    assert shapes == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("op_class", [FlashAttention, FlashAttentionVarlen])
def test_a_forward_whose_backward_is_absent(op_class: type[Any]) -> None:
    """Of RDNA 3, which has forwards of more head dimensions than backwards: where a gradient is needed the forward
    raises, and launches nothing."""
    op, made = recording.recorded(op_class, tables_of("gfx1100"))

    def called(dim: int, graded: bool) -> bool:
        """Whether the forward was launched."""
        for driver in made:
            driver.launches.clear()
        q, k, v = (torch.randn(1, 8, 2, dim).bfloat16() for _ in range(3))
        k.requires_grad_(graded)
        if op_class is FlashAttention:
            op(q, k, v)
        else:
            starts = torch.tensor([0, 3, 8], dtype=torch.int32)
            op(q[0], k[0], v[0], starts, starts, 5, 5)
        return bool(recording.all_launches(made))

    assert called(64, True) and called(128, False)
    with pytest.raises(
        NotBuilt, match=r"backward_dkdv is not built for .* past n = 64 .*gradients of head dim"
    ):
        called(128, True)
    assert not recording.all_launches(made)
    assert called(128, False)
