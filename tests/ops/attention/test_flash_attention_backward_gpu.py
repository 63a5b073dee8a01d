"""Attention's backward on a GPU: the binaries against float64, any strides, streams, graphs, torch.compile.

A deterministic call has the same bits every time, and so has every other one by the tiles; dq of warp-specialised
kernels varies.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import liger_aot
from liger_aot.ops.attention._backward import MOST_HEADS_IN_ORDER
from liger_aot.ops.attention.flash_attention import FlashAttention
from liger_aot.runtime.packs import pack_for
from tests.harness.tolerances import UNIT_ROUNDOFF
from tests.ops.attention.attention_cases import BF16, EMPTY, FP16, LARGE, Problem
from tests.ops.attention.attention_gradients import (
    FAINT,
    SMALL_GRADIENTS,
    check_gradients,
    faint_errors,
    gradient_errors,
)
from tests.ops.attention.test_flash_attention_gpu import views

pytestmark = pytest.mark.gpu
# float64 matrices of scores must fit beside each other
CASES = [p for p in (*SMALL_GRADIENTS, *EMPTY, *LARGE) if p.batch * p.heads * p.len_q * p.len_k <= 1 << 26]


@pytest.fixture
def op() -> FlashAttention:
    found: FlashAttention = liger_aot.load("flash_attention")
    return found


@pytest.fixture
def allowed() -> dict[str, float]:
    from liger_aot.runtime.devices import gpu

    return dict(pack_for(gpu(0).device).tolerance)


def same(found: Sequence[Tensor], wanted: Sequence[Tensor], rounded: int = 0) -> bool:
    """The same bits; of the first ``rounded`` ones (dq, dk, dv) the same but for a rounding."""
    for a, b in zip(found[:rounded], wanted[:rounded], strict=True):
        assert (a - b).norm() <= UNIT_ROUNDOFF[a.dtype] * b.norm()
    return all(torch.equal(a, b) for a, b in zip(found[rounded:], wanted[rounded:], strict=True))


def gradients(
    op: FlashAttention, problem: Problem, seed: int = 0, deterministic: bool = True
) -> tuple[Tensor, ...]:
    q, k, v, sinks = problem.tensors(seed, "cuda")
    leaves = [t.requires_grad_() for t in (q, k, v, sinks) if t is not None]
    o, _ = op(q, k, v, **problem.keywords(sinks), deterministic=deterministic)
    return torch.autograd.grad(o, leaves, torch.sin(o.detach()))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("gap", "size"), FAINT)
def test_subnormal_factors(
    op: FlashAttention, allowed: dict[str, float], gap: float, size: float, deterministic: bool
) -> None:
    """P and dS, or dY, that are subnormal in float16."""

    def run(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        return torch.autograd.grad(op(*leaves, deterministic=deterministic), leaves, do)

    worst = faint_errors(run, gap, size, allowed, "cuda")
    assert max(worst.values()) <= 1, worst


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", sorted({p.dim for p in CASES}))
def test_cases(
    op: FlashAttention,
    allowed: dict[str, float],
    dim: int,
    deterministic: bool,
    request: pytest.FixtureRequest,
) -> None:
    """Memory that is never written shows in the deterministic calls alone: torch has no other way to fill it."""
    if deterministic:
        request.getfixturevalue("poisoned")
    for seed, problem in enumerate(CASES):
        if problem.dim == dim:
            check_gradients(op, problem, allowed, seed=seed, device="cuda")


@pytest.mark.parametrize("dim", [64, 72, 100])
def test_strides(op: FlashAttention, dim: int) -> None:
    """Of the arguments and of the gradient; an expanded gradient, as sum() has it."""
    q, k, v, _ = Problem(2, 4, 4, 150, 150, dim).tensors(device="cuda")
    do = torch.randn(q.shape, device="cuda").to(BF16)

    def run(a: Tensor, b: Tensor, c: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (a, b, c)]
        return torch.autograd.grad(op(*leaves, causal=True, deterministic=True), leaves, g)

    wanted = run(q, k, v, do)
    for name in views(q):
        found = run(*(views(t)[name] for t in (q, k, v, do)))
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), name
    one = torch.ones(1, device="cuda", dtype=BF16).expand(q.shape)
    found, wanted = run(q, k, v, one), run(q, k, v, one.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_torch_agrees(op: FlashAttention, dim: int, causal: bool) -> None:
    """No farther from float64 than SDPA's own backward by more than a half."""
    q, k, v, _ = Problem(2, 4, 4, 1024, 1024, dim, layout="bhsd").tensors(device="cuda")
    do = torch.randn(q.shape, device="cuda").to(BF16)

    def run(function: object, dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
        return torch.autograd.grad(function(*leaves), leaves, do.to(dtype))  # type: ignore[operator]

    def sdpa(*t: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*t, is_causal=causal)

    exact = run(sdpa, torch.float64)
    ours, theirs = run(lambda *t: op(*t, causal=causal, layout="bhsd"), BF16), run(sdpa, BF16)
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert (a - c).norm() <= 1.5 * (b - c).norm()


REPEATED = [
    Problem(2, 16, 4, 2048, 2048, 128, causal=True, sinks=True),
    Problem(1, 2, 2, 20000, 20000, 64),  # more blocks of keys a head than multiprocessors
    Problem(1, 2, 2, 20000, 20000, 64, causal=True),
    Problem(3, 8, 1, 700, 3000, 96, causal=True),
    Problem(1, 12, 4, 3000, 700, 96),
    Problem(2, 8, 8, 1500, 1500, 128, FP16, window=(None, 200)),
    Problem(2, 4, 4, 600, 600, 192, causal=True),
    Problem(1, 6, 2, 1300, 2000, 232, FP16),
    Problem(1, 8, 2, 5000, 5000, 128, window=(1024, 0)),
    Problem(2, 4, 4, 1500, 1200, 64, FP16, window=(100, None)),
    Problem(1, 4, 1, 1200, 2500, 256, window=(300, 20)),
    Problem(1, 4, 2, 1500, 1500, 256, window=(300, 0), softcap=20.0),
]


@pytest.mark.parametrize("problem", REPEATED)
def test_the_same_bits(op: FlashAttention, problem: Problem) -> None:
    """On several streams, after each other and beside each other, when blocks of other calls lie between."""
    wanted = gradients(op, problem)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    for beside in (False, True):
        found = []
        for stream in streams * 2:
            with torch.cuda.stream(stream):
                found.append(gradients(op, problem))
            if not beside:
                stream.synchronize()
        torch.cuda.synchronize()
        assert all(same(each, wanted) for each in found)


BUSY = """
import torch
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
print("busy", flush=True)
while True:
    a @ a
    torch.cuda.synchronize()
"""


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_beside_other_processes(op: FlashAttention, dim: int) -> None:
    """A GPU that processes share leaves blocks that run and comes back to them: nothing of them is lost."""
    problem = Problem(1, 2, 2, 20000, 20000, dim)
    wanted = gradients(op, problem)
    others = [subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) for _ in range(3)]
    try:
        if any(other.stdout is None or other.stdout.readline() != b"busy\n" for other in others):
            pytest.skip("the GPU lets no other process in")
        assert all(same(gradients(op, problem), wanted) for _ in range(40))
    finally:
        for other in others:
            other.kill()
            other.wait()


@pytest.mark.parametrize("problem", REPEATED)
def test_the_order_is_all_that_differs(op: FlashAttention, problem: Problem) -> None:
    """Of dQ's sums; where query heads are interleaved, also of dK's and dV's."""
    interleaved = problem.causal and problem.heads > MOST_HEADS_IN_ORDER * problem.kv_heads
    fast, ordered = gradients(op, problem, deterministic=False), gradients(op, problem)
    assert same(fast, ordered, rounded=3 if interleaved else 1)


@pytest.mark.parametrize("deterministic", [False, True])
def test_graph(op: FlashAttention, deterministic: bool) -> None:
    q, k, v, _ = Problem(1, 4, 2, 300, 300, 64).tensors(device="cuda")
    leaves = [t.requires_grad_() for t in (q, k, v)]
    do = torch.randn(q.shape, device="cuda").to(BF16)

    def run() -> tuple[Tensor, ...]:
        return torch.autograd.grad(op(*leaves, causal=True, deterministic=deterministic), leaves, do)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        wanted = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert same(found, wanted, rounded=0 if deterministic else 1)


@pytest.mark.parametrize("deterministic", [False, True])
def test_compile(op: FlashAttention, deterministic: bool) -> None:
    q, k, v, sinks = Problem(1, 4, 2, 200, 300, 72, sinks=True).tensors(device="cuda")
    leaves = [t.requires_grad_() for t in (q, k, v, sinks) if t is not None]
    torch.compiler.reset()

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        o: Tensor = op(q, k, v, causal=True, sinks=sinks, deterministic=deterministic)
        return o

    do = torch.randn(q.shape, device="cuda").to(BF16)
    found = torch.autograd.grad(torch.compile(call, fullgraph=True)(*leaves), leaves, do)
    wanted = torch.autograd.grad(call(*leaves), leaves, do)
    assert same(found, wanted, rounded=0 if deterministic else 1)


def test_alone(op: FlashAttention) -> None:
    problem = Problem(2, 4, 2, 300, 400, 128, causal=True, sinks=True, softcap=10.0)
    q, k, v, sinks = problem.tensors(device="cuda")
    keywords = {key: value for key, value in problem.keywords(sinks).items() if key != "return_lse"}
    o, lse = op(q, k, v, **keywords, return_lse=True)
    found = liger_aot.load("flash_attention_backward")(
        torch.sin(o), q, k, v, o, lse, **keywords, deterministic=True
    )
    assert all(torch.equal(a, b) for a, b in zip(found, gradients(op, problem), strict=True))


@pytest.mark.parametrize("deterministic", [False, True])
def test_memory_is_linear(op: FlashAttention, deterministic: bool) -> None:
    """Beside the gradients, two float32 a row; warp-specialised, dq in float32, too."""
    q, k, v, _ = Problem(1, 4, 4, 8192, 8192, 64).tensors(device="cuda")
    leaves = [t.requires_grad_() for t in (q, k, v)]
    o = op(*leaves, deterministic=deterministic)
    do = torch.ones_like(o)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = torch.autograd.grad(o, leaves, do)
    grown = torch.cuda.max_memory_allocated() - before
    assert grown <= sum(g.nbytes for g in found) + 4 * q.numel() + 3 * 4 * 8192 * 4 + (1 << 20)


def test_tensors_beyond_two_billion_elements(op: FlashAttention, allowed: dict[str, float]) -> None:
    """q, the output and their gradients of 2^31 + elements: dq of the last rows against float64."""
    if torch.cuda.get_device_properties(0).total_memory < 40 << 30:
        pytest.skip("needs 40 GB")
    batch, length = 5, 1 << 18
    q = torch.randn(batch, length, 32, 64, device="cuda", dtype=BF16)
    k, v = (torch.randn(batch, 100, 1, 64, device="cuda", dtype=BF16) for _ in range(2))
    assert q.numel() > 1 << 31
    o = op(q.requires_grad_(), k, v)
    (dq,) = torch.autograd.grad(o, q, o.detach())
    last = (q.detach()[-1:, -500:, -1:].contiguous(), k[-1:], v[-1:], None)
    do = o.detach()[-1:, -500:, -1:]
    problem = Problem(1, 1, 1, 500, 100, 64)
    worst = gradient_errors((dq[-1:, -500:, -1:],), last, do, None, problem, allowed, approximate=True)
    assert max(worst.values()) <= 1
