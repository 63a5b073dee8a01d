"""What lies beside a release's wheels: the sha256 of every file, and a bill of materials (CycloneDX 1.6).

    python -m liger_aot_build.release dist

Both are read from the wheels themselves, so that they hold for wheels that were built on several machines.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from email.message import Message
from email.parser import BytesParser
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5
from zipfile import ZipFile

from liger_aot_build.device_wheel import HOST, NAMESPACE
from liger_aot_build.errors import BuildError

SUMS = "SHA256SUMS"


def write_records(folder: Path) -> tuple[Path, Path]:
    """Write the checksums and the bill of materials of the wheels in ``folder``; their paths."""
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise BuildError(f"there is no wheel in {folder}")
    metadata = {wheel: _metadata(wheel) for wheel in wheels}
    versions = sorted({m["Version"] for m in metadata.values()})
    if len(versions) > 1:
        raise BuildError(f"{folder} holds wheels of versions {', '.join(versions)}: use an empty folder")
    bill = folder / f"{HOST.replace('-', '_')}-{versions[0]}.cdx.json"
    bill.write_text(json.dumps(bill_of_materials(metadata, versions[0]), indent=2) + "\n")
    sums = folder / SUMS
    sums.write_text("".join(f"{_sha256(path)}  {path.name}\n" for path in (*wheels, bill)))
    return sums, bill


def bill_of_materials(wheels: Mapping[Path, Message], version: str) -> dict[str, Any]:
    """The wheels, what they require where they run, and the compilers that made their binaries (scope "excluded": they
    aren't there where it runs). With no time in it: the same wheels give the same document."""
    manifests = {wheel: _manifests(wheel) for wheel in wheels}
    required = sorted({name for m in wheels.values() for name in _required(m)})
    tools = {wheel: sorted({t for m in packs for t in _toolchain(m)}) for wheel, packs in manifests.items()}
    components = [_wheel(wheel, metadata, manifests[wheel]) for wheel, metadata in wheels.items()]
    refs = [c["bom-ref"] for c in components]
    components += [_component(name, f"pkg:pypi/{name}") for name in required]
    components += [
        _component(name, _purl(kind, name, v), version=v, scope="excluded")
        for kind, name, v in sorted({tool for of_wheel in tools.values() for tool in of_wheel})
    ]
    needs = [{"ref": HOST, "dependsOn": refs}]
    for wheel, metadata in wheels.items():
        on = [f"pkg:pypi/{name}" for name in _required(metadata)] + [_purl(*tool) for tool in tools[wheel]]
        needs.append({"ref": wheel.name, **({"dependsOn": on} if on else {})})
    product = {
        **_component(HOST, f"pkg:pypi/{HOST}@{version}", version=version),
        "bom-ref": HOST,
        "licenses": [{"license": {"id": "Apache-2.0"}}],
    }
    body = {"metadata": {"component": product}, "components": components, "dependencies": needs}
    digest = sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid5(NAMESPACE_URL, digest)}",
        "version": 1,
        **body,
    }


def _component(name: str, purl: str, **more: str) -> dict[str, Any]:
    return {"type": "library", "bom-ref": purl, "name": name, **more, "purl": purl}


def _purl(kind: str, name: str, version: str) -> str:
    return f"pkg:{kind}/{name}@{version}"


def _wheel(path: Path, metadata: Message, manifests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    name, version = metadata["Name"], metadata["Version"]
    purl = f"pkg:pypi/{name}@{version}?file_name={path.name}"
    component = {
        **_component(name, purl, version=version),
        "bom-ref": path.name,
        "hashes": [{"alg": "SHA-256", "content": _sha256(path)}],
        "licenses": [{"license": {"id": metadata["License-Expression"]}}],
    }
    facts = {f"{HOST}:{m['arch']}:{key}": value for m in manifests for key, value in _facts(m).items()}
    if facts:
        component["properties"] = [{"name": key, "value": value} for key, value in facts.items()]
    return component


def _facts(manifest: Mapping[str, Any]) -> dict[str, str]:
    facts = {"serves": ", ".join(manifest["serves"]), "profile_sha256": manifest["profile_sha256"]}
    return facts | {f"toolchain:{key}": str(value) for key, value in sorted(manifest["toolchain"].items())}


def _toolchain(manifest: Mapping[str, Any]) -> Iterable[tuple[str, str, str]]:
    """Triton, and the assembler that ends the way: "ptxas 12.8", or the LLVM inside Triton, which has no version."""
    yield "pypi", "triton", manifest["toolchain"]["triton"]
    name, _, version = manifest["toolchain"]["compiler"].rpartition(" ")
    if name == "ptxas":
        yield "generic", name, version


def _required(metadata: Message) -> list[str]:
    """The distributions that a wheel requires, but for those of extras."""
    lines = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    return sorted(re.split(r"[^\w.-]", line)[0] for line in lines)


def _metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return BytesParser().parsebytes(archive.read(name))


def _manifests(wheel: Path) -> list[dict[str, Any]]:
    """The manifests of a wheel's packs: one of a device wheel, maybe several of one from source, none of the host's."""
    with ZipFile(wheel) as archive:
        names = [
            n for n in archive.namelist() if n.startswith(f"{NAMESPACE}/") and n.endswith("/manifest.json")
        ]
        return [json.loads(archive.read(name)) for name in sorted(names)]


def _sha256(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m liger_aot_build.release FOLDER")
    try:
        print(*write_records(Path(sys.argv[1])), sep="\n")
    except BuildError as error:
        raise SystemExit(f"error: {error}") from None
