"""examples/emulated.py, which ``make demo`` runs where there is no GPU: what it prints, and what it does without."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from examples import emulated
from liger_aot_build.paths import ROOT
from tests.conftest import built_pack

WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("triton", "pytest", "ml_dtypes"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
import examples.emulated
"""


def test_it_needs_no_triton_and_no_pytest() -> None:
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'python'}"}
    subprocess.run([sys.executable, "-c", WITHOUT], cwd=ROOT, env=environment, check=True)


def test_what_it_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pack = built_pack("gfx942")
    monkeypatch.setattr(emulated, "installed_packs", lambda: (pack,))
    assert emulated.run()
    shown = capsys.readouterr().out
    for op in emulated.EXAMPLES:
        assert f"of {op}.bin: " in shown
    assert " instructions with v_mfma_f32_" in shown
    assert shown.count("is allowed") == 7 and "WRONG" not in shown


def test_without_the_pack(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(emulated, "installed_packs", lambda: ())
    assert emulated.run()
    assert "left out: no pack of gfx942" in capsys.readouterr().out


def test_a_wrong_result() -> None:
    exact = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    allowed = {"bf16": 1.0, "fp32": 32.0}
    for off, fine in ((0.0, True), (0.007, True), (0.01, False), (float("nan"), False)):
        got = exact + torch.tensor([0.0, off, 0.0])
        right, line = emulated.Result("y", got, exact, exact, exact).line(allowed)
        assert right == fine and ("WRONG" in line) != fine
