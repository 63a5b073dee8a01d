"""Trainers that turn Liger on by a flag of their own: two steps with it on liger-aot are those without it. A launch of
Triton's is an error. Each runs where it is installed; they want other versions of Transformers and TRL than each other,
so that an environment has one of them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="Transformers is not installed: make venv installs it")
pytest.importorskip("liger_kernel", reason="liger-kernel is not installed: make venv installs it")

from tests.harness.children import environment, start_as_installed

TRAINERS = {"axolotl": "axolotl", "llamafactory": "llamafactory", "ms-swift": "swift", "verl": "verl"}


def train(name: str, folder: Path, liger: bool) -> tuple[dict[str, Any], str]:
    """What ``tests.models.trainer_by_flag`` found, and all that was said."""
    before = {k: v for k, v in environment().items() if not k.startswith(("LIGER_", "RANK", "LOCAL_RANK"))}
    given = {
        "PYTHONPATH": os.pathsep.join((str(folder), before["PYTHONPATH"])),
        "LIGER_AOT_LIGER": f"{liger:d}",
        "LIGER_AOT_JIT": "error",
        "HF_HUB_OFFLINE": "1",
        "AXOLOTL_DO_NOT_TRACK": "1",
    }
    command = [sys.executable, "-m", "tests.models.trainer_by_flag", name, str(folder), f"{liger:d}"]
    done = subprocess.run(command, cwd=folder, env=before | given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
def test_with_liger(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(TRAINERS[name]) is None:
        pytest.skip(f"{name} is not installed: pip install {name}")
    start_as_installed(tmp_path)
    plain, _ = train(name, tmp_path, liger=False)
    ours, said = train(name, tmp_path, liger=True)
    assert len(plain["losses"]) == 2 and abs(plain["losses"][0] - plain["losses"][1]) > 0.1
    assert ours["losses"] == pytest.approx(plain["losses"], abs=2e-3)
    assert plain["ours"] is None
    assert ours["ours"] == ["liger_aot.liger.norms", "liger_kernel.transformers.rope"]
    assert said.count("liger_aot: liger_kernel ") == 1
