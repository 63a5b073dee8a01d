"""Every stand-in for a function of Liger's: its signature, its results and gradients against plain torch."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("liger_kernel", reason="liger-kernel is not installed: make venv installs it")

import liger_aot.liger
from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.liger import elementwise, fallback, losses, norms
from liger_aot.liger.functions import COVERED
from tests.conftest import built_pack
from tests.harness.drivers import EmulatorDriver, bound_op
from tests.harness.process_groups import in_group
from tests.harness.tolerances import UNIT_ROUNDOFF
from tests.models.liger_cases import (
    CASES,
    Case,
    grpo_arguments,
    labels,
    mlp,
    multi_token,
    neighbours,
    ours,
    randn,
    rms,
    scaled_cross_entropy,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


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
    assert {case.name for case in CASES} == {name for name in COVERED if name.startswith(("Liger", "Grpo"))}


@pytest.mark.parametrize("name", COVERED)
def test_signature(name: str) -> None:
    """Names, order and defaults of Liger's own arguments."""
    theirs: Any = fallback.theirs[name]
    assert theirs.__module__.startswith("liger_kernel.")
    stands = ours(name)
    if inspect.isclass(theirs):
        assert issubclass(stands, torch.autograd.Function)
        assert _parameters(stands.forward) == _parameters(theirs.forward)
        theirs, stands = theirs.forward, stands.apply
    assert _parameters(stands) == [p for p in _parameters(theirs) if p[0] != "ctx"]


def _parameters(function: Any) -> list[tuple[str, Any]]:
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_forward_and_backward_with_a_context(case: Case) -> None:
    """As functions of the users' own call them: what apply and autograd give."""
    torch.manual_seed(0)
    arguments = case.arguments()
    copies = tuple(
        t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t for t in arguments
    )
    context, function = SimpleNamespace(), ours(case.name)
    with torch.no_grad():
        got = function.forward(context, *arguments)
    want = function.apply(*copies)
    torch.manual_seed(5)
    results = want if isinstance(want, tuple) else (want,)
    grads = [torch.randn_like(t) if t is not None and t.requires_grad else None for t in results]
    found = function.backward(context, *grads)
    found = found if isinstance(found, tuple) else (found,)
    for a, b in zip(outputs(got), outputs(want), strict=True):
        torch.testing.assert_close(a, b.detach())
        assert not a.requires_grad
    assert len(found) == len(arguments)
    needed = [t is not None and isinstance(t, Tensor) and t.requires_grad for t in arguments]
    assert [g is not None for g in found] == needed
    for a, b in zip([g for g in found if g is not None], gradients(want, copies), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("selected", [None, torch.tensor([4, 0, 4])], ids=["", "selected"])
@pytest.mark.parametrize("entropy", [False, True])
def test_scaled_cross_entropy(entropy: bool, selected: Tensor | None) -> None:
    """Through Liger's function, which chooses by device, and what it would choose on Hopper."""
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction

    for function in (
        LigerFusedLinearScaledCrossEntropyFunction,
        ours("_load_sm90_function")(),
    ):
        torch.manual_seed(0)
        x, w = randn(9, 8), randn(13, 8)
        arguments = (x, w, labels(9, 13), 0.7, -100, 1, entropy)
        got = function.apply(*arguments, *(() if selected is None else (selected,)))
        want = scaled_cross_entropy(*arguments, torch.tensor([0]) if selected is None else selected)
        want = tuple(t for t, asked in zip(want, (True, entropy, selected is not None), strict=True) if asked)
        assert isinstance(got, tuple) == (len(want) > 1)
        for a, b in zip(outputs(got), want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        for a, b in zip(gradients(got, (x, w)), gradients(want, (x, w)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    narrow = function.apply(x.bfloat16(), w.bfloat16(), *arguments[2:])
    types = [t.dtype for t in outputs(narrow)]
    assert types == [torch.float32, torch.bfloat16][: len(types)]


def test_scaled_cross_entropy_over_ranks() -> None:
    in_group(scaled_cross_entropy_of_shards, 2)


@pytest.mark.gpu
def test_scaled_cross_entropy_over_gpus() -> None:
    in_group(scaled_cross_entropy_of_shards, min(4, torch.cuda.device_count()), backend="nccl")


def scaled_cross_entropy_of_shards(rank: int, device: torch.device) -> None:
    """Every rank has the results and the gradient of the input, and that of its own rows of the weight."""
    torch.manual_seed(0)
    each = 12 // torch.distributed.get_world_size()
    shard = slice(rank * each, rank * each + each)
    x, w, t = (v.detach().to(device) for v in (randn(9, 8), randn(12, 8), labels(9, 12)))
    x, w = x.requires_grad_(), w.requires_grad_()
    want = scaled_cross_entropy(x, w, t, 0.7, -100, 1, True, t[:1] * 0)[:2]
    own, leaf = w.detach()[shard].requires_grad_(), x.detach().requires_grad_()
    function, group = ours("_TensorParallelFusedLinearPPOFallbackFunction"), torch.distributed.group.WORLD
    got = function.apply(leaf, own, t, 0.7, -100, True, group)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    torch.manual_seed(5)
    grads = [torch.randn(9, device=device) for _ in range(2)]
    dx, dw = torch.autograd.grad(want, (x, w), grads)
    d_leaf, d_own = torch.autograd.grad(got, (leaf, own), grads)
    torch.testing.assert_close(d_leaf, dx, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(d_own, dw[shard], rtol=1e-4, atol=1e-5)
    alone = function.apply(leaf, own, t, 0.7, -100, False, group)
    assert torch.equal(alone, got[0])


def test_neighbours_in_16_bits() -> None:
    """The result has the query's dtype."""
    torch.manual_seed(0)
    q, k, v = (randn(2, 3, 21, 16).detach().bfloat16() for _ in range(3))
    for dilation in (1, 2, 5):
        got = ours("LigerFusedNeighborhoodAttentionFunction").apply(q, k, v, 5, dilation)
        want = neighbours(q.double(), k.double(), v.double(), 5, dilation)
        assert got.dtype == torch.bfloat16 and got.is_contiguous()
        torch.testing.assert_close(got.double(), want, rtol=2.0**-8, atol=2.0**-8)


def near(name: str, plain: Any, rounding: float, leaves: list[Tensor], *rest: Any) -> None:
    """Result and gradients of a stand-in against the same in float64: within ``rounding`` of their largest values, and
    what the float32 sums of so many terms, whose errors are independent, add."""
    got = ours(name).apply(*(t.requires_grad_() for t in leaves), *rest)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    want = plain(*wide, *rest)
    assert got.dtype == leaves[0].dtype and got.shape == want.shape
    grad = torch.randn_like(got)
    found = [got, *torch.autograd.grad(got, leaves, grad)]
    exact = [want, *torch.autograd.grad(want, wide, grad.double())]
    for a, b in zip(found, exact, strict=True):
        ratio = float((a.double() - b).detach().abs().max() / b.detach().abs().max())
        allowed = rounding + UNIT_ROUNDOFF[torch.float32] * max(1, got.numel() / a.numel()) ** 0.5
        assert ratio <= allowed, f"{name} {tuple(a.shape)}: {ratio}, {allowed} is allowed"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.usefixtures("poisoned")
def test_compositions_on_a_gpu(dtype: torch.dtype) -> None:
    """Scores, probabilities and results are each rounded to the dtype, float32 products to some roundoffs of their
    sums; against the largest value of a tensor eight roundoffs, or 256 in float32, are ample and would show any wrong
    index."""
    rounding = UNIT_ROUNDOFF[dtype] * (256 if dtype == torch.float32 else 8)

    def drawn(*shape: int, size: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device="cuda") * size).to(dtype)

    for length, dim, rest in (
        (1001, 64, (7, 1)),
        (1001, 64, (9, 2)),
        (1500, 128, (33, 3, 0.2)),
        (2048, 16, (301, 1)),
        (20, 64, (7, 8)),
    ):
        leaves = [drawn(2, 3, length, dim) for _ in range(3)]
        near("LigerFusedNeighborhoodAttentionFunction", neighbours, rounding, leaves, *rest)
    for length in (7, 130, 1025):
        leaves = [drawn(2, 4, length, length), drawn(4, 4, 3, 3, size=0.3), drawn(4)]
        with torch.backends.cudnn.flags(allow_tf32=False):  # type: ignore[no-untyped-call]
            near("LigerMultiTokenAttentionFunction", multi_token, rounding, leaves, 1, 1, 1, 1)
    leaves = [drawn(2, 500, 512), *(drawn(*s, size=0.05) for s in ((1024, 512), (1024, 512), (512, 1024)))]
    near("LigerMLPFunction", mlp, rounding, leaves, 0.7, 1.5)


@pytest.mark.gpu
def test_matmul_of_packed_integers_on_a_gpu() -> None:
    from liger_kernel.ops.experimental.mm_int8int2 import matmul, unpack_weights

    for rows, k, columns in ((1, 64, 8), (3, 2048, 1000), (17, 8192, 4096), (2048, 4096, 10000)):
        a = torch.randint(-128, 128, (rows, k), device="cuda", dtype=torch.int8)
        b = torch.randint(0, 256, (k // 4, columns), device="cuda", dtype=torch.uint8)
        assert torch.equal(matmul(a, b).double(), a.double() @ unpack_weights(b).double())


def test_mlp_refuses_what_ligers_does() -> None:
    call = ours("LigerMLPFunction").apply
    x, g, d = (torch.ones(shape, dtype=torch.bfloat16) for shape in ((1, 3, 8), (16, 8), (8, 16)))
    with pytest.raises(TypeError, match=r"input must be .*; got torch\.float64"):
        call(x.double(), g, g, d)
    with pytest.raises(TypeError, match=r"of one dtype, got torch\.bfloat16, torch\.float32"):
        call(x, g.float(), g, d)
    with pytest.raises(ValueError, match=r"rows must lie multiples of 16 bytes apart.*shape \(8, 15\)"):
        call(x, g[:15], g[:15], torch.ones(8, 15, dtype=torch.bfloat16))


@pytest.mark.parametrize(("rows", "k", "columns"), [(1, 4, 1), (17, 64, 24), (40, 36, 10)])
def test_matmul_of_packed_integers(rows: int, k: int, columns: int) -> None:
    from liger_kernel.ops.experimental.mm_int8int2 import matmul, unpack_weights

    torch.manual_seed(0)
    a = torch.randint(-128, 128, (rows, k), dtype=torch.int8)
    b = torch.randint(0, 256, (k // 4, columns), dtype=torch.uint8)
    got = matmul(a, b)
    assert got.dtype == torch.int32 and torch.equal(got, a.int() @ unpack_weights(b))
    with pytest.raises(AssertionError, match="Incompatible dimensions"):
        matmul(a, b[1:])


def test_fused_selective_log_softmax() -> None:
    torch.manual_seed(0)
    logits, ids = torch.randn(2, 6, 11), torch.randint(0, 11, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, -2:] = 0
    want = (logits[:, :-1] / 0.9).log_softmax(-1).gather(-1, ids[:, -5:, None])[..., 0]
    call = ours("fused_selective_log_softmax")
    got = call(logits.requires_grad_(), ids)
    torch.testing.assert_close(got, want)
    assert got.dtype == torch.float32 and not got.requires_grad
    for dtype in (torch.int64, torch.bool, torch.bfloat16):
        masked = call(logits.bfloat16(), ids, 0.9, mask.to(dtype))
        assert (masked[1, -2:] == 0).all() and (masked[0] != 0).all()


def test_grpo_overwrites_the_logits_of_a_linear_layer() -> None:
    """As Liger's, and unlike it not those that another backward reads, nor a leaf."""
    torch.manual_seed(0)
    function, (leaf, *rest) = ours("GrpoLossFunction"), grpo_arguments("dapo", True, "token")
    (wanted,) = torch.autograd.grad(function.apply(leaf, *rest)[0], leaf)
    was = leaf.detach().clone()
    for make, over in ((lambda t: F.linear(t, torch.eye(11)), True), (torch.exp, False)):
        source = was.clone() if over else was.clone().log().nan_to_num()
        source.requires_grad_()
        logits = make(source)
        loss = function.apply(logits, *rest)[0]
        before = logits.detach().clone()
        loss.backward()
        assert torch.equal(logits.detach(), before) != over
        if over:
            torch.testing.assert_close(source.grad, wanted)
            torch.testing.assert_close(logits.detach(), wanted)
    assert torch.equal(leaf.detach(), was)


@pytest.mark.parametrize("name", ["GrpoLossFunction", "LigerCrossEntropyFunction"])
def test_losses_that_may_overwrite_are_one_graph(name: str) -> None:
    """Under torch.compile they overwrite nothing."""
    torch.manual_seed(0)
    if name == "GrpoLossFunction":
        leaf, *rest = grpo_arguments("grpo", True, "sequence")
    else:
        leaf, *rest = randn(9, 31), labels(9, 31), None

    def loss(x: Tensor) -> Tensor:
        found: Tensor = ours(name).apply(F.linear(x, torch.eye(x.shape[-1])), *rest)[0]
        return found

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got, wanted = compiled(leaf), loss(leaf)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(t, leaf)[0] for t in (got, wanted)))


def test_grpo_as_liger_refuses() -> None:
    function = ours("GrpoLossFunction")
    for loss_type in ("cispo", "sapo"):
        with pytest.raises(ValueError, match="Sequence-level importance sampling is not supported"):
            function.apply(*grpo_arguments(loss_type, True, "sequence"))
    with pytest.raises(ValueError, match="requires phi_seq"):
        function.apply(*grpo_arguments("vespo", True, "token"))
    with pytest.raises(ValueError, match="delta is not for"):
        function.apply(*grpo_arguments("cispo", True, "token"))


def _of_a_rank(rank: int, device: torch.device) -> None:
    torch.manual_seed(0)
    function, arguments = ours("GrpoLossFunction"), list(grpo_arguments("dapo", True, "token"))
    losses = function.apply(*arguments[:13], False, *arguments[14:])[0].detach()
    tokens = arguments[5].sum()
    own = [a[rank : rank + 1] if isinstance(a, Tensor) else a for a in arguments]
    for given in (None, tokens, float(tokens)):
        loss = function.apply(*own[:20], given)[0].detach()
        torch.testing.assert_close(loss, losses[rank].sum() / (tokens / 2))


def test_grpo_divides_by_the_tokens_of_all_ranks() -> None:
    """So that the average of the ranks' losses is the mean over all tokens."""
    in_group(_of_a_rank, 2)


def test_dtypes_are_ligers() -> None:
    """Of the inputs where Liger's are, with targets of another dtype."""
    x = randn(6, 8).detach().bfloat16().requires_grad_()
    w, t = randn(9, 8).detach().bfloat16().requires_grad_(), labels(6, 9)
    logits = (x @ w.t()).detach().requires_grad_()
    for reduction in ("mean", "sum", "none"):
        loss, z, *_ = ours("LigerCrossEntropyFunction").apply(
            logits, t, None, -100, 0.1, 0.0, reduction, None, True
        )
        assert loss.dtype == z.dtype == torch.bfloat16
    loss, z, *_ = ours("LigerFusedLinearCrossEntropyFunction").apply(
        x, w, t, None, None, -100, 0.1, 0.0, "mean", None, True
    )
    assert loss.dtype == torch.float32 and z.dtype == torch.bfloat16
    student, teacher = logits.log_softmax(-1), torch.randn(6, 9).log_softmax(-1)
    jsd = ours("LigerJSDFunction").apply(student, teacher)
    assert jsd.dtype == torch.bfloat16
    wide = ours("LigerJSDFunction").apply(student.float(), teacher)
    torch.testing.assert_close(jsd, wide.bfloat16())
    for name, p, q in (
        ("LigerKLDivLossFunction", student, teacher.exp()),
        ("LigerTVDLossFunction", student.exp(), teacher.exp()),
    ):
        p = p.detach().requires_grad_()
        loss = ours(name).apply(p, q)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, ours(name).apply(p.float(), q))
        (grad,) = torch.autograd.grad(loss, p)
        assert grad.dtype == torch.bfloat16


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


@pytest.mark.parametrize("name", ["LigerSiLUMulFunction", "LigerGELUMulFunction"])
def test_gate_and_up_of_two_dtypes(name: str) -> None:
    """The result has the gate's, as with Liger, and each gradient its input's."""
    apply = ours(name).apply
    for dtypes in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        gate, up = (randn(3, 8).detach().to(dtype).requires_grad_() for dtype in dtypes)
        got, want = apply(gate, up), apply(gate.float(), up.float())
        assert got.dtype == gate.dtype
        torch.testing.assert_close(got, want.to(gate.dtype))
        grads = torch.autograd.grad(got.sum(), (gate, up))
        assert [g.dtype for g in grads] == list(dtypes)


X16, DY = torch.linspace(-2, 2, 48).view(3, 16), torch.linspace(1, 3, 48).view(3, 16)
RSTD, W16 = torch.tensor([0.5, 2.0, 1.0]), torch.linspace(0.5, 1.5, 16)
# Of each backward: its module and op there, and arguments; what is float32 here is none of the op's memory.
BACKWARDS: dict[str, tuple[Any, str, tuple[Any, ...]]] = {
    "swiglu_backward": (elementwise, "swiglu", (X16.bfloat16(), W16.expand(3, 16), DY)),
    "geglu_backward": (elementwise, "geglu", (X16, W16.expand(3, 16).bfloat16(), DY.half())),
    "relu_squared_backward": (elementwise, "relu_squared", (X16.bfloat16(), DY)),
    "rms_norm_backward": (
        norms,
        "rmsnorm",
        (DY, X16.bfloat16(), W16.bfloat16(), RSTD.bfloat16(), 0.0, "llama", 16, 4, False, None),
    ),
    "fused_add_rms_norm_backward": (
        norms,
        "added",
        (DY, DY.half(), X16.bfloat16(), W16, RSTD.bfloat16(), 0.0, "llama", 16, 4, 2, False),
    ),
    "modulated_rms_norm_backward": (
        norms,
        "modulated",
        (DY, X16.bfloat16(), None, W16, None, RSTD.bfloat16(), 0.0, "llama", 16, 4, 3, False),
    ),
    "layer_norm_backward": (
        norms,
        "layernorm",
        (DY, X16.bfloat16(), W16, None, RSTD.bfloat16(), RSTD.half()),
    ),
    "poly_norm_backward": (
        norms,
        "poly_norm",
        (DY, X16.bfloat16(), W16[:3].clone(), torch.ones(9).bfloat16(), 16, 4, False),
    ),
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_backwards_of_mixed_dtypes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers bring their own gradients and statistics: the binaries, which read memory as it is declared, give what
    plain torch does."""
    module, op, arguments = BACKWARDS[name]
    wanted = outputs(ours(name)(*arguments))
    bound = bound_op(type(getattr(module, f"_{op}")), built_pack("gfx942"), EmulatorDriver)
    monkeypatch.setattr(module, f"_{op}", bound)
    for got, want in zip(outputs(ours(name)(*arguments)), wanted, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want)
    wrong = [t.to("meta") if t is arguments[-1 if op == "relu_squared" else 0] else t for t in arguments]
    with pytest.raises(ArgumentError, match=r"a gradient must be of shape|on meta"):
        ours(name)(*wrong)


@pytest.mark.parametrize(
    ("name", "op", "others"),
    [
        ("rms_norm_forward", "rmsnorm", (W16, 1e-6, 0.0, "llama", None)),
        ("layer_norm_forward", "layernorm", (W16, None, 1e-6)),
        ("relu_squared_forward", "relu_squared", ()),
        ("relu_squared_backward", "relu_squared", (DY,)),
        ("swiglu_backward", "swiglu", (X16, DY)),
    ],
)
def test_a_negative_bit(name: str, op: str, others: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Which torch's dispatcher sees and a kernel does not: memory holds minus the values."""
    module = norms if "norm" in name else elementwise
    bound = bound_op(type(getattr(module, f"_{op}")), built_pack("gfx942"), EmulatorDriver)
    monkeypatch.setattr(module, f"_{op}", bound)
    lazy = torch._neg_view(-X16)  # as conj().imag, without its stride of 2, which is copied
    assert lazy.is_neg() and torch.equal(lazy, X16)
    wanted = outputs(ours(name)(lazy.resolve_neg(), *others))
    for got, want in zip(outputs(ours(name)(lazy, *others)), wanted, strict=True):
        assert not isinstance(got, Tensor) or torch.equal(got, want)


@pytest.mark.parametrize("gradient", [False, True])
def test_a_negative_bit_of_logits(gradient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    op = bound_op(type(losses._cross_entropy), built_pack("gfx942"), EmulatorDriver)
    monkeypatch.setattr(losses, "_cross_entropy", op)
    lazy, others = torch._neg_view(-X16), (None, -100, 0.0, 0.0, "mean", None, False)
    t = torch.tensor([1, 2, 3])
    want = ours("cross_entropy_forward")(X16.clone().requires_grad_(gradient), t, *others)
    got = ours("cross_entropy_forward")(lazy.requires_grad_(gradient), t, *others)
    assert torch.equal(got[0], want[0]) and torch.equal(got[-1], want[-1])


def test_settings_of_a_forward() -> None:
    with pytest.raises(ArgumentError, match="rmsnorm: eps must be"):
        ours("rms_norm_forward")(X16, W16, -1.0, 0.0, "llama", None)
    with pytest.raises(ArgumentError, match="cross_entropy: reduction must be"):
        ours("cross_entropy_forward")(X16, W16[:3].long(), None, -100, 0.0, 0.0, "all", None, False)


@pytest.mark.parametrize("grad", [torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([0.5, -1.0, 2.0])])
def test_the_losses_gradient_has_the_logits_dtype(grad: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the losses have; the kernel reads float32."""
    op = bound_op(type(losses._cross_entropy), built_pack("gfx942"), EmulatorDriver)
    monkeypatch.setattr(losses, "_cross_entropy", op)
    x = X16.bfloat16()
    want = (x.float() * (grad.unsqueeze(-1) if len(grad.shape) else grad)).bfloat16()
    assert torch.equal(ours("cross_entropy_backward")(x.clone(), grad.bfloat16()), want)
    with pytest.raises(ArgumentError, match="must hold one number or 3, one a row"):
        ours("cross_entropy_backward")(x, grad.new_ones(2))


def test_a_target_out_of_bounds() -> None:
    """Liger's assertion, where the error is raised."""
    x, t = randn(4, 8), torch.tensor([1, 8, -100, 0])
    for call in (
        lambda: ours("LigerCrossEntropyFunction").apply(x, t, None),
        lambda: ours("cross_entropy_forward")(x, t, None, -100, 0.0, 0.0, "mean", None, False),
    ):
        with pytest.raises(AssertionError, match=r"in \[0, 8\).*got 8: it is out of bounds") as raised:
            call()
        assert isinstance(raised.value, ArgumentError)


def test_float64_is_an_error_that_says_so() -> None:
    """Liger computes most of it in float32."""
    x, w = torch.randn(3, 8).double(), torch.randn(8).double()
    for call in (
        lambda: ours("LigerRMSNormFunction").apply(x, w, 1e-6),
        lambda: ours("LigerCrossEntropyFunction").apply(x, torch.tensor([1, 2, 3]), None),
        lambda: ours("LigerSiLUMulFunction").apply(x, x),
    ):
        with pytest.raises(ArgumentTypeError, match="must be bfloat16, float16, float32, got float64"):
            call()


def within(got: Tensor, exact: Tensor, atol: float, rtol: float) -> bool:
    return bool(torch.allclose(got.double(), exact, atol=atol, rtol=rtol))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("casting_mode", ["llama", "gemma"])
@pytest.mark.parametrize("shape", [(2, 128, 512), (5, 123, 123)], ids=str)
def test_sums_of_a_modulated_norm(shape: tuple[int, ...], casting_mode: str, device: str) -> None:
    """Liger and the plain torch that its test compares with round each product to bfloat16 before they sum it; ours are
    float32 until the sum. With the limits of Liger's test (0.1 and 2%), ours hold against float64 and that torch
    doesn't, where so many rows are summed: against it they can't hold either."""
    torch.manual_seed(0)
    offset = 1.0 if casting_mode == "gemma" else 0.0
    x, dy = (torch.randn(shape).bfloat16().to(device) for _ in range(2))
    scale, shift = (torch.randn(shape[-1]).mul(0.1).bfloat16().to(device) for _ in range(2))
    weight = torch.ones(shape[-1], device=device).bfloat16()

    def in_torch(dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = s, b, w = tuple(t.to(dtype).requires_grad_() for t in (scale, shift, weight))
        wide = x.to(torch.promote_types(dtype, torch.float32))
        normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        if casting_mode == "llama":
            normal = normal.to(dtype) * (offset + w)
        else:
            normal = (normal * (offset + w.to(wide.dtype))).to(dtype)
        return torch.autograd.grad(normal * (1 + s) + b, leaves, dy.to(dtype))

    leaves = s, b, w = tuple(t.clone().requires_grad_() for t in (scale, shift, weight))
    y = ours("LigerModulatedRMSNormFunction").apply(x, w, s, b, 1e-6, offset, casting_mode)
    got = torch.autograd.grad(y, leaves, dy)
    exact, rounded = in_torch(torch.float64), in_torch(torch.bfloat16)
    assert all(within(g, e, 0.1, 0.02) for g, e in zip(got, exact, strict=True))
    assert not all(within(r, e, 0.1, 0.02) for r, e in zip(rounded, exact, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "act"), [("LigerSiLUMulFunction", F.silu), ("LigerGELUMulFunction", gelu)])
def test_a_gated_activation_is_rounded_once(name: str, act: Any, device: str) -> None:
    """Liger rounds the activation to bfloat16 before it multiplies, as Transformers does: two roundings, so that some
    elements differ from ours by one unit in the last place."""
    torch.manual_seed(0)
    gate, up = (torch.randn(64, 512, device=device).bfloat16() for _ in range(2))
    exact = act(gate.double()) * up.double()

    def error(y: Tensor) -> float:
        return float(((y.double() - exact).abs() / exact.abs()).max())

    once, twice = ours(name).apply(gate, up), act(gate.float()).bfloat16() * up
    assert error(once) <= 1.05 * 2.0**-8 < error(twice) <= 2.05 * 2.0**-8
    assert float((once != twice).float().mean()) > 0.1


@pytest.mark.parametrize("width", [41, 42])
def test_rotary_embedding_of_an_odd_head_dimension(width: int) -> None:
    """Liger's kernel turns 20 pairs of 41 columns and leaves the last one."""
    torch.manual_seed(0)
    q, k = randn(2, 3, 5, 41), randn(2, 2, 5, 41)
    cos, sin = torch.randn(1, 5, width), torch.randn(1, 5, width)

    def turned(x: Tensor) -> Tensor:
        a, b, last = x[..., :20], x[..., 20:40], x[..., 40:]
        c, s = cos[:, None, :, :20], sin[:, None, :, :20]
        return torch.cat((a * c - b * s, b * c + a * s, last), -1)

    got = ours("LigerRopeFunction").apply(q, k, cos, sin)
    for a, x in zip(got, (q, k), strict=True):
        torch.testing.assert_close(a, turned(x))
    want = torch.autograd.grad([turned(q).square().sum(), turned(k).square().sum()], (q, k))
    torch.testing.assert_close(torch.autograd.grad([t.square().sum() for t in got], (q, k)), want)
    dq, dk, c, s = ours("rope_forward")(q.detach(), k.detach(), cos, sin)
    torch.testing.assert_close((dq, dk), tuple(t.detach() for t in got))
    back = ours("rope_backward")(2 * dq, 2 * dk, c, s)
    torch.testing.assert_close(back, want)


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
