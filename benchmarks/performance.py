"""The tables of figures in README.md and docs/performance.md, from the files of results alone: `python -m benchmarks
performance`.

A section stands between two markers, with its heading and with where it was measured. It shows every GPU that has a
folder of results with the section's file. A section without results is left empty, so that results which come later
need this command and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import headline, performance_ops, performance_steps
from benchmarks.markdown import ROOT, Gpu, gpus

PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md")
MARKED = re.compile(r"(<!-- measured: ([\w ]+) -->\n)(.*?)(<!-- /measured -->)", re.DOTALL)


def write(*, check: bool = False) -> list[Path]:
    """Put the sections into the pages; returns the pages that were not up to date.

    Args:
        check: write nothing.

    Raises:
        ValueError: a marker names no section, or a file of results contradicts itself.
    """
    stale = []
    for page in PAGES:
        before = page.read_text()
        after = rendered(before, gpus(), page.parent)
        if after != before:
            stale.append(page)
            if not check:
                page.write_text(after)
    return stale


def rendered(text: str, found: Sequence[Gpu], start: Path) -> str:
    """``text``, of a page in the folder ``start``, with what stands between its markers made anew."""

    def fresh(match: re.Match[str]) -> str:
        opening, name, _, closing = match.groups()
        section = body(name, found, start)
        return f"{opening}\n{section}\n\n{closing}" if section else f"{opening}{closing}"

    return MARKED.sub(fresh, text)


def body(name: str, found: Sequence[Gpu], start: Path) -> str:
    """A section for a page in the folder ``start``; "" where no GPU has results for it."""
    if name not in SECTIONS:
        raise ValueError(f"no section {name!r}: there are {', '.join(SECTIONS)}")
    return SECTIONS[name](found, start)


SECTIONS: dict[str, Callable[[Sequence[Gpu], Path], str]] = {
    "headline": headline.headline,
    "rmsnorm": performance_ops.rmsnorm,
    "attention forward": performance_steps.attention_forward,
    "attention backward": performance_steps.attention_backward,
    "decoding": performance_steps.decoding,
    "other ops": performance_ops.other_ops,
    "losses": performance_ops.losses,
    "fused linear cross entropy": performance_steps.fused_linear_cross_entropy,
    "fused linear jsd": performance_steps.fused_linear_jsd,
    "training": performance_steps.training,
}
