"""Audited binaries -> ``liger_aot_packs/<arch>/``: the manifests and the binaries, the same bytes from the same source.

This module writes the format; ``liger_aot.manifest`` reads it. Nothing else passes between the two halves.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from build_tools.audit import Audited
from build_tools.compile import BINARY
from build_tools.plan import ALIGNMENT, Plan
from build_tools.profile import Profile

FORMAT = 3


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
        text = _json(op_manifest(plan, audited))
        (fresh / f"{plan.op}.json").write_bytes(text)
        ops[plan.op] = {"sha256": sha256(text).hexdigest(), "binaries": len(plan.variants)}
        (fresh / plan.op).mkdir()
        for variant in plan.variants:
            path = fresh / plan.op / f"{variant.name}.{suffix(arch.backend)}"
            path.write_bytes(stored(audited[variant.name].compiled.image))
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
    return f"{BINARY[backend]}.gz"


def stored(image: bytes) -> bytes:
    """A binary as a pack holds it: a third of its size, readable with ``gunzip``; no time in it, so the same bytes."""
    return gzip.compress(image, mtime=0)


def op_manifest(plan: Plan, audited: Mapping[str, Audited]) -> dict[str, Any]:
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
    variants = {v.name: _variant(audited[v.name]) for v in plan.variants}
    return {"format": FORMAT, "op": plan.op, "kernels": kernels, "variants": variants}


def _variant(audited: Audited) -> dict[str, Any]:
    variant, compiled, facts = audited.variant, audited.compiled, audited.facts
    return {
        "sha256": sha256(stored(compiled.image)).hexdigest(),
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
