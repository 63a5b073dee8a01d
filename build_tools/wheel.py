"""What setup.py calls: the packs into the build folder, and the launcher's sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from build_tools.build import build_pack
from build_tools.detect import VARIABLE, chosen_archs
from build_tools.errors import BuildError
from build_tools.paths import PACKS, ROOT

NAMESPACE = "liger_aot_packs"
EPOCH = (
    "315532800"  # 1980-01-01, the earliest time a zip file knows: the same bytes whenever a wheel is built
)


def add_packs(build_lib: Path) -> tuple[str, ...]:
    """Build the chosen architectures' packs and copy them to ``build_lib``."""
    archs = chosen_archs()
    for arch in archs:
        build_pack(arch)
        shutil.copytree(PACKS / arch, build_lib / NAMESPACE / arch)
    return archs


def launcher_sources() -> list[str]:
    """C files of the launcher, relative to the root."""
    package = ROOT / "python" / "liger_aot"
    return sorted(str(p.relative_to(ROOT)) for p in (*package.glob("*.c"), *package.glob("_native/*.c")))


def build_wheel(archs: Sequence[str], out: Path) -> None:
    """Build the wheel with the packs of ``archs`` into ``out``, in this environment (no build isolation)."""
    environment = {**os.environ, VARIABLE: ",".join(archs) or "none"}
    environment.setdefault("SOURCE_DATE_EPOCH", EPOCH)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        str(ROOT),
    ]
    if subprocess.run(command, env=environment).returncode:
        raise BuildError("pip wheel failed: its output is above")
