"""A decode step's ops at few rows, on this machine's GPU: `python -m benchmarks.few_rows`.

Microseconds a call inside a CUDA graph of CALLS calls, as a serving engine makes them: the device's time, with the gaps
between a graph's launches. All providers in turn, the median of several replays. The tensors are the same in each call:
what fits into the L2 cache is there, for everyone. fused_add_rmsnorm and rope write their arguments, as engines have
them; gate and up lie in one tensor (for Liger, which has no such form, in two).

The peers are torch.compile for just this shape, where --compiled-rows has the number of rows, Liger, and vLLM's CUDA
kernels, where ``--vllm`` names its shared object (vllm/_C_stable_libtorch.abi3.so of its wheel). Beside them "empty", a
kernel that does nothing in our grid, and a copy of as many bytes. "floor" is the empty kernel and the time that the
bytes take at the speed of a copy of 1 GiB. Before it is timed, a provider's result is compared with float64.

``merge FILE`` puts the kinds that another run measured into the kept record.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.environment import RESULTS, folder_name
from benchmarks.in_graphs import Ready, Result, beside_the_copy, captured, cells, small_error
from benchmarks.measure import copy_calls, time_device
from benchmarks.providers import OURS
from benchmarks.steps import Command, measured_again

EPS, CALLS = 1e-6, 50
ROWS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048)
HIDDEN = (2048, 2880, 4096, 5120, 7168, 8192)
GATED = (2048, 7168, 14336, 28672)
VOCABULARY = 128256
D = 128
ROPE = (5120, 9216)  # 32 heads of q, or 64, and 8 of k
KINDS: Mapping[str, Sequence[int]] = {
    "rmsnorm": (*HIDDEN, VOCABULARY),
    "fused_add_rmsnorm": HIDDEN,
    "layernorm": HIDDEN,
    "softmax": (*HIDDEN, VOCABULARY),
    "swiglu": GATED,
    "geglu": GATED,
    "rope": ROPE,
}
GIB = 2**30
# Providers round up to three times to bf16 on their way, each by half a step: of 2^-9 of values up to five times the
# root mean square, to which errors are related.
TOLERANCE = 2.0**-5
Tensors = tuple[Tensor, ...]
Run = Callable[[], Any]  # gives what is compared


@dataclass(frozen=True)
class Point:
    """``rows`` rows of ``columns`` results, bf16."""

    kind: str
    rows: int
    columns: int

    @property
    def bytes(self) -> int:
        """Read and written once, but for vectors and tables."""
        an_element = {"fused_add_rmsnorm": 8, "swiglu": 6, "geglu": 6}.get(self.kind, 4)
        return an_element * self.rows * self.columns


POINTS = tuple(
    Point(kind, rows, columns)
    for rows in ROWS
    for kind, lengths in KINDS.items()
    for columns in lengths
    if columns < VOCABULARY or rows <= 64
)


def drawn(point: Point, device: torch.device, seed: int = 0) -> Tensors:
    """The arguments of ``formula``."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=torch.bfloat16).normal_(generator=generator)

    rows, n = point.rows, point.columns
    if point.kind in ("swiglu", "geglu"):
        return (normal(rows, 2 * n),)
    if point.kind == "rope":
        angles = torch.rand(rows, D // 2, generator=generator, device=device) * 6
        table = torch.cat((angles.cos(), angles.sin()), -1).bfloat16()
        return normal(rows, n // D - 8, D), normal(rows, 8, D), table, torch.arange(rows, device=device)
    others: dict[str, Callable[[], Tensors]] = {
        "rmsnorm": lambda: (normal(n),),
        "fused_add_rmsnorm": lambda: (normal(rows, n), normal(n)),
        "layernorm": lambda: (normal(n), normal(n)),
        "softmax": lambda: (),
    }
    return normal(rows, n), *others[point.kind]()


# ---- the formulas ----


def _added(x: Tensor, residual: Tensor, weight: Tensor) -> Tensors:
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, EPS), total


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _rope(q: Tensor, k: Tensor, table: Tensor, positions: Tensor) -> Tensors:
    cos, sin = table[positions].unsqueeze(1).chunk(2, -1)
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def _gated(gate: Callable[[Tensor], Tensor]) -> Callable[..., Tensors]:
    def formula(both: Tensor) -> Tensors:
        first, second = both.chunk(2, -1)
        return (gate(first) * second,)

    return formula


FORMULAS: dict[str, Callable[..., Tensors]] = {
    "rmsnorm": lambda x, weight: (F.rms_norm(x, weight.shape, weight, EPS),),
    "fused_add_rmsnorm": _added,
    "layernorm": lambda x, weight, bias: (F.layer_norm(x, weight.shape, weight, bias, EPS),),
    "softmax": lambda x: (F.softmax(x, -1),),
    "swiglu": _gated(F.silu),
    "geglu": _gated(lambda x: F.gelu(x, approximate="tanh")),
    "rope": _rope,
}


def error(point: Point, given: Tensors, results: Sequence[Tensor]) -> float:
    """The largest error of a result, beside its size and the root mean square of all, in float64."""
    exact = FORMULAS[point.kind](*(t.double() if t.is_floating_point() else t for t in given))
    return max(
        float(((got.double().reshape(e.shape) - e).abs() / (e.abs() + e.square().mean().sqrt())).max())
        for got, e in zip(results, exact, strict=True)
    )


# ---- the providers ----


def ours(point: Point, given: Tensors) -> Run:
    import liger_aot

    op, kind = liger_aot.load(point.kind), point.kind
    if kind == "fused_add_rmsnorm":
        return lambda: op(*given, eps=EPS, inplace=True)
    if kind == "rope":
        q, k, table, positions = given
        cos, sin, ids = table[:, : D // 2], table[:, D // 2 :], positions[None]
        rope = partial(op, position_ids=ids, rotary_dim=D, layout="bshd", inplace=True)
        return lambda: rope(q[None], k[None], cos, sin)
    keywords: dict[str, Any] = {"eps": EPS} if "norm" in kind else {}
    return lambda: (op(*given, **keywords),)


def torch_compile(point: Point, given: Tensors) -> Run:
    torch._dynamo.reset()  # a limit counts the graphs of all lengths together
    run = torch.compile(FORMULAS[point.kind], fullgraph=True, dynamic=False)
    return lambda: run(*given)


def liger(point: Point, given: Tensors) -> Run:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.geglu import LigerGELUMulFunction
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.softmax import LigerSoftmaxFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    kind = point.kind
    if kind in ("swiglu", "geglu"):
        gate, up = (half.contiguous() for half in given[0].chunk(2, -1))
        function = LigerSiLUMulFunction if kind == "swiglu" else LigerGELUMulFunction
        return lambda: (function.apply(gate, up),)
    if kind == "rope":
        q, k, table, positions = given
        cos, sin = (half.repeat(1, 2)[None] for half in table[positions].chunk(2, -1))
        heads = [t[None].transpose(1, 2) for t in (q, k)]
        return lambda: [t.transpose(1, 2) for t in LigerRopeFunction.apply(*heads, cos, sin)]
    calls: dict[str, Run] = {
        "rmsnorm": lambda: (LigerRMSNormFunction.apply(*given, EPS, 0.0, "llama", False, None),),
        "fused_add_rmsnorm": lambda: LigerFusedAddRMSNormFunction.apply(*given, EPS, 0.0, "llama", False),
        "layernorm": lambda: (LigerLayerNormFunction.apply(*given, EPS),),
        "softmax": lambda: (LigerSoftmaxFunction.apply(*given),),
    }
    return calls[kind]


def vllm(point: Point, given: Tensors) -> Run:
    """Its kernels write into memory that is given."""
    ops: Any = torch.ops._C
    x = given[0]
    y = torch.empty(point.rows, point.columns, device=x.device, dtype=x.dtype)

    def rope() -> Tensors:
        q, k, table, positions = given
        ops.rotary_embedding(positions, q.flatten(1), k.flatten(1), D, table, True)
        return q, k

    calls: dict[str, Run] = {
        "rmsnorm": lambda: (ops.rms_norm(y, *given, EPS), (y,))[1],
        "fused_add_rmsnorm": lambda: (ops.fused_add_rms_norm(*given, EPS), given[:2])[1],
        "swiglu": lambda: (ops.silu_and_mul(y, x), (y,))[1],
        "geglu": lambda: (ops.gelu_tanh_and_mul(y, x), (y,))[1],
        "rope": rope,
    }
    return calls[point.kind]


@dataclass(frozen=True)
class Launch:
    """A launch of ours."""

    programs: tuple[int, ...]
    threads: int


@contextmanager
def launches(op: Any) -> Iterator[list[Launch]]:
    """What an op launches meanwhile."""
    found: list[Launch] = []
    bound = list(op._own.bound.values())
    all_loaded = [one for on in bound for one in on._loaded.values()]
    plans = [dict(on.plans) for on in bound]

    def recorded(launch: Callable[..., None], threads: int) -> Callable[..., None]:
        def run(device: int, stream: int, *rest: Any) -> None:
            found.append(Launch(rest[:3], threads))
            launch(device, stream, *rest)

        return run

    for one in all_loaded:
        one.launch = recorded(one.kernel.launch, one.variant.threads)
    for on in bound:  # they hold launches
        on.plans.clear()
    try:
        yield found
    finally:
        for one in all_loaded:
            one.launch = one.kernel.launch
        for on, before in zip(bound, plans, strict=True):
            on.plans.clear()
            on.plans.update(before)


def empty(point: Point, given: Tensors) -> Run:
    """Kernels that do nothing, as many as we launch and in our grids."""
    import triton

    import liger_aot

    def nothing() -> None:
        pass

    kernel = triton.jit(nothing)
    run = ours(point, given)
    run()
    with launches(liger_aot.load(point.kind)) as found:
        run()
    if not found:
        raise RuntimeError(f"{point.kind} launched nothing")
    return lambda: [kernel[one.programs](num_warps=one.threads // 32) for one in found]


PROVIDERS: dict[str, Callable[[Point, Tensors], Run]] = {
    OURS: ours,
    "torch_compile": torch_compile,
    "liger": liger,
    "vllm": vllm,
    "empty": empty,
}
NOT_THEIRS = {"vllm": ("layernorm", "softmax")}  # what a peer has no kernel for


# ---- measuring ----


def prepared(point: Point, name: str, device: torch.device) -> Ready:
    """A provider's graph and its error."""
    run = PROVIDERS[name](point, drawn(point, device))
    found = None if name == "empty" else small_error(error(point, drawn(point, device), run()), TOLERANCE)
    return captured(run, CALLS), found


def at(point: Point, names: Sequence[str], device: torch.device) -> list[Result]:
    return beside_the_copy(point, names, lambda name: prepared(point, name, device), device, CALLS)


def bytes_a_microsecond(device: torch.device) -> float:
    """Of a copy of 1 GiB."""
    times = sorted(time_device(copy_calls(GIB, device, 1, 0), 11))
    return GIB / (times[len(times) // 2] * 1e3)


def floor(found: Sequence[Result], point: Point, rate: float) -> float | None:
    """An empty kernel and the bytes' time."""
    return next((r.us + point.bytes / rate for r in found if r.provider == "empty" and r.us), None)


def line(point: Point, found: Sequence[Result], rate: float) -> str:
    least = floor(found, point, rate)
    text = f"{point.kind} {point.rows} x {point.columns}: {cells(found)}"
    return text if least is None else f"{text}, floor {least:.2f}"


def merge(file: Path) -> None:
    """Put the kinds that a file has into the kept record of its GPU."""
    found = json.loads(file.read_text())
    kept = RESULTS / folder_name(found["environment"]["gpu"]) / "steps" / "few_rows.json"
    kept.write_text(json.dumps(measured_again(json.loads(kept.read_text()), found, "kind"), indent=1) + "\n")


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["merge"]:
        merge(Path(arguments[1]))
        return 0
    command = Command("benchmarks.few_rows", __doc__, PROVIDERS)
    command.library("vllm", "vLLM's _C_stable_libtorch.abi3.so")
    command.several("rows", ROWS)
    command.several("compiled-rows", (1, 32, 256, 2048))
    command.several("columns", sorted({n for lengths in KINDS.values() for n in lengths}))
    command.several("kinds", list(KINDS))
    options = command.read(arguments)
    rate = bytes_a_microsecond(command.device)

    def measured(point: Point) -> list[Result]:
        names = [
            name
            for name in options.providers
            if point.kind not in NOT_THEIRS.get(name, ())
            and (name != "torch_compile" or point.rows in options.compiled_rows)
        ]
        return at(point, names, command.device)

    points = [
        p
        for p in POINTS
        if p.rows in options.rows and p.columns in options.columns and p.kind in options.kinds
    ]
    return command.measure(
        "few_rows", points, measured, lambda p, found: line(p, found, rate), bytes_a_microsecond=rate
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
