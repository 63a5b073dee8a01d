"""``verify``: every file of every installed pack against its manifest."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from liger_aot.errors import LigerAOTError, PackDamaged
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
    unread = []
    damaged = set()  # a base is read with each binary that is compressed against it
    for op in pack.ops:
        known.add(folder / f"{op}.json")
        try:
            manifest = pack.op(op)
        except LigerAOTError as error:
            yield _fault(folder, error)
            unread.append(folder / op)
            continue
        for name in manifest.variants:
            known.add(manifest.binary(name))
            try:
                manifest.variant(name).read()
            except LigerAOTError as error:
                fault = _fault(folder, error)
                if fault not in damaged:
                    damaged.add(fault)
                    yield fault
    for path in _files(folder):
        if path not in known and not any(path.is_relative_to(skipped) for skipped in unread):
            yield Fault(path, "not in the manifest")


def _files(folder: Path) -> Iterator[Path]:
    for root, _, names in sorted(os.walk(folder)):
        yield from (Path(root, name) for name in sorted(names))


def _fault(folder: Path, error: LigerAOTError) -> Fault:
    if isinstance(error, PackDamaged):
        return Fault(error.path, error.problem)
    return Fault(folder, str(error))
