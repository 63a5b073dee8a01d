"""Flash attention on a GPU: the installed binaries against float64, any strides, streams, graphs, torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import liger_aot
from liger_aot.ops.attention.flash_attention import FlashAttention
from liger_aot.runtime.packs import pack_for
from tests.ops.attention.attention_cases import (
    BF16,
    EMPTY,
    FP16,
    GAPS,
    LARGE,
    SMALL,
    Problem,
    check,
    errors,
    far_behind,
)

pytestmark = pytest.mark.gpu


@pytest.fixture
def op() -> FlashAttention:
    found: FlashAttention = liger_aot.load("flash_attention")
    return found


@pytest.fixture
def allowed() -> dict[str, float]:
    from liger_aot.runtime.devices import gpu

    return dict(pack_for(gpu(0).device).tolerance)


@pytest.mark.parametrize("dim", sorted({p.dim for p in (*SMALL, *EMPTY, *LARGE)}))
def test_cases(op: FlashAttention, allowed: dict[str, float], dim: int, poisoned: None) -> None:
    for seed, problem in enumerate((*SMALL, *EMPTY, *LARGE)):
        if problem.dim == dim:
            check(op, problem, allowed, seed=seed, device="cuda")


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("gap", GAPS)
def test_keys_far_behind(
    op: FlashAttention, allowed: dict[str, float], gap: float, dtype: torch.dtype
) -> None:
    """Their probabilities are subnormal in float16."""
    problem, tensors = far_behind(gap, dtype, "cuda")
    o, lse = op(*tensors[:3], return_lse=True)
    assert max(errors(o, lse, tensors, problem, allowed, approximate=True)) <= 1


def views(t: Tensor) -> dict[str, Tensor]:
    """The same values in other layouts."""
    wide = torch.full((*t.shape[:-1], 2 * t.shape[-1]), torch.nan, dtype=t.dtype, device=t.device)
    wide[..., 8 : 8 + t.shape[-1]] = t
    odd = torch.full((t.numel() + 1,), torch.nan, dtype=t.dtype, device=t.device)
    odd[1:] = t.flatten()
    return {
        "heads outside": t.transpose(1, 2).contiguous().transpose(1, 2),
        "batch inside": t.transpose(0, 1).contiguous().transpose(0, 1),
        "beside others": wide[..., 8 : 8 + t.shape[-1]],
        "misaligned": odd[1:].view(t.shape),
    }


@pytest.mark.parametrize("dim", [64, 72, 100])
def test_strides(op: FlashAttention, dim: int) -> None:
    q, k, v, _ = Problem(2, 4, 4, 150, 150, dim).tensors(device="cuda")
    wanted = op(q, k, v, causal=True)
    for name, (a, b, c) in {n: (views(q)[n], views(k)[n], views(v)[n]) for n in views(q)}.items():
        assert torch.equal(op(a, b, c, causal=True), wanted), name
    packed = torch.stack((q, k, v), 3).flatten(2, 3).unflatten(2, (4, 3))
    assert torch.equal(op(*packed.unbind(3), causal=True), wanted), "one buffer of q, k and v"


def test_expanded(op: FlashAttention, allowed: dict[str, float]) -> None:
    problem = Problem(3, 4, 4, 150, 150, 64, causal=True)
    q, k, v, _ = problem.tensors(device="cuda")
    k, v = k[:1, :, :1].expand(k.shape), v[:1, :, :1].expand(v.shape)
    o, lse = op(q, k, v, causal=True, return_lse=True)
    assert max(errors(o, lse, (q, k, v, None), problem, allowed, approximate=True)) <= 1


def test_streams_at_once(op: FlashAttention) -> None:
    q, k, v, _ = Problem(2, 16, 16, 2048, 2048, 128).tensors(device="cuda")
    wanted = op(q, k, v, causal=True)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    for _ in range(5):
        results = []
        for _ in range(4):
            for stream in streams:
                with torch.cuda.stream(stream):
                    results.append(op(q, k, v, causal=True))
        torch.cuda.synchronize()
        assert all(torch.equal(o, wanted) for o in results)


def test_graphs_replayed_at_once(op: FlashAttention) -> None:
    q, k, v, _ = Problem(2, 16, 16, 1024, 1024, 64).tensors(device="cuda")
    wanted = op(q, k, v, causal=True)
    graphs = []
    for _ in range(3):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [op(q, k, v, causal=True) for _ in range(2)]
        graphs.append((graph, results))
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(10):
        for (graph, _), stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(o, wanted) for _, results in graphs for o in results)


def test_compile(op: FlashAttention) -> None:
    q, k, v, _ = Problem(1, 4, 2, 200, 300, 64).tensors(device="cuda")
    torch.compiler.reset()
    compiled = torch.compile(lambda *t: op(*t, causal=True), fullgraph=True)
    assert torch.equal(compiled(q, k, v), op(q, k, v, causal=True))


def test_tensors_beyond_two_billion_elements(op: FlashAttention, allowed: dict[str, float]) -> None:
    """q and the output of 2^31 + elements: the last head against float64."""
    if torch.cuda.get_device_properties(0).total_memory < 24 << 30:
        pytest.skip("needs 24 GB")
    batch, length = 5, 1 << 18
    q = torch.randn(batch, length, 32, 64, device="cuda", dtype=BF16)
    k, v = (torch.randn(batch, 100, 1, 64, device="cuda", dtype=BF16) for _ in range(2))
    o, lse = op(q, k, v, return_lse=True)
    assert q.numel() > 1 << 31
    last = (q[-1:, -500:, -1:].contiguous(), k[-1:], v[-1:], None)
    problem = Problem(1, 1, 1, 500, 100, 64)
    got = errors(o[-1:, -500:, -1:], lse[-1:, -1:, -500:], last, problem, allowed, approximate=True)
    assert max(got) <= 1


def test_longer_than_two_billion_lse(op: FlashAttention) -> None:
    """Rows of LSE past 2^31: their offsets take 64 bits."""
    if torch.cuda.get_device_properties(0).total_memory < 100 << 30:
        pytest.skip("needs 100 GB")
    heads, length = 129, 1 << 24
    q = torch.ones(1, 1, heads, 8, device="cuda", dtype=BF16).expand(1, length, heads, 8)
    k, v = (torch.ones(1, 1, 1, 8, device="cuda", dtype=BF16) for _ in range(2))
    o, lse = op(q, k, v, return_lse=True)
    assert lse.numel() > 1 << 31
    assert torch.equal(o[0, -1000:, -1], torch.ones_like(o[0, -1000:, -1]))
    assert torch.allclose(lse[0, -1, -1000:], torch.tensor(8**0.5, device="cuda"), rtol=1e-5)
    assert torch.allclose(lse[0, 0, :1000], torch.tensor(8**0.5, device="cuda"), rtol=1e-5)
