"""fused_linear_jsd: chunks, labels, every beta, what autograd gets and when, on every driver."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_aot
from benchmarks import workload
from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.losses._linear import padded
from liger_aot.ops.losses.fused_linear_jsd import FusedLinearJSD
from liger_aot.ops.torch_library import register
from tests.harness.tolerances import UNIT_ROUNDOFF
from tests.ops.losses.linear_loss_cases import BF16, FP16, FP32, WAYS, made

GRADED = ("student_input", "student_weight", "student_bias")


@dataclass(frozen=True)
class Case:
    """``chunks`` of the rows at a time. The teacher's layer is j wide, and of dtype ``teacher`` where that is given."""

    rows: int
    k: int
    j: int
    vocabulary: int
    dtype: torch.dtype = FP32
    labels: torch.dtype | None = None
    bias: bool = False
    chunks: int = 1
    all_ignored: bool = False
    teacher: torch.dtype | None = None
    keywords: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        shape = f"{self.rows}x{self.k}/{self.j}x{self.vocabulary}"
        parts = [shape, str(self.dtype).removeprefix("torch."), f"{self.chunks}chunks"]
        parts += [name for name in ("labels", "bias", "all_ignored", "teacher") if getattr(self, name)]
        return "-".join(parts + [f"{k}={v}" for k, v in self.keywords.items()])


CASES = (
    Case(9, 16, 24, 48),
    Case(9, 16, 24, 37, BF16, chunks=3),
    Case(1, 8, 8, 1),
    Case(5, 1, 3, 40, FP16, torch.int32, chunks=2),
    Case(7, 24, 16, 130, BF16, torch.int64, bias=True, chunks=2),
    Case(6, 16, 8, 2100, BF16),
    Case(6, 16, 8, 37, FP32, torch.int64, all_ignored=True),
    *(
        Case(9, 16, 24, 37, dtype, torch.int64, chunks=2, keywords={"jsd_beta": beta, "temperature": t})
        for beta, t in ((0.0, 1.0), (1.0, 2.0), (0.1, 0.7))
        for dtype in (FP32, BF16)
    ),
    Case(9, 16, 24, 37, FP32, torch.int64, keywords={"ignore_index": 3}),
    Case(9, 16, 24, 37, BF16, chunks=3, keywords={"weight_grad_dtype": FP32}),
    Case(9, 16, 24, 37, FP32, torch.int64, bias=True, chunks=2, teacher=BF16),
    Case(9, 16, 24, 37, BF16, chunks=2, teacher=FP32),
)


def draw(case: Case, seed: int, device: str) -> dict[str, Tensor | None]:
    g = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=g)

    x, y = normal(case.rows, case.k), normal(case.rows, case.j)
    w, v = normal(case.vocabulary, case.k) * case.k**-0.5, normal(case.vocabulary, case.j) * case.j**-0.5
    b, c = (normal(case.vocabulary) if case.bias else None for _ in range(2))
    labels, of_teacher = None, case.teacher or case.dtype
    if case.labels is not None:
        labels = torch.randint(100, (case.rows,), device=device, generator=g)
        ignored = case.keywords.get("ignore_index", -100)
        labels[torch.arange(case.rows, device=device) % 3 == 1] = ignored
        if case.all_ignored:
            labels[:] = ignored
        labels = labels.to(case.labels)
    return {
        "student_input": x.to(case.dtype),
        "student_weight": w.to(case.dtype),
        "teacher_input": y.to(of_teacher),
        "teacher_weight": v.to(of_teacher),
        "shift_labels": labels,
        "student_bias": None if b is None else b.to(case.dtype),
        "teacher_bias": None if c is None else c.to(of_teacher),
    }


def loss_of(case: Case, drawn: dict[str, Any], logits: tuple[Tensor, Tensor]) -> Tensor:
    """By torch's own functions."""
    beta, temperature = case.keywords.get("jsd_beta", 0.5), case.keywords.get("temperature", 1.0)
    log_q, log_p = ((x / temperature).log_softmax(-1) for x in logits)
    q, p = log_q.exp(), log_p.exp()
    if beta == 0:
        rows = (p * (log_p - log_q)).sum(-1)
    elif beta == 1:
        rows = (q * (log_q - log_p)).sum(-1)
    else:
        mixed = (beta * p + (1 - beta) * q).log()
        rows = (beta * p * (log_p - mixed) + (1 - beta) * q * (log_q - mixed)).sum(-1)
    counts = torch.ones_like(rows)
    if drawn["shift_labels"] is not None:
        counts = (drawn["shift_labels"] != case.keywords.get("ignore_index", -100)).to(rows.dtype)
    return (rows * counts).sum() / counts.sum().clamp(min=1)


def logits_of(drawn: dict[str, Any], whose: str) -> Tensor:
    x, w, b = (drawn[f"{whose}_{name}"] for name in ("input", "weight", "bias"))
    made: Tensor = torch.nn.functional.linear(x, w, b)
    return made


def run(op: Any, case: Case, drawn: dict[str, Any], grad: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    given = dict(drawn)
    for name in GRADED:
        if given[name] is not None:
            given[name] = given[name].detach().requires_grad_()
    a_row = 2 * case.dtype.itemsize + (case.teacher.itemsize if case.teacher is not None else 0)
    budget = -(-case.rows // case.chunks) * a_row * padded(case.vocabulary)
    loss = op(**given, chunk_bytes=budget, **case.keywords)
    loss.backward(grad)
    return loss.detach(), {name: given[name].grad for name in GRADED if given[name] is not None}


def check(op: Any, case: Case, device: str, seed: int, rounded_logits: bool) -> None:
    """Within what rounding can do.

    Where chunks hold the logits in the dtype, each is off by a roundoff of its size (and a teacher's of another dtype
    by one of that, before it is cast), which moves a log-probability by
    at most twice the largest of its row. A row's loss is a sum over probabilities of differences of log-probabilities:
    it moves by that times one more than the largest difference, and so does a gradient of logits, relative to the
    probabilities' own share. All bounds are of first order: a factor of 2 is for the rest.
    """
    drawn = draw(case, seed, device)
    before = {name: t.clone() for name, t in drawn.items() if t is not None}
    grad = torch.tensor(0.625, device=device)
    loss, gradients = run(op, case, drawn, grad)
    for name, t in before.items():
        assert torch.equal(drawn[name], t), f"{case}: {name} was overwritten"  # type: ignore[arg-type]
    wide = {k: t.double() if t is not None and t.is_floating_point() else t for k, t in drawn.items()}
    leaves = {name: wide[name].requires_grad_() for name in gradients}  # type: ignore[union-attr]
    student, teacher = logits_of(wide, "student"), logits_of(wide, "teacher")
    student.retain_grad()
    exact = loss_of(case, wide, (student, teacher))
    exact.backward(grad.double())
    u, u32 = UNIT_ROUNDOFF[case.dtype], UNIT_ROUNDOFF[FP32]
    temperature = case.keywords.get("temperature", 1.0)
    largest = torch.maximum(student.detach().abs().amax(-1), teacher.detach().abs().amax(-1)) / temperature
    stored = u + (UNIT_ROUNDOFF[case.teacher] if case.teacher is not None else 0.0)
    off = 2 * ((stored if rounded_logits else 0.0) + (max(case.k, case.j) + 34) * u32) * largest + 40 * u32
    log_q, log_p = ((x.detach() / temperature).log_softmax(-1) for x in (student, teacher))
    apart = (log_q - log_p).abs().amax(-1) + 1
    counts = torch.ones(case.rows, dtype=torch.bool, device=device)
    if drawn["shift_labels"] is not None:
        counts = drawn["shift_labels"] != case.keywords.get("ignore_index", -100)
    count = max(int(counts.sum()), 1)
    allowed = 2 * float((off * apart * counts).sum()) / count + 64 * u32 * float(exact.detach()) + 1e-12
    assert loss.dtype == FP32 and loss.shape == ()
    error = abs(float(loss) - float(exact.detach()))
    assert error <= allowed, f"{case}: the loss is off by {error}, {allowed} is allowed"
    shares = torch.maximum(log_q.exp(), log_p.exp())
    size = 0.625 / count / temperature
    dg = 2 * (off * apart * counts)[:, None] * shares * size * 2 + u * student.grad.abs()  # type: ignore[union-attr]
    tiny = 2.0**-24 if case.dtype == FP16 else 2.0**-126  # of what is rounded among subnormal numbers
    dg = dg + tiny
    x, w, g = wide["student_input"].abs(), wide["student_weight"].abs(), student.grad.abs()  # type: ignore[union-attr]
    limits = {
        "student_input": dg @ w + (u + case.vocabulary * u32) * (g @ w),
        "student_weight": dg.t() @ x + (case.chunks * u * 2 + case.rows * u32) * (g.t() @ x),
        "student_bias": dg.sum(0) + (u + case.rows * u32) * g.sum(0),
    }
    for name, gradient in gradients.items():
        assert gradient.dtype == case.dtype and gradient.isfinite().all()
        ratio = (gradient.double() - leaves[name].grad).abs() / (2 * limits[name].detach() + tiny)
        assert float(ratio.max()) <= 1, (
            f"{case}: {name}'s gradient is off by {float(ratio.max())} of what is allowed"
        )


@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures("poisoned")
def test_cases(way: str, case: Case) -> None:
    op, device = made(FusedLinearJSD, way)
    check(op, case, device, 0, rounded_logits=way != "reference")


@pytest.mark.parametrize("way", WAYS)
def test_frozen(way: str) -> None:
    """What is frozen gets nothing, the teacher's parameters neither; without gradients the loss is the same."""
    op, device = made(FusedLinearJSD, way)
    case = Case(9, 16, 24, 37, FP32, torch.int64, bias=True, chunks=2)
    drawn = draw(case, 0, device)
    loss, gradients = run(op, case, drawn, torch.ones((), device=device))
    for name in GRADED:
        given = {k: t if k != name else t.detach().requires_grad_() for k, t in drawn.items()}
        given["teacher_weight"] = given["teacher_weight"].detach().requires_grad_()
        found = op(**given)
        found.backward()
        torch.testing.assert_close(given[name].grad, gradients[name], rtol=1e-5, atol=1e-7)
        assert given["teacher_weight"].grad is None
        torch.testing.assert_close(found.detach(), loss, rtol=1e-6, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(op(**drawn), loss, rtol=1e-6, atol=0)


def test_more_dimensions() -> None:
    op, _ = made(FusedLinearJSD, "reference")
    drawn = draw(Case(12, 16, 24, 40, FP32, torch.int64), 0, "cpu")
    shaped = dict(drawn)
    for name in ("student_input", "teacher_input"):
        shaped[name] = drawn[name].view(3, 4, -1)  # type: ignore[union-attr]
    shaped["shift_labels"] = drawn["shift_labels"].view(3, 4)  # type: ignore[union-attr]
    torch.testing.assert_close(op(**shaped), op(**drawn))


def test_compile_is_one_graph() -> None:
    op, _ = made(FusedLinearJSD, "reference")
    case = Case(9, 16, 24, 37, FP32, torch.int64, bias=True)
    drawn = draw(case, 0, "cpu")
    loss, gradients = run(op, case, drawn, torch.tensor(0.5))
    torch.compiler.reset()
    compiled = torch.compile(lambda **t: op(**t), fullgraph=True, backend="aot_eager")
    again, found = run(compiled, case, drawn, torch.tensor(0.5))
    torch.testing.assert_close(again, loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient)


def test_registration() -> None:
    register("fused_linear_jsd")
    drawn = draw(Case(5, 8, 8, 16, FP32, torch.int64, bias=True), 0, "cpu")
    settings = (0.5, -100, 1.0, 1 << 20, None, [True, True, True], True)
    torch.library.opcheck(torch.ops.liger_aot.fused_linear_jsd_forward.default, (*drawn.values(), *settings))


def test_as_liger_and_jsd() -> None:
    """The composition of its parts: jsd of log-softmaxes."""
    case = Case(9, 16, 24, 37, FP32, torch.int64)
    drawn = draw(case, 0, "cpu")
    log_q, log_p = (logits_of(drawn, whose).log_softmax(-1) for whose in ("student", "teacher"))
    wanted = liger_aot.load("jsd")(log_q, log_p, drawn["shift_labels"], beta=0.3)
    got = liger_aot.load("fused_linear_jsd")(**drawn, jsd_beta=0.3)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-7)


X, W, L = torch.ones(4, 8), torch.ones(6, 8), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "pattern"),
    [
        ((X, W, X[:3], W), {}, ArgumentError, r"teacher_input must be of student_input's.*got.*\(3, 8\)"),
        ((X, W[:, :4], X, W), {}, ArgumentError, r"student_weight must be of shape \(vocabulary, 8\)"),
        (
            (X, W, X, W[:5]),
            {},
            ArgumentError,
            r"teacher_weight must have student_weight's 6 rows; got \(5, 8\)",
        ),
        ((X, W, X, [1]), {}, ArgumentTypeError, "teacher_weight must be a torch.Tensor, got list"),
        (
            (X, W.half(), X, W),
            {},
            ArgumentTypeError,
            "student_weight must be of student_input's dtype.*float16",
        ),
        ((X, W, X, W, L, W[0]), {}, ArgumentError, r"student_bias must be of shape \(6,\)"),
        ((X, W, X, W, L[:3]), {}, ArgumentError, r"shift_labels must be of shape \(4,\)"),
        ((X, W, X, W, X[:, 0]), {}, ArgumentTypeError, "shift_labels must be int64 or int32"),
        ((X, W, X, W), {"jsd_beta": 2.0}, ArgumentError, "jsd_beta must be from 0 to 1, got 2.0"),
        ((X, W, X, W), {"temperature": 0.0}, ArgumentError, "temperature must be above 0"),
        (
            (X, W, X, W),
            {"chunk_bytes": 100},
            ArgumentError,
            "chunk_bytes must hold one row of the logits, 512",
        ),
        (
            (X, W, X, W),
            {"weight_grad_dtype": torch.bfloat16},
            ArgumentTypeError,
            "weight_grad_dtype must be None",
        ),
        ((X.int(), W, X, W), {}, ArgumentTypeError, "student_input must be bfloat16"),
    ],
)
def test_bad_input(arguments: Any, keywords: Any, error: type[Exception], pattern: str) -> None:
    with pytest.raises(error, match=f"fused_linear_jsd: .*{pattern}"):
        liger_aot.load("fused_linear_jsd")(*arguments, **keywords)


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [50257, 128256, 262144])
def test_large(vocabulary: int) -> None:
    """Against the parts in float32 on the GPU."""
    g = torch.Generator("cuda").manual_seed(0)
    x, y = (torch.randn(300, 256, device="cuda", generator=g).to(BF16) for _ in range(2))
    w, v = (torch.randn(vocabulary, 256, device="cuda", generator=g).div_(16).to(BF16) for _ in range(2))
    leaves = x.requires_grad_(), w.requires_grad_()
    loss = liger_aot.load("fused_linear_jsd")(x, w, y, v, chunk_bytes=128 * 4 * padded(vocabulary))
    got = torch.autograd.grad(loss, leaves)
    wide = [t.detach().float().requires_grad_() for t in leaves]
    log_q, log_p = ((a @ b.t()).log_softmax(-1) for a, b in (wide, (y.float(), v.float())))
    mixed = torch.logaddexp(log_q, log_p) - 0.6931471805599453
    kl = torch.nn.functional.kl_div
    wanted = sum(kl(mixed, t, reduction="batchmean", log_target=True) for t in (log_q, log_p)) / 2
    exact = torch.autograd.grad(wanted, wide)
    torch.testing.assert_close(loss, wanted.detach(), rtol=2e-3, atol=0)
    for a, b in zip(got, exact, strict=True):
        assert workload.relative_error(a, b.double()) < workload.TOLERANCE[BF16]


@pytest.mark.gpu
def test_cuda_graph() -> None:
    op = liger_aot.load("fused_linear_jsd")
    op.preload()
    case = Case(64, 32, 48, 1000, BF16, torch.int64, chunks=2)
    one = torch.ones((), device="cuda")
    drawn = draw(case, 0, "cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(op, case, drawn, one)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, gradients = run(op, case, drawn, one)
    other = draw(case, 1, "cuda")
    for name, t in drawn.items():
        if t is not None:
            t.copy_(other[name])
    graph.replay()
    wanted, expected = run(op, case, other, one)
    assert torch.equal(loss, wanted) and all(torch.equal(gradients[n], expected[n]) for n in expected)
