"""The modules beside torch.nn's: same parameters, same names, same values; the rest by formula."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import liger_aot.nn as ours
from liger_aot.errors import ArgumentError

# name -> (ours, torch's, input)
TWINS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], tuple[int, ...]]] = {
    "RMSNorm": (lambda: ours.RMSNorm(24), lambda: nn.RMSNorm(24), (2, 5, 24)),
    "RMSNorm, two dimensions": (
        lambda: ours.RMSNorm((4, 6), 1e-5),
        lambda: nn.RMSNorm((4, 6), 1e-5),
        (3, 4, 6),
    ),
    "RMSNorm, no weight": (
        lambda: ours.RMSNorm(24, elementwise_affine=False),
        lambda: nn.RMSNorm(24, elementwise_affine=False),
        (3, 24),
    ),
    "LayerNorm": (lambda: ours.LayerNorm(24), lambda: nn.LayerNorm(24), (2, 5, 24)),
    "LayerNorm, no bias": (
        lambda: ours.LayerNorm((4, 6), bias=False),
        lambda: nn.LayerNorm((4, 6), bias=False),
        (3, 4, 6),
    ),
    "GroupNorm": (lambda: ours.GroupNorm(3, 12), lambda: nn.GroupNorm(3, 12), (2, 12, 4, 5)),
    "GroupNorm, not affine": (
        lambda: ours.GroupNorm(3, 12, affine=False),
        lambda: nn.GroupNorm(3, 12, affine=False),
        (2, 12, 7),
    ),
    "Softmax": (lambda: ours.Softmax(dim=-1), lambda: nn.Softmax(dim=-1), (3, 24)),
    "Softmax, first dimension": (lambda: ours.Softmax(dim=0), lambda: nn.Softmax(dim=0), (3, 24)),
    "LogSoftmax": (lambda: ours.LogSoftmax(dim=1), lambda: nn.LogSoftmax(dim=1), (3, 24, 2)),
}


@pytest.mark.parametrize("name", TWINS)
def test_like_torch(name: str) -> None:
    make, make_torch, shape = TWINS[name]
    module, twin = make(), make_torch()
    assert isinstance(module, type(twin)) or not list(twin.parameters())
    with torch.no_grad():
        for p in module.parameters():
            p.normal_()
    twin.load_state_dict(module.state_dict())
    x = torch.randn(shape, requires_grad=True)
    inputs = (x, *module.parameters())
    y = module(x)
    dy = torch.randn_like(y)
    got = (y, *torch.autograd.grad(y, inputs, dy))
    y = twin(x)
    wanted = (y, *torch.autograd.grad(y, (x, *twin.parameters()), dy))
    for value, exact in zip(got, wanted, strict=True):
        torch.testing.assert_close(value, exact)


def test_embedding_is_like_torch() -> None:
    module, twin = ours.Embedding(10, 8, padding_idx=3), nn.Embedding(10, 8, padding_idx=3)
    twin.load_state_dict(module.state_dict())
    indices = torch.tensor([[1, 3, 9], [1, 0, 3]])
    for one in (module, twin):
        one(indices).square().sum().backward()
    assert torch.equal(module(indices), twin(indices))
    assert module.weight.grad is not None
    torch.testing.assert_close(module.weight.grad, twin.weight.grad)
    with pytest.raises(ArgumentError, match=r"max_norm must be None, got 1\.0"):
        ours.Embedding(10, 8, max_norm=1.0)


def test_formulas() -> None:
    a, b = torch.randn(4, 6, 16), torch.randn(4, 6, 16)
    pairs: list[tuple[Tensor, Tensor]] = [
        (ours.SwiGLU()(a, b), nn.functional.silu(a) * b),
        (ours.SwiGLU()(torch.cat((a, b), -1)), nn.functional.silu(a) * b),
        (ours.GEGLU()(a, b), nn.functional.gelu(a, approximate="tanh") * b),
        (ours.GEGLU("none")(a, b), nn.functional.gelu(a) * b),
        (ours.ReLUSquared()(a), a.relu().square()),
        (ours.Softmax(temperature=2.0)(a), (a / 2).softmax(-1)),
        (ours.DyT(16, 0.7)(a), torch.tanh(0.7 * a)),
        (ours.FusedAddRMSNorm(16, 1e-5)(a, b)[0], nn.functional.rms_norm(a + b, (16,), eps=1e-5)),
        (ours.FusedAddRMSNorm(16, 1e-5)(a, b)[1], a + b),
    ]
    for value, exact in pairs:
        torch.testing.assert_close(value, exact)
    assert torch.allclose(ours.Sparsemax()(a).sum(-1), torch.ones(4, 6))
    powers = [a**k / (a**k).square().mean(-1, keepdim=True).add(1e-6).sqrt() for k in (1, 2, 3)]
    torch.testing.assert_close(ours.PolyNorm()(a), sum(powers) / 3)
    scale, shift = torch.randn(4, 16), torch.randn(4, 16)
    norm = nn.functional.rms_norm(a, (16,), eps=1e-6)
    torch.testing.assert_close(
        ours.ModulatedRMSNorm(16)(a, scale, shift), norm * (1 + scale[:, None]) + shift[:, None]
    )


def test_a_module_can_be_copied_and_saved() -> None:
    model = nn.Sequential(ours.RMSNorm(8), ours.LayerNorm(8), ours.Softmax())
    x = torch.randn(3, 8)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x))


def test_compiles_to_one_graph() -> None:
    model = nn.Sequential(ours.RMSNorm(8), ours.LayerNorm(8), ours.ReLUSquared(), ours.Softmax())
    x = torch.randn(3, 8)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 24), nn.Linear(8, 24), nn.Linear(24, 8)
        self.act = ours.SwiGLU()
        self.most = 0  # tokens at once

    def forward(self, x: Tensor) -> Tensor:
        self.most = max(self.most, x.shape[-2])
        y: Tensor = self.down(self.act(self.gate(x), self.up(x)))
        return y


@pytest.mark.parametrize(
    ("shape", "shards", "most"), [((2, 21, 8), None, 7), ((9, 8), 4, 3), ((3, 1, 8), 5, 1)]
)
def test_tiled_mlp(shape: tuple[int, ...], shards: int | None, most: int) -> None:
    """The results and gradients of the whole, from so many tokens at once."""
    torch.manual_seed(0)
    plain = MLP()
    tiled = ours.TiledMLP(copy.deepcopy(plain), shards)
    found = []
    x = torch.randn(shape)
    for module in (plain, tiled):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        y.square().sum().backward()
        found.append([y.detach(), leaf.grad, *(p.grad for p in module.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
    assert tiled.mlp.most == most
    with torch.no_grad():
        torch.testing.assert_close(tiled(x), found[0][0])
    assert repr(tiled).startswith(f"TiledMLP(\n  shards={shards}")


def test_tiled_mlp_asks_for_parts() -> None:
    for wrong in (0, 2.0, True):
        with pytest.raises(ArgumentError, match=f"shards must be an int from 1 on, or None; got {wrong}"):
            ours.TiledMLP(nn.Identity(), wrong)  # type: ignore[arg-type]


def test_shape_that_does_not_fit() -> None:
    with pytest.raises(ArgumentError, match=r"x must end in the normalized shape \(8,\), got \(3, 9\)"):
        ours.RMSNorm(8)(torch.randn(3, 9))
