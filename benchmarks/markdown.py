"""Tables and sources of figures as Markdown, for the README, docs/performance.md and the ops' pages."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.environment import RESULTS, ROOT
from benchmarks.records import Run

FIRST = "h200"  # the GPU on which sm90's launch numbers were measured: first in every table
VERSIONS = (
    ("driver", "driver"),
    ("torch", "torch"),
    ("triton", "Triton"),
    ("liger_kernel", "Liger-Kernel"),
    ("quack", "QuACK"),
)


@dataclass(frozen=True)
class Gpu:
    """A GPU with results in ``folder``, which `environment.folder_name` names."""

    folder: Path

    @property
    def name(self) -> str:
        """As the tables have it: "H200"."""
        return self.folder.name.upper().replace("-", " ")


def gpus(results: Path = RESULTS) -> list[Gpu]:
    """The GPUs that have a folder of results, in the order of the tables."""
    folders = sorted(path for path in results.glob("*") if path.is_dir())
    return [Gpu(folder) for folder in sorted(folders, key=lambda folder: folder.name != FIRST)]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["|" + "".join(f" {cell} |" if cell else " |" for cell in line) for line in (header, *rows)]
    return "\n".join([lines[0], "|---" * len(header) + "|", *lines[1:]])


def table_by_gpu(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with a column "GPU", which is left out where all rows are of one GPU."""
    at = header.index("GPU")
    if len({row[at] for row in rows}) > 1:
        return table(header, rows)
    return table([*header[:at], *header[at + 1 :]], [[*row[:at], *row[at + 1 :]] for row in rows])


def made_on(*environments: Mapping[str, Any]) -> str:
    """The GPU, versions and dates of runs, as far as their files have them. Runs that differ in the date alone
    are named once."""
    dates: dict[tuple[str, ...], set[str]] = {}
    for environment in environments:
        known = (f"{label} {environment[key]}" for key, label in VERSIONS if environment.get(key))
        days = dates.setdefault((environment["gpu"], *known), set())
        days |= {environment["date"][:10]} if environment.get("date") else set()
    parts = []
    for (gpu, *versions), days in dates.items():
        inside = [*versions, *([" and ".join(sorted(days))] if days else [])]
        parts.append(f"one {gpu} ({', '.join(inside)})" if inside else f"one {gpu}")
    return " and ".join(parts)


def made_in(run: Run) -> str:
    """Where a run was made, and those of its sections that were measured again after it."""
    return made_on(vars(run.environment)) + made_again({key: vars(seen) for key, seen in run.again.items()})


def made_again(environments: Mapping[str, Mapping[str, Any]]) -> str:
    """Which parts of a run were measured again, and where: the end of a sentence."""
    parts: dict[str, list[str]] = {}
    for part, environment in environments.items():
        parts.setdefault(made_on(environment), []).append(part)
    return "".join(f"; {' and '.join(names)} measured again on {made}" for made, names in parts.items())


def link(path: Path, start: Path = ROOT) -> str:
    """A Markdown link from a page in ``start`` to a file of the tree; of any other file its name."""
    if not path.is_relative_to(ROOT):
        return path.name
    return f"[{path.name}]({os.path.relpath(path, start)})"
