"""Processes that a test starts: they import the same liger_aot as this one, from a wheel or from the tree."""

from __future__ import annotations

import os
from pathlib import Path

import liger_aot

ROOT = Path(__file__).parents[1]
PACKAGE = Path(liger_aot.__file__).parents[1]  # the folder that liger_aot is imported from


def environment(**more: str) -> dict[str, str]:
    """This process's, with the tree's root and that folder first among what can be imported."""
    before = os.environ.get("PYTHONPATH")
    folders = [str(ROOT), str(PACKAGE), *([before] if before else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), **more}
