"""Fused linear cross entropy: chunks, options, what autograd gets and when, on every driver; torch.compile, autocast,
modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import liger_aot
from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.nn import FusedLinearCrossEntropyLoss
from liger_aot.ops.losses._linear import accumulate, chunk_buffer, chunk_rows, padded
from liger_aot.ops.losses.fused_linear_cross_entropy import FusedLinearCrossEntropy
from liger_aot.ops.torch_library import register
from tests.harness.drivers import past_modes
from tests.ops.losses.linear_loss_cases import (
    BF16,
    FP16,
    FP32,
    OPTIONS,
    PLAIN,
    WAYS,
    LinearCase,
    draw,
    formula,
    made,
    worst_linear,
)

X, W, T = torch.ones(4, 8), torch.ones(6, 8), torch.tensor([0, 5, 2, -100])


def run(op: Any, case: LinearCase, drawn: Any, *, seed: int = 1) -> tuple[Any, dict[str, Tensor], Tensor]:
    """(outputs, gradients by name, the loss's gradient); the arguments stay as they are."""
    budget = -(-case.rows // case.chunks) * padded(case.vocabulary) * case.dtype.itemsize
    leaves = drawn.leaves()
    before = [t.detach().clone() for t in leaves]
    outputs = op(
        leaves[0], leaves[1], drawn.target, *leaves[2:], chunk_bytes=budget,
        return_z_loss=True, return_token_accuracy=True, return_predicted_tokens=True, **drawn.keywords,
    )  # fmt: skip
    generator = torch.Generator(outputs[0].device).manual_seed(seed)
    grad = torch.rand(outputs[0].shape, device=outputs[0].device, generator=generator) + 0.5
    outputs[0].backward(grad)
    for t, was in zip(leaves, before, strict=True):
        assert torch.equal(t.detach(), was)
    names = ("input", "weight", "bias")
    gradients = {name: t.grad for name, t in zip(names, leaves, strict=False) if t.grad is not None}
    assert len(gradients) == len(leaves)
    return outputs, gradients, grad


def check(op: Any, case: LinearCase, device: str, seed: int = 0, rounded_logits: bool = True) -> None:
    drawn = draw(case, seed, device)
    (loss, z_loss, accuracy, predicted), gradients, grad = run(op, case, drawn)
    exact = formula(drawn, grad)
    assert loss.dtype == torch.float32 and loss.shape == exact.loss.shape
    assert all(g.dtype == case.dtype for g in gradients.values())
    worst = worst_linear(case, drawn, exact, loss, gradients, rounded_logits=rounded_logits)
    assert max(worst.values()) <= 1, f"{case}: errors as fractions of what is allowed {worst}"
    allowed = 4 * (2.0**-7 if rounded_logits and case.dtype != FP32 else 2.0**-18)
    torch.testing.assert_close(z_loss.double(), exact.z_loss, rtol=allowed, atol=1e-7)
    # Where two logits are nearly the same, either may be the greatest.
    top = exact.logits.topk(min(2, case.vocabulary), -1).values
    counts = drawn.target != case.get("ignore_index", -100)
    clear = ~counts | (top[:, 0] - top[:, -1] > allowed * 4) | (case.vocabulary == 1)
    assert predicted.dtype == torch.int64 and torch.equal(predicted[clear], exact.predicted[clear])
    hits = (predicted == drawn.target) & counts
    torch.testing.assert_close(accuracy.cpu(), (hits.sum() / counts.sum()).float().cpu())


@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", [*PLAIN, *OPTIONS], ids=str)
@pytest.mark.usefixtures("poisoned")
def test_cases(way: str, case: LinearCase) -> None:
    op, device = made(FusedLinearCrossEntropy, way)
    check(op, case, device, rounded_logits=way != "reference")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [FP32, FP16])
def test_backwards_one_after_the_other(way: str, dtype: torch.dtype) -> None:
    """The second, which has to compute all again, is as good as the first; each gradient alone gives its bits."""
    op, device = made(FusedLinearCrossEntropy, way)
    case = LinearCase(9, 16, 37, dtype, bias=True)
    drawn = draw(case, 0, device)
    leaves = drawn.leaves()
    loss = op(leaves[0], leaves[1], drawn.target, leaves[2])
    grad = torch.tensor(0.375, device=device)
    first = torch.autograd.grad(loss, leaves, grad, retain_graph=True)
    second = torch.autograd.grad(loss, leaves, grad, retain_graph=True)
    third = [torch.autograd.grad(loss, leaf, grad, retain_graph=True)[0] for leaf in leaves]
    ones = torch.autograd.grad(loss, leaves)
    for a, b, c, one in zip(first, second, third, ones, strict=True):
        # The gradient of the logits is rounded before it is multiplied by the loss's, or after.
        allowed = 16 * torch.finfo(dtype).eps * float(a.abs().max())
        torch.testing.assert_close(b, a, rtol=0, atol=allowed)
        torch.testing.assert_close(one * 0.375, a, rtol=0, atol=allowed)
        assert torch.equal(b, c)


@pytest.mark.parametrize("way", WAYS)
def test_layouts(way: str) -> None:
    """Transposed, sliced and expanded arguments, and more dimensions than two."""
    op, device = made(FusedLinearCrossEntropy, way)
    case = LinearCase(12, 16, 40, FP32)
    drawn = draw(case, 0, device)
    plain = op(drawn.input, drawn.weight, drawn.target, reduction="none")
    wide = torch.stack((drawn.input, drawn.input), -1)[..., 0]
    beside = torch.cat((drawn.weight, drawn.weight), 1)[:, :16]
    shaped = drawn.input.view(3, 4, 16), drawn.weight, drawn.target.view(3, 4)
    turned = drawn.input.view(3, 4, 16).transpose(0, 1), drawn.weight, drawn.target.view(3, 4).t()
    for x, w, t in (
        (wide, drawn.weight, drawn.target),
        (drawn.input, beside, drawn.target),
        (drawn.input, drawn.weight.t().contiguous().t(), drawn.target),
        (drawn.input, drawn.weight, torch.stack((drawn.target, drawn.target), 1)[:, 0]),
    ):
        leaves = x.detach().requires_grad_(), w.detach().requires_grad_()
        loss = op(*leaves, t, reduction="none")
        torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-5)
        grads = torch.autograd.grad(loss.sum(), leaves)
        assert [g.shape for g in grads] == [x.shape, w.shape]
    assert op(*shaped, reduction="none").shape == (3, 4)
    torch.testing.assert_close(op(*shaped, reduction="none").view(-1), plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(op(*turned, reduction="none").t().reshape(-1), plain, rtol=1e-5, atol=1e-5)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(func).split(".")[1] in ("mm", "addmm")
        return func(*args, **(kwargs or {}))


def test_what_is_frozen_costs_nothing() -> None:
    """One product a chunk for the loss, one for each gradient that is wanted; none in the first backward."""
    op, _ = made(FusedLinearCrossEntropy, "emulator gfx942")
    case = LinearCase(9, 16, 37, BF16)
    drawn = draw(case)
    budget = 3 * padded(37) * 2
    for need_input in (False, True):
        for need_weight in (False, True):
            x = drawn.input.detach().requires_grad_(need_input)
            w = drawn.weight.detach().requires_grad_(need_weight)
            with past_modes(), Products() as forward:
                loss = op(x, w, drawn.target, chunk_bytes=budget)
            assert forward.count == 3 * (1 + need_input + need_weight)
            assert loss.requires_grad == (need_input or need_weight)
            if loss.requires_grad:
                with past_modes(), Products() as backward:
                    loss.backward()
                assert not backward.count
            assert (x.grad is not None, w.grad is not None) == (need_input, need_weight)
    with torch.no_grad(), past_modes(), Products() as forward:
        op(drawn.input.requires_grad_(), drawn.weight.requires_grad_(), drawn.target, chunk_bytes=budget)
    assert forward.count == 3


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_scale(way: str, dtype: torch.dtype) -> None:
    """In place, rounded once, nothing beside it; aligned and not."""
    op, device = made(FusedLinearCrossEntropy, way)
    for n, shift in ((4112, 0), (5000, 8), (37, 1)):
        memory = torch.randn(shift + n + 5, device=device).to(dtype)
        before = memory.clone()
        op.scale(memory[shift : shift + n], torch.tensor(0.3, device=device))
        before[shift : shift + n] = (before[shift : shift + n].float() * torch.tensor(0.3)).to(dtype)
        assert torch.equal(memory, before)
        assert torch.equal(memory[:shift], before[:shift]) and torch.equal(
            memory[shift + n :], before[shift + n :]
        )


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_handed_over(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """.grad is the very memory that the forward wrote: AccumulateGrad copies nothing."""
    op, device = made(FusedLinearCrossEntropy, way)
    drawn = draw(LinearCase(9, 16, 37), 0, device)
    leaves = drawn.leaves()
    loss = op(leaves[0], leaves[1], drawn.target)
    places = []
    scale = op.scale
    monkeypatch.setattr(op, "scale", lambda g, by: (places.append(g.data_ptr()), scale(g, by)))
    loss.backward()
    assert places == [leaf.grad.data_ptr() for leaf in leaves]  # type: ignore[union-attr]


@pytest.mark.parametrize("way", WAYS)
def test_float32_gradient_of_a_16_bit_weight(way: str) -> None:
    """weight.grad_dtype lets autograd keep it as it was added."""
    op, device = made(FusedLinearCrossEntropy, way)
    case = LinearCase(9, 16, 37, BF16, chunks=3)
    drawn = draw(case, 0, device)
    w = torch.nn.Parameter(drawn.weight.clone())
    if not hasattr(w, "grad_dtype"):
        pytest.skip("this torch has no Tensor.grad_dtype")
    w.grad_dtype = torch.float32
    budget = 3 * padded(37) * 2
    op(drawn.input, w, drawn.target, weight_grad_dtype=torch.float32, chunk_bytes=budget).backward()
    assert w.grad is not None and w.grad.dtype == torch.float32
    exact = formula(drawn, torch.ones((), device=device))
    worst = worst_linear(case, drawn, exact, exact.loss, {"weight": w.grad})
    assert max(worst.values()) <= 1
    assert not torch.equal(w.grad, w.grad.bfloat16().float())


@pytest.mark.parametrize("way", WAYS)
def test_all_ignored(way: str) -> None:
    """As torch: a mean of nothing is NaN, a sum 0, and there is no gradient."""
    op, device = made(FusedLinearCrossEntropy, way)
    x, w, t = (
        X.to(device).requires_grad_(),
        W.to(device).requires_grad_(),
        torch.full((4,), -100, device=device),
    )
    for reduction in ("mean", "sum"):
        x.grad = w.grad = None
        loss = op(x, w, t, reduction=reduction)
        wanted = F.cross_entropy(x @ w.t(), t, reduction=reduction)
        torch.testing.assert_close(loss, wanted, equal_nan=True)
        loss.backward()
        assert not x.grad.any() and not w.grad.any()  # type: ignore[union-attr]
    x.requires_grad_(False), w.requires_grad_(False)


def test_no_rows() -> None:
    op = liger_aot.load("fused_linear_cross_entropy")
    w = W.clone().requires_grad_()
    loss = op(X[:0], w, T[:0], reduction="sum")
    loss.backward()
    assert loss == 0 and w.grad is not None and not w.grad.any()


# ---- chunks ---------------------------------------------------------------------------------------------------


def test_chunks_are_few_and_of_one_size() -> None:
    assert chunk_rows("op", 8192, 128256 * 2, 1 << 29) == 2048
    assert chunk_rows("op", 1024, 128256 * 2, 1 << 29) == 1024
    assert (
        chunk_rows("op", 3000, 1000, 1000 * 1000) == 1000 or chunk_rows("op", 3000, 1000, 1000 * 1000) == 768
    )
    assert chunk_rows("op", 5, 100, 200) == 2
    for rows in (1, 127, 128, 129, 1000, 8191):
        for most in (1, 3, 128, 200, 1000, 10_000):
            each = chunk_rows("op", rows, 10, 10 * most)
            assert 1 <= each <= min(rows, most)
            assert -(-rows // each) == -(-rows // most)


def test_rows_of_the_buffer_are_aligned() -> None:
    buffer = chunk_buffer(torch.empty(0, dtype=BF16), 3, 50257)
    assert buffer.shape == (3, 50257) and buffer.stride(0) * 2 % 128 == 0


def test_sums_in_float32() -> None:
    """A sum of many parts is not rounded to 16 bits on the way."""
    a, b = torch.randn(5, 7).to(BF16), torch.randn(7, 3).to(BF16)
    total = torch.empty(5, 3)
    for i in range(100):
        accumulate(total, a, b, i == 0)
    torch.testing.assert_close(total.double(), 100 * (a.double() @ b.double()), rtol=1e-5, atol=1e-4)


# ---- in torch's machinery -------------------------------------------------------------------------------------


def check_compiled(device: str, **options: Any) -> None:
    op = liger_aot.load("fused_linear_cross_entropy")
    for keywords in ({}, {"reduction": "none", "return_z_loss": True, "lse_square_scale": 0.01}):
        torch.compiler.reset()

        def doubled(x: Tensor, w: Tensor, b: Tensor, t: Tensor, keywords: Any = keywords) -> Any:
            found = op(x * 2, w * 2, t, b * 2, **keywords)
            return found[0] if keywords else found

        compiled = torch.compile(doubled, fullgraph=True, **options)
        for rows in (9, 11, 12):
            drawn = draw(LinearCase(rows, 16, 37, bias=True), rows, device)
            leaves = drawn.leaves()
            plain, got = doubled(*leaves, drawn.target), compiled(*leaves, drawn.target)
            torch.testing.assert_close(got, plain)
            grad = torch.rand_like(plain)
            for a, b in zip(
                torch.autograd.grad(got, leaves, grad), torch.autograd.grad(plain, leaves, grad), strict=True
            ):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
            with torch.no_grad():
                torch.testing.assert_close(compiled(*leaves, drawn.target), plain)


def test_compile_is_one_graph() -> None:
    check_compiled("cpu", backend="aot_eager")


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_registration(reduction: str) -> None:
    register("fused_linear_cross_entropy")
    drawn = draw(LinearCase(9, 16, 37, bias=True))
    settings = (-100, 0.1, 0.0, 0.0, False, reduction, 1 << 20, None, [True] * 3, [True] * 3)
    forward = torch.ops.liger_aot.fused_linear_cross_entropy_forward
    x, w, b = drawn.leaves()
    torch.library.opcheck(forward.default, (x, w, drawn.target, b, None, *settings, True))
    tensors = (x.detach(), w.detach(), drawn.target, b.detach(), None)
    results = forward(*tensors, *settings, True)
    saved = list(FusedLinearCrossEntropy().saved(tensors, results))
    backward = torch.ops.liger_aot.fused_linear_cross_entropy_backward
    grads = [torch.ones_like(results[0]), None, None, None]
    needed = [True, True, False, True, False]
    torch.library.opcheck(backward.default, (grads, saved, *settings, needed))


def test_autocast() -> None:
    """float32 weights under autocast: products in bfloat16, gradients in float32."""
    op = liger_aot.load("fused_linear_cross_entropy")
    case = LinearCase(9, 16, 37, bias=True)
    drawn = draw(case)
    leaves = drawn.leaves()
    with torch.autocast("cpu", dtype=BF16):
        loss = op(leaves[0], leaves[1], drawn.target, leaves[2])
    loss.backward()
    rounded = draw(case)
    exact = formula(rounded, torch.ones(()))
    assert all(leaf.grad is not None and leaf.grad.dtype == torch.float32 for leaf in leaves)
    narrow = LinearCase(9, 16, 37, BF16, bias=True)
    grads = {
        n: t.grad for n, t in zip(("input", "weight", "bias"), leaves, strict=True) if t.grad is not None
    }
    # Input and weight are rounded too: a logit's error is that of three roundings.
    worst = worst_linear(narrow, rounded, exact, loss, grads, slack=6.0)
    assert max(worst.values()) <= 1, worst


def test_module() -> None:
    drawn = draw(LinearCase(9, 16, 37, bias=True, classes=True))
    classes = drawn.keywords["class_weight"]
    module = FusedLinearCrossEntropyLoss(
        classes, label_smoothing=0.1, return_z_loss=True, lse_square_scale=0.1
    )
    op = liger_aot.load("fused_linear_cross_entropy")
    wanted = op(
        drawn.input, drawn.weight, drawn.target, drawn.bias, class_weight=classes, label_smoothing=0.1,
        return_z_loss=True, lse_square_scale=0.1,
    )  # fmt: skip
    for a, b in zip(module(drawn.weight, drawn.input, drawn.target, drawn.bias), wanted, strict=True):
        assert torch.equal(a, b)
    assert not module.state_dict() and "label_smoothing=0.1" in repr(module)


# ---- arguments ------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "no tensor": (([1.0], W, T), {}, ArgumentTypeError, "input must be a torch.Tensor, got list"),
    "double": ((X.double(), W, T), {}, ArgumentTypeError, "input must be bfloat16.*got float64"),
    "scalar": ((X[0, 0], W, T), {}, ArgumentError, "input must have at least one dimension"),
    "weight's dtype": ((X, W.bfloat16(), T), {}, ArgumentTypeError, "weight must be of input's dtype"),
    "weight's width": (
        (X, W[:, :7], T),
        {},
        ArgumentError,
        r"weight must be of shape \(vocabulary, 8\).*got \(6, 7\)",
    ),
    "weight is a vector": ((X, W[0], T), {}, ArgumentError, r"weight must be of shape.*got \(8,\)"),
    "weight elsewhere": ((X, W.to("meta"), T), {}, ArgumentError, "weight is on meta, input on cpu"),
    "bias": ((X, W, T, torch.ones(5)), {}, ArgumentError, r"bias must be of shape \(6,\).*got \(5,\)"),
    "target's dtype": ((X, W, T.float()), {}, ArgumentTypeError, "target must be int64 or int32"),
    "target's shape": ((X, W, T[:3]), {}, ArgumentError, r"target must be of shape \(4,\).*got \(3,\)"),
    "target too large": ((X, W, T + 1), {}, ArgumentError, r"target must be in \[0, 6\)"),
    "target too small": ((X, W, T - 1), {}, ArgumentError, r"target must be in \[0, 6\)"),
    "classes": (
        (X, W, T),
        {"class_weight": torch.ones(5)},
        ArgumentError,
        r"class_weight.*\(6,\).*got \(5,\)",
    ),
    "reduction": (
        (X, W, T),
        {"reduction": "batchmean"},
        ArgumentError,
        "reduction must be one of mean, sum, none",
    ),
    "smoothing": ((X, W, T), {"label_smoothing": 1.5}, ArgumentError, "label_smoothing"),
    "softcap": ((X, W, T), {"softcap": 0.0}, ArgumentError, "softcap must be above 0"),
    "budget": (
        (X, W, T),
        {"chunk_bytes": 255},
        ArgumentError,
        "chunk_bytes must hold one row.*256 bytes; got 255",
    ),
    "grad dtype": (
        (X, W, T),
        {"weight_grad_dtype": BF16},
        ArgumentTypeError,
        "weight_grad_dtype must be None",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input(bad: str) -> None:
    arguments, keywords, error, text = BAD[bad]
    with pytest.raises(error, match=f"fused_linear_cross_entropy: .*{text}"):
        liger_aot.load("fused_linear_cross_entropy")(*arguments, **keywords)
