"""One run of one op: all its sections, saved as they are made, then drawn and printed."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import cold_start, environment, records, runner, table
from benchmarks.entry import load
from benchmarks.op_entry import OpEntry
from benchmarks.plot import plot
from benchmarks.providers import absence, first_line
from benchmarks.records import Measurement, Run

RESULTS = Path(__file__).resolve().parent / "results"


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


def measure(
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
    seen = environment.observe(device, command=command, commit=commit, absent=absent)
    folder = results or RESULTS / environment.folder_name(seen.gpu)
    path = folder / f"{op}.json"
    again = sections is not None and path.exists()
    run = records.read(path).without(sections or (), seen) if again else Run(op, seen, ())
    recorder = Recorder(run, path)
    try:
        _sections(recorder, load(op), sections, present, device, runner.EFFORTS[effort], points)
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {first_line(error)}"
        failures = [
            Measurement(op, (sections or ["forward"])[0], "bfloat16", (), name, status="error", reason=reason)
            for name in present
        ]
        recorder.add("stopped", failures)

    print(f"\n{table.render(recorder.run)}\n\n{recorder.path}", flush=True)
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
    effort: runner.Effort,
    points: Sequence[str],
) -> None:
    op = entry.op
    sections = entry.sections if asked is None else asked
    if "host" in sections:
        recorder.add("host", runner.host_measurements(op, entry, providers, device, effort))
    for case in entry.cases(effort.points, points):
        if case.direction in sections:
            shape = " x ".join(map(str, case.shape))
            title = " ".join((case.direction, case.dtype_name, case.variant, shape))
            recorder.add(title, runner.device_measurements(op, entry, case, providers, device, effort))
            torch.cuda.empty_cache()
    if "cold" in sections:
        offering = [name for name in providers if name in entry.providers]
        recorder.add("cold", cold_start.measurements(op, offering, effort.processes))
