"""A build's binaries -> ``liger_aot_triton_packs/<name>/<arch>/``, and the wheel that holds it.

docs/triton-pack-format.md describes the format; it shares the rules, the limits and the compression of this project's
own packs (docs/pack-format.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from liger_aot._version import __version__
from liger_aot.triton.identity import RANGE
from liger_aot.triton.recording import Package
from liger_aot.triton.stand_ins import capability
from liger_aot.triton.targets import Target
from liger_aot_build.device_wheel import write_wheel
from liger_aot_build.errors import BuildError
from liger_aot_build.pack import as_json
from liger_aot_build.stored import Stored, stored_group
from liger_aot_build.triton_packs.audit import known_arch
from liger_aot_build.triton_packs.build import Result, by_function
from liger_aot_build.triton_packs.sources import Tree, flat
from liger_aot_build.triton_packs.worker import Built, Job

FORMAT = 1
KIND = "triton"
NAMESPACE = "liger_aot_triton_packs"
GROUP = "liger_aot.triton_packs"  # of entry points
LONGEST_STEM = 80
_FOLDERS = re.compile(r"(?<![\w.])(/[\w.+-]+)+/")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_VERSION = re.compile(r"[0-9]+(\.[0-9]+)*([a-z]+[0-9]+)?(\.post[0-9]+)?(\.dev[0-9]+)?(\+[a-z0-9.]+)?")


def check_name(name: str) -> str:
    """A pack's name: part of a wheel's, of a folder's and of an entry point's."""
    if not _NAME.fullmatch(name):
        raise BuildError(f"--name {name!r}: lower-case letters, digits and _, a letter first, at most 64")
    return name


def check_version(version: str) -> str:
    """A wheel's version."""
    if not _VERSION.fullmatch(version):
        raise BuildError(f"--version {version!r}: expected one such as 1.2.0")
    return version


def pack_files(result: Result, name: str, version: str) -> dict[str, bytes]:
    """The pack's files by their names in its folder."""
    files: dict[str, bytes] = {}
    functions: dict[str, Any] = {}
    for function, found in by_function(result).items():
        stem = _stem(function)
        text, blob = _function(function, found, result)
        files[f"{stem}.json"], files[f"{stem}.bin"] = text, blob
        functions[function] = {
            "file": stem,
            "sha256": sha256(text).hexdigest(),
            "variants": len({built.name for _, built in found}),
        }
    manifest = {
        "format": FORMAT,
        "kind": KIND,
        "name": name,
        "arch": result.target.profile,
        "backend": result.target.backend,
        "target": dict(zip(("backend", "arch", "warp_size"), result.target, strict=True)),
        "serves": serves(result.target),
        "binary_version": max((built.binary_version for _, built in result.built), default=0),
        "version": version,
        "liger_aot": __version__,
        "toolchain": {
            "triton": result.recorded.triton,
            "compiler": _compiler(result),
        },
        "recorded_on": [result.recorded.target.name],
        "packages": [package._asdict() for package in packages(result)],
        "functions": functions,
        "left_out": _left_out(result),
    }
    return {"manifest.json": as_json(manifest), **files}


def serves(of: Target) -> list[str]:
    """The devices that may run an architecture's binaries. From sm_90 on Triton makes code for one machine alone
    (sm_90a), also where this project's own kernels are built for a family of machines."""
    arch = known_arch(of.profile)
    if arch is not None and (of.backend == "hip" or capability(of) < (9, 0)):
        return list(arch.serves)
    if of.backend == "hip":
        return [str(of.arch)]
    major, minor = capability(of)
    return [f"{major}.{minor}"]


def _compiler(result: Result) -> str:
    """What made the machine code."""
    if isinstance(result.target.arch, str):
        return f"llvm of triton {result.recorded.triton}"
    from triton.backends.nvidia.compiler import get_ptxas

    return f"ptxas {get_ptxas(result.target.arch).version}"


def packages(result: Result) -> tuple[Package, ...]:
    """The distributions that the functions are of, the one with most variants first."""
    counted: dict[Package, int] = {}
    for job, _ in result.built:
        package = job.functions[0].package
        if package.name:
            counted[package] = counted.get(package, 0) + 1
    return tuple(sorted(counted, key=lambda package: (-counted[package], package)))


def _left_out(result: Result) -> list[dict[str, Any]]:
    """Functions and reasons, each pair once, without the build machine's paths."""
    counted: dict[tuple[str, str], int] = {}
    for one in result.left_out:
        pair = (one.function, _FOLDERS.sub("", one.why))
        counted[pair] = counted.get(pair, 0) + 1
    return [{"function": f, "why": why, "variants": n} for (f, why), n in sorted(counted.items())]


def _stem(function: str) -> str:
    """A file's name for a function: readable, and its own."""
    readable = re.sub(r"[^A-Za-z0-9_]+", "_", function.rpartition(":")[2]).strip("_")[:LONGEST_STEM]
    return f"{readable or 'f'}-{sha256(function.encode()).hexdigest()[:12]}"


def _function(name: str, found: Sequence[tuple[Job, Built]], result: Result) -> tuple[bytes, bytes]:
    """One function's JSON and its file of binaries."""
    places: dict[str, list[tuple[Job, Built]]] = {}
    for job, built in found:
        places.setdefault(built.name, []).append((job, built))
    images = {f"{v}/{i}": b.image for v, entries in places.items() for i, (_, b) in enumerate(entries)}
    stored = stored_group(list(images), images)
    common = _common([built.metadata for _, built in found])
    offsets, blob = _blob(stored)
    variants = {
        v: [{**_entry(job, built, common), **offsets[f"{v}/{i}"]} for i, (job, built) in enumerate(entries)]
        for v, entries in places.items()
    }
    keys = sorted({built.cache_key for _, built in found})
    table, source_of = flat([_source(key, found) for key in keys])
    document = {
        "format": FORMAT,
        "function": name,
        "cache_keys": keys,
        "sources": table,
        "source_of": source_of,
        "arg_names": list(found[0][1].arg_names),
        "gluon": found[0][0].noted.variant.gluon,
        "metadata": common,
        "variants": variants,
        "tuners": _tuners(name, result),
    }
    return as_json(document), blob


def _source(key: str, found: Sequence[tuple[Job, Built]]) -> Tree | None:
    """What the function with this key is told by; None unless all of its binaries were made of the same."""
    first, *others = [built.source for _, built in found if built.cache_key == key]
    return first if all(other == first for other in others) else None


def _blob(stored: Mapping[str, Stored]) -> tuple[dict[str, dict[str, Any]], bytes]:
    offsets, offset = {}, 0
    for name, one in stored.items():
        digest = sha256(one.data).hexdigest()
        offsets[name] = {"offset": offset, "length": len(one.data), "sha256": digest, "base": one.base}
        offset += len(one.data)
    return offsets, b"".join(one.data for one in stored.values())


def _common(metadata: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all say alike."""
    first = metadata[0]
    return {key: value for key, value in first.items() if all(key in m and m[key] == value for m in metadata)}


def _entry(job: Job, built: Built, common: Mapping[str, Any]) -> dict[str, Any]:
    recorded, said = job.noted.variant, built.metadata
    attrs = {tuple(path): list(found) for path, found in recorded.attrs}
    for path in built.ranged:
        attrs[path] = [*attrs.get(path, []), [RANGE, 32]]
    return {
        "cache_key": built.cache_key,
        "symbol": built.symbol,
        "num_warps": said["num_warps"],
        "num_ctas": said.get("num_ctas", 1),
        "threads": said["num_warps"] * said["warp_size"],
        "shared": said["shared"],
        "cooperative": bool(said.get("launch_cooperative_grid", False)),
        "pdl": bool(said.get("launch_pdl", False)),
        "scratch": {
            kind: [said.get(f"{kind}_scratch_size") or 0, said.get(f"{kind}_scratch_align") or 1]
            for kind in ("global", "profile")
        },
        "maps": said.get("tensordesc_meta") or None,
        "parameters": list(built.parameters),
        "signature": recorded.signature,
        "constants": built.constants,
        "attrs": [[list(path), found] for path, found in sorted(attrs.items())],
        "given": dict(recorded.given),
        "ranged": [list(path) for path in built.ranged],
        "registers": built.registers,
        "local_bytes": built.local_bytes,
        "metadata": {key: value for key, value in said.items() if key not in common},
    }


def _tuners(function: str, result: Result) -> list[dict[str, Any]]:
    """What was chosen, by the names that the tuner's key is made of."""
    tuners: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    on = result.recorded.target.name
    for choice in result.choices:
        if f"{choice.module}:{choice.qualname}" == function:
            winner = {"key": list(choice.key), "config": dict(choice.config), "text": choice.text}
            tuners.setdefault(choice.keys, []).append({**winner, "on": on, "timed": choice.timed})
    return [{"keys": list(keys), "winners": winners} for keys, winners in sorted(tuners.items())]


# -- the wheel --------------------------------------------------------------------------------------------------------
_METADATA = """\
Metadata-Version: 2.4
Name: {dist}
Version: {version}
Summary: Triton kernels of {of}, compiled for {arch} ({serves})
{licences}Requires-Python: >=3.10
Requires-Dist: liger-aot
Description-Content-Type: text/markdown

# {dist}

Triton kernels of {of}, compiled for {arch} ({serves}) with Triton {triton}: {functions} functions, {binaries} binaries.
liger-aot runs them where the same Triton and the same source are installed: `LIGER_AOT_TRITON=warn`, or
`liger_aot.triton.use("{name}")`.
"""
_WHEEL = "Wheel-Version: 1.0\nGenerator: liger-aot pack\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_NOTE = (
    "The folder {arch} holds Triton kernels of the pack {name} for {arch}. Its manifest.json lists them.\n"
)


def write_pack_wheel(result: Result, name: str, version: str, out: Path) -> Path:
    """Write the wheel of a build's pack into ``out``; its path."""
    arch, files = result.target.profile, pack_files(result, name, version)
    stem = f"{name}_{arch}-{version}"
    folder = f"{NAMESPACE}/{name}"
    wheel = {f"{folder}/{arch}.txt": _NOTE.format(arch=arch, name=name).encode()}
    wheel |= {f"{folder}/{arch}/{path}": data for path, data in files.items()}
    licences = licence_files(packages(result))
    wheel |= {f"{stem}.dist-info/licenses/{path}": data for path, data in licences.items()}
    of = ", ".join(f"{package.name} {package.version}" for package in packages(result)) or name
    lines = "".join(f"License-File: {path}\n" for path in licences)
    wheel[f"{stem}.dist-info/METADATA"] = _METADATA.format(
        dist=f"{name.replace('_', '-')}-{arch}",
        version=version,
        of=of,
        arch=arch,
        serves=", ".join(serves(result.target)),
        licences=lines,
        triton=result.recorded.triton,
        functions=len(by_function(result)),
        binaries=len(result.built),
        name=name,
    ).encode()
    entry = f"[{GROUP}]\n{name}.{arch} = {NAMESPACE}.{name}.{arch}\n"
    wheel[f"{stem}.dist-info/entry_points.txt"] = entry.encode()
    wheel[f"{stem}.dist-info/WHEEL"] = _WHEEL.encode()
    out.mkdir(parents=True, exist_ok=True)
    return write_wheel(out / f"{stem}-py3-none-any.whl", wheel, f"{stem}.dist-info/RECORD")


def licence_files(of: Sequence[Package]) -> dict[str, bytes]:
    """The licences of the packages whose kernels these are, as they are installed here."""
    found: dict[str, bytes] = {}
    for package in of:
        try:
            files = metadata.distribution(package.name).files or []
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            path = PurePosixPath(file)
            if path.parts[0].endswith(".dist-info") and _is_licence(path):
                data = Path(str(file.locate())).read_bytes()
                found[f"{package.name}/{path.name}"] = data
    return found


def _is_licence(path: PurePosixPath) -> bool:
    return "licenses" in path.parts or path.name.upper().startswith(
        ("LICENSE", "LICENCE", "COPYING", "NOTICE")
    )
