"""What the commands list, explain, doctor and verify say of packs of Triton kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import liger_aot.triton
from liger_aot.cli import main
from liger_aot.doctor import examine
from liger_aot.triton.packs import OVERRIDE, folders
from tests.harness.stand_in import StandIn
from tests.harness.triton_stand_in import wanted, write_pack
from tests.triton_packs import run_kernels as kernels
from tests.triton_packs.test_run_launches import winner

pytest_plugins = ("tests.harness.launcher_fixtures", "tests.harness.triton_fixtures")
NAME = "tests.triton_packs.run_kernels"


@pytest.fixture
def folder(tmp_path: Path, triton_gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pack for sm90: two variants of one function, one of a tuned one, and one function that is left out."""
    x, y, z = (torch.zeros(64) for _ in range(3))
    for fn in (kernels.add, kernels.tuned.fn):
        fn.device_caches.clear()
    liger_aot.triton.use(missing="compile")
    plain = kernels.tuned.fn
    misses = [
        (
            wanted(lambda: kernels.add[(1,)](x, y, z, 64, BLOCK=32, num_warps=8)),
            {"num_warps": 8, "shared": 99},
        ),
        (wanted(lambda: kernels.add[(1,)](x[1:], y, z, 1, BLOCK=32)), {"num_ctas": 2, "pdl": True}),
        (wanted(lambda: plain[(1,)](x, 64, BLOCK=128, num_warps=4, num_stages=3, num_ctas=1)), {}),
    ]
    tuners = {
        f"{NAME}:tuned": [{"keys": ["n"], "winners": [winner((64, "torch.float32"), 128, 4, timed=False)]}]
    }
    left_out = [{"function": f"{NAME}:apply", "why": "it reads a global"}]
    made = write_pack(tmp_path / "packs", misses, tuners=tuners, left_out=left_out, version="2.5")
    liger_aot.triton.stop()
    monkeypatch.setenv(OVERRIDE, str(tmp_path / "packs"))
    return made


def test_list(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["list"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["pack", "arch", "functions", "variants", "KB", "left", "out", "Triton"] in lines
    (row,) = [line for line in lines if line[:1] == ["mykernels"]]
    assert row[1:4] + row[5:6] == ["sm90", "2", "3", "1"]


def test_explain(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{NAME}:add"]) == 0
    text = capsys.readouterr().out
    assert f"{NAME}:add, 2 variants in mykernels for sm90" in text
    assert "8 warps, 99 bytes of shared memory;" in text and "clusters of 2, PDL;" in text
    assert "X: *fp32 divisible by 16, Y: *fp32 divisible by 16" in text
    assert "n: i32 divisible by 16, BLOCK: the constant 32" in text and "n: the constant 1," in text
    assert "given: num_warps=8" in text
    assert main(["explain", f"{NAME}:tuned", "--arch", "sm90"]) == 0
    text = capsys.readouterr().out
    assert "choices of @triton.autotune by n:" in text
    assert "64, 'torch.float32': BLOCK: 128, num_warps: 4" in text and "(of cuda-90, not timed)" in text
    assert main(["explain", f"{NAME}:apply"]) == 0
    assert (
        capsys.readouterr().out.strip() == f"{NAME}:apply, left out of mykernels for sm90: it reads a global"
    )


def test_explain_what_is_not_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "my:kernel"]) == 1
    assert f"no pack has my:kernel; there are {NAME}:add, {NAME}:tuned" in capsys.readouterr().err
    assert main(["explain", f"{NAME}:add", "--arch", "gfx942"]) == 1
    assert "no pack of Triton kernels is installed for gfx942" in capsys.readouterr().err
    assert main(["explain", "rmsnorm"]) == 1
    assert "required: --shape, --dtype" in capsys.readouterr().err


def test_doctor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    section = next(s for s in examine().sections if s.title == "packs of Triton kernels")
    assert section.ok
    assert section.lines[0].startswith("mykernels for sm90: for 9.0; 2 functions of no package; in ")
    assert section.lines[1:] == tuple(
        f"cuda:{index}: NVIDIA H200 (compute capability 9.0) takes mykernels for sm90" for index in range(2)
    )


def test_doctor_finds_another_triton(folder: Path) -> None:
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"triton": "', '"triton": "9'))
    report = examine()
    section = next(s for s in report.sections if s.title == "packs of Triton kernels")
    assert not section.ok and not report.healthy
    assert "was built with Triton 9" in section.lines[0]


def test_verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["verify"])
    assert "mykernels sm90" in capsys.readouterr().out
    data = bytearray((folder / "f0.bin").read_bytes())
    data[3] ^= 1
    (folder / "f0.bin").write_bytes(data)
    (folder / "more.bin").write_bytes(b"")
    text = (folder / "f1.json").read_text()
    (folder / "f1.json").write_text(text + " ")
    assert main(["verify"]) == 1
    faults = capsys.readouterr().out
    assert "f0.bin: " in faults and "sha256 is" in faults
    assert "f1.json: sha256 is" in faults
    assert "more.bin: not in the manifest" in faults


def test_a_pack_inside_a_package(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by its distribution's entry point, without importing the package."""
    site = tmp_path / "site"
    own = site / "project" / "packs" / "sm90"
    own.parent.mkdir(parents=True)
    folder.rename(own)
    (site / "project" / "__init__.py").write_text("raise AssertionError('imported')")
    (site / "project-2.5.dist-info").mkdir()
    entries = "[console_scripts]\nx = y:z\n[liger_aot.triton_packs]\nmykernels.sm90 = project.packs.sm90\nbad = ..\n"
    (site / "project-2.5.dist-info" / "entry_points.txt").write_text(entries)
    monkeypatch.delenv(OVERRIDE)
    monkeypatch.syspath_prepend(str(site))
    assert folders()["mykernels"] == {"sm90": own}
