"""A recording of the small project, made on a machine without a GPU, and what was built from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

pytest.importorskip("triton", reason="Triton is not installed: make venv installs it")

from tests.harness.children import environment, start_as_installed

WINDOW = 32768


def liger_aot(
    folder: Path, *arguments: str | Path, code: int = 0, installed: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """``liger-aot`` in a process whose Python, and its children's, read liger_aot.pth as from site-packages, and find
    what lies in ``folder`` and in ``installed``."""
    start = folder / "start"
    start.mkdir(exist_ok=True)
    start_as_installed(start)
    variables = environment()
    folders = [start, folder, *([installed] if installed else []), variables["PYTHONPATH"]]
    variables["PYTHONPATH"] = os.pathsep.join(map(str, folders))
    command = [sys.executable, "-m", "liger_aot", *map(str, arguments)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, cwd=folder)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def record(folder: Path, *program: str | Path, target: str = "sm90") -> Path:
    """The recording of a program, in ``folder``."""
    liger_aot(
        folder, "record", "--out", folder / "recording", "--target", target, "--", sys.executable, *program
    )
    return folder / "recording"


@pytest.fixture(scope="session")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kernel of the project, recorded for sm90."""
    return record(tmp_path_factory.mktemp("recorded"), "-m", "tests.triton_packs.project.program")


@dataclass(frozen=True)
class Packed:
    """A wheel of Triton kernels, read by its own words."""

    wheel: Path
    said: str  # what the build printed

    @cached_property
    def files(self) -> dict[str, bytes]:
        with ZipFile(self.wheel) as archive:
            return {name: archive.read(name) for name in archive.namelist()}

    @cached_property
    def folder(self) -> str:
        (name,) = (n for n in self.files if n.endswith("/manifest.json"))
        return name.rpartition("/")[0]

    @cached_property
    def manifest(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.files[f"{self.folder}/manifest.json"])
        return found

    def function(self, name: str) -> dict[str, Any]:
        """One function's file, by the end of its name."""
        (entry,) = (e for f, e in self.manifest["functions"].items() if f.endswith(f":{name}"))
        found: dict[str, Any] = json.loads(self.files[f"{self.folder}/{entry['file']}.json"])
        return found | {"bin": self.files[f"{self.folder}/{entry['file']}.bin"]}

    def entries(self, name: str) -> list[dict[str, Any]]:
        """The binaries of a function, with their images."""
        function = self.function(name)
        return [
            entry | {"image": self._image(function, f"{variant}/{i}")}
            for variant, entries in function["variants"].items()
            for i, entry in enumerate(entries)
        ]

    def _image(self, function: dict[str, Any], name: str) -> bytes:
        variant, _, index = name.partition("/")
        entry = function["variants"][variant][int(index)]
        dictionary = self._image(function, entry["base"])[:WINDOW] if entry["base"] else b""
        data = function["bin"][entry["offset"] : entry["offset"] + entry["length"]]
        return zlib.decompressobj(zdict=dictionary).decompress(data)


def pack(recording: Path, arch: str, *more: str | Path, code: int = 0) -> Packed:
    """The wheel of a recording for one architecture, and what the build said."""
    out = recording.parent / f"dist-{arch}"
    done = liger_aot(
        recording.parent, "pack", recording, "--arch", arch, "--name", "small", "--version", "1.0",
        "--jobs", "1", "--out", out, *more, code=code,
    )  # fmt: skip
    wheels = list(out.glob("*.whl")) if out.exists() else []
    return Packed(wheels[0] if wheels else out, done.stdout + done.stderr)


@pytest.fixture(scope="session")
def sm90(recording: Path) -> Packed:
    return pack(recording, "sm90")


@pytest.fixture(scope="session")
def gfx942(recording: Path) -> Packed:
    """From what was recorded for sm90. One kernel asks for clusters, which no AMD GPU has: exit code 1."""
    return pack(recording, "gfx942", code=1)


@pytest.fixture(scope="session")
def made_in_calls_recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels that functions make when they are called, recorded for sm90."""
    return record(tmp_path_factory.mktemp("made"), "-m", "tests.triton_packs.project.made_in_calls")


@pytest.fixture(scope="session")
def made_in_calls_sm90(made_in_calls_recording: Path) -> Packed:
    """One of them has a variable that can't be written down: exit code 1."""
    return pack(made_in_calls_recording, "sm90", code=1)
