"""Processes that a test starts: they import the same liger_aot as this one, from a wheel or from the tree."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import liger_aot

ROOT = Path(__file__).parents[2]
PACKAGE = Path(liger_aot.__file__).parents[1]  # the folder that liger_aot is imported from


def environment(**more: str) -> dict[str, str]:
    """This process's, with the tree's root and that folder first among what can be imported."""
    before = os.environ.get("PYTHONPATH")
    folders = [str(ROOT), str(PACKAGE), *([before] if before else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), **more}


def start_as_installed(folder: Path) -> None:
    """Every Python that has the folder in its path reads liger_aot.pth at startup, as from site-packages."""
    (folder / "liger_aot.pth").write_bytes((PACKAGE / "liger_aot.pth").read_bytes())
    (folder / "sitecustomize.py").write_text(f"import site; site.addsitedir({str(folder)!r})\n")


def in_child(action: Callable[[], object]) -> str:
    """What ``action`` returns or raises, in a forked process; it has 20 seconds."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = str(action())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    deadline = time.monotonic() + 20
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            raise AssertionError("the forked process hangs")
        time.sleep(0.01)
    with open(reading, "rb") as pipe:
        return pipe.read().decode()
