"""What our launcher passes to a GPU driver is what Triton's own passes, byte for byte; both are built here and run on
the stand-in driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.stand_in import ROOT, build_stand_in

pytest_plugins = ("tests.harness.launcher_fixtures",)
LIBRARIES = {"cuda": "libcuda.so.1", "hip": "libamdhip64.so"}


@pytest.mark.slow  # Triton has the compiler make a module for each of the launches
@pytest.mark.parametrize("backend", ["cuda", "hip"])
def test_the_driver_sees_the_same(tmp_path: Path, launcher_path: Path, backend: str) -> None:
    library = build_stand_in(tmp_path, name=LIBRARIES[backend])
    folder = os.pathsep.join((str(ROOT), str(ROOT / "python")))
    environment = {**os.environ, "PYTHONPATH": folder, "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    module = "tests.triton_packs.run_like_triton"
    command = [sys.executable, "-m", module, library, launcher_path, backend, tmp_path / "packs"]
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout)
    assert len(seen) == (11 if backend == "cuda" else 7)
    for name, (theirs, ours) in seen.items():
        assert theirs == ours, name
