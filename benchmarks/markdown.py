"""Tables and sources of figures as Markdown, for the README and the ops' pages."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .records import Run

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "h200"  # of the GPU whose figures the pages show


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["|" + "".join(f" {cell} |" if cell else " |" for cell in line) for line in (header, *rows)]
    return "\n".join([lines[0], "|---" * len(header) + "|", *lines[1:]])


def made_on(environment: Mapping[str, Any]) -> str:
    """The GPU, versions and the date of a run, as far as its file has them."""
    versions = (
        ("driver", "driver"),
        ("torch", "torch"),
        ("triton", "Triton"),
        ("liger_kernel", "Liger-Kernel"),
        ("quack", "QuACK"),
    )
    known = [f"{label} {environment[key]}" for key, label in versions if environment.get(key)]
    date = [environment["date"][:10]] if environment.get("date") else []
    return f"{environment['gpu']} ({', '.join([*known, *date])})"


def made_in(run: Run) -> str:
    """Where a run was made, and those of its sections that were measured again after it."""
    sections: dict[str, list[str]] = {}
    for section, seen in run.again.items():
        sections.setdefault(made_on(vars(seen)), []).append(section)
    again = (f"; {' and '.join(names)} again on one {made}" for made, names in sections.items())
    return made_on(vars(run.environment)) + "".join(again)


def link(path: Path, start: Path = ROOT) -> str:
    """To a file of the tree, from a page in ``start``; the name alone of any other file."""
    if not path.is_relative_to(ROOT):
        return path.name
    return f"[{path.name}]({os.path.relpath(path, start)})"
