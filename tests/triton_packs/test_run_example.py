"""examples/triton_pack, by its README's commands as printed; its program then runs from the wheel on the emulator."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import liger_aot.triton
from liger_aot.triton.packs import NAMESPACE, OVERRIDE
from tests.harness.stand_in import ROOT

pytest_plugins = (
    "tests.harness.launcher_fixtures",
    "tests.harness.triton_fixtures",
    "tests.harness.triton_emulator",
)
EXAMPLE = ROOT / "examples" / "triton_pack"


def commands() -> list[str]:
    """The lines of the README's sh blocks."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (EXAMPLE / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines()]


def run(line: str, folder: Path, site: Path) -> str:
    """A command of the README. ``python`` and ``liger-aot`` are this interpreter's, with what liger_aot.pth imports at
    its start; pip's work, which would need an environment of its own, is unpacking the wheels."""
    words = shlex.split(line)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder / "triton")}
    environment.pop(OVERRIDE)
    path = [str(ROOT), str(ROOT / "python"), str(site)]
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        assert name == "PYTHONPATH"
        path.insert(0, value)
    if words[0] == "pip":
        for wheel in (folder / words[words.index("--find-links") + 1]).glob("*.whl"):
            with zipfile.ZipFile(wheel) as files:
                files.extractall(site)
        return ""
    assert words[0] == "liger-aot"
    start = "import sys; sys.argv = sys.argv[1:]; import _liger_aot_startup, runpy; sys.path.insert(0, '.'); "
    program = [sys.executable, "-c", start + "runpy.run_path(sys.argv[0], run_name='__main__')"]
    if "--" in words:
        at = words.index("--")
        assert words[at + 1] == "python"
        words[at + 1 : at + 2] = program
    environment["PYTHONPATH"] = os.pathsep.join(path)
    done = subprocess.run(
        [sys.executable, "-m", "liger_aot", *words[1:]],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.slow  # test_run_results has the same way with another project
def test_the_readme(tmp_path: Path, triton_emulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, site = tmp_path / "project", tmp_path / "site"
    shutil.copytree(EXAMPLE, folder)
    said = {line: run(line, folder, site) for line in commands()}
    assert "swiglu  gfx942" in said["liger-aot list"] and "swiglu  sm90" in said["liger-aot list"]
    assert "choices of @triton.autotune by columns" in said["liger-aot explain swiglu_kernels:swiglu_kernel"]
    assert "swiglu gfx942, swiglu sm90" in said["liger-aot verify"]

    monkeypatch.setenv(OVERRIDE, str(site / NAMESPACE))
    monkeypatch.syspath_prepend(str(folder))
    liger_aot.triton.use("swiglu")
    serve = importlib.import_module("serve")
    monkeypatch.setattr(serve, "print", lambda *_: None, raising=False)
    serve.main("cpu")
    assert len(triton_emulator.executed) == 4
    for dtype, rounding in ((torch.bfloat16, 2.0**-8), (torch.float32, 2.0**-24)):
        x = torch.randn(4, 2000, generator=torch.Generator().manual_seed(1)).to(dtype)
        expected = serve.reference(x)
        # Units: the exponential has its argument's error, |x| < 5, and 1; the quotient 2.5, two products 2.
        units = 5 + 1 + 2.5 + 2
        assert torch.all(
            (serve.swiglu(x).double() - expected).abs() <= (units * 2.0**-24 + rounding) * expected.abs()
        )
    for name in ("serve", "swiglu_kernels"):
        sys.modules.pop(name, None)
