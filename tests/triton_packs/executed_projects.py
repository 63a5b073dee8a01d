"""What of other projects' kernels the emulator executes: python -m tests.triton_packs.executed_projects writes
docs/triton-packs-executed.md. Takes some twenty minutes; arguments such as ``fla/gfx942`` do a part of it again."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

from liger_aot.triton.packs import NAMESPACE
from tests.harness.children import environment
from tests.triton_packs.conftest import liger_aot, record

PAGE = Path(__file__).resolve().parents[2] / "docs" / "triton-packs-executed.md"
ARCHS = ("gfx942", "gfx90a")


@dataclass(frozen=True)
class Project:
    """A project's name in words, and the modules that it needs."""

    title: str
    needs: tuple[str, ...]

    @property
    def lacks(self) -> str:
        """The module that is not installed."""
        return next((name for name in self.needs if find_spec(name) is None), "")


PROJECTS = {
    "liger": Project("Liger-Kernel 0.8.5", ("liger_kernel",)),
    "fla": Project("flash-linear-attention 0.6.0", ("fla", "einops")),
}


@dataclass(frozen=True)
class Report:
    """What came of a project's calls: as ``emulated`` writes it, and the functions that were recorded for them."""

    recorded: frozenset[str]
    left_out: Mapping[str, str]  # function -> why the build made no binary of it
    raw: Mapping[str, Any]

    @property
    def executed(self) -> frozenset[str]:
        return frozenset(self.raw["launched"])

    @property
    def wrong(self) -> list[str]:
        """Calls that did not run, or whose results are not those of plain torch."""
        return [
            f"{name}: {failed or f'{what} is {far:.2g} off, {slack:.2g} is allowed'}"
            for name, (far, what, failed, slack) in self.raw["calls"].items()
            if failed or not far <= slack
        ]

    def table(self) -> dict[str, str]:
        """Function -> "executed", or what refused it."""
        refused = {**self.left_out, **self.raw["refused"]}
        return {
            name: "executed" if name in self.executed else refused.get(name, "recorded, not launched")
            for name in sorted(self.recorded | self.executed | set(refused))
        }


def run(folder: Path, project: str, arch: str, names: str = "") -> Report:
    """Record a project's calls for ``arch`` without a GPU, build the pack, execute it."""
    module = "tests.triton_packs.emulated"
    recording = record(folder, "-m", module, project, "record", *([names] if names else []), target=arch)
    out = folder / "dist"
    command = ["pack", recording, "--arch", arch, "--name", project, "--jobs", "1", "--out", out]
    liger_aot(folder, *command)
    (wheel,) = out.glob("*.whl")
    with ZipFile(wheel) as files:
        files.extractall(folder / "site")
    packs, found = folder / "site" / NAMESPACE, folder / "found.json"
    subprocess.run(
        [sys.executable, "-m", module, project, arch, str(packs), str(found), *([names] if names else [])],
        env=environment(), check=True, capture_output=True, cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    manifest = json.loads((packs / project / arch / "manifest.json").read_text())
    left_out = {entry["function"]: entry["why"] for entry in manifest["left_out"]}
    recorded = [json.loads(path.read_text()) for path in recording.glob("*/functions/*.json")]
    return Report(
        frozenset(f"{one['module']}:{one['qualname']}" for one in recorded),
        left_out,
        json.loads(found.read_text()),
    )


def read() -> dict[tuple[str, str], dict[str, str]]:
    """The page: (project, architecture) -> function -> what it says."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    titles = {project.title: name for name, project in PROJECTS.items()}
    here = ""
    for line in PAGE.read_text().splitlines() if PAGE.exists() else ():
        if line.startswith("## "):
            here = titles.get(line.removeprefix("## "), "")
        elif here and (row := re.fullmatch(r"\| `([^`]+)` \| (.*) \| (.*) \|", line)):
            for arch, said in zip(ARCHS, row.groups()[1:], strict=True):
                if said:
                    found.setdefault((here, arch), {})[row[1]] = said
    return found


def page(found: Mapping[tuple[str, str], Mapping[str, str]]) -> str:
    """The page's text."""
    lines = [
        "# Other projects' kernels that were executed",
        "",
        "Recorded for the architecture and built into a pack on a machine without a GPU, then launched from the pack "
        "at small shapes, forward and backward: the emulator executed the AMD binaries, and the results were those of "
        "the same in plain torch and float64. No AMD GPU was there. Written by "
        "`python -m tests.triton_packs.executed_projects`; `tests/triton_packs/test_run_projects.py` does it again.",
    ]
    for name, project in PROJECTS.items():
        of = [found.get((name, arch), {}) for arch in ARCHS]
        counts = ", ".join(
            f"{arch}: {sum(said == 'executed' for said in one.values())} of {len(one)}"
            for arch, one in zip(ARCHS, of, strict=True)
        )
        lines += ["", f"## {project.title}", "", f"Functions executed: {counts}.", ""]
        lines += [f"| function | {' | '.join(ARCHS)} |", "|---" * (1 + len(ARCHS)) + "|"]
        for function in sorted({function for one in of for function in one}):
            said = " | ".join(one.get(function, "").replace("|", "/").replace("\n", " ") for one in of)
            lines.append(f"| `{function}` | {said} |")
    return "\n".join(lines) + "\n"


def main(wanted: Sequence[str]) -> None:
    found = read()
    for project in PROJECTS:
        for arch in ARCHS:
            if wanted and f"{project}/{arch}" not in wanted:
                continue
            if PROJECTS[project].lacks:
                print(f"{project}: {PROJECTS[project].lacks} is not installed: the page keeps what it says")
                continue
            with TemporaryDirectory() as folder:
                report = run(Path(folder), project, arch)
            found[project, arch] = report.table()
            print(f"{project}/{arch}: {len(report.executed)} functions executed", *report.wrong, sep="\n  ")
            PAGE.write_text(page(found))


if __name__ == "__main__":
    main(sys.argv[1:])
