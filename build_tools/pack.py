"""Audited binaries -> ``liger_aot_packs/<arch>/``: the manifests and the binaries, the same bytes from the same source.

This module writes the format; ``liger_aot.manifest`` reads it. Nothing else passes between the two halves.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from build_tools.audit import Audited
from build_tools.compiler import BINARY
from build_tools.plan import ALIGNMENT, Plan
from build_tools.profile import Profile
from build_tools.stored import Stored, stored

FORMAT = 4


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
        text = write_op(fresh, plan, audited, suffix(arch.backend))
        ops[plan.op] = {"sha256": sha256(text).hexdigest(), "binaries": len(plan.variants)}
    manifest = {
        "format": FORMAT,
        "arch": arch.name,
        "backend": arch.backend,
        "serves": arch.serves,
        "binary": suffix(arch.backend),
        "binary_version": max(a.facts.format_version for a in audited.values()),
        "version": version,
        "toolchain": {"triton": profile.toolchain.triton, "compiler": compiler, **profile.toolchain.options},
        "tolerance": dict(profile.tolerance.roundoffs),
        "profile_sha256": profile.sha256,
        "ops": ops,
    }
    (fresh / "manifest.json").write_bytes(_json(manifest))
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)


def suffix(backend: str) -> str:
    """What the names of a pack's binaries end in."""
    return f"{BINARY[backend]}.z"


def write_op(folder: Path, plan: Plan, audited: Mapping[str, Audited], ending: str) -> bytes:
    """Write one op's manifest and binaries into a pack's folder; returns the manifest's text."""
    files = stored(plan, {v.name: audited[v.name].compiled.image for v in plan.variants})
    text = _json(_op_manifest(plan, audited, files))
    (folder / f"{plan.op}.json").write_bytes(text)
    (folder / plan.op).mkdir()
    for name, file in files.items():
        (folder / plan.op / f"{name}.{ending}").write_bytes(file.data)
    return text


def _op_manifest(plan: Plan, audited: Mapping[str, Audited], files: Mapping[str, Stored]) -> dict[str, Any]:
    """One op's part of a pack: its dispatch tables and what a launch of each binary needs."""
    kernels = {
        name: {
            "arguments": list(k.kernel.arguments),
            "signature": k.kernel.signature(),
            "axes": list(k.kernel.axes),
            "aligned": list(k.kernel.aligned),
            "alignment": ALIGNMENT,
            "tables": {key: [list(entry) for entry in entries] for key, entries in k.tables.items()},
        }
        for name, k in plan.kernels.items()
    }
    variants = {v.name: _variant(audited[v.name], files[v.name]) for v in plan.variants}
    return {"format": FORMAT, "op": plan.op, "kernels": kernels, "variants": variants}


def _variant(audited: Audited, file: Stored) -> dict[str, Any]:
    variant, compiled, facts = audited.variant, audited.compiled, audited.facts
    follows = {"follows": True} if variant.follows else {}  # few do: said of those alone
    return {
        **follows,
        "sha256": sha256(file.data).hexdigest(),
        "base": file.base,
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


def _json(value: Any) -> bytes:
    return (json.dumps(value, sort_keys=True, separators=(",", ":"), indent=None) + "\n").encode()
