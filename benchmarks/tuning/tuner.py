"""A run of the tuner: for every problem of a kernel's space, all candidates and the winner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.tuning.candidates import Candidate, Target, prepare, rows
from benchmarks.tuning.rows_text import Winner
from benchmarks.tuning.space import Problem, Row
from benchmarks.tuning.trial import Job, space_of
from liger_aot_build.errors import BuildError

# (the candidates' folder, jobs) -> each job with its answer
Try = Callable[[Path, Sequence[Job]], Iterable[tuple[Job, Job]]]


@dataclass
class Measured:
    """A candidate of a problem: what it reached at each point, or why it was left out."""

    row: Row
    refused: str | None = None
    error: float | None = None
    points: dict[str, Mapping[str, float]] = field(default_factory=dict)


def tune(
    kernel: str, of: Target, attempt: Try, problems: Sequence[Problem], workers: int | None = None
) -> Iterator[tuple[Problem, list[Measured], Winner | str]]:
    """Each problem with what was measured and the winner, or why there is none."""
    space = space_of(kernel)
    for problem in problems:
        with TemporaryDirectory(prefix="tuning_") as temporary:
            folder = Path(temporary)
            made = prepare(of, problem, rows(space, problem, of), folder, workers)
            measured = measure(problem, space.problems.index(problem), made, folder, attempt)
        try:
            yield problem, measured, best(problem, measured)
        except BuildError as error:
            yield problem, measured, str(error)


def measure(
    problem: Problem, number: int, made: Sequence[Candidate], folder: Path, attempt: Try
) -> list[Measured]:
    """``number`` is the problem's in its space."""
    found = [Measured(one.row, one.refused) for one in made]
    jobs: list[Job] = [
        {"candidate": i, "problem": number, "n": n, "dtype": problem.dtypes[0]}
        for n in problem.sizes
        for i, one in enumerate(made)
        if not one.refused
    ]
    for job, answer in attempt(folder, jobs):
        one = found[job["candidate"]]
        one.refused = one.refused or answer["refused"]
        one.error = max(one.error or 0.0, answer.get("error") or 0.0)
        one.points |= {f"{job['n']}: {point}": figures for point, figures in answer.get("points", {}).items()}
    return found


def best(problem: Problem, measured: Sequence[Measured]) -> Winner:
    """The candidate with the best worst case: at each point its speed is a fraction of the fastest candidate's, and the
    least of these fractions counts."""
    ran = [one for one in measured if one.refused is None and one.points]
    if not ran:
        reasons = dict.fromkeys(str(one.refused) for one in measured)
        raise BuildError(f"{problem}: no candidate ran: {'; '.join(reasons) or 'there is none'}")
    fastest = {point: min(one.points[point]["milliseconds"] for one in ran) for point in ran[0].points}

    def least(one: Measured) -> float:
        return min(fastest[point] / figures["milliseconds"] for point, figures in one.points.items())

    winner = max(ran, key=least)
    reached = ", ".join(f"{_figure(figures)} at {point}" for point, figures in winner.points.items())
    comment = f"{reached}; worst of {len(ran)} {min(map(least, ran)):.2f} of the fastest"
    when = {"dtype": problem.dtypes, **problem.when}
    return Winner(problem.max_n, when, winner.row, comment, problem.most_rows)


def _figure(figures: Mapping[str, float]) -> str:
    return f"{figures['tflops']:.0f} TFLOP/s" if figures["tflops"] else f"{figures['of_copy']:.3f}"


def report(problem: Problem, measured: Sequence[Measured]) -> dict[str, Any]:
    """A problem's part of the report file."""
    return {"problem": asdict(problem), "candidates": [asdict(one) for one in measured]}
