"""Every op's benchmark without a GPU: its inputs, its providers, its bytes, its fp64 references, and what it hands to
the tuner."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import liger_aot
from benchmarks import op_entry, reference, runner, workload
from benchmarks.activations import swiglu
from benchmarks.norms import rmsnorm
from benchmarks.softmax import softmax
from benchmarks.tuning.spaces import SPACES
from benchmarks.workload import Case
from tests.benchmarks.test_tuning_spaces import DECLARED

CPU = torch.device("cpu")
BF16, FP32 = torch.bfloat16, torch.float32
OPS = op_entry.modules()

# Small shapes of the kind that an op's points have; (rows, n) where none is named.
SMALL = {
    "attention_residuals": (3, 9, 48),
    "mhc_coefficients": (9, 4, 24),
    "mhc_post": (9, 4, 24),
    "mhc_pre": (9, 4, 24),
    "embedding": (50, 30, 16),
    "groupnorm": (3, 64, 4, 5),
    "grpo_loss": (3, 5, 48),
    "modulated_rmsnorm": (3, 7, 32),
    "neighborhood_attention": (70, 2, 30, 16),
    "rope": (2, 5, 4, 2, 128),
    "rope_multimodal": (1, 5, 4, 2, 16),
    "rope_llama4": (2, 5, 4, 2, 16),
}


def variants(op: str) -> list[str]:
    return list(dict.fromkeys(case.variant for case in op_entry.load(op).points))


KINDS = [(op, variant) for op in OPS for variant in variants(op)]
WAYS = [
    way for op in OPS for way in dict.fromkeys((op, c.variant, c.direction) for c in op_entry.load(op).points)
]


def small_case(op: str, direction: str, dtype: torch.dtype = BF16, variant: str = "") -> Case:
    return Case(direction, dtype, SMALL.get(op, (70, 48)), variant)


def problem_of(case: Case, op: str, sets: int = 2) -> workload.Problem:
    return op_entry.load(op).problem(case, CPU, sets, seed=0)


@pytest.mark.parametrize(("op", "variant", "direction"), WAYS)
def test_providers_agree_with_the_reference(op: str, variant: str, direction: str) -> None:
    for dtype in (BF16, FP32):
        case = small_case(op, direction, dtype, variant)
        with torch.set_grad_enabled(direction == "backward"):
            problem = problem_of(case, op)
            for provider in ("liger_aot", "torch"):
                if not op_entry.load(op).offers(provider, variant):
                    continue
                calls = problem.calls(provider)
                assert len(calls) == 2
                results = calls[0].run()
                assert problem.check(results) < workload.TOLERANCE[dtype], provider
                assert problem.check(calls[1].run()) > 0.2  # of other inputs
                for result in results:
                    result.data[(-1,) * result.dim()] = float("nan")
                assert problem.check(results) == float("inf")


@pytest.mark.parametrize(("op", "variant"), KINDS)
def test_formula_is_one_graph_and_right(op: str, variant: str) -> None:
    one = op_entry.load(op)
    torch._dynamo.reset()
    compiled = torch.compile(one.formula(variant), fullgraph=True, dynamic=False, backend="eager")
    case = small_case(op, "forward", FP32, variant)
    problem = problem_of(case, op)
    random = op_entry.Random(FP32, CPU, torch.Generator().manual_seed(0))
    results = compiled(*one.inputs(case, random))
    assert problem.check(results if isinstance(results, tuple) else (results,)) < 1e-5


TUNED = [k for k, space in SPACES.items() if space.workloads is None]


@pytest.mark.parametrize("kernel", TUNED)
def test_every_tuned_kernel_has_a_workload(kernel: str) -> None:
    op = DECLARED[kernel]
    n = 128 if op.startswith("rope") else 64
    works = op_entry.load(op).workloads(kernel, n, BF16, 2**16, CPU, seed=3)
    assert works[0].timed and not any(work.timed for work in works[1:])
    for work in works:
        with torch.set_grad_enabled(work.grad):
            results = work.call(liger_aot.load(op)).run()
        assert work.error(results) < workload.TOLERANCE[BF16] and work.bytes > 0 and work.point
        for result in results:
            result.data[(-1,) * result.dim()] = float("nan")
        assert work.error(results) == float("inf")


@pytest.mark.parametrize("op", OPS)
def test_small_calls_run(op: str) -> None:
    one = op_entry.load(op)
    inputs = one.small_inputs(CPU)
    assert any(x.requires_grad for x in inputs)
    for provider in ("liger_aot", "torch"):
        calls = one.host_calls(provider, CPU)
        assert {"host_forward", "host_forward_backward"} <= set(calls)
        gradients = calls["host_forward_backward"]()
        assert [g.shape for g in gradients] == [x.shape for x in inputs if x.requires_grad]
        with torch.no_grad():
            calls["host_forward"]()


@pytest.mark.parametrize("op", OPS)
def test_points_are_distinct_and_fewer_ones_among_them(op: str) -> None:
    one = op_entry.load(op)
    cases = one.cases()
    assert len(set(cases)) == len(cases) and set(cases) == set(one.points)
    assert {case.direction for case in cases} == {"forward", "backward"}
    kinds = {(c.direction, c.dtype, c.variant) for c in cases}
    for most in (1, 3):
        fewer = one.cases(most)
        assert set(fewer) <= set(cases)
        for kind in kinds:
            whole, some = (
                [c for c in of if (c.direction, c.dtype, c.variant) == kind] for of in (cases, fewer)
            )
            assert len(some) == min(most, len(whole))
            assert most == 1 or (some[0], some[-1]) == (whole[0], whole[-1])
    named = [cases[0].point, cases[-1].point]
    assert {case.point for case in one.cases(1, named)} == set(named)
    # No input set is larger than a few GiB: two of them, the results and fp64 chunks fit a GPU.
    assert all(2**25 <= one.moved_bytes(case) <= 2**33 for case in cases)


N, ROWS = 4096, 1000
ELEMENTS = ROWS * N
Q_AND_K = 2 * 9 * (8 + 2) * 64


# Elements or bytes written out by hand, for bf16: what the formula has to read, plus what it has to write.
@pytest.mark.parametrize(
    ("op", "shape", "variant", "forward", "backward"),
    [
        ("rmsnorm", (ROWS, N), "", 2 * (2 * ELEMENTS + N), 2 * (3 * ELEMENTS + 2 * N)),
        ("layernorm", (ROWS, N), "", 2 * (2 * ELEMENTS + 2 * N), 2 * (3 * ELEMENTS + 3 * N)),
        ("groupnorm", (5, 64, 4, 8), "", 2 * (2 * 10240 + 128), 2 * (3 * 10240 + 192)),
        ("groupnorm", (5, 64, 4, 8), "channels_last", 2 * (2 * 10240 + 128), 2 * (3 * 10240 + 192)),
        ("fused_add_rmsnorm", (ROWS, N), "", 2 * (4 * ELEMENTS + N), 2 * (4 * ELEMENTS + 2 * N)),
        ("modulated_rmsnorm", (5, 200, N), "", 2 * (2 * ELEMENTS + 10 * N), 2 * (3 * ELEMENTS + 15 * N)),
        ("swiglu", (ROWS, N), "", 6 * ELEMENTS, 10 * ELEMENTS),
        ("swiglu", (ROWS, N), "packed", 6 * ELEMENTS, 10 * ELEMENTS),
        ("geglu", (ROWS, N), "exact", 6 * ELEMENTS, 10 * ELEMENTS),
        ("geglu", (ROWS, N), "packed", 6 * ELEMENTS, 10 * ELEMENTS),
        ("relu_squared", (ROWS, N), "", 4 * ELEMENTS, 6 * ELEMENTS),
        ("softmax", (ROWS, N), "", 4 * ELEMENTS, 6 * ELEMENTS),
        ("log_softmax", (ROWS, N), "", 4 * ELEMENTS, 6 * ELEMENTS),
        ("sparsemax", (ROWS, N), "", 4 * ELEMENTS, 6 * ELEMENTS),
        ("dyt", (ROWS, N), "", 2 * (2 * ELEMENTS + 2 * N + 1), 2 * (3 * ELEMENTS + 3 * N + 2)),
        ("poly_norm", (ROWS, N), "", 2 * (2 * ELEMENTS + 4), 2 * (3 * ELEMENTS + 7)),
        ("rope", (2, 9, 8, 2, 64), "", 4 * Q_AND_K + 4 * 9 * 64, 4 * Q_AND_K + 4 * 9 * 64),
        ("rope", (2, 9, 8, 2, 128), "rotary 64", 8 * Q_AND_K + 4 * 9 * 64, 8 * Q_AND_K + 4 * 9 * 64),
        ("rope_multimodal", (2, 9, 8, 2, 64), "", 4 * Q_AND_K + 12 * 18 * 64, 4 * Q_AND_K + 12 * 18 * 64),
        ("rope_llama4", (2, 9, 8, 2, 64), "", 4 * Q_AND_K + 8 * 9 * 32, 4 * Q_AND_K + 8 * 9 * 32),
        ("embedding", (ROWS, 3000, N), "", 8 * ROWS + 4 * ELEMENTS, 8 * ROWS + 2 * (ELEMENTS + 3000 * N)),
        ("embedding", (ROWS, 100, N), "", 8 * ROWS + 2 * (ELEMENTS + 100 * N), 8 * ROWS + 2 * (ELEMENTS + 100 * N)),
        ("mhc_pre", (9, 4, N), "", 9 * (10 * N + 16), 9 * (18 * N + 32)),
        ("mhc_post", (9, 4, N), "", 9 * (18 * N + 80), 9 * (28 * N + 160)),
        (
            "mhc_coefficients",
            (9, 4, N),
            "",
            9 * (8 * N + 96) + 192 * N + 4 * 27,
            9 * (16 * N + 96) + 2 * (192 * N + 4 * 27),
        ),
        ("attention_residuals", (8, 9, N), "", 2 * N * (9 * 9 + 2), 2 * N * (9 * 17 + 4)),
    ],
)  # fmt: skip
def test_moved_bytes(op: str, shape: tuple[int, ...], variant: str, forward: int, backward: int) -> None:
    if op not in OPS:
        pytest.skip(f"{op} has no device code")
    one = op_entry.load(op)
    assert one.moved_bytes(Case("forward", BF16, shape, variant)) == forward
    assert one.moved_bytes(Case("backward", BF16, shape, variant)) == backward


def test_sweeps_keep_the_elements() -> None:
    for case in rmsnorm.ENTRY.points:
        elements = 2**28 if (case.direction, case.dtype) == ("forward", BF16) else 2**27
        rows, n = case.shape
        assert elements - n < rows * n <= elements
    lengths = [c.shape[1] for c in rmsnorm.ENTRY.points if (c.direction, c.dtype) == ("forward", BF16)]
    assert lengths == list(rmsnorm.NS)


# References ------------------------------------------------------------------------------------------------


def test_references_are_those_of_torch() -> None:
    """Independently of the op's own reference, in fp64: forward, gradients of rows, and sums over all rows."""
    case = Case("backward", FP32, (300, 64))
    arguments, grads = rmsnorm.ENTRY._inputs_and_grads(
        case, op_entry.Random(FP32, CPU, torch.Generator().manual_seed(2))
    )
    rows = torch.tensor([0, 17, 150, 299])
    found = reference.Reference(rmsnorm.ENTRY._public(case), arguments, grads, rmsnorm.ENTRY.shared)
    x, weight = (a.double().requires_grad_() for a in arguments)
    y = torch.nn.functional.rms_norm(x, weight.shape, weight, rmsnorm.EPS)
    dx, dweight = torch.autograd.grad(y, (x, weight), grads[0].double())
    torch.testing.assert_close(found.forward(rows)[0], y.detach()[rows], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.backward(rows, (0, 1)), (dx[rows], dweight), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("op", [op for op in OPS if op_entry.load(op).by_rows])
def test_chunks_make_no_difference(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, case = op_entry.load(op), small_case(op, "backward", FP32)
    random = op_entry.Random(FP32, CPU, torch.Generator().manual_seed(1))
    arguments, grads = one._inputs_and_grads(case, random)
    wanted, public = one.wanted(arguments), one._public(case)
    rows = workload.checked_rows(len(grads[0]), CPU, seed=0)

    def found() -> tuple[torch.Tensor, ...]:
        called = reference.Reference(public, arguments, grads, one.shared)
        return *called.forward(rows), *called.backward(rows, wanted)

    expected = found()
    monkeypatch.setattr(reference, "FP64_CHUNK_ELEMENTS", 100)
    torch.testing.assert_close(found(), expected, rtol=1e-12, atol=1e-12)


def test_checked_rows_hold_both_ends() -> None:
    rows = workload.checked_rows(10_000, CPU, seed=0)
    assert len(rows.unique()) == len(rows) == workload.CHECKED_ROWS
    assert rows[0] == 0 and rows[-1] == 9999
    assert workload.checked_rows(5, CPU, seed=0).tolist() == [0, 1, 2, 3, 4]


def test_errors_are_seen() -> None:
    exact = torch.ones(8, dtype=torch.float64)
    assert workload.relative_error(torch.ones(8), exact) == 0
    assert workload.relative_error(torch.full((8,), 1.1), exact) == pytest.approx(0.1, rel=1e-5)
    assert workload.relative_error(torch.tensor([1.0] * 7 + [float("nan")]), exact) == float("inf")
    with pytest.raises(ValueError, match="its reference"):
        workload.largest_error([torch.ones(1, 8)], [exact])
    with pytest.raises(ValueError, match="references"):
        workload.largest_error([torch.ones(8)], [exact, exact])


# The tuner's workloads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["rmsnorm_forward", "swiglu_backward"])
@pytest.mark.parametrize(("n", "elements"), [(96, 96 * 300 + 17), (1, 5), (130, 131)])
def test_workload_sizes(kernel: str, n: int, elements: int) -> None:
    op = kernel.partition("_")[0]
    work, *_ = op_entry.load(op).workloads(kernel, n, BF16, elements, CPU, seed=3)
    with torch.set_grad_enabled(work.grad):
        results = work.call(liger_aot.load(op)).run()
    assert results[0].shape == (elements // n, n)
    assert work.error(results) < workload.TOLERANCE[BF16]


def test_what_a_forward_keeps_for_the_backward_is_checked() -> None:
    timed, check = rmsnorm.ENTRY.workloads("rmsnorm_forward", 32, BF16, 3200, CPU, seed=1)
    assert timed.timed and not timed.grad and check.grad and not check.timed
    op = liger_aot.load("rmsnorm")
    assert [r.shape for r in check.call(op).run()] == [(100, 32), (32,)]
    wrong = check.call(op).run()
    wrong[0].mul_(1.1)
    assert check.error(wrong) == pytest.approx(0.1, rel=0.1)


def test_workload_inputs_depend_on_the_seed_alone() -> None:
    def first(seed: int) -> torch.Tensor:
        work, _ = rmsnorm.ENTRY.workloads("rmsnorm_forward", 32, BF16, 3200, CPU, seed)
        return work.call(liger_aot.load("rmsnorm")).run()[0]

    assert torch.equal(first(5), first(5))
    assert not torch.equal(first(5), first(6))


def test_workload_refuses_what_it_cannot_make() -> None:
    with pytest.raises(ValueError, match="rmsnorm_sideways"):
        rmsnorm.ENTRY.workloads("rmsnorm_sideways", 32, BF16, 3200, CPU, 0)
    with pytest.raises(ValueError, match="row of 4096"):
        rmsnorm.ENTRY.workloads("rmsnorm_forward", 4096, BF16, 100, CPU, 0)


# Providers -------------------------------------------------------------------------------------------------


class GradientInPlace(torch.autograd.Function):
    """Squared ReLU that writes dx into dy."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.relu(x).square()

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return dy.data.mul_(2 * torch.relu(x.data))


class InputInPlace(torch.autograd.Function):
    """SwiGLU that writes both gradients over what it has saved, which is its inputs, as Liger's does."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx, dy):
        gate, up = (t.data for t in ctx.saved_tensors)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        gate.copy_(dy * up * (silu * (1 - sigmoid) + sigmoid))
        up.copy_(dy * silu)
        return gate, up


@pytest.mark.parametrize(
    ("function", "op", "overwritten"),
    [
        (GradientInPlace, "relu_squared", op_entry.Overwritten(grads=True)),
        (InputInPlace, "swiglu", op_entry.Overwritten((0, 1))),
    ],
)
def test_a_provider_that_overwrites_gets_its_inputs_back(
    function: type[torch.autograd.Function],
    op: str,
    overwritten: op_entry.Overwritten,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = op_entry.load(op)
    monkeypatch.setattr(one, "liger", lambda variant: function.apply)
    monkeypatch.setattr(one, "overwritten", lambda provider, case: overwritten)
    with torch.enable_grad():
        problem = problem_of(Case("backward", FP32, (32, 64)), op)
        call = problem.calls("liger")[0]
        assert call.restore is not None
        for _ in range(2):
            runner._poison(runner._results(call))
            assert problem.check(runner._results(call)) < 1e-5
        assert problem.check(call.run()) > 1e-2  # as it is where nothing is restored
        monkeypatch.undo()
        assert problem.check(problem.calls("torch")[0].run()) < 1e-5


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rmsnorm.ENTRY, "eager", lambda variant: lambda x, weight: x * weight)
    case = Case("forward", BF16, (100, 16))
    with pytest.raises(ArithmeticError, match="relative error"):
        runner._prepare(problem_of(case, "rmsnorm"), "torch", case)


def test_what_liger_lacks_is_not_asked_of_it() -> None:
    assert swiglu.ENTRY.offers("liger", "packed")
    assert not softmax.ENTRY.offers("quack", "")
    geglu, log_softmax = op_entry.load("geglu"), op_entry.load("log_softmax")
    assert geglu.offers("liger", "") and not geglu.offers("liger", "exact")
    assert not log_softmax.offers("liger", "")


def test_inputs_that_do_not_fit_are_a_failure_of_each_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        L2_cache_size = 2**20

    def no_memory(*arguments: object, **keywords: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate too much")

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Device)
    monkeypatch.setattr(swiglu.ENTRY, "inputs", no_memory)
    case = dataclasses.replace(swiglu.ENTRY.points[-1], direction="forward")
    made = runner.device_measurements(
        "swiglu", swiglu.ENTRY, case, ["liger_aot", "torch", "quack"], CPU, runner.EFFORTS["quick"]
    )
    assert [(m.provider, m.status, m.variant) for m in made] == [
        ("liger_aot", "error", "packed"),
        ("torch", "error", "packed"),
    ]
    assert all("too much" in str(m.reason) for m in made)
