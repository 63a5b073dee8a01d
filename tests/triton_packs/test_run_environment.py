"""LIGER_AOT_TRITON in the environment: programs that have no line for packs, where nothing could be compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import liger_aot.triton
from liger_aot.triton.packs import OVERRIDE
from tests.harness.stand_in import ROOT, StandIn
from tests.harness.triton_stand_in import wanted, write_pack
from tests.triton_packs import run_kernels as kernels
from tests.triton_packs.test_run_launches import winner

pytest_plugins = ("tests.harness.launcher_fixtures", "tests.harness.triton_fixtures")


@pytest.fixture
def installed(tmp_path: Path, triton_gpu: StandIn) -> Path:
    """A folder of packs with the kernels that run_in_environment launches."""
    x, y, z = (torch.zeros(64) for _ in range(3))
    for fn in (kernels.add, kernels.tuned.fn):
        fn.device_caches.clear()
    liger_aot.triton.use(missing="compile")
    name = "tests.triton_packs.run_kernels:tuned"
    launches = [
        (lambda: kernels.add[(3, 2)](x, y, z, 60, BLOCK=32), {"symbol": "add_kernel"}),
        (
            lambda: kernels.tuned.fn[(1,)](x, 64, BLOCK=128, num_warps=4, num_stages=3, num_ctas=1),
            {"symbol": "t"},
        ),
    ]
    tuners = {name: [{"keys": ["n"], "winners": [winner((64, "torch.float32"), 128, 4)]}]}
    write_pack(tmp_path / "packs", [(wanted(launch), more) for launch, more in launches], tuners=tuners)
    return tmp_path / "packs"


def run(stand_in: StandIn, launcher: Path, packs: Path, action: str, **environment: str) -> Any:
    module = "tests.triton_packs.run_in_environment"
    kept = {k: v for k, v in os.environ.items() if k not in ("HOME", "PATH") and not k.startswith("TRITON_")}
    whole = {
        **kept,
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "python"))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PATH": "/nonexistent",
        "HOME": "/nonexistent",
        OVERRIDE: str(packs),
        **environment,
    }
    command = [sys.executable, "-m", module, stand_in.path, str(launcher), action]
    return subprocess.run(command, env=whole, cwd=ROOT, capture_output=True, text=True)


def test_nothing_is_compiled_or_written(installed: Path, triton_gpu: StandIn, launcher_path: Path) -> None:
    """No compiler on PATH, no HOME; no process is started and no file written from the first launch on. In a fork of
    it the GPU can't be used, as with torch: an error, not a hang."""
    done = run(triton_gpu, launcher_path, installed, "all", LIGER_AOT_TRITON="error")
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout) == ["t", "add_kernel"]


def test_a_miss_in_such_a_program(installed: Path, triton_gpu: StandIn, launcher_path: Path) -> None:
    done = run(triton_gpu, launcher_path, installed.parent / "none", "plain", LIGER_AOT_TRITON="error")
    assert done.returncode == 1
    assert "KernelNotInPack: tests.triton_packs.run_kernels:add: no pack has the function" in done.stderr


def test_a_value_that_is_none(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import _liger_aot_startup, sys; assert 'triton' not in sys.modules"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "LIGER_AOT_TRITON": "yes"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0
    assert "LIGER_AOT_TRITON must be error, warn, compile or 0, got 'yes': ignored" in done.stderr
