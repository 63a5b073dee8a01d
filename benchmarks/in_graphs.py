"""Calls of microseconds, timed by the replay of CUDA graphs: providers in turn, with the copy of as many bytes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from benchmarks.providers import COPY, first_line

CALLS, ROUNDS = 20, 7  # calls of a graph; its replays, of which the median counts


@dataclass(frozen=True)
class Captured:
    """A graph of calls. ``run`` is kept: the graph holds addresses, and not the tensors that lie there."""

    graph: torch.cuda.CUDAGraph
    run: Callable[[], Any]

    def replay(self) -> None:
        self.graph.replay()


# A provider's graph, and its error against float64, if it computes anything.
Ready = tuple[Captured, float | None]


class Point(Protocol):
    """What is timed."""

    @property
    def bytes(self) -> int:
        """That must be read and written."""
        ...


@dataclass(frozen=True)
class Result:
    point: Any
    provider: str
    us: float | None = None
    of_copy: float | None = None
    error: float | None = None
    failed: str | None = None


def captured(run: Callable[[], Any], calls: int = CALLS) -> Captured:
    """A graph of so many calls."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return Captured(graph, run)


def microseconds(
    graphs: Mapping[str, Captured], device: torch.device, calls: int = CALLS
) -> dict[str, float]:
    """A call of each, all in turn."""
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize(device)
            samples[name].append(start.elapsed_time(end) * 1e3 / calls)
    return {name: statistics.median(times) for name, times in samples.items()}


def made_ready(
    names: Sequence[str], prepare: Callable[[str], Ready]
) -> tuple[dict[str, Ready], dict[str, str]]:
    """(the providers that can, how the others failed): a peer that cannot do a point is a result."""
    tried = {name: _tried(prepare, name) for name in names}
    failed = {name: found for name, found in tried.items() if isinstance(found, str)}
    return {name: found for name, found in tried.items() if not isinstance(found, str)}, failed


def _tried(prepare: Callable[[str], Ready], name: str) -> Ready | str:
    try:
        return prepare(name)
    except Exception as problem:
        return f"{type(problem).__name__}: {first_line(problem)}"


def beside_the_copy(
    point: Point,
    names: Sequence[str],
    prepare: Callable[[str], Ready],
    device: torch.device,
    calls: int = CALLS,
) -> list[Result]:
    """All providers, with the copy of the point's bytes; each graph has so many calls."""
    halves = [torch.empty(point.bytes // 2, dtype=torch.uint8, device=device) for _ in range(2)]
    ready, failed = made_ready(names, prepare)
    graphs = {COPY: captured(lambda: halves[0].copy_(halves[1]), calls)}
    us = microseconds({**graphs, **{name: graph for name, (graph, _) in ready.items()}}, device, calls)
    errors = {name: error for name, (_, error) in ready.items()}
    return [
        *(Result(point, name, failed=why) for name, why in failed.items()),
        *(Result(point, n, t, us[COPY] / t, errors.get(n)) for n, t in us.items()),
    ]


def small_error(error: float, limit: float) -> float:
    """The error, if it is within the limit."""
    if not error <= limit:
        raise ArithmeticError(f"error against fp64 {error}")
    return error


def cells(found: Sequence[Result]) -> str:
    """A point's results in one line."""
    return ", ".join(
        [
            *(f"{r.provider} {r.us:.2f}" for r in found if r.us is not None),
            *(f"{r.of_copy:.2f} of the copy" for r in found if r.provider == "liger_aot" and r.of_copy),
            *(f"{r.provider} failed: {r.failed}" for r in found if r.failed),
        ]
    )
