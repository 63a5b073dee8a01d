"""fused_linear_log_probs: chunks, temperatures, every output's gradient, parts of a vocabulary, on every driver."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import liger_aot
from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.losses._linear import BUDGET, padded
from liger_aot.ops.post_training.fused_linear_log_probs import (
    FusedLinearLogProbs,
    Settings,
    combined,
    gradients_of,
    layer_of,
    results_of,
    statistics_of,
)
from liger_aot.ops.torch_library import register
from liger_aot.runtime import device_errors
from tests.harness.process_groups import in_group
from tests.harness.tolerances import UNIT_ROUNDOFF
from tests.ops.losses.linear_loss_cases import BF16, FP16, FP32, WAYS, made

OUTPUTS = ("log_probs", "entropy", "lse")
GRADED = ("input", "weight", "bias")


@dataclass(frozen=True)
class Case:
    """``chunks`` of the rows at a time; ``used``: the outputs that something is computed from."""

    rows: int
    k: int
    vocabulary: int
    dtype: torch.dtype = FP32
    index: torch.dtype = torch.int64
    bias: bool = False
    chunks: int = 1
    size: float = 1.0  # of the logits
    used: tuple[str, ...] = OUTPUTS
    keywords: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        parts = [f"{self.rows}x{self.k}x{self.vocabulary}", dtype, f"{self.chunks}chunks", *self.used]
        parts += ["bias"] if self.bias else []
        return "-".join(parts + [f"{k}={v}" for k, v in self.keywords.items()])

    def get(self, name: str, default: Any) -> Any:
        return self.keywords.get(name, default)


CASES = (
    Case(9, 16, 48),
    Case(9, 16, 37, BF16, chunks=3, keywords={"temperature": 0.7}),
    Case(1, 8, 1),
    Case(5, 1, 40, FP16, torch.int32, chunks=2, keywords={"temperature": 3.0}),
    Case(7, 24, 130, BF16, torch.int32, bias=True, chunks=2),
    Case(3, 16, 5000, BF16, size=4.0),
    Case(3, 16, 4097, FP32, size=20.0, keywords={"temperature": 0.5}),
    *(Case(9, 16, 37, FP32, used=(name,), keywords={"temperature": 1.5}) for name in OUTPUTS),
    Case(9, 16, 37, FP32, bias=True, keywords={"ignore_index": 3}),
    Case(9, 16, 37, BF16, chunks=3, keywords={"weight_grad_dtype": FP32}),
)


def draw(case: Case, seed: int, device: str) -> dict[str, Tensor | None]:
    g = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=g)

    x, w = normal(case.rows, case.k), normal(case.vocabulary, case.k) * case.k**-0.5 * case.size
    target = torch.randint(case.vocabulary, (case.rows,), device=device, generator=g)
    target[1::4] = case.get("ignore_index", -100)
    return {
        "input": x.to(case.dtype),
        "weight": w.to(case.dtype),
        "target": target.to(case.index),
        "bias": normal(case.vocabulary).to(case.dtype) if case.bias else None,
    }


def formula(case: Case, drawn: dict[str, Any]) -> tuple[tuple[Tensor, ...], Tensor]:
    """(outputs, logits) by torch's own functions."""
    logits = F.linear(drawn["input"], drawn["weight"], drawn["bias"])
    log_p = (logits / case.get("temperature", 1.0)).log_softmax(-1)
    target = drawn["target"].long()
    counts = target != case.get("ignore_index", -100)
    chosen = log_p.gather(-1, torch.where(counts, target, 0).unsqueeze(-1)).squeeze(-1)
    lse = (logits / case.get("temperature", 1.0)).logsumexp(-1)
    outputs = (chosen, torch.special.entr(log_p.exp()).sum(-1), lse)
    return tuple(torch.where(counts, t, 0) for t in outputs), logits


def run(op: Any, case: Case, drawn: dict[str, Any], grads: Tensor) -> tuple[Any, dict[str, Tensor]]:
    given = dict(drawn)
    for name in GRADED:
        if given[name] is not None:
            given[name] = given[name].detach().requires_grad_()
    budget = -(-case.rows // case.chunks) * padded(case.vocabulary) * case.dtype.itemsize
    outputs = op(**given, chunk_bytes=budget, return_entropy=True, return_lse=True, **case.keywords)
    used = [(y, g) for name, y, g in zip(OUTPUTS, outputs, grads, strict=True) if name in case.used]
    torch.autograd.backward(*map(list, zip(*used, strict=True)))  # type: ignore[arg-type]
    return [y.detach() for y in outputs], {n: given[n].grad for n in GRADED if given[n] is not None}


def limits(
    case: Case,
    wide: dict[str, Any],
    outputs: tuple[Tensor, ...],
    logits: Tensor,
    grads: Tensor,
    rounded: bool,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """How far rounding can take outputs and gradients, of first order.

    A logit is off by one rounding to the dtype (where a chunk's buffer holds it) and by the float32 sum's errors; twice
    the largest of a row, over the temperature, is what the logarithms of its probabilities are off. The entropy is a
    sum of p log(p), whose derivative by a logit is p (log(p) + H); in float32 it is the difference of two numbers not
    above log(vocabulary) plus the spread of the logits. A logit's gradient is p times a sum of terms that follow log(p)
    alike, rounded to the dtype; the products add its errors' absolute values and round again, weight's once a chunk.
    """
    u, u32 = UNIT_ROUNDOFF[case.dtype], UNIT_ROUNDOFF[FP32]
    t = case.get("temperature", 1.0)
    x, w = wide["input"].detach().abs(), wide["weight"].detach().abs()
    size = x @ w.t() + (0.0 if wide["bias"] is None else wide["bias"].detach().abs())
    z = logits.detach()
    off = ((u if rounded else 0.0) * z.abs() + (case.k + 4) * u32 * size).amax(-1) * 2 / t
    own = 32 * u32 * (z.abs().amax(-1) / t + z.shape[-1].bit_length())
    off = (off + own)[:, None]
    log_p = (z / t).log_softmax(-1)
    p, h = log_p.exp(), outputs[1].detach()[:, None]
    d_entropy = off * (p * (log_p + h).abs()).sum(-1, keepdim=True) + off**2 + own[:, None]
    g, e, f = (
        a[:, None] * (name in case.used) for name, a in zip(OUTPUTS, grads.double().abs(), strict=True)
    )
    slope = g + e * (log_p + h).abs() + f
    dz = p * slope + 0.0
    d_dz = p * (slope * (off + 32 * u32) + e * (off + d_entropy))
    tiny = 2.0**-24 if case.dtype == FP16 else 2.0**-126
    exact = (dz + g * (p > -1)) / t
    dg = d_dz / t + u * exact + tiny
    counts = wide["target"].long() != case.get("ignore_index", -100)
    dg, exact = dg * counts[:, None], exact * counts[:, None]
    of_outputs = [off.squeeze(-1), d_entropy.squeeze(-1), off.squeeze(-1)]
    return of_outputs, {
        "input": dg @ w + (u + case.vocabulary * u32) * (exact @ w) + tiny,
        "weight": dg.t() @ x + (case.chunks * u * 2 + case.rows * u32) * (exact.t() @ x) + tiny,
        "bias": dg.sum(0) + (u + case.rows * u32) * exact.sum(0) + tiny,
    }


def check(op: Any, case: Case, device: str, seed: int, rounded_logits: bool) -> None:
    drawn = draw(case, seed, device)
    before = {name: t.clone() for name, t in drawn.items() if t is not None}
    g = torch.Generator(device).manual_seed(seed + 1)
    grads = torch.randn(3, case.rows, device=device, generator=g)
    outputs, gradients = run(op, case, drawn, grads)
    for name, t in before.items():
        assert torch.equal(drawn[name], t), f"{case}: {name} was overwritten"  # type: ignore[arg-type]
    wide = {k: t.double() if t is not None and t.is_floating_point() else t for k, t in drawn.items()}
    leaves = {name: wide[name].requires_grad_() for name in gradients}  # type: ignore[union-attr]
    exact, logits = formula(case, wide)
    used = [(y, dy.double()) for name, y, dy in zip(OUTPUTS, exact, grads, strict=True) if name in case.used]
    torch.autograd.backward(*map(list, zip(*used, strict=True)))  # type: ignore[arg-type]
    allowed, of_gradients = limits(case, wide, exact, logits, grads, rounded_logits)
    ignored = drawn["target"].long() == case.get("ignore_index", -100)  # type: ignore[union-attr]
    for name, y, wanted, limit in zip(OUTPUTS, outputs, exact, allowed, strict=True):
        assert y.dtype == FP32 and y.shape == (case.rows,) and (y[ignored] == 0).all()
        ratio = (y.double() - wanted.detach()).abs() / (2 * limit + 1e-12)
        assert float(ratio.max()) <= 1, f"{case}: {name} is off by {float(ratio.max())} of what is allowed"
    for name, gradient in gradients.items():
        assert gradient.dtype == case.dtype and gradient.isfinite().all()
        ratio = (gradient.double() - leaves[name].grad).abs() / (2 * of_gradients[name])
        assert float(ratio.max()) <= 1, (
            f"{case}: {name}'s gradient is off by {float(ratio.max())} of what is allowed"
        )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures("poisoned")
def test_cases(way: str, case: Case) -> None:
    op, device = made(FusedLinearLogProbs, way)
    check(op, case, device, 0, rounded_logits=way != "reference")


@pytest.mark.parametrize("way", WAYS)
def test_frozen(way: str) -> None:
    """What is frozen gets nothing; what is not asked for is not returned."""
    op, device = made(FusedLinearLogProbs, way)
    case = Case(9, 16, 37, FP32, bias=True, used=("log_probs",), keywords={"temperature": 0.8})
    drawn = draw(case, 0, device)
    outputs, gradients = run(op, case, drawn, torch.ones(3, 9, device=device))
    for name in GRADED:
        given = {k: t if k != name else t.detach().requires_grad_() for k, t in drawn.items()}  # type: ignore[union-attr]
        found = op(**given, temperature=0.8)
        found.sum().backward()
        torch.testing.assert_close(given[name].grad, gradients[name], rtol=1e-5, atol=1e-6)  # type: ignore[union-attr]
        torch.testing.assert_close(found.detach(), outputs[0])
    with torch.no_grad():
        both = op(**drawn, temperature=0.8, return_lse=True)
    assert torch.equal(both[0], outputs[0]) and torch.equal(both[1], outputs[2])


@pytest.mark.parametrize("way", WAYS)
def test_infinite_logits(way: str) -> None:
    """-inf, as of masked classes, has probability 0; NaN gives NaN in its row alone."""
    op, device = made(FusedLinearLogProbs, way)
    drawn = draw(Case(4, 8, 20, FP32, bias=True), 0, device)
    drawn["bias"][:5] = -torch.inf  # type: ignore[index]
    drawn["input"][3, 2] = torch.nan  # type: ignore[index]
    drawn["target"].fill_(7)  # type: ignore[union-attr]
    x = drawn["input"].detach().requires_grad_()  # type: ignore[union-attr]
    outputs = op(x, *list(drawn.values())[1:], return_entropy=True, return_lse=True)
    wanted, _ = formula(Case(4, 8, 15), {k: t[5:] if k in ("weight", "bias") else t for k, t in drawn.items()} | {
        "target": drawn["target"] - 5  # type: ignore[operator]
    })  # fmt: skip
    for y, exact in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(y[:3].detach(), exact[:3])
        assert y[3].isnan()
    (dx,) = torch.autograd.grad([y.sum() for y in outputs], x)
    assert dx[:3].isfinite().all() and dx[3].isnan().all()


@pytest.mark.parametrize("way", [w for w in WAYS if w != "reference"])
def test_a_target_out_of_range(way: str) -> None:
    """NaN for its row; the next call says so."""
    op, device = made(FusedLinearLogProbs, way)
    drawn = draw(Case(4, 8, 20, FP32), 0, device)
    drawn["target"][2] = 20  # type: ignore[index]
    found = op(**drawn)
    if device == "cuda":
        torch.cuda.synchronize()
    assert found.isnan().tolist() == [False, False, True, False]
    with pytest.raises(ArgumentError, match="an earlier call was given 20, which is out of range"):
        op(**drawn)
    device_errors.raise_if_any("fused_linear_log_probs")


@pytest.mark.parametrize("way", WAYS)
def test_parts_of_a_vocabulary(way: str) -> None:
    """Statistics of three parts together give the whole's results, and each part its rows of the gradient."""
    op, device = made(FusedLinearLogProbs, way)
    case = Case(9, 16, 60, FP32, size=5.0, keywords={"temperature": 0.7})
    drawn = draw(case, 0, device)
    grads = torch.randn(3, 9, device=device)
    outputs, gradients = run(op, case, drawn, grads)
    x, weight, target, _ = drawn.values()
    on = None if way == "reference" else op._own.of(x, "input")
    layers = [
        layer_of((x, weight[first:last], target, None), Settings(0.7, -100, BUDGET, None), first, 60)  # type: ignore[index]
        for first, last in ((0, 7), (7, 40), (40, 60))
    ]
    found = combined(torch.stack([statistics_of(on, layer) for layer in layers]), layers[0])
    results = results_of(found, 0.7)
    for y, wanted in zip(results, outputs, strict=True):
        torch.testing.assert_close(y, wanted, rtol=1e-5, atol=2e-5)
    parts = [
        gradients_of(on, layer, found, results[1], tuple(grads), (True, True, False), layer.weight, None)
        for layer in layers
    ]
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(sum(part.x for part in parts), gradients["input"], **close)  # type: ignore[misc]
    weights = torch.cat([part.weight for part in parts])  # type: ignore[misc]
    torch.testing.assert_close(weights, gradients["weight"], **close)


OF_SHARDS = (
    Case(9, 16, 48),
    Case(9, 16, 48, BF16, torch.int32, bias=True, chunks=3, keywords={"temperature": 0.7}),
    Case(5, 24, 4100, FP16, chunks=2, keywords={"temperature": 1.5, "ignore_index": 3}),
    *(Case(9, 16, 40, BF16, used=(name,)) for name in OUTPUTS),
)


def shards(rank: int, device: torch.device) -> None:
    """Each rank has as many rows of the vocabulary: the whole's results, the same bits everywhere, the whole gradient
    of the input and that of its own rows."""
    op, world = liger_aot.load("fused_linear_log_probs"), dist.get_world_size()
    for case in OF_SHARDS:
        drawn: dict[str, Any] = draw(case, 0, "cpu")
        each = case.vocabulary // world
        own = slice(rank * each, rank * each + each)
        grads = torch.randn(3, case.rows, generator=torch.Generator().manual_seed(1))
        parts = {
            name: t if t is None or name not in ("weight", "bias") else t[own] for name, t in drawn.items()
        }
        given = {name: t if t is None else t.to(device) for name, t in parts.items()}
        with_group = partial(op, group=dist.group.WORLD)
        outputs, gradients = run(with_group, case, given, grads.to(device))
        for t in (*outputs, gradients["input"]):
            everyone = [torch.empty_like(t) for _ in range(world)]
            dist.all_gather(everyone, t.contiguous())
            assert all(torch.equal(other, t) for other in everyone)
        wide = {k: t.double() if t is not None and t.is_floating_point() else t for k, t in drawn.items()}
        leaves = {name: wide[name].requires_grad_() for name in gradients}
        exact, logits = formula(case, wide)
        used = [
            (y, dy.double()) for name, y, dy in zip(OUTPUTS, exact, grads, strict=True) if name in case.used
        ]
        torch.autograd.backward(*map(list, zip(*used, strict=True)))  # type: ignore[arg-type]
        allowed, of_gradients = limits(case, wide, exact, logits, grads, True)
        for name, y, wanted, limit in zip(OUTPUTS, outputs, exact, allowed, strict=True):
            ratio = (y.cpu().double() - wanted.detach()).abs() / (2 * limit + 1e-12)
            assert float(ratio.max()) <= 1, f"{case} on rank {rank}: {name} by {float(ratio.max())}"
        for name, gradient in gradients.items():
            rows = slice(None) if name == "input" else own
            # The ranks' parts of the input's gradient are rounded, and so are their sums.
            slack = 2.0 + (world if name == "input" else 0)
            off = (gradient.cpu().double() - leaves[name].grad[rows]).abs()
            ratio = off / (slack * of_gradients[name][rows])
            assert float(ratio.max()) <= 1, (
                f"{case} on rank {rank}: {name}'s gradient by {float(ratio.max())}"
            )


def test_shards_on_the_cpu() -> None:
    in_group(shards, 2)


@pytest.mark.gpu
def test_shards_on_one_gpu() -> None:
    in_group(shards, 2, device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs two GPUs, there are {torch.cuda.device_count()}"
)
def test_shards_on_two_gpus() -> None:
    in_group(shards, 2, backend="nccl")


def test_more_dimensions() -> None:
    op, _ = made(FusedLinearLogProbs, "reference")
    drawn = draw(Case(12, 16, 40), 0, "cpu")
    shaped = drawn | {"input": drawn["input"].view(3, 4, -1), "target": drawn["target"].view(3, 4)}  # type: ignore[union-attr]
    torch.testing.assert_close(op(**shaped), op(**drawn).view(3, 4))


def test_no_rows() -> None:
    w = torch.randn(6, 8, requires_grad=True)
    x = torch.randn(0, 8, requires_grad=True)
    found = liger_aot.load("fused_linear_log_probs")(
        x, w, torch.zeros(0, dtype=torch.int64), return_entropy=True
    )
    assert [y.shape for y in found] == [(0,), (0,)]
    dx, dw = torch.autograd.grad(found[0].sum(), (x, w))
    assert dx.shape == (0, 8) and (dw == 0).all()


def test_second_derivative() -> None:
    """In float32 against the formula in float64."""
    case = Case(5, 4, 7, keywords={"temperature": 0.7})
    drawn, found = draw(case, 0, "cpu"), []
    op = liger_aot.load("fused_linear_log_probs")
    for dtype in (torch.float32, torch.float64):
        x, w = (drawn[name].to(dtype).requires_grad_() for name in ("input", "weight"))  # type: ignore[union-attr]
        if dtype == torch.float64:
            outputs, _ = formula(case, drawn | {"input": x, "weight": w})
        else:
            outputs = op(x, w, drawn["target"], temperature=0.7, return_entropy=True, return_lse=True)
        loss = sum((y * y.detach()).sum() for y in outputs)
        dx, dw = torch.autograd.grad(loss, (x, w), create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum() + dw.square().sum(), (x, w)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def test_compile_is_one_graph() -> None:
    op, _ = made(FusedLinearLogProbs, "reference")
    case = Case(9, 16, 37, FP32, bias=True, keywords={"temperature": 0.7})
    drawn, grads = draw(case, 0, "cpu"), torch.randn(3, 9)
    outputs, gradients = run(op, case, drawn, grads)
    torch.compiler.reset()
    compiled = torch.compile(lambda **t: op(**t), fullgraph=True, backend="aot_eager")
    again, found = run(compiled, case, drawn, grads)
    for a, b in zip(again, outputs, strict=True):
        torch.testing.assert_close(a, b)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient)


def test_registration() -> None:
    register("fused_linear_log_probs")
    drawn = draw(Case(5, 8, 16, FP32, bias=True), 0, "cpu")
    settings = (0.7, -100, 1 << 20, None, True)
    torch.library.opcheck(
        torch.ops.liger_aot.fused_linear_log_probs_forward.default, (*drawn.values(), *settings)
    )


X, W, T = torch.ones(4, 8), torch.ones(6, 8), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "pattern"),
    [
        ((X.int(), W, T), {}, ArgumentTypeError, "input must be bfloat16"),
        ((X, W[:, :4], T), {}, ArgumentError, r"weight must be of shape \(vocabulary, 8\)"),
        ((X, W.half(), T), {}, ArgumentTypeError, "weight must be of input's dtype.*float16"),
        ((X, W, T[:3]), {}, ArgumentError, r"target must be of shape \(4,\)"),
        ((X, W, X[:, 0]), {}, ArgumentTypeError, "target must be int64 or int32"),
        ((X, W, T + 6), {}, ArgumentError, r"target must be in \[0, 6\).*got 6"),
        ((X, W, T, W[0]), {}, ArgumentError, r"bias must be of shape \(6,\)"),
        ((X, W, T), {"temperature": 0.0}, ArgumentError, "temperature must be above 0"),
        ((X, W, T), {"chunk_bytes": 100}, ArgumentError, "chunk_bytes must hold one row of the logits, 256"),
        ((X, W, T), {"weight_grad_dtype": BF16}, ArgumentTypeError, "weight_grad_dtype must be None"),
        ((X, W, T), {"return_entropy": 1}, ArgumentTypeError, "return_entropy must be True or False"),
        ((X, W, T), {"return_lse": None}, ArgumentTypeError, "return_lse must be True or False"),
    ],
)
def test_bad_input(arguments: Any, keywords: Any, error: type[Exception], pattern: str) -> None:
    with pytest.raises(error, match=f"fused_linear_log_probs: .*{pattern}"):
        liger_aot.load("fused_linear_log_probs")(*arguments, **keywords)


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [50257, 128256, 262144])
@pytest.mark.usefixtures("poisoned")
def test_large(vocabulary: int) -> None:
    check(
        liger_aot.load("fused_linear_log_probs"),
        Case(300, 256, vocabulary, BF16, chunks=3, keywords={"temperature": 0.8}), "cuda", 0, True,
    )  # fmt: skip


@pytest.mark.gpu
def test_beyond_32_bits() -> None:
    """A chunk of more than 2^31 logits: its last rows are as they are alone."""
    op = liger_aot.load("fused_linear_log_probs")
    g = torch.Generator("cuda").manual_seed(0)
    rows, vocabulary, k = 8300, 262144, 64
    x = torch.randn(rows, k, device="cuda", generator=g).to(BF16)
    w = torch.randn(vocabulary, k, device="cuda", generator=g).div_(8).to(BF16)
    target = torch.randint(vocabulary, (rows,), device="cuda", generator=g)
    assert rows * vocabulary > 1 << 31
    leaf = x.clone().requires_grad_()
    both = op(leaf, w, target, chunk_bytes=1 << 33, return_entropy=True)
    (dx,) = torch.autograd.grad([y.sum() for y in both], leaf)
    tail = x[-200:].clone().requires_grad_()
    alone = op(tail, w, target[-200:], return_entropy=True)
    (d_tail,) = torch.autograd.grad([y.sum() for y in alone], tail)
    for y, wanted in zip(both, alone, strict=True):
        torch.testing.assert_close(y[-200:], wanted, rtol=0, atol=2.0**-6)
    torch.testing.assert_close(dx[-200:], d_tail, rtol=2.0**-6, atol=2.0**-6)


@pytest.mark.gpu
def test_cuda_graph() -> None:
    op = liger_aot.load("fused_linear_log_probs")
    op.preload()
    case = Case(64, 32, 1000, BF16, chunks=2, keywords={"temperature": 0.7})
    drawn, grads = draw(case, 0, "cuda"), torch.randn(3, 64, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(op, case, drawn, grads)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs, gradients = run(op, case, drawn, grads)
    other = draw(case, 1, "cuda")
    for name, t in drawn.items():
        if t is not None:
            t.copy_(other[name])  # type: ignore[arg-type]
    graph.replay()
    wanted, expected = run(op, case, other, grads)
    assert all(map(torch.equal, outputs, wanted))
    assert all(torch.equal(gradients[n], expected[n]) for n in expected)
