"""Liger's chunked losses on the ops: the results, gradients and errors of its own functions, which run beside them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("liger_kernel", reason="Liger-Kernel is not installed: make venv installs it")

import liger_aot.liger
from liger_aot.liger import chunked
from liger_aot.liger.fallback import theirs

S, T, K, J, V = 6, 5, 16, 8, 31


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape).requires_grad_()


def layer(width: int = K, bias: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
    return randn(S, T, width), randn(V, width), randn(V) if bias else None


def tokens(part: int = 3) -> Tensor:
    t = torch.randint(V, (S, T))
    t.view(-1)[::part] = -100
    return t


def dpo(kind: str, reference: bool = True, **options: Any) -> tuple[Any, ...]:
    (x, w, b), (y, v, c) = layer(), layer(J)
    smoothing = 0.1 if kind in ("exo_pair", "robust") else 0.0
    ref = (y.detach(), v.detach(), None if c is None else c.detach()) if reference else (None, None, None)
    return (
        x, w, tokens(), b, *ref, -100, 0.1, options.get("nll", False), False, reference,
        options.get("average", False), 1, kind, smoothing, 0.05, options.get("alpha", 1.0),
    )  # fmt: skip


def cpo(nll: bool, average: bool) -> tuple[Any, ...]:
    x, w, b = layer()
    return x, w, tokens(), b, -100, 0.2, 0.7, 0.1, nll, False, average, 2


def simpo(nll: bool) -> tuple[Any, ...]:
    x, w, b = layer(bias=nll)
    return x, w, tokens(), b, -100, 2.0, 0.7, 0.1, nll, False, 0.4, 1


def orpo(nll: bool, other: bool) -> tuple[Any, ...]:
    x, w, b = layer(bias=other)
    return x, w, tokens(), b, -100, 0.1, nll, tokens(4) if other else None, False, 1


def kto(reference: bool, average: bool) -> tuple[Any, ...]:
    (x, w, b), (y, v, c) = layer(), layer(J)
    labels = torch.tensor([True, False, False, True, True, False])
    ref = (y.detach(), v.detach(), c.detach()) if reference and c is not None else (None, None, None)
    kl = torch.tensor([0.3]) if average else None
    return x, w, tokens(), labels, b, *ref, kl, -100, 0.1, False, reference, average, 1


def grpo(kind: str, level: str = "token", beta: float = 0.1, **given: Any) -> tuple[Any, ...]:
    (x, w, b), (y, v, c) = layer(), layer(J)
    ids, mask = torch.randint(V, (S, T)), (torch.rand(S, T) < 0.8).float()
    logps = (x @ w.t() + b).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1).detach()
    old = logps + 0.3 * torch.randn(S, T)
    reference = (y.detach(), v.detach(), None if c is None else c.detach())
    ref_logps = None if given.get("layer") else logps - 0.2
    return (
        x, w, ids, mask, torch.linspace(-1, 1.5, S), b, ref_logps, old,
        *(reference if given.get("layer") else (None, None, None)), beta, 0.2, 0.3, kind, 9, level, 1.0, 1.05, 1.3,
        False, given.get("use_ref", True), 2, given.get("ratio"), given.get("delta"), given.get("fixed", False),
        2.0, 3.0, 3.0, 2.0, given.get("items"),
    )  # fmt: skip


def distillation(
    weights: tuple[float, float], beta: float, temperature: float, returned: bool
) -> tuple[Any, ...]:
    x, w, b = randn(S * T, K), randn(V, K), randn(V)
    y, v = torch.randn(S * T, J), torch.randn(V + 3, J)
    return (
        x, w, y, v, tokens().view(-1), b, torch.randn(V + 3), *weights, beta, -100, temperature, False, 8, returned
    )  # fmt: skip


DPO_LOSSES = (
    "sigmoid", "hinge", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop",
)  # fmt: skip
CASES: list[tuple[str, Callable[[], tuple[Any, ...]]]] = [
    *(("dpo", lambda kind=kind: dpo(kind)) for kind in DPO_LOSSES),  # type: ignore[misc]
    ("dpo", lambda: dpo("sigmoid", False, nll=True, average=True, alpha=0.5)),
    ("cpo", lambda: cpo(True, False)),
    ("cpo", lambda: cpo(False, True)),
    ("simpo", lambda: simpo(True)),
    ("simpo", lambda: simpo(False)),
    ("orpo", lambda: orpo(True, True)),
    ("orpo", lambda: orpo(True, False)),
    ("orpo", lambda: orpo(False, True)),
    ("kto", lambda: kto(True, True)),
    ("kto", lambda: kto(False, False)),
    *(("grpo", lambda kind=kind: grpo(kind)) for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo")),  # type: ignore[misc]
    *(("grpo", lambda kind=kind: grpo(kind, "sequence", fixed=True)) for kind in ("grpo", "dapo", "luspo")),  # type: ignore[misc]
    ("grpo", lambda: grpo("luspo", "sequence", 0.0)),
    ("grpo", lambda: grpo("dapo", layer=True, items=20.0, delta=1.1)),
    ("grpo", lambda: grpo("bnpo", beta=0.0, use_ref=False, ratio=torch.rand(S, T) + 0.5)),
    ("grpo", lambda: grpo("vespo", ratio=torch.rand(S) + 0.5, items=torch.tensor(20))),
    ("jsd", lambda: distillation((0.5, 0.5), 0.5, 1.0, False)),
    ("jsd", lambda: distillation((0.3, 0.7), 0.0, 2.0, True)),
    ("jsd", lambda: distillation((0.0, 1.0), 1.0, 1.0, True)),
    ("cosine", lambda: distillation((0.5, 0.5), 0.4, 1.0, True)),
    ("cosine", lambda: distillation((1.0, 0.0), 0.5, 2.0, False)),
]  # fmt: skip


@pytest.fixture(autouse=True)
def installed() -> None:
    liger_aot.liger.install()


def flat(results: Any) -> list[Any]:
    return [t for r in results for t in flat(r)] if isinstance(results, (tuple, list)) else [results]


def structure(results: Any) -> Any:
    return tuple(structure(r) for r in results) if isinstance(results, tuple) else None


def copied(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t for t in arguments
    )


@pytest.mark.parametrize("word,arguments", CASES, ids=[f"{word}{i}" for i, (word, _) in enumerate(CASES)])
def test_results(word: str, arguments: Callable[[], tuple[Any, ...]]) -> None:
    torch.manual_seed(3)
    given = arguments()
    copies = copied(given)
    ours, _ = chunked.NAMES[f"liger_fused_linear_{word}"]
    got, want = ours(*given), theirs[f"chunked_loss.liger_fused_linear_{word}"](*copies)
    assert structure(got) == structure(want)
    for a, b in zip(flat(got), flat(want), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)
    flat(got)[0].backward(torch.tensor(0.5))
    flat(want)[0].backward(torch.tensor(0.5))
    for a, b in zip(given, copies, strict=True):
        if isinstance(a, Tensor) and a.requires_grad:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("word", ["dpo", "cpo", "simpo", "orpo", "kto", "grpo", "jsd", "cosine"])
def test_forward_and_backward_with_a_context(word: str) -> None:
    torch.manual_seed(3)
    given = next(arguments() for name, arguments in CASES if name == word)
    copies = copied(given)
    function, _ = chunked.NAMES[f"liger_fused_linear_{word}"]
    stands = next(row for name, (row, _) in chunked.NAMES.items() if getattr(row, "apply", None) is function)
    context = SimpleNamespace()
    got = stands.forward(context, *given)
    want = function(*copies)
    for a, b in zip(flat(got), flat(want), strict=True):
        torch.testing.assert_close(a, b.detach())
    found = stands.backward(
        context, torch.tensor(0.5), *(None,) * (len(got) - 1 if isinstance(got, tuple) else 0)
    )
    flat(want)[0].backward(torch.tensor(0.5))
    assert len(found) == len(given)
    for g, t in zip(found, copies, strict=True):
        if isinstance(t, Tensor) and t.requires_grad:
            torch.testing.assert_close(g, t.grad)
        else:
            assert g is None


@pytest.mark.parametrize("name", [name for name in chunked.NAMES if name.startswith("Liger")])
def test_signature(name: str) -> None:
    """Names, order and defaults of Liger's own arguments."""
    stands, own = chunked.NAMES[name][0], theirs[f"chunked_loss.{name}"]
    wanted = [(p.name, p.default) for p in inspect.signature(own.forward).parameters.values()]
    wanted = [p for p in wanted if p[0] not in ("cls", "ctx")]
    got = [(p.name, p.default) for p in inspect.signature(stands.apply).parameters.values()]
    assert [n for n, _ in got] == [n for n, _ in wanted]
    optional = ("student_bias", "teacher_bias")  # without a default in Liger's
    assert [p for p in got if p[0] not in optional] == [p for p in wanted if p[0] not in optional]


def test_liger_modules_call_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing compiles, and the loss is the op's."""
    from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss, LigerFusedLinearJSDLoss

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("torch.compile was called")

    monkeypatch.setattr(torch, "compile", refuse)
    torch.manual_seed(0)
    (x, w, b), (y, v, _) = layer(), layer(J)
    loss, aux = LigerFusedLinearDPOLoss()(w, x, tokens(), b, y.detach(), v.detach())
    loss.backward()
    assert len(aux) == 7 and w.grad is not None
    student = x.detach().view(-1, K).requires_grad_()
    LigerFusedLinearJSDLoss()(student, w, y.detach().view(-1, J), v.detach(), tokens().view(-1)).backward()
    assert student.grad is not None


def test_errors_are_liger_s() -> None:
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="Sequence-level importance sampling is not supported"):
        chunked.LigerFusedLinearGRPOFunction.apply(*grpo("sapo", "sequence"))
    with pytest.raises(NotImplementedError, match="ipo"):
        chunked.LigerFusedLinearDPOFunction.apply(*dpo("ipo"))
    without = list(grpo("dr_grpo"))
    without[15] = None
    with pytest.raises(AssertionError, match="max_completion_length"):
        chunked.LigerFusedLinearGRPOFunction.apply(*without)
    with pytest.raises(AssertionError, match="ref_per_token_logps or ref_input must be provided"):
        arguments = list(grpo("dapo"))
        arguments[6] = None
        chunked.LigerFusedLinearGRPOFunction.apply(*arguments)


def test_uninstalled_they_are_liger_s() -> None:
    from liger_kernel.chunked_loss import dpo_loss, functional

    own = theirs["chunked_loss.LigerFusedLinearDPOFunction"]
    assert dpo_loss.LigerFusedLinearDPOFunction is chunked.LigerFusedLinearDPOFunction
    liger_aot.liger.uninstall()
    try:
        assert dpo_loss.LigerFusedLinearDPOFunction is own
        assert functional.liger_fused_linear_dpo == own.apply
    finally:
        liger_aot.liger.install()
    assert functional.liger_fused_linear_dpo is chunked.LigerFusedLinearDPOFunction.apply
