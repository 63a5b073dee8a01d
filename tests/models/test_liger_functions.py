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
from liger_aot.errors import ArgumentError
from liger_aot.liger.functions import COVERED
from tests.harness.process_groups import in_group
from tests.models.liger_cases import CASES, Case, grpo_arguments, labels, ours, randn, rms


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
    assert {case.name for case in CASES} == {
        name for name, (stands, _) in COVERED.items() if inspect.isclass(stands)
    }


@pytest.mark.parametrize("name", COVERED)
def test_signature(name: str) -> None:
    """Names, order and defaults of Liger's own arguments."""
    liger_aot.liger.uninstall()
    try:
        import liger_kernel.ops

        theirs = getattr(liger_kernel.ops, name, None) or getattr(liger_kernel.ops.grpo_loss, name)
    finally:
        liger_aot.liger.install()
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
