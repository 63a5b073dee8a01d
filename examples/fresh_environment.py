"""A fresh virtual environment that has torch and no Triton, in seconds and without a download.

    python -m examples.fresh_environment build/demo-venv dist/liger_aot-*.whl

Torch and all that it requires, but for Triton, are linked from the environment that runs this; the wheel is installed
as anyone would install it. It is the nearest thing to the machine that serves.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement


def make_environment(folder: Path, wheel: Path) -> Path:
    """Make ``folder`` anew, with torch and ``wheel``; the path of its Python."""
    venv.create(folder, clear=True, symlinks=True)
    python = folder / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / version / "site-packages"
    for package in with_requirements("torch", "numpy", "pip"):  # without numpy torch warns
        link(package, site)
    # -I: what PYTHONPATH names is no part of it, and pip would take a liger_aot there for the wheel's
    install = ["-I", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run(
        [python, *install, wheel.resolve()],
        check=True,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    return python


def with_requirements(*names: str) -> Iterator[Distribution]:
    """The installed distributions of ``names`` and, once each, all that they require; Triton's are left out."""
    queue, seen = [*names], set[str]()
    while queue:
        wanted = queue.pop()
        if wanted in seen or "triton" in wanted:
            continue
        seen.add(wanted)
        try:
            found = distribution(wanted)
        except PackageNotFoundError:  # required on other platforms, or not installed here either
            continue
        yield found
        requirements = map(Requirement, found.requires or ())
        queue += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]


def link(package: Distribution, site: Path) -> None:
    """Link a distribution's modules and metadata into ``site``."""
    if package.files is None:
        raise SystemExit(f"error: {package.metadata['Name']} does not list its files: install it with pip")
    tops = {file.parts[0] for file in package.files} - {"..", "__pycache__"}
    for top in sorted(tops):
        if not (site / top).exists():  # "nvidia" and its like are shared by several distributions
            (site / top).symlink_to(Path(str(package.locate_file(top))).resolve())


def main() -> None:
    parser = argparse.ArgumentParser(description="Make an environment with torch, a wheel and no Triton.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("wheel", type=Path)
    options = parser.parse_args()
    make_environment(options.folder, options.wheel)


if __name__ == "__main__":
    main()
