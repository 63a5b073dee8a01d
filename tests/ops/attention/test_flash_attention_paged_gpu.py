"""Paged attention on a GPU: the installed binaries against float64, any strides, mixed batches, fp8, CUDA graphs,
streams, torch.compile, caches of more than 2^31 elements, starts, lengths and pages out of range."""

from __future__ import annotations

import pytest
import torch

import liger_aot
from liger_aot.errors import ArgumentError
from liger_aot.ops.attention._paged import NAME
from liger_aot.ops.attention.flash_attention_paged import FlashAttentionPaged
from liger_aot.runtime.packs import pack_for
from tests.harness.gpu_fp8 import fp8_of_gpu
from tests.ops.attention.paged_cases import (
    BF16,
    EMPTY,
    FP16,
    SMALL,
    SMALL_FP8,
    Problem,
    check,
    check_sequences,
    run,
)

pytestmark = pytest.mark.gpu

PREFILL = (300, 1, 0, 700, 129, 64, 5), (300, 900, 40, 1500, 64, 333, 0)
LARGE = (
    *(
        problem
        for dim in (16, 48, 64, 80, 96, 128, 160, 192, 240, 256)
        for problem in (
            Problem(4, 1, *PREFILL, dim, behind=37, sinks=True),
            Problem(8, 2, *PREFILL, dim, FP16, page=64, window=(200, 0), halves=True),
            Problem(4, 4, *PREFILL, dim, page=256, softcap=15.0, window=(None, 20)),
            Problem(6, 2, *PREFILL, dim, FP16, page=32, causal=False),
            Problem(8, 1, (1000,), (1000,), dim, page=128),
            Problem(8, 8, (700,), (3000,), dim, FP16),
            Problem(32, 4, (1,) * 9, tuple(range(1, 4000, 450)), dim),
            Problem(32, 4, (1,) * 3, (4000, 17, 2500), dim, FP16, page=64, splits=7, window=(3000, None)),
            Problem(16, 1, (5, 3, 0, 1), (2000, 3, 50, 1999), dim, page=16, splits=3, behind=6),
            Problem(16, 4, (100, 3), (3000, 40), dim, known=True),
            Problem(8, 2, (130,), (4000,), dim, FP16, page=64, window=(1500, 0), sinks=True, known=True),
        )
    ),
    # keys are split by the sequences' lengths
    *(
        Problem(32, 8, (1, 3, 0, 5) * 9, tuple(range(10, 9000, 250)), dim, sinks=True, behind=1)
        for dim in (64, 128, 256)
    ),
    Problem(32, 8, (1,) * 63 + (2,), (300,) * 40 + (20000,) + (0,) * 22 + (4000,), 128, FP16, page=64),
    Problem(16, 4, (2,) * 140, (500, 30) * 69 + (9000, 6000), 128),
    Problem(32, 8, (40,) + (20,) * 8, tuple(range(1000, 9100, 1000)), 128),
    Problem(32, 8, (900,) + (1, 30) * 8, (900, *range(500, 8500, 500)), 128),
    Problem(64, 8, (1,), (65536,), 128),
    Problem(64, 8, (16,), (32768,), 128, page=64),
    Problem(8, 2, (2048, 1, 1, 512), (4096, 3000, 1, 512), 128, page=16),
    Problem(8, 2, (600, 30), (700, 900), 128),
    Problem(64, 8, (600,), (1800,), 64, page=16, window=(127, 0), sinks=True),  # gpt-oss
    Problem(
        2, 1, (3, 150, 0) * 60, (7, 160, 5) * 60, 64, page=32, behind=2
    ),  # more than are sorted at a time
)


@pytest.fixture
def op() -> FlashAttentionPaged:
    found: FlashAttentionPaged = liger_aot.load(NAME)
    return found


@pytest.fixture
def allowed() -> dict[str, float]:
    from liger_aot.runtime.devices import gpu

    return dict(pack_for(gpu(0).device).tolerance)


@pytest.mark.parametrize("dim", sorted({p.dim for p in (*SMALL, *EMPTY, *LARGE)}))
def test_cases(op: FlashAttentionPaged, allowed: dict[str, float], dim: int, poisoned: None) -> None:
    for seed, problem in enumerate((*SMALL, *EMPTY, *LARGE)):
        if problem.dim == dim:
            check(op, problem, allowed, seed=seed, device="cuda")


@pytest.mark.parametrize("seed", range(len(SMALL_FP8) + 3))
def test_fp8_caches(op: FlashAttentionPaged, allowed: dict[str, float], seed: int, poisoned: None) -> None:
    large = (
        Problem(8, 2, *PREFILL, 128, page=64, per_head=True, behind=3),
        Problem(64, 8, (1,) * 5, (4000, 3, 2500, 0, 1999), 128, FP16, halves=True),
        Problem(8, 1, (300, 2), (2000, 1777), 64, page=16, window=(500, 0), softcap=9.0, sinks=True),
    )
    problem = (*SMALL_FP8, *large)[seed]._replace(cache=fp8_of_gpu())
    check(op, problem, allowed, seed=seed, device="cuda")


@pytest.mark.parametrize("queries", [(300, 40), (1, 3)])
def test_strides(op: FlashAttentionPaged, allowed: dict[str, float], queries: tuple[int, ...]) -> None:
    """The same bits from other layouts; a q that is not aligned is copied, a cache is refused."""
    problem = Problem(8, 2, queries, (500, 333), 80, page=64)
    tensors = problem.tensors(device="cuda")
    wanted, _ = run(op, problem, tensors)
    q, k, v = tensors[:3]
    beside = torch.full((*q.shape[:-1], 160), torch.nan, dtype=q.dtype, device="cuda")
    beside[..., 16:96] = q
    odd = torch.full((q.numel() + 1,), torch.nan, dtype=q.dtype, device="cuda")
    odd[1:] = q.flatten()
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v)]
    both = torch.stack((k, v), 1)
    one = [
        t[:, :, :1].expand(-1, -1, 2, -1) for t in (k, v)
    ]  # no tensor map has a stride of 0: by plain tiles
    apart = [t.contiguous() for t in one]
    for cache in (one, apart):
        o, lse = run(op, problem, [q, *cache, *tensors[3:]])
        same = [q, *cache, *tensors[3:]]
        check_sequences(problem, same, o, lse, allowed, "cuda")
    for others in (
        (beside[..., 16:96], k, v),
        (odd[1:].view(q.shape), k, v),
        (q.transpose(0, 1).contiguous().transpose(0, 1), *heads_first),
        (q, both[:, 0], both[:, 1]),
    ):
        assert torch.equal(run(op, problem, [*others, *tensors[3:]])[0], wanted)
    shifted = torch.zeros(k.numel() + 1, dtype=k.dtype, device="cuda")[1:].view(k.shape)
    with pytest.raises(ArgumentError, match="k_cache must start at a multiple of 16 bytes"):
        run(op, problem, [q, shifted, shifted, *tensors[3:]])


@pytest.mark.parametrize(
    "queries", [((64, 1, 0), (3, 2, 60), (1, 1, 1)), ((300, 1, 0), (3, 2, 300), (200, 1, 100))]
)
def test_a_graph_follows_starts_lengths_and_tables(
    op: FlashAttentionPaged, allowed: dict[str, float], queries: tuple[tuple[int, ...], ...]
) -> None:
    """Captured once; sequences come and go, pages change."""
    op.preload()
    most, tokens = max(map(max, queries)), max(map(sum, queries)) + 9
    steps = [
        Problem(16, 2, q, k, 128, behind=tokens - sum(q))
        for q, k in zip(queries, ((2000, 1000, 17), (5, 1999, 700), (1200, 16, 1024)), strict=True)
    ]
    rows = 160  # pages of a sequence, as in every step
    static = steps[0].tensors(device="cuda")
    pages = 3 * rows
    static[1:3] = [
        torch.full((pages, *t.shape[1:]), torch.nan, dtype=t.dtype, device="cuda") for t in static[1:3]
    ]
    static[5] = torch.full((3, rows), -1, dtype=torch.int32, device="cuda")
    call = dict(steps[0].keywords(static), max_seqlen_q=most)
    graph = torch.cuda.CUDAGraph()
    static[4].zero_()
    with torch.cuda.graph(graph):
        o, lse = op(*static[:6], **call)
    for seed, problem in enumerate(steps):
        tensors = problem.tensors(seed, "cuda")
        for i in (0, 3, 4):
            static[i].copy_(tensors[i])
        for i in (1, 2):
            static[i][: tensors[i].shape[0]] = tensors[i]
        static[5].fill_(-1)
        static[5][:, : tensors[5].shape[1]] = tensors[5]
        graph.replay()
        torch.cuda.synchronize()
        check_sequences(problem, tensors, o, lse, allowed, "cuda")
        end = sum(problem.queries)
        assert not o[end:].any() and torch.isneginf(lse[:, end:]).all()


def test_no_call_waits_for_the_gpu(op: FlashAttentionPaged) -> None:
    problem = Problem(16, 2, (300, 1), (2000, 100), 128)
    tensors = problem.tensors(device="cuda")
    run(op, problem, tensors)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(op, problem, tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("queries", [(2000, 1, 1, 300), (1, 1, 3, 2)])
def test_streams_at_once(op: FlashAttentionPaged, queries: tuple[int, ...]) -> None:
    problem = Problem(32, 8, queries, (4000, 3000, 3, 300), 128)
    tensors = problem.tensors(device="cuda")
    wanted, _ = run(op, problem, tensors)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    results = []
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(run(op, problem, tensors)[0])
    torch.cuda.synchronize()
    assert all(torch.equal(o, wanted) for o in results)


def test_what_follows_waits_for_every_split(op: FlashAttentionPaged) -> None:
    """Results are read, and queries overwritten, by the next kernels of the stream."""
    problem = Problem(64, 8, (1,) * 100, tuple(512 - i % 50 for i in range(100)), 128, splits=4)
    static = problem.tensors(device="cuda")
    sets = [static[0].clone(), torch.randn_like(static[0])]
    wanted = []
    for q in sets:
        wanted.append(run(op, problem, [q, *static[1:]])[0])
        torch.cuda.synchronize()
    results = []
    for i in range(20):
        static[0].copy_(sets[i % 2])
        o, lse = run(op, problem, static)
        results.append(o.clone())
        del o, lse  # the next call's are in the same memory
    torch.cuda.synchronize()
    assert not torch.equal(*wanted)
    assert all(torch.equal(o, wanted[i % 2]) for i, o in enumerate(results))


# One token of each, the kernel for few queries alone; a prompt beside them, whose kernel runs at the same time.
MIXED = (1,) * 40, (900,) + (1, 3) * 16


@pytest.mark.parametrize("queries", MIXED, ids=("decoding", "a prompt too"))
def test_waits_for_its_arguments_and_is_waited_for(op: FlashAttentionPaged, queries: tuple[int, ...]) -> None:
    """Keys are split by lengths that the kernel before has just written, as it has the queries and keys; results are
    read, and arguments overwritten, by the next one. In a graph and without."""
    keys = tuple(max(n, 100 + 200 * i) for i, n in enumerate(queries))
    problem = Problem(32, 8, queries, keys, 128, known=True)
    static = problem.tensors(device="cuda")
    fewer = static[4] - (torch.arange(len(keys), device="cuda") % 5 * (static[4] // 10)).int()
    fewer = torch.maximum(fewer, static[3].diff())
    sets = [[static[i].clone() for i in (0, 2, 4)], [torch.randn_like(static[0]), static[2] + 1, fewer]]

    def step(given: list[torch.Tensor]) -> torch.Tensor:
        for i, t in zip((0, 2, 4), given, strict=True):
            static[i].copy_(t)
        o, _ = run(op, problem, static)
        for i in (0, 2, 4):
            static[i].zero_()
        return o + 0

    wanted = []
    for given in sets:
        wanted.append(step(given))
        torch.cuda.synchronize()
    assert not torch.equal(*wanted)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.cuda.graph(graph, stream=side):
        in_graph = [step(sets[i % 2]) for i in range(6)]
    for _ in range(5):
        results = [step(sets[i % 2]) for i in range(6)]
        graph.replay()
        torch.cuda.synchronize()
        for found in (results, in_graph):
            assert all(torch.equal(o, wanted[i % 2]) for i, o in enumerate(found))


def test_compile(op: FlashAttentionPaged) -> None:
    problem = Problem(16, 2, (200, 2), (500, 64), 64)
    tensors = problem.tensors(device="cuda")
    torch.compiler.reset()
    compiled = torch.compile(lambda *t: run(op, problem, list(t)), fullgraph=True)
    for a, b in zip(compiled(*tensors), run(op, problem, tensors), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("queries", [(300, 200), (2, 1)])
def test_out_of_range(op: FlashAttentionPaged, allowed: dict[str, float], queries: tuple[int, int]) -> None:
    """Of the last sequence: a page, a length, where it ends."""
    problem = Problem(8, 2, queries, (400, 300), 64, page=32)
    good = Problem(8, 2, queries[:1], (400,), 64, page=32, behind=queries[1])
    for argument, value in ((5, 1 << 30), (4, 1 << 29), (3, 1 << 29)):
        tensors = problem.tensors(device="cuda")
        if argument == 5:
            tensors[5][-1, 1] = value
        else:
            tensors[argument][-1] = value
        o, lse = run(op, problem, tensors)
        torch.cuda.synchronize()
        check_sequences(good, tensors, o, lse, allowed, "cuda")
        with pytest.raises(ArgumentError, match="of an earlier call was given"):
            run(op, problem, problem.tensors(device="cuda"))
        run(op, problem, problem.tensors(device="cuda"))


def test_a_gradient_is_refused(op: FlashAttentionPaged) -> None:
    problem = Problem(8, 2, (3,), (64,), 64)
    tensors = problem.tensors(device="cuda")
    with pytest.raises(ArgumentError, match="attention to a cache has none"):
        run(op, problem, [tensors[0].requires_grad_(), *tensors[1:]])


@pytest.mark.parametrize("queries", [(300,), (1,)])
def test_caches_beyond_two_billion_elements(
    op: FlashAttentionPaged, allowed: dict[str, float], queries: tuple[int, ...]
) -> None:
    """Keys and values of 2^31 + elements each, whose last pages are a sequence's, against float64."""
    if torch.cuda.get_device_properties(0).total_memory < 24 << 30:
        pytest.skip("needs 24 GB")
    problem = Problem(4, 2, queries, (1000,), 128, page=64)
    tensors = problem.tensors(device="cuda")
    pages = (1 << 31) // (64 * 2 * 128) + 100
    for i in (1, 2):
        small = tensors[i]
        tensors[i] = torch.empty(pages, *small.shape[1:], dtype=BF16, device="cuda")
        tensors[i][-small.shape[0] :] = small
        offset = pages - small.shape[0]
    tensors[5] = torch.where(tensors[5] >= 0, tensors[5] + offset, -1)
    assert tensors[1].numel() > 1 << 31
    o, lse = run(op, problem, tensors)
    check_sequences(problem, tensors, o, lse, allowed, "cuda")
