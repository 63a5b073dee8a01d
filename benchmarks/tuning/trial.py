"""Candidates are checked against fp64 and timed in a process of their own.

A kernel may hang, or leave an error that only a new process clears. So the tuner passes jobs to a worker process, which
answers each with a line of JSON, and kills it when an answer takes too long. That candidate is refused, and a new
process continues with the others.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any

import torch

from benchmarks import measure
from benchmarks.in_graphs import captured, microseconds
from benchmarks.op_entry import load
from benchmarks.providers import first_line
from benchmarks.tuning.candidates import digest, target
from benchmarks.tuning.space import Space
from benchmarks.tuning.spaces import SPACES
from benchmarks.workload import Workload, poisoned
from liger_aot.ops.registry import module
from liger_aot.runtime.devices import gpu
from liger_aot.runtime.dispatch import Driver, GPUDriver, OpOn, Runtimes
from liger_aot.runtime.manifest import OpManifest
from liger_aot_build.errors import BuildError

Job = dict[str, Any]
START = 300.0  # seconds that the first answer of a process may take beyond the limit: torch, inputs, fp64
LIMIT = 60.0
SMALL = 32 << 20  # bytes of a call that takes a few microseconds
LARGEST_COPY = 4 << 30  # bytes: the bandwidth of a copy does not change any more
UNIT_ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


# ---- In the process that watches ----


def supervised(
    command: Sequence[str], jobs: Sequence[Job], limit: float = LIMIT, start: float = START
) -> Iterator[tuple[Job, Job]]:
    """Each job and its answer, which says why the candidate is "refused". Where the process gave none or says that this
    is "fatal", no other job of the same candidate is tried.

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
            answer = {"refused": why, "fatal": True} if line is None else json.loads(line)
            yield job, answer
            if answer.get("fatal"):
                left = [other for other in left if other["candidate"] != job["candidate"]]
                break
        process.kill()
        process.wait()


def _pump(lines: Any, answers: Queue[str | None]) -> None:
    for line in lines:
        answers.put(line)
    answers.put(None)


def worker(arch: str, kernel: str, folder: Path, elements: int) -> list[str]:
    """The command of a process that tries this kernel's candidates."""
    return [sys.executable, "-m", "benchmarks.tuning.trial", arch, kernel, str(folder), str(elements)]


# ---- In the process that works ----


@dataclass(frozen=True)
class Machine:
    """Where candidates run. Tests bring one without a GPU, and its clock."""

    device: torch.device
    index: int  # of the device, as ops are bound to it
    multiprocessors: int
    driver: Callable[[str], Driver]  # of an op
    # Of calls that take turns; in CUDA graphs where they are small: of a few microseconds events show too much.
    milliseconds: Callable[[Mapping[str, measure.Call], bool], dict[str, float]]
    synchronize: Callable[[], None]


def this_gpu() -> Machine:
    here = gpu(0)
    return Machine(
        device=torch.device("cuda", 0),
        index=0,
        multiprocessors=here.multiprocessors,
        driver=lambda op: GPUDriver(here.shared_per_block),
        milliseconds=_milliseconds,
        synchronize=torch.cuda.synchronize,
    )


def _milliseconds(calls: Mapping[str, measure.Call], in_graphs: bool) -> dict[str, float]:
    if in_graphs:
        graphs = {name: captured(call.run) for name, call in calls.items()}
        return {name: us / 1e3 for name, us in microseconds(graphs, torch.device("cuda", 0)).items()}
    subjects = {name: [call] for name, call in calls.items()}
    samples = measure.time_interleaved(subjects, rounds=2, min_ms=4.0)
    return {name: measure.summarize(times).median_ms for name, times in samples.items()}


@dataclass(frozen=True)
class Subject:
    """What a worker needs beside its jobs. ``allowed`` is the relative error allowed for each rounding, by dtype."""

    kernel: str
    op: str
    space: Space
    folder: Path
    elements: int
    allowed: Mapping[str, float]

    def workloads(self, problem: int, n: int, dtype: str, device: torch.device) -> Sequence[Workload]:
        make, of = self.space.workloads, self.space.problems[problem]
        elements = self.elements if of.most_rows is None else of.most_rows * n
        if make is None:
            return load(self.op).workloads(self.kernel, n, DTYPES[dtype], elements, device, n)
        return make(of, n, DTYPES[dtype], elements, device)


def space_of(kernel: str) -> Space:
    if kernel not in SPACES:
        raise BuildError(f"no search space for {kernel!r}: there are those of {', '.join(SPACES)}")
    return SPACES[kernel]


def subject_of(arch: str, kernel: str, folder: Path, elements: int) -> Subject:
    of = target(arch, kernel)
    allowed = {d: r * UNIT_ROUNDOFF[d] for d, r in of.profile.tolerance.roundoffs.items()}
    return Subject(kernel, of.op, space_of(kernel), folder, elements, allowed)


def bound(subject: Subject, candidate: int, machine: Machine) -> tuple[Any, OpOn]:
    """The op bound to a candidate's binaries, and its ``OpOn``."""
    op = module(subject.op).OP
    on = {}
    for name in (subject.op, *op.uses):
        path = subject.folder / str(candidate) / f"{name}.json"
        manifest = OpManifest(path, subject.folder / f"{name}.bin", digest(path))
        on[name] = OpOn(manifest, machine.driver(name), machine.index, machine.multiprocessors)
    own = on[subject.op]
    own.kernels = {
        k: v for k, v in own.kernels.items() if k == subject.kernel or not k.startswith(subject.space.without)
    }
    return op({name: Runtimes(name, {machine.index: one}) for name, one in on.items()}), own


def answers(subject: Subject, machine: Machine, jobs: Iterable[Job]) -> Iterator[Job]:
    """An answer to each job, which is a candidate at one n and dtype."""
    made: tuple[Any, Sequence[Workload]] = None, []
    for job in jobs:
        key = job["problem"], job["n"], job["dtype"]
        try:
            if made[0] != key:
                made = key, subject.workloads(*key, machine.device)
        except Exception as error:  # every candidate of this size is without a workload
            yield {"refused": f"no workload: {type(error).__name__}: {first_line(error)}"}
            continue
        try:
            yield tried(subject, machine, job, made[1])
        except Exception as error:  # a launch that the GPU refuses is a result, too
            yield {"refused": f"{type(error).__name__}: {first_line(error)}", "fatal": True}


def tried(subject: Subject, machine: Machine, job: Job, workloads: Sequence[Workload]) -> Job:
    """Check one candidate and time it at each point, in turns with a copy."""
    points: dict[str, Job] = {}
    largest = 0.0
    for work in workloads:
        op, on = bound(subject, job["candidate"], machine)
        with torch.set_grad_enabled(work.grad):
            with poisoned():
                call = work.call(op)
                if call.restore is not None:
                    call.restore()
                results: Any = call.run()
                error = work.error(results)
            machine.synchronize()
            largest = max(largest, error)
            allowed = subject.allowed[job["dtype"]] * work.roundings
            if not error <= allowed:
                return {"refused": f"error {error:.2e} > {allowed:.2e} at {work.point}", "error": error}
            if not any(name.split("-")[0] == subject.kernel for name in on._loaded):
                return {"refused": f"{work.point} did not launch it, but {', '.join(on._loaded)}"}
            if work.timed:
                copied = min(work.bytes, LARGEST_COPY)
                (copy,) = measure.copy_calls(copied, machine.device, 1, 0)
                times = machine.milliseconds({"copy": copy, "op": call}, work.bytes <= SMALL)
                points[work.point] = {
                    "milliseconds": times["op"],
                    "of_copy": times["copy"] / times["op"] * work.bytes / copied,
                    "tflops": work.flops / times["op"] / 1e9,
                }
    return {"refused": None, "error": largest, "points": points}


def main(arguments: Sequence[str]) -> int:
    arch, kernel, folder, elements = arguments
    subject = subject_of(arch, kernel, Path(folder), int(elements))
    for answer in answers(subject, this_gpu(), json.loads(sys.stdin.read())):
        print(json.dumps(answer), flush=True)
        if answer.get("fatal"):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
