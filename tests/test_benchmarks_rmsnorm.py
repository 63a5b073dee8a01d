"""RMSNorm's benchmark without a GPU: its cases, its fp64 references, what it hands to the tuner."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks import rmsnorm, runner, workload

CPU = torch.device("cpu")


def test_bytes_of_a_case() -> None:
    forward = workload.Case("forward", torch.bfloat16, 2**16, 4096)
    backward = workload.Case("backward", torch.bfloat16, 2**15, 4096)
    assert rmsnorm.moved_bytes(forward) == 2**30
    assert rmsnorm.moved_bytes(backward) == 3 * 2**28
    assert rmsnorm.moved_bytes(dataclasses.replace(backward, dtype=torch.float32)) == 3 * 2**29


def test_every_case_moves_the_bytes_of_its_sweep() -> None:
    cases = rmsnorm.cases(quick=False)
    for case in cases:
        whole = {"forward": 2**30, "backward": 3 * 2**28}[case.direction]
        row = rmsnorm.moved_bytes(dataclasses.replace(case, rows=1))
        assert whole - row < rmsnorm.moved_bytes(case) <= whole
    lengths = {
        (direction, dtype): [c.n for c in cases if (c.direction, c.dtype_name) == (direction, dtype)]
        for direction, dtype in {(c.direction, c.dtype_name) for c in cases}
    }
    assert lengths["forward", "bfloat16"] == list(rmsnorm.NS)
    assert max(lengths["forward", "float32"]) == max(lengths["backward", "bfloat16"]) == 32768
    assert set(rmsnorm.cases(quick=True)) < set(cases)


class RawOp:
    """The raw paths of the op in fp64 torch, rounded to the dtype of x, through autograd for the backward."""

    def forward(self, x, weight=None, *, eps, offset, casting_mode, out=None, store_rstd=True):
        rstd = torch.rsqrt(x.double().square().mean(-1) + eps)
        return (x.double() * rstd[:, None] * (weight.double() + offset)).to(x.dtype), rstd.float()

    def backward(self, dy, x, weight, rstd, *, offset=0.0, need_dx=True, need_dweight=True):
        wide_x, wide_weight = x.double().requires_grad_(), weight.double().requires_grad_()
        with torch.enable_grad():
            y = torch.nn.functional.rms_norm(wide_x, wide_weight.shape, wide_weight, rmsnorm.EPS)
        dx, dweight = torch.autograd.grad(y, (wide_x, wide_weight), dy.double())
        expected = torch.rsqrt(x.double().square().mean(-1) + rmsnorm.EPS)
        torch.testing.assert_close(rstd.double(), expected, rtol=1e-6, atol=0)
        return dx.to(x.dtype), dweight.to(weight.dtype)


@pytest.mark.parametrize("kernel", ["rmsnorm_forward", "rmsnorm_backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "elements"), [(96, 96 * 300 + 17), (1, 5), (130, 131)])
def test_workload_agrees_with_torch(kernel: str, dtype: torch.dtype, n: int, elements: int) -> None:
    load = rmsnorm.workload(kernel, n, dtype, elements, CPU, seed=3)
    assert load.rows == elements // n and load.n == n
    selected = load.select(load.run(RawOp()))
    references = load.reference()
    assert all(reference.dtype == torch.float64 for reference in references)
    assert workload.largest_error(selected, references) < workload.TOLERANCE[dtype]


def test_backward_reference_sums_all_rows_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    load = rmsnorm.workload("rmsnorm_backward", 64, torch.float32, 64 * 100, CPU, seed=1)
    whole = load.reference()
    monkeypatch.setattr(rmsnorm, "FP64_CHUNK_ELEMENTS", 64 * 7)
    for one, other in zip(load.reference(), whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_workload_inputs_depend_on_the_seed_alone() -> None:
    def first(seed: int) -> torch.Tensor:
        return rmsnorm.workload("rmsnorm_forward", 32, torch.bfloat16, 3200, CPU, seed).run(RawOp())[0]

    assert torch.equal(first(5), first(5))
    assert not torch.equal(first(5), first(6))


def test_workload_refuses_what_it_cannot_make() -> None:
    with pytest.raises(ValueError, match="rmsnorm_backward"):
        rmsnorm.workload("rmsnorm_sideways", 32, torch.bfloat16, 3200, CPU, 0)
    with pytest.raises(ValueError, match="row of 4096"):
        rmsnorm.workload("rmsnorm_forward", 4096, torch.bfloat16, 100, CPU, 0)


def test_checked_rows_hold_both_ends() -> None:
    rows = workload.checked_rows(10_000, CPU, seed=0)
    assert len(rows.unique()) == len(rows) == workload.CHECKED_ROWS
    assert rows[0] == 0 and rows[-1] == 9999
    assert workload.checked_rows(5, CPU, seed=0).tolist() == [0, 1, 2, 3, 4]


def test_errors_are_seen() -> None:
    reference = torch.ones(8, dtype=torch.float64)
    assert workload.relative_error(torch.ones(8), reference) == 0
    assert workload.relative_error(torch.full((8,), 1.1), reference) == pytest.approx(0.1, rel=1e-5)
    assert workload.relative_error(torch.tensor([1.0] * 7 + [float("nan")]), reference) == float("inf")
    with pytest.raises(ValueError, match="its reference"):
        workload.largest_error([torch.ones(1, 8)], [reference])
    with pytest.raises(ValueError, match="references"):
        workload.largest_error([torch.ones(8)], [reference, reference])


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_problem_gives_torch_right_and_notices_wrong_results(direction: str) -> None:
    case = workload.Case(direction, torch.bfloat16, 200, 256)
    problem = rmsnorm.problem(case, CPU, sets=3, seed=0)
    calls = problem.calls("torch")
    assert len(calls) == 3
    results = calls[0].run()
    assert problem.check(results) < workload.TOLERANCE[torch.bfloat16]
    assert problem.check(calls[1].run()) > 0.5
    results[-1][-1] = float("nan")
    assert problem.check(results) == float("inf")


def test_a_provider_that_overwrites_dy_gets_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return torch.nn.functional.rms_norm(x, weight.shape, weight, rmsnorm.EPS)

        @staticmethod
        def backward(ctx, dy):
            dx, dweight = RawOp().backward(dy, *ctx.saved_tensors, rmsnorm._rstd(ctx.saved_tensors[0]))
            return dy.copy_(dx), dweight

    monkeypatch.setitem(rmsnorm._FUNCTIONS, "liger", lambda: InPlace.apply)
    case = workload.Case("backward", torch.float32, 32, 64)
    problem = rmsnorm.problem(case, CPU, sets=2, seed=0)
    with torch.enable_grad():
        call = problem.calls("liger")[0]
        for _ in range(2):
            call.restore()
            assert problem.check(call.run()) < 1e-5
        assert problem.check(call.run()) > 1e-2


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rmsnorm._FUNCTIONS, "torch", lambda: lambda x, weight: x * weight)
    case = workload.Case("forward", torch.bfloat16, 100, 16)
    problem = rmsnorm.problem(case, CPU, sets=1, seed=0)
    with pytest.raises(ArithmeticError, match="relative error"):
        runner._prepare(problem, "torch", case)


def test_host_calls_of_torch_run() -> None:
    calls = rmsnorm.host_calls("torch", CPU)
    assert set(calls) == {"host_forward", "host_forward_backward", "host_empty_like"}
    dx, dweight = calls["host_forward_backward"]()
    assert dx.shape == rmsnorm.SMALL and dweight.shape == rmsnorm.SMALL[1:]
