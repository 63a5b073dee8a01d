"""Fused linear cross entropy inside DistributedDataParallel and FSDP2: each rank has a part of the batch, and they
train as one process does on the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from liger_aot.errors import ArgumentTypeError
from liger_aot.nn import FusedLinearCrossEntropyLoss
from tests.harness.process_groups import in_group

ROWS, K, VOCABULARY = 6, 16, 40


class Model(nn.Module):
    """A body and a head; the loss reads the head's weight inside forward."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(K, K)
        self.head = nn.Linear(K, VOCABULARY)
        self.loss = FusedLinearCrossEntropyLoss() if fused else None

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        if self.loss is None:
            return F.cross_entropy(self.head(h), target)
        loss: Tensor = self.loss(self.head.weight, h, target, self.head.bias)
        return loss


def batch(device: torch.device) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS * dist.get_world_size(), K, generator=g)
    return x.to(device), torch.randint(VOCABULARY, x.shape[:1], generator=g).to(device)


def train(rank: int, device: torch.device, wrap: str) -> None:
    """Three steps give the parameters of one process with torch's own loss on the whole batch."""
    alone, fused = Model(False).to(device), Model(True).to(device)
    wrapped: Any = fused
    if wrap == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(fused)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(fused, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (alone, wrapped)]
    x, t = batch(device)
    own = slice(ROWS * rank, ROWS * rank + ROWS)
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        alone(x, t).backward()
        wrapped(x[own], t[own]).backward()
        for optimizer in optimizers:
            optimizer.step()
    for (name, a), b in zip(alone.named_parameters(), fused.parameters(), strict=True):
        whole = b.full_tensor() if hasattr(b, "full_tensor") else b
        torch.testing.assert_close(whole, a, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("wrap", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp2"])
def test_on_the_cpu(wrap: str) -> None:
    in_group(train, 2, wrap)


def refused(rank: int, device: torch.device) -> None:
    """A sharded weight is told from a whole one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Model(True)
    fully_shard(model, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
    x, t = batch(device)
    assert model.loss is not None
    with pytest.raises(
        ArgumentTypeError, match="weight is a DTensor: under FSDP2 call this inside the forward"
    ):
        model.loss(model.head.weight, x, t)


def test_sharded_weight_is_refused() -> None:
    in_group(refused, 1)


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs two GPUs, there are {torch.cuda.device_count()}"
)
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_on_two_gpus(wrap: str) -> None:
    in_group(train, 2, wrap, backend="nccl")
