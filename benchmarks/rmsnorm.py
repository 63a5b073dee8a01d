"""RMSNorm: its cases, how each provider is called, and its fp64 reference.

y = x / sqrt(mean(x^2) + eps) * weight over rows of n, with a weight, offset 0 and the "llama" casting mode.
Bytes count x and y forward, and x, dy and dx backward; the weight, its gradient and rstd are left out, the
same for every provider (at most 2% of the bytes at the shapes below).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .measure import Call
from .workload import Case, Problem, Workload, checked_rows, largest_error

EPS = 1e-6
SMALL = (4, 4096)
FP64_CHUNK_ELEMENTS = 2**24

NS = (128, 256, 512, 1024, 2048, 4096, 5120, 8192, 11008, 16384, 18944, 32768, 65536, 131072)
SWEEPS = (
    # direction, dtype, elements, row lengths: 1 GiB read and written forward, 768 MiB backward
    ("forward", torch.bfloat16, 2**28, NS),
    ("forward", torch.float32, 2**27, tuple(n for n in NS if n <= 32768)),
    ("backward", torch.bfloat16, 2**27, tuple(n for n in NS if 512 <= n <= 32768)),
)
QUICK_NS = (1024, 4096, 16384)

Norm = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Inputs:
    """x and dy [rows, n], weight [n], of one dtype and device."""

    x: Tensor
    weight: Tensor
    dy: Tensor


# Providers -------------------------------------------------------------------------------------------------


def function(provider: str) -> Norm:
    """RMSNorm as a provider gives it, f(x, weight), imported and loaded now."""
    return _FUNCTIONS[provider]()


def _liger_aot() -> Norm:
    import liger_aot

    op = liger_aot.load("rmsnorm")
    return lambda x, weight: op(x, weight, eps=EPS)


def _torch_eager() -> Norm:
    return lambda x, weight: torch.nn.functional.rms_norm(x, weight.shape, weight, EPS)


def _torch_compile() -> Norm:
    import torch._dynamo
    import torch._functorch.config

    # Every shape is compiled afresh, as a model of that shape would be, not as the n-th recompilation.
    torch._dynamo.reset()
    # Donated buffers refuse retain_graph=True, with which the backward is timed.
    torch._functorch.config.donated_buffer = False
    return torch.compile(_formula, fullgraph=True, dynamic=False)


def _formula(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return (wide * rstd).to(x.dtype) * weight


def _liger() -> Norm:
    # The submodule: liger_kernel.ops itself may hand out another implementation (LIGER_KERNEL_IMPL).
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return lambda x, weight: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama")


def _quack() -> Norm:
    from quack.rmsnorm import rmsnorm

    return lambda x, weight: rmsnorm(x, weight, eps=EPS)


_FUNCTIONS: dict[str, Callable[[], Norm]] = {
    "liger_aot": _liger_aot,
    "torch": _torch_eager,
    "torch_compile": _torch_compile,
    "liger": _liger,
    "quack": _quack,
}
# Liger's default writes dx into dy, which it is given again for the next call.
_OVERWRITES_DY = {"liger"}


# Device time -----------------------------------------------------------------------------------------------


def cases(quick: bool) -> list[Case]:
    return [
        Case(direction, dtype, elements // n, n)
        for direction, dtype, elements, ns in SWEEPS
        for n in ns
        if not quick or n in QUICK_NS
    ]


def moved_bytes(case: Case) -> int:
    return _moved_bytes(case.direction, case.dtype, case.rows, case.n)


def _moved_bytes(direction: str, dtype: torch.dtype, rows: int, n: int) -> int:
    return {"forward": 2, "backward": 3}[direction] * rows * n * dtype.itemsize


def problem(case: Case, device: torch.device, sets: int, seed: int) -> Problem:
    generator = torch.Generator(device).manual_seed(seed)
    inputs = [random_inputs(case.rows, case.n, case.dtype, device, generator) for _ in range(sets)]
    rows = checked_rows(case.rows, device, seed)
    first = inputs[0]
    if case.direction == "forward":
        references: tuple[Tensor, ...] = reference_forward(first.x, first.weight, rows)[:1]
    else:
        references = reference_backward(first.dy, first.x, first.weight, rows)

    def calls(provider: str) -> list[Call]:
        norm = function(provider)
        if case.direction == "forward":
            return [_forward_call(norm, one) for one in inputs]
        return [_backward_call(norm, one, provider in _OVERWRITES_DY) for one in inputs]

    def check(results: tuple[Tensor, ...]) -> float:
        return largest_error((results[0][rows], *results[1:]), references)

    return Problem(calls, check)


def random_inputs(
    rows: int, n: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Inputs:
    """Normal x and dy, and weights around 1 as trained models have them."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    return Inputs(x=normal(rows, n), weight=1 + normal(n) / 4, dy=normal(rows, n))


def _forward_call(norm: Norm, inputs: Inputs) -> Call:
    return Call(lambda: (norm(inputs.x, inputs.weight),))


def _backward_call(norm: Norm, inputs: Inputs, overwrites_dy: bool) -> Call:
    x = inputs.x.detach().requires_grad_()
    weight = inputs.weight.detach().requires_grad_()
    dy = inputs.dy.clone() if overwrites_dy else inputs.dy
    y = norm(x, weight)
    return Call(
        run=lambda: torch.autograd.grad(y, (x, weight), dy, retain_graph=True),
        restore=(lambda: dy.copy_(inputs.dy)) if overwrites_dy else None,
    )


# Host time -------------------------------------------------------------------------------------------------


def small_inputs(device: torch.device) -> tuple[Tensor, Tensor]:
    """x [4, 4096] and weight [4096], bf16, with gradients wanted as a model's parameters have them."""
    inputs = random_inputs(*SMALL, torch.bfloat16, device, torch.Generator(device).manual_seed(0))
    return inputs.x.requires_grad_(), inputs.weight.requires_grad_()


def host_calls(provider: str, device: torch.device) -> Mapping[str, Callable[[], object]]:
    x, weight = small_inputs(device)
    dy = torch.randn_like(x)
    norm = function(provider)
    calls: dict[str, Callable[[], object]] = {
        "host_forward": lambda: norm(x, weight),
        # Liger writes into dy: its values drift, which host time does not notice.
        "host_forward_backward": lambda: torch.autograd.grad(norm(x, weight), (x, weight), dy),
    }
    if provider == "liger_aot":
        import liger_aot

        op = liger_aot.load("rmsnorm")
        out = torch.empty_like(x)
        calls["host_forward_out"] = lambda: op(x, weight, eps=EPS, out=out)
    if provider == "torch":
        calls["host_empty_like"] = lambda: torch.empty_like(x)
    return calls


# Reference -------------------------------------------------------------------------------------------------


def reference_forward(x: Tensor, weight: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """y [len(rows), n] and rstd [len(rows)] of some rows of x, in fp64."""
    wide = x[rows].double()
    rstd = torch.rsqrt(wide.square().mean(-1) + EPS)
    return wide * rstd[:, None] * weight.double(), rstd


def reference_backward(dy: Tensor, x: Tensor, weight: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """dx [len(rows), n] of some rows and dweight [n] over all rows, in fp64."""
    dweight = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
    step = max(1, FP64_CHUNK_ELEMENTS // x.shape[1])
    for chunk_dy, chunk_x in zip(dy.split(step), x.split(step), strict=True):
        dweight += (chunk_dy.double() * _normalized(chunk_x)[0]).sum(0)
    normalized, rstd = _normalized(x[rows])
    weighted = dy[rows].double() * weight.double()
    along = (weighted * normalized).mean(-1, keepdim=True)
    return rstd * (weighted - normalized * along), dweight


def _normalized(x: Tensor) -> tuple[Tensor, Tensor]:
    """x / rms(x) [rows, n] and 1 / rms(x) [rows, 1] in fp64."""
    wide = x.double()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return wide * rstd, rstd


# The tuner's workloads -------------------------------------------------------------------------------------


def workload(
    kernel: str, n: int, dtype: torch.dtype, elements: int, device: torch.device, seed: int
) -> Workload:
    """`rmsnorm_forward` gives (y, rstd), `rmsnorm_backward` gives (dx, dweight) and is handed rstd.

    Raises:
        ValueError: another kernel, or fewer elements than one row has.
    """
    count = elements // n
    if count < 1:
        raise ValueError(f"{elements} elements do not fill a row of {n}")
    if kernel not in ("rmsnorm_forward", "rmsnorm_backward"):
        raise ValueError(f"no workload for {kernel!r}: there are rmsnorm_forward and rmsnorm_backward")
    inputs = random_inputs(count, n, dtype, device, torch.Generator(device).manual_seed(seed))
    rows = checked_rows(count, device, seed)
    if kernel == "rmsnorm_forward":
        return Workload(
            run=lambda op: _forward(op, inputs),
            bytes=_moved_bytes("forward", dtype, count, n),
            reference=lambda: reference_forward(inputs.x, inputs.weight, rows),
            select=lambda results: (results[0][rows], results[1][rows]),
            rows=count,
            n=n,
        )
    rstd = _rstd(inputs.x)
    return Workload(
        run=lambda op: _backward(op, inputs, rstd),
        bytes=_moved_bytes("backward", dtype, count, n),
        reference=lambda: reference_backward(inputs.dy, inputs.x, inputs.weight, rows),
        select=lambda results: (results[0][rows], results[1]),
        rows=count,
        n=n,
    )


def _forward(op: Any, inputs: Inputs) -> tuple[Tensor, ...]:
    return tuple(
        op.forward(inputs.x, inputs.weight, eps=EPS, offset=0.0, casting_mode="llama", store_rstd=True)
    )


def _backward(op: Any, inputs: Inputs, rstd: Tensor) -> tuple[Tensor, ...]:
    return tuple(op.backward(inputs.dy, inputs.x, inputs.weight, rstd, offset=0.0))


def _rstd(x: Tensor) -> Tensor:
    """1 / rms of each row, fp32 [rows], as the forward stores it; reads x without a copy in fp32."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
    return torch.rsqrt(norms.square() / x.shape[-1] + EPS)
