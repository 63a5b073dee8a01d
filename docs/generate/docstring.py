"""An op's docstring as Markdown: the house's sections, nothing else of any convention."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import dataclass
from textwrap import dedent

from liger_aot.ops.op import Op

SECTIONS = ("Args", "Returns", "Raises", "Source")
_SIGNATURE = re.compile(r"``.+?``(: *|\s+)?", re.DOTALL)
_YEAR = re.compile(r"\(.*\b(19|20)\d\d\)")
_NAMED = re.compile(r"([\w, ]+): +(.*)", re.DOTALL)


@dataclass(frozen=True)
class Docstring:
    """Markdown without a heading; an item is (names, text)."""

    summary: str
    first: str  # the first sentence
    differentiable: str  # what has a gradient, as the docstring says it; "" for nothing
    arguments: tuple[tuple[str, str], ...]
    returns: str
    errors: tuple[tuple[str, str], ...]
    source: str


def read(op: type[Op]) -> Docstring:
    """ValueError names what the docstring lacks. A source may also stand at the end of the module's."""
    name, text = op.name, inspect.getdoc(op) or ""
    signature = _SIGNATURE.match(text)
    if signature is None or not text.startswith(f"``{name}("):
        raise ValueError(f"{name}: the docstring must begin with ``{name}(...) -> ...``")
    parts = re.split(rf"^({'|'.join(SECTIONS)}):\n", text[signature.end() :], flags=re.MULTILINE)
    found = dict(zip(parts[1::2], map(dedent, parts[2::2]), strict=True))
    module = (inspect.getdoc(sys.modules[op.__module__]) or "").rpartition("\n\n")[2]
    if "Source" not in found and _YEAR.search(module):
        found["Source"] = module
    if missing := [s for s in SECTIONS if s not in found]:
        raise ValueError(f"{name}: the docstring has no section {missing[0]}")
    summary = _paragraphs(parts[0])
    if not summary:
        raise ValueError(f"{name}: the docstring does not say what the op computes")
    differentiable = re.search(r"\b(?<!-)[Dd]ifferentiable( in [^;.]+)?", summary)
    return Docstring(
        summary,
        re.split(r"(?<=[.:])(?:\s|$)", summary, maxsplit=1)[0].rstrip(":.") + ".",
        "" if differentiable is None else (differentiable[1] or " in its input").removeprefix(" in "),
        _items(found["Args"]),
        _paragraphs(found["Returns"]),
        _items(found["Raises"]),
        _paragraphs(found["Source"]),
    )


def _paragraphs(text: str) -> str:
    return "\n\n".join(_inline(" ".join(p.split())) for p in re.split(r"\n\s*\n", text.strip()) if p.strip())


def _items(text: str) -> tuple[tuple[str, str], ...]:
    """What begins at the margin, with the indented lines below it."""
    items = []
    for item in re.split(r"\n(?=\S)", text.strip()):
        line = " ".join(item.split())
        named = _NAMED.fullmatch(line)
        if named is None:
            raise ValueError(f"{line!r} does not begin with names and a colon")
        items.append((named[1], _inline(named[2])))
    return tuple(items)


def _inline(text: str) -> str:
    """Code as Markdown has it; a star between letters is no emphasis."""
    parts = text.split("``")
    return "".join(
        f"`{part}`" if i % 2 else re.sub(r"(?<=\S)\*|\*(?=\S)", r"\\*", part) for i, part in enumerate(parts)
    )
