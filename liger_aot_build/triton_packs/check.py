"""``liger-aot pack --check``: whether the installed packs hold all that was recorded. For a project's CI."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from liger_aot.triton.recording import Part
from liger_aot_build.triton_packs.pack import NAMESPACE


def check(parts: Sequence[Part], name: str | None) -> int:
    """Print what is missing, by target; the exit code, 1 where something is. A pack is asked about what was recorded
    on its own architecture: another's names differ where modules look at the GPU."""
    missing_any = False
    for part in parts:
        held: set[str] = set()
        folders = [
            f for f in pack_folders() if f.name == part.target.profile and name in (None, f.parent.name)
        ]
        for folder in folders:
            held |= _variants(folder, part.triton)
        named = {noted.variant.name: noted.variant for noted in part.variants}
        missing = [named[key] for key in sorted(named.keys() - held)]
        where = ", ".join(f.parent.name for f in folders) or "no pack is installed"
        print(f"{part.target.profile}: {len(named) - len(missing)} of {len(named)} variants ({where})")
        functions: dict[str, int] = {}
        for variant in missing:
            functions[variant.function] = functions.get(variant.function, 0) + 1
        for function, count in sorted(functions.items()):
            print(f"  missing: {function} ({count} variants)")
        missing_any |= bool(missing)
    return int(missing_any)


def pack_folders() -> Iterator[Path]:
    """Folders of installed packs of Triton kernels, ``<name>/<arch>``."""
    spec = find_spec(NAMESPACE)
    places = (spec.submodule_search_locations or ()) if spec else ()
    for place in dict.fromkeys(Path(place).resolve() for place in places):
        for manifest in sorted(place.glob("*/*/manifest.json")):
            yield manifest.parent


def _variants(folder: Path, triton: str) -> set[str]:
    """Names of the variants in a pack that this Triton may use."""
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())
    if manifest["toolchain"]["triton"] != triton:
        print(f"  {folder.parent.name} is of triton {manifest['toolchain']['triton']}, recorded was {triton}")
        return set()
    found: set[str] = set()
    for entry in manifest["functions"].values():
        found |= json.loads((folder / f"{entry['file']}.json").read_bytes())["variants"].keys()
    return found
