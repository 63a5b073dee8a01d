"""How large the device wheels are, for the support matrix.

    python -m docs.generate.wheels DIST [FILE]

updates FILE (docs/wheels.json) with the device wheels in the folder DIST: bytes and binaries of each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict
from zipfile import ZipFile

from benchmarks.environment import ROOT

FILE = ROOT / "docs" / "wheels.json"


class Size(TypedDict):
    bytes: int
    binaries: int


def read(path: Path = FILE) -> dict[str, Size]:
    """By architecture; those whose wheel was measured."""
    found: dict[str, Size] = json.loads(path.read_text()) if path.exists() else {}
    return found


def measured(wheel: Path) -> tuple[str, Size]:
    """The architecture of a device wheel, and how large it is."""
    with ZipFile(wheel) as archive:
        (manifest,) = [name for name in archive.namelist() if name.endswith("/manifest.json")]
        folder, _, _ = manifest.rpartition("/")
        parts = [n for n in archive.namelist() if n.startswith(f"{folder}/") and n.endswith(".json")]
        count = sum(len(json.loads(archive.read(name))["variants"]) for name in parts if name != manifest)
    return folder.rpartition("/")[2], {"bytes": wheel.stat().st_size, "binaries": count}


def text(sizes: Mapping[str, Size]) -> str:
    lines = [f'  "{arch}": {json.dumps(sizes[arch])}' for arch in sorted(sizes)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    dist, *rest = (Path(argument) for argument in (sys.argv[1:] if arguments is None else arguments))
    path = rest[0] if rest else FILE
    sizes = read(path) | dict(measured(wheel) for wheel in dist.glob("liger_aot_*-py3-none-any.whl"))
    path.write_text(text(sizes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
