"""``verify``: every file of every installed pack against its manifest."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from liger_aot.errors import LigerAOTError, PackDamaged
from liger_aot.manifest import Blob, OpManifest
from liger_aot.packs import open_pack, pack_folders


@dataclass(frozen=True)
class Fault:
    """A file of a pack that is not as it was built."""

    path: Path
    problem: str

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


def verify() -> list[Fault]:
    """Read every installed pack whole: manifests, op manifests and binaries by their sha256; missing and extra files.

    Goes on after a fault. No pack installed is no fault: ``packs.pack_folders`` says which there are.
    """
    return [fault for folder in pack_folders() for fault in verify_pack(folder)]


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
