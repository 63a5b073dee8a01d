"""Gradients in and beside the transforms of torch.func, and the tensors that those leave behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import liger_aot

CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu_squared": lambda x: liger_aot.load("relu_squared")(x).sum(),
    "rmsnorm": lambda x: liger_aot.load("rmsnorm")(x, torch.ones(6, device=x.device)).sum(),
    "kl_div": lambda x: liger_aot.load("kl_div")(x, torch.full((4, 6), 1 / 6, device=x.device)),
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def rows(device: str) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).to(device)


@pytest.mark.parametrize("op", CALLS)
def test_a_tensor_that_a_transform_left_behind(op: str, device: str) -> None:
    """It may take the reference where a plain tensor takes the kernels."""
    x = rows(device).requires_grad_()
    seen: list[Tensor] = []

    def leave(twos: Tensor) -> Tensor:
        seen.append(x * twos)
        return twos.sum()

    torch.func.grad(leave)(torch.full((4, 6), 2.0, device=device))
    assert torch._C._functorch.is_functorch_wrapped_tensor(seen[0])
    (found,) = torch.autograd.grad(CALLS[op](seen[0]), x)
    (expected,) = torch.autograd.grad(CALLS[op](x * 2), x)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("op", CALLS)
def test_plain_tensors_take_the_short_way(op: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def long_way(*_: object) -> None:
        raise AssertionError("through torch's apply")

    monkeypatch.setattr(torch.autograd.Function, "apply", long_way)
    CALLS[op](torch.zeros(4, 6, device=device, requires_grad=True)).backward()


@pytest.mark.parametrize("op", CALLS)
def test_gradients_inside_a_transform(op: str, device: str) -> None:
    """Also of a tensor that the transform does not know."""
    x = rows(device)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(CALLS[op](leaf), leaf)
    torch.testing.assert_close(torch.func.grad(CALLS[op])(x), expected)
    value = torch.func.grad_and_value(lambda y: CALLS[op](leaf) + y.sum())(torch.zeros(3))[1]
    (found,) = torch.autograd.grad(value, leaf)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("op", ["rmsnorm", "flash_attention", "rope"])
def test_vmap_without_gradients(op: str, device: str) -> None:
    """No tensor there has memory to read: the reference computes."""
    dtype = torch.bfloat16 if op == "flash_attention" and device == "cuda" else torch.float32
    x = torch.randn(3, 1, 8, 2, 64, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    angles = torch.zeros(8, 64, device=device)
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "rmsnorm": lambda y: liger_aot.load("rmsnorm")(y),
        "flash_attention": lambda y: liger_aot.load("flash_attention")(y, y, y, causal=True),
        "rope": lambda y: liger_aot.load("rope")(y, y, angles, angles, layout="bshd")[0],
    }
    expected = torch.stack([calls[op](y) for y in x])
    torch.testing.assert_close(torch.vmap(calls[op])(x), expected)
