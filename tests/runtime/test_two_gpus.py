"""Ops outside of the harness on another GPU than the current one: attention, decoding, the fused linear losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_aot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason=f"needs two GPUs, there are {torch.cuda.device_count()}"
    ),
]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return liger_aot.load("flash_attention")(q, k, v, causal=True)


def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    starts = torch.tensor([0, 100, 300], dtype=torch.int32, device=q.device)
    op = liger_aot.load("flash_attention_varlen")
    return op(*(t.flatten(0, 1) for t in (q, k, v)), starts, starts, 200, 200, causal=True)


def decoding(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    lengths = torch.tensor([70, 150], dtype=torch.int32, device=q.device)
    return liger_aot.load("flash_decoding")(q[:, :1], k, v, cache_seqlens=lengths)


def linear_loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    x, weight = q.reshape(300, -1), k.reshape(300, -1)
    target = torch.arange(300, device=q.device)
    return liger_aot.load("fused_linear_cross_entropy")(x, weight, target)


@pytest.mark.parametrize("call", [attention, packed, decoding, linear_loss])
@pytest.mark.parametrize("dim", [64, 192])
def test_another_gpu_than_the_current_one(call: Callable[..., Any], dim: int) -> None:
    """The same bits as on the current one, the gradients too but for dq's order of sums."""
    tensors = [torch.randn(2, 150, 4, dim, dtype=torch.bfloat16) for _ in range(3)]
    found = []
    for device in ("cuda:0", "cuda:1"):
        leaves = [t.to(device).requires_grad_(call is not decoding) for t in tensors]
        with torch.cuda.device(0):
            result = call(*leaves)
            gradients = (
                []
                if call is decoding
                else torch.autograd.grad(result.float().square().sum(), leaves, allow_unused=True)
            )
        assert torch.cuda.current_device() == 0
        found.append([t.cpu() for t in (result, *gradients) if t is not None])
    for here, there in zip(*found, strict=True):
        torch.testing.assert_close(there, here, rtol=1e-2, atol=1e-3)
    assert torch.equal(found[0][0], found[1][0])
