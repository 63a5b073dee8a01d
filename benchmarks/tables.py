"""Runs as text: each problem of one run with every provider, or of several runs ours beside the best peer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from benchmarks.providers import COPY, NAMES
from benchmarks.records import Measurement, Run

Lines = list[list[str]]


def render(run: Run) -> str:
    """All tables of a run as text, followed by the providers that were absent and those that failed."""
    parts = [f"{run.op}{title}\n{_aligned(lines)}" for title, lines in tables(run)]
    absent = {name: reason for seen in run.environments() for name, reason in seen.absent.items()}
    parts += [f"{name} is absent: {reason}" for name, reason in absent.items()]
    failures = {(m.provider, m.reason): m for m in run.measurements if m.status == "error"}
    parts += [f"{m.provider} failed ({m.direction} {m.point}): {m.reason}" for m in failures.values()]
    return "\n\n".join(parts)


def tables(run: Run) -> list[tuple[str, Lines]]:
    """Titles and lines, a header first: fractions of the copy, host microseconds, cold milliseconds."""
    made = []
    for direction, dtype in device_figures(run):
        found = run.select(direction=direction, dtype=dtype)
        title = f" {direction} {dtype}: fraction of the copy of as many bytes"
        made.append((title, _rows("n", found, lambda m: m.point, _fraction, copy_column=True)))
    host = [m for m in run.measurements if m.direction.startswith("host_")]
    if host:
        made.append((", host us a small call", _rows("", host, _direction, _host)))
    cold = [m for m in run.measurements if m.direction.startswith("cold_")]
    if cold:
        made.append((", ms in a fresh process", _rows("", cold, _direction, _milliseconds)))
    return made


def device_figures(run: Run) -> list[tuple[str, str]]:
    """The (direction, dtype) pairs timed on the device against a copy, in the order they were made."""
    pairs = ((m.direction, m.dtype) for m in run.measurements if m.provider == COPY)
    return list(dict.fromkeys(pairs))


def _rows(
    corner: str,
    found: list[Measurement],
    row_of: Callable[[Measurement], str],
    cell_of: Callable[[Measurement], str],
    copy_column: bool = False,
) -> Lines:
    providers = list(dict.fromkeys(m.provider for m in found if m.provider != COPY))
    rows: dict[str, dict[str, Measurement]] = {}
    for m in found:
        rows.setdefault(row_of(m), {})[m.provider] = m
    lines = [[corner, *providers] + (["copy GB/s"] if copy_column else [])]
    for name, row in rows.items():
        cells = [_cell(row.get(provider), cell_of) for provider in providers]
        if copy_column:
            cells.append(_cell(row.get(COPY), lambda m: f"{m.bandwidth_gb_s:.0f}"))
        lines.append([name, *cells])
    return lines


def _aligned(lines: Lines) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
    )


def _cell(m: Measurement | None, text: Callable[[Measurement], str]) -> str:
    if m is None:
        return "-"
    return "error" if m.status == "error" else text(m)


def _direction(m: Measurement) -> str:
    return m.direction.partition("_")[2]


def _fraction(m: Measurement) -> str:
    return f"{m.fraction:.3f}"


def _host(m: Measurement) -> str:
    return f"{m.host_us:.1f}"


def _milliseconds(m: Measurement) -> str:
    return f"{m.median_ms:.1f}"


# A peer this much faster is marked.
MARGIN = 1.03
COMPARED = ("op", "direction", "n", "ours", "best peer", "", "peer/ours", "liger/ours", "")


def compare(runs: Sequence[Run]) -> str:
    """Device points as fractions of the copy, host points as microseconds; the last columns are how long the best
    peer and Liger take against ours, and a mark: "PEER AHEAD" by more than 3%, "FAILED" where ours gave no result."""
    lines = [COMPARED, *(line for run in runs for line in _lines(run))]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COMPARED))]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    ahead = sum(line[-1] != "" for line in lines)
    return "\n".join([*text, f"{len(lines) - 1} points, {ahead} marked"])


def _lines(run: Run) -> Iterable[tuple[str, ...]]:
    points: dict[tuple[str, str, str], dict[str, Measurement]] = {}
    for m in run.measurements:
        if m.direction.startswith("cold_") or m.provider == COPY:
            continue
        points.setdefault((m.direction, m.dtype, m.point), {})[m.provider] = m
    for (direction, dtype, point), found in points.items():
        ours = found.get(NAMES[0])
        if ours is None:
            continue
        peers = [m for name, m in found.items() if name != NAMES[0] and m.status == "ok"]
        peer = min(peers, key=_time, default=None)
        kind = direction if dtype == "bfloat16" else f"{direction} {dtype}"
        head = (run.op, kind, point)
        known = ours if ours.status == "ok" else None
        mark = "FAILED" if known is None else ""
        if known is not None and peer is not None and _time(peer) * MARGIN < _time(known):
            mark = "PEER AHEAD"
        liger = next((m for m in peers if m.provider == "liger"), None)
        theirs = ("-", "") if peer is None else (_figure(peer), peer.provider)
        mine = "-" if known is None else _figure(known)
        yield (*head, mine, *theirs, _ratio(peer, known), _ratio(liger, known), mark)


def _ratio(peer: Measurement | None, ours: Measurement | None) -> str:
    return "-" if peer is None or ours is None else f"{_time(peer) / _time(ours):.2f}"


def _time(m: Measurement) -> float:
    """What the point is about: device time, or the host's."""
    value = m.median_ms if m.median_ms is not None else m.host_us
    assert value is not None, "a measurement with no error has a time"
    return value


def _figure(m: Measurement) -> str:
    return f"{m.host_us:.1f} us" if m.fraction is None else f"{m.fraction:.3f}"
