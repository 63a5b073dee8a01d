"""A recording -> for each architecture, the binaries that a pack is made of, and what is left out and why."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import get_context

from liger_aot.triton.identity import Variant
from liger_aot.triton.recording import Choice, Function, Made, Part
from liger_aot.triton.targets import Target
from liger_aot_build.errors import BuildError
from liger_aot_build.triton_packs import worker
from liger_aot_build.triton_packs.find import BY_GLOBALS
from liger_aot_build.triton_packs.worker import Built, Job, Setup

Key = tuple[str, str, str]  # of a recorded function

_SAID = 10.0  # seconds between lines that say how far a build is


@dataclass(frozen=True)
class Settings:
    """What a build is told beside the recording."""

    packages: tuple[str, ...] = ()
    main: str | None = None
    jobs: int | None = None


@dataclass(frozen=True)
class LeftOut:
    """A variant that no binary was made of."""

    function: str
    variant: str
    why: str


@dataclass
class Result:
    """One architecture's binaries, by the recorded variant that they are of."""

    target: Target
    recorded: Part
    built: list[tuple[Job, Built]] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What tuners chose, of functions that are in the pack."""
        functions = {job.noted.variant.function for job, _ in self.built}
        return tuple(c for c in self.recorded.choices if f"{c.module}:{c.qualname}" in functions)


def nearest(parts: Sequence[Part], of: Target) -> Part:
    """The recording to build ``of`` from: its own, else that of the nearest GPU, of the same vendor where there is one.
    An earlier one of NVIDIA's goes before a later one: sm80's kernels use nothing that sm89 lacks, sm90's may. One in
    which kernels ran goes before one in which none did."""

    def distance(part: Part) -> tuple[bool, bool, int, bool, str]:
        there = part.target
        ahead = _number(there) - _number(of)
        later = there.backend == of.backend == "cuda" and ahead > 0
        return there.backend != of.backend, later, abs(ahead), not part.timed, there.name

    return min(parts, key=distance)


def _number(of: Target) -> int:
    return of.arch if isinstance(of.arch, int) else int(of.arch.removeprefix("gfx"), 16)


def build(parts: Sequence[Part], of: Target, settings: Settings) -> Result:
    """Compile all that was recorded, for ``of``."""
    part = nearest(parts, of)
    jobs, refused = _jobs(part, of)
    result = Result(of, part, left_out=refused)
    with _processes(of, settings, len(jobs)) as pool:
        jobs = list(_proved(jobs, part, of, settings, pool, result))
        outcomes = pool.map(worker.compile_job, jobs)
        for job, outcome in zip(jobs, _told(outcomes, len(jobs), of), strict=True):
            if isinstance(outcome, Built):
                result.built.append((job, outcome))
            else:
                result.left_out.append(_left_out(job, outcome))
    return result


def _left_out(job: Job, why: str) -> LeftOut:
    return LeftOut(job.noted.variant.function, job.noted.variant.name, why)


@contextmanager
def _processes(of: Target, settings: Settings, work: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that see a GPU of ``of``."""
    count = min(settings.jobs or len(os.sched_getaffinity(0)), max(work, 1))
    scratch = tempfile.mkdtemp(prefix="liger-aot-")
    setup = Setup(of, settings.packages, settings.main, scratch)
    pool = ProcessPoolExecutor(count, get_context("spawn"), worker.start, (setup,))
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        shutil.rmtree(scratch, ignore_errors=True)


def _jobs(part: Part, of: Target) -> tuple[list[Job], list[LeftOut]]:
    """What to compile. On AMD a binary may take tensors to be smaller than 2 GiB: a recording of an AMD GPU says of
    which; from another's, a second binary takes any."""
    jobs: dict[tuple[str, tuple[tuple[int, ...], ...]], Job] = {}
    refused = []
    for noted in part.variants:
        functions = _functions(noted.variant, part)
        if isinstance(functions, str):
            refused.append(LeftOut(noted.variant.function, noted.variant.name, functions))
            continue
        ranges: list[tuple[tuple[int, ...], ...]] = [()]
        if of.backend == "hip":
            ranges = [noted.ranged] if part.target.backend == "hip" else [noted.ranged, ()]
        for ranged in ranges:
            key = (noted.variant.name, ranged)
            jobs.setdefault(key, Job(noted, functions, part.target == of, ranged))
    return list(jobs.values()), refused


def _functions(variant: Variant, part: Part) -> tuple[Function, ...] | str:
    """The functions that a variant is made of, itself first, and those among their variables; why not, where the
    recording lacks one."""
    named = [(variant.module, variant.qualname, variant.cache_key)]
    named += _named([value for _, value in variant.constants])
    found: dict[Key, Function] = {}
    while named:
        key = named.pop(0)
        if key in found:
            continue
        if key not in part.functions:
            return f"the recording says nothing of {key[0]}:{key[1]}, a constant or variable of it"
        found[key] = function = part.functions[key]
        if isinstance(function.made, Made):
            named += _named([value for _, value in (*function.made.variables, *function.made.defaults)])
    return tuple(found.values())


def _named(data: object) -> list[tuple[str, str, str]]:
    if isinstance(data, list):
        return [found for item in data for found in _named(item)]
    if isinstance(data, dict):
        body = data.get("function")
        if isinstance(body, list) and len(body) == 3:
            return [(str(body[0]), str(body[1]), str(body[2]))]
        return [found for item in data.values() for found in _named(item)]
    return []


def _proved(
    jobs: Sequence[Job],
    part: Part,
    of: Target,
    settings: Settings,
    pool: ProcessPoolExecutor,
    result: Result,
) -> Iterator[Job]:
    """Those of ``jobs`` whose functions are known to be what this GPU makes of them. Where another GPU was recorded on
    and a function differs on this one, a process that sees the recorded one must make it as recorded."""
    if part.target == of:
        yield from jobs
        return
    functions = {function.key: function for job in jobs for function in job.functions}

    def differing(pool: ProcessPoolExecutor, keys: Collection[Key], calls: bool = False) -> dict[Key, str]:
        some = [functions[key] for key in keys]
        said = pool.submit(worker.reproduced, list(functions.values()), some, calls).result()
        return {key: problem for key, problem in zip(keys, said, strict=True) if problem}

    why, made = differing(pool, functions), set[Key]()
    if why:
        with _processes(part.target, settings, 1) as before:
            by_import = differing(before, why)
            why = differing(before, by_import, calls=True)
        made = by_import.keys() - why.keys()
    for key, problem in why.items():
        if BY_GLOBALS in problem:
            why[key] += f". It can't be told what {of.profile} would make of it: record on {of.profile}"
    for job in jobs:
        if problem := next((why[f.key] for f in job.functions if f.key in why), ""):
            result.left_out.append(_left_out(job, problem))
        else:
            yield replace(job, made=frozenset(made))


def _told(outcomes: Iterator[Built | str], count: int, of: Target) -> Iterator[Built | str]:
    """``outcomes``, with a line on stderr now and then."""
    before = time.monotonic()
    for index, outcome in enumerate(outcomes, 1):
        if time.monotonic() - before > _SAID:
            before = time.monotonic()
            print(f"{of.profile}: {index}/{count} kernels compiled", file=sys.stderr, flush=True)
        yield outcome


def check_triton(parts: Sequence[Part]) -> str:
    """Triton's version, which must be the one that was recorded with: its defaults and rules are part of a variant."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("triton").partition("+")[0]
    except PackageNotFoundError:
        raise BuildError(f"triton is not installed: pip install triton=={parts[0].triton}") from None
    if found != parts[0].triton:
        raise BuildError(
            f"recorded with triton {parts[0].triton}, found {found}: install that, or record anew"
        )
    return found


def by_function(result: Result) -> Mapping[str, list[tuple[Job, Built]]]:
    """The binaries by their function's name, in one order."""
    found: dict[str, list[tuple[Job, Built]]] = defaultdict(list)
    for job, built in sorted(result.built, key=lambda one: (one[1].name, -len(one[1].ranged), one[1].ranged)):
        found[job.noted.variant.function].append((job, built))
    return dict(sorted(found.items()))
