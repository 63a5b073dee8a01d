"""The modules over the divergences: torch's and Liger's arguments, the ops' results."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor

import liger_aot
import liger_aot.nn as ours


def pair(rows: int = 6, n: int = 24) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(rows, n, generator=g).log_softmax(-1) for _ in range(2))
    return x, y


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "batchmean", "sum", "none"])
def test_kl_div_is_like_torch(reduction: str, log_target: bool) -> None:
    x, y = pair()
    target = y if log_target else y.exp()
    module = ours.KLDivLoss(reduction=reduction, log_target=log_target)
    twin = torch.nn.KLDivLoss(reduction=reduction, log_target=log_target)
    assert isinstance(module, torch.nn.KLDivLoss)
    leaves = x.clone().requires_grad_(), x.clone().requires_grad_()
    losses = module(leaves[0], target), twin(leaves[1], target)
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.sum().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)


def test_default_reduction_is_torchs() -> None:
    assert ours.KLDivLoss().reduction == torch.nn.KLDivLoss().reduction == "mean"


def test_jsd_and_tvd() -> None:
    x, y = pair()
    labels = torch.tensor([1, -1, 2, 3, -1, 4])
    jsd, tvd = ours.JSD(beta=0.2, ignore_index=-1), ours.TVDLoss("sum", ignore_index=-1)
    wanted = liger_aot.load("jsd")(x, y, labels, beta=0.2, ignore_index=-1)
    assert torch.equal(jsd(x, y, labels), wanted) and not torch.equal(jsd(x, y), wanted)
    p, q = x.exp(), y.exp()
    kept = labels != -1
    torch.testing.assert_close(tvd(p, q, labels), (p - q)[kept].abs().sum() / 2)
    assert "beta=0.2" in repr(jsd) and "'sum'" in repr(tvd)


def test_fused_linear_jsd() -> None:
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(6, 8, generator=g), torch.randn(6, 16, generator=g)
    w, v = torch.randn(24, 8, generator=g), torch.randn(24, 16, generator=g)
    module = ours.FusedLinearJSD(0.3, temperature=2.0)
    wanted = ours.JSD(0.3)((x @ w.t() / 2).log_softmax(-1), (y @ v.t() / 2).log_softmax(-1))
    torch.testing.assert_close(module(x, w, y, v), wanted)
    assert "temperature=2.0" in repr(module)


@pytest.mark.parametrize("make", [ours.KLDivLoss, ours.JSD, ours.TVDLoss, ours.FusedLinearJSD])
def test_copies(make: type[torch.nn.Module]) -> None:
    module = make()
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert repr(twin) == repr(module) and not twin.state_dict()
