"""Cases of the fused linear losses, the drivers that run them, their float64 references, and how far rounding may take
a result from those."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from liger_aot import load
from liger_aot.ops.op import Op
from tests.conftest import built_pack
from tests.harness import executed
from tests.harness.drivers import EmulatorDriver, InterpreterDriver, bound_op
from tests.harness.op_gpu_tests import PTX, lowered_from_ptx
from tests.harness.tolerances import UNIT_ROUNDOFF

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
IGNORED = -100
WAYS = [
    "reference",
    pytest.param("interpreter sm90", marks=pytest.mark.interpreter),
    pytest.param("emulator gfx90a", marks=pytest.mark.slow),
    "emulator gfx942",
    *(pytest.param(f"emulator {arch}", marks=pytest.mark.slow) for arch in executed.BY_FORM),
    pytest.param("gpu", marks=pytest.mark.gpu),
    PTX,
]


def made(op_class: type[Op], way: str) -> tuple[Any, str]:
    """The op as one of the drivers runs it, and the device of its tensors."""
    driver, _, arch = way.partition(" ")
    if driver in ("reference", "gpu"):
        return load(op_class.name), "cpu" if driver == "reference" else "cuda"
    if driver == "PTX":
        return lowered_from_ptx(op_class), "cuda"
    by = InterpreterDriver if driver == "interpreter" else EmulatorDriver
    return bound_op(op_class, built_pack(arch), by), "cpu"


@dataclass(frozen=True)
class LinearCase:
    """input (rows, k) @ weight (vocabulary, k)^T, ``chunks`` of its rows at a time, with keywords of the op."""

    rows: int
    k: int
    vocabulary: int
    dtype: torch.dtype = FP32
    bias: bool = False
    classes: bool = False  # class weights
    index: torch.dtype = torch.int64
    chunks: int = 1
    keywords: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        options = [f"{k}={v}" for k, v in self.keywords.items()] + [
            k for k in ("bias", "classes") if getattr(self, k)
        ]
        dtype = str(self.dtype).removeprefix("torch.")
        return "-".join([f"{self.rows}x{self.k}x{self.vocabulary}", dtype, f"{self.chunks}chunks", *options])

    def get(self, name: str, default: Any) -> Any:
        return self.keywords.get(name, default)


@dataclass(frozen=True)
class Drawn:
    """A case's tensors and all keywords."""

    input: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    keywords: dict[str, Any]

    def leaves(self) -> list[Tensor]:
        return [t.detach().requires_grad_() for t in (self.input, self.weight, self.bias) if t is not None]


def draw(case: LinearCase, seed: int = 0, device: str = "cpu") -> Drawn:
    """Logits of about standard normal size; one target in five is ignored."""
    g = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=g)

    x = normal(case.rows, case.k).to(case.dtype)
    w = (normal(case.vocabulary, case.k) * case.k**-0.5).to(case.dtype)
    b = normal(case.vocabulary).to(case.dtype) if case.bias else None
    t = torch.randint(case.vocabulary, (case.rows,), device=device, generator=g)
    t[torch.rand(case.rows, device=device, generator=g) < 0.2] = case.get("ignore_index", IGNORED)
    keywords = dict(case.keywords)
    if case.classes:
        keywords["class_weight"] = torch.rand(case.vocabulary, device=device, generator=g)
    return Drawn(x, w, t.to(case.index), b, keywords)


@dataclass(frozen=True)
class Formula:
    """In float64, by torch's own functions and autograd."""

    loss: Tensor
    z_loss: Tensor
    accuracy: Tensor
    predicted: Tensor
    rows: Tensor  # each row's loss
    gradients: dict[str, Tensor]
    logits: Tensor  # before the cap
    dlogits: Tensor
    mass: Tensor  # of each row: what dlogits has of its probabilities; below one of lse's square
    z_slope: Tensor  # of each row: how fast that follows lse


def capped(logits: Tensor, cap: float | None) -> Tensor:
    return cap * torch.tanh(logits / cap) if cap else logits


def formula(drawn: Drawn, grad: Tensor) -> Formula:
    """``grad`` is the loss's."""
    kw = drawn.keywords
    x, w = (t.detach().double().requires_grad_() for t in (drawn.input, drawn.weight))
    b = None if drawn.bias is None else drawn.bias.detach().double().requires_grad_()
    t, classes = drawn.target.long(), kw.get("class_weight")
    classes = None if classes is None else classes.double()
    ignore, reduction = kw.get("ignore_index", IGNORED), kw.get("reduction", "mean")
    logits = F.linear(x, w, b)
    logits.retain_grad()
    cap = kw.get("softcap")
    y = capped(logits, cap)
    smoothing = kw.get("label_smoothing", 0.0)
    main = F.cross_entropy(y, t, classes, ignore_index=ignore, label_smoothing=smoothing, reduction="none")
    counts = t != ignore
    lse = torch.logsumexp(y, -1)
    z = torch.where(counts, kw.get("lse_square_scale", 0.0) * lse**2, 0.0)
    at = torch.where(counts, t, 0)
    of_class = torch.ones_like(y[0]) if classes is None else classes
    mass = torch.where(counts, (1 - smoothing) * of_class[at] + smoothing * of_class.mean(), 0.0)
    z_slope = torch.where(counts, 2 * kw.get("lse_square_scale", 0.0), torch.zeros_like(lse))
    if kw.get("use_token_scaling"):
        p = torch.softmax(y, -1).gather(1, at[:, None])[:, 0].detach()
        main, z, mass, z_slope = main * p, z * p, mass * p, z_slope * p
    rows, count = main + z, counts.sum()
    divisor = count if classes is None else classes[t[counts]].sum()
    if reduction == "none":
        loss, z_loss = rows, z
    elif reduction == "sum":
        loss, z_loss = rows.sum(), z.sum()
    else:
        loss, z_loss = main.sum() / divisor + z.sum() / count, z.sum() / count
        mass, z_slope = mass / divisor, z_slope / count
    best = torch.where(counts, y.argmax(-1), -1)
    loss.backward(grad.double())
    gradients = {"input": x.grad, "weight": w.grad} | ({} if b is None else {"bias": b.grad})
    assert logits.grad is not None
    return Formula(
        loss.detach(), z_loss.detach(), ((best == t) & counts).sum() / count, best, rows.detach(), gradients,  # type: ignore[arg-type]
        logits.detach(), logits.grad, (mass + z_slope * lse.detach().abs()) * grad.double().abs(),
        z_slope * grad.double().abs(),
    )  # fmt: skip


def worst_linear(
    case: LinearCase,
    drawn: Drawn,
    exact: Formula,
    loss: Tensor,
    gradients: dict[str, Tensor],
    *,
    rounded_logits: bool = True,
    slack: float = 2.0,
) -> dict[str, float]:
    """Each result's greatest error as a fraction of what rounding can do.

    The logits are off by one rounding to the dtype (where a chunk's buffer holds them) and by the float32 sum's errors;
    twice the largest of a row is what its log-sum-exp and its probabilities' logarithms are off. A gradient of logits
    is rounded to the dtype; the products add its errors' absolute values, and round again, weight's once a chunk.

    Args:
        slack: for the exponential's and the logarithm's own errors, and what is of second order.
    """
    u, u32 = UNIT_ROUNDOFF[case.dtype], UNIT_ROUNDOFF[FP32]
    store = u if rounded_logits else 0.0
    x, w = drawn.input.double(), drawn.weight.double()
    size = x.abs() @ w.abs().t() + (0.0 if drawn.bias is None else drawn.bias.double().abs())
    off = (store * exact.logits.abs() + (case.k + 2) * u32 * size).amax(-1) * 2 + 8 * u32
    if cap := case.get("softcap", None):
        off = off * (1 + 2 / cap)
    z = case.get("lse_square_scale", 0.0)
    lse = torch.logsumexp(capped(exact.logits, cap), -1).abs()
    row = off * (1 + 2 * z * lse + exact.rows.abs()) + 32 * u32 * (exact.rows.abs() + lse)
    reduction = case.get("reduction", "mean")
    counts = drawn.target != case.get("ignore_index", IGNORED)
    row = torch.where(counts, row, 0.0)
    if reduction == "none":
        allowed = row
    else:
        allowed = row.sum() + 4 * u32 * exact.rows.abs().sum()
        if reduction == "mean":
            classes = drawn.keywords.get("class_weight")
            allowed = allowed / (
                counts.sum() if classes is None else classes.double()[drawn.target.long()[counts]].sum()
            )
    tiny = 2.0**-24 if case.dtype == FP16 else 2.0**-126
    worst = {"loss": _ratio(loss, exact.loss, slack * allowed + 2.0**-40)}

    g, p = exact.dlogits.abs(), torch.softmax(capped(exact.logits, cap), -1)
    mass, off = exact.mass[:, None], off[:, None]
    # a probability follows its logit by p (1 - p), lse by p; 32 roundoffs are its own
    dp = p * (off * (1 - p + off) + 32 * u32)
    dg = mass * dp + off * (g + exact.z_slope[:, None] * p) + u * g + tiny
    limits = {
        "input": dg @ w.abs() + (u + case.vocabulary * u32) * (g @ w.abs()) + tiny,
        "weight": dg.t() @ x.abs() + (case.chunks * u + case.rows * u32) * (g.t() @ x.abs()) + tiny,
        "bias": dg.sum(0) + (u + case.rows * u32) * g.sum(0) + tiny,
    }
    for name, gradient in gradients.items():
        worst[name] = _ratio(gradient, exact.gradients[name], slack * limits[name])
    return worst


def _ratio(got: Tensor, exact: Tensor, allowed: Tensor) -> float:
    ratio = (got.detach().double() - exact).abs() / allowed
    return float(torch.where(torch.isnan(ratio), torch.inf, ratio).max()) if ratio.numel() else 0.0


PLAIN = (
    LinearCase(9, 16, 48),
    LinearCase(9, 16, 37, BF16, chunks=3),
    LinearCase(1, 8, 1),
    LinearCase(5, 1, 40, FP16, index=torch.int32, chunks=2),
    LinearCase(7, 24, 130, BF16, bias=True, chunks=2),
)
OPTIONS = (
    LinearCase(9, 16, 37, chunks=3, keywords={"label_smoothing": 0.1}),
    LinearCase(9, 16, 37, classes=True, bias=True, chunks=2),
    LinearCase(9, 16, 37, classes=True, keywords={"label_smoothing": 0.2, "ignore_index": 5}),
    LinearCase(9, 16, 37, keywords={"softcap": 3.0, "lse_square_scale": 0.01, "ignore_index": 0}, chunks=2),
    LinearCase(9, 16, 37, BF16, classes=True, keywords={"lse_square_scale": 0.01}),
    LinearCase(9, 16, 37, keywords={"use_token_scaling": True}, chunks=2),
    LinearCase(9, 16, 37, classes=True, keywords={"use_token_scaling": True, "softcap": 3.0}),
    LinearCase(9, 16, 37, keywords={"reduction": "sum"}),
    LinearCase(9, 16, 37, BF16, bias=True, keywords={"reduction": "none"}, chunks=3),
    LinearCase(9, 16, 37, FP16, keywords={"reduction": "none", "lse_square_scale": 0.01}),
    LinearCase(9, 16, 37, FP16, bias=True, chunks=2),
    LinearCase(9, 16, 37, BF16, keywords={"weight_grad_dtype": FP32}, chunks=3),
)
