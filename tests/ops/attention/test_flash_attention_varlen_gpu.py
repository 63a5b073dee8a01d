"""Varlen attention on a GPU: the installed binaries against float64, what is out of range, graphs whose
lengths change, torch.compile, and that nothing waits.

A deterministic call has the same bits every time, and so has every other one without warp groups; with them dq varies.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_aot
from liger_aot.errors import ArgumentError
from liger_aot.ops.attention.flash_attention_varlen import FlashAttentionVarlen
from liger_aot.runtime import device_errors
from liger_aot.runtime.packs import pack_for
from tests.ops.attention.attention_cases import BF16
from tests.ops.attention.test_flash_attention_backward_gpu import same
from tests.ops.attention.varlen_cases import EMPTY, LARGE, SMALL, Problem, check, starts_of

pytestmark = pytest.mark.gpu
CASES = (*SMALL, *EMPTY, *LARGE)


@pytest.fixture
def op() -> FlashAttentionVarlen:
    found: FlashAttentionVarlen = liger_aot.load("flash_attention_varlen")
    return found


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", sorted({p.dim for p in CASES}))
def test_cases(
    op: FlashAttentionVarlen, dim: int, deterministic: bool, request: pytest.FixtureRequest
) -> None:
    """Memory that is never written shows in the deterministic calls alone: torch has no other way to fill it."""
    from liger_aot.runtime.devices import gpu

    if deterministic:
        request.getfixturevalue("poisoned")
    allowed = dict(pack_for(gpu(0).device).tolerance)
    for seed, problem in enumerate(CASES):
        if problem.dim == dim:
            check(op, problem, allowed, seed=seed, device="cuda")


def run(
    op: FlashAttentionVarlen, problem: Problem, tensors: list[Any], deterministic: bool = True
) -> tuple[Tensor, ...]:
    """The gradients of q, k and v, and the output."""
    leaves = [t.detach().requires_grad_() for t in tensors[:3]]
    o = op(*leaves, *tensors[3:5], *problem.longest(), causal=True, deterministic=deterministic)
    return *torch.autograd.grad(o, leaves, torch.sin(o.detach())), o.detach()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_the_same_bits_whatever_lies_beside(op: FlashAttentionVarlen, dim: int, deterministic: bool) -> None:
    problem = Problem(8, 2, (700, 300, 900), (700, 500, 900), dim)
    tensors = problem.tensors(device="cuda")
    whole = run(op, problem, tensors, deterministic)
    assert same(run(op, problem, tensors, deterministic), whole, rounded=0 if deterministic else 1)
    rows, keys = slice(700, 1000), slice(700, 1200)
    one = Problem(8, 2, (300,), (500,), dim)
    starts = [starts_of((n,)).cuda() for n in (300, 500)]
    own = [tensors[0][rows], tensors[1][keys], tensors[2][keys], *starts]
    alone = run(op, one, own, deterministic)
    inside = [g[of] for g, of in zip(whole, (rows, keys, keys, rows), strict=True)]
    assert same(inside, alone, rounded=0 if deterministic else 1)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", [64, 72, 100])
def test_strides(op: FlashAttentionVarlen, dim: int, deterministic: bool) -> None:
    """Also one buffer of q, k and v, and a misaligned one."""
    problem = Problem(4, 4, (150, 0, 77), (150, 0, 77), dim)
    tensors = problem.tensors(device="cuda")
    wanted = run(op, problem, tensors, deterministic)
    buffer = torch.stack(tensors[:3], 1)
    odd = torch.empty(buffer.numel() + 1, device="cuda", dtype=BF16)[1:].view(buffer.shape).copy_(buffer)
    heads_outside = torch.stack(tensors[:3]).transpose(1, 2).contiguous().transpose(1, 2)
    for name, views in (
        ("one", buffer.unbind(1)),
        ("odd", odd.unbind(1)),
        ("heads", heads_outside.unbind(0)),
    ):
        found = run(op, problem, [*views, *tensors[3:]], deterministic)
        assert same(found, wanted, rounded=0 if deterministic else 1), name


def test_nothing_waits(op: FlashAttentionVarlen) -> None:
    problem = Problem(4, 2, (100, 200), (100, 200), 64)
    tensors = problem.tensors(device="cuda")
    run(op, problem, tensors, deterministic=False)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(op, problem, tensors, deterministic=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_out_of_range(op: FlashAttentionVarlen, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(4, 2, (100, 200), (100, 200), 64)
    tensors = problem.tensors(device="cuda")
    for starts in ([0, 200, 100], [0, 100, 400], [7, 100, 300], [0, -5, 300], [0, 10, 300]):
        wrong = [*tensors[:4], torch.tensor(starts, dtype=torch.int32, device="cuda")]
        run(op, problem, wrong, deterministic=False)
        torch.cuda.synchronize()
        with pytest.raises(ArgumentError, match=r"cu_seqlens.* of an earlier call"):
            run(op, problem, tensors)
        run(op, problem, tensors)
    monkeypatch.setattr(device_errors, "DEBUG", True)
    with pytest.raises(ArgumentError, match="this call"):
        run(op, problem, wrong)


@pytest.mark.parametrize("deterministic", [False, True])
def test_graph_of_other_lengths(op: FlashAttentionVarlen, deterministic: bool) -> None:
    """Captured once; cu_seqlens change between replays, but not how many there are."""
    problem = Problem(4, 2, (300, 0, 200), (300, 0, 200), 128, causal=True)
    tensors = problem.tensors(device="cuda")
    leaves = [t.requires_grad_() for t in tensors[:3]]
    do = torch.randn(tensors[0].shape, device="cuda").to(BF16)

    def call() -> tuple[Tensor, ...]:
        o = op(*leaves, *tensors[3:5], 500, 500, causal=True, deterministic=deterministic)
        return *torch.autograd.grad(o, leaves, do), o

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    for lengths in ((300, 0, 200), (1, 499, 0), (0, 0, 500), (100, 100, 100)):
        for t in tensors[3:5]:
            t.copy_(starts_of(lengths))
        graph.replay()
        torch.cuda.synchronize()
        assert same(found, call(), rounded=0 if deterministic else 1), lengths


@pytest.mark.parametrize("deterministic", [False, True])
def test_compile(op: FlashAttentionVarlen, deterministic: bool) -> None:
    torch.compiler.reset()
    eager = partial(op, causal=True, deterministic=deterministic)
    compiled = torch.compile(lambda *t: eager(*t), fullgraph=True, dynamic=True)
    for lengths in ((50, 60), (100, 3, 7)):
        problem = Problem(4, 2, lengths, lengths, 72)
        *tensors, _ = problem.tensors(device="cuda")
        leaves = [t.requires_grad_() for t in tensors[:3]]
        do = torch.randn(tensors[0].shape, device="cuda").to(BF16)
        found, wanted = (
            torch.autograd.grad(f(*tensors, *problem.longest()), leaves, do) for f in (compiled, eager)
        )
        assert same(found, wanted, rounded=0 if deterministic else 1)


def test_alone(op: FlashAttentionVarlen) -> None:
    problem = Problem(4, 2, (300, 20), (400, 10), 128, sinks=True, causal=True)
    *tensors, sinks = problem.tensors(device="cuda")
    leaves = [t.requires_grad_() for t in (*tensors[:3], sinks)]
    o, lse = op(*tensors, *problem.longest(), causal=True, sinks=sinks, return_lse=True, deterministic=True)
    wanted = torch.autograd.grad(o, leaves, torch.sin(o.detach()))
    backward = liger_aot.load("flash_attention_varlen_backward")
    with torch.no_grad():  # as in a backward
        found = backward(
            torch.sin(o), *tensors[:3], o, lse, *tensors[3:], *problem.longest(), causal=True, sinks=sinks,
            deterministic=True,
        )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("deterministic", [False, True])
def test_memory_is_linear(op: FlashAttentionVarlen, deterministic: bool) -> None:
    """Beside the results, lse and two float32 a row and head; by warp groups dq in float32, too, of 128 rows more a
    sequence."""
    problem = Problem(4, 4, (8192, 100, 8000), (8192, 100, 8000), 64)
    tensors = problem.tensors(device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = run(op, problem, tensors, deterministic)
    grown = torch.cuda.max_memory_allocated() - before
    floats = 3 if deterministic else 3 + 64
    rows = 4 * floats * 4 * (tensors[0].shape[0] + 4 * 128)
    assert grown <= 2 * sum(t.nbytes for t in found) + rows + (1 << 20)


@pytest.mark.parametrize("deterministic", [False, True])
def test_tensors_beyond_two_billion_elements(op: FlashAttentionVarlen, deterministic: bool) -> None:
    """q, the output and dq of 2^31 + elements: the last sequence has the bits that it has alone."""
    if torch.cuda.get_device_properties(0).total_memory < 40 << 30:
        pytest.skip("needs 40 GB")
    lengths = (1 << 20, 50_000)
    q = torch.randn(sum(lengths), 32, 64, device="cuda", dtype=BF16)
    k, v = (torch.randn(200, 1, 64, device="cuda", dtype=BF16) for _ in range(2))
    assert q.numel() > 1 << 31
    problem = Problem(32, 1, lengths, (100, 100), 64)
    starts = [starts_of(n).cuda() for n in (lengths, (100, 100))]
    dq, _, _, o = run(op, problem, [q, k, v, *starts], deterministic)
    one = Problem(32, 1, lengths[1:], (100,), 64)
    starts = [starts_of(n).cuda() for n in (lengths[1:], (100,))]
    alone = run(op, one, [q[lengths[0] :], k[100:], v[100:], *starts], deterministic)
    assert same((dq[lengths[0] :], o[lengths[0] :]), (alone[0], alone[3]), rounded=0 if deterministic else 1)
