"""Which packs are installed, and which of them serves a device."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from liger_aot._version import __version__
from liger_aot.errors import PackNotFound
from liger_aot.manifest import Pack

NAMESPACE = "liger_aot_packs"
OVERRIDE = "LIGER_AOT_PACKS"  # folders of packs, separated like PATH, searched instead of the installed ones


@dataclass(frozen=True)
class Device:
    """What decides which pack a GPU takes."""

    backend: str  # "cuda" or "hip"
    target: str  # "9.0" or "gfx942"
    name: str

    def __str__(self) -> str:
        kind = "compute capability " if self.backend == "cuda" else ""
        return f"{self.name} ({kind}{self.target})"


def pack_folders() -> tuple[Path, ...]:
    """Folders that hold one pack each, without reading them."""
    if override := os.environ.get(OVERRIDE):
        roots: Iterable[str] = override.split(os.pathsep)
    else:
        spec = find_spec(NAMESPACE)
        roots = (spec.submodule_search_locations or ()) if spec else ()
    found = {p.parent for root in roots for p in Path(root).glob("*/manifest.json")}
    return tuple(sorted(found, key=lambda p: p.name))


@lru_cache(maxsize=1)
def installed_packs() -> tuple[Pack, ...]:
    """Every installed pack of this version; PackDamaged or PackNotFound where one can't be used."""
    packs = tuple(Pack(folder) for folder in pack_folders())
    for pack in packs:
        if pack.version != __version__:
            raise PackNotFound(
                f"{pack.folder}: pack {pack.arch} is of version {pack.version}, liger-aot of {__version__}: "
                f'install the same version of both: pip install "liger-aot[{pack.arch}]=={__version__}"'
            )
    return packs


def pack_for(device: Device) -> Pack:
    """The pack that names the device's architecture earliest; PackNotFound says what is there and what to do."""
    serving = [
        (pack.serves.index(device.target), pack.arch, pack)
        for pack in installed_packs()
        if pack.backend == device.backend and device.target in pack.serves
    ]
    if serving:
        return min(serving, key=lambda s: s[:2])[2]
    raise PackNotFound(f"no installed pack serves {device}: {_installed()}. {_remedy(device)}")


def pack_of(arch: str) -> Pack:
    """The installed pack of an architecture by name."""
    for pack in installed_packs():
        if pack.arch == arch:
            return pack
    raise PackNotFound(f"no pack {arch!r} is installed: {_installed()}")


def _installed() -> str:
    packs = installed_packs()
    if not packs:
        return "none is installed"
    return "installed are " + ", ".join(f"{p.arch} (for {', '.join(p.serves)})" for p in packs)


def _remedy(device: Device) -> str:
    """What to install, by the rule that names packs: sm80 serves 8.x, sm90 serves 9.0, gfx names serve themselves."""
    if device.backend == "hip" and device.target in ("gfx90a", "gfx942"):
        arch = device.target
    elif device.backend == "cuda" and device.target.startswith("8."):
        arch = "sm80"
    elif device.backend == "cuda" and device.target == "9.0":
        arch = "sm90"
    else:
        return "liger-aot is built for compute capabilities 8.x and 9.0, gfx90a and gfx942; add a profile to build more"
    return (
        f'Install it: pip install "liger-aot[{arch}]", or from source: LIGER_AOT_ARCHS={arch} pip install .'
    )
