"""Decoding on a GPU: the installed binaries against float64, any strides, CUDA graphs, streams, torch.compile, caches
of more than 2^31 elements, pages and lengths out of range."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import liger_aot
from liger_aot.errors import ArgumentError
from liger_aot.ops.decoding.flash_decoding import FlashDecoding
from liger_aot.runtime.packs import pack_for
from tests.ops.attention.attention_cases import GAPS
from tests.ops.decoding.decoding_cases import (
    BF16,
    EMPTY,
    FP8,
    FP16,
    SMALL,
    Problem,
    check,
    errors,
    far_behind,
)

pytestmark = pytest.mark.gpu

LARGE = (
    *(
        problem
        for dim in (8, 33, 40, 64, 72, 80, 96, 100, 104, 128, 160, 192, 200, 256)
        for problem in (
            Problem(8, 1, 1, 3000, (3000, 1777, 5), dim),
            Problem(16, 2, 1, 4096, (4096, 3001), dim, FP16, page=16),
            Problem(12, 4, 3, 2048, (2048, 1999), dim, page=256, sinks=True),
            Problem(40, 1, 1, 1500, (1500, 1), dim, FP16, splits=7),
            Problem(12, 1, 1, 2000, (2000, 999), dim, splits=5),
            Problem(16, 1, 1, 2000, (2000, 999), dim, FP16),
            Problem(8, 2, 8, 1024, (1000, 1024), dim, page=64, softcap=20.0),
            Problem(6, 6, 1, 4096, (4096, 4000), dim, window=(1000, 0)),
            Problem(32, 4, 5, 4096, (4096, 77), dim, FP16, page=32, window=(500, None), splits=9),
            Problem(9, 3, 2, 700, (700, 345), dim, causal=False, window=(300, 1)),
        )
    ),
    Problem(64, 8, 1, 65536, (65536, 40001), 128),
    Problem(64, 8, 1, 65536, (65536, 40001), 128, page=16),
    Problem(8, 1, 1, 131072, (131072,), 128, FP16, splits=256),
    *(Problem(64, 8, 1, 600, tuple(range(1, 597, 5)), 128, page=page) for page in (0, 16)),
    Problem(32, 8, 1, 2048, tuple(range(0, 2049, 17)), 128, page=64, softcap=20.0, sinks=True),
    Problem(16, 8, 2, 512, tuple(range(0, 513, 7)), 96, FP16, page=64, window=(100, None)),
    # many long sequences
    Problem(64, 8, 1, 16384, tuple(range(0, 16385, 400)), 64, sinks=True),
    Problem(64, 8, 2, 8192, tuple(range(0, 8193, 200)), 96, FP16, window=(3000, None)),
    Problem(64, 8, 1, 8192, tuple(range(0, 8193, 200)), 128, softcap=20.0),
    Problem(64, 8, 1, 8192, tuple(range(0, 8193, 200)), 128, page=16, softcap=20.0),
    Problem(64, 8, 1, 4096, (4096,) * 17, 128, FP16, full=True),
)
# caches of codes
CODES = (
    *FP8,
    *(p._replace(fp8=True, scales="head") for p in LARGE if p.dim in (64, 100, 128, 256)),
    Problem(64, 8, 1, 65536, (65536, 40001), 128, FP16, page=64, fp8=True, scales="one", shift=1),
)


@pytest.fixture
def op() -> FlashDecoding:
    found: FlashDecoding = liger_aot.load("flash_decoding")
    return found


@pytest.fixture
def allowed() -> dict[str, float]:
    from liger_aot.runtime.devices import gpu

    return dict(pack_for(gpu(0).device).tolerance)


@pytest.mark.parametrize("dim", sorted({p.dim for p in (*SMALL, *EMPTY, *LARGE, *CODES)}))
def test_cases(op: FlashDecoding, allowed: dict[str, float], dim: int, poisoned: None) -> None:
    for seed, problem in enumerate((*SMALL, *EMPTY, *LARGE, *CODES)):
        if problem.dim == dim:
            check(op, problem, allowed, seed=seed, device="cuda")


def views(t: Tensor) -> dict[str, Tensor]:
    """The same values in other layouts."""
    wide = torch.full((*t.shape[:-1], 2 * t.shape[-1]), torch.nan, dtype=t.dtype, device=t.device)
    wide[..., 16 : 16 + t.shape[-1]] = t
    odd = torch.full((t.numel() + 1,), torch.nan, dtype=t.dtype, device=t.device)
    odd[1:] = t.flatten()
    return {
        "heads outside": t.transpose(1, 2).contiguous().transpose(1, 2),
        "batch inside": t.transpose(0, 1).contiguous().transpose(0, 1),
        "beside others": wide[..., 16 : 16 + t.shape[-1]],
        "misaligned": odd[1:].view(t.shape),
    }


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("gap", GAPS)
def test_keys_far_behind(
    op: FlashDecoding, allowed: dict[str, float], gap: float, dtype: torch.dtype, splits: int
) -> None:
    """Their probabilities are subnormal in float16."""
    problem, tensors = far_behind(gap, dtype, splits, "cuda")
    assert max(errors(*op(*tensors[:3], **problem.keywords(tensors)), tensors, problem, allowed)) <= 1


@pytest.mark.parametrize("page", [0, 32])
@pytest.mark.parametrize("dim", [64, 80])
def test_strides(op: FlashDecoding, allowed: dict[str, float], dim: int, page: int) -> None:
    problem = Problem(8, 2, 2, 512, (512, 300), dim, page=page, splits=3)
    tensors = problem.tensors(device="cuda")
    wanted = op(*tensors[:3], **problem.keywords(tensors))
    for name in views(tensors[0]):
        others = [views(t)[name] for t in tensors[:3]]
        got = op(*others, **problem.keywords(tensors))
        if name != "misaligned":  # another binary, other sums
            assert torch.equal(got[0], wanted[0]), name
        assert max(errors(*got, tensors, problem, allowed)) <= 1, name
    both = torch.stack(tensors[1:3], 2)  # keys and values of a page in one buffer
    got = op(tensors[0], both[:, :, 0], both[:, :, 1], **problem.keywords(tensors))
    assert torch.equal(got[0], wanted[0])


def test_a_graph_follows_lengths_and_tables(op: FlashDecoding, allowed: dict[str, float]) -> None:
    """Captured once; tokens come, pages change."""
    op.preload()
    problem = Problem(16, 2, 1, 2048, (1, 1, 1), 128, page=16)
    static = problem.tensors(device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = op(*static[:3], **problem.keywords(static))
    for seed, lengths in enumerate(((2048, 1000, 17), (5, 2047, 0), (1, 16, 1024))):
        now = problem._replace(lengths=lengths)
        tensors = now.tensors(seed, "cuda")
        for to, t in zip(static, tensors, strict=True):
            if t is not None:
                to.copy_(t)
        graph.replay()
        torch.cuda.synchronize()
        assert max(errors(o, lse, tensors, now, allowed)) <= 1


def test_no_call_waits_for_the_gpu(op: FlashDecoding) -> None:
    problem = Problem(16, 2, 1, 2048, (2048, 100), 128, page=16)
    tensors = problem.tensors(device="cuda")
    op(*tensors[:3], **problem.keywords(tensors))
    torch.cuda.set_sync_debug_mode("error")
    try:
        op(*tensors[:3], **problem.keywords(tensors))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_streams_at_once(op: FlashDecoding) -> None:
    problem = Problem(64, 8, 1, 8192, (8192, 8000), 128)
    tensors = problem.tensors(device="cuda")
    wanted, _ = op(*tensors[:3], **problem.keywords(tensors))
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    results = []
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(op(*tensors[:3], **problem.keywords(tensors))[0])
    torch.cuda.synchronize()
    assert all(torch.equal(o, wanted) for o in results)


@pytest.mark.parametrize("prepared", [True, False])
def test_graphs_at_once(prepared: bool) -> None:
    """Graphs of one call, replayed on streams of their own: what their programs count in is their own, too."""
    op = FlashDecoding()
    problem = Problem(64, 8, 1, 8192, (8192, 8000), 128)
    tensors = problem.tensors(device="cuda")
    wanted, _ = op(*tensors[:3], **problem.keywords(tensors))
    if prepared:
        op.preload()
    captured = []
    for _ in range(3):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o, _ = op(*tensors[:3], **problem.keywords(tensors))
        captured.append((graph, o, torch.cuda.Stream()))
    torch.cuda.synchronize()
    for _ in range(20):
        for graph, _, stream in captured:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(o, wanted) for _, o, _ in captured)


@pytest.mark.parametrize("dim", [128, 256])  # of one launch, of two
@pytest.mark.parametrize("longest", [60, 512])
def test_what_follows_waits_for_every_split(op: FlashDecoding, longest: int, dim: int) -> None:
    """Results are read, and inputs overwritten, by the next kernels of the stream. Of short sequences ``split`` writes
    all results: ``combine`` has nothing to do, and must not end before it."""
    problem = Problem(64, 8, 1, 512, tuple(longest - i % 50 for i in range(400)), dim, splits=8)
    other = problem._replace(lengths=problem.lengths[::-1])
    sets = [p.tensors(seed, "cuda")[:4] for seed, p in enumerate((problem, other))]
    wanted = []
    for tensors in sets:
        wanted.append(op(*tensors[:3], cache_seqlens=tensors[3], splits=8))
        torch.cuda.synchronize()
    static = [t.clone() for t in sets[0]]
    results = []
    for i in range(20):
        for to, t in zip(static, sets[i % 2], strict=True):
            to.copy_(t)
        o, lse = op(*static[:3], cache_seqlens=static[3], splits=8, return_lse=True)
        results.append(o.clone())
        del o, lse  # the next call's are in the same memory
    torch.cuda.synchronize()
    assert not torch.equal(*wanted)
    assert all(torch.equal(o, wanted[i % 2]) for i, o in enumerate(results))


def test_compile(op: FlashDecoding) -> None:
    problem = Problem(16, 2, 2, 512, (500, 64), 64, page=16)
    tensors = problem.tensors(device="cuda")
    torch.compiler.reset()
    compiled = torch.compile(lambda *t: op(*t[:3], **problem.keywords(t)), fullgraph=True)
    for a, b in zip(compiled(*tensors), op(*tensors[:3], **problem.keywords(tensors)), strict=True):
        assert torch.equal(a, b)


def test_pages_and_lengths_out_of_range(op: FlashDecoding) -> None:
    problem = Problem(8, 2, 1, 192, (150, 100, 192, 33), 64, page=32, splits=3)
    tensors = list(problem.tensors(device="cuda"))
    good, _ = op(*tensors[:3], **problem.keywords(tuple(tensors)))
    tensors[4], tensors[3] = tensors[4].clone(), tensors[3].clone()
    tensors[4][1, 2] = 1 << 30
    tensors[3][2] = 193
    o, lse = op(*tensors[:3], **problem.keywords(tuple(tensors)))
    torch.cuda.synchronize()
    assert torch.isnan(o[1:3]).all() and torch.isnan(lse[1:3]).all()
    assert torch.equal(o[0], good[0]) and torch.equal(o[3], good[3])
    with pytest.raises(ArgumentError, match="of an earlier call was given"):
        op(*tensors[:3], **problem.keywords(tuple(tensors)))
    assert torch.equal(op(*tensors[:3], **problem.keywords(problem.tensors(device="cuda")))[0], good)


def test_a_gradient_is_refused(op: FlashDecoding) -> None:
    tensors = Problem(8, 2, 1, 64, (64,), 64).tensors(device="cuda")
    with pytest.raises(ArgumentError, match="decoding has none"):
        op(tensors[0].requires_grad_(), *tensors[1:3])


@pytest.mark.parametrize("page", [0, 1 << 18])
def test_caches_beyond_two_billion_elements(op: FlashDecoding, allowed: dict[str, float], page: int) -> None:
    """Keys and values of 2^31 + elements each: the last sequence, the last head, against float64."""
    if torch.cuda.get_device_properties(0).total_memory < 24 << 30:
        pytest.skip("needs 24 GB")
    batch, capacity, heads = 9, 1 << 18, 16
    q = torch.randn(batch, 1, heads, 64, device="cuda", dtype=BF16)
    k, v = (torch.empty(batch, capacity, heads, 64, device="cuda", dtype=BF16).normal_() for _ in range(2))
    table = torch.arange(batch, dtype=torch.int32, device="cuda")[:, None] if page else None
    o, lse = op(q, k, v, block_table=table, return_lse=True)
    assert k.numel() > 1 << 31
    last = (q[-1:, :, -1:], k[-1:, :, -1:], v[-1:, :, -1:], None, None, None, None, None)
    problem = Problem(1, 1, 1, capacity, (capacity,), 64)
    assert max(errors(o[-1:, :, -1:], lse[-1:, -1:], last, problem, allowed)) <= 1
