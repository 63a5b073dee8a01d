"""A run as short text tables: a row for each problem, a column for each provider."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.providers import COPY
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
        made.append((title, _lines("n", found, lambda m: m.point, _fraction, copy_column=True)))
    host = [m for m in run.measurements if m.direction.startswith("host_")]
    if host:
        made.append((", host us a small call", _lines("", host, _direction, _host)))
    cold = [m for m in run.measurements if m.direction.startswith("cold_")]
    if cold:
        made.append((", ms in a fresh process", _lines("", cold, _direction, _milliseconds)))
    return made


def device_figures(run: Run) -> list[tuple[str, str]]:
    """The (direction, dtype) pairs timed on the device against a copy, in the order they were made."""
    pairs = ((m.direction, m.dtype) for m in run.measurements if m.provider == COPY)
    return list(dict.fromkeys(pairs))


def _lines(
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
