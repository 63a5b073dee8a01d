"""A run as short tables: rows of problems, columns of providers."""

from __future__ import annotations

from collections.abc import Callable

from .providers import COPY
from .records import Measurement, Run


def render(run: Run) -> str:
    """All tables of a run as text: fractions of the copy, host microseconds, cold milliseconds."""
    parts = []
    for direction, dtype in device_figures(run):
        found = run.select(direction=direction, dtype=dtype)
        title = f"{run.op} {direction} {dtype}: fraction of the copy of as many bytes"
        parts.append(_table(title, "n", found, lambda m: m.point, _fraction, copy_column=True))
    host = [m for m in run.measurements if m.direction.startswith("host_")]
    if host:
        parts.append(_table(f"{run.op}, host us a small call", "", host, _direction, _host))
    cold = [m for m in run.measurements if m.direction.startswith("cold_")]
    if cold:
        parts.append(_table(f"{run.op}, ms in a fresh process", "", cold, _direction, _milliseconds))
    parts += [f"{name} is absent: {reason}" for name, reason in run.environment.absent.items()]
    failures = {(m.provider, m.reason): m for m in run.measurements if m.status == "error"}
    parts += [f"{m.provider} failed ({m.direction} {m.point}): {m.reason}" for m in failures.values()]
    return "\n\n".join(parts)


def device_figures(run: Run) -> list[tuple[str, str]]:
    """The (direction, dtype) pairs timed on the device against a copy, in the order they were made."""
    pairs = ((m.direction, m.dtype) for m in run.measurements if m.provider == COPY)
    return list(dict.fromkeys(pairs))


def _table(
    title: str,
    corner: str,
    found: list[Measurement],
    row_of: Callable[[Measurement], str],
    cell_of: Callable[[Measurement], str],
    copy_column: bool = False,
) -> str:
    providers = list(dict.fromkeys(m.provider for m in found if m.provider != COPY))
    rows: dict[str, dict[str, Measurement]] = {}
    for m in found:
        rows.setdefault(row_of(m), {})[m.provider] = m
    header = [corner, *providers] + (["copy GB/s"] if copy_column else [])
    lines = [header]
    for name, row in rows.items():
        cells = [_cell(row.get(provider), cell_of) for provider in providers]
        if copy_column:
            cells.append(_cell(row.get(COPY), lambda m: f"{m.bandwidth_gb_s:.0f}"))
        lines.append([name, *cells])
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    body = ("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join([title, *body])


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
