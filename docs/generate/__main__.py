"""`python -m docs.generate`: the ops' pages, their index and the support matrix, from docstrings, plans, results and
docs/executed.toml. No GPU and no packs are needed; the same tree gives the same files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import markdown
from benchmarks.environment import ROOT
from docs.generate import facts, op_page, support
from liger_aot.ops.registry import names

INDEX = ROOT / "docs" / "index.md"


def made() -> dict[Path, str]:
    """Every generated file and what is to stand in it."""
    pages = {support.PAGE: support.page(support.read()), INDEX: index()}
    gpus = markdown.gpus()
    for op in names():
        pages |= op_page.pages(op, gpus)
    return pages


def index() -> str:
    rows = []
    for op in names():
        told = op_page.described(op)
        rows.append(
            [
                f"[{op}](ops/{op}.md)",
                told.first.replace("|", "\\|"),
                "yes" if told.differentiable else "no",
                "all" if facts.archs(op) == facts.ARCHS else ", ".join(facts.archs(op)),
            ]
        )
    return (
        "\n\n".join(
            [
                "# liger-aot",
                "- [The README](../README.md): install, a first op, a server, training, the command line\n"
                "- [Moving to liger-aot](migration.md): from Liger, Transformers, flash-attn and plain torch\n"
                "- [What has run where](support.md): ops and architectures\n"
                "- [Performance](performance.md): all tables of figures\n"
                "- [Packs of Triton kernels](triton-packs.md): any project's kernels, recorded, built, run\n"
                "- [Contributing](../CONTRIBUTING.md): an op or an architecture of your own, tests, tuning\n"
                "- [Tuning a chip](tuning-your-chip.md): launch numbers for a GPU whose own were never measured\n"
                "- [The pack format](pack-format.md), [of others' kernels](triton-pack-format.md): reading binaries "
                "without liger-aot\n"
                "- [Glossary](glossary.md): the words that code, profiles and docs use",
                "## Ops",
                markdown.table(["op", "what it computes", "gradient", "architectures"], rows),
                "Pages are made by `make docs`.",
            ]
        )
        + "\n"
    )


def stale(pages: dict[Path, str]) -> list[Path]:
    """Files that differ from what is to stand in them, and pages of ops that are no more."""
    kept = {path for pattern in ("*.md", "*.svg") for path in op_page.FOLDER.glob(pattern)}
    differing = [path for path, text in pages.items() if not path.exists() or path.read_text() != text]
    return sorted([*differing, *(kept - set(pages))])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m docs.generate", description="Write the generated pages of docs/."
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; 1 where a page is not up to date"
    )
    options = parser.parse_args(arguments)
    try:
        pages = made()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    old = stale(pages)
    for path in old:
        print(path.relative_to(ROOT))
        if not options.check:
            path.parent.mkdir(exist_ok=True)
            if path in pages:
                path.write_text(pages[path])
            else:
                path.unlink()
    return int(options.check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
