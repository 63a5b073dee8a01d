"""merge_attention_states: its reference, the device code on Triton's interpreter, the AMD binaries on the emulator, the
binaries on a GPU."""

from __future__ import annotations

import pytest
import torch

import liger_aot
from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.decoding.merge_attention_states import MergeAttentionStates
from tests.conftest import built_pack
from tests.emulator.emulated_cases import BY_FORM
from tests.harness.drivers import EmulatorDriver, InterpreterDriver, bound_op
from tests.harness.op_gpu_tests import installed
from tests.harness.tolerances import REFERENCE
from tests.ops.decoding.merge_cases import BF16, FP16, FP32, SMALL, Problem, check, errors

OP = liger_aot.load("merge_attention_states")
poisoned = pytest.mark.usefixtures("poisoned")  # memory that nobody has written to holds NaN


@pytest.mark.parametrize("seed", range(len(SMALL)))
def test_reference(seed: int) -> None:
    check(OP, SMALL[seed], REFERENCE, seed=seed)


def test_states_without_keys() -> None:
    """Either, or both; positive infinity counts as negative. A logarithm that is NaN gives NaN."""
    inf, nan = torch.inf, torch.nan
    a, b = torch.full((1, 6, 2), 3.0), torch.full((1, 6, 2), 5.0)
    a[:, 0] = nan
    lse_a = torch.tensor([[-inf], [1.0], [-inf], [inf], [nan], [2.0]])
    lse_b = torch.tensor([[1.0], [inf], [-inf], [inf], [0.0], [2.0]])
    out, lse = OP(a, lse_a, b, lse_b, return_lse=True)
    assert out[0, :4].tolist() == [[5, 5], [3, 3], [0, 0], [0, 0]] and out[0, 4].isnan().all()
    assert lse[:4, 0].tolist() == [1, 1, -inf, -inf] and lse[4].isnan().all()
    assert out[0, 5].tolist() == [4, 4] and abs(float(lse[5]) - 2 - 0.6931472) < 1e-6


def test_merges_attention() -> None:
    """To the first and the last keys: what attention to all of them gives."""
    attention = liger_aot.load("flash_attention")
    q, k, v = (torch.randn(2, n, 3, 16) for n in (4, 11, 11))
    whole, lse = attention(q, k, v, return_lse=True)
    (a, lse_a), (b, lse_b) = (
        attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(7), slice(7, 11))
    )
    merged, merged_lse = OP(a, lse_a, b, lse_b, return_lse=True)
    torch.testing.assert_close(merged, whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged_lse, lse, rtol=1e-5, atol=1e-5)


def test_refused() -> None:
    a, lse_a, b, lse_b = Problem(4, 2, 16, FP32).tensors()
    for bad, words, error in (
        ((a, lse_a, b[:3], lse_b), "out_b must be", ArgumentError),
        ((a[0], lse_a, b[0], lse_b), "out_a must be", ArgumentError),
        ((a, lse_a.T, b, lse_b), "lse_a must be of shape", ArgumentError),
        ((a, lse_a, b, lse_b[None]), "lse_b must be of shape", ArgumentError),
        ((a, lse_a, b.half(), lse_b), "out_b must be of out_a's dtype", ArgumentTypeError),
        ((a, lse_a.half(), b, lse_b), "lse_a must be float32", ArgumentTypeError),
        ((a.mT, lse_a, b.mT, lse_b), "out_a must be", ArgumentError),
        ((a.requires_grad_(), lse_a, b, lse_b), "a gradient is needed", ArgumentError),
    ):
        with pytest.raises(error, match=f"merge_attention_states: {words}"):
            OP(*bad)


@poisoned
@pytest.mark.interpreter
@pytest.mark.filterwarnings(
    "ignore:(overflow|underflow|invalid value|divide by zero) encountered", "ignore:All-NaN"
)
@pytest.mark.parametrize("arch", ["sm90", pytest.param("gfx942", marks=pytest.mark.slow)])
def test_interpreted(arch: str) -> None:
    pack = built_pack(arch)
    for seed, problem in enumerate(SMALL):
        check(
            bound_op(MergeAttentionStates, pack, InterpreterDriver), problem, dict(pack.tolerance), seed=seed
        )


@poisoned
@pytest.mark.parametrize("arch", BY_FORM)
def test_some_binaries_on_the_emulator(arch: str) -> None:
    pack = built_pack(arch)
    for seed in (0, 3, 6):
        op = bound_op(MergeAttentionStates, pack, EmulatorDriver)
        check(op, SMALL[seed], dict(pack.tolerance), seed=seed)


@poisoned
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gfx942", "gfx90a"])
def test_every_binary_on_the_emulator(arch: str) -> None:
    pack = built_pack(arch)
    op = bound_op(MergeAttentionStates, pack, EmulatorDriver)
    for seed, problem in enumerate(SMALL):
        check(op, problem, dict(pack.tolerance), seed=seed)
    executed = {v for on in op._own.bound.values() for v in on._loaded}
    assert executed == set(pack.op("merge_attention_states").variants)


# ---- on a GPU ----


@poisoned
@pytest.mark.gpu
def test_on_a_gpu() -> None:
    OP.preload()
    more = [
        Problem(3000, 32, 128),
        Problem(777, 16, 512, FP16, packed=True),
        Problem(100, 8, 72, FP32, batch=3, shift=1),
    ]
    for seed, problem in enumerate((*SMALL, *more)):
        check(OP, problem, dict(installed().tolerance), seed=seed, device="cuda")


@pytest.mark.gpu
def test_past_two_to_the_31() -> None:
    """The last tokens are those of a call with them alone."""
    tokens = (1 << 31) // (32 * 128) + 40
    a, b = (torch.empty(tokens, 32, 128, device="cuda", dtype=BF16).normal_() for _ in range(2))
    lse_a, lse_b = (torch.randn(32, tokens, device="cuda") for _ in range(2))
    out, lse = OP(a, lse_a, b, lse_b, return_lse=True)
    few, few_lse = OP(a[-16:], lse_a[:, -16:], b[-16:], lse_b[:, -16:], return_lse=True)
    assert torch.equal(out[-16:], few) and torch.equal(lse[:, -16:], few_lse)


@pytest.mark.gpu
def test_cuda_graph() -> None:
    OP.preload()
    problem = Problem(37, 8, 128, FP16)
    tensors = problem.tensors(0, "cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        OP(*tensors)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = OP(*tensors, return_lse=True)
    for seed in (1, 2):
        for to, new in zip(tensors, problem.tensors(seed, "cuda"), strict=True):
            to.copy_(new)
        graph.replay()
        assert max(errors(out, lse, tensors, dict(installed().tolerance))) <= 1


@pytest.mark.gpu
def test_compiled_on_a_gpu() -> None:
    tensors = Problem(37, 8, 128).tensors(0, "cuda")
    torch.compiler.reset()
    assert torch.equal(torch.compile(lambda *t: OP(*t), fullgraph=True)(*tensors), OP(*tensors))
