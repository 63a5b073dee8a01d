"""Training steps of whole models on one GPU: `python -m benchmarks.models.training`.

bf16, random weights and tokens: tokens per second, and the most memory that a step holds, for Transformers, Liger,
liger-aot, and Liger's code on liger-aot's binaries. Each runs in a fresh process; at every point they take turns,
`--rounds` times.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import select
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.cold_start import ROOT
from benchmarks.models.model_steps import LABELS, OURS, SHAPES, absences, file_of, finish, keep, seen_on

TIMEOUT_S = 240.0  # of one provider at one point
GIB = 1 << 30
OPTIMIZERS = ("adamw", "sgd")
PROVIDERS = ("transformers", "liger", OURS, "liger_aot_attention", "liger_on_aot")
ONCE = PROVIDERS[3:]  # no figure depends on them: one round
# What is wanted of ours: the least speed against a provider, the most memory against Liger.
LEAST_SPEED = {"transformers": 1.0, "liger": 1.05}
LEAST_SPEED_PHI3_BATCH_4 = 1.10  # against Transformers
MOST_MEMORY = 1.03


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
            "benchmarks.models.training_worker",
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


def missed(results: Sequence[Result]) -> list[str]:
    """Of one point's results: where ours is not what is wanted."""
    by = {r.provider: r for r in results}
    ours, point = by.get(OURS), results[0].point
    if ours is None:
        return []
    peers = {name: by[name] for name in LEAST_SPEED if name in by and not by[name].failed}
    if ours.failed or ours.tokens_per_second is None:
        return ["FAILED"] if peers else []
    found = []
    for name, peer in peers.items():
        least = LEAST_SPEED[name]
        if name == "transformers" and point.model == "phi3-mini" and point.batch == 4:
            least = LEAST_SPEED_PHI3_BATCH_4
        if peer.tokens_per_second and ours.tokens_per_second < least * peer.tokens_per_second:
            found.append(f"slower than {least:.2f} of {LABELS[name]}")
    liger = peers.get("liger")
    if liger and liger.peak_bytes and ours.peak_bytes and ours.peak_bytes > MOST_MEMORY * liger.peak_bytes:
        found.append(f"more memory than {MOST_MEMORY:.2f} of Liger")
    return found


def table(results: Sequence[Result]) -> str:
    """A line a point and provider: speeds and memory, and what they are of Transformers' and of Liger's."""
    lines = []
    for point, group in itertools.groupby(results, lambda r: r.point):
        found = list(group)
        by = {r.provider: r for r in found}
        lines.append(f"{point}  {'; '.join(missed(found)).upper()}".rstrip())
        for r in found:
            if r.failed:
                lines.append(f"  {LABELS[r.provider]:30s} {r.failed}")
                continue
            of = [_of(r, by.get(peer)) for peer in ("transformers", "liger")]
            peak = (
                ""
                if r.peak_bytes is None
                else f"  {r.peak_bytes / GIB:7.2f} GiB {of[0][1]:>6s} {of[1][1]:>6s}"
            )
            lines.append(
                f"  {LABELS[r.provider]:30s} {r.tokens_per_second:9.0f} tokens/s {of[0][0]:>6s} {of[1][0]:>6s}{peak}"
            )
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


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.models.training", description=__doc__)
    parser.add_argument(
        "--out", type=Path, help="folder of the results (default: benchmarks/results/GPU/steps)"
    )
    parser.add_argument("--effort", choices=EFFORTS, default="full", help="(default: full)")
    parser.add_argument("--model", action="append", choices=SHAPES, help="(may be repeated)")
    parser.add_argument("--batch", action="append", type=int, help="sequences (may be repeated)")
    parser.add_argument("--tokens", action="append", type=int, help="of a sequence (may be repeated)")
    parser.add_argument("--optimizer", action="append", choices=OPTIMIZERS, help="(may be repeated)")
    parser.add_argument("--providers", default=",".join(PROVIDERS), help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, help="of all providers in turn (default: the effort's)")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try it with tiny models"
    )
    parser.add_argument("--commit", help="the commit measured, where the tree has no history")
    options = parser.parse_args(arguments)
    names = options.providers.split(",")
    if strangers := [name for name in names if name not in PROVIDERS]:
        parser.error(f"no provider {', '.join(strangers)}: there are {', '.join(PROVIDERS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("a GPU is needed, and torch sees none here")
    effort, absent = EFFORTS[options.effort], absences(names)
    command = shlex.join(["python", "-m", "benchmarks.models.training", *arguments])
    seen = seen_on(torch.device(options.device), command=command, commit=options.commit, absent=absent)
    file = file_of(seen, "training", options.out)
    processes = {n: Process(n, options.device, effort.seconds) for n in names if n not in absent}
    results: list[Result] = []
    try:
        for point in chosen(options):
            found = at(point, processes, options.rounds or effort.rounds)
            print(table(found), flush=True)
            results += found
            keep(file, "training", seen, results=[dataclasses.asdict(r) for r in results])
    finally:
        for process in processes.values():
            process.end()
    finish(file, table(results))
    return int(any(r.failed and r.failed != "out of memory" for r in results if r.provider == OURS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
