"""Audited binaries -> ``liger_aot_packs/<arch>/``: manifests and binaries, the same bytes from the same source.

This module writes the format that docs/pack-format.md describes; ``liger_aot.runtime.manifest`` reads it.
Nothing else passes between the two halves.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from liger_aot_build.audit import Audited
from liger_aot_build.declaration import Kernel
from liger_aot_build.plan import ALIGNMENT, Plan
from liger_aot_build.profile import DERIVED, Profile
from liger_aot_build.stored import Stored, stored

FORMAT = 7


def write_pack(
    folder: Path,
    profile: Profile,
    plans: Sequence[Plan],
    audited: Mapping[str, Audited],
    version: str,
    compiler: str,
) -> None:
    """Replace ``folder`` with the pack of one architecture; a failure leaves what was there."""
    arch = profile.arch
    fresh = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    ops: dict[str, Any] = {}
    for plan in plans:
        text = write_op(fresh, plan, audited)
        ops[plan.op] = {"sha256": sha256(text).hexdigest(), "binaries": len(plan.variants)}
    manifest = {
        "format": FORMAT,
        "arch": arch.name,
        "backend": arch.backend,
        "serves": arch.serves,
        "measured": sum(
            not profile.tables[kernel].provenance.startswith(DERIVED)
            for plan in plans
            for kernel in plan.kernels
            if kernel in profile.tables
        ),
        "fp8": arch.fp8,
        "binary_version": max(a.facts.format_version for a in audited.values()),
        "version": version,
        "toolchain": {"triton": profile.toolchain.triton, "compiler": compiler, **profile.toolchain.options},
        "tolerance": dict(profile.tolerance.roundoffs),
        "profile_sha256": profile.sha256,
        "ops": ops,
    }
    (fresh / "manifest.json").write_bytes(as_json(manifest))
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)


def write_op(folder: Path, plan: Plan, audited: Mapping[str, Audited]) -> bytes:
    """Write one op's manifest and its file of binaries into a pack's folder; returns the manifest's text."""
    binaries = stored(plan, {v.name: audited[v.name].compiled.image for v in plan.variants})
    text = as_json(_op_manifest(plan, audited, binaries))
    (folder / f"{plan.op}.json").write_bytes(text)
    (folder / f"{plan.op}.bin").write_bytes(b"".join(binary.data for binary in binaries.values()))
    return text


def _op_manifest(
    plan: Plan, audited: Mapping[str, Audited], binaries: Mapping[str, Stored]
) -> dict[str, Any]:
    """One op's part of a pack: its dispatch tables and what a launch of each binary needs."""
    kernels = {
        name: {
            "arguments": list(k.kernel.arguments),
            "signature": k.kernel.signature(),
            "axes": list(k.kernel.axes),
            "aligned": list(k.kernel.aligned),
            "alignment": ALIGNMENT,
            "tables": {key: list(map(list, e)) for key, e in k.tables.items() if key not in k.absent},
            **(
                {
                    "limited": {
                        key: {"table": list(map(list, k.tables.get(key, ()))), "why": why}
                        for key, why in k.absent.items()
                    }
                }
                if k.absent
                else {}
            ),
            **(
                {"few": {key: [list(entry) for entry in entries] for key, entries in k.few.items()}}
                if k.few
                else {}
            ),
        }
        for name, k in plan.kernels.items()
    }
    blobs = _blobs(binaries)
    variants = {
        v.name: {**_variant(audited[v.name], plan.kernels[v.kernel].kernel), **blobs[v.name]}
        for v in plan.variants
    }
    return {"format": FORMAT, "op": plan.op, "kernels": kernels, "variants": variants}


def _blobs(binaries: Mapping[str, Stored]) -> dict[str, dict[str, Any]]:
    """Where each binary lies in its op's file, in which they follow one another, and what is needed to read it."""
    blobs, offset = {}, 0
    for name, binary in binaries.items():
        length = len(binary.data)
        digest = sha256(binary.data).hexdigest()
        blobs[name] = {"offset": offset, "length": length, "sha256": digest, "base": binary.base}
        offset += length
    return blobs


def _variant(audited: Audited, kernel: Kernel) -> dict[str, Any]:
    variant, compiled, facts = audited.variant, audited.compiled, audited.facts
    pdl = {"pdl": True} if variant.pdl else {}  # few do: said of those alone
    absent = [name for name in kernel.arguments if name not in variant.arguments]
    lacks = {"lacks": absent} if absent else {}
    return {
        **pdl,
        **lacks,
        "symbol": compiled.symbol,
        "threads": audited.threads,
        "shared": compiled.shared,
        "cooperative": variant.cooperative,
        "contiguous": variant.form.contiguous,
        "form": variant.form.name,
        "num_warps": compiled.num_warps,
        "numbers": {**{k.lower(): int(v) for k, v in variant.constants.items()}, **variant.host},
        "registers": facts.registers,
        "local_bytes": facts.local_bytes,
        "resident": audited.resident,
        "maps": _maps(audited),
        "row": variant.where,
    }


def _maps(audited: Audited) -> dict[str, Any]:
    """What a tensor map must be encoded with, by argument."""
    named = [n for n, kind in audited.variant.arguments.items() if kind.startswith("tensordesc<")]
    return dict(zip(named, audited.compiled.maps, strict=True))


def as_json(value: Any) -> bytes:
    """A file of a pack: the same bytes from the same value."""
    return (json.dumps(value, sort_keys=True, separators=(",", ":"), indent=None) + "\n").encode()
