"""Several runs in one table: at every point ours, the best peer, and whether that peer is ahead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.providers import COPY, NAMES
from benchmarks.records import Measurement, Run

# A peer this much faster is marked.
MARGIN = 1.03
HEADER = ("op", "direction", "n", "ours", "best peer", "", "peer/ours", "liger/ours", "")


def render(runs: Sequence[Run]) -> str:
    """Device points as fractions of the copy, host points as microseconds; the last columns are how long the best
    peer and Liger take against ours, and a mark: "PEER AHEAD" by more than 3%, "FAILED" where ours gave no result."""
    lines = [HEADER, *(line for run in runs for line in _lines(run))]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
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
