"""Attention of packed sequences on a GPU: the installed binaries against float64, what is out of range, graphs whose
lengths change, torch.compile, and that nothing waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import liger_aot
from liger_aot import pending
from liger_aot.errors import ArgumentError
from liger_aot.ops.flash_attention_varlen import FlashAttentionVarlen
from liger_aot.packs import pack_for
from tests.attention_cases import BF16
from tests.varlen_cases import EMPTY, LARGE, SMALL, Problem, check, starts_of

pytestmark = pytest.mark.gpu
CASES = (*SMALL, *EMPTY, *LARGE)


@pytest.fixture
def op() -> FlashAttentionVarlen:
    found: FlashAttentionVarlen = liger_aot.load("flash_attention_varlen")
    return found


@pytest.mark.parametrize("dim", sorted({p.dim for p in CASES}))
def test_cases(op: FlashAttentionVarlen, dim: int, poisoned: None) -> None:
    from liger_aot.devices import gpu

    allowed = dict(pack_for(gpu(0).device).tolerance)
    for seed, problem in enumerate(CASES):
        if problem.dim == dim:
            check(op, problem, allowed, seed=seed, device="cuda")


def run(op: FlashAttentionVarlen, problem: Problem, tensors: list[Any]) -> tuple[Tensor, ...]:
    """The output and the gradients of q, k and v."""
    leaves = [t.detach().requires_grad_() for t in tensors[:3]]
    o = op(*leaves, *tensors[3:5], *problem.longest(), causal=True)
    return o.detach(), *torch.autograd.grad(o, leaves, torch.sin(o.detach()))


def test_the_same_bits_whatever_lies_beside(op: FlashAttentionVarlen) -> None:
    problem = Problem(8, 2, (700, 300, 900), (700, 500, 900), 128)
    tensors = problem.tensors(device="cuda")
    whole = run(op, problem, tensors)
    assert all(torch.equal(a, b) for a, b in zip(whole, run(op, problem, tensors), strict=True))
    rows, keys = slice(700, 1000), slice(700, 1200)
    one = Problem(8, 2, (300,), (500,), 128)
    starts = [starts_of((n,)).cuda() for n in (300, 500)]
    alone = run(op, one, [tensors[0][rows], tensors[1][keys], tensors[2][keys], *starts])
    for a, b, own in zip(whole, alone, (rows, rows, keys, keys), strict=True):
        assert torch.equal(a[own], b)


@pytest.mark.parametrize("dim", [64, 72, 100])
def test_strides(op: FlashAttentionVarlen, dim: int) -> None:
    """Also one buffer of q, k and v, and a misaligned one."""
    problem = Problem(4, 4, (150, 0, 77), (150, 0, 77), dim)
    tensors = problem.tensors(device="cuda")
    wanted = run(op, problem, tensors)
    buffer = torch.stack(tensors[:3], 1)
    odd = torch.empty(buffer.numel() + 1, device="cuda", dtype=BF16)[1:].view(buffer.shape).copy_(buffer)
    heads_outside = torch.stack(tensors[:3]).transpose(1, 2).contiguous().transpose(1, 2)
    for name, views in (
        ("one", buffer.unbind(1)),
        ("odd", odd.unbind(1)),
        ("heads", heads_outside.unbind(0)),
    ):
        found = run(op, problem, [*views, *tensors[3:]])
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), name


def test_nothing_waits(op: FlashAttentionVarlen) -> None:
    problem = Problem(4, 2, (100, 200), (100, 200), 64)
    tensors = problem.tensors(device="cuda")
    run(op, problem, tensors)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(op, problem, tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_out_of_range(op: FlashAttentionVarlen, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(4, 2, (100, 200), (100, 200), 64)
    tensors = problem.tensors(device="cuda")
    for starts in ([0, 200, 100], [0, 100, 400], [7, 100, 300], [0, -5, 300], [0, 10, 300]):
        wrong = [*tensors[:4], torch.tensor(starts, dtype=torch.int32, device="cuda")]
        run(op, problem, wrong)
        torch.cuda.synchronize()
        with pytest.raises(ArgumentError, match=r"cu_seqlens.* of an earlier call"):
            run(op, problem, tensors)
        run(op, problem, tensors)
    monkeypatch.setattr(pending, "DEBUG", True)
    with pytest.raises(ArgumentError, match="this call"):
        run(op, problem, wrong)


def test_graph_of_other_lengths(op: FlashAttentionVarlen) -> None:
    """Captured once; cu_seqlens change between replays, but not how many there are."""
    problem = Problem(4, 2, (300, 0, 200), (300, 0, 200), 128, causal=True)
    tensors = problem.tensors(device="cuda")
    leaves = [t.requires_grad_() for t in tensors[:3]]
    do = torch.randn(tensors[0].shape, device="cuda").to(BF16)

    def call() -> tuple[Tensor, ...]:
        o = op(*leaves, *tensors[3:5], 500, 500, causal=True)
        return o, *torch.autograd.grad(o, leaves, do)

    side = torch.cuda.Stream()
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
        assert all(torch.equal(a, b) for a, b in zip(found, call(), strict=True)), lengths


def test_compile(op: FlashAttentionVarlen) -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda *t: op(*t, causal=True), fullgraph=True, dynamic=True)
    for lengths in ((50, 60), (100, 3, 7)):
        problem = Problem(4, 2, lengths, lengths, 72)
        *tensors, _ = problem.tensors(device="cuda")
        leaves = [t.requires_grad_() for t in tensors[:3]]
        do = torch.randn(tensors[0].shape, device="cuda").to(BF16)
        found, wanted = (
            torch.autograd.grad(f(*tensors, *problem.longest()), leaves, do)
            for f in (compiled, lambda *t: op(*t, causal=True))
        )
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_alone(op: FlashAttentionVarlen) -> None:
    problem = Problem(4, 2, (300, 20), (400, 10), 128, sinks=True, causal=True)
    *tensors, sinks = problem.tensors(device="cuda")
    leaves = [t.requires_grad_() for t in (*tensors[:3], sinks)]
    o, lse = op(*tensors, *problem.longest(), causal=True, sinks=sinks, return_lse=True)
    wanted = torch.autograd.grad(o, leaves, torch.sin(o.detach()))
    found = liger_aot.load("flash_attention_varlen_backward")(
        torch.sin(o.detach()), *tensors[:3], o.detach(), lse.detach(), *tensors[3:], *problem.longest(), causal=True,
        sinks=sinks,
    )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_memory_is_linear(op: FlashAttentionVarlen) -> None:
    problem = Problem(4, 4, (8192, 100, 8000), (8192, 100, 8000), 64)
    tensors = problem.tensors(device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = run(op, problem, tensors)
    grown = torch.cuda.max_memory_allocated() - before
    rows = 3 * 4 * tensors[0].shape[0] * 4  # lse, and two float32 a row and head
    assert grown <= 2 * sum(t.nbytes for t in found) + rows + (1 << 20)


def test_tensors_beyond_two_billion_elements(op: FlashAttentionVarlen) -> None:
    """q, the output and dq of 2^31 + elements: the last sequence has the bits that it has alone."""
    if torch.cuda.get_device_properties(0).total_memory < 40 << 30:
        pytest.skip("needs 40 GB")
    lengths = (1 << 20, 50_000)
    q = torch.randn(sum(lengths), 32, 64, device="cuda", dtype=BF16)
    k, v = (torch.randn(200, 1, 64, device="cuda", dtype=BF16) for _ in range(2))
    assert q.numel() > 1 << 31
    problem = Problem(32, 1, lengths, (100, 100), 64)
    starts = [starts_of(n).cuda() for n in (lengths, (100, 100))]
    o, dq, _, _ = run(op, problem, [q, k, v, *starts])
    one = Problem(32, 1, lengths[1:], (100,), 64)
    starts = [starts_of(n).cuda() for n in (lengths[1:], (100,))]
    alone = run(op, one, [q[lengths[0] :], k[100:], v[100:], *starts])
    assert torch.equal(o[lengths[0] :], alone[0]) and torch.equal(dq[lengths[0] :], alone[1])
