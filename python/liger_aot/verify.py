"""``verify``: every file of every installed pack, those of Triton kernels included, against its manifest, and against
the RECORD of its wheel."""

from __future__ import annotations

import csv
import os
from base64 import urlsafe_b64encode
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from liger_aot.errors import LigerAOTError, PackDamaged
from liger_aot.runtime.manifest import LARGEST_FILE, Blob, OpManifest, read_file
from liger_aot.runtime.packs import open_pack, pack_folders
from liger_aot.triton.packs import folders as triton_folders
from liger_aot.triton.packs import open_pack as open_triton_pack


@dataclass(frozen=True)
class Fault:
    """A file of a pack that is not as it was built."""

    path: Path
    problem: str

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


@dataclass(frozen=True)
class Report:
    """What ``verify`` found: faults, and how many files lie in folders whose files no wheel's RECORD names."""

    faults: tuple[Fault, ...]
    unrecorded: Mapping[Path, int]


def verify() -> Report:
    """Read every installed pack whole: manifests, op manifests and binaries by their sha256; missing and extra files.

    A manifest vouches for its own pack, so that one that was exchanged whole would pass: the files of packs, and those
    of liger_aot itself, are also compared with the RECORD of the wheel that installed them. A source tree has none.

    Goes on after a fault. No pack installed is no fault: ``packs.pack_folders`` says which there are.
    """
    folders = [Path(os.path.abspath(folder)) for folder in pack_folders()]
    of_triton = [Path(os.path.abspath(folder)) for folder in triton_pack_folders()]
    faults = [fault for folder in folders for fault in verify_pack(folder)]
    faults += [fault for folder in of_triton for fault in verify_triton_pack(folder)]
    at_fault = {fault.path for fault in faults}
    unrecorded: dict[Path, int] = {}
    own = Path(__file__).parent
    ours = [(own, own.parent), *((folder, folder.parents[1]) for folder in folders)]
    wheels = [(folder, site, "liger_aot*") for folder, site in ours]
    wheels += [(folder, _site(folder), "*") for folder in of_triton]
    for folder, site, distributions in wheels:
        try:
            recorded = _recorded(site, folder, distributions)
        except PackDamaged as error:
            faults.append(_fault(site, error))
            continue
        files = [path for path in _files(folder) if "__pycache__" not in path.parts]
        if not recorded:
            unrecorded[folder] = len(files)
            continue
        found = [Fault(path, "in no wheel's RECORD") for path in files if path not in recorded]
        found += _changed(recorded)
        faults += [fault for fault in found if fault.path not in at_fault]
    return Report(tuple(dict.fromkeys(faults)), unrecorded)


def triton_pack_folders() -> list[Path]:
    """The folders of installed packs of Triton kernels, by name and architecture."""
    return [folder for _, archs in sorted(triton_folders().items()) for _, folder in sorted(archs.items())]


def _site(folder: Path) -> Path:
    """Where the wheel was installed that a pack came with: it may lie inside a project's own package."""
    for parent in folder.parents:
        if any(parent.glob("*.dist-info")):
            return parent
    return folder.parents[2]


def _recorded(site: Path, folder: Path, distributions: str) -> dict[Path, tuple[str, str]]:
    """What wheels installed from ``site`` into ``folder``: by path, sha256 and size as their RECORD has them."""
    recorded = {}
    for path in sorted(site.glob(f"{distributions}.dist-info/RECORD")):
        lines = read_file(path, LARGEST_FILE).decode(errors="surrogateescape").splitlines()
        try:
            rows = list(csv.reader(lines))
        except csv.Error as error:
            raise PackDamaged(path, f"not CSV: {error}") from None
        for row in rows:
            if len(row) == 3 and row[1]:  # RECORD itself and compiled Python have no hash
                recorded[Path(os.path.normpath(site / row[0]))] = (row[1], row[2])
    return {path: entry for path, entry in recorded.items() if path.is_relative_to(folder)}


def _changed(recorded: Mapping[Path, tuple[str, str]]) -> Iterator[Fault]:
    """The faults of files that are not as a RECORD says."""
    for path, (digest, size) in recorded.items():
        try:
            data = read_file(path, int(size) if size.isdecimal() and len(size) < 12 else LARGEST_FILE)
        except PackDamaged as error:
            yield Fault(path, error.problem)
            continue
        found = "sha256=" + urlsafe_b64encode(sha256(data).digest()).rstrip(b"=").decode()
        if digest != found:
            yield Fault(path, f"is {found}, its wheel's RECORD says {digest}")


def verify_pack(folder: Path) -> Iterator[Fault]:
    """The faults of the pack in ``folder``. What a damaged manifest names is unknown, so its files are not judged."""
    try:
        pack = open_pack(folder)
    except LigerAOTError as error:
        yield _fault(folder, error)
        return
    known = {pack.path}
    for op in pack.ops:
        known |= {folder / f"{op}.json", folder / f"{op}.bin"}
        try:
            manifest = pack.op(op)
        except LigerAOTError as error:
            yield _fault(folder, error)
        else:
            yield from _binaries(folder, manifest)
    for path in _files(folder):
        if path not in known:
            yield Fault(path, "not in the manifest")


def verify_triton_pack(folder: Path) -> Iterator[Fault]:
    """The same for a pack of Triton kernels."""
    try:
        pack = open_triton_pack(folder)
        stems = {name: pack.stem(name) for name in pack.functions}
    except LigerAOTError as error:
        yield _fault(folder, error)
        return
    known = {pack.path}
    for name, stem in stems.items():
        known |= {folder / f"{stem}.json", folder / f"{stem}.bin"}
        try:
            function = pack.function(name)
            assert function is not None
            binaries = list(function.all_binaries())
        except LigerAOTError as error:
            yield _fault(folder, error)
            continue
        faults = []
        for binary in binaries:
            try:
                binary.read()
            except LigerAOTError as error:  # noqa: PERF203 (each is to be told)
                faults.append(_fault(folder, error))
        blobs = {blob for binary in binaries for blob in (binary.blob, binary.base) if blob is not None}
        yield from dict.fromkeys(faults) or _strays(folder / f"{stem}.bin", blobs)
    for path in _files(folder):
        if path not in known:
            yield Fault(path, "not in the manifest")


def _binaries(folder: Path, manifest: OpManifest) -> Iterator[Fault]:
    """The faults of an op's binaries, each once: a base is read with each binary that is compressed against it."""
    read = [_blobs_or_fault(folder, manifest, name) for name in manifest.variants]
    faults = dict.fromkeys(found for found in read if isinstance(found, Fault))
    blobs = {blob for found in read if not isinstance(found, Fault) for blob in found}
    yield from faults or _strays(manifest.binaries, blobs)


def _blobs_or_fault(folder: Path, manifest: OpManifest, name: str) -> tuple[Blob, ...] | Fault:
    """What was read for a binary: it and its base, or what is wrong with it."""
    try:
        variant = manifest.variant(name)
        variant.read()
    except LigerAOTError as error:
        return _fault(folder, error)
    return (variant.blob,) if variant.base is None else (variant.blob, variant.base)


def _strays(path: Path, blobs: Iterable[Blob]) -> Iterator[Fault]:
    """Bytes of a file of binaries that are in none of ``blobs``, or in two."""
    try:
        size = path.stat().st_size
    except OSError as error:
        yield Fault(path, error.strerror or str(error))
        return
    end = 0
    for blob in sorted(blobs, key=lambda blob: blob.offset):
        if blob.offset > end:
            yield Fault(path, f"bytes {end} to {blob.offset} are in no binary")
        if blob.offset < end:
            yield Fault(path, f"bytes {blob.offset} to {min(end, blob.end)} are in two binaries")
        end = max(end, blob.end)
    if size > end:
        yield Fault(path, f"bytes from {end} on are in no binary")


def _files(folder: Path) -> Iterator[Path]:
    for root, _, names in sorted(os.walk(folder)):
        yield from (Path(root, name) for name in sorted(names))


def _fault(folder: Path, error: LigerAOTError) -> Fault:
    if isinstance(error, PackDamaged):
        return Fault(error.path, error.problem)
    return Fault(folder, str(error))
