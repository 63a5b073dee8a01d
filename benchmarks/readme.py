"""The README's tables of figures, from the files of results alone: `python -m benchmarks readme`.

A section stands between two markers, heading and source with it. One whose file is not there is left empty, so that
results which come later need this command and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from . import readme_ops, readme_steps

MARKED = re.compile(r"(<!-- measured: ([\w ]+) -->\n)(.*?)(<!-- /measured -->)", re.DOTALL)


def write(readme: Path, results: Path, *, check: bool = False) -> bool:
    """Put the sections into the README; returns whether they were there already.

    Args:
        results: one GPU's folder of results.
        check: write nothing.

    Raises:
        ValueError: a marker names no section, a file does not hold together.
    """
    before = readme.read_text()
    after = rendered(before, results)
    if not check and after != before:
        readme.write_text(after)
    return after == before


def rendered(text: str, results: Path) -> str:
    """``text`` with what stands between its markers made anew."""

    def fresh(match: re.Match[str]) -> str:
        opening, name, _, closing = match.groups()
        section = body(name, results)
        return f"{opening}\n{section}\n\n{closing}" if section else f"{opening}{closing}"

    return MARKED.sub(fresh, text)


def body(name: str, results: Path) -> str:
    """A section, "" where its file is not there."""
    if name not in SECTIONS:
        raise ValueError(f"no section {name!r}: there are {', '.join(SECTIONS)}")
    try:
        return SECTIONS[name](results)
    except FileNotFoundError:
        return ""


SECTIONS: dict[str, Callable[[Path], str]] = {
    "rmsnorm": readme_ops.rmsnorm,
    "attention forward": readme_steps.attention_forward,
    "attention backward": readme_steps.attention_backward,
    "decoding": readme_steps.decoding,
    "other ops": readme_ops.other_ops,
    "losses": readme_ops.losses,
    "fused linear cross entropy": readme_steps.fused_linear_cross_entropy,
    "fused linear jsd": readme_steps.fused_linear_jsd,
    "training": readme_steps.training,
}
