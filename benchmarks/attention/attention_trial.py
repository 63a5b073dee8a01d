"""Packs of attention's candidates, tried out in processes of their own: see ``attention_candidates``.

A process gets jobs as JSON on its standard input and answers each with a line. One that gives no answer in time is
killed with the kernel that it waits for, and the next goes on with the jobs after that.
"""

from __future__ import annotations

import datetime
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention import (
    attention_trial_packed,
    attention_trial_packed_backward,
    attention_trial_windows,
)
from benchmarks.attention.attention_trial_packed_backward import distance
from liger_aot.ops.attention.flash_attention import FlashAttention
from tests.ops.attention.attention_cases import BF16, FP16, Problem
from tests.ops.attention.attention_gradients import gradient_errors

PACKED = "flash_attention_varlen"
PACKED_BACKWARD = f"{PACKED}_backward"
START = 90.0  # seconds until a process has imported all and made its first answer, beside a case's own
Job = dict[str, Any]


def about() -> dict[str, str]:
    import triton

    from benchmarks.environment import observe

    seen = observe(
        torch.device("cuda", 0),
        command="python -m benchmarks.attention.attention_candidates",
        commit=None,
        absent={},
    )
    return {
        "gpu": seen.gpu, "driver": seen.driver, "torch": seen.torch, "triton": triton.__version__,
        "date": str(datetime.date.today()),
    }  # fmt: skip


# ---- In the process that watches ----


def supervised(
    command: Sequence[str], jobs: Sequence[Job], limit: float, start: float = START
) -> Iterator[tuple[Job, Job]]:
    """Each job and its answer, which says what is "wrong". Where the process gave none or says that it is "fatal", no
    other job of the same kernel is run.

    Args:
        command: a process that reads a list of jobs and answers each with a line.
        limit: seconds an answer may take; the first of a process ``start`` more.
    """
    left = list(jobs)
    while left:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        with process.stdin as to:
            to.write(json.dumps(left))
        answers: Queue[str | None] = Queue()
        Thread(target=_pump, args=(process.stdout, answers), daemon=True).start()
        wait = start + limit
        while left:
            job = left.pop(0)
            try:
                line = answers.get(timeout=wait)
                why = "its process ended without an answer"
            except Empty:
                line, why = None, f"no answer in {wait:.0f} s"
            wait = limit
            answer = {"wrong": why, "fatal": True} if line is None else json.loads(line)
            yield job, answer
            if answer.get("fatal"):
                left = [other for other in left if "kernel" not in job or other["kernel"] != job["kernel"]]
                break
        process.kill()
        process.wait()


def worker(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.attention.attention_trial", *arguments]


def _pump(lines: Any, answers: Queue[str | None]) -> None:
    for line in lines:
        answers.put(line)
    answers.put(None)


def run_checks(pack: Path, kernels: Sequence[str], limit: float) -> Iterator[Job]:
    """A line for every case of every kernel, up to one that never ends."""
    jobs = [{"kernel": kernel, "case": i} for kernel in kernels for i in range(len(cases(kernel)))]
    for job, answer in supervised(worker("check", str(pack)), jobs, limit):
        yield {**job, "case": str(cases(job["kernel"])[job["case"]]), **answer}


def run_times(folder: Path, arch: str, direction: str, jobs: Sequence[Job], limit: float) -> Iterator[Job]:
    for job, answer in supervised(worker("time", str(folder), arch, direction), jobs, limit):
        yield {**job, **answer}


def cases(kernel: str) -> list[Any]:
    """What a kernel of the backward or a packed form must get right, the simplest first."""
    width = int(kernel.partition("_groups_")[2].partition("_")[0])
    if kernel.startswith(PACKED):
        backward = kernel.startswith(PACKED_BACKWARD)
        return attention_trial_packed.cases(width) if backward else attention_trial_packed.cases_of(kernel)
    odd = {64: 40, 96: 72, 128: 104, 192: 136, 256: 216}[width]
    if "_local" in kernel or "_capped" in kernel:
        return attention_trial_windows.cases(width, odd, "_capped" in kernel)
    causal = "_causal" in kernel
    shapes = [
        Problem(1, 1, 1, 128, 128, width),
        Problem(1, 1, 1, 512, 512, width),
        Problem(2, 3, 3, 256, 512, width),
        Problem(1, 2, 2, 1024, 1024, width, FP16, "bhsd"),
        Problem(2, 3, 3, 300, 300, width),
        Problem(1, 2, 1, 513, 777, width, FP16, "bhsd"),
        Problem(1, 4, 1, 777, 300, width),  # causal: rows that see no key
        Problem(2, 4, 2, 500, 700, odd, sinks=True),
        Problem(1, 2, 2, 40, 1000, width, FP16),
        Problem(1, 2, 2, 1000, 40, width),
        Problem(
            1, 2, 2, 300, 1, width, scale=32.0
        ),  # exp of minus lse overflows: no key may come of the 63 beside
        Problem(1, 1, 1, 8192, 300, width),  # many times around every ring
        Problem(1, 8, 2, 2048, 2048, width),
        Problem(4, 16, 4, 1000, 1000, width, FP16),
    ]
    if causal:
        return [p._replace(causal=True) for p in shapes] + [
            Problem(1, 2, 2, 250, 600, width, window=(None, 20))
        ]
    return [*shapes, Problem(1, 2, 2, 1, 1000, width), Problem(3, 2, 2, 129, 1, width)]


# ---- In the process that works ----


def bound(op_class: Any, folder: Path, by_groups: bool = True) -> tuple[Any, Any]:
    """An op of a pack, with or without its kernels by warp groups, and what it launches."""
    from liger_aot.runtime.devices import gpu
    from liger_aot.runtime.dispatch import GPUDriver, OpOn, Runtimes
    from liger_aot.runtime.manifest import Pack

    here = gpu(0)
    on = OpOn(Pack(folder).op(op_class.name), GPUDriver(here.shared_per_block), 0, here.multiprocessors)
    if not by_groups:
        on.kernels = {name: kernel for name, kernel in on.kernels.items() if "_groups" not in name}
    return op_class({op_class.name: Runtimes(op_class.name, {0: on})}), on


def check_all(folder: Path, jobs: Sequence[Job]) -> None:
    from liger_aot.ops.attention.flash_attention_backward import FlashAttentionBackward
    from liger_aot.runtime.manifest import Pack

    allowed = dict(Pack(folder).tolerance)
    for job in jobs:
        kernel, case = job["kernel"], job["case"]
        if kernel.startswith(PACKED):
            packed = (
                attention_trial_packed_backward
                if kernel.startswith(PACKED_BACKWARD)
                else attention_trial_packed
            )
            work = partial(packed.check, *packed.bound(folder))
        else:
            tiles, _ = bound(FlashAttentionBackward, folder, by_groups=False)
            op, on = bound(FlashAttentionBackward, folder)
            work = partial(check, op, tiles, on)
        _answer(partial(work, kernel, cases(kernel)[case], allowed, case))


def _answer(work: Callable[[], Job]) -> None:
    """Print what ``work`` gives; after an error the GPU reports, the process is of no more use."""
    answer: Job
    try:
        answer = work()
        torch.cuda.synchronize()
    except Exception as error:
        answer = {"wrong": f"{type(error).__name__}: {str(error)[:300]}", "fatal": True}
    print(json.dumps(answer), flush=True)
    if answer.get("fatal"):
        sys.exit(1)


def check(
    op: Any,
    tiles: Any,
    on: Any,
    kernel: str,
    problem: Problem,
    allowed: Mapping[str, float],
    seed: int,
    device: str = "cuda",
) -> Job:
    """One case: errors against float64 as fractions of what is allowed, the same bits of dK and dV again, dQ again and
    the tiles' gradients within roundings. Of a kernel in order, dQ has the same bits again, and the other kernel's
    gradients are within roundings."""
    q, k, v, sinks = problem.tensors(seed, device)
    o, lse = FlashAttention.reference(q, k, v, sinks, *problem.settings())
    o = o.contiguous()
    do = torch.randn_like(o)
    dlse = torch.randn_like(lse) if seed % 2 else None
    keywords = {key: value for key, value in problem.keywords(sinks).items() if key != "return_lse"}
    in_order = kernel.endswith("_ordered")

    def run(op: Any = op, deterministic: bool = in_order) -> tuple[Tensor, ...]:
        held = [torch.full((t.numel() * 2,), math.nan, device=device) for t in (q, k, v, lse)]
        del held  # what is never written shows
        found: tuple[Tensor, ...] = op(
            do, q, k, v, o, lse, dlse=dlse, deterministic=deterministic, **keywords
        )
        return found

    first, second = run(), run()
    launched = {name.partition("-")[0] for name in on._loaded}
    others = {"tiles": run(tiles)}
    if in_order:
        others["any order"] = run(deterministic=False)
    worst = gradient_errors(first, (q, k, v, sinks), do, dlse, problem, allowed, approximate=True)
    apart = [distance(a, b) for a, b in zip(first[:3], second[:3], strict=True)]
    wrong = []
    if kernel not in launched:
        wrong.append(f"{', '.join(on._loaded)} were launched")
    if not max(worst.values()) <= 1:
        wrong.append(f"errors {worst}")
    if apart[1] or apart[2]:
        wrong.append(f"dk and dv differ from run to run by {apart[1]:.1e} and {apart[2]:.1e}")
    unit = 2.0**-8 if problem.dtype == BF16 else 2.0**-11
    if not apart[0] <= (0 if in_order else unit):
        wrong.append(f"dq differs from run to run by {apart[0]:.1e}")
    away = {}
    for name, other in others.items():
        away[name] = [distance(a, b) for a, b in zip(first[:3], other[:3], strict=True)]
        if not max(away[name]) <= 4 * unit:  # P, dS and the result are rounded, each in both
            wrong.append(f"gradients of {name} differ by {away[name]}")
    return {"wrong": "; ".join(wrong), "worst": worst, "again": apart, **away}


def time_all(folder: Path, arch: str, direction: str, jobs: Sequence[Job]) -> None:
    from liger_aot.ops.attention.flash_attention_backward import FlashAttentionBackward

    packs = {int(p.name): p / arch for p in sorted(folder.iterdir())}
    if direction.startswith("varlen"):
        backward = direction == "varlen_backward"
        packed = attention_trial_packed_backward if backward else attention_trial_packed
        ways = {n: packed.bound(pack)[:2] for n, pack in packs.items()}
        work = partial(time_packed, packed.runs, ways, packed.others(packs[0]))
    else:
        op_class = FlashAttention if direction == "forward" else FlashAttentionBackward
        ops = {n: bound(op_class, pack)[0] for n, pack in packs.items()}
        work = partial(time, direction, ops, bound(op_class, packs[0], by_groups=False)[0])
    for job in jobs:
        _answer(partial(work, job))
        torch.cuda.empty_cache()


def time_packed(runs_of: Callable[..., Any], ways: Mapping[int, Any], others: Any, job: Job) -> Job:
    """TFLOP/s at one point: see ``attention_trial_packed.runs``."""
    if not job["packs"]:
        return {"wrong": "no pack is right"}
    ours = {n: ways[n] for n in job["packs"]}
    return speeds(*runs_of(ours, others, job["dim"], job["length"], job["causal"]))


def time(direction: str, ops: dict[int, Any], tiles: Any, job: Job) -> Job:
    """TFLOP/s at one point of each pack named, of a backward's deterministic calls, of the tiles and of cuDNN or, with
    a window, of FlashAttention-2; of none with a soft cap."""
    from benchmarks.attention.attention import BACKWARD_FLOPS, TOKENS, WIDTH

    dim, length, causal, window = job["dim"], job["length"], job["causal"], job["window"]
    shape = (TOKENS // length, length, WIDTH // dim, dim)
    q, k, v, do = (torch.randn(shape, device="cuda", dtype=BF16) for _ in range(4))
    named = {n: ops[n] for n in job["packs"]}
    if direction == "forward":
        runs = _forward_runs(named, q, k, v, causal)
    else:
        ordered = {n: ops[n] for n in job["ordered"]}
        runs = _backward_runs(named, ordered, tiles, q, k, v, do, causal, window, job["softcap"])
    seen = length**2 / (2 if causal else 1)
    if window is not None:
        seen = attention_trial_windows.pairs(length, window)
    flops = 4 * shape[0] * shape[2] * seen * dim * (1 if direction == "forward" else BACKWARD_FLOPS)
    return speeds(runs, dict.fromkeys(runs, flops))


def speeds(runs: dict[str, Callable[[], Any]], flops: Mapping[str, float], rounds: int = 5) -> Job:
    """TFLOP/s of each, which take turns; what is wrong where results of one shape are too far apart."""
    from benchmarks.attention.attention import TOLERANCE, _tried, milliseconds

    results = {name: found for name, run in runs.items() if (found := _tried(name, run)) is not None}
    runs = {name: runs[name] for name in results}
    base = next(iter(results.values()))
    for name, found in results.items():
        if [t.shape for t in found] != [t.shape for t in base]:
            continue  # of another problem
        off = max(float((a - b).norm() / b.norm()) for a, b in zip(found, base, strict=True))
        if not off < TOLERANCE:
            return {"wrong": f"{name} is {off:.1e} from {next(iter(results))}"}
    del results, base
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(milliseconds(run, max(3, round(15e-3 * 500e12 / flops[name]))))
    return {
        "wrong": "", "tflops": {name: flops[name] / statistics.median(t) / 1e9 for name, t in times.items()}
    }  # fmt: skip


def _forward_runs(ops: dict[int, Any], q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, Any]:
    mine = {str(n): (lambda op=op: (op(q, k, v, causal=causal),)) for n, op in ops.items()}
    return {**mine, "cudnn": lambda: (_cudnn(q, k, v, causal),)}


def _backward_runs(
    ops: dict[int, Any],
    ordered: dict[int, Any],
    tiles: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    causal: bool,
    window: int | None,
    softcap: float,
) -> dict[str, Any]:
    from benchmarks.attention.attention import _backward

    leaves = (q.detach(), k.detach(), v.detach())
    if window is not None:
        o, lse = attention_trial_windows.flash(*leaves, window)
        peer, forward = "flash_attention_2", lambda: attention_trial_windows.flash(*leaves, window)[0]
    else:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        swapped = [t.transpose(1, 2) for t in leaves]
        o, lse, *_ = flash(*swapped, 0.0, causal, False, scale=q.shape[-1] ** -0.5)
        o, lse = o.transpose(1, 2), lse.contiguous()
        peer, forward = "cudnn", lambda: _cudnn(*leaves, causal)
    bounds = None if window is None else (window, None)
    keywords = {"causal": causal, "window": bounds, "softcap": softcap}

    def run(op: Any, **other: Any) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = op(do, q, k, v, o, lse, **keywords, **other)
        return found[:3]

    return {
        **{str(n): partial(run, op) for n, op in ops.items()},
        **{f"{n} ordered": partial(run, op, deterministic=True) for n, op in ordered.items()},
        "tiles": partial(run, tiles),
        **({} if softcap else {peer: _backward(forward, leaves, do)}),  # neither has soft caps
    }


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        transposed = [t.transpose(1, 2) for t in (q, k, v)]
        found = torch.nn.functional.scaled_dot_product_attention(*transposed, is_causal=causal)
    return found.transpose(1, 2)


def main(arguments: Sequence[str]) -> int:
    jobs = json.loads(sys.stdin.read())
    what, folder, *rest = arguments
    if what == "check":
        check_all(Path(folder), jobs)
    else:
        time_all(Path(folder), *rest, jobs)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
