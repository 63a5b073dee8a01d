"""RMSNorm without a GPU: the reference, bad input, the interpreter, and the AMD binaries on the emulator."""

from __future__ import annotations

import pytest
import torch

import liger_aot
from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.norms.rmsnorm import RMSNorm, reference, reference_backward
from liger_aot.ops.torch_library import register_all
from tests.conftest import built_pack
from tests.harness.drivers import EmulatorDriver, InterpreterDriver, bound_op
from tests.harness.op_cases import form_of
from tests.harness.tolerances import worst
from tests.ops.norms.rmsnorm_cases import BF16, DTYPES, EDGES, FP16, FP32, check, form_cases, table_cases

# Beyond these a case takes more than a second or two; the GPU's tests have the longer ones.
LONGEST_EMULATED = 5000
LONGEST_INTERPRETED = 20480


def driven(arch: str, driver: type) -> RMSNorm:
    op = bound_op(RMSNorm, built_pack(arch), driver)
    assert isinstance(op, RMSNorm)
    return op


@pytest.mark.interpreter
@pytest.mark.parametrize("arch", ["sm90", "gfx942"])
@pytest.mark.usefixtures("poisoned")
def test_every_form_on_the_interpreter(arch: str) -> None:
    """Programs that wait for each other run as threads."""
    op, pack = driven(arch, InterpreterDriver), built_pack(arch)
    manifest = pack.op("rmsnorm")
    for seed, case in enumerate(EDGES + form_cases(manifest)):
        check(op, case, pack.tolerance, seed)
    loaded = {form_of(v) for on in op._own.bound.values() for v in on._loaded}
    assert loaded == set(map(form_of, manifest.variants))


@pytest.mark.interpreter
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm90", "gfx942"])
@pytest.mark.usefixtures("poisoned")
def test_every_row_on_the_interpreter(arch: str) -> None:
    """Every row of the tables, every dtype, both variants."""
    op, allowed = driven(arch, InterpreterDriver), built_pack(arch).tolerance
    for seed, case in enumerate(table_cases(built_pack(arch).op("rmsnorm"), LONGEST_INTERPRETED)):
        check(op, case, allowed, seed)


@pytest.mark.usefixtures("poisoned")
def test_every_form_on_the_emulator() -> None:
    """The pack's own machine code, executed in software."""
    op, pack = driven("gfx942", EmulatorDriver), built_pack("gfx942")
    manifest = pack.op("rmsnorm")
    for seed, case in enumerate([EDGES[8], *form_cases(manifest)]):
        check(op, case, pack.tolerance, seed)
    loaded = {form_of(v) for on in op._own.bound.values() for v in on._loaded}
    assert loaded == set(map(form_of, manifest.variants))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gfx90a", "gfx942"])
@pytest.mark.usefixtures("poisoned")
def test_every_row_on_the_emulator(arch: str) -> None:
    allowed = built_pack(arch).tolerance
    op = driven(arch, EmulatorDriver)
    for seed, case in enumerate(EDGES + table_cases(built_pack(arch).op("rmsnorm"), LONGEST_EMULATED)):
        check(op, case, allowed, seed)


@pytest.mark.parametrize("casting_mode", ["llama", "gemma", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_is_the_formula(dtype: torch.dtype, casting_mode: str) -> None:
    x = torch.randn(6, 50).to(dtype)
    weight = torch.randn(50).to(dtype)
    y, rstd = reference(x, weight, eps=1e-5, offset=1.0, casting_mode=casting_mode)
    rms = x.double().square().mean(-1, keepdim=True).add(1e-5).sqrt()
    exact = x.double() / rms * (1.0 + weight.double())
    allowed = {"bf16": 1.05, "fp16": 1.05, "fp32": 32.0}
    assert worst(y, exact, allowed, roundings=2 if casting_mode == "llama" else 1) <= 1
    assert worst(rstd, 1 / rms[:, 0], allowed) <= 1
    assert y.dtype == dtype


def test_reference_backward_is_the_derivative() -> None:
    x = torch.randn(5, 12, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(12, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(5, 12, dtype=torch.float64)
    y, rstd = reference(x, weight, offset=0.3)
    exact = torch.autograd.grad(y, (x, weight), dy)
    got = reference_backward(dy, x.detach(), weight.detach(), rstd.detach(), offset=0.3)
    for value, wanted in zip(got, exact, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)


def test_cpu_tensors_take_the_reference() -> None:
    op = liger_aot.load("rmsnorm")
    x = torch.randn(2, 3, 40, dtype=BF16, requires_grad=True)
    weight = torch.randn(40, dtype=FP32, requires_grad=True)
    y = op(x, weight, eps=1e-5)
    assert torch.equal(y, reference(x, weight, eps=1e-5)[0])
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype == BF16 and x.grad.shape == x.shape
    assert weight.grad is not None and weight.grad.dtype == FP32
    with torch.no_grad():
        out = torch.empty_like(x)
        assert op(x, weight, eps=1e-5, out=out) is out
        assert torch.equal(out, y)


@pytest.mark.parametrize("shape", [(0, 16), (4, 0), (0, 0), (2, 0, 8)])
def test_empty(shape: tuple[int, ...]) -> None:
    op = liger_aot.load("rmsnorm")
    x = torch.empty(shape, requires_grad=True)
    weight = torch.ones(shape[-1], requires_grad=True)
    y = op(x, weight)
    assert y.shape == shape
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == shape
    assert weight.grad is not None and torch.equal(weight.grad, torch.zeros(shape[-1]))


def test_frozen_arguments_get_no_gradient() -> None:
    op = liger_aot.load("rmsnorm")
    x, weight = torch.randn(3, 8), torch.randn(8, requires_grad=True)
    op(x, weight).sum().backward()
    assert weight.grad is not None
    x2 = torch.randn(3, 8, requires_grad=True)
    op(x2, weight.detach()).sum().backward()
    assert x2.grad is not None


X = torch.ones(2, 8)
BAD = {
    "x is no tensor": (([1.0],), {}, ArgumentTypeError, "x must be a torch.Tensor, got list"),
    "x of a wrong dtype": (
        (X.int(),),
        {},
        ArgumentTypeError,
        "x must be bfloat16, float16, float32, got int32",
    ),
    "x a scalar": ((torch.tensor(1.0),), {}, ArgumentError, "at least one dimension"),
    "weight is no tensor": ((X, 3.0), {}, ArgumentTypeError, "weight must be a torch.Tensor, got float"),
    "weight too long": ((X, torch.ones(9)), {}, ArgumentError, r"shape \(8,\).*got shape \(9,\)"),
    "weight 2-D": ((X, torch.ones(8, 1)), {}, ArgumentError, "weight must be contiguous of shape"),
    "weight strided": ((X, torch.ones(16)[::2]), {}, ArgumentError, "weight must be contiguous"),
    "weight of another dtype": (
        (X, torch.ones(8, dtype=FP16)),
        {},
        ArgumentTypeError,
        "x's dtype.*or float32",
    ),
    "weight elsewhere": ((X, torch.ones(8, device="meta")), {}, ArgumentError, "weight is on meta, x on cpu"),
    "unknown mode": (
        (X,),
        {"casting_mode": "mistral"},
        ArgumentError,
        "one of llama, gemma, none; got 'mistral'",
    ),
    "out of another shape": ((X,), {"out": torch.ones(2, 9)}, ArgumentError, "out must be of x's dtype"),
    "out of another dtype": (
        (X,),
        {"out": torch.ones(2, 8, dtype=BF16)},
        ArgumentError,
        "out must be of x's dtype",
    ),
    "out with a gradient": (
        (torch.ones(2, 8, requires_grad=True),),
        {"out": torch.ones(2, 8)},
        ArgumentError,
        "a gradient is needed",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    arguments, settings, error, text = BAD[name]
    with pytest.raises(error, match=text):
        liger_aot.load("rmsnorm")(*arguments, **settings)


def test_overlapping_out() -> None:
    op = liger_aot.load("rmsnorm")
    buffer = torch.randn(2 * 16)
    with pytest.raises(ArgumentError, match="out overlaps x"):
        op(buffer[:16].view(2, 8), out=buffer[4:20].view(2, 8))
    both = torch.randn(4, 16)
    left, right = both[:, :8], both[:, 8:]
    expected = op(left)
    assert torch.equal(op(left, out=right), expected), "columns beside each other don't overlap"
    assert torch.equal(op(left, out=left), expected), "x itself is allowed"


def test_compile_is_one_graph() -> None:
    op = liger_aot.load("rmsnorm")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(24))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return op(x * 2, self.weight, eps=1e-5) + 1

    model, x = Model(), torch.randn(3, 5, 24, requires_grad=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for run in (model, compiled):
        run(x).square().sum().backward()
    expected = torch.autograd.grad(model(x).square().sum(), (x, model.weight))
    got = torch.autograd.grad(compiled(x).square().sum(), (x, model.weight))
    for value, wanted in zip(got, expected, strict=True):
        assert torch.equal(value, wanted)
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))


def test_registration() -> None:
    x, weight = torch.randn(3, 24, requires_grad=True), torch.randn(24, requires_grad=True)
    register_all()
    torch.library.opcheck(torch.ops.liger_aot.rmsnorm_forward.default, (x, weight, 1e-6, 0.0, "llama", True))
    y, rstd = torch.ops.liger_aot.rmsnorm_forward(x.detach(), weight.detach(), 1e-6, 0.0, "llama", True)
    arguments = ([y], [x.detach(), weight.detach(), rstd], 1e-6, 0.0, "llama", [True, True])
    torch.library.opcheck(torch.ops.liger_aot.rmsnorm_backward.default, arguments)
