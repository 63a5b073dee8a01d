"""Varlen attention without a GPU: the reference, the AMD binaries on the emulator, the device code on
Triton's interpreter, the checks, torch.compile, what is launched."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_aot
from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.attention._operands import LOG2_E, padded_head_dim
from liger_aot.ops.attention._varlen import MAX_TOKENS
from liger_aot.ops.attention.flash_attention_varlen import FORWARD, FlashAttentionVarlen
from liger_aot.ops.attention.flash_attention_varlen_backward import FlashAttentionVarlenBackward
from liger_aot.ops.torch_library import register
from liger_aot.runtime import device_errors
from tests.conftest import built_pack
from tests.emulator.emulated_cases import emulated
from tests.harness.drivers import EmulatorDriver, InterpreterDriver, bound_op
from tests.harness.planned_packs import tables_of
from tests.harness.recording import RecordingDriver, recorded
from tests.harness.tolerances import NAMES, REFERENCE
from tests.ops.attention.attention_cases import BF16, FP16
from tests.ops.attention.attention_gradients import FAINT, faint_errors
from tests.ops.attention.varlen_cases import EMPTY, SMALL, Problem, check, starts_of

pytest_plugins = ("tests.harness.pack_fixtures",)
ARCHS = ("sm80", "sm90", "gfx90a", "gfx942")
CASES = list(enumerate((*SMALL, *EMPTY)))


@pytest.mark.parametrize(("seed", "problem"), CASES, ids=str)
def test_cpu(seed: int, problem: Problem) -> None:
    check(liger_aot.load("flash_attention_varlen"), problem, REFERENCE, seed=seed)


@pytest.mark.parametrize("problem", [SMALL[1], SMALL[2], SMALL[4]], ids=str)
def test_reference_is_the_dense_ones_of_each_sequence(problem: Problem) -> None:
    """In float32, gradients too: the limits of the other tests leave room for roundings."""
    dense, packed = liger_aot.load("flash_attention"), liger_aot.load("flash_attention_varlen")
    tensors = problem._replace(dtype=torch.float32).tensors()
    q, k, v, cu_q, cu_k, sinks = tensors
    keywords = problem.keywords(sinks)
    leaves = [t.requires_grad_() for t in (q, k, v, sinks) if t is not None]
    o, lse = packed(q, k, v, cu_q, cu_k, *problem.longest(), **keywords)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    found = torch.autograd.grad((o, lse), leaves, (do, dlse))
    outputs, given = [], []
    for one, rows, keys in problem.pieces():
        if one.len_q:
            own, own_lse = dense(q[rows][None], k[keys][None], v[keys][None], **keywords)
            torch.testing.assert_close((o[rows], lse[:, rows]), (own[0], own_lse[0]))
            outputs += [own, own_lse]
            given += [do[rows][None], dlse[None, :, rows]]
    wanted = torch.autograd.grad(outputs, leaves, given)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# ---- The binaries and the device code ----


@pytest.mark.parametrize(("seed", "problem", "arch"), emulated(CASES), ids=str)
def test_amd_binaries(seed: int, problem: Problem, arch: str, poisoned: None) -> None:
    pack = built_pack(arch)
    check(bound_op(FlashAttentionVarlen, pack, EmulatorDriver), problem, dict(pack.tolerance), seed=seed)


@pytest.mark.parametrize(("gap", "size"), FAINT)
def test_subnormal_factors_on_gfx90a(gap: float, size: float) -> None:
    """Its matrix instructions read subnormal float16 numbers as zeros."""
    pack = built_pack("gfx90a")
    op = bound_op(FlashAttentionVarlen, pack, EmulatorDriver)

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        *leaves, do = (t[0].detach().clone() for t in tensors)
        q, k, v = (t.requires_grad_() for t in leaves)
        o = op(q, k, v, starts_of((len(q),)), starts_of((len(k),)), len(q), len(k))
        return tuple(t[None] for t in torch.autograd.grad(o, (q, k, v), do))

    worst = faint_errors(run, gap, size, dict(pack.tolerance))
    assert max(worst.values()) <= 1, worst


def test_every_head_dimension_has_a_problem() -> None:
    for arch in ("gfx90a", "gfx942"):
        tables = built_pack(arch).op("flash_attention_varlen").kernels[f"{FORWARD}_tiles"].tables
        assert all(len(rows) == 1 for rows in tables.values())
        assert set(tables) == {f"{NAMES[p.dtype]}/{padded_head_dim(p.dim)}/aligned" for p in SMALL}


@pytest.mark.parametrize("softcap", [False, True])
@pytest.mark.parametrize("kernel", ["backward_dkdv", "backward_dq"])
def test_every_row_of_the_tables_has_a_problem(kernel: str, softcap: bool) -> None:
    problems = [p for p in SMALL if bool(p.softcap) == softcap]
    for arch in ("gfx90a", "gfx942"):
        kernels = built_pack(arch).op("flash_attention_varlen_backward").kernels
        tables = kernels[f"flash_attention_varlen_{kernel}"].tables
        for dtype, name in ((BF16, "bf16"), (FP16, "fp16")):
            low = 0
            for bound, variant in tables[f"{name}/{str(softcap).lower()}/aligned"]:
                high = bound or 256
                assert any(p.dtype == dtype and low < p.dim <= high for p in problems), variant
                low = high


@pytest.mark.interpreter
@pytest.mark.parametrize(("seed", "problem"), CASES, ids=str)
def test_on_the_interpreter(seed: int, problem: Problem, poisoned: None) -> None:
    """sm90's rows have every form of the loops."""
    op = bound_op(FlashAttentionVarlen, built_pack("sm90"), InterpreterDriver)
    check(op, problem, REFERENCE, seed=seed)


def test_a_sequence_has_the_bits_that_it_has_alone() -> None:
    """Whatever lies beside it, NaN too."""
    op = bound_op(FlashAttentionVarlen, built_pack("gfx942"), EmulatorDriver)
    problem = Problem(2, 1, (20, 33, 20), (30, 40, 30), 64, causal=True)
    q, k, v, cu_q, cu_k, _ = problem.tensors()
    for t, starts in ((q, cu_q), (k, cu_k), (v, cu_k)):
        t[: starts[1]] = t[starts[2] :] = math.nan
    rows, keys = slice(20, 53), slice(30, 70)

    def run(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        o = op(*leaves, cu_q, cu_k, 33, 40, causal=True)
        return o.detach(), *torch.autograd.grad(o, leaves, torch.sin(o.detach()))

    whole = run(q, k, v, cu_q, cu_k)
    alone = run(q[rows], k[keys], v[keys], starts_of((33,)), starts_of((40,)))
    for a, b, own in zip(whole, alone, (rows, rows, keys, keys), strict=True):
        assert torch.equal(a[own], b)


WRONG = {
    "start": ([5, 10, 30], 30, 5),
    "fall": ([0, 30, 10], 30, -20),
    "negative": ([0, -7, 30], 40, -7),
    "past the tokens": ([0, 10, 1000], 2000, 1000),
    "too long": ([0, 10, 40], 29, 30),
}


@pytest.mark.parametrize("which", [3, 4])
@pytest.mark.parametrize("name", WRONG)
def test_starts_out_of_order_or_range(name: str, which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing out of bounds is read or written, in the backward neither: the emulator would not let it pass. The next
    call raises, once; in debug mode the call itself."""
    op = bound_op(FlashAttentionVarlen, built_pack("gfx942"), EmulatorDriver)
    tensors: list[Any] = Problem(1, 1, (20, 20), (20, 20), 16).tensors()[:5]
    good, longest = list(tensors), [40, 40]
    starts, longest[which - 3], reported = WRONG[name]
    tensors[which] = torch.tensor(starts, dtype=torch.int32)
    leaves = [t.requires_grad_() for t in tensors[:3]]
    o = op(*tensors, *longest)
    torch.autograd.grad(o, leaves, torch.ones_like(o))
    with pytest.raises(ArgumentError, match=rf"cu_seqlens.* of an earlier call.* was given {reported}, "):
        op(*good, 40, 40)
    op(*good, 40, 40)
    monkeypatch.setattr(device_errors, "DEBUG", True)
    with pytest.raises(ArgumentError, match=rf"this call was given {reported}, "):
        op(*tensors, *longest)


# ---- The backward alone ----


def test_alone_it_is_autograds() -> None:
    problem = SMALL[1]._replace(lengths_q=(20, 1, 9), lengths_k=(40, 20, 3))
    pack = built_pack("gfx942")
    forward = bound_op(FlashAttentionVarlen, pack, EmulatorDriver)
    backward = bound_op(FlashAttentionVarlenBackward, pack, EmulatorDriver)
    *tensors, sinks = problem.tensors()
    leaves = [t.requires_grad_() for t in (*tensors[:3], sinks)]
    keywords = problem.keywords(sinks)
    o, lse = forward(*tensors, *problem.longest(), **keywords)
    do, dlse = torch.randn(o.shape).to(o.dtype), torch.randn(lse.shape)
    wanted = torch.autograd.grad((o, lse), leaves, (do, dlse))
    del keywords["return_lse"]
    saved = (o.detach(), lse.detach(), *tensors[3:], *problem.longest())
    with torch.no_grad():  # as in a backward
        got = backward(do, *tensors[:3], *saved, dlse=dlse, **keywords)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("sinks", [False, True])
def test_alone_under_compile(sinks: bool) -> None:
    op = liger_aot.load("flash_attention_varlen_backward")
    problem = Problem(2, 1, (5, 9), (7, 3), 16, torch.float32, sinks=sinks)
    *tensors, given = problem.tensors()
    o, lse = liger_aot.load("flash_attention_varlen")(*tensors, 9, 7, sinks=given, return_lse=True)
    torch.compiler.reset()
    compiled = torch.compile(lambda *t: op(*t, 9, 7, sinks=given), fullgraph=True, backend="aot_eager")
    arguments = (o, *tensors[:3], o, lse, *tensors[3:])
    for a, b in zip(compiled(*arguments), op(*arguments, 9, 7, sinks=given), strict=True):
        assert a is b is None or torch.equal(a, b)


# ---- torch ----


def test_compile_is_one_graph_for_all_lengths() -> None:
    op = liger_aot.load("flash_attention_varlen")
    torch.compiler.reset()
    compiled = torch.compile(
        lambda *t: op(*t, causal=True, return_lse=True), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for lengths in ((5, 9, 2), (30, 1), (4, 4, 4, 20)):
        problem = Problem(4, 2, lengths, lengths[::-1], 16, torch.float32)
        *tensors, _ = problem.tensors()
        leaves = [t.requires_grad_() for t in tensors[:3]]
        got, wanted = (
            f(*tensors, *problem.longest())
            for f in (compiled, lambda *t: op(*t, causal=True, return_lse=True))
        )
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
        gradients = (torch.autograd.grad(o.square().sum(), leaves) for o, _ in (got, wanted))
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b)
    with torch.compiler.set_stance("fail_on_recompile"):
        problem = Problem(4, 2, (7, 8, 50), (50, 8, 7), 16, torch.float32)
        *tensors, _ = problem.tensors()
        leaves = [t.requires_grad_() for t in tensors[:3]]
        compiled(*tensors, *problem.longest())


def test_registration() -> None:
    register("flash_attention_varlen")
    problem = Problem(2, 1, (5, 0, 4), (7, 2, 3), 8, torch.float32, causal=True, sinks=True, behind=(2, 1))
    tensors = problem.tensors()
    for i in (0, 1, 2, 5):
        tensors[i].requires_grad_()
    call = torch.ops.liger_aot.flash_attention_varlen_forward.default
    torch.library.opcheck(call, (*tensors, *problem.settings(), True))


# ---- Arguments ----

Q, K = torch.ones(6, 4, 16, dtype=BF16), torch.ones(8, 2, 16, dtype=BF16)
CU_Q, CU_K = starts_of((2, 4)), starts_of((5, 3))
GOOD = (Q, K, K, CU_Q, CU_K, 4, 5)


def but(**others: Any) -> tuple[Any, ...]:
    names = ("q", "k", "v", "cu_q", "cu_k", "max_q", "max_k")
    return tuple(others.get(name, value) for name, value in zip(names, GOOD, strict=True))


BAD: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "no tensor": (but(q=[1.0]), {}, ArgumentTypeError, "q must be a torch.Tensor"),
    "four dimensions": (but(q=Q[None]), {}, ArgumentError, "q must have 3 dimensions"),
    "mixed dtypes": (but(v=K.half()), {}, ArgumentTypeError, "v must be of q's dtype"),
    "dim over 256": (but(q=Q.expand(6, 4, 16).repeat(1, 1, 17)[..., :257]), {}, ArgumentError, "1 to 256, got 257"),
    "other dim": (but(k=K[..., :8], v=K[..., :8]), {}, ArgumentError, "k has shape .* the last dimension must agree"),
    "v another shape": (but(v=K[:3]), {}, ArgumentError, "v must have k's shape"),
    "heads": (but(q=Q[:, :3]), {}, ArgumentError, r"heads of q \(3\) must be a multiple .* \(2\)"),
    "last dimension": (but(q=Q.mT.contiguous().mT), {}, ArgumentError, "last dimension of q must be contiguous"),
    "devices": (but(k=K.to("meta")), {}, ArgumentError, "k is on meta"),
    "cu's device": (but(cu_k=CU_K.to("meta")), {}, ArgumentError, "cu_seqlens_k is on meta"),
    "cu is a list": (but(cu_q=[0, 6]), {}, ArgumentTypeError, "cu_seqlens_q must be a torch.Tensor, got list"),
    "cu is None": (but(cu_k=None), {}, ArgumentTypeError, "cu_seqlens_k must be a torch.Tensor, got NoneType"),
    "int64": (but(cu_q=CU_Q.long()), {}, ArgumentTypeError, "cu_seqlens_q must be int32, got torch.int64"),
    "cu's shape": (but(cu_q=CU_Q[None]), {}, ArgumentError, r"cu_seqlens_q must be of shape \(sequences \+ 1,\)"),
    "no starts": (but(cu_q=CU_Q[:0]), {}, ArgumentError, r"cu_seqlens_q must be of shape \(sequences \+ 1,\)"),
    "other sequences": (but(cu_k=CU_K[:2]), {}, ArgumentError, r"cu_seqlens_k must be of .* shape \(3,\), got \(2,\)"),
    "start": (but(cu_q=CU_Q + 1), {}, ArgumentError, "cu_seqlens_q must start at 0, got 1"),
    "deterministic": (GOOD, {"deterministic": 1}, ArgumentTypeError, "deterministic must be True or False, got 1"),
    "fall": (but(cu_k=CU_K[[0, 2, 1]]), {}, ArgumentError, "cu_seqlens_k must not fall, got 5 behind 8"),
    "past": (but(cu_q=starts_of((2, 5)), max_q=5), {}, ArgumentError, "must end at the 6 tokens of q or before, got 7"),
    "max": (but(max_k=4), {}, ArgumentError, "max_seqlen_k must be the longest length, 5, or more; got 4"),
    "negative max": (but(max_q=-1), {}, ArgumentError, "max_seqlen_q must be at least 0 .*, got -1"),
    "max is a float": (but(max_q=4.0), {}, ArgumentTypeError, "max_seqlen_q must be an int, got 4.0"),
    "max is a tensor": (but(max_q=torch.tensor(4)), {}, ArgumentTypeError, "max_seqlen_q must be an int, got Tensor"),
    "scale 0": (GOOD, {"scale": 0.0}, ArgumentError, "scale must be above 0"),
    "softcap": (GOOD, {"softcap": -1.0}, ArgumentError, "softcap must be at least 0 and finite"),
    "window": (GOOD, {"window": (5, -2)}, ArgumentError, "window must be two numbers"),
    "sinks": (GOOD, {"sinks": torch.ones(3)}, ArgumentError, r"sinks must be of shape \(4,\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    arguments, keywords, error, text = BAD[name]
    with pytest.raises(error, match=f"flash_attention_varlen: .*{text}"):
        liger_aot.load("flash_attention_varlen")(*arguments, **keywords)
    q, k, v, *rest = arguments
    with pytest.raises(error, match=f"flash_attention_varlen_backward: .*{text}"):
        lse = torch.ones(4, 6)
        liger_aot.load("flash_attention_varlen_backward")(q, q, k, v, q, lse, *rest, **keywords)


def test_what_the_layout_of_dense_calls_may_be() -> None:
    with pytest.raises(ArgumentError, match="layout must be one of bshd, bhsd; got 'thd'"):
        liger_aot.load("flash_attention")(Q[None], K[None], K[None], layout="thd")


def test_wrong_numbers_where_a_plan_is_known() -> None:
    """A call like one that ran does not go through all of the checks."""
    op = bound_op(FlashAttentionVarlen, tables_of("sm80"), Recorder)
    op(*GOOD)
    for wrong, error in ((4.0, ArgumentTypeError), (-1, ArgumentError)):
        with pytest.raises(error, match="max_seqlen_k"):
            op(*but(max_k=wrong))


# ---- What is launched ----


class Recorder(RecordingDriver):
    tensor_map = None  # type: ignore[assignment]


@pytest.mark.parametrize("arch", ARCHS)
def test_grids_and_numbers(arch: str) -> None:
    """From shapes alone: no number depends on what cu_seqlens hold."""
    op, made = recorded(FlashAttentionVarlen, tables_of(arch), Recorder)
    problem = Problem(6, 2, (900, 100), (600, 900), 64, window=(7, 5), behind=(24, 36))
    q, k, v, cu_q, cu_k, _ = problem.tensors()
    o, lse = op(
        q.requires_grad_(), k.requires_grad_(), v, cu_q, cu_k, 900, 5000, window=(7, 5), return_lse=True
    )
    o.backward(o.detach())
    own, keyed, rows = made
    numbers = {kernel: variant.numbers for d in made for kernel, variant in d.loaded.items()}
    kernel = f"{FORWARD}_tiles"
    x, y, z, *forward = own.launches[kernel]
    tiles = 1024 // numbers[kernel]["block_m"] + 3
    assert (x, y, z) == (6 * tiles, 1, 1)
    at = [t.data_ptr() for t in (o, q, k, v, lse)]
    assert forward[:9] == [
        *at,
        None,
        cu_q.data_ptr(),
        cu_k.data_ptr(),
        device_errors.flag("flash_attention_varlen"),
    ]
    of_q, of_k = (64, 6 * 64), (64, 2 * 64)
    shared = (LOG2_E / 8, 0.0)
    assert tuple(forward[9:]) == (
        *of_q, *of_q, *of_k, *of_k, *shared, tiles, 3, 64, 2, 1024, 1536, 6, -7, 900, 1536,
    )  # fmt: skip

    x, _, _, *sums = rows.launches["flash_attention_backward_preprocess"]
    padded = 1024
    assert x == 6 * padded // numbers["flash_attention_backward_preprocess"]["block_m"]
    assert tuple(sums[6:]) == (0, *of_q, 0, *of_q, x // 6, 6, 64, 1024, padded)
    read = (*of_q, *of_k, *of_k, *of_q, *shared, 0.125)
    sizes = (3, 64, padded, 2, 1024, 1536, 6, -7)
    kernel = "flash_attention_varlen_backward_dkdv"
    x, _, _, *keys = keyed.launches[kernel]
    tiles = 1536 // numbers[kernel]["block_n"] + 3
    assert x == 2 * tiles and tuple(keys[8:]) == (
        cu_q.data_ptr(),
        cu_k.data_ptr(),
        *of_k,
        *read,
        tiles,
        *sizes,
    )
    kernel = "flash_attention_varlen_backward_dq"
    x, _, _, *queries = keyed.launches[kernel]
    tiles = 1024 // numbers[kernel]["block_m"] + 3
    assert x == 6 * tiles and tuple(queries[9:]) == (*of_q, *read, tiles, *sizes)
    assert sums[:2] == keys[6:8] == queries[5:7]


def test_bounds_that_bind_nothing() -> None:
    op, made = recorded(FlashAttentionVarlen, tables_of("sm80"), Recorder)
    for window in (None, (7, 5)):
        op(*GOOD, window=window)
        assert made[0].launches[f"{FORWARD}_tiles"][-4:-2] == (MAX_TOKENS, -MAX_TOKENS)


@pytest.mark.parametrize("arch", ARCHS)
def test_explain(arch: str, built: Path) -> None:
    from liger_aot.explanation import explain

    choices = explain("flash_attention_varlen", arch=arch, shape=(1024, 8, 96), dtype="bf16")
    kernels = ["backward_preprocess", "varlen_backward_dkdv", "varlen_backward_dq"]
    forward = ["varlen_forward_tiles"]
    if arch == "sm90":
        kernels += [f"varlen_backward_{kind}" for kind in ("preprocess", "warp_specialized", "postprocess")]
        forward = ["varlen_forward", "varlen_forward", *forward]
    assert [c.kernel for c in choices] == [f"flash_attention_{k}" for k in (*forward, *kernels)]
    # its declaration says why
    assert all("-warp_specialized_spills-" in c.variant for c in choices if c.local_bytes)
