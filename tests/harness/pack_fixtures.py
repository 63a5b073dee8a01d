"""Copies of the built packs to install, edit and damage: pytest_plugins = ("tests.harness.pack_fixtures",)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from liger_aot.runtime import packs
from tests.conftest import built_pack
from tests.harness.pack_edits import ARCHS


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """``install(root, ...)`` makes the packs in these folders the installed ones, until the test ends."""

    def install(*roots: Path) -> None:
        monkeypatch.setenv(packs.OVERRIDE, os.pathsep.join(map(str, roots)))
        packs.installed.cache_clear()

    yield install
    packs.installed.cache_clear()


@pytest.fixture
def copies(tmp_path: Path, install: Callable[..., None]) -> Callable[..., Path]:
    """``copies("sm80", ...)`` installs copies of built packs alone, and returns the folder they are in."""

    def copies(*archs: str) -> Path:
        root = tmp_path / "packs"
        for arch in archs:
            shutil.copytree(built_pack(arch).folder, root / arch)
        install(root)
        return root

    return copies


@pytest.fixture
def built(tmp_path: Path, install: Callable[..., None]) -> Path:
    """A folder with the packs of ARCHS alone, installed."""
    root = tmp_path / "built"
    root.mkdir()
    for arch in ARCHS:
        (root / arch).symlink_to(built_pack(arch).folder, target_is_directory=True)
    install(root)
    return root


@pytest.fixture
def sm80(copies: Callable[..., Path]) -> Path:
    return copies("sm80") / "sm80"
