"""Which packs are installed, and which of them serves a device."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from liger_aot._version import __version__
from liger_aot.errors import LigerAOTError, PackDamaged, PackNotFound, how_to_install
from liger_aot.runtime.manifest import Pack

NAMESPACE = "liger_aot_packs"
OVERRIDE = "LIGER_AOT_PACKS"  # folders of packs, separated like PATH, searched instead of the installed ones


class Device(NamedTuple):
    """What decides which pack a GPU takes."""

    backend: str  # "cuda" or "hip"
    target: str  # "9.0" or "gfx942"
    name: str

    def __str__(self) -> str:
        kind = "compute capability " if self.backend == "cuda" else ""
        return f"{self.name} ({kind}{self.target})"


def pack_roots() -> tuple[Path, ...]:
    """Folders that are searched for packs, first come first: the one beside liger_aot, then those of the import path.

    The current directory is none of them, though Python may have it on the import path: what lies there is not what was
    installed.
    """
    if override := os.environ.get(OVERRIDE):
        return tuple(Path(root) for root in override.split(os.pathsep) if root)
    return namespace_folders(NAMESPACE, first=str(Path(__file__).parents[2] / NAMESPACE))


def namespace_folders(name: str, first: str | None = None) -> tuple[Path, ...]:
    """The folders of a namespace package, each once: ``first``, then those on the import path but the current
    directory's."""
    roots = {found: first} if first and (found := _folder_id(first)) else {}
    here = _folder_id(name)
    for entry in sys.path:
        path = os.path.join(entry, name)
        if (found := _folder_id(path)) and found != here:
            roots.setdefault(found, path)
    return tuple(Path(root) for root in roots.values())


def _folder_id(path: str) -> tuple[int, int] | None:
    """What tells one folder from another, whatever its path; None where there is nothing, as is common on sys.path."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


def pack_folders() -> tuple[Path, ...]:
    """Folders that hold one pack each, by name, without reading them. Of two of one name the first root's counts."""
    return tuple(folders[0] for folders in _by_name())


def hidden_folders() -> tuple[tuple[Path, Path], ...]:
    """Folders of packs that are not used, each with the one of its name that comes first."""
    return tuple((folder, first) for first, *others in _by_name() for folder in others)


def _by_name() -> list[list[Path]]:
    found: dict[str, list[Path]] = {}
    for root in pack_roots():
        try:
            folders = [Path(entry) for entry in os.scandir(root) if entry.is_dir()]
        except OSError:  # not there, as is common along a search path
            continue
        for folder in folders:
            if not folder.name.startswith((".", "_")):
                found.setdefault(folder.name, []).append(folder)
    return [found[name] for name in sorted(found)]


def open_pack(folder: Path) -> Pack:
    """The pack in ``folder``; PackDamaged, PackTooNew or PackNotFound where it can't be used."""
    pack = Pack(folder)
    if pack.arch != folder.name:  # else two folders could hold one architecture
        raise PackDamaged(pack.path, f"arch is {pack.arch!r}, its folder is {folder.name!r}")
    if pack.version != __version__:
        raise PackNotFound(
            f"{folder}: pack {pack.arch} is of version {pack.version}, liger-aot of {__version__}: "
            f"install the same version of both. {how_to_install(pack.arch)}"
        )
    return pack


class Installed:
    """The packs that can be used, and the folders that can't with what is wrong."""

    __slots__ = ("packs", "unusable")

    def __init__(self, packs: tuple[Pack, ...], unusable: Mapping[Path, str]) -> None:
        self.packs, self.unusable = packs, unusable


@lru_cache(maxsize=1)
def installed() -> Installed:
    """Every installed pack. One that can't be used doesn't keep the others from their work."""
    found = {folder: _pack_or_problem(folder) for folder in pack_folders()}
    return Installed(
        tuple(pack for pack in found.values() if isinstance(pack, Pack)),
        {folder: problem for folder, problem in found.items() if isinstance(problem, str)},
    )


def _pack_or_problem(folder: Path) -> Pack | str:
    try:
        return open_pack(folder)
    except LigerAOTError as error:
        return str(error)


def installed_packs() -> tuple[Pack, ...]:
    """The installed packs that can be used."""
    return installed().packs


def pack_for(device: Device) -> Pack:
    """The pack that names the device's architecture earliest.

    Raises:
        PackNotFound: no installed pack serves the device; says what is there and what to do.
        PackDamaged, PackTooNew: the pack of the device's own architecture can't be used. No other takes its place.
    """
    serving = [
        (pack.serves.index(device.target), pack.arch, pack)
        for pack in installed_packs()
        if pack.backend == device.backend and device.target in pack.serves
    ]
    own = own_arch(device)
    for folder in installed().unusable:
        if folder.name == own or (not serving and folder.name == _released(device)):
            open_pack(folder)  # raises anew: an error that is kept would keep its frames' tensors
    if serving:
        return min(serving, key=lambda s: s[:2])[2]
    raise PackNotFound(f"no installed pack serves {device}: {describe()}. {_remedy(device)}")


def pack_of(arch: str) -> Pack:
    """The installed pack of an architecture by name; raises as ``pack_for`` does."""
    for pack in installed_packs():
        if pack.arch == arch:
            return pack
    for folder in installed().unusable:
        if folder.name == arch:
            open_pack(folder)
    raise PackNotFound(f"no pack {arch!r} is installed: {describe()}")


def describe() -> str:
    """What is installed, for a message."""
    parts = [f"{p.arch} (for {', '.join(p.serves)})" for p in installed_packs()]
    parts += [f"{folder.name} (unusable: liger-aot verify says why)" for folder in installed().unusable]
    if parts:
        return "installed are " + ", ".join(parts)
    if override := os.environ.get(OVERRIDE):
        return f"none is installed in {OVERRIDE}={override}"
    return "none is installed"


def _released(device: Device) -> str | None:
    """The pack that is made for a device, of those that this version is released with: the one of its own name, or on
    CUDA the last before it of its major compute capability, whose binaries it runs."""
    own = own_arch(device)
    if own is None or (names := released_archs()) is None:
        return None
    if device.backend == "hip" or own in names:
        return own if own in names else None
    before = [name for name in names if name[:-1] == own[:-1] and name < own]
    return max(before, default=None)


def own_arch(device: Device) -> str | None:
    """The name that a pack of the device's own architecture has."""
    if device.backend == "hip":
        return device.target
    major, _, minor = device.target.partition(".")
    return f"sm{major}{minor}" if minor.isdecimal() and len(minor) == 1 else None


def released_archs() -> tuple[str, ...] | None:
    """Architectures that wheels of this version exist for, as the extras of liger-aot name them; None where it is not
    installed, as in a source tree."""
    from importlib.metadata import PackageNotFoundError, metadata

    try:
        extras = metadata("liger-aot").get_all("Provides-Extra") or ()
    except PackageNotFoundError:
        return None
    return tuple(sorted(set(extras) - {"all"}))


def _remedy(device: Device) -> str:
    if (arch := _released(device)) is not None:
        return how_to_install(arch)
    names = released_archs()
    built = "" if names is None else f"liger-aot is built for {', '.join(names)}; "
    return f"{built}add a profile to build for another GPU"
