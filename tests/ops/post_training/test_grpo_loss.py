"""grpo_loss against autograd in float64: from logits to their gradient, on every driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_aot
from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.post_training.grpo_loss import GRPOLoss
from liger_aot.ops.post_training.policy_loss import LOSS_TYPES, PolicyLoss
from tests.conftest import built_pack
from tests.harness.drivers import EmulatorDriver, InterpreterDriver, bound_op
from tests.harness.op_gpu_tests import PTX, lowered_from_ptx
from tests.harness.op_tests import BY_FORM

WAYS = [
    "reference",
    pytest.param("interpreter sm90", marks=pytest.mark.interpreter),
    "emulator gfx942",
    pytest.param("emulator gfx90a", marks=pytest.mark.slow),
    *BY_FORM,
    pytest.param("gpu", marks=pytest.mark.gpu),
    PTX,
]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OPTIONS: Mapping[str, dict[str, Any]] = {
    "plain": {"loss_type": "dapo", "beta": 0.04},
    "sequence": {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.1, "delta": 1.5},
    "per token": {"loss_type": "cispo", "reduction": "none", "eps_high": 1.5},
}


@pytest.fixture
def way(request: pytest.FixtureRequest, poisoned: None) -> tuple[GRPOLoss, str]:
    """The op on one of the drivers, and the device; memory that nobody has written to holds NaN."""
    driver, _, arch = request.param.partition(" ")
    if driver in ("reference", "gpu"):
        return GRPOLoss(), "cuda" if driver == "gpu" else "cpu"
    if driver == "PTX":
        return lowered_from_ptx(GRPOLoss), "cuda"
    by = InterpreterDriver if driver == "interpreter" else EmulatorDriver
    return bound_op(GRPOLoss, built_pack(arch), by), "cpu"


def draw(b: int, length: int, n: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(b + length + n)

    def r(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    logits = (2 * r(b, length + 1, n)).to(dtype)
    ids = torch.randint(n, (b, length), generator=generator, device=device)
    mask = torch.randint(3, (b, length), generator=generator, device=device, dtype=torch.int32)
    logp = (logits.float() / 0.8).log_softmax(-1)[:, :-1].gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    found = {"old_logp": logp + 0.3 * r(b, length), "ref_logp": logp + 0.3 * r(b, length), "advantages": r(b)}
    return {"logits": logits, "completion_ids": ids, "mask": mask, **found}


def exact(tensors: Mapping[str, Tensor], dloss: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The loss and the logits' gradient in float64, by torch's autograd."""
    wide = {k: t.double() if t.is_floating_point() else t for k, t in tensors.items()}
    logits = wide["logits"].requires_grad_()
    logp = (logits[:, :-1] / 0.8).log_softmax(-1).gather(-1, wide["completion_ids"].unsqueeze(-1)).squeeze(-1)
    op, asked = PolicyLoss(), []

    def record(tensors: Any, given: Any = (), out: Any = None) -> Any:
        asked.append(given)
        return (torch.zeros(()),) * 3

    op.differentiable = record  # type: ignore[method-assign]
    op(logp.detach().float(), None, wide["ref_logp"].float(), wide["advantages"].float(), **options)
    given = (logp, wide["old_logp"], wide["ref_logp"], wide["advantages"], wide["mask"], None, None, None)
    loss = PolicyLoss.reference(*given, *asked[0])[0]
    (found,) = torch.autograd.grad(loss, logits, dloss.double())
    return loss.detach(), found


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 5, 64), BF16), ((3, 4, 37), FP32), ((1, 3, 5001), FP16)], ids=str
)
def test_loss_and_gradient(
    way: tuple[GRPOLoss, str], options: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    check(*way, OPTIONS[options], shape, dtype)


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_large(options: str, dtype: torch.dtype) -> None:
    check(liger_aot.load("grpo_loss"), "cuda", OPTIONS[options], (3, 100, 128256), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type_on_a_gpu(loss_type: str) -> None:
    for reduction in ("mean", "none"):
        options = {"loss_type": loss_type, "beta": 0.04, "reduction": reduction}
        check(liger_aot.load("grpo_loss"), "cuda", options, (4, 50, 2000), BF16)


def check(
    op: Any, device: str, options: dict[str, Any], shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """A row's gradients are probabilities, or one less it, times the token's slope. A slope adds terms of the size of
    the greatest, each of a few roundings of logarithms, and the result is rounded to the logits' dtype."""
    tensors = draw(*shape, dtype, device)
    leaf = tensors["logits"].clone().requires_grad_()
    arguments = {**tensors, "logits": leaf}
    loss, _, _ = op(**arguments, temperature=0.8, **options)
    dloss = torch.linspace(0.5, 2.0, loss.numel(), device=device).view(loss.shape)
    (dlogits,) = torch.autograd.grad(loss, leaf, dloss)
    wanted, dwanted = exact(tensors, dloss, options)
    assert dlogits.dtype == dtype and loss.dtype == FP32 and loss.shape == wanted.shape
    size = float(wanted.abs().max())
    torch.testing.assert_close(loss.detach().double(), wanted, rtol=2e-5, atol=2e-6 * (1 + size))
    unit = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-24}[dtype]
    least = 2.0**-25 if dtype == FP16 else 2.0**-126  # of a subnormal
    row = dwanted.abs().amax(-1, keepdim=True)
    of_row = dwanted.abs() / row.clamp(min=1e-300)  # 1 at the chosen column
    error = (dlogits.double() - dwanted).abs() - least
    rounding = 1.1 * unit * dwanted.abs()
    assert bool((error <= rounding + 1e-4 * dwanted.abs() + 1e-5 * of_row * row.amax()).all())
    assert not dlogits[:, -1].any() and not dlogits[:, :-1][tensors["mask"] == 0].any()


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_gradient_over_the_logits(way: tuple[GRPOLoss, str]) -> None:
    op, device = way
    tensors = draw(2, 5, 64, BF16, device)
    leaf = tensors.pop("logits").requires_grad_()
    (wanted,) = torch.autograd.grad(op(leaf, **tensors)[0], leaf)
    made = leaf * 1
    (found,) = torch.autograd.grad(op(made, **tensors, inplace_grad=True)[0], made)
    assert torch.equal(found, wanted) and found.data_ptr() == made.data_ptr()
    with pytest.raises(ArgumentError, match="logits is a leaf that requires a gradient"):
        op(leaf, **tensors, inplace_grad=True)


def test_compiled_and_second_derivatives() -> None:
    """One graph with the eager call's bits; the gradient's own gradient is that of the steps in torch."""
    op, tensors = liger_aot.load("grpo_loss"), draw(2, 5, 16, FP32, "cpu")
    leaf = tensors.pop("logits").requires_grad_()

    def call(logits: Tensor) -> Any:
        return op(logits * 2, **tensors, beta=0.1, inplace_grad=True)

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for got, wanted in zip(compiled(leaf), call(leaf), strict=True):
        assert torch.equal(got, wanted)
    (got,), (wanted,) = (torch.autograd.grad(f(leaf)[0], leaf) for f in (compiled, call))
    assert torch.equal(got, wanted)
    small = leaf.detach()[:1, :3, :4].contiguous().requires_grad_()
    cut = {k: t[:1] if t.dim() == 1 else t[:1, :2].contiguous() for k, t in tensors.items()}
    cut["completion_ids"] = cut["completion_ids"] % 4

    def loss(logits: Tensor) -> Tensor:
        found: Tensor = op(logits, **cut, beta=0.1)[0]
        return found

    hessian = torch.autograd.functional.hessian(loss, small)
    step = 1e-2
    for at in ((0, 0, 1), (0, 1, 3)):
        ends = []
        for by in (step, -step):
            x = small.detach().clone()
            x[at] += by
            ends.append(torch.autograd.grad(loss(x.requires_grad_()), x)[0])
        torch.testing.assert_close((ends[0] - ends[1]) / (2 * step), hessian[at], rtol=2e-2, atol=2e-3)


def test_errors_name_the_op_and_the_argument() -> None:
    op, tensors = liger_aot.load("grpo_loss"), draw(2, 5, 16, FP32, "cpu")
    with pytest.raises(ArgumentError, match=r"grpo_loss: completion_ids must be of shape \(2, 4\)"):
        op(**{**tensors, "logits": tensors["logits"][:, :-1]})
    with pytest.raises(ArgumentError, match="grpo_loss: old_logp must be of shape"):
        op(**{**tensors, "old_logp": tensors["old_logp"][:, :-1]})
    for wrong, error, text in (
        ({"completion_ids": tensors["completion_ids"] + 100}, ArgumentError, r"completion_ids must be in \[0, 16\)"),
        ({"completion_ids": tensors["completion_ids"].float()}, ArgumentTypeError, "completion_ids must be int64"),
        ({"completion_ids": tensors["completion_ids"].to_sparse()}, ArgumentTypeError, "completion_ids must be dense"),
        ({"completion_ids": None}, ArgumentTypeError, "completion_ids must be a torch.Tensor"),
        ({"mask": tensors["advantages"].half()}, ArgumentTypeError, "mask must be "),
        ({"temperature": 0}, ArgumentError, "temperature must be "),
        ({"inplace_grad": 1}, ArgumentTypeError, "inplace_grad must be "),
        ({"loss_type": "ppo"}, ArgumentError, "loss_type must be "),
        ({"sequence_weight": tensors["advantages"]}, ArgumentError, "sequence_weight is not for loss_type='dapo'"),
    ):  # fmt: skip
        with pytest.raises(error, match=rf"^grpo_loss: {text}"):
            op(**{**tensors, **wrong})
    with pytest.raises(TypeError, match="unexpected keyword argument 'gamma'"):
        op(**tensors, gamma=1.0)


@pytest.mark.parametrize("way", WAYS[1:], indirect=True)
def test_a_token_out_of_range(way: tuple[GRPOLoss, str]) -> None:
    """Found by a kernel: the next call says whose it was."""
    op, device = way
    tensors = {**draw(2, 5, 16, FP32, device), "mask": torch.ones(2, 5, device=device)}
    assert op(**tensors)[0].isfinite()
    tensors["completion_ids"][0, 0] = 16
    assert op(**tensors)[0].isnan()
    if device == "cuda":
        torch.cuda.synchronize()
    tensors["completion_ids"][0, 0] = 15
    with pytest.raises(
        ArgumentError, match=r"^grpo_loss: an earlier call was given 16, .* no index to ignore"
    ):
        op(**tensors)
    assert op(**tensors)[0].isfinite()
