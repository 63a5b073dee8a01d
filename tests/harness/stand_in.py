"""Builds the launcher and the stand-in driver with the machine's C compiler, and drives the stand-in."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
import shutil
import struct
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from liger_aot_build.launcher import COMPILE, LINK

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "liger_aot"
DRIVER = ROOT / "tests" / "harness" / "stand_in_driver"
FLAGS = ("-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread")

# What the launch record of tests/harness/stand_in_driver/record.c holds before the parameter bytes.
_RECORD = struct.Struct("<64s3I3IIiiiQ")
_LETTERS = {"p": "Q", "i": "i", "l": "q", "f": "f", "b": "b", "h": "h"}
_LETTERS |= {str(rank): "16Q" + rank * "i" + rank * "q" for rank in range(1, 6)}  # a tensor map


def compile_c(sources: list[Path], output: Path, *flags: str) -> Path:
    """A shared library, with the machine's compiler."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler on this machine to build the launcher with")
    extra = os.environ.get("CFLAGS", "").split()
    command = [*compiler.split(), *FLAGS, *flags, *extra, "-o", str(output), *map(str, sources)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return output


def build_launcher(folder: Path) -> Path:
    """Compile liger_aot._launch for the limited API of Python 3.10, as the wheel does.

    LIGER_AOT_LAUNCHER names one that is built already: another machine's, under emulation.
    """
    if built := os.environ.get("LIGER_AOT_LAUNCHER"):
        return Path(built)
    include = Path(sysconfig.get_paths()["include"])
    if not (include / "Python.h").exists():
        pytest.skip(f"no Python.h in {include} to build the launcher with")
    sources = [PACKAGE / "_launch.c", *sorted((PACKAGE / "_native").glob("*.c"))]
    return compile_c(sources, folder / "_launch.abi3.so", *COMPILE, *LINK, f"-I{include}")


def build_stand_in(
    folder: Path, *, without: str | None = None, version: int = 12040, name: str | None = None
) -> Path:
    """Compile the stand-in driver; `without` names a function that it shall not have, `version` is CUDA's. As `name` it
    is what a process that has opened it finds under that name."""
    flags = [f"-DVERSION={version}", *([f"-D{without}=renamed_away"] if without else [])]
    if name is not None:
        flags.append(f"-Wl,-soname,{name}")
    output = folder / (name or f"libstandin{without or ''}.so")
    return compile_c(sorted(DRIVER.glob("*.c")), output, *flags, "-ldl")


def import_launcher(path: Path) -> ModuleType:
    """The freshly built extension as liger_aot._launch, without making it the one that liger_aot imports."""
    if str(ROOT / "python") not in sys.path:
        sys.path.insert(0, str(ROOT / "python"))
    loader = importlib.machinery.ExtensionFileLoader("liger_aot._launch", str(path))
    spec = importlib.util.spec_from_loader("liger_aot._launch", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def image(*kernels: str, ptx: bool = False) -> bytes:
    """What the stand-in takes for a compiled image: each kernel as "name=letters"."""
    return (b"// PTX " if ptx else b"\x7fELF ") + " ".join(kernels).encode()


@dataclass(frozen=True)
class LaunchRecord:
    """One launch as the driver saw it; `parameters` are its bytes, without padding."""

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    device: int
    cooperative: bool
    pdl: bool
    stream: int
    parameters: bytes
    cluster: int = 1
    spread: bool = False

    def unpack(self, signature: str) -> tuple[Any, ...]:
        """The parameters as numbers, the two scratch pointers last."""
        return struct.unpack("<" + "".join(_LETTERS[letter] for letter in signature) + "QQ", self.parameters)


class StandIn:
    """The stand-in driver library of this process: what it says, and what it was asked."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._library = ctypes.CDLL(self.path)
        self._library.stand_in_launch.restype = ctypes.c_void_p
        self._library.stand_in_launch.argtypes = [ctypes.c_long]
        self._library.stand_in_launch_count.restype = ctypes.c_long
        self._library.stand_in_log.restype = ctypes.c_char_p
        self.reset()

    def reset(self) -> None:
        """Forget all calls and launches, fail nothing, make device 0 current in this thread."""
        self._library.stand_in_reset()

    def set_current(self, device: int | None) -> None:
        self._library.stand_in_set_current(-1 if device is None else device)

    def current(self, backend: str) -> int | None:
        """The current device of this thread: None without a context, which HIP knows not."""
        if backend == "hip":
            return int(self._library.stand_in_hip_device())
        assert self._library.stand_in_context_depth() == 0, "a context was pushed and not popped"
        device = int(self._library.stand_in_current())
        return None if device < 0 else device

    def fail(self, call: str, code: int) -> None:
        self._library.stand_in_fail(call.encode(), code)

    def hold(self, call: str | None) -> None:
        """Make a driver function block, until it is no longer held."""
        self._library.stand_in_hold((call or "").encode())

    def capture(self, on: bool) -> None:
        """As if a stream were being captured: what can't be captured fails in threads that don't ask for it."""
        self._library.stand_in_capture(int(on))

    def unreachable(self, start: int, end: int) -> None:
        """Kernels reach no memory from `start` up to `end`: the host's."""
        self._library.stand_in_unreachable(ctypes.c_uint64(start), ctypes.c_uint64(end))

    def log_calls(self, on: bool) -> None:
        self._library.stand_in_log_calls(int(on))

    def calls(self, *names: str) -> list[str]:
        """The calls so far, as "cuLaunchKernel@0" with the current device: all, or of some functions."""
        lines = self._library.stand_in_log().decode().split()
        return [line for line in lines if not names or line.split("@")[0] in names]

    @property
    def live_libraries(self) -> int:
        return int(self._library.stand_in_live_libraries())

    @property
    def last_error(self) -> int:
        return int(self._library.stand_in_last_error())

    def retained(self, device: int) -> int:
        return int(self._library.stand_in_retained(device))

    @property
    def launch_count(self) -> int:
        return int(self._library.stand_in_launch_count())

    def launches(self) -> list[LaunchRecord]:
        return [self._record(index) for index in range(self.launch_count)]

    def _record(self, index: int) -> LaunchRecord:
        address = self._library.stand_in_launch(index)
        name, gx, gy, gz, bx, by, bz, shared, device, way, size, stream = _RECORD.unpack(
            ctypes.string_at(address, _RECORD.size)
        )
        return LaunchRecord(
            name=name.split(b"\0")[0].decode(),
            grid=(gx, gy, gz),
            block=(bx, by, bz),
            shared=shared,
            device=device,
            cooperative=bool(way & 1),
            pdl=bool(way & 2),
            cluster=max(1, way >> 8),
            spread=bool(way & 4),
            stream=stream,
            parameters=ctypes.string_at(address + _RECORD.size, size),
        )
