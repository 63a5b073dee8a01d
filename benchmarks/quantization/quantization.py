"""Ops with 8-bit results on this machine's GPU: `python -m benchmarks.quantization.quantization`.

Microseconds a call inside a CUDA graph of CALLS calls, as a serving engine makes them: the device's time, with the gaps
between a graph's launches. All providers in turn, the median of ROUNDS. Beside them a copy of as many bytes as a call
must move, read and written. The tensors are the same in each call: what fits into the L2 cache is there, for the copy,
too. The peers are torch.compile, with static columns and dynamic rows, and vLLM's CUDA kernels, where ``--vllm`` names
its shared object (vllm/_C_stable_libtorch.abi3.so of its wheel). Before it is timed, a provider's result is compared
with float64.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.in_graphs import Ready, Result, beside_the_copy, captured, cells, small_error
from benchmarks.steps import Command

FP8, LARGEST = torch.float8_e4m3fn, 448.0
EPS, GROUP = 1e-6, 128
ROWS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 8192)
HIDDEN = (2048, 2880, 4096, 5120, 7168, 8192)
GATED = (2048, 7168, 14336, 28672)
KINDS = {"quantize": HIDDEN, "rmsnorm": HIDDEN, "fused_add_rmsnorm": HIDDEN, "swiglu": GATED}
SCHEMES = ("token", "group", "tensor")
# Half a step of e4m3, relative, and a little for the values' own rounding to bf16.
TOLERANCE = 2.0**-4 + 2.0**-7
Run = Callable[[], Any]


@dataclass(frozen=True)
class Point:
    """``rows`` rows of ``columns`` codes, of bf16 values."""

    kind: str
    scheme: str
    rows: int
    columns: int

    @property
    def bytes(self) -> int:
        """Read and written once, but for the scales; of the sum in place, both."""
        an_element = {"quantize": 3, "rmsnorm": 3, "fused_add_rmsnorm": 7, "swiglu": 5}[self.kind]
        return an_element * self.rows * self.columns


POINTS = tuple(
    Point(kind, scheme, rows, columns)
    for rows in ROWS
    for kind, lengths in KINDS.items()
    for scheme in SCHEMES
    for columns in lengths
    if scheme != "group" or columns % GROUP == 0
)


@dataclass(frozen=True)
class Inputs:
    x: Tensor  # of swiglu gate and up, beside each other
    residual: Tensor
    weight: Tensor
    scale: Tensor


def drawn(point: Point, device: torch.device, seed: int = 0) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=torch.bfloat16).normal_(generator=generator)

    width = point.columns * (2 if point.kind == "swiglu" else 1)
    shape = (point.rows, point.columns)
    residual = normal(*shape) if point.kind == "fused_add_rmsnorm" else normal(1)
    scale = torch.full((1,), 4 / LARGEST, device=device)
    return Inputs(normal(point.rows, width), residual, normal(point.columns), scale)


# ---- the formula ----


def values(point: Point, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """What is quantised, in x's dtype, and what is returned beside it."""
    if point.kind == "swiglu":
        gate, up = x.chunk(2, -1)
        return (F.silu(gate) * up,)
    if point.kind == "quantize":
        return (x,)
    added = x + residual if point.kind == "fused_add_rmsnorm" else x
    return F.rms_norm(added, weight.shape, weight, EPS), added


def quantized(point: Point, y: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    wide = y.float()
    if point.scheme == "tensor":
        return (wide / scale).clamp(-LARGEST, LARGEST).to(FP8), scale
    grouped = wide.unflatten(-1, (-1, GROUP)) if point.scheme == "group" else wide.unsqueeze(-2)
    s = grouped.abs().amax(-1, keepdim=True).clamp(min=1e-10) / LARGEST
    return (grouped / s).clamp(-LARGEST, LARGEST).to(FP8).flatten(-2), s.squeeze(-1)


def error(point: Point, inputs: Inputs, codes: Tensor, scales: Tensor) -> float:
    """The largest error of a value as a fraction of its size and its scale, in float64."""
    exact = values(point, inputs.x.double(), inputs.residual.double(), inputs.weight.double())[0]
    wide = scales.double().reshape(-1, 1) if point.scheme == "tensor" else scales.double()
    s = wide if wide.shape[-1] == 1 else wide.repeat_interleave(GROUP, -1)
    got = codes.double() * s
    held = exact.clamp(-LARGEST * s, LARGEST * s) if point.scheme == "tensor" else exact
    return float(((got - held).abs() / (held.abs() + s / 16)).max())


# ---- the providers: a call, which gives codes and scales first ----


def ours(point: Point, i: Inputs) -> Run:
    import liger_aot

    name = "quantize" if point.kind == "quantize" else f"{point.kind}_quantize"
    op = liger_aot.load(name)
    given: dict[str, Any] = {"scheme": point.scheme, "scale": i.scale if point.scheme == "tensor" else None}
    if i.x.is_cuda and torch.version.hip is None:
        given["dtype"] = FP8
    if point.kind in ("quantize", "swiglu"):
        return lambda: op(i.x, **given)
    if point.kind == "rmsnorm":
        return lambda: op(i.x, i.weight, eps=EPS, **given)
    return lambda: op(i.x, i.residual, i.weight, eps=EPS, inplace=i.x.is_cuda, **given)


@cache
def _compiled(kind: str, scheme: str, columns: int, one_row: bool) -> Callable[..., Any]:
    """A graph for each length of a row and, as torch specialises on it, for one row."""
    point = Point(kind, scheme, 0, columns)

    def formula(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        y, *rest = values(point, x, residual, weight)
        return *quantized(point, y, scale), *rest

    # All graphs belong to one function. Past Dynamo's limit for that, 8, it runs eagerly unless fullgraph=True.
    torch._dynamo.config.recompile_limit = 256
    made: Callable[..., Any] = torch.compile(formula, fullgraph=True)
    return made


def torch_compile(point: Point, i: Inputs) -> Run:
    run = _compiled(point.kind, point.scheme, point.columns, point.rows == 1)
    if point.rows > 1:
        for t in (i.x, i.residual):
            if t.dim() > 1:
                torch._dynamo.mark_dynamic(t, 0)
    return lambda: run(i.x, i.residual, i.weight, i.scale)


def vllm(point: Point, i: Inputs) -> Run:
    """Its kernels write into memory that is given; where it has none for both steps, two."""
    ops: Any = torch.ops._C
    rows, n, device = point.rows, point.columns, i.x.device
    codes = torch.empty(rows, n, device=device, dtype=FP8)
    groups = {"token": 1, "group": n // GROUP, "tensor": 1}[point.scheme]
    s = i.scale if point.scheme == "tensor" else torch.empty(rows, groups, device=device)
    residual = i.residual if point.kind == "fused_add_rmsnorm" else None
    y = torch.empty(rows, n, device=device, dtype=torch.bfloat16)
    calls: dict[tuple[str, str], Callable[[], Any]] = {
        ("quantize", "token"): lambda: ops.dynamic_per_token_scaled_fp8_quant(codes, i.x, s, None),
        ("quantize", "group"): lambda: ops.per_token_group_fp8_quant(
            i.x, codes, s, GROUP, 1e-10, -LARGEST, LARGEST, False, False, False
        ),
        ("quantize", "tensor"): lambda: ops.static_scaled_fp8_quant(codes, i.x, s, None),
        ("swiglu", "group"): lambda: ops.silu_and_mul_per_block_quant(codes, i.x, s, GROUP, None, False),
        ("swiglu", "tensor"): lambda: ops.silu_and_mul_quant(codes, i.x, s),
        ("swiglu", "token"): lambda: (
            ops.silu_and_mul(y, i.x),
            ops.dynamic_per_token_scaled_fp8_quant(codes, y, s, None),
        ),
        ("rmsnorm", "tensor"): lambda: ops.rms_norm_static_fp8_quant(codes, i.x, i.weight, s, EPS),
        ("fused_add_rmsnorm", "tensor"): lambda: ops.fused_add_rms_norm_static_fp8_quant(
            codes, i.x, i.residual, i.weight, s, EPS
        ),
    }
    for kind in ("rmsnorm", "fused_add_rmsnorm"):
        calls[kind, "token"] = lambda: ops.rms_norm_dynamic_per_token_quant(
            codes, i.x, i.weight, s, EPS, None, residual
        )
        calls[kind, "group"] = lambda: ops.rms_norm_per_block_quant(
            codes, i.x, i.weight, s, EPS, None, residual, GROUP, False
        )
    run = calls[point.kind, point.scheme]
    return lambda: (run(), (codes, s))[1]


PROVIDERS: dict[str, Callable[[Point, Inputs], Run]] = {
    "liger_aot": ours,
    "torch_compile": torch_compile,
    "vllm": vllm,
}


# ---- measuring ----


def prepared(point: Point, name: str, device: torch.device) -> Ready:
    """A provider's graph and its error."""
    run = PROVIDERS[name](point, drawn(point, device))
    found = small_error(error(point, drawn(point, device), *run()[:2]), TOLERANCE)
    return captured(run), found


def at(point: Point, names: Sequence[str], device: torch.device) -> list[Result]:
    return beside_the_copy(point, names, lambda name: prepared(point, name, device), device)


def line(point: Point, found: Sequence[Result]) -> str:
    return f"{point.kind} {point.scheme} {point.rows} x {point.columns}: {cells(found)}"


def main(arguments: Sequence[str]) -> int:
    command = Command("benchmarks.quantization.quantization", __doc__, PROVIDERS)
    command.library("vllm", "vLLM's _C_stable_libtorch.abi3.so")
    command.several("rows", ROWS)
    command.several("columns", (*HIDDEN, *GATED))
    options = command.read(arguments)
    points = [p for p in POINTS if p.rows in options.rows and p.columns in options.columns]
    return command.measure("quantization", points, lambda p: at(p, options.providers, command.device), line)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
