"""Fused linear Jensen-Shannon divergence, forward and backward together: `python -m benchmarks.losses.linear_jsd`.

What bounds it are four matrix products (the student's and the teacher's logits, the student's input's and weight's
gradients): see `benchmarks.losses.linear_steps`. The teacher's layer is as wide as the student's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.losses.linear_steps import Inputs, LinearLoss, Loss, Shape, main

POINTS = ((4096, 4096, 128256), (8192, 2048, 32000))
CHECKED = 128  # rows of the input's gradient


def drawn(shape: Shape, device: torch.device) -> Inputs:
    """A student and a teacher who agree in part; the teacher's input and weight are the others."""
    rows, k, vocabulary = shape
    g = torch.Generator(device).manual_seed(rows)
    x, other = (torch.randn(rows, k, device=device, generator=g) for _ in range(2))
    w = torch.randn(vocabulary, k, device=device, generator=g).mul_(2 * k**-0.5)
    leaves = x.bfloat16().requires_grad_(), w.bfloat16().requires_grad_()
    return Inputs(*leaves, ((x + other / 2).bfloat16(), w.bfloat16()))


def jsd(student: Tensor, teacher: Tensor) -> Tensor:
    x, y = student.log_softmax(-1), teacher.log_softmax(-1)
    mixed = torch.logaddexp(x, y) - 0.6931471805599453
    kl = F.kl_div
    halves = (kl(mixed, t, reduction="batchmean", log_target=True) for t in (x, y))
    return torch.stack(tuple(halves)).mean()


def eager(i: Inputs) -> Tensor:
    y, teacher = i.others
    return jsd(F.linear(i.input, i.weight).float(), F.linear(y, teacher).float())


def compiled() -> Loss:
    torch._dynamo.reset()
    made: Loss = torch.compile(eager, dynamic=False)
    return made


def ours() -> Loss:
    import liger_aot

    op = liger_aot.load("fused_linear_jsd")
    return lambda i: op(i.input, i.weight, *i.others)


def liger() -> Loss:
    from liger_kernel.ops.fused_linear_jsd import LigerFusedLinearJSDFunction as Function

    def loss(i: Inputs) -> Tensor:
        settings = (None, 0.5, -100, 1.0, None, None, None)
        found: Tensor = Function.apply(i.input, i.weight, *i.others, *settings)
        return found

    return loss


def products(inputs: Inputs) -> Callable[[], None]:
    x, w, (y, teacher) = inputs.input.detach(), inputs.weight.detach(), inputs.others
    student, of_teacher = torch.mm(x, w.t()), torch.mm(y, teacher.t())
    g, dx, dw = torch.softmax(student, -1), torch.empty_like(x), torch.empty_like(w)

    def run() -> None:
        torch.mm(x, w.t(), out=student)
        torch.mm(y, teacher.t(), out=of_teacher)
        torch.mm(g, w, out=dx)
        torch.mm(g.t(), x, out=dw)

    return run


def exact(inputs: Inputs) -> dict[str, Tensor]:
    y, teacher = inputs.others
    w, v = inputs.weight.detach().double(), teacher.double()
    rows, total, gradient = len(y), w.new_zeros(()), None
    for first in range(0, rows, CHECKED):
        x = inputs.input[first : first + CHECKED].detach().double().requires_grad_(first == 0)
        loss = jsd(x @ w.t(), y[first : first + CHECKED].double() @ v.t()) * (len(x) / rows)
        total += loss.detach()
        if first == 0:
            (gradient,) = torch.autograd.grad(loss, x)
    assert gradient is not None
    return {"loss": total, "input": gradient}


JSD = LinearLoss(
    op="fused_linear_jsd",
    module="linear_jsd",
    points=POINTS,
    providers={"liger_aot": ours, "torch": lambda: eager, "torch_compile": compiled, "liger": liger},
    drawn=drawn,
    products=products,
    exact=exact,
    largest_error=0.05,  # logits rounded to bf16 move it by half of that; what is wrong is off by far more
)

if __name__ == "__main__":
    sys.exit(main(JSD, __doc__, sys.argv[1:]))
