"""What a run of the tests executed on the AMD emulator: what drivers write, and what is made of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import executed


def test_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One binary of each form is enough; without one the form is named, and the command fails."""
    file = tmp_path / "executed"
    monkeypatch.setenv(executed.VARIABLE, str(file))
    monkeypatch.setattr(executed, "_written", set())
    monkeypatch.setattr("sys.argv", ["executed", "--forms", str(file)])
    one = {(op, *name.split("-")[:2]): name for op, name in executed.reachable(executed.QUICK)}
    assert executed.main() == 1  # there is no file yet
    assert f"of {len(one)} forms of kernels {len(one)} were executed" in capsys.readouterr().out
    left_out = ("rmsnorm", "rmsnorm_forward", "tile")
    for (op, *_), name in one.items():
        if name != one[left_out]:
            executed.record(executed.QUICK, op, name)
            executed.record("gfx90a", op, name)
    executed.record("gfx90a", "rmsnorm", one[left_out])  # of another architecture: it does not count
    assert executed.main() == 1
    shown = capsys.readouterr().out
    assert "1 were executed by no test" in shown and "  gfx942 rmsnorm rmsnorm_forward-tile\n" in shown
    executed.record(executed.QUICK, "rmsnorm", one[left_out])
    assert executed.main() == 0


def test_forms_of_the_other_architectures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --forms, architectures whose binaries are not all executed need one of each form."""
    file = tmp_path / "executed"
    monkeypatch.setenv(executed.VARIABLE, str(file))
    monkeypatch.setattr(executed, "_written", set())
    monkeypatch.setattr(executed, "ARCHS", ())
    monkeypatch.setattr(executed, "BY_FORM", ("gfx1100",))
    monkeypatch.setattr("sys.argv", ["executed", str(file)])
    for arch in executed.BY_FORM:
        one = {(op, *name.split("-")[:2]): (op, name) for op, name in executed.reachable(arch)}
        for op, name in one.values():
            executed.record(arch, op, name)
    assert executed.main() == 0
    lines = file.read_text().splitlines()
    file.write_text(
        "".join(f"{line}\n" for line in lines if not line.startswith("gfx1100 rmsnorm rmsnorm_forward-tile"))
    )
    assert executed.main() == 1
    shown = capsys.readouterr().out
    assert "forms of kernels 1 were executed by no test\n  gfx1100 rmsnorm rmsnorm_forward-tile\n" in shown


def test_a_launch_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "executed"
    monkeypatch.setattr(executed, "_written", set())
    monkeypatch.delenv(executed.VARIABLE, raising=False)
    executed.record("gfx942", "softmax", "a-b")
    assert not file.exists()
    monkeypatch.setenv(executed.VARIABLE, str(file))
    for _ in range(2):
        executed.record("gfx942", "softmax", "a-b")
    assert file.read_text() == "gfx942 softmax a-b\n"
