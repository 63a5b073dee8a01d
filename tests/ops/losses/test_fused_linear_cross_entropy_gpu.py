"""Fused linear cross entropy where only a GPU shows it: large vocabularies, memory, CUDA graphs, torch.compile, targets
out of range."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import liger_aot
from liger_aot.errors import ArgumentError
from liger_aot.runtime import device_errors
from tests.ops.losses.linear_loss_cases import BF16, FP16, FP32, LinearCase, draw
from tests.ops.losses.test_fused_linear_cross_entropy import check, check_compiled

pytestmark = pytest.mark.gpu
OP: Any = liger_aot.load("fused_linear_cross_entropy")
GIB = 1 << 30
LARGE = (
    LinearCase(1000, 512, 128256, BF16, chunks=4),
    LinearCase(700, 512, 50257, BF16, chunks=3),
    LinearCase(700, 512, 50257, FP16, bias=True, chunks=3),
    LinearCase(500, 256, 32000, FP32, classes=True, chunks=2, keywords={"label_smoothing": 0.1}),
    LinearCase(300, 256, 262144, BF16, chunks=2, keywords={"softcap": 30.0, "lse_square_scale": 1e-4}),
    LinearCase(500, 256, 32000, BF16, chunks=2, keywords={"reduction": "none", "use_token_scaling": True}),
    LinearCase(
        300, 256, 50257, BF16, chunks=2, keywords={"weight_grad_dtype": torch.float32}, index=torch.int32
    ),
)


@pytest.mark.parametrize("case", LARGE, ids=str)
@pytest.mark.usefixtures("poisoned")
def test_large(case: LinearCase) -> None:
    check(OP, case, "cuda")


def test_compile() -> None:
    check_compiled("cuda")


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_cuda_graph(reduction: str) -> None:
    """Forward and backward captured once, with a gradient of the loss that is not 1, and replayed with other values."""
    OP.preload()
    case = LinearCase(300, 128, 1000, BF16, bias=True)
    drawn = draw(case, 0, "cuda")
    leaves, target = drawn.leaves(), drawn.target.clone()
    grad = torch.rand(300 if reduction == "none" else (), device="cuda")
    budget = 128 * 1024 * 2

    def step() -> Any:
        loss = OP(leaves[0], leaves[1], target, leaves[2], reduction=reduction, chunk_bytes=budget)
        return loss.detach(), torch.autograd.grad(loss, leaves, grad)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (1, 2):
        other = draw(case, seed, "cuda")
        for to, new in zip(leaves, other.leaves(), strict=True):
            to.data.copy_(new.detach())
        target.copy_(other.target)
        grad.uniform_()
        graph.replay()
        loss, gradients = captured[0].clone(), [g.clone() for g in captured[1]]
        wanted = step()
        assert torch.equal(loss, wanted[0])
        assert all(torch.equal(a, b) for a, b in zip(gradients, wanted[1], strict=True))


@pytest.mark.parametrize(("dtype", "limit"), [(None, 0.9), (torch.float32, 1.4)])
def test_memory(dtype: torch.dtype | None, limit: float) -> None:
    """The peak is the gradients, the chunk and little more, forward and backward; what is left are the gradients."""
    rows, k, vocabulary = 4096, 2048, 128256
    x = torch.randn(rows, k, device="cuda", dtype=BF16).requires_grad_()
    w = (torch.randn(vocabulary, k, device="cuda", dtype=BF16) * k**-0.5).requires_grad_()
    if dtype is not None:
        if not hasattr(w, "grad_dtype"):
            pytest.skip("this torch has no Tensor.grad_dtype")
        w.grad_dtype = dtype
    t = torch.randint(vocabulary, (rows,), device="cuda")
    for _ in range(2):  # the first makes cuBLAS's workspace
        x.grad = w.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        OP(x, w, t, chunk_bytes=1 << 28, weight_grad_dtype=dtype).backward(torch.tensor(0.5, device="cuda"))
        peak, left = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    size = w.numel() * (2 if dtype is None else 4) + x.numel() * 2
    assert left <= size * 1.01
    assert peak <= size + (1 << 28) * 1.05
    assert peak / GIB <= limit


def test_targets_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is NaN, nothing is read out of bounds, the next call raises; with the debug switch the call itself."""
    x, w = torch.randn(4, 64, device="cuda", dtype=BF16), torch.randn(100, 64, device="cuda", dtype=BF16)
    t = torch.tensor([1, 100, -100, 3], device="cuda")
    assert OP(x, w, t).isnan()
    torch.cuda.synchronize()
    with pytest.raises(ArgumentError, match=r"fused_linear_cross_entropy: an earlier call.*100"):
        OP(x, w, t.clamp(max=99))
    assert OP(x, w, t.clamp(max=99)).isfinite()
    monkeypatch.setattr(device_errors, "DEBUG", True)
    with pytest.raises(ArgumentError, match=r"fused_linear_cross_entropy: this call.*-7"):
        OP(x, w, torch.tensor([1, -7, -100, 3], device="cuda"))


def test_no_wait_for_the_device() -> None:
    """Neither way synchronises."""
    case = LinearCase(300, 128, 1000, BF16, bias=True)
    for keywords in ({}, {"reduction": "none"}, {"label_smoothing": 0.1, "return_token_accuracy": True}):
        drawn = draw(case, 0, "cuda")
        leaves = drawn.leaves()
        for attempt in range(2):
            torch.cuda.set_sync_debug_mode("error" if attempt else "default")
            try:
                loss = OP(leaves[0], leaves[1], drawn.target, leaves[2], **keywords)
                loss = loss[0] if isinstance(loss, tuple) else loss
                torch.autograd.grad(loss.sum(), leaves)
            finally:
                torch.cuda.set_sync_debug_mode("default")
