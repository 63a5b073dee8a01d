"""Which architectures a source build makes: what is asked for, what the machine has, all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from liger_aot_build import detect
from liger_aot_build.detect import VARIABLE, chosen_archs, parse_archs
from liger_aot_build.errors import BuildError
from liger_aot_build.profile import profile_names

ALL = profile_names()


@pytest.mark.parametrize(
    ("text", "archs"),
    [
        ("sm90", ("sm90",)),
        ("sm90,gfx942", ("sm90", "gfx942")),
        (" gfx942 , sm90,", ("gfx942", "sm90")),
        ("sm80,sm80", ("sm80",)),
        ("none", ()),
        ("all", ALL),
    ],
)
def test_parse(text: str, archs: tuple[str, ...]) -> None:
    assert parse_archs(text) == archs


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("sm91", "sm91"),
        ("sm90,h100", "h100"),
        ("sm90;sm80", "sm90;sm80"),
        ("", ""),
        (" , ", " , "),
        ("all,sm90", "all"),
        ("sm90,none", "none"),
        ("SM90", "SM90"),
    ],
)
def test_unknown(text: str, wrong: str) -> None:
    with pytest.raises(BuildError) as caught:
        parse_archs(text)
    assert (
        str(caught.value) == f"unknown architecture {wrong!r}: known are {', '.join(ALL)}, 'all' and 'none'"
    )


def test_the_variable_wins_over_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "_cuda_targets", lambda: {"9.0"})
    monkeypatch.setenv(VARIABLE, "gfx942")
    assert chosen_archs() == ("gfx942",)
    monkeypatch.setenv(VARIABLE, "none")
    assert chosen_archs() == ()
    monkeypatch.setenv(VARIABLE, "h100")
    with pytest.raises(BuildError, match="unknown architecture 'h100'"):
        chosen_archs()


@pytest.mark.parametrize(
    ("cuda", "hip", "archs"),
    [
        ({"9.0"}, set(), ("sm90",)),
        ({"8.0", "8.9"}, set(), ("sm80",)),
        ({"8.6", "9.0"}, set(), ("sm80", "sm90")),
        (set(), {"gfx942"}, ("gfx942",)),
        ({"9.0"}, {"gfx90a"}, ("gfx90a", "sm90")),
        ({"7.5"}, {"gfx1030"}, ALL),
        (set(), set(), ALL),
    ],
)
def test_the_machine_decides(
    monkeypatch: pytest.MonkeyPatch, cuda: set[str], hip: set[str], archs: tuple[str, ...]
) -> None:
    """GPUs that a profile serves choose its architecture; with none of them, all are built."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(detect, "_cuda_targets", lambda: cuda)
    monkeypatch.setattr(detect, "_hip_targets", lambda: hip)
    assert chosen_archs() == archs


def test_amd_topology(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel driver's files: node 0 is a CPU, the others two kinds of GPU."""
    for node, version in enumerate((0, 90402, 90402, 90010, 110000)):
        folder = tmp_path / str(node)
        folder.mkdir()
        folder.joinpath("properties").write_text(
            f"cpu_cores_count 0\ngfx_target_version {version}\nsimd_count 4\n"
        )
    monkeypatch.setattr(detect, "KFD", tmp_path)
    assert detect._hip_targets() == {"gfx942", "gfx90a", "gfx1100"}
    monkeypatch.setattr(detect, "KFD", tmp_path / "nothing")
    assert detect._hip_targets() == set()


def test_no_cuda_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(detect.ctypes, "CDLL", missing)
    assert detect._cuda_targets() == set()


class Driver:
    """libcuda with a GPU of compute capability 8.6 and one of 9.0."""

    status = 0
    capabilities = ((8, 6), (9, 0))

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self.capabilities)
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = index
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:
        value._obj.value = self.capabilities[device.value][{75: 0, 76: 1}[attribute]]
        return 0


def test_cuda_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect.ctypes, "CDLL", lambda name: Driver())
    assert detect._cuda_targets() == {"8.6", "9.0"}
    monkeypatch.setattr(Driver, "status", 100)  # CUDA_ERROR_NO_DEVICE
    assert detect._cuda_targets() == set()
