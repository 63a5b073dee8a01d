"""Packs of the small project in ``tests/triton_packs/project``, recorded and built once a run: pytest_plugins =
(..., "tests.harness.triton_project") brings them. No GPU takes part."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.harness.stand_in import ROOT

PROGRAM = "tests.triton_packs.project.program"
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "python"))), "OMP_NUM_THREADS": "1"}


def liger_aot(*arguments: object, code: int = 0, **environment: str) -> str:
    """The command's output; it ends with ``code``."""
    command = [sys.executable, "-m", "liger_aot", *map(str, arguments)]
    whole = {**os.environ, **ENVIRONMENT, **environment}
    done = subprocess.run(command, env=whole, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def in_program(module: str) -> list[str]:
    """A command that runs a module as where liger-aot is installed: what its .pth file imports, imported."""
    run = f"import _liger_aot_startup, runpy; runpy.run_module({module!r}, run_name='__main__')"
    return [sys.executable, "-c", run]


@pytest.fixture(scope="session")
def project_recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the project's program launches, recorded for an sm90 that is not there."""
    folder = tmp_path_factory.mktemp("recording") / "project"
    cache = str(tmp_path_factory.getbasetemp() / "triton")
    liger_aot(
        "record", "--target", "sm90", "--out", folder, "--", *in_program(PROGRAM), TRITON_CACHE_DIR=cache
    )
    return folder


@pytest.fixture(scope="session")
def project_packs(project_recording: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its packs for gfx942, where an environment has them: a folder for the import path."""
    out = tmp_path_factory.mktemp("packs")
    cache = str(tmp_path_factory.getbasetemp() / "triton")
    options = ["--arch", "gfx942", "--name", "project", "--out", out, "--jobs", "1"]
    liger_aot("pack", project_recording, *options, code=1, TRITON_CACHE_DIR=cache)  # one kernel is left out
    for wheel in out.glob("*.whl"):
        with zipfile.ZipFile(wheel) as files:
            files.extractall(out / "site")
    return out / "site"
