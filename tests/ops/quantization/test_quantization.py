"""The ops with 8-bit results: their reference, the device code on Triton's interpreter, the AMD binaries on the
emulator, the binaries on a GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_aot
from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.quantization import _codes
from liger_aot.ops.quantization._codes import E4M3, E4M3FNUZ, INT8
from liger_aot.ops.registry import module
from liger_aot.ops.torch_library import register
from liger_aot.runtime.manifest import OpManifest
from tests.conftest import built_pack
from tests.emulator.emulated_cases import AMD
from tests.harness.drivers import EmulatorDriver, InterpreterDriver, bound_op
from tests.harness.op_cases import form_of, sizes_of
from tests.harness.op_gpu_tests import installed
from tests.harness.recording import RecordingDriver
from tests.harness.tolerances import REFERENCE
from tests.ops.quantization.quantization_cases import (
    BF16,
    FP16,
    FP32,
    OPS,
    Problem,
    check,
    check_results,
    small,
)

FP8 = {"sm80": INT8, "sm90": E4M3, "gfx90a": INT8, "gfx942": E4M3FNUZ}
FP8 |= {"gfx950": E4M3, "gfx1100": INT8, "gfx1201": E4M3}
DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32, "fp8e4nv": E4M3, "fp8e4b8": E4M3FNUZ, "i8": INT8}
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|underflow|invalid value|divide by zero) encountered"
)
poisoned = pytest.mark.usefixtures("poisoned")  # memory that nobody has written to holds NaN


def bound(name: str, arch: str, driver: Any) -> Any:
    return bound_op(type(liger_aot.load(name)), built_pack(arch), driver)


# ---- the reference ----


@pytest.mark.parametrize("out", [E4M3, E4M3FNUZ])
@pytest.mark.parametrize("name", OPS)
def test_reference(name: str, out: torch.dtype) -> None:
    for seed, problem in enumerate(small(name, out)):
        check(liger_aot.load(name), problem, REFERENCE, seed=seed)


def test_what_is_defined_of_special_values() -> None:
    op = liger_aot.load("quantize")
    codes, scale = op(torch.zeros(2, 128))
    assert not codes.float().any() and torch.equal(scale, torch.full((2, 1), 1 / 512) / 448)
    codes, scale = op(torch.tensor([[math.nan, -448.0, 0.0, -0.0]]))
    assert scale.item() == 1.0 and codes.view(torch.uint8).tolist()[0][1:] == [0xFE, 0, 0x80]
    assert codes.float().isnan().tolist() == [[True, False, False, False]]
    codes, scale = op(torch.tensor([[math.inf, 5.0, -math.inf]]))
    assert scale.item() == math.inf and codes.float().nan_to_num(9.0).tolist() == [[9.0, 0.0, 9.0]]
    bounded, scale = op(torch.tensor([[math.inf, 448.0, -900.0]]), scale_ub=torch.tensor(448.0))
    assert scale.item() == 1.0 and bounded.float().tolist() == [[448.0, 448.0, -448.0]]
    codes, _ = op(
        torch.tensor([[math.nan, math.inf, 127.0, 0.5, 1.5]]), dtype=INT8, scale_ub=torch.tensor(127.0)
    )
    assert codes.tolist() == [[0, 127, 127, 0, 2]]
    ties = torch.tensor([1.0625, 1.1875, 17.0, 19.0, 2.0**-10, 3 * 2.0**-10])
    codes, given = op(ties, torch.tensor([1.0]), scheme="tensor")
    assert codes.float().tolist() == [1.0, 1.25, 16.0, 20.0, 0.0, 2.0**-8] and given.item() == 1.0
    powers = op(torch.tensor([[448.0], [449.0], [1e-30]]), ue8m0=True)[1]
    assert powers.flatten().tolist() == [1.0, 2.0, 2.0**-17]


def test_scales_are_given_back() -> None:
    """The caller's own tensor, and memory of TMA's shape."""
    x, scale = torch.randn(5, 256, dtype=BF16), torch.tensor(0.5)
    assert liger_aot.load("quantize")(x, scale, scheme="tensor")[1] is scale
    found = liger_aot.load("quantize")(x, scheme="group", scale_layout="tma_aligned")[1]
    assert found.shape == (5, 2) and found.stride() == (1, 8)


X, W = torch.ones(4, 256, dtype=BF16), torch.ones(256, dtype=BF16)
ONE = torch.ones(1)
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "an unknown scheme": (
        {"scheme": "row"},
        ArgumentError,
        "scheme must be one of tensor, token, group; got 'row'",
    ),
    "a dtype of other bits": (
        {"dtype": BF16},
        ArgumentTypeError,
        "dtype must be float8_e4m3fn, .* got bfloat16",
    ),
    "int8 by groups": ({"dtype": INT8, "scheme": "group"}, ArgumentError, "dtype int8 is for scheme 'token'"),
    "groups of 96": (
        {"scheme": "group", "group_size": 96},
        ArgumentError,
        "group_size must be 64 or 128, got 96",
    ),
    "a layout of one scale": (
        {"scale_layout": "column_major"},
        ArgumentError,
        "scale_layout 'column_major' is for scheme 'group'",
    ),
    "ue8m0 in int8": ({"ue8m0": True, "dtype": INT8}, ArgumentError, "ue8m0 is for fp8 scales"),
    "a scale by token": ({"scale": ONE}, ArgumentError, "scale is for scheme 'tensor'"),
    "a bound of a tensor": ({"scale_ub": ONE, "scheme": "tensor"}, ArgumentError, "scale_ub is for schemes"),
    "two scales": (
        {"scale": torch.ones(2), "scheme": "tensor"},
        ArgumentError,
        r"scale must have one .* \(2,\)",
    ),
    "a scale in bf16": (
        {"scale": W[:1], "scheme": "tensor"},
        ArgumentTypeError,
        "scale must be a dense float32",
    ),
    "a scale elsewhere": ({"scale": ONE.to("meta"), "scheme": "tensor"}, ArgumentError, "scale is on meta"),
    "no tensor": ({"scale_ub": 1.0}, ArgumentTypeError, "scale_ub must be a torch.Tensor, got float"),
}
SOURCES: Mapping[str, dict[str, Any]] = {
    "quantize": {"x": X},
    "rmsnorm_quantize": {"x": X, "weight": W},
    "fused_add_rmsnorm_quantize": {"x": X, "residual": X, "weight": W},
    "layernorm_quantize": {"x": X, "weight": W, "bias": W},
    "swiglu_quantize": {"gate": X, "up": X},
    "geglu_quantize": {"gate": X, "up": X},
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("name", OPS)
def test_bad_input(name: str, case: str) -> None:
    keywords, error, text = BAD[case]
    with pytest.raises(error, match=f"{name}: {text}"):
        liger_aot.load(name)(**SOURCES[name], **keywords)


@pytest.mark.parametrize("name", OPS)
def test_bad_tensors(name: str) -> None:
    op, good = liger_aot.load(name), SOURCES[name]
    first, *rest = good
    with pytest.raises(ArgumentError, match=rf"{name}: rows of (100|50) are no whole groups of 128"):
        short = {k: v[..., :100].contiguous() for k, v in good.items()}
        op(**short, scheme="group")
    for argument in rest:
        with pytest.raises(
            (ArgumentError, ArgumentTypeError), match=f"{name}: {argument} must be of .* dtype"
        ):
            op(**{**good, argument: good[argument].half()})
        with pytest.raises(ArgumentError, match=f"{name}: {argument} is on meta"):
            op(**{**good, argument: good[argument].to("meta")})
        with pytest.raises(ArgumentError, match=f"{name}: {argument} must be"):
            op(**{**good, argument: good[argument][..., :16].contiguous()})
    with pytest.raises(ArgumentTypeError, match=f"{name}: {first} must be bfloat16, float16"):
        op(**{**good, first: X.double()})
    if name != "quantize":
        with pytest.raises(ArgumentError, match=f"{name}: scheme 'tensor' needs a scale"):
            op(**good, scheme="tensor")
        with pytest.raises(
            ArgumentTypeError, match=f"{name}: {first} must be bfloat16, float16, got float32"
        ):
            op(**{k: v.float() for k, v in good.items()})
    with pytest.raises(ArgumentError, match=f"{name}: a gradient is needed, and codes have none"):
        op(**{**good, first: X.clone().requires_grad_()})


def test_sum_in_place() -> None:
    op = liger_aot.load("fused_add_rmsnorm_quantize")
    x, residual = torch.randn(2, 3, 128, dtype=BF16), torch.randn(2, 3, 128, dtype=BF16)
    wanted = op(x, residual, W[:128])
    version = residual._version
    got = op(x, residual, W[:128], inplace=True)
    assert got[2] is residual and residual._version > version
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(got, wanted, strict=True))
    for argument, arguments in (("x", (x, x)), ("weight", (x, W.expand(2, 3, 256)[..., :128], W[:128]))):
        with pytest.raises(ArgumentError, match=f"residual.*({argument}|overlap)"):
            op(*arguments, inplace=True)
    with pytest.raises(ArgumentError, match="residual has strides"):
        op(x[:, :, ::2], residual[:, :, ::2], inplace=True)


@pytest.mark.parametrize(
    ("arch", "dtype"), [("gfx942", E4M3FNUZ), ("gfx950", E4M3), ("gfx1100", E4M3), ("gfx1201", E4M3)]
)
def test_the_default_fp8_on_rocm_is_the_packs(
    arch: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(_codes, "gpu", lambda index: SimpleNamespace(device=arch))
    monkeypatch.setattr(_codes, "pack_for", built_pack)
    _codes._fp8_of.cache_clear()
    try:
        assert _codes.Scheme("token", None, 128, "row_major", False).codes == dtype
        assert _codes.Scheme("token", INT8, 128, "row_major", False).codes == INT8
    finally:
        _codes._fp8_of.cache_clear()


def test_a_gpu_without_fp8_says_so() -> None:
    for arch in ("sm80", "gfx90a"):
        op = bound("rmsnorm_quantize", arch, RecordingDriver)
        with pytest.raises(ArgumentTypeError, match=r"does not convert to float8_e4m3fn: .* all have int8"):
            op(X, W)
        op(X, W, dtype=INT8)
        with pytest.raises(ArgumentTypeError, match="does not convert to float8_e4m3fn"):
            bound("quantize", arch, RecordingDriver)(X, scheme="tensor")


@pytest.mark.parametrize("name", OPS)
def test_compiled_graphs_have_the_same_results(name: str) -> None:
    """One graph, without a copy of the scales into another layout."""
    register(name)
    op, good = liger_aot.load(name), SOURCES[name]
    for keywords in (
        {},
        {"scheme": "group", "scale_layout": "tma_aligned"},
        {"scheme": "group", "ue8m0": True},
    ):

        def call(tensors: dict[str, Tensor], keywords: dict[str, Any] = keywords) -> Any:
            return op(**tensors, **keywords)

        torch.compiler.reset()
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)(good)
        for a, b in zip(compiled, call(good), strict=True):
            assert torch.equal(a.float(), b.float()) and a.stride() == b.stride()


# ---- the kernels ----


def table_problems(name: str, manifest: OpManifest, longest: int, rows: int) -> list[tuple[str, Problem]]:
    """(variant, a problem that takes it) for every row of every table. The kernels for a whole tensor come in pairs."""
    found = []
    fp8 = "fp8e4b8" if any("fp8e4b8" in key for key in manifest.kernels[name].tables) else "fp8e4nv"
    for kernel in manifest.kernels.values():
        for key, entries in kernel.tables.items():
            *words, alignment = key.split("/")
            axes = dict(zip(kernel.axes, words, strict=True))
            scheme = axes.get("scheme", "tensor")
            problem = Problem(
                name, (rows,), 1, DTYPES[axes["dtype"]],
                scheme=scheme.rstrip("0123456789"),
                out=DTYPES[axes.get("out", fp8)],
                group_size=int(scheme.removeprefix("group")) if scheme.startswith("group") else 128,
                given=scheme == "tensor" and "scheme" in axes,
                shift=int(alignment == "generic"),
                gap=16 if alignment == "aligned" else 3,
            )  # fmt: skip
            unit = problem.group_size if problem.scheme == "group" else 1
            for n, (_, variant) in zip(
                sizes_of(entries, alignment == "aligned", longest), entries, strict=True
            ):
                found.append((variant, problem._replace(cols=-(-n // unit) * unit)))
            for bound_n, most, variant in kernel.few.get(key, ()):
                n = min(bound_n or longest, longest) // unit * unit or unit
                found.append((variant, problem._replace(cols=n, lead=(min(most, rows),))))
    return found


def check_tables(op: Any, name: str, arch: str, problems: list[tuple[str, Problem]], rows: bool) -> None:
    pack, done, wanted = built_pack(arch), set(), set()
    for variant, problem in problems:
        key = variant if rows else form_of(variant)
        wanted.add(key)
        if (rows and problem in done) or (not rows and key in done):
            continue
        done |= {problem, key}
        check(op, problem, dict(pack.tolerance))
    assert wanted


@poisoned
@pytest.mark.interpreter
@pytest.mark.parametrize("arch", ["sm90", "gfx942", pytest.param("sm80", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OPS)
def test_on_the_interpreter(name: str, arch: str) -> None:
    op, allowed = bound(name, arch, InterpreterDriver), dict(built_pack(arch).tolerance)
    for seed, problem in enumerate(small(name, FP8[arch])):
        check(op, problem, allowed, seed=seed)
    check_tables(op, name, arch, table_problems(name, built_pack(arch).op(name), 200, 2), rows=False)


@poisoned
@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.parametrize("name", OPS)
def test_every_row_on_the_interpreter(name: str) -> None:
    op = bound(name, "sm90", InterpreterDriver)
    check_tables(op, name, "sm90", table_problems(name, built_pack("sm90").op(name), 30000, 2), rows=True)


@poisoned
@pytest.mark.parametrize("arch", [arch for arch in AMD if arch.values != ("gfx90a",)])
@pytest.mark.parametrize("name", OPS)
def test_forms_on_the_emulator(name: str, arch: str) -> None:
    """Every form of each kernel, and the typical problems."""
    op = bound(name, arch, EmulatorDriver)
    allowed = dict(built_pack(arch).tolerance)
    check(op, small(name, FP8[arch])[0], allowed)
    problems = table_problems(name, built_pack(arch).op(name), 130, 2)
    check_tables(op, name, arch, problems, rows=False)


@poisoned
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gfx90a", "gfx942"])
@pytest.mark.parametrize("name", OPS)
def test_every_binary_on_the_emulator(name: str, arch: str) -> None:
    op = bound(name, arch, EmulatorDriver)
    allowed = dict(built_pack(arch).tolerance)
    for seed, problem in enumerate(small(name, FP8[arch])):
        check(op, problem, allowed, seed=seed)
    manifest = built_pack(arch).op(name)
    check_tables(op, name, arch, table_problems(name, manifest, 5000, 2), rows=True)
    loaded = {v for on in op._own.bound.values() for v in on._loaded}
    assert not set(manifest.variants) - loaded


def test_few_rows_choose_their_own_binaries() -> None:
    """Rows of a table that are for few rows go before the others."""
    for name in OPS:
        for kernel in built_pack("sm90").op(name).kernels.values():
            assert all(key in kernel.tables and entries for key, entries in kernel.few.items())


# ---- on a GPU ----


@poisoned
@pytest.mark.gpu
@pytest.mark.parametrize("name", OPS)
def test_on_a_gpu(name: str) -> None:
    op, allowed = liger_aot.load(name), dict(installed().tolerance)
    out = FP8[installed().arch]
    for seed, problem in enumerate(small(name, out)):
        check(op, problem, allowed, seed=seed, device="cuda")
    for rows in (1, 40, 300):
        for _, problem in table_problems(name, installed().op(name), 70000, rows):
            check(op, problem, allowed, seed=rows, device="cuda")


@poisoned
@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["tensor", "token", "group"])
@pytest.mark.parametrize("name", OPS)
def test_large_on_a_gpu(name: str, scheme: str) -> None:
    out = FP8[installed().arch]
    if out == INT8 and scheme != "token":
        pytest.skip("this GPU has int8 by token alone")
    for lead, cols in (((3000,), 4096), ((7, 333), 2880 if scheme != "group" else 2816), ((129,), 28672)):
        problem = Problem(name, lead, cols, scheme=scheme, out=out)
        check(liger_aot.load(name), problem, dict(installed().tolerance), device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPS)
def test_past_two_to_the_31(name: str) -> None:
    """The last rows are those of a call with them alone."""
    op, out = liger_aot.load(name), FP8[installed().arch]
    problem = Problem(name, ((1 << 31) // 8192 + 64,), 8192, out=out)
    tensors = problem.tensors(device="cuda")
    tail = tuple(t[-32:].clone() if t is not None and t.dim() > 1 else t for t in tensors)
    for scheme in ("token",) if out == INT8 else ("token", "group", "tensor"):
        if scheme == "tensor" and name != "quantize":
            continue
        one = problem._replace(scheme=scheme)
        got = one.run(op, tensors)
        few = one.run(op, tail) if scheme != "tensor" else one.run(op, (tail[0], got[1], None))
        for a, b in zip(got, few, strict=True):
            a = a[-32:] if a.shape[:1] == problem.lead else a
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), scheme


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPS)
def test_cuda_graph(name: str) -> None:
    op, out = liger_aot.load(name), FP8[installed().arch]
    op.preload()
    problems = [Problem(name, (37,), 4096, out=out), Problem(name, (37,), 4096, out=INT8)]
    if out != INT8:
        problems += [problems[0]._replace(scheme=s) for s in ("group", "tensor")]
    for problem in problems:
        tensors = problem.tensors(0, "cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            problem.run(op, tensors)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = problem.run(op, tensors)
        for seed in (1, 2):
            for to, new in zip(tensors, problem.tensors(seed, "cuda"), strict=True):
                if to is not None:
                    to.copy_(new)
            graph.replay()
            check_results(
                problem, tensors, captured, dict(installed().tolerance), f"{problem}, replay {seed}"
            )


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPS)
def test_compiled_on_a_gpu(name: str) -> None:
    op, good = liger_aot.load(name), {k: v.cuda() for k, v in SOURCES[name].items()}
    out = FP8[installed().arch]  # looked up here: Dynamo cannot trace the reading of folders
    torch.compiler.reset()
    compiled = torch.compile(lambda t: op(**t, dtype=out), fullgraph=True)(good)
    for a, b in zip(compiled, op(**good, dtype=out), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.gpu
def test_sum_in_place_on_a_gpu() -> None:
    op = liger_aot.load("fused_add_rmsnorm_quantize")
    for n in (4096, 40000):
        x, residual, w = (torch.randn(*s, device="cuda", dtype=BF16) for s in ((9, n), (9, n), (n,)))
        wanted = op(x, residual, w, dtype=INT8)
        got = op(x, residual, w, dtype=INT8, inplace=True)
        assert got[2] is residual and all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_every_op_has_a_module() -> None:
    assert all(module(name).OP.name == name for name in OPS)


@pytest.mark.gpu
def test_every_reciprocal() -> None:
    """For each mantissa that a scale can have, values of which x / s is nearest to a tie: the quotient must be the
    correctly rounded one, which is made by another way here than in the kernel."""
    if FP8[installed().arch] != E4M3:
        pytest.skip("this GPU has no e4m3")
    op = liger_aot.load("quantize")
    ties = torch.tensor(
        [17, 19, 21, 23, 25, 27, 29, 31, 1.0625, 33 / 32, 2.0**-10, 3 * 2.0**-10, 5 / 512, 432.0, 0.3]
    )
    ties = ties.to("cuda")
    for first in range(0, 1 << 23, 1 << 20):
        mantissas = torch.arange(first, first + (1 << 20), device="cuda", dtype=torch.int32)
        top = (mantissas | 0x43800000).view(torch.float32)  # 256 to 512
        # By a tensor: on a GPU torch divides by a number as a product with its rounded reciprocal.
        s = (top / torch.full_like(top, 448))[:, None]
        x = torch.cat((top[:, None], s * ties), 1)
        codes, scales = op(x)
        assert torch.equal(scales, s), f"mantissas from {first:#x} on"
        wanted = (x / s).clamp(-448, 448).to(E4M3)
        assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8)), f"mantissas from {first:#x} on"
