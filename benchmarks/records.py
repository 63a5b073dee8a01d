"""What one run of the benchmarks measured, and the JSON file that keeps it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 2
# Format 1 knew no variants; its files are kept results and are still read.
_ADDED_SINCE_1 = {"variant": ""}
STATUSES = ("ok", "error")


@dataclass(frozen=True)
class Environment:
    """Where and from what a run was made. Versions are None where the package is not installed."""

    gpu: str
    multiprocessors: int
    l2_bytes: int
    driver: str
    cuda: str
    python: str
    torch: str
    triton: str | None
    liger_kernel: str | None
    quack: str | None
    liger_aot: str | None
    date: str
    commit: str
    command: str
    absent: dict[str, str]
    """Providers that were asked for and are not here, each with the reason."""


@dataclass(frozen=True)
class Measurement:
    """One op, direction, dtype, shape, variant and provider.

    Device directions ("forward", "backward") give milliseconds of device time a call, the bytes the call
    has to move, the bandwidth that makes, and its fraction of a copy of as many bytes timed in the same
    rounds; `host_us` is what the call costs the host. Host directions ("host_...") give `host_us` alone.
    Cold directions ("cold_...") give wall milliseconds in fresh processes.
    """

    op: str
    direction: str
    dtype: str
    shape: tuple[int, ...]
    provider: str
    status: str = "ok"
    reason: str | None = None
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    samples: int | None = None
    bytes: int | None = None
    bandwidth_gb_s: float | None = None
    fraction: float | None = None
    host_us: float | None = None
    relative_error: float | None = None
    variant: str = ""

    def __post_init__(self) -> None:
        problem = _problem(self)
        if problem:
            raise ValueError(
                f"{self.op} {self.direction} {self.dtype} {self.point} {self.provider}: {problem}"
            )

    @property
    def section(self) -> str:
        """The part of a run that it belongs to: "forward", "backward", "host" or "cold"."""
        return self.direction.partition("_")[0]

    @property
    def point(self) -> str:
        return point(self.shape, self.variant)


def point(shape: tuple[int, ...], variant: str) -> str:
    """Which problem, in a table's words: the row length of (rows, n), any other shape whole."""
    size = str(shape[-1]) if len(shape) == 2 else "x".join(map(str, shape))
    return f"{variant} {size}".strip()


@dataclass(frozen=True)
class Run:
    """All measurements of one op: of one run, but for the sections that were measured again after it."""

    op: str
    environment: Environment
    measurements: tuple[Measurement, ...]
    again: dict[str, Environment] = dataclasses.field(default_factory=dict)
    """Section -> where and from what it was measured again."""

    def environments(self, *sections: str) -> list[Environment]:
        """Those that the sections' measurements were made in, each once; of all sections by default."""
        made = (m.section for m in self.measurements if not sections or m.section in sections)
        found: list[Environment] = []
        for seen in (self.again.get(section, self.environment) for section in dict.fromkeys(made)):
            if seen not in found:
                found.append(seen)
        return found

    def without(self, sections: Sequence[str], environment: Environment) -> Run:
        """What stays of it where these sections are measured again in another environment."""
        kept = tuple(m for m in self.measurements if m.section not in sections)
        if not kept:
            return Run(self.op, environment, ())
        return Run(self.op, self.environment, kept, self.again | dict.fromkeys(sections, environment))

    def select(self, **fields: object) -> list[Measurement]:
        """The measurements whose named fields have these values, in the order they were made."""
        return [m for m in self.measurements if all(getattr(m, k) == v for k, v in fields.items())]


def _problem(m: Measurement) -> str | None:
    """What contradicts itself in a measurement, or None."""
    if m.status not in STATUSES:
        return f"status {m.status!r} is none of {', '.join(STATUSES)}"
    if (m.status == "error") != (m.reason is not None):
        return "an error has a reason, and nothing else has one"
    times = (m.p20_ms, m.median_ms, m.p80_ms)
    if m.status == "error":
        return "an error has no time" if m.median_ms is not None or m.host_us is not None else None
    if m.median_ms is None and m.host_us is None:
        return "neither a device time nor a host time"
    if any(t is None for t in times) != all(t is None for t in times):
        return "median_ms, p20_ms and p80_ms come together"
    for field in (
        "median_ms",
        "p20_ms",
        "p80_ms",
        "samples",
        "bytes",
        "bandwidth_gb_s",
        "fraction",
        "host_us",
    ):
        value = getattr(m, field)
        if value is not None and not (math.isfinite(value) and value > 0):
            return f"{field} is {value}"
    ordered = (m.p20_ms or 0) <= (m.median_ms or 0) <= (m.p80_ms or 0)
    if not ordered:
        return f"the median {m.median_ms} is outside p20 {m.p20_ms} to p80 {m.p80_ms}"
    if m.bytes is None or m.bandwidth_gb_s is None or m.median_ms is None:
        return None if m.bytes is m.bandwidth_gb_s is None else "bytes and bandwidth_gb_s come with a time"
    if not math.isclose(m.bandwidth_gb_s, m.bytes / m.median_ms / 1e6, rel_tol=1e-3):
        return f"{m.bytes} bytes in {m.median_ms} ms are not {m.bandwidth_gb_s} GB/s"
    return None


def write(path: Path, run: Run) -> None:
    """Write a run as JSON, one measurement a line so that a diff reads well. Replaces the file whole."""
    environment = json.dumps(dataclasses.asdict(run.environment), indent=1)
    again = json.dumps({section: dataclasses.asdict(seen) for section, seen in run.again.items()}, indent=1)
    again = f'"again": {again},\n' if run.again else ""
    lines = ",\n".join(json.dumps(dataclasses.asdict(m)) for m in run.measurements)
    text = (
        f'{{"format": {FORMAT}, "op": {json.dumps(run.op)},\n"environment": {environment},\n{again}'
        f'"measurements": [\n{lines}\n]}}\n'
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)


def read(path: Path) -> Run:
    """Read what `write` wrote.

    Raises:
        ValueError: the file is no run of this format; the message names the file and what is wrong.
    """
    try:
        data = json.loads(path.read_text())
        if not isinstance(data, dict) or data.get("format") not in (1, FORMAT):
            raise ValueError(f"not a benchmark file of format {FORMAT} or 1")
        added = _ADDED_SINCE_1 if data["format"] == 1 else {}
        environment = _build(Environment, data.get("environment"))
        measurements = tuple(
            _build(Measurement, {**item, **added, "shape": tuple(item["shape"])})
            for item in data["measurements"]
        )
        again = {section: _build(Environment, seen) for section, seen in data.get("again", {}).items()}
        return Run(str(data["op"]), environment, measurements, again)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def _build(kind: type[Any], data: object) -> Any:
    """A dataclass from exactly its own fields."""
    if not isinstance(data, dict):
        raise ValueError(f"{kind.__name__} is not an object")
    names = {field.name for field in dataclasses.fields(kind)}
    if set(data) != names:
        wrong = sorted(set(data) ^ names)
        raise ValueError(f"{kind.__name__} has missing or unknown fields: {', '.join(wrong)}")
    return kind(**data)
