"""A pack -> the device wheel that holds it, ``liger_aot_<arch>-<version>-py3-none-any.whl``.

It is data alone, so that this writes it: no setuptools, no compiler, the same bytes from the same pack. It requires
nothing: the host wheel's extras name it at their own version, and the loader refuses a pack of another one.
"""

from __future__ import annotations

import json
import os
import time
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from liger_aot_build.paths import ROOT

HOST = "liger-aot"
NAMESPACE = "liger_aot_packs"
# 1980-01-01, the earliest time a zip file knows: the same bytes whenever a wheel is built
EPOCH = "315532800"
_MODE = 0o100644 << 16

_METADATA = """\
Metadata-Version: 2.4
Name: {name}
Version: {version}
Summary: Binaries of liger-aot for {arch} ({serves})
License-Expression: Apache-2.0
License-File: LICENSE
Classifier: Development Status :: 3 - Alpha
Classifier: Environment :: GPU{vendor}
Classifier: Operating System :: POSIX :: Linux
Requires-Python: >=3.10
Description-Content-Type: text/markdown

# {name}

The binaries of liger-aot for {arch} ({serves}), without its Python code. Install both at one version, from a folder
that holds the wheels of both:

    pip install --no-index --find-links FOLDER "liger-aot[{arch}]=={version}"
"""
# pip removes a folder with what is in it only where the folder holds a file itself: this one, beside the pack's folder.
_NOTE = "The folder {arch} holds the binaries of liger-aot for {arch}. Its manifest.json lists them.\n"
_VENDORS = {"cuda": " :: NVIDIA CUDA", "hip": ""}
_WHEEL = (
    "Wheel-Version: 1.0\nGenerator: liger-aot liger_aot_build\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
)


def distribution(arch: str) -> str:
    """The name of an architecture's device wheel."""
    return f"{HOST}-{arch}"


def note(arch: str) -> tuple[str, str]:
    """Name and text of the file that lies beside a pack's folder where packs are installed."""
    return f"{arch}.txt", _NOTE.format(arch=arch)


def write_device_wheel(pack: Path, out: Path) -> Path:
    """Write the wheel of the pack in ``pack`` into ``out``, at the pack's version; its path."""
    manifest = json.loads((pack / "manifest.json").read_bytes())
    arch, version = manifest["arch"], manifest["version"]
    stem = f"{distribution(arch).replace('-', '_')}-{version}"
    files = pack_files(pack, arch)
    files[f"{stem}.dist-info/licenses/LICENSE"] = (ROOT / "LICENSE").read_bytes()
    files[f"{stem}.dist-info/METADATA"] = _metadata(manifest).encode()
    files[f"{stem}.dist-info/WHEEL"] = _WHEEL.encode()
    out.mkdir(parents=True, exist_ok=True)
    return write_wheel(out / f"{stem}-py3-none-any.whl", files, f"{stem}.dist-info/RECORD")


def pack_files(pack: Path, arch: str) -> dict[str, bytes]:
    """What of a pack a wheel holds, by its name there."""
    name, text = note(arch)
    files = {f"{NAMESPACE}/{name}": text.encode()}
    for path in sorted(pack.rglob("*")):
        if path.is_file():
            files[f"{NAMESPACE}/{arch}/{path.relative_to(pack).as_posix()}"] = path.read_bytes()
    return files


def write_wheel(path: Path, files: Mapping[str, bytes], record: str) -> Path:
    """Write a wheel of ``files`` and their ``record``, in this order, with one time and one mode for all."""
    lines = [f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in files.items()]
    written = {**files, record: "".join((*lines, f"{record},,\n")).encode()}
    date = time.gmtime(max(int(os.environ.get("SOURCE_DATE_EPOCH", EPOCH)), int(EPOCH)))[:6]
    with ZipFile(path, "w", ZIP_DEFLATED) as archive:
        for name, data in written.items():
            entry = ZipInfo(name, date)
            entry.external_attr, entry.compress_type, entry.create_system = _MODE, ZIP_DEFLATED, 3
            archive.writestr(entry, data)
    return path


def _digest(data: bytes) -> str:
    return urlsafe_b64encode(sha256(data).digest()).rstrip(b"=").decode()


def _metadata(manifest: Mapping[str, Any]) -> str:
    arch, backend = manifest["arch"], manifest["backend"]
    kind = "compute capability " if backend == "cuda" else ""
    serves = f"for {kind}{', '.join(manifest['serves'])}"
    return _METADATA.format(
        name=distribution(arch),
        version=manifest["version"],
        arch=arch,
        serves=serves,
        vendor=_VENDORS[backend],
    )
