"""How the launcher is built: what the library asks of the system, and what its bytes depend on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from liger_aot_build import launcher
from liger_aot_build.paths import ROOT

# What a Python may have been built with: all of it has been seen in Pythons that people use.
BUILD = """
import sys, sysconfig
from unittest.mock import patch
known = sysconfig.get_config_vars()
with patch.dict(known, {}):
    for name, flags in zip(sys.argv[1:3], sys.argv[3:5]):
        known[name] = f"{known.get(name) or 'cc'} {flags}"
    known.update(Py_GIL_DISABLED=int(sys.argv[5]))
    sys.argv[1:] = ["-q", "build_ext", "--build-lib", sys.argv[6], "--build-temp", sys.argv[7]]
    exec(compile(open("setup.py").read(), "setup.py", "exec"), {"__name__": "__main__", "__file__": "setup.py"})
"""


def build(
    folder: Path, compile_flags: str = "", link_flags: str = "", free_threaded: bool = False
) -> tuple[Path, str]:
    """setup.py's launcher as a Python with these flags builds it, and what the build said where it failed."""
    if not shutil.which("cc") and not os.environ.get("CC"):
        pytest.skip("no C compiler on this machine to build the launcher with")
    names = ("CFLAGS", "LDSHARED", compile_flags, link_flags, str(int(free_threaded)))
    command = [sys.executable, "-c", BUILD, *names, str(folder / "lib"), str(folder / "temp")]
    environment = {k: v for k, v in os.environ.items() if k not in ("CFLAGS", "CPPFLAGS", "LDFLAGS")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode == 0) is not free_threaded, done.stderr
    return folder / "lib" / "liger_aot" / "_launch.abi3.so", done.stderr


def readelf(library: Path, *options: str) -> str:
    if not shutil.which("readelf"):
        pytest.skip("no readelf (binutils) on this machine to look into the launcher with")
    command = ["readelf", "--wide", *options, str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = "-L/opt/python/lib -Wl,-rpath,/opt/python/lib"
    return build(tmp_path_factory.mktemp("launcher"), "-O0 -fno-stack-protector", flags)[0]


def test_it_brings_no_search_path(library: Path) -> None:
    """Else the GPU driver's library would be looked for there first."""
    dynamic = readelf(library, "--dynamic")
    assert "RUNPATH" not in dynamic and "RPATH" not in dynamic
    assert b"/opt/python" not in library.read_bytes()


def test_it_is_hardened(library: Path) -> None:
    dynamic, segments = readelf(library, "--dynamic"), readelf(library, "--segments")
    assert "BIND_NOW" in dynamic and "GNU_RELRO" in segments
    assert not [line for line in segments.splitlines() if "GNU_STACK" in line and "RWE" in line]
    symbols = readelf(library, "--dyn-syms")
    assert "__stack_chk_fail" in symbols, "no stack protector"
    assert "__snprintf_chk" in symbols, "no _FORTIFY_SOURCE"


def test_its_bytes_do_not_depend_on_the_python_that_builds_it(library: Path, tmp_path: Path) -> None:
    """Neither on its flags nor on what its headers inline."""
    other, _ = build(tmp_path, "-O3 -fwrapv -DNDEBUG -fcommon", "-Wl,-rpath,/elsewhere -Wl,--strip-all")
    assert other.read_bytes() == library.read_bytes()
    symbols = readelf(library, "--dyn-syms").split()
    assert "Py_DecRef" in symbols and "_Py_Dealloc" not in symbols, "a reference count is inlined"
    assert not [name for name in symbols if name.endswith("_SizeT")], "names that Python 3.13's headers lack"


def test_the_environment_has_its_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """For cross-compilers and distributions: CC and flags, which may hold several words."""
    for name, value in {"CC": "zig cc -target x", "CFLAGS": "-O1", "LDFLAGS": "-Wl,-s"}.items():
        monkeypatch.setenv(name, value)
    assert launcher.compile_command()[:4] == ["zig", "cc", "-target", "x"]
    assert launcher.compile_command()[-1] == "-O1" and launcher.link_command()[-1] == "-Wl,-s"


def test_a_free_threaded_python_is_refused(tmp_path: Path) -> None:
    """It has no stable ABI: its own headers would end the build with an error about them."""
    _, said = build(tmp_path, free_threaded=True)
    assert "error: liger-aot does not support free-threaded Python (3.13t, 3.14t)" in said
    assert "Traceback" not in said
