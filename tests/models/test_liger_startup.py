"""``LIGER_AOT_LIGER=1``: programs without a line of ours run Liger on liger-aot, and so do their children."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("liger_kernel", reason="liger-kernel is not installed: make venv installs it")

from tests.harness.children import environment, start_as_installed

USES_LIGER = """
import sys
import liger_kernel.transformers.rms_norm
from liger_kernel.ops import LigerRMSNormFunction
print(LigerRMSNormFunction.__module__)
"""
SAYS = "liger_aot: liger_kernel "


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """A folder that makes every Python which has it in its path read liger_aot.pth, as from site-packages."""
    start_as_installed(tmp_path)
    return tmp_path


def run(start: Path, code: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A fresh Python that reads the .pth file."""
    variables = {k: v for k, v in environment().items() if not k.startswith(("LIGER_", "RANK", "LOCAL_RANK"))}
    variables["PYTHONPATH"] = f"{start}{os.pathsep}{variables['PYTHONPATH']}"
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables | more, capture_output=True, text=True, cwd=start
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done


@pytest.mark.parametrize("variable", ["LIGER_AOT_LIGER=1", "LIGER_KERNEL_IMPL=liger_aot"])
def test_liger_runs_on_ours(start: Path, variable: str) -> None:
    name, _, value = variable.partition("=")
    done = run(start, USES_LIGER, **{name: value})
    assert done.stdout.splitlines() == ["liger_aot.liger.norms"]
    assert done.stderr.count(SAYS) == 1


TRAINER = """
import sys, torch
from transformers import Trainer, TrainingArguments
from tests.models.transformers_cases import tiny
model = tiny("llama")
data = [{"input_ids": torch.arange(3, 20), "labels": torch.arange(3, 20)} for _ in range(4)]
arguments = TrainingArguments(
    "trained", use_liger_kernel=True, use_cpu=True, max_steps=2, per_device_train_batch_size=2, save_strategy="no",
    report_to=[], disable_tqdm=True,
)
Trainer(model, arguments, train_dataset=data).train()
from liger_kernel.ops import LigerRMSNormFunction
print(LigerRMSNormFunction.__module__)
"""


@pytest.mark.slow
def test_transformers_trainer(start: Path) -> None:
    pytest.importorskip("transformers", reason="Transformers is not installed: make venv installs it")
    pytest.importorskip("accelerate", reason="accelerate, which the Trainer needs, is not installed")
    done = run(start, TRAINER, LIGER_AOT_LIGER="1", LIGER_AOT_JIT="error")
    assert done.stdout.splitlines()[-1] == "liger_aot.liger.norms" and "train_loss" in done.stdout
    assert done.stderr.count(SAYS) == 1


def test_children_too_and_it_is_said_once(start: Path) -> None:
    code = f"""
import subprocess, sys
{USES_LIGER}
sys.stdout.flush()
subprocess.run([sys.executable, "-c", {USES_LIGER!r}], check=True)
"""
    done = run(start, code, LIGER_AOT_LIGER="1")
    assert done.stdout.splitlines() == ["liger_aot.liger.norms"] * 2
    assert done.stderr.count(SAYS) == 1


def test_a_second_rank_says_nothing(start: Path) -> None:
    done = run(start, USES_LIGER, LIGER_AOT_LIGER="1", RANK="1", LOCAL_RANK="1")
    assert done.stdout.splitlines() == ["liger_aot.liger.norms"] and SAYS not in done.stderr


NOTHING = """
import sys
editable = "__editable__"  # where liger-aot is installed from its source tree, a module that finds it
print(sorted(n for n in sys.modules if ("liger" in n or n == "torch") and not n.startswith(editable)))
import importlib.util
print(importlib.util.find_spec("liger_kernel") is not None, "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("variables", "modules"),
    [
        ({}, []),
        ({"LIGER_AOT_LIGER": "0"}, ["_liger_aot_startup"]),
        ({"LIGER_KERNEL_IMPL": "cutile"}, ["_liger_aot_startup"]),
        ({"LIGER_AOT_LIGER": "1"}, ["_liger_aot_startup"]),
    ],
    ids=str,
)
def test_nothing_is_imported_before_liger_is(
    start: Path, variables: dict[str, str], modules: list[str]
) -> None:
    """And asking whether it is installed does not import it."""
    done = run(start, NOTHING, **variables)
    assert done.stdout.splitlines() == [str(modules), "True False"]
    assert done.stderr == ""


def test_another_value(start: Path) -> None:
    done = run(start, NOTHING, LIGER_AOT_LIGER="yes")
    assert "LIGER_AOT_LIGER must be 1 or 0, got 'yes': ignored" in done.stderr
