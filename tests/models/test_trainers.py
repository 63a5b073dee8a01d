"""TRL's trainers by their own flags: steps with Liger on liger-aot, and of packed rows through our attention, are those
of plain Transformers. A launch of Triton's is an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install trl")
pytest.importorskip("datasets", reason="datasets is not installed: pip install trl")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install trl")
pytest.importorskip("liger_kernel", reason="liger-kernel is not installed: make venv installs it")

from liger_aot.kernels import PATH
from tests.harness.children import ROOT, environment, start_as_installed

LIGER = {"use_liger_kernel": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder, and the file that Python reads at startup, as from site-packages."""
    folder = tmp_path_factory.mktemp("trainers")
    start_as_installed(folder)
    return folder


def train(folder: Path, name: str, given: dict[str, Any], **variables: str) -> dict[str, Any]:
    path = os.pathsep.join((str(folder), environment()["PYTHONPATH"], str(ROOT)))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.models.trainer_program",
            name,
            str(folder / "model"),
            json.dumps(given),
        ],
        cwd=ROOT,
        env=environment() | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "LIGER_AOT_JIT": "error"} | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("cpu", [True, pytest.param(False, marks=pytest.mark.gpu)], ids=["cpu", "gpu"])
@pytest.mark.parametrize("name", ["SFT", "DPO", "GRPO", "KTO", "RLOO"])
def test_with_liger(name: str, cpu: bool, folder: Path) -> None:
    """``--use_liger_kernel`` and LIGER_AOT_LIGER=1."""
    plain = train(folder, name, {"arguments": {"use_cpu": cpu}})
    ours = train(folder, name, {"arguments": {"use_cpu": cpu, **LIGER}}, LIGER_AOT_LIGER="1")
    assert ours["losses"] == pytest.approx(plain["losses"], abs=2e-3) and len(plain["losses"]) == 2
    assert ours["ours"] == ["liger_aot.liger.norms", "liger_kernel.transformers.rms_norm"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["padding_free", "packing"])
def test_packed_rows(how: str, folder: Path) -> None:
    """By ``--attn_implementation flash_attention_2`` where ``kernels`` takes our local repository. Without padding a
    step has the same loss as with it; packed, as eager attention has with a mask."""
    pytest.importorskip("kernels", reason="kernels is not installed: pip install kernels")
    more = (
        {"padding_free": True, "max_length": None}
        if how == "padding_free"
        else {"packing": True, "max_length": 32}
    )
    given = {"arguments": more, "model": {"attn_implementation": "flash_attention_2"}}
    ours = train(folder, "SFT", given, LOCAL_KERNELS=f"kernels-community/flash-attn2={PATH}")
    like = {} if how == "padding_free" else {"arguments": more, "model": {"attn_implementation": "eager"}}
    plain = train(folder, "SFT", like)
    assert ours["losses"] == pytest.approx(plain["losses"], abs=2e-3) and len(plain["losses"]) == 2
    assert "flash" in ours["attention"]
