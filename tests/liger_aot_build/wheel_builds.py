"""What the tests of wheels share: a source tree of their own, its wheels, and environments to install them into."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from importlib.metadata import distribution
from pathlib import Path

from examples.fresh_environment import link, with_requirements
from liger_aot_build.paths import ROOT

PARTS = (
    "arch_profiles",
    "liger_aot_build",
    "csrc_triton",
    "python",
    "setup.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)


def copy_tree(folder: Path, cache: Path | None = None) -> Path:
    """What a source build needs, in ``folder``; with ``cache``, kernels that it holds aren't compiled again."""
    folder.mkdir(parents=True)
    for part in PARTS:
        if (ROOT / part).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
            shutil.copytree(ROOT / part, folder / part, ignore=ignored)
        else:
            shutil.copy2(ROOT / part, folder / part)
    if cache is not None:
        cache.mkdir(parents=True, exist_ok=True)
        (folder / "build").mkdir()
        (folder / "build" / "cache").symlink_to(cache)
    return folder


def run_wheel(tree: Path, *arguments: str | Path) -> str:
    """``python -m liger_aot_build wheel`` in ``tree``; what it prints."""
    command = [sys.executable, "-m", "liger_aot_build", "wheel", *map(str, arguments)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def build(tree: Path, archs: str, ops: str = "") -> Path:
    """The wheel of ``tree`` with the packs of ``archs``, of some ops or (none given) of all."""
    out = tree / "wheels" / f"{archs} {ops}"
    run_wheel(tree, "--arch", archs, *(("--kernel", ops) if ops else ()), "--out", out)
    (wheel,) = out.glob("*.whl")
    return wheel


class Environment:
    """A fresh environment with torch and pip, which installs from a folder of wheels and from nowhere else."""

    def __init__(self, folder: Path, index: Path) -> None:
        self.folder, self.index = folder, index
        venv.create(folder, symlinks=True)
        (site,) = folder.glob("lib/python*/site-packages")
        for package in with_requirements("torch", "numpy", "pip"):
            link(package, site)
        # Torch's requirements are linked but for Triton, which nothing here needs: pip is told of none.
        version = distribution("torch").version
        (told,) = site.glob("torch-*.dist-info")
        told.unlink()
        told.mkdir()
        (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        self.fresh = self.files()

    def pip(self, command: str, *arguments: str) -> str:
        """``pip install`` or ``uninstall``; what it printed."""
        options = {"install": ("--no-index", "--find-links", str(self.index)), "uninstall": ("--yes",)}
        return self.run("python", "-m", "pip", command, *options.get(command, ()), *arguments)

    def run(self, *command: str, exit_code: int = 0) -> str:
        """Run a command of the environment; its output and errors."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_", "LIGER_"))}
        environment |= {"PYTHONDONTWRITEBYTECODE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        program = [str(self.folder / "bin" / command[0]), *command[1:]]
        done = subprocess.run(program, cwd="/proc", env=environment, capture_output=True, text=True)
        assert done.returncode == exit_code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def installed(self) -> dict[str, str]:
        """Versions of what is liger-aot's, by name, as the environment's pip tells."""
        lines = self.run("python", "-m", "pip", "list", "--format", "freeze").splitlines()
        return dict(line.split("==") for line in lines if line.startswith("liger"))

    def files(self) -> set[str]:
        """Every file and folder of the environment itself, not those that it links to."""
        return {
            os.path.join(root, name)
            for root, folders, names in os.walk(self.folder)
            for name in (*folders, *names)
        }
