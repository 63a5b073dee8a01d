"""Which library the launcher opens: the HIP that torch has loaded, by what /proc/self/maps says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from liger_aot.errors import DriverNotFound
from liger_aot.runtime import devices

LINE = "7f2a1c000000-7f2a1c200000 r-xp 00001000 08:01 1835012                    {}"


@pytest.fixture
def maps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``maps("/a/b.so", ...)``: the process has mapped these files, and memory that is no file."""

    def maps(*paths: str) -> None:
        lines = ["7f2a1b000000-7f2a1b021000 rw-p 00000000 00:00 0", LINE.format("[heap]")]
        file = tmp_path / "maps"
        file.write_bytes("".join(f"{line}\n" for line in (*lines, *map(LINE.format, paths))).encode())
        monkeypatch.setattr(devices, "Path", lambda path: file)

    return maps


@pytest.mark.parametrize(
    "path",
    [
        "/opt/rocm/lib/libamdhip64.so",
        "/opt/rocm-6.3.0/lib/libamdhip64.so.6.3.60300",
        "/home/a user/my  venv/torch/lib/libamdhip64.so",
        "/srv/line\u2028break/libamdhip64.so.6",
        "/opt/trailing /libamdhip64.so",
    ],
)
def test_the_whole_path_is_taken(maps: Callable[..., None], path: str) -> None:
    maps("/usr/lib/libc.so.6", path)
    assert devices._mapped("libamdhip64.so") == path


@pytest.mark.parametrize(
    "path",
    [
        "libamdhip64.so",
        "user/lib/libamdhip64.so",
        "anon_inode:/libamdhip64.so",
        "/opt/rocm/lib/libamdhip64.so.debug",
        "/opt/rocm/lib/libamdhip64.so-old",
        "/opt/rocm/lib/notlibamdhip64.so",
        "/opt/libamdhip64.so/libother.so",
        "/home/a libamdhip64.so",
    ],
)
def test_nothing_else_is_taken(maps: Callable[..., None], path: str) -> None:
    """No path that is relative, which the current directory would decide, and no other library."""
    maps(path)
    with pytest.raises(DriverNotFound, match=r"torch has not loaded libamdhip64\.so"):
        devices._mapped("libamdhip64.so")


def test_a_library_that_was_replaced_on_disk(maps: Callable[..., None]) -> None:
    """What lies at its path now is another copy."""
    maps("/opt/rocm/lib/libamdhip64.so.6 (deleted)")
    with pytest.raises(DriverNotFound, match="was replaced on disk after torch had loaded it"):
        devices._mapped("libamdhip64.so")


def test_a_file_that_this_process_has_mapped() -> None:
    """Against the real /proc/self/maps."""
    path = Path(devices._mapped("libtorch_cpu.so"))
    assert path.is_absolute() and path.is_file()
