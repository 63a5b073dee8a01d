"""Training steps of whole models on one GPU: `python -m benchmarks.models.training`.

bf16, random weights and tokens: tokens per second, and the most memory that a step holds, for Transformers, Liger,
liger-aot, and Liger's code on liger-aot's binaries. Each runs in a fresh process; at every point they take turns,
`--rounds` times.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import math
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.environment import ROOT
from benchmarks.measure import summarize
from benchmarks.models.models import SHAPES, absences, adopted, config_of, made
from benchmarks.plot import GIB
from benchmarks.providers import MODEL_LABELS, OURS, first_line
from benchmarks.steps import Command

MODULE = "benchmarks.models.training"
TIMEOUT_S = 240.0  # of one provider at one point
OPTIMIZERS = ("adamw", "sgd")
PROVIDERS = ("transformers", "liger", OURS, "liger_aot_attention", "liger_on_aot")
ONCE = PROVIDERS[3:]  # no figure depends on them: one round


@dataclass(frozen=True)
class Point:
    model: str
    batch: int
    tokens: int
    optimizer: str

    def __str__(self) -> str:
        return f"{self.model} {self.batch} x {self.tokens} {self.optimizer}"


# Models, sequences, tokens of each and optimizers, in all combinations.
EVERY = (("phi3-mini", "llama-1b", "llama-8b"), (4, 8, 16), (512, 1024, 2048), OPTIMIZERS)
SHORT = (
    Point("phi3-mini", 4, 512, "adamw"),
    Point("phi3-mini", 8, 1024, "sgd"),
    Point("llama-1b", 4, 512, "sgd"),
    Point("llama-1b", 16, 1024, "adamw"),
    Point("llama-8b", 4, 512, "adamw"),
    Point("llama-8b", 8, 1024, "sgd"),
)


def combined(axes: Iterable[Iterable[Any]]) -> tuple[Point, ...]:
    return tuple(Point(*p) for p in itertools.product(*axes))


@dataclass(frozen=True)
class Effort:
    points: tuple[Point, ...]
    rounds: int
    seconds: float  # of timed steps, a provider, point and round


EFFORTS = {"full": Effort(combined(EVERY), 3, 2.0), "short": Effort(SHORT, 2, 0.7)}


@dataclass(frozen=True)
class Result:
    """One provider at one point. Memory is torch's allocator's; `peaks` is by phase of a step, in bytes."""

    point: Point
    provider: str
    tokens_per_second: float | None = None
    slowest: float | None = None
    fastest: float | None = None
    rounds: int = 0
    steps: int = 0
    peak_bytes: int | None = None
    peaks: dict[str, int] = field(default_factory=dict)
    loss: float | None = None
    failed: str | None = None


class Process:
    """A provider's process, started when it is first asked and anew where it ended."""

    def __init__(self, provider: str, device: str, seconds: float, timeout: float = TIMEOUT_S) -> None:
        self._command = [
            sys.executable,
            "-m",
            MODULE,
            "--work",
            provider,
            device,
            str(seconds),
        ]
        self._timeout = timeout
        self._running: subprocess.Popen[str] | None = None
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (as long as this lives)

    def ask(self, point: Point) -> dict[str, Any]:
        """What it measured at a point, or how it failed."""
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(dataclasses.asdict(point)) + "\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], self._timeout)
            line = process.stdout.readline() if ready else None
        except BrokenPipeError:
            line = ""
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        if line is None:
            reason = f"no answer in {self._timeout:.0f} s"
        else:
            self._errors.seek(0)
            said = self._errors.read().strip().splitlines()
            reason = f"its process ended: {said[-1][:200] if said else f'exit status {process.wait()}'}"
        self.end()
        return {"failed": reason}

    def _started(self) -> subprocess.Popen[str]:
        if self._running is None:
            pipe = subprocess.PIPE
            self._running = subprocess.Popen(
                self._command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=self._errors, text=True
            )
        return self._running

    def end(self) -> None:
        if self._running is not None:
            self._running.kill()
            self._running.communicate()
            self._running = None


def at(point: Point, processes: dict[str, Process], rounds: int) -> list[Result]:
    """All providers in turn, so many times; one that failed is not asked again."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in processes}
    for later in range(rounds):
        for name, process in processes.items():
            before = answers[name]
            if later and (name in ONCE or "failed" in before[-1]):
                continue
            before.append(process.ask(point))
    return [pooled(point, name, found) for name, found in answers.items()]


def pooled(point: Point, provider: str, found: Sequence[dict[str, Any]]) -> Result:
    """Of several rounds: the median of speeds, the extremes of their ranges, the largest peak."""
    if "failed" in found[-1]:
        return Result(point, provider, failed=found[-1]["failed"])
    last = found[-1]
    peaks = [f["peak_bytes"] for f in found if f["peak_bytes"] is not None]
    return Result(
        point,
        provider,
        statistics.median(f["tokens_per_second"] for f in found),
        min(f["slowest"] for f in found),
        max(f["fastest"] for f in found),
        len(found),
        sum(f["steps"] for f in found),
        max(peaks, default=None),
        last["peaks"],
        last["loss"],
    )


def table(results: Sequence[Result]) -> str:
    """A line a point and provider: speeds and memory, and what they are of Transformers' and of Liger's."""
    lines = []
    for point, group in itertools.groupby(results, lambda r: r.point):
        found = list(group)
        by = {r.provider: r for r in found}
        lines.append(str(point))
        for r in found:
            if r.failed:
                lines.append(f"  {MODEL_LABELS[r.provider]:30s} {r.failed}")
                continue
            of = [_of(r, by.get(peer)) for peer in ("transformers", "liger")]
            peak = (
                ""
                if r.peak_bytes is None
                else f"  {r.peak_bytes / GIB:7.2f} GiB {of[0][1]:>6s} {of[1][1]:>6s}"
            )
            speed = f"{r.tokens_per_second:9.0f} tokens/s {of[0][0]:>6s} {of[1][0]:>6s}"
            lines.append(f"  {MODEL_LABELS[r.provider]:30s} {speed}{peak}")
    return "\n".join([*lines, "ratios: of Transformers', of Liger's"])


def _of(r: Result, peer: Result | None) -> tuple[str, str]:
    if peer is None or peer.tokens_per_second is None or r.tokens_per_second is None:
        return "-", "-"
    memory = f"{r.peak_bytes / peer.peak_bytes:.3f}" if r.peak_bytes and peer.peak_bytes else "-"
    return f"{r.tokens_per_second / peer.tokens_per_second:.3f}", memory


def chosen(options: argparse.Namespace) -> tuple[Point, ...]:
    """The effort's points, or all combinations of what was asked for."""
    asked = (options.model, options.batch, options.tokens, options.optimizer)
    if not any(asked):
        return EFFORTS[options.effort].points
    return combined(given or every for given, every in zip(asked, EVERY, strict=True))


# ---- In a provider's process: it reads points as JSON lines and answers each. Several share a GPU and take turns:
# between points a process holds no tensor. ----

# The first compiles and makes the optimizer's states, the second has all of them, the third is timed.
WARM_STEPS = 3
FEWEST, MOST = 3, 60  # timed steps
RATES = {"adamw": 1e-4, "sgd": 1e-2}
PHASES = ("forward", "backward", "optimizer")
MS = 1e3  # of a second


class Step:
    """A training step of one model on batches of random tokens, the same for every provider."""

    def __init__(self, point: dict[str, Any], provider: str, device: torch.device) -> None:
        shape = SHAPES[point["model"]]
        config = config_of(shape)
        model = made(config, device, torch.bfloat16)
        self.model = adopted(provider, shape.family, model).train()
        rate = RATES[point["optimizer"]]
        parameters = self.model.parameters()
        if point["optimizer"] == "adamw":
            self.optimizer: Any = torch.optim.AdamW(parameters, lr=rate, fused=True)
        else:
            self.optimizer = torch.optim.SGD(parameters, lr=rate)
        self._size, self._vocabulary = (point["batch"], point["tokens"]), config.vocab_size
        self._random = torch.Generator(device).manual_seed(0)
        self.peaks: dict[str, int] = {}

    def __call__(self, *, watched: bool = False) -> torch.Tensor:
        """One step; the loss. Watched, it notes the most bytes that each phase held."""
        ids = torch.randint(self._vocabulary, self._size, generator=self._random, device=self._random.device)
        loss: torch.Tensor = self.model(input_ids=ids, labels=ids).loss
        self._note("forward", watched)
        loss.backward()
        self._note("backward", watched)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._note("optimizer", watched)
        return loss.detach()

    def _note(self, phase: str, watched: bool) -> None:
        if watched and self._random.device.type == "cuda":
            self.peaks[phase] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()


def measured(point: dict[str, Any], provider: str, device: torch.device, seconds: float) -> dict[str, Any]:
    """Steps until about ``seconds`` have passed: tokens per second, peak bytes, the loss."""
    step = Step(point, provider, device)
    gpu = device.type == "cuda"
    for _ in range(WARM_STEPS - 1):
        step()
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    loss = float(step(watched=True))
    each = time.perf_counter() - began
    count = min(MOST, max(FEWEST, math.ceil(seconds / each)))
    took = [ms / MS for ms in (_gpu_steps(step, count) if gpu else _cpu_steps(step, count))]
    tokens = point["batch"] * point["tokens"]
    times = summarize(took)
    return {
        "tokens_per_second": tokens / times.median_ms,  # here in seconds
        "slowest": tokens / times.p80_ms,
        "fastest": tokens / times.p20_ms,
        "steps": count,
        "loss": loss,
        "peak_bytes": max(step.peaks.values(), default=None),
        "peaks": step.peaks,
    }


def _gpu_steps(step: Step, count: int) -> list[float]:
    """Milliseconds of each of so many steps, queued one behind the other."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in itertools.pairwise(events)]


def _cpu_steps(step: Step, count: int) -> list[float]:
    took = []
    for _ in range(count):
        began = time.perf_counter()
        step()
        took.append((time.perf_counter() - began) * MS)
    return took


def answer(point: dict[str, Any], provider: str, device: torch.device, seconds: float) -> dict[str, Any]:
    """What was measured, or why it was not: what does not fit into memory is a result."""
    try:
        return measured(point, provider, device, seconds)
    except torch.OutOfMemoryError:
        failed = "out of memory"
    except Exception as error:
        failed = f"{type(error).__name__}: {first_line(error)}"
    return {"failed": failed}


def work(provider: str, device: torch.device, seconds: float) -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    for line in sys.stdin:
        found = answer(json.loads(line), provider, device, seconds)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        print(json.dumps(found), file=answers, flush=True)


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["--work"]:
        provider, device, seconds = arguments[1:]
        work(provider, torch.device(device), float(seconds))
        return 0
    command = Command(MODULE, __doc__, PROVIDERS, on_cpu=True)
    add = command.parser.add_argument
    add("--effort", choices=EFFORTS, default="full", help="(default: full)")
    add("--model", action="append", choices=SHAPES, help="(may be repeated)")
    add("--batch", action="append", type=int, help="sequences (may be repeated)")
    add("--tokens", action="append", type=int, help="of a sequence (may be repeated)")
    add("--optimizer", action="append", choices=OPTIMIZERS, help="(may be repeated)")
    add("--rounds", type=int, help="of all providers in turn (default: the effort's)")
    options = command.read(arguments)
    effort, absent = EFFORTS[options.effort], absences(options.providers)
    file = command.file("training", absent)
    names = [name for name in options.providers if name not in absent]
    processes = {name: Process(name, options.device, effort.seconds) for name in names}
    results: list[Result] = []
    try:
        for point in chosen(options):
            found = at(point, processes, options.rounds or effort.rounds)
            print(table(found), flush=True)
            results += found
            file.keep(benchmark="training", results=results)
    finally:
        for process in processes.values():
            process.end()
    file.finish(table(results))
    return int(any(r.failed and r.failed != "out of memory" for r in results if r.provider == OURS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
