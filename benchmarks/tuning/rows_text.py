"""Rows of a launch table as text: a profile is written for people, and keeps its comments when the tuner edits it."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liger_aot_build.errors import ProfileError
from liger_aot_build.profile import read_profile, row_keys

if sys.version_info >= (3, 11):
    import tomllib
else:
    from setuptools.compat.py310 import tomllib


@dataclass(frozen=True)
class Winner:
    """The row that won for problems up to ``max_n`` of these axes' values, of at most ``most_rows`` rows where that is
    given, and what it reached."""

    max_n: int | None
    when: Mapping[str, tuple[Any, ...]]
    candidate: Mapping[str, Any]
    comment: str
    most_rows: int | None = None

    def line(self) -> str:
        bounds = {"most_rows": self.most_rows, "max_n": self.max_n}
        bound = {key: value for key, value in bounds.items() if value is not None}
        axes = {axis: list(values) if len(values) > 1 else values[0] for axis, values in self.when.items()}
        pairs = {**bound, "form": self.candidate["form"], **axes, **self.candidate}
        return f"  {_row(pairs)}, # {self.comment}"


def write_rows(path: Path, kernel: str, winners: Sequence[Winner], provenance: str) -> None:
    """Put the winners into ``[kernel.<kernel>]``, in place of rows with the same bound and dtypes. A profile that has
    the table from the one that it extends gets its own, with the other's remaining rows."""
    text = path.read_text()
    pattern = re.compile(rf"^\[kernel\.{kernel}\]\n.*?(?=^\[|\Z)", re.MULTILINE | re.DOTALL)
    found = pattern.search(text)
    if found is None and re.search(r"^extends = ", text, re.MULTILINE) is None:
        raise ProfileError(f"{path.name}: table [kernel.{kernel}] is missing")
    if found is None:
        text = f"{text.rstrip()}\n\n{_inherited(path, kernel)}"
    elif re.search(r"^changes = \[$", found[0], re.MULTILINE):
        text = f"{text[: found.start()]}{_inherited(path, kernel)}\n{text[found.end() :]}"
    section = pattern.search(text)
    assert section is not None
    body = re.search(r"^rows = \[\n(.*?)^\]", section[0], re.MULTILINE | re.DOTALL)
    if body is None:
        raise ProfileError(f"{path.name}: [kernel.{kernel}]: rows must stand one a line")
    lines = [(_parse(path, line), line) for line in body[1].splitlines() if line.strip().startswith("{")]
    kept = [(row, line) for item in lines for row, line in _narrowed(*item, winners)]
    lines = [(_parse(path, w.line()), w.line()) for w in winners] + kept
    lines.sort(key=lambda item: _order(item[0]))
    rows = "\n".join(line for _, line in lines)
    fresh = f'[kernel.{kernel}]\nprovenance = """\n{provenance}"""\nrows = [\n{rows}\n]\n\n'
    path.write_text((text[: section.start()] + fresh + text[section.end() :]).rstrip() + "\n")


def _inherited(path: Path, kernel: str) -> str:
    """A table whose rows a profile has from another, with changes or without, as text."""
    table = read_profile(path.stem, path.parent).table(kernel)
    rows = "\n".join(f"  {_row(row_keys(row))}," for row in table.rows)
    return f'[kernel.{kernel}]\nprovenance = """\n{table.provenance}"""\nrows = [\n{rows}\n]\n'


def _row(keys: Mapping[str, Any]) -> str:
    return f"{{ {', '.join(f'{k} = {_value(v)}' for k, v in keys.items())} }}"


def _parse(path: Path, line: str) -> dict[str, Any]:
    try:
        row: dict[str, Any] = tomllib.loads(f"row = {line.strip().partition('#')[0].strip().rstrip(',')}")[
            "row"
        ]
    except tomllib.TOMLDecodeError as error:
        raise ProfileError(f"{path.name}: {line.strip()}: {error}") from None
    return row


def _narrowed(row: dict[str, Any], line: str, winners: Sequence[Winner]) -> list[tuple[dict[str, Any], str]]:
    """A row beside winners with the same bound and axes: it keeps the dtypes that no winner has."""
    left = dtypes = _tuple(row.get("dtype", ["bf16", "fp16", "fp32"]))
    for winner in winners:
        others = {axis: values for axis, values in winner.when.items() if axis != "dtype"}
        same = (winner.max_n, winner.most_rows) == (row.get("max_n"), row.get("most_rows"))
        if same and all(_tuple(row.get(a)) == v for a, v in others.items()):
            left = tuple(d for d in left if d not in winner.when["dtype"])
    if row.get("aligned") is False or left == dtypes:
        return [(row, line)]
    if not left:
        return []
    row = {**row, "dtype": list(left)}
    return [(row, f"  {_row(row)},")]


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list) else (value,)


def _order(row: Mapping[str, Any]) -> tuple[float, ...]:
    """Those for the fewest rows first: of these the first that holds a call is taken."""
    return (
        row.get("most_rows", float("inf")),
        row.get("aligned") is not False,
        row.get("max_n", float("inf")),
    )


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)
