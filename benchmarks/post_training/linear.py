"""Post-training losses of a linear layer's results, forward and backward together, beside the matrix products that
bound them, as ``benchmarks.losses.linear``:

    python -m benchmarks.post_training.linear dpo
    python -m benchmarks.post_training.linear orpo
    python -m benchmarks.post_training.linear kto
    python -m benchmarks.post_training.linear grpo
    python -m benchmarks.post_training.linear distillation
    python -m benchmarks.post_training.linear kl_div

The products are four (the logits of the policy or student and of its reference or teacher, the gradients of input and
weight); those of orpo, which has no reference, and of kl_div, whose teacher's probabilities are given, three. The rows
are four sequences of as many tokens; for dpo and orpo two pairs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.losses.linear import (
    CHECKED_OF_INPUT,
    Inputs,
    LinearLoss,
    Loss,
    Shape,
    compiled,
    drawn_teacher,
    measured,
)
from benchmarks.losses.linear import four_products as products_of_student

SEQUENCES, BETA = 4, 0.1
POINTS = ((4096, 4096, 128256), (4096, 2048, 32000))


def op_of(name: str) -> Any:
    import liger_aot

    return liger_aot.load(name)


def drawn_sequences(shape: Shape, device: torch.device) -> Inputs:
    """Logits of about standard normal size and a reference near the policy; the target, the reference's input and its
    weight are the others."""
    rows, k, vocabulary = shape
    g = torch.Generator(device).manual_seed(rows)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=device, generator=g)

    x, w = normal(SEQUENCES, rows // SEQUENCES, k), normal(vocabulary, k).mul_(k**-0.5)
    target = torch.randint(vocabulary, x.shape[:2], device=device, generator=g)
    reference = (x + normal(*x.shape).mul_(0.1)).bfloat16(), w.bfloat16()
    return Inputs(x.bfloat16().requires_grad_(), w.bfloat16().requires_grad_(), (target, *reference))


def four_products(inputs: Inputs) -> Callable[[], None]:
    _, y, v = inputs.others
    k = inputs.input.shape[-1]
    flat = Inputs(inputs.input.detach().view(-1, k), inputs.weight, (y.view(-1, k), v))
    return products_of_student(flat)


def three_products(inputs: Inputs) -> Callable[[], None]:
    k = inputs.input.shape[-1]
    x, w = inputs.input.detach().view(-1, k), inputs.weight.detach()
    logits, dx, dw = torch.mm(x, w.t()), torch.empty_like(x), torch.empty_like(w)
    g = torch.softmax(logits, -1)

    def run() -> None:
        torch.mm(x, w.t(), out=logits)
        torch.mm(g, w, out=dx)
        torch.mm(g.t(), x, out=dw)

    return run


def log_probs(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(x, w)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(wide).log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)


# ---- Of log-probabilities: DPO, ORPO, KTO, GRPO ----


def dpo_of(logps: Tensor, reference: Tensor) -> Tensor:
    chosen, rejected = (logps.sum(-1) - reference.sum(-1)).chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def orpo_of(logps: Tensor, reference: None) -> Tensor:
    chosen, rejected = logps.mean(-1).chunk(2)
    odds = chosen - rejected - ((-chosen.exp()).log1p() - (-rejected.exp()).log1p())
    return -logps.chunk(2)[0].mean() - BETA * F.logsigmoid(odds).mean()


def desirable(target: Tensor) -> Tensor:
    """Every second sequence."""
    return torch.arange(len(target), device=target.device) % 2 == 0


def kto_of(logps: Tensor, reference: Tensor) -> Tensor:
    apart = BETA * (logps.sum(-1) - reference.sum(-1))
    return (1 - torch.where(desirable(logps), apart, -apart).sigmoid()).mean()


def grpo_of(logps: Tensor, reference: Tensor) -> Tensor:
    """The policy's own probabilities are those that it sampled with."""
    advantages = torch.linspace(-1, 1.5, len(logps), device=logps.device, dtype=logps.dtype).unsqueeze(1)
    apart = reference - logps
    return (-(logps - logps.detach()).exp() * advantages + BETA * (apart.exp() - apart - 1)).mean()


def in_torch(of: Callable[[Tensor, Any], Tensor], referred: bool = True) -> Loss:
    """``referred``: whether the loss has a reference."""

    def loss(i: Inputs) -> Tensor:
        target, y, v = i.others
        with torch.no_grad():
            reference = log_probs(y, v, target) if referred else None
        return of(log_probs(i.input, i.weight, target), reference)

    return loss


def our_dpo() -> Loss:
    op = op_of("fused_linear_preference_loss")

    def loss(i: Inputs) -> Tensor:
        target, y, v = i.others
        found: Tensor = op(i.input, i.weight, target, None, y, v, beta=BETA).loss
        return found

    return loss


def liger_dpo() -> Loss:
    from liger_kernel.chunked_loss.functional import liger_fused_linear_dpo

    def loss(i: Inputs) -> Tensor:
        target, y, v = i.others
        found: Tensor = liger_fused_linear_dpo(i.input, i.weight, target, None, y, v, None, -100, BETA)[0]
        return found

    return loss


def our_orpo() -> Loss:
    op = op_of("fused_linear_preference_loss")
    options: dict[str, Any] = {"loss_type": "odds_ratio", "average_log_prob": True, "nll_weight": 1.0}

    def loss(i: Inputs) -> Tensor:
        found: Tensor = op(i.input, i.weight, i.others[0], beta=BETA, **options).loss
        return found

    return loss


def liger_orpo() -> Loss:
    from liger_kernel.chunked_loss.functional import liger_fused_linear_orpo

    def loss(i: Inputs) -> Tensor:
        found: Tensor = liger_fused_linear_orpo(i.input, i.weight, i.others[0], None, -100, BETA)[0]
        return found

    return loss


def our_kto() -> Loss:
    op = op_of("fused_linear_preference_loss")

    def loss(i: Inputs) -> Tensor:
        target, y, v = i.others
        options = {"preference_labels": desirable(target), "loss_type": "kto", "beta": BETA}
        found: Tensor = op(i.input, i.weight, target, None, y, v, **options).loss
        return found

    return loss


def liger_kto() -> Loss:
    from liger_kernel.chunked_loss.functional import liger_fused_linear_kto

    def loss(i: Inputs) -> Tensor:
        target, y, v = i.others
        given = (i.input, i.weight, target, desirable(target), None, y, v, None, None, -100, BETA)
        found: Tensor = liger_fused_linear_kto(*given)[0]
        return found

    return loss


def our_grpo() -> Loss:
    op = op_of("fused_linear_grpo_loss")

    def loss(i: Inputs) -> Tensor:
        target, y, v = i.others
        advantages = torch.linspace(-1, 1.5, len(target), device=target.device)
        found: Tensor = op(
            i.input, i.weight, target, advantages, ref_input=y, ref_weight=v, beta=BETA, loss_type="bnpo"
        ).loss
        return found

    return loss


def liger_grpo() -> Loss:
    from liger_kernel.chunked_loss.functional import liger_fused_linear_grpo

    def loss(i: Inputs) -> Tensor:
        target, y, v = i.others
        advantages = torch.linspace(-1, 1.5, len(target), device=target.device)
        mask = torch.ones(target.shape, device=target.device)
        given = (i.input, i.weight, target, mask, advantages, None, None, None, y, v, None, BETA)
        found: Tensor = liger_fused_linear_grpo(*given, 0.2, 0.2, "bnpo")[0]
        return found

    return loss


def exact_of(
    of: Callable[[Tensor, Any], Tensor], referred: bool = True
) -> Callable[[Inputs], dict[str, Tensor]]:
    """The loss, and the gradient of the first sequence's input, a sequence at a time."""

    def exact(inputs: Inputs) -> dict[str, Tensor]:
        target, y, v = inputs.others
        w, v = inputs.weight.detach().double(), v.double()
        x = inputs.input.detach()[:1].double().requires_grad_()
        logps, reference = [log_probs(x, w, target[:1])], []
        with torch.no_grad():
            for i in range(len(target)):
                if referred:
                    reference.append(log_probs(y[i : i + 1].double(), v, target[i : i + 1]))
                if i:
                    logps.append(log_probs(inputs.input[i : i + 1].double(), w, target[i : i + 1]))
        loss = of(torch.cat(logps), torch.cat(reference) if referred else None)
        (gradient,) = torch.autograd.grad(loss, x)
        return {"loss": loss.detach(), "input": gradient}

    return exact


DPO = LinearLoss(
    op="fused_linear_preference_loss",
    points=POINTS,
    providers={
        "liger_aot": our_dpo,
        "torch": lambda: in_torch(dpo_of),
        "torch_compile": lambda: compiled(in_torch(dpo_of)),
        "liger": liger_dpo,
    },
    drawn=drawn_sequences,
    products=four_products,
    exact=exact_of(dpo_of),
    largest_error=0.1,  # sums of many log-probabilities of rounded logits; what is wrong is off by far more
)
ORPO = LinearLoss(
    op="fused_linear_preference_loss",
    record="fused_linear_preference_loss_orpo",
    points=POINTS,
    providers={
        "liger_aot": our_orpo,
        "torch": lambda: in_torch(orpo_of, referred=False),
        "torch_compile": lambda: compiled(in_torch(orpo_of, referred=False)),
        "liger": liger_orpo,
    },
    drawn=drawn_sequences,
    products=three_products,
    exact=exact_of(orpo_of, referred=False),
    largest_error=0.1,
)
KTO = LinearLoss(
    op="fused_linear_preference_loss",
    record="fused_linear_preference_loss_kto",
    points=POINTS,
    providers={
        "liger_aot": our_kto,
        "torch": lambda: in_torch(kto_of),
        "torch_compile": lambda: compiled(in_torch(kto_of)),
        "liger": liger_kto,
    },
    drawn=drawn_sequences,
    products=four_products,
    exact=exact_of(kto_of),
    largest_error=0.1,
)
GRPO = LinearLoss(
    op="fused_linear_grpo_loss",
    points=POINTS,
    providers={
        "liger_aot": our_grpo,
        "torch": lambda: in_torch(grpo_of),
        "torch_compile": lambda: compiled(in_torch(grpo_of)),
        "liger": liger_grpo,
    },
    drawn=drawn_sequences,
    products=four_products,
    exact=exact_of(grpo_of),
    largest_error=0.1,
)


# ---- Distillation: half of the cross entropy, half of the Jensen-Shannon divergence ----


def drawn_students(shape: Shape, device: torch.device) -> Inputs:
    found = drawn_teacher(shape, device)
    g = torch.Generator(device).manual_seed(1)
    target = torch.randint(shape[2], (shape[0],), device=device, generator=g)
    return Inputs(found.input, found.weight, (*found.others, target))


def distilled(student: Tensor, teacher: Tensor, target: Tensor) -> Tensor:
    x, y = student.log_softmax(-1), teacher.log_softmax(-1)
    mixed = torch.logaddexp(x, y) - 0.6931471805599453
    halves = (F.kl_div(mixed, t, reduction="batchmean", log_target=True) for t in (x, y))
    return torch.stack((*halves, F.nll_loss(x, target) * 2)).sum() / 4


def distillation_in_torch(i: Inputs) -> Tensor:
    y, v, target = i.others
    return distilled(F.linear(i.input, i.weight).float(), F.linear(y, v).float(), target)


def our_distillation() -> Loss:
    op = op_of("fused_linear_distillation_loss")

    def loss(i: Inputs) -> Tensor:
        y, v, target = i.others
        found: Tensor = op(i.input, i.weight, y, v, target).loss
        return found

    return loss


def liger_distillation() -> Loss:
    from liger_kernel.chunked_loss.functional import liger_fused_linear_jsd

    def loss(i: Inputs) -> Tensor:
        y, v, target = i.others
        found: Tensor = liger_fused_linear_jsd(i.input, i.weight, y, v, target, None, None)
        return found

    return loss


def exact_distillation(inputs: Inputs) -> dict[str, Tensor]:
    y, teacher, target = inputs.others
    w, v = inputs.weight.detach().double(), teacher.double()
    rows, total, gradient = len(y), w.new_zeros(()), None
    for first in range(0, rows, CHECKED_OF_INPUT):
        these = slice(first, first + CHECKED_OF_INPUT)
        x = inputs.input[these].detach().double().requires_grad_(first == 0)
        loss = distilled(x @ w.t(), y[these].double() @ v.t(), target[these]) * (len(x) / rows)
        total += loss.detach()
        if first == 0:
            (gradient,) = torch.autograd.grad(loss, x)
    assert gradient is not None
    return {"loss": total, "input": gradient}


def products_beside_target(inputs: Inputs) -> Callable[[], None]:
    return products_of_student(Inputs(inputs.input, inputs.weight, inputs.others[:2]))


DISTILLATION = LinearLoss(
    op="fused_linear_distillation_loss",
    points=POINTS,
    providers={
        "liger_aot": our_distillation,
        "torch": lambda: distillation_in_torch,
        "torch_compile": lambda: compiled(distillation_in_torch),
        "liger": liger_distillation,
    },
    drawn=drawn_students,
    products=products_beside_target,
    exact=exact_distillation,
    largest_error=0.05,
)


# ---- KL divergence from given probabilities ----


def drawn_probabilities(shape: Shape, device: torch.device) -> Inputs:
    found = drawn_teacher(shape, device)
    y, v = found.others
    return Inputs(found.input, found.weight, (F.linear(y, v).softmax(-1),))


def kl_in_torch(i: Inputs) -> Tensor:
    logits = F.linear(i.input, i.weight).float()
    return F.kl_div(logits.log_softmax(-1), i.others[0].float(), reduction="batchmean")


def liger_kl() -> Loss:
    from liger_kernel.ops.fused_linear_kl_div import LigerFusedLinearKLDivFunction as Function

    return lambda i: Function.apply(i.input, i.weight, *i.others)


def our_kl() -> Loss:
    op = op_of("fused_linear_kl_div")
    loss: Loss = lambda i: op(i.input, i.weight, *i.others)  # noqa: E731
    return loss


def exact_kl(inputs: Inputs) -> dict[str, Tensor]:
    (q,) = inputs.others
    w, total, gradient = inputs.weight.detach().double(), q.new_zeros((), dtype=torch.float64), None
    for first in range(0, len(q), CHECKED_OF_INPUT):
        these = slice(first, first + CHECKED_OF_INPUT)
        x = inputs.input[these].detach().double().requires_grad_(first == 0)
        p = q[these].double()
        loss = F.kl_div((x @ w.t()).log_softmax(-1), p, reduction="sum") / len(q)
        total += loss.detach()
        if first == 0:
            (gradient,) = torch.autograd.grad(loss, x)
    assert gradient is not None
    return {"loss": total, "input": gradient}


KL_DIV = LinearLoss(
    op="fused_linear_kl_div",
    points=POINTS,
    providers={
        "liger_aot": our_kl,
        "torch": lambda: kl_in_torch,
        "torch_compile": lambda: compiled(kl_in_torch),
        "liger": liger_kl,
    },
    drawn=drawn_probabilities,
    products=three_products,
    exact=exact_kl,
    largest_error=0.05,
)
LOSSES = {"dpo": DPO, "orpo": ORPO, "kto": KTO, "grpo": GRPO, "distillation": DISTILLATION, "kl_div": KL_DIV}


if __name__ == "__main__":
    sys.exit(measured("benchmarks.post_training.linear", __doc__, LOSSES, sys.argv[1:]))
