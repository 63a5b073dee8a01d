"""RMSNorm against fp64, whatever runs it: cases and the one check that all drivers share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.norms.rmsnorm import RMSNorm, reference, reference_backward
from liger_aot.runtime.manifest import OpManifest
from tests.harness import op_cases
from tests.harness.op_cases import Draw, Exact, OpCases, sizes_of
from tests.harness.tolerances import worst

DTYPES = BF16, FP16, FP32 = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Case:
    rows: int
    n: int
    dtype: torch.dtype
    weight: torch.dtype | None = None
    casting_mode: str = "llama"
    offset: float = 0.0
    eps: float = 1e-6
    shift: int = 0  # elements that x, dy and out start after an aligned address
    gap: int = 0  # elements between rows

    def __str__(self) -> str:
        weight = "none" if self.weight is None else str(self.weight).removeprefix("torch.")
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.rows}x{self.n}-{dtype}-{weight}-{self.casting_mode}-{self.offset}-+{self.shift}-gap{self.gap}"


def make_rows(case: Case, generator: torch.Generator) -> Tensor:
    """(rows, n) random values as the case lays them out in memory, the rest of which is NaN."""
    stride = case.n + case.gap
    buffer = torch.full(
        (case.rows * stride + case.shift,), torch.nan, dtype=case.dtype, device=generator.device
    )
    rows = buffer.as_strided((case.rows, case.n), (stride, 1), case.shift)
    rows.copy_(torch.randn((case.rows, case.n), generator=generator, device=generator.device))
    return rows


def check(
    op: RMSNorm, case: Case, allowed: Mapping[str, float], seed: int, *, forward_only: bool = False
) -> None:
    """Forward and backward of ``op`` on fresh random inputs; asserts that every error is within what is allowed."""
    device = op_device(op)
    generator = torch.Generator(device).manual_seed(seed)
    x, dy = make_rows(case, generator), make_rows(case, generator)
    x *= 10 ** torch.empty((case.rows, 1), device=device).uniform_(-2, 2, generator=generator)
    weight = None
    if case.weight is not None:
        weight = torch.randn(case.n, generator=generator, device=device).to(case.weight)
    settings = {"eps": case.eps, "offset": case.offset, "casting_mode": case.casting_mode}
    y, rstd = op.forward(x, weight, **settings)
    wide = None if weight is None else weight.double()
    exact_y, exact_rstd = reference(x.double(), wide, eps=case.eps, offset=case.offset)
    twice = case.casting_mode == "llama" and weight is not None and case.dtype != torch.float32
    assert rstd is not None
    scale = 1.0 if wide is None else 1 + (case.offset + wide).abs()
    errors = {
        "y": worst(y, exact_y, allowed, roundings=2 if twice else 1, scale=scale),
        "rstd": worst(rstd, exact_rstd, allowed),
    }
    if not forward_only:
        dx, dweight = op.backward(dy, x, weight, rstd, offset=case.offset)
        exact_dx, exact_dweight = reference_backward(
            dy.double(), x.double(), wide, exact_rstd, offset=case.offset
        )
        row_scale = exact_rstd[:, None]
        scaled = dy.double() if wide is None else dy.double() * (case.offset + wide)
        if wide is not None:  # some forms multiply the offset out
            scaled = dy.double().abs() * (abs(case.offset) + wide.abs())
        mean = (x.double() * scaled).abs().mean(1, keepdim=True)
        magnitude = (scaled * row_scale).abs() + x.double().abs() * mean * row_scale**3
        errors["dx"] = worst(dx, exact_dx, allowed, magnitude=magnitude)
        if weight is not None:
            terms = (dy.double() * x.double() * row_scale).abs().sum(0)
            errors["dweight"] = worst(dweight, exact_dweight, allowed, magnitude=terms)
    assert max(errors.values()) <= 1, f"seed {seed}: {errors}"


def op_device(op: RMSNorm) -> torch.device:
    """Where the op's tensors live: the CPU for bound drivers, else the GPU."""
    return torch.device("cpu" if op._own.find(1, 0) is not None else "cuda")


EDGES = [
    Case(1, 1, BF16, BF16),
    Case(7, 1, FP32, None),
    Case(3, 2, FP16, FP32, "gemma", 1.0),
    Case(4, 17, BF16, None, "none"),
    Case(5, 48, BF16, BF16, "gemma", 1.0, gap=16),
    Case(5, 48, FP32, FP32, offset=0.5, gap=3),
    Case(2, 64, FP16, FP16, eps=0.1, shift=8),
    Case(9, 1000, BF16, FP32, "llama", 1.0, shift=3, gap=5),
    Case(600, 32, BF16, BF16),
    Case(1, 9008, FP32, FP32),  # one step for one program, in a form that only writes partials
    Case(1, 5001, BF16, BF16, shift=1),
    Case(1, 8192, BF16, BF16),
]


def table_cases(manifest: OpManifest, longest: int, rows: int = 3) -> list[Case]:
    """A case for every row of both kernels' dispatch tables, for every dtype, aligned and generic."""
    cases: dict[Case, None] = {}
    names = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
    for kernel in manifest.kernels.values():
        for key, entries in kernel.tables.items():
            dtype, weight, alignment = key.split("/")
            aligned = alignment == "aligned"
            for n in sizes_of(entries, aligned, longest):
                cases[Case(rows, n, names[dtype], names[weight], shift=0 if aligned else 1)] = None
    return list(cases)


def form_cases(manifest: OpManifest, rows: int = 3) -> list[Case]:
    """A case for every form of both kernels."""
    cases = (case for _, case in RMSNormCases().form_cases(manifest, rows))
    return [Case(rows, case.shape[-1], case.dtype, case.get("weight"), shift=case.shift) for case in cases]


class RMSNormCases(OpCases):
    """The same as an op of the harness: what tests of all ops take. Rows of very different sizes."""

    op_class = RMSNorm
    defaults = {"eps": 1e-6, "offset": 0.0, "casting_mode": "llama"}  # noqa: RUF012
    cases = (
        op_cases.Case((3, 5, 48), BF16, weight=BF16),
        *(
            op_cases.Case(
                (case.rows, case.n),
                case.dtype,
                shift=case.shift,
                gap=case.gap,
                weight=case.weight,
                casting_mode=case.casting_mode,
                offset=case.offset,
                eps=case.eps,
            )
            for case in EDGES
        ),
    )

    large = tuple(
        op_cases.Case(((1 << 25) // n, n), dtype, weight=weight)
        for n in (4096, 16384)
        for dtype in DTYPES
        for weight in dict.fromkeys((dtype, FP32))
    )

    def tensors(self, case: op_cases.Case, draw: Draw) -> Tensors:
        x = draw.rows(*case.shape).mul_(10 ** draw.uniform(-2, 2, *case.shape[:-1], 1))
        dtype = case.get("weight")
        return x, None if dtype is None else draw.dense(case.shape[-1], dtype=dtype)

    def limits(self, exact: Exact) -> Mapping[str, Mapping[str, Any]]:
        x, weight = exact.inputs.values()
        (dy,), rstd = exact.grads, exact.results[1].view(*x.shape[:-1], 1)
        w = torch.ones_like(x[..., :1]) if weight is None else exact.settings["offset"] + weight
        twice = exact.settings["casting_mode"] == "llama" and weight is not None
        limits: dict[str, dict[str, Any]] = {"y": {"roundings": 2 if twice else 1, "scale": 1 + w.abs()}}
        if dy is not None:
            apart = w if weight is None else abs(exact.settings["offset"]) + weight.abs()
            mean = (x * dy * apart).abs().mean(-1, keepdim=True)  # some forms multiply the offset out
            limits["dx"] = {"magnitude": (dy * apart * rstd).abs() + x.abs() * mean * rstd**3}
            limits["dweight"] = {"magnitude": torch.atleast_2d((dy * x * rstd).abs()).flatten(0, -2).sum(0)}
        return limits
