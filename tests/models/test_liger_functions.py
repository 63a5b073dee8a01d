"""Every stand-in for a function of Liger's: its signature, its results and gradients against plain torch."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("liger_kernel", reason="liger-kernel is not installed: make venv installs it")

import liger_aot.liger
from liger_aot.errors import ArgumentError
from liger_aot.liger.functions import COVERED
from tests.models.liger_cases import CASES, Case, labels, ours, randn, rms


def outputs(value: Any) -> list[Tensor]:
    return [t for t in (value if isinstance(value, tuple) else (value,)) if t is not None]


def gradients(value: Any, arguments: tuple[Any, ...]) -> list[Tensor]:
    torch.manual_seed(5)
    made = [t for t in outputs(value) if t.requires_grad]
    inputs = [t for t in arguments if isinstance(t, Tensor) and t.requires_grad]
    return list(torch.autograd.grad(made, inputs, [torch.randn_like(t) for t in made]))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_as_plain_torch(case: Case) -> None:
    torch.manual_seed(0)
    arguments = case.arguments()
    # Leaves: the loss may overwrite what is none.
    copies = tuple(
        t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t for t in arguments
    )
    want = case.plain(*copies)
    got = ours(case.name).apply(*arguments)
    assert isinstance(got, tuple) == isinstance(want, tuple)
    if isinstance(want, tuple):
        assert [t is None for t in got] == [t is None for t in want]
    for a, b in zip(outputs(got), outputs(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    wanted = [t for t in outputs(want) if t.requires_grad][
        : len([t for t in outputs(got) if t.requires_grad])
    ]
    for a, b in zip(gradients(got, arguments), gradients(tuple(wanted), copies), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_every_class_has_a_case() -> None:
    assert {case.name for case in CASES} == {name for name in COVERED if name.startswith("Liger")}


@pytest.mark.parametrize("name", COVERED)
def test_signature(name: str) -> None:
    """Names, order and defaults of Liger's own arguments."""
    liger_aot.liger.uninstall()
    try:
        import liger_kernel.ops

        theirs = getattr(liger_kernel.ops, name)
    finally:
        liger_aot.liger.install()
    stands = ours(name)
    if inspect.isclass(theirs):
        theirs, stands = theirs.forward, stands.apply
    want = [(p.name, p.default) for p in inspect.signature(theirs).parameters.values() if p.name != "ctx"]
    assert [(p.name, p.default) for p in inspect.signature(stands).parameters.values()] == want


def test_ignored_rows_give_zero() -> None:
    """A mean over no targets is 0 with Liger, and its gradient too."""
    x, w, t = randn(4, 8), randn(9, 8), torch.full((4,), -100)
    for loss in (
        ours("LigerCrossEntropyFunction").apply(x @ w.t(), t, None)[0],
        ours("LigerFusedLinearCrossEntropyFunction").apply(x, w, t)[0],
    ):
        assert loss == 0
        assert all((g == 0).all() for g in torch.autograd.grad(loss, (x, w)))


def test_the_gradient_takes_the_logits_place() -> None:
    """Where no backward reads them: behind a linear layer, and not behind what keeps its result."""
    apply, t = ours("LigerCrossEntropyFunction").apply, labels(9, 31)
    x, w = randn(3, 3, 16), randn(31, 16)
    logits = (x @ w.t()).view(9, 31)
    before = logits.detach().clone()
    loss, *_ = apply(logits, t, None)
    assert not torch.equal(logits.detach(), before)
    want = torch.autograd.grad(F.cross_entropy((x @ w.t()).view(9, 31), t), (x, w))
    torch.testing.assert_close(torch.autograd.grad(loss, (x, w)), want)

    capped = torch.tanh(x @ w.t()).view(9, 31)
    before = capped.detach().clone()
    loss, *_ = apply(capped, t, None)
    assert torch.equal(capped.detach(), before)
    want = torch.autograd.grad(F.cross_entropy(torch.tanh(x @ w.t()).view(9, 31), t), (x, w))
    torch.testing.assert_close(torch.autograd.grad(loss, (x, w)), want)


def test_casting_modes() -> None:
    x, w = torch.randn(3, 8).bfloat16(), torch.randn(8).bfloat16()
    apply = ours("LigerRMSNormFunction").apply
    for number, name in ((0, "llama"), (1, "gemma"), (-1, "none")):
        assert torch.equal(apply(x, w, 1e-6, 0.0, number), liger_aot.load("rmsnorm")(x, w, casting_mode=name))
    assert apply(x, w.float().half(), 1e-6).dtype == torch.bfloat16  # a weight of a third dtype
    for wrong in ("other", 7):
        with pytest.raises(ArgumentError, match="casting_mode must be one of llama, gemma, none"):
            apply(x, w, 1e-6, 0.0, wrong)


def test_tensors_of_a_tensor_parallel_module() -> None:
    """A DTensor is gathered by norms, and kept as it is by the activation."""
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        a, b, w = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
        da, db = (distribute_tensor(t, mesh, [Shard(1)]) for t in (a, b))
        c = ours("LigerSiLUMulFunction").apply(da, db)
        assert c.placements == da.placements
        torch.testing.assert_close(c.to_local(), F.silu(a) * b)
        torch.testing.assert_close(ours("LigerSiLUMulFunction").apply(a, db).to_local(), F.silu(a) * b)
        torch.testing.assert_close(ours("LigerRMSNormFunction").apply(da, w, 1e-6), rms(a, w, 1e-6))
    finally:
        dist.destroy_process_group()
