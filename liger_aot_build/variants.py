"""Wheel variants (PEP 825, a draft): whole wheels, of which an installer that knows variants takes the machine's.

Each is the host wheel with one pack, labelled with the GPU that it is for; "null" is the host wheel alone, for machines
with none. They are for an index of their own: beside the device wheels, two wheels would own the same files. Installers
that know no variants do not see them, since their file names have one part more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from liger_aot_build.device_wheel import pack_files, write_wheel

SCHEMA = "https://variants-schema.wheelnext.dev/peps/825/v0.1.1.json"
NAMESPACES = ("nvidia", "amd")  # who names the properties of GPUs, in the order in which they count
NULL = "null"

Properties = dict[str, dict[str, list[str]]]


def write_variants(host: Path, packs: Sequence[Path], out: Path) -> list[Path]:
    """Write the variants of the wheel ``host`` with each of ``packs``, and their index file, into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    stem = "-".join(host.name.split("-")[:2])
    with ZipFile(host) as archive:
        files = {n: archive.read(n) for n in archive.namelist() if not n.endswith(("/", "/RECORD"))}
    manifests = {pack: json.loads((pack / "manifest.json").read_bytes()) for pack in packs}
    variants: dict[str, Properties] = {m["arch"]: properties(m) for m in manifests.values()} | {NULL: {}}
    held = {m["arch"]: pack_files(pack, m["arch"]) for pack, m in manifests.items()} | {NULL: {}}
    wheels = []
    for label, about in variants.items():
        said = {f"{stem}.dist-info/variant.json": _document({label: about})}
        path = out / f"{host.name.removesuffix('.whl')}-{label}.whl"
        wheels.append(write_wheel(path, {**files, **held[label], **said}, f"{stem}.dist-info/RECORD"))
    index = out / f"{stem}-variants.json"
    index.write_bytes(_document(variants))
    return [*wheels, index]


def properties(manifest: Mapping[str, Any]) -> Properties:
    """What a GPU must be for a pack: ``nvidia :: sm_arch :: 90_real`` or ``amd :: gfx_arch :: gfx942``."""
    if manifest["backend"] == "cuda":
        return {"nvidia": {"sm_arch": [f"{manifest['arch'].removeprefix('sm')}_real"]}}
    return {"amd": {"gfx_arch": [manifest["arch"]]}}


def _document(variants: Mapping[str, Properties]) -> bytes:
    body = {"$schema": SCHEMA, "default-priorities": {"namespace": NAMESPACES}, "variants": variants}
    return (json.dumps(body, indent=2) + "\n").encode()
