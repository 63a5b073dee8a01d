"""One run of one op: from cases and providers to measurements, saved as they are made, then drawn and printed."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks import cold_start, measure, records, tables
from benchmarks.environment import RESULTS, folder_name, observe
from benchmarks.measure import Call
from benchmarks.op_entry import OpEntry, load
from benchmarks.plot import plot
from benchmarks.providers import COPY, absence, first_line
from benchmarks.records import Measurement, Run
from benchmarks.workload import TOLERANCE, Case, Problem, rotated_sets

T = TypeVar("T")


@dataclass(frozen=True)
class Effort:
    """How much is measured: points of each kind (None: all), rounds of all providers in turn, device milliseconds in
    each, host repeats, and fresh processes of the cold start."""

    points: int | None
    rounds: int
    min_ms: float
    host_calls: int
    host_repeats: int
    processes: int


EFFORTS = {
    "full": Effort(points=None, rounds=5, min_ms=15.0, host_calls=100, host_repeats=25, processes=5),
    "short": Effort(points=3, rounds=3, min_ms=10.0, host_calls=100, host_repeats=10, processes=3),
    "quick": Effort(points=1, rounds=2, min_ms=10.0, host_calls=100, host_repeats=5, processes=1),
}

# A large call is some launches long: few enough calls that the launch queue does not fill.
LARGE_CALLS = 8


@dataclass(frozen=True)
class Ready:
    """A provider that gave a right result on a case: what to time, and what is known of it already."""

    calls: Sequence[Call]
    host_us: float
    relative_error: float


def device_measurements(
    op: str, entry: OpEntry, case: Case, providers: Sequence[str], device: torch.device, effort: Effort
) -> list[Measurement]:
    """Every provider that has the case, in turns with a copy of as many bytes. What keeps all of them from being
    measured (too little memory for the inputs) is a failure of each."""
    subject = _Subject(op, case.direction, case.dtype_name, case.shape, case.variant)
    offering = [name for name in providers if entry.offers(name, case.variant)]
    with torch.set_grad_enabled("backward" in case.direction):
        made = _attempt(partial(_measured, subject, entry, case, offering, device, effort))
    return [subject.failure(name, made) for name in offering] if isinstance(made, str) else made


def _measured(
    subject: _Subject,
    entry: OpEntry,
    case: Case,
    providers: Sequence[str],
    device: torch.device,
    effort: Effort,
) -> list[Measurement]:
    moved = entry.moved_bytes(case)
    sets = rotated_sets(moved, torch.cuda.get_device_properties(device).L2_cache_size)
    problem = entry.problem(case, device, sets, seed=case.shape[-1])
    prepared = {name: _attempt(partial(_prepare, problem, name, case)) for name in providers}
    ready = {name: one for name, one in prepared.items() if isinstance(one, Ready)}
    subjects = {name: one.calls for name, one in ready.items()}
    subjects[COPY] = measure.copy_calls(moved, device, sets, seed=case.shape[-1])
    samples = measure.time_interleaved(subjects, rounds=effort.rounds, min_ms=effort.min_ms)

    made = [subject.failure(name, one) for name, one in prepared.items() if isinstance(one, str)]
    timings = {name: measure.summarize(times) for name, times in samples.items()}
    copy_ms = timings[COPY].median_ms
    for name, timing in timings.items():
        known = ready.get(name)
        made.append(
            subject.measurement(
                name,
                median_ms=timing.median_ms,
                p20_ms=timing.p20_ms,
                p80_ms=timing.p80_ms,
                samples=timing.samples,
                bytes=moved,
                bandwidth_gb_s=measure.gigabytes_per_second(moved, timing.median_ms),
                fraction=copy_ms / timing.median_ms,
                host_us=known.host_us if known is not None else None,
                relative_error=known.relative_error if known is not None else None,
            )
        )
    return made


def host_measurements(
    op: str, entry: OpEntry, providers: Sequence[str], device: torch.device, effort: Effort
) -> list[Measurement]:
    """What small calls cost the host, by provider and direction."""
    x = next(x for x in entry.small_inputs(device) if x.is_floating_point())
    shape, dtype = tuple(x.shape), str(x.dtype).removeprefix("torch.")
    made = []
    for provider in [name for name in providers if name in entry.providers]:
        calls = _attempt(partial(entry.host_calls, provider, device))
        if isinstance(calls, str):
            made.append(_Subject(op, "host_forward", dtype, shape).failure(provider, calls))
            continue
        for direction, run in calls.items():
            subject = _Subject(op, direction, dtype, shape)
            time_it = partial(measure.time_host, run, calls=effort.host_calls, repeats=effort.host_repeats)
            with torch.set_grad_enabled("backward" in direction):
                host_us = _attempt(time_it)
            if isinstance(host_us, str):
                made.append(subject.failure(provider, host_us))
            else:
                made.append(subject.measurement(provider, host_us=host_us))
    return made


@dataclass(frozen=True)
class _Subject:
    """What several providers are measured on: the fields their measurements share."""

    op: str
    direction: str
    dtype: str
    shape: tuple[int, ...]
    variant: str = ""

    def measurement(self, provider: str, **values: Any) -> Measurement:
        return Measurement(
            self.op, self.direction, self.dtype, self.shape, provider, variant=self.variant, **values
        )

    def failure(self, provider: str, reason: str) -> Measurement:
        return self.measurement(provider, status="error", reason=reason)


def _attempt(make: Callable[[], T]) -> T | str:
    """What `make` returns, or why it failed: a peer that cannot do a case is a result, not the run's end."""
    try:
        return make()
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"


def _prepare(problem: Problem, provider: str, case: Case) -> Ready:
    """Compile, check against fp64, and time the host side of one provider.

    Raises:
        ArithmeticError: the result is wrong.
    """
    calls = problem.calls(provider)
    _poison(_results(calls[0]))
    error = problem.check(_results(calls[0]))
    if not error <= TOLERANCE[case.dtype]:
        raise ArithmeticError(f"relative error {error:.2g} against fp64")
    host_us = measure.time_host(calls[0].run, calls=LARGE_CALLS, repeats=5)
    return Ready(calls, host_us, error)


def _results(call: Call) -> tuple[Tensor, ...]:
    if call.restore is not None:
        call.restore()
    results = call.run()
    if not isinstance(results, tuple):
        raise TypeError(f"a call returned {type(results).__name__}, not a tuple of tensors")
    return results


def _poison(results: tuple[Tensor, ...]) -> None:
    """Fill memory that was just a result with NaN and let it go: the allocator hands the same blocks to the
    next call of these sizes, so an element that call does not write shows in its check. Past autograd's eyes: a
    peer's result may be what it has saved and has overwritten."""
    for result in results:
        result.data.fill_(float("nan"))


class Recorder:
    """Collects measurements and keeps the file up to date, so that a run cut short keeps what it had."""

    def __init__(self, run: Run, path: Path) -> None:
        self.run = run
        self.path = path
        self._start = time.monotonic()

    def add(self, title: str, measurements: Iterable[Measurement]) -> None:
        """Record what an iterator measures, then save."""
        made = tuple(measurements)
        self.run = replace(self.run, measurements=self.run.measurements + made)
        records.write(self.path, self.run)
        failed = [m.provider for m in made if m.status == "error"]
        note = f"; failed: {', '.join(failed)}" if failed else ""
        print(f"[{time.monotonic() - self._start:6.1f} s] {title}: {len(made)} records{note}", flush=True)


def measure_op(
    op: str,
    *,
    sections: Sequence[str] | None,
    providers: Sequence[str],
    effort: str,
    points: Sequence[str] = (),
    results: Path | None,
    command: str,
    commit: str | None,
) -> Run:
    """Measure an op on GPU 0 and write OP.json, OP.png and OP.svg into `results` (or the GPU's own folder).

    Sections are "forward", "backward", "host" and "cold"; a file there from before keeps the others, with the
    environment of each part beside it. By default they are those that the op's entry names, and the file is replaced
    whole. ``points`` names the points of the device figures to measure (default: as many as the effort says). What
    goes wrong is recorded as an error of all providers: the next op is measured all the same.
    """
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    absent = {name: reason for name in providers if (reason := absence(name)) is not None}
    present = [name for name in providers if name not in absent]
    seen = observe(device, command=command, commit=commit, absent=absent)
    folder = results or RESULTS / folder_name(seen.gpu)
    path = folder / f"{op}.json"
    again = sections is not None and path.exists()
    run = records.read(path).without(sections or (), seen) if again else Run(op, seen, ())
    recorder = Recorder(run, path)
    try:
        _sections(recorder, load(op), sections, present, device, EFFORTS[effort], points)
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {first_line(error)}"
        failures = [
            Measurement(op, (sections or ["forward"])[0], "bfloat16", (), name, status="error", reason=reason)
            for name in present
        ]
        recorder.add("stopped", failures)

    print(f"\n{tables.render(recorder.run)}\n\n{recorder.path}", flush=True)
    try:
        plot(recorder.path)
    except (ImportError, ValueError) as error:
        print(f"not drawn: {error}; `python -m benchmarks plot {recorder.path}` draws it where matplotlib is")
    return recorder.run


def _sections(
    recorder: Recorder,
    entry: OpEntry,
    asked: Sequence[str] | None,
    providers: Sequence[str],
    device: torch.device,
    effort: Effort,
    points: Sequence[str],
) -> None:
    op = entry.op
    sections = entry.sections if asked is None else asked
    if "host" in sections:
        recorder.add("host", host_measurements(op, entry, providers, device, effort))
    for case in entry.cases(effort.points, points):
        if case.direction in sections:
            shape = " x ".join(map(str, case.shape))
            title = " ".join((case.direction, case.dtype_name, case.variant, shape))
            recorder.add(title, device_measurements(op, entry, case, providers, device, effort))
            torch.cuda.empty_cache()
    if "cold" in sections:
        offering = [name for name in providers if name in entry.providers]
        recorder.add("cold", cold_start.measurements(op, offering, effort.processes))
